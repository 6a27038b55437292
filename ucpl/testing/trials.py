"""A file of the user's, tried at many degrees."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations, product

from attrs import evolve, field

from ucpl.conversion.degrees import Degrees, call_at, degrees_of, degrees_text, depends_on_numbers, is_part
from ucpl.conversion.drawn_lists import ListParameter, call_with_lists, dims_of, list_parameters, lists_text
from ucpl.conversion.drawn_sizes import Sizes, lets_of
from ucpl.errors import Label, UcplError, fail
from ucpl.language import nodes, parse
from ucpl.layout import Library, load, resolve
from ucpl.layout.name_remedies import nearest
from ucpl.layout.scope import Config, Value
from ucpl.layout.statements import called_model
from ucpl.lint.missing_tensors import holes, tensors_without_entry
from ucpl.placement import Placement, locate
from ucpl.records import define, frozen
from ucpl.testing.laws import assert_round_trip
from ucpl.texts import text_at

__all__ = ["Report", "roundtrip"]

TRIED = (1, 2, 3, 4, 5, 6, 8)  # degrees of one axis
ATTEMPTS_MAX = 160  # combinations of degrees that are looked at for one layout
DRAWS_MAX = 40  # of sizes, until there are some that every axis divides
REFUSED_SHOWN = 4


@frozen
class Report:
    """The result of `roundtrip` for one layout."""

    layout: str
    tried: tuple[str, ...]  # "megatron(tp = 2) -> megatron(tp = 3)", each there and back
    refused: tuple[
        str, ...
    ]  # degrees that do not suit, each with the size that is not divisible: "megatron(tp = 3): ..."
    sizes: dict[str, int] = field(factory=dict)  # sizes chosen here, since the text gives none (or too large ones)
    elements: int = 0  # carried there and back, all tries together

    def __str__(self) -> str:
        lines = [f"{self.layout}: {len(self.tried)} round trips, {self.elements} elements"]
        if self.sizes:
            lines.append("  sizes: " + ", ".join(f"{k} = {v}" for k, v in self.sizes.items()))
        lines += [f"  {t}" for t in self.tried]
        lines += [f"  does not suit: {t}" for t in self.refused[:REFUSED_SHOWN]]
        if len(self.refused) > REFUSED_SHOWN:
            lines.append(f"  and {len(self.refused) - REFUSED_SHOWN} more that do not suit")
        return "\n".join(lines)


def roundtrip(
    file_text: str,
    layout_name: str | None = None,
    examples: int = 20,
    *,
    name: str = "<text>",
    model: nodes.Model | None = None,
    config: Config | None = None,
    sizes: Mapping[str, Value] | None = None,
    degrees: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    arguments: Sequence[nodes.Argument] = (),
) -> tuple[Report, ...]:
    """Carry layouts of a text to changed degrees and back.

    All layouts of it, or one.

    model:   the model of layouts `of any`; they are left out without one.
    config:  a config.json. sizes: sizes of dims; a dim that has none, or makes the model too large to number, gets a small one.
    degrees: by axis, which to try. Without it, small ones that suit the sizes.
    arguments: of the layout, the same in every call: lists and words, which are no degrees.

    Raises AssertionError at the first element that does not come back, UcplError for a text that is wrong.
    """
    library = load((name, file_text), read=text_at)
    file = parse(file_text, name)
    layouts = [s for s in file.statements if isinstance(s, nodes.Layout)]
    chosen = [s for s in layouts if s.name == layout_name or (layout_name is None and not is_part(library, file, s))]
    if not chosen and layout_name is not None:
        library.layout(layout_name)
    if model is None:
        models = [s for s in file.statements if isinstance(s, nodes.Model)]
        model = called_model(library, nodes.Call(models[0].name), sizes) if len(models) == 1 else None
    kept = [s for s in chosen if s.of != "any" or model is not None]
    if not kept:
        fail("E114", f"{name} has no layout of a model of its own", remedy="name a model with --model FILE:NAME")
    given = _Given(library, model, config or {}, dict(sizes or {}), dict(degrees or {}), tuple(arguments))
    known = {axis for layout in kept for axis in given.axes(layout)}
    degrees = degrees or {}
    for axis in degrees:
        if axis not in known:
            fail(
                "E148",
                f"--degrees {axis}: no layout that is tried has a mesh axis of that name",
                Label("<command line>", where=f"--degrees {axis}"),
                remedy=_for_degrees(axis, degrees[axis], kept, sorted(known)),
            )
    return tuple(_tried(given, s, max(1, examples), random.Random(f"{seed} {s.name}")) for s in kept)


def _for_degrees(axis: str, tried: Sequence[int], kept: Sequence[nodes.Layout], known: Sequence[str]) -> str:
    """The remedy for degrees of an axis that does not exist."""
    if not known:
        return f"{kept[0].name} has no mesh, and is stored in one way: leave --degrees out"
    close = nearest(axis, known)
    numbers = ",".join(map(str, tried if len(tried) > 1 else (1, 2)))
    if close:
        return f"did you mean --degrees {close}={numbers}?"
    return f"name one of {', '.join(known)}, as in --degrees {known[-1]}={numbers}"


@frozen
class _Given:
    library: Library
    model: nodes.Model | None  # the model of layouts `of any`
    config: Config
    sizes: dict[str, Value]
    degrees: dict[str, Sequence[int]]
    arguments: tuple[nodes.Argument, ...] = ()

    def axes(self, layout: nodes.Layout) -> tuple[str, ...]:
        """Parameters that are degrees: mesh axes, and those without a value."""
        axes, said = degrees_of(self.library, layout), {a.name for a in self.arguments}
        said |= {one.name for one in list_parameters(self.library, layout)}
        return tuple(p.name for p in layout.parameters if (p.name in axes or p.default is None) and p.name not in said)

    def model_of(self, layout: nodes.Layout) -> nodes.Model:
        if layout.of == "any":
            assert self.model is not None
            return self.model
        return called_model(self.library, nodes.Call(layout.of, layout.arguments), self.sizes)


def _tried(given: _Given, layout: nodes.Layout, examples: int, chance: random.Random) -> Report:
    best = _best(given, layout, examples, chance)
    pairs = list(permutations(best.found, 2)) if best.axes else [(one, one) for one in best.found]
    chance.shuffle(pairs)
    pairs.sort(key=lambda pair: -sum(pair[0][0][axis] != pair[1][0][axis] for axis in best.axes))
    tried: list[str] = []
    elements = 0
    for (here, source), (there, target) in pairs[:examples]:
        text = f"{best.named(here)} -> {best.named(there)}"
        try:
            elements += assert_round_trip(source, target)
        except AssertionError as error:
            raise AssertionError(f"{text}: {error}") from None
        tried.append(text)
    return Report(layout.name, tuple(tried), tuple(best.refused), best.small, elements)


def _best(given: _Given, layout: nodes.Layout, examples: int, chance: random.Random) -> _Suiting:
    """Sizes that every axis of the mesh divides, if there are any.

    The first such draw, else the one that most axes divide.
    """
    model = given.model_of(layout)
    chain = [link.node for link in given.library.chain(layout.name)]
    sizes = Sizes.of(model, chain, given.sizes, given.config, lets_of(given.library))
    said = {a.name for a in given.arguments}
    lists = tuple(one for one in list_parameters(given.library, layout) if one.name not in said)
    best: _Suiting | None = None
    for _ in range(DRAWS_MAX):
        small = sizes.draw(chance, model, given.sizes, given.config)
        drawn = _Suiting(given, layout, small, given.axes(layout), lists=lists)
        drawn.search(examples, chance)
        if best is None or (len(drawn.reached), len(drawn.found)) > (len(best.reached), len(best.found)):
            best = drawn
        if not small or (drawn.found and len(drawn.reached) == len(drawn.axes)):
            break
    assert best is not None
    return best


@define
class _Suiting:
    """Degrees at which a layout holds, with sizes.

    `refused`: those at which it does not, and why.
    """

    given: _Given
    layout: nodes.Layout
    small: dict[str, int]
    axes: tuple[str, ...]
    found: list[tuple[Degrees, Placement]] = field(factory=list)
    refused: list[str] = field(factory=list)
    reached: set[str] = field(factory=set)  # axes that were changed
    met: list[Degrees] = field(factory=list)

    lists: tuple[ListParameter, ...] = ()
    calls: dict[str, nodes.Call] = field(factory=dict)  # with drawn lists, by their degrees

    def named(self, degrees: Degrees) -> str:
        drawn = self.calls.get(degrees_text(degrees))
        more = lists_text(drawn) if drawn is not None and self.lists else ""
        return f"{self.layout.name}({', '.join(filter(None, (degrees_text(degrees), more)))})"

    def values(self, axis: str) -> Sequence[int]:
        return self.given.degrees.get(axis, TRIED)

    def search(self, examples: int, chance: random.Random) -> None:
        """Search until there are enough pairs, each axis among them."""
        enough = next(n for n in range(2, examples + 3) if n * (n - 1) >= examples)
        for degrees in self.combinations(chance):
            if self.small and not self.found and len(self.met) > 2:  # these sizes fit nothing
                return
            if len(self.met) > ATTEMPTS_MAX or (len(self.found) >= enough and len(self.reached) == len(self.axes)):
                return
            if degrees not in self.met and not self.is_enough(degrees):
                self.attempt(degrees)

    def is_enough(self, degrees: Degrees) -> bool:
        """Two degrees of an axis alone leave room for the others."""
        changed = [a for a in self.axes if degrees[a] != self.values(a)[0]]
        alone = [d for d in self.met if [a for a in self.axes if d[a] != self.values(a)[0]] == changed]
        return len(self.axes) > 1 and len(changed) == 1 and changed[0] in self.reached and len(alone) > 1

    def combinations(self, chance: random.Random) -> Iterator[Degrees]:
        base = {a: self.values(a)[0] for a in self.axes}
        yield base
        for axis in self.axes:
            yield from ({**base, axis: n} for n in self.values(axis)[1:])
        every = list(product(*(self.values(a)[:5] for a in self.axes[:6])))
        chance.shuffle(every)
        yield from ({**base, **dict(zip(self.axes, c, strict=False))} for c in every)

    def attempt(self, degrees: Degrees) -> None:
        self.met.append(degrees)
        made: list[Placement] = []

        def attempt(call: nodes.Call) -> None:
            made[:] = [self.placed(call)]

        try:
            if self.lists:
                self.calls[degrees_text(degrees)] = call_with_lists(
                    self.layout, degrees, self.lists, self.dims, partial(self.stores_all, attempt, made)
                )
            else:
                attempt(call_at(self.layout, degrees))
            self.found.append((degrees, made[0]))
        except UcplError as error:
            if not depends_on_numbers(error):
                raise
            self.refused.append(f"{self.named(degrees)}: {error.diagnostics[0].message}")
            return
        self.reached |= {a for a in self.axes if degrees[a] != self.values(a)[0]}

    def placed(self, call: nodes.Call) -> Placement:
        call = evolve(call, arguments=(*call.arguments, *self.given.arguments))
        sizes: dict[str, Value] = {**self.given.sizes, **self.small}
        model = self.given.model_of(self.layout) if self.layout.of == "any" else None
        return locate(resolve(self.given.library, call, model=model, config=self.given.config, define_sizes=sizes))

    @staticmethod
    def stores_all(attempt: Callable[[nodes.Call], None], made: list[Placement], call: nodes.Call) -> None:
        """Place a call with drawn lists.

        Raises: UcplError E313 if a tensor is not stored, or in part.
        """
        attempt(call)
        absent = tensors_without_entry(made[0].layout, frozenset())
        if absent:
            fail("E313", f"{call.name} stores nothing of {absent[0]}", remedy="store it")
        found = next(holes(made[0]), None)
        if found is not None:
            fail("E313", f"{found}, the first {found.first}", remedy="store it")

    @property
    def dims(self) -> Mapping[str, int]:
        sizes = {**self.given.sizes, **self.small}
        return dims_of(self.given.model_of(self.layout), self.layout, self.given.library, sizes, self.given.config)
