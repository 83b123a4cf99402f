#!/usr/bin/env bash
# Runs the checks and tests in stages, and ends with what was skipped and why, what failed, and
# one line of counts.
#
#   test.sh full     everything, the end-to-end suite in release mode included
#   test.sh quick    without it: ten minutes of processor time from nothing, few when all is built
#
# A stage that is no test runner counts as one test. Of `cargo test` every `test result:` line is
# added up; a run that fails without a failed test (it does not build, it crashes) counts as one
# failure, so that no failure can hide. A test that finds its machine lacking something prints
# `skipped: NAME: REASON` and returns: it is moved from the passed to the skipped.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

mode=${1:-full}
passed=0 failed=0 skipped=0
skips=() failures=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# A log is easier to read without bars and colours, and the parsing below needs it so.
export CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=never

# Of each failure, at the end: only that may be left of a long log.
LINES_SHOWN=16

title() { printf '\n== %s\n' "$1"; }

skip() {
    skipped=$((skipped + 1))
    skips+=("$1: $2")
    echo "skipped: $1: $2"
}

# What the log ends with, under the last failure.
last_lines() {
    local line
    while IFS= read -r line; do
        failures+=("    $line")
    done < <(grep -v '^[[:space:]]*$' "$log" | tail -n "$LINES_SHOWN" | cut -c 1-500)
}

single() {
    local name=$1
    shift
    title "$name"
    local start=$SECONDS
    "$@" 2>&1 | tee "$log"
    if [ "${PIPESTATUS[0]}" -eq 0 ]; then
        passed=$((passed + 1))
        echo "$name: ok ($((SECONDS - start)) s)"
    else
        failed=$((failed + 1))
        failures+=("$name")
        last_lines
        echo "$name: FAILED ($((SECONDS - start)) s)"
    fi
}

suite() {
    local name=$1
    shift
    title "$name"
    local start=$SECONDS status counts ok bad ignored said
    "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    counts=$(awk '
        /^test result: / {
            for (i = 1; i <= NF; i++) {
                if ($i ~ /^passed/) ok += $(i - 1)
                if ($i ~ /^failed;/) bad += $(i - 1)
                if ($i ~ /^ignored/) ignored += $(i - 1)
            }
        }
        END { print ok + 0, bad + 0, ignored + 0 }' "$log")
    read -r ok bad ignored <<<"$counts"
    said=$(grep -c '^skipped: ' "$log")
    while read -r line; do
        skips+=("$name: $line")
    done < <(sed -n -e 's/^skipped: //p' \
        -e 's/^test \(.*\) \.\.\. ignored, \(.*\)$/\1: \2/p' \
        -e 's/^test \(.*\) \.\.\. ignored$/\1: ignored in the source/p' "$log")
    while IFS= read -r line; do
        case $line in
        ' '*) failures+=("$line") ;;
        *) failures+=("$name: $line") ;;
        esac
    done < <(awk -v most="$LINES_SHOWN" '
        # With what stands below its heading further down: its output, or how it failed end to end. The first
        # line is kept, for it may be the cause, and as many of the last ones, where panics are.
        function show(    i) {
            if (title in failed && !(title in shown)) {
                print title
                shown[title] = 1
                for (i = 1; i <= lines; i++)
                    if (i == 1 || i > lines - most + 1) print "    " substr(line[i], 1, 500)
            }
            title = ""
            lines = 0
        }
        /^test .* \.\.\. FAILED$/ {
            name = substr($0, 6, length($0) - 16)
            sub(/ - should panic$/, "", name)
            failed[name] = 1
            order[++count] = name
        }
        /^---- .* stdout ----$/ { show(); title = substr($0, 6, length($0) - 17); next }
        /^(failures|successes):$/ || /^test result: / { show() }
        title != "" && NF { line[++lines] = $0 }
        END { show(); for (i = 1; i <= count; i++) { title = order[i]; show() } }' "$log")
    if [ "$status" -ne 0 ] && [ "$bad" -eq 0 ]; then
        bad=1
        failures+=("$name: ended with status $status and no failed test:")
        last_lines
    fi
    if [ "$status" -eq 0 ] && [ $((ok + ignored)) -eq 0 ]; then
        bad=1
        failures+=("$name: ran no test at all")
    fi
    passed=$((passed + ok - said))
    failed=$((failed + bad))
    skipped=$((skipped + ignored + said))
    echo "$name: $((ok - said)) passed, $bad failed, $((ignored + said)) skipped" \
        "($((SECONDS - start)) s)"
}

have_deny() {
    command -v cargo-deny >/dev/null && return
    [ "$mode" = full ] || return 1
    title "installing cargo-deny, once"
    cargo install --locked --quiet --debug cargo-deny
}

if command -v shellcheck >/dev/null; then
    single "scripts" shellcheck scripts/*.sh .ci/run
else
    skip "scripts" "shellcheck is not installed; run: make setup"
fi
single "format" cargo fmt --all --check
single "clippy" cargo clippy --quiet --locked --workspace --all-targets -- -D warnings

# Tests of the pager start QEMU with it.
single "libhecaton.so" cargo build --quiet --locked -p hecaton-preload

# --show-output: what a passing test prints is where it says that it skipped something.
suite "unit" cargo test --locked --no-fail-fast --workspace --exclude hecaton-e2e \
    -- --show-output

if have_deny; then
    single "licences" cargo deny --log-level error check licenses bans sources
else
    skip "licences" "cargo-deny is not installed; run: cargo install --locked cargo-deny"
fi

if [ "$mode" = full ]; then
    single "release build" cargo build --quiet --release --locked -p hecaton-cli -p hecaton-preload
    suite "end to end" cargo test --release --locked -p hecaton-e2e
fi

echo
if [ "${#skips[@]}" -gt 0 ]; then
    echo "Skipped, and why:"
    printf '  %s\n' "${skips[@]}"
fi
if [ "${#failures[@]}" -gt 0 ]; then
    echo "Failed:"
    printf '  %s\n' "${failures[@]}"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
