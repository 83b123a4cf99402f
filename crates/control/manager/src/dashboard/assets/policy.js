// Who may hold how much of the pool: the policy in force, and the choice of another one, which is confirmed.

import { ask } from "./confirm.js";
import { byId, h, show } from "./dom.js";

/** As `hecaton policy set` takes them without settings. */
const CHOICES = [
  ["none", "everybody may hold what it gets"],
  ["greedy-local", "nodes use what they lend themselves; who comes first has it", '{"policy":"greedy-local"}'],
  ["greedy-remote", "who comes first has it, and a node without room asks for other nodes’ share", '{"policy":"greedy-remote","request_pages":1000}'],
  ["tlp", "the two-level policy of the vMCA paper", '{"policy":"tlp","percent":2,"threshold_pages":1024,"reserve_pages":16384}'],
  ["anticipating", "targets that run ahead of demand, shared evenly among those in want", '{"policy":"anticipating"}'],
];

let latest = "none";

/** Draws the line. */
export function policy(overview) {
  latest = overview.policy ?? "none";
  const text = overview.policy ? [h("code", {}, overview.policy)] : ["none: everybody may hold what it gets"];
  show(byId("policy"), "Policy: ", ...text, " ", h("button", { type: "button", "data-act": "policy" }, "Change…"));
}

byId("policy").addEventListener("click", (event) => {
  if (!event.target.closest("[data-act=policy]")) return;
  const [name] = latest.split(" ");
  const question = {
    title: "Divide the pool by another policy?",
    text: "It holds from now on, while programs run: no page is lost, and nobody is ended. It is set as usual; hecaton policy set takes other settings.",
    yes: "Set",
    choices: CHOICES.map(([key, text]) => ({ key, text, chosen: key === name })),
  };
  ask(question, async (key) => {
    const choice = CHOICES.find(([one]) => one === key);
    if (!choice) throw new Error("Choose one.");
    const [, , body] = choice;
    const headers = { "content-type": "application/json" };
    const answer = await fetch("/v1/policy", body ? { method: "PUT", headers, body } : { method: "DELETE", headers });
    if (!answer.ok) throw new Error(await answer.text());
  });
});
