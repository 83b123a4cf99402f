#!/usr/bin/env bash
# Runs the whole suite again and again, every second time beside a load on all processors, and ends with
# one line for each round. The output of each round stays in target/soak.
#
#   soak.sh [ROUNDS]
set -uo pipefail
cd "$(dirname "$0")/.." || exit

rounds=${1:-10}
logs=target/soak
mkdir -p "$logs"
failed=0 load=
trap '[ -z "$load" ] || kill "$load" 2>/dev/null' EXIT

for round in $(seq "$rounds"); do
    beside="alone"
    if [ $((round % 2)) -eq 0 ]; then
        beside="beside stress-ng --cpu 2"
        stress-ng --quiet --cpu 2 &
        load=$!
    fi
    start=$SECONDS
    HECATON_TEST_PATIENCE=2 scripts/test.sh full >"$logs/round-$round.log" 2>&1 || failed=$((failed + 1))
    if [ -n "$load" ]; then
        kill "$load" && wait "$load" 2>/dev/null
        load=
    fi
    cp target/nextest/default/junit.xml "$logs/round-$round.xml" 2>/dev/null
    echo "round $round, $beside, $((SECONDS - start)) s: $(tail -n 1 "$logs/round-$round.log")"
done
echo "$failed of $rounds rounds failed; their output: $logs"
[ "$failed" -eq 0 ]
