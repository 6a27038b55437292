"""The cost of a plan: bytes read, written and sent, seeks, files.

By rank and in all, from the plan alone. A rank reads the sources of its stored tensors of the target. If ranks run
the plan together, bytes of another rank's stored tensors are sent to it. A stored tensor that several ranks hold
counts for the first of them.
"""

from __future__ import annotations

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.extents import PAIRED, STORED, Shelf, Shelves
from ucpl.planning.plan import Plan
from ucpl.planning.text import files_of
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.tables import I64, Moves, each, once

__all__ = ["Cost", "cost_of", "width_of"]

F64 = NDArray[np.float64]

FILES_TOLD = 200_000  # stored tensors of a plan whose files are counted one by one


@frozen(eq=False)
class Cost:
    """Bytes by rank, and totals.

    Ranks of both sides are numbered alike.
    """

    read: I64  # (R,) bytes from which the stored tensors of a rank of the target are made, and bytes that are compared
    sent: I64  # (R,) of these, bytes in stored tensors of another rank of the source; compared bytes are not sent
    given: I64  # (R,) bytes of a rank of the source that others are sent
    written: I64  # (R,) bytes of a rank's stored tensors of the target, with their padding
    seeks: I64  # (R,) runs of the source that are read
    files_read: int | None  # None: the format distributes tensors over files of its own
    files_written: int | None
    dear: int = field(init=False)  # the rank with the most bytes to read and write

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "dear", int(np.argmax(self.read + self.written)) if len(self.read) else 0)

    @property
    def bytes_read(self) -> int:
        return int(self.read.sum())

    @property
    def bytes_sent(self) -> int:
        return int(self.sent.sum())

    @property
    def bytes_written(self) -> int:
        return int(self.written.sum())

    @property
    def runs(self) -> int:
        return int(self.seeks.sum())

    @property
    def files(self) -> int:
        return (self.files_read or 0) + (self.files_written or 0)


@frozen(eq=False)
class _Side:
    """Owners and element widths of the stored tensors of a side."""

    shelves: Shelves

    def of(self, homes: I64) -> tuple[I64, F64]:
        """The first rank that holds each of them, and bytes per element."""
        shelf = np.searchsorted(self.shelves.starts, homes, side="right") - 1
        rank = np.zeros(len(homes), dtype=np.int64)
        width = np.zeros(len(homes))
        for n in each(shelf):
            one, mine = self.shelves.shelves[n], shelf == n
            number = homes[mine] - self.shelves.starts[n]
            rank[mine] = one.block.rank[number // one.block.choices]
            widths = np.array([width_of(dtype) for dtype in one.dtypes])
            width[mine] = widths[number] if len(widths) > 1 else widths[0]
        return rank, width


def width_of(dtype: str) -> float:
    """Bytes of an element; 0 where no dtype is known."""
    if not dtype:
        return 0.0
    return 0.5 if dtype in PAIRED else float(STORED[dtype].itemsize)


def cost_of(plan: Plan) -> Cost:
    """The cost, computed from the plan's tables without expanding them by tensor."""
    sides = _Side(plan.source_shelves), _Side(plan.target_shelves)
    ranks = 1 + max((int(s.block.rank.max(initial=0)) for side in sides for s in side.shelves.shelves), default=0)
    read, sent, given, written, seeks = (np.zeros(ranks) for _ in range(5))
    touched: list[I64] = []
    for flow in plan.flows:
        elements, runs = _read_of(flow.moves)
        for lane in flow.lanes:
            source = plan.spaces[0].home(flow.moves.source) + lane.source
            target = plan.spaces[1].home(flow.moves.target) + lane.target
            (theirs, width), (ours, _) = sides[0].of(source), sides[1].of(target)
            size = elements * width
            read += np.bincount(ours, weights=size, minlength=ranks)
            seeks += np.bincount(ours, weights=runs, minlength=ranks)
            if flow.kind != "check":
                away = size * (ours != theirs)
                sent += np.bincount(ours, weights=away, minlength=ranks)
                given += np.bincount(theirs, weights=away, minlength=ranks)
            touched.append(source)
    for shelf in plan.target_shelves.shelves:
        written += np.bincount(shelf.block.rank, weights=_sizes(shelf), minlength=ranks)
    own = [format_named(side.framework).has_own_files for side in (plan.source, plan.target)]
    files = None if own[0] else _files_read(plan, touched), None if own[1] else files_of(plan.target_shelves)
    return Cost(_whole(read), _whole(sent), _whole(given), _whole(written), _whole(seeks), *files)


def _whole(column: F64) -> I64:
    return np.rint(column).astype(np.int64)


def _read_of(moves: Moves) -> tuple[I64, I64]:
    """Elements of the source of each move, and its runs."""
    steps = np.where(moves.shape > 1, moves.source_stride, 0)
    counted = np.where(steps != 0, moves.shape, 1)
    elements: I64 = counted.prod(axis=1)
    along: I64 = np.ones(len(moves), dtype=np.int64)
    for _ in range(moves.shape.shape[1]):  # a dim whose step is as long as a run so far makes it longer
        along = along * np.where(steps == along[:, None], moves.shape, 1).max(axis=1, initial=1)
    return elements, elements // along


def _sizes(shelf: Shelf) -> F64:
    """Bytes stored at each coordinate; second names store nothing."""
    block = shelf.block
    numel = block.shape.prod(axis=1).astype(np.float64)
    if len(shelf.dtypes) == 1 and shelf.shares is None:
        sole: F64 = numel * block.choices * width_of(shelf.dtypes[0])
        return sole
    widths = np.array([width_of(dtype) for dtype in shelf.dtypes])
    widths = np.broadcast_to(widths, (len(shelf),)) * (1 if shelf.shares is None else shelf.shares < 0)
    out: F64 = numel * widths.reshape(-1, block.choices).sum(axis=1)
    return out


def _files_read(plan: Plan, touched: list[I64]) -> int:
    """Files to read; for very large plans, all files of the source."""
    shelves = plan.source_shelves
    if len(shelves) > FILES_TOLD:
        return files_of(shelves)
    homes = once(np.concatenate(touched)) if touched else np.zeros(0, dtype=np.int64)
    return len({shelves[n].file for n in homes.tolist()})
