"""Lines about copies that do not exist, or untrained states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ucpl.language import nodes
from ucpl.language.nodes import NOWHERE
from ucpl.language.walk import walk
from ucpl.language.words import HOLE
from ucpl.layout import Layout
from ucpl.layout.layout import Entry
from ucpl.layout.templates import template

__all__ = ["lines_in_wrong_scope"]

_NAME = re.compile(r"[A-Za-z_][\w.]*")


def lines_in_wrong_scope(
    layout: Layout, own: Iterable[nodes.LayoutItem], items: tuple[nodes.LayoutItem, ...]
) -> Iterator[str]:
    """`own`: the layout's own statements.

    `items`: also those of the layouts that it extends.
    Each remark names an own line and gives the remedy.
    """
    rules = {i.name: i for i in items if isinstance(i, nodes.Index)}
    entries = {entry.span: entry for entry in layout.entries}
    own = tuple(own)
    for item in own:
        match item:
            case nodes.Entry(shape=tuple()):
                yield from _copies(layout, item, entries.get(item.span), rules)
                yield from _sizes_in_keys(layout, item)
            case nodes.Group(name=name, members=tuple(members)) if _keeps_states(name, items):
                yield from _untrained(layout, item, members)
            case nodes.Derive(state="weight", source=source, when=None):
                yield from _stored_too(layout, item, source)
    yield from _uncounted(layout, own, rules)
    yield from _in_two_groups(layout, own)


def _sizes_in_keys(layout: Layout, item: nodes.Entry) -> Iterator[str]:
    """`{l}` of a dim that is in no brackets.

    It is one number for all of it, its size.
    """
    dims = {name for tensor in layout.tensors.values() for name in tensor.dims}
    dims -= {n.name for n in walk(*item.indices) if isinstance(n, nodes.Dim)}
    dims -= {axis for mesh in layout.meshes for axis in mesh.axes}
    for text in (c.args[0] for c in item.clauses if c.word == "as"):
        for hole in HOLE.finditer(text):
            name = next((n for n in _NAME.findall(hole[1]) if n in dims and f"size({n})" not in hole[1]), None)
            if name is not None:
                indices = ", ".join([*(n.name for n in walk(*item.indices) if isinstance(n, nodes.Dim)), name])
                yield (
                    f"{layout.name}: `{{{hole[1]}}}` in the key of `{item.path}` (line {item.span.line}) is a number of sizes:"
                    f" {name} is {layout.sizes.get(name)}, and in no brackets. Write `{item.path}[{indices}] = ...` for a key"
                    f" of each {name}, or `{{size({name})}}` where the size is meant"
                )


def _cuts(axis: nodes.Axis) -> set[str]:
    return {split.mesh_axis for node in walk(axis) if isinstance(node, nodes.Cut) for split in node.splits}


def _copies(layout: Layout, item: nodes.Entry, entry: Entry | None, rules: dict[str, nodes.Index]) -> Iterator[str]:
    """Clauses about copies along an axis without copies.

    The axis deals the index, or no name depends on it.
    """
    bracketed = {axis.name for axis in item.indices if isinstance(axis, nodes.Dim)}
    dealt = {name: _cuts(rule.axis) for name, rule in rules.items() if rule.when is None}
    fixed = {c.args[0] for c in item.clauses if c.word == "at"}
    for word, axes in (c.args for c in item.clauses if c.word == "copies"):
        for axis in (a for a in axes if a not in fixed):
            said = f"{layout.name}: `{word} @{axis}` of `{item.path}` (line {item.span.line})"
            by = next((i for i in sorted(bracketed) if axis in dealt.get(i, ())), None)
            if by is not None:
                yield f"{said} speaks of copies along {axis}, over which `index {by}` deals {by}: there are none. Take it out"
            elif entry is not None and entry.storing.file in layout.files and word != "same":
                file = layout.files[entry.storing.file]
                text = file.path.text if file.path else file.name
                texts = [t for t in (file.path, file.key, entry.storing.key) if t is not None]
                names = frozenset[str]().union(*(text.names for text in texts))
                if not {axis, "rank"} & names and not _made_of(layout, axis):
                    yield (
                        f"{said} speaks of copies along {axis}, and all its ranks share one file, `{text}`."
                        f" Write {{{axis}}} in the file's name, or take it out"
                    )


def _made_of(layout: Layout, axis: str) -> bool:
    """Return True if the axis belongs to a second mesh."""
    return len(layout.meshes) > 1 and axis not in layout.meshes[0].axes


def _uncounted(layout: Layout, own: Iterable[nodes.LayoutItem], rules: dict[str, nodes.Index]) -> Iterator[str]:
    """`{l.local}` where nothing deals `l`: every rank counts all of them.

    Only the first line of each dim is reported.
    """
    told: set[str] = set()
    axes = layout.meshes[0].axes if layout.ranks > 1 else ()
    for item in (i for i in own if axes and isinstance(i, nodes.Entry)):
        texts = [c.args[0] for c in item.clauses if c.word == "as"]
        for name in sorted(name for text in texts for name in template(text, NOWHERE).names):
            dim = name.removesuffix(".local")
            if name != dim and nodes.Dim(dim) in item.indices and dim not in {*rules, *told}:
                told.add(dim)
                known = [a for mesh in layout.meshes for a in mesh.axes]
                axis = next((a for a in (f"{dim}p", "pp") if a in known), axes[0])
                yield (
                    f"{layout.name}: `{{{name}}}` of `{item.path}` (line {item.span.line}) counts a rank's part of {dim},"
                    f" and no `index {dim}` deals it: every rank has all. Write `index {dim} = {dim}@{axis}`, or `{{{dim}}}`"
                )


def _keeps_states(group: str, items: Iterable[nodes.LayoutItem]) -> bool:
    """Return True if a group's state line stores optimizer states."""
    return any(
        isinstance(i, nodes.States) and i.shape is not None and group in (i.groups or ()) and i.names != ("weight",)
        for i in items
    )


def _untrained(layout: Layout, item: nodes.Group, members: tuple[str, ...]) -> Iterator[str]:
    for name in members:
        kinds = {layout.tensors[t].kind for e in layout.entries if e.path == name for t in e.targets.values()}
        if kinds and "parameter" not in kinds:
            kind = sorted(kinds)[0]
            yield (
                f"{layout.name}: `{name}` of `group {item.name}` (line {item.span.line}) is {kind}, which no optimizer trains"
                f" and which has no states. Take it out of the group, or `is {kind}` off the tensor"
            )


def _stored_too(layout: Layout, item: nodes.Derive, source: str) -> Iterator[str]:
    """Weights that are derived, and stored under a key all the same."""
    trained = {path for path, tensor in layout.tensors.items() if tensor.kind == "parameter"}
    kept = [
        e
        for e in layout.entries
        if e.storing.key is not None
        and layout.files[e.storing.file].form is not None
        and trained & {*e.targets.values()}
    ]
    if kept and any(state.name == source for state in layout.states):
        yield (
            f"{layout.name}: `derive weight from {source}` (line {item.span.line}) says that no weight is stored, and the line"
            f" of `{kept[0].path}` has a key. Take the `as` out of the lines of trained tensors, or the `derive`"
        )


def _in_two_groups(layout: Layout, items: tuple[nodes.LayoutItem, ...]) -> Iterator[str]:
    """Members of two groups that store one state.

    They would be stored twice.
    """
    lines = [i for i in items if isinstance(i, nodes.States) and isinstance(i.shape, tuple) and i.names != ("weight",)]
    groups = [i for i in items if isinstance(i, nodes.Group) and i.members is not None and not i.indices]
    named = [frozenset(i.members or ()) for i in groups]
    for n, one in enumerate(groups):
        for other, theirs in zip(groups[:n], named, strict=False):
            shared = [name for name in one.members or () if name in theirs]
            both = [_of_group(lines, group.name) for group in (one, other)]
            if shared and any(_same_state(a, b) for a in both[0] for b in both[1]):
                yield (
                    f"{layout.name}: `{shared[0]}` is in `group {other.name}` (line {other.span.line}) and in"
                    f" `group {one.name}` (line {one.span.line}), and its states are in both. Take it out of one"
                )


def _of_group(lines: Iterable[nodes.States], name: str) -> list[tuple[str, ...] | None]:
    return [line.names for line in lines if name in (line.groups or ()) and not _is_conditional(line)]


def _is_conditional(line: nodes.States) -> bool:
    return any(c.word == "when" for c in line.clauses)


def _same_state(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> bool:
    return one is None or other is None or bool({*one} & {*other})
