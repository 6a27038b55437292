"""The picture of a plan: an SVG file, or an HTML page."""

from __future__ import annotations

from ucpl.pictures.drawing import Drawing, text_width
from ucpl.pictures.flows import FlowGrid, PlanPicture, StateFlow, ranks_text
from ucpl.pictures.look import amount_text, clipped, count_text, printable, shade_of, share_text
from ucpl.pictures.page import picture_page

__all__ = ["KINDS", "plan_html", "plan_svg"]

WIDTH, MARGIN, NAMES, GAP = 1200, 28, 236, 26
SIDE = 392  # of the first grid
BANDS = 440
SMALLER = 262  # of those inside it
ENTRIES_MAX = 40
TITLE_MAX = 84  # characters
RANKS = 88  # room for the names of ranks

# The names of the kinds of moves.
KINDS = {
    "copy": "copied as it is",
    "derive": "made of another state, rounded to nearest",
    "scale": "times the scales of its blocks",
    "mean": "averaged over copies",
    "sum": "added up over copies",
    "max": "the greatest of copies",
    "check": "a copy that must be equal, and is not written",
    "fill of padding": "padding of the target",
    "fill, which the source lacks": "a value that a line says, where the source has none",
}


def plan_svg(picture: PlanPicture, *, paper: bool = True) -> str:
    """One file, or part of a page without paper.

    Raises nothing: names are whatever they are.
    """
    d = Drawing(WIDTH, f"plan {picture.name}: {picture.source} to {picture.target}")
    y = _head(d, picture)
    y = _ways(d, picture, y)
    y = _between(d, picture, y)
    y = _entries(d, picture, y)
    return d.finished(y + 8, paper=paper)


def plan_html(picture: PlanPicture) -> str:
    """The same in a page, with a table of the target's entries."""
    rows = [
        (
            e.label,
            ", ".join(e.states),
            ", ".join(e.kinds),
            f"{e.amount:,}",
            f"{e.runs:,}",
            _ranks(e.sources),
            _ranks(e.targets),
            share_text(e.own, e.amount),
        )
        for e in sorted(picture.entries, key=lambda e: -e.amount)
    ]
    unit = "bytes" if picture.unit == "B" else picture.unit
    heads = ("entry of the target", "states", "ways", unit, "runs", "from", "to", "to the same rank")
    return picture_page(f"{picture.source} → {picture.target}", plan_svg(picture, paper=False), heads, rows)


def _head(d: Drawing, p: PlanPicture) -> float:
    both = f"{p.source} → {p.target}"
    y = 40.0
    for line in [both] if len(both) <= TITLE_MAX else [p.source, f"→ {p.target}"]:
        d.text(MARGIN, y, clipped(line, TITLE_MAX), "title", title=both)
        y += 26
    said = [f"plan {p.name}"] if p.name else []
    said += [
        f"{count_text(p.stored[0])} stored tensors on {p.ranks[0]:,} ranks to {count_text(p.stored[1])} on {p.ranks[1]:,}",
        f"{amount_text(p.written, p.unit)} moved",
        f"{share_text(p.own, p.written)} of it to the rank of the same number",
    ]
    y -= 4
    d.text(MARGIN, y, clipped(" · ".join(said), 170), "faint", title=" · ".join(said))
    for note in p.notes:
        y += 16
        d.text(MARGIN, y, clipped(note, 180), "small", title=note)
    return y + 14


# ---- moves -----------------------------------------------------------------------------------------------------------


def _shade_of_kind(kind: str) -> int | None:
    """The shade of a kind: grey for padding, else a colour each.

    All but copies have a hatching, too.
    """
    if kind == "fill of padding":
        return None
    number = list(KINDS).index(kind)
    return shade_of(number + 8 * (number % 4))


def _ways(d: Drawing, p: PlanPicture, y: float) -> float:
    d.text(MARGIN, y + 14, "What moves", "title2")
    x = float(MARGIN + NAMES)
    for kind in dict.fromkeys(w.kind for w in p.ways):
        d.cell((x, y + 4, 22, 12), _shade_of_kind(kind), KINDS[kind])
        text = f"{kind}: {KINDS[kind]}"
        d.text(x + 28, y + 14, text, "small")
        x += 28 + text_width(text) + 22
    y += 26
    states: dict[str, list[StateFlow]] = {}
    for way in p.ways:
        states.setdefault(way.state, []).append(way)
    most = max((sum(w.amount for w in ways) for ways in states.values()), default=0) or 1
    scale = (WIDTH - 2 * MARGIN - NAMES - 300) / most
    for state, ways in states.items():
        d.text(MARGIN, y + 13, clipped(state, 32), "name", title=state)
        x = float(MARGIN + NAMES)
        with d.group(state=state):
            for way in ways:
                if way.amount:
                    sentence = (
                        f"{way.kind}: {way.elements:,} elements, {amount_text(way.amount, p.unit)}, {way.runs:,} runs"
                    )
                    d.cell(
                        (x, y + 1, way.amount * scale, 16),
                        _shade_of_kind(way.kind),
                        f"{state}\n{sentence}",
                        labels=(way.kind,),
                    )
                x += way.amount * scale
        shown = ", ".join(f"{way.kind.split()[0]} {amount_text(way.amount, p.unit)}" for way in ways)
        d.text(x + 7, y + 13, clipped(shown, 60), "small", title=shown)
        y += 21
    return y + 14


# ---- between ranks ---------------------------------------------------------------------------------------------------


def _between(d: Drawing, p: PlanPicture, y: float) -> float:
    first, *rest = p.grids
    d.text(MARGIN, y + 14, "Between ranks", "title2")
    d.text(
        MARGIN + NAMES, y + 14, "Ranks of the source at the left, of the target at the right and above. "
        "Several ranks that share a file count as the first of them.", "faint",
    )  # fmt: skip
    y += 34
    height = float(min(SIDE, max(4, len(first.sources), len(first.targets)) * 34))
    _bands(d, p, first, (MARGIN, y + 18, BANDS, height))
    x = MARGIN + BANDS + 40
    _grid(d, p, first, (x, y, WIDTH - MARGIN - x, height))
    y += height + 34
    for i in range(0, len(rest), 3):
        room = (WIDTH - 2 * MARGIN - 2 * GAP) / 3
        ends = []
        for n, grid in enumerate(rest[i : i + 3]):
            at = MARGIN + n * (room + GAP)
            text = f"inside {_grid_text(grid)}, the cell with the most"
            d.text(at, y + 10, clipped(text, 56), "small", title=text)
            tall = float(min(SMALLER, max(2, len(grid.sources)) * 24))
            _grid(d, p, grid, (at, y + 14, room, tall))
            ends.append(y + tall + 44)
        y = max(ends)
    return y + 4


def _grid_text(grid: FlowGrid) -> str:
    here, there = (ranks_text((side[0][0], side[-1][1])) for side in (grid.sources, grid.targets))
    return f"{here} → {there}"


def _flow_title(p: PlanPicture, grid: FlowGrid, i: int, j: int) -> str:
    """The text of hovering over a cell of a grid."""
    here, there = grid.sources[i], grid.targets[j]
    amount = int(grid.amount[i, j])
    exact = f" ({amount:,} {'bytes' if p.unit == 'B' else p.unit})" if amount >= 100_000 else ""
    return (
        f"{_named(here)} of the source to {_named(there)} of the target\n"
        f"{amount_text(amount, p.unit)}{exact}, {share_text(amount, p.written)} of all moves"
    )


def _named(run: tuple[int, int]) -> str:
    return f"rank{'s' * (run[1] - run[0] > 1)} {ranks_text(run)}"


def _grid(d: Drawing, p: PlanPicture, grid: FlowGrid, place: tuple[float, float, float, float]) -> None:
    x, y, width, height = place
    left = max(text_width(ranks_text(run)) for run in grid.sources) + 8
    w, h = (width - left) / len(grid.targets), height / len(grid.sources)
    above = 18.0
    names = [ranks_text(there) for there in grid.targets]
    if max(map(text_width, names)) + 4 > w:  # the first rank of each is shown, or of every second, third, ...
        names = [str(there[0]) for there in grid.targets]
    each = int((max(map(text_width, names)) + 4) // w) + 1
    for j in range(0, len(names), each):
        title = f"ranks {ranks_text(grid.targets[j])} of the target"
        d.text(x + left + (j + 0.5) * w, y + 12, names[j], "middle", title=title)
    most = int(grid.amount.max(initial=0)) or 1
    with d.group(grid=_grid_text(grid), amount=int(grid.amount.sum())):
        for i, here in enumerate(grid.sources):
            if h >= 9:
                d.text(x + left - 6, y + above + (i + 0.5) * h + 3.7, ranks_text(here), "end")
            for j in range(len(grid.targets)):
                amount = int(grid.amount[i, j])
                box = (x + left + j * w, y + above + i * h, w, h)
                d.heat(box, amount / most, _flow_title(p, grid, i, j), count_text(amount) if amount else "")


def _bands(d: Drawing, p: PlanPicture, grid: FlowGrid, place: tuple[float, float, float, float]) -> None:
    """Bands between ranks of both sides, as wide as their amounts."""
    x, y, width, height = place
    left, right = x + RANKS, x + width - RANKS
    total = int(grid.amount.sum()) or 1
    ends = []
    for axis, runs in ((1, grid.sources), (0, grid.targets)):
        amounts = grid.amount.sum(axis=axis).tolist()
        gap = 3.0
        room = height - gap * (len(runs) - 1)
        at, tops = y, []
        for run, amount in zip(runs, amounts, strict=True):
            size = room * amount / total
            tops.append(at)
            where, kind = (left - 12, "end") if axis else (right + 12, "small")
            if size >= 9:
                d.text(where, at + size / 2 + 3.7, ranks_text(run), kind)
            at += size + gap
        ends.append((tops, room / total))
    (tops, scale), (bottoms, _) = [list(ends[0][0]), ends[0][1]], [list(ends[1][0]), ends[1][1]]
    other = ends[1][1]
    for i in range(len(grid.sources)):
        for j in range(len(grid.targets)):
            amount = int(grid.amount[i, j])
            if not amount:
                continue
            here, there = (left, tops[i], amount * scale), (right, bottoms[j], amount * other)
            d.ribbon(here, there, shade_of(i), _flow_title(p, grid, i, j))
            tops[i] += here[2]
            bottoms[j] += there[2]


# ---- entries ---------------------------------------------------------------------------------------------------------


def _entries(d: Drawing, p: PlanPicture, y: float) -> float:
    d.text(MARGIN, y + 14, "Stored together", "title2")
    d.text(MARGIN + NAMES, y + 14, "Entries of the target; a flat buffer has all tensors of its group.", "faint")
    y += 24
    most = max((e.amount for e in p.entries), default=0) or 1
    room = WIDTH - 2 * MARGIN - NAMES - 420
    for e in sorted(p.entries, key=lambda e: -e.amount)[:ENTRIES_MAX]:
        names = "\n".join(printable(name) for name in e.tensors)
        d.text(MARGIN, y + 13, clipped(e.label, 30), "name", title=f"{printable(e.label)}\n{names}")
        x = MARGIN + NAMES
        sentence = f"{', '.join(e.states)}: {amount_text(e.amount, p.unit)}"
        with d.group(entry=e.label, amount=e.amount):
            d.cell((x, y + 1, max(1.0, room * e.amount / most), 16), shade_of(4), printable(sentence))
        text = f"{amount_text(e.amount, p.unit)}, {e.runs:,} runs, {_ranks(e.sources)} → {_ranks(e.targets)}"
        d.text(
            x + max(1.0, room * e.amount / most) + 7, y + 13, clipped(text, 80), "small", title=f"{sentence}\n{text}"
        )
        y += 21
    if len(p.entries) > ENTRIES_MAX:
        d.text(MARGIN, y + 13, f"and {len(p.entries) - ENTRIES_MAX:,} entries more", "small")
        y += 21
    return y


def _ranks(count: int) -> str:
    return f"{count:,} rank{'s' * (count > 1)}"
