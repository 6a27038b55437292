"""How the chunks of tensors lie on a mesh: FSDP's and tensor parallelism's degrees, and which dim of each tensor tp cuts.

FSDP2 cuts dim 0 of a tensor as torch.chunk does; over tensor parallelism, it cuts what a tp rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ucpl.extents import Extent
from ucpl.records import frozen

__all__ = ["Boxes", "Cut", "Mesh", "boxes_by", "boxes_of", "chunked", "mesh_of"]

Shape = tuple[int, ...]
Boxes = Mapping[Shape, Shape]  # where a chunk begins -> its shape; those that have elements


@frozen
class Cut:
    """How one tensor is cut. dim: over tp; None: a copy on each. whole: FSDP does not cut it."""

    dim: int | None = None
    whole: bool = False


@frozen
class Mesh:
    fsdp: int
    tp: int
    cuts: dict[str, Cut]


def boxes_of(extents: Iterable[Extent], dims: Mapping[str, int]) -> dict[str, dict[Shape, Shape]]:
    """Of tensors by their stored names, from chunks' keys: name, then where it begins in `dims[name]` dims."""
    out: dict[str, dict[Shape, Shape]] = {}
    for extent in extents:
        for name in ("/".join(map(str, extent.key[: len(extent.key) - n])) for n in (len(extent.shape),)):
            if name in dims:
                offset = tuple(int(step) for step in extent.key[len(extent.key) - len(extent.shape) :])
                out.setdefault(name, {})[offset] = extent.shape
    return out


def chunked(size: int, ways: int) -> list[tuple[int, int]]:
    """(begin, length) of each part of torch.chunk, those without elements left out."""
    each = -(-size // ways) if size else 0
    return [(low, min(each, size - low)) for low in range(0, size, each)] if each else []


def boxes_by(shape: Shape, cut: Cut, fsdp: int, tp: int) -> dict[Shape, Shape]:
    """Chunks of a tensor that is cut so."""
    if not shape:
        return {(): ()}
    out: dict[Shape, Shape] = {}
    for low, length in [(0, 0)] if cut.dim is None else chunked(shape[cut.dim], tp):
        begin, size = [0] * len(shape), list(shape)
        if cut.dim is not None:
            begin[cut.dim], size[cut.dim] = low, length
        for first, rows in chunked(size[0], 1 if cut.whole else fsdp):
            out[begin[0] + first, *begin[1:]] = (rows, *size[1:])
    return out


def mesh_of(shapes: Mapping[str, Shape], found: Mapping[str, Boxes]) -> Mesh | None:
    """The least mesh on which every tensor lies so. None: there is none.

    shapes: whole; found: the chunks of each. Which of two axes cuts what they cut alike is one and the same: FSDP does.
    """
    most = max((len(one) for one in found.values()), default=1)
    widest = max((max(_counts(one), default=1) for one in found.values()), default=1)
    for ranks in range(most, 2 * max(most, widest) + 1):
        for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
            cuts = _cuts(shapes, found, ranks // tp, tp)
            if cuts is not None:
                return Mesh(ranks // tp, tp, cuts)
    return None


def _counts(found: Boxes) -> list[int]:
    """Different begins along each dim."""
    return [len(set(column)) for column in zip(*found, strict=True)]


def _cuts(shapes: Mapping[str, Shape], found: Mapping[str, Boxes], fsdp: int, tp: int) -> dict[str, Cut] | None:
    out: dict[str, Cut] = {}
    known: dict[tuple[Shape, frozenset[tuple[Shape, Shape]]], Cut | None] = {}
    for name, shape in shapes.items():
        mark = shape, frozenset(found[name].items())
        if mark not in known:
            known[mark] = _cut(shape, found[name], fsdp, tp)
        cut = known[mark]
        if cut is None:
            return None
        out[name] = cut
    return out


def _cut(shape: Shape, found: Boxes, fsdp: int, tp: int) -> Cut | None:
    dims = range(len(shape)) if tp > 1 else ()
    for cut in (Cut(), *(Cut(d) for d in dims), Cut(whole=True), *(Cut(d, whole=True) for d in dims)):
        if boxes_by(shape, cut, fsdp, tp) == found:
            return cut
    return None
