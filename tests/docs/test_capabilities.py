"""What README says works is in one list, and each claim of it has a test of its kind that is there.

Parameters of tests are those that pytest collects here. Of files that need a framework to be collected, names of functions are
held, and `make interop` holds the parameters, and that each test passed (tests/interop/conftest.py).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.collecting import collected as collected_of
from tests.docs.capabilities import (
    README,
    ROOT,
    Capabilities,
    Claim,
    Row,
    Standing,
    names,
    page,
    read_capabilities,
)
from tests.interop.conftest import unproved
from ucpl.errors import catalogue

FOUND = read_capabilities()
CLAIMS = [
    pytest.param(claim, id=f"{row.checkpoint[:40]} {side}")
    for row in FOUND.rows
    for side, claim in (("read", row.read), ("written", row.written))
]
INTEROP = "tests/interop/"


def functions(path: Path) -> list[str]:
    """Names of a file's tests, without their parameters."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return [f"{path.relative_to(ROOT).as_posix()}::{name}" for name in found]


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """Every test of the files that the list names, as pytest tells them; functions of files that it cannot collect here."""
    asked = {name.partition("::")[0] for name in FOUND.named()}
    files = sorted({path for pattern in asked for path in ROOT.glob(pattern)} | set((ROOT / INTEROP).glob("test_*.py")))
    tests = collected_of(files)
    there = {test.partition("::")[0] for test in tests}
    return tests + [t for path in files if path.relative_to(ROOT).as_posix() not in there for t in functions(path)]


def test_the_table_of_the_readme_is_made_of_the_list() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == page(text, FOUND), "make docs"


def test_a_row_is_there_once() -> None:
    said = [row.checkpoint for row in FOUND.rows]
    assert len(said) == len(set(said)) > 30


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_has_what_its_word_asks_for(claim: Claim) -> None:
    by_framework = [name for name in claim.by if name.startswith(INTEROP)]
    match claim.standing:
        case Standing.PROVED:
            assert by_framework
        case Standing.COMPARED | Standing.READER:
            assert set(claim.by) - set(by_framework)
        case Standing.REFUSED:
            texts = "".join((ROOT / name.partition("::")[0]).read_text(encoding="utf-8") for name in claim.by)
            assert claim.codes and [code for code in claim.codes if code not in catalogue() or code not in texts] == []
        case Standing.NO | Standing.LATER:
            assert claim.by == ()
    assert claim.codes == () or claim.standing is Standing.REFUSED


def test_every_test_that_is_named_is_there(collected: list[str]) -> None:
    bare = {test for test in collected if "[" not in test}

    def is_there(pattern: str) -> bool:
        by_name = pattern.partition("[")[0]  # all that a file tells which is not collected here
        return any(names(pattern, test) or (test in bare and names(by_name, test)) for test in collected)

    assert sorted(name for name in FOUND.named() if not is_there(name)) == []


def test_every_test_with_a_framework_is_named(collected: list[str]) -> None:
    patterns = FOUND.named()
    patterns |= {name.partition("[")[0] for name in patterns}  # of a test without parameters there is no more to ask

    def is_named(test: str) -> bool:
        asked = FOUND.named() if "[" in test else patterns
        return any(names(pattern, test) for pattern in asked)

    tests = [test for test in collected if test.startswith(INTEROP)]
    assert len(tests) > 150
    assert [test for test in tests if not is_named(test)] == []


@pytest.mark.parametrize(
    ("pattern", "test", "same"),
    [
        ("a.py::b", "a.py::b", True),
        ("a.py::b", "a.py::b[x-y]", True),
        ("a.py::b", "a.py::bc", False),
        ("a.py::b[x*]", "a.py::b[x-y]", True),
        ("a.py::b[x*]", "a.py::b[y-x]", False),
        ("a.py::b[x*]", "a.py::b", False),
        ("a.py::*", "a.py::b[y(z)]", True),
        ("a*.py::b", "abc.py::b", True),
        ("a.py::b[x.y]", "a.py::b[xzy]", False),
    ],
)
def test_a_name_is_a_test(pattern: str, test: str, same: bool) -> None:
    assert names(pattern, test) == same


def test_a_run_is_held_against_the_list() -> None:
    """What `make interop` says at its end."""
    every = {name.replace("*", "x") for name in FOUND.named() if name.startswith(INTEROP)}
    assert unproved(every, every) == []
    first, second = sorted(every)[:2]
    (line,) = unproved(every, every - {first})
    assert line == f"docs/capabilities.toml rests on {first}, which did not pass"
    assert any(line.startswith("docs/capabilities.toml names") for line in unproved({second}, {second}))
    (line,) = unproved({*every, f"{INTEROP}test_x.py::test_new"}, every)
    assert line == f"docs/capabilities.toml does not name {INTEROP}test_x.py::test_new"


def test_a_table_that_was_edited_by_hand_is_made_anew() -> None:
    row = Row("`a|b`", Claim(Standing.REFUSED, codes=("E457", "E473")), Claim(Standing.PROVED, note=", once"))
    found = Capabilities((row,))
    text = page(README.read_text(encoding="utf-8"), found)
    assert r"| `a\|b` | refused (E457, E473) | proved, once |" in text and "ZeRO-1, ZeRO-2, ZeRO-3" not in text
    assert page(text.replace("once", "twice"), found) == text
    with pytest.raises(ValueError, match="README"):
        page(re.sub("<!--.*-->", "", text), found)
