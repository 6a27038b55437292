"""One line for names that differ in numbers: the inverse of `numbered_names`.

A number is an index if enough names differ in it alone and agree in all else. Other names keep lines of their own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import TypeVar

from attrs import evolve

from ucpl.language import nodes
from ucpl.layout.brackets import compact
from ucpl.layout.expand import distinct
from ucpl.layout.numbered_names import NUMBER, BracedName, filled, loop, trie_of
from ucpl.layout.used_names import names_of
from ucpl.records import frozen

__all__ = ["folded"]

FEWEST = 2  # values of the first number of a name
FEWEST_WITHIN = 4  # of another: a person writes `layer.0` and `layer.1` of a block in two lines
MERGED_MAX = 2_000  # lines of one loop that are put in order; more of them hardly fold
_LETTERS = "likjmnorstuw"
_HOLE = "{}"  # in the texts before an index

Row = tuple[int, ...]
Item = TypeVar("Item", nodes.Tensor, nodes.Entry)


@frozen(eq=False)
class _Line:
    """The names of one line: texts, and rows of numbers in order."""

    texts: tuple[str, ...]
    containers: tuple[str, ...]  # of each index: the text before it
    places: tuple[int, ...]  # of each index among the numbers of the name
    rows: list[Row]
    first: int  # the place of its first name


@frozen(eq=False)
class _Parts:
    """A name: the texts around its numbers, and the numbers."""

    texts: tuple[str, ...]
    numbers: Row


@lru_cache(maxsize=1 << 20)
def _parts(name: str) -> _Parts:
    return _Parts(tuple(NUMBER.split(name)), tuple([int(n) for n in NUMBER.findall(name)]))


# ---- indices ---------------------------------------------------------------------------------------------------------


def _containers(names: Sequence[_Parts], alike: Sequence[Hashable]) -> dict[str, int]:
    """The texts before indices, each with its greatest number.

    alike: facts that must agree.
    """
    out: dict[str, int] = {}
    level = 0
    opened = [(n, name.texts[0]) for n, name in enumerate(names) if name.numbers]
    while opened:
        values: dict[tuple[str, str, Hashable], set[int]] = {}
        for n, before in opened:
            name = names[n]
            rest = name.texts[level + 1 :]
            values.setdefault((before, rest[0], (rest, alike[n])), set()).add(name.numbers[level])
        found = {before for (before, text, *_), held in values.items() if len(held) >= _fewest(before, text)}
        after: list[tuple[int, str]] = []
        for n, before in opened:
            name = names[n]
            number, text = name.numbers[level], name.texts[level + 1]
            if before in found:
                out[before] = max(number, out.get(before, 0))
            if len(name.numbers) > level + 1:
                after.append((n, f"{before}{_HOLE if before in found else number}{text}"))
        opened, level = after, level + 1
    return out


def _fewest(before: str, after: str) -> int:
    """Values that a number must have to be an index."""
    is_part = before[-1:] in ("", ".") and after[:1] in ("", ".")
    if not is_part:
        return FEWEST_WITHIN
    return FEWEST if _HOLE not in before or "expert" in before else FEWEST_WITHIN


def _named(containers: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """An index for each container: l, e of experts, and others."""
    used = {*taken}
    out: dict[str, str] = {}
    for container in containers:
        letters = ("e" if "expert" in container.rpartition(_HOLE)[2] else "") + _LETTERS
        choices = (f"{letter}{n or ''}" for n in (0, *range(2, len(used) + 3)) for letter in letters)
        out[container] = name = next(one for one in choices if one not in used)
        used.add(name)
    return out


# ---- lines -----------------------------------------------------------------------------------------------------------


def _lines(names: Sequence[_Parts], alike: Sequence[Hashable], containers: Collection[str]) -> list[_Line]:
    """The names as lines.

    They are in an order in which their loops give the order of the names, if there is one.
    """
    found: dict[tuple[tuple[str, ...], Hashable], _Line] = {}
    of: list[_Line] = []
    for n, name in enumerate(names):
        texts, within, places, row = [name.texts[0]], [], [], []
        before = name.texts[0]
        for place, (number, text) in enumerate(zip(name.numbers, name.texts[1:], strict=True)):
            if before in containers:
                within.append(before)
                places.append(place)
                row.append(number)
                texts.append(text)
                before += _HOLE + text
            else:
                texts[-1] += f"{number}{text}"
                before += f"{number}{text}"
        key = tuple(texts), alike[n]
        if key not in found:
            found[key] = _Line(key[0], tuple(within), tuple(places), [], n)
        found[key].rows.append(tuple(row))
        of.append(found[key])
    loops: dict[str | int, dict[int, dict[int, _Line]]] = {}  # by the first index: of each number its lines, in order
    seen: dict[int, int] = {}
    for line in of:
        nth = seen[id(line)] = seen.get(id(line), -1) + 1
        if line.containers:
            loops.setdefault(line.containers[0], {}).setdefault(line.rows[nth][0], {})[id(line)] = line
        else:
            loops[id(line)] = {0: {0: line}}
    return [line for blocks in loops.values() for line in _merged([[*held.values()] for held in blocks.values()])]


def _merged(blocks: Sequence[Sequence[_Line]]) -> list[_Line]:
    """All lines of the blocks, in their order if possible."""
    out = list({id(line): line for block in blocks for line in block}.values())
    if len(out) > MERGED_MAX:
        return out
    out = []
    for block in blocks:
        known = {id(line): n for n, line in enumerate(out)}
        new: list[_Line] = []
        moved = 0
        for line in block:
            if id(line) not in known:
                new.append(line)
                continue
            place = known[id(line)] + moved
            out[place:place] = new
            moved, new = moved + len(new), []
        out += new
    return out


def _products(rows: Collection[Row]) -> list[tuple[tuple[int, ...], ...]]:
    """Rows as products of sets of numbers."""
    columns = [tuple(sorted({*column})) for column in zip(*rows, strict=True)]
    if prod(map(len, columns)) == len(rows):
        return [tuple(columns)]
    after: dict[int, list[Row]] = {}
    for row in rows:
        after.setdefault(row[0], []).append(row[1:])
    alike: dict[frozenset[Row], list[int]] = {}
    for number, rest in after.items():
        alike.setdefault(frozenset(rest), []).append(number)
    return [(tuple(sorted(first)), *rest) for others, first in alike.items() for rest in _products(sorted(others))]


def _brackets(numbers: Sequence[int], size: int) -> str:
    """Some indices of a dim, in its brackets; empty for all."""
    if len(numbers) == size:
        return ""
    others = [n for n in range(size) if n not in {*numbers}] if len(numbers) > size // 2 else []
    texts = _runs(numbers, size)
    return min((texts, f"[not {_runs(others, 0)[1:]}") if others else (texts,), key=len)


def _runs(numbers: Sequence[int], size: int) -> str:
    """Runs in brackets.

    size: that of the dim; 0 behind `not`, where each run has both ends.
    """
    least = "" if size else "0"
    even = compact(numbers)
    if isinstance(even, range) and len(even) > 2 and even.step > 1:
        start = even.start or least
        return f"[{start}..{'' if even.stop - 1 + even.step >= size > 0 else even.stop} by {even.step}]"
    texts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        held = [number for _, number in run]
        a, b = held[0], held[-1] + 1
        texts.append(str(a) if len(held) == 1 else f"{a or least}..{'' if b == size else b}")
    return f"[{', '.join(texts)}]"


# ---- statements ------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class FoldedModel:
    """A model with folded lines, and the indices for its layouts."""

    model: nodes.Model
    aliases: frozenset[str]
    rows: dict[tuple[str, ...], set[Row]]  # the numbers of all names, by the texts around them
    indices: dict[str, str]  # of each container
    sizes: dict[str, int]

    def items(self, items: Sequence[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
        """Statements of a layout, with folded entries and members of groups."""
        out: list[nodes.LayoutItem] = []
        for is_entry, run in groupby(items, lambda i: isinstance(i, nodes.Entry) and not i.indices and not i.glob):
            held = list(run)
            if is_entry:
                out += self.entries([i for i in held if isinstance(i, nodes.Entry)])
                continue
            for one in held:
                if isinstance(one, nodes.Group) and one.members is not None and not one.indices:
                    one = evolve(one, members=self.members(one.members))
                out.append(one)
        return out

    def word(self, path: str) -> str:
        """The word for a name in its own line."""
        return "{alias}" if path in self.aliases else "{name}"

    def entries(self, items: Sequence[nodes.Entry]) -> list[nodes.Entry]:
        numbers: dict[object, int] = {}
        known: dict[tuple[int, ...], int] = {}
        alike = []
        for item in items:
            mark = id(item.shape), *map(id, item.clauses)
            if mark not in known:
                whole = item.shape, tuple(_unnamed(c, item.path, self.word(item.path)) for c in item.clauses)
                number = numbers.setdefault(repr(whole), len(numbers))
                if not any(c.word == "as" and c.args[0] and item.path in c.args[0] for c in item.clauses):
                    known[mark] = number
            else:
                number = known[mark]
            alike.append(number)
        names = [_parts(item.path) for item in items]
        out: list[nodes.Entry] = []
        for line in _lines(names, alike, self.indices):
            first = items[line.first]
            word = self.word(first.path)
            clauses = tuple(_unnamed(c, first.path, word) for c in first.clauses)
            for text in self.texts(line, is_model=False):
                path = text.single or text.text
                kept = tuple(_renamed(c, path, word) for c in clauses) if text.single else clauses
                out.append(evolve(first, path=path, clauses=kept))
        return out

    def members(self, names: Sequence[str]) -> tuple[str, ...]:
        """Members of a group as few names, if their order is kept."""
        parts = [*map(_parts, names)]
        if not all(one.numbers in self.rows.get(one.texts, ()) for one in parts):
            return tuple(names)  # entries of a layout
        lines = _lines(parts, [0] * len(names), self.indices)
        texts = [one for line in lines for one in self.texts(line, is_model=False)]
        order = [one.names for one in texts]
        given = [order[n].filled(row) for n, row in loop(order)]
        return tuple(one.text for one in texts) if given == [*names] else tuple(names)

    def texts(self, line: _Line, *, is_model: bool) -> list[_Text]:
        """The names for the rows of a line.

        In lines of layouts and groups, an index has the numbers of the model's names.
        """
        indices = tuple(self.indices[c] for c in line.containers)
        if not is_model and len(line.rows) > 1 and self._is_all(line):
            return [
                _Text(
                    _shown(line.texts, indices, [""] * len(indices)),
                    BracedName(line.texts, indices, trie_of(line.rows)),
                )
            ]
        out: list[_Text] = []
        for product in _products(line.rows):
            sets = [_brackets(one, self.sizes[c]) for one, c in zip(product, line.containers, strict=True)]
            rows = trie_of(itertools.product(*product))
            single = filled(line.texts, [one[0] for one in product]) if all(len(one) == 1 for one in product) else ""
            out.append(_Text(_shown(line.texts, indices, sets), BracedName(line.texts, indices, rows), single))
        return out

    def _is_all(self, line: _Line) -> bool:
        """True if all names of the model that fit are these."""
        first = _parts(filled(line.texts, line.rows[0]))
        pattern = re.compile("[0-9]+".join(map(re.escape, line.texts)))
        fitting = (pattern.fullmatch(filled(first.texts, row)) for row in self.rows.get(first.texts, ()))
        return sum(match is not None for match in fitting) == len({*line.rows})


@frozen(eq=False)
class _Text:
    """A name with braces, and its single names. `single`: the only one."""

    text: str
    names: BracedName
    single: str = ""


def _shown(texts: Sequence[str], indices: Sequence[str], sets: Sequence[str]) -> str:
    holes = [f"{{{index}{some}}}" for index, some in zip(indices, sets, strict=True)]
    return texts[0] + "".join(hole + text for hole, text in zip(holes, texts[1:], strict=True))


_BRACES = re.compile(r"(\{[^{}]*\})")


def _unnamed(clause: nodes.Clause, path: str, word: str) -> nodes.Clause:
    """A key with `{name}` instead of the name, or `{alias}`."""
    if clause.word != "as" or not path or path not in clause.args[0]:
        return clause
    texts = _BRACES.split(clause.args[0])
    place = next((n for n in range(0, len(texts), 2) if path in texts[n]), None)
    if place is None:
        return clause
    texts[place] = texts[place].replace(path, word, 1)
    return evolve(clause, args=("".join(texts),))


def _renamed(clause: nodes.Clause, path: str, word: str) -> nodes.Clause:
    return evolve(clause, args=(clause.args[0].replace(word, path),)) if clause.word == "as" else clause


def folded(model: nodes.Model, layout: nodes.Layout) -> tuple[nodes.Model, nodes.Layout]:
    """Both with one line for names that differ in numbers alone.

    Keys of the layout may have `{name}`.
    """
    items = (*layout.items, *layout.parameters)
    taken = {*names_of(distinct(items)), *(p.name for p in layout.parameters)}
    taken |= {b.name for i in (*items, *model.items) if isinstance(i, nodes.Let | nodes.Dims) for b in i.bindings}
    try:
        one = folded_model(model, taken)
        return one.model, evolve(layout, items=tuple(one.items(layout.items)))
    finally:
        _parts.cache_clear()


def folded_model(model: nodes.Model, taken: Collection[str]) -> FoldedModel:
    """The model with one line for names that differ in numbers alone.

    taken: names that no index may have.
    """
    tensors = [i for i in model.items if isinstance(i, nodes.Tensor)]
    names = [_parts(i.path) for i in tensors]
    alike = _facts(tensors)
    sizes = {container: most + 1 for container, most in _containers(names, alike).items()}
    aliases = frozenset(i.path for i in model.items if isinstance(i, nodes.Alias))
    every: dict[tuple[str, ...], set[Row]] = {}
    for name in (*names, *map(_parts, aliases)):
        every.setdefault(name.texts, set()).add(name.numbers)
    one = FoldedModel(model, aliases, every, _named(sizes, taken), sizes)
    if not sizes:
        return one
    lines: list[nodes.ModelItem] = [
        nodes.Dims(tuple(nodes.Binding(one.indices[c], nodes.Number(n)) for c, n in sizes.items()))
    ]
    for line in _lines(names, alike, sizes):
        first = tensors[line.first]
        scaling = _scaling(first, line, one.indices)
        lines += (evolve(first, path=text.text, scaling=scaling) for text in one.texts(line, is_model=True))
    place = next(n for n, i in enumerate(model.items) if isinstance(i, nodes.Tensor))
    items: list[nodes.ModelItem] = []
    for n, item in enumerate(model.items):
        items += lines if n == place else []
        if isinstance(item, nodes.Group) and item.members is not None:
            items.append(evolve(item, members=one.members(item.members)))
        elif not isinstance(item, nodes.Tensor):
            items.append(item)
    return evolve(one, model=evolve(model, items=tuple(items)))


def _facts(tensors: Sequence[nodes.Tensor]) -> list[Hashable]:
    """All facts of each tensor besides its name."""
    shapes: dict[object, int] = {}
    known: dict[int, int] = {}  # a model of files has one record for all dims of a shape
    out: list[Hashable] = []
    for one in tensors:
        if id(one.dims) not in known:
            known[id(one.dims)] = shapes.setdefault(repr(one.dims), len(shapes))
        scaling: Hashable = None
        if one.scaling is not None:
            mine, its = _parts(one.path), _parts(one.scaling.of)
            scaling = its.texts if its.numbers == mine.numbers else one.scaling.of, repr(one.scaling.by)
        when = None if one.when is None else repr(one.when)
        out.append((known[id(one.dims)], one.dtype, one.kind, when, scaling))
    return out


def _scaling(tensor: nodes.Tensor, line: _Line, indices: Mapping[str, str]) -> nodes.Scaling | None:
    """The owner of a scale with the indices of the scale's line."""
    if tensor.scaling is None:
        return None
    its = _parts(tensor.scaling.of)
    if its.numbers != _parts(tensor.path).numbers:
        return tensor.scaling
    index_at = dict(zip(line.places, line.containers, strict=True))
    shown = [f"{{{indices[index_at[n]]}}}" if n in index_at else str(number) for n, number in enumerate(its.numbers)]
    return evolve(tensor.scaling, of=filled(its.texts, shown))
