#!/bin/sh
# Records the page traces in this folder anew, or just those named:
#     traces/record.sh [sort|sort-threads|quicksort|heat|python|sqlite|compile|xz|redis|sort-demo]...
# Needs cargo, cc, gcc, valgrind, python3, sqlite3, xz, redis-server and redis-benchmark; takes about
# half an hour. Each program's references go from valgrind's lackey through a pipe into
# examples/record_trace.rs, which keeps at most the number of entries given below.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
traces=${*:-sort quicksort heat python sqlite compile xz redis}
# The recorder is built with the traces in it, and so needs a file for each.
for name in $traces; do
    [ -e "$here/$name.trace" ] || : >"$here/$name.trace"
done
cargo build --quiet --release --example record_trace
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
recorder=$target/release/examples/record_trace
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# record NAME MAX_ENTRIES FILTER_PAGES COMMAND...
record() {
    name=$1 max=$2 filter=$3
    shift 3
    mkfifo "$scratch/$name"
    "$recorder" "$here/$name.trace" "$max" "$filter" <"$scratch/$name" &
    reader=$!
    valgrind --quiet --tool=lackey --trace-mem=yes --trace-sched=yes --log-fd=9 "$@" \
        9>"$scratch/$name" >"$scratch/$name.out" 2>&1 &
    program=$!
    # The recorder may have enough before the program ends.
    wait "$reader"
    kill -KILL "$program" 2>/dev/null || true
    wait "$program" 2>/dev/null || true
}

trace_sort() {
    python3 -c '
import random
random.seed(1)
for _ in range(30000):
    print("%030x" % random.getrandbits(120), "x" * random.randrange(540))' >"$scratch/lines"
    record sort 150000 64 sort --parallel=1 -S 14M -o "$scratch/sorted" "$scratch/lines"
}

# Not one of the set. sort has threads from 131072 lines on: short ones, to keep it small. Each of four threads sorts a
# quarter of them; then two merge two quarters each.
trace_sort_threads() {
    python3 -c '
import random
random.seed(1)
for _ in range(140000):
    print("%016x" % random.getrandbits(64), "x" * random.randrange(20))' >"$scratch/lines"
    record sort-threads 200000 64 sort --parallel=4 -S 40M -o "$scratch/sorted" "$scratch/lines"
}

# The sort of `make demo`, a sixteenth as large, from its beginning to its end. Not one of the set:
# docs/eviction.md tells what it is for.
trace_sort_demo() {
    base64 -w 511 /dev/urandom | head -c 16M >"$scratch/lines"
    LC_ALL=C record sort-demo 1000000 64 sort --parallel=2 -S 18M -o "$scratch/sorted" \
        "$scratch/lines"
}

trace_quicksort() {
    cc -O2 -o "$scratch/quicksort.bin" "$here/quicksort.c"
    record quicksort 150000 64 "$scratch/quicksort.bin" 1000000
}

trace_heat() {
    cc -O2 -o "$scratch/heat.bin" "$here/heat.c"
    record heat 150000 64 "$scratch/heat.bin" 300 16
}

trace_python() {
    # The interpreter itself: python3 may be a script that starts it.
    record python 150000 64 "$(python3 -c 'import sys; print(sys.executable)')" "$here/objects.py"
}

trace_sqlite() {
    record sqlite 150000 64 sqlite3 :memory: ".read $here/queries.sql"
}

trace_compile() {
    python3 -c '
for n in range(500):
    print("""int f%d(int *a, int n) { int s = %d; for (int i = 0; i < n; i++) {
if (a[i] %% %d == 1) s += a[i] * %d; else s ^= a[(i * %d) %% n]; } return s %% 77; }"""
        % (n, n, n % 9 + 2, n + 3, n + 1))
print("int main(void) { int a[9] = {0}; return 0" )
for n in range(500): print("+ f%d(a, 9)" % n)
print("; }")' >"$scratch/unit.c"
    record compile 150000 64 "$(gcc -print-prog-name=cc1)" -quiet -O2 -o /dev/null "$scratch/unit.c"
}

trace_xz() {
    cat "$here"/../src/*.rs "$here"/../src/*/*.rs "$here"/*.c /usr/lib/*/libc.so.6 \
        >"$scratch/mixed"
    record xz 120000 64 xz --threads=1 -4 --keep --stdout "$scratch/mixed"
}

# Writes random keys, then reads them until the server is gone. A batch of requests touches some 200
# pages of the server itself: with the others' filter, they would be nearly all of the trace.
trace_redis() {
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    (
        until redis-cli -p "$port" ping; do sleep 1; done
        redis-benchmark -p "$port" -t set -c 4 -P 16 -r 4000 -d 2000 -n 6000
        while redis-benchmark -p "$port" -t get -c 4 -P 16 -r 4000 -n 10000; do :; done
    ) >"$scratch/requests" 2>&1 &
    requests=$!
    record redis 40000 512 redis-server --port "$port" --bind 127.0.0.1 --save "" \
        --appendonly no --dir "$scratch"
    kill "$requests" 2>/dev/null || true
    wait "$requests" || true
}

for name in $traces; do
    "trace_$(echo "$name" | tr - _)"
done
