"""Expressions: whole numbers, words, lists, operators and functions."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from attrs import evolve
from lark import Token

from ucpl.errors import fail
from ucpl.syntax import nodes
from ucpl.syntax.limits import DEPTH_MAX, INTEGER_MAX
from ucpl.syntax.nodes import Expr
from ucpl.syntax.recording.places import Children, Place, Places

__all__ = ["Numbers"]

Kept = TypeVar("Kept", bound=Expr)


class Numbers(Places):
    """Methods of the rules under "numbers"."""

    def _too_deep(self, place: Place) -> NoReturn:
        fail("E010", f"an expression nests deeper than {DEPTH_MAX} levels", self.label(place, "one level too many"))

    def _deepen(self, expr: Kept, place: Place, *inner: Expr) -> Kept:
        depth = 1 + max((self._depth.get(id(e), 1) for e in inner), default=0)
        if depth > DEPTH_MAX:
            self._too_deep(place)
        self._depth[id(expr)] = depth
        return expr

    def _integer(self, token: Token) -> int:
        if len(token) > 19 or int(token) > INTEGER_MAX:
            fail("E015", "a number does not fit in 64 bits", self.label(token, f"larger than {INTEGER_MAX}"))
        return int(token)

    def number(self, children: Children) -> Expr:
        return nodes.Number(self._integer(children[0]), span=self.span(children))

    def text(self, children: Children) -> Expr:
        return nodes.Text(self.string(children[0]), span=self.span(children))

    def reference(self, children: Children) -> Expr:
        part = self.path(children)
        return nodes.Name(part.value, span=part.span)

    def function(self, children: Children) -> Expr:
        args = tuple(children[2:-1:2])
        return self._deepen(nodes.Function(str(children[0]), args, span=self.span(children)), children[0], *args)

    def list(self, children: Children) -> Expr:
        items = tuple(children[1:-1:2])
        return self._deepen(nodes.List(items, span=self.span(children)), children[0], *items)

    def unary(self, children: Children) -> Expr:
        operator, operand = children
        return self._deepen(nodes.Unary(operator.value, operand, span=self.span(children)), operator, operand)

    def binary(self, children: Children) -> Expr:
        left, operator, right = children
        record = nodes.Binary(str(operator), left, right, span=self.span(children))
        return self._deepen(record, operator, left, right)

    def inner(self, children: Children) -> Expr:
        inner: Expr = children[1]
        expr = evolve(inner, span=self.span(children))  # the parentheses belong to its place
        self._depth[id(expr)] = self._depth.get(id(inner), 1)
        return expr

    def expr_text(self, children: Children) -> Expr:
        expr: Expr = next(c for c in children if not isinstance(c, Token))
        return expr
