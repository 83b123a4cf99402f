#!/usr/bin/env bash
# GNU sort on 1 GiB of text, with a quarter of the memory that it asks for: the rest is in the pool
# of an embedded cluster. Its output is compared with that of a plain sort, its time with all memory
# local and with the same limit on disk swap.
#
# Where page faults may not be handled (no userfaultfd), it says how to grant that, and shows the
# pool through the page protocol instead.
set -euo pipefail
cd "$(dirname "$0")/.."

INPUT_MIB=${DEMO_MIB:-1024}
ASK_MIB=$((INPUT_MIB * 2))
LOCAL_MIB=$((ASK_MIB / 4))
DONORS=3
# The run on disk swap is given up after so long.
SWAP_LIMIT_S=${DEMO_SWAP_LIMIT_S:-1200}
# Together the donors lend what sort asks for, and half as much again.
LEND_MIB=$((ASK_MIB / 2))

say() {
    if [ -t 1 ]; then printf '\033[1m== %s\033[0m\n' "$*"; else printf '== %s\n' "$*"; fi
}

# A line that is rewritten on a terminal, and one line in ten seconds elsewhere.
progress() {
    local what=$1 pid=$2 start=$SECONDS detail
    shift 2
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        detail=""
        [ $# -eq 0 ] || detail=$("$@")
        if [ -t 1 ]; then
            printf '\r   %s: %d s %s\033[K' "$what" $((SECONDS - start)) "$detail"
        elif [ $(((SECONDS - start) % 10)) -eq 0 ]; then
            printf '   %s: %d s %s\n' "$what" $((SECONDS - start)) "$detail"
        fi
    done
    [ ! -t 1 ] || printf '\r\033[K'
    wait "$pid"
}

dir=$(mktemp -d "${DEMO_DIR:-/var/tmp}/hecaton-demo-XXXXXX")
dev="" job=""
clean_up() {
    # A job is a pipeline in a group of its own, the cluster a process that gives all back itself.
    [ -z "$job" ] || kill -TERM -- "-$job" 2>/dev/null || true
    [ -z "$job" ] || wait "$job" 2>/dev/null || true
    [ -z "$dev" ] || kill -TERM "$dev" 2>/dev/null || true
    [ -z "$dev" ] || wait "$dev" 2>/dev/null || true
    rm -rf "$dir"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

free_mib=$(df -Pm "$dir" | awk 'NR == 2 { print $4 }')
if [ "$free_mib" -lt $((INPUT_MIB * 7)) ]; then
    echo "demo: $dir has $free_mib MiB free, $((INPUT_MIB * 7)) MiB are needed;" \
        "name another directory with DEMO_DIR" >&2
    exit 1
fi

say "building in release mode"
cargo build --release --locked -p hecaton-cli -p hecaton-preload
hecaton="$(cd "${CARGO_TARGET_DIR:-target}/release" && pwd)/hecaton"

say "starting an embedded cluster: $DONORS donors, $LEND_MIB MiB each"
"$hecaton" dev --json --donors $DONORS --lend "${LEND_MIB}M" --dir "$dir/cluster" \
    >"$dir/ready" 2>"$dir/log" &
dev=$!
while [ ! -s "$dir/ready" ]; do
    if ! kill -0 "$dev" 2>/dev/null; then
        dev=""
        cat "$dir/log" >&2
        exit 1
    fi
    sleep 0.1
done
HECATON_MANAGER=$(sed 's/.*"manager":"\([^"]*\)".*/\1/' "$dir/ready")
export HECATON_MANAGER

if ! "$hecaton" run --local 64M -- true 2>"$dir/reason"; then
    if grep -q userfaultfd "$dir/reason"; then
        say "this machine does not let Hecaton handle page faults"
        cat "$dir/reason"
        say "the pool through the page protocol instead"
        "$hecaton" bench pool --size "${INPUT_MIB}M" --dir "$dir"
        exit 0
    fi
    cat "$dir/reason" "$dir/log" >&2
    exit 1
fi

say "making $INPUT_MIB MiB of random lines of 511 characters"
written() { echo "$(($(stat -c %s "$dir/input" 2>/dev/null || echo 0) >> 20)) MiB"; }
set -m
(
    set +o pipefail
    base64 -w 511 /dev/urandom | head -c "${INPUT_MIB}M" >"$dir/input"
    echo >>"$dir/input"
) &
job=$!
progress "writing" "$job" written
job=""

export LC_ALL=C
threads=$(nproc)
sort_input=(sort -S "${ASK_MIB}M" --parallel="$threads" -T "$dir" "$dir/input")
hundredths() { echo $((10#${EPOCHREALTIME/[.,]/} / 10000)); }

# timed NAME OUTPUT COMMAND...: the seconds are left in $seconds. The output is written by `cat`,
# so that a memory limit on the command does not also limit the file system's cache.
timed() {
    local name=$1 output=$2 start
    shift 2
    start=$(hundredths)
    (
        set -o pipefail
        "$@" 2>"$dir/complaint" | cat >"$output"
    ) &
    job=$!
    local status=0
    progress "$name" "$job" || status=$?
    job=""
    seconds=$(($(hundredths) - start))
    seconds="$((seconds / 100)).$(printf '%02d' $((seconds % 100)))"
    return "$status"
}

say "sorting with all memory local"
timed "sort, ${ASK_MIB} MiB" "$dir/plain" "${sort_input[@]}" || {
    cat "$dir/complaint" >&2
    exit 1
}
all_local=$seconds

say "sorting with $LOCAL_MIB MiB local and the rest in the pool"
timed "sort, $LOCAL_MIB MiB" "$dir/pooled" \
    "$hecaton" run --local "${LOCAL_MIB}M" --stats "$dir/stats" -- "${sort_input[@]}" || {
    cat "$dir/complaint" "$dir/log" >&2
    exit 1
}
pooled=$seconds

say "comparing the outputs"
if ! cmp "$dir/plain" "$dir/pooled"; then
    echo "demo: the sort on pool memory put out something else" >&2
    exit 1
fi
rm "$dir/pooled"

say "sorting with $LOCAL_MIB MiB local and disk swap"
swapped="" swap_reason=""
# A memory cgroup under heavy swapping is sometimes ended by the kernel's out-of-memory killer,
# with the swap half empty: that is tried again.
for _ in 1 2 3; do
    if timed "sort, $LOCAL_MIB MiB and swap" "$dir/swapped" \
        "$hecaton" bench limited --local "${LOCAL_MIB}M" --swap "$((ASK_MIB * 2))M" --dir "$dir" \
        --limit-s "$SWAP_LIMIT_S" -- "${sort_input[@]}"; then
        swapped=$seconds
        break
    fi
    swap_reason=$(tail -n 1 "$dir/complaint")
    echo "   no result: $swap_reason"
    grep -q 'signal 9' "$dir/complaint" || break
done

# stat NAME, or stat OBJECT NAME: a number of the statistics, which stand one to a line.
stat_of() {
    local object=pager name=$1
    [ $# -eq 1 ] || object=$1 name=$2
    awk -v object="$object" -v name="$name" '
        match($0, /^ *"[a-z_0-9]+": *\{/) { split($0, part, "\""); inside = part[2] }
        /^ *\}/ { inside = "pager" }
        inside == object && $1 == "\"" name "\":" { gsub(/,/, "", $2); print $2; exit }
    ' "$dir/stats"
}
mib() { awk -v bytes="$1" 'BEGIN { printf "%.0f MiB", bytes / 1048576 }'; }
times() { awk -v a="$1" -v b="$all_local" 'BEGIN { printf "%.2f", a / b }'; }

prefetched=$(stat_of pages_prefetched)
hits=$(stat_of prefetch_hits)
rate=$(awk -v hits="$hits" -v all="$prefetched" \
    'BEGIN { if (all > 0) printf "%.1f %% of %d pages", 100 * hits / all, all; else print "none" }')
us() { printf '%.1f µs' "$(stat_of pool_fault_latency "$1")"; }

row() { printf '  %-36s %s\n' "$1" "$2"; }
say "sort of $INPUT_MIB MiB, asking for $ASK_MIB MiB; the outputs are the same"
row "local memory, most (limit)" "$(mib "$(stat_of local_peak_bytes)") ($LOCAL_MIB MiB)"
row "pool memory, most" "$(mib "$(stat_of pool_peak_bytes)")"
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
