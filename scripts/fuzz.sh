#!/usr/bin/env bash
# Runs every fuzz target for a given number of seconds each.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
if ! command -v cargo-fuzz >/dev/null; then
    cargo install --locked cargo-fuzz
fi
# The sanitizers' switches are unstable ones; this lets the installed stable compiler take them.
export RUSTC_BOOTSTRAP=1
for target in $(cargo fuzz list --fuzz-dir fuzz); do
    echo "== $target, $seconds s"
    cargo fuzz run --fuzz-dir fuzz "$target" -- -max_total_time="$seconds" -timeout=10
done
