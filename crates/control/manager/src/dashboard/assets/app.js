// Puts each second's overview on the page.

import { alarms, happenings } from "./alarms.js";
import { chart } from "./chart.js";
import { consumers } from "./consumers.js";
import { byId, show } from "./dom.js";
import { donors } from "./donors.js";
import { flows } from "./flows.js";
import { ago, bytes, rate } from "./format.js";
import { hostKey, hosts } from "./hosts.js";
import { listen } from "./live.js";
import { policy } from "./policy.js";
import { summary } from "./summary.js";

/** So many consumers have an area of their own in the chart; the others share one. */
const AREAS = 6;

show(byId("host-key"), hostKey());

listen(
  (overview, history) => {
    alarms(overview);
    show(byId("summary"), summary(overview));
    show(byId("hosts"), hosts(overview));
    flows(overview);
    if (history) charts(overview, history);
    policy(overview);
    consumers(overview, history);
    donors(overview);
    happenings(overview);
    byId("about").textContent = `Hecaton ${overview.version}, manager up for ${ago(overview.uptime_ms)}`;
    document.body.classList.remove("is-stale");
  },
  (state, text) => {
    byId("link").className = state;
    byId("link-text").textContent = text;
    document.body.classList.toggle("is-stale", state !== "live");
  },
);

/** A consumer keeps its tone for as long as the page is open. */
const tones = new Map();

function charts(overview, history) {
  const all = Object.entries(history.pool_bytes);
  const most = ([, values]) => Math.max(0, ...values.map((value) => value ?? 0));
  all.sort((a, b) => most(b) - most(a) || a[0].localeCompare(b[0]));
  const shown = all.length > AREAS + 1 ? all.slice(0, AREAS) : all.slice(0, AREAS + 1);
  const names = new Map(overview.consumers.map((one) => [one.id, one.name]));
  const bare = (id) => names.get(id) ?? id.slice(id.indexOf("/") + 1).replace(/^volume:/, "");
  const unique = (id) => (shown.filter(([other]) => bare(other) === bare(id)).length > 1 ? id : bare(id));
  for (const id of tones.keys()) if (!shown.some(([one]) => one === id)) tones.delete(id);
  for (const [id] of shown) {
    if (tones.has(id)) continue;
    const taken = new Set(tones.values());
    let tone = 0;
    while (taken.has(tone)) tone += 1;
    tones.set(id, tone);
  }
  const series = shown.map(([id, values]) => ({ name: unique(id), values, tone: tones.get(id) }));
  const rest = all.slice(shown.length);
  if (rest.length) {
    const longest = Math.max(...rest.map(([, values]) => values.length));
    const sum = (back) => {
      const known = rest.map(([, values]) => values[values.length - 1 - back] ?? null).filter((value) => value !== null);
      return known.length ? known.reduce((a, b) => a + b, 0) : null;
    };
    const values = Array.from({ length: longest }, (_, at) => sum(longest - 1 - at));
    series.push({ name: `${rest.length} others`, values, tone: "rest" });
  }
  const common = { ticks: history.ticks, tickMs: history.tick_ms };
  chart("pool-chart", { ...common, series, text: bytes, stacked: true, binary: true, height: 200, empty: "Nothing was in the pool in the last ten minutes." });
  const faults = [{ name: "all consumers", values: history.faults_per_s, tone: 0 }];
  chart("faults-chart", { ...common, series: faults, text: rate, stacked: false, binary: false, height: 96, empty: "Not known yet." });
}
