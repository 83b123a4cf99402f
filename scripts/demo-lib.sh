# shellcheck shell=bash
# What the demos have in common: where their files are, what runs beside them and how that ends, the
# build, the cluster, and how results are shown. It is sourced, in the repository's root.

DONORS=3
# Of sort's order, and of decimal points.
export LC_ALL=C

say() {
    if [ -t 1 ]; then printf '\033[1m== %s\033[0m\n' "$*"; else printf '== %s\n' "$*"; fi
}

dir="" big="" daemons=() job=""
clean_up() {
    local at running
    # A job is a group of processes, a daemon one process that gives all back itself.
    [ -z "$job" ] || kill -TERM -- "-$job" 2>/dev/null || true
    [ -z "$job" ] || wait "$job" 2>/dev/null || true
    running=$(jobs -pr)
    for ((at = ${#daemons[@]} - 1; at >= 0; at--)); do
        # The number of one that has ended may be somebody else's.
        grep -qx "${daemons[at]}" <<<"$running" || continue
        kill -TERM "${daemons[at]}" 2>/dev/null || true
        wait "${daemons[at]}" 2>/dev/null || true
    done
    rm -rf ${dir:+"$dir"} ${big:+"$big"}
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# $dir is for sockets, whose paths must be short, and for what is small. $big is for what must be on
# a disk: swap, and files that are not to take the memory that is measured.
dir=$(mktemp -d)
disk=${DEMO_DIR:-${CARGO_TARGET_DIR:-target}}
mkdir -p "$disk"
big=$(mktemp -d -p "$(cd "$disk" && pwd)" --suffix=-hecaton-demo)

# need_mib NUMBER: of $big.
need_mib() {
    local free
    free=$(df -Pm "$big" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$1" ] || {
        echo "demo: $disk has $free MiB free, $1 MiB are needed;" \
            "name another directory with DEMO_DIR" >&2
        exit 1
    }
}

# The command is left in $hecaton.
build() {
    say "building in release mode"
    cargo build --release --locked -p hecaton-cli -p hecaton-preload
    hecaton="$(cd "${CARGO_TARGET_DIR:-target}/release" && pwd)/hecaton"
}

# start_daemon COMMAND...: in the background, until it has said a line, which is left in $dir/ready.
start_daemon() {
    rm -f "$dir/ready"
    "$@" >"$dir/ready" 2>>"$dir/log" &
    daemons+=($!)
    while [ ! -s "$dir/ready" ]; do
        if ! kill -0 "${daemons[-1]}" 2>/dev/null; then
            cat "$dir/log" >&2
            exit 1
        fi
        sleep 0.1
    done
}

# What has started says where its manager is.
manager_url() { sed 's/.*"manager":"\([^"]*\)".*/\1/' "$dir/ready"; }

# start_cluster LEND: an embedded one, in $dir/cluster.
start_cluster() {
    say "starting an embedded cluster: $DONORS donors, $1 each"
    start_daemon "$hecaton" dev --json --donors "$DONORS" --lend "$1" --dir "$dir/cluster"
}

# launch COMMAND...: in the background, as $job. A group of its own lets clean_up end a whole
# pipeline.
launch() {
    set -m
    "$@" &
    job=$!
    set +m
}

# progress NAME [COMMAND...]: waits for $job, and is its status. Meanwhile there is a line that is
# rewritten on a terminal, and one in ten seconds elsewhere; the command says how far the job is.
progress() {
    local name=$1 start=$SECONDS status=0 detail
    shift
    while kill -0 "$job" 2>/dev/null; do
        sleep 1
        detail=""
        [ $# -eq 0 ] || detail=$("$@")
        if [ -t 1 ]; then
            printf '\r   %s: %d s  %s\033[K' "$name" $((SECONDS - start)) "$detail"
        elif [ $(((SECONDS - start) % 10)) -eq 0 ]; then
            printf '   %s: %d s  %s\n' "$name" $((SECONDS - start)) "$detail"
        fi
    done
    [ ! -t 1 ] || printf '\r\033[K'
    wait "$job" || status=$?
    job=""
    return "$status"
}

# stat_of [OBJECT] NAME: a number of $dir/stats, where they stand one to a line.
stat_of() {
    local object=pager name=$1
    [ $# -eq 1 ] || object=$1 name=$2
    awk -v object="$object" -v name="$name" '
        match($0, /^ *"[a-z_0-9]+": *\{/) { split($0, part, "\""); inside = part[2] }
        /^ *\}/ { inside = "pager" }
        inside == object && $1 == "\"" name "\":" { gsub(/,/, "", $2); print $2; exit }
    ' "$dir/stats"
}

# mib NAME: such a number, of bytes.
mib() { awk -v bytes="$(stat_of "$1")" 'BEGIN { printf "%.0f MiB", bytes / 1048576 }'; }

# row LABEL VALUE...: a line of the results, in columns.
row() {
    local label=$1 last=${*: -1} value
    printf '  %-36s' "$label"
    shift
    for value in "${@:1:$#-1}"; do printf ' %-42s' "$value"; done
    printf ' %s\n' "$last"
}
