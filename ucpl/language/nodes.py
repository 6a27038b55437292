"""The syntax tree of a .ucpl file: one frozen record per construct.

Each has a span for messages. Spans never take part in comparison (`eq=False`), so that two texts with the same meaning
give equal trees. Paths (names of tensors, dims, states) are plain strings, unquoted: `attn.q` and `"attn.q"` are the
same name.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import AttrsInstance, field

from ucpl.records import frozen

__all__ = [
    "NOWHERE",
    "Alias",
    "Among",
    "Any_",
    "Argument",
    "Assert",
    "Axis",
    "Binary",
    "Binding",
    "Blob",
    "Call",
    "Clause",
    "Cut",
    "DefaultDtype",
    "Derive",
    "Dim",
    "Dimension",
    "Dims",
    "Domain",
    "Each",
    "Entry",
    "Expr",
    "File",
    "Files",
    "Fill",
    "FillStates",
    "Flat",
    "Framework",
    "Function",
    "Gone",
    "Group",
    "Import",
    "Index",
    "Layout",
    "LayoutItem",
    "Let",
    "List",
    "Mesh",
    "Model",
    "ModelItem",
    "Name",
    "Number",
    "Pad",
    "Parameter",
    "Plan",
    "Range",
    "Record",
    "Rest",
    "Scaling",
    "Span",
    "Split",
    "Stack",
    "State",
    "Statement",
    "States",
    "Tensor",
    "Term",
    "Text",
    "Trim",
    "TypedOf",
    "Without",
    "Unary",
    "Use",
]


# ---- expressions and patterns ----------------------------------------------------------------------------------------

Record = AttrsInstance  # any record of the tree


@frozen
class Span:
    """A half-open range of characters in one file."""

    start: int
    stop: int
    line: int  # 1-based
    column: int  # 1-based
    file: str = ""
    said: str = field(default="", eq=False, repr=False)  # the complete line, if no file has it: a call's text
    version: int = field(default=1, eq=False, repr=False)  # of the language, as the file states it


NOWHERE = Span(0, 0, 0, 0, "")


def no_span() -> Span:
    """Field for the place of a record.

    It never takes part in comparison.
    """
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
    """A name in an expression: `tp`, `config.hidden_size`, `l.size`.

    A mesh axis means its size here.
    """

    path: str
    span: Span = no_span()


@frozen
class Function:
    """min, max, lcm, default, size(a), ceil(a, b); item(a, i) is written a[i]."""

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
    """Indices of a dim, in brackets.

    Ranges, numbers, and lists of numbers together; `others`: all but these.
    """

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
    """One run of a stack.

    Its label names the logical tensor that it comes from.
    """

    label: str | None
    axes: tuple[Axis, ...]
    span: Span = no_span()


@frozen
class Stack:
    """( a b + c ): terms end to end, each row-major."""

    terms: tuple[Term, ...]
    span: Span = no_span()


@frozen
class Pad:
    """Padding at the end to the next multiple.

    kind: `zero` (checked), `live` (trained rows), `undefined` (masked).
    """

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
class Copies:
    """`copies(n)`: a factor of n positions, which hold equal elements."""

    count: Expr
    span: Span = no_span()


@frozen
class Flat:
    """`axis` once per tensor of the group, end to end.

    Each means the tensor.
    """

    axis: Axis
    span: Span = no_span()


@frozen
class Each:
    span: Span = no_span()


@frozen
class Any_:
    """`_`: the next unnamed dim, in a layout of any model.

    `_[..24]` is a range of it. The terms of a `+` start from the same place: in `(_[..24]@tp + _[24..]@tp) _` the first
    two are one dim.
    """

    range: Among | None = None
    span: Span = no_span()


@frozen
class Rest:
    """`...`: all unnamed dims of a tensor, in order."""

    span: Span = no_span()


Axis = Dim | Stack | Pad | Trim | Copies | Flat | Each | Any_ | Rest | Cut


# ---- statements ------------------------------------------------------------------------------------------------------

# ---- model ---------------------------------------------------------------------------------------------------------


@frozen
class Dimension:
    """One dim of a logical tensor, perhaps only some of its indices.

    It is named, or a bare size (`67`, as infer writes).
    """

    name: str | None  # None: anonymous
    size: int | None = None  # of an anonymous one
    range: Among | None = None
    span: Span = no_span()


@frozen
class Scaling:
    """`scale of w by 128, 128`: one element for each block of w.

    The numbers are for dims that w has under other names.
    """

    of: str
    by: tuple[Expr, ...]
    span: Span = no_span()


@frozen
class Tensor:
    """`path : dims [dtype T] [is buffer|frozen|scale of w by ...] [when EXPR]`; `()` for no dims at all.

    A scale is frozen. `gate, up : l f h` makes two records. The second is `joined`.
    """

    path: str
    dims: tuple[Dimension, ...]
    dtype: str | None = None
    kind: Literal["parameter", "buffer", "frozen"] = "parameter"
    when: Expr | None = None
    scaling: Scaling | None = None
    joined: bool = field(default=False, eq=False, repr=False)  # a further name of the statement before
    span: Span = no_span()


@frozen
class Alias:
    """`alias "lm_head.weight" = "wte.weight"`: a second name of one tensor."""

    path: str
    owner: str
    when: Expr | None = None
    span: Span = no_span()


@frozen
class TypedOf:
    """`dtype f32 of router, "*.norm"`: the type of a state for these tensors.

    A star in a name makes a glob.
    """

    dtype: str
    of: tuple[str, ...]
    span: Span = no_span()


@frozen
class Without:
    """`without h for embed, "*.up"`: dims that a state lacks.

    Its tensors have one number for all indices of these dims. of None: each parameter of the state.
    """

    dims: tuple[str, ...]
    of: tuple[str, ...] | None = None
    span: Span = no_span()


@frozen
class State:
    """`state exp_avg, exp_avg_sq : bf16 [scalar] [of decay, nodecay] [dtype f32 of router]`: once per trained parameter."""

    names: tuple[str, ...]
    dtype: str
    scalar: bool = False
    groups: tuple[str, ...] | None = None  # None: every parameter
    typed: tuple[TypedOf, ...] = ()
    without: tuple[Without, ...] = ()
    within: str = field(default="", eq=False, repr=False)  # the prefix of the used model that has the line
    span: Span = no_span()


@frozen
class Gone:
    """`w : none`, `alias a = none`, `state m : none`, `group g = none`.

    They remove a definition of the base.
    """

    kind: Literal["tensor", "alias", "state", "group"]
    names: tuple[str, ...]
    joined: bool = field(default=False, eq=False, repr=False)  # a further tensor of the statement before
    span: Span = no_span()


@frozen
class DefaultDtype:
    name: str
    span: Span = no_span()


# ---- statements shared -----------------------------------------------------------------------------------------------


@frozen
class Binding:
    """A number and its name.

    Of a dim, `by`: the value is a list of sizes, one for each value of that dim.
    """

    name: str
    value: Expr
    by: str | None = None
    span: Span = no_span()


@frozen
class Let:
    bindings: tuple[Binding, ...]
    span: Span = no_span()


@frozen
class Dims:
    bindings: tuple[Binding, ...]
    span: Span = no_span()


@frozen
class Assert:
    condition: Expr
    message: str | None = None
    span: Span = no_span()


@frozen
class Argument:
    name: str | None
    value: Expr
    span: Span = no_span()


@frozen
class Call:
    """`megatron(tp = 2, pp = 4)`: a layout or model with its arguments."""

    name: str
    arguments: tuple[Argument, ...] = ()
    span: Span = no_span()


@frozen
class Use:
    """Another model or layout under a prefix: `use vision() as eye key "vision_tower.{key}" at pp[0]`."""

    call: Call
    name: str
    key: str | None = None
    at: tuple[Clause, ...] = ()  # of a layout: the ranks that have it
    span: Span = no_span()


@frozen
class Index:
    """`index l = l@pp`: the distribution of an index, or its digits."""

    name: str
    axis: Axis
    when: Expr | None = None
    span: Span = no_span()


@frozen
class Group:
    """`group g = members [order ...]`.

    Exactly one of: `members` (paths); `without` not None (`all - a - b`); `stated` (`from FILE "key"`); `of_model`
    (`group * = model`: the parameter groups of the model, each). `order`: None, "reversed", or the ways of `dealt n`.
    `name` is "*" with `of_model`.
    """

    name: str
    indices: tuple[Axis, ...] = ()
    members: tuple[str, ...] | None = None
    without: tuple[str, ...] | None = None
    stated: tuple[str, str] | None = None
    of_model: bool = False
    order: Literal["reversed"] | Expr | None = None
    span: Span = no_span()


# ---- layout ------------------------------------------------------------------------------------------------------------


@frozen
class Parameter:
    name: str
    default: Expr | None = None
    span: Span = no_span()


@frozen
class Mesh:
    """`mesh pp dp tp`, or `mesh expert: pp edp ep` for the same ranks seen otherwise. Major to minor."""

    name: str  # "" for the first
    axes: tuple[str, ...]
    span: Span = no_span()


@frozen
class Domain:
    """`domain node = "{pp}.{dp - dp % 4}"`: which ranks fail at once; `process` is the other kind."""

    kind: str
    template: str
    span: Span = no_span()


@frozen
class Files:
    """`file weights = torch "mp_rank_{tp:02}.pt" key "module/{key}"`; form None: nothing is stored."""

    name: str
    form: str | None
    template: str = ""
    key: str | None = None
    when: Expr | None = None
    span: Span = no_span()


@frozen
class Framework:
    """`framework deepspeed(stage = 1, dp = dp)`: the writer of non-tensor files.

    The arguments are the facts that it needs.
    """

    call: Call
    span: Span = no_span()


@frozen
class Clause:
    """One clause of an entry or state. `word` and `args`:

    copies (policy, (mesh axes...));  at (axis, expr);  on (mesh,);  in (file,);  as (template,);  dtype (name,);
    lossy ();  exact ();  value (expr,);  when (expr,);  buckets (expr,)
    """

    word: str
    args: tuple[Any, ...] = ()
    span: Span = no_span()


@frozen
class Entry:
    """One entry: the stored form of a tensor.

    `path` "*" with `of` None, or a class: parameter, trainable, frozen, buffer, alias. `shape` None: `none`, which
    removes the base layout's entry. `glob`: the texts between the stars of a glob, two at the least; `path` is then its
    text. A star that is part of a name is in `path` alone.
    """

    path: str
    indices: tuple[Axis, ...]
    shape: tuple[Axis, ...] | None
    clauses: tuple[Clause, ...] = ()
    of: str | None = None
    glob: tuple[str, ...] = ()
    joined: bool = field(default=False, eq=False, repr=False)  # a further left side of the statement before
    span: Span = no_span()


@frozen
class States:
    """`state a, b of g, h = shape`.

    names None: `*`. groups None: every tensor; `("*",)`: every group in turn.
    """

    names: tuple[str, ...] | None
    groups: tuple[str, ...] | None
    shape: tuple[Axis, ...] | Literal["like", "like(1)"] | None  # None: `none`
    clauses: tuple[Clause, ...] = ()
    span: Span = no_span()


@frozen
class Derive:
    """`derive weight from fp32`: not stored; computed by rounding to nearest even."""

    state: str
    source: str
    when: Expr | None = None
    span: Span = no_span()


@frozen
class Fill:
    """`fill w[l[4..]] = 0`: the value of elements that the source lacks.

    `path`, `of`, `glob` as in an entry.
    """

    path: str
    indices: tuple[Axis, ...]
    value: Expr
    of: str | None = None
    glob: tuple[str, ...] = ()
    when: Expr | None = None
    span: Span = no_span()


@frozen
class FillStates:
    """`fill state a, b of g = 0`: the same of states. `names` and `groups` as a state line's."""

    names: tuple[str, ...] | None
    groups: tuple[str, ...] | None
    value: Expr
    when: Expr | None = None
    span: Span = no_span()


@frozen
class Blob:
    """`blob rng @dp keep in meta as "rng"`. fate: keep, first, remap, drop."""

    name: str
    mesh_axes: tuple[str, ...]
    fate: Literal["keep", "first", "remap", "drop"]
    clauses: tuple[Clause, ...] = ()
    span: Span = no_span()


# ---- files -----------------------------------------------------------------------------------------------------------


@frozen
class Import:
    file: str
    names: tuple[str, ...]
    span: Span = no_span()


ModelItem = Let | Dims | DefaultDtype | Tensor | Alias | State | Assert | Index | Use | Group | Gone
LayoutItem = (
    Gone
    | Let
    | Dims
    | Assert
    | Mesh
    | Domain
    | Index
    | Files
    | Framework
    | Group
    | Entry
    | States
    | Derive
    | Fill
    | FillStates
    | Blob
    | Use
)


@frozen
class Model:
    """`model gpt(layers = 12) extends base(layers = layers) { ... }`; mostly neither parameters nor a base."""

    name: str
    items: tuple[ModelItem, ...]
    parameters: tuple[Parameter, ...] = ()
    extends: Call | None = None
    span: Span = no_span()


@frozen
class Layout:
    name: str
    parameters: tuple[Parameter, ...]
    of: str  # the model's name, or "any"
    extends: Call | None
    items: tuple[LayoutItem, ...]
    arguments: tuple[Argument, ...] = ()  # of the model: `of gpt(layers = 4)`
    span: Span = no_span()


@frozen
class Plan:
    """`plan grow = a(tp = 4) -> b(tp = 2) [drop exp_avg, ...] [freeze w, ...] [train v, ... [in decay]]`."""

    name: str
    source: Call
    target: Call
    drop: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    train: tuple[tuple[str, str | None], ...] = ()  # names, each with its group
    span: Span = no_span()


Statement = Import | Let | Assert | Model | Layout | Plan


@frozen
class File:
    """One parsed file.

    `name` is its name in errors; `text` is its source.
    """

    name: str
    version: int
    statements: tuple[Statement, ...]
    text: str = field(default="", eq=False, repr=False)
