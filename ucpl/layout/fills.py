"""`fill` lines, closed: values for elements that the source lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NoReturn

from ucpl.errors import fail
from ucpl.language import nodes, print_expr, worded
from ucpl.language.printer import print_item
from ucpl.layout.brackets import chosen, compact, runs_in
from ucpl.layout.by_index import of_sizes, whole_dim
from ucpl.layout.globs import literals, matches
from ucpl.layout.layout import Box, Filling, LogicalState, LogicalTensor
from ucpl.layout.models import ModelGroups, unknown_tensor
from ucpl.layout.name_remedies import nearest
from ucpl.layout.scope import Scope, at
from ucpl.records import define

__all__ = ["COUNTED", "PARAMETER", "fillings_of", "with_filled_states"]

PARAMETER = (
    "weight",
    "fp32",
    "master",
    "param",
)  # the parameter itself: its weight, and its master by the names it has
COUNTED = frozenset({"step"})  # one number a parameter, in every optimizer
BOXES_MAX = 1 << 12  # separate parts of one tensor that a line may speak of
_NOT_FINITE = ("nan", "inf", "infinity")
_CLASSES = {"parameter": ("trainable", "parameter"), "frozen": ("frozen", "parameter"), "buffer": ("buffer",)}


@define
class _Model:
    """Names against which lines are closed."""

    scope: Scope
    tensors: dict[str, LogicalTensor]
    aliases: dict[str, str]
    states: tuple[LogicalState, ...]
    groups: ModelGroups
    itself: frozenset[str]  # states that are the parameter


def fillings_of(
    items: Iterable[nodes.LayoutItem],
    scope: Scope,
    model: tuple[dict[str, LogicalTensor], dict[str, str], tuple[LogicalState, ...], ModelGroups],
    derived: Iterable[str],
) -> tuple[Filling, ...]:
    """Fillings of a layout.

    `model`: tensors, second names, states, groups. `derived`: states that are made of each other. Raises E137, E326.
    """
    said = [i for i in items if isinstance(i, nodes.Fill | nodes.FillStates) and scope.holds(i.when)]
    known = _Model(scope, *model, frozenset({*PARAMETER, *derived}))
    return tuple(_tensors(i, known) if isinstance(i, nodes.Fill) else _states(i, known) for i in said)


def with_filled_states(
    items: Iterable[nodes.LayoutItem], model_items: Sequence[nodes.ModelItem], scope: Scope
) -> list[nodes.ModelItem]:
    """Model of a layout of any model, with filled states.

    They are states that the model lacks and the layout fills: f32, of all trained parameters.
    """
    held = {name for i in model_items if isinstance(i, nodes.State) for name in i.names}
    lines = [i for i in items if isinstance(i, nodes.FillStates) and i.names and scope.holds(i.when)]
    new = [n for i in lines if not _is_weight(i.value) for n in i.names or () if n not in held and n not in PARAMETER]
    made = [nodes.State((name,), "f32", name in COUNTED, None) for name in dict.fromkeys(new)]
    return [*model_items, *made]


# ---- lines of tensors --------------------------------------------------------------------------------------------------


def _tensors(item: nodes.Fill, known: _Model) -> Filling:
    names, rank = _spoken(item, known)
    if item.of is not None and item.path != "*" and not item.glob:
        said = worded(item.span, f"of {item.of}", f"is {item.of}")
        _refuse(item, f"`{item.path}` is one tensor, and `{said}` selects some of many", f"take `{said}` out")
    boxes: dict[str, tuple[Box, ...]] = {}
    if item.indices:
        if item.path == "*" or item.glob:
            _refuse(
                item, "dims in brackets belong to one tensor", "write a line for each tensor that is filled in part"
            )
        boxes = {name: _boxes(item, known.tensors[name], known.scope) for name in names}
        rank = (rank[0] + 1, *rank[1:])
    value = _value(item, known)
    return Filling(print_item(item), rank, names, boxes, None, value, item.span)


def _spoken(item: nodes.Fill, known: _Model) -> tuple[frozenset[str], tuple[int, ...]]:
    """Tensors of a line, and its rank.

    The order is: by name, by a glob's characters, by class.
    """
    classed = 0 if item.of is None else 1 if item.of == "parameter" else 2
    if item.path != "*" and not item.glob:
        found = of_sizes([known.aliases.get(item.path, item.path)], known.tensors) & known.tensors.keys()
        if not found:
            is_state = item.path in (s.name for s in known.states)
            remedy = f"write: fill state {item.path} = {print_expr(item.value)}" if is_state else ""
            unknown_tensor(item.path, known.tensors, item.span, remedy)
        return frozenset(found), (2, 0, 0)
    names = (
        path
        for path, t in known.tensors.items()
        if (item.of is None or item.of in _CLASSES[t.kind]) and (not item.glob or matches(item.glob, path))
    )
    return frozenset(names), (1 if item.glob else 0, literals(item.glob), classed)


def _boxes(item: nodes.Fill, tensor: LogicalTensor, scope: Scope) -> tuple[Box, ...]:
    """Positions of the brackets, as boxes.

    A dim without brackets is covered completely.
    """
    left = list(range(len(tensor.dims)))
    runs: list[list[tuple[int, int]]] = [[(0, count)] for count in tensor.counts]
    for axis in item.indices:
        among = axis.range if isinstance(axis, nodes.Dim | nodes.Any_) else None
        if not isinstance(axis, nodes.Dim | nodes.Any_):
            _refuse(item, "in the brackets of a fill stand dims and parts of dims", "as in fill w[l[4..], h[..8]] = 0")
        named = [d for d in left if isinstance(axis, nodes.Any_) or whole_dim(tensor.dims[d]) == axis.name]
        if not named:
            name = axis.name if isinstance(axis, nodes.Dim) else "_"
            dims = " ".join("_" if "#" in d else whole_dim(d) for d in tensor.dims)
            _refuse(item, f"`{tensor.path}` has no dim `{name}` left", f"its dims: {dims or 'none'}")
        d = named[0]
        left.remove(d)
        if among is not None:
            name = tensor.dims[d]
            wanted = set(chosen(among, whole_dim(name), scope.size(name, item.span), scope))
            runs[d] = list(runs_in(compact([p for p, i in enumerate(tensor.indices[d]) if i in wanted])))
    if math.prod(map(len, runs)) > BOXES_MAX:
        _refuse(item, f"more than {BOXES_MAX} separate parts of `{tensor.path}`", "write ranges: w[l[4..]]")
    corners = (tuple(zip(*box, strict=True)) for box in product(*runs))
    return tuple((low, high) for low, high in corners)


# ---- lines of states ---------------------------------------------------------------------------------------------------


def _states(item: nodes.FillStates, known: _Model) -> Filling:
    kept = {s.name for s in known.states if not s.scalar}
    names = frozenset(item.names or kept - known.itself)
    for name in names:
        _check_state(item, name, known, kept)
    groups = dict(known.groups)
    for name in item.groups or ():
        if name != "*" and name not in groups:
            close = nearest(name, groups)
            fail(
                "E157",
                f"no group is called `{name}`",
                at(item.span),
                remedy=f"did you mean `{close}`?" if close else "",
            )
    trained = [path for path, t in known.tensors.items() if t.kind == "parameter"]
    named = item.groups is not None and item.groups != ("*",)
    of = [m for g in item.groups or () for m in groups[g]] if named else trained
    value = None if _is_weight(item.value) else _value(item, known)
    rank = (int(named), int(item.names is not None), 0)
    return Filling(print_item(item), rank, frozenset(of), {}, names, value, item.span)


def _check_state(item: nodes.FillStates, name: str, known: _Model, kept: set[str]) -> None:
    """Check that the model has the state and the value fits.

    A master can be the weight, other states a number.
    """
    from_weight = _is_weight(item.value)
    if name in known.itself and name != "weight" and from_weight:
        return
    if name in known.itself:
        remedy = f"for the parameter itself: fill NAME = {print_expr(item.value)}"
        if name != "weight":
            remedy = f"where the source has the weight: fill state {name} = weight; {remedy}"
        _refuse(item, f"`{name}` is the parameter itself, not a state of it", remedy)
    if any(s.name == name and s.scalar for s in known.states) and not from_weight:
        return
    if name not in kept:
        close = nearest(name, kept)
        _refuse(
            item,
            f"the model has no state `{name}`",
            f"did you mean `{close}`?" if close else f"write `state {name} : f32` in the model",
        )
    if from_weight:
        _refuse(item, f"`{name}` is no copy of the weight", f"write a number: fill state {name} = 0")


# ---- values ------------------------------------------------------------------------------------------------------------


def _is_weight(value: nodes.Expr) -> bool:
    return isinstance(value, nodes.Name) and value.path == "weight"


def _value(item: nodes.Fill | nodes.FillStates, known: _Model) -> float:
    """A whole number, or a quoted one with a point."""
    scope = known.scope
    named = item.value.operand if isinstance(item.value, nodes.Unary) else item.value
    if isinstance(named, nodes.Name) and not scope.knows(named.path):
        _check_no_other(item, named.path, known)
    if isinstance(item.value, nodes.Name) and item.value.path in ("none", "None", "null"):
        _refuse(
            item, f"`{item.value.path}` is no number", "take the line out: without a fill, the value is the source's"
        )
    value = scope.evaluate(item.value)
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    if not isinstance(value, int):
        _refuse(
            item,
            f"`{print_expr(item.value)}` is no number",
            'write a number, in quotes if it is no integer: fill gate = "0.5"',
        )
    return float(value)


def _check_no_other(item: nodes.Fill | nodes.FillStates, name: str, known: _Model) -> None:
    """Check that a word in the place of a number names nothing.

    Raises: UcplError E326.
    """
    line = print_expr(item.value)
    if name.lower() in _NOT_FINITE:
        _refuse(item, f"`{line}` is no finite number", 'a fill is finite: write 0, or a number in quotes, as in "0.5"')
    states = {s.name for s in known.states} | known.itself
    if name in known.tensors or name in known.aliases or name in states:
        kind = "state" if name in states else "tensor"
        _refuse(
            item,
            f"`{name}` is a {kind}, and a fill is one number for all elements",
            "write a number, as in fill w = 0; a tensor that the source has by another name is no fill: its layout gives it the"
            " name here; masters alone are made of weights, as in fill state fp32 = weight",
        )


def _refuse(item: nodes.Fill | nodes.FillStates, what: str, remedy: str) -> NoReturn:
    fail("E326", what, at(item.span), remedy=remedy)
