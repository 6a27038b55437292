"""Small random sizes for a model with open or very large dims.

A dim that depends on an absent config, that has no size in the text, or that is large, gets a drawn size; dims that are
computed from others stay computed. Drawn sizes satisfy the ranges of the text: with `w : l[2..]` or `n[..24]`, l is above 2 and
n is at least 24. They also satisfy its divisions: with `d = h / n`, n divides h. A dim that is cut into sizes given as
numbers, or that a list of layers indexes, keeps its size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from attrs import evolve, field

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout import Layout, Library, load, resolve
from ucpl.layout.arithmetic import Operand, evaluated
from ucpl.layout.scope import Config, Value
from ucpl.records import frozen

__all__ = ["ELEMENTS_MAX", "ConfigList", "Sizes", "config_lists", "lets_of"]

ELEMENTS_MAX = 400_000  # of a model that `roundtrip` numbers
POOL = (4, 6, 8, 12)  # of small sizes: most degrees divide some of them
DIVISOR_MAX = 128
LARGE = 12  # a size up to this is no reason to draw another


@frozen
class Sizes:
    """The dims that may be drawn for a layout, and their bounds."""

    missing: tuple[str, ...]  # depend on an absent config
    others: tuple[str, ...]  # have a size from a number or a config
    least: dict[str, int] = field(factory=dict)  # bounds from the texts
    kept: frozenset[str] = frozenset()
    open: tuple[str, ...] = ()  # have no size in the texts: a checkpoint's shapes give it, or -D
    exact: dict[str, int] = field(factory=dict)  # sizes of open dims that a list of the texts determines
    computed: dict[str, nodes.Expr] = field(factory=dict)  # of dims and numbers that are not drawn

    @classmethod
    def of(
        cls,
        model: nodes.Model,
        layouts: Sequence[nodes.Layout],
        given: Mapping[str, Value],
        config: Config,
        lets: Sequence[nodes.Binding] = (),
    ) -> Sizes:
        """Find the dims to draw.

        lets: numbers of the file that dims may use.
        """
        bindings = [b for i in model.items if isinstance(i, nodes.Dims) for b in i.bindings if b.name not in given]
        least, kept = _bounds(model, *layouts)
        numbers = [b for i in model.items if isinstance(i, nodes.Let) for b in i.bindings]
        missing = [b.name for b in bindings if absent(b.value, config) and b.by is None]
        missing += [b.name for b in (*lets, *numbers) if b.name not in given and _is_number(b.value, config)]
        said = [b for b in bindings if b.name not in missing and b.name not in kept and _is_stated(b.value)]
        of_tensors = _open_dims(model, layouts, {*given, *(b.name for b in lets)})
        exact = _exact(model, *layouts) if of_tensors else {}
        computed = {b.name: b.value for b in (*lets, *numbers, *bindings) if b.by is None and b.name not in missing}
        return cls(tuple(dict.fromkeys(missing)), tuple(b.name for b in said), least, kept, of_tensors, exact, computed)

    def draw(
        self, chance: random.Random, model: nodes.Model, given: Mapping[str, Value], config: Config
    ) -> dict[str, int]:
        """Draw sizes for open dims.

        If the model has too many elements for `roundtrip`, the largest other dims are drawn, too.
        """
        out = {name: self.one(name, chance) for name in (*self.missing, *self.open)}
        self.divide(out, given, config)
        layout = probed(model, {**given, **out}, config)
        left = [n for n in self.others if layout is not None and layout.sizes.get(n, 0) > LARGE]
        while left and layout is not None and sum(t.numel for t in layout.tensors.values()) > ELEMENTS_MAX:
            sizes = layout.sizes
            largest = max(left, key=lambda n: sizes.get(n, 0))
            left.remove(largest)
            out[largest] = self.one(largest, chance, sizes.get(largest, 0))
            layout = probed(model, {**given, **out}, config) or layout
        return out

    def divide(self, out: dict[str, int], given: Mapping[str, Value], config: Config) -> None:
        """Change drawn sizes so that divisions of the text leave no remainder.

        A drawn divisor shrinks to a common divisor above 1, or else the dividend grows.
        """

        def look(name: nodes.Name) -> Operand:
            if name.path in out:
                return out[name.path]
            if name.path in given:
                return given[name.path]
            if name.path.startswith("config."):
                value = _configured(name.path, config)
                return value if isinstance(value, int | float | str | list) else None
            return evaluated(self.computed[name.path], look)

        divisions = [n for e in self.computed.values() for n in walk(e) if isinstance(n, nodes.Binary)]
        for division in (n for n in divisions if n.operator == "/"):
            try:
                dividend, divisor = evaluated(division.left, look), evaluated(division.right, look)
            except (UcplError, KeyError, RecursionError):
                continue
            if not isinstance(dividend, int) or not isinstance(divisor, int) or divisor < 1 or dividend % divisor == 0:
                continue
            names = [n.path for n in walk(division.right) if isinstance(n, nodes.Name)]
            free = len(names) == 1 and names[0] in out and isinstance(division.right, nodes.Name)
            shared = math.gcd(dividend, divisor)
            if free and names[0] not in self.exact and shared >= max(2, self.least.get(names[0], 0)):
                out[names[0]] = shared
                continue
            grown = next((n.path for n in walk(division.left) if isinstance(n, nodes.Name) and n.path in out), None)
            if grown is not None and grown not in self.exact:
                out[grown] *= divisor // shared

    def one(self, name: str, chance: random.Random, was: int = 0) -> int:
        """A small size, or a divisor of the present one.

        A width must be divisible by the heads of a config.
        """
        if name in self.exact:
            return self.exact[name]
        least = self.least.get(name, 0)
        pool = (*POOL, *(n for n in range(LARGE + 1, min(was, DIVISOR_MAX) + 1) if was % n == 0))
        return chance.choice([n for n in pool if n >= least] or [-(-least // 12) * 12, least])


@frozen
class ConfigList:
    """A list in an absent config.

    dim: has one item for each of its indices. words: those that the text asks for; none: items are sizes.
    """

    key: str
    dim: str
    words: tuple[str | int, ...] = ()
    is_flag: bool = False  # items are 0 or 1
    names: tuple[str, ...] = ()  # of the text for the key

    def draw(self, chance: random.Random, size: int) -> list[str | int]:
        """A list with each word, if it has room for them."""
        items: list[str | int]
        if self.is_flag:
            items = [1, *(chance.choice((0, 1)) for _ in range(size - 1))]
        elif self.words:
            items = [*self.words, *(chance.choice(self.words) for _ in range(size - len(self.words)))]
        else:
            items = [chance.choice(POOL[:3]) for _ in range(size)]
        items = items[:size]
        chance.shuffle(items)
        return items


def config_lists(roots: Sequence[nodes.Record], lets: Sequence[nodes.Binding]) -> tuple[ConfigList, ...]:
    """Keys of a config that the texts read as lists."""
    numbers = {
        b.name: b.value for b in (*lets, *(b for r in walk(*roots) if isinstance(r, nodes.Let) for b in r.bindings))
    }
    found: dict[str, ConfigList] = {}
    words: dict[str, list[str | int]] = {}
    for node in walk(*roots, *lets):
        match node:
            case nodes.Binding(by=str(by), value=value):
                for key in _keys(value, numbers):
                    found.setdefault(key, ConfigList(key, by))
            case nodes.Function(name="where", args=(of, nodes.Text(value=word) | nodes.Number(value=word))):
                for key in _keys(of, numbers):
                    words.setdefault(key, []).append(word)
            case (
                nodes.Dim(name=str(dim), range=nodes.Among(items=items))
                | nodes.Dimension(name=str(dim), range=nodes.Among(items=items))
            ):
                for one in items:
                    asked = numbers.get(one.path, one) if isinstance(one, nodes.Name) else one
                    if isinstance(asked, nodes.Function) and asked.name == "where":
                        for key in _keys(asked.args[0], numbers):
                            found.setdefault(key, ConfigList(key, dim, is_flag=len(asked.args) == 1))
    names = {key: tuple(n for n, value in numbers.items() if value == nodes.Name(f"config.{key}")) for key in found}
    return tuple(
        evolve(one, words=tuple(dict.fromkeys(words.get(key, ()))), names=names[key]) for key, one in found.items()
    )


def _keys(expr: nodes.Expr, numbers: Mapping[str, nodes.Expr]) -> Iterator[str]:
    """Keys of the config in an expression, also by other names."""
    for name in (n for n in walk(expr) if isinstance(n, nodes.Name)):
        head, _, rest = name.path.partition(".")
        other = numbers.get(name.path) or numbers.get(head)
        if name.path.startswith("config."):
            yield name.path.removeprefix("config.")
        elif isinstance(other, nodes.Name) and other.path.startswith("config."):
            yield other.path.removeprefix("config.") + (f".{rest}" if name.path not in numbers else "")


def lets_of(library: Library) -> list[nodes.Binding]:
    """The numbers that files define outside of models and layouts."""
    statements = (s for file in library.files.values() for s in file.statements)
    return [b for s in statements if isinstance(s, nodes.Let) for b in s.bindings]


def probed(model: nodes.Model, sizes: Mapping[str, Value], config: Config) -> Layout | None:
    """The model's tensors and sizes, or None if it cannot be resolved.

    The error is reported when the layout itself is resolved.
    """
    try:
        return resolve(_probe(), nodes.Call("probe"), model=model, config=config, define_sizes=dict(sizes))
    except UcplError:
        return None


@cache
def _probe() -> Library:
    return load(("<probe>", "ucpl 2\nlayout probe() of any {\n  file weights = none\n  * = ...\n}\n"))


def _configured(path: str, config: Config) -> object:
    value: object = config
    for step in path.split(".")[1:]:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def absent(expr: nodes.Expr, config: Config) -> bool:
    """True if an expression needs an absent config key, outside `default`."""
    match expr:
        case nodes.Name(path=path) if path.startswith("config."):
            return _configured(path, config) is None
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
    """True if an expression needs an absent config and is no list."""
    lists = any(isinstance(n, nodes.List) or (isinstance(n, nodes.Function) and n.name == "where") for n in walk(expr))
    return absent(expr, config) and not lists


def _is_stated(expr: nodes.Expr) -> bool:
    """True for a number or a config's value, false for computed dims."""
    names = [n.path for n in walk(expr) if isinstance(n, nodes.Name)]
    return isinstance(expr, nodes.Number) or bool(names and all(n.startswith("config.") for n in names))


def _open_dims(model: nodes.Model, layouts: Sequence[nodes.Layout], known: Collection[str]) -> tuple[str, ...]:
    """Dims of tensors that no statement gives a size.

    A digit of an `index` gets its size from the others.
    """
    statements = [*model.items, *(item for layout in layouts for item in layout.items)]
    said = {b.name for s in statements if isinstance(s, nodes.Let | nodes.Dims) for b in s.bindings}
    said |= {p.name for layout in layouts for p in layout.parameters}
    for rule in statements:
        if isinstance(rule, nodes.Index):
            said |= {d.name for d in walk(rule.axis) if isinstance(d, nodes.Dim) and d.name != rule.name}
    named = (d.name for t in model.items if isinstance(t, nodes.Tensor) for d in t.dims if d.name is not None)
    return tuple(name for name in dict.fromkeys(named) if name not in said and name not in known)


def _exact(*roots: nodes.Model | nodes.Layout) -> dict[str, int]:
    """Sizes of dims that lists of the texts determine.

    The lists are sizes by another dim, and sizes of a cut's pieces.
    """
    found: dict[str, int] = {}
    for node in walk(*roots):
        match node:
            case nodes.Binding(value=nodes.List(items=items), by=str(name)):
                found[name] = len(items)
            case nodes.Cut(axis=nodes.Dim(name=name, range=None), splits=(nodes.Split(sizes=sizes),)):
                given = [size.value for size in sizes if isinstance(size, nodes.Number)]
                if given and len(given) == len(sizes):
                    found[name] = sum(given)
    return found


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
    """The least sizes of a dim for a range or an index.

    The range or index is inside the dim, and no part is empty.
    """
    match item:
        case nodes.Range(start=start, stop=stop):
            yield from (e.value + 1 for e in (start, stop) if isinstance(e, nodes.Number) and e.value > 0)
        case nodes.Number(value=value):
            yield value + 1
