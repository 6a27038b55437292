"""One tile: every element of a range of a target tensor, put together from the source in the worker's buffer.

Copies first, then means and sums, then checks of replicas against what was put there. Positions that no move reaches are
zero. Not here: which tiles there are, and what happens to the bytes (execute writes them, compare holds them against others).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.extents import key_text
from ucpl.runtime.boxes import Box, clip
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.reading import Reader, strided
from ucpl.runtime.rows import CHECK, COPY, REDUCE, Place, Rows
from ucpl.runtime.values import Conversion, mean, value_text

__all__ = ["Assembler", "Difference"]

U8 = NDArray[np.uint8]


@frozen
class Difference:
    """The first element of a box whose copy is not what the tile holds. Positions are row-major in the stored tensors."""

    row: int
    target: int  # index into the places of the target
    target_position: int
    source: int
    source_position: int
    value: bytes  # of the tile, in the target's dtype
    other: bytes  # of the copy, in the target's dtype


@frozen(eq=False)
class Assembler:
    """Everything that stays the same from tile to tile. `file_of[s]` is the index of source s's file in the reader's files."""

    rows: Rows
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
        on_difference: Callable[[Difference], None] | None = None,
    ) -> int | None:
        """Elements [low, high) of a target into the front of `work.tile`. Returns their CRC where reading has computed it.

        Raises: UcplError E605, E610, E611, E613 (unless `on_difference` takes it).
        """
        rows = self.rows
        within = rows.within(target, low, high)
        itemsize = self.targets[target].itemsize
        size = (high - low) * itemsize
        if len(within) == 1 and rows.run[row := within[0]]:
            begin, end = int(rows.low[row]), int(rows.high[row])
            if begin <= low and high <= end:
                position = int(rows.position[row]) + (low - begin) * itemsize
                return reader.run(self.file_of[int(rows.source[row])], position, work.tile_view[:size])
        run = rows.run[within.start : within.stop]
        if run.all():
            if not self._runs(within, low, high, itemsize, reader, work):
                return self._single_crc(reader, size)
            return None
        work.tile[:size] = 0
        others = (np.flatnonzero(~run) + within.start).tolist()
        if len(others) < len(within):
            self._runs(within, low, high, itemsize, reader, work, zeroed=True)
        kinds = [rows.rules[int(rows.rule[row])].kind for row in others]
        for row, kind in zip(others, kinds, strict=True):
            if kind == COPY:
                self._copy(row, target, low, high, reader, work)
        if REDUCE in kinds:
            self._reduce(
                [r for r, k in zip(others, kinds, strict=True) if k == REDUCE], target, low, high, reader, work
            )
        for row, kind in zip(others, kinds, strict=True):
            if kind == CHECK:
                self._check(row, target, low, high, reader, work, on_difference)
        return None

    @staticmethod
    def _single_crc(reader: Reader, size: int) -> int | None:
        """The CRC of a tile that was read as one run."""
        fragments = reader.fragments
        if len(fragments) == 1 and fragments.size[0] == size:
            return fragments.crc[0]
        return None

    def _runs(
        self, within: range, low: int, high: int, itemsize: int, reader: Reader, work: Workspace, zeroed: bool = False
    ) -> bool:
        """Rows that are runs of bytes on both sides, neighbours joined. Returns whether the tile has other bytes, too."""
        rows = self.rows
        part = slice(within.start, within.stop)
        begin, end = np.maximum(rows.low[part], low), np.minimum(rows.high[part], high)
        chosen = np.flatnonzero(rows.run[part] & (begin < end))
        begin, end = begin[chosen], end[chosen]
        source = rows.source[part][chosen]
        position = rows.position[part][chosen] + (begin - rows.low[part][chosen]) * itemsize
        at, size = (begin - low) * itemsize, (end - begin) * itemsize
        if not zeroed and int(size.sum()) < (high - low) * itemsize:
            work.tile[: (high - low) * itemsize] = 0
        if not len(chosen):
            return True
        file = np.array([self.file_of[s] for s in source.tolist()])
        head = np.ones(len(chosen), np.bool_)
        head[1:] = (
            (file[1:] != file[:-1]) | (position[1:] != position[:-1] + size[:-1]) | (at[1:] != at[:-1] + size[:-1])
        )
        heads = np.flatnonzero(head)
        joined = np.add.reduceat(size, heads)
        view = work.tile_view
        for f, p, a, n in zip(
            file[heads].tolist(), position[heads].tolist(), at[heads].tolist(), joined.tolist(), strict=True
        ):
            reader.run(f, p, view[a : a + n])
        return len(heads) != 1 or int(joined[0]) != (high - low) * itemsize

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

    def _copy(self, row: int, target: int, low: int, high: int, reader: Reader, work: Workspace) -> None:
        conversion = self._conversion(row, target)
        source = int(self.rows.source[row])
        size, itemsize = self.sources[source].itemsize, self.targets[target].itemsize
        file = self.file_of[source]
        for box in clip(self.rows.box(row), low, high):
            if conversion.is_identity:
                out_step = tuple(s * itemsize for s in box.target_step)
                reader.gather(
                    file, box.source, box.shape, box.source_step, work.tile, (box.target - low) * itemsize, out_step, size,
                    work.staging,
                )  # fmt: skip
                continue
            for part in blocks(box, work.share.block):
                raw = self._fetch(file, part, size, reader, work)
                made = conversion.convert(raw)
                if conversion.check_exact and (at := conversion.inexact_at(raw, made)) is not None:
                    self._not_exact(row, target, part, at, raw, size)
                self._put(made, part, low, itemsize, work.tile)

    def _fetch(self, file: int, box: Box, size: int, reader: Reader, work: Workspace) -> U8:
        """A box of source elements, packed, in the scratch."""
        count = box.elements
        packed = _packed(box.shape, size)
        reader.gather(file, box.source, box.shape, box.source_step, work.scratch, 0, packed, size, work.staging)
        return work.scratch[: count * size]

    @staticmethod
    def _put(made: U8, box: Box, low: int, itemsize: int, tile: U8) -> None:
        there = strided(
            tile, (box.target - low) * itemsize, box.shape, tuple(s * itemsize for s in box.target_step), itemsize
        )
        there[...] = strided(made, 0, box.shape, _packed(box.shape, itemsize), itemsize)

    def _check(
        self,
        row: int,
        target: int,
        low: int,
        high: int,
        reader: Reader,
        work: Workspace,
        on_difference: Callable[[Difference], None] | None,
    ) -> None:
        conversion = self._conversion(row, target)
        source = int(self.rows.source[row])
        size, itemsize = self.sources[source].itemsize, self.targets[target].itemsize
        for box in clip(self.rows.box(row), low, high):
            for part in blocks(box, work.share.block):
                raw = self._fetch(self.file_of[source], part, size, reader, work)
                made = conversion.convert(raw)
                steps = tuple(s * itemsize for s in part.target_step)
                there = strided(work.tile, (part.target - low) * itemsize, part.shape, steps, itemsize)
                unequal = there != strided(made, 0, part.shape, _packed(part.shape, itemsize), itemsize)
                if not unequal.any():
                    continue
                at = int(np.flatnonzero(unequal.reshape(part.elements, -1).any(axis=1))[0])
                goal = _element(at, part.shape, part.target, part.target_step)
                place = (goal - low) * itemsize
                difference = Difference(
                    row,
                    target,
                    goal,
                    source,
                    self._logical(row, goal),
                    work.tile[place : place + itemsize].tobytes(),
                    made[at * itemsize : (at + 1) * itemsize].tobytes(),
                )
                if on_difference is None:
                    self.unequal(difference)
                else:
                    on_difference(difference)
                return

    def _reduce(self, among: list[int], target: int, low: int, high: int, reader: Reader, work: Workspace) -> None:
        """Means and sums: fp64, in order of the sources, a block of the tile at a time, rounded once."""
        rows = self.rows
        among.sort(key=lambda row: (int(rows.source[row]), row))
        conversions = {row: self._conversion(row, target) for row in among}
        itemsize = self.targets[target].itemsize
        for conversion in conversions.values():
            if "c" in (conversion.source[0], conversion.target[0]):
                there = self.targets[target]
                fail("E605", f"{there.text} is complex: no mean or sum is made of it", Label(there.file))
        rule = rows.rules[int(rows.rule[among[0]])]
        block = work.share.block // 2  # the sums and their counts live as long as the values that are added
        for begin in range(low, high, block):
            end = min(high, begin + block)
            total = np.zeros(end - begin, np.float64)
            count = np.zeros(end - begin, np.uint32)
            for row in among:
                source = int(rows.source[row])
                size = self.sources[source].itemsize
                for box in clip(rows.box(row), begin, end):
                    raw = self._fetch(self.file_of[source], box, size, reader, work)
                    steps = tuple(8 * s for s in box.target_step)
                    sums = np.ndarray(box.shape, np.float64, total, 8 * (box.target - begin), steps)
                    sums += conversions[row].logical(raw).reshape(box.shape)
                    seen = np.ndarray(
                        box.shape, np.uint32, count, 4 * (box.target - begin), tuple(4 * s for s in box.target_step)
                    )
                    seen += 1
            made = conversions[among[0]].stored(mean(total, count) if rule.mean else total)
            goal = strided(work.tile, (begin - low) * itemsize, (end - begin,), (itemsize,), itemsize)
            values = strided(made, 0, (end - begin,), (itemsize,), itemsize)
            if count.all():
                goal[...] = values
            else:
                goal[count > 0] = values[count > 0]

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _logical(self, row: int, goal: int) -> int:
        """Where in the source tensor's row-major order the element lies that a row has for a target position."""
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

    def name(self, row: int) -> str:
        tensor = int(self.rows.tensor[row])
        return (
            self.tensors[tensor] if 0 <= tensor < len(self.tensors) else self.sources[int(self.rows.source[row])].label
        )

    def provider(self, target: int, position: int) -> tuple[Place, int] | None:
        """Which source tensor a copy takes a target element from, and the element's place in it."""
        for row in self.rows.within(target, position, position + 1):
            if self.rows.rules[int(self.rows.rule[row])].kind != CHECK and any(
                clip(self.rows.box(row), position, position + 1)
            ):
                return self.sources[int(self.rows.source[row])], self._logical(row, position)
        return None

    def unequal(self, found: Difference) -> None:
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
        )

    def _not_exact(self, row: int, target: int, box: Box, at: int, raw: U8, size: int) -> None:
        source, there = self.sources[int(self.rows.source[row])], self.targets[target]
        goal = _element(at, box.shape, box.target, box.target_step)
        index = source.index_text(self._logical(row, goal))
        value = value_text(raw[at * size : (at + 1) * size].tobytes(), source.dtype)
        fail(
            "E605",
            f"{self.name(row)}: {source.dtype} {value} at {index} has no equal in {there.dtype}",
            Label(source.file, where=f"{key_text(source.key)}{index}"),
            Label(there.file, f"is {there.dtype}", where=f"{key_text(there.key)}{there.index_text(goal)}"),
        )


def blocks(box: Box, limit: int) -> list[Box]:
    """A box as boxes of at most `limit` elements, cut along its first dims."""
    if box.elements <= limit:
        return [box]
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
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
        parts += blocks(part, limit)
    return parts


def _packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    steps = [itemsize]
    for n in reversed(shape[1:]):
        steps.append(steps[-1] * n)
    return tuple(reversed(steps)) if shape else ()


def _element(at: int, shape: tuple[int, ...], start: int, step: tuple[int, ...]) -> int:
    for n, s in zip(reversed(shape), reversed(step), strict=True):
        start += at % n * s
        at //= n
    return start
