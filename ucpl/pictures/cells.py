"""The cells of a tensor's state, from full tensor to ranks.

A level has at most `CELLS` cells. If there are more, ranks are grouped by the mesh axes that cut first, and one of the
cells is drawn again, cut further: equal cells are drawn once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from attrs import field

from ucpl.extents import key_text
from ucpl.layout.by_index import whole_dim
from ucpl.pictures.boxes import Frame, framed, joined
from ucpl.pictures.holders import Holders, listed
from ucpl.placement import element_name
from ucpl.records import define, frozen

if TYPE_CHECKING:
    from ucpl.layout import Layout
    from ucpl.placement import Part
    from ucpl.tables import I64

__all__ = ["CELLS", "SMALL", "Cell", "Fine", "HeldBoxes", "Level", "fine", "levels", "overlapping"]

CELLS = 128  # of one level
RUNS = 16  # of one axis that has more coordinates than `ALONG`
ALONG = 48
LEAST = 1 / 17  # of both sides: half of the cells are larger, so that most have room for a label
LEVELS = 5
SMALL = 64  # ranks that are called by their numbers
RECTANGLES = 600  # of one level


@frozen(eq=False)
class Cell:
    """The part of one rank, or of several.

    Several have copies of it, or parts that are drawn as one.
    """

    ranks: I64 = field(repr=False)
    elements: int
    parts: int  # different parts that ranks hold of it
    copies: int  # stored tensors that hold each element
    number: int  # selects its colour and hatching
    label: str
    short: str  # the label without the names of axes
    held_by: str  # in words
    span: str  # which elements
    where: str  # file and key
    places: tuple[tuple[float, float, float, float], ...]  # x, y, width, height in a picture of 1 x 1


@frozen(eq=False)
class Level:
    """A tensor, or a cell of the level before, and its cells."""

    of: str  # the name of the drawn part: "" is the full tensor
    alike: int  # how many cells of the level before it could have been
    elements: int
    cells: tuple[Cell, ...]
    frame: Frame = field(repr=False)
    strips: tuple[tuple[float, float, str], ...]  # start, size and name of strips from left to right
    axes: tuple[str, ...]  # mesh axes that distinguish its cells


@frozen(eq=False)
class HeldBoxes:
    """Boxes of one tensor and state in one part.

    `first` is the first rank that holds each.
    """

    part: Part
    rows: I64  # of part.folded
    first: I64


@define
class Fine:
    """The smallest distinct parts of ranks: copies are one."""

    low: I64
    high: I64
    first: int
    part: Part
    row: int
    coordinates: tuple[int, ...] = ()
    ranks: list[I64] = field(factory=list)
    stored: int = 1


def overlapping(fine: list[Fine], numel: int) -> bool:
    """Return True if some elements are in two different cuts.

    One picture cannot show that.
    """
    return sum(_volume(f.low, f.high) for f in fine) > numel


def _volume(low: I64, high: I64) -> int:
    return int((high - low).prod(axis=1).sum())


def fine(held: list[HeldBoxes], width: int, holders: Holders) -> tuple[list[Fine], tuple[str, ...]]:
    """Boxes by the ranks that hold them, copies together.

    Also the mesh axes that distinguish them, outer first.
    """
    found: dict[bytes, Fine] = {}
    for one in held:
        table = one.part.folded
        low, high = table.low[one.rows][:, :width], table.high[one.rows][:, :width]
        group, a, b = joined(one.first, low, high)
        order = np.lexsort((*a.T[::-1], group)) if width else np.argsort(group, kind="stable")
        group, a, b = group[order], a[order], b[order]
        starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]])[: len(group)])
        rows = {}
        for first, row in zip(one.first[::-1].tolist(), one.rows[::-1].tolist(), strict=True):
            rows[first] = row
        for begin, end in zip(starts, [*starts[1:], len(group)], strict=True):
            first = int(group[begin])
            mark = a[begin:end].tobytes() + b[begin:end].tobytes()
            known = found.get(mark)
            if known is None:
                found[mark] = known = Fine(a[begin:end], b[begin:end], first, one.part, rows[first])
            else:
                known.stored += 1
            known.ranks.append(holders.like(one.part, first))
    cells = _together(found.values())
    used = {a for h in held for a in h.part.axes}
    names = [a for a in holders.order if a in used and holders.degree(a) > 1]
    firsts = np.array([f.first for f in cells], dtype=np.int64)
    columns = holders.coordinates(tuple(names), firsts)
    cutting = [n for n in range(len(names)) if len(np.unique(columns[:, n])) > 1]
    for f, row in zip(cells, columns[:, cutting].tolist(), strict=True):
        f.coordinates = tuple(row)
    return cells, tuple(a for n, a in enumerate(names) if n in cutting)


def _together(found: Iterable[Fine]) -> list[Fine]:
    """Join parts of the same ranks, such as two entries' layers."""
    out: dict[bytes, Fine] = {}
    for f in found:
        ranks = np.unique(np.concatenate(f.ranks))
        known = out.setdefault(ranks.tobytes(), f)
        if known is not f:
            known.low, known.high = np.concatenate([known.low, f.low]), np.concatenate([known.high, f.high])
        known.ranks = [ranks]
    return list(out.values())


def levels(
    cells: list[Fine], axes: tuple[str, ...], path: str, panels: tuple[int, ...], holders: Holders
) -> Iterator[Level]:
    """The full tensor, then a cell at a time, to ranks."""
    counts = holders.layout.tensors[path].counts
    offset, of, alike, begin = (0,) * len(counts), "", 1, 0
    for _ in range(LEVELS):
        while begin < len(axes) and len({f.coordinates[begin] for f in cells}) == 1:
            begin += 1
        groups, told, frame = _drawn(cells, begin, len(axes), (counts, offset, panels))
        told_by = axes[begin : max(told, begin + 1)]
        by_rank = holders.count <= SMALL and all(len(g) == 1 for g in groups)  # colours are those of ranks
        drawn = tuple(_cell(g, (frame, n, by_rank), path, told_by, holders) for n, g in enumerate(groups))
        of_axis = frame.across[0] if frame.strips else None
        strips = tuple(
            (
                s.start,
                s.size,
                _strip(holders.layout, path, of_axis, (s.low + offset[of_axis], s.high + offset[of_axis])),
            )
            for s in frame.strips
            if of_axis is not None
        )
        yield Level(of, alike, prod(counts), drawn, frame, strips, told_by)
        rest = [n for n, g in enumerate(groups) if len(g) > 1]
        if not rest:
            return
        cells, begin = groups[rest[0]], told
        of, alike = " · ".join(filter(None, (of, drawn[rest[0]].label))), len(rest)
        low, high = _boxes(cells)
        offset, counts = tuple(low.min(axis=0).tolist()), tuple((high.max(axis=0) - low.min(axis=0)).tolist())


def _drawn(
    cells: list[Fine], begin: int, axes: int, of: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
) -> tuple[list[list[Fine]], int, Frame]:
    """The first readable grouping, or else the coarsest.

    Of: counts of the drawn part, its begin, panels.
    """
    counts, offset, panels = of
    made: list[tuple[list[list[Fine]], int, Frame]] = []
    for groups, told in _groupings(cells, begin, axes):
        of_group = np.repeat(np.arange(len(groups)), [sum(len(f.low) for f in g) for g in groups])
        group, low, high = joined(of_group, *_boxes([f for g in groups for f in g]))
        low, high = low - np.array(offset, np.int64), high - np.array(offset, np.int64)
        frame = framed(group, low, high, counts, panels)
        made.append((groups, told, frame))
        if len(frame.group) <= RECTANGLES and _readable(frame):
            break
    return made[-1]


def _readable(frame: Frame) -> bool:
    """Return True if half of the groups have a visible rectangle.

    It has some size along both sides.
    """
    widest = np.zeros(int(frame.group.max()) + 1)
    np.maximum.at(widest, frame.group, frame.places[:, 2:].min(axis=1))
    return float(np.median(widest)) >= LEAST


def _boxes(cells: list[Fine]) -> tuple[I64, I64]:
    return np.concatenate([f.low for f in cells]), np.concatenate([f.high for f in cells])


def _groupings(cells: list[Fine], begin: int, axes: int) -> Iterator[tuple[list[list[Fine]], int]]:
    """Group cells by as many axes from `begin` on as possible.

    Then by fewer, last by runs along one of them.

    Second: the first axis that does not distinguish groups.
    """
    keys = [f.coordinates for f in cells]
    for stop in range(axes, begin, -1):
        found: dict[tuple[int, ...], list[Fine]] = {}
        for key, f in sorted(zip(keys, cells, strict=True), key=lambda pair: pair[0]):
            found.setdefault(key[:stop], []).append(f)
        if len(found) <= (CELLS if stop > begin + 1 else ALONG):
            yield list(found.values()), stop
    order = sorted(range(len(cells)), key=lambda n: (keys[n], cells[n].first))
    if begin >= axes:
        runs = [[cells[n]] for n in order]
    else:
        known = sorted({key[begin] for key in keys})
        many = min(RUNS, len(known))
        run = {c: i * many // len(known) for i, c in enumerate(known)}
        runs = [[cells[n] for n in order if run[keys[n][begin]] == r] for r in range(many)]
    yield runs, begin if len(runs) < len({key[: begin + 1] for key in keys}) else begin + 1


def _cell(group: list[Fine], at: tuple[Frame, int, bool], path: str, axes: tuple[str, ...], holders: Holders) -> Cell:
    """Make one cell.

    At: the picture, the number of this group in it, and a flag: its ranks select its colour.
    axes: those that distinguish it from the others.
    """
    frame, n, by_rank = at
    ranks = np.unique(np.concatenate([r for f in group for r in f.ranks]))
    places = tuple(tuple(p) for p in frame.places[frame.group == n].tolist())
    elements = sum(_volume(f.low, f.high) for f in group)
    if holders.count <= SMALL:
        label = short = listed(ranks)
        if len(group) > 1:  # no copies
            short = listed(ranks, singly=1)
            label, short = f"{short}, in {len(group):,} parts", f"{short} ÷ {len(group):,}"
    else:
        firsts = holders.coordinates(axes, np.array([f.first for f in group]))
        told = zip(axes, firsts.T, strict=True)
        values = [(a, listed(np.unique(c), singly=2)) for a, c in told]
        label = " · ".join(f"{a} {v}" for a, v in values) or holders.text(ranks) or "all"
        short = "·".join(v for _, v in values)
    return Cell(
        ranks,
        elements,
        len(group),
        max(f.stored for f in group),
        int(ranks[0]) if by_rank else n,
        label,
        short,
        _held_by(ranks, group, holders),
        _span(group, path, holders.layout),
        _where(group),
        places,
    )


def _held_by(ranks: I64, group: list[Fine], holders: Holders) -> str:
    named = holders.named(ranks)
    if len(group) > 1:
        return f"{named}, cut into {len(group):,} parts"
    stored = f"; stored {group[0].stored:,} times" if group[0].stored > 1 else ""
    return named if len(ranks) == 1 else f"{named}, each with all of it{stored}"


def _where(group: list[Fine]) -> str:
    """File and key of the first stored tensor."""
    f = group[0]
    home = f.part.homes.home(int(f.part.folded.home[f.row]))
    return f"{home.file}: {key_text(home.key)}"


def _span(group: list[Fine], path: str, layout: Layout) -> str:
    """The elements: `[l=0..8, f=0..6656]` of a box.

    For several boxes, the first and the last.
    """
    low, high = _boxes(group)
    _, low, high = joined(np.zeros(len(low), np.int64), low, high)
    if len(low) == 1:
        tensor = layout.tensors[path]
        dims = range(len(tensor.dims))
        return f"[{', '.join(_strip(layout, path, d, (int(low[0, d]), int(high[0, d]))) for d in dims)}]"
    first = np.lexsort(low.T[::-1])[0]
    last = np.lexsort(high.T[::-1])[-1]
    ends = element_name(layout, path, tuple(low[first])), element_name(layout, path, tuple(high[last] - 1))
    return f"{len(low):,} boxes from {ends[0]} to {ends[1]}"


def _strip(layout: Layout, path: str, dim: int, run: tuple[int, int]) -> str:
    """`l=0..8`, in indices of the full dim."""
    tensor = layout.tensors[path]
    name, indices = tensor.dims[dim], tensor.indices[dim]
    low, high = indices[run[0]], indices[run[1] - 1]
    text = str(low) if run[1] - run[0] == 1 else f"{low}..{high + 1}"
    return text if "#" in name else f"{whole_dim(name)}={text}"
