"""A layout for chunks without a mesh: one axis for each dim."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.formats.dcp.mesh import Boxes
from ucpl.inference.parallel import STORED, Base, Extended
from ucpl.language import nodes, parse
from ucpl.language.words import quote
from ucpl.layout.scope import Value
from ucpl.records import frozen

__all__ = ["Lines", "by_dims"]

_AXIS = "dim"  # of the mesh: dim0, dim1

Shape = tuple[int, ...]


@frozen
class Lines:
    """Contents of a layout.

    shapes, boxes, templates: of each tensor, by name. settings: the layout's parameters. An empty template means that
    only the states of the tensor are stored.
    """

    shapes: Mapping[str, Shape]
    boxes: Mapping[str, Boxes]
    templates: Mapping[str, str]
    settings: Mapping[str, Value]
    framework: str
    states: tuple[str, ...]


def by_dims(base: Base, lines: Lines, path: Path) -> Extended:
    """A layout with one axis for each dim, by widths.

    If a tensor has fewer parts than another, its last parts are empty. path: the file that describes the chunks.
    Raises: UcplError E523.
    """
    widths = {name: _widths(name, shape, lines.boxes[name], path) for name, shape in lines.shapes.items()}
    dims = max(map(len, widths.values()), default=0)
    degrees = [max((len(w[d]) for w in widths.values() if d < len(w)), default=1) for d in range(dims)]
    entries = []
    for name, parts in widths.items():
        axes = [
            f"_@{_AXIS}{d}[{', '.join(map(str, (*w, *(0 for _ in range(degrees[d] - len(w))))))}]"
            if len(w) > 1
            else "_"
            for d, w in enumerate(parts)
        ]
        key = f"  as {quote(lines.templates[name])}" if lines.templates[name] else ""
        entries.append(f"  {quote(name)} = {' '.join(axes) if axes else '...'}{key}")
    texts = [f"{n} = {quote(value) if isinstance(value, str) else value}" for n, value in lines.settings.items()]
    axes_said = [f"{_AXIS}{d}" for d in range(dims)]
    parameters = ", ".join((*(f"{a} = {n}" for a, n in zip(axes_said, degrees, strict=True)), *texts))
    text = "\n".join(
        (
            "ucpl 2",
            f"layout {STORED}({parameters}) of any {{",
            f"  {lines.framework}",
            *((f"  mesh {' '.join(axes_said)}",) if axes_said else ()),
            '  file weights = dcp "{file}"',
            "  group * = model",
            *entries,
            *(f"  {line}" for line in lines.states),
            "}",
        )
    )
    larger = evolve(base.library, known=dict(base.library.known), files=dict(base.library.files))
    file = f"{STORED}.ucpl"
    larger.add(parse(text + "\n", file))
    return Extended(larger, nodes.Call(STORED))


def _widths(name: str, shape: Shape, found: Boxes, path: Path) -> tuple[tuple[int, ...], ...]:
    """The widths of a tensor's parts along each dim.

    Raises: UcplError E523 if its chunks are no grid.
    """
    starts = [sorted({at[d] for at in found}) for d in range(len(shape))]
    widths = tuple(tuple(b - a for a, b in pairwise((*begins, n))) for begins, n in zip(starts, shape, strict=True))
    by_start = [dict(zip(begins, w, strict=True)) for begins, w in zip(starts, widths, strict=True)]
    for at, size in found.items():
        whole = tuple(w[a] for w, a in zip(by_start, at, strict=True))
        if whole != size:
            fail(
                "E523",
                f"the chunks of `{name}` are no grid: that at {list(at)} is {list(size)}, and others begin within its rows",
                Label(str(path), f"{list(size)} at {list(at)}", where=name),
            )
    return widths
