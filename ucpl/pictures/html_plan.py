"""The picture of a plan as one HTML page.

Moves, bands and tables of amounts between ranks, entries.
"""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.pictures.drawing import Drawing
from ucpl.pictures.flows import Grid, PlanPicture, StateFlow, ranks_text
from ucpl.pictures.look import HEATS, amount_text, count_text, printable, share_text
from ucpl.pictures.page import bar, lines_of, page, tag
from ucpl.pictures.svg_plan import KINDS, bands, flow_title, grid_text, shade_of_kind

__all__ = ["plan_html"]

ENTRIES_MAX = 500
BANDS = 440


def plan_html(picture: PlanPicture) -> str:
    """One file. Raises nothing: names are whatever they are."""
    body = [*_head(picture), *_ways(picture), *_between(picture), *_entries(picture)]
    return page(f"{picture.source} → {picture.target}", "\n".join(body))


def _head(p: PlanPicture) -> Iterator[str]:
    yield tag("h1", f"{p.source} → {p.target}")
    said = [f"plan {p.name}"] if p.name else []
    said += [
        f"{p.stored[0]:,} stored tensors on {p.ranks[0]:,} ranks to {p.stored[1]:,} on {p.ranks[1]:,}",
        f"{amount_text(p.written, p.unit)} moved",
        f"{share_text(p.own, p.written)} of it to the rank of the same number",
    ]
    yield tag("p", " · ".join(said))
    yield from (tag("p", note) for note in p.notes)


def _kind(kind: str) -> str:
    shade = shade_of_kind(kind)
    return "k" if shade is None else f"s{shade}"


def _ways(p: PlanPicture) -> Iterator[str]:
    yield "<h2>What moves</h2>"
    kinds = dict.fromkeys(w.kind for w in p.ways)
    entries = "".join(f'<li><i class="{_kind(k)}"></i>{k}: {KINDS[k]}</li>' for k in kinds)
    yield f'<ul class="legend">{entries}</ul><div class="rows">'
    states: dict[str, list[StateFlow]] = {}
    for way in p.ways:
        states.setdefault(way.state, []).append(way)
    most = (max((sum(w.amount for w in ways) for ways in states.values()), default=0) or 1) * 1.6
    for state, ways in states.items():
        parts = []
        for w in ways:
            said = f"{w.kind}: {w.elements:,} elements, {amount_text(w.amount, p.unit)}, {w.runs:,} runs"
            if w.amount:
                parts.append((w.amount / most, _kind(w.kind), f"{printable(state)}\n{said}", ""))
        shown = ", ".join(f"{w.kind.split()[0]} {amount_text(w.amount, p.unit)}" for w in ways)
        yield tag("span", state, kind="name") + bar(parts, shown)
    yield "</div>"


def _between(p: PlanPicture) -> Iterator[str]:
    yield "<h2>Between ranks</h2>"
    yield tag(
        "p",
        "Ranks of the source at the left, of the target at the right and above. Several ranks that share a file count as the "
        "first of them. A stronger colour is more.",
    )
    first = p.grids[0]
    height = max(4.0, len(first.sources), len(first.targets)) * 24
    d = Drawing(BANDS, "bands between ranks")
    bands(d, p, first, (0, 6, BANDS, height))
    yield f'<div class="flow"><div class="bands">{d.finished(height + 12, paper=False)}</div>'
    yield from _grid(p.grids[0], p)
    yield "</div>"
    for grid in p.grids[1:]:
        yield f"<details open><summary>inside {grid_text(grid)}, the cell with the most</summary>"
        yield from _grid(grid, p)
    yield "</details>" * (len(p.grids) - 1)


def _grid(grid: Grid, p: PlanPicture) -> Iterator[str]:
    yield f'<div class="wide"><table class="heat" data-grid="{grid_text(grid)}"><thead><tr><th></th>'
    yield "".join(f"<th>{_first(run)}</th>" for run in grid.targets) + "</tr></thead><tbody>"
    most = int(grid.amount.max(initial=0)) or 1
    for i, here in enumerate(grid.sources):
        cells = "".join(_cell(p, grid, (i, j), most) for j in range(len(grid.targets)))
        yield f"<tr><th>{ranks_text(here)}</th>{cells}</tr>"
    yield "</tbody></table></div>"


def _first(run: tuple[int, int]) -> str:
    return str(run[0]) if run[1] - run[0] == 1 else f"{run[0]}.."


def _cell(p: PlanPicture, grid: Grid, at: tuple[int, int], most: int) -> str:
    amount = int(grid.amount[at])
    level = 0 if not amount else 1 + min(HEATS - 1, int(amount / most * HEATS))
    return (
        f'<td class="h{level}" title="{lines_of(flow_title(p, grid, *at))}">{count_text(amount) if amount else ""}</td>'
    )


def _entries(p: PlanPicture) -> Iterator[str]:
    yield "<h2>Stored together</h2><p>Entries of the target; a flat buffer has all tensors of its group.</p>"
    yield '<div class="wide"><table class="lined"><thead><tr><th>entry</th><th>states</th><th>ways</th>'
    yield f'<th class="n">{"bytes" if p.unit == "B" else p.unit}</th><th class="n">runs</th>'
    yield '<th class="n">from</th><th class="n">to</th><th class="n">to the same rank</th></tr></thead><tbody>'
    for e in sorted(p.entries, key=lambda e: -e.amount)[:ENTRIES_MAX]:
        names = lines_of("\n".join(map(printable, e.tensors[:100])))
        yield f'<tr title="{names}">{tag("td", e.label, kind="name")}{tag("td", ", ".join(e.states))}'
        yield tag("td", ", ".join(e.kinds)) + tag("td", f"{e.amount:,}", kind="n") + tag("td", f"{e.runs:,}", kind="n")
        yield tag("td", _ranks(e.sources), kind="n") + tag("td", _ranks(e.targets), kind="n")
        yield tag("td", share_text(e.own, e.amount), kind="n") + "</tr>"
    yield "</tbody></table></div>"
    if len(p.entries) > ENTRIES_MAX:
        yield tag("p", f"and {len(p.entries) - ENTRIES_MAX:,} entries more")


def _ranks(count: int) -> str:
    return f"{count:,} rank{'s' * (count > 1)}"
