"""Walks over trees visit everything, in order.

An unchanged node stays the same object.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ucpl.language import nodes, parse, print_file
from ucpl.language.walk import inside, rewritten, walk

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.ucpl"))
TEXT = """ucpl 1
layout x(dp) of any {
  w[l] = (q: a[..b + 1] + k: pad(c, 2 * dp))@dp[1, n] as "w" when dp > d
}
"""


def names(*roots: nodes.Record) -> list[str]:
    return [
        n.path if isinstance(n, nodes.Name) else n.name for n in walk(*roots) if isinstance(n, nodes.Name | nodes.Dim)
    ]


def test_a_walk_meets_what_is_written_in_its_order() -> None:
    file = parse(TEXT)
    assert names(file) == ["l", "a", "b", "c", "dp", "n", "dp", "d"]
    assert next(iter(walk(file))) is file
    assert not any(isinstance(n, nodes.Span) for n in walk(file))
    (layout,) = file.statements
    assert names(layout, layout) == 2 * names(file)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_what_does_not_change_is_the_same_object(path: Path) -> None:
    file = parse(path.read_text(encoding="utf-8"), path.name)
    assert rewritten(file, lambda _: None) is file
    assert inside(file, lambda _: None) is file


def test_a_change_reaches_every_depth_and_keeps_the_rest() -> None:
    file = parse(TEXT)

    def change(node: nodes.Record) -> nodes.Record | None:
        return nodes.Name("ranks") if isinstance(node, nodes.Name) and node.path == "dp" else None

    made = rewritten(file, change)
    assert names(made) == ["l", "a", "b", "c", "ranks", "n", "ranks", "d"]
    assert print_file(made) == print_file(file).replace("2 * dp", "2 * ranks").replace("dp > d", "ranks > d")
    assert names(file)[4] == "dp"


def test_what_is_put_in_is_not_walked_again() -> None:
    expr = nodes.Binary("+", nodes.Name("a"), nodes.Name("a"))
    made = rewritten(expr, lambda n: nodes.Unary("-", n) if isinstance(n, nodes.Name) else None)
    assert made == nodes.Binary("+", nodes.Unary("-", nodes.Name("a")), nodes.Unary("-", nodes.Name("a")))
    whole = rewritten(nodes.Name("a"), lambda n: nodes.Name("b") if isinstance(n, nodes.Name) else None)
    assert whole == nodes.Name("b")
