"""Open sizes of a spec, from the shapes of a checkpoint.

An open `dim` has no value in a statement, -D or config. Every stored axis with one unknown dim is an equation: alone,
in a product, a sum or a part, cut evenly or not (the pieces of all ranks together). Each solution is used for the next
equation. A padded axis gives a range of sizes, and another axis has to determine the size. The values of a name's
template (`layers.{l}.weight`) give the number of indices. Every value is printed with its tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.files.checkpoint import Checkpoint
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout import Library
from ucpl.layout.arithmetic import NotWhole
from ucpl.layout.bases import placed
from ucpl.layout.scope import Scope, Value, at
from ucpl.layout.statements import called_model, items_of
from ucpl.records import define, frozen
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
    """Sizes of the open dims of the layout's model.

    Raises: UcplError E163 if two tensors disagree.
    """
    stored = [("/".join(map(str, key)), e.shape) for (_, key), e in checkpoint.extents.items()]
    return sizes_of_shapes(stored, library, call, config, given)


def sizes_of_shapes(
    stored: Sequence[tuple[str, tuple[int, ...]]],
    library: Library,
    call: nodes.Call,
    config: Mapping[str, Json] | None = None,
    given: Mapping[str, Value] | None = None,
) -> Found:
    """Sizes from keys with shapes, each as often as it is stored."""
    layout = library.layout(call.name).node
    assert isinstance(layout, nodes.Layout)
    if layout.of == "any":
        return {}
    model = called_model(library, nodes.Call(layout.of, layout.arguments), given)
    chain = [link.node for link in library.chain(call.name)]
    statements = [*model.items, *(i for one in chain for i in one.items)]
    bindings = {b.name: b.value for s in statements if isinstance(s, nodes.Let | nodes.Dims) for b in s.bindings}
    parameters = {p.name: p.default for one in reversed(chain) for p in one.parameters}
    names = {d.name for t in model.items if isinstance(t, nodes.Tensor) for d in t.dims if d.name is not None}
    open_names = names - bindings.keys() - parameters.keys() - (given or {}).keys()
    if not open_names:
        return {}
    scope = Scope(given=dict(given or {}), bindings=bindings, config=dict(config or {}))
    for one, parameter in zip(call.arguments, layout.parameters, strict=False):
        scope.given[one.name or parameter.name] = scope.evaluate(one.value)
    for derived, base in pairwise(chain):
        assert derived.extends is not None
        for name, argument in placed(base.parameters, derived.extends).items():
            scope.given.setdefault(name, scope.evaluate(argument.value))
    for name, default in parameters.items():
        if name not in scope.given and default is not None:
            scope.given[name] = scope.evaluate(default)
    own = {i.span for one in chain for i in one.items}  # not of a layout that is used
    lines = items_of(library, nodes.Call(call.name))
    entries = [i for i in lines if isinstance(i, nodes.Entry) and i.shape is not None and i.span in own]
    learner = _Learner(open_names, scope)
    for _ in range(_ROUNDS):
        before = len(learner.found)
        for entry in entries:
            learner.learn(entry, stored)
        scope.given.update({name: size for name, (size, _) in learner.found.items()})
        if len(learner.found) == before:
            break
    learner.check_ranges()
    return learner.found


@define
class _Learner:
    """Sizes from entries, one after another: each solution helps the next."""

    open_names: set[str]
    scope: Scope
    found: Found = field(factory=dict)
    ranges: dict[str, tuple[range, str, nodes.Entry]] = field(factory=dict)  # between which sizes an open dim is

    def learn(self, entry: nodes.Entry, stored: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        text = next((c.args[0] for c in entry.clauses if c.word == "as"), None)
        if text is None:
            return
        text = text.replace("{name}", entry.path)
        holes = [m[1] for m in _HOLE.finditer(text)]
        parts = _HOLE.split(text)[::2]
        pattern = re.compile("(?:^|/)" + "(.+?)".join(map(re.escape, parts)) + "$")
        counts: dict[str, tuple[int, str]] = {}
        shapes: dict[str, list[tuple[int, ...]]] = {}  # of each name, on all ranks
        for name, shape in stored:
            match = pattern.search(name)
            if match is None:
                continue
            for hole, value in zip(holes, match.groups(), strict=True):
                if hole in self.open_names and _NUMBER.fullmatch(value):
                    counts[hole] = max(counts.get(hole, (0, "")), (int(value) + 1, f"names like {name}"))
            if len(shape) == len(entry.shape or ()):
                shapes.setdefault(name, []).append(shape)
        for name, pieces in shapes.items():
            for i, axis in enumerate(entry.shape or ()):
                self.axis(axis, (name, [shape[i] for shape in pieces]), entry)
        for hole, said in counts.items():
            self.say(hole, said, entry)

    def axis(self, axis: nodes.Axis, stored: tuple[str, list[int]], entry: nodes.Entry) -> None:
        """Solve one stored axis, by its length on all ranks together."""

        name, lengths = stored
        ways = ways_of(axis, self.scope)
        total, origin = _total(axis, lengths, ways, name)
        length = length_of(axis, self.scope, ways) if ways is not None and total is not None else None
        if length is None or total is None or length.name not in self.open_names or not length.times:
            return
        if length.short:
            self.between(length.name, length.sizes(total), (origin, entry))
        elif (size := length.size(total)) is not None:
            self.say(length.name, (size, origin), entry)

    def between(self, name: str, sizes: range, said: tuple[str, nodes.Entry]) -> None:
        """Add an axis that leaves some sizes open."""
        was = self.ranges.get(name, (sizes, *said))[0]
        left = range(max(was.start, sizes.start), min(was.stop, sizes.stop))
        self.ranges[name] = (left, *said)
        if len(left) == 1:
            self.say(name, (left[0], said[0]), said[1])

    def check_ranges(self) -> None:
        """Stop for dims that only padded axes bound.

        Raises: UcplError E101.
        """
        for name, (left, origin, entry) in self.ranges.items():
            if name not in self.found and left:
                fail(
                    "E101",
                    f"dim `{name}` has no size: it is from {left[0]} to {left[-1]} by the padded {origin}",
                    at(entry.span, "padded here"),
                    remedy=f"give it, with -D {name}=... or `dim {name} = ...`: the begin of padding is unknown",
                )

    def say(self, name: str, said: tuple[int, str], entry: nodes.Entry) -> None:
        was = self.found.setdefault(name, said)
        if was[0] != said[0]:
            fail(
                "E163",
                f"dim `{name}` is {was[0]} by the {was[1]} and {said[0]} by the {said[1]}",
                at(entry.span, f"{said[0]}"),
                Label("<checkpoint>", f"{was[0]}", where=was[1]),
            )


def _total(axis: nodes.Axis, lengths: list[int], ways: int | None, name: str) -> tuple[int | None, str]:
    """The total length of an axis's pieces, and its origin, or None.

    None: pieces are missing.
    """
    cuts = [s for node in walk(axis) if isinstance(node, nodes.Cut) for s in node.splits]
    if ways is None:
        return None, ""
    if all(s.kind == "equal" for s in cuts):
        return (lengths[0] * ways if len(set(lengths)) == 1 else None), f"shape of {name}"
    whole, rest = divmod(sum(lengths) * ways, len(lengths))  # ranks that hold the same piece are as many for each
    return (whole if len(lengths) % ways == 0 and rest == 0 else None), f"shapes of {name} on all ranks"


def with_sizes(library: Library, model: str, found: Found) -> Library:
    """A library whose model has the sizes found."""
    if model == "any" or not found:
        return library
    known = library.model(model).node
    assert isinstance(known, nodes.Model)
    said = nodes.Dims(tuple(nodes.Binding(name, nodes.Number(size)) for name, (size, _) in found.items()))
    return library.with_model(evolve(known, items=(said, *known.items)))


def in_order(checkpoint: Checkpoint, library: Library, name: str) -> Library:
    """The library with a model's tensors in the checkpoint's order.

    It changes lines with braces alone. Such a line is a set: files sort `10` before `2`, and shards have any order.
    """
    known = library.known.get(name)
    if known is None or not isinstance(known.node, nodes.Model):
        return library
    tensors = [item for item in known.node.items if isinstance(item, nodes.Tensor)]
    if len({item.span for item in tensors}) == len(tensors):
        return library
    place = {tensor.name: n for n, tensor in enumerate(checkpoint.state.tensors)}
    if not all(item.path in place for item in tensors):
        return library
    ordered = iter(sorted(tensors, key=lambda item: place[item.path]))
    items = tuple(next(ordered) if isinstance(item, nodes.Tensor) else item for item in known.node.items)
    return library.with_model(evolve(known.node, items=items))


# ---- lengths with one unknown dim ------------------------------------------------------------------------------------


_UNKNOWN = ("E101", "E105")


@frozen
class Length:
    """`times` * x + `plus`, and less than `short` fewer if padded."""

    plus: int
    times: int = 0
    name: str | None = None  # x
    short: int = 0

    def size(self, total: int) -> int | None:
        """x of an axis of that length, or None."""
        size, rest = divmod(total - self.plus, self.times)
        return size if rest == 0 and size >= 0 else None

    def sizes(self, total: int) -> range:
        """All that x may be, where the axis is padded."""
        least, most = total - self.short + 1 - self.plus, total - self.plus
        return range(max(0, -(-least // self.times)), most // self.times + 1)


def number(scope: Scope, expr: nodes.Expr) -> int | None:
    """The value of an expression; None: unknown, or a list."""
    try:
        return scope.integer(expr)
    except UcplError as error:
        found = error.diagnostics[0]
        if found.code in _UNKNOWN or (isinstance(found.about, NotWhole) and isinstance(found.about.value, list)):
            return None
        raise


def ways_of(axis: nodes.Axis, scope: Scope) -> int | None:
    """The number of pieces of an axis over all mesh axes."""
    found = [number(scope, nodes.Name(a)) for a in sorted(_cutting(axis))]
    return None if None in found else prod(n for n in found if n is not None)


def _cutting(axis: nodes.Record) -> set[str]:
    return {s.mesh_axis for node in walk(axis) if isinstance(node, nodes.Cut) for s in node.splits}


def length_of(axis: nodes.Axis, scope: Scope, ways: int = 1) -> Length | None:
    """The total length of all pieces of an axis.

    ways: their number. None: they do not determine one dim.
    """
    match axis:
        case nodes.Dim():
            return _dim(axis, scope, ways)
        case nodes.Cut(axis=inner, splits=splits):
            own = prod(number(scope, nodes.Name(s.mesh_axis)) or 0 for s in splits)
            return length_of(inner, scope, ways // own) if own and ways % own == 0 else None
        case nodes.Pad(axis=inner, multiple=multiple):
            return _padded(length_of(inner, scope), number(scope, multiple), ways)
        case nodes.Trim(axis=inner):
            return length_of(inner.axis if isinstance(inner, nodes.Pad) else inner, scope, ways)
        case nodes.Copies(count=count):
            times = number(scope, count)
            return None if times is None else Length(times * ways)
        case nodes.Stack(terms=terms):
            return _sum([_product(term.axes, scope, ways) for term in terms])
    return None


def _dim(dim: nodes.Dim, scope: Scope, ways: int) -> Length | None:
    size = number(scope, nodes.Name(dim.name))
    if dim.range is None:
        return Length(0, ways, dim.name) if size is None else Length(size * ways)
    if dim.range.others or len(dim.range.items) != 1 or not isinstance(part := dim.range.items[0], nodes.Range):
        return None
    low = 0 if part.start is None else number(scope, part.start)
    high = size if part.stop is None else number(scope, part.stop)
    if low is None or part.step is not None:
        return None
    if part.stop is None and size is None:
        return Length(-low * ways, ways, dim.name)
    return None if high is None else Length((high - low) * ways)


def _padded(inner: Length | None, multiple: int | None, ways: int) -> Length | None:
    if inner is None or multiple is None or multiple < 1 or inner.short:
        return None
    if inner.name is None:
        return Length(-(-inner.plus // multiple) * multiple * ways)
    return Length(inner.plus, inner.times, inner.name, multiple) if ways == 1 else None


def _product(axes: tuple[nodes.Axis, ...], scope: Scope, ways: int) -> Length | None:
    """The length of a product of axes.

    A cut of one factor cuts the product, and no mesh axis cuts two of them.
    """
    cuts = [_cutting(axis) for axis in axes]
    if sum(map(len, cuts)) != len(set[str]().union(*cuts)):
        return None
    degrees = [ways_of(axis, scope) for axis in axes]
    own = prod(n or 0 for n in degrees)
    if not own or ways % own:
        return None
    lengths = [length_of(axis, scope, n or 1) for axis, n in zip(axes, degrees, strict=True)]
    open_ones = [n for n in lengths if n is not None and n.name is not None]
    if None in lengths or len(open_ones) > 1:
        return None
    rest = prod((n.plus for n in lengths if n is not None and n.name is None), start=ways // own)
    if not open_ones:
        return Length(rest)
    (x,) = open_ones
    if x.short and rest != 1:
        return None
    return Length(x.plus * rest, x.times * rest, x.name, x.short)


def _sum(terms: list[Length | None]) -> Length | None:
    known = [t for t in terms if t is not None]
    names = {t.name for t in known if t.name is not None}
    if len(known) != len(terms) or len(names) > 1 or (len(terms) > 1 and any(t.short for t in known)):
        return None
    short = known[0].short if len(known) == 1 else 0
    return Length(sum(t.plus for t in known), sum(t.times for t in known), next(iter(names), None), short)
