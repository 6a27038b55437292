"""Each row of the suggestions and of the forms fits its example.

The suggested text can be parsed.
"""

from __future__ import annotations

import pytest

from ucpl.errors import UcplError
from ucpl.extents.dtypes import DTYPES
from ucpl.language import parse, parse_call
from ucpl.language.foreign_words import table, words
from ucpl.language.reading import forms
from ucpl.language.suggestions import SuggestionRow, rows
from ucpl.language.words import ELEMENT_TYPES, LAYOUT_WORDS, MODEL_WORDS
from ucpl.resources import VERSIONS

ROWS_MAX = 60
FRAMES = {
    "l": ("ucpl 1\nmodel m {\n  embed : v h\n}\nlayout x() of m {\n", "\n}\n"),
    "m": ("ucpl 1\nmodel m {\n  embed : v h\n", "\n}\n"),
    "t": ("ucpl 1\n", "\n"),
    "h": ("", "\n"),
    "c": ("", ""),
}


def framed(line: str, place: str, version: int = 1) -> str:
    before, after = FRAMES[place]
    before = before.replace("ucpl 1", f"ucpl {version}")
    return before + line + "\n}" * (line.count("{") - line.count("}")) * line.endswith("{") + after


def read(line: str, place: str, version: int = 1) -> object:
    return parse_call(line) if place == "c" else parse(framed(line, place, version))


def remedy(line: str, place: str, version: int = 1) -> str:
    with pytest.raises(UcplError) as caught:
        read(line, place, version)
    return caught.value.diagnostics[0].remedy


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.example)
def test_each_row_offers_its_line(row: SuggestionRow) -> None:
    version = row.version or 1
    why, _, offered = remedy(row.example, row.place[0], version).partition("\nwrite: ")
    assert row.why[:20] in why
    assert offered.replace("\n       ", "\n") == row.write
    if row.write:
        read(row.write, row.place[0], version)


OLDER = {  # words of version 1 in a text of version 2, and the line to write
    "state fp32 of decay = like": "state fp32 for decay = like",
    "* of frozen = none": "* is frozen = none",
    "fill * of frozen = 0": "fill * is frozen = 0",
    "fill state m of decay = 0": "fill state m for decay = 0",
}


@pytest.mark.parametrize("line", OLDER)
def test_each_version_offers_its_words_for_those_of_the_other(line: str) -> None:
    assert remedy(line, "l", 2).endswith(f"write: {OLDER[line]}")
    assert remedy(OLDER[line], "l").endswith(f"write: {line}")


def test_the_rows_are_few() -> None:
    listed = table()["word"]
    assert isinstance(listed, list)
    assert len([row for row in rows() if not row.version]) + len(listed) <= ROWS_MAX


def test_a_line_has_several_mistakes() -> None:
    text = remedy("embed: [v, h] as 'embed', // the table;", "l")
    assert text.endswith('\nwrite: embed = v h as "embed"  # the table;')


def test_what_is_offered_for_one_line_of_a_statement_can_be_read_with_the_others() -> None:
    line = "attn.qkv[l] = (g (q: r d | k: d\n               + v: d)) h\n  as 'layers.{l}.qkv'"
    assert remedy(line, "l").endswith("write: attn.qkv[l] = (g (q: r d + k: d")
    fixed = line.replace("|", "+")
    assert remedy(fixed, "l").endswith('write: as "layers.{l}.qkv"')
    parse(framed(fixed.replace("'", '"'), "l"))


def test_nothing_is_offered_that_cannot_be_read() -> None:
    assert "write:" not in remedy("embed = v <=> [h, !! as 'x'", "l")


def test_no_bracket_is_taken_out_that_leaves_another_open() -> None:
    assert "write:" not in remedy("index k = l@pp[]", "l")


def test_a_line_that_no_person_wrote_is_not_looked_at() -> None:
    assert "write:" not in remedy(f"embed = [{'v, ' * 200}h]", "l")


@pytest.mark.parametrize("place", "lmt")
def test_every_statement_has_its_form(place: str) -> None:
    words = {"l": LAYOUT_WORDS, "m": MODEL_WORDS, "t": {"from", "let", "assert", "model", "layout", "plan"}}
    assert {word for at, word in forms(1) if at == place} == words[place] | {""}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_form_has_an_example_that_can_be_read(version: int) -> None:
    for (place, word), (_, example) in forms(version).items():
        assert example.split()[0] == word or not word
        read(example.replace(" … ", "\n"), place, version)


def test_a_statement_that_goes_wrong_says_its_form() -> None:
    assert remedy("derive weight ??", "l").startswith(forms(1)["l", "derive"][0])
    assert "as in: attn.q[l]" in remedy("embed = v h ??", "l")


def test_words_of_other_tools_are_not_words_of_the_language() -> None:
    own = ELEMENT_TYPES | LAYOUT_WORDS | MODEL_WORDS | {"pad", "trim", "flat", "each"}
    assert words().always <= words().advice.keys() and not words().always & own
    assert all(words().advice.values())


def test_element_types_are_those_that_files_have() -> None:
    assert set(DTYPES) == ELEMENT_TYPES
    assert set(words().dtypes.values()) <= ELEMENT_TYPES and not set(words().dtypes) & ELEMENT_TYPES
