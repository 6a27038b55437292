"""The layers with a tensor.

All, a range, a list of the config, or numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve, field

from ucpl.inference.hf.folding import Span, stepped
from ucpl.inference.hf.records import ModelFacts, Vector, identifier
from ucpl.inference.hf.sizes import SizeSolver
from ucpl.language import nodes
from ucpl.language.quoting import quote
from ucpl.records import define
from ucpl.texts import Json

__all__ = ["Kinds"]


@define
class Kinds:
    """Sets of layers, and their names if the config lists them."""

    facts: ModelFacts
    sizes: SizeSolver
    taken: dict[str, str]  # names of dims
    lets: dict[str, str] = field(factory=dict)  # name -> its expression

    def among(self, spans: list[Span | None], lengths: Vector, container: str) -> nodes.Among | None:
        """The set in brackets behind the dim, or None for all.

        The first span is the config's own.
        """
        span, length = spans[0], lengths[0]
        assert span is not None
        if span == tuple(range(length)):
            return None
        listed = self._listed(spans, lengths)
        if listed is not None:
            return listed
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
        found = self.sizes.count(vector, container) if len(set(vector)) > 1 else None
        return nodes.Number(vector[0]) if found is None else nodes.Name(found.text)

    # ---- lists of the config -------------------------------------------------------------------------------------

    def _listed(self, spans: list[Span | None], lengths: Vector) -> nodes.Among | None:
        """The list of the config that names these layers.

        It must do so in every version, and not twice alike.
        """
        if any(s is None for s in spans):
            return None
        versions = [self.facts.lists, *(v.lists for v in self.facts.variations)]
        for others in (False, True):
            for path in self.facts.lists:
                lists = [v.get(path, []) for v in versions]
                if len(lists) > 1 and all(items == lists[0] for items in lists):
                    continue  # never moved: that it agrees may be chance
                for name, text, value in _readings(path, lists[0]):
                    named = [_named(items, value, n, others) for items, n in zip(lists, lengths, strict=True)]
                    if named == spans:
                        return nodes.Among((nodes.Name(self._let(name, text)),), others)
        return None

    def _let(self, name: str, text: str) -> str:
        n, base = 2, name
        while self.lets.get(name, text) != text or name in self.taken:
            name, n = f"{base}{n}", n + 1
        self.lets[name] = text
        return name


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
