"""A file of the user's, tried at many degrees."""

from __future__ import annotations

import random
from collections.abc import Mapping

from attrs import field, frozen

from ucpl.errors import UcplError, fail
from ucpl.layout import Library, load, resolve
from ucpl.layout.bases import called_model
from ucpl.layout.scope import Config, Value
from ucpl.regions import Placement, locate
from ucpl.syntax import nodes, parse
from ucpl.testing.laws import assert_round_trip
from ucpl.texts import text_at

__all__ = ["Report", "roundtrip"]

ELEMENTS_MAX = 400_000  # of a model that `roundtrip` numbers
REMAINDERS = frozenset({"E108", "E160", "E203", "E204"})  # degrees that do not suit the sizes


@frozen
class Report:
    """What `roundtrip` did with one layout."""

    layout: str
    tried: tuple[str, ...]  # "megatron(tp = 2) -> megatron(tp = 3)", each there and back
    refused: tuple[str, ...]  # the same, with the reason: a cut that leaves a remainder
    sizes: dict[str, int] = field(factory=dict)  # sizes chosen here, since the text gives none (or too large ones)
    elements: int = 0  # carried there and back, all tries together

    def __str__(self) -> str:
        lines = [f"{self.layout}: {len(self.tried)} round trips, {self.elements} elements, {len(self.refused)} refused"]
        if self.sizes:
            lines.append("  sizes: " + ", ".join(f"{k} = {v}" for k, v in self.sizes.items()))
        lines += [f"  {t}" for t in self.tried]
        lines += [f"  refused: {t}" for t in self.refused]
        return "\n".join(lines)


def roundtrip(
    file_text: str,
    layout_name: str | None = None,
    examples: int = 20,
    *,
    name: str = "<text>",
    model: nodes.Model | None = None,
    config: Config | None = None,
    sizes: dict[str, int] | None = None,
    seed: int = 0,
) -> tuple[Report, ...]:
    """Carry each layout of a text (or one of them) there and back between changed degrees of its mesh.

    model:  what layouts `of any` are over; they are left out without one.
    config: a config.json. sizes: sizes of dims; a dim that has none, or makes the model too large to number, gets a small one.

    Degrees that do not suit the sizes (a cut leaves a remainder) are counted as refused. Raises AssertionError at the first
    element that does not come back, UcplError for a text that is wrong.
    """
    library = load((name, file_text), read=text_at)
    file = parse(file_text, name)
    chosen = [s for s in file.statements if isinstance(s, nodes.Layout) and layout_name in (None, s.name)]
    if not chosen and layout_name is not None:
        library.layout(layout_name)
    if model is None:
        models = [s for s in file.statements if isinstance(s, nodes.Model)]
        model = called_model(library, nodes.Call(models[0].name), sizes) if len(models) == 1 else None
    kept = [s for s in chosen if s.of != "any" or model is not None]
    if not kept:
        fail("E114", f"{name} has no layout of a model of its own", remedy="name a model with --model FILE:NAME")
    tries = _Tries(library, model, config or {}, dict(sizes or {}), max(1, examples))
    return tuple(tries.layout(s, random.Random(f"{seed} {s.name}")) for s in kept)


@frozen
class _Tries:
    library: Library
    model: nodes.Model | None  # what layouts of any model are over
    config: Config
    sizes: dict[str, int]
    examples: int

    def layout(self, layout: nodes.Layout, chance: random.Random) -> Report:
        small = self.small_sizes(layout, chance)
        parameters = _mesh_parameters(self.library, layout)
        tried: dict[str, None] = {}
        refused: dict[str, None] = {}
        elements = 0
        for _ in range(self.examples * 4):
            if len(tried) + len(refused) >= self.examples or (tried and not parameters):
                break
            a = {p: chance.choice((1, 2, 3, 4)) for p in parameters}
            b = {p: chance.choice((1, 2, 3, 4)) for p in parameters}
            said = f"{_call_text(layout.name, a)} -> {_call_text(layout.name, b)}"
            if (a == b and parameters) or said in tried or said in refused:
                continue
            try:
                elements += assert_round_trip(self.located(layout, a, small), self.located(layout, b, small))
                tried[said] = None
            except UcplError as error:
                if error.diagnostics[0].code not in REMAINDERS:
                    raise
                refused[f"{said}: {error.diagnostics[0].message}"] = None
            except AssertionError as error:
                raise AssertionError(f"{said}: {error}") from None
        return Report(layout.name, tuple(tried), tuple(refused), small, elements)

    def located(self, layout: nodes.Layout, degrees: dict[str, int], small: dict[str, int]) -> Placement:
        call = nodes.Call(layout.name, tuple(nodes.Argument(k, nodes.Number(v)) for k, v in degrees.items()))
        given: dict[str, Value] = {**self.sizes, **small}
        model = self.model if layout.of == "any" else None
        return locate(resolve(self.library, call, model=model, config=self.config, define_sizes=given))

    def small_sizes(self, layout: nodes.Layout, chance: random.Random) -> dict[str, int]:
        """Sizes of dims that rest on a config that is not there; of all dims where the model is too large to number."""
        model = self.model if layout.of == "any" else _model_of(self.library, layout, self.sizes)
        bindings = [b for i in (model.items if model else ()) if isinstance(i, nodes.Dims) for b in i.bindings]
        free = [b for b in bindings if b.name not in self.sizes]
        out = {b.name: chance.choice((4, 6, 8, 12)) for b in free if _lacks(b.value, self.config)}
        literal = {b.name: b.value.value for b in free if isinstance(b.value, nodes.Number)}
        while literal and model is not None and _elements(model, {**self.sizes, **out}, self.config) > ELEMENTS_MAX:
            largest = max(literal, key=literal.__getitem__)
            del literal[largest]
            out[largest] = chance.choice((4, 6, 8, 12))
        return out


def _call_text(name: str, degrees: dict[str, int]) -> str:
    return f"{name}({', '.join(f'{k} = {v}' for k, v in degrees.items())})"


def _model_of(library: Library, layout: nodes.Layout, sizes: Mapping[str, Value]) -> nodes.Model:
    return called_model(library, nodes.Call(layout.of, layout.arguments), sizes)


def _mesh_parameters(library: Library, layout: nodes.Layout) -> tuple[str, ...]:
    """Parameters that are degrees: axes of a mesh of the layout or of one that it extends; and those without a value."""
    chain = library.chain(layout.name)
    axes = {a for link in chain for i in link.node.items if isinstance(i, nodes.Mesh) for a in i.axes}
    return tuple(p.name for p in layout.parameters if p.name in axes or p.default is None)


def _elements(model: nodes.Model, sizes: dict[str, int], config: Config) -> int:
    probe = load(("<probe>", "ucpl 1\nlayout probe() of any {\n  file weights = none\n  * = ...\n}\n"))
    try:
        layout = resolve(probe, nodes.Call("probe"), model=model, config=config, define_sizes=dict(sizes))
    except UcplError:
        return 0  # what is wrong with it is said where the layout itself is resolved
    return sum(t.numel for t in layout.tensors.values())


def _lacks(expr: nodes.Expr, config: Config) -> bool:
    match expr:
        case nodes.Name(path=path) if path.startswith("config."):
            return config.get(path.removeprefix("config.")) is None
        case nodes.Function(name="default", args=args):
            return all(_lacks(a, config) for a in args)
        case nodes.Function(args=args) | nodes.List(items=args):
            return any(_lacks(a, config) for a in args)
        case nodes.Unary(operand=operand):
            return _lacks(operand, config)
        case nodes.Binary(left=left, right=right):
            return _lacks(left, config) or _lacks(right, config)
        case _:
            return False
