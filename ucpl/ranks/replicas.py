"""Copies of one value on several ranks, compared by digests.

The comparison is done after the transfer. A rank compares the elements that it received with every other copy of them.
The ranks that have the copies send digests, so no element is sent twice. Elements that no target has are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import xxhash
from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, key_text
from ucpl.live.tensors import memory_of
from ucpl.planning import Plan, Runs
from ucpl.ranks.exchange import Tensors, dtype_of, seen
from ucpl.ranks.rank_graph import Message, MessagePart
from ucpl.ranks.remote_boxes import Held, Name, Piece, RemoteBox, Transfer, box_of
from ucpl.records import define

__all__ = ["DIGEST", "Digests", "copies_of", "compare_copies"]

DIGEST = 16  # bytes
REMEDY = (
    "find out which copy is right and broadcast it first; if copies may differ, give each rank a file (its axis in the name)"
    " and write `any @AXIS` on the line"
)


def copies_of(plan: Plan, held: Held, pieces: Sequence[Piece]) -> list[Piece]:
    """Copies of a rank's share that `pieces` do not read, as pieces.

    `source` has the dtype of the target.
    """
    read = {(piece.peer, piece.source, piece.target) for piece in pieces}
    found = []
    for runs in plan.moves:
        if runs.kind not in ("copy", "check") or runs.source_value != runs.target_value or runs.half:
            continue
        for row in _rows(runs, plan, held):
            way = Transfer(plan.targets[int(runs.target[row])].label, runs.state, runs.state)
            source, target = box_of(plan, runs, row, "source"), box_of(plan, runs, row, "target")
            for peer in held.get(source.name, ()):
                if (peer, source, target) not in read:
                    found.append(Piece(peer, evolve(source, dtype=target.dtype), target, way))
    return found


def _rows(runs: Runs, plan: Plan, held: Held) -> Iterator[int]:
    """Rows with elements, of stored tensors that may have another copy."""
    several = [runs.kind == "check" or len(held.get((t.file, t.key), ())) > 1 for t in plan.sources]
    return (row for row in range(len(runs)) if several[int(runs.source[row])] and runs.shape[row].all())


@define(eq=False)
class Digests:
    """Digests of boxes of some tensors, each made once.

    `most`: bytes that are copied at a time.
    """

    tensors: Tensors
    most: int
    _known: dict[RemoteBox, bytes] = field(factory=dict)

    def of(self, box: RemoteBox) -> bytes:
        """The digest of a box's elements in row-major order, after a cast."""
        if box not in self._known:
            found = xxhash.xxh3_128()
            room = max(1, self.most // DTYPES[box.dtype].itemsize)
            for part in MessagePart(Message(0, box.dtype, box.elements), 0, box).split(room):
                values = seen(self.tensors[box.name], part.box)
                found.update(memory_of(values.to(dtype_of(box.dtype))))
            self._known[box] = found.digest()
        return self._known[box]


def compare_copies(
    copies: Sequence[Piece], told: Mapping[int, bytes], pieces: Sequence[Piece], targets: Digests
) -> None:
    """Compare the copies with this rank's elements.

    `told`: the digests of each rank, in the order of `copies`. Raises: UcplError E613 if a copy differs.
    """
    at: dict[int, int] = {}
    other = []
    for copy in copies:
        begin = at.get(copy.peer, 0)
        at[copy.peer] = begin + DIGEST
        if told[copy.peer][begin : begin + DIGEST] != targets.of(copy.target):
            other.append(copy)
    if not other:
        return
    one = other[0]
    taken = next((p for p in pieces if p.target.name == one.target.name and p.target.end > one.target.offset), None)
    more = f", and {len(other) - 1:,} more" if len(other) > 1 else ""
    label = Label(_where(one.source.name, one.peer), where=key_text(one.source.name[1]))
    labels = (
        [label] if taken is None else [label, Label(_where(taken.source.name, taken.peer), "the copy that was taken")]
    )
    what = f"{one.way.state} of {one.way.label} has other values on rank {one.peer} than the copy that was taken{more}"
    fail("E613", what, *labels, remedy=REMEDY)


def _where(name: Name, rank: int) -> str:
    return f"{name[0]} of rank {rank}"
