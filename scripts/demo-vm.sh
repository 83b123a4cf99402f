#!/usr/bin/env bash
# A virtual machine of 4 GiB on a host that gives it 512 MiB: stock QEMU, a Debian kernel, and three
# donors with the rest. In the guest run mbw, and a load that verifies what it reads. Beside it the
# same guest on plain memory, and with 512 MiB and disk swap.
#
# Everything is emulated (TCG), so that it runs where KVM does not; with few processors the guest,
# its pager and three donors share them. Takes 5 to 15 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

MEMORY=${DEMO_VM_MEMORY:-4G}
LOCAL=${DEMO_VM_LOCAL:-512M}
LEND=${DEMO_VM_LEND:-1400M}
# What the guest does: memory that does not fit in $LOCAL, copied and verified.
MBW_MIB=${DEMO_VM_MBW_MIB:-256}
VERIFY=${DEMO_VM_VERIFY:-1G}
DONORS=3
# A run that is not done by then is given up.
LIMIT_S=${DEMO_VM_LIMIT_S:-900}

say() {
    if [ -t 1 ]; then printf '\033[1m== %s\033[0m\n' "$*"; else printf '== %s\n' "$*"; fi
}

dir=$(mktemp -d "${DEMO_DIR:-/var/tmp}/hecaton-demo-vm-XXXXXX")
dev="" job=""
clean_up() {
    [ -z "$job" ] || kill -TERM -- "-$job" 2>/dev/null || true
    [ -z "$job" ] || wait "$job" 2>/dev/null || true
    [ -z "$dev" ] || kill -TERM "$dev" 2>/dev/null || true
    [ -z "$dev" ] || wait "$dev" 2>/dev/null || true
    rm -rf "$dir"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "building in release mode"
cargo build --release --locked -p hecaton-cli -p hecaton-preload
hecaton="$(cd "${CARGO_TARGET_DIR:-target}/release" && pwd)/hecaton"
say "the guest: a Debian kernel and QEMU from the backports, busybox, mbw, stress-ng"
guest=$(scripts/guest.sh qemu)

script="mbw -q -n 5 -t0 $MBW_MIB
stress-ng --vm 1 --vm-bytes $VERIFY --vm-keep --vm-method zero-one --verify --vm-ops 20 || exit 1
awk '{ print \"guest: seconds\", \$1 }' /proc/uptime"
qemu=("$guest/qemu-10/usr/bin/qemu-system-x86_64"
    -L "$guest/qemu-10/usr/share/qemu" -L "$guest/qemu-10/usr/share/seabios"
    -accel tcg -M q35 -smp 2 -m "$MEMORY" -nodefaults -no-reboot -display none -serial stdio
    -kernel "$guest/vmlinuz" -initrd "$guest/initramfs"
    -append "console=ttyS0 quiet no_timer_check panic=-1 hecaton.script=$(base64 -w 0 <<<"$script")")

# boot NAME COMMAND...: runs a guest to its end, and shows where it is.
boot() {
    local name=$1 start=$SECONDS last=""
    shift
    timeout -k 10 "$LIMIT_S" "$@" </dev/null >"$dir/$name.console" 2>"$dir/$name.complaint" &
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        sleep 1
        last=$(tail -n 1 "$dir/$name.console" 2>/dev/null | tr -d '\r' | cut -c 1-60)
        if [ -t 1 ]; then
            printf '\r   %s: %d s  %s\033[K' "$name" $((SECONDS - start)) "$last"
        elif [ $(((SECONDS - start) % 10)) -eq 0 ]; then
            printf '   %s: %d s  %s\n' "$name" $((SECONDS - start)) "$last"
        fi
    done
    [ ! -t 1 ] || printf '\r\033[K'
    wait "$job" 2>/dev/null || true
    job=""
    printf '%d' $((SECONDS - start)) >"$dir/$name.seconds"
    grep -q 'guest: exit 0' "$dir/$name.console"
}

set -m
say "the guest on plain memory"
boot plain "${qemu[@]}" || { tail -n 5 "$dir"/plain.* >&2; exit 1; }

say "starting an embedded cluster: $DONORS donors, $LEND each"
"$hecaton" dev --json --donors $DONORS --lend "$LEND" --dir "$dir/cluster" \
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

say "the guest with $LOCAL local, and the rest in the pool"
boot pool "$hecaton" vm run --dir "$dir/cluster" --name demo --memory "$MEMORY" --local "$LOCAL" \
    --stats "$dir/stats" -- "${qemu[@]}" || { tail -n 5 "$dir"/pool.* "$dir/log" >&2; exit 1; }

say "the guest with $LOCAL local and disk swap"
swap_reason=""
boot swap "$hecaton" bench limited --local "$LOCAL" --swap 8G --dir "$dir" --limit-s "$LIMIT_S" \
    -- "${qemu[@]}" || swap_reason=$(tail -n 1 "$dir/swap.complaint")

stat_of() { awk -v name="\"$1\":" '$1 == name { gsub(/,/, "", $2); print $2; exit }' "$dir/stats"; }
mib() { awk -v bytes="$(stat_of "$1")" 'BEGIN { printf "%.0f MiB", bytes / 1048576 }'; }
# The copy rates of mbw: slowest, mean, fastest.
rates() {
    awk '/MEMCPY/ && !/AVG/ {
        for (i = 1; i < NF; i++) if ($i == "Copy:") { r = $(i + 1); n++; s += r
            if (n == 1 || r < lo) lo = r; if (r > hi) hi = r } }
        END { if (n) printf "%.0f / %.0f / %.0f MiB/s", lo, s / n, hi; else print "none" }' \
        "$dir/$1.console"
}
verified() { sed -n 's/.*successful run completed in \([0-9.]*\)s.*/\1 s/p' "$dir/$1.console"; }

row() { printf '  %-40s %-42s %s\n' "$1" "$2" "$3"; }
say "a guest of $MEMORY; every run verified what it had written"
row "" "mbw $MBW_MIB MiB: slowest / mean / fastest" "verified load of $VERIFY"
row "plain memory" "$(rates plain)" "$(verified plain)"
row "$LOCAL local and the pool" "$(rates pool)" "$(verified pool)"
if [ -z "$swap_reason" ]; then
    row "$LOCAL local and disk swap" "$(rates swap)" "$(verified swap)"
else
    row "$LOCAL local and disk swap" "no result: $swap_reason" ""
fi
row "local memory, most" "$(mib local_peak_bytes)" ""
row "pool memory, most" "$(mib pool_peak_bytes)" ""
row "fault served by the pool, p50 / p99" "$(stat_of p50_us) / $(stat_of p99_us) µs" ""
