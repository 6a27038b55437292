"""The mesh of a folder's chunks.

Degrees of FSDP and tp, and cut dims.
FSDP2 cuts dim 0 of a tensor as torch.chunk does. With tensor parallelism, it cuts the part of a tp rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isqrt

from ucpl.extents import Extent, Setting
from ucpl.records import frozen

__all__ = ["Boxes", "TensorCut", "ChunkMesh", "boxes_by", "boxes_of", "chunked", "mesh_of", "mesh_settings"]

RANKS_MAX = 1 << 14  # chunks of one tensor over which no mesh is looked for
Shape = tuple[int, ...]
Boxes = Mapping[Shape, Shape]  # where a chunk begins -> its shape; those that have elements


@frozen
class TensorCut:
    """The cut of one tensor.

    dim: the dim over tp, or None for a copy on each tp rank. `whole`: FSDP does not cut it.
    """

    dim: int | None = None
    whole: bool = False


@frozen
class ChunkMesh:
    fsdp: int
    tp: int
    cuts: dict[str, TensorCut]


def boxes_of(extents: Iterable[Extent], dims: Mapping[str, int]) -> dict[str, dict[Shape, Shape]]:
    """Boxes of tensors by stored name, from the keys of chunks.

    A key is the name, then the begin in `dims[name]` dims.
    """
    out: dict[str, dict[Shape, Shape]] = {}
    for extent in extents:
        for name in ("/".join(map(str, extent.key[: len(extent.key) - n])) for n in (len(extent.shape),)):
            if name in dims:
                offset = tuple(int(step) for step in extent.key[len(extent.key) - len(extent.shape) :])
                out.setdefault(name, {})[offset] = extent.shape
    return out


def chunked(size: int, ways: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of each part of torch.chunk, those without elements left out."""
    each = -(-size // ways) if size else 0
    return ((low, min(each, size - low)) for low in range(0, size, each or 1))


def boxes_by(shape: Shape, cut: TensorCut, fsdp: int, tp: int) -> dict[Shape, Shape]:
    """Chunks of a tensor that is cut so."""
    return dict(_boxes(shape, cut, fsdp, tp))


def _boxes(shape: Shape, cut: TensorCut, fsdp: int, tp: int) -> Iterator[tuple[Shape, Shape]]:
    if not shape:
        yield (), ()
        return
    for low, length in [(0, 0)] if cut.dim is None else chunked(shape[cut.dim], tp):
        begin, size = [0] * len(shape), list(shape)
        if cut.dim is not None:
            begin[cut.dim], size[cut.dim] = low, length
        for first, rows in chunked(size[0], 1 if cut.whole else fsdp):
            yield (begin[0] + first, *begin[1:]), (rows, *size[1:])


def mesh_of(shapes: Mapping[str, Shape], found: Mapping[str, Boxes]) -> ChunkMesh | None:
    """The least mesh that makes these chunks, or None.

    shapes: complete ones. found: the chunks of each tensor. If FSDP and tp both explain a cut, FSDP is used.
    """
    marks = {name: (shape, frozenset(found[name].items())) for name, shape in shapes.items()}
    kinds: dict[object, tuple[Shape, Boxes]] = {mark: (mark[0], found[name]) for name, mark in marks.items()}
    most = max((len(boxes) for _, boxes in kinds.values()), default=1)
    if most > RANKS_MAX:
        return None
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1][1]))  # many chunks rule out a mesh sooner
    for ranks in range(most, 2 * most + 1):
        for tp in _divisors(ranks):
            cuts: dict[object, TensorCut] = {}
            for mark, (shape, boxes) in ordered:
                cut = _cut(shape, boxes, ranks // tp, tp)
                if cut is None:
                    break
                cuts[mark] = cut
            else:
                return ChunkMesh(ranks // tp, tp, {name: cuts[mark] for name, mark in marks.items()})
    return None


def mesh_settings(shapes: Mapping[str, Shape], extents: Iterable[Extent], origin: str) -> dict[str, Setting]:
    """The degrees as settings of a checkpoint, if there is a mesh.

    shapes: of tensors by their stored names.
    """
    mesh = mesh_of(shapes, boxes_of(extents, {name: len(shape) for name, shape in shapes.items()}))
    if mesh is None:
        return {}
    out = {"fsdp": Setting(mesh.fsdp, origin), "tp": Setting(mesh.tp, origin)}
    return out | ({"tp_rule": Setting("chunk", "DTensor cuts as torch.chunk does")} if mesh.tp > 1 else {})


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _cut(shape: Shape, found: Boxes, fsdp: int, tp: int) -> TensorCut | None:
    dims = range(len(shape)) if tp > 1 else ()
    for cut in (
        TensorCut(),
        *(TensorCut(d) for d in dims),
        TensorCut(whole=True),
        *(TensorCut(d, whole=True) for d in dims),
    ):
        if _count(shape, cut, fsdp, tp) == len(found) and _are(shape, cut, fsdp, tp, found):
            return cut
    return None


def _are(shape: Shape, cut: TensorCut, fsdp: int, tp: int, found: Boxes) -> bool:
    """Compare the expected chunks of a cut with those found."""
    return all(found.get(at) == size for at, size in _boxes(shape, cut, fsdp, tp))


def _count(shape: Shape, cut: TensorCut, fsdp: int, tp: int) -> int:
    """The number of chunks of a tensor with this cut."""
    if not shape:
        return 1
    over_fsdp = 1 if cut.whole else fsdp
    if cut.dim != 0:
        return (1 if cut.dim is None else _parts(shape[cut.dim], tp)) * _parts(shape[0], over_fsdp)
    each = -(-shape[0] // tp)
    full, rest = divmod(shape[0], each) if each else (0, 0)
    return full * _parts(each, over_fsdp) + _parts(rest, over_fsdp)


def _parts(size: int, ways: int) -> int:
    """The number of torch.chunk's parts that have elements."""
    return -(-size // -(-size // ways)) if size else 0
