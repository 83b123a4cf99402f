#!/bin/sh
# Records the demand traces in this folder anew, or just those named:
#     traces/demand/record.sh [in-memory|graph|caching]...
# Needs cc, python3 and memcached (the Debian package), 3 GiB of free memory, and two processors that nothing else
# wants, or a higher priority than what else runs (nice -n -10); takes about six minutes.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The interpreter itself: python3 may be a script that starts it.
python=$(python3 -c 'import sys; print(sys.executable)')
python_version=$(python3 -c 'import platform; print("CPython", platform.python_version())')

# record NAME DESCRIPTION COMMAND...
record() {
    name=$1
    shift
    "$python" "$here/record.py" "$here/$name.demand" "$@"
}

record_in_memory() {
    cc -O2 -o "$scratch/als" "$here/als.c" -lm
    set -- 25000095 162541 62423 2
    record in-memory "als.c $* (gcc $(gcc -dumpfullversion) -O2)" "$scratch/als" "$@"
}

record_graph() {
    set -- 19 180000000 2
    record graph "pagerank.py $* ($python_version)" "$python" "$here/pagerank.py" "$@"
}

record_caching() {
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    set -- 950000 5000 60
    record caching-server "$(memcached -V) -m 1024 -t 1, for caching_client.py $*" \
        memcached -A -u nobody -l 127.0.0.1 -p "$port" -m 1024 -t 1 &
    record caching-client "caching_client.py $* ($python_version)" \
        "$python" "$here/caching_client.py" "$port" "$@"
    wait
}

[ $# -gt 0 ] || set -- in-memory graph caching
for name; do
    case $name in
    in-memory) record_in_memory ;;
    graph) record_graph ;;
    caching) record_caching ;;
    *) echo "record.sh: no program is called $name" >&2 && exit 2 ;;
    esac
done
