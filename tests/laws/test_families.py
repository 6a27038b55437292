"""Law: a family of tensors is placed as each of them alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.families import CALLS, any_models
from ucpl.errors import UcplError
from ucpl.language import nodes, parse_call
from ucpl.layout import load, resolve
from ucpl.placement import Part, Placement, locate
from ucpl.placement.families import apart

LIBRARY = load()


def placed(model: nodes.Model, call: str, *, fold: bool) -> Placement | str:
    try:
        return locate(resolve(LIBRARY, parse_call(call), model=model, fold=fold))
    except UcplError as error:
        return error.diagnostics[0].code


def boxes(placement: Placement) -> Counter[Hashable]:
    """The places of each element, tensor by tensor, in no order."""
    out: Counter[Hashable] = Counter()
    for part in placement.parts:
        p, homes = part.pieces, part.homes.each
        for row in range(len(p)):
            path = placement.tensors[int(p.tensor[row])]
            columns = zip(p.low[row].tolist(), p.high[row].tolist(), p.stride[row].tolist(), strict=True)
            box = tuple(
                (low, high, step if high - low > 1 else 0) for low, high, step in columns if (low, high) != (0, 1)
            )
            at = homes[int(p.home[row])], int(p.offset[row]), int(p.policy[row]), int(p.over[row])
            out[(part.state, path, box, *at, part.dtype, part.lossy, part.value_of(path), part.is_alias)] += 1
    return out


def in_order(placement: Placement) -> list[Hashable]:
    """Stored tensors in the order in which files have them."""
    homes: list[Hashable] = [(part.state, home) for part in placement.parts for home in part.homes.each]
    if any(part.begins is None for part in placement.parts):
        return homes
    places = [
        begin + coordinate
        for part in placement.parts
        for block, begins in zip(part.homes.blocks, _by_block(part), strict=True)
        for coordinate in range(len(block.rank))
        for begin in begins
    ]
    assert sorted(places) == list(range(len(homes)))
    return [home for _, home in sorted(zip(places, homes, strict=True), key=lambda pair: pair[0])]


def _by_block(part: Part) -> list[list[int]]:
    assert part.begins is not None
    left = part.begins.tolist()
    return [[left.pop(0) for _ in range(block.choices)] for block in part.homes.blocks]


@pytest.mark.fault(
    "Against an oracle or the truth", "tensors that are planned as one family", "each place as without families"
)
@settings(max_examples=120, deadline=None)
@given(any_models(), st.sampled_from(CALLS))
def test_a_family_is_placed_as_its_tensors_are(model: nodes.Model, call: str) -> None:
    alone, together = placed(model, call, fold=False), placed(model, call, fold=True)
    if isinstance(alone, str) or isinstance(together, str):
        assert alone == together
        return
    assert boxes(apart(together)) == boxes(alone)
    assert together.flats == alone.flats
    assert in_order(together) == in_order(alone)
    members = [name for path in together.layout.placed for name in together.layout.members(path)]
    assert sorted(members) == sorted(alone.layout.tensors) == sorted(together.layout.tensors)


def test_names_that_differ_in_numbers_are_a_family_and_others_of_a_size_are_one() -> None:
    shapes = {"layers.0.a": 3, "layers.1.a": 3, "x": 4, "layers.0.b": 3, "y": 4, "z": 5, "layers.1.b": 3}
    items = [nodes.Tensor(name, (nodes.Dimension(None, n),), "f32", "parameter") for name, n in shapes.items()]
    made = placed(nodes.Model("m", tuple(items)), "plain()", fold=True)
    assert isinstance(made, Placement)
    found = {path: family.names for path, family in made.layout.families.items()}
    assert found == {
        "layers.*.a": ("layers.0.a", "layers.1.a"),
        "x and 1 more": ("x", "y"),
        "layers.*.b": ("layers.0.b", "layers.1.b"),
    }
    assert list(made.layout.placed) == ["layers.*.a", "x and 1 more", "layers.*.b", "z"]
