"""Clauses that could not do anything where they stand are refused: nothing is accepted that does not act."""

from __future__ import annotations

from collections.abc import Iterable

from ucpl.errors import fail
from ucpl.layout.scope import at
from ucpl.syntax import nodes

__all__ = ["demand_acting"]


def demand_acting(items: Iterable[nodes.Record]) -> None:
    """Raises: UcplError E190 for `buckets` where no flat buffer is, and for what a line that stores `none` says of storing."""
    for item in items:
        if not isinstance(item, nodes.Entry | nodes.States):
            continue
        is_flat = isinstance(item, nodes.States) and isinstance(item.shape, tuple)
        for clause in item.clauses:
            span = clause.span if clause.span.line else item.span
            if clause.word == "buckets" and not is_flat:
                fail(
                    "E190",
                    "`buckets` closes flat buffers, and this line stores tensors one by one",
                    at(span),
                    remedy="take it out, or write it in a state line of flat(each)",
                )
            if item.shape is None and clause.word != "when":
                word = clause.args[0] if clause.word == "copies" else clause.word
                fail(
                    "E190",
                    f"`{word}` says how something is stored, and this line stores `none`",
                    at(span),
                    remedy="take the clause out, or write a pattern for `none`",
                )
