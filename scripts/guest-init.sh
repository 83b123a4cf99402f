#!/bin/busybox sh
# shellcheck shell=dash
# The guest's first process; scripts/guest.sh puts it into the initramfs.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
cat >/bin/load <<'EOF'
#!/bin/sh
# load [NAME...]: those that every guest has, or these and what they need.
for order in "${@:-}"; do
    while read -r module; do
        insmod "/lib/modules/$module" 2>/dev/null
    done <"/lib/modules/order${order:+.$order}"
done
EOF
chmod 755 /bin/load
load
ip link set lo up
# The console must not cut or fold lines that the host reads.
stty -echo cols 1000 2>/dev/null
echo "guest: ready $(awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo) MiB"
script=$(sed -n 's/.*hecaton\.script=\([A-Za-z0-9+/=]*\).*/\1/p' /proc/cmdline)
if [ -z "$script" ]; then
    # A shell that is left ends the guest.
    setsid sh -c 'exec sh </dev/ttyS0 >/dev/ttyS0 2>&1'
else
    echo "$script" | base64 -d >/tmp/script
    sh /tmp/script </dev/null 2>&1
    echo "guest: exit $?"
fi
sync
poweroff -f
