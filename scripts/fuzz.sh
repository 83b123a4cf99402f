#!/usr/bin/env bash
# Runs every fuzz target for a given number of seconds each.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
if ! command -v c++ >/dev/null; then
    echo "fuzz: there is no C++ compiler, which libFuzzer is built with; install g++" >&2
    exit 1
fi
if ! cargo fuzz --version >/dev/null 2>&1; then
    echo "== installing cargo-fuzz, once"
    if ! cargo install --locked --quiet cargo-fuzz; then
        echo "fuzz: cargo-fuzz is missing; run: cargo install --locked cargo-fuzz" >&2
        exit 1
    fi
fi
# The sanitizers' switches are unstable ones; this lets the installed stable compiler take them.
export RUSTC_BOOTSTRAP=1
for target in $(cargo fuzz list --fuzz-dir fuzz); do
    echo "== $target, $seconds s"
    cargo fuzz run --fuzz-dir fuzz "$target" -- -max_total_time="$seconds" -timeout=10
done
