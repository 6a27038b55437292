"""A text of version 1 means the same in version 2.

Expected: the records of the text itself, and its stored tensors on every rank, at degrees that suit it.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings

from tests.language import strategies
from tests.language.test_print import comments
from ucpl.errors import UcplError
from ucpl.language import format_text, nodes, parse, print_file, upgraded
from ucpl.language.nodes import Clause
from ucpl.language.source import version_of
from ucpl.language.walk import rewritten, walk
from ucpl.layout import load
from ucpl.layout.statements import called_model
from ucpl.placement import Part
from ucpl.testing import trials
from ucpl.texts import text_at

ROOT = Path(__file__).parents[2]
FILES = sorted(
    p for p in ROOT.rglob("*.ucpl") if not {"errors", ".git", "_site", "_data", "build"} & {*p.relative_to(ROOT).parts}
)
PARTS = ROOT / "tests" / "language" / "examples"  # texts whose imports are not there
EVERY = PARTS / "layout.ucpl"  # every construct of version 1, those that version 2 does without among them


def in_order(file: nodes.File) -> tuple[nodes.Statement, ...]:
    """The statements, with `buckets` as the last clause.

    Version 2 has no place for it among the clauses.
    """

    def change(node: Any) -> Any:
        if not isinstance(node, nodes.Entry | nodes.States):
            return None
        return evolve(node, clauses=tuple(sorted(node.clauses, key=lambda c: c.word == "buckets")))

    return rewritten(file, change).statements


def same(text: str, name: str) -> None:
    new = upgraded(text, name)
    assert version_of(new) == 2
    file = parse(new, name)
    assert in_order(file) == in_order(parse(text, name))
    assert comments(new) == comments(format_text(text, name))
    assert format_text(new, name) == new == upgraded(new, name)


@pytest.mark.parametrize("path", [p for p in FILES if p != EVERY], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_file_has_the_same_records_and_comments(path: Path) -> None:
    same(path.read_text(encoding="utf-8"), path.name)


def texts_of(path: Path) -> Iterator[str]:
    """Texts of the language in a Python file.

    Those that are wrong, or lack a form in version 2, are left out.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and version_of(node.value) == 1:
            try:
                upgraded(node.value)
            except UcplError:
                continue
            yield node.value


def test_texts_of_the_tests_have_the_same_records() -> None:
    texts = {text for path in sorted(ROOT.joinpath("tests").rglob("*.py")) for text in texts_of(path)}
    assert len(texts) > 150
    for text in sorted(texts):
        same(text, "text.ucpl")


def told(part: Part) -> tuple[object, ...]:
    """Stored tensors of a part: file, key, shape, and elements."""
    p = part.folded
    columns = (p.tensor, p.home, p.low, p.high, p.stride, p.home_stride, p.offset, p.policy, p.over)
    rows = tuple(column.tolist() for column in columns)
    facts = part.state, part.label, part.form, part.dtype, part.lossy, part.value, part.scaled, part.values, part.axes
    return *facts, tuple(map(repr, part.homes)), *map(repr, rows)


def suited(text: str, path: Path) -> dict[str, Any]:
    """Stored tensors of the layouts of a text, at suitable degrees.

    A layout that needs more has the code of its error.
    """
    library = load((str(path), text), read=text_at)
    file = library.files[str(path)]
    models = [s for s in file.statements if isinstance(s, nodes.Model)]
    model = called_model(library, nodes.Call(models[0].name), None) if len(models) == 1 else None
    given = trials._Given(library, model, {}, {}, {})
    out: dict[str, Any] = {}
    for layout in file.statements:
        if isinstance(layout, nodes.Layout) and (layout.of != "any" or model is not None):
            try:
                found = trials._best(given, layout, 2, random.Random(layout.name)).found
            except UcplError as error:
                out[layout.name] = error.diagnostics[0].code
                continue
            out |= {f"{layout.name} {degrees}": [told(p) for p in placement.parts] for degrees, placement in found}
    return out


# Of these, with 20,000 tensors and more at their own sizes, records alone are compared: placing them takes minutes.
LARGE = {ROOT / "examples" / "architectures" / f"{name}.ucpl" for name in ("deepseek_v3", "gpt_oss")}


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent != PARTS and p not in LARGE], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_a_file_has_the_same_stored_tensors(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert suited(text, path) == suited(upgraded(text, str(path)), path)


def sayable(file: nodes.File) -> nodes.File:
    """The file without the clauses and lines that version 2 lacks."""

    def change(node: Any) -> Any:
        match node:
            case nodes.Plan():
                return evolve(node, freeze=(), train=())
            case nodes.Entry() | nodes.States():
                axes = node.shape if isinstance(node.shape, tuple) else ()
                flat = any(isinstance(one, nodes.Flat) for one in walk(*axes))
                kept = [c for c in node.clauses if c.word != "exact" and c.args[:1] != ("max",)]
                kept = [c for c in kept if c.word != "buckets" or flat]
                return evolve(node, clauses=tuple(sorted(kept, key=lambda c: c.word == "buckets")))
            case nodes.Blob():
                kept = [c for c in node.clauses if c.word not in ("exact", "buckets") and c.args[:1] != ("max",)]
                return evolve(node, clauses=tuple(kept))
            case nodes.Layout():
                items = tuple(change(i) or i for i in node.items if not isinstance(i, nodes.Domain))
                return evolve(node, items=items)
        return None

    return rewritten(file, change)


@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
@given(strategies.files())
def test_any_file_is_read_in_version_2_as_it_is_written(file: nodes.File) -> None:
    file = sayable(evolve(file, version=2))
    printed = print_file(file)
    assert parse(printed) == file
    assert format_text(printed) == printed == upgraded(print_file(evolve(file, version=1)))


LACKING = {
    "exact": "w = r c  dtype bf16 exact",
    "max": "w = r c  max @dp",
    "domain": 'domain node = "{dp}"',
    "buckets": "w = r c  buckets 4",
}


@pytest.mark.parametrize("word", LACKING)
def test_a_word_of_version_1_alone_is_named(word: str) -> None:
    text = f"ucpl 1\nlayout x(dp) of any {{\n  mesh dp\n  {LACKING[word]}\n}}\n"
    with pytest.raises(UcplError) as caught:
        upgraded(text)
    (found,) = caught.value.diagnostics
    assert (found.code, found.labels[0].line) == ("E024", 4)
    assert f"`{word}`" in found.message and found.remedy


def test_changes_of_a_plan_are_options() -> None:
    with pytest.raises(UcplError) as caught:
        upgraded("ucpl 1\nplan p = a() -> b() drop m freeze w train v in decay\n")
    assert [re.findall(r"--\w+", d.remedy) for d in caught.value.diagnostics] == [["--freeze"], ["--train"]]


def test_a_size_of_a_flat_is_the_clause_of_its_line() -> None:
    text = "ucpl 2\nlayout x(dp) of any {\n  state * for a = pad(flat(each, 400 * dp), 2)@dp  dtype bf16 in optim\n}\n"
    (layout,) = parse(text).statements
    assert isinstance(layout, nodes.Layout)
    (line,) = layout.items
    assert isinstance(line, nodes.States)
    number = nodes.Binary("*", nodes.Number(400), nodes.Name("dp"))
    assert line.clauses[-1] == Clause("buckets", (number,)) and len(line.clauses) == 3
    assert format_text(text) == text


@pytest.mark.parametrize("version", [1, 2])
def test_a_layout_extends_one_of_the_other_version(version: int) -> None:
    """Records have no version, so that files of both go together."""
    base = f"ucpl {version}\nmodel m {{\n  dim r = 4\n  w : r  is buffer\n}}\n"
    base += 'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}"\n  w = r@tp  as "w"\n}\n'
    word = "is" if version == 1 else "of"
    own = f'ucpl {3 - version}\nfrom "base.ucpl" import m, x\nlayout y(tp) of m extends x(tp = tp) {{\n'
    own += f'  w = none\n  * {word} buffer = ...  as "own {{name}}"\n}}\n'
    library = load(("own.ucpl", own), read=lambda _: base)
    assert {name: f.version for name, f in library.files.items()} == {"own.ucpl": 3 - version, "base.ucpl": version}
