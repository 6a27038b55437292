"""`on MESH`: the mesh of a line's axes.

The line's cuts, coordinates, means and keys use axes of that mesh. Names of files are left out: they distinguish ranks,
and a rank has coordinates on every mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ucpl.errors import fail
from ucpl.layout import axes as ax
from ucpl.layout.layout import Entry, Layout, Mesh, States
from ucpl.layout.scope import at

__all__ = ["check_meshes"]

Line = Entry | States


def check_meshes(layout: Layout) -> None:
    """Check the meshes of all lines.

    Raises: UcplError E218 for a mesh that does not exist, E219 for an axis of another.
    """
    lines: tuple[Line, ...] = (*layout.entries, *layout.state_lines)
    for line in lines:
        if line.storing.mesh:
            mesh = _mesh_of(line, layout)
            for axis, use in _axes(line, layout):
                _demand(line, axis, use, (mesh, layout))


def _mesh_of(line: Line, layout: Layout) -> Mesh:
    found = next((m for m in layout.meshes if m.name == line.storing.mesh), None)
    if found is None:
        fail(
            "E218",
            f"{_named(line)} is on mesh `{line.storing.mesh}`, and there is none of that name",
            at(line.span),
            remedy=_instead_of_mesh(line.storing.mesh, layout),
        )
    return found


def _instead_of_mesh(name: str, layout: Layout) -> str:
    named = [m.name for m in layout.meshes if m.name]
    axes = [a for m in layout.meshes for a in m.axes]
    if name in axes:
        return (
            f"take `on {name}` out: `{name}` is an axis of a mesh, and a line is on all of them. A cut over it is `@{name}`,"
            f" one of its ranks `at {name}[0]`"
        )
    return f"the meshes with a name are {', '.join(named)}" if named else f"take `on {name}` out: no mesh has a name"


def _axes(line: Line, layout: Layout) -> Iterator[tuple[str, str]]:
    """Mesh axes that a line uses, each with the use."""
    known = {a for m in layout.meshes for a in m.axes}
    cut = ax.mesh_axes_of(*line.shape) if not isinstance(line.shape, str) else ()
    yield from ((a, "is cut over") for a in cut if a in known)
    for axis in _dealt(line.indices, layout, frozenset()) if isinstance(line, Entry) else ():
        if layout.sizes.get(axis, 1) > 1:  # an index that one rank has all of is dealt to nobody
            yield axis, "is dealt over"
    yield from ((a, "uses a coordinate of") for a, _ in line.storing.at)
    yield from ((a, f"says `{line.storing.policy.word}` of") for a in line.storing.policy_axes)
    yield from ((a, "says `any` of") for a in line.storing.loose)
    names = line.storing.key.names if line.storing.key is not None else frozenset()
    yield from ((a, "names in its key") for a in sorted(names & known))


def _dealt(axes: tuple[ax.Axis, ...], layout: Layout, seen: frozenset[str]) -> Iterator[str]:
    """Mesh axes that deal the indices in brackets.

    They do so by their own cuts and by `index` statements.
    """
    yield from ax.mesh_axes_of(*axes)
    for name in ax.dims_of(*axes):
        if name in layout.indices and name not in seen:
            yield from _dealt((layout.indices[name],), layout, seen | {name})


def _demand(line: Line, axis: str, use: str, where: tuple[Mesh, Layout]) -> None:
    mesh, layout = where
    first = layout.mesh_of(axis)  # whose coordinates the axis has
    if first is None:
        return  # an axis of no mesh is refused where it cuts
    if axis not in mesh.axes:
        fail(
            "E219",
            f"{_named(line)} is on mesh `{mesh.name}` and {use} `{axis}`, an axis of {_called(first)}",
            at(line.span),
            remedy=f"mesh {mesh.name} has {', '.join(mesh.axes)}: take one of these, or leave `on {mesh.name}` out",
        )
    if _step(first, axis) != _step(mesh, axis) and layout.sizes.get(axis, 1) > 1:
        fail(
            "E219",
            f"{_named(line)} {use} `{axis}` on mesh `{mesh.name}`, where other ranks have its coordinates"
            f" than on {_called(first)}",
            at(line.span),
            remedy=f"give the axis of mesh {mesh.name} a name of its own: `let {mesh.name}_{axis} = {axis}`",
        )


def _step(mesh: Mesh, axis: str) -> int:
    """Distance of neighbours along an axis, in ranks."""
    return prod(mesh.degrees[mesh.axes.index(axis) + 1 :])


def _named(line: Line) -> str:
    return f"`{line.path}`" if isinstance(line, Entry) else "a state line"


def _called(mesh: Mesh) -> str:
    return f"mesh `{mesh.name}`" if mesh.name else f"the mesh `{' '.join(mesh.axes)}`"
