"""The layers with a tensor.

All, a range, a list of the config, or numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from attrs import evolve, field

from ucpl.inference.hf.folding import Span, stepped
from ucpl.inference.hf.records import ModelFacts, Vector, identifier, moves
from ucpl.inference.hf.sizes import SizeSolver
from ucpl.inference.hf.varying import COUNTS
from ucpl.language import nodes
from ucpl.language.words import quote
from ucpl.records import define, frozen
from ucpl.texts import Json

__all__ = ["Kinds"]


@define
class Kinds:
    """Sets of layers, and their names if the config lists them."""

    facts: ModelFacts
    sizes: SizeSolver
    taken: dict[str, str]  # names of dims
    lets: dict[str, str] = field(factory=dict)  # name -> its expression
    notes: dict[str, dict[str, None]] = field(factory=dict)  # container -> keys that its sets of layers may not follow

    def among(self, spans: list[Span | None], lengths: Vector, container: str) -> nodes.Among | None:
        """The set in brackets behind the dim, or None for all.

        The first span is the config's own.
        """
        span, length = spans[0], lengths[0]
        assert span is not None
        if all(s in (None, tuple(range(n))) for s, n in zip(spans, lengths, strict=True)):
            return None
        if span == tuple(range(length)):
            self._note(spans, lengths, container)
            return None
        changed = ["", *(v.changed for v in self.facts.variations)]
        together: list[Span | None] = [s if not key else None for s, key in zip(spans, changed, strict=True)]
        for seen in (spans, together) if any(changed) else (spans,):
            listed = self._listed(seen, lengths)
            is_seen = sum(s is not None for s in seen) > 1  # in other versions, too
            chosen = listed or (self._ranged(seen, lengths) if is_seen else None)
            if chosen is not None:
                if seen is together:
                    self._note(spans, lengths, container)
                return chosen
        self._note(spans, lengths, container)
        if len(span) == 1:
            return nodes.Among((self._range(range(span[0], span[0] + 1), spans, length, container),))
        without = [_others(s, n) if s else None for s, n in zip(spans, lengths, strict=True)]
        for versions, others in ((spans, False), (without, True)):
            steps = stepped(versions[0] or ())
            if steps is not None and len(steps) > 1:
                found = self._range(steps, versions, length, container)
                if others and found.start is None:
                    found = evolve(found, start=nodes.Number(0))  # `not ..` does not parse
                return nodes.Among((found,), others)
        others = len(span) > length // 2
        numbers = _others(span, length) if others else span
        return nodes.Among(tuple(nodes.Number(n) for n in numbers), others)

    def _range(self, span: range, spans: list[Span | None], length: int, container: str) -> nodes.Range:
        starts = tuple(s[0] for s in spans if s)
        stops = tuple(s[-1] + 1 for s in spans if s)
        start = self._bound(starts, container) if span.start else None
        stop = self._bound(stops, container) if span.stop < length and span[-1] + span.step < length else None
        return nodes.Range(start, stop, nodes.Number(span.step) if span.step > 1 else None)

    def _bound(self, vector: Vector, container: str) -> nodes.Expr:
        """A bound of a range: its key, or else a number."""
        behind = self.facts.behind
        if behind is not None and vector == (behind.layers,) and container == behind.container:
            return nodes.Name("config.num_hidden_layers")
        found = self.sizes.count(vector, container) if moves(vector) else None
        return nodes.Number(vector[0]) if found is None else nodes.Name(found.text)

    def _note(self, spans: list[Span | None], lengths: Vector, container: str) -> None:
        """Keep the keys that move the layers of a tensor.

        The tensor's set of layers may not follow them.
        """
        same = [s in (None, spans[0]) or n != lengths[0] for s, n in zip(spans, lengths, strict=True)]
        keys = [
            v.changed for v, is_same in zip(self.facts.variations, same[1:], strict=True) if v.changed and not is_same
        ]
        if keys:
            self.notes.setdefault(container, {}).update(dict.fromkeys(keys))

    # ---- ranges by keys ------------------------------------------------------------------------------------------

    def _ranged(self, spans: list[Span | None], lengths: Vector) -> nodes.Among | None:
        """The range of numbers or keys for the layers in every version.

        Numbers are tried before keys. A bound can be a key, one less, or the number of layers less a key; a step can be
        a key.
        """
        span = spans[0]
        assert span is not None
        for others in (False, True):
            own = _others(span, lengths[0]) if others else span
            if not own:
                continue
            steps = stepped(own)
            if steps is None:
                continue
            choices = product(
                self._starts(steps.start),
                self._stops(steps, lengths),
                self._steps(steps.step if len(own) > 1 else None),
            )
            for start, stop, step in sorted(choices, key=lambda c: sum(b is not None and b.is_key for b in c)):
                made = [_layers(start, stop, step, i, n) for i, n in enumerate(lengths)]
                found = [_others(m, n) if others else m for m, n in zip(made, lengths, strict=True)]
                if all(s in (None, f) for s, f in zip(spans, found, strict=True)):
                    begin = start if start.text != "0" or others else None
                    names = [nodes.Name(b.text) if b is not None else None for b in (begin, stop, step)]
                    return nodes.Among((nodes.Range(names[0], names[1], names[2]),), others)
        return None

    def _starts(self, own: int) -> list[_Bound]:
        keys = [(self.sizes.of_key(k), v) for k, v in self.sizes.keys.items()]
        found = [_Bound(k.text, v) for k, v in keys if v[0] == own]
        found += [_Bound(f"{k.text} - 1", tuple(n - 1 for n in v)) for k, v in keys if v[0] == own + 1]
        return [_Bound(str(own), (own,) * len(self._versions), is_key=False), *found]

    def _stops(self, steps: range, lengths: Vector) -> list[_Bound | None]:
        own = steps[-1] + 1
        if own + steps.step > lengths[0]:
            return [None]
        keys = [(self.sizes.of_key(k), v) for k, v in self.sizes.keys.items()]
        found: list[_Bound | None] = [_Bound(k.text, v) for k, v in keys if v[0] == own]
        for layers, all_ in keys:
            if COUNTS.search(layers.key.rpartition(".")[2]) and all_[0] == lengths[0]:
                less = ((k, v) for k, v in keys if v[0] == lengths[0] - own and k.key != layers.key)
                found += [
                    _Bound(f"{layers.text} - {k.text}", tuple(a - b for a, b in zip(all_, v, strict=True)))
                    for k, v in less
                ]
        return [_Bound(str(own), (own,) * len(self._versions), is_key=False), *found]

    def _steps(self, own: int | None) -> list[_Bound | None]:
        keys = [_Bound(self.sizes.of_key(k).text, v) for k, v in self.sizes.keys.items() if own in (None, v[0])]
        keys = [k for k in keys if min(k.vector) > 0]
        number = _Bound(str(own), (own,) * len(self._versions), is_key=False) if own and own > 1 else None
        return [number, *keys]

    @property
    def _versions(self) -> range:
        return range(1 + len(self.facts.variations))

    # ---- lists of the config -------------------------------------------------------------------------------------

    def _listed(self, spans: list[Span | None], lengths: Vector) -> nodes.Among | None:
        """The list of the config that names these layers.

        It must do so in every version, and not twice alike.
        """
        versions = [self.facts.lists, *(v.lists for v in self.facts.variations)]
        for others in (False, True):
            for path in self.facts.lists:
                lists = [v.get(path, []) for v in versions]
                if len(lists) > 1 and all(items == lists[0] for items in lists):
                    continue  # never moved: that it agrees may be chance
                for name, text, value in _readings(path, lists[0]):
                    named = [_named(items, value, n, others) for items, n in zip(lists, lengths, strict=True)]
                    if all(s in (None, n) for s, n in zip(spans, named, strict=True)):
                        return nodes.Among((nodes.Name(self._let(name, text)),), others)
        return None

    def _let(self, name: str, text: str) -> str:
        n, base = 2, name
        while self.lets.get(name, text) != text or name in self.taken:
            name, n = f"{base}{n}", n + 1
        self.lets[name] = text
        return name


@frozen
class _Bound:
    """A bound or step of a range: text, and number per version."""

    text: str
    vector: Vector
    is_key: bool = True


def _layers(start: _Bound, stop: _Bound | None, step: _Bound | None, version: int, length: int) -> Span:
    end = length if stop is None else min(stop.vector[version], length)
    return tuple(range(max(start.vector[version], 0), end, 1 if step is None else step.vector[version]))


def _readings(path: str, items: list[Json]) -> Iterator[tuple[str, str, Json]]:
    """Ways to read a list of layers.

    A value per layer, or numbers (None).
    """
    key = path.rpartition(".")[2]
    for value in dict.fromkeys(items):
        if isinstance(value, str):
            yield identifier(value), f"where(config.{path}, {quote(value)})", value
        elif isinstance(value, int) and set(items) <= {0, 1} and value:
            yield key, f"where(config.{path})", value
    if all(isinstance(v, int) for v in items):
        yield key, f"config.{path}", None


def _named(items: list[Json], value: Json, length: int, others: bool) -> Span | None:
    """The layers that a list names, or the others, or None."""
    if value is None:
        found = tuple(sorted(v for v in items if isinstance(v, int)))
        fits = bool(found) and found[0] >= 0 and found[-1] < length
    else:
        found = tuple(i for i, v in enumerate(items) if v == value)
        fits = len(items) == length
    if not fits:
        return None
    return _others(found, length) if others else found


def _others(span: Span, length: int) -> Span:
    return tuple(n for n in range(length) if n not in set(span))
