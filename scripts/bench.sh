#!/usr/bin/env bash
# Runs the benches one after the other. Arguments go to each of them: --quick, --json.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build --quiet --release --locked -p hecaton-cli -p hecaton-preload
hecaton="${CARGO_TARGET_DIR:-target}/release/hecaton"
for bench in fault stream app; do
    "$hecaton" bench "$bench" "$@"
done
