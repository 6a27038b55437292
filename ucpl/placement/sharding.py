"""Cuts of tensors over tensor-parallel ranks, as facts.

A store writes them next to the tensors. Not here: patterns that are no sections of one dim (heads of q, k and v in
turn, labelled parts): they are left out.
"""

from __future__ import annotations

from ucpl.errors import fail
from ucpl.extents import Section, Sharding
from ucpl.layout import Entry, Layout
from ucpl.layout import axes as ax
from ucpl.layout.remedies import for_cut
from ucpl.layout.scope import at

TP = "tp"  # the mesh axis of tensor parallelism


def shardings_of(layout: Layout) -> dict[str, Sharding]:
    """Every tensor whose pattern is sections of one dim, by its path.

    The value is the sections, or none. Empty without tensor parallelism. Raises: UcplError E204 if a cut leaves a
    remainder.
    """
    degree = next((n for m in layout.meshes for a, n in zip(m.axes, m.degrees, strict=True) if a == TP), 1)
    out: dict[str, Sharding] = {}
    if degree == 1:
        return out
    for entry in layout.entries:
        if entry.alias is None and entry.path not in out and entry.path in layout.placed and not entry.indices:
            try:
                found = _sharding(layout, entry, degree)
            except ax.UnevenCut as error:  # of a layout that is asked before any rank of it was looked at
                remedy = f"choose another tp; in a layout of your own, {for_cut(error)}"
                fail("E204", f"`{entry.path}`: {error}", at(entry.span, "cut here"), remedy=remedy)
            if found is not None:
                out[entry.path] = found
    return out


def _sharding(layout: Layout, entry: Entry, degree: int) -> Sharding | None:
    tensor = layout.placed[entry.path]
    axes = _unwrapped(entry.shape)
    if set(entry.targets) != {None} or len(axes) != len(tensor.dims):
        return None
    if any(n != layout.sizes[d] for d, n in zip(tensor.dims, tensor.counts, strict=True)):
        return None  # if the tensor has only a range of a dim, the dim is cut as it is
    cut: tuple[int, tuple[Section, ...]] | None = None
    for i, (axis, dim, size) in enumerate(zip(axes, tensor.dims, tensor.counts, strict=True)):
        sections = _sections(axis, dim, size, degree)
        if sections is None:
            return None
        if all(s.widths is None for s in sections):
            if len(sections) != 1:
                return None
            continue
        if cut is not None:
            return None
        cut = (i, sections)
    if cut is None:
        return Sharding(tensor.counts)
    return Sharding(tensor.counts, *cut, origin=f"layout {layout.name}")


def _unwrapped(shape: tuple[ax.Axis, ...]) -> tuple[ax.Axis, ...]:
    """The tensor's own axes inside `pad((...), dp)@dp`.

    That is a flattened tensor that is cut once more.
    """
    if len(shape) != 1:
        return shape
    axis = shape[0]
    while isinstance(axis, ax.Cut | ax.Pad | ax.Trim):
        axis = axis.axis
    return axis.terms[0].axes if isinstance(axis, ax.Stack) and len(axis.terms) == 1 else shape


def _sections(axis: ax.Axis, dim: str, size: int, degree: int) -> tuple[Section, ...] | None:
    """Sections of one dim in order, each cut over tp or not.

    None if the axis is something else.
    """
    parts = [axis]
    if isinstance(axis, ax.Stack):
        if any(t.label is not None or len(t.axes) != 1 for t in axis.terms):
            return None
        parts = [t.axes[0] for t in axis.terms]
    out: list[Section] = []
    end = 0
    for part in parts:
        inner, split = part, None
        if isinstance(part, ax.Cut):
            first, *others = part.splits  # cuts by other axes are made on each tp rank
            if TP in (one.mesh_axis for one in others):
                return None
            inner, split = part.axis, first if first.mesh_axis == TP else None
        if not isinstance(inner, ax.Dim) or inner.name != dim or inner.low != end:
            return None
        end = size if inner.high is None else inner.high
        widths = None
        if split is not None:
            places = [ax.piece_of(split, end - inner.low, degree, here) for here in range(degree)]
            widths = tuple(b - a for a, b in places)
        out.append(Section(end - inner.low, widths))
    return tuple(out) if end == size else None
