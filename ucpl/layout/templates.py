"""Names of files and keys: text with expressions in braces, `mp_rank_{tp + pp * size(tp):02}`.

A mesh axis is its *coordinate* here and its size inside `size(...)` or with `.size`.
`/` separates the steps of a key; braces are filled after the text was cut into steps, so that a `/` inside a tensor's
name never makes a step.
"""

from __future__ import annotations

import re
from typing import Any

from attrs import frozen

from ucpl.errors import fail
from ucpl.layout.scope import Scope, at, nearest
from ucpl.syntax import nodes, parse_expr

_BRACE = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
_FORMAT = re.compile(r"0?\d{0,3}d?\Z")
TEMPLATE_LIMIT = 4096  # characters


@frozen
class Hole:
    """`{expr:format}`: `path` where it is a plain name, so that most holes need no evaluation."""

    path: str | None
    expr: nodes.Expr
    format: str


@frozen
class Template:
    text: str
    parts: tuple[str | Hole, ...]
    span: nodes.Span

    @property
    def names(self) -> frozenset[str]:
        """Names that the template uses as coordinates or indices (sizes asked for by size(a), a.size are left out)."""
        found: set[str] = set()
        for part in self.parts:
            if isinstance(part, Hole):
                found |= _names(part.expr)
        return frozenset(found)


def _names(expr: nodes.Expr) -> set[str]:
    match expr:
        case nodes.Name(path=path):
            return set() if path.endswith(".size") else {path}
        case nodes.Function(name="size"):
            return set()
        case nodes.Function(args=args) | nodes.List(items=args):
            return {n for a in args for n in _names(a)}
        case nodes.Unary(operand=operand):
            return _names(operand)
        case nodes.Binary(left=left, right=right):
            return _names(left) | _names(right)
        case _:
            return set()


def template(text: str, span: nodes.Span) -> Template:
    """Parse a template. Raises E120 for unbalanced braces or an unknown format."""
    if len(text) > TEMPLATE_LIMIT:
        fail("E121", f"a name template has {len(text)} characters", at(span))
    parts: list[str | Hole] = []
    end = 0
    for m in _BRACE.finditer(text):
        parts.append(text[end : m.start()])
        if not _FORMAT.match(m[2] or ""):
            fail("E120", f"`{m[2]}` is no number format: write {{x:02}} for two digits", at(span))
        expr = parse_expr(m[1], file=span.file, line=span.line, column=span.column)
        parts.append(Hole(expr.path if isinstance(expr, nodes.Name) else None, expr, m[2] or ""))
        end = m.end()
    parts.append(text[end:])
    for part in parts:
        if isinstance(part, str) and ("{" in part or "}" in part):
            fail("E120", f'braces of "{text}" do not pair up', at(span))
    return Template(text, tuple(p for p in parts if p != ""), span)


def render(rule: Template, variables: dict[str, Any], scope: Scope) -> str:
    """Fill in a template. Raises E122 for a name that neither the place nor the layout knows."""
    out = []
    for part in rule.parts:
        if isinstance(part, str):
            out.append(part)
        elif part.path is not None and part.path in variables:
            value = variables[part.path]
            out.append(format(value, part.format) if part.format else str(value))
        else:
            out.append(format(_evaluate(part.expr, variables, scope, rule), part.format))
    return "".join(out)


def _evaluate(expr: nodes.Expr, variables: dict[str, Any], scope: Scope, rule: Template) -> Any:
    unknown = [n for n in _names(expr) if n not in variables and not scope.knows(n) and not n.startswith("config.")]
    if unknown:
        close = nearest(unknown[0], [*variables, *scope.names()])
        fail(
            "E122",
            f'"{rule.text}" names `{unknown[0]}`, which has no value here',
            at(rule.span),
            remedy=f"did you mean `{close}`?" if close else f"known here: {', '.join(sorted(variables))}",
        )
    sizes = _sized(expr, scope)
    return Scope(
        given={**scope.given, **sizes, **variables}, bindings=scope.bindings, config=scope.config, values=scope.values
    ).evaluate(_size_calls(expr))


def _size_calls(expr: nodes.Expr) -> nodes.Expr:
    """size(a) as the name a.size, which is looked up among sizes and not among coordinates."""
    match expr:
        case nodes.Function(name="size", args=(nodes.Name(path=path),)):
            return nodes.Name(f"{path}.size", span=expr.span)
        case nodes.Function():
            return nodes.Function(expr.name, tuple(map(_size_calls, expr.args)), span=expr.span)
        case nodes.Unary():
            return nodes.Unary(expr.operator, _size_calls(expr.operand), span=expr.span)
        case nodes.Binary():
            return nodes.Binary(expr.operator, _size_calls(expr.left), _size_calls(expr.right), span=expr.span)
        case _:
            return expr


def _sized(expr: nodes.Expr, scope: Scope) -> dict[str, Any]:
    """Values of every a.size and size(a) inside an expression."""
    match expr:
        case nodes.Name(path=path) if path.endswith(".size"):
            return {path: scope.lookup(path[: -len(".size")], expr.span)}
        case nodes.Function(name="size", args=(nodes.Name(path=path),)):
            return {f"{path}.size": scope.lookup(path, expr.span)}
        case nodes.Function(args=args) | nodes.List(items=args):
            return {k: v for a in args for k, v in _sized(a, scope).items()}
        case nodes.Unary(operand=operand):
            return _sized(operand, scope)
        case nodes.Binary(left=left, right=right):
            return {**_sized(left, scope), **_sized(right, scope)}
        case _:
            return {}


def key_steps(rule: Template) -> tuple[Template, ...]:
    """A key template cut at `/`, one template a step."""
    steps: list[list[str | Hole]] = [[]]
    for part in rule.parts:
        if isinstance(part, Hole):
            steps[-1].append(part)
            continue
        first, *rest = part.split("/")
        if first:
            steps[-1].append(first)
        for text in rest:
            steps.append([text] if text else [])
    return tuple(Template(rule.text, tuple(s), rule.span) for s in steps)
