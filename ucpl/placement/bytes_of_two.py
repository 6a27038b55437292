"""Elements of half a byte: one tensor has both of a byte.

They are elements 2i and 2i + 1 of one dim.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.extents import PAIRED, key_text
from ucpl.layout.scope import at
from ucpl.placement.placement import Part, Pieces, Placement
from ucpl.tables import I64, Bools, pairs, whole_pairs

__all__ = ["check_whole_bytes", "dim_of_pairs", "is_paired"]


def is_paired(placement: Placement, part: Part) -> bool:
    """True if a part has elements of half a byte."""
    if part.dtype is not None:
        return part.dtype in PAIRED
    return any(placement.layout.dtype_of(placement.tensors[t], part.state) in PAIRED for t in part.tensors)


def check_whole_bytes(placement: Placement) -> None:
    """Check that no stored tensor begins or ends inside a byte.

    Boxes of a dim are end to end: it is enough that all are of even sizes. Raises E231.
    """
    for part in placement.parts:
        if len(part.folded) and is_paired(placement, part):
            p = part.folded
            good = whole_pairs(p.high - p.low, (p.offset, p.stride))
            good &= _last_extents(part)[p.home] % 2 == 0
            if not good.all():
                _refuse(placement, part, int(np.flatnonzero(~good)[0]))


def dim_of_pairs(placement: Placement, part: Part) -> str:
    """The dim along which two elements of a part share a byte."""
    p = part.folded
    tensor = placement.layout.placed[placement.tensors[int(p.tensor[0])]]
    return tensor.dims[int(np.flatnonzero(_along(p)[0])[0])]


def _last_extents(part: Part) -> I64:
    """Number of elements of each stored tensor along its last axis."""
    blocks = part.homes.blocks
    return np.concatenate(
        [np.repeat(b.shape[:, -1] if b.shape.shape[1] else np.ones(len(b.rank)), b.choices) for b in blocks]
    )


def _along(p: Pieces) -> Bools:
    return pairs(p.high - p.low, p.stride)


def _refuse(placement: Placement, part: Part, row: int) -> NoReturn:
    p = part.folded
    path = placement.tensors[int(p.tensor[row])]
    tensor, home = placement.layout.placed[path], part.homes.home(int(p.home[row]))
    label = at(part.span, "stored so") if part.span.line else Label(placement.layout.call, where=path)
    place = Label(home.file, f"rank {home.rank}", where=key_text(home.key))
    steps = p.stride[row][: len(tensor.dims)]
    along = np.flatnonzero(steps == 1)[::-1]  # where others have one element, the last is meant
    count = tensor.counts[int(along[0])] if len(along) else 1
    if not len(along) or count % 2:
        what = f"{tensor.dims[int(along[0])]} = {count}" if len(along) else "no dim of the model"
        fail(
            "E231",
            f"two elements of `{path}` share a byte, and along its last axis runs {what}",
            label,
            place,
            remedy="end the pattern with a dim of an even size, or with its digits",
        )
    dim, low, high = (
        tensor.dims[int(along[0])],
        int(p.low[row, along[0]]),
        int(p.high[row, along[0]]),
    )
    ways = [str(n) for n in range(2, count // 2 + 1) if count // 2 % n == 0]
    fail(
        "E231",
        f"two elements of `{path}` share a byte, and rank {home.rank} has {dim} from {low} to {high}:"
        f" it {'begins' if low % 2 else 'ends'} inside a byte",
        label,
        place,
        remedy=f"cut it at complete bytes: {dim}@spread(tp, 2)"
        + (f"; or equally, {count} go into {', '.join(ways[:8])} pieces of complete bytes" if ways else ""),
    )
