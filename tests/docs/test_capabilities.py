"""`ucpl formats` and docs/FORMATS.md are one list; claims have tests.

Parameters of tests are those that pytest collects here. Of files that need a framework to be collected, names of functions are
held, and `make interop` holds the parameters, and that each test passed (tests/interop/conftest.py).
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from packaging.requirements import Requirement

from tests.collecting import collected as collected_of
from tests.docs.capabilities import PAGE, ROOT, markdown, names, read_capabilities
from tests.interop.conftest import unproved
from ucpl import registry
from ucpl.errors import catalogue
from ucpl.language import nodes, parse
from ucpl.registry.support import Claim, Standing, Support, SupportEntry, SupportRow, support, support_of
from ucpl.resources import spec_files

FOUND = read_capabilities()
ROWS = [row for one in support() for row in one.rows]
CLAIMS = [pytest.param(claim, by, id=name) for name, claim, by in FOUND.claims()]
BASES = ("megatron_release",)  # bases of layouts of architectures
BY_FILE = ("megatron_deepspeed.ucpl",)  # its layouts are called with it, and are DeepSpeed's
INTEROP = "tests/interop/"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def functions(path: Path) -> list[str]:
    """Names of a file's tests, without their parameters."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return [f"{path.relative_to(ROOT).as_posix()}::{name}" for name in found]


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """Every test of the named files, as pytest collects them.

    Functions of files that need a framework: to collect them takes longer than to read them.
    """
    asked = {name.partition("::")[0] for name in FOUND.named()}
    files = {path for pattern in asked for path in ROOT.glob(pattern)}
    framed = set((ROOT / INTEROP).glob("test_*.py"))
    return collected_of(sorted(files - framed)) + [test for path in sorted(framed) for test in functions(path)]


def test_the_page_of_formats_is_generated_from_the_list() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(support()), "make docs"


def test_a_row_is_there_once() -> None:
    for said in ([row.checkpoint for row in ROWS], [row.id for row in ROWS]):
        assert len(said) == len(set(said)) > 30
    assert sorted(FOUND.rows.keys() - {row.id for row in ROWS}) == []


def test_each_form_says_what_there_is() -> None:
    """Each shipped layout and framework is in one form.

    Releases are those that `make interop` asks for.
    """
    texts = [parse(path.read_text(encoding="utf-8"), name) for name, path in spec_files() if name not in BY_FILE]
    layouts = [item for text in texts for item in text.statements if isinstance(item, nodes.Layout)]
    any_model = [item.name for item in layouts if item.of == "any" and item.name not in BASES]
    said = [name for one in support() for name in one.layouts]
    assert sorted(said) == sorted(any_model)
    readers = {name for name, one in registry.formats().items() if not one.is_of_a_spec}
    assert {one.framework for one in support()} - {None} == readers
    assert len({one.place for one in support()}) == len(support())
    asked = {Requirement(line).name: Requirement(line) for line in PROJECT["optional-dependencies"]["interop"]}
    for name, _, release in (said.partition(" ") for one in support() for said in one.releases):
        assert release and (name == "torch" or asked[name].specifier.contains(release)), name


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"row": []}, "no row"),
        ({"rows": []}, "rows"),
        ({"row": [{"id": "a", "checkpoint": "b", "both": {"is": "fine"}}]}, "FINE"),
        ({"row": [{"id": "a", "checkpoint": "b", "both": {"is": "no", "by": []}}]}, "by"),
        ({"row": [{"id": "a", "checkpoint": "b", "read": {"is": "no"}}]}, "written"),
    ],
)
def test_a_form_of_another_form_is_refused(change: dict[str, Any], wrong: str) -> None:
    entry: Any = {
        "place": 1,
        "title": "t",
        "files": "f",
        "layouts": [],
        "states": [],
        "parallelism": [],
        "releases": [],
    }
    good: dict[str, Any] = {**entry, "row": [{"id": "a", "checkpoint": "b", "both": {"is": "no"}}]}
    assert support_of("x", cast(SupportEntry, good)).read is Standing.NO
    with pytest.raises((KeyError, TypeError, ValueError), match=wrong):
        support_of("x", cast(SupportEntry, {**good, **change}))


@pytest.mark.parametrize(("claim", "by"), CLAIMS)
def test_a_claim_has_what_its_word_asks_for(claim: Claim, by: tuple[str, ...]) -> None:
    by_framework = [name for name in by if name.startswith(INTEROP)]
    match claim.standing:
        case Standing.PROVED:
            assert by_framework
        case Standing.COMPARED | Standing.READER:
            assert set(by) - set(by_framework)
        case Standing.REFUSED:
            texts = "".join((ROOT / name.partition("::")[0]).read_text(encoding="utf-8") for name in by)
            assert claim.codes and [code for code in claim.codes if code not in catalogue() or code not in texts] == []
        case Standing.NO | Standing.LATER:
            assert by == ()
    assert claim.codes == () or claim.standing is Standing.REFUSED


def test_every_test_that_is_named_is_there(collected: list[str]) -> None:
    bare = {test for test in collected if "[" not in test}

    def is_there(pattern: str) -> bool:
        by_name = pattern.partition("[")[0]  # the only name in a file that is not collected here
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
    """The result of `make interop`."""
    every = {name.replace("*", "x") for name in FOUND.named() if name.startswith(INTEROP)}
    assert unproved(every, every) == []
    first, second = sorted(every)[:2]
    (line,) = unproved(every, every - {first})
    assert line == f"docs/capabilities.toml rests on {first}, which did not pass"
    assert any(line.startswith("docs/capabilities.toml names") for line in unproved({second}, {second}))
    (line,) = unproved({*every, f"{INTEROP}test_x.py::test_new"}, every)
    assert line == f"docs/capabilities.toml does not name {INTEROP}test_x.py::test_new"


def test_a_row_of_the_page_says_what_its_entry_says() -> None:
    row = SupportRow(
        "a", "`a|b`", Claim(Standing.REFUSED, codes=("E457", "E473")), Claim(Standing.PROVED, note=", once")
    )
    text = markdown((Support("x", 1, "an x", "f", ("y", "z"), ("weights",), (), ("x 1.0",), (row,)),))
    assert "| `x`: an x | `y`, `z` | weights |  | x 1.0 |" in text and "\n## An x\n" in text
    assert r"| `a\|b` | refused (E457, E473) | proved, once |" in text and "ZeRO-1" not in text
