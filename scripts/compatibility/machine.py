"""Facts of this machine and of this checkout, for the document's header."""

import datetime
import os
import platform
import subprocess
from pathlib import Path


def _field(path, key):
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def facts(root):
    """Processors, memory, kernel, distribution, date and commit, as words."""
    memory_kib = int(_field("/proc/meminfo", "MemTotal").split()[0])
    release = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    return {
        "processors": f"{os.cpu_count()} processors ({_field('/proc/cpuinfo', 'model name')})",
        "memory": f"{memory_kib / (1 << 20):.0f} GiB",
        "kernel": f"Linux {platform.release().split('-')[0]}",
        "system": release,
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
        "date": datetime.date.today().isoformat(),
        "commit": commit(root),
    }


def commit(root):
    """The last commit that changed Hecaton's sources, with `+` if the checkout differs from it."""
    git, sources = ["git", "-C", str(root)], ["--", "crates", "Cargo.lock"]
    log = [*git, "log", "-1", "--format=%h", *sources]
    name = subprocess.run(log, capture_output=True, text=True).stdout.strip()
    clean = subprocess.run([*git, "diff", "--quiet", "HEAD", *sources])
    return name + ("" if clean.returncode == 0 else "+")
