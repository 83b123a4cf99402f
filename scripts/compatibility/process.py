"""Runs one command with a time limit, and leaves none of its processes behind."""

import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Smaps_rollup of more processes than this takes too long to sum.
MAX_SAMPLED = 64
GRACE_SECONDS = 3
REAP_SECONDS = 0.2


@dataclass
class Ended:
    """How a command ended. `status` is as `subprocess` has it, and None at the time limit."""

    status: int | None
    seconds: float
    peak_bytes: int = 0
    digests: dict = field(default_factory=dict)
    stdout: bytes = b""
    error: str = ""


def adopt_orphans():
    """Makes this process the parent of orphaned descendants, so that it finds and ends them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # An orphan that signals its parent, as workers of stress-ng do, now signals this process. A
    # handler, unlike SIG_IGN, is not inherited by programs.
    for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def children_of_all():
    """Parents of all processes, as a map of parent to children."""
    children = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except OSError:
            continue
        parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
        children.setdefault(parent, []).append(int(name))
    return children


def descendants(keep):
    """All descendants of this process, except those of the processes in `keep`, and these."""
    children, found, queue = children_of_all(), [], [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in keep:
                found.append(child)
                queue.append(child)
    return found


def anonymous_bytes(pids):
    """Anonymous resident memory of processes; a page of several processes counts once."""
    total = 0
    for pid in pids[:MAX_SAMPLED]:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(b"Pss_Anon:"))
    return total * 1024


def reap_and_kill(keep):
    """Kills all descendants but those in `keep`. True if there were any."""
    found = descendants(keep)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for pid in found:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
    return bool(found)


def digest(path):
    """SHA-256 of a file, or of all files of a directory with their names."""
    path = Path(path)
    if path.is_dir():
        whole = hashlib.sha256()
        for file in sorted(path.rglob("*")):
            if file.is_file():
                whole.update(f"{file.relative_to(path)} {digest(file)}\n".encode())
        return whole.hexdigest()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "no file"


def _remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run(command, directory, environment, limit_seconds, outputs=(), sample=False, keep=()):
    """Runs `command` in `directory`, and ends all that it started, at the limit or after its end."""
    for name in outputs:
        _remove(Path(directory, name))
    stdout, stderr = Path(directory, ".stdout"), Path(directory, ".stderr")
    with stdout.open("wb") as out, stderr.open("wb") as err:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, cwd=directory, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        )  # fmt: skip
        peak = _wait(process, begun + limit_seconds, sample, keep)
        seconds = time.monotonic() - begun
    status = process.returncode
    if status is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    end = time.monotonic() + 10
    while reap_and_kill(keep) and time.monotonic() < end:
        time.sleep(0.05)
    digests = {name: digest(Path(directory, name)) for name in (".stdout", *outputs)}
    with stdout.open("rb") as file:
        head = file.read(4096)
    tail = stderr.read_bytes()[-4096:].decode(errors="replace").strip()
    return Ended(status, seconds, peak, digests, head, tail)


def _wait(process, deadline, sample, keep):
    """Waits for the end, or the deadline. The peak of anonymous memory, if asked for."""
    peak, pause = 0, 0.005
    while process.poll() is None and time.monotonic() < deadline:
        if sample:
            begun = time.monotonic()
            peak = max(peak, anonymous_bytes(descendants(keep)))
            pause = max(0.01, 4 * (time.monotonic() - begun))
            time.sleep(pause)
        else:
            try:
                process.wait(min(REAP_SECONDS, max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                pass
        _reap_orphans({process.pid, *keep})
    return peak


def _reap_orphans(others):
    """Reaps orphans that have ended. Without it the table of processes fills, as `init` prevents."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if int(pid) not in others:
            os.waitpid(int(pid), os.WNOHANG)
