#!/usr/bin/env bash
# Figure 5 of "Memory-Harvesting VMs in Cloud Platforms" (2022), live at 1/64 of its sizes: regular VMs arrive
# and leave on a host of 256 (4) GiB, a harvest VM has what they leave but for a buffer, and the last arrival
# evicts it. Then, as in no figure, one leaves, and the harvest VM comes back. Ends with a plot of the host's
# memory over time.
#
# The guests are real ones, emulated (TCG), so that it runs where KVM does not. In the harvest VM `hecaton guest`
# has a cache that fills all it may have. Takes 3 to 5 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/demo-lib.sh
. scripts/demo-lib.sh

# A step that is not done by then has failed.
LIMIT_S=${DEMO_HARVEST_LIMIT_S:-300}
# How long things stay as they are after each step.
HOLD_S=10
# Recording and report stay here.
out="$(cd "$disk" && pwd)/demo-harvest"

# What is a GiB in the paper.
scaled() { echo "$(($1 * 16))M"; }

available=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
[ "$available" -ge 6144 ] || {
    echo "demo: this machine has $available MiB available, 6144 MiB are needed" >&2
    exit 1
}

build
say "the guest: a Debian kernel and QEMU from the backports, busybox"
guest=$(scripts/guest.sh qemu)
mkdir -p "$dir/root/bin"
cat >"$dir/root/guest.toml" <<'EOF'
reserve = "384M"

[[application]]
name = "cache"
hook = { command = ["/bin/cache"] }
EOF
cat >"$dir/root/bin/cache" <<'EOF'
#!/bin/sh
# A cache that fills what it may have.
say() { echo "guest: $*" >/dev/ttyS0; }
kill "$(cat /tmp/filler 2>/dev/null)" 2>/dev/null
mib=$((HECATON_LIMIT_BYTES >> 20))
has=$(($(stat -c %s /tmp/cache 2>/dev/null || echo 0) >> 20))
if [ "$HECATON_REASON" = eviction ]; then
    say "evicted within $((HECATON_DEADLINE_MS / 1000)) s, shuts down"
    poweroff -f
fi
say "$HECATON_REASON: the cache has $has MiB, and may have $mib"
if [ "$mib" -gt "$has" ]; then
    # In the background: it must not keep the manager from the next order.
    dd if=/dev/zero of=/tmp/cache bs=1M seek="$has" count=$((mib - has)) >/dev/null 2>&1 &
    echo $! >/tmp/filler
else
    truncate -s "${mib}M" /tmp/cache
fi
EOF
scripts/guest-with.sh "$guest/initramfs" "$hecaton" "$dir/root" "$dir/initramfs"

say "a host of $(scaled 256), $(scaled 32) of which nobody harvests"
start_daemon "$hecaton" manager --json --listen 127.0.0.1:0
"$hecaton" node --name demo --manager "$(manager_url)" --dir "$dir/node" --agent --qmp-dir "$dir/vms" \
    --manage "$(scaled 256)" --buffer "$(scaled 32)" --batch 256M --eviction-warning 20 \
    --reclaim-patience 60 --reclaim-time 120 >/dev/null 2>>"$dir/log" &
daemons+=($!)

status() { "$hecaton" host status --dir "$dir/node" 2>/dev/null; }

# class NAME: what of the host is in it.
class() { status | awk -v name="$1" '$1 == name { print $NF; exit }'; }

classes() {
    status | awk '$1 ~ /^(regular|minimum|harvested|buffer|reserved)$/ && NF == 3 && !seen[$1]++ {
        printf "%s%s %s", comma, $1, $NF; comma = ", " }'
}

# are NAME SIZE...: whether the classes have these sizes.
are() {
    while [ $# -gt 0 ]; do
        [ "$(class "$1")" = "$2" ] || return
        shift 2
    done
}

# has_grown SIZE: so much the harvest VM's guest has beyond its minimum.
has_grown() { [ "$(status | awk '$1 == "harvest" && $3 == "running" { print $5 }')" = "$1" ]; }

# has_said NAME TEXT: on its console.
has_said() { grep -q "$2" "$dir/$1.console" 2>/dev/null; }

# in_time COMMAND...: until it succeeds.
in_time() {
    local end=$((SECONDS + LIMIT_S))
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.5
    done
}

# await WHAT COMMAND...: until that succeeds.
await() {
    local what=$1
    shift
    launch in_time "$@"
    if ! progress "$what" classes; then
        echo "demo: not so after $LIMIT_S s: $what" >&2
        { status; tail -n 5 "$dir"/*.console "$dir"/*.complaint "$dir/log"; } >&2
        exit 1
    fi
    printf '   %s: %s\n' "$what" "$(classes)"
}

# step WHAT: the next one, when the last could be seen in the plot for a while.
step() {
    sleep "$HOLD_S"
    say "$*"
}

declare -A machines

# create NAME INITRAMFS SCRIPT OPTION...: a machine, which waits until it is admitted.
create() {
    local name=$1 initramfs=$2 script=$3
    shift 3
    "$hecaton" vm create --dir "$dir/node" --name "$name" "$@" -- \
        "$guest/qemu-10/usr/bin/qemu-system-x86_64" \
        -L "$guest/qemu-10/usr/share/qemu" -L "$guest/qemu-10/usr/share/seabios" \
        -accel tcg -M q35 -smp 2 -nodefaults -no-reboot -display none -serial stdio \
        -kernel "$guest/vmlinuz" -initrd "$initramfs" -append "console=ttyS0 quiet no_timer_check panic=-1 \
memhp_default_state=online_movable hecaton.script=$(base64 -w 0 <<<"$script")" \
        </dev/null >"$dir/$name.console" 2>"$dir/$name.complaint" &
    machines[$name]=$!
    daemons+=($!)
}

# arrive NAME GIB: a regular VM of so much in the paper.
arrive() { create "$1" "$guest/initramfs" "sleep 3600" --regular --memory "$(scaled "$2")"; }

leave() {
    kill -TERM "${machines[$1]}"
    wait "${machines[$1]}" || true
}

harvest() {
    # shellcheck disable=SC2016 # The guest's.
    create harvest "$dir/initramfs" \
        'mount -o remount,size=4G /tmp
hecaton guest --config /guest.toml --port /dev/$(ls /sys/class/virtio-ports)' \
        --harvest --min "$(scaled 64)" --max "$(scaled 160)"
}

await "the agent has looked" are buffer 512M
"$hecaton" host watch --json --dir "$dir/node" >"$out.jsonl" 2>>"$dir/log" &
daemons+=($!)

say "t0: VM1 and VM2 of $(scaled 64) are there, and a harvest VM of $(scaled 64) at least"
arrive vm1 64
arrive vm2 64
await "VM1 and VM2" are regular 2G
harvest
await "it has what is unallocated but for the buffer" has_grown 512M
await "the manager inside is there" has_said harvest "guest: start"
step "t1: VM2 leaves"
leave vm2
await "the harvest VM has its memory" has_grown 1.5G
step "t2: VM3 of $(scaled 96) arrives"
arrive vm3 96
await "VM3 has the buffer and what the harvest VM gives" are regular 2.5G
await "the buffer is full again" are harvested 0 buffer 512M
step "t3: VM4 of $(scaled 32) arrives"
arrive vm4 32
await "VM4 has the buffer, at once" are regular 3G buffer 0
step "t4: VM5 of $(scaled 32) arrives"
arrive vm5 32
await "the harvest VM is evicted for VM5" are regular 3.5G minimum 0
say "what the harvest VM said"
sed -n 's/^guest: \(.*\)\r$/   \1/p' "$dir/harvest.console"
step "t5: the harvest VM is wanted back, and VM3 leaves"
harvest
sleep "$HOLD_S"
leave vm3
await "the harvest VM is back" has_grown 512M
await "the manager inside is there" has_said harvest "guest: start"

step "the host's memory over time"
"$hecaton" host plot "$out.jsonl" --html "$out.html"
row "recording" "$out.jsonl"
row "report" "$out.html"
if command -v chromium >/dev/null; then
    # Its sandbox refuses root.
    sandbox=()
    [ "$(id -u)" -ne 0 ] || sandbox=(--no-sandbox)
    chromium --headless=new --disable-gpu --hide-scrollbars "${sandbox[@]}" --window-size=1200,1400 \
        --user-data-dir="$dir/chromium" --screenshot="$out.png" "file://$out.html" 2>"$dir/chromium.log" ||
        { cat "$dir/chromium.log" >&2; exit 1; }
    row "picture" "$out.png"
fi
