"""Comparison of a plan's result with a target that exists.

The same tiles are put together from the source, but compared instead of written. Only elements that a move reaches are
compared, so padding is left out. Bits are compared: a NaN equals itself. Not here: data that is not a tensor
(`verification.compare` compares train states), and files that one side lacks (the plan names them).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import evolve, field
from numpy.typing import NDArray

from ucpl.extents import PAIRED, Seen, doubt, key_text, together
from ucpl.files.checkpoint import Checkpoint
from ucpl.planning import Bound, Plan, Runs
from ucpl.records import define, frozen
from ucpl.runtime.assemble import Assembler, Assembly, CopyDifference, blocks
from ucpl.runtime.boxes import clip
from ucpl.runtime.buffers import Budget, Workspace, share_of
from ucpl.runtime.counters import Counters, Report
from ucpl.runtime.equal_runs import EqualRuns, Met
from ucpl.runtime.fills import Fills, bind_fills
from ucpl.runtime.reading import Reader, strided
from ucpl.runtime.rows import Place, Rows, bind_rows, fit, wanted
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.tiles import Unit, cut_tiles
from ucpl.runtime.values import decode, first_half, value_text
from ucpl.runtime.worker_pool import Queue, run_through
from ucpl.tables import MoveSide
from ucpl.tables.operations import Check

__all__ = ["Comparison", "Measured", "Unequal", "compare", "measure"]


@frozen
class Unequal:
    """First element of a target tensor that differs from the plan's."""

    target: int  # index into the plan's targets
    element: tuple[int, ...]  # of the stored target tensor
    file: str
    key: str
    label: str
    value: str  # as the target has it
    wanted: str  # as the plan makes it from the source
    source_file: str = ""  # where that comes from (the first of several, for a mean)
    source_key: str = ""
    source_element: tuple[int, ...] = ()
    half: int | None = None  # if an element is half a byte: the first half of byte `element` that differs

    def position(self, shape: tuple[int, ...]) -> int:
        """Row-major index among the elements of a stored tensor of that shape."""
        index = self.element if self.half is None else (*self.element[:-1], 2 * self.element[-1] + self.half)
        position = 0
        for n, i in zip(shape, index, strict=True):
            position = position * n + i
        return position

    def __str__(self) -> str:
        there = f"{self.file}: {self.key}{list(self.element)} is {self.value}"
        here = f"{self.wanted} in {self.source_file}: {self.source_key}{list(self.source_element)}"
        return f"{self.label}: {there}, {here}"


@frozen
class Comparison:
    """All target tensors that differ, in the plan's order.

    Each has its first unequal element. The number of compared tensors is given, too.
    """

    unequal: tuple[Unequal, ...]
    elements: int  # that moves reach, all of them compared
    report: Report
    seen: dict[str, Seen] = field(factory=dict)  # the values that were compared, by tensor

    def __iter__(self) -> Iterator[Unequal]:
        return iter(self.unequal)

    def __bool__(self) -> bool:
        """True if nothing differs."""
        return not self.unequal

    @property
    def constant(self) -> frozenset[str]:
        """Tensors without two different finite values.

        They cannot show a wrong order of elements.
        """
        return frozenset(name for name, seen in self.seen.items() if not seen.varies)

    def doubt(self, what: str) -> str:
        """Reason why no tensor could have differed, or "".

        `what`: the compared values, in the plural.
        """
        if any(seen.varies for seen in self.seen.values()):
            return ""
        return doubt(together(self.seen.values()), what)


def compare(
    plan: Plan, source: Checkpoint, target: Checkpoint, *, memory: int = 512 << 20, workers: int = 2
) -> Comparison:
    """Compare `target` with the plan's result for `source`.

    Raises: UcplError E600, E601 (either side does not fit the plan), E603, E605, E610, E611, E613.
    """
    both = _Both.of(plan, source, target)
    try:
        assembler = _Comparer(*both.parts, both.base)
        first: dict[int, CopyDifference] = {}
        lock = threading.Lock()

        def found(difference: CopyDifference) -> None:
            if difference.source < both.base:
                assembler.unequal(difference)  # two copies within the source
            with lock:
                known = first.get(difference.target)
                if known is None or difference.target_position < known.target_position:
                    first[difference.target] = difference

        apart = both.unequal(assembler._met, memory, workers)
        report = both.walk(assembler, found, memory, workers, apart)
    finally:
        both.files.close()
    filed = plan.target_shelves.filed
    order = sorted(first) if filed is None else [t for t in filed.tolist() if t in first]
    unequal = tuple(_named(first[t], assembler, both.there) for t in order)
    return Comparison(unequal, both.elements, report, assembler.seen)


@frozen(eq=False)
class _Comparer(Assembler):
    """Assembler that notes values of the other side, which are `sources[base:]`."""

    base: int
    seen: dict[str, Seen] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def _met(self, row: int, target: int, made: NDArray[np.uint8]) -> None:
        if int(self.rows.source[row]) < self.base:
            return
        name = self.name(row)
        seen = self.seen.get(name)
        if seen is None:
            with self.lock:
                seen = self.seen.setdefault(name, Seen())
        if not seen.varies:
            with self.lock:
                seen.add(decode(made, self.targets[target].dtype))


def measure(
    plan: Plan, source: Checkpoint, target: Checkpoint, *, memory: int = 512 << 20, workers: int = 2
) -> tuple[dict[str, Measured], Report]:
    """Measure the distance of `target` from the plan's result.

    It is given by tensor, in f32. Both sides are floats of at most 32 bits. Raises: UcplError as `compare`.
    """
    both = _Both.of(plan, source, target, WIDE)
    try:
        measurer = _Measurer(*both.parts, both.base)
        report = both.walk(measurer, None, memory, workers)
    finally:
        both.files.close()
    return measurer.measured, report


@define(eq=False)
class _Both:
    """A plan bound to the files of both sides.

    The target's files are listed after the source's, under their absolute paths.
    """

    rows: Rows
    fills: Fills
    places: tuple[Place, ...]
    there: tuple[Place, ...]
    files: SourceFiles
    file_of: Sequence[int]  # of each place: its file's number
    base: int  # the number of the first place of the target's side
    tensors: tuple[str, ...]
    elements: int  # that moves reach
    top: str
    counters: Counters = field(factory=Counters)
    live_max: int = 0

    @classmethod
    def of(cls, plan: Plan, source: Checkpoint, target: Checkpoint, wide: str | None = None) -> _Both:
        """Bind a plan to both sides.

        `wide`: the type in which tiles are compared; None: the target's own.
        """
        here, there = fit(plan.sources, source.extents), fit(plan.targets, target.extents, "target")
        roots = (str(source.root.resolve()),) * len(here) + (str(target.root.resolve()),) * len(there)
        places = (*here, *there)
        names = [f"{root}/{p.extent.file}" for p, root in zip(places, roots, strict=True) if p.extent is not None]
        made = Bound.of(plan)
        mirrored = tuple(_mirror(m, len(here)) for m in made.moves if m.kind not in ("check", "scale"))
        bound = _with(made, mirrored)
        goal = there if wide is None else [evolve(p, dtype=wide) for p in there]
        files = SourceFiles(source.root, names)
        rows = bind_rows(bound, places, goal)
        if files.is_remote:
            files.want(wanted(rows, [*map(_named_file, places, names)]))
        return cls(
            rows=rows,
            fills=bind_fills(bound, goal),
            places=places,
            there=tuple(goal),
            files=files,
            file_of=[files.index[name] for name in names],
            base=len(here),
            tensors=tuple(plan.tensors),
            elements=sum(m.elements for m in mirrored),
            top=str(target.top),
        )

    @property
    def parts(self) -> tuple[Rows, Fills, Sequence[Place], Sequence[Place], Sequence[int], Sequence[str]]:
        """Arguments of an assembler."""
        return self.rows, self.fills, self.places, self.there, self.file_of, self.tensors

    def unequal(self, met: Met | None, memory: int, workers: int) -> list[int]:
        """Targets that differ, or that runs of bytes alone do not compare."""
        every = EqualRuns.of(self.rows, self.places, self.base, self.files, self.file_of)
        runs, begins = every.cut(share_of(memory, workers).tile)
        moved = np.flatnonzero(np.diff(self.rows.starts))
        alone = {*moved.tolist()}.difference(runs.target.tolist())
        parts = [slice(a, b) for a, b in pairwise(begins.tolist())]

        def part(space: Workspace, _: Reader, number: int) -> None:
            alone.update(runs.unequal(parts[number], space, met))
            self.counters.add(read=2 * int(runs.size[parts[number]].sum()), tiles=1)

        self.through(len(parts), part, memory, workers)
        return sorted(alone)

    def walk(
        self,
        assembler: Assembler,
        found: Callable[[CopyDifference], None] | None,
        memory: int,
        workers: int,
        targets: Iterable[int] | None = None,
    ) -> Report:
        """Every tile of these targets (or of all), in threads."""
        some = range(len(self.there)) if targets is None else targets
        places = [(t, self.there[t]) for t in some]
        tiles = cut_tiles([Unit(t, 0, 0, p.numel * p.itemsize, "") for t, p in places], share_of(memory, workers).tile)

        def tile(space: Workspace, reader: Reader, i: int) -> None:
            t = places[int(tiles.unit[i])][0]
            low, size, itemsize = int(tiles.low[i]), int(tiles.size[i]), self.there[t].itemsize
            assembler.assemble(t, low // itemsize, (low + size) // itemsize, reader, space, found)
            self.counters.add(read=reader.bytes_read, tiles=1)
            reader.bytes_read = 0
            reader.fragments.clear()

        self.through(len(tiles), tile, memory, workers)
        self.files.check_unchanged()
        counters = self.counters
        return Report(
            self.top, bytes_needed=self.rows.bytes_needed, bytes_read=counters.bytes_read, bytes_live_max=self.live_max,
            tiles=counters.tiles, files=len(self.files.files), seconds=dict(counters.seconds),
        )  # fmt: skip

    def through(self, count: int, one: Callable[[Workspace, Reader, int], None], memory: int, workers: int) -> None:
        """Call `one` for each number, in threads."""
        share, budget, queue = share_of(memory, workers), Budget(memory), Queue(count)

        def work(stop: threading.Event) -> None:
            with Workspace(share, budget) as space:
                reader = Reader(self.files)
                while not stop.is_set() and (i := queue.take()) is not None:
                    one(space, reader, i)

        with self.counters.phase("compare"):
            run_through(queue, work, workers)
        self.live_max = max(self.live_max, budget.live_max)


def _named_file(place: Place, file: str) -> Place:
    assert place.extent is not None
    return evolve(place, extent=evolve(place.extent, file=file))


def _with(bound: Bound, mirrored: Sequence[Runs]) -> Bound:
    """Append checks of the plan's results to the plan."""
    last = [m.replace(node=np.full(len(m), len(bound.nodes), np.int32)) for m in mirrored]
    boxes = MoveSide.concat(m.table(bound.spaces).target_side for m in mirrored)
    return evolve(bound, nodes=(*bound.nodes, Check("the target's tensors", (), boxes)), moves=(*bound.moves, *last))


def _mirror(m: Runs, base: int) -> Runs:
    """Boxes of the target that are compared with it.

    Its values are as stored: no factors.
    """
    if m.kind in ("mean", "sum", "max") and len(m):  # several sources of one place: it is compared once
        places = np.column_stack((m.target, m.target_offset, m.shape, m.target_stride))
        m = m.take(np.unique(places, axis=0, return_index=True)[1].astype(np.int64))
    return evolve(
        m, kind="check", source=(m.target + np.int32(base)).astype(np.int32), source_offset=m.target_offset,
        source_stride=m.target_stride, source_value=(1.0, 0.0), target_value=(1.0, 0.0), lossy=False,
        half="",
    )  # fmt: skip


def _named(d: CopyDifference, assembler: Assembler, there: Sequence[Place]) -> Unequal:
    place = there[d.target]
    origin = assembler.provider(d.target, d.target_position)
    half = first_half(d.value, d.other) if place.dtype in PAIRED else None
    which = {None: "", 0: "low", 1: "high"}[half]
    found = Unequal(
        d.target,
        place.index_of(d.target_position),
        place.file,
        key_text(place.key),
        assembler.name(d.row),
        value_text(d.other, place.dtype, which),
        value_text(d.value, place.dtype, which),
        *((origin[0].file, key_text(origin[0].key), origin[0].index_of(origin[1])) if origin is not None else ()),
    )
    return evolve(found, half=half)


# --- Distances between the elements of two checkpoints of different types -------------------------------------------
#  Tiles are put together from the source as a plan says, in f32 for every type of target, and compared with the
#  target's own
#  elements, in f32, too: both casts are exact, so that the count is of the distance of the stored values.

WIDE = "f32"


@define
class Measured:
    """Result for one tensor.

    The number of compared elements, the number that differ, and the largest distance.
    """

    elements: int = 0
    differ: int = 0
    largest: float = 0.0


@frozen(eq=False)
class _Measurer(Assembler):
    """Assembler that counts differences instead of reporting them.

    `sources[base:]` are those of the other side.
    """

    base: int
    measured: dict[str, Measured] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def _difference(self, tile: Assembly, row: int) -> CopyDifference | None:
        source = int(self.rows.source[row])
        if source < self.base:  # copies within the source are equal, or it is an error
            return super()._difference(tile, row)
        conversion, size = self._conversion(row, tile.target), self.sources[source].itemsize
        for box in clip(self.rows.box(row), tile.low, tile.high):
            for part in blocks(box, tile.work.share.block):
                made = conversion.convert(self._fetch(tile, self.file_of[source], part, size))
                there = strided(tile.work.tile, tile.at(part), part.shape, tile.steps(part), tile.itemsize)
                self._count(self.name(row), _numbers(made), _numbers(there))
        return None

    def _count(self, name: str, ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
        differ = ours.view(np.uint32) != theirs.view(np.uint32)
        with np.errstate(all="ignore"):
            apart = np.abs(ours[differ].astype(np.float64) - theirs[differ].astype(np.float64))
        largest = float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))
        with self.lock:
            known = self.measured.setdefault(name, Measured())
            known.elements += len(ours)
            known.differ += int(differ.sum())
            known.largest = max(known.largest, largest)


def _numbers(raw: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8).view("<f4")
