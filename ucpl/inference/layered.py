"""The layers of a PipelineModule from names of tensors.

`3.weight` is of layer 3. They are used if no file of a layer exists. Universal folders have these names, and so has a
pipeline converted to a module without one. The number of layers, functions included, and the layers of a tied module
are unknown: the call of a target gives them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents.pipeline import METHODS, Layer, Pipeline
from ucpl.inference.parallel import Base, Note
from ucpl.inference.stages import LAYERS, STAGES, arguments, is_dealt
from ucpl.layout.scope import Scope
from ucpl.records import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucpl.files.checkpoint import Checkpoint

TIED = "tied"
_MODULES = "tied_modules"
_DIGITS_MAX = 6  # of a layer's number

Names = dict[str, tuple[tuple[str, str], ...]]  # (name in the layer, tensor), by layer or tied module


@frozen(eq=False)
class _Named:
    """Tensors by the layer or tied module of their names."""

    own: Names = field(factory=dict)
    tied: Names = field(factory=dict)

    @property
    def numbers(self) -> set[int]:
        return {int(number) for number in self.own}


def is_asked(base: Base) -> bool:
    """Test whether a call has arguments on stages or layers."""
    return base.asked("pp") > 1 or is_dealt(base) or bool(arguments(base, (TIED,))[1])


def of_names(base: Base, source: Checkpoint | None) -> tuple[Base, Pipeline, tuple[Note, ...]]:
    """(base, pipeline, notes).

    The layers on one stage, and the base without ties.
    Raises: UcplError E475.
    """
    asked = Label("<call>", where=base.call.name)
    named = _named(source, base, asked)
    plain, given = arguments(base, (TIED,))
    count = _count(plain)
    places, origin = _ties(named, count, Scope().evaluate(given[TIED]) if TIED in given else None, asked)
    numbers = {number for mine in places.values() for number in mine} | named.numbers
    # The call's count of layers is checked at the time of dealing.
    total = max((count or 0) if LAYERS not in arguments(plain, (LAYERS,))[1] else 0, max(numbers) + 1)
    keys = {number: key for key, mine in places.items() for number in mine}
    layers = tuple(_layer(number, keys.get(number), named) for number in range(total))
    sizes = {t.name: prod(t.shape) for t in source.state.tensors if t.kind == "parameter"} if source is not None else {}
    elements = tuple(sum(sizes.get(tensor, 0) for _, tensor in layer.names) for layer in layers)
    made = Pipeline(layers, (0, total), elements, METHODS, "names of the tensors")
    if source is not None:
        _demand_order(made, source, asked)
    notes: list[Note] = [(f"layers of tied module {key}", [*mine], origin) for key, mine in places.items()]
    return plain, made, (("layers", total, "names of the tensors, and the call"), *notes)


def _named(source: Checkpoint | None, base: Base, asked: Label) -> _Named:
    named = _Named()
    for name in _in_order(source) if source is not None else ():
        first, _, rest = name.partition(".")
        key, _, inner = rest.partition(".")
        if first.isascii() and first.isdigit() and len(first) <= _DIGITS_MAX and rest:
            named.own[first] = (*named.own.get(first, ()), (rest, name))
        elif first == _MODULES and inner:
            named.tied[key] = (*named.tied.get(key, ()), (inner, name))
        else:
            _no_pipeline(base, f"{name} is of no layer by its name", asked)
    if not named.own:
        _no_pipeline(base, "no tensor is of a layer by its name", asked)
    return named


def _in_order(source: Checkpoint) -> Iterator[str]:
    """Names of tensors, with those of each group in the group's order.

    Files of safetensors sort names; the groups of an optimizer keep the order of registration.
    """
    group_of = {name: n for n, group in enumerate(source.state.groups) for name in group.members}
    known = {tensor.name for tensor in source.state.tensors}
    members = [
        iter([name for name in dict.fromkeys(group.members) if name in known and group_of[name] == n])
        for n, group in enumerate(source.state.groups)
    ]
    for tensor in source.state.tensors:
        yield next(members[group_of[tensor.name]]) if tensor.name in group_of else tensor.name


def _no_pipeline(base: Base, why: str, asked: Label) -> None:
    fail("E475", f"`{base.call.name}` with pipeline stages: the source is no pipeline, and {why}", asked)


def _count(base: Base) -> int | None:
    """The number of layers in a call."""
    _, given = arguments(base, (STAGES, LAYERS))
    scope = Scope()
    if LAYERS in given:
        return scope.integer(given[LAYERS])
    sizes = scope.evaluate(given[STAGES]) if STAGES in given else None
    if isinstance(sizes, list) and all(isinstance(size, int) for size in sizes):
        return sum(size for size in sizes if isinstance(size, int))
    return None


def _ties(named: _Named, count: int | None, said: object, asked: Label) -> tuple[dict[str, tuple[int, ...]], str]:
    """The layers of each tied module.

    They are given, or the only two that no tensor is named after. Raises: UcplError E475.
    """
    keys = sorted(named.tied)
    if said is not None:
        return _stated_ties(named, said), "given"
    if not keys:
        return {}, ""
    free = [n for n in range(count or 0) if n not in named.numbers]
    if len(keys) == 1 and len(free) == 2:
        return {keys[0]: tuple(free)}, "the layers that no other tensor is named after"
    last = max(named.numbers) + 1
    example = f"tied = [0, {last}]" if len(keys) == 1 else "tied = [[0, 7], [1, 6]]"
    fail(
        "E475",
        f"no tensor has a name with the layers of the tied modules {', '.join(keys)}",
        asked,
        Label("<source>", f"layers {', '.join(map(str, sorted(named.numbers)))} have tensors of their own"),
        remedy=f"give their numbers in the PipelineModule, functions counted: {example};"
        f" and how many layers each stage has: stages = [...]",
    )


def _stated_ties(named: _Named, said: object) -> dict[str, tuple[int, ...]]:
    keys = sorted(named.tied)
    lists = said if isinstance(said, list) else []
    if lists and all(isinstance(n, int) for n in lists):
        lists = [lists]
    places = [tuple(n for n in mine if isinstance(n, int)) for mine in lists if isinstance(mine, list)]
    every = [n for mine in places for n in mine]
    is_apart = len(set(every)) == len(every) and not named.numbers.intersection(every)
    in_range = all(0 <= n < 10**_DIGITS_MAX for n in every)
    if len(places) != len(keys) or any(len(mine) < 2 for mine in places) or not (is_apart and in_range):
        fail(
            "E475",
            f"tied = {said}: of {', '.join(keys) or 'no tied module'}, two layers or more each, which are no other's",
            Label("<call>", where=f"tied = {said}"),
            Label("<source>", f"layers {', '.join(map(str, sorted(named.numbers)))} have tensors of their own"),
            remedy="tied = [0, 6] of one tied module, [[0, 7], [1, 6]] of two, in the order of their names",
        )
    return {key: tuple(sorted(mine)) for key, mine in zip(keys, places, strict=True)}


def _layer(number: int, key: str | None, named: _Named) -> Layer:
    """A layer, with a file for each layer of a tied module.

    DeepSpeed skips the file if the layer is a function.
    """
    names = named.tied[key] if key is not None else named.own.get(str(number), ())
    return Layer(number, f"layer_{number:02d}" if names else None, names, key)


def _demand_order(pipeline: Pipeline, source: Checkpoint, asked: Label) -> None:
    """Check that the source's order is that of stages' flat buffers.

    Tied modules are first, then layer by layer.
    """
    ties = [x for x in pipeline.layers if x.tied is not None]
    order = dict.fromkeys(t for x in (*ties, *pipeline.layers) for _, t in x.names)
    place = {tensor: i for i, tensor in enumerate(order)}
    for group in source.state.groups:
        at = [place[name] for name in group.members if name in place]
        if at != sorted(at):
            fail(
                "E475",
                f"the parameters of group {group.name} are not in the order of a PipelineModule",
                asked,
                Label("<source>", where=f"group {group.name}"),
            )
