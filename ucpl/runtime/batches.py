"""Batches: tiles that are assembled together, from one read.

The tiles of a group, mostly of several targets, are made of the same bytes of the source, in runs too short to be read
alone. An example is a matrix that is cut by column: a rank of the target has a few hundred bytes of each row of the
source, and the next rank has the bytes behind them. A window reaches from the first byte to the last that the tiles of
a group need: it is read once, and each tile takes its runs from there, one tile after the other. Tiles stay the unit of
digests, writes and the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ucpl.records import frozen
from ucpl.runtime.reading import CALL_BYTES, WASTE_MAX, Window
from ucpl.runtime.rows import Place, Rows
from ucpl.runtime.tiles import Tiles, Unit
from ucpl.tables import within

__all__ = ["RUN_WANTED", "Batch", "bands_of", "cut_bands", "group_bands", "narrow_bands"]

RUN_MAX = 16384  # bytes of a run from which on a call for it takes less than copying it once more
WINDOW_BYTES = 4 << 20  # of a window that tiles are cut for, where they need not become small for it
PARTS_MAX = 4  # of a tile: it is not cut smaller for that
PARTS_MOST = 16  # the least size if memory is short

I64 = NDArray[np.int64]


@frozen
class Batch:
    """Bands that one read serves, in order.

    A band is tiles [first, end) of one unit; that of a stretch, of several.
    """

    bands: tuple[tuple[int, int], ...]
    windows: tuple[Window, ...] = ()
    is_stretch: bool = False  # small tensors, one behind the other

    @property
    def held(self) -> int:
        """Bytes of its windows."""
        return sum(w.size for w in self.windows)


@frozen(eq=False)
class _Narrow:
    """Rows with short runs and gaps between them.

    Another row needs bytes of the same source.
    """

    row: I64  # their numbers
    run: I64  # contiguous bytes of the file
    share: NDArray[np.float64]  # bytes from the first to the last that a tile needs, over those that it needs


def _narrow(rows: Rows, sources: Sequence[Place], tile: int) -> _Narrow:
    """Keep rows that go through source and target in one order.

    Of other rows, a tile has something of every run.
    """
    size = np.array([p.itemsize for p in sources] or [1], np.int64)[rows.source]
    run, needed, span = size.copy(), size.copy(), size.copy()
    together, falls = np.ones(len(size), np.bool_), rows.shape[:, 0] > 1
    last = np.zeros_like(size)
    for d in reversed(range(rows.shape.shape[1])):
        n, step = rows.shape[:, d], rows.source_step[:, d]
        real = n > 1
        falls &= ~real | ((step > 0) & (step >= last))
        last = np.where(real, step, last)
        together &= ~real | (step == run)
        run = np.where(together, run * n, run)
        grows = real & (needed < tile)
        span, needed = np.where(grows, span + (n - 1) * step, span), np.where(grows, needed * n, needed)
    chosen = falls & ~rows.run & (run < RUN_MAX) & (span - needed > needed // WASTE_MAX)
    chosen &= np.bincount(rows.source[chosen], minlength=len(sources) or 1)[rows.source] > 1
    row = np.flatnonzero(chosen)
    return _Narrow(row, run[row], span[row] / needed[row])


def narrow_bands(
    rows: Rows, places: tuple[Sequence[Place], Sequence[Place]], units: Sequence[Unit], tile: int, limit: int
) -> dict[int, int]:
    """Band size of each unit that has bytes in windows.

    A band has rows of the target, the same number for all units that are made of the same sources: as many as have a
    window in the memory that remains. places: of the source, and of the target. Other units are cut as they would be
    without windows.
    """
    sources, targets = places
    narrow = _narrow(rows, sources, tile)
    if not len(narrow.row):
        return {}
    room = limit - tile
    target, source = rows.target[narrow.row], rows.source[narrow.row]
    unit_of = {unit.target: u for u, unit in enumerate(units)}
    share: dict[int, float] = {}
    for t, more in zip(target.tolist(), narrow.share.tolist(), strict=True):
        share[t] = max(share.get(t, 1.0), more)
    wanted = {t: max(WINDOW_BYTES / q, tile / PARTS_MAX) for t, q in share.items()}
    most = {t: int(min(tile, wanted[t], room / q)) for t, q in share.items()}
    # If tiles of two ranks end at different rows, two groups share the source of a few tiles.
    least = {t: int(min(most[t], max(room / q / WASTE_MAX, tile / PARTS_MOST))) // 16 * 16 for t, q in share.items()}
    found: dict[int, int] = {}
    links = set(zip(target.tolist(), (-1 - source).tolist(), strict=True))  # sources are below 0
    for some in _components(links):
        among = [t for t in some if t >= 0]
        pitch = {t: _pitch(rows, t, targets[t].itemsize) for t in among}
        count = min((most[t] // pitch[t] if pitch[t] else 0) for t in among)  # of rows
        for t in among:
            cut = count * pitch[t] or least[t]
            if cut * PARTS_MOST >= tile and t in unit_of:
                found[unit_of[t]] = cut
    return found


def _pitch(rows: Rows, target: int, itemsize: int) -> int:
    """Bytes from one row of a target to the next.

    0 if its boxes have rows of different lengths.
    """
    mine = slice(int(rows.starts[target]), int(rows.starts[target + 1]))
    shape, step = rows.shape[mine], rows.target_step[mine]
    return int(step[0, 0]) * itemsize if (shape[:, 0] > 1).all() and (step[:, 0] == step[0, 0]).all() else 0


def group_bands(
    assembled: tuple[Rows, Sequence[Place], Sequence[int], Sequence[Place]],
    units: Sequence[Unit],
    tiles: Tiles,
    bands: Sequence[tuple[int, int]],
    room: int,
    *,
    shared: bool,
) -> list[Batch]:
    """Put every band in one group.

    Groups are in the order of their first bands. Windows of one group have `room` bytes at most. assembled: the rows,
    places of the source, the file of each, and places of the target. shared: bytes that several tiles need are read
    once for all of them in any case, in long runs too. If it is not set, they are not: the page cache of a single process has
    them when it reads them again, and a copy from there is as fast as from a window.
    """
    rows, sources, file_of, targets = assembled
    chosen = _shared(rows, sources) if shared else _narrow(rows, sources, int(tiles.size.max(initial=1)))
    items = _items(chosen, (rows, sources, file_of, targets), units, tiles, bands)
    groups: list[Batch] = []
    grouped: set[int] = set()
    for some in _joined(items, room):
        mine = sorted({item.band for item in some})
        windows = _windows(some)
        if windows and sum(w.size for w in windows) <= room:
            groups.append(Batch(tuple(bands[b] for b in mine), tuple(windows)))
            grouped.update(mine)
    groups += [Batch((band,)) for b, band in enumerate(bands) if b not in grouped]
    groups.sort(key=lambda group: group.bands[0])
    return _apart(groups)


@frozen
class _Item:
    """Bytes [low, high) of a file that a band needs."""

    file: int
    low: int
    high: int
    band: int  # its number
    cost: int  # bytes that are read for it alone; the cost of a call is counted as bytes
    along: float  # how far into its source it begins


def _shared(rows: Rows, sources: Sequence[Place]) -> _Narrow:
    """All rows of sources that several rows read."""
    times = np.bincount(rows.source, minlength=len(sources) or 1)
    row = np.flatnonzero(times[rows.source] > 1)
    size = np.array([p.itemsize for p in sources] or [1], np.int64)[rows.source[row]]
    run = np.where(rows.run[row], rows.shape[row].prod(axis=1), 1) * size
    return _Narrow(row, run, np.ones(len(row)))


def _items(
    narrow: _Narrow,
    assembled: tuple[Rows, Sequence[Place], Sequence[int], Sequence[Place]],
    units: Sequence[Unit],
    tiles: Tiles,
    bands: Sequence[tuple[int, int]],
) -> list[_Item]:
    rows, sources, file_of, targets = assembled
    if not len(narrow.row) or not bands:
        return []
    unit_of = {unit.target: u for u, unit in enumerate(units)}
    head = np.array([first for first, _ in bands], np.int64)
    end = np.array([end for _, end in bands], np.int64)
    which = tiles.unit[head]
    itemsize = np.array([p.itemsize for p in targets], np.int64)[np.array([u.target for u in units], np.int64)][which]
    low, high = tiles.low[head] // itemsize, (tiles.low[end - 1] + tiles.size[end - 1]) // itemsize
    row, run = narrow.row, narrow.run
    unit = np.array([unit_of.get(t, -1) for t in rows.target[row].tolist()], np.int64)
    row, run, unit = row[unit >= 0], run[unit >= 0], unit[unit >= 0]
    a, b = np.searchsorted(which, unit), np.searchsorted(which, unit, "right")
    count = b - a
    row, run = np.repeat(row, count), np.repeat(run, count)
    band = np.repeat(a, count) + within(count)
    meets = (rows.low[row] < high[band]) & (low[band] < rows.high[row])
    meets &= (end == head + 1)[band]  # of several tiles, it leaves no room for a window
    row, run, band = row[meets], run[meets], band[meets]
    size = np.array([p.itemsize for p in sources], np.int64)[rows.source[row]]
    begin, stop, needed = _spans(rows, row, (low[band], high[band]), size)
    calls = needed // np.minimum(run, needed)
    cost = np.minimum(stop - begin, needed + calls * CALL_BYTES)
    file = np.array(file_of, np.int64)[rows.source[row]]
    length = np.array([max(p.numel, 1) for p in sources], np.int64)[rows.source[row]]
    along = (rows.logical[row] + (begin - rows.position[row]) / size) / length
    columns: tuple[NDArray[np.integer] | NDArray[np.floating], ...] = (file, begin, stop, band, cost, along)
    order = np.lexsort((begin, file))
    return [_Item(*item) for item in zip(*(c[order].tolist() for c in columns), strict=True)]


def _spans(rows: Rows, row: I64, part: tuple[I64, I64], size: I64) -> tuple[I64, I64, I64]:
    """Span of parts [low, high) of boxes in the file.

    Returns the first byte, the last, and the number of needed bytes at most.
    """
    low, high = part[0] - rows.low[row], part[1] - rows.low[row]
    shape, step, along = rows.shape[row], rows.source_step[row], rows.target_step[row]
    begin = rows.position[row].copy()
    inner = ((shape - 1) * along).sum(axis=1)
    stop, needed, open_ = begin.copy(), size.copy(), np.ones(len(row), np.bool_)
    for d in range(shape.shape[1]):
        inner = inner - (shape[:, d] - 1) * along[:, d]  # of the dims below
        apart = np.maximum(along[:, d], 1)
        first: I64 = np.where(open_, np.maximum(-((inner - low) // apart), 0), 0)
        most = shape[:, d] - 1
        last: I64 = np.maximum(first, np.where(open_, np.minimum((high - 1) // apart, most), most))
        begin, stop = begin + first * step[:, d], stop + last * step[:, d]
        needed = needed * (last - first + 1)
        open_ &= first == last
        low, high = (np.where(open_, x - first * along[:, d], x) for x in (low, high))
    return begin, stop + size, needed


def _joined(items: Sequence[_Item], room: int) -> list[list[_Item]]:
    """Items of bands that share bytes, joined.

    As many bands are joined as leave windows within `room`.
    """
    of: dict[int, list[_Item]] = {}
    for item in items:
        of.setdefault(item.band, []).append(item)
    links = ((one.band, other.band) for some in _clusters(items) for one, other in pairwise(some))
    found: list[list[_Item]] = []
    for among in _components(links):
        taken: list[_Item] = []
        spans: dict[int, tuple[int, int]] = {}
        for band in sorted(among, key=lambda b: (min(item.along for item in of[b]), b)):
            more = dict(spans)
            for item in of[band]:
                low, high = more.get(item.file, (item.low, item.high))
                more[item.file] = min(low, item.low), max(high, item.high)
            if taken and sum(high - low for low, high in more.values()) > room:
                found.append(taken)
                taken = []
                more = {item.file: (item.low, item.high) for item in of[band]}
            taken += of[band]
            spans = more
        found.append(taken)
    return found


def _components(links: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Numbers that are linked, directly or over others."""
    first: dict[int, int] = {}

    def root(of: int) -> int:
        first.setdefault(of, of)
        while first[of] != of:
            first[of] = of = first[first[of]]
        return of

    for one, other in links:
        a, b = root(one), root(other)
        first[max(a, b)] = min(a, b)
    found: dict[int, list[int]] = {}
    for number in sorted(first):
        found.setdefault(root(number), []).append(number)
    return list(found.values())


def _clusters(items: Sequence[_Item]) -> list[list[_Item]]:
    """Neighbours in a file that share more than a row or two.

    Items are in order of file and byte.
    """
    found: list[list[_Item]] = []
    reach = 0
    for item in items:
        together = reach - item.low if found and found[-1][0].file == item.file else 0
        if together * WASTE_MAX > item.high - item.low:
            found[-1].append(item)
            reach = max(reach, item.high)
        else:
            found.append([item])
            reach = item.high
    return found


def _windows(items: Sequence[_Item]) -> list[Window]:
    """Windows that are worth one read.

    A window is left out if it reads more than all of its items alone.
    """
    found = []
    for some in _clusters(sorted(items, key=lambda item: (item.file, item.low))):
        low, high = some[0].low, max(item.high for item in some)
        if len(some) > 1 and high - low < sum(item.cost for item in some):
            found.append(Window(some[0].file, low, low, high))
    return found


def _apart(groups: Sequence[Batch]) -> list[Batch]:
    """Groups with the end of each window's shared part.

    Other groups have the bytes up to there. Runs of CRCs that do not overlap cover all windows.
    """
    reach: dict[int, int] = {}
    made: dict[tuple[int, int], Window] = {}
    order = sorted(
        (w.file, w.low, -w.high, g, i) for g, group in enumerate(groups) for i, w in enumerate(group.windows)
    )
    for file, low, below, g, i in order:
        seen = min(max(reach.get(file, low), low), -below)
        made[g, i] = evolve(groups[g].windows[i], seen=seen)
        reach[file] = max(seen, -below)
    return [
        evolve(group, windows=tuple(made[g, i] for i in range(len(group.windows)))) if group.windows else group
        for g, group in enumerate(groups)
    ]


# --- Bands ----------------------------------------------------------------------------------------------------------
#  An example is a transposed matrix: a row of the target is a column of the source, an element of each of its rows. As
#  many rows
#  of the target as memory allows turn these into runs of the source, each read once. Tiles stay the unit of digests,
#  writes and
#  the journal.

RUN_WANTED = 4096  # bytes of a run of the source: longer ones were not faster, and their bands leave the cache
RUN_LONG = 65536  # the same, as far as it makes bands of TILES_NEAR: fewer calls, and the cache still has the band
TILES_NEAR = 4


def bands_of(
    rows: Rows, places: tuple[Sequence[Place], Sequence[Place]], units: Sequence[Unit], tile: int, limit: int
) -> I64:
    """Bytes of each unit's band, at most `limit`.

    A band has complete rows of the target if they fit. A unit that needs no bands has bands of one tile, or of less if
    it shares windows of the source with others (groups). places: of the source, and of the target.
    """
    reach, row = _reach(rows, places, RUN_WANTED)
    near, far = TILES_NEAR * tile, _reach(rows, places, RUN_LONG)
    # A source of several rows has windows instead: a band of several tiles leaves no room for one.
    longer = (reach < near) & (np.bincount(rows.source, minlength=1)[rows.source] == 1)
    reach, row = np.where(longer, np.minimum(far[0], near), reach), np.where(longer, far[1], row)
    order = np.lexsort((reach, rows.target))  # the last of each target reaches farthest
    most, step = np.zeros(len(places[1]), np.int64), np.ones(len(places[1]), np.int64)
    most[rows.target[order]], step[rows.target[order]] = reach[order], row[order]
    which = np.array([u.target for u in units], np.int64)
    band, step = np.minimum(most[which], limit), step[which]
    count = -(-np.array([u.size for u in units], np.int64) // step)  # of rows
    each = np.maximum(band // step, 1)
    even = -(-count // np.maximum(-(-count // each), 1))  # none is much narrower than the others
    found = np.where(band <= tile, tile, np.where(band >= step, even * step, limit))
    for unit, size in narrow_bands(rows, places, units, tile, limit).items():
        if band[unit] <= tile:
            found[unit] = size
    return found


def cut_bands(tiles: Tiles, most: int, done: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Divide unfinished tiles into runs [first, end) of one band, in order.

    A run has at most so many tiles.
    """
    number = np.arange(len(tiles))
    within = (number - tiles.first[tiles.unit]) % tiles.together[tiles.unit]
    head = within % most == 0
    head[1:] |= done[:-1]
    first = np.flatnonzero(head & ~done)
    end = np.flatnonzero(np.append((head | done)[1:], True)[: len(tiles)] & ~done) + 1
    return list(zip(first.tolist(), end.tolist(), strict=True))


def _reach(rows: Rows, places: tuple[Sequence[Place], Sequence[Place]], wanted: int) -> tuple[I64, I64]:
    """Bytes of the target over which boxes have efficient runs.

    A run has the wanted bytes in the file or, if a box has none, its largest run. Also returns the bytes of one row.
    """
    sources, targets = places
    size = np.array([p.itemsize for p in sources] or [1], np.int64)[rows.source]
    goal = np.array([p.itemsize for p in targets] or [1], np.int64)[rows.target]
    shape = rows.shape
    step = np.where((shape > 1) & (rows.source_step > 0), rows.source_step, np.iinfo(np.int64).max)
    order = np.argsort(step, axis=1, kind="stable")  # the closest elements in the file come first
    shape, step, along = (np.take_along_axis(a, order, 1) for a in (shape, step, rows.target_step))
    run, open_ = size.copy(), ~rows.run
    reach, row = np.zeros_like(size), np.ones_like(size)
    for d in range(shape.shape[1]):
        open_ &= (step[:, d] == run) & (run < wanted)
        taken = np.minimum(shape[:, d], -(-wanted // run))
        farther = open_ & (taken * along[:, d] * goal > reach)
        reach = np.where(farther, taken * along[:, d] * goal, reach)
        row = np.where(farther, along[:, d] * goal, row)
        run = np.where(open_, run * shape[:, d], run)
    return reach, row
