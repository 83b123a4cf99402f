#!/usr/bin/env bash
# A virtual machine of 4 GiB on a host that gives it 512 MiB: stock QEMU, a Debian kernel, and three
# donors with the rest. In the guest run mbw, and a load that verifies what it reads. Beside it the
# same guest on plain memory, and with 512 MiB and disk swap.
#
# Everything is emulated (TCG), so that it runs where KVM does not; with few processors the guest,
# its pager and three donors share them. Takes 5 to 15 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/demo-lib.sh
. scripts/demo-lib.sh

MEMORY=${DEMO_VM_MEMORY:-4G}
LOCAL=${DEMO_VM_LOCAL:-512M}
LEND=${DEMO_VM_LEND:-1400M}
# What the guest does: memory that does not fit in $LOCAL, copied and verified.
MBW_MIB=${DEMO_VM_MBW_MIB:-256}
VERIFY=${DEMO_VM_VERIFY:-1G}
# A run that is not done by then is given up.
LIMIT_S=${DEMO_VM_LIMIT_S:-900}

build
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

console_end() { tail -n 1 "$dir/$1.console" 2>/dev/null | tr -d '\r' | cut -c 1-60; }

# boot NAME COMMAND...: runs a guest to its end.
boot() {
    local name=$1
    shift
    launch timeout -k 10 "$LIMIT_S" "$@" </dev/null >"$dir/$name.console" 2>"$dir/$name.complaint"
    # What the guest says of itself decides, not how QEMU ends.
    progress "$name" console_end "$name" || true
    grep -q 'guest: exit 0' "$dir/$name.console"
}

say "the guest on plain memory"
boot plain "${qemu[@]}" || { tail -n 5 "$dir"/plain.* >&2; exit 1; }

start_cluster "$LEND"
say "the guest with $LOCAL local, and the rest in the pool"
boot pool "$hecaton" vm run --dir "$dir/cluster" --name demo --memory "$MEMORY" --local "$LOCAL" \
    --stats "$dir/stats" -- "${qemu[@]}" || { tail -n 5 "$dir"/pool.* "$dir/log" >&2; exit 1; }

say "the guest with $LOCAL local and disk swap"
swapped=yes
boot swap "$hecaton" bench limited --local "$LOCAL" --swap 8G --dir "$big" --limit-s "$LIMIT_S" \
    -- "${qemu[@]}" || swapped=""

# The copy rates of mbw: slowest, mean, fastest.
rates() {
    awk '/MEMCPY/ && !/AVG/ {
        for (i = 1; i < NF; i++) if ($i == "Copy:") { r = $(i + 1); n++; s += r
            if (n == 1 || r < lo) lo = r; if (r > hi) hi = r } }
        END { if (n) printf "%.0f / %.0f / %.0f MiB/s", lo, s / n, hi; else print "none" }' \
        "$dir/$1.console"
}
verified() { sed -n 's/.*successful run completed in \([0-9.]*\)s.*/\1 s/p' "$dir/$1.console"; }
us() { printf '%.1f' "$(stat_of pool_fault_latency "$1")"; }

say "a guest of $MEMORY; every run verified what it had written"
row "" "mbw $MBW_MIB MiB: slowest / mean / fastest" "verified load of $VERIFY"
row "plain memory" "$(rates plain)" "$(verified plain)"
row "$LOCAL local and the pool" "$(rates pool)" "$(verified pool)"
if [ -n "$swapped" ]; then
    row "$LOCAL local and disk swap" "$(rates swap)" "$(verified swap)"
else
    row "$LOCAL local and disk swap" "no result: $(tail -n 1 "$dir/swap.complaint")"
fi
row "local memory, most" "$(mib local_peak_bytes)"
row "pool memory, most" "$(mib pool_peak_bytes)"
row "fault served by the pool, p50 / p99" "$(us p50_us) / $(us p99_us) µs"
