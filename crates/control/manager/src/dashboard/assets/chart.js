// The last ten minutes: areas that are stacked, or a line. Where nothing is known there is a gap.

import { byId, h, s, show } from "./dom.js";
import { UNKNOWN, ago } from "./format.js";

const MARGIN = { top: 8, right: 8, bottom: 20, left: 60 };

/** Where a reader points, in ticks before now, by chart. */
const pointed = new Map();
/** What is drawn again when a reader points elsewhere. */
const again = new Map();

/** The least of 1, 2, 5 times a power of `base` that is not below `value`, in four steps. */
function ceiling(value, binary) {
  const base = binary ? 1024 ** Math.max(0, Math.floor(Math.log(value) / Math.log(1024))) : 10 ** Math.floor(Math.log10(value));
  const steps = binary ? [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024] : [1, 2, 4, 6, 8, 10];
  return (steps.find((step) => step * base >= value) ?? 1024) * base;
}

/**
 * Draws into the element `id`. `series` are `{ name, values, tone }`, whose values all end now; `text`
 * writes a value; `stacked` piles them up.
 */
export function chart(id, { series, ticks, tickMs, text, stacked, binary, height, empty }) {
  again.set(id, () => chart(id, { series, ticks, tickMs, text, stacked, binary, height, empty }));
  const target = byId(id);
  const width = target.clientWidth;
  if (!watched.has(target)) watch(target, id, ticks);
  if (series.every((one) => one.values.every((value) => value === null))) {
    show(target, h("p", { class: "empty" }, empty));
    return;
  }
  const at = (one, tick) => one.values[one.values.length - 1 - tick] ?? null;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const x = (tick) => MARGIN.left + inner.width * (1 - tick / (ticks - 1));
  let most = 0;
  for (let tick = 0; tick < ticks; tick += 1) {
    const values = series.map((one) => at(one, tick) ?? 0);
    most = Math.max(most, stacked ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values));
  }
  const top = ceiling(Math.max(most, binary ? 4096 : 1), binary);
  const y = (value) => MARGIN.top + inner.height * (1 - value / top);
  const floor = new Array(ticks).fill(0);
  const shapes = series.map((one) => {
    const runs = [];
    let run = null;
    for (let tick = ticks - 1; tick >= 0; tick -= 1) {
      const value = at(one, tick);
      if (value === null) {
        run = null;
        continue;
      }
      if (!run) runs.push((run = []));
      const low = stacked ? floor[tick] : 0;
      run.push([x(tick), y(low + value), y(low)]);
      if (stacked) floor[tick] += value;
    }
    return runs.map((points) => {
      const above = points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
      if (!stacked) return s("path", { d: `M${above}`, class: `line tone-${one.tone}` });
      const below = points.reverse().map(([px, , py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
      return s("path", { d: `M${above}L${below}Z`, class: `area tone-${one.tone}` });
    });
  });
  const grid = (height > 120 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1]).map((part) => [
    s("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(top * part), y2: y(top * part), class: "grid" }),
    s("text", { x: MARGIN.left - 8, y: y(top * part) + 4, "text-anchor": "end" }, text(top * part)),
  ]);
  const minutes = Math.round((ticks * tickMs) / 60_000);
  const marks = [0, 0.5, 1].map((part) => {
    const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
    const label = part === 1 ? "now" : `${Math.round(minutes * (1 - part))} min ago`;
    return s("text", { x: MARGIN.left + inner.width * part, y: height - 4, "text-anchor": anchor }, label);
  });
  const tick = pointed.get(id) ?? null;
  const cross = tick !== null && s("line", { x1: x(tick), x2: x(tick), y1: MARGIN.top, y2: height - MARGIN.bottom, class: "cross" });
  const read = (one) => {
    const value = at(one, tick ?? 0);
    return value === null ? UNKNOWN : text(value);
  };
  const when = tick ? `${ago(tick * tickMs)} ago` : "now";
  const legend = series.map((one) => h("li", { "data-key": one.name }, h("i", { class: `swatch tone-${one.tone}` }), h("span", { class: "name" }, one.name), h("b", {}, read(one))));
  const spoken = `${when}: ${series.map((one) => `${one.name} ${read(one)}`).join(", ")}`;
  show(
    target,
    s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0, "aria-label": `${spoken}. Left and right go through the last ${minutes} minutes.` }, grid, shapes, marks, cross),
    h("ul", { class: "legend" }, h("li", { class: "muted when", "data-key": " when" }, when), stacked && legend.reverse(), !stacked && legend),
  );
}

const watched = new Set();

function watch(target, id, ticks) {
  watched.add(target);
  const point = (tick) => {
    if (tick === null) pointed.delete(id);
    else pointed.set(id, Math.max(0, Math.min(ticks - 1, tick)));
    again.get(id)();
  };
  target.addEventListener("pointermove", (event) => {
    const svg = event.target.closest("svg");
    if (!svg) return;
    const box = svg.getBoundingClientRect();
    const part = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    point(Math.round((1 - part) * (ticks - 1)));
  });
  target.addEventListener("pointerleave", () => point(null));
  target.addEventListener("focusout", () => point(null));
  target.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 5, ArrowRight: -5 }[event.key];
    if (!step) return;
    event.preventDefault();
    point((pointed.get(id) ?? 0) + step);
  });
  new ResizeObserver(() => again.get(id)()).observe(target);
}

/** A line without axes, for tables. */
export function spark(values, ticks) {
  const [width, height] = [110, 22];
  const most = Math.max(1, ...values.map((value) => value ?? 0));
  const x = (at) => width - ((values.length - 1 - at) * width) / (ticks - 1);
  let d = "";
  let pen = "M";
  values.forEach((value, at) => {
    if (value === null) pen = "M";
    else {
      d += `${pen}${x(at).toFixed(1)},${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`;
      pen = "L";
    }
  });
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "spark", "aria-hidden": "true" }, s("path", { d, class: "line" }));
}
