"""Names and whole numbers: expressions evaluated lazily, so that the order of statements does not matter."""

from __future__ import annotations

import math
from typing import Any

from attrs import define, field

from ucpl.errors import Label, fail
from ucpl.syntax import nodes

Value = int | str | float | list[Any] | None

EXPANSION_LIMIT = 10_000  # evaluations of one expression before it counts as runaway
NUMBER_LIMIT = 1 << 62  # sizes are 64-bit in files and columns


def at(span: nodes.Span, text: str = "") -> Label:
    """A label for a place of a .ucpl text."""
    return Label(span.file, text, span.line or None, span.column or None, max(1, min(span.stop - span.start, 200)))


@define
class Scope:
    """Names known at one place. `given` wins over `bindings` (the command line's -D), both over `config`."""

    given: dict[str, Value] = field(factory=dict)
    bindings: dict[str, nodes.Expr] = field(factory=dict)
    config: dict[str, Any] = field(factory=dict)
    origins: dict[str, str] = field(factory=dict)
    values: dict[str, Value] = field(factory=dict)
    pending: list[str] = field(factory=list)
    evaluations: int = 0

    def knows(self, name: str) -> bool:
        return name in self.given or name in self.values or name in self.bindings

    def names(self) -> list[str]:
        return [*self.given, *self.values, *self.bindings]

    def lookup(self, name: str, span: nodes.Span) -> Value:
        """Value of a name. Raises E101 for an unknown one, E102 for one that is defined by itself."""
        if name in self.given:
            return self.given[name]
        if name in self.values:
            return self.values[name]
        if name in self.bindings:
            if name in self.pending:
                cycle = " -> ".join([*self.pending[self.pending.index(name) :], name])
                fail("E102", f"`{name}` is defined by itself: {cycle}", at(span, "needed here"))
            if len(self.pending) > 200:
                fail("E103", "definitions are nested too deep", at(span))
            self.pending.append(name)
            try:
                value = self.evaluate(self.bindings[name])
            finally:
                self.pending.pop()
            self.values[name] = value
            return value
        head, _, rest = name.partition(".")
        if head == "config":
            return self._config(rest)
        if name.endswith(".size") and self.knows(name[: -len(".size")]):
            return self.lookup(name[: -len(".size")], span)
        close = nearest(name, self.names())
        fail(
            "E101",
            f"no number is called `{name}`",
            at(span, "used here"),
            remedy=f"did you mean `{close}`?"
            if close
            else f"define it with `let {name} = ...` or give it with -D {name}=...",
        )

    def _config(self, path: str) -> Value:
        node: Any = self.config
        for step in path.split("."):
            if not isinstance(node, dict) or step not in node:
                return None
            node = node[step]
        if isinstance(node, bool):
            return int(node)
        if node is None or isinstance(node, int | str | float | list):
            return node
        return None

    def evaluate(self, expr: nodes.Expr) -> Value:
        """Value of an expression; whole numbers, words, or lists of them. None stands for a config key that is absent."""
        self.evaluations += 1
        if self.evaluations > EXPANSION_LIMIT * 100:
            fail("E103", "expressions of this file take too many steps", at(expr.span))
        match expr:
            case nodes.Number(value=number):
                return self._bounded(number, expr.span)
            case nodes.Text(value=text):
                return text
            case nodes.Name(path=path):
                return self.lookup(path, expr.span)
            case nodes.List(items=items):
                return [self.evaluate(i) for i in items]
            case nodes.Unary(operator="not", operand=operand):
                return int(not self.evaluate(operand))
            case nodes.Unary(operand=operand):
                return -self.integer(operand)
            case nodes.Binary(operator="and", left=left, right=right):
                return int(bool(self.evaluate(left)) and bool(self.evaluate(right)))
            case nodes.Binary(operator="or", left=left, right=right):
                return int(bool(self.evaluate(left)) or bool(self.evaluate(right)))
            case nodes.Binary(operator=("==" | "!=") as operator, left=left, right=right):
                return int((self.evaluate(left) == self.evaluate(right)) == (operator == "=="))
            case nodes.Binary():
                return self._arithmetic(expr)
            case nodes.Function():
                return self._function(expr)
        raise TypeError(expr)

    def integer(self, expr: nodes.Expr) -> int:
        """Value of an expression that must be a whole number. Raises E104 otherwise."""
        value = self.evaluate(expr)
        if value is None:
            what = f"`{expr.path}`" if isinstance(expr, nodes.Name) else "this"
            fail("E105", f"{what} has no value", at(expr.span, "absent from the config"))
        if isinstance(value, bool) or not isinstance(value, int):
            fail("E104", f"a whole number is needed here, not {value!r}", at(expr.span))
        return value

    def _bounded(self, number: int, span: nodes.Span) -> int:
        if abs(number) > NUMBER_LIMIT:
            fail("E106", "a number grew beyond 64 bits", at(span))
        return number

    def _arithmetic(self, expr: nodes.Binary) -> int:
        left, right = self.integer(expr.left), self.integer(expr.right)
        match expr.operator:
            case "+":
                out = left + right
            case "-":
                out = left - right
            case "*":
                out = left * right
            case "/" | "%" if right == 0:
                fail("E107", "division by zero", at(expr.span))
            case "/":
                if left % right:
                    fail(
                        "E108",
                        f"{left} / {right} leaves a remainder of {left % right}",
                        at(expr.span, f"{left} does not divide by {right}"),
                    )
                out = left // right
            case "%":
                out = left % right
            case "<":
                out = int(left < right)
            case ">":
                out = int(left > right)
            case "<=":
                out = int(left <= right)
            case ">=":
                out = int(left >= right)
            case operator:
                raise TypeError(operator)
        return self._bounded(out, expr.span)

    def _function(self, expr: nodes.Function) -> Value:
        match expr.name:
            case "default":
                for arg in expr.args:
                    value = self.evaluate(arg)
                    if value is not None:
                        return value
                return None
            case "min":
                return min(map(self.integer, expr.args))
            case "max":
                return max(map(self.integer, expr.args))
            case "lcm":
                return math.lcm(*map(self.integer, expr.args))
            case "gcd":
                return math.gcd(*map(self.integer, expr.args))
            case "size" if len(expr.args) == 1:
                return self.integer(expr.args[0])
            case "ceil" if len(expr.args) == 2:
                return -(-self.integer(expr.args[0]) // self.integer(expr.args[1]))
        fail("E109", f"no function is called `{expr.name}` with {len(expr.args)} arguments", at(expr.span))


def nearest(name: str, names: list[str]) -> str | None:
    """The known name that is spelled most like this one, if any is close."""
    import difflib

    found = difflib.get_close_matches(name, names, 1, 0.75)
    return found[0] if found else None
