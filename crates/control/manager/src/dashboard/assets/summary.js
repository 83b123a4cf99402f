// The cluster in five figures.

import { h } from "./dom.js";
import { UNKNOWN, bytes, rate } from "./format.js";

const figure = (key, name, value, of) => h("div", { "data-key": key }, h("dt", {}, name), h("dd", {}, value, of && h("small", {}, of)));

/** The entries of the list of figures. */
export function summary({ totals }) {
  const part = totals.lent_bytes === undefined || !totals.lend_bytes ? UNKNOWN : `${Math.round((100 * totals.lent_bytes) / totals.lend_bytes)} %`;
  return [
    figure("nodes", "Nodes up", totals.nodes_up, `of ${totals.nodes}`),
    figure("lent", "Lent", bytes(totals.lent_bytes), totals.lend_bytes !== undefined && `${part} of ${bytes(totals.lend_bytes)}`),
    figure("room", "Can be lent now", bytes(totals.lendable_bytes)),
    figure("pool", "Held by consumers", bytes(totals.pool_bytes), `${totals.consumers} ${totals.consumers === 1 ? "consumer" : "consumers"}`),
    figure("faults", "Faults a second", rate(totals.faults_per_s)),
  ];
}
