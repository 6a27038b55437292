"""Small sizes for a model that has none, or that is too large to number: drawn, and held to what the text says of them.

A dim that rests on a config that is not there, and one that is large, gets a size of its own; what is computed from others
stays computed. A text that has `w : l[2..]` or `n[..24]` gets an l above 2 and an n of 24 or more; a
dim that is cut into sizes given as numbers, or of which a list of layers speaks, keeps its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from attrs import field

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout import Layout, Library, load, resolve
from ucpl.layout.scope import Config, Value
from ucpl.records import frozen

__all__ = ["ELEMENTS_MAX", "Sizes", "lets_of"]

ELEMENTS_MAX = 400_000  # of a model that `roundtrip` numbers
POOL = (4, 6, 8, 12)  # of small sizes: most degrees divide some of them
DIVISOR_MAX = 128
LARGE = 12  # a size up to this is no reason to draw another


@frozen
class Sizes:
    """What may be drawn for a layout's dims, and within which bounds."""

    missing: tuple[str, ...]  # rest on a config that is not there
    others: tuple[str, ...]  # have a size that is said by a number or a config
    least: dict[str, int] = field(factory=dict)  # bounds that the texts have
    kept: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        model: nodes.Model,
        layouts: Sequence[nodes.Layout],
        given: Mapping[str, Value],
        config: Config,
        lets: Sequence[nodes.Binding] = (),
    ) -> Sizes:
        """`lets`: numbers of the file, of which dims may be made."""
        bindings = [b for i in model.items if isinstance(i, nodes.Dims) for b in i.bindings if b.name not in given]
        least, kept = _bounds(model, *layouts)
        numbers = [b for i in model.items if isinstance(i, nodes.Let) for b in i.bindings]
        missing = [b.name for b in bindings if absent(b.value, config) and b.by is None]
        missing += [b.name for b in (*lets, *numbers) if b.name not in given and _is_number(b.value, config)]
        said = [b for b in bindings if b.name not in missing and b.name not in kept and _is_said(b.value)]
        return cls(tuple(dict.fromkeys(missing)), tuple(b.name for b in said), least, kept)

    def draw(
        self, chance: random.Random, model: nodes.Model, given: Mapping[str, Value], config: Config
    ) -> dict[str, int]:
        """Sizes for what has none; where the model is too large to number, for the largest that are said, too."""
        out = {name: self.one(name, chance) for name in self.missing}
        layout = probed(model, {**given, **out}, config)
        left = [n for n in self.others if layout is not None and layout.sizes.get(n, 0) > LARGE]
        while left and layout is not None and sum(t.numel for t in layout.tensors.values()) > ELEMENTS_MAX:
            sizes = layout.sizes
            largest = max(left, key=lambda n: sizes.get(n, 0))
            left.remove(largest)
            out[largest] = self.one(largest, chance, sizes.get(largest, 0))
            layout = probed(model, {**given, **out}, config) or layout
        return out

    def one(self, name: str, chance: random.Random, was: int = 0) -> int:
        """A small size, or a divisor of what it was: a width is divided by heads that a config says."""
        least = self.least.get(name, 0)
        pool = (*POOL, *(n for n in range(LARGE + 1, min(was, DIVISOR_MAX) + 1) if was % n == 0))
        return chance.choice([n for n in pool if n >= least] or [-(-least // 12) * 12, least])


def lets_of(library: Library) -> list[nodes.Binding]:
    """The numbers that files define outside of models and layouts."""
    statements = (s for file in library.files.values() for s in file.statements)
    return [b for s in statements if isinstance(s, nodes.Let) for b in s.bindings]


def probed(model: nodes.Model, sizes: Mapping[str, Value], config: Config) -> Layout | None:
    """The model's tensors and sizes; None where it has none: what is wrong is said where the layout itself is resolved."""
    probe = load(("<probe>", "ucpl 1\nlayout probe() of any {\n  file weights = none\n  * = ...\n}\n"))
    try:
        return resolve(probe, nodes.Call("probe"), model=model, config=config, define_sizes=dict(sizes))
    except UcplError:
        return None


def absent(expr: nodes.Expr, config: Config) -> bool:
    """Whether an expression rests on a config's key that is not there, outside `default`."""
    match expr:
        case nodes.Name(path=path) if path.startswith("config."):
            value: object = config
            for step in path.split(".")[1:]:
                value = value.get(step) if isinstance(value, Mapping) else None
            return value is None
        case nodes.Function(name="default", args=args):
            return all(absent(a, config) for a in args)
        case nodes.Function(args=args) | nodes.List(items=args):
            return any(absent(a, config) for a in args)
        case nodes.Unary(operand=operand):
            return absent(operand, config)
        case nodes.Binary(left=left, right=right):
            return absent(left, config) or absent(right, config)
        case _:
            return False


def _is_number(expr: nodes.Expr, config: Config) -> bool:
    """Whether an expression needs a config that is absent, and is one number, no list."""
    lists = any(isinstance(n, nodes.List) or (isinstance(n, nodes.Function) and n.name == "where") for n in walk(expr))
    return absent(expr, config) and not lists


def _is_said(expr: nodes.Expr) -> bool:
    """A number, or what a config says: not what is computed from other dims."""
    names = [n.path for n in walk(expr) if isinstance(n, nodes.Name)]
    return isinstance(expr, nodes.Number) or bool(names and all(n.startswith("config.") for n in names))


def _bounds(*roots: nodes.Model | nodes.Layout) -> tuple[dict[str, int], frozenset[str]]:
    """Least sizes by literal ranges, and dims that keep theirs."""
    least: dict[str, int] = {}
    kept: set[str] = set()
    for node in walk(*roots):
        match node:
            case (
                nodes.Dim(name=name, range=nodes.Among(items=items))
                | nodes.Dimension(name=str(name), range=nodes.Among(items=items))
            ):
                for item in items:
                    if isinstance(item, nodes.Function | nodes.List | nodes.Name):
                        kept.add(name)
                    for bound in _ends(item):
                        least[name] = max(least.get(name, 0), bound)
            case nodes.Cut(axis=axis, splits=splits):
                if any(isinstance(size, nodes.Number) for s in splits for size in s.sizes):
                    kept |= {d.name for d in walk(axis) if isinstance(d, nodes.Dim)}
    return least, frozenset(kept)


def _ends(item: nodes.Range | nodes.Expr) -> Iterator[int]:
    """How large a dim must be, for a range or an index to be inside it and to leave nothing of it empty."""
    match item:
        case nodes.Range(start=start, stop=stop):
            yield from (e.value + 1 for e in (start, stop) if isinstance(e, nodes.Number) and e.value > 0)
        case nodes.Number(value=value):
            yield value + 1
