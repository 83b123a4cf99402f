// What needs an eye, and what happened of late. Only a new alarm is spoken.

import { byId, h, show } from "./dom.js";
import { ago } from "./format.js";

const SIGNS = { critical: "▲", warning: "◆", notice: "●" };
let spoken = null;

const sign = (severity) => h("span", { class: `sign ${severity}`, "aria-hidden": "true" }, SIGNS[severity]);

/** Draws the alarms. */
export function alarms({ alarms, uptime_ms }) {
  const items = alarms.map((alarm) =>
    h(
      "li",
      { class: alarm.severity },
      sign(alarm.severity),
      h("span", { class: "unseen" }, `${alarm.severity}: `),
      h("b", {}, alarm.subject),
      h("span", { class: "text" }, alarm.text),
      h("time", {}, `for ${ago(uptime_ms - alarm.since_ms)}`),
    ),
  );
  if (items.length === 0) items.push(h("li", { class: "good" }, h("span", { class: "sign good", "aria-hidden": "true" }, "✓"), h("span", { class: "text" }, "Nothing needs attention.")));
  show(byId("alarm-list"), items);
  const worst = alarms.filter((alarm) => alarm.severity !== "notice").length;
  document.title = worst ? `(${worst}) Hecaton` : "Hecaton";
  const key = (alarm) => `${alarm.subject} ${alarm.since_ms}`;
  const news = spoken ? alarms.filter((alarm) => !spoken.has(key(alarm))) : [];
  if (news.length) byId("announce").textContent = news.map((alarm) => `${alarm.severity}: ${alarm.subject} ${alarm.text}`).join("; ");
  spoken = new Set(alarms.map(key));
}

/** Draws what happened. */
export function happenings({ happenings, uptime_ms }) {
  const items = happenings.slice(0, 30).map((one) => h("li", {}, h("time", {}, `${ago(uptime_ms - one.at_ms)} ago`), sign(one.severity), h("span", { class: "unseen" }, `${one.severity}: `), h("span", {}, h("b", {}, one.subject), ` ${one.text}`)));
  if (items.length === 0) items.push(h("li", { class: "empty" }, "Nothing since this manager began to look."));
  show(byId("happenings"), items);
}
