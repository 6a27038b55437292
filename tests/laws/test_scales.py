"""Laws of tensors in blocks.

The scaled elements and their scales equal the oracle's, for all degrees and cuts.
"""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.laws.agreement import agree, both
from tests.laws.moves import Fill, cells, fills
from tests.oracle import Meaning, scale_of
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.language import parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.placement import locate
from ucpl.planning import Plan, order
from ucpl.testing import numbers
from ucpl.verification.proof.coverage import prove

AXES = ("tp", "dp")


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A model of one tensor in blocks, with or without experts.

    Odd sizes, so that last blocks are short.
    """
    r, c, e, b, d = (draw(st.integers(1, n)) for n in (14, 9, 3, 5, 4))
    lead = draw(st.sampled_from(("", "e ")))
    lines = [
        f"  dim r = {r}, c = {c}, e = {e}, rb = ceil(r, {b}), cb = ceil(c, {d})",
        "  dtype f32",
        f"  w : {lead}r c",
        f"  s : {lead}rb cb is scale of w by {b}, {d}",
        "  n : c",
    ]
    return "\n".join(lines), {
        "r": r,
        "c": c,
        "e": e,
        "rb": ceil(r / b),
        "cb": ceil(c / d),
        "b": b,
        "d": d,
        "lead": len(lead),
    }


def cut(draw: st.DrawFn, n: int, block: int, ways: int, names: tuple[str, str]) -> tuple[str, str]:
    """A cut of a dim of n elements, and of their scales.

    The second is the dim of its blocks.
    """
    dim, blocks = names
    found = [(dim, blocks), (f"{dim}@chunk(tp, {block})", f"{blocks}@chunk(tp)"), (f"{dim}@chunk(tp, {block})", blocks)]
    found += [(f"pad({dim}, {block} * tp)@tp", f"pad({blocks}, tp)@tp")]
    if n % block == 0:
        found += [(f"{dim}@spread(tp, {block})", f"{blocks}@spread(tp)")]
    return draw(st.sampled_from(found if ways else found[:1]))


def stored(draw: st.DrawFn, size: dict[str, int], name: str, product: bool) -> str:
    """A layout of the factors, cut in blocks, or of the product."""
    lead = "e" if size["lead"] else ""
    along = draw(st.sampled_from(("r", "c")))
    brackets = draw(st.sampled_from(("", "[e]"))) if lead else ""
    first = "" if brackets or not lead else f"{lead} "
    key = ".{e}" if brackets else ""
    w, s = (draw(st.permutations(t)) for t in (["r", "c"], ["rb", "cb"]))
    if product:
        pieces = draw(
            st.sampled_from((f"{along}@chunk(tp)", f"{along}@chunk(dp)@chunk(tp)", f"pad({along}, 3 * tp)@tp", along))
        )
        body = [
            f'w{brackets} = {first}{" ".join(pieces if d == along else d for d in w)} dtype f32 value x * scale as "w{key}"'
        ]
    else:
        mine, theirs = cut(draw, size[along], size["b" if along == "r" else "d"], 1, (along, along + "b"))
        shown = " ".join(mine if d == along else d for d in w), " ".join(theirs if d == along + "b" else d for d in s)
        body = [f'w{brackets} = {first}{shown[0]} as "w{key}"', f's{brackets} = {first}{shown[1]} as "s{key}"']
    body += ['n = c as "n"']
    lines = "".join(f"  {line}\n" for line in body)
    return f'layout {name}(tp, dp) of m {{\n  mesh dp tp\n  file weights = torch "{{dp}}.{{tp}}"\n{lines}}}\n'


@st.composite
def cases(draw: st.DrawFn, product: bool) -> tuple[str, str, str]:
    """A text, and calls of a source of factors and a target.

    The target has their product, or factors again.
    """
    model, size = draw(models())
    text = f"ucpl 1\nmodel m {{\n{model}\n}}\n" + stored(draw, size, "a", False) + stored(draw, size, "z", product)
    degrees = [draw(st.tuples(st.integers(1, 3), st.integers(1, 2))) for _ in range(2)]
    assume(degrees[0] != degrees[1])
    return text, f"a(tp = {degrees[0][0]}, dp = {degrees[0][1]})", f"z(tp = {degrees[1][0]}, dp = {degrees[1][1]})"


def planned(text: str, source: str, target: str) -> tuple[Plan, tuple[Meaning, Meaning], tuple[Layout, Layout]]:
    (here, a), (there, z) = both(text, source), both(text, target)
    agree(here, locate(a))
    agree(there, locate(z))
    graph = build(locate(a), locate(z))
    prove(graph)
    return order(graph), (here, there), (a, z)


@given(cases(product=True))
@settings(max_examples=50, deadline=None)
def test_each_element_of_a_product_is_scaled_once_by_the_scale_of_its_block(case: tuple[str, str, str]) -> None:
    plan, (here, there), _ = planned(*case)
    source, target = cells(here), cells(there)
    moved = fills(plan)

    def ends(fill: Fill) -> tuple[Any, Any]:
        return source[fill.source[0]][fill.source[1]], target[fill.target[0]][fill.target[1]]

    for fill in moved:
        (_, path, index), (_, goal, place) = ends(fill)
        if fill.kind == "scale":
            assert goal == "w" and (path, index) == scale_of(there, "w", place)
        else:
            assert (path, index) == (goal, place)
    wanted = Counter((home, at) for home, held in target.items() for at, c in enumerate(held) if c and c[1] == "w")
    assert Counter(fill.target for fill in moved if fill.kind == "scale") == wanted
    assert Counter(fill.target for fill in moved if fill.kind == "copy" and ends(fill)[1][1] == "w") == wanted


@given(cases(product=True))
@settings(max_examples=15, deadline=None)
def test_products_of_element_numbers_are_those_of_an_independent_repetition(case: tuple[str, str, str]) -> None:
    plan, (here, there), (layout, _) = planned(*case)
    counts = {path: layout.tensors[path].counts for path in ("w", "s", "n")}
    whole = {p: np.arange(int(np.prod(n)), dtype=np.float64).reshape(n) + 2 for p, n in counts.items()}
    sizes = layout.tensors["s"].scaling
    assert sizes is not None
    big = whole["s"]
    for dim, n in enumerate(sizes.sizes):
        big = big.repeat(n, dim)
    wanted = {**whole, "w": whole["w"] * big[tuple(slice(n) for n in counts["w"])]}

    def flat(meaning: Meaning, values: dict[str, Any]) -> dict[Any, Any]:
        return {
            home: np.array([np.nan if c is None else values[c[1]][c[2]] for c in held], dtype=np.float64)
            for home, held in cells(meaning).items()
        }

    start = flat(here, whole)
    from ucpl.extents import key_text

    given_ = {(s.file, s.key): start[s.file, key_text(s.key)] for s in plan.sources}
    made = numbers.run(plan, given_)
    for (file, key), values in made.items():
        assert np.array_equal(values, flat(there, wanted)[file, key_text(key)], equal_nan=True)


@given(cases(product=False))
@settings(max_examples=20, deadline=None)
def test_factors_move_together_to_other_degrees(case: tuple[str, str, str]) -> None:
    plan, (here, there), _ = planned(*case)
    source, target = cells(here), cells(there)
    for fill in fills(plan):
        assert fill.kind in ("copy", "check")
        assert source[fill.source[0]][fill.source[1]] == target[fill.target[0]][fill.target[1]]


@given(cases(product=True), st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_scale_of_another_block_is_found_by_the_proof(case: tuple[str, str, str], which: int) -> None:
    text, source, target = case
    graph = build(*(locate(both(text, call)[1]) for call in (source, target)))
    scales = [f for f in graph.flows if f.kind == "scale"]
    flow = scales[which % len(scales)]
    row = which % len(flow.moves)
    bits = graph.spaces[0].bits
    length = graph.sources[int(flow.moves.source[row] >> bits)].numel
    assume(length > 1)
    at = int(flow.moves.source[row]) & ((1 << bits) - 1)
    flow.extract.boxes.offset[row] += 1 if at + 1 < length else -1
    with pytest.raises(UcplError) as caught:
        prove(graph)
    assert caught.value.diagnostics[0].code == "E347"


def test_a_scale_of_another_tensor_is_found_by_the_proof() -> None:
    """Of two tensors of one shape, in the same block.

    Only the owner of the scale distinguishes them.
    """
    model = "  dim r = 4, b = 2\n  dtype f32\n" + "".join(
        f"  {t} : r\n  {t}.s : b is scale of {t} by 2\n" for t in "uv"
    )
    factors = "".join(f'  {t} = r as "{t}"\n  {t}.s = b as "{t}.s"\n' for t in "uv")
    product = "".join(f'  {t} = r dtype f32 value x * scale as "{t}"\n' for t in "uv")
    text = f'ucpl 1\nmodel m {{\n{model}}}\nlayout a() of m {{\n  file weights = torch "a"\n{factors}}}\n'
    text += f'layout z() of m {{\n  file weights = torch "z"\n{product}}}\n'
    graph = build(*(locate(resolve(load(("two.ucpl", text)), parse_call(call))) for call in ("a()", "z()")))
    prove(graph)
    flow = next(f for f in graph.flows if f.kind == "scale")
    bits, homes = graph.spaces[0].bits, {s.label: n for n, s in enumerate(graph.sources)}
    at = flow.moves.source.copy()
    swapped = {homes["u.s"]: homes["v.s"], homes["v.s"]: homes["u.s"]}
    flow.extract.boxes.offset[:] += np.array([(swapped[int(p) >> bits] - (int(p) >> bits)) << bits for p in at])
    with pytest.raises(UcplError, match="is not of its block") as caught:
        prove(graph)
    assert caught.value.diagnostics[0].code == "E347"
