"""Evaluation of expressions, for integers and for columns of them alike.

A column is an array of int64, one number a place. A number that is refused (a division with a remainder, 64 bits) is
refused in a column, too. The caller gives the values of names: `Look`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Union

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ucpl.errors import Diagnostic, Label, UcplError, catalogue, fail
from ucpl.language import nodes, print_expr
from ucpl.records import frozen

__all__ = [
    "FUNCTIONS",
    "I64",
    "NUMBER_LIMIT",
    "Look",
    "NotWhole",
    "Number",
    "Operand",
    "Value",
    "at",
    "bounded",
    "evaluated",
    "integer",
    "meant_number",
]

I64 = NDArray[np.int64]
# None: a key of the config that is absent.
Value = Union[int, str, float, list["Value"], None]  # noqa: UP007
Number = int | I64
Operand = Value | I64
Look = Callable[[nodes.Name], Operand]

NUMBER_LIMIT = 1 << 62  # sizes are 64-bit in files and columns
DIGITS_MAX = 19  # of such a number


def at(span: nodes.Span, text: str = "") -> Label:
    """A label for a place of a .ucpl text."""
    length = max(1, min(span.stop - span.start, 200))
    return Label(span.file, text, span.line or None, span.column or None, length, span.said or None)


def evaluated(expr: nodes.Expr, look: Look) -> Operand:
    """The value of an expression. Raises E104 to E109."""
    match expr:
        case nodes.Number(value=number):
            return bounded(number, expr.span)
        case nodes.Text(value=text):
            return text
        case nodes.Name():
            return look(expr)
        case nodes.List(items=items):
            return [_alone(evaluated(i, look), i) for i in items]
        case nodes.Unary(operator="not", operand=operand):
            return _truth(np.logical_not(_true(evaluated(operand, look))))
        case nodes.Unary(operand=operand):
            return _each(lambda a, _: -a, (evaluated(operand, look), 0), (operand, operand))
        case nodes.Binary(operator="and", left=left, right=right):
            first = _true(evaluated(left, look))
            return 0 if first is False else _truth(np.logical_and(first, _true(evaluated(right, look))))
        case nodes.Binary(operator="or", left=left, right=right):
            first = _true(evaluated(left, look))
            return 1 if first is True else _truth(np.logical_or(first, _true(evaluated(right, look))))
        case nodes.Binary(operator=("==" | "!=") as operator, left=left, right=right):
            same = _same(evaluated(left, look), evaluated(right, look))
            return _truth(same if operator == "==" else np.logical_not(same))
        case nodes.Binary(operator=("+" | "-" | "*" | "/" | "%") as operator, left=left, right=right):
            one = evaluated(left, look)
            both = one if isinstance(one, list) else _whole(one, left), evaluated(right, look)
            return _each(lambda a, b: _combined(operator, a, b, expr.span), both, (left, right))
        case nodes.Binary(operator=operator, left=left, right=right):
            return _combined(operator, integer(left, look), integer(right, look), expr.span)
        case nodes.Function(name="default", args=args):
            return next((v for a in args if (v := evaluated(a, look)) is not None), None)
        case nodes.Function(name="where", args=(listed, *wanted)) if len(wanted) < 2:
            return _where(listed, wanted, look)
        case nodes.Function(name="item", args=(listed, place)):
            return _item(listed, integer(place, look), expr, look)
        case nodes.Function(name="length", args=(listed,)):
            return len(_list(listed, look, "length", _itemless(listed)))
        case nodes.Function(name=name, args=args):
            known = name in _MANY or (name, len(args)) in _FEW
            return _function(expr, [integer(a, look) for a in args] if known else [])
    raise TypeError(expr)


@frozen
class NotWhole:
    """Value in the place of an integer."""

    value: object

    @property
    def remedy(self) -> str:
        number = meant_number(self.value)
        if number is not None and isinstance(self.value, str):
            return f"give a whole number: {number}, without quotes"
        if isinstance(self.value, str):
            compared = f'a text is compared, as in `kind == "{self.value}"`, or is a part of a key'
            return f"give a whole number: {compared}; an index in brackets is a dim"
        return catalogue()["E104"].remedy


def meant_number(value: object) -> int | None:
    """The whole number that a text or a fraction means: `"4"`, `4.0`.

    None for any other value.
    """
    if isinstance(value, str):
        return int(value) if value.removeprefix("-").isdecimal() and len(value) <= DIGITS_MAX else None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < NUMBER_LIMIT else None


def integer(expr: nodes.Expr, look: Look) -> Number:
    """Value of an expression that must be an integer, or a column.

    A column is one of integers. Raises E104 or E105 otherwise.
    """
    return _whole(evaluated(expr, look), expr)


def _whole(value: Operand, expr: nodes.Expr) -> Number:
    """The value of an expression, as a number."""
    if value is None:
        what = f"`{expr.path}`" if isinstance(expr, nodes.Name) else "this"
        fail("E105", f"{what} has no value", at(expr.span, "absent from the config"))
    if isinstance(value, bool) or not isinstance(value, int | np.ndarray):
        about = NotWhole(value)
        text = f"a whole number is needed here, not {value!r}"
        raise UcplError(Diagnostic("E104", text, (at(expr.span),), remedy=about.remedy, about=about))
    return value


def bounded(number: Number, span: nodes.Span) -> Number:
    """The number itself. Raises E106 where it does not fit."""
    if _largest(number) > NUMBER_LIMIT:
        fail("E106", "a number grew beyond 64 bits", at(span))
    return number


def _largest(number: Number) -> int:
    if isinstance(number, int):
        return abs(number)
    return max(abs(int(number.max())), abs(int(number.min()))) if number.size else 0


def _alone(value: Operand, expr: nodes.Expr) -> Value:
    if isinstance(value, np.ndarray):
        fail("E104", "a list holds numbers that are the same at every place", at(expr.span))
    return value


# ---- truths: one bool, or a column of them; in the language they are 0 and 1 ---------------------------------------

Truth = bool | NDArray[np.bool_]


def _true(value: Operand) -> Truth:
    return np.asarray(value != 0) if isinstance(value, np.ndarray) else bool(value)


def _same(left: Operand, right: Operand) -> Truth:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.asarray(left == right)
    return left == right


def _truth(truth: Truth | np.bool_) -> Number:
    return truth.astype(np.int64) if isinstance(truth, np.ndarray) and truth.ndim else int(truth)


# ---- operators and functions -----------------------------------------------------------------------------------------


def _each(
    combine: Callable[[Number, Number], Number], both: tuple[Operand, Operand], of: tuple[nodes.Expr, nodes.Expr]
) -> Operand:
    """Combine two numbers, or the items of lists.

    A number is combined with each item, two lists item by item. Raises E104, E105.
    """
    lists = [items for items in both if isinstance(items, list)]
    if not lists:
        return combine(_whole(both[0], of[0]), _whole(both[1], of[1]))
    if len(lists) == 2 and len(lists[0]) != len(lists[1]):
        text = f"{print_expr(of[0])} has {len(lists[0])} items, and {print_expr(of[1])} has {len(lists[1])}"
        fail("E104", text, at(of[1].span), remedy="combine lists of one length, or a list and a number")
    out: list[Value] = []
    for n in range(len(lists[0])):
        a, b = (
            _whole(operand[n] if isinstance(operand, list) else operand, expr)
            for operand, expr in zip(both, of, strict=True)
        )
        combined = combine(a, b)
        if not isinstance(combined, int):
            fail("E104", "a list holds numbers that are the same at every place", at(of[0].span))
        out.append(combined)
    return out


def _combined(operator: str, left: Number, right: Number, span: nodes.Span) -> Number:
    match operator:
        case "+" | "-" | "*":
            return _fitting(operator, left, right, span)
        case "<":
            return _truth(left < right)
        case ">":
            return _truth(left > right)
        case "<=":
            return _truth(left <= right)
        case ">=":
            return _truth(left >= right)
        case "/" | "%":
            return _divided(operator, left, right, span)
    raise TypeError(operator)


def _divided(operator: str, left: Number, right: Number, span: nodes.Span) -> Number:
    if np.any(np.equal(right, 0)):
        fail("E107", "division by zero", at(span))
    rest = left % right
    if operator == "%":
        return rest
    if np.any(np.not_equal(rest, 0)):
        a, b, r = _first_uneven(left, right, rest)
        fail("E108", f"{a} / {b} leaves a remainder of {r}", at(span, f"{a} does not divide by {b}"))
    return left // right


def _fitting(operator: str, left: Number, right: Number, span: nodes.Span) -> Number:
    """A sum, difference or product.

    It is computed in 64 bits if nothing can grow beyond them, else exactly and then checked.
    """
    a, b = _largest(left), _largest(right)
    if (isinstance(left, int) and isinstance(right, int)) or (a * b if operator == "*" else a + b) <= NUMBER_LIMIT:
        return bounded(_plain(operator, left, right), span)
    exact = np.asarray(_plain(operator, _exact(left), _exact(right)), dtype=object)
    if any(abs(n) > NUMBER_LIMIT for n in exact.ravel()):
        fail("E106", "a number grew beyond 64 bits", at(span))
    return exact.astype(np.int64)


def _plain(operator: str, left: Number, right: Number) -> Number:
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def _exact(number: Number) -> Number:
    return number if isinstance(number, int) else number.astype(object)


def _first_uneven(left: Number, right: Number, rest: Number) -> tuple[int, int, int]:
    a, b, r = (column.ravel() for column in np.broadcast_arrays(left, right, rest))
    first = int(np.flatnonzero(r)[0])
    return int(a[first]), int(b[first]), int(r[first])


def _list(listed: nodes.Expr, look: Look, word: str, remedy: str = "") -> list[Value]:
    """Items of a list. Raises E104, E105."""
    items = evaluated(listed, look)
    if items is None:
        integer(listed, look)  # names the absent key of the config
    if not isinstance(items, list):
        fail("E104", f"`{word}` looks through a list, not {items!r}", at(listed.span), remedy=remedy)
    return items


def _itemless(listed: nodes.Expr) -> str:
    """Remedy for the number of items of a value without any."""
    return f"a number or a text has no items: write `{print_expr(listed)}`, or name a list"


def _item(listed: nodes.Expr, place: Number, expr: nodes.Expr, look: Look) -> Operand:
    """The item of a list at a place, or those at many.

    Raises: UcplError E104.
    """
    name = print_expr(listed)
    items = _list(
        listed, look, "[ ]", f"a number has no items: write `{name}`" if isinstance(listed, nodes.Name) else ""
    )
    if not items or _largest(place) > len(items) or np.any(np.greater_equal(place, len(items))):
        count = f"{len(items)} item{'s' * (len(items) != 1)}"
        remedy = f"its items are {name}[0] .. {name}[{len(items) - 1}]" if items else ""
        fail("E104", f"`{print_expr(expr)}` is not there: the list has {count}", at(expr.span), remedy=remedy)
    return items[place] if isinstance(place, int) else np.asarray(items)[place]


def _where(listed: nodes.Expr, wanted: Sequence[nodes.Expr], look: Look) -> list[Value]:
    """Positions of a value in a list, or of all true values.

    Raises E104, E105.
    """
    items = _list(listed, look, "where", _unlisted(listed, wanted))
    found: list[bool] = [bool(item) for item in items]
    if wanted:
        value = _alone(_wanted(listed, wanted[0], items, look), wanted[0])
        found = [item == value for item in items]
    return [i for i, is_one in enumerate(found) if is_one]


def _unlisted(listed: nodes.Expr, wanted: Sequence[nodes.Expr]) -> str:
    """Remedy for `where` of a condition, or with its arguments turned."""
    match listed:
        case nodes.Binary(operator="==", left=left, right=right):
            return f"the value comes after a comma: where({print_expr(left)}, {print_expr(right)})"
        case nodes.Binary(operator="!=", left=left, right=right):
            return f"all others are `not` in the brackets: l[not where({print_expr(left)}, {print_expr(right)})]"
        case nodes.Text() | nodes.Number() if wanted:
            return f"the list comes first: where({print_expr(wanted[0])}, {print_expr(listed)})"
    return f"a list has its items in brackets: [{print_expr(listed)}]"


def _wanted(listed: nodes.Expr, wanted: nodes.Expr, items: Sequence[Value], look: Look) -> Operand:
    """The value that a list is searched for.

    Raises: UcplError E101, with quotes as the remedy for a word of the list.
    """
    try:
        return evaluated(wanted, look)
    except UcplError as error:
        found = error.diagnostics[0]
        words = any(isinstance(item, str) for item in items)
        if found.code != "E101" or not words or not isinstance(wanted, nodes.Name):
            raise
        remedy = f'a word has double quotes: where({print_expr(listed)}, "{wanted.path}")'
        raise UcplError(evolve(found, remedy=remedy)) from None


_MANY = ("min", "max", "lcm", "gcd")
_FEW = (("size", 1), ("ceil", 2), ("floor", 2))
FUNCTIONS = ("default", "where", "length", *_MANY, *(name for name, _ in _FEW))


def _function(expr: nodes.Function, numbers: Sequence[Number]) -> Number:
    match expr.name:
        case "min" | "max" | "gcd" if numbers:
            return reduce(_PICKS[expr.name], numbers)
        case "lcm" if numbers:
            return bounded(reduce(lambda a, b: _lcm(a, b, expr.span), numbers), expr.span)
        case "size" if numbers:
            return numbers[0]
        case "ceil" | "floor" if numbers:
            if np.any(np.equal(numbers[1], 0)):
                fail("E107", "division by zero", at(expr.span))
            return numbers[0] // numbers[1] if expr.name == "floor" else -(-numbers[0] // numbers[1])
    count = f"{len(expr.args)} argument{'s' * (len(expr.args) != 1)}"
    fail("E109", f"no function is called `{expr.name}` with {count}", at(expr.span), remedy=_function_remedy(expr.name))


def _least(a: Number, b: Number) -> Number:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.asarray(np.minimum(a, b))


def _greatest(a: Number, b: Number) -> Number:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.asarray(np.maximum(a, b))


def _gcd(a: Number, b: Number) -> Number:
    return math.gcd(a, b) if isinstance(a, int) and isinstance(b, int) else np.asarray(np.gcd(a, b))


def _lcm(a: Number, b: Number, span: nodes.Span) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    step = np.asarray(np.abs(a) // np.maximum(np.gcd(a, b), 1), dtype=np.int64)
    return _fitting("*", step, np.abs(np.asarray(b, dtype=np.int64)), span)


_PICKS: dict[str, Callable[[Number, Number], Number]] = {"min": _least, "max": _greatest, "gcd": _gcd}


_FORMS = {
    "ceil": "`ceil` has two arguments: ceil(a, b) is a / b rounded up",
    "floor": "`floor` has two arguments: floor(a, b) is a / b rounded down",
    "where": '`where` has a list and a value of it, and gives the positions: where(config.layer_types, "attention")',
    "length": "`length` has one list, and gives the number of its items: length(config.layer_types)",
    "size": "`size` has one name, of a mesh axis or a dim: size(tp)",
}


def _function_remedy(name: str) -> str:
    from difflib import get_close_matches

    from ucpl.language.foreign_words import foreign  # most commands end without an error

    if name == "len":
        return "the name of a dim is its size, and length(ks) the number of items of a list"
    close = "" if name in FUNCTIONS else next(iter(get_close_matches(name, FUNCTIONS, 1, 0.7)), "")
    if name in _FORMS:
        return _FORMS[name]
    return (f"did you mean `{close}`?" if close else foreign(name)) or catalogue()["E109"].remedy
