"""Names of files and keys: text with expressions in braces, `mp_rank_{tp + pp * size(tp):02}`.

A mesh axis is its *coordinate* here and its size inside `size(...)` or with `.size`. `/` separates the steps of a key;
braces are filled after the text was cut into steps, so that a `/` inside a tensor's name never makes a step.

A template of a resolved layout is *closed*: its braces have numbers and the names that a stored tensor's place gives
(coordinates, indices, names of tensors and states). It is data: `columns` splits it, `evaluate` works for the numbers
of one place and for columns of many.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from itertools import islice, product
from typing import NoReturn, TypeVar

import numpy as np
from attrs import evolve, field

from ucpl.errors import UcplError, fail
from ucpl.language import nodes, parse_expr, print_expr
from ucpl.language.walk import rewritten
from ucpl.language.words import HOLE, USUAL_AXES
from ucpl.layout.arithmetic import Operand, Value, at, evaluated
from ucpl.layout.name_remedies import nearest
from ucpl.layout.scope import Scope, literal
from ucpl.records import frozen

Item = TypeVar("Item", bound=nodes.Record)

_FORMAT = re.compile(r"0?[0-9]{0,3}d?\Z")
TEMPLATE_LIMIT = 4096  # characters
_ALL_RANKS = (
    "world_size",
    "num_ranks",
    "n_ranks",
    "nranks",
    "nproc",
    "nprocs",
    "world",
)  # how many there are, elsewhere
# Variables that a stored tensor's place gives to a template, besides coordinates and indices.
PLACE_WORDS = frozenset({"name", "alias", "owner", "key", "state", "bucket", "group", "member", "number", "rank"})


@frozen(slots=False)
class Hole:
    """`{expr:format}`; `path` is set for a plain name.

    So most holes need no evaluation.
    """

    path: str | None
    expr: nodes.Expr
    format: str

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(_names(self.expr))


@frozen(slots=False)
class Template:
    """A template in parts.

    `sizes`: the value of a name at a place that does not give it. For names that may have no value: `near`, the name
    that may be meant; `known`, the coordinates and indices of the place.
    """

    text: str
    parts: tuple[str | Hole, ...]
    span: nodes.Span = field(default=nodes.NOWHERE, eq=False, repr=False)
    sizes: tuple[tuple[str, int | str], ...] = ()
    near: tuple[tuple[str, str], ...] = field(default=(), eq=False, repr=False)
    known: tuple[str, ...] = field(default=(), eq=False, repr=False)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that the template uses as coordinates or indices.

        Sizes are left out: size(a), a.size.
        """
        return _names_of(self.parts)


def _names_of(parts: tuple[str | Hole, ...]) -> frozenset[str]:
    return frozenset[str]().union(*(part.names for part in parts if isinstance(part, Hole)))


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


# ---- reading ---------------------------------------------------------------------------------------------------------


def template(text: str, span: nodes.Span) -> Template:
    """Parse a template. Raises E120 for unbalanced braces or an unknown format."""
    if len(text) > TEMPLATE_LIMIT:
        fail("E121", f"a name template has {len(text)} characters", at(span))
    parts: list[str | Hole] = []
    end = 0
    for m in HOLE.finditer(text):
        parts.append(text[end : m.start()])
        if not _FORMAT.match(m[2] or ""):
            fail("E120", f"`{m[2]}` is no number format: write {{x:02}} for two digits", at(span))
        if m[2] == "":
            remedy = f'write: "{text.replace(m[0], m[0].replace(":", ""))}", or {{x:02}} for two digits'
            fail("E120", f"nothing comes after the `:` of `{m[0]}`", at(span), remedy=remedy)
        if not m[1].strip():
            shown = re.sub(r"\{\s*\}", "{l}", text)
            fail(
                "E120", f'braces of "{text}" have nothing in them', at(span), remedy=f'name the index, as in "{shown}"'
            )
        parts.append(_hole(_read(m[1], text, span), m[2] or ""))
        end = m.end()
    parts.append(text[end:])
    for part in parts:
        if isinstance(part, str) and ("{" in part or "}" in part):
            single = re.sub(r"\{\{+([^{}]*)\}\}+", r"{\1}", text)
            remedy = f'braces are single: write "{single}"' if single != text else ""
            fail("E120", f'braces of "{text}" do not pair up', at(span), remedy=remedy)
    return Template(text, tuple(p for p in parts if p != ""), span)


# Texts of other tools between braces, as patterns, and their replacements. Patterns of refusals are compiled on use: all
# of them at each start would take longer than to read a file.
_OPERAND = r"([\w.]+(?:\([^()]*\))?|\([^()]*\))"
_HABITS = (
    (
        rf"(|.*[-+(,]\s*){_OPERAND}\s*//\s*{_OPERAND}(.*)",
        r"\1floor(\2, \3)\4",
        "`/` leaves no remainder: `floor(a, b)` rounds down",
    ),
    (r"(.*)//(.*)", r"\1/\2", "`/` divides whole numbers, and leaves no remainder"),
    (r"(\w+)![rsa]", r"\1", "a number has one text; `{x:02}` has two digits"),
    (r"(?:str|int|repr)\((\w+)\)", r"\1", "a number has one text"),
    (r"(\w+)\.(?:lower|upper|strip)\(\)", r"\1", "a name is as the model has it"),
    (r"(\w+) rank", r"\1", "the name of a mesh axis is the coordinate of a rank on it"),
    (r"\$(\w+)", r"\1", "a name is written as it is"),
    (r"\{(.*)\}?", r"\1", "one pair of braces"),
)


def _read(said: str, text: str, span: nodes.Span) -> nodes.Expr:
    """The expression between braces.

    Raises: UcplError E001 to E019, with the template as it would be read.
    """
    try:
        return parse_expr(said, file=span.file, line=span.line, column=span.column)
    except UcplError as error:
        first = error.diagnostics[0]
        why = "braces hold a number or a name, and perhaps its digits: `{l}`, `{l + 1}`, `{tp:02}`, `{size(tp)}`"
        for habit, instead, reason in _HABITS:
            if (found := re.fullmatch(habit, said.strip())) is not None:
                new = found.expand(instead)
                why = f'{reason}\nwrite: "{text.replace(said, new)}"'
                break
        raise UcplError(evolve(first, remedy=why), *error.diagnostics[1:]) from None


def _hole(expr: nodes.Expr, form: str) -> Hole:
    return Hole(expr.path if isinstance(expr, nodes.Name) else None, expr, form)


# ---- texts with names of their own ----------------------------------------------------------------------------------

_SPELLED_MAX = 20  # texts within texts


def spelled_out(items: Iterable[Item], scope: Scope) -> list[Item]:
    """Statements whose templates have the texts that they name: `let attn = "layers.{l}.attn."`, `as "{attn}q"`.

    A text that a call gives is put in its place only if it has braces: another one is a word, which `closed` evaluates.
    Raises E102 for a text within itself.
    """

    def text_of(name: str) -> str | None:
        if name in PLACE_WORDS:
            return None
        said, bound = scope.given.get(name), scope.bindings.get(name)
        if name not in scope.given and isinstance(bound, nodes.Text):
            return bound.value
        return said if isinstance(said, str) and "{" in said else None

    def spelled(text: str, span: nodes.Span) -> str:
        for _ in range(_SPELLED_MAX):
            if len(text) > TEMPLATE_LIMIT or all(text_of(m[1].strip()) is None for m in HOLE.finditer(text)):
                return text
            text = HOLE.sub(lambda m: m[0] if m[2] else text_of(m[1].strip()) or m[0], text)
        fail("E102", "a text of this name has itself as a part, or more than 20 texts one in another", at(span))

    def change(node: nodes.Record) -> nodes.Record | None:
        match node:
            case nodes.Entry() | nodes.States() | nodes.Blob() if any(c.word == "as" for c in node.clauses):
                place = node.span
                clauses = tuple(
                    evolve(c, args=(spelled(c.args[0], c.span if c.span.line else place),)) if c.word == "as" else c
                    for c in node.clauses
                )
                return evolve(node, clauses=clauses) if clauses != node.clauses else node
            case nodes.Files() | nodes.Use():
                made = node
                if isinstance(node, nodes.Files):
                    made = evolve(node, template=spelled(node.template, node.span))
                return evolve(made, key=made.key and spelled(made.key, made.span))
        return node

    if not any(isinstance(v, nodes.Text | str) for v in [*scope.given.values(), *scope.bindings.values()]):
        return [*items]
    return [rewritten(item, change) for item in items]


# ---- closing ---------------------------------------------------------------------------------------------------------


def closed(text: str, span: nodes.Span, scope: Scope, places: frozenset[str]) -> Template:
    """A template whose names are those that a place can give.

    All others are numbers, or words, now. A name of `places` that the layout knows as a number, too, is that number if
    the place gives none. Raises E120, E121, and errors of evaluating the other names.
    """
    read = template(text, span)
    parts = tuple(p if isinstance(p, str) else _closed_hole(p, scope, places) for p in read.parts)
    text = "".join(map(_written, parts))
    names = _names_of(parts)
    values = {n: scope.value(n) for n in sorted(names) if scope.knows(n)}
    sizes = tuple((n, v if isinstance(v, int) else str(v)) for n, v in values.items() if not isinstance(v, list | None))
    unknown = sorted(names - {n for n, _ in sizes} - PLACE_WORDS)
    if not unknown:
        return Template(text, parts, span, sizes)
    axes = scope.mesh_axes
    known = (*axes, *(("rank",) if axes else ()), *sorted(places - PLACE_WORDS - {*axes}))
    return Template(text, parts, span, sizes, _near(unknown, scope, places), known)


def _near(unknown: Iterable[str], scope: Scope, places: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """For each of these names the one that may be meant."""
    known = [*scope.names(), *sorted(places - PLACE_WORDS)]
    indices = [n for n in sorted(places - PLACE_WORDS - set(scope.mesh_axes)) if "." not in n]
    alone = indices[0] if len(indices) == 1 else None
    ranks = " * ".join(f"size({axis})" for axis in scope.mesh_axes)
    all_ = dict.fromkeys(_ALL_RANKS, ranks) if ranks else {}
    return tuple((n, close) for n in unknown if (close := all_.get(n) or nearest(n, known) or alone) is not None)


def _written(part: str | Hole) -> str:
    if isinstance(part, str):
        return part
    return f"{{{print_expr(part.expr)}{':' if part.format else ''}{part.format}}}"


def _closed_hole(hole: Hole, scope: Scope, places: frozenset[str]) -> Hole:
    def change(node: nodes.Record) -> nodes.Record | None:
        """A part of an expression that no place changes, as its value."""
        if not isinstance(node, nodes.Expr):
            return None
        if any(n in places or not (scope.knows(n) or n.startswith("config.")) for n in _names(node)):
            return node if isinstance(node, nodes.Name) else None
        return _constant(node, scope.evaluate(node))

    made = rewritten(hole.expr, change)
    if isinstance(made, nodes.List):
        fail(
            "E164",
            f"`{print_expr(hole.expr)}` is a list, and a template has one value in a place",
            at(hole.expr.span),
            remedy="name the index that the list is by in the entry's brackets and in its key, as {l}",
        )
    return hole if made == _ABSENT else _hole(made, hole.format)


_ABSENT = nodes.Function("default", ())  # no value: a key that the config lacks


def _constant(node: nodes.Expr, value: Value) -> nodes.Expr:
    if value is None:
        return _ABSENT
    if isinstance(value, float):
        return nodes.Text(str(value), span=node.span)
    if isinstance(value, int) and value < 0:
        return nodes.Unary("-", nodes.Number(-value), span=node.span)
    return evolve(literal(value), span=node.span)


def nested(outer: Template, inner: Template) -> Template:
    """`outer` with the parts of `inner` where it says `{key}`."""
    parts: list[str | Hole] = []
    for part in outer.parts:
        parts += inner.parts if isinstance(part, Hole) and part.path == "key" else (part,)
    text = "".join(map(_written, parts))
    sizes = tuple({**dict(inner.sizes), **dict(outer.sizes)}.items())
    known = tuple(dict.fromkeys((*outer.known, *inner.known)))
    return Template(text, tuple(parts), outer.span, sizes, (*outer.near, *inner.near), known)


# ---- filling in ------------------------------------------------------------------------------------------------------


def evaluate(expr: nodes.Expr, variables: Mapping[str, Operand]) -> Operand:
    """Value of a closed expression at one place, or at many.

    For many, variables are columns of int64. Raises: KeyError for a name that has no value there; UcplError E104 to
    E109.
    """
    try:
        return evaluated(expr, lambda name: variables[name.path])
    except UcplError as error:
        raise UcplError(*(evolve(d, about=d.about or UnevenPlace()) for d in error.diagnostics)) from None


@frozen
class UnevenPlace:
    """Number of a template that some place does not have.

    An example: `{tp / 2}` at tp = 1.
    """


_COORDINATES = (0, 1, 2, 3, 7, 8, 63, 64, 1023, 1024)  # at which a part of a template is tried
_TRIED = 4096


def varies(hole: Hole, axes: Container[str]) -> bool:
    """True if coordinates change the text of a hole.

    `{tp + 1}` and `{rank}` vary, `{tp * 0}` and `{size(tp)}` do not.
    """
    names = sorted(name for name in hole.names if name in axes)
    if not names or len(names) < len(hole.names):
        return bool(names)
    found = set()
    for place in islice(product(_COORDINATES, repeat=len(names)), _TRIED):
        try:
            found.add(evaluate(hole.expr, dict(zip(names, place, strict=True))))
        except UcplError:  # no integer there, as of `{tp / 8}`
            found.add(None)
        if len(found) > 1:
            return True
    return False


def columns(rule: Template) -> tuple[tuple[str, ...], tuple[Hole, ...]]:
    """Literal texts of a template and the holes between them.

    There is one text more than there are holes.
    """
    texts, holes = [""], []
    for part in rule.parts:
        if isinstance(part, str):
            texts[-1] += part
        else:
            holes.append(part)
            texts.append("")
    return tuple(texts), tuple(holes)


def render(rule: Template, variables: Mapping[str, Value]) -> str:
    """Fill in a template.

    Raises E122 for a name that neither the place nor the layout knows, E164 for a word as a number.
    """
    out = []
    for part in rule.parts:
        if isinstance(part, str):
            out.append(part)
            continue
        path = part.path
        value = variables[path] if path is not None and path in variables else _value(rule, part, variables)
        if part.format and not isinstance(value, int):
            fail(
                "E164",
                f'`{print_expr(part.expr)}` of "{rule.text}" is {value!r}, and `:{part.format}` writes a number',
                at(rule.span),
            )
        out.append(format(value, part.format) if part.format else str(value))
    return "".join(out)


def _value(rule: Template, part: Hole, variables: Mapping[str, Value]) -> Value:
    try:
        value = evaluate(part.expr, {**dict(rule.sizes), **variables})
    except KeyError as error:
        _no_value(rule, str(error.args[0]), variables)
    if value is None:
        _no_value(rule, print_expr(part.expr), variables)
    assert not isinstance(value, np.ndarray)
    return value


_COUNTED = r"(?:(local|global)_(\w+)|(\w+?)[._](local|global))"


def _counted(name: str) -> str:
    """Base of `local_e` and `e.global`.

    They count an index on the rank, or in the model.
    """
    found = re.fullmatch(_COUNTED, name)
    if found is None:
        return ""
    dim, count = found[2] or found[3], found[1] or found[4]
    return (
        f"write {{{dim}.local}}: counted on the rank" if count == "local" else f"write {{{dim}}}: counted in the model"
    )


# Words of other tools for the number of a layer or an expert.
_INDICES_ELSEWHERE = frozenset(
    ("layer", "layers", "layer_idx", "layer_id", "layer_index", "layer_num", "block", "block_idx", "i", "idx", "index")
    + ("k", "n", "num", "expert", "expert_idx", "expert_id")
)


def _no_value(rule: Template, name: str, variables: Mapping[str, Value]) -> NoReturn:
    near = dict(rule.near).get(name)
    indices = [one for one in rule.known if f"{one}.local" in rule.known]
    if len(indices) == 1 and name.casefold() in _INDICES_ELSEWHERE:
        near = indices[0]
    close = (
        near
        if near in indices or (name in _ALL_RANKS and near)
        else nearest(name, [*variables, *(n for n, _ in rule.sizes)]) or near
    )
    fail(
        "E122",
        f'"{rule.text}" names `{name}`, which has no value here',
        at(rule.span),
        remedy=_rank_word(name)
        or _counted(name)
        or _tensor_word(name)
        or (_AN_AXIS.format(name) if name in USUAL_AXES else "")
        or (
            f"did you mean `{close}`?"
            if close
            else f"known here: {', '.join(dict.fromkeys((*rule.known, *sorted({*variables, *dict(rule.sizes)}))))}"
        ),
    )


_AN_AXIS = (
    "`{0}` is no axis here: write it in the `mesh` line, and its degree among the parameters, or take `{{{0}}}` out"
)


def _tensor_word(name: str) -> str:
    """Of `tensor` and `param`: the name on the left side."""
    words = ("tensor", "param", "parameter", "tensor_name", "param_name", "path")
    return "the name on the line's left side is `{name}`" if name in words else ""


def _rank_word(name: str) -> str:
    """Of `tp_rank` and `tp_size`, as others call a coordinate and a degree."""
    axis, _, word = name.rpartition("_")
    if axis in USUAL_AXES and word in ("rank", "index", "idx", "id"):
        return f"the coordinate of {axis} is `{{{axis}}}`"
    if axis in USUAL_AXES and word in ("size", "world", "degree", "count"):
        return f"how many ranks {axis} has is `{{size({axis})}}`"
    return ""


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
    return tuple(Template(rule.text, tuple(s), rule.span, rule.sizes, rule.near, rule.known) for s in steps)
