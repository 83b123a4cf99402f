#!/usr/bin/env bash
# The guest of guest.sh with a program in its /bin, and further files.
#
#   guest-with.sh INITRAMFS PROGRAM ROOT OUTPUT
#
# PROGRAM is copied into ROOT, the directory of the further files, with the libraries that it needs. OUTPUT is
# INITRAMFS and all of that.
set -euo pipefail

initramfs=$(realpath "$1") program=$(realpath "$2") output=$(realpath "$4")
cd "$3"
mkdir -p bin
cp "$program" bin
strip "bin/${program##*/}"
for library in $(ldd "$program" | grep -o '/[^ ]*'); do
    install -D "$(readlink -f "$library")" ".$library"
done
chmod -R u=rwx .
# The kernel unpacks one archive after the other. An archive of lz4 has no end, and so is the last.
{
    find . | cpio --quiet -o -H newc --owner 0:0 | gzip -1
    cat "$initramfs"
} >"$output"
