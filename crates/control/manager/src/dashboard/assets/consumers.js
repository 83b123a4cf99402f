// Programs, machines and volumes, in the order that the reader wants.

import { spark } from "./chart.js";
import { byId, h, show } from "./dom.js";
import { UNKNOWN, bytes, micros, rate } from "./format.js";

const KINDS = { program: "program", machine: "VM", volume: "volume" };

const COLUMNS = [
  { key: "name", name: "Consumer", compare: (a, b) => a.name.localeCompare(b.name) },
  { key: "node", name: "Node", compare: (a, b) => a.node.localeCompare(b.node), wide: true },
  { key: "state", name: "State", compare: (a, b) => a.state.localeCompare(b.state), wide: true },
  { key: "local_bytes", name: "Local", number: true, wide: true },
  { key: "pool_bytes", name: "In the pool", number: true },
  { key: "spark", name: "Last 10 min", wide: true },
  { key: "faults_per_s", name: "Faults/s", number: true },
  { key: "p50_us", name: "p50", number: true, wide: true },
  { key: "p99_us", name: "p99", number: true },
  { key: "copies", name: "Copies", number: true, wide: true },
];

let sorted = { key: "faults_per_s", down: true };
let latest = null;

function ordered(list) {
  const column = COLUMNS.find((one) => one.key === sorted.key);
  const compare = column.compare ?? ((a, b) => (a[column.key] ?? -1) - (b[column.key] ?? -1));
  return [...list].sort((a, b) => (sorted.down ? -1 : 1) * compare(a, b) || a.id.localeCompare(b.id));
}

/** Draws the table. */
export function consumers(overview, history) {
  latest = [overview, history];
  const target = byId("consumers");
  if (overview.consumers.length === 0) {
    show(target, h("p", { class: "empty" }, "Nothing borrows. hecaton run --local 256M -- COMMAND"));
    return;
  }
  const heads = COLUMNS.map((column) => {
    const is = sorted.key === column.key;
    const class_ = [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ");
    const inside = column.key === "spark" ? column.name : h("button", { type: "button", "data-sort": column.key }, column.name, is && h("span", { "aria-hidden": "true" }, sorted.down ? " ↓" : " ↑"));
    return h("th", { scope: "col", class: class_, "aria-sort": is ? (sorted.down ? "descending" : "ascending") : "none" }, inside);
  });
  const rows = ordered(overview.consumers).map((one) => row(one, history));
  show(
    target,
    h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows)),
    h("p", { class: "hint" }, "p50, p99: of all faults so far, from the fault to its page from the pool. Of volumes, requests a second. In the pool: of what the policy lets it have, where there is one."),
  );
}

/** What it may have, and how much of that it has. */
function target({ pool_bytes, target_bytes }) {
  if (target_bytes === undefined) return null;
  const part = pool_bytes === undefined ? null : target_bytes > 0 ? (100 * pool_bytes) / target_bytes : 100;
  return [
    h("small", {}, ` of ${bytes(target_bytes)}`),
    h("span", { class: part > 100 ? "meter is-over" : "meter", "aria-hidden": "true" }, part !== null && h("i", { css: { width: `${Math.min(100, part).toFixed(2)}%` } })),
  ];
}

function row(one, history) {
  const values = history?.pool_bytes[one.id];
  const local = one.kind === "volume" ? UNKNOWN : [bytes(one.local_bytes), h("small", {}, ` of ${bytes(one.local_limit_bytes)}`)];
  return h(
    "tr",
    { "data-key": one.id, class: one.state === "silent" ? "is-silent" : false },
    h("th", { scope: "row" }, one.name, h("span", { class: "badge" }, KINDS[one.kind])),
    h("td", { class: "wide" }, one.node),
    h("td", { class: "wide" }, one.state),
    h("td", { class: "number wide" }, local),
    h("td", { class: "number" }, bytes(one.pool_bytes), target(one)),
    h("td", { class: "wide" }, values ? spark(values, history.ticks) : UNKNOWN),
    h("td", { class: "number" }, rate(one.faults_per_s)),
    h("td", { class: "number wide" }, micros(one.p50_us)),
    h("td", { class: "number" }, micros(one.p99_us)),
    h("td", { class: "number wide" }, one.copies ?? UNKNOWN),
  );
}

byId("consumers").addEventListener("click", (event) => {
  const key = event.target.closest("[data-sort]")?.dataset.sort;
  if (!key) return;
  sorted = { key, down: sorted.key === key ? !sorted.down : !["name", "node", "state"].includes(key) };
  consumers(...latest);
});
