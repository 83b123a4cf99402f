// Who borrows from whom, as bands as wide as the memory is large. In a small cluster from donor to
// consumer, in a larger one from host to host.

import { byId, h, s, show } from "./dom.js";
import { bytes } from "./format.js";

/** With more ends than this on a side, hosts stand for them. */
const MOST_ENDS = 12;
const GAP = 10;
const BAR = 10;
const LABEL = 15;

function aggregate(flows, from, to) {
  const bands = new Map();
  for (const flow of flows) {
    const key = JSON.stringify([from(flow), to(flow)]);
    bands.set(key, (bands.get(key) ?? 0) + flow.bytes);
  }
  return [...bands].map(([key, bytes]) => ({ from: JSON.parse(key)[0], to: JSON.parse(key)[1], bytes }));
}

function ends(bands, side) {
  const sums = new Map();
  for (const band of bands) sums.set(band[side], (sums.get(band[side]) ?? 0) + band.bytes);
  return [...sums].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).map(([name, bytes]) => ({ name, bytes }));
}

/** Draws the flows. */
export function flows(overview) {
  const target = byId("flows");
  if (overview.flows.length === 0) {
    show(target, h("p", { class: "empty" }, "Nobody borrows."));
    return;
  }
  const unknown = "a borrower that no node knows";
  let bands = aggregate(overview.flows, (flow) => flow.donor, (flow) => flow.consumer);
  let what = ["Donor", "Consumer"];
  if (ends(bands, "from").length > MOST_ENDS || ends(bands, "to").length > MOST_ENDS) {
    bands = aggregate(overview.flows, (flow) => flow.from, (flow) => flow.to ?? unknown);
    what = ["Lending host", "Borrowing host"];
  }
  // What is left of many is one end.
  for (const side of ["from", "to"]) {
    const all = ends(bands, side);
    if (all.length <= MOST_ENDS) continue;
    const kept = new Set(all.slice(0, MOST_ENDS - 1).map((end) => end.name));
    const name = `${all.length - kept.size} others`;
    const other = (flow, key) => (key !== side || kept.has(flow[key]) ? flow[key] : name);
    bands = aggregate(bands, (flow) => other(flow, "from"), (flow) => other(flow, "to"));
  }
  show(target, h("div", { class: "sides", "aria-hidden": "true" }, h("span", {}, what[0]), h("span", {}, what[1])), draw(bands, target.clientWidth), table(bands, what));
}

function draw(bands, width) {
  const left = ends(bands, "from");
  const right = ends(bands, "to");
  const rows = Math.max(left.length, right.length);
  const height = Math.max(300, Math.min(420, rows * 78));
  const total = bands.reduce((sum, band) => sum + band.bytes, 0);
  // The least that an end needs is its label.
  const scale = (list) => (height - list.length * (GAP + LABEL)) / total;
  const unit = Math.max(0, Math.min(scale(left), scale(right)));
  const place = (list) => {
    const used = list.reduce((sum, end) => sum + Math.max(2, end.bytes * unit) + LABEL + GAP, -GAP);
    let y = Math.max(0, (height - used) / 2);
    for (const end of list) {
      end.y = y + LABEL;
      end.size = Math.max(2, end.bytes * unit);
      end.next = end.y;
      y += end.size + LABEL + GAP;
    }
    return new Map(list.map((end) => [end.name, end]));
  };
  const from = place(left);
  const to = place(right);
  const [x0, x1] = [BAR, width - BAR];
  const middle = (x0 + x1) / 2;
  const order = [...bands].sort((a, b) => from.get(a.from).y - from.get(b.from).y || to.get(a.to).y - to.get(b.to).y);
  const ribbons = order.map((band) => {
    const [a, b] = [from.get(band.from), to.get(band.to)];
    const size = Math.max(1, band.bytes * unit);
    const [y0, y1] = [a.next, b.next];
    a.next += size;
    b.next += size;
    const d = `M${x0},${y0}C${middle},${y0} ${middle},${y1} ${x1},${y1}v${size}C${middle},${y1 + size} ${middle},${y0 + size} ${x0},${y0 + size}Z`;
    return s("path", { d, class: "ribbon" }, s("title", {}, `${band.from} → ${band.to}: ${bytes(band.bytes)}`));
  });
  const label = (end, x, anchor) => [
    s("rect", { x: anchor === "start" ? 0 : width - BAR, y: end.y, width: BAR, height: end.size, class: anchor === "start" ? "end lends" : "end borrows", rx: 1.5 }),
    s("text", { x, y: end.y - 4, "text-anchor": anchor }, s("tspan", { class: "name" }, clip(end.name, width)), s("tspan", { class: "muted", dx: 6 }, bytes(end.bytes))),
  ];
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "flows", "aria-hidden": "true" }, ribbons, left.map((end) => label(end, 0, "start")), right.map((end) => label(end, width, "end")));
}

function clip(name, width) {
  const most = Math.max(8, Math.floor(width / 2 / 7) - 11);
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

/** The same for those who do not see it. */
function table(bands, what) {
  const rows = bands.map((band) => h("tr", {}, h("td", {}, band.from), h("td", {}, band.to), h("td", {}, bytes(band.bytes))));
  return h("table", { class: "unseen" }, h("thead", {}, h("tr", {}, [...what, "Memory"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows));
}
