"""A located layout, position by position, compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from tests.oracle import Meaning, Padding, homes, mean
from ucpl.language import nodes, parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.layout.layout import Policy
from ucpl.placement import Part, Placement, locate
from ucpl.placement.placement import Pieces
from ucpl.texts import text_at

Place = tuple[str, str]


TOGETHER = ("mean", "sum", "max")


class TwoMeanings(ValueError):
    """The oracle finds two tensors, or two pieces, in one place."""


def both(
    text: str,
    call: str,
    *,
    name: str = "text.ucpl",
    model: nodes.Model | None = None,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
) -> tuple[Meaning, Layout]:
    """The same call, understood by the oracle and by the compiler."""
    meaning = mean(text, call, name=name, model=model, config=config, sizes=sizes)
    layout = resolve(load((name, text), read=text_at), parse_call(call), model=model, config=config, define_sizes=sizes)
    return meaning, layout


def cells_of(placement: Placement, part: Part, number: int) -> list[Any]:
    """The positions of one home: (tensor, index) or None.

    Two pieces on one position are a mistake.
    """
    home, pieces = part.homes[number], part.pieces
    out: list[Any] = [None] * int(np.prod(home.shape, dtype=np.int64))
    for row in np.flatnonzero(pieces.home == number).tolist():
        path = placement.tensors[int(pieces.tensor[row])]
        dims = len(placement.layout.tensors[path].dims)
        for place, index in _placed(pieces, row):
            assert out[place] is None, (home.key, place, "holds two elements")
            out[place] = (path, index[:dims])
    return out


def _placed(pieces: Pieces, row: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each position of a box, with the index that it holds."""
    low, high, stride = (numbers[row].tolist() for numbers in (pieces.low, pieces.high, pieces.stride))
    first = int(pieces.offset[row]) - sum(a * s for a, s in zip(low, stride, strict=True))
    for index in product(*map(range, low, high)):
        yield first + sum(i * s for i, s in zip(index, stride, strict=True)), index


def _coordinates(layout: Layout, over: int, rank: int) -> str:
    """A rank's position along axes given as bits.

    The order is that in which meshes name them, each mesh from its last.
    """
    place: dict[str, int] = {}
    for mesh in layout.meshes:
        rest = rank
        for axis, degree in reversed([*zip(mesh.axes, mesh.degrees, strict=True)]):
            rest, here = divmod(rest, degree)
            place.setdefault(axis, here)
    among = sorted((a, c) for n, (a, c) in enumerate(place.items()) if over >> n & 1)
    return "".join(f" {a}={c}" for a, c in among)


def live_of(placement: Placement, part: Part, number: int) -> dict[int, Any]:
    """Live rows of one home, by position: (tensor, index)."""
    if part.live is None:
        return {}
    live = part.live.singly()
    out: dict[int, Any] = {}
    for row in np.flatnonzero(live.home == number).tolist():
        path = placement.tensors[int(live.tensor[row])]
        dims = len(placement.layout.tensors[path].dims)
        for place, index in _placed(live, row):
            assert place not in out, (part.homes[number].key, place, "holds two live rows")
            out[place] = (path, index[:dims])
    return out


def table(placement: Placement, rank: int | None = None) -> dict[Place, tuple[Any, ...]]:
    """(file, key) -> all statements about a home."""
    out: dict[Place, tuple[Any, ...]] = {}
    for part in placement.parts:
        policies: dict[int, dict[str, str]] = {}
        columns = (part.pieces.tensor, part.pieces.home, part.pieces.policy, part.pieces.over)
        for t, h, p, over in zip(*(c.tolist() for c in columns), strict=True):
            member = _coordinates(placement.layout, over, part.homes[h].rank) if Policy(p).word in TOGETHER else ""
            policies.setdefault(h, {})[placement.tensors[t]] = f"{Policy(p).word}{member}"
        for i, home in enumerate(part.homes):
            place = (home.file, "/".join(map(str, home.key)))
            assert place not in out, f"{place} is listed twice"
            cells = cells_of(placement, part, i)
            assert home.padding == cells.count(None), place
            held = policies.get(i, {})
            values = {path: part.value_of(path) for path in held}
            live = live_of(placement, part, i)
            assert all(cells[at] is None for at in live), (place, "an element is a live row, too")
            said = (part.state, part.form, home.shape, cells, live, held, values, part.dtype)
            out[place] = (*said, *(() if rank is not None else (home.rank,)))
    return out


def agree(meaning: Meaning, placement: Placement, stated: Any = None, rank: int | None = None) -> int:
    """Assert that a placement equals the oracle's.

    Returns the number of homes.
    """
    found = table(placement, rank)
    undefined = {(h.file, "/".join(map(str, h.key))): h.undefined for p in placement.parts for h in p.homes}
    wanted: dict[Place, tuple[Any, ...]] = {}
    for home in homes(meaning, stated):
        if rank is not None and home.rank != rank:
            continue
        plain = [None if isinstance(c, Padding) else c for c in home.cells]
        value = {path: (float(a), float(b)) for path, (a, b) in home.value.items()}
        live = {at: c.of for at, c in enumerate(home.cells) if isinstance(c, Padding) and c.of is not None}
        said = (home.state, home.form, home.shape, plain, live, home.policy, value, home.dtype)
        place = (home.file, home.key)
        if place in wanted:
            # A place of two entries has both entries' tensors; the first entry's rule for copies holds.
            if wanted[place][:5] != said[:5]:
                raise TwoMeanings(place)
            continue
        wanted[place] = (*said, *(() if rank is not None else (home.rank,)))
        pads = [c for c in home.cells if isinstance(c, Padding)]
        if pads and place in undefined:
            assert undefined[place] or "undefined" not in {p.kind for p in pads}, place
    assert set(found) == set(wanted)
    for place, said in wanted.items():
        assert found[place] == said, place
    return len(wanted)


def check(text: str, call: str, **more: Any) -> int:
    meaning, layout = both(text, call, **more)
    return agree(meaning, locate(layout))
