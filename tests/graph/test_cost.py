"""Calls of planning for each line of a spec, at any load.

A thousand lines stay cheap.
"""

from __future__ import annotations

from tests.counted import calls
from ucpl.graph import build
from ucpl.placement import locate
from ucpl.testing import Example
from ucpl.verification.proof.coverage import prove


def pairs(count: int) -> list[Example]:
    """Weights in blocks with their scales, each by its own line.

    The second layout stores the products.
    """
    model, factors, products = [], [], []
    for i in range(count):
        model += [f"  w{i} : r c dtype f8_e4m3fn", f"  s{i} : rb cb dtype f32 is scale of w{i} by 2, 2"]
        factors += [f'  w{i} = r@chunk(tp, 2) c as "w{i}"', f'  s{i} = rb@chunk(tp) cb as "s{i}"']
        products += [f'  w{i} = r c@tp dtype bf16 value x * scale as "w{i}"', f"  s{i} = none"]
    head = '\n  mesh tp\n  file weights = torch "{tp}"\n'
    text = "\n".join([
        "ucpl 1\nmodel m {\n  dim r = 8, c = 12, rb = 4, cb = 6", *model, "}",
        f"layout a(tp) of m {{{head}", *factors, "}", f"layout b(tp) of m {{{head}", *products, "}\n",
    ])  # fmt: skip
    return [Example(text, call) for call in ("a(tp = 2)", "b(tp = 3)")]


def spent(count: int) -> tuple[int, int]:
    """Calls of `build` and of `prove`."""
    a, b = (locate(e.layout()) for e in pairs(count))
    graph = build(a, b)
    return calls(lambda: build(a, b)), calls(lambda: prove(graph))


def test_a_line_more_costs_the_same_few_calls_however_many_there_are() -> None:
    spent(2)  # imports and caches are filled now
    few, more, many = (spent(n) for n in (20, 40, 120))
    for a, b, c, limit in zip(few, more, many, (1200, 700), strict=True):
        each = [(b - a) / 20, (c - b) / 80]
        assert each[1] < 1.2 * each[0], "what a line costs grows with the lines beside it"
        assert each[1] < limit, each
