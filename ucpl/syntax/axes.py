"""Expressions and patterns in the syntax tree: frozen records, one class per construct. `nodes` has them beside all others."""

from __future__ import annotations

from typing import Literal

from attrs import AttrsInstance, field

from ucpl.records import frozen

__all__ = [
    "NOWHERE",
    "Among",
    "Any_",
    "Axis",
    "Binary",
    "Cut",
    "Dim",
    "Each",
    "Expr",
    "Flat",
    "Function",
    "List",
    "Name",
    "Number",
    "Pad",
    "Range",
    "Record",
    "Rest",
    "Span",
    "Split",
    "Stack",
    "Term",
    "Text",
    "Trim",
    "Unary",
    "no_span",
]

Record = AttrsInstance  # any record of the tree


@frozen
class Span:
    """A half-open range of characters in one file."""

    start: int
    stop: int
    line: int  # 1-based
    column: int  # 1-based
    file: str = ""
    said: str = field(default="", eq=False, repr=False)  # the whole line, where no file has it: a call's text


NOWHERE = Span(0, 0, 0, 0, "")


def no_span() -> Span:
    """The field of a record that says where it stands: it never takes part in comparison."""
    made: Span = field(default=NOWHERE, eq=False, repr=False, kw_only=True)
    return made


# ---- expressions: whole numbers, lists, and words (texts) ----------------------------------------------------------


@frozen
class Number:
    value: int
    span: Span = no_span()


@frozen
class Text:
    """A quoted word as a value: `shard = "5GB"`."""

    value: str
    span: Span = no_span()


@frozen
class Name:
    """A name in an expression: `tp`, `config.hidden_size`, `l.size`. A mesh axis means its size here."""

    path: str
    span: Span = no_span()


@frozen
class Function:
    """min, max, lcm, default, size(a), ceil(a, b)."""

    name: str
    args: tuple[Expr, ...]
    span: Span = no_span()


@frozen
class List:
    items: tuple[Expr, ...]
    span: Span = no_span()


@frozen
class Unary:
    operator: Literal["-", "not"]
    operand: Expr
    span: Span = no_span()


@frozen
class Binary:
    """Left-associative; `and`/`or` give 0 or 1; `/` must leave no remainder."""

    operator: str  # + - * / % == != <= >= < > and or
    left: Expr
    right: Expr
    span: Span = no_span()


Expr = Number | Text | Name | Function | List | Unary | Binary


# ---- patterns: a stored axis is a list of cells --------------------------------------------------------------------


@frozen
class Range:
    """`1..4`, `1..`, `..dense`, `1.. by 2`: half-open, as a slice."""

    start: Expr | None = None
    stop: Expr | None = None
    step: Expr | None = None
    span: Span = no_span()


@frozen
class Among:
    """Indices of a dim, in brackets: ranges, numbers, and lists of numbers together; `others`: all but these."""

    items: tuple[Range | Expr, ...]
    others: bool = False
    span: Span = no_span()


@frozen
class Dim:
    """A dim, or some indices of it: `d[..24]`, `d[24..32]`, `l[1, 4]`."""

    name: str
    range: Among | None = None
    span: Span = no_span()


@frozen
class Split:
    """One `@` cut over a mesh axis.

    kind `equal`: equal pieces. `sizes`: `sizes` gives one size a piece (one item may be a list-valued name).
    `chunk`: torch.chunk, pieces of ceiling size, or of the next multiple of `grain`. `spread`: sizes differ by at most
    one `grain` (unit), the larger first.
    """

    mesh_axis: str
    kind: Literal["equal", "sizes", "chunk", "spread"] = "equal"
    sizes: tuple[Expr, ...] = ()
    grain: Expr | None = None
    span: Span = no_span()


@frozen
class Cut:
    """An axis cut by one or more splits, major first."""

    axis: Axis
    splits: tuple[Split, ...]
    span: Span = no_span()


@frozen
class Term:
    """One run of a stack; its label names the logical tensor that it comes from."""

    label: str | None
    axes: tuple[Axis, ...]
    span: Span = no_span()


@frozen
class Stack:
    """( a b + c ): terms end to end, axes inside a term row-major."""

    terms: tuple[Term, ...]
    span: Span = no_span()


@frozen
class Pad:
    """Grown at the end to the next multiple. kind: `zero` (checked), `live` (trained rows), `undefined` (masked)."""

    axis: Axis
    multiple: Expr
    kind: Literal["zero", "live", "undefined"] = "zero"
    span: Span = no_span()


@frozen
class Trim:
    """The axis without the padding at its end."""

    axis: Axis
    span: Span = no_span()


@frozen
class Flat:
    """`axis` once per tensor of the group, end to end; Each stands for the tensor."""

    axis: Axis
    span: Span = no_span()


@frozen
class Each:
    span: Span = no_span()


@frozen
class Any_:
    """`_`: the next dim that is not yet named, in a layout of any model; `_[..24]` a range of it.

    The terms of a `+` start from the same place: in `(_[..24]@tp + _[24..]@tp) _` the first two are one dim.
    """

    range: Among | None = None
    span: Span = no_span()


@frozen
class Rest:
    """`...`: all dims of a tensor that are not yet named, in order."""

    span: Span = no_span()


Axis = Dim | Stack | Pad | Trim | Flat | Each | Any_ | Rest | Cut
