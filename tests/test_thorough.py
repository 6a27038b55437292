"""The tests that `make test` leaves to `make thorough`.

Each line of the list names tests that are there, and CI runs all.
"""

from __future__ import annotations

from pathlib import Path

from tests import collecting, thorough
from tests.thorough import Entry

ROOT = Path(__file__).parents[1]


def test_each_line_leaves_some_tests_and_keeps_what_it_says():
    listed = thorough.entries()
    files = {
        path
        for entry in listed
        for path in ROOT.glob(entry.of.partition("::")[0].removesuffix("/*") + "*/**/test_*.py")
    }
    files |= {ROOT / entry.of.partition("::")[0] for entry in listed if "*" not in entry.of.partition("::")[0]}
    names = collecting.collected(sorted(files))
    for entry in listed:
        left = thorough.thorough(names, [entry])
        assert left, entry.of
        functions = {name.partition("[")[0] for name in left}
        for function in functions:
            every = [name for name in names if name.partition("[")[0] == function]
            assert any(name not in left for name in every), function  # none is left out of `make test` altogether
        assert entry.why


def test_every_so_many_stays():
    names = [f"tests/a.py::b[{i}]" for i in range(7)] + ["tests/a.py::c"]
    assert thorough.thorough(names, [Entry("tests/a.py::b", "", 3)]) == {f"tests/a.py::b[{i}]" for i in (1, 2, 4, 5)}
    assert thorough.thorough(names, [Entry("tests/*", "")]) == set(names)
    assert thorough.thorough(names, [Entry("tests/b.py::*", "")]) == set()


def test_ci_runs_both():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[-2:] == ["make thorough", "make test"]
