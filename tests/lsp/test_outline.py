"""The outline of a valid text equals the compiler's reading.

For an invalid one it has the valid parts.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT, blocks
from ucpl.language import nodes, parse
from ucpl.lsp.definitions import definitions_of
from ucpl.lsp.outline import BLOCKS, continuing_words, outline
from ucpl.lsp.tokens import LineStarts, tokens
from ucpl.resources import VERSIONS, grammar_text

FILES = [p for folder in ("specs", "benchmarks", "examples") for p in sorted((ROOT / folder).rglob("*.ucpl"))]
TEXTS = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in FILES}
TEXTS |= {
    str(b): b.text
    for page in [ROOT / "docs/LANGUAGE.md", ROOT / "docs/REFERENCE.md", *sorted((ROOT / "docs/reference").glob("*.md"))]
    for b in blocks(page)
    if b.info[:2] in (("ucpl", "cells"), ("ucpl", "file"))
}


@pytest.mark.parametrize("name", TEXTS)
def test_both_find_the_same_statements(name: str) -> None:
    text = TEXTS[name]
    shape, file = outline(text), parse(text)
    spans = [(s.start, s.stop) for s in shape.top.statements if s.word != "ucpl"]
    spans += [(b.start, b.stop) for b in shape.blocks]
    assert sorted(spans) == [(s.span.start, s.span.stop) for s in file.statements]
    blocks_read = [s for s in file.statements if isinstance(s, nodes.Model | nodes.Layout)]
    assert [(b.kind, b.name) for b in shape.blocks] == [(type(n).__name__.lower(), n.name) for n in blocks_read]
    for block, node in zip(shape.blocks, blocks_read, strict=True):
        assert [(s.start, s.stop) for s in block.statements] == [
            (i.span.start, i.span.stop) for i in node.items if not getattr(i, "joined", False)
        ]
        assert block.is_closed
        if isinstance(node, nodes.Layout):
            assert block.of == node.of
            assert block.extends == (node.extends.name if node.extends is not None else "")


@pytest.mark.parametrize("name", TEXTS)
def test_the_names_are_those_that_the_compiler_reads(name: str) -> None:
    shape, file = outline(TEXTS[name]), parse(TEXTS[name])
    for block in shape.blocks:
        node = next(s for s in file.statements if isinstance(s, nodes.Model | nodes.Layout) and s.name == block.name)
        found = definitions_of(shape, block)
        for kind, wanted in _named(node).items():
            assert [d.name for d in found if d.kind == kind] == wanted, (block.name, kind)
        for one in found:
            assert TEXTS[name][one.token.start : one.token.stop].strip('"') == one.name


def _named(node: nodes.Model | nodes.Layout) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {"parameter": [p.name for p in getattr(node, "parameters", ())]}
    for kind in ("let", "dim", "tensor", "alias", "mesh", "axis", "file", "index", "prefix"):
        out[kind] = []
    for item in node.items:
        match item:
            case nodes.Let(bindings=bound):
                out["let"] += [b.name for b in bound]
            case nodes.Dims(bindings=bound):
                out["dim"] += [b.name for b in bound]
            case nodes.Tensor(path=path):
                out["tensor"].append(path)
            case nodes.Alias(path=path):
                out["alias"].append(path)
            case nodes.Gone(kind="tensor" | "alias" as kind, names=names):
                out[kind] += names
            case nodes.Mesh(name=name, axes=axes):
                out["mesh"] += [name] if name else []
                out["axis"] += axes
            case nodes.Files(name=name):
                out["file"].append(name)
            case nodes.Index(name=name):
                out["index"].append(name)
            case nodes.Use(name=name):
                out["prefix"].append(name)
    return out


def test_words_that_continue_a_statement_are_the_grammars() -> None:
    assert {"at", "as", "in", "lossy", "extends"} <= continuing_words()
    texts = [re.findall(r"#\|\\r\?\\n\|\(([a-z|]+)\)", grammar_text(version))[0] for version in VERSIONS]
    assert {word for text in texts for word in text.split("|")} == continuing_words()


HALF = {
    "a bracket is open": ("ucpl 1\nmodel m {\n  dim a = (1\n  w : a\n}\nlayout x() of m {\n  w = a\n}\n", ["m", "x"]),
    "a brace is missing": ("ucpl 1\nmodel m {\n  w : a\n\nlayout x() of m {\n  w = a\n}\n", ["m", "x"]),
    "a word is misspelt": ("ucpl 1\nmodle m {\n  w : a\n}\nlayuot x() of m {\n  w = a\n}\n", ["m", "x"]),
    "nothing is closed": ("ucpl 1\nmodel m {\n  w : a\nlayout x() of m {\n  w = (a", ["m", "x"]),
}


@pytest.mark.parametrize("case", HALF)
def test_what_is_typed_by_half_has_its_blocks(case: str) -> None:
    text, names = HALF[case]
    shape = outline(text)
    assert [b.name for b in shape.blocks] == names
    assert [b.kind for b in shape.blocks] == list(BLOCKS)
    assert [[s.word for s in b.statements][-1] for b in shape.blocks] == ["tensor", "entry"]


def test_offsets_and_places_go_there_and_back() -> None:
    text = "ab\n\ncd\n"
    lines = LineStarts(text)
    assert [lines.place(i) for i in range(len(text) + 1)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
        (3, 0),
    ]
    assert all(lines.offset(*lines.place(i)) == i for i in range(len(text) + 1))
    assert lines.offset(0, 99) == 2 and lines.offset(99, 0) == len(text)


def test_a_quoted_text_that_does_not_end_ends_with_its_line() -> None:
    found = tokens('a = h as "b\nc')
    assert [(t.kind, t.value) for t in found][3:5] == [("name", "as"), ("string", "b")]
    assert [t.text for t in tokens("config.a. l[1..] n[..3]")] == [
        "config.a.",
        "l",
        "[",
        "1",
        "..",
        "]",
        "n",
        "[",
        "..",
        "3",
        "]",
    ]
