"""Conditions that come to one thing whatever their names are: `tp > 2 and tp < 2`. By trying the numbers that they speak of.

A comparison with a number changes where that number is, so that values there and beside it are all that can tell.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from math import prod

from ucpl.errors import UcplError
from ucpl.layout.arithmetic import Operand, evaluated
from ucpl.syntax import nodes, print_expr
from ucpl.syntax.walk import walk

__all__ = ["constant_truth", "of_one_truth"]

_TRIES_MAX = 4_096
_TRUTHS = frozenset({"and", "or", "not", "==", "!=", "<", "<=", ">", ">=", "-"})
_BESIDE = (-2, -1, 0, 1, 2, 3)  # where names are compared with each other, and for truth


def of_one_truth(asked: nodes.Expr, axes: Collection[str]) -> str:
    """What is wrong with a condition that never or always holds, with what to write instead; else \"\".

    `axes`: names of mesh axes, of which there is one rank or more.
    """
    truth = constant_truth(asked, axes)
    if truth is None:
        return ""
    said = "always holds" if truth else "never holds"
    match asked:
        case nodes.Binary(operator=("and" | "or") as word, left=left):
            other = "or" if word == "and" else "and"
            return f"{said}. Keep one side of it, as in `when {print_expr(left)}`, or write `{other}` for `{word}`"
    name = next((n.path for n in walk(asked) if isinstance(n, nodes.Name)), "tp")
    if name in axes:
        return (
            f"{said}: `{name}` is how many ranks there are, 1 or more. Write `when {name} > 1`, or for the first of them"
            f" `at {name}[0]`"
        )
    return f"{said}. Write the other number, or take it out"


def constant_truth(asked: nodes.Expr, axes: Collection[str]) -> bool | None:
    """Whether a condition holds for all values of its names, or for none; None where that hangs on them, or is not known."""
    parts = list(walk(asked))
    paths = [n.path for n in parts if isinstance(n, nodes.Name)]
    names = list(dict.fromkeys(paths))
    if not names or (len(names) == len(paths) and not {*names} & {*axes}):
        return None  # each name is free to be otherwise
    if any(
        isinstance(n, nodes.Function | nodes.List)
        or (isinstance(n, nodes.Binary | nodes.Unary) and n.operator not in _TRUTHS)
        or (isinstance(n, nodes.Binary) and n.operator == "-")
        for n in parts
    ):
        return None
    values = [_values(name, parts, name in axes) for name in names]
    if prod(map(len, values)) > _TRIES_MAX:
        return None
    found: set[bool] = set()
    for tried in product(*values):
        known = dict(zip(names, tried, strict=True))
        try:
            found.add(bool(evaluated(asked, lambda name, known=known: known[name.path])))  # type: ignore[misc]
        except UcplError:  # a text, or nothing, is neither more nor less than a number
            continue
        if len(found) > 1:
            return None
    return found.pop() if found else None


def _values(name: str, parts: list[nodes.Record], is_axis: bool) -> list[Operand]:
    numbers = {n.value for n in parts if isinstance(n, nodes.Number)}
    near = {*_BESIDE, *(sign * (n + by) for n in numbers for by in (-1, 0, 1) for sign in (1, -1))}
    if is_axis:
        return [n for n in sorted(near) if n > 0]
    texts = dict.fromkeys(n.value for n in parts if isinstance(n, nodes.Text))
    out: list[Operand] = [*sorted(near), *texts, *(["\0"] if texts else [])]
    return [*out, None] if name.startswith("config.") else out
