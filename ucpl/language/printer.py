"""Records to text, which parses to an equal record.

A name that is not plain, or that is a word of the language at its place, is quoted. pages.py makes the text of a
complete file, with its columns and comments, from these functions. A statement is in the version of its own text,
unless another is asked for.

Not here: records that the language cannot express (a number below zero, a stack without terms). They are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, assert_never

from attrs import evolve, field

from ucpl.language import nodes
from ucpl.language.nodes import Axis, Clause, Expr
from ucpl.language.walk import walk
from ucpl.language.words import (
    AXIS_WORDS,
    BRACKET_WORDS,
    DIM_WORDS,
    FILL_WORDS,
    LACKED_WORDS,
    LAYOUT_WORDS,
    MEMBER_WORDS,
    MODEL_WORDS,
    NONE_WORDS,
    PATTERN_WORDS,
    SPLIT_WORDS,
    is_dotted,
    quote,
)
from ucpl.records import frozen

__all__ = [
    "StatementRow",
    "opening",
    "print_axis",
    "print_expr",
    "print_item",
    "row_of",
    "rows_of_plain",
    "statements_of",
    "worded",
]

_NO_WORDS: frozenset[str] = frozenset()

_LEVELS = {
    "or": 1,
    "and": 2,
    **dict.fromkeys(("==", "!=", "<=", ">=", "<", ">"), 4),
    "+": 5,
    "-": 5,
    "*": 6,
    "/": 6,
    "%": 6,
}
_NOT, _COMPARISON, _UNIT = 3, 4, 7


@frozen
class StatementRow:
    """One statement in four columns: sign and body may be empty.

    An example: `ln1[l]`, `=`, `h`, (`mean @tp`, `as "ln1"`).
    """

    kind: str  # rows of one kind align with each other
    head: str
    sign: str = ""
    body: str = ""
    tail: tuple[str, ...] = field(default=())

    def text(self) -> str:
        """The statement on one line."""
        return " ".join(part for part in (self.head, self.sign, self.body, *self.tail) if part)


# ---- names -----------------------------------------------------------------------------------------------------------


def _changes(item: nodes.Plan) -> Iterator[str]:
    """Names that a plan leaves out, freezes and trains, by group."""
    for word, paths in (("drop", item.drop), ("freeze", item.freeze)):
        if paths:
            yield f"{word} {', '.join(map(_path, paths))}"
    for group, some in groupby(item.train, key=lambda one: one[1]):
        names = ", ".join(_path(path) for path, _ in some)
        yield f"train {names}" if group is None else f"train {names} in {_name(group)}"


def _path(path: str, words: frozenset[str] = _NO_WORDS) -> str:
    """A dotted name.

    Only its first part can be read as a word of the language.
    """
    return quote(path) if not is_dotted(path) or path.partition(".")[0] in words else path


def _name(name: str, words: frozenset[str] = _NO_WORDS) -> str:
    """A name without dots."""
    return quote(name) if "." in name or not is_dotted(name) or name in words else name


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(_name(name) for name in names)


# ---- expressions -----------------------------------------------------------------------------------------------------


def print_expr(expr: Expr) -> str:
    """The expression with no more parentheses than it needs."""
    return _expr(expr, 0)


def _expr(expr: Expr, level: int) -> str:
    """The expression where operators below `level` need parentheses."""
    match expr:
        case nodes.Number():
            return str(expr.value)
        case nodes.Text():
            return quote(expr.value)
        case nodes.Name():
            return expr.path
        case nodes.Function(name="item", args=(nodes.Name(path=path), place)):
            return f"{path}[{_expr(place, 0)}]"
        case nodes.Function():
            return f"{expr.name}({', '.join(_expr(arg, 0) for arg in expr.args)})"
        case nodes.List():
            return f"[{', '.join(_expr(item, 0) for item in expr.items)}]"
        case nodes.Unary(operator="not"):
            text = f"not {_expr(expr.operand, _NOT)}"
            return f"({text})" if level > _NOT else text
        case nodes.Unary():
            return f"-{_expr(expr.operand, _UNIT)}"
        case nodes.Binary():
            own = _LEVELS[expr.operator]
            left = _expr(expr.left, own + (own == _COMPARISON))  # a comparison has only two sides
            text = f"{left} {expr.operator} {_expr(expr.right, own + 1)}"
            return f"({text})" if level > own else text
        case _:
            assert_never(expr)


def _bound(expr: Expr | None) -> str:
    """A bound of a range, where `by` is a word."""
    text = "" if expr is None else _expr(expr, 0)
    return f"({text})" if text == "by" or text.startswith(("by ", "by.", "by(")) else text


# ---- patterns --------------------------------------------------------------------------------------------------------


def print_axis(axis: Axis) -> str:
    """The pattern of one stored axis."""
    return _axis(axis, PATTERN_WORDS)


def _axis(axis: Axis, words: frozenset[str]) -> str:
    match axis:
        case nodes.Dim():
            name = quote("_") if axis.name == "_" else _path(axis.name, words)
            return name + _part(axis.range)
        case nodes.Stack():
            return f"({' + '.join(_term(term) for term in axis.terms)})"
        case nodes.Pad():
            kind = "" if axis.kind == "zero" else f", {axis.kind}"
            return f"pad({_axis(axis.axis, BRACKET_WORDS)}, {_expr(axis.multiple, 0)}{kind})"
        case nodes.Trim():
            return f"trim({_axis(axis.axis, BRACKET_WORDS)})"
        case nodes.Copies():
            return f"copies({_expr(axis.count, 0)})"
        case nodes.Flat():
            return f"flat({_axis(axis.axis, BRACKET_WORDS)})"
        case nodes.Each():
            return "each"
        case nodes.Any_():
            return f"_{_part(axis.range)}"
        case nodes.Rest():
            return "..."
        case nodes.Cut():
            return _axis(axis.axis, words) + "".join(_split(split) for split in axis.splits)
        case _:
            assert_never(axis)


def _part(among: nodes.Among | None) -> str:
    """Text in brackets behind a dim.

    A `not` that is part of a number is in parentheses: bare, it is the set's.
    """
    if among is None:
        return ""
    first, *rest = among.items
    shown = ("not " + _among_item(first, _NOT)) if among.others else _among_item(first, 0)
    return f"[{', '.join([shown, *(_among_item(item, 0) for item in rest)])}]"


def _among_item(item: nodes.Range | Expr, level: int) -> str:
    if not isinstance(item, nodes.Range):
        return _first(item, level)
    by = "" if item.step is None else f" by {_expr(item.step, 0)}"
    return f"{'' if item.start is None else _first(item.start, level)}..{_bound(item.stop)}{by}"


def _first(expr: Expr, level: int) -> str:
    if level == 0 and isinstance(expr, nodes.Unary) and expr.operator == "not":
        return f"({_expr(expr, 0)})"
    return _expr(expr, level)


def _term(term: nodes.Term) -> str:
    label = "" if term.label is None else f"{_path(term.label, AXIS_WORDS)}: "
    return label + " ".join(_axis(axis, BRACKET_WORDS) for axis in term.axes)


def _split(split: nodes.Split) -> str:
    axis = _name(split.mesh_axis, SPLIT_WORDS)
    if split.kind == "equal":
        return f"@{axis}"
    if split.kind == "sizes":
        return f"@{axis}[{', '.join(_expr(size, 0) for size in split.sizes)}]"
    grain = "" if split.grain is None else f", {_expr(split.grain, 0)}"
    return f"@{split.kind}({_name(split.mesh_axis)}{grain})"


def _indices(axes: tuple[Axis, ...]) -> str:
    return f"[{', '.join(_axis(axis, BRACKET_WORDS) for axis in axes)}]" if axes else ""


def _shape(axes: tuple[Axis, ...]) -> str:
    return " ".join(_axis(axis, PATTERN_WORDS) for axis in axes) if axes else "()"


# ---- statements ------------------------------------------------------------------------------------------------------


def _clause(clause: Clause) -> str:
    word, args = clause.word, clause.args
    match word:
        case "copies":
            return " ".join((args[0], *(f"@{_name(axis)}" for axis in args[1])))
        case "at":
            return f"at {_name(args[0])}[{_expr(args[1], 0)}]"
        case "as":
            return f"as {quote(args[0])}"
        case "on" | "in" | "dtype":
            return f"{word} {_name(args[0])}"
        case "lossy" | "exact":
            return word
        case _:
            return f"{word} {_expr(args[0], 0)}"


def _call(call: nodes.Call) -> str:
    return f"{_name(call.name)}({', '.join(_argument(argument) for argument in call.arguments)})"


def _argument(argument: nodes.Argument) -> str:
    if argument.name is None:
        # A bare comparison here is refused: it is a typing error for `dp = 8`.
        return _expr(argument.value, _COMPARISON + 1 if _is_equality(argument.value) else 0)
    value = _expr(argument.value, 0)
    return f"{_name(argument.name, frozenset({'not'}))} = {value}"


def _is_equality(expr: Expr) -> bool:
    return isinstance(expr, nodes.Binary) and expr.operator == "=="


def _bindings(bindings: tuple[nodes.Binding, ...], version: int) -> str:
    return ", ".join(_binding(b, version) for b in bindings)


def _binding(binding: nodes.Binding, version: int) -> str:
    name, value = _name(binding.name), _expr(binding.value, 0)
    if binding.by is None:
        return f"{name} = {value}"
    return f"{name} = {value} by {_name(binding.by)}" if version == 1 else f"{name}[{_name(binding.by)}] = {value}"


def _when(when: Expr | None) -> tuple[str, ...]:
    return () if when is None else (f"when {_expr(when, 0)}",)


def _key(key: str | None) -> tuple[str, ...]:
    return () if key is None else (f"key {quote(key)}",)


def _groups(groups: tuple[str, ...] | None, version: int) -> str:
    word = "of" if version == 1 else "for"
    return "" if groups is None else f" {word} {'*' if groups == ('*',) else _names(groups)}"


def _class(of: str | None, version: int) -> str:
    word = "of" if version == 1 else "is"
    return "" if of is None else f" {word} {of}"


def _with_clauses(
    kind: str,
    head: str,
    shape: tuple[Axis, ...] | Literal["like", "like(1)"] | None,
    clauses: tuple[Clause, ...],
    version: int,
) -> StatementRow:
    """A line of tensors or of states."""
    body = "none" if shape is None else shape if isinstance(shape, str) else _shape(shape)
    size = next((c.args[0] for c in clauses if c.word == "buckets"), None) if version > 1 else None
    flat = None
    if size is not None and isinstance(shape, tuple):
        flat = next((n for n in walk(*shape) if isinstance(n, nodes.Flat)), None)
    if size is not None and flat is not None:  # version 2 has the number in the flat
        bare = _axis(flat, BRACKET_WORDS)
        body = body.replace(bare, f"{bare[:-1]}, {_expr(size, 0)})", 1)
        clauses = tuple(c for c in clauses if c.word != "buckets")
    return StatementRow(kind, head, "=", body, tuple(_clause(c) for c in clauses))


def _dimension(dimension: nodes.Dimension) -> str:
    if dimension.name is None:
        return str(dimension.size)
    return _path(dimension.name, DIM_WORDS) + _part(dimension.range)


def _without(item: nodes.Without) -> str:
    of = "" if item.of is None else f" for {', '.join(map(_path, item.of))}"
    return f"without {' '.join(_path(dim, LACKED_WORDS) for dim in item.dims)}{of}"


def _group(group: nodes.Group) -> StatementRow:
    order: tuple[str, ...] = ()
    if isinstance(group.order, str):
        order = ("order reversed",)
    elif group.order is not None:
        order = (f"order dealt {_expr(group.order, 0)}",)
    head = "group *" if group.of_model else f"group {_name(group.name)}{_indices(group.indices)}"
    if group.of_model:
        body = "model"
    elif group.stated is not None:
        body = f"from {_name(group.stated[0])} {quote(group.stated[1])}"
    elif group.without is not None:
        body = " - ".join(("all", *(_name(name) for name in group.without)))
    else:
        first, *others = group.members or ("",)
        body = ", ".join((_path(first, MEMBER_WORDS), *(_path(other) for other in others)))
    return StatementRow("group", head, "=", body, order)


def _tensor(tensor: nodes.Tensor, version: int) -> StatementRow:
    tail = [f"dtype {_name(tensor.dtype)}"] if tensor.dtype is not None else []
    if tensor.scaling is not None:
        of, by = _path(tensor.scaling.of), ", ".join(_expr(e, 0) for e in tensor.scaling.by)
        tail.append(f"is scale of {of} by {by}" if version == 1 else f"is scale({of}, {by})")
    elif tensor.kind != "parameter":
        tail.append(f"is {tensor.kind}")
    dims = " ".join([_dimension(dimension) for dimension in tensor.dims]) or "()"
    return StatementRow("tensor", _path(tensor.path, MODEL_WORDS), ":", dims, (*tail, *_when(tensor.when)))


def rows_of_plain(tensors: Sequence[nodes.Tensor], version: int) -> list[tuple[str, StatementRow]] | None:
    """The head of each tensor, and a row with the other columns.

    A row is made once for all tensors of one form. None: a tensor has a condition or a scale, or shares its line.
    """
    rows: dict[object, StatementRow] = {}  # by identity: a model of files has one record for all dims of a shape
    found: list[tuple[str, StatementRow]] = []
    for tensor in tensors:
        if tensor.when is not None or tensor.scaling is not None or tensor.joined:
            return None
        form = id(tensor.dims), tensor.dtype, tensor.kind
        row = rows.get(form)
        if row is None:
            row = rows[form] = _tensor(tensor, version)
        found.append((_path(tensor.path, MODEL_WORDS), row))
    return found


def _entry(entry: nodes.Entry, version: int) -> StatementRow:
    head = _left(entry, LAYOUT_WORDS) + _class(entry.of, version) + _indices(entry.indices)
    return _with_clauses("entry", head, entry.shape, entry.clauses, version)


def _left(entry: nodes.Entry | nodes.Fill, words: frozenset[str]) -> str:
    """`*`, a name, or a glob.

    A star of a name is written by its number: a plain star makes a glob.
    """
    if entry.glob:
        return '"' + "*".join(_starless(text)[1:-1] for text in entry.glob) + '"'
    if entry.path == "*":
        return "*"
    return _starless(entry.path) if "*" in entry.path else _path(entry.path, words)


def _starless(text: str) -> str:
    return quote(text).replace("*", "\\u{2a}")


def _states(states: nodes.States, version: int) -> StatementRow:
    head = f"state {'*' if states.names is None else _names(states.names)}{_groups(states.groups, version)}"
    return _with_clauses("states", head, states.shape, states.clauses, version)


def _file(file: nodes.Files) -> StatementRow:
    head = f"file {_name(file.name)}"
    if file.form is None:
        return StatementRow("file", head, "=", "none", _when(file.when))
    return StatementRow("file", head, "=", f"{file.form} {quote(file.template)}", (*_key(file.key), *_when(file.when)))


def row_of(item: nodes.ModelItem | nodes.LayoutItem | nodes.Statement, version: int | None = None) -> StatementRow:
    """Columns of one statement; of a model or layout, its first line."""
    version = item.span.version if version is None else version
    match item:
        case nodes.Tensor():  # first: there are most of them
            return _tensor(item, version)
        case nodes.Model() | nodes.Layout():
            return StatementRow("block", opening(item))
        case nodes.Import():
            return StatementRow("import", f"from {quote(item.file)}", "import", _names(item.names))
        case nodes.Let():
            return StatementRow("let", f"let {_bindings(item.bindings, version)}")
        case nodes.Dims():
            return StatementRow("dim", f"dim {_bindings(item.bindings, version)}")
        case nodes.Assert():
            message = "" if item.message is None else f", {quote(item.message)}"
            return StatementRow("assert", f"assert {_expr(item.condition, 0)}{message}")
        case nodes.Plan():
            body = f"{_call(item.source)} -> {_call(item.target)}"
            return StatementRow("plan", f"plan {_name(item.name)}", "=", body, tuple(_changes(item)))
        case nodes.DefaultDtype():
            return StatementRow("dtype", f"dtype {_name(item.name)}")
        case nodes.Alias():
            owner = _path(item.owner, NONE_WORDS)
            return StatementRow("alias", f"alias {_path(item.path)}", "=", owner, _when(item.when))
        case nodes.Gone():
            return _gone(item)
        case nodes.State():
            tail = ("scalar",) if item.scalar else ()
            dtype = _name(item.dtype, NONE_WORDS)
            word = "of" if version == 1 else "for"
            typed = tuple(f"dtype {_name(t.dtype)} {word} {', '.join(map(_path, t.of))}" for t in item.typed)
            body = " ".join((dtype, *tail)) + _groups(item.groups, version)
            typed += tuple(map(_without, item.without))
            return StatementRow("state", f"state {_names(item.names)}", ":", body, typed)
        case nodes.Use():
            return StatementRow(
                "use", f"use {_call(item.call)}", "as", _name(item.name), (*_key(item.key), *map(_clause, item.at))
            )
        case nodes.Index():
            return StatementRow("index", f"index {_name(item.name)}", "=", print_axis(item.axis), _when(item.when))
        case nodes.Group():
            return _group(item)
        case nodes.Mesh():
            name = f"{_name(item.name)}: " if item.name else ""
            return StatementRow("mesh", f"mesh {name}{' '.join(_name(axis) for axis in item.axes)}")
        case nodes.Domain():
            return StatementRow("domain", f"domain {item.kind}", "=", quote(item.template))
        case nodes.Files():
            return _file(item)
        case nodes.Framework():
            return StatementRow("framework", f"framework {_call(item.call)}")
        case nodes.Entry():
            return _entry(item, version)
        case nodes.States():
            return _states(item, version)
        case nodes.Derive():
            text = f"derive {_name(item.state)} from {_name(item.source)}"
            return StatementRow("derive", text, tail=_when(item.when))
        case nodes.Fill():
            head = f"fill {_left(item, FILL_WORDS)}{_class(item.of, version)}{_indices(item.indices)}"
            return StatementRow("fill", head, "=", _expr(item.value, 0), _when(item.when))
        case nodes.FillStates():
            names = "*" if item.names is None else _names(item.names)
            head = f"fill state {names}{_groups(item.groups, version)}"
            return StatementRow("fill", head, "=", _expr(item.value, 0), _when(item.when))
        case nodes.Blob():
            axes = "".join(f" @{_name(axis)}" for axis in item.mesh_axes)
            head = f"blob {_path(item.name)}{axes} {item.fate}"
            return StatementRow("blob", head, tail=tuple(_clause(c) for c in item.clauses))
        case _:
            assert_never(item)


def _gone(gone: nodes.Gone) -> StatementRow:
    if gone.kind == "tensor":
        return StatementRow("tensor", _path(gone.names[0], MODEL_WORDS), ":", "none")
    names = _path(gone.names[0]) if gone.kind == "alias" else _names(gone.names)
    return StatementRow(gone.kind, f"{gone.kind} {names}", ":" if gone.kind == "state" else "=", "none")


def opening(block: nodes.Model | nodes.Layout) -> str:
    """The first line of a model or a layout, without its brace."""
    parameters = ", ".join(
        _name(p.name) + ("" if p.default is None else f" = {_expr(p.default, 0)}") for p in block.parameters
    )
    base = "" if block.extends is None else f" extends {_call(block.extends)}"
    if isinstance(block, nodes.Model):
        return f"model {_name(block.name)}{f'({parameters})' if parameters else ''}{base}"
    of = _call(nodes.Call(block.of, block.arguments)) if block.arguments else _name(block.of)
    return f"layout {_name(block.name)}({parameters}) of {of}{base}"


def worded(span: nodes.Span, first: str, newer: str) -> str:
    """Choose the wording for version 1, or for newer ones."""
    return first if span.version == 1 else newer


def print_item(item: nodes.ModelItem | nodes.LayoutItem | nodes.Statement) -> str:
    """One statement as text; of a model or layout, all statements."""
    if isinstance(item, nodes.Model | nodes.Layout):
        inner = (f"  {row.text()}" for _, row in statements_of(item.items))
        return "\n".join([f"{opening(item)} {{", *inner, "}"])
    return row_of(item).text()


Items = Iterable[nodes.ModelItem] | Iterable[nodes.LayoutItem]


def statements_of(
    items: Items, version: int | None = None
) -> list[tuple[nodes.ModelItem | nodes.LayoutItem, StatementRow]]:
    """The first record of each statement, and the row of them all.

    Records that a text joins are one statement as long as they differ in their left sides alone.
    """
    out: list[tuple[nodes.ModelItem | nodes.LayoutItem, StatementRow]] = []
    for item in items:
        row = row_of(item, version)
        if out and isinstance(item, nodes.Tensor | nodes.Entry | nodes.Gone) and item.joined:
            first, all_ = out[-1]
            if evolve(row, head="") == evolve(all_, head=""):
                out[-1] = first, evolve(all_, head=f"{all_.head}, {row.head}")
                continue
        out.append((item, row))
    return out
