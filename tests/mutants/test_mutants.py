"""The list of mutants fits the tree; `make mutants` finds the survivors."""

from __future__ import annotations

import pytest

from tests.collecting import collected
from tests.mutants.__main__ import ROOT, Mutant, planted, read_mutants


@pytest.mark.parametrize("room", sorted({m.room for m in read_mutants()}))
def test_every_mutant_fits_its_file_and_names_a_test_that_is_there(room: str) -> None:
    mutants = read_mutants(rooms=[room])
    assert mutants
    for mutant in mutants:
        planted((ROOT / mutant.file).read_text(), mutant)
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), mutant
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text() or not name, mutant


def test_every_parameter_that_a_mutant_names_is_there() -> None:
    """Find unknown tests.

    A name with brackets is one case, and goes when a table of cases changes. Tests that need a framework are not collected.
    """
    named = {test: mutant for mutant in read_mutants() for test in mutant.tests if "[" in test}
    asked = {test: mutant for test, mutant in named.items() if not test.startswith("tests/interop/")}
    assert len(asked) > 50
    there = set(collected(sorted({test.partition("::")[0] for test in asked})))
    assert [f"{mutant}: {test}" for test, mutant in asked.items() if test not in there] == []


def test_a_fault_is_planted_once_and_only_where_it_fits() -> None:
    one = Mutant("room", 1, "file", "a", "b", "test")
    assert planted("x a y", one) == "x b y"
    for text in ("x", "a a"):
        with pytest.raises(ValueError, match="occurs"):
            planted(text, one)
    assert planted("a a a", Mutant("room", 1, "file", "a", "b", "test", nth=2)) == "a b a"
    with pytest.raises(ValueError, match="nothing"):
        planted("a", Mutant("room", 1, "file", "a", "a", "test"))
