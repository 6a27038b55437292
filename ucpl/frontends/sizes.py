"""Sizes that a spec leaves open, from the shapes of a checkpoint: `dim` names that no statement, -D or config gives.

An entry whose stored axis is one such dim, or a product of dims with one of them unknown, says its size; the values that a
name's template takes (`layers.{l}.weight`) say how many indices there are. Every value is printed with the tensor it is from.

Not here: dims inside sums, padded or unevenly cut axes. They stay unknown, and E101 asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from attrs import define, evolve, field

from ucpl.errors import Label, fail
from ucpl.layout import Library
from ucpl.layout.bases import called_model
from ucpl.layout.scope import Scope, Value, at
from ucpl.stores.checkpoint import Checkpoint
from ucpl.syntax import nodes
from ucpl.texts import Json

Found = dict[str, tuple[int, str]]  # name -> (size, where it is from)

_HOLE = re.compile(r"\{([^{}:]*)(?::[^{}]*)?\}")
_NUMBER = re.compile("[0-9]{1,9}")
_ROUNDS = 8


def sizes_from(
    checkpoint: Checkpoint,
    library: Library,
    call: nodes.Call,
    config: Mapping[str, Json] | None = None,
    given: dict[str, Value] | None = None,
) -> Found:
    """Sizes of the open dims of the layout's model. Raises: UcplError E163 where two tensors disagree."""
    layout = library.layout(call.name).node
    assert isinstance(layout, nodes.Layout)
    if layout.of == "any":
        return {}
    model = called_model(library, nodes.Call(layout.of, layout.arguments), given)
    chain = [link.node for link in library.chain(call.name)]
    statements = [*model.items, *(i for one in chain for i in one.items)]
    bindings = {b.name: b.value for s in statements if isinstance(s, nodes.Let | nodes.Dims) for b in s.bindings}
    parameters = {p.name: p.default for one in chain for p in one.parameters}
    names = {d.name for t in model.items if isinstance(t, nodes.Tensor) for d in t.dims if d.name is not None}
    open_names = names - bindings.keys() - parameters.keys() - (given or {}).keys()
    if not open_names:
        return {}
    scope = Scope(given=dict(given or {}), bindings=bindings, config=dict(config or {}))
    for one, parameter in zip(call.arguments, layout.parameters, strict=False):
        scope.given[one.name or parameter.name] = scope.evaluate(one.value)
    for name, default in parameters.items():
        if name not in scope.given and default is not None:
            scope.given[name] = scope.evaluate(default)
    entries = [i for one in chain for i in one.items if isinstance(i, nodes.Entry) and i.shape is not None]
    stored = [("/".join(map(str, key)), e.shape) for (_, key), e in checkpoint.extents.items()]
    learner = _Learner(open_names, scope)
    for _ in range(_ROUNDS):
        before = len(learner.found)
        for entry in entries:
            learner.learn(entry, stored)
        scope.given.update({name: size for name, (size, _) in learner.found.items()})
        if len(learner.found) == before:
            break
    return learner.found


@define
class _Learner:
    """Sizes said by entries, one after another: a dim that one has found is known to the next."""

    open_names: set[str]
    scope: Scope
    found: Found = field(factory=dict)

    def learn(self, entry: nodes.Entry, stored: list[tuple[str, tuple[int, ...]]]) -> None:
        text = next((c.args[0] for c in entry.clauses if c.word == "as"), None)
        if text is None:
            return
        holes = [m[1] for m in _HOLE.finditer(text)]
        parts = _HOLE.split(text)[::2]
        pattern = re.compile("(?:^|/)" + "(.+?)".join(map(re.escape, parts)) + "$")
        counts: dict[str, tuple[int, str]] = {}
        for name, shape in stored:
            match = pattern.search(name)
            if match is None:
                continue
            for hole, value in zip(holes, match.groups(), strict=True):
                if hole in self.open_names and _NUMBER.fullmatch(value):
                    counts[hole] = max(counts.get(hole, (0, "")), (int(value) + 1, f"names like {name}"))
            if len(shape) == len(entry.shape or ()):
                for i, axis in enumerate(entry.shape or ()):
                    self.axis(axis, (shape[i], f"shape of {name}"), entry)
        for hole, said in counts.items():
            self.say(hole, said, entry)

    def axis(self, axis: nodes.Axis, said: tuple[int, str], entry: nodes.Entry) -> None:
        """What one stored axis says: a dim, cut evenly perhaps, or a product with one dim unknown."""
        size, origin = said
        match axis:
            case nodes.Cut(axis=inner, splits=splits):
                if all(s.kind == "equal" and self.scope.knows(s.mesh_axis) for s in splits):
                    for s in splits:
                        size *= self.scope.integer(nodes.Name(s.mesh_axis))
                    self.axis(inner, (size, origin), entry)
            case nodes.Dim(name=name, range=None) if name in self.open_names:
                self.say(name, said, entry)
            case nodes.Stack(terms=(nodes.Term(axes=axes),)) if all(isinstance(a, nodes.Dim) for a in axes):
                dims = [a.name for a in axes if isinstance(a, nodes.Dim)]
                unknown = [name for name in dims if not self.scope.knows(name)]
                rest = prod(self.scope.integer(nodes.Name(name)) for name in dims if name not in unknown)
                if len(unknown) == 1 and rest and size % rest == 0:
                    if unknown[0] in self.open_names:
                        self.say(unknown[0], (size // rest, origin), entry)
            case _:
                pass

    def say(self, name: str, said: tuple[int, str], entry: nodes.Entry) -> None:
        was = self.found.setdefault(name, said)
        if was[0] != said[0]:
            fail(
                "E163",
                f"dim `{name}` is {was[0]} by the {was[1]} and {said[0]} by the {said[1]}",
                at(entry.span, f"{said[0]}"),
                Label("<checkpoint>", f"{was[0]}", where=was[1]),
            )


def with_sizes(library: Library, model: str, found: Found) -> Library:
    """A library whose model has the sizes found, as if it had said them."""
    if model == "any" or not found:
        return library
    known = library.model(model).node
    assert isinstance(known, nodes.Model)
    said = nodes.Dims(tuple(nodes.Binding(name, nodes.Number(size)) for name, (size, _) in found.items()))
    return library.with_model(evolve(known, items=(said, *known.items)))
