"""Measures which programs run on Hecaton as they do natively, and prints the table.

    python3 scripts/compatibility [--only PATTERN] [--write] [--json] [--list]

Results are kept in target/compatibility/results.json, row by row. `--only` measures rows again
whose name or section matches, and keeps the results of the others.
"""

import argparse
import errno
import fcntl
import json
import os
import re
import signal
import sys
import time
import tomllib
from pathlib import Path

import document
import machine
import process
import row
import stressors
from cluster import Cluster
from measure import Bench, Result

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "compatibility"
DOCUMENT = ROOT / "docs" / "compatibility.md"
RESULTS = TOOLS / "results.json"
ATTEMPTS = 60


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PATTERN", help="measure only rows that match")
    parser.add_argument("--missing", action="store_true", help="measure only rows without result")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--kept", action="store_true", help="measure nothing; print kept results")
    return parser.parse_args()


def environment():
    """Variables of all rows: a small, fixed set, so that runs do not depend on who starts them."""
    venv = TOOLS / "venv" / "bin" / "python"
    python = venv if venv.exists() else Path(sys.executable)
    paths = [os.environ["PATH"], "/usr/lib/postgresql/15/bin", "/usr/sbin", "/sbin"]
    kept = {key: os.environ[key] for key in ("HOME", "GOFLAGS", "GOPROXY") if key in os.environ}
    return {
        **kept,
        "PATH": ":".join(paths),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHON": str(python),
        "PYTHONHASHSEED": "0",
        "NODE_PATH": str(TOOLS / "npm" / "node_modules"),
        "ROOT": str(ROOT),
        "TOOLS": str(TOOLS),
        "PROGRAMS": str(row.HERE / "programs"),
    }


def sections_of_all():
    """Sections of the rows, and the one of stress-ng."""
    notes = tomllib.loads((row.HERE / "stress-ng.toml").read_text())["notes"]
    return row.load_sections(), stressors.section(notes)


def measure(rows, options):
    """Measures what is asked for, and keeps each result as soon as it is there."""
    hecaton = Path(TOOLS.parent, "release", "hecaton")
    if not hecaton.exists():
        sys.exit(f"no {hecaton}; run `make build`")
    pattern = re.compile(options.only or "")
    chosen = [one for one in rows if pattern.search(one.name) or pattern.search(one.section)]
    if options.missing:
        chosen = [one for one in chosen if one.name not in kept()]
    variables, commit = environment(), machine.commit(ROOT)
    process.adopt_orphans()
    with Cluster(str(hecaton)) as cluster:
        bench = Bench(str(hecaton), cluster, variables, row.Requirements(variables))
        for number, one in enumerate(chosen, 1):
            begun = time.monotonic()
            result = bench.measure(one)
            result.commit = commit
            keep(result)
            took = time.monotonic() - begun
            said = f"[{number}/{len(chosen)}] {one.name}: {result.outcome} {result.detail}"
            times = f"{result.native_seconds:.2f} s, {result.hecaton_seconds:.2f} s"
            print(f"{said} ({times}; {took:.0f} s)", file=sys.stderr, flush=True)


def kept():
    """The results in results.json, by name of row."""
    if not RESULTS.exists():
        return {}
    return {entry["name"]: Result(**entry) for entry in json.loads(RESULTS.read_text())}


def keep(result):
    """Adds one result to results.json, which another measurement may write at the same time."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = [one.record() for one in {**kept(), result.name: result}.values()]
        text = json.dumps(entries, indent=1) + "\n"
        # Some stressors fill the disk for a moment.
        for attempt in range(ATTEMPTS):
            try:
                RESULTS.with_suffix(".new").write_text(text)
                break
            except OSError as error:
                if error.errno != errno.ENOSPC or attempt == ATTEMPTS - 1:
                    raise
                time.sleep(1)
        RESULTS.with_suffix(".new").replace(RESULTS)


def main():
    """Measures and prints."""
    # So that the cluster and the temporary directories go with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = arguments()
    sections, stress = sections_of_all()
    rows = [one for section in [*sections, stress] for one in section.rows]
    if options.list:
        print("\n".join(one.name for one in rows))
        return
    TOOLS.mkdir(parents=True, exist_ok=True)
    if not (options.only or options.missing or options.kept):
        RESULTS.unlink(missing_ok=True)
    if not options.kept:
        measure(rows, options)
    results = kept()
    if options.json:
        print(json.dumps([result.record() for result in results.values()], indent=1))
        return
    text = document.markdown(sections, results, machine.facts(ROOT))
    text += document.stress(stress, results)
    if options.write:
        DOCUMENT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
