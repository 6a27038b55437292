"""Single names of lines with braces: `"layers.{l}.up" : 8 4`.

Such a line of a model is a tensor for each index of the dim l; `{l[3..]}` has some of them. In an entry or a group, `{l}`
has the numbers of the model's names. Neighbours with the same first index are a loop body: all lines of index 0, then those
of index 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TypeVar, cast

from attrs import evolve

from ucpl.errors import UcplError, fail
from ucpl.language import nodes, parse
from ucpl.language.source import INDICES_MAX
from ucpl.language.words import NUMBERED
from ucpl.layout.brackets import Indices, chosen
from ucpl.layout.scope import Scope, at
from ucpl.layout.used_names import names_of
from ucpl.records import frozen

__all__ = ["NUMBER", "BracedName", "Trie", "filled", "loop", "trie_of", "with_single_names"]

NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,5})(?![0-9])")  # a value of `{l}` in a name
NAMES_LIMIT = 1_000_000  # single names of one line

Trie = dict[int, "Trie"]  # the numbers in the first braces, each with those in the others
Item = TypeVar("Item", nodes.Tensor, nodes.Entry)


@frozen(eq=False)
class BracedName:
    """A name in parts: texts around braces, indices and their numbers."""

    texts: tuple[str, ...]  # one more than indices
    indices: tuple[str, ...]
    numbers: Trie

    def filled(self, numbers: Sequence[int]) -> str:
        return filled(self.texts, numbers)


def filled(texts: Sequence[str], numbers: Sequence[int | str]) -> str:
    """The texts with numbers between them."""
    return texts[0] + "".join([f"{n}{text}" for n, text in zip(numbers, texts[1:], strict=True)])


def trie_of(rows: Iterable[Sequence[int]]) -> Trie:
    """Rows of numbers by their first, and so on."""
    out: Trie = {}
    for row in rows:
        level = out
        for number in row:
            level = level.setdefault(number, {})
    return out


def loop(lines: Sequence[BracedName]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the single names of neighbouring lines in order.

    Each is a line's number and the numbers in its braces.
    """
    yield from _looped([(n, line, line.numbers, ()) for n, line in enumerate(lines)], 0)


_Open = tuple[int, BracedName, Trie, tuple[int, ...]]  # a line, with numbers in its first braces


def _looped(lines: Sequence[_Open], depth: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    begin = 0
    while begin < len(lines):
        number, line, _, numbers = lines[begin]
        if len(line.indices) == depth:
            yield number, numbers
            begin += 1
            continue
        end = begin + 1
        while end < len(lines) and lines[end][1].indices[depth : depth + 1] == line.indices[depth : depth + 1]:
            end += 1
        body = lines[begin:end]
        for value in sorted({*body[0][2]}.union(*(inner for _, _, inner, _ in body[1:]))):
            yield from _looped([(n, x, t[value], (*row, value)) for n, x, t, row in body if value in t], depth + 1)
        begin = end


# ---- statements ------------------------------------------------------------------------------------------------------


def with_single_names(file: nodes.File, models: Mapping[str, Sequence[nodes.ModelItem]]) -> nodes.File:
    """The file with a line for each single name.

    models: statements of models of other files. Braces around a name without a number stay as they are.
    Raises: UcplError E101, E131, E134, E138.
    """
    if not any(_has_braces(s) for s in file.statements if isinstance(s, nodes.Model | nodes.Layout)):
        return file
    known = {**models}
    own: dict[str, _Names] = {}
    statements: list[nodes.Statement] = []
    for one in file.statements:
        match one:
            case nodes.Model():
                scope = Scope()
                scope.bind([*file.statements, *one.items])
                names = _Names(scope)
                tensors = names.lines(one.items, nodes.Tensor)
                items = cast(tuple[nodes.ModelItem, ...], tuple(map(_Names.of(scope, tensors).group, tensors)))
                known[one.name] = items
                statements.append(evolve(one, items=items))
                own[one.name] = names
            case _:
                statements.append(one)
    for place, one in enumerate(statements):
        if isinstance(one, nodes.Layout) and one.of in known and _has_braces(one):
            scope = Scope()
            scope.bind([*file.statements, *known[one.of], *one.items])
            names = _Names.of(scope, known[one.of])
            stored = tuple(map(names.group, names.lines(one.items, nodes.Entry)))
            statements[place] = evolve(one, items=cast(tuple[nodes.LayoutItem, ...], stored))
    said = {*_said(file)}
    for place, one in enumerate(statements):
        if isinstance(one, nodes.Model) and (gone := own[one.name].used - said):
            statements[place] = evolve(one, items=_without(one.items, gone))
    return evolve(file, statements=tuple(statements))


def _said(file: nodes.File) -> Iterator[str]:
    """Names that statements use outside of braces in names."""
    for one in file.statements:
        yield from names_of(one.items if isinstance(one, nodes.Model | nodes.Layout) else [one])


def _without(items: Sequence[nodes.ModelItem], gone: set[str]) -> tuple[nodes.ModelItem, ...]:
    """Statements without numbers that only braces use: `-D` cannot change them."""
    out: list[nodes.ModelItem] = []
    for item in items:
        if isinstance(item, nodes.Let | nodes.Dims):
            item = evolve(item, bindings=tuple(b for b in item.bindings if b.name not in gone))
            if not item.bindings:
                continue
        out.append(item)
    return tuple(out)


def _has_braces(block: nodes.Model | nodes.Layout) -> bool:
    for item in block.items:
        if isinstance(item, nodes.Tensor | nodes.Entry):
            if "{" in item.path:
                return True
        elif isinstance(item, nodes.Group) and any("{" in name for name in item.members or ()):
            return True
    return False


class _Names:
    """Names of one block.

    names: those of the model, by their texts without numbers; None in the model itself.
    """

    def __init__(self, scope: Scope, names: Mapping[str, list[str]] | None = None) -> None:
        self.scope = scope
        self.names = names
        self.ranges: dict[str, nodes.Among] = {}
        self.used: set[str] = set()

    @classmethod
    def of(cls, scope: Scope, items: Iterable[nodes.Record]) -> _Names:
        names: dict[str, list[str]] = {}
        for item in items:
            if isinstance(item, nodes.Tensor | nodes.Alias):
                names.setdefault(NUMBER.sub("*", item.path), []).append(item.path)
        return cls(scope, names)

    def group(self, item: nodes.Record) -> nodes.Record:
        """A group with single members; another statement as it is."""
        if not isinstance(item, nodes.Group) or not any("{" in name for name in item.members or ()):
            return item
        lines = [self.numbered(name, item.span) for name in item.members or ()]
        return evolve(item, members=tuple(lines[n].filled(row) for n, row in loop(lines)))

    def lines(self, items: Iterable[nodes.Record], kind: type[Item]) -> list[nodes.Record]:
        """The statements, those of a kind for single names."""
        out: list[nodes.Record] = []
        waiting: list[tuple[Item, BracedName]] = []

        def write() -> None:
            lines = [line for _, line in waiting]
            for n, row in loop(lines):
                item, line = waiting[n]
                out.append(_single(item, line, row) if row else item)
            waiting.clear()

        for item in items:
            if isinstance(item, kind) and not getattr(item, "glob", ()):
                waiting.append((item, self.numbered(item.path, item.span)))
            else:
                write()
                out.append(item)
        write()
        return out

    def numbered(self, path: str, span: nodes.Span) -> BracedName:
        """A name in parts, with the numbers that its braces have here."""
        found = [m for m in NUMBERED.finditer(path) if self.scope.knows(m[1])] if "{" in path else []
        if not found:
            return BracedName((path,), (), {})
        if len(found) > INDICES_MAX:
            fail("E013", f"`{path}` has {len(found)} braces, and {INDICES_MAX} are allowed", at(span))
        ends = [(0, 0), *(m.span() for m in found), (len(path), len(path))]
        texts = tuple(path[a[1] : b[0]] for a, b in pairwise(ends))
        indices = tuple(m[1] for m in found)
        self.used.update(indices)
        if self.names is None:
            return BracedName(texts, indices, self.product([self.indices(m[1], m[2], span) for m in found], path, span))
        limits = [None if m[2] is None else {*self.indices(m[1], m[2], span)} for m in found]
        rows = self.matching(texts, limits)
        return BracedName(texts, indices, trie_of(rows)) if rows else BracedName((path,), (), {})

    def matching(self, texts: Sequence[str], limits: Sequence[set[int] | None]) -> list[tuple[int, ...]]:
        """The numbers of the model's names that fit."""
        assert self.names is not None
        form = "*".join(NUMBER.sub("*", text) for text in texts)
        pattern = re.compile("(0|[1-9][0-9]{0,5})".join(map(re.escape, texts)))
        matches = filter(None, map(pattern.fullmatch, self.names.get(form, ())))
        rows = (tuple(map(int, m.groups())) for m in matches)
        return [row for row in rows if all(s is None or n in s for n, s in zip(row, limits, strict=True))]

    def product(self, indices: Sequence[Indices], path: str, span: nodes.Span) -> Trie:
        count = prod(map(len, indices))
        if count > NAMES_LIMIT:
            fail("E131", f"`{path}` is {count} tensors, and {NAMES_LIMIT} are allowed", at(span))
        inner: Trie = {}
        for one in reversed(indices):
            inner = dict.fromkeys(one, inner)
        return inner

    def indices(self, name: str, brackets: str | None, span: nodes.Span) -> Indices:
        """Indices of a dim in braces. Raises: UcplError E101, E131, E134, E138."""
        size = self.scope.size(name, span)
        if not 0 <= size <= NAMES_LIMIT:
            fail("E131", f"`{name}` in braces is {size}, and {NAMES_LIMIT} are allowed", at(span))
        return range(size) if brackets is None else chosen(self.among(name, brackets, span), name, size, self.scope)

    def among(self, name: str, brackets: str, span: nodes.Span) -> nodes.Among:
        """The brackets of a dim, as they are in a model."""
        if brackets not in self.ranges:
            try:
                (model,) = parse(f"ucpl 2\nmodel m {{\nt : x[{brackets}]\n}}\n", span.file).statements
            except UcplError as error:
                first = error.diagnostics[0]
                remedy = f"brackets hold indices: {{{name}[3..]}}, {{{name}[0, 2]}}, {{{name}[1.. by 2]}}"
                raise UcplError(evolve(first, labels=(at(span, "in these braces"),), remedy=remedy)) from None
            assert isinstance(model, nodes.Model)
            (tensor,) = model.items
            assert isinstance(tensor, nodes.Tensor)
            (dim,) = tensor.dims
            assert dim.range is not None
            self.ranges[brackets] = dim.range
        return self.ranges[brackets]


def _single(item: Item, line: BracedName, row: tuple[int, ...]) -> nodes.Tensor | nodes.Entry:
    """The statement for one name."""
    path = line.filled(row)
    match item:
        case nodes.Tensor(scaling=nodes.Scaling() as scaling):
            of = dict(zip(line.indices, map(str, row), strict=True))
            owner = NUMBERED.sub(lambda m: of.get(m[1], m[0]), scaling.of)
            tensor: nodes.Tensor = item
            return evolve(tensor, path=path, scaling=evolve(scaling, of=owner))
        case _:
            return evolve(item, path=path)
