"""A layout inside another (`use vision(tp = tp) as eye`): its numbers are its own, and the ranks are those that are here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve

from ucpl.errors import fail
from ucpl.layout.library import Link
from ucpl.layout.scope import Scope, Value, at, literal
from ucpl.syntax import nodes

__all__ = ["axes_here", "axes_in", "demand_axes", "demand_groups", "given_within", "numbers_within", "on_these_ranks"]

Origins = dict[str, tuple[Value, str]]


def axes_in(links: Sequence[Link[nodes.Layout]]) -> frozenset[str]:
    """The axes of all meshes of a layout and of those that it extends."""
    return frozenset(a for link in links for i in link.node.items if isinstance(i, nodes.Mesh) for a in i.axes)


def given_within(
    links: Sequence[Link[nodes.Layout]], use: nodes.Use, here: Scope, axes: Iterable[str]
) -> dict[str, Value]:
    """What is given (`-D eye.h=4`) to names of the layout that is used, by their names in it; and `axes` that are here."""
    head = f"{use.name}."
    parameters = {p.name for link in links for p in link.node.parameters}  # they are what the call says
    found = {name: here.given[name] for name in axes if name in here.given}
    found |= {name.removeprefix(head): value for name, value in here.given.items() if name.startswith(head)}
    return {name: value for name, value in found.items() if name not in parameters}


def axes_here(layout: nodes.Layout, axes: frozenset[str], here: Scope) -> Origins:
    """Parameters that are axes which are here, too: what the call leaves open is as it is here, whatever the default."""
    known = [p for p in layout.parameters if p.name in axes and here.knows(p.name)]
    return {p.name: (here.size(p.name, p.span), "the mesh") for p in known}


def demand_axes(links: Sequence[Link[nodes.Layout]], call: nodes.Call, inside: Scope, here: Scope) -> None:
    """Raises: UcplError E125 where a parameter of the layout, or of one that it extends, is another number of ranks."""
    axes = axes_in(links)
    for p in (p for link in links for p in link.node.parameters):
        if p.name in axes and here.knows(p.name) and here.size(p.name, call.span) != inside.given[p.name]:
            fail(
                "E125",
                f"`{p.name}` is {here.size(p.name)} here and {inside.given[p.name]} in `{call.name}`, which is used here",
                at(call.span),
                at(p.span),
                remedy=f"ranks are shared: write {p.name} = {p.name}, or give the axis another name",
            )


def numbers_within(links: Sequence[Link[nodes.Layout]], inside: Scope, here: Scope) -> list[nodes.Record]:
    """The numbers of the files, and the values of all parameters, as `let`. An axis that is here has its value here."""
    out: list[nodes.Record] = [s for link in reversed(links) for s in link.file.statements if isinstance(s, nodes.Let)]
    shared = {a for a in axes_in(links) if here.knows(a)}
    parameters = {p.name: p for link in links for p in link.node.parameters}
    for name, p in parameters.items():
        if name not in shared:
            out.append(nodes.Let((nodes.Binding(name, _written(inside.given[name]), span=p.span),), span=p.span))
    return out


def _written(value: Value) -> nodes.Expr:
    """A value as it is written; a key that the config lacks stays one, so that `default` and `not` know it."""
    return nodes.Name("config.") if value is None else literal(value)


def on_these_ranks(
    links: Sequence[Link[nodes.Layout]], items: Iterable[nodes.Record], here: Scope
) -> list[nodes.Record]:
    """Statements without what they say of axes that are here, which must be the same; and without numbers that a
    parameter of the same name gives."""
    shared = {a for a in axes_in(links) if here.knows(a)}
    taken = shared | {p.name for link in links for p in link.node.parameters}
    out: list[nodes.Record] = []
    for item in items:
        if not isinstance(item, nodes.Let | nodes.Dims):
            out.append(item)
            continue
        kept = tuple(b for b in item.bindings if b.name not in taken)
        if kept:
            out.append(evolve(item, bindings=kept))
        for b in item.bindings:
            if b.name in shared:
                out.append(nodes.Assert(nodes.Binary("==", nodes.Name(b.name), b.value), span=b.span))
    return out


def demand_groups(items: Iterable[nodes.Record]) -> None:
    """A state line of what is used is of groups of its own: `all` and `*` are of the whole model. Raises: UcplError E194."""
    rests = {i.name for i in items if isinstance(i, nodes.Group) and i.without is not None}
    for item in items:
        if isinstance(item, nodes.States) and item.shape is not None:
            of_all = item.groups is None or item.groups == ("*",)
            rest = next((g for g in item.groups or () if g in rests), None)
            if of_all or rest:
                fail(
                    "E194",
                    f"a state line of all that is trained{f', in `{rest}`,' if rest else ''} in a layout that is used",
                    at(item.span),
                    remedy="name its tensors, group own = w, b, and write `of own`;"
                    " or write the state line in the layout that uses this one",
                )
