"""Writes the results as Markdown."""

import measure
import stressors

MIB = 1 << 20

HEADER = """# Compatibility

Made by `make compatibility`. Do not edit it by hand: the rows are in
[scripts/compatibility/rows](../scripts/compatibility/rows), and `make compatibility` measures and
writes all of it again, in about an hour. `make compatibility-setup` installs the packages that rows
need. Use a machine that nobody else works on: some stressors fill its disk for a moment.

Each row runs natively, and then under `hecaton run --local SIZE`, where SIZE is **half of the
native peak** of anonymous memory, and at least 16 MiB; small programs that test one interface of
the kernel run with 32 MiB. The exit status, the standard output and the files that the program
makes must be the same.

| | |
|---|---|
| machine | {processors}, {memory}, {kernel}, {system}; program, pager and three donors on it |
| user | {user} |
| date | {date} |
| commit | {commit} |

**Times are noisy.** The machine is virtual, and other builds ran on it meanwhile. Programs run
three times natively and three times on Hecaton, in turn, and less often if they take more than
5 s there; the table has the medians. A short time is mostly that of the start.

| outcome | rows |
|---|---|
{counts}

- **same**: exit status and all outputs are those of the native run.
- **refused**: `hecaton run` does not start the program, and says why.
- **differs**, **fails**: the program ends in another way than natively.
- **hangs**: it has not ended within 60 s and 30 times the native time. It may only be slow.
- **not measured**: the last measurement was of other rows, or ended early.
- **not tried**: this machine lacks what the row needs. **native fails**: so does the native run.
"""

COLUMNS = """| program | native | peak, local | Hecaton | slowdown | pages in, out | note |
|---|---|---|---|---|---|---|
"""

STRESS = """## stress-ng

Each stressor of the classes `vm`, `memory` and `os` runs for {seconds} s with one instance and `--verify`,
natively and with 64 MiB local. stress-ng itself leaves out the stressors that it calls
pathological. "Not natively" counts stressors that this machine cannot run without Hecaton either.

| class | stressors | pass natively | of them pass on Hecaton | not natively | not tried |
|---|---|---|---|---|---|
"""

STRESS_ROWS = """
These pass natively, and not on Hecaton:

| stressor | Hecaton | note |
|---|---|---|
"""

ORDER = [
    measure.SAME, measure.REFUSED, measure.DIFFERS, measure.FAILS, measure.HANGS,
    measure.NATIVE_FAILS, measure.NOT_TRIED, measure.NOT_MEASURED,
]  # fmt: skip


def markdown(sections, results, facts):
    """The whole document. `results` are by name of row."""
    rows = [row for section in sections for row in section.rows]
    results = {row.name: measure.Result(row.name, measure.NOT_MEASURED) for row in rows} | results
    counted = [results[row.name] for row in rows if row.name in results]
    commits = sorted({result.commit for result in counted if result.commit})
    text = HEADER.format(
        **{**facts, "commit": ", ".join(commits) or facts["commit"]}, counts=_counts(rows, results)
    )
    for section in sections:
        text += f"\n## {section.title}\n\n{section.about.strip()}\n\n".replace("\n\n\n\n", "\n\n")
        text += COLUMNS
        text += "".join(_line(row, results[row.name]) for row in section.rows)
    return _wrapped(text)


def stress(section, results):
    """The part of the document about stress-ng."""
    found = [results[row.name] for row in section.rows if row.name in results]
    if not found:
        return ""
    text = "\n" + STRESS.format(seconds=stressors.SECONDS)
    for group, of_group in stressors.by_class(found):
        count = lambda *outcomes: sum(r.outcome in outcomes for r in of_group)  # noqa: E731
        away = count(measure.NATIVE_FAILS), count(measure.NOT_TRIED)
        passed = len(of_group) - sum(away)
        good = count(measure.SAME)
        text += f"| {group} | {len(of_group)} | {passed} | {good} | {away[0]} | {away[1]} |\n"
    notes = {row.name: row.note for row in section.rows}
    bad = [r for r in found if r.outcome not in (measure.SAME, measure.NATIVE_FAILS)]
    failed = [r for r in bad if r.outcome != measure.NOT_TRIED]
    if failed:
        text += STRESS_ROWS
        for r in failed:
            text += f"| {r.name} | {r.outcome} | {_note(notes[r.name], r.detail)} |\n"
    away = [r for r in bad if r.outcome == measure.NOT_TRIED]
    if away:
        names = "; ".join(f"`{r.name}` ({r.detail})" for r in away)
        text += f"\nNot tried, because they may harm the machine: {names}.\n"
    missing = [r.name.removeprefix("stress-ng --") for r in found if r.outcome == measure.NATIVE_FAILS]
    if missing:
        text += f"\nNot natively: {', '.join(missing)}.\n"
    return _wrapped(text)


def _wrapped(text):
    """Breaks lines of more than 100 columns, except those of tables."""
    lines = []
    for line in text.splitlines():
        while len(line) > 100 and not line.startswith("|"):
            at = line.rindex(" ", 0, 100)
            lines.append(line[:at])
            line = line[at + 1 :]
        lines.append(line)
    return "\n".join(lines) + "\n"


def _counts(rows, results):
    lines = []
    for outcome in ORDER:
        of_outcome = [row for row in rows if results[row.name].outcome == outcome]
        if of_outcome:
            programs = sum(row.program for row in of_outcome)
            lines.append(f"| {outcome} | {len(of_outcome)}, of them {programs} programs |")
    return "\n".join(lines)


def _line(row, result):
    ran = result.outcome in (measure.SAME, measure.DIFFERS)
    slowdown = pages = ""
    hecaton = f"**{result.outcome}**" if result.outcome != measure.SAME else "same"
    if ran:
        hecaton += f", {_seconds(result.hecaton_seconds)}"
        pages = f"{result.pages_in:,}, {result.pages_out:,}"
        if not row.untimed and result.native_seconds:
            slowdown = f"{result.hecaton_seconds / result.native_seconds:.1f}"
    native = _seconds(result.native_seconds) if result.native_seconds else ""
    peak = f"{result.peak_bytes / MIB:.0f}, {result.local[:-1]} MiB" if result.peak_bytes else ""
    name = row.name.replace("|", "\\|")
    detail = result.detail if result.outcome != measure.SAME else _local(row, result)
    note = _note(row.note, detail)
    return f"| {name} | {native} | {peak} | {hecaton} | {slowdown} | {pages} | {note} |\n"


def _local(row, result):
    """Says so where the program's memory was not in the pool, although it did not fit."""
    mib = int(result.local.removesuffix("M") or 0)
    if result.pages_out or row.note or result.peak_bytes < 1.2 * mib * MIB:
        return ""
    return "runs on local memory"


def _seconds(seconds):
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _note(note, detail):
    both = "; ".join(part for part in (detail, note) if part)
    return both.replace("|", "\\|").replace("\n", " ")
