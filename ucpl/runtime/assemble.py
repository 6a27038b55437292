"""Assembly of one tile: the elements of a target's range.

A tile is put together from the source in the worker's buffer. The nodes of the graph that have boxes in the range run
in the graph's order, each kind by its function in `HANDLERS`. An Extract and a Split are the two ends of a row of the
node between them: elements are read straight to their place, and a Reconstruct computes its elements where they are
read. In a target, some node reaches every position (`execute` refuses others); in a comparison, positions may be left
out. Not here: the division into tiles, and the use of the bytes (execute writes them, compare compares them with
others).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.extents import key_text, largest
from ucpl.records import frozen
from ucpl.runtime.boxes import Box, clip
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.fills import Fills
from ucpl.runtime.reading import Reader, packed, strided
from ucpl.runtime.rows import Place, Rows
from ucpl.runtime.values import Array, Conversion, Wide, decode, encode, infinite_at, mean, put, value_text
from ucpl.tables import each
from ucpl.tables.operations import Check, Derive, Fill, Merge, Node, Reduce, Scale

_ROUNDED = "`value` makes a number that the type does not hold: write `lossy` behind it, where rounding is meant"
_COPIED = (
    "Find out which one is right. `copies(n)` holds while these elements are equal; if each was trained, they are dims"
)

__all__ = ["Assembler", "CopyDifference"]

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


@frozen
class CopyDifference:
    """First element of a box whose copy differs from the tile.

    Positions are row-major in the stored tensors.
    """

    row: int
    target: int  # index into the places of the target
    target_position: int
    source: int
    source_position: int
    value: bytes  # of the tile, in the target's dtype
    other: bytes  # of the copy, in the target's dtype


@frozen(eq=False)
class Assembly:
    """Elements [low, high) of a target, assembled at the front of `work.tile`."""

    target: int
    low: int
    high: int
    itemsize: int  # of the target
    reader: Reader
    work: Workspace
    on_difference: Callable[[CopyDifference], None] | None = None

    @property
    def size(self) -> int:
        return (self.high - self.low) * self.itemsize

    @property
    def single_crc(self) -> int | None:
        """CRC of a tile that one read has filled.

        It is the first of its group: held windows are read for other tiles, too.
        """
        fragments = self.reader.fragments
        alone = len(fragments) == 1 and not self.reader.holds
        return fragments.crc[0] if alone and fragments.size[0] == self.size else None

    def at(self, box: Box) -> int:
        """The byte of the tile where a box of the target begins."""
        return (box.target - self.low) * self.itemsize

    def steps(self, box: Box) -> tuple[int, ...]:
        return tuple(s * self.itemsize for s in box.target_step)


@frozen(eq=False)
class Assembler:
    """State that is the same for all tiles.

    `file_of[s]` is the index of source s's file in the reader's files.
    """

    rows: Rows
    fills: Fills
    sources: Sequence[Place]
    targets: Sequence[Place]
    file_of: Sequence[int]
    tensors: Sequence[str]  # names that `rows.tensor` points into

    def assemble(
        self,
        target: int,
        low: int,
        high: int,
        reader: Reader,
        work: Workspace,
        on_difference: Callable[[CopyDifference], None] | None = None,
    ) -> int | None:
        """Assemble elements [low, high) of a target at the front of `work.tile`.

        Returns their CRC if reading has computed it. Raises: UcplError E605, E607, E610, E611, E613 (unless
        `on_difference` takes it).
        """
        rows = self.rows
        tile = Assembly(target, low, high, self.targets[target].itemsize, reader, work, on_difference)
        within = rows.within(target, low, high)
        fills = self.fills.within(target, low, high)
        if not fills and len(within) == 1 and rows.run[row := within[0]]:  # most tiles: one read of one Merge
            begin, end = int(rows.low[row]), int(rows.high[row])
            if begin <= low and high <= end:
                position = int(rows.position[row]) + (low - begin) * tile.itemsize
                return reader.run(self.file_of[int(rows.source[row])], position, work.tile_view[: tile.size])
        run = not fills and rows.run[within.start : within.stop].all()
        if not rows.are_all(within, low, high):
            work.tile[: tile.size] = 0
        for handler, some in self._walk(within, fills):
            handler(self, tile, some)
        return tile.single_crc if run else None

    def _walk(self, within: range, fills: range) -> Iterator[tuple[Handler, I64]]:
        """Actions on rows of one target, node by node.

        Neighbours with the same action run at once. So do the sources of one mean, which belong to several nodes if
        they are stored in different ways.
        """
        rules, filled = self.rows.rule[within.start : within.stop], self.fills.node[fills.start : fills.stop]
        steps = [(self.rows.order[n], self.rows.rules[n].node, n) for n in each(rules)]
        steps += [(self.fills.order[n], self.fills.nodes[n], n) for n in each(filled)]
        steps.sort(key=itemgetter(0))
        for (handler, _), group in groupby(steps, lambda step: _work(step[1])):
            numbers = [n for _, _, n in group]
            among, start = (filled, fills.start) if handler is Assembler._fill else (rules, within.start)
            mine = among == numbers[0] if len(numbers) == 1 else np.isin(among, numbers)  # ten times as long
            yield handler, np.flatnonzero(mine) + start

    # ---- one operation each ----------------------------------------------------------------------------------------------

    def _merge(self, tile: Assembly, among: I64) -> None:
        """Move boxes from their source to the Split's place.

        If the dtypes differ, values are cast on the way.
        """
        run = self.rows.run[among]
        self._runs(tile, among[run])
        for row in among[~run].tolist():
            self._copy(tile, row)

    def _runs(self, tile: Assembly, among: I64) -> None:
        """Rows that are runs of bytes on both sides, neighbours joined."""
        rows, low, itemsize = self.rows, tile.low, tile.itemsize
        begin, end = np.maximum(rows.low[among], low), np.minimum(rows.high[among], tile.high)
        chosen = begin < end
        if not chosen.any():
            return
        among, begin, end = among[chosen], begin[chosen], end[chosen]
        position = rows.position[among] + (begin - rows.low[among]) * itemsize
        at, size = (begin - low) * itemsize, (end - begin) * itemsize
        file = np.array([self.file_of[s] for s in rows.source[among].tolist()])
        head = np.ones(len(among), np.bool_)
        head[1:] = (
            (file[1:] != file[:-1]) | (position[1:] != position[:-1] + size[:-1]) | (at[1:] != at[:-1] + size[:-1])
        )
        heads = np.flatnonzero(head)
        joined = np.add.reduceat(size, heads)
        view = tile.work.tile_view
        for f, p, a, n in zip(
            file[heads].tolist(), position[heads].tolist(), at[heads].tolist(), joined.tolist(), strict=True
        ):
            tile.reader.run(f, p, view[a : a + n])

    def _copy(self, tile: Assembly, row: int) -> None:
        conversion = self._conversion(row, tile.target)
        source, work = int(self.rows.source[row]), tile.work
        size, file = self.sources[source].itemsize, self.file_of[source]
        for box in clip(self.rows.box(row), tile.low, tile.high):
            if conversion.is_identity:
                tile.reader.gather(
                    file, box.source, box.shape, box.source_step, work.tile, tile.at(box), tile.steps(box), size,
                    work.staging,
                )  # fmt: skip
                continue
            for part in blocks(box, work.share.block, by_source=True):
                raw = self._fetch(tile, file, part, size)
                made = conversion.convert(raw)
                if conversion.check_exact and (at := conversion.inexact_at(raw, made)) is not None:
                    self._not_exact(tile, row, part, at, raw)
                self._check_finite(tile, row, part, made, partial(conversion.read, raw))
                there = strided(work.tile, tile.at(part), part.shape, tile.steps(part), tile.itemsize)
                there[...] = _as_packed(made, part, tile.itemsize)

    @staticmethod
    def _fetch(tile: Assembly, file: int, box: Box, size: int) -> U8:
        """A box of source elements, packed, in the scratch."""
        scratch, dense = tile.work.scratch, packed(box.shape, size)
        tile.reader.gather(file, box.source, box.shape, box.source_step, scratch, 0, dense, size, tile.work.staging)
        return scratch[: box.elements * size]

    def _check(self, tile: Assembly, among: I64) -> None:
        """Compare boxes with the elements at their places.

        The first difference of each row is reported.
        """
        for row in among.tolist():
            if (found := self._difference(tile, row)) is None:
                continue
            if tile.on_difference is None:
                self.unequal(found)
            else:
                tile.on_difference(found)

    def _difference(self, tile: Assembly, row: int) -> CopyDifference | None:
        conversion, itemsize = self._conversion(row, tile.target), tile.itemsize
        source = int(self.rows.source[row])
        size = self.sources[source].itemsize
        for box in clip(self.rows.box(row), tile.low, tile.high):
            for part in blocks(box, tile.work.share.block):
                made = conversion.convert(self._fetch(tile, self.file_of[source], part, size))
                self._met(row, tile.target, made)
                there = strided(tile.work.tile, tile.at(part), part.shape, tile.steps(part), itemsize)
                unequal = there != _as_packed(made, part, itemsize)
                if not unequal.any():
                    continue
                at = int(np.flatnonzero(unequal.reshape(part.elements, -1).any(axis=1))[0])
                goal = _element(at, part.shape, part.target, part.target_step)
                place = (goal - tile.low) * itemsize
                value = tile.work.tile[place : place + itemsize].tobytes()
                other = made[at * itemsize : (at + 1) * itemsize].tobytes()
                return CopyDifference(row, tile.target, goal, source, self._logical(row, goal), value, other)
        return None

    def _met(self, row: int, target: int, made: U8) -> None:
        """Take note of values that are about to be compared."""

    def _fill(self, tile: Assembly, among: I64) -> None:
        """Boxes of padding. `among` are rows of the fills."""
        for row in among.tolist():
            node = self.fills.nodes[int(self.fills.node[row])]
            cell = encode(np.array([node.value]), self.targets[tile.target].dtype)
            for box in clip(self.fills.box(row), tile.low, tile.high):
                there = strided(tile.work.tile, tile.at(box), box.shape, tile.steps(box), tile.itemsize)
                there[...] = strided(cell, 0, (1,) * len(box.shape), (0,) * len(box.shape), tile.itemsize)

    def _reduce(self, tile: Assembly, rows: I64) -> None:
        """Compute means, sums and maxima, rounded once.

        Sources are added in their order, one block of the tile at a time.
        """
        among = sorted(rows.tolist(), key=lambda row: (int(self.rows.source[row]), row))
        conversions = {row: self._conversion(row, tile.target) for row in among}
        for conversion in conversions.values():
            if "c" in (conversion.source[0], conversion.target[0]):
                there = self.targets[tile.target]
                fail("E605", f"{there.text} is complex: no mean, sum or maximum is made of it", Label(there.file))
        node = conversions[among[0]].rule.node
        assert isinstance(node, Reduce)
        itemsize = tile.itemsize
        members = _members_of(
            (row, conversions[row].rule.node, self.sources[int(self.rows.source[row])].rank) for row in among
        )
        wide = _dtype_of(node.how, conversions.values())
        # The sums, one member and the numbers that it is compared with live as long as the values that are added.
        block = tile.work.share.block // 4
        for begin in range(tile.low, tile.high, block):
            end = min(tile.high, begin + block)
            sums = _Sums.over(begin, end, wide)
            for rows_of in members:
                self._put(tile, rows_of, conversions, sums)
            count = sums.count
            whole = mean(sums.total, count) if node.how == "mean" else sums.total
            made = conversions[among[0]].stored(whole)
            if node.exact and (at := conversions[among[0]].rounded_at(whole, made, count)) is not None:
                _reject_rounded(self.name(among[0]), node, self.targets[tile.target], begin + at, whole[at].item())
            every = Box((end - begin,), 0, (0,), begin, (1,))
            self._check_finite(tile, among[0], every, made, partial(np.asarray, whole))
            goal = strided(tile.work.tile, (begin - tile.low) * itemsize, (end - begin,), (itemsize,), itemsize)
            values = strided(made, 0, (end - begin,), (itemsize,), itemsize)
            if count.all():
                goal[...] = values
            else:
                goal[count > 0] = values[count > 0]

    def _put(self, tile: Assembly, among: list[int], conversions: Mapping[int, Conversion], sums: _Sums) -> None:
        """Put one of several copies.

        The first that has an element gives it; the others must equal it.
        """
        node = conversions[among[0]].rule.node
        assert isinstance(node, Reduce)
        end = sums.begin + len(sums.total)
        alone = len(among) == 1
        own = sums if alone else _Sums.over(sums.begin, end, sums.total.dtype)
        for row in among:
            for box in clip(self.rows.box(row), sums.begin, end):
                source = int(self.rows.source[row])
                raw = self._fetch(tile, self.file_of[source], box, self.sources[source].itemsize)
                found = conversions[row].logical(raw, sums.total.dtype).reshape(box.shape)
                values, seen = own.of(box)
                if alone:
                    put(node.how, (values, seen), (found, np.ones_like(seen)))
                    continue
                unequal = (seen > 0) & (values.view(np.uint64) != found.view(np.uint64))
                if unequal.any():
                    self._members_differ(tile, among, row, box, int(np.flatnonzero(unequal)[0]))
                values[...] = found
                seen[...] = 1
        if not alone:
            put(node.how, (sums.total, sums.count), (own.total, own.count))

    def _scale(self, tile: Assembly, among: I64) -> None:
        """Multiply boxes of the tile by a factor each, in fp32.

        The product is rounded once. A factor is read once for all elements of a block.
        """
        dtype = self.targets[tile.target].dtype
        for row in among.tolist():
            source = int(self.rows.source[row])
            here, file = self.sources[source], self.file_of[source]
            for box in clip(self.rows.box(row), tile.low, tile.high):
                for part in blocks(box, tile.work.share.block):
                    apart = tuple(n if step else 1 for n, step in zip(part.shape, part.source_step, strict=True))
                    raw = self._fetch(tile, file, evolve(part, shape=apart), here.itemsize)
                    factors = decode(raw, here.dtype).astype(np.float32).reshape(apart)
                    there = strided(tile.work.tile, tile.at(part), part.shape, tile.steps(part), tile.itemsize)
                    values = decode(np.ascontiguousarray(there).reshape(-1).view(np.uint8), dtype).reshape(part.shape)
                    with np.errstate(all="ignore"):
                        made = encode((values.astype(np.float32) * factors).reshape(-1), dtype)
                    self._check_finite(tile, row, part, made, partial(_products, values, factors))
                    there[...] = _as_packed(made, part, tile.itemsize)

    def _conversion(self, row: int, target: int) -> Conversion:
        source = self.sources[int(self.rows.source[row])]
        conversion = Conversion(source.dtype, self.targets[target].dtype, self.rows.rules[int(self.rows.rule[row])])
        if not conversion.is_possible:
            there = self.targets[target]
            fail(
                "E605",
                f"{source.text} is {source.dtype}, {there.text} is {there.dtype}: no cast is known between them",
                Label(source.file, where=key_text(source.key)),
                Label(there.file, where=key_text(there.key)),
            )
        return conversion

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _logical(self, row: int, goal: int) -> int:
        """Position of an element in the source tensor, row-major.

        goal: its position in the target.
        """
        rows = self.rows
        position = int(rows.logical[row])
        left = goal - int(rows.low[row])
        for n, step, along in zip(
            rows.shape[row].tolist(), rows.target_step[row].tolist(), rows.logical_step[row].tolist(), strict=True
        ):
            if n > 1:
                j = min(left // step, n - 1)
                left -= j * step
                position += j * along
        return position

    def _origin(self, row: int, goal: int) -> Label:
        """The source's element of a target position."""
        source = self.sources[int(self.rows.source[row])]
        return Label(source.file, where=f"{key_text(source.key)}{source.index_text(self._logical(row, goal))}")

    def name(self, row: int) -> str:
        tensor = int(self.rows.tensor[row])
        return (
            self.tensors[tensor] if 0 <= tensor < len(self.tensors) else self.sources[int(self.rows.source[row])].label
        )

    def provider(self, target: int, position: int) -> tuple[Place, int] | None:
        """Source tensor of a copied element, and the element's place in it."""
        for row in self.rows.within(target, position, position + 1):
            node = self.rows.rules[int(self.rows.rule[row])].node
            if not isinstance(node, Check | Scale) and any(clip(self.rows.box(row), position, position + 1)):
                return self.sources[int(self.rows.source[row])], self._logical(row, position)
        return None

    def unequal(self, found: CopyDifference) -> None:
        there = self.targets[found.target]
        copy = self.sources[found.source]
        labels = []
        if (first := self.provider(found.target, found.target_position)) is not None:
            place, position = first
            labels.append(
                Label(
                    place.file,
                    value_text(found.value, there.dtype),
                    where=f"{key_text(place.key)}{place.index_text(position)}",
                )
            )
        labels.append(
            Label(
                copy.file,
                value_text(found.other, there.dtype),
                where=f"{key_text(copy.key)}{copy.index_text(found.source_position)}",
            )
        )
        fail(
            "E613",
            f"two copies of {self.name(found.row)} differ at element {copy.index_text(found.source_position)} of "
            f"{key_text(copy.key)} in {copy.file}",
            *labels,
            notes=(f"both go to {there.text}{there.index_text(found.target_position)} of {there.file}",),
            remedy=_COPIED if first is not None and first[0] is copy else "",
            about=copy.key,
        )

    def _members_differ(self, tile: Assembly, among: list[int], row: int, box: Box, at: int) -> NoReturn:
        """Report two unequal copies of one member of a mean or sum.

        They come from ranks that differ along other axes than those that are reduced.
        """
        goal = _element(at, box.shape, box.target, box.target_step)
        first = next(r for r in among if any(clip(self.rows.box(r), goal, goal + 1)))
        labels = [self._origin(one, goal) for one in (first, row)]
        there = self.targets[tile.target]
        node = self.rows.rules[int(self.rows.rule[row])].node
        assert isinstance(node, Reduce)
        fail(
            "E613",
            f"two copies of {self.name(row)} differ, and the {node.how} that it goes into is over other axes",
            *labels,
            notes=(f"both go to {there.text}{there.index_text(goal)} of {there.file}",),
            remedy=f"name the axis along which they differ, too, as in `{node.how} @tp @dp`; or trust one: `any @dp`",
        )

    def _check_finite(self, tile: Assembly, row: int, box: Box, made: U8, before: Callable[[], Array]) -> None:
        """Check that no cast makes a number infinite.

        Elements that are already in place are compared as they are.
        """
        there = self.targets[tile.target]
        if tile.on_difference is not None or not self._conversion(row, tile.target).may_overflow:
            return
        if (at := infinite_at(made, there.dtype, before)) is not None:
            goal = _element(at, box.shape, box.target, box.target_step)
            _reject_infinite(self.name(row), before()[at].item(), self._origin(row, goal), there, goal)

    def _not_exact(self, tile: Assembly, row: int, box: Box, at: int, raw: U8) -> None:
        source, there = self.sources[int(self.rows.source[row])], self.targets[tile.target]
        goal = _element(at, box.shape, box.target, box.target_step)
        index = source.index_text(self._logical(row, goal))
        value = value_text(raw.reshape(-1, source.itemsize)[at].tobytes(), source.dtype)
        fail(
            "E605",
            f"{self.name(row)}: {source.dtype} {value} at {index} has no equal in {there.dtype}",
            self._origin(row, goal),
            Label(there.file, f"is {there.dtype}", where=f"{key_text(there.key)}{there.index_text(goal)}"),
            remedy=_ROUNDED if source.dtype == there.dtype else "",
        )


Handler = Callable[[Assembler, Assembly, I64], None]

# Handlers of the nodes between the ends of a row. A new operation is one more entry.
HANDLERS: dict[type[Node], Handler] = {
    Merge: Assembler._merge,
    Derive: Assembler._merge,
    Reduce: Assembler._reduce,
    Scale: Assembler._scale,
    Check: Assembler._check,
    Fill: Assembler._fill,
}


def _work(node: Node) -> tuple[Handler, str]:
    """Equal for nodes that may run at once."""
    return HANDLERS[type(node)], node.how if isinstance(node, Reduce) else ""


def blocks(box: Box, limit: int, *, by_source: bool = False) -> list[Box]:
    """Cut a box into boxes of at most `limit` elements.

    It is cut along its first dims; by_source: the dims that are first in the source.
    """
    if box.elements <= limit:
        return [box]
    axes = [i for i, n in enumerate(box.shape) if n > 1]
    axis = max(axes, key=lambda i: box.source_step[i]) if by_source else axes[0]
    count = box.shape[axis]
    each = max(1, limit // (box.elements // count))
    parts: list[Box] = []
    for i in range(0, count, each):
        part = Box(
            (*box.shape[:axis], min(each, count - i), *box.shape[axis + 1 :]),
            box.source + i * box.source_step[axis],
            box.source_step,
            box.target + i * box.target_step[axis],
            box.target_step,
        )
        parts += blocks(part, limit, by_source=by_source)
    return parts


def _products(values: Array, factors: Array) -> Array:
    """Of finite values and factors they are finite in fp64."""
    products: Array = (values.astype(np.float64) * factors).reshape(-1)
    return products


def _as_packed(made: U8, box: Box, itemsize: int) -> NDArray[Any]:
    """Contiguous elements in the shape of a box."""
    return strided(made, 0, box.shape, packed(box.shape, itemsize), itemsize)


def _element(at: int, shape: tuple[int, ...], start: int, step: tuple[int, ...]) -> int:
    for n, s in zip(reversed(shape), reversed(step), strict=True):
        start += at % n * s
        at //= n
    return start


# --- Values that several sources are put together to ----------------------------------------------------------------


@frozen(eq=False)
class _Sums:
    """Accumulated elements of a target from `begin` on.

    Their type has 8 bytes. Each element has the number of values that were added to it.
    """

    begin: int
    total: Array
    count: NDArray[np.uint32]

    @classmethod
    def over(cls, begin: int, end: int, dtype: Wide) -> _Sums:
        return cls(begin, np.zeros(end - begin, dtype), np.zeros(end - begin, np.uint32))

    def of(self, box: Box) -> tuple[Array, NDArray[np.uint32]]:
        """Both, as a box of the target."""
        at = box.target - self.begin
        total = np.ndarray(box.shape, self.total.dtype, self.total, 8 * at, tuple(8 * s for s in box.target_step))
        return total, np.ndarray(box.shape, np.uint32, self.count, 4 * at, tuple(4 * s for s in box.target_step))


def _dtype_of(how: str, conversions: Iterable[Conversion]) -> Wide:
    """Type of the accumulated values: fp64.

    The maximum of integers that fp64 does not hold is kept as an integer.
    """
    wide = {conversion.wide for conversion in conversions}
    return wide.pop() if how == "max" and len(wide) == 1 else np.dtype(np.float64)


def _members_of(among: Iterable[tuple[int, Node, int]]) -> list[list[int]]:
    """Rows by the member that they are copies of.

    Each row comes with its node and the rank of its source.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for row, node, rank in among:
        assert isinstance(node, Reduce)
        number = node.member(rank)
        found.setdefault(("row", row) if number is None else ("member", number), []).append(row)
    return list(found.values())


def _reject_rounded(name: str, node: Reduce, there: Place, goal: int, value: float | int) -> NoReturn:
    """Raise E605: the target's type rounds an exact mean or sum."""
    fail(
        "E605",
        f"{name}: the {node.how} {value!r} at {there.index_text(goal)} has no equal in {there.dtype}",
        Label(there.file, f"is {there.dtype}", where=f"{key_text(there.key)}{there.index_text(goal)}"),
    )


def _reject_infinite(name: str, value: float, source: Label, there: Place, goal: int) -> NoReturn:
    """A number that is beyond the greatest of the target's type. E607."""
    where = f"{key_text(there.key)}{there.index_text(goal)}"
    fail(
        "E607",
        f"{name}: {value!r} at {there.index_text(goal)} is too large for {there.dtype}, which ends at {largest(there.dtype):g}",
        source,
        Label(there.file, f"is {there.dtype}", where=where),
    )
