#!/usr/bin/env bash
# Runs a test and lets all of it stand still three times, as if its machine was paused.
# `make stand-still` has cargo-nextest start every test with it.
#
#   stand-still.sh COMMAND...
#
# STILL_S     for how long each time (2 s)
# STILL_MS    at most so long before it stands still, and between two times (500 ms)
# It takes root and control groups of version 2 (Linux 5.2).
set -uo pipefail
case " $* " in *" --list "*) exec "$@" ;; esac

base=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
group=$base/hecaton-still-$$
if [ -z "$base" ] || ! mkdir "$group"; then
    echo "$0: no control group can be made: run it as root where cgroup2 is mounted" >&2
    exit 1
fi

stand_still() {
    local ms
    for _ in 1 2 3; do
        ms=$((RANDOM * ${STILL_MS:-500} / 32768))
        sleep "$((ms / 1000)).$(printf %03d $((ms % 1000)))"
        grep -q . "$group/cgroup.procs" || return
        echo 1 >"$group/cgroup.freeze"
        sleep "${STILL_S:-2}"
        echo 0 >"$group/cgroup.freeze"
    done
}
stand_still <&- >&- 2>&- &
stills=$!

end() {
    kill "$stills" 2>/dev/null
    wait "$stills" 2>/dev/null
    echo 0 >"$group/cgroup.freeze"
    # What the test has left behind is moved up, so that the group can go.
    while read -r process; do
        echo "$process" >"$base/cgroup.procs"
    done <"$group/cgroup.procs" 2>/dev/null
    rmdir "$group"
}
trap end EXIT
# The runner ends a test that takes too long. The test may stand still just then.
trap 'echo 0 >"$group/cgroup.freeze"' TERM INT

(echo "$BASHPID" >"$group/cgroup.procs" && exec "$@")
