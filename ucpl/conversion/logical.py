"""Turns a placement over a dialect's names into one over logical tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ucpl.errors import Label, fail

if TYPE_CHECKING:
    from ucpl.conversion.dialects import Dialect, DialectTensor, Names
    from ucpl.conversion.side import Side
    from ucpl.layout import Layout, LogicalTensor
    from ucpl.placement import Part, Pieces, Placement

__all__ = ["placements", "over_logical_tensors"]


def placements(names: Names, source: Side, target: Side) -> tuple[Placement, Placement]:
    """The placements of both sides over the logical tensors."""
    return over_logical_tensors(source.placement, names.source), over_logical_tensors(target.placement, names.target)


def over_logical_tensors(placement: Placement, names: Dialect) -> Placement:
    """Turn a placement over names into one over the logical tensors.

    Elements of a name that belong to no logical tensor become padding.
    """
    logical, layout = names.placement, names.placement.layout
    known = [names.named.get(path) for path in placement.tensors]
    width = max((len(t.counts) for t in layout.tensors.values()), default=1)
    made: dict[int, tuple[Pieces, Part]] = {}

    def rows(part: Part) -> Pieces:
        if id(part.folded) not in made:
            made[id(part.folded)] = (_through(part, known, width), part)
        return made[id(part.folded)][0]

    parts = tuple(_padded(evolve(part, folded=rows(part), live=None)) for part in placement.parts)
    return evolve(
        placement,
        layout=_layout(placement.layout, layout, _kinds(placement.layout, names)),
        tensors=logical.tensors,
        parts=parts,
        own=placement,
    )


def _through(part: Part, known: Sequence[DialectTensor | None], width: int) -> Pieces:
    from ucpl.placement import Pieces
    from ucpl.placement.dialect_boxes import through

    p = part.pieces
    out: list[tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, int]] = []
    columns = (p.tensor, p.home, p.low, p.high, p.stride, p.offset, p.policy, p.over)
    for tensor, home, low, high, stride, offset, policy, over in zip(*(c.tolist() for c in columns), strict=True):
        named = known[tensor]
        if named is None:
            continue
        dims = len(named.shape)
        for logical, piece in named.pieces:
            for box in through(piece, tuple(low[:dims]), tuple(high[:dims]), offset, tuple(stride[:dims])):
                more = width - len(box.low)
                zeros = (0,) * more
                out.append(
                    (
                        logical,
                        home,
                        box.low + zeros,
                        box.high + (1,) * more,
                        box.stride + zeros,
                        box.offset,
                        policy,
                        over,
                    )
                )
    n = len(out)
    tensors, homes, lows, highs, strides, offsets, policies, overs = zip(*out, strict=True) if out else ((),) * 8

    def block(values: Sequence[object]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64).reshape(n, width)

    def column(values: Sequence[object]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64)

    return Pieces(
        tensor=column(tensors),
        home=column(homes),
        low=block(lows),
        high=block(highs),
        stride=block(strides),
        home_stride=np.zeros((n, width), dtype=np.int64),
        offset=column(offsets),
        policy=column(policies),
        over=column(overs),
    )


def _padded(part: Part) -> Part:
    """Count elements of no logical tensor as padding, with any values."""
    filled = np.zeros(len(part.homes), dtype=np.int64)
    np.add.at(filled, part.folded.home, part.folded.volume)
    blocks = []
    at = 0
    for block in part.homes.blocks:
        mine = filled[at : at + len(block)].reshape(-1, block.choices)
        at += len(block)
        cells = block.shape.prod(axis=1)
        assert (mine == mine[:, :1]).all(), "stored tensors that are cut alike have padding alike"
        padding = cells - mine[:, 0]
        grown = padding > block.padding
        blocks.append(evolve(block, padding=padding, live=block.live | grown))
    return evolve(part, homes=type(part.homes)(tuple(blocks)))


def _kinds(layout: Layout, names: Dialect) -> dict[str, LogicalTensor]:
    """Logical tensors with the dtype and kind of the named ones.

    Raises: UcplError E337 if these differ.
    """
    logical = names.placement
    out = dict(names.placement.layout.tensors)
    said: dict[str, str] = {}
    for name, named in names.named.items():
        tensor = layout.tensors.get(name)
        if tensor is None:
            continue
        for number, _ in named.pieces:
            path = logical.tensors[number]
            first = said.setdefault(path, name)
            other = layout.tensors[first]
            if _facts_of(other) != _facts_of(tensor):
                fail(
                    "E337",
                    f"`{path}` is `{first}` and `{name}`, and they are of other dtypes or kinds",
                    Label(layout.call, f"{other.dtype} {other.kind}", where=first),
                    Label(layout.call, f"{tensor.dtype} {tensor.kind}", where=name),
                    remedy=f"the model has one `{path}` of all layers: freeze or train all of them first, or none",
                )
            out[path] = evolve(out[path], dtype=tensor.dtype, kind=tensor.kind, state_dtypes=tensor.state_dtypes)
    return out


def _facts_of(tensor: LogicalTensor) -> tuple[str | None, str, dict[str, str]]:
    return tensor.dtype, tensor.kind, dict(tensor.state_dtypes)


def _layout(own: Layout, logical: Layout, tensors: dict[str, LogicalTensor]) -> Layout:
    return evolve(
        own,
        tensors=tensors,
        sizes={**own.sizes, **logical.sizes},
        indices=logical.indices,
        aliases={},
        model_groups=(),
        model_name=logical.model_name,
        model_arguments=logical.model_arguments,
    )
