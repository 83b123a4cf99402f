#!/usr/bin/env python3
"""Sums up a run of scripts/test.sh: the slowest tests, what was skipped, what failed, and the counts.

    summary.py STAGES JUNIT

STAGES: lines of outcome, name and seconds (or the reason of one that was skipped), with tabs between.
JUNIT: what the test runner wrote. A test that finds its machine lacking something passes and prints
`skipped: NAME: REASON`.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SLOWEST = 10


def main(stages_file, junit_file):
    passed = 0
    failed, skipped, times = [], [], []
    for line in Path(stages_file).read_text().splitlines():
        outcome, name, note = line.split("\t")
        # The tests count themselves, if they ran.
        if name == "tests" and Path(junit_file).exists():
            continue
        if outcome == "passed":
            passed += 1
        elif outcome == "failed":
            failed.append(f"stage {name}, after {note} s")
        else:
            skipped.append(f"{name}: {note}")

    cases = ElementTree.parse(junit_file).iter("testcase") if Path(junit_file).exists() else []
    for case in cases:
        name = f"{case.get('classname')} {case.get('name')}"
        times.append((float(case.get("time", 0)), name))
        reasons = [
            line.removeprefix("skipped: ")
            for line in (case.findtext("system-out") or "").splitlines()
            if line.startswith("skipped: ")
        ]
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif reasons:
            skipped.append(f"{name}: {'; '.join(reasons)}")
        else:
            passed += 1

    if times:
        together = sum(seconds for seconds, _ in times)
        print(f"\nThe slowest of {len(times)} tests, which took {together:.0f} s together:")
        for seconds, name in sorted(times, reverse=True)[:SLOWEST]:
            print(f"  {seconds:6.1f} s  {name}")
    for title, names in (("Skipped, and why:", skipped), ("Failed:", failed)):
        if names:
            print(title)
            print("\n".join(f"  {name}" for name in names))
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or not times else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
