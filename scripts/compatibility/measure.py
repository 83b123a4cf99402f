"""Runs one row natively and on Hecaton, and compares the two."""

import itertools
import json
import re
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import process

MIB = 1 << 20
MIN_LOCAL_BYTES = 16 * MIB
PREPARE_LIMIT_SECONDS = 300
NATIVE_LIMIT_SECONDS = 120
# The limit on Hecaton, in native times and seconds beside.
LIMIT_FACTOR, LIMIT_BESIDE_SECONDS = 30, 60
# A row that has taken this long on Hecaton gets no further round.
ENOUGH_SECONDS = 5

SAME, DIFFERS, FAILS, HANGS, REFUSED = "same", "differs", "fails", "hangs", "refused"
NOT_TRIED, NATIVE_FAILS, NOT_MEASURED = "not tried", "native fails", "not measured"


@dataclass
class Result:
    """What was measured of a row. Times are medians in seconds."""

    name: str
    outcome: str
    detail: str = ""
    native_seconds: float = 0.0
    hecaton_seconds: float = 0.0
    peak_bytes: int = 0
    local: str = ""
    faults: int = 0
    pages_in: int = 0
    pages_out: int = 0
    rounds: int = 0
    commit: str = ""
    counts: dict = field(default_factory=dict)

    def record(self):
        """For JSON."""
        return asdict(self)


class Bench:
    """The command, its cluster, and the environment of all rows."""

    def __init__(self, hecaton, cluster, environment, requirements, log=sys.stderr):
        self.hecaton = hecaton
        self.cluster = cluster
        self.environment = environment
        self.requirements = requirements
        self.log = log

    def measure(self, row):
        """Never raises for what the row's programs do."""
        if row.skip:
            return Result(row.name, NOT_TRIED, row.skip)
        lacking = self.requirements.missing(row)
        if lacking:
            return Result(row.name, NOT_TRIED, f"needs {lacking}")
        with tempfile.TemporaryDirectory(prefix="hecaton-row-") as directory:
            return self._measure_in(row, directory)

    def _measure_in(self, row, directory):
        if row.prepare:
            made = self._run(["sh", "-ec", row.prepare], directory, PREPARE_LIMIT_SECONDS)
            if made.status != 0:
                return Result(row.name, NATIVE_FAILS, f"its inputs: {last_line(made.error)}")
        command = ["sh", "-c", row.shell] if row.shell else self._split(row.run)
        natively = lambda sample: self._run(  # noqa: E731
            command, directory, NATIVE_LIMIT_SECONDS, row.outputs, sample
        )
        reference = natively(True)
        if reference.status is None or (reference.status != 0 and not row.expect):
            why = last_line(reference.error)
            return Result(row.name, NATIVE_FAILS, f"status {reference.status}: {why}")

        local = row.local or f"{max(MIN_LOCAL_BYTES, reference.peak_bytes // 2) // MIB}M"
        result = Result(row.name, SAME, local=local, peak_bytes=reference.peak_bytes)
        native, paged, stats = [reference.seconds], [], []
        limit = LIMIT_FACTOR * reference.seconds + LIMIT_BESIDE_SECONDS
        for number in range(row.rounds):
            if number or row.rounds > 1:
                again = natively(False)
                native.append(again.seconds)
                if (again.status, again.digests) != (reference.status, reference.digests):
                    result.outcome = NATIVE_FAILS
                    result.detail = f"two native runs differ: {changed(reference, again)}"
                    return result
            ended, counted = self.on_hecaton(command, directory, local, limit, row.outputs)
            result.outcome, result.detail = judge(reference, ended, limit, bool(counted))
            if result.outcome in (SAME, DIFFERS):
                paged.append(ended.seconds)
                stats.append(counted)
            if result.outcome != SAME:
                self.cluster.check()
                break
            if sum(paged) > ENOUGH_SECONDS:
                break
        # The first native run was sampled, and read inputs from the disk.
        result.native_seconds = statistics.median(native[1:] or native)
        if paged:
            result.hecaton_seconds = statistics.median(paged)
            result.rounds = len(paged)
            middle = stats[len(stats) // 2]
            result.faults = middle.get("faults", 0)
            result.pages_in = middle.get("pages_in", 0)
            result.pages_out = middle.get("pages_out", 0)
        return result

    def on_hecaton(self, command, directory, local, limit, outputs=()):
        """How `command` ended under `hecaton run`, and the pager's statistics."""
        file = Path(directory, ".stats")
        file.unlink(missing_ok=True)
        wrapped = [self.hecaton, "run", "--manager", self.cluster.manager, "--local", local]
        wrapped += ["--stats", str(file), "--", *command]
        ended = self._run(wrapped, directory, limit, outputs)
        try:
            return ended, json.loads(file.read_text()).get("pager") or {}
        except (OSError, ValueError):
            return ended, {}

    def _split(self, text):
        """Words of `run`, with the variables that rows may use."""
        words = shlex.split(text)
        return [
            re.sub(r"\$([A-Z_]+)", lambda found: self.environment.get(found[1], found[0]), word)
            for word in words
        ]

    def _run(self, command, directory, limit, outputs=(), sample=False):
        return process.run(
            command, directory, self.environment, limit, outputs, sample, self.cluster.keep()
        )


def judge(reference, ended, limit, started):
    """The outcome of a run beside the native one, and its detail. A refused program never starts."""
    if ended.status is None:
        return HANGS, f"no end within {limit:.0f} s"
    said = [line for line in ended.error.splitlines() if line.startswith(("error:", "hecaton"))]
    if ended.status != exit_status(reference.status):
        line = said[-1] if said else last_line(ended.error)
        if said and not started:
            return REFUSED, line
        return FAILS, f"status {ended.status}: {line}"
    if ended.digests != reference.digests:
        return DIFFERS, changed(reference, ended)
    return SAME, ""


def exit_status(status):
    """The exit status that `hecaton run` has for a program that ended with `status`."""
    return status if status >= 0 else 128 - status


def changed(one, other):
    """How the outputs differ."""
    if one.status != other.status:
        return f"status {one.status} and {other.status}"
    names = [name for name in one.digests if one.digests[name] != other.digests[name]]
    if names != [".stdout"]:
        return ", ".join("standard output" if name == ".stdout" else name for name in names)
    lines = [text.decode(errors="replace").splitlines() for text in (one.stdout, other.stdout)]
    for line, instead in itertools.zip_longest(*lines, fillvalue="nothing"):
        if line != instead:
            return f"`{instead[:80]}` in place of `{line[:80]}`"
    return "standard output, far from its start"


def last_line(text):
    """The last line of an error output that tells of an error, or the last, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(fail|error|ERROR)\b", line)]
    return (telling or lines or ["no error output"])[-1][:160]
