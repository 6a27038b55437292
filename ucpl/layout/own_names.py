"""One name has one value: a number of a layout that has the name of one of its model's would change the model unseen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import evolve

from ucpl.errors import UcplError, fail
from ucpl.layout.scope import Scope, Value, at
from ucpl.syntax import nodes

__all__ = ["refuse_second_meanings"]


def refuse_second_meanings(
    scope: Scope, model: Sequence[nodes.Record], layout: Sequence[nodes.Record], said: Collection[str]
) -> None:
    """`model` and `layout` are their statements, the layout's parameters among them; `said` are names of -D, which win.

    Numbers of a file are no part of either: a layout may say another for them.
    A name that both define is refused unless its values are one, or one of them is not known yet. Raises: UcplError E125.
    """
    ours = {name: (value, span) for name, value, span in _defined(model) if name not in said}
    shared = [found for found in _defined(layout) if found[0] in ours]
    if not shared:
        return
    before, after = (evolve(scope, bindings=dict(scope.bindings), values={}, pending=[]) for _ in range(2))
    after.bind(layout)
    for name, value, span in shared:
        here = scope.given.get(name) if value is None else _value(after, value)
        there = _value(before, ours[name][0])
        if None not in (here, there) and here != there:
            fail(
                "E125",
                f"`{name}` is {there} in the model and {here} in the layout",
                at(span, "the layout's"),
                at(ours[name][1], "the model's"),
                remedy=f"a layout and its model share their names: give the layout's `{name}` another name",
            )


def _defined(items: Iterable[nodes.Record]) -> Iterator[tuple[str, nodes.Expr | None, nodes.Span]]:
    for item in items:
        if isinstance(item, nodes.Let | nodes.Dims):
            yield from ((b.name, b.value, b.span) for b in item.bindings)
        elif isinstance(item, nodes.Parameter):
            yield item.name, None, item.span


def _value(scope: Scope, expr: nodes.Expr | None) -> Value:
    """None where it is not to be had: it rests on a name or a key that nothing gives."""
    try:
        return None if expr is None else scope.evaluate(expr)
    except UcplError:
        return None
