// Hosts as bars, all to one scale: the frame is the memory that a host has, what stands out of it is
// what its programs have borrowed.

import { h } from "./dom.js";
import { ago, bytes } from "./format.js";

const PARTS = [
  ["system", "system and programs"],
  ["local", "local part of consumers"],
  ["lent", "lent, in use"],
  ["lendable", "free to lend"],
  ["free", "free, kept"],
];

/** The entries of the key to the bars. */
export const hostKey = () =>
  [...PARTS, ["borrowed", "borrowed from the pool"]].map(([part, name]) => h("li", {}, h("i", { class: `swatch ${part}` }), name));

/** The entries of the list of hosts. */
export function hosts({ hosts }) {
  const scale = Math.max(1, ...hosts.map((host) => host.memory_bytes + (host.borrowed_bytes ?? 0)));
  if (hosts.length === 0) return [h("li", { class: "empty" }, "No node has joined yet: hecaton node --manager URL --name NAME --lend SIZE")];
  return hosts.map((host) => row(host, scale));
}

function row(host, scale) {
  const percent = (part, whole) => `${((100 * part) / whole).toFixed(3)}%`;
  const values = PARTS.map(([part, name]) => [part, name, host[`${part}_bytes`]]);
  const known = values.reduce((sum, [, , value]) => sum + (value ?? 0), 0);
  const bar = values
    .filter(([, , value]) => value > 0)
    .map(([part, name, value]) => h("i", { class: `part ${part}`, title: `${name}: ${bytes(value)}`, css: { width: percent(value, host.memory_bytes) } }));
  if (known < host.memory_bytes) {
    const css = { width: percent(host.memory_bytes - known, host.memory_bytes) };
    bar.push(h("i", { class: "part unknown", title: `not known yet: ${bytes(host.memory_bytes - known)}`, css }));
  }
  const all = [...values, ["borrowed", "borrowed", host.borrowed_bytes]];
  const spoken = all.map(([, name, value]) => `${name} ${value === undefined ? "not known" : bytes(value)}`).join(", ");
  return h(
    "li",
    { class: host.is_up ? "host" : "host is-silent", "data-key": host.name },
    h(
      "div",
      { class: "host-head" },
      h("h3", {}, host.name),
      host.location && h("span", { class: "muted" }, host.location),
      !host.is_up && h("span", { class: "badge critical" }, `silent for ${ago(host.silent_ms)}; as it was then`),
      host.membership && h("span", { class: "badge notice" }, host.membership),
      host.quota_bytes !== undefined && h("span", { class: "muted" }, `uses ${bytes(host.quota_used_bytes)} of the pool, may use ${bytes(host.quota_bytes)}`),
      h("span", { class: "host-memory" }, bytes(host.memory_bytes)),
    ),
    h(
      "div",
      { class: "bar", role: "img", "aria-label": `${host.name}: ${bytes(host.memory_bytes)} of memory; ${spoken}` },
      h("div", { class: "ram", css: { width: percent(host.memory_bytes, scale) } }, bar),
      host.borrowed_bytes > 0 &&
        h("i", { class: "part borrowed", title: `borrowed: ${bytes(host.borrowed_bytes)}`, css: { width: percent(host.borrowed_bytes, scale) } }),
    ),
    h(
      "ul",
      { class: "values", "aria-hidden": "true" },
      all.map(([part, , value]) => h("li", { class: value === 0 ? "is-zero" : false }, h("i", { class: `swatch ${part}` }), bytes(value))),
    ),
  );
}
