"""One body of statements over another: `extends` of layouts and models."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from attrs import evolve

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.layout.name_remedies import nearest
from ucpl.layout.scope import at

__all__ = ["each_state", "fresh", "left_side", "overlay", "without_gone"]

Item = TypeVar("Item", bound=nodes.Record)


def overlay(base: list[Item], body: list[Item]) -> list[Item]:
    """Replace statements with the same left side in place.

    Others stay, and new ones come last.
    """
    mine: dict[Hashable, list[Item]] = {}
    for item in body:
        mine.setdefault(left_side(item), []).append(item)
    known: dict[Hashable, list[Item]] = {}
    for item in base:
        known.setdefault(left_side(item), []).append(item)
    out: list[Item] = []
    placed: set[Hashable] = set()
    for item in base:
        side = left_side(item)
        if side not in mine:
            out.append(item)
        elif side not in placed:
            placed.add(side)
            out += _with_key(known[side], mine[side])
    return without_gone(base, out + [item for item in body if left_side(item) not in known])


def _with_key(base: list[Item], items: list[Item]) -> list[Item]:
    """Lines of an entry, with the keys of replaced lines.

    Lines with a key keep theirs. Several replaced lines are homes of one tensor: they have no one key to take.
    """
    keys = [c for one in base if isinstance(one, nodes.Entry) for c in one.clauses if c.word == "as"]
    if len(base) != 1 or len(keys) != 1:
        return items
    return [
        evolve(one, clauses=(*one.clauses, keys[0]))
        if isinstance(one, nodes.Entry) and one.shape is not None and all(c.word != "as" for c in one.clauses)
        else one
        for one in items
    ]


def fresh(base: Iterable[Item], body: Iterable[Item]) -> list[Item]:
    """Statements of a body whose left side the base does not have."""
    known = {left_side(item) for item in base}
    return [item for item in body if left_side(item) not in known]


def without_gone(base: Iterable[nodes.Record], items: Iterable[Item]) -> list[Item]:
    """Statements without those that `none` removes, and the removing ones.

    Raises E139 if the base has no such statement.
    """
    known = {left_side(item): item for item in base}
    out: list[Item] = []
    for item in items:
        if not isinstance(item, nodes.Gone):
            out.append(item)
        elif left_side(item) not in known:
            names = [side[1] for side in known if isinstance(side, tuple) and side[0] == _KIND[item.kind]]
            close = nearest(item.names[0], [n for n in names if isinstance(n, str)])
            fail(
                "E139",
                f"there is no {item.kind} `{item.names[0]}` that could be taken back",
                at(item.span),
                remedy=f"did you mean `{close}`?" if close else "take the line out: nothing that is extended says it",
            )
    return out


def each_state(items: Iterable[nodes.ModelItem]) -> list[nodes.ModelItem]:
    """Items of a model with one statement a state.

    So one of several on a line can be replaced.
    """
    out: list[nodes.ModelItem] = []
    for item in items:
        if isinstance(item, nodes.State) or (isinstance(item, nodes.Gone) and item.kind == "state"):
            out += [evolve(item, names=(name,)) for name in item.names]
        else:
            out.append(item)
    return out


_KIND = {"tensor": "tensor", "alias": "tensor", "state": "kept", "group": "Group"}


def left_side(item: nodes.Record) -> Hashable:
    """Identity of a statement.

    Of two with one left side, that of the extending layout holds.
    """
    match item:
        case nodes.Entry():
            return "entry", item.path, item.of, item.glob
        case nodes.Group() | nodes.Blob() | nodes.Index() | nodes.Mesh() | nodes.Files():
            return type(item).__name__, item.name
        case nodes.Domain():
            return "domain", item.kind
        case nodes.Tensor() | nodes.Alias():
            return "tensor", item.path
        case nodes.State(names=(name,)):
            return "kept", name
        case nodes.Gone():
            return _KIND[item.kind], item.names[0]
        case nodes.DefaultDtype():
            return ("dtype",)
        case nodes.States():
            return "state", item.names, item.groups
        case nodes.Derive():
            return "derive", item.state
        case nodes.Fill():
            return "fill", item.path, item.of, item.glob, item.indices
        case nodes.FillStates():
            return "fill state", item.names, item.groups
        case nodes.Framework():
            return ("framework",)
        case nodes.Let() | nodes.Dims():
            return type(item).__name__, tuple(b.name for b in item.bindings)
    return id(item)
