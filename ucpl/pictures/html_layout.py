"""The picture of a layout as one HTML page.

It is the same as in SVG, as wide as its window, and cells open to show their inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ucpl.pictures.cells import Cell
from ucpl.pictures.layouts import CellFamily, LayoutPicture, RankRow, TensorPicture
from ucpl.pictures.look import count_text, markup, printable, shade_of, share_text
from ucpl.pictures.page import bar, box, page, percent, tag
from ucpl.pictures.svg import cell_title, family_note
from ucpl.tables import I64

__all__ = ["layout_html"]

CELLS_MAX = 12_000  # of a page; tensors behind them are named
NAMED_MAX = 20
FULL_LABELS = 9  # cells whose labels name their axes


def layout_html(picture: LayoutPicture) -> str:
    """One file. Raises nothing: names are whatever they are."""
    body = [tag("h1", picture.call), *_head(picture), *_find(picture), *_ranks(picture), *_tensors(picture)]
    return page(f"{picture.call} of {picture.model or 'any model'}", "\n".join(body))


def _head(p: LayoutPicture) -> Iterator[str]:
    many = sum(len(t.names) for t in p.tensors)
    ranks = f"{p.ranks:,} rank{'s' * (p.ranks > 1)}"
    said = [f"of {p.model}"] if p.model else []
    said += [p.mesh] if p.ranks > 1 else []
    said += [ranks if p.rank is None else f"rank {p.rank} of {ranks}", f"{many:,} tensors"]
    said += [f"{count_text(p.numel)} elements", "states " + ", ".join(p.states)]
    yield tag("p", " · ".join(said))
    yield from (tag("p", remark) for remark in p.remarks)
    numbers = any(c.label[:1].isdigit() for t in p.tensors for f in t.families for c in f.levels[0].cells)
    what = "numbers are ranks" if numbers else "names are coordinates of the mesh"
    yield (
        f'<ul class="legend"><li><i class="s0"></i>a cell is a part of a tensor on some ranks: {what}</li>'
        '<li><i class="s9"></i>colour and hatching distinguish cells; labels are enough without them</li>'
        '<li><i class="k"></i>not held here, or padding</li></ul>'
    )


def _find(p: LayoutPicture) -> Iterator[str]:
    if p.rank is None and p.ranks > 1:
        mesh = " ".join(f"{a}={n}" for a, n in p.axes)
        yield (
            f'<p class="find"><label>Find a rank <input id="find" type="number" min="0" max="{p.ranks - 1}" '
            f'data-mesh="{markup(mesh)}"></label> <span id="hits"></span></p>'
        )


def _ranks(p: LayoutPicture) -> Iterator[str]:
    yield "<h2>Ranks</h2><p>Elements that each stores, or shares a file of; states end to end.</p>"
    most = (max((sum(r.elements) + r.padding for r in p.rows), default=0) or 1) * 1.25
    yield '<div class="rows">'
    for row in p.rows:
        yield tag("span", row.said) + _row(p, row, most)
    yield "</div>"


def _row(p: LayoutPicture, row: RankRow, most: float) -> str:
    parts = [
        (n / most, f"s{shade_of(7 + 8 * i)}", f"{printable(state)}: {n:,} elements", state)
        for i, (state, n) in enumerate(zip(p.states, row.elements, strict=True))
        if n
    ]
    if row.padding:
        parts.append((row.padding / most, "k", f"padding: {row.padding:,} elements", ""))
    total = sum(row.elements)
    text = count_text(total) if row.least == total else f"{count_text(row.least)} to {count_text(total)}"
    return bar(parts, text + (f" + {count_text(row.padding)}" if row.padding else ""))


def _tensors(p: LayoutPicture) -> Iterator[str]:
    yield "<h2>Tensors</h2><p>Areas are to scale within a tensor; the percentage is its share of the model.</p>"
    left = CELLS_MAX
    rest: list[str] = []
    for tensor in p.tensors:
        if left > 0:
            left -= sum(len(level.cells) for f in tensor.families for level in f.levels)
            yield from _tensor(p, tensor)
        else:
            rest += tensor.names
    if rest:
        yield f"<details><summary>{len(rest):,} tensors more, which are not drawn</summary>"
        yield tag("p", ", ".join(rest)) + "</details>"


def _tensor(p: LayoutPicture, t: TensorPicture) -> Iterator[str]:
    yield f'<section class="tensor"><header>{tag("div", t.path, kind="name")}'
    if len(t.names) > 1:
        others = ", ".join(t.names[1:NAMED_MAX]) + (", ..." if len(t.names) > NAMED_MAX else "")
        yield f"<details><summary>and {len(t.names) - 1:,} more, alike</summary>{markup(others)}</details>"
    kind = "" if t.kind == "parameter" else t.kind
    share = share_text(t.numel * len(t.names), p.numel)
    yield tag("div", t.dims or "one element") + tag("div", " ".join(filter(None, (kind, t.dtype))))
    each = " each" if len(t.names) > 1 else ""
    yield tag("div", f"{count_text(t.numel)} elements{each}, {share}") + '</header><div class="states">'
    if not t.families:
        yield tag("p", "not stored" if t.numel else "no elements")
    for family in t.families:
        note = family_note(family)  # an empty one, too, so that pictures stand in line
        yield f"<div>{tag('h3', ', '.join(family.states))}{tag('p', note)}"
        yield from _levels(t, family, 0)
        yield "</div>"
    yield "</div></section>"


def _levels(t: TensorPicture, family: CellFamily, depth: int) -> Iterator[str]:
    level = family.levels[depth]
    if len(level.strips) > 1:
        strips = "".join(
            f'<i style="left:{percent(start)};width:{percent(size)}"><b>{markup(name)}</b></i>'
            for start, size, name in level.strips
        )
        yield f'<div class="strips">{strips}</div>'
    rows = len({round(b, 6) for c in level.cells for _, b, _, _ in c.places})
    height = 28 if not level.frame.down else max(72, min(rows, 24) * 15)
    told = {"tensor": t.path, "states": " ".join(family.states), "depth": str(depth), "elements": str(level.elements)}
    data = "".join(f' data-{k}="{markup(v)}"' for k, v in told.items())
    data += " data-partly" if family.held < t.numel or depth else ""
    short = len(level.axes) > 1 or len(level.cells) > FULL_LABELS
    yield f'<div class="cells" style="height:{height}px"{data}>'
    yield "".join(piece for cell in level.cells for piece in _cell(t, family, cell, short))
    yield "</div>"
    if depth + 1 < len(family.levels):
        inner = family.levels[depth + 1]
        many = f", one of {inner.alike:,} such cells" if inner.alike > 1 else ""
        yield f"<details><summary>{markup(f'inside {inner.of}{many}')}</summary>"
        yield from _levels(t, family, depth + 1)
        yield "</details>"


def _cell(t: TensorPicture, family: CellFamily, cell: Cell, short: bool) -> Iterator[str]:
    title, data = cell_title(t, family, cell), f' data-r="{_runs(cell.ranks)}"'
    largest = max(range(len(cell.places)), key=lambda i: cell.places[i][2] * cell.places[i][3])
    label = cell.short if short else cell.label
    for i, place in enumerate(cell.places):
        yield box(place, f"s{shade_of(cell.number)}", title, label if i == largest else "", data)


def _runs(ranks: I64) -> str:
    """Numbers as runs of one step: `3 8:16 32:64:8` (exclusive ends)."""
    out: list[str] = []
    values = ranks.tolist()
    steps = np.diff(ranks).tolist()
    i = 0
    while i < len(values):
        j = i + 1
        while j < len(values) and steps[j - 1] == steps[i]:
            j += 1
        if j - i > 2:
            step = steps[i]
            out.append(f"{values[i]}:{values[j - 1] + step}" + (f":{step}" if step > 1 else ""))
        else:
            j = i + 1
            out.append(str(values[i]))
        i = j
    return " ".join(out)
