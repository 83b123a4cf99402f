#!/usr/bin/env bash
# Runs the checks and tests in stages. Ends with the slowest tests, what was skipped and why, what failed,
# and one line of counts.
#
#   test.sh full     everything
#   test.sh quick    without end-to-end tests: for use before a commit
#
# A stage counts as one test. The runner of the tests writes what became of each to
# target/nextest/default/junit.xml, which scripts/summary.py reads.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

mode=${1:-full}
results=$(mktemp)
trap 'rm -f "$results"' EXIT

# A log is easier to read without bars and colours.
export CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=never

# stage NAME COMMAND...
stage() {
    local name=$1 start=$SECONDS outcome=passed
    shift
    printf '\n== %s\n' "$name"
    "$@" || outcome=failed
    printf '%s\t%s\t%s\n' "$outcome" "$name" "$((SECONDS - start))" >>"$results"
    echo "$name: $outcome ($((SECONDS - start)) s)"
}

# lacks NAME REASON
lacks() {
    printf 'skipped\t%s\t%s\n' "$1" "$2" >>"$results"
    echo "skipped: $1: $2"
}

if command -v shellcheck >/dev/null; then
    stage scripts shellcheck scripts/*.sh .ci/run
else
    lacks scripts "shellcheck is not installed; run: make setup"
fi
stage format cargo fmt --all --check
if cargo deny --version >/dev/null 2>&1; then
    stage licences cargo deny --log-level error check licenses bans sources
else
    lacks licences "cargo-deny is not installed; run: make setup"
fi
stage clippy cargo clippy --quiet --locked --workspace --all-targets -- -D warnings

tests=(cargo nextest run --locked --workspace --test-threads $((2 * $(nproc))))
[ "$mode" = full ] || tests+=(-E 'not package(hecaton-e2e)')
junit=target/nextest/default/junit.xml
rm -f "$junit"
stage tests "${tests[@]}"

python3 scripts/summary.py "$results" "${CARGO_TARGET_DIR:-target}/${junit#target/}"
