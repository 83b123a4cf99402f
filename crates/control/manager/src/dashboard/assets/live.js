// The manager's events. A page that nobody looks at listens to nothing: browsers allow a host only a
// few connections, for all of its tabs.

import { ago } from "./format.js";

const SILENCE_MS = 4000;
const RETRY_MS = 5000;

/** Calls `onOverview(overview, history)` once a second, and `onLink(state, text)` as the link changes. */
export function listen(onOverview, onLink) {
  let source = null;
  let history = null;
  let heard = 0;
  let retry = 0;

  const close = () => {
    clearTimeout(retry);
    source?.close();
    source = null;
  };

  const open = () => {
    close();
    source = new EventSource("/v1/events");
    source.addEventListener("open", async () => {
      // What went by while the link was down is asked for.
      const answer = await fetch("/v1/history").catch(() => null);
      if (answer?.ok) history = await answer.json();
    });
    source.addEventListener("overview", (event) => {
      heard = performance.now();
      onLink("live", "live");
      const overview = JSON.parse(event.data);
      if (history) append(history, overview);
      onOverview(overview, history);
    });
    source.addEventListener("error", () => {
      // The manager ends a stream now and then; the browser comes back by itself, but not after a refusal.
      if (source?.readyState !== EventSource.CLOSED && heard) return;
      onLink("lost", "the manager does not answer; trying again");
      if (source?.readyState !== EventSource.CLOSED) return;
      close();
      retry = setTimeout(open, RETRY_MS);
    });
  };

  setInterval(() => {
    const silence = performance.now() - heard;
    if (heard && source && silence > SILENCE_MS) onLink("lost", `no news for ${ago(silence)}`);
  }, 1000);
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  if (!document.hidden) open();
}

/** Adds an overview to the history that ends just before it. */
function append(history, overview) {
  const missed = overview.tick - history.tick;
  if (missed <= 0) return;
  const put = (values, value) => {
    // Of ticks that went by unseen nothing is known.
    for (let tick = 1; tick < missed && tick < history.ticks; tick += 1) values.push(null);
    values.push(value ?? null);
    values.splice(0, values.length - history.ticks);
  };
  put(history.faults_per_s, overview.totals.faults_per_s);
  const now = new Map(overview.consumers.map((one) => [one.id, one.state === "silent" ? null : one.pool_bytes]));
  for (const [id, values] of Object.entries(history.pool_bytes)) {
    put(values, now.get(id));
    now.delete(id);
    if (values.every((value) => value === null)) delete history.pool_bytes[id];
  }
  for (const [id, value] of now) if (value !== undefined && value !== null) history.pool_bytes[id] = [value];
  history.tick = overview.tick;
}
