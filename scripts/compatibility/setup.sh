#!/usr/bin/env bash
# Installs the packages that rows of the compatibility table need, and only those that are missing.
#
# Debian packages go into the system; those of PyPI, npm, Go and Maven into target/compatibility.
# A package that cannot be installed is listed, and is no failure: its rows say "not tried".
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/compatibility")
log=$tools/setup.log
programs=$PWD/scripts/compatibility/programs
mkdir -p "$tools/jars" "$tools/bin" "$tools/go"
: >"$log"

lost() { echo "compatibility-setup: could not install $*; see $log"; }

debian='
    gcc g++ gcc-multilib musl-tools clang libclang-rt-14-dev gfortran valgrind gdb strace ltrace linux-perf
    stress-ng util-linux bubblewrap busybox-static libcap2-bin man-db libjemalloc2 libtcmalloc-minimal4
    libmimalloc2.0 nodejs npm openjdk-17-jdk-headless maven golang-go perl ruby php-cli r-base-core
    erlang-base elixir lua5.4 luajit ocaml-nox ghc sbcl guile-3.0 chezscheme clojure mono-runtime mono-mcs
    swi-prolog-nox tcl fpc octave pari-gp gnuplot-nox gawk mawk sqlite3 redis-server redis-tools memcached
    postgresql mariadb-server-core git xz-utils zstd bzip2 pigz p7zip-full brotli lrzip ffmpeg
    imagemagick graphviz jq pandoc python3-torch libxml2-utils xsltproc z3 glpk-utils samtools bwa
'
python='numpy pandas polars duckdb chdb pyarrow scipy scikit-learn lightgbm numba networkx igraph jax'
npm='@duckdb/node-api esbuild typescript@5 better-sqlite3@12 lokijs graphology immutable
    webpack webpack-cli lodash three'
maven='com.h2database:h2:2.3.232 org.hsqldb:hsqldb:2.7.4 org.duckdb:duckdb_jdbc:1.4.4.0
    org.apache.lucene:lucene-core:9.12.3'

install_debian() {
    local package root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo -n)
    local missing=()
    for package in $debian; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' && continue
        # A command that comes from elsewhere does as well.
        case $package in
            nodejs | npm | maven) command -v "${package/maven/mvn}" >/dev/null && continue ;;
            golang-go) command -v go >/dev/null && continue ;;
            openjdk-*) command -v javac >/dev/null && continue ;;
        esac
        missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    echo "compatibility-setup: installing ${missing[*]}"
    "${root[@]}" apt-get update -q >>"$log" 2>&1
    for package in "${missing[@]}"; do
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
            apt-get install -y -q --no-install-recommends "$package" >>"$log" 2>&1 ||
            lost "the Debian package $package"
    done
}

install_python() {
    local package
    [ -x "$tools/venv/bin/python" ] || python3 -m venv "$tools/venv" >>"$log" 2>&1
    for package in $python; do
        "$tools/venv/bin/pip" show -q "$package" >/dev/null 2>&1 ||
            "$tools/venv/bin/pip" install --quiet --no-input "$package" >>"$log" 2>&1 ||
            lost "the Python package $package"
    done
}

install_npm() {
    local package directory
    mkdir -p "$tools/npm"
    for package in $npm; do
        directory=$package
        [[ $package == @* ]] || directory=${package%@*}
        [ -d "$tools/npm/node_modules/$directory" ] ||
            npm install --silent --prefix "$tools/npm" "$package" >>"$log" 2>&1 ||
            lost "the npm package $package"
    done
}

install_maven() {
    local artifact name
    for artifact in $maven; do
        name=$(cut -d : -f 2 <<<"$artifact")
        [ ! -f "$tools/jars/$name.jar" ] || continue
        mvn -q -B dependency:copy "-Dartifact=$artifact" "-DoutputDirectory=$tools/jars" \
            -Dmdep.stripVersion=true >>"$log" 2>&1 || lost "the Maven artifact $artifact"
    done
}

# Programs with Go modules are built here, because modules come from the network.
install_go() {
    local program
    cp "$programs"/packages/*.go "$tools/go/"
    (
        cd "$tools/go" || exit
        [ -f go.mod ] || go mod init compatibility >>"$log" 2>&1
        for module in badger/v4:github.com/dgraph-io bigcache/v3:github.com/allegro bbolt:go.etcd.io; do
            grep -q "${module#*:}/${module%:*}" go.mod ||
                go get "${module#*:}/${module%:*}" >>"$log" 2>&1 || lost "the Go module ${module%:*}"
        done
        for program in badger caches; do
            # `-linkmode external` makes a dynamically linked program.
            CGO_ENABLED=1 go build -ldflags '-linkmode external' -o "$tools/bin/$program" "$program.go" \
                >>"$log" 2>&1 || lost "the Go program $program.go"
        done
    )
}

install_debian
install_python
if command -v npm >/dev/null; then install_npm; else lost "npm packages: there is no npm"; fi
if command -v mvn >/dev/null; then install_maven; else lost "Maven artifacts: there is no mvn"; fi
if command -v go >/dev/null; then install_go; else lost "Go modules: there is no go"; fi
