"""Makes a row of each stressor of stress-ng's classes `vm`, `memory` and `os`."""

import shutil
import subprocess

from row import Row, Section

CLASSES = ("vm", "memory", "os")
SECTION = "stress-ng"
PREFIX = "stress-ng --"
LOCAL = "64M"
SECONDS = 2

# Stressors that may harm the machine that they run on, for longer than they run.
HARMFUL = {
    "cpu-online": "takes processors offline",
    "memhotplug": "takes memory offline",
    "sysfs": "writes to files of /sys, which may stop the machine",
    "watchdog": "may reset the machine",
}


def names(group):
    """The stressors of a class, without those that stress-ng itself calls pathological."""
    command = ["stress-ng", "--class", f"{group}?"]
    answer = subprocess.run(command, capture_output=True, text=True)
    return (answer.stdout + answer.stderr).partition("stressors:")[2].split()


def section(notes):
    """One row a stressor. `notes` are those of rows/*.toml for stressors, by name."""
    rows = []
    if shutil.which("stress-ng"):
        for name in sorted({name for group in CLASSES for name in names(group)}):
            rows.append(_row(name, notes.get(name, "")))
    return Section(SECTION, "", rows)


def _row(name, note):
    if name in HARMFUL:
        return Row(PREFIX + name, SECTION, run="true", skip=HARMFUL[name], note=note)
    # The log goes to the error output: it holds process numbers and times.
    shell = f"exec stress-ng --{name} 1 --timeout {SECONDS} --verify --temp-path . >&2"
    return Row(
        PREFIX + name, SECTION, shell=shell, needs=["stress-ng"], local=LOCAL, rounds=1,
        untimed=True, note=note,
    )  # fmt: skip


def by_class(results):
    """For each class: its name and the results of its stressors."""
    if not shutil.which("stress-ng"):
        return []
    found = {result.name.removeprefix(PREFIX): result for result in results}
    return [(group, [found[name] for name in names(group) if name in found]) for group in CLASSES]
