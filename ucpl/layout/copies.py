"""What the clauses of a statement say of copies on ranks: `sum @tp same @dp`, closed."""

from __future__ import annotations

from collections.abc import Iterable, Set

from ucpl.errors import fail
from ucpl.layout.axis_lines import UnknownAxis
from ucpl.layout.layout import Policy
from ucpl.layout.near import for_axis
from ucpl.layout.scope import at
from ucpl.records import frozen
from ucpl.syntax import nodes

__all__ = ["Copies", "copies_of"]


@frozen
class Copies:
    how: Policy = Policy.SAME  # how copies along `axes` are put together; same: there is nothing to put together
    axes: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()  # along these one is trusted


def copies_of(clauses: Iterable[nodes.Clause], mesh_axes: Set[str]) -> Copies:
    """What holds between copies that differ along each axis; `same` for all that no clause names. E148, E154."""
    said: dict[str, nodes.Clause] = {}
    for clause in (c for c in clauses if c.word == "copies"):
        for axis in clause.args[1]:
            _demand_axis(axis, clause, mesh_axes)
            if axis in said:
                _two(f"the copies along `{axis}`", said[axis], clause)
            said[axis] = clause
    together = [c for c in said.values() if c.args[0] not in ("same", "any")]
    other = next((c for c in together if c.args[0] != together[0].args[0]), None)
    if other is not None:
        _two("how copies are put together", together[0], other)
    return Copies(
        Policy[together[0].args[0].upper()] if together else Policy.SAME,
        tuple(a for a, c in said.items() if c in together),
        tuple(a for a, c in said.items() if c.args[0] == "any"),
    )


def _demand_axis(axis: str, clause: nodes.Clause, mesh_axes: Set[str]) -> None:
    if axis in mesh_axes:
        return
    word = clause.args[0]
    fail(
        "E148",
        f"`{word} @{axis}` speaks of copies along `{axis}`, which no mesh has",
        at(clause.span),
        remedy=for_axis(axis, sorted(mesh_axes), f"{word} @"),
        about=UnknownAxis(axis),
    )


def _two(what: str, one: nodes.Clause, other: nodes.Clause) -> None:
    words = one.args[0], other.args[0]
    axes = " ".join(f"@{a}" for a in dict.fromkeys((*one.args[1], *other.args[1])))
    fail(
        "E154",
        f"two clauses say {what}: `{words[0]}` and `{words[1]}`",
        at(one.span, words[0]),
        at(other.span, words[1]),
        remedy=f"keep one: `{words[0]} {axes}` or `{words[1]} {axes}`",
    )
