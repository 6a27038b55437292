"""affine_map of universal_checkpoint_info: views that make up each rank's shard.

A view is one of the complete tensor, as by torch.as_strided. This module reads sections of one dim, and copies on every
rank. Source: deepspeed 0.19.8, checkpoint/affine.py.
"""

from __future__ import annotations

from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.names import INFO
from ucpl.formats.deepspeed.order import Shape
from ucpl.records import frozen


def refuse(file: TorchFile, name: str, why: str) -> NoReturn:
    fail("E462", f"{name}: {why}", Label(str(file.path), where=f"{INFO}: {name}"))


@frozen(eq=False)
class _Refusing:
    """The tensor that messages name."""

    entry: Value
    name: str

    def refuse(self, why: str) -> NoReturn:
        fail("E462", f"{self.name}: {why}", Label(str(self.entry.path), where=f"{INFO}: {self.name}"))


@frozen
class _Piece:
    """One view.

    A run of the complete tensor, and its place in the shard.
    """

    shape: Shape
    source: int  # first element
    source_strides: Shape
    dest: int
    dest_strides: Shape

    @classmethod
    def of(cls, entry: Value, tensor: _Refusing) -> _Piece:
        shape = entry.at("shape").shape()
        source, dest = entry.at("source").items(), entry.at("dest").items()
        if len(source) != 2 or len(dest) != 2:
            tensor.refuse("affine_map is of another form")
        made = cls(shape, source[0].whole(), source[1].shape(), dest[0].whole(), dest[1].shape())
        if not len(shape) == len(made.source_strides) == len(made.dest_strides):
            tensor.refuse("affine_map is of another form")
        scale = entry.find("scale")
        if scale is not None and scale.held != 1.0:
            tensor.refuse("a rank holds it scaled, so that its moments and learning rate are scaled, too")
        return made


def affine_sharding(entry: Value, name: str, degree: int) -> Sharding:
    """The cut of a tensor over `degree` ranks.

    Raises: UcplError E455, E462.
    """
    tensor = _Refusing(entry, name)
    origin = f"affine_map of {entry.file}"
    whole = entry.at("logical_shape").shape()
    ranks = entry.at("ranks")
    if len(ranks.mapping()) != degree or any(ranks.find(tp) is None for tp in range(degree)):
        tensor.refuse(f"affine_map of {len(ranks.mapping())} ranks, there are files of {degree}")
    shards = [ranks.at(tp, "shard_shape").shape() for tp in range(degree)]
    pieces = [[_Piece.of(piece, tensor) for piece in ranks.at(tp, "pieces").items()] for tp in range(degree)]
    shapes = [*shards, *(piece.shape for row in pieces for piece in row)]
    if any(len(shape) != len(whole) for shape in shapes):
        tensor.refuse("affine_map is of another form")
    dims = [d for d in range(len(whole)) if any(shape[d] != whole[d] for shape in shapes)]
    if len(dims) > 1:
        tensor.refuse("its pieces are parts of several dims")
    if not whole:
        return Sharding(whole, origin=origin)
    dim = dims[0] if dims else 0
    runs = [_runs(tensor, whole, shard, row, dim) for shard, row in zip(shards, pieces, strict=True)]
    if not dims and all(row == [(0, whole[dim])] for row in runs):
        return Sharding(whole, origin=origin)
    if len({len(row) for row in runs}) != 1:
        tensor.refuse("ranks hold different numbers of pieces of it")
    return Sharding(whole, dim, _sections(tensor, runs, whole[dim]), origin)


def _sections(tensor: _Refusing, runs: list[list[tuple[int, int]]], size: int) -> tuple[Section, ...]:
    """The sections of the cut dim, in order.

    runs: per rank; column i has the (start, width) of the i-th section on each rank.
    """
    sections: list[Section] = []
    base = 0
    for column in zip(*runs, strict=True):
        is_copied = len(column) > 1 and len(set(column)) == 1 and column[0][1]
        first = base
        for start, width in column[:1] if is_copied else column:
            if width and start != base:
                tensor.refuse(f"a piece begins at {start}, the one before ends at {base}")
            base += width
        sections.append(Section(base - first, None if is_copied else tuple(width for _, width in column)))
    if base != size:
        tensor.refuse(f"its pieces end at {base} of {size}")
    return tuple(sections)


def strides(shape: Shape) -> tuple[int, ...]:
    """Strides of a row-major tensor, as DeepSpeed writes them.

    A stride is 0 if a later dim has no positions.
    """
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * shape[i + 1]
    return tuple(out)


def _runs(tensor: _Refusing, whole: Shape, shard: Shape, pieces: list[_Piece], dim: int) -> list[tuple[int, int]]:
    """(start, width) along `dim` of each piece.

    The pieces must fill the shard end to end in this order.
    """
    of_whole, of_shard = strides(whole), strides(shard)
    out: list[tuple[int, int]] = []
    end = 0
    for piece in pieces:
        width = piece.shape[dim]
        for given, expected in ((piece.source_strides, of_whole), (piece.dest_strides, of_shard)):
            if any(n > 1 and a != b for n, a, b in zip(piece.shape, given, expected, strict=True)):
                tensor.refuse(f"a piece with the strides {list(given)}, where {list(expected)} are the tensor's")
        start, rest = divmod(piece.source, of_whole[dim] or 1)
        if width and (rest or piece.dest != end * of_shard[dim]):
            tensor.refuse("a piece that is no run of positions of one dim, or not in its turn")
        out.append((start, width))
        end += width
    if end != shard[dim]:
        tensor.refuse(f"pieces of {end} positions make up a shard of {shard[dim]}")
    return out
