"""Indices that keys imply: `w = h as "{l}.w"` is `w[l] = h as "{l}.w"`.

A dim of the tensor that key or file names in braces, and that no axis of the line has, is an index: there is one stored
tensor for each of its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import evolve

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout.axes import tensor_of_label
from ucpl.layout.naming import names_in
from ucpl.layout.templates import PLACE_WORDS
from ucpl.records import frozen

__all__ = ["with_implied_indices", "with_indices"]


def with_implied_indices(
    items: Sequence[nodes.LayoutItem],
    model_items: Iterable[nodes.ModelItem],
    plain: Iterable[nodes.Tensor] = (),
) -> list[nodes.LayoutItem]:
    """Statements of a layout, its entries with all of their indices.

    plain: tensors besides, whose dims have no names.
    """
    model_items = list(model_items)
    is_named = any(isinstance(i, nodes.Entry) and not (i.glob or i.path == "*") for i in items)
    dims: dict[str, tuple[str, ...]] = {i.path: () for i in plain} if is_named else {}
    dims |= {i.path: tuple(d.name for d in i.dims if d.name) for i in model_items if isinstance(i, nodes.Tensor)}
    for alias in (i for i in model_items if isinstance(i, nodes.Alias)):
        dims.setdefault(alias.path, dims.get(alias.owner, ()))
    rules = [i for i in (*model_items, *items) if isinstance(i, nodes.Index)]
    texts: dict[str, tuple[str, ...]] = {}
    for file in (i for i in items if isinstance(i, nodes.Files)):
        texts[file.name] = (*texts.get(file.name, ()), file.template, file.key or "")
    axes = frozenset(a for i in items if isinstance(i, nodes.Mesh) for a in i.axes)
    work = _Implying(dims, {i.name: _digits(i.axis) for i in rules}, texts, axes | PLACE_WORDS)
    return [work.entry(i) if isinstance(i, nodes.Entry) and i.shape is not None else i for i in items]


def with_indices(own: Iterable[nodes.LayoutItem], items: Iterable[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
    """Lines as they are written, with the indices of the same `items`."""
    of = {i.span: i.indices for i in items if isinstance(i, nodes.Entry)}
    return [evolve(i, indices=of.get(i.span, i.indices)) if isinstance(i, nodes.Entry) else i for i in own]


def _digits(*axes: nodes.Axis) -> tuple[str, ...]:
    return tuple(n.name for n in walk(*axes) if isinstance(n, nodes.Dim))


@frozen
class _Implying:
    dims: Mapping[str, tuple[str, ...]]  # of each tensor
    digits: Mapping[str, tuple[str, ...]]  # dims that `index` makes a dim of
    files: Mapping[str, tuple[str, ...]]  # of each file: its paths and keys
    places: frozenset[str]  # names in braces that are no dims

    def entry(self, item: nodes.Entry) -> nodes.Entry:
        key = next((c for c in item.clauses if c.word == "as"), None)
        if key is None or item.glob or item.path == "*":
            return item
        file = next((c.args[0] for c in item.clauses if c.word == "in"), "weights")
        braces = [text for text in (key.args[0], *self.files.get(file, ())) if "{" in text]
        spoken = frozenset[str]().union(*map(_names, braces)) - self.places
        if not spoken:
            return item
        dims = dict.fromkeys(self.of(item))
        if {*_digits(*item.indices)} - {name for dim in dims for name in self.with_digits(dim)}:
            return item  # a name that is no dim may be meant for one of them
        named = {*_digits(*item.indices, *(item.shape or ()))}
        found = [dim for dim in dims if self.is_index(dim, spoken, named)]
        return evolve(item, indices=(*item.indices, *(nodes.Dim(i, span=key.span) for i in found))) if found else item

    def of(self, item: nodes.Entry) -> Iterator[str]:
        """Dims of the tensors of an entry."""
        labels = [t.label for s in walk(*(item.shape or ())) if isinstance(s, nodes.Stack) for t in s.terms if t.label]
        for path in [tensor_of_label(item.path, label, self.dims) for label in labels] or [item.path]:
            yield from self.dims.get(path, ())

    def with_digits(self, dim: str) -> set[str]:
        own = {dim}
        while more := {d for name in own for d in self.digits.get(name, ())} - own:
            own |= more
        return own

    def is_index(self, dim: str, spoken: frozenset[str], named: set[str]) -> bool:
        """True if a key, and no axis, has the dim or digits."""
        own = self.with_digits(dim)
        return bool({dim, f"{dim}.local", *own} & spoken) and not own & named


def _names(text: str) -> frozenset[str]:
    """Names in the braces of a template.

    There are none in one that cannot be read: it is refused elsewhere.
    """
    try:
        return names_in(text)
    except UcplError:
        return frozenset()
