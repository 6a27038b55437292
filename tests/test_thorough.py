"""The tests that `make test` leaves to `make thorough`.

A share of the cases of each function stays, and CI runs all.
"""

from __future__ import annotations

from pathlib import Path

from tests import collecting, thorough
from tests.thorough import KEEP, NONE, Entry, by_function, share

ROOT = Path(__file__).parents[1]


def test_each_line_says_something_of_tests_that_are_there():
    listed = thorough.entries()
    files = {
        path
        for entry in listed
        for path in ROOT.glob(entry.of.partition("::")[0].removesuffix("/*") + "*/**/test_*.py")
    }
    files |= {ROOT / entry.of.partition("::")[0] for entry in listed if "*" not in entry.of.partition("::")[0]}
    names = collecting.collected(sorted(files))
    for number, entry in enumerate(listed):
        assert entry.why and entry.keep >= NONE and entry.keep != KEEP
        cases = [
            tests
            for function, tests in by_function(names).items()
            if share(function, [entry]) != KEEP and share(function, listed[: number + 1]) == entry.keep
        ]
        assert any(len(tests) > 1 for tests in cases) or (cases and entry.keep == NONE), entry.of


def test_every_so_many_stays():
    names = [f"tests/a.py::{function}[{i}]" for function in "bcd" for i in range(9)] + ["tests/a.py::e"]
    listed = [Entry("tests/a.py::b", "", 3), Entry("tests/a.py::c", "", 1), Entry("tests/*::[bc]", "", 2)]
    listed += [Entry("tests/a.py::e", "", NONE)]
    left = (
        {"tests/a.py::e"}
        | {f"tests/a.py::b[{i}]" for i in (1, 2, 4, 5, 7, 8)}
        | {f"tests/a.py::d[{i}]" for i in range(1, 8)}
    )
    assert KEEP == 8 and thorough.thorough(names, listed) == left


def test_ci_runs_both():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[-2:] == ["make thorough", "make test"]
