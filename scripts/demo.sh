#!/usr/bin/env bash
# GNU sort on 1 GiB of text, with a quarter of the memory that it asks for: the rest is in the pool
# of an embedded cluster. Its output is compared with that of a plain sort, its time with all memory
# local and with the same limit on disk swap.
#
# Where page faults may not be handled (no userfaultfd), it says how to grant that, and shows the
# pool through the page protocol instead.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/demo-lib.sh
. scripts/demo-lib.sh

INPUT_MIB=${DEMO_MIB:-1024}
ASK_MIB=$((INPUT_MIB * 2))
LOCAL_MIB=$((ASK_MIB / 4))
# Together the donors lend what sort asks for, and half as much again.
LEND_MIB=$((ASK_MIB / 2))
# The run on disk swap is given up after so long.
SWAP_LIMIT_S=${DEMO_SWAP_LIMIT_S:-1200}

# Input, two outputs, and swap.
need_mib $((INPUT_MIB * 7))
build
start_cluster "${LEND_MIB}M"
HECATON_MANAGER=$(manager_url)
export HECATON_MANAGER

if ! "$hecaton" run --local 64M -- true 2>"$dir/reason"; then
    if grep -q userfaultfd "$dir/reason"; then
        say "this machine does not let Hecaton handle page faults"
        cat "$dir/reason"
        say "the pool through the page protocol instead"
        "$hecaton" bench pool --size "${INPUT_MIB}M" --dir "$big"
        exit 0
    fi
    cat "$dir/reason" "$dir/log" >&2
    exit 1
fi

say "making $INPUT_MIB MiB of random lines of 511 characters"
write_input() {
    # base64 is ended by the pipe when head has enough.
    set +o pipefail
    base64 -w 511 /dev/urandom | head -c "${INPUT_MIB}M" >"$big/input"
    echo >>"$big/input"
}
written() { echo "$(($(stat -c %s "$big/input" 2>/dev/null || echo 0) >> 20)) MiB"; }
launch write_input
progress "writing" written

sort_input=(sort -S "${ASK_MIB}M" --parallel="$(nproc)" -T "$big" "$big/input")
hundredths() { echo $((10#${EPOCHREALTIME/[.,]/} / 10000)); }

# Leaves the hundredths of a second behind. The output is written by `cat`, so that a memory limit on
# the command does not also limit the file system's cache.
piped() {
    local output=$1 start status=0
    shift
    start=$(hundredths)
    "$@" 2>"$dir/complaint" | cat >"$output" || status=$?
    echo $(($(hundredths) - start)) >"$dir/took"
    return "$status"
}

# timed NAME OUTPUT COMMAND...: the seconds are left in $seconds.
timed() {
    local name=$1 took
    shift
    launch piped "$@"
    progress "$name" || return
    took=$(<"$dir/took")
    seconds="$((took / 100)).$(printf '%02d' $((took % 100)))"
}

say "sorting with all memory local"
timed "sort, ${ASK_MIB} MiB" "$big/plain" "${sort_input[@]}" || {
    cat "$dir/complaint" >&2
    exit 1
}
all_local=$seconds

say "sorting with $LOCAL_MIB MiB local and the rest in the pool"
timed "sort, $LOCAL_MIB MiB" "$big/pooled" \
    "$hecaton" run --local "${LOCAL_MIB}M" --stats "$dir/stats" -- "${sort_input[@]}" || {
    cat "$dir/complaint" "$dir/log" >&2
    exit 1
}
pooled=$seconds

say "comparing the outputs"
if ! cmp "$big/plain" "$big/pooled"; then
    echo "demo: the sort on pool memory put out something else" >&2
    exit 1
fi
rm "$big/pooled"

say "sorting with $LOCAL_MIB MiB local and disk swap"
swapped="" swap_reason=""
# A memory cgroup under heavy swapping is sometimes ended by the kernel's out-of-memory killer,
# with the swap half empty: that is tried again.
for _ in 1 2 3; do
    if timed "sort, $LOCAL_MIB MiB and swap" "$big/swapped" \
        "$hecaton" bench limited --local "${LOCAL_MIB}M" --swap "$((ASK_MIB * 2))M" --dir "$big" \
        --limit-s "$SWAP_LIMIT_S" -- "${sort_input[@]}"; then
        swapped=$seconds
        break
    fi
    swap_reason=$(tail -n 1 "$dir/complaint")
    echo "   no result: $swap_reason"
    grep -q 'signal 9' "$dir/complaint" || break
done

times() { awk -v a="$1" -v b="$all_local" 'BEGIN { printf "%.2f", a / b }'; }
us() { printf '%.1f µs' "$(stat_of pool_fault_latency "$1")"; }
prefetched=$(stat_of pages_prefetched)
hits=$(stat_of prefetch_hits)
rate=$(awk -v hits="$hits" -v all="$prefetched" \
    'BEGIN { if (all > 0) printf "%.1f %% of %d pages", 100 * hits / all, all; else print "none" }')

say "sort of $INPUT_MIB MiB, asking for $ASK_MIB MiB; the outputs are the same"
row "local memory, most (limit)" "$(mib local_peak_bytes) ($LOCAL_MIB MiB)"
row "pool memory, most" "$(mib pool_peak_bytes)"
row "pages in" "$(stat_of pages_in)"
row "pages out" "$(stat_of pages_out)"
row "fault served by the pool: p50" "$(us p50_us)"
row "                          p90" "$(us p90_us)"
row "                          p99" "$(us p99_us)"
row "prefetched pages that were used" "$rate"
row "run time: all memory local" "$all_local s"
row "          $LOCAL_MIB MiB and the pool" "$pooled s ($(times "$pooled") ×)"
if [ -n "$swapped" ]; then
    row "          $LOCAL_MIB MiB and disk swap" "$swapped s ($(times "$swapped") ×)"
else
    row "          $LOCAL_MIB MiB and disk swap" "no result: $swap_reason"
fi
