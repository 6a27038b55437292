"""A model from the keys and shapes of files.

It has the tensors of files that a layout of any model names. A key that is made of `{name}` gives the name, and the
stored shapes on all ranks give the shape. The layout is then placed over this model and compared with the files, as
over each other model, so a wrong model is found. Each tensor is a parameter, unless its line is of buffers or of frozen
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod

from attrs import field

from ucpl.errors import fail
from ucpl.extents import Extent, NamedTensor
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout.globs import literals, matches
from ucpl.layout.scope import Scope, at
from ucpl.layout.statements import OpenedLayout
from ucpl.layout.templates import closed, nested, render
from ucpl.records import define, frozen

__all__ = ["files_of_keys", "tensors_of_keys"]

_NAME = "ucplNAMEucpl"  # in a rendered key, in place of a tensor's name
_KINDS = {"buffer": "buffer", "frozen": "frozen"}  # others are trained
_EVERY = ("*", "parameter", "trainable", *_KINDS)
Coordinates = dict[str, int]


@frozen
class _Found:
    """A stored tensor with its line in the layout, on some ranks."""

    name: str
    entry: nodes.Entry
    extent: Extent
    at: Coordinates
    literal: int  # characters of the key that are not the name


@define
class _Reader:
    opened: OpenedLayout
    entries: list[nodes.Entry] = field(init=False)

    def __attrs_post_init__(self) -> None:
        items = [i for i in self.opened.items if isinstance(i, nodes.Entry)]
        self.entries = [e for e in items if all(self.scope.holds(c.args[0]) for c in e.clauses if c.word == "when")]

    @property
    def scope(self) -> Scope:
        return self.opened.scope

    def ranks(self) -> Iterator[Coordinates]:
        """The coordinates of each rank on all meshes."""
        meshes = [i.axes for i in self.opened.items if isinstance(i, nodes.Mesh)] or [()]
        sizes = {axis: self.scope.size(axis) for axes in meshes for axis in axes}
        self.scope.mesh_axes = tuple(sizes)
        every = [list(product(*(range(sizes[a]) for a in axes))) for axes in meshes]
        for rank, places in enumerate(zip(*every, strict=False)):
            one = {a: n for axes, place in zip(meshes, places, strict=True) for a, n in zip(axes, place, strict=True)}
            yield {**one, "rank": rank}

    def lines(self) -> Iterator[tuple[str, str, nodes.Entry, Coordinates]]:
        """The file and the key of each line on each rank."""
        files = {i.name: i for i in self.opened.items if isinstance(i, nodes.Files) and i.form}
        met: set[tuple[str, str, nodes.Span]] = set()
        for place in self.ranks():
            known = frozenset(place)
            for entry in self.entries:
                said = {c.word: c.args[0] for c in entry.clauses if c.word in ("as", "in")}
                file = files.get(str(said.get("in", "weights")))
                if file is None or "as" not in said or entry.shape is None or not self.scope.holds(file.when):
                    continue
                name = render(closed(file.template, file.span, self.scope, known), place)
                wrap = closed(file.key or "{key}", file.span, self.scope, known | {"key"})
                key = nested(wrap, closed(str(said["as"]), entry.span, self.scope, known | {"name"}))
                text = render(key, {**place, "name": _NAME}) if key.names <= known | {"name"} else ""
                if text and (name, text, entry.span) not in met:
                    met.add((name, text, entry.span))
                    yield name, text, entry, place

    def found(self, extents: Mapping[str, list[Extent]]) -> Iterator[_Found]:
        for name, text, entry, place in self.lines():
            yield from self.of_key(text, entry, extents.get(name, []), place)

    def of_key(self, text: str, entry: nodes.Entry, stored: list[Extent], place: Coordinates) -> Iterator[_Found]:
        first, *rest = re.escape(text).split(_NAME)
        pattern = re.compile(first + "".join(("(.+)" if n == 0 else r"\1") + part for n, part in enumerate(rest)))
        for extent in stored:
            match = pattern.fullmatch("/".join(map(str, extent.key)))
            if match is not None:
                name = match[1] if rest else entry.path
                if self.is_line_of(entry, name):
                    yield _Found(name, entry, extent, place, len(text.replace(_NAME, "")))

    def is_line_of(self, entry: nodes.Entry, name: str) -> bool:
        """True if no closer line is of this name.

        A name in full is closest, then the most literal glob.
        """

        def closeness(one: nodes.Entry) -> int:
            if one.glob:
                return literals(one.glob) + 1 if matches(one.glob, name) else -1
            if one.path in _EVERY:
                return 0
            return len(name) + 2 if one.path == name else -1

        own = closeness(entry)
        return own >= 0 and own == max(map(closeness, self.entries))


def files_of_keys(opened: OpenedLayout) -> tuple[str, ...]:
    """The files of a layout of any model, on all ranks."""
    return tuple(dict.fromkeys(name for name, *_ in _Reader(opened).lines()))


def tensors_of_keys(opened: OpenedLayout, extents: Iterable[Extent]) -> tuple[NamedTensor, ...]:
    """The tensors that files' keys name, each with its complete shape.

    Raises: UcplError E101 if the stored shapes leave a size open.
    """
    by_file: dict[str, list[Extent]] = {}
    for extent in extents:
        by_file.setdefault(extent.file, []).append(extent)
    reader = _Reader(opened)
    closest: dict[tuple[str, object], list[_Found]] = {}
    for one in reader.found(by_file):
        before = closest.setdefault((one.extent.file, one.extent.key), [])
        if before and one.literal > before[0].literal:
            before.clear()
        if not before or (one.literal == before[0].literal and one.name == before[0].name):
            before.append(one)
    by_name: dict[str, list[_Found]] = {}
    for several in closest.values():
        for one in several:
            by_name.setdefault(one.name, []).append(one)
    return tuple(
        NamedTensor(name, _shape(several, reader.scope), several[0].extent.dtype, _kind(several[0].entry))
        for name, several in by_name.items()
    )


def _kind(entry: nodes.Entry) -> str:
    return _KINDS.get(entry.of or entry.path, "parameter")


def _shape(several: list[_Found], scope: Scope) -> tuple[int, ...]:
    """The complete shape of a tensor from its pieces on all ranks."""
    first = several[0]
    stored, axes = first.extent.shape, list(first.entry.shape or ())
    rest = next((i for i, axis in enumerate(axes) if isinstance(axis, nodes.Rest)), None)
    if rest is not None:
        axes[rest : rest + 1] = [nodes.Any_()] * (len(stored) - len(axes) + 1)
    if len(axes) != len(stored):
        return stored  # the comparison with the files has the reason
    return tuple(_size(several, i, axis, scope) for i, axis in enumerate(axes))


def _size(several: list[_Found], position: int, axis: nodes.Axis, scope: Scope) -> int:
    first = several[0]
    cuts = [frozenset(s.mesh_axis for s in n.splits) for n in walk(axis) if isinstance(n, nodes.Cut)]
    cutting = frozenset[str]().union(*cuts)
    trimmed = [n for trim in walk(axis) if isinstance(trim, nodes.Trim) for n in walk(trim) if isinstance(n, nodes.Pad)]
    padded = [n for n in walk(axis) if isinstance(n, nodes.Pad) and n not in trimmed]
    terms = [t for n in walk(axis) if isinstance(n, nodes.Stack) for t in n.terms]
    uneven = len(terms) > 1 and bool(cutting) and (len(set(cuts)) > 1 or len(cuts) not in (1, len(terms)))
    if padded or uneven or any(len(term.axes) > 1 for term in terms):
        name = f"`{first.name}`"
        fail(
            "E101",
            f"size {position} of {name} is not known: its stored shape, {list(first.extent.shape)}, is of padding, a product or"
            " copies",
            at(first.entry.span, "stored here"),
            remedy=f"write a model with {name}, and a layout of it: a layout of any model has no sizes",
        )
    lengths: dict[tuple[int, ...], int] = {}
    for one in several:
        lengths.setdefault(tuple(one.at[a] for a in sorted(cutting)), one.extent.shape[position])
    if len(lengths) < prod(scope.size(a) for a in cutting):  # a piece is missing: the comparison with the files says so
        return first.extent.shape[position] * prod(scope.size(a) for a in cutting)
    return sum(lengths.values())
