"""Reads the rows of the table from TOML files, and checks what each row needs.

A file holds one section of the table: `title`, `about`, and an array `row` of tables with
these keys, which may also stand before the first row, for all of them:

    name      the first column; unique in the whole table
    run       the command, split as a shell would and started directly; or
    shell     a script for `sh -c`
    prepare   script that makes inputs in the row's directory; it runs once, natively
    needs     requirements, see `Requirements.missing`
    outputs   files that `run` makes; they are compared beside standard output and exit status
    local     `--local` in place of half of the native peak
    rounds    timed rounds, natively and on Hecaton; default 3 for programs, 1 for interfaces
    program   true for a real program that people use; false for a small test of one kernel interface
    expect    "refused" if `hecaton run` must refuse it
    untimed   true if the time says nothing, for example because the row sleeps
    skip      why the row must not run at all
    note      the last column: a limit that is known, with its reason
"""

import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass
class Row:
    """One line of the table."""

    name: str
    section: str = ""
    run: str = ""
    shell: str = ""
    prepare: str = ""
    needs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    local: str = ""
    rounds: int = 0
    program: bool = False
    expect: str = ""
    untimed: bool = False
    skip: str = ""
    note: str = ""


@dataclass
class Section:
    """One table of the document."""

    title: str
    about: str
    rows: list


def load_sections(folder=HERE / "rows"):
    """The sections, in the order of their files' names. Raises ValueError for a wrong row."""
    sections, names = [], set()
    for path in sorted(folder.glob("*.toml")):
        text = tomllib.loads(path.read_text())
        rows = []
        common = {key: text[key] for key in text if key not in ("title", "about", "row")}
        for fields in text.get("row", []):
            try:
                row = Row(**{"section": text["title"], **common, **fields})
            except TypeError as error:
                raise ValueError(f"{path.name}: {fields.get('name')}: {error}") from error
            if bool(row.run) == bool(row.shell):
                raise ValueError(f"{path.name}: {row.name} must have `run` or `shell`")
            if row.name in names:
                raise ValueError(f"{path.name}: two rows are named {row.name}")
            names.add(row.name)
            row.rounds = row.rounds or (3 if row.program else 1)
            rows.append(row)
        sections.append(Section(text["title"], text.get("about", ""), rows))
    return sections


def _split(need):
    """The kind of a requirement, empty for a command, and its name."""
    kind, colon, name = need.partition(":")
    return (kind, name) if colon else ("", need)


class Requirements:
    """Answers which requirements of a row this machine lacks."""

    def __init__(self, environment):
        self.environment = environment
        self.known = {}

    def missing(self, row):
        """The first requirement that is not met, in words; empty if all are."""
        for need in row.needs:
            if need not in self.known:
                self.known[need] = self._is_met(need)
            if not self.known[need]:
                kind, name = _split(need)
                return {
                    "": f"the command `{name}`",
                    "python": f"the Python package `{name}`",
                    "npm": f"the npm package `{name}`",
                    "file": f"`{name}`",
                    "test": f"`{name}` to succeed",
                }[kind]
        return ""

    def _is_met(self, need):
        """`command`, `python:PACKAGE`, `npm:PACKAGE`, `file:PATH` or `test:COMMAND`."""
        kind, name = _split(need)
        if kind == "":
            return shutil.which(name, path=self.environment["PATH"]) is not None
        if kind == "file":
            for key in ("ROOT", "TOOLS", "PROGRAMS", "NODE_PATH"):
                name = name.replace(f"${key}", self.environment[key])
            return Path(name).exists()
        if kind == "npm":
            return (Path(self.environment["NODE_PATH"]) / name).exists()
        test = f"$PYTHON -c 'import {name}'" if kind == "python" else name
        command = ["sh", "-c", test]
        quiet = subprocess.DEVNULL
        return subprocess.run(
            command, env=self.environment, stdin=quiet, stdout=quiet, stderr=quiet, timeout=120
        ).returncode == 0
