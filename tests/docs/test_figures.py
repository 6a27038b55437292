"""docs/PERFORMANCE.md and docs/performance/ show the measured figures.

The tests compare its blocks with the figures that were kept.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace

import pytest
from attrs import evolve

from benchmarks import loads
from benchmarks.__main__ import NAMES, tables
from benchmarks.children import finished
from benchmarks.convert import CASES, FORMS, HEAD, Rounds, Run, rows_of
from benchmarks.figures import PAGES, Table, blocks, known, written
from benchmarks.usual import USUAL_HEAD
from tests.docs.blocks import ROOT

TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
SHOWN = [name for text in TEXTS for name in blocks(text)]


def test_the_pages_show_the_figures_that_were_kept() -> None:
    tables = known()
    for text in TEXTS:
        assert text == written(text, tables), "run `make bench`, or undo what was written by hand"
    assert set(tables) <= set(SHOWN) and len(SHOWN) == len(set(SHOWN))
    for table in tables.values():
        assert {len(row) for row in table.rows} == {len(table.head)}, table.name


IMPORT = re.compile(r"^ *(?:from (ucpl\S*) import (.+)|import (ucpl\S*(?:, \S+)*))$", re.MULTILINE)
IMPORTS = sorted(
    {m.group().strip() for p in (ROOT / "benchmarks").glob("*.py") for m in IMPORT.finditer(p.read_text())}
)


@pytest.mark.parametrize("line", IMPORTS)
def test_programs_in_texts_of_benchmarks_import_what_there_is(line: str) -> None:
    """They run in processes of their own, which no other test starts."""
    exec(line, {})


def test_every_name_of_make_bench_is_a_table_of_a_page() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ranked, timed = (re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE) for name in ("RANKED", "TIMED"))
    assert ranked is not None and timed is not None
    named = timed[1].replace("$(RANKED)", ranked[1]).split()
    given = Namespace(pairs=[1], gib=[1.0], folder=None)
    assert named == list(NAMES) == list(tables(given))
    assert set(named) <= set(SHOWN)
    kept = known()
    for name, (head, _) in tables(given).items():  # a table whose columns are others by now was measured by other code
        assert name not in kept or kept[name].head == head, name


def test_the_readme_has_the_figures_of_the_usual_tools() -> None:
    rows = [dict(zip(USUAL_HEAD, row, strict=True)) for row in known()["usual"].rows]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [
        f"| {r['wish']} | {r['usual tool']} | {r['its seconds']} s, {r['its peak']} | {r['seconds']} s, {r['peak']} |"
        for r in rows
    ]
    assert shown and [row for row in shown if row not in text] == []


def test_a_block_is_made_of_its_table_and_no_other() -> None:
    end = "<!-- end of figures -->"
    page = f"before\n<!-- figures: plan -->\nold\n{end}\nafter\n<!-- figures: lsp -->\nkept\n{end}\n"
    table = Table("plan", "make bench plan", "2 cores", ("case", "figure"), (("405B", "2.4 s"),))
    made = written(page, {"plan": table})
    assert made == page.replace(
        "old\n", "| case | figure |\n| --- | --- |\n| 405B | 2.4 s |\n\n`make bench plan`, 2 cores.\n"
    )
    assert written(made, {"plan": table}) == made
    assert written(made, {"plan": evolve(table, rows=(("405B", "9.9 s"),))}) != made


def test_where_the_time_of_a_process_went() -> None:
    """Start is the time of the same command on a tiny checkpoint.

    The rest before the first byte is planning.
    """
    seconds = {
        "plan": 0.1,
        "create": 0.1,
        "digest": 0.5,
        "read-back beside": 0.25,
        "move": 2.0,
        "fsync": 0.5,
        "read-back": 1.0,
    }
    report = {
        "seconds": seconds,
        "bytes_target": 8 << 30,
        "bytes_read": 51,
        "bytes_needed": 50,
        "bytes_read_back": 8 << 30,
    }
    ours = Run(4.5, 80.0, report)
    start = Run(1.0, 70.0, {"seconds": {"plan": 0.25, "move": 0.25}})
    runs = {case.name: [ours, ours] for case in CASES}
    runs |= {
        "start": [start],
        "copy": [Run(3.0, 2.0, {})],
        "again": [Run(6.0, 9.0, {})],
        "ds_to_universal": [Run(18.0, 900.0, {})],
    }
    found = list(rows_of(Rounds(runs, [8 * 2.0**30], [(4 * 2.0**30, 8 * 2.0**30)]), 8 << 30, CASES))
    assert {len(row) for row in found} == {len(HEAD)}
    cells = dict(zip(HEAD, found[0], strict=True))
    assert (cells["start"], cells["plan"], cells["move"], cells["sync"]) == ("0.50", "0.50", "2.00", "0.50")
    assert (cells["/ copy"], cells["/ copy and read again"], cells["ds_to_universal /"]) == ("1.50", "0.75", "4.0")
    assert cells["read / needed"] == "1.020"
    assert cells["of memory's speed"] == "0.50"
    assert cells["of the disk's speed"] == "0.67"  # 2 s to write and 1 s to read, of 4.5 s
    small = Run(4.5, 80.0, {**report, "bytes_target": 4 << 30})
    runs = {**runs, **{case.name: [small] for case in FORMS}}
    del runs["ds_to_universal"]
    found = list(rows_of(Rounds(runs, [8 * 2.0**30], [(4 * 2.0**30, 8 * 2.0**30)]), 8 << 30, FORMS))
    cells = dict(zip(HEAD, found[0], strict=True))
    assert (cells["/ copy"], cells["/ copy and read again"]) == ("3.00", "1.50")  # of a copy of as many bytes
    assert len(found) == len(FORMS) + 3


def test_a_benchmark_whose_child_fails_ends_with_the_last_lines_of_the_child() -> None:
    program = "import sys; print('rank 1 begins'); sys.exit('no such option: --stage')"
    with pytest.raises(SystemExit, match=r"failed with 1:\nrank 1 begins\nno such option: --stage"):
        finished([sys.executable, "-c", program])
    assert finished([sys.executable, "-c", "print(3)"]) == "3\n"


def test_ways_to_load_are_divided_by_the_first_of_their_kind() -> None:
    def one(loaded: float, read: float) -> dict[str, float]:
        return {"loaded": loaded, "step": loaded + 1, "read": read, "core": 0.5, "peak": 3 << 20}

    found = {
        "fsdp2: `dcp.load`": [one(9, 120), one(2, 120), one(4, 120)],
        "fsdp2: `load_into`": [one(5, 120), one(1, 60), one(2, 60)],
        "weights: `load_file`": [one(1, 80), one(1, 80), one(1, 80)],
    }
    rows = [dict(zip(loads.HEAD, row, strict=True)) for row in loads.rows(2, found, 40)]
    assert [row["loaded, s"] for row in rows] == ["3.00", "1.50", "1.00"]
    assert [row["/ the first way"] for row in rows] == ["1.00", "0.50", "1.00"]
    assert [row["the first call, s"] for row in rows] == ["9.00", "5.00", "1.00"]
    assert [row["to the first step, s"] for row in rows] == ["5.00", "3.00", "2.00"]
    assert [row["read / needed"] for row in rows] == ["1.00", "0.50", "1.00"]  # weights: by each rank
