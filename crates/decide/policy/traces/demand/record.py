"""Records what memory a program uses, for record.sh: record.py FILE DESCRIPTION COMMAND...

Runs COMMAND until it ends, without huge pages, and writes two lines of header, then one for each second: the pages that it had
in memory at the end of it, and of these the pages that it referenced in it. The kernel tells both (proc(5):
smaps_rollup, clear_refs), of the one process that COMMAND becomes.
"""
import ctypes
import os
import subprocess
import sys
import time

PR_SET_THP_DISABLE = 41
PAGE_KIB = 4


def pages(pid):
    """Resident and referenced; none of a process that has ended."""
    with open("/proc/%d/smaps_rollup" % pid) as rollup:
        fields = dict(line.split(":", 1) for line in rollup.readlines()[1:])
    return tuple(int(fields[name].split()[0]) // PAGE_KIB for name in ("Rss", "Referenced"))


def clear_referenced(pid):
    with open("/proc/%d/clear_refs" % pid, "w") as clear_refs:
        clear_refs.write("1")


path, description, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
    sys.exit("huge pages: " + os.strerror(ctypes.get_errno()))
program = subprocess.Popen(command)
seconds = []
began = time.monotonic()
try:
    while program.poll() is None:
        clear_referenced(program.pid)
        time.sleep(max(0, began + len(seconds) + 1 - time.monotonic()))
        seconds.append(pages(program.pid))
except (ProcessLookupError, FileNotFoundError):
    pass  # It ended in this second, which is left out.
with open(path, "w") as trace:
    trace.write("# %s\n# pages in memory, pages referenced; a line a second\n" % description)
    trace.writelines("%d %d\n" % second for second in seconds)
sys.exit(program.wait())
