"""Moves of a plan, bound to bytes: one row a box.

Rows are sorted by their place in the target and found by its ranges. Binding looks up each (file, key) of the plan
among the extents of the opened source and refuses an extent that differs from the plan's. It plans nothing: the plan
alone assigns elements to places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.errors import catalogue as codes
from ucpl.extents import DTYPES, STORED, Extent, Key, StoredTensor, bits_of, in_file, key_text
from ucpl.planning import Bound, Runs
from ucpl.records import frozen
from ucpl.runtime.boxes import Box, compose
from ucpl.tables import widened
from ucpl.tables.operations import Derive, Merge, Node, Reduce, Scale

__all__ = ["Place", "Rows", "Rule", "bind_rows", "check_within", "fit", "rows_of", "views_of", "wanted"]

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
Bools = NDArray[np.bool_]


@frozen
class Place:
    """Tensor of the source or the target, for messages and for reading.

    Of elements that share a byte with another, the shape and every position count bytes.
    """

    file: str
    key: Key
    label: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent | None = None  # None on the target's side: its bytes are bound by the target's files
    rank: int = 0  # the first that holds it

    @classmethod
    def of(cls, tensor: StoredTensor) -> Place:
        """A target of a plan, whose bytes are bound elsewhere."""
        _, shape = in_file(tensor.dtype, tensor.shape)
        return cls(tensor.file, tensor.key, tensor.label, tensor.dtype, shape)

    @property
    def itemsize(self) -> int:
        return STORED[self.dtype].itemsize

    @property
    def numel(self) -> int:
        return int(prod(self.shape))

    @property
    def text(self) -> str:
        return f"{self.label} ({key_text(self.key)})" if self.label else key_text(self.key)

    def index_of(self, position: int) -> tuple[int, ...]:
        """The element at `position` of row-major order."""
        found = []
        for n in reversed(self.shape):
            found.append(position % n)
            position //= n
        return tuple(reversed(found))

    def index_text(self, position: int) -> str:
        """The element at `position` of row-major order as people write it: `[3, 17]`."""
        return str(list(self.index_of(position)))


@frozen
class Rule:
    """Effect of a node on the values of one state."""

    node: Node
    source_value: tuple[float, float] = (1.0, 0.0)
    target_value: tuple[float, float] = (1.0, 0.0)
    lossy: bool = False
    half: Literal["", "low", "high"] = ""  # of bytes of two elements, those that are meant

    @property
    def keeps_values(self) -> bool:
        return not self.reduces and self.source_value == self.target_value

    @property
    def scales(self) -> bool:
        return isinstance(self.node, Scale)

    @property
    def reduces(self) -> bool:
        return isinstance(self.node, Reduce)


@frozen(eq=False)
class Rows:
    """Columns of all moves, sorted by (target, low).

    Row i covers targets [low, high) in part or completely.

    `position` is the byte in `source`'s file where the box starts, `source_step` in bytes, targets in elements. `reach`
    is the running maximum of `high` within a target: rows from `reach.searchsorted(x, "right")` on can cover x.
    """

    rule: I32  # (N,) index into rules, which are in the order of their nodes: the order in which they run
    tensor: I32  # (N,) index into the names of tensors, -1: none
    source: I32
    target: I32
    shape: I64  # (N, D)
    position: I64
    source_step: I64  # (N, D)
    low: I64
    high: I64
    target_step: I64  # (N, D)
    reach: I64
    run: Bools  # one contiguous run on both sides, values kept: bytes go over as they are
    logical: I64  # (N,) element of the source tensor, in row-major order, where the box starts: for messages
    logical_step: I64  # (N, D)
    starts: I64  # (targets + 1,): rows of target t are starts[t]:starts[t + 1]
    rules: tuple[Rule, ...]
    order: tuple[int, ...]  # of each rule: the place of its node among all that run
    bytes_needed: int

    def within(self, target: int, low: int, high: int) -> range:
        """Rows that may have elements in [low, high) of a target.

        All rows that have some are among them.
        """
        a, b = int(self.starts[target]), int(self.starts[target + 1])
        if b - a == 1:
            return range(a, b)
        first = a + int(self.reach[a:b].searchsorted(low, "right"))
        last = a + int(self.low[a:b].searchsorted(high, "left"))
        return range(first, last)

    def are_all(self, within: range, low: int, high: int) -> bool:
        """True if boxes leave nothing of [low, high) open.

        They are one box, or runs in the order in which they begin.
        """
        if not within:
            return False
        begin, end = self.low[within.start : within.stop], self.high[within.start : within.stop]
        if len(within) > 1:
            end = np.maximum.accumulate(end)
            whole = self.run[within.start : within.stop].all() and (begin[1:] <= end[:-1]).all()
        else:
            row = within[0]
            whole = self.shape[row].prod() == end[0] - begin[0]
            whole &= isinstance(self.rules[int(self.rule[row])].node, Merge | Derive)
        return bool(whole and begin[0] <= low and end[-1] >= high)

    def box(self, row: int) -> Box:
        return Box(
            tuple(self.shape[row].tolist()),
            int(self.position[row]),
            tuple(self.source_step[row].tolist()),
            int(self.low[row]),
            tuple(self.target_step[row].tolist()),
        )


def fit(
    wanted: Sequence[StoredTensor], extents: Mapping[tuple[str, Key], Extent], side: str = "source"
) -> tuple[Place, ...]:
    """Each tensor of the plan with its extent.

    Raises: UcplError E600, E601 (all misfits at once, up to twenty).
    """
    found: list[Place] = []
    misfits: list[Diagnostic] = []
    for tensor in wanted:
        extent = extents.get((tensor.file, tensor.key))
        name = f"{tensor.label} ({key_text(tensor.key)})" if tensor.label else key_text(tensor.key)
        dtype, shape = in_file(tensor.dtype, tensor.shape)
        if extent is None:
            has_file = any(file == tensor.file for file, _ in extents)
            misfits.append(
                Diagnostic(
                    "E600",
                    f"the {side} has no {name} in {tensor.file}, which the plan {'reads' if side == 'source' else 'names'}",
                    (
                        Label(
                            tensor.file,
                            f"the plan has {dtype} {list(shape)}, "
                            + (f"the {side} has no such tensor" if has_file else f"the {side} has no such file"),
                            where=key_text(tensor.key),
                        ),
                    ),
                    remedy=codes()["E600"].remedy,
                )
            )
        elif (extent.dtype, extent.shape) != (dtype, shape):
            misfits.append(
                Diagnostic(
                    "E601",
                    f"{name} in {tensor.file} is {extent.dtype} {list(extent.shape)}, "
                    f"the plan was made for {dtype} {list(shape)}",
                    (
                        Label(tensor.file, f"{side}: {extent.dtype} {list(extent.shape)}", where=key_text(tensor.key)),
                        Label("plan", f"made for: {dtype} {list(shape)}", where=key_text(tensor.key)),
                    ),
                    remedy=codes()["E601"].remedy,
                )
            )
        else:
            # A store may divide a file that the plan names (shards): the extent gives the tensor's place.
            found.append(Place(extent.file, tensor.key, tensor.label, tensor.dtype, shape, extent, tensor.rank))
        if len(misfits) == 20:
            break
    if misfits:
        raise UcplError(*misfits)
    return tuple(found)


def bind_rows(bound: Bound, sources: Sequence[Place], targets: Sequence[Place]) -> Rows:
    """One table of all moves.

    Raises: UcplError E603 if a move leaves a tensor, or its target's order is not nested.
    """
    filled = [m for m in bound.moves if len(m)]
    width = max((m.shape.shape[1] for m in filled), default=1)
    rules, places_of, rule = _rules(bound.nodes, filled)

    def column(pick: Callable[[Runs], NDArray[np.integer]]) -> I64:
        if not filled:
            return np.zeros(0, np.int64)
        return np.concatenate([pick(m).astype(np.int64) for m in filled])

    def wide(pick: Callable[[Runs], I64], fill: int) -> I64:
        if not filled:
            return np.full((0, width), fill, np.int64)
        parts = []
        for m in filled:
            a = pick(m)
            parts.append(widened(a, width, fill).astype(np.int64))
        return np.concatenate(parts)

    tensor, source, target = column(lambda m: m.tensor), column(lambda m: m.source), column(lambda m: m.target)
    shape = wide(lambda m: m.shape, 1)  # (N, D)
    logical, logical_step = column(lambda m: m.source_offset), wide(lambda m: m.source_stride, 0)
    low, target_step = column(lambda m: m.target_offset), wide(lambda m: m.target_stride, 0)
    keep = shape.all(axis=1)
    if not keep.all():
        rule, tensor, source, target = rule[keep], tensor[keep], source[keep], target[keep]
        shape, logical, logical_step, low, target_step = (
            shape[keep], logical[keep], logical_step[keep], low[keep], target_step[keep],
        )  # fmt: skip
    check_within("a move takes from", source, (shape, logical, logical_step), sources)
    check_within("a move puts into", target, (shape, low, target_step), targets)
    rule, tensor, source, target, shape, logical, logical_step, low, target_step = _nested(
        rule, tensor, source, target, shape, logical, logical_step, low, target_step, targets
    )

    # Elements of a source tensor -> bytes of its file.
    itemsize = np.array([p.itemsize for p in sources] or [1], np.int64)
    base = np.array([_base(p) for p in sources] or [0], np.int64)
    strided = np.array([p.extent is not None and not p.extent.is_contiguous for p in sources] or [False])
    table: tuple[I64, ...] = (
        rule, tensor, source, target, shape,
        base[source] + logical * itemsize[source], logical_step * itemsize[source][:, None],
        low, target_step, logical, logical_step,
    )  # fmt: skip
    if len(rule) and strided[source].any():
        table = _composed(table, strided[source], sources)
    rule, tensor, source, target, shape, position, source_step, low, target_step, logical, logical_step = table

    high = low + ((shape - 1) * target_step).sum(axis=1) + 1
    order = np.lexsort((high, low, target))
    rule, tensor, source, target, shape, position, source_step, low, target_step, logical, logical_step = (
        a[order] for a in table
    )
    high = high[order]
    starts = np.searchsorted(target, np.arange(len(targets) + 1))
    reach = high.copy()
    for t in np.flatnonzero(np.diff(starts) > 1):
        np.maximum.accumulate(reach[starts[t] : starts[t + 1]], out=reach[starts[t] : starts[t + 1]])

    size = itemsize[source]
    run = (shape[:, 1:] == 1).all(axis=1)
    run &= ((source_step[:, 0] == size) & (target_step[:, 0] == 1)) | (shape[:, 0] == 1)
    names = {name: list(DTYPES).index(bits_of(name)) for name in STORED}
    of_source = np.array([names[p.dtype] for p in sources] or [0])
    of_target = np.array([names[p.dtype] for p in targets] or [0])
    same = of_source[source] == of_target[target] if len(rule) else np.zeros(0, np.bool_)
    plain = np.array([isinstance(r.node, Merge | Derive) and r.keeps_values for r in rules] or [False])
    run &= same & plain[rule]
    apart = np.where(source_step != 0, shape, 1).prod(axis=1)  # one scale is read for many elements
    needed = int((apart * size).sum()) if len(rule) else 0
    return Rows(
        rule.astype(np.int32), tensor.astype(np.int32), source.astype(np.int32), target.astype(np.int32),
        shape, position, source_step, low, high, target_step, reach, run, logical, logical_step, starts, rules, places_of,
        needed,
    )  # fmt: skip


def _rules(nodes: Sequence[Node], moves: Sequence[Runs]) -> tuple[tuple[Rule, ...], tuple[int, ...], I64]:
    """Rules of all nodes, their places, and the rule of each row.

    All tables are covered. Rules are in the order of the nodes.
    """
    used = [np.unique(m.node, return_inverse=True) for m in moves]
    keys = sorted((node, i) for i, (numbers, _) in enumerate(used) for node in numbers.tolist())
    place = {key: n for n, key in enumerate(keys)}
    rules = tuple(
        Rule(nodes[n], moves[i].source_value, moves[i].target_value, moves[i].lossy, moves[i].half) for n, i in keys
    )
    parts = [np.array([place[n, i] for n in numbers.tolist()])[which] for i, (numbers, which) in enumerate(used)]
    order = tuple(node for node, _ in keys)
    return rules, order, np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def views_of(sources: Sequence[Place]) -> I64:
    """For each source, the first one that views the same bytes.

    That is its own number, or that of another with the same view.
    """
    seen: dict[object, int] = {}
    out = np.arange(len(sources))
    for i, place in enumerate(sources):
        e = place.extent
        if e is not None:
            out[i] = seen.setdefault((e.file, e.storage_start, e.offset, e.shape, e.stride, e.dtype), i)
    return out


def _base(place: Place) -> int:
    extent = place.extent
    return extent.storage_start + extent.offset * place.itemsize if extent is not None else 0


def check_within(what: str, index: I64, box: tuple[I64, I64, I64], places: Sequence[Place]) -> None:
    """Check that every box is within its tensor.

    `box`: (N, D) shape, (N,) offset, (N, D) step. Raises: UcplError E603.
    """
    if not len(index):
        return
    shape, offset, step = box
    if index.min() < 0 or index.max() >= len(places):
        fail("E603", f"{what} tensor {int(index.max())}, the plan has {len(places)}")
    numel = np.array([p.numel for p in places], np.int64)
    # A sum of enormous steps in 64 bits can be as small as any: these are checked one by one before.
    bad = (offset < 0) | (offset >= numel[index]) | (step < 0).any(axis=1) | (shape < 0).any(axis=1)
    bad |= ((shape - 1).astype(np.float64) * step > numel[index, None]).any(axis=1)
    last = offset + np.where(bad[:, None], 0, (shape - 1) * step).sum(axis=1)
    bad |= last >= numel[index]
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        place, told = places[int(index[row])], (shape[row].tolist(), int(offset[row]), step[row].tolist())
        fail(
            "E603",
            f"{what} {place.text} elements from {told[1]} on, {told[0]} of them in steps of {told[2]}; it has {place.numel}",
            Label(place.file, where=key_text(place.key)),
        )


def _nested(
    rule: I64, tensor: I64, source: I64, target: I64, shape: I64, logical: I64, logical_step: I64, low: I64,
    target_step: I64, places: Sequence[Place],
) -> tuple[I64, ...]:  # fmt: skip
    """Put dims in falling order of target steps.

    Refuses boxes that visit a target element twice or are interleaved.
    """
    columns = (rule, tensor, source, target, shape, logical, logical_step, low, target_step)
    if not len(rule):
        return columns
    weight = np.where(shape == 1, -1, target_step)  # dims of size 1 go last
    if (np.diff(weight, axis=1) > 0).any():
        order = np.argsort(-weight, axis=1, kind="stable")
        shape, logical_step, target_step = (np.take_along_axis(a, order, 1) for a in (shape, logical_step, target_step))
    inner = ((shape - 1) * target_step)[:, ::-1].cumsum(axis=1)[:, ::-1]
    below = np.zeros_like(inner)
    below[:, :-1] = inner[:, 1:]
    bad = np.flatnonzero(((shape > 1) & (target_step <= below)).any(axis=1))
    if len(bad):
        row = int(bad[0])
        place = places[int(target[row])]
        fail(
            "E603",
            f"a move into {place.text} visits its elements out of order: shape {shape[row].tolist()}, "
            f"steps {target_step[row].tolist()}",
            Label(place.file, where=key_text(place.key)),
        )
    return rule, tensor, source, target, shape, logical, logical_step, low, target_step


def _composed(table: tuple[I64, ...], strided: Bools, sources: Sequence[Place]) -> tuple[I64, ...]:
    """Rows with a strided source, as boxes over the source's storage."""
    rule, tensor, source, target, shape, _, _, low, target_step, logical, logical_step = table
    made: list[tuple[int, Box, Box]] = []
    for row in np.flatnonzero(strided).tolist():
        place = sources[int(source[row])]
        extent = place.extent
        assert extent is not None
        size = place.itemsize
        box = Box(
            tuple(shape[row].tolist()), int(logical[row]), tuple(logical_step[row].tolist()), int(low[row]),
            tuple(target_step[row].tolist()),
        )  # fmt: skip
        # The same cuts with unit weights give each part's place in the tensor's own row-major order.
        in_storage = list(compose(box, extent.shape, extent.stride))
        weights = tuple(prod(extent.shape[i + 1 :]) for i in range(len(extent.shape)))
        in_tensor = list(compose(box, extent.shape, weights))
        for there, here in zip(in_storage, in_tensor, strict=True):
            made.append(
                (
                    row,
                    Box(
                        there.shape,
                        _base(place) + there.source * size,
                        tuple(s * size for s in there.source_step),
                        there.target,
                        there.target_step,
                    ),
                    here,
                )
            )
    width = max(shape.shape[1], max((len(b.shape) for _, b, _ in made), default=1))

    def wide(rows: list[tuple[int, ...]], fill: int) -> I64:
        return np.array([(*r, *([fill] * (width - len(r)))) for r in rows], np.int64).reshape(len(rows), width)

    picked = np.array([row for row, _, _ in made], np.int64)
    keep = ~strided
    fresh: tuple[I64, ...] = (
        rule[picked], tensor[picked], source[picked], target[picked], wide([b.shape for _, b, _ in made], 1),
        np.array([b.source for _, b, _ in made], np.int64), wide([b.source_step for _, b, _ in made], 0),
        np.array([b.target for _, b, _ in made], np.int64), wide([b.target_step for _, b, _ in made], 0),
        np.array([h.source for _, _, h in made], np.int64), wide([h.source_step for _, _, h in made], 0),
    )  # fmt: skip
    fills = {4: 1, 6: 0, 8: 0, 10: 0}
    return tuple(
        np.concatenate([widened(old[keep], width, fills[i]) if i in fills else old[keep], new])
        for i, (old, new) in enumerate(zip(table, fresh, strict=True))
    )


# --- Byte ranges of the source that a run reads ---------------------------------------------------------------------


def rows_of(rows: Rows, spans: Iterable[tuple[int, int, int]]) -> Bools:
    """(N,) the rows that complete spans of targets need.

    spans: (target, its first element, the one behind the last).
    """
    covered = np.zeros(len(rows.low), np.int64)  # elements of a target, with those between a row's own
    for target, low, high in spans:
        within = rows.within(target, low, high)
        some = slice(within.start, within.stop)
        part = np.minimum(rows.high[some], high) - np.maximum(rows.low[some], low)
        covered[some] += np.maximum(part, 0)
    whole: Bools = covered == rows.high - rows.low
    return whole


def wanted(rows: Rows, places: Sequence[Place], mine: Bools | None = None) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges by file that moves read.

    If all of a tensor is moved, that is the tensor, else its boxes as runs of the file. mine: (N,) the rows that count;
    None, all.
    """
    moved = np.zeros(len(places), np.int64)  # elements; if several tensors use one of the source, more than it has
    chosen = np.ones(len(rows.low), np.bool_) if mine is None else mine
    count = rows.shape.prod(axis=1)
    np.add.at(moved, rows.source[chosen], count[chosen])
    out: dict[str, list[tuple[int, int]]] = {}
    parts = []
    for i, place in enumerate(places):
        extent = place.extent
        if extent is None or not moved[i]:
            continue
        if extent.is_contiguous and moved[i] >= place.numel:
            low = extent.storage_start + extent.offset * place.itemsize
            out.setdefault(extent.file, []).append((low, low + place.numel * place.itemsize))
        else:
            parts.append(i)
    for row in np.flatnonzero(np.isin(rows.source, parts) & chosen).tolist():
        place, shape = places[int(rows.source[row])], rows.shape[row].tolist()
        steps = rows.source_step[row].tolist()
        span = place.itemsize + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if place.extent is not None and span == prod(shape) * place.itemsize:
            low = int(rows.position[row])
            out.setdefault(place.extent.file, []).append((low, low + span))
    return out
