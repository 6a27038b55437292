"""Printing and parsing are inverse to each other.

Formatting changes the appearance of a text and nothing else.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.language import strategies
from tests.language.reading import read
from ucpl.language import (
    format_text,
    nodes,
    parse,
    parse_call,
    parse_expr,
    print_axis,
    print_expr,
    print_file,
    print_item,
)

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of a strategy, by Hypothesis

HERE = Path(__file__).parent
TEXTS = sorted([*HERE.parent.joinpath("specs").glob("*.ucpl"), *HERE.joinpath("examples").glob("*.ucpl")])
COMMENT = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*')


def comments(text: str) -> list[str]:
    return [m[0].rstrip() for m in COMMENT.finditer(text) if m[0].startswith("#")]


def roughened(text: str, random: random.Random) -> str:
    """The text with comments, blank lines and spaces at random allowed places.

    A hasty person would type it like this.
    """
    lines = []
    for number, line in enumerate(text.split("\n")):
        if random.random() < 0.2:
            lines.append(" " * random.randrange(4) + f'# above {number} "')
        if random.random() < 0.2:
            lines.append("\t" * random.randrange(2))
        pieces = re.split(r'("(?:[^"\\\n]|\\[^\n])*")', line.strip())
        for i in range(0, len(pieces), 2):
            pieces[i] = pieces[i].replace(", ", random.choice([",", " ,  ", ", # inside\n", ",\n\n   "]))
            pieces[i] = pieces[i].replace("(", random.choice(["(", "( ", "(\n  # in brackets {\n "]))
        line = " " * random.randrange(5) + "".join(pieces)
        beside = f"  # beside {number}" if line.strip() and random.random() < 0.3 else ""
        lines.append(line + beside)
    return "\n".join(lines)


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(strategies.files(), st.randoms(use_true_random=False))
def test_what_is_printed_parses_to_an_equal_file_however_it_is_formatted(file, random):
    """Formatting keeps meaning and comments, and is idempotent."""
    printed = print_file(file)
    assert parse(printed) == file
    assert format_text(printed) == printed
    text = roughened(printed, random)
    tidy = format_text(text)
    assert parse(tidy) == file
    assert sorted(comments(tidy)) == sorted(comments(text))
    assert format_text(tidy) == tidy
    assert not any(line != line.rstrip() for line in tidy.split("\n"))
    assert "\n\n\n" not in tidy


@settings(max_examples=200, deadline=None)
@given(strategies.exprs)
def test_an_expression_keeps_its_tree(expr):
    assert parse_expr(print_expr(expr)) == expr


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(strategies.axes)
def test_an_axis_keeps_its_tree(axis):
    text = f"ucpl 1\nlayout x() of any {{\n  w = {print_axis(axis)}\n}}\n"
    entry = read(text).statements[0].items[0]
    assert entry.shape == (axis,)


@settings(max_examples=100, deadline=None)
@given(strategies.calls)
def test_a_call_keeps_its_arguments(call):
    text = print_item(nodes.Framework(call)).removeprefix("framework ")
    assert parse_call(text) == call


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.name)
def test_texts_print_and_format_to_what_they_mean(path):
    text = path.read_text(encoding="utf-8")
    file = parse(text, path.name)
    assert file.statements
    assert parse(print_file(file), path.name) == file
    tidy = format_text(text, path.name)
    assert parse(tidy, path.name) == file
    assert sorted(comments(tidy)) == sorted(comments(text))
    assert format_text(tidy) == tidy


MEMBERS = [f'"block.{i}, w"' for i in range(9)]
LONG = "k" * 70
ARGUMENTS = [f"argument{i} = {i}" for i in range(9)]
EXAMPLES = {
    "spaces": (["ucpl   1"], ["ucpl 1"]),
    "comments around the header": (
        ["# a", "", "", "# b", "ucpl 1 # c", "", "", "", "let a=1,b = (2+3)*4", "# end"],
        ["# a", "", "# b", "ucpl 1  # c", "", "let a = 1, b = (2 + 3) * 4", "# end"],
    ),
    "comments in a body": (
        ["ucpl 1\r", "layout x( dp,# size", " tp=1 )of any{  # body", "", "", "  mesh dp # ranks", "  a=h",
         '  bcd[ l ]=h  as"x" # two', "", "  # last", "} # done"],
        ["ucpl 1", "# size", "layout x(dp, tp = 1) of any {  # body", "  mesh dp  # ranks", "  a      = h",
         '  bcd[l] = h  as "x"  # two', "", "  # last", "}  # done"],
    ),
    "a body on one line": (
        ['ucpl 1', 'model m { "h" : h }'],
        ["ucpl 1", "model m {", "  h : h", "}"],
    ),
    "columns": (
        ["ucpl 1", "model m {", "  a: h", "  bcd: h h when a", "  # still the same columns", "  e: h dtype f32", "",
         "  f: h", "}"],
        ["ucpl 1", "model m {", "  a   : h", "  bcd : h h  when a", "  # still the same columns", "  e   : h    dtype f32",
         "", "  f : h", "}"],
    ),
    "long clauses": (
        ["ucpl 1", "layout x() of any {", f'  a = h as "{LONG}" in {"f" * 40} dtype f32 # long', "}"],
        ["ucpl 1", "layout x() of any {", "  a = h", f'      as "{LONG}"', f"      in {'f' * 40} dtype f32  # long", "}"],
    ),
    "long lists": (
        ["ucpl 1", "layout x() of any {", f"  group g = {', '.join(MEMBERS)} order reversed", "}"],
        ["ucpl 1", "layout x() of any {", f"  group g = {', '.join(MEMBERS[:7])},",
         f"      {', '.join(MEMBERS[7:])} order reversed", "}"],
    ),
    "long calls": (
        ["ucpl 1", f"layout x({', '.join(ARGUMENTS)}) of any {{", f"  framework f({', '.join(ARGUMENTS)})",
         "  derive a from b when c", "}"],
        ["ucpl 1", f"layout x({', '.join(ARGUMENTS[:7])},", f"    {', '.join(ARGUMENTS[7:])}) of any {{",
         f"  framework f({', '.join(ARGUMENTS[:7])},", f"      {', '.join(ARGUMENTS[7:])})",
         "  derive a from b when c", "}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_formatting_by_example(example):
    text, tidy = ("\n".join(lines) + "\n" for lines in EXAMPLES[example])
    assert format_text(text) == tidy
    assert format_text(tidy) == tidy


def test_a_number_keeps_the_parentheses_that_it_needs_and_no_more():
    for text in ["1 - (2 - 3)", "(a + b) * -c", "not (a and b) or c", "not a == b", "(not a) == b", "-(a + b)", "a / b / c",
                 "(a < b) == c", "[a, [b], []]", "max(a, size(tp)) % 2", "a * (b / c)"]:  # fmt: skip
        assert print_expr(parse_expr(text)) == text
    assert print_expr(parse_expr("((a)) + ((b * c))")) == "a + b * c"


@pytest.mark.parametrize("seed", range(8))
def test_plain_tensors_have_the_columns_that_formatting_gives_them(seed):
    """Among them: conditions, and lines that are too wide."""
    chance = random.Random(seed)
    kinds: tuple[Literal["parameter", "buffer", "frozen"], ...] = ("parameter", "buffer", "frozen")
    sizes = [tuple(nodes.Dimension(None, 10 ** chance.randrange(9)) for _ in range(n)) for n in (0, 1, 2, 9)]
    names = ["a", "layers.0.w", "b.c", "x,y", "dim", 'q"w', "l" * 39, "l" * 99]
    items: list[nodes.ModelItem] = []
    for n in range(60):
        dtype, kind = chance.choice([None, "bf16"]), chance.choice(kinds)
        items.append(nodes.Tensor(f"{chance.choice(names)}{n}", chance.choice(sizes), dtype, kind))
        if chance.random() < 0.1:
            others: list[nodes.ModelItem] = [
                nodes.Alias(f"z{n}", "a"),
                nodes.State((f"m{n}",), "f32"),
                nodes.Tensor(f"c{n}", sizes[1], when=nodes.Name("tied")),
                nodes.Gone("tensor", (f"y{n}",)),
            ]
            items.append(chance.choice(others[: 3 + seed % 2]))
    text = print_file(nodes.File("", 2, (nodes.Model("m", tuple(items)),)))
    assert format_text(text) == text
