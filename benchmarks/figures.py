"""Figures of one run, stored as data and written into pages.

These pages are made of measured figures, so every figure has its command and machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from attrs import asdict

from ucpl.records import frozen

__all__ = ["PAGES", "Table", "blocks", "known", "machine", "save", "written"]

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
PAGES = [DOCS / "PERFORMANCE.md", *sorted((DOCS / "performance").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@frozen
class Table:
    """A table in Markdown: cells as they are shown."""

    name: str  # of the file that it is kept in, and of the block of the page
    command: str  # that makes it anew
    machine: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine() -> str:
    """The machine of a measurement, and its load."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}; load {os.getloadavg()[0]:.1f} at its end"
    )


def save(table: Table) -> None:
    """Keep it, and write it into its page."""
    folder = HERE / "figures"
    folder.mkdir(exist_ok=True)
    text = json.dumps(asdict(table), indent=1, ensure_ascii=False)
    (folder / f"{table.name}.json").write_text(text + "\n", encoding="utf-8")
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8"), known()), encoding="utf-8")


def known() -> dict[str, Table]:
    """All tables that were kept, by name."""
    found = {}
    for path in sorted((HERE / "figures").glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(tuple(row) for row in kept["rows"])
        found[path.stem] = Table(kept["name"], kept["command"], kept["machine"], tuple(kept["head"]), rows)
    return found


def written(page: str, tables: dict[str, Table]) -> str:
    """The page with new blocks; a block without a table stays."""

    def block(match: re.Match[str]) -> str:
        table = tables.get(match[2])
        if table is None:
            return match[0]
        return f"{match[1]}{table}\n\n`{table.command}`, {table.machine}.\n{match[3]}"

    return _BLOCK.sub(block, page)


def blocks(page: str) -> Iterable[str]:
    """Names of the blocks of a page."""
    return (name for _, name, _ in _BLOCK.findall(page))
