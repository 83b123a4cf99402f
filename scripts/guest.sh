#!/usr/bin/env bash
# Builds the guest that the demo, the benches and the tests run: a Debian kernel and an initramfs
# of busybox and the load programs. It is cached; nothing is installed on this machine.
#
#   guest.sh            the guest; prints the directory
#   guest.sh qemu       the guest and QEMU 10 beside Debian's own, unpacked and not installed
#   guest.sh libvirt    these and libvirt 11, in the same way: its virsh is libvirt-11/bin/virsh
#
# The guest's kernel takes a script from its command line (`hecaton.script=` and the script in
# base64, at most some 1,500 characters), runs it on the serial console, prints `guest: exit N` and
# powers off. Without a script it prints `guest: ready` and waits on a shell. `load xfs nbd` loads
# modules that not every guest needs.
#
# In the directory: `vmlinuz`, `vmlinux` (the same kernel, unpacked: an emulated processor takes 2 s to unpack
# it, and QEMU boots either), `initramfs`, and `qemu-10/` with `usr/bin/qemu-system-x86_64` and
# the firmware directories that QEMU is told of by -L.
#
# Packages come from the mirror of Debian that apt uses on this machine, or from the one that
# HECATON_DEBIAN_MIRROR names.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=bookworm-backports
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
MODULES="virtio_mem virtio_balloon virtio_blk ext4 zram"
# Each is loaded by `load NAME`.
MODULES_ON_DEMAND="xfs nbd virtio_net ublk_drv"
# name:package, each copied with the libraries that it needs.
PROGRAMS="stress-ng:stress-ng memtester:memtester mbw:mbw redis-server:redis-server redis-benchmark:redis-tools redis-cli:redis-tools mkfs.ext4:e2fsprogs e2fsck:e2fsprogs mkfs.xfs:xfsprogs xfs_repair:xfsprogs nbd-client:nbd-client"

what=${1:-guest}
dir="${CARGO_TARGET_DIR:-target}/guest"
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
# What the cache was built from: another script builds another guest.
stamp=$(sha256sum scripts/guest.sh scripts/guest-init.sh | sha256sum | cut -c 1-16)

exec 9>"$dir/lock"
# Tests ask for it in parallel.
flock 9

die() {
    echo "guest: $*" >&2
    exit 1
}

apt() {
    "$1" -o Dir::Etc::sourcelist="$dir/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$dir/apt/lists" -o Dir::Cache::pkgcache= \
        -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root "${@:2}"
}

# debian_of [OPTION...]: where the machine's sources get Debian itself from, going by what the
# archives say of themselves in their Release files: an address alone tells nothing.
debian_of() {
    # shellcheck disable=SC2016 # The names are apt's.
    apt-get "$@" indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 'Component: main' | sed -n 1p
}

mirror() {
    local found=${HECATON_DEBIAN_MIRROR:-} lists="$dir/apt/machine"
    [ -n "$found" ] || found=$(debian_of)
    if [ -z "$found" ]; then
        # A fresh image has sources, and no lists yet.
        echo "guest: reading the package lists of this machine's sources" >&2
        mkdir -p "$lists/partial"
        apt-get -o Dir::State::lists="$lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
            -o APT::Sandbox::User=root update -q >"$dir/apt/log" 2>&1 || true
        found=$(debian_of -o Dir::State::lists="$lists")
        rm -rf "$lists"
    fi
    [ -n "$found" ] || die "apt has no source of Debian on this machine, or cannot reach it;" \
        "name a mirror in HECATON_DEBIAN_MIRROR"
    echo "$found"
}

# Package lists of our own, so that the machine's are left as they are.
lists() {
    local mirror suite
    [ ! -e "$dir/apt/ready-$stamp" ] || return 0
    command -v apt-get >/dev/null || die "there is no apt-get, and the guest is made of Debian's packages"
    [ -e "$KEYRING" ] || die "there is no $KEYRING; install debian-archive-keyring"
    mkdir -p "$dir/apt/lists/partial"
    mirror=$(mirror)
    rm -f "$dir/apt/sources.list"
    # An address may have a password in it.
    (
        umask 077
        for suite in "$SUITE" "${SUITE%-backports}"; do
            echo "deb [signed-by=$KEYRING] $mirror $suite main"
        done >"$dir/apt/sources.list"
    )
    echo "guest: reading the package lists of $SUITE" >&2
    # Without that mode, lists that cannot be fetched are a warning.
    apt apt-get -o APT::Update::Error-Mode=any update -q >"$dir/apt/log" 2>&1 ||
        die "$(tail -n 2 "$dir/apt/log")"$'\n'"HECATON_DEBIAN_MIRROR can name another mirror"
    touch "$dir/apt/ready-$stamp"
}

# fetch DIRECTORY PACKAGE...: unpacked there.
fetch() {
    local to=$1 package
    shift
    lists
    rm -rf "$dir/debs" && mkdir -p "$dir/debs" "$to"
    echo "guest: fetching $*" >&2
    (cd "$dir/debs" && apt apt-get download -q "$@" >"$dir/apt/log" 2>&1) ||
        die "$(tail -n 2 "$dir/apt/log")"
    for package in "$dir"/debs/*.deb; do
        dpkg -x "$package" "$to"
    done
    rm -rf "$dir/debs"
}

# A kernel image is a program that unpacks what follows it: one zstd frame, whose magic number is looked for.
unpack_kernel() {
    local offset
    offset=$(LC_ALL=C grep -abo -m 1 -P '\x28\xb5\x2f\xfd' "$dir/vmlinuz" | head -n 1 | cut -d : -f 1)
    [ -n "$offset" ] || die "the kernel is not packed with zstd"
    # Bytes behind the frame are an error of zstd's, and none of the kernel's.
    tail -c "+$((offset + 1))" "$dir/vmlinuz" | zstd -qdc >"$dir/vmlinux" 2>/dev/null || true
    head -c 4 "$dir/vmlinux" | grep -q ELF || die "the kernel cannot be unpacked"
}

build_kernel() {
    local package
    lists
    package=$(apt apt-cache depends "linux-image-cloud-amd64/$SUITE" |
        awk '/Depends: linux-image-/ { print $2; exit }')
    [ -n "$package" ] || die "$SUITE has no linux-image-cloud-amd64"
    rm -rf "$dir/kernel"
    fetch "$dir/kernel" "$package/$SUITE"
    cp "$dir"/kernel/boot/vmlinuz-* "$dir/vmlinuz"
    unpack_kernel
}

# Copies a program to its place below the root, with the libraries that it needs.
copy_program() {
    local root=$1 program=$2 library
    install -D -m 755 "$program" "$root/bin/${program##*/}"
    while read -r library; do
        [ -e "$root$library" ] || install -D -m 755 "$(readlink -f "$library")" "$root$library"
    done < <(ldd "$program" | grep -o '/[^ ]*')
}

build_initramfs() {
    local root="$dir/root" entry program path version order
    rm -rf "$root" && mkdir -p "$root"/{bin,dev,proc,sys,tmp,root,etc,mnt}
    fetch "$dir/busybox" busybox-static
    install -m 755 "$dir/busybox/bin/busybox" "$root/bin/busybox"
    install -m 755 scripts/guest-init.sh "$root/init"
    for entry in $PROGRAMS; do
        program=${entry%%:*}
        path=$(PATH="$PATH:/usr/sbin:/sbin" command -v "$program") ||
            die "there is no $program to put in the guest; install the package ${entry##*:}"
        copy_program "$root" "$path"
    done
    version=$(ls "$dir/kernel/lib/modules")
    mkdir -p "$root/lib/modules"
    cp -r "$dir/kernel/lib/modules/$version" "$dir/modules-$$"
    mkdir -p "$dir/modules-tree/lib/modules"
    rm -rf "$dir/modules-tree/lib/modules/$version"
    mv "$dir/modules-$$" "$dir/modules-tree/lib/modules/$version"
    PATH="$PATH:/sbin:/usr/sbin" depmod -b "$dir/modules-tree" "$version"
    # In the order in which they must be loaded.
    for entry in $MODULES $MODULES_ON_DEMAND; do
        order="$root/lib/modules/order"
        case " $MODULES " in *" $entry "*) ;; *) order="$order.$entry" ;; esac
        { PATH="$PATH:/sbin:/usr/sbin" modprobe -d "$dir/modules-tree" -S "$version" \
            --show-depends "$entry" 2>/dev/null || true; } | awk '$1 == "insmod" { print $2 }' |
            while read -r path; do
                # busybox loads no compressed modules.
                case $path in
                *.xz) xz -dc "$path" >"$root/lib/modules/$(basename "${path%.xz}")" ;;
                *) cp "$path" "$root/lib/modules/" ;;
                esac
                path=$(basename "${path%.xz}")
                grep -qsx "$path" "$order" || echo "$path" >>"$order"
            done
    done
    rm -rf "$dir/modules-tree"
    (cd "$root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc --owner 0:0 | lz4 -qlc9) \
        >"$dir/initramfs"
    rm -rf "$root"
}

if [ ! -e "$dir/guest-$stamp" ]; then
    rm -f "$dir"/guest-*
    build_kernel
    build_initramfs
    touch "$dir/guest-$stamp"
fi
if [ "$what" != guest ] && [ ! -e "$dir/qemu-$stamp" ]; then
    rm -rf "$dir"/qemu-10 "$dir"/qemu-*
    fetch "$dir/qemu-10" "qemu-system-x86/$SUITE" "qemu-system-common/$SUITE" \
        "qemu-system-data/$SUITE" seabios
    touch "$dir/qemu-$stamp"
fi
if [ "$what" = libvirt ] && [ ! -e "$dir/libvirt-$stamp" ]; then
    rm -rf "$dir"/libvirt-*
    fetch "$dir/libvirt-11" "libvirt0/$SUITE" "libvirt-clients/$SUITE" \
        "libvirt-daemon-driver-qemu/$SUITE"
    mkdir -p "$dir/libvirt-11/bin"
    # With its own libraries and driver, which are not where it was built to look for them.
    cat >"$dir/libvirt-11/bin/virsh" <<EOF
#!/bin/sh
usr='$dir/libvirt-11/usr'
for lib in "\$usr"/lib/*/libvirt/connection-driver; do :; done
LIBVIRT_DRIVER_DIR=\$lib LD_LIBRARY_PATH=\${lib%/libvirt/*} exec "\$usr/bin/virsh" "\$@"
EOF
    chmod 755 "$dir/libvirt-11/bin/virsh"
    touch "$dir/libvirt-$stamp"
fi
echo "$dir"
