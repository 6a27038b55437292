"""Patterns, meshes and index rules, closed: numbers instead of expressions."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import assert_never

from attrs import evolve

from ucpl.errors import fail
from ucpl.language import nodes, print_axis
from ucpl.language.walk import walk
from ucpl.layout import axes as ax
from ucpl.layout.brackets import chosen, runs_in
from ucpl.layout.layout import Entry, LogicalTensor, Mesh
from ucpl.layout.name_remedies import for_axis, for_name
from ucpl.layout.remedies import UnknownAxis
from ucpl.layout.scope import Scope, at

__all__ = [
    "axes_closed", "axis_closed", "check_flat", "check_indices", "check_no_flat", "dims_in", "index_rules",
    "meshes_of", "check_live", "reject_live",
]  # fmt: skip

RANK_LIMIT = 1 << 18
MULTIPLE_MAX = 1 << 40  # elements: of padding, grains and units; so that no sum of padded lengths leaves 64 bits
_MULTIPLES = f"give a whole number from 1 to {MULTIPLE_MAX:,}"


# ---- one axis --------------------------------------------------------------------------------------------------------


def axes_closed(axes: Iterable[nodes.Axis], scope: Scope, span: nodes.Span) -> tuple[ax.Axis, ...]:
    return tuple(axis_closed(a, scope, span) for a in axes)


def axis_closed(node: nodes.Axis, scope: Scope, span: nodes.Span) -> ax.Axis:
    """One axis. `span`: the statement's, for a pattern that no text wrote."""
    here = node.span if node.span.line else span
    match node:
        case nodes.Dim():
            return _ranged(node, scope, here)
        case nodes.Stack(terms=terms):
            return ax.Stack(tuple(ax.Term(t.label, axes_closed(t.axes, scope, here)) for t in terms))
        case nodes.Pad(axis=inner, multiple=multiple, kind=kind):
            n = scope.integer(multiple)
            if not 1 <= n <= MULTIPLE_MAX:
                fail("E145", f"pad to a multiple of {n}", at(here), remedy=_MULTIPLES)
            return ax.Pad(axis_closed(inner, scope, here), n, kind)
        case nodes.Trim(axis=inner):
            if isinstance(inner, nodes.Cut):
                fail(
                    "E146",
                    "trim the full tensor before it is cut: the end of one piece is not the end of the tensor",
                    at(here),
                    remedy=f"write {print_axis(evolve(inner, axis=nodes.Trim(inner.axis)))}; parts that are saved without"
                    " padding are x@chunk(dp, grain)",
                )
            if not any(
                isinstance(node, nodes.Pad | nodes.Each) for node in walk(inner)
            ):  # members of a buffer may be padded
                remedy = f"write {print_axis(inner)}, or pad it: trim(pad({print_axis(inner)}, 8))"
                fail("E190", f"`{print_axis(node)}` leaves padding out, and there is none", at(here), remedy=remedy)
            return ax.Trim(axis_closed(inner, scope, here))
        case nodes.Copies(count=count):
            n = scope.integer(count)
            if not 1 <= n <= MULTIPLE_MAX:
                fail("E145", f"{n} copies of each element", at(here), remedy=_MULTIPLES)
            return ax.Copies(n)
        case nodes.Flat(axis=inner):
            return ax.Flat(axis_closed(inner, scope, here))
        case nodes.Each():
            return ax.Each()
        case nodes.Cut(axis=inner, splits=splits):
            _check_order(inner, splits[0], scope, here)
            return ax.Cut(axis_closed(inner, scope, here), tuple(_split(s, scope, here) for s in splits))
        case nodes.Any_() | nodes.Rest():
            fail("E147", "`_` and `...` stand for the dims of one tensor, in an entry", at(here))
        case _:
            assert_never(node)


def _ranged(node: nodes.Dim, scope: Scope, span: nodes.Span) -> ax.Axis:
    """A dim, or some of its indices as runs of neighbours."""
    if not scope.knows(node.name):
        fail(
            "E169",
            f"no dim is called `{node.name}`",
            at(span),
            remedy=for_name(node.name, scope.names(), f"define it: `dim {node.name} = ...` in the model or here"),
        )
    size = scope.size(node.name, span)
    if node.range is None:
        return ax.Dim(node.name)
    match node.range:
        case nodes.Among(items=(nodes.Range(start=start, stop=stop, step=None),), others=False):
            low = 0 if start is None else scope.integer(start)
            high = size if stop is None else scope.integer(stop)
            if not 0 <= low <= high <= size:
                remedy = (
                    f"write `{node.name}[{size + low}..]`: bounds count from 0"
                    if -size <= low < 0 == high - size
                    else f"`{node.name}` is {size}: write `{node.name}[{low}..]`, or `{node.name}` for all of it"
                    if 0 <= low < size < high
                    else ""
                )
                fail("E161", f"{low}..{high} is no range of `{node.name}`, which is {size}", at(span), remedy=remedy)
            return ax.Dim(node.name) if (low, high) == (0, size) else ax.Dim(node.name, low, high)
    said = chosen(node.range, node.name, size, scope)
    runs = list(runs_in(said)) or [(0, 0)]
    if runs == [(0, size)]:
        return ax.Dim(node.name)  # entries with the same values in brackets are one loop body, however they say them
    found = [ax.Dim(node.name, *run) for run in runs]
    return found[0] if len(found) == 1 else ax.Stack(tuple(ax.Term(None, (run,)) for run in found))


def _check_order(inner: nodes.Axis, split: nodes.Split, scope: Scope, span: nodes.Span) -> None:
    """Check that a cut is of a dim over a mesh axis.

    The reverse is refused. Raises E148.
    """
    axes = scope.mesh_axes
    if isinstance(inner, nodes.Dim) and inner.name in axes and split.mesh_axis not in axes:
        fail(
            "E148",
            f"`{inner.name}` is a mesh axis, and `{split.mesh_axis}` none: the dim comes before the `@`",
            at(span),
            remedy=f"write {split.mesh_axis}@{inner.name}",
        )


def _split(split: nodes.Split, scope: Scope, span: nodes.Span) -> ax.Split:
    place = split.span if split.span.line else span
    if not scope.knows(split.mesh_axis):
        fail(
            "E148",
            f"`@{split.mesh_axis}` cuts over a mesh axis that there is not",
            at(place),
            remedy=for_axis(split.mesh_axis, scope.mesh_axes),
            about=UnknownAxis(split.mesh_axis),
        )
    sizes: list[int] = []
    for expr in split.sizes:
        value = scope.evaluate(expr)
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, int) or one < 0:
                remedy = "the sizes of the pieces are whole numbers from 0, and together they are the dim: @tp[19, 18]"
                fail("E104", f"{one!r} is no size of a piece", at(place), remedy=remedy)
            sizes.append(one)
    grain = 1 if split.grain is None else scope.integer(split.grain)
    if not 1 <= grain <= MULTIPLE_MAX:
        fail("E145", f"a grain of {grain}", at(place), remedy=_MULTIPLES)
    return ax.Split(split.mesh_axis, split.kind, tuple(sizes), grain)


def check_no_flat(axes: Iterable[nodes.Axis], span: nodes.Span) -> None:
    """Refuse `flat` and `each` outside of groups.

    They are refused for one tensor, or for an index.
    """
    for node in walk(*axes):
        if isinstance(node, nodes.Flat | nodes.Each):
            word = "each" if isinstance(node, nodes.Each) else "flat(...)"
            fail(
                "E158",
                f"`{word}` means tensors of a group, and here one tensor or an index is meant",
                at(node.span if node.span.line else span),
                remedy="write it in a state line: state * = flat(each)",
            )


def check_indices(axes: Iterable[nodes.Axis], span: nodes.Span) -> None:
    """Check that brackets have dims and parts of them, each dim once.

    The brackets are an entry's or a group's. Raises E138, E133.
    """
    seen: set[str] = set()
    for node in walk(*axes):
        place = at(node.span if isinstance(node, nodes.Dim | nodes.Cut) and node.span.line else span)
        if isinstance(node, nodes.Cut | nodes.Pad | nodes.Trim | nodes.Copies):
            said = print_axis(node)
            dim = next((n.name for n in walk(node) if isinstance(n, nodes.Dim)), "l")
            dealt = said if isinstance(node, nodes.Cut) and isinstance(node.axis, nodes.Dim) else f"{dim}@pp"
            fail(
                "E138",
                f"`{said}` is no index: brackets have a dim, and perhaps some of its indices",
                place,
                remedy=f"how an index is dealt to ranks is a line of its own, `index {dim} = {dealt}`; here write [{dim}]",
            )
        if isinstance(node, nodes.Dim) and node.range is None:
            if node.name in seen:
                remedy = f"write `{node.name}` once"
                fail("E133", f"the index `{node.name}` is twice in the brackets", place, remedy=remedy)
            seen.add(node.name)


def check_flat(axis: nodes.Axis, span: nodes.Span) -> None:
    """One axis of a state line, over the tensors of a group.

    `each` is in it, and nothing else.
    """
    flats = [n for n in walk(axis) if isinstance(n, nodes.Flat)]
    eaches = [n for n in walk(axis) if isinstance(n, nodes.Each)]
    inside = [[n for n in walk(flat.axis) if isinstance(n, nodes.Each)] for flat in flats]
    odd = next((n for n in walk(axis) if isinstance(n, nodes.Dim | nodes.Any_ | nodes.Rest | nodes.Copies)), None)
    if odd is None and flats and all(len(e) == 1 for e in inside) and len(eaches) == len(flats):
        return
    place = odd.span if odd is not None and odd.span.line else span
    fail("E158", "a state line stores flat(each), padded and cut, and no dims by name or copies", at(place))


def dims_in(axes: Iterable[nodes.Axis]) -> list[str]:
    """Names of dims in patterns as they are written."""
    return [node.name for node in walk(*axes) if isinstance(node, nodes.Dim)]


# ---- ranks and indices -----------------------------------------------------------------------------------------------


def meshes_of(items: Iterable[nodes.LayoutItem], scope: Scope) -> tuple[Mesh, ...]:
    """The meshes; all of them number the same ranks."""
    said = [i for i in items if isinstance(i, nodes.Mesh)]
    found: list[Mesh] = []
    for item in said:
        for axis in item.axes:
            if not scope.knows(axis):
                fail(
                    "E101",
                    f"mesh axis `{axis}` has no size",
                    at(item.span),
                    remedy=for_name(
                        axis,
                        scope.given,
                        f"make it a parameter of the layout, or write `let {axis} = 2`",
                    ),
                    about=UnknownAxis(axis, is_of_mesh=True),
                )
        degrees = [scope.size(axis, item.span) for axis in item.axes]
        for axis, degree in zip(item.axes, degrees, strict=True):
            if degree < 1:
                fail("E140", f"mesh axis `{axis}` is {degree}", *scope.labels_at(axis, at(item.span)))
        found.append(Mesh(item.name, item.axes, tuple(degrees)))
        total, first = prod(degrees), prod(found[0].degrees)
        if total > RANK_LIMIT:
            fail("E141", f"a mesh of {total:,} ranks, and {RANK_LIMIT:,} are the limit", at(item.span))
        if total != first:
            lacking = [axis for axis in item.axes if axis not in found[0].axes]
            fail(
                "E142",
                f"mesh `{item.name or ' '.join(item.axes)}` has {total} ranks, the first mesh {first}",
                at(item.span, " x ".join(map(str, degrees))),
                at(said[0].span, " x ".join(map(str, found[0].degrees))),
                remedy=f"the axes of a layout that is used are axes here, too: mesh {' '.join((*found[0].axes, *lacking))}"
                if not item.name and lacking
                else "",
            )
    return tuple(found)


def index_rules(items: Iterable[nodes.Record], scope: Scope) -> dict[str, ax.Axis]:
    """`index` statements by name.

    A digit that has no size gets one first: slot = l / (vp * pp).
    """
    rules: dict[str, nodes.Index] = {}
    for item in items:
        if isinstance(item, nodes.Index) and scope.holds(item.when):
            before = rules.get(item.name)
            if before is not None and (before.when is not None or item.when is not None):
                fail(
                    "E150",
                    f"two rules for the index `{item.name}` hold at once",
                    at(item.span, "this one"),
                    at(before.span, "and this one"),
                )
            rules[item.name] = item  # a layout's own rule wins over the model's
    for item in rules.values():
        check_no_flat([item.axis], item.span)
        _check_no_copies(item)
        reject_live([item.axis], item.span, "an index")
    for name, item in rules.items():
        digits = _digits(item.axis)
        if not digits:
            axis_closed(item.axis, scope, item.span)  # reports an error in it, unless it is a sum
        twice = next((d for d in digits if digits.count(d) > 1), None)
        if twice is not None:
            fail(
                "E133",
                f"the index `{name}` has the digit `{twice}` twice",
                at(item.span),
                remedy=f"each digit has a name of its own, as in `index {name} = (lap stage slot)`",
            )
        if digits != [name]:
            _infer_digit(item, digits, scope)
    closed = {name: axis_closed(item.axis, scope, item.span) for name, item in rules.items()}
    for name, item in rules.items():
        _reject_circle(name, closed, item.span, (name,))
    return closed


def _check_no_copies(item: nodes.Index) -> None:
    """Refuse copies of the values of an index. Raises E138."""
    for node in walk(item.axis):
        if isinstance(node, nodes.Copies):
            fail(
                "E138",
                f"`{print_axis(node)}` repeats values of the index `{item.name}`, and each has one place",
                at(node.span if node.span.line else item.span),
                remedy="ranks with equal layers need no word: name no mesh axis that distinguishes them;"
                " copies inside one stored tensor are in an entry's pattern, (g copies(2) d)",
            )


def _reject_circle(name: str, rules: dict[str, ax.Axis], span: nodes.Span, chain: tuple[str, ...]) -> None:
    digits = ax.digits_of(rules[name]) if name in rules else ()
    for digit in digits if digits != (name,) else ():
        if digit in chain:
            shown = " -> ".join([*chain, digit])
            fail("E167", f"the digits of `{chain[0]}` lead back to `{digit}`: {shown}", at(span))
        _reject_circle(digit, rules, span, (*chain, digit))


def _infer_digit(item: nodes.Index, digits: list[str], scope: Scope) -> None:
    unknown = [d for d in digits if not scope.knows(d)]
    if len(unknown) > 1:
        fail(
            "E143",
            f"sizes of digits {', '.join(unknown)} are unknown; one may be",
            at(item.span),
            remedy=f"give the others, as in `dim {unknown[0]} = 2`: the last one is the rest of `{item.name}`",
        )
    if len(digits) == 1 and (unknown == digits or digits[0] in scope.mesh_axes):
        run = next((a for a in scope.mesh_axes if digits[0] in (f"{item.name}{a}", a)), None)
        remedy = (
            f"did you mean `{item.name}@{run}`?"
            if run
            else f"an index is cut, as in `index {item.name} = {item.name}@pp`"
        )
        fail(
            "E169",
            f"`{digits[0]}` is no dim, and `{item.name}` has no other digits",
            at(item.span),
            remedy=remedy,
        )
    known = prod(scope.size(d, item.span) for d in digits if d not in unknown)
    whole = scope.size(item.name, item.span)
    if not unknown:
        if known != whole:
            fail("E144", f"the digits of `{item.name}` multiply to {known}, and {item.name} is {whole}", at(item.span))
        return
    if known == 0 or whole % known:
        fail("E108", f"{item.name} = {whole} does not divide by {known}, the product of its digits", at(item.span))
    scope.given[unknown[0]] = whole // known


def _digits(axis: nodes.Axis) -> list[str]:
    """Names of an index's digits, major first; none for a sum."""
    match axis:
        case nodes.Dim(name=name):
            return [name]
        case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner):
            return _digits(inner)
        case nodes.Stack(terms=(term,)):
            return [d for inner in term.axes for d in _digits(inner)]
        case _:
            return []


# ---- live rows -------------------------------------------------------------------------------------------------------


def check_live(entry: Entry, tensors: dict[str, LogicalTensor]) -> None:
    """Check that live rows are rows of one complete dim.

    It is a dim of the entry's tensor, and the pattern names all of it. Raises E196.
    """
    owned = {dim for path in entry.targets.values() for dim in tensors[path].dims}
    for pad in _live(*entry.shape):
        inner = pad.axis
        if not isinstance(inner, ax.Dim) or (inner.low, inner.high) != (0, None) or inner.name not in owned:
            fail(
                "E196",
                f"`{entry.path}` pads with live rows, but not a complete dim of its tensor",
                at(entry.span),
                remedy="pad the dim itself, and cut and multiply behind it, as in pad(v, 128, live)@tp h;"
                " or say that nothing is there, pad(..., 128)",
            )
    several = _together(entry.shape)
    if len(several) > 1:
        fail(
            "E196",
            f"`{entry.path}` has live rows of several dims: {' and '.join(several)}",
            at(entry.span),
            remedy="say `live` of the dim whose further rows training changes, and pad the other one with zeros",
        )


def reject_live(axes: Iterable[nodes.Axis], span: nodes.Span, what: str) -> None:
    """Refuse live rows in a place without a padded tensor.

    Training changes nothing there. Raises E196.
    """
    for node in walk(*axes):
        if isinstance(node, nodes.Pad) and node.kind == "live":
            fail(
                "E196",
                f"`{print_axis(node)}`: {what} has no rows that training changes",
                at(node.span if node.span.line else span),
                remedy="say `live` in the tensor's own entry, as in w = pad(v, 128, live) h; here take the word out",
            )


def _live(*axes: ax.Axis) -> list[ax.Pad]:
    return [node for node in ax.walk(*axes) if isinstance(node, ax.Pad) and node.kind == "live"]


def _together(axes: Iterable[ax.Axis]) -> list[str]:
    """Adjacent dims with live rows, in axes or in a product.

    Of a sum, those of the term with the most.
    """
    found: list[str] = []
    for axis in axes:
        match axis:
            case ax.Stack(terms=terms):
                each = sorted((_together(term.axes) for term in terms), key=len)
                found += each[-1] if each else []
            case ax.Pad(axis=ax.Dim(name=name), kind="live"):
                found.append(name)
            case _:
                found += _together(ax.children(axis))
    return found
