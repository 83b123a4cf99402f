// Donors, and what an administrator can have them do. Each of it is confirmed.

import { ask } from "./confirm.js";
import { byId, h, show } from "./dom.js";
import { UNKNOWN, bytes, parseSize } from "./format.js";

let latest = [];

/** Draws the table. */
export function donors(overview) {
  latest = overview.donors;
  const target = byId("donors");
  if (latest.length === 0) {
    show(target, h("p", { class: "empty" }, "Nobody lends."));
    return;
  }
  const head = [["Donor"], ["Node", "wide"], ["State"], ["Lent", "number"], ["Can lend", "number wide"], ["Restarts", "number wide"], ["Actions"]];
  show(
    target,
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map(([name, class_]) => h("th", { scope: "col", class: class_ }, name === "Actions" ? h("span", { class: "unseen" }, name) : name)))),
      h("tbody", {}, latest.map(row)),
    ),
    overview.left_out > 0 && h("p", { class: "hint" }, `${overview.left_out} further donors, consumers or flows are not listed.`),
  );
}

function row(donor) {
  const action = (act, name, title) => h("button", { type: "button", "data-act": act, "data-donor": donor.name, title }, name);
  const limit = donor.told_limit_bytes;
  const silent = donor.state === "silent";
  const badge = { serving: "good", silent: "critical", starting: "critical" }[donor.state] ?? "notice";
  const part = donor.lent_bytes === undefined || !donor.lend_bytes ? null : (100 * donor.lent_bytes) / donor.lend_bytes;
  return h(
    "tr",
    { "data-key": donor.name, class: silent ? "is-silent" : false },
    h("th", { scope: "row" }, donor.name),
    h("td", { class: "wide" }, donor.node),
    h("td", {}, h("span", { class: `badge ${badge}` }, donor.state), limit !== undefined && h("small", { class: "limit" }, `at most ${bytes(limit)}`)),
    h(
      "td",
      { class: "number" },
      bytes(donor.lent_bytes),
      h("small", {}, ` of ${bytes(donor.lend_bytes)}`),
      donor.parked_bytes > 0 && h("small", { class: "limit" }, `${bytes(donor.parked_bytes)} of it on its disk`),
      h("span", { class: "meter", "aria-hidden": "true" }, part !== null && h("i", { css: { width: `${Math.min(100, part).toFixed(2)}%` } })),
    ),
    h("td", { class: "number wide" }, bytes(donor.lendable_bytes)),
    h("td", { class: "number wide" }, donor.restarts),
    h(
      "td",
      { class: "actions" },
      donor.draining ? action("undrain", "Stop draining", "It lends again") : action("drain", "Drain…", "Empties it, so that its host can be taken away"),
      limit === undefined ? action("recall", "Recall…", "Takes a part of its memory back") : action("lift", "Lift the limit", "It lends all of its memory again"),
    ),
  );
}

const ACTIONS = {
  drain: (donor) => ({
    title: `Drain ${donor.name}?`,
    text: `It lends nothing more, and its borrowers move the ${held(donor)} that they have there to other donors. They go on running. Draining can be stopped at any time; what has moved stays where it is.`,
    yes: "Drain",
    request: () => ["POST", "drain"],
  }),
  undrain: (donor) => ({
    title: `Have ${donor.name} lend again?`,
    text: "What has moved to other donors stays there.",
    yes: "Lend again",
    request: () => ["DELETE", "drain"],
  }),
  recall: (donor) => ({
    title: `Take memory of ${donor.name} back?`,
    text: `It may lend ${bytes(donor.lend_bytes)}, and has lent ${held(donor)}. What it has lent above the new limit, its borrowers move to other donors while they run; a page's only copy stays until another donor has room.`,
    yes: "Take back",
    size: true,
    request: (text) => {
      const size = parseSize(text);
      if (Number.isNaN(size)) throw new Error(`“${text}” is no size: write it as 512M or 8G.`);
      if (size >= donor.lend_bytes) throw new Error(`It lends ${bytes(donor.lend_bytes)} at most as it is: less than that takes something back.`);
      return ["PUT", `limit?bytes=${size}`];
    },
  }),
  lift: (donor) => ({
    title: `Lift the limit of ${donor.name}?`,
    text: `It lends up to ${bytes(donor.lend_bytes)} again.`,
    yes: "Lift",
    request: () => ["DELETE", "limit"],
  }),
};

const held = (donor) => (donor.lent_bytes === undefined ? `memory (${UNKNOWN})` : bytes(donor.lent_bytes));

byId("donors").addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  const donor = button && latest.find((one) => one.name === button.dataset.donor);
  if (!donor) return;
  const { request, ...question } = ACTIONS[button.dataset.act](donor);
  ask(question, async (input) => {
    const [method, path] = request(input);
    const headers = { "content-type": "application/json" };
    const answer = await fetch(`/v1/donors/${encodeURIComponent(donor.name)}/${path}`, { method, headers });
    if (!answer.ok) throw new Error(await answer.text());
  });
});
