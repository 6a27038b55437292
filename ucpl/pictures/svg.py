"""The picture of a layout: an SVG file, or an HTML page.

It has no script and no font, and fetches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ucpl.pictures.cells import Cell, Level
from ucpl.pictures.drawing import Drawing, text_width
from ucpl.pictures.layouts import CellFamily, LayoutPicture, RankRow, TensorPicture
from ucpl.pictures.look import clipped, count_text, printable, shade_of, share_text
from ucpl.pictures.page import picture_page

__all__ = ["layout_html", "layout_svg"]

WIDTH, MARGIN, NAMES = 1200, 28, 236
GAP, COLUMN_MIN = 22, 250
TENSORS_MAX = 40  # that are drawn; the others are named
NAME_MAX, NAME_LINES = 26, 3  # characters of a tensor's name in a line
BAR, ROW, INSET = 26, 13, 14


def layout_svg(picture: LayoutPicture, *, paper: bool = True) -> str:
    """One file, or part of a page without paper.

    Raises nothing: names are whatever they are.
    """
    d = Drawing(WIDTH, f"{picture.call} of {picture.model or 'any model'}")
    y = _head(d, picture)
    y = _legend(d, picture, y)
    y = _ranks(d, picture, y)
    d.text(MARGIN, y + 14, "Tensors", "title2")
    d.text(
        MARGIN + NAMES, y + 14, "Areas are to scale within a tensor; the percentage is its share of the model.", "faint"
    )
    y += 30
    for tensor in picture.tensors[:TENSORS_MAX]:
        y = _tensor(d, picture, tensor, y)
    rest = picture.tensors[TENSORS_MAX:]
    if rest:
        y = _rest(d, [name for t in rest for name in t.names], y)
    return d.finished(y + 6, paper=paper)


def layout_html(picture: LayoutPicture) -> str:
    """The same in a page, with a table of all tensors."""
    rows = [
        (
            ", ".join(t.names),
            t.dims or "one element",
            t.kind,
            t.dtype,
            f"{t.numel:,}",
            share_text(t.numel * len(t.names), picture.numel),
            "; ".join(", ".join(family.states) for family in t.families),
        )
        for t in picture.tensors
    ]
    heads = ("tensors that are cut alike", "dims", "kind", "dtype", "elements of each", "share", "states")
    return picture_page(picture.call, layout_svg(picture, paper=False), heads, rows)


def _head(d: Drawing, picture: LayoutPicture) -> float:
    d.text(MARGIN, 40, clipped(picture.call, 84), "title", title=picture.call)
    many = sum(len(t.names) for t in picture.tensors)
    ranks = f"{picture.ranks:,} rank{'s' * (picture.ranks > 1)}"
    if picture.rank is not None:
        ranks = f"rank {picture.rank} of {ranks}"
    said = [picture.mesh] if picture.ranks > 1 else []
    said += [ranks, f"{many:,} tensors", f"{count_text(picture.numel)} elements", "states " + ", ".join(picture.states)]
    if picture.model:
        said.insert(0, f"of {picture.model}")
    d.text(MARGIN, 62, clipped(" · ".join(said), 170), "faint", title=" · ".join(said))
    y = 62.0
    for remark in picture.remarks[:4]:
        y += 17
        d.text(MARGIN, y, clipped(remark, 170), "faint", title=remark)
    return y + 14


def _legend(d: Drawing, picture: LayoutPicture, y: float) -> float:
    small = (
        "numbers are ranks"
        if any(c.label[:1].isdigit() for c in _cells(picture))
        else "names are coordinates of the mesh"
    )
    entries = [
        (shade_of(0), "a cell is a part of a tensor on some ranks: " + small),
        (shade_of(9), "colour and hatching distinguish cells; labels are enough without them"),
        (None, "not held here, or padding"),
    ]
    x = float(MARGIN)
    for shade, text in entries:
        d.cell((x, y + 2, 22, 12), shade)
        d.text(x + 29, y + 12, text, "small")
        x += 29 + text_width(text) + 26
    return y + 34


def _cells(picture: LayoutPicture) -> Iterator[Cell]:
    return (c for t in picture.tensors for f in t.families for c in f.levels[0].cells)


def _rest(d: Drawing, names: list[str], y: float) -> float:
    """Names of tensors that are not drawn, in lines."""
    d.rule(MARGIN, WIDTH - MARGIN, y)
    d.text(MARGIN, y + 20, f"{len(names):,} tensors more:", "state")
    y += 20
    line = ""
    for name in [*names, ""]:
        if line and (not name or len(line) + len(name) > 170):
            y += 16
            d.text(MARGIN, y, clipped(line, 170), "small", title=line)
            line = ""
        line += ("  " if line else "") + name
    return y + 12


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _ranks(d: Drawing, picture: LayoutPicture, y: float) -> float:
    d.text(MARGIN, y + 14, "Ranks", "title2")
    d.text(MARGIN + NAMES, y + 14, "Elements that each stores, or shares a file of; states end to end.", "faint")
    y += 24
    most = max((sum(r.elements) + r.padding for r in picture.rows), default=0) or 1
    room = WIDTH - 2 * MARGIN - NAMES - 120
    for row in picture.rows:
        d.text(MARGIN, y + 13, clipped(row.said, 34), "label", title=row.said)
        _bar(d, picture, row, (MARGIN + NAMES, y, room / most))
        y += 21
    return y + 12


def _bar(d: Drawing, picture: LayoutPicture, row: RankRow, place: tuple[float, float, float]) -> None:
    """place: x, y, and pixels an element."""
    x, y, scale = place
    for n, (state, elements) in enumerate(zip(picture.states, row.elements, strict=True)):
        width = elements * scale
        if width:
            d.cell((x, y + 1, width, 16), shade_of(7 + 8 * n), f"{state}: {elements:,} elements", labels=(state,))
        x += width
    if row.padding:
        d.cell((x, y + 1, row.padding * scale, 16), None, f"padding: {row.padding:,} elements", labels=("padding",))
        x += row.padding * scale
    total = sum(row.elements)
    text = count_text(total) if row.least == total else f"{count_text(row.least)} to {count_text(total)}"
    d.text(x + 7, y + 13, text + (f" + {count_text(row.padding)}" if row.padding else ""), "small")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _tensor(d: Drawing, picture: LayoutPicture, tensor: TensorPicture, y: float) -> float:
    d.rule(MARGIN, WIDTH - MARGIN, y)
    y += 8
    several = f" and {len(tensor.names) - 1:,} more" if len(tensor.names) > 1 else ""
    at = y - 2
    for line in _name_lines(tensor.path):
        at += 16
        d.text(MARGIN, at, line, "name", title="\n".join(map(printable, tensor.names)))
    lines = [tensor.dims or "one element", " ".join(filter(None, (_kind(tensor), tensor.dtype)))]
    share = share_text(tensor.numel * len(tensor.names), picture.numel)
    lines.append(f"{count_text(tensor.numel)} elements{' each' if several else ''}, {share}")
    if several:
        lines.insert(0, several.strip() + ", alike")
    for line in filter(None, lines):
        at += 15
        d.text(MARGIN, at, clipped(line, 38), "small", title=line)
    bottom = at
    x0, room = MARGIN + NAMES, WIDTH - 2 * MARGIN - NAMES
    if not tensor.families:
        d.text(x0, y + 14, "not stored" if tensor.numel else "no elements", "faint")
    many = max(1, min(len(tensor.families), int((room + GAP) // (COLUMN_MIN + GAP))))
    width = (room - GAP * (many - 1)) / many
    top = y
    for i in range(0, len(tensor.families), many):
        ends = [
            _family(d, tensor, family, (x0 + n * (width + GAP), top, width))
            for n, family in enumerate(tensor.families[i : i + many])
        ]
        top = max(ends) + 4
        bottom = max(bottom, *ends)
    return bottom + 10


def _name_lines(name: str) -> list[str]:
    """Split a long name into at most three lines.

    They end at its dots, if it has any.
    """
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+", clipped(name, NAME_LINES * NAME_MAX - NAME_MAX // 2)) or [name]:
        while part:
            room = NAME_MAX - len(lines[-1])
            if lines[-1] and len(part) > room and (len(part) <= NAME_MAX or room < NAME_MAX // 2):
                lines.append("")
                room = NAME_MAX
            lines[-1], part = lines[-1] + part[:room], part[room:]
            if part:
                lines.append("")
    return [line for line in lines if line] or [name]


def _kind(tensor: TensorPicture) -> str:
    return "" if tensor.kind == "parameter" else tensor.kind


def _family(d: Drawing, tensor: TensorPicture, family: CellFamily, place: tuple[float, float, float]) -> float:
    """place: x, y, width. Returns where it ends."""
    x, y, width = place
    note = family_note(family)
    sentence = ", ".join(family.states)
    d.text(x, y + 13, clipped(sentence, int(width / 7)), "state", title=sentence)
    used = text_width(sentence) * 1.32 + 10
    if note and used + text_width(note) > width:
        y += 14
        d.text(x, y + 13, clipped(note, int(width / 5.6)), "small", title=note)
    elif note:
        d.text(x + used, y + 13, note, "small")
    y += 19
    beside = len(family.levels) if len(tensor.families) == 1 else 1  # levels are next to each other if there is room
    room = (width - GAP * (beside - 1)) / beside
    top = bottom = y
    for n, level in enumerate(family.levels):
        indent = INSET if n and beside == 1 else 0
        if n and beside > 1:
            top, x = y, x + room + GAP
        if n:
            many = f", one of {level.alike:,} such cells" if level.alike > 1 else ""
            text = f"inside {level.of}{many}"
            d.text(x + indent, top + (-6 if beside > 1 else 11), clipped(text, int(room / 5.6)), "small", title=text)
            top += 0 if beside > 1 else 16
        top = _level(d, tensor, family, n, (x + indent, top, room - indent)) + 8
        bottom = max(bottom, top)
    return bottom


def family_note(family: CellFamily) -> str:
    """The text next to states: copies, padding, meaning of numbers."""
    axes = " · ".join(family.levels[0].axes)
    short = any(c.label != c.short for c in family.levels[0].cells)
    padding = f"{family.padding:,} of padding" if family.padding else ""
    return "; ".join(filter(None, (f"cells by {axes}" if short and axes else "", family.note, padding)))


def _level(
    d: Drawing, tensor: TensorPicture, family: CellFamily, depth: int, place: tuple[float, float, float]
) -> float:
    level, (x, y, width) = family.levels[depth], place
    if any(len(level.strips) > 1 and text_width(name) + 4 <= size * width for _, size, name in level.strips):
        for start, size, name in level.strips:
            if text_width(name) + 4 <= size * width:
                d.text(x + start * width + size * width / 2, y + 9, name, "strip")
        y += 13
    height = _height(level)
    with d.group(tensor=tensor.path, states=" ".join(family.states), depth=depth, elements=level.elements):
        d.cell((x, y, width, height), None, f"{tensor.path}: not held" if family.held < tensor.numel else "")
        for cell in level.cells:
            title = cell_title(tensor, family, cell)
            big = max(range(len(cell.places)), key=lambda i: cell.places[i][2] * cell.places[i][3])
            for i, (a, b, w, h) in enumerate(cell.places):
                box = (x + a * width, y + b * height, w * width, h * height)
                d.cell(box, shade_of(cell.number), title, labels=(cell.label, cell.short) if i == big else ())
    return y + height


def _height(level: Level) -> float:
    """As high as its rows need.

    A matrix that is higher than wide is drawn higher.
    """
    if not level.frame.down:
        return BAR
    rows = len({round(b, 6) for c in level.cells for _, b, _, _ in c.places})
    shape = 96 if level.frame.aspect < 0.5 else 72 if level.frame.aspect <= 2 else 56
    return float(max(shape, min(rows, 16) * ROW))


def cell_title(tensor: TensorPicture, family: CellFamily, cell: Cell) -> str:
    """The lines that hovering over a cell shows."""
    lines = [f"{tensor.path}{cell.span}" if cell.span.startswith("[") else f"{tensor.path}: {cell.span}"]
    lines.append(f"{cell.elements:,} elements of {', '.join(family.states)}")
    lines.append(cell.held_by)
    lines.append(f"file {cell.where}")
    return "\n".join(map(printable, lines))
