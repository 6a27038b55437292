"""Trees of texts that are kept between processes.

A kept tree equals the parsed tree, or it is not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ucpl.errors import UcplError
from ucpl.language import nodes, parse, parse_call, parse_expr, parser, trees
from ucpl.language.source import Source
from ucpl.language.walk import walk
from ucpl.resources import grammar_text, spec_files, spec_text

EXAMPLES = Path(__file__).parent / "examples"
TEXTS = {
    **{name: spec_text(name) for name, _ in spec_files()},
    **{path.name: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.ucpl"))},
}
CALL = 'zero1(dp = 8, names = [a, b], word = "x")'
TEMPLATE = 'ucpl 1\nlayout a() of any {\n  mesh dp\n  file f = torch "{dp + 1:02}-{dp}.pt" key "k/{name}"\n}\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and a process that has read nothing."""
    monkeypatch.setenv("UCPL_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for known in (parser._file, parser._expr, parser._kept_file):
        known.cache_clear()
    trees._holes.clear()


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the next process, if that one may read nothing."""
    forget()
    monkeypatch.setattr(parser, "_read", lambda source, start: pytest.fail(f"{source.text!r} is read again"))


def spans(*roots: nodes.Record) -> list[object]:
    return [getattr(node, "span", None) for node in walk(*roots)]


@pytest.mark.parametrize("name", TEXTS)
def test_a_kept_tree_is_what_reading_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = parse(TEXTS[name], f"here/{name}")
    assert parse(TEXTS[name], "elsewhere", keep=True) == parse(TEXTS[name], "elsewhere")
    no_reading(monkeypatch)
    found = parse(TEXTS[name], f"here/{name}", keep=True)
    assert repr(found) == repr(expected) and found == expected
    assert spans(*found.statements) == spans(*expected.statements)
    assert (found.name, found.text) == (expected.name, expected.text)


def test_a_kept_call_is_what_reading_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = parse_call(CALL)
    assert parse_call(CALL, keep=True) == expected
    no_reading(monkeypatch)
    found = parse_call(CALL, keep=True)
    assert repr(found) == repr(expected) and spans(found) == spans(expected)


@pytest.mark.parametrize(("line", "column"), [(1, 1), (1, 7), (12, 5)])
def test_expressions_in_braces_are_kept_with_their_file(
    line: int, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = parse_expr("dp + 1", file="f.ucpl", line=line, column=column)
    parse(TEMPLATE, keep=True)
    no_reading(monkeypatch)
    parse(TEMPLATE, keep=True)
    found = parse_expr("dp + 1", file="f.ucpl", line=line, column=column)
    assert repr(found) == repr(expected) and spans(found) == spans(expected)
    assert parse_expr("name") == nodes.Name("name")


def test_what_was_read_is_given_again_under_its_own_name_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a process, the cache keeps names and places apart.

    The same text in another file, or further down, gives another tree.
    """
    places = [("f.ucpl", 1, 1), ("f.ucpl", 1, 7), ("f.ucpl", 12, 5), ("g.ucpl", 12, 5)]

    def files() -> list[nodes.File]:
        return [parse(TEMPLATE, name) for name in ("f.ucpl", "g.ucpl")]

    def exprs() -> list[nodes.Expr]:
        return [parse_expr("dp + 1", file=file, line=line, column=column) for file, line, column in places]

    once = files(), exprs()
    assert [{one.span.file for one in f.statements} for f in once[0]] == [{"f.ucpl"}, {"g.ucpl"}]
    assert [(e.span.file, e.span.line, e.span.column) for e in once[1]] == places
    monkeypatch.setattr(parser, "_read", lambda source, start: pytest.fail(f"{source.text!r} is read again"))
    assert all(a is b for a, b in zip([*once[0], *once[1]], [*files(), *exprs()], strict=True))


def test_a_template_that_cannot_be_read_is_left_to_who_needs_it() -> None:
    broken = TEMPLATE.replace("dp + 1", "dp +")
    assert parse(broken, keep=True) == parse(broken)
    with pytest.raises(UcplError):
        parse_expr("dp +")


def test_places_may_be_of_lines_further_down(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("<text>", "[1,\n 2]", 4, 9)
    expected = parser._read(source, "expr_text")
    trees._know({source.text: trees._encoded(parser._read(Source("", source.text), "expr_text"))})
    found = trees.find_hole(source)
    assert isinstance(found, nodes.List) and isinstance(expected, nodes.List)
    assert spans(found) == spans(expected)


def test_only_what_is_to_be_kept_is_kept(folder: Path) -> None:
    parse(TEMPLATE)
    parse_call(CALL)
    parse_expr("a + 1")
    assert not list(folder.glob("tree-*"))
    with pytest.raises(UcplError):
        parse("ucpl 1\nlet a = \n", keep=True)
    assert not list(folder.glob("tree-*"))
    parse(TEMPLATE, keep=True)
    assert len(list(folder.glob("tree-*"))) == 1


def test_without_a_cache_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCPL_CACHE", "")
    assert parse(TEMPLATE, keep=True) == parse(TEMPLATE)
    assert parse_call(CALL, keep=True) == parse_call(CALL)


def test_an_error_in_a_file_is_reported_each_time() -> None:
    text = "ucpl 1\nlet a = 1\nlet a = 2\n"
    said = []
    for _ in range(2):
        with pytest.raises(UcplError) as caught:
            parse(text, "f.ucpl", keep=True)
        said.append(caught.value.diagnostics)
    assert said[0] == said[1] and said[0][0].code == "E008"


@pytest.mark.parametrize(
    "harm", ["one number", "an end is missing", "nothing", "no tree", "unknown kind", "another record", "odd holes"]
)
def test_an_incomplete_file_is_no_tree(harm: str, folder: Path) -> None:
    parse_call("zero1(dp = 8)", keep=True)
    (path,) = folder.glob("tree-*")
    text = path.read_text()
    body = json.dumps([[999, 0, 1, 1, 1], {}])
    record = json.dumps([trees._encoded(parse_expr("a")), {}])
    holes = json.dumps([trees._encoded(parse_call("zero1(dp = 8)")), [1, 2]])
    other = {
        "one number": text.replace(",8]", ",9]"),
        "an end is missing": text[:-5],
        "nothing": "",
        "no tree": f"{trees._digest('{}')}\n{{}}",
        "unknown kind": f"{trees._digest(body)}\n{body}",
        "another record": f"{trees._digest(record)}\n{record}",
        "odd holes": f"{trees._digest(holes)}\n{holes}",
    }[harm]
    assert other != text
    path.write_text(other)
    assert not isinstance(trees.find(Source("<call>", "zero1(dp = 8)"), "call_text"), nodes.Call)
    assert parse_call("zero1(dp = 8)", keep=True) == parse_call("zero1(dp = 8)")
    assert path.read_text() == text


def test_another_grammar_or_another_rule_has_other_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    here = trees._path("a", "call_text")
    assert here == trees._path("a", "call_text") != trees._path("b", "call_text")
    assert trees._path("a", "expr_text") != here
    monkeypatch.setattr(trees, "grammar_text", lambda version: grammar_text(version) + " ")
    trees._reader.cache_clear()
    assert trees._path("a", "call_text") != here
    monkeypatch.undo()
    trees._reader.cache_clear()


def test_the_oldest_trees_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "TREES_MAX", 2)
    for n in range(4):
        parse_call(f"zero1(dp = {n})", keep=True)
        assert trees.find(Source("<call>", f"zero1(dp = {n})"), "call_text") is not None
    assert len(list(folder.glob("tree-*"))) == 2


def test_a_long_text_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "CHARACTERS_MAX", 10)
    parse_call("zero1(dp = 8)", keep=True)
    assert not list(folder.glob("tree-*"))
    parse_call("zero1", keep=True)
    assert len(list(folder.glob("tree-*"))) == 1


def test_known_expressions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "HOLES_MAX", 1)
    for text in ("a", "b", "c"):
        trees._know({text: None, text * 2: None})
    assert set(trees._holes) == {"c", "cc"}
