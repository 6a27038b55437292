"""The page of faults, generated from the tests that provoke them.

A test states its row in a marker: `@pytest.mark.fault(SECTION, FAULT, GUARANTEE)`.

python -m tests.docs.faults        print the page, which `make docs` builds into the site
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from attrs import frozen

from tests.docs.blocks import ROOT
from ucpl.errors.document import table

SECTIONS = {
    "Interruption": "",
    "Ranks that run a plan together": "`make faults` runs all failpoints, `make test` a share of them.",
    "Object stores": "The server is rclone's S3, behind a proxy that injects the faults.",
    "Vaults": "F1 to F22 are the faults in the design of the vault. A real network and a lost machine were not tried.",
    "Power loss": (
        "A recorder writes down each write, size, sync, new name and rename of a run. Each prefix is laid out as a disk might "
        "hold it: complete, without unsynced bytes, with names but without their bytes, and with a torn last write. "
        "`make powerloss` tries all orders of unsynced calls, `make test` a sample."
    ),
    "Disk and files": "",
    "Folders of DeepSpeed and Hugging Face": "",
    "Messages": "",
    "Every system call": (
        "`make faults` counts the opens, reads, writes, syncs, renames and other calls of each verb, and then runs the verb "
        "once for each of them, with an error or a kill at that call."
    ),
    "Hostile input": (
        "`python -m tests.fuzz --reader NAME --inputs N --seed S` damages valid inputs of a reader. Each ends in a result or "
        "in an error with a code."
    ),
    "Against an oracle or the truth": "`make interop` also loads targets with the frameworks themselves.",
}
HEAD = """\
# Faults

Each row is a fault that tests provoke, with the guarantee that must hold. `make test TESTS=PATH` repeats one row; `make test`,
`make thorough` and `make interop` repeat all. `make docs` generates this page from the markers of the tests.
[Guarantees](GUARANTEES.md) has the summary.
"""
FAILPOINT = re.compile(r'failpoint\("([a-z-]+)"\)')


@frozen
class Fault:
    """One row: a test, the fault it provokes, the checked guarantee."""

    test: str
    section: str
    fault: str
    guarantee: str


def faults() -> Iterator[Fault]:
    """All rows, in the order of files and tests."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.fault(" in text:
            yield from of_file(ast.parse(text), path.relative_to(ROOT).as_posix())


def of_file(tree: ast.Module, name: str) -> Iterator[Fault]:
    for node in ast.walk(tree):
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                assert isinstance(node, ast.FunctionDef)
                section, fault, guarantee = map(ast.literal_eval, mark.args)
                yield Fault(f"{name}::{node.name}", section, fault, guarantee)


def failpoints() -> list[str]:
    """Names of all failpoints in the code."""
    return sorted({name for p in (ROOT / "ucpl").rglob("*.py") for name in FAILPOINT.findall(p.read_text("utf-8"))})


def page() -> str:
    rows = list(faults())
    parts = [HEAD]
    for section, note in SECTIONS.items():
        found = [(one.fault, one.guarantee, f"`{one.test}`") for one in rows if one.section == section]
        parts += [f"## {section}\n", *([f"{note}\n"] if note else []), table(("fault", "guarantee", "test"), found)]
    names = ", ".join(f"`{name}`" for name in failpoints())
    parts += [
        "## Failpoints\n",
        '`UCPL_FAIL_AT="tile-written:17:kill"` kills the process at the 17th tile. The actions are `kill`, `interrupt`, '
        f"`terminate`, `hangup`, `stop`, `enospc` and `eio`; the failpoints are {names}.\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
