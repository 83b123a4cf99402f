#!/bin/sh
# Records the page traces in this folder anew, or just those named:
#     traces/record.sh [sort|quicksort|heat|python|sqlite|compile|xz]...
# Needs cargo, cc, gcc, valgrind, python3, sqlite3 and xz; takes about a quarter of an hour. Each
# program's references go from valgrind's lackey through a pipe into examples/record_trace.rs, which
# keeps at most the number of entries given below.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
cargo build --quiet --release --example record_trace
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
recorder=$target/release/examples/record_trace
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# record NAME MAX_ENTRIES COMMAND...
record() {
    name=$1 max=$2
    shift 2
    mkfifo "$scratch/$name"
    "$recorder" "$here/$name.trace" "$max" <"$scratch/$name" &
    reader=$!
    valgrind --quiet --tool=lackey --trace-mem=yes --log-fd=9 "$@" \
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
    record sort 150000 sort --parallel=1 -S 14M -o "$scratch/sorted" "$scratch/lines"
}

trace_quicksort() {
    cc -O2 -o "$scratch/quicksort.bin" "$here/quicksort.c"
    record quicksort 150000 "$scratch/quicksort.bin" 1000000
}

trace_heat() {
    cc -O2 -o "$scratch/heat.bin" "$here/heat.c"
    record heat 150000 "$scratch/heat.bin" 300 16
}

trace_python() {
    # The interpreter itself: python3 may be a script that starts it.
    record python 150000 "$(python3 -c 'import sys; print(sys.executable)')" "$here/objects.py"
}

trace_sqlite() {
    record sqlite 150000 sqlite3 :memory: ".read $here/queries.sql"
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
    record compile 150000 "$(gcc -print-prog-name=cc1)" -quiet -O2 -o /dev/null "$scratch/unit.c"
}

trace_xz() {
    cat "$here"/../src/*.rs "$here"/../src/*/*.rs "$here"/*.c /usr/lib/*/libc.so.6 \
        >"$scratch/mixed"
    record xz 120000 xz --threads=1 -4 --keep --stdout "$scratch/mixed"
}

for name in ${*:-sort quicksort heat python sqlite compile xz}; do
    "trace_$name"
done
