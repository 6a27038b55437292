"""Indices in brackets that no axis of the mesh deals out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.language.words import HOLE
from ucpl.layout import Layout

__all__ = ["undealt_indices"]

_LOCAL = re.compile(r"\{(\w+)\.local\b")


def undealt_indices(layout: Layout, items: Sequence[nodes.LayoutItem]) -> Iterator[str]:
    """Remarks on layers that each rank has, and their numbers.

    `items`: the layout's statements and those of its bases.
    """
    yield from _copied(layout, items)
    dealt = {item.name for item in items if isinstance(item, nodes.Index)}
    found: dict[str, int] = {}
    for entry in layout.entries:
        for name in _LOCAL.findall(entry.storing.key.text if entry.storing.key is not None else ""):
            if name not in dealt:
                found.setdefault(name, entry.span.line)
    for name, line in found.items():
        yield (
            f"{layout.name}: `{{{name}.local}}` (line {line}) is `{{{name}}}`: no line deals out `{name}`."
            f" Write `index {name} = {name}@...` with an axis of the mesh, or `{{{name}}}`"
        )


def _copied(layout: Layout, items: Sequence[nodes.LayoutItem]) -> Iterator[str]:
    """Axes that place tensors or files and cut nothing.

    There is one remark for each index that no line deals out.
    """
    axes = dict.fromkeys(axis for item in items if isinstance(item, nodes.Mesh) for axis in item.axes)
    cut = {node.mesh_axis for item in items for node in walk(item) if isinstance(node, nodes.Split)}
    cut |= {
        n.path for item in items if isinstance(item, nodes.Use) for n in walk(item.call) if isinstance(n, nodes.Name)
    }
    dealt = {item.name for item in items if isinstance(item, nodes.Index)}
    templates = {item.name: item.template for item in items if isinstance(item, nodes.Files)}
    entries = [i for i in items if isinstance(i, nodes.Entry) and i.shape is not None]
    found: dict[str, str] = {}
    for axis in (axis for axis in axes if axis not in cut):
        is_placed = any(_is_at(entry, axis) for entry in entries)
        copied = [
            (entry, name)
            for entry in entries
            if any(c.word == "as" for c in entry.clauses) and not _is_at(entry, axis) and not _is_same(entry, axis)
            if is_placed or _is_of(templates.get(_file(entry), ""), axis)
            for name in dict.fromkeys(n.name for n in walk(*entry.indices) if isinstance(n, nodes.Dim))
            if name not in dealt
        ]
        for entry, name in sorted(copied, key=lambda one: not axis.startswith(one[1]))[:1]:
            more = len({other.span for other, index in copied if index == name}) - 1
            found.setdefault(
                name,
                f"{layout.name}: each rank of {axis} has all of `{name}` of `{entry.path}`{f' and {more} more' * bool(more)}"
                f" (line {entry.span.line}): {axis} cuts nothing. Write `index {name} = {name}@{axis}`; if copies are meant,"
                f" `same @{axis}` in the line",
            )
    yield from found.values()


def _is_at(entry: nodes.Entry, axis: str) -> bool:
    return any(c.word == "at" and c.args[0] == axis for c in entry.clauses)


def _is_same(entry: nodes.Entry, axis: str) -> bool:
    return any(c.word == "copies" and axis in c.args[1] for c in entry.clauses)


def _file(entry: nodes.Entry) -> str:
    return next((c.args[0] for c in entry.clauses if c.word == "in"), "weights")


def _is_of(template: str, axis: str) -> bool:
    return any(re.search(rf"\b{re.escape(axis)}\b", hole[1]) for hole in HOLE.finditer(template))
