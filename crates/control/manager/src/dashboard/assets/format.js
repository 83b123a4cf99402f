// Numbers for people. What is not known is a dash, and never zero.

/** What stands for a number that is not known. */
export const UNKNOWN = "–";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Three figures, or as many as there are before the point. */
const short = (value) => value.toFixed(value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2);

/** Bytes, such as `1.50 GiB`. */
export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0";
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${short(value)}\u00a0${UNITS[unit]}`;
}

/** A rate, such as `12.3 k`. */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  if (value >= 999_950) return `${short(value / 1e6)}\u00a0M`;
  if (value >= 9_999.5) return `${short(value / 1e3)}\u00a0k`;
  return value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1);
}

/** Microseconds. */
export function micros(value) {
  if (!known(value)) return UNKNOWN;
  return value >= 9_999.5 ? `${short(value / 1000)}\u00a0ms` : `${value.toFixed(value < 100 ? 1 : 0)}\u00a0µs`;
}

/** A time that has passed, such as `5 min`. */
export function ago(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 90) return `${seconds}\u00a0s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)}\u00a0min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)}\u00a0h`;
  return `${Math.round(seconds / 86_400)}\u00a0days`;
}

/** The bytes that a text such as `512M` or `1.5G` means, or NaN. */
export function parseSize(text) {
  const match = /^\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?\s*$/i.exec(text);
  if (!match) return NaN;
  return Math.round(Number(match[1]) * 1024 ** " KMGTP".indexOf(match[2].toUpperCase() || " "));
}
