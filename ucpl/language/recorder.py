"""Records of the parsed constructs, one method per rule of the grammar.

lark calls a method as soon as its rule is complete, so no tree is built in between. All tokens are kept as children:
the first and the last give the span of the record. A rule whose value is not a record returns a `Fragment`. Each class
has the methods of one subject, and adds them to those of the class above it; `Recorder` has all of them.

Not here: anything that needs more than one statement (see definitions.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, Protocol, TypeVar, cast, get_args

from attrs import evolve
from lark import Token

from ucpl.errors import Label, fail
from ucpl.language import nodes
from ucpl.language.foreign_words import words
from ucpl.language.nodes import Clause, Expr, Span
from ucpl.language.source import DEPTH_MAX, INDICES_MAX, INTEGER_MAX, NAME_CHARACTERS_MAX, Source
from ucpl.language.words import CLAUSE_WORDS, DIM_WORDS, ELEMENT_TYPES, INSTEAD, PATTERN_WORDS, quote, unquote
from ucpl.records import frozen
from ucpl.resources import VERSIONS

__all__ = ["ENTRY_CLASSES", "Recorder"]


# ---- spans, names, quoted texts --------------------------------------------------------------------------------------


class HasSpan(Protocol):
    """A record or a part."""

    @property
    def span(self) -> Span: ...


Place = Token | HasSpan
Children = list[Any]  # tokens, records and parts: which of them stand where, the rule says


@frozen
class Fragment:
    """A value on its way up, with its place."""

    kind: str
    value: Any
    span: Span


class SpanRecorder:
    """Spans, labels and names. `source` is the text that is being parsed."""

    def __init__(self) -> None:
        self.begin(Source("", ""))

    def begin(self, source: Source, version: int = 1) -> None:
        """Start on another text, of a version of the language."""
        self.source = source
        self.version = version
        self._buckets: list[Clause] = []  # of the flats in the statement that is being read
        # Depth of every expression of more than one level, by id: the records live until the text is done.
        self._depth: dict[int, int] = {}

    def span(self, children: Sequence[Place]) -> Span:
        """From the first child to the last."""
        first, last = children[0], children[-1]
        stop: int = (last.end_pos or 0) if isinstance(last, Token) else last.span.stop
        if not isinstance(first, Token):
            at = first.span
            return Span(at.start, stop, at.line, at.column, at.file, at.said, at.version)
        source = self.source
        line, column = first.line or 1, first.column or 1
        if source.line != 1 or source.column != 1:
            column += source.column - 1 if line == 1 else 0
            line += source.line - 1
        return Span(first.start_pos or 0, stop, line, column, source.name, source.line_text, self.version)

    def label(self, place: Place, text: str = "") -> Label:
        """A label at a token, a record or a part."""
        return self.source.label(self.span([place]), text)

    def string(self, token: Token) -> str:
        """The text of a quoted token."""
        return unquote(token, self.source, token.start_pos or 0)

    def word(self, token: Token, words: tuple[str, ...], what: str) -> str:
        """One word out of a list.

        A rule would make each a keyword; a list also gives the other words for the message.
        """
        if token in words:
            return str(token)
        known = ", ".join(f"`{word}`" for word in words)
        near = difflib.get_close_matches(str(token)[:40], words, 1, 0.75)
        remedy = f"did you mean `{near[0]}`?" if near else ""
        if "buffer" in words and not near:
            remedy = "a tensor is a parameter without a word: take the word out, or write `is frozen` or `is buffer`"
        if "live" in words and not near:
            remedy = "zeros need no word, as in pad(v, tp); others are pad(v, tp, live) and pad(v, tp, undefined)"
        fail(
            "E016",
            f"`{token}` is not {what}",
            self.label(token, f"one of {known} is expected here"),
            remedy=remedy,
            about=what if "live" in words else None,
        )

    def _element_type(self, part: Fragment) -> str:
        """The name of an element type. Raises E023 for any other."""
        name = str(part.value)
        if name not in ELEMENT_TYPES:
            near = difflib.get_close_matches(name[:40], sorted(ELEMENT_TYPES), 1)
            close = words().dtypes.get(name) or next(iter(near), "")
            known = ", ".join(sorted(ELEMENT_TYPES))
            remedy = f"write `{close}`" if close else f"there are {known}"
            if name == "scalar":
                remedy = "the element type comes before: write `f32 scalar`"
            fail("E023", f"no element type is called `{name}`", self.label(part, "named here"), remedy=remedy)
        return name

    def _twice(self, code: str, what: str, first: Place, second: Place, remedy: str = "") -> NoReturn:
        labels = self.label(second, "again here"), self.label(first, "first here")
        fail(code, f"{what} is given twice", *labels, remedy=remedy)

    def path(self, children: Children) -> Fragment:
        first = children[0]
        if len(children) == 1:
            if first.type == "STRING":
                return Fragment("quoted", self._name_of(first), self.span(children))
            return Fragment("path", str(first), self.span(children))
        value = "".join(children)
        if len(value) > NAME_CHARACTERS_MAX:
            self._long_name(self.span(children))
        return Fragment("path", value, self.span(children))

    def name(self, children: Children) -> Fragment:
        token = children[0]
        return Fragment("name", self._name_of(token) if token.type == "STRING" else str(token), self.span(children))

    mesh_name = split_name = changed_in = name
    changed = lacked = path

    def _name_of(self, token: Token) -> str:
        value = self.string(token)
        if value in ("", "*"):
            message = f"a name cannot be {'`*`, which means all' if value else 'empty'}"
            remedy = (
                'write it without quotes: all are `*`; some of them, a glob, "*.weight"' if value else "give it a name"
            )
            fail("E017", message, self.label(token, "not a name"), remedy=remedy)
        if len(value) > NAME_CHARACTERS_MAX:
            self._long_name(self.span([token]))
        return value

    def _long_name(self, span: Span) -> NoReturn:
        message = f"a name has {span.stop - span.start} characters; {NAME_CHARACTERS_MAX} are allowed"
        fail("E014", message, self.source.label(span))


def _sign(children: Children) -> int:
    """Number of the child that is `:` or `=`.

    It is behind the left sides of a statement.
    """
    return next(i for i, c in enumerate(children) if isinstance(c, Token) and c in (":", "="))


def _is_gone(children: Children) -> bool:
    """True if a statement says `none`."""
    last = children[-1]
    return isinstance(last, Token) and last.type == "NONE"


def _flat(items: Children) -> Children:
    """Items of a body, one record each.

    A statement with several left sides is as many records.
    """
    return [one for item in items for one in (item if isinstance(item, tuple) else (item,))]


def when_of(children: Children) -> Expr | None:
    """The condition of a statement that may carry one."""
    last = children[-1]
    return last.args[0] if isinstance(last, Clause) and last.word == "when" else None


# ---- expressions -----------------------------------------------------------------------------------------------------

Kept = TypeVar("Kept", bound=Expr)


class Numbers(SpanRecorder):
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

    def item(self, children: Children) -> Expr:
        """An item of a list, as the function that gives it."""
        at = next(i for i, c in enumerate(children) if isinstance(c, Token) and c == "[")
        args = self.reference(children[:at]), children[at + 1]
        if isinstance(args[1], nodes.Text):
            owner, key = args[0].path if isinstance(args[0], nodes.Name) else "", args[1].value
            remedy = f"a key of a section comes after a dot: {owner}.{key}" if owner else ""
            fail(
                "E001", "an item of a list has a number, not a text", self.label(args[1], "not a number"), remedy=remedy
            )
        return self._deepen(nodes.Function("item", args, span=self.span(children)), children[at], *args)

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


# ---- patterns --------------------------------------------------------------------------------------------------------

PadKind = Literal["zero", "live", "undefined"]
PAD_KINDS: tuple[str, ...] = get_args(PadKind)


class Patterns(Numbers):
    """Methods of the rules under "patterns"."""

    def dim(self, children: Children) -> nodes.Axis:
        span = self.span(children)
        bounds = None
        if children[-1].type == "RSQB":
            bounds = children[-2]
            children = children[:-3]
        part = self.path(children)
        # Quotes make a name of a word of the language. Every other quoted text here lacks the clause word before it.
        if part.kind == "quoted" and part.value != "_" and part.value.partition(".")[0] not in PATTERN_WORDS:
            fail(
                "E017",
                "a quoted text is in the place of an axis",
                self.label(part, "not an axis"),
                remedy=f"to name the stored tensor, put the clause word before it: as {self._literal(part)}",
            )
        if part.value == "_" and part.kind == "path":
            return nodes.Any_(bounds, span=span)
        return nodes.Dim(part.value, bounds, span=span)

    def range(self, children: Children) -> nodes.Range:
        start = stop = step = None
        before, by = True, False
        for child in children:
            if isinstance(child, Token):
                before, by = False, child.type == "BY"
            elif before:
                start = child
            elif by:
                step = child
            else:
                stop = child
        return nodes.Range(start, stop, step, span=self.span(children))

    def among(self, children: Children) -> nodes.Among:
        first, *rest = children[::2]
        for item in rest:
            if self._denied(item) is not None:
                fail(
                    "E022",
                    "`not` comes once, before everything else in the brackets",
                    self.label(item, "not here"),
                    remedy="write it first: l[not 1, 4] has all but 1 and 4",
                )
        denied = self._denied(first)
        if denied is not None:
            first = evolve(first, start=denied) if isinstance(first, nodes.Range) else denied
        return nodes.Among((first, *rest), denied is not None, span=self.span(children))

    def _denied(self, item: nodes.Range | nodes.Expr) -> nodes.Expr | None:
        """The part that a `not` in front of an item negates.

        It is not in parentheses.
        """
        expr = item.start if isinstance(item, nodes.Range) else item
        is_bare = isinstance(expr, nodes.Unary) and expr.operator == "not" and self.source.text[expr.span.start] == "n"
        return expr.operand if is_bare and isinstance(expr, nodes.Unary) else None

    def _literal(self, part: Fragment) -> str:
        return self.source.text[part.span.start : part.span.stop]

    def cut(self, children: Children) -> nodes.Axis:
        return nodes.Cut(children[0], tuple(children[1:]), span=self.span(children))

    def stack(self, children: Children) -> nodes.Axis:
        return nodes.Stack(tuple(children[1:-1:2]), span=self.span(children))

    def label_(self, children: Children) -> Fragment:
        return Fragment("label", self.path(children[:-1]).value, self.span(children))

    def term(self, children: Children) -> nodes.Term:
        first = children[0]
        if isinstance(first, Fragment):
            return nodes.Term(first.value, tuple(children[1:]), span=self.span(children))
        return nodes.Term(None, tuple(children), span=self.span(children))

    def pad(self, children: Children) -> nodes.Axis:
        axis, multiple = children[2], children[4]
        kind: PadKind = "zero"
        if len(children) > 6:
            kind = cast(PadKind, self.word(children[6], PAD_KINDS, "a kind of padding"))
        return nodes.Pad(axis, multiple, kind, span=self.span(children))

    def trim(self, children: Children) -> nodes.Axis:
        return nodes.Trim(children[2], span=self.span(children))

    def copied(self, children: Children) -> nodes.Axis:
        return nodes.Copies(children[2], span=self.span(children))

    def flat(self, children: Children) -> nodes.Axis:
        if len(children) > 4:  # `flat(x, n)`: the record has the number as a clause
            self._buckets.append(Clause("buckets", (children[4],), span=self.span(children[4:5])))
        return nodes.Flat(children[2], span=self.span(children))

    def each(self, children: Children) -> nodes.Axis:
        return nodes.Each(span=self.span(children))

    def rest(self, children: Children) -> nodes.Axis:
        return nodes.Rest(span=self.span(children))

    def split(self, children: Children) -> nodes.Split:
        sizes = tuple(children[3:-1:2])
        return nodes.Split(children[1].value, "sizes" if sizes else "equal", sizes, None, span=self.span(children))

    def chunk(self, children: Children) -> nodes.Split:
        grain = children[5] if len(children) > 5 else None
        return nodes.Split(children[3].value, "chunk", (), grain, span=self.span(children))

    def spread(self, children: Children) -> nodes.Split:
        grain = children[5] if len(children) > 5 else None
        return nodes.Split(children[3].value, "spread", (), grain, span=self.span(children))

    def indices(self, children: Children) -> Fragment:
        axes = tuple(children[1:-1:2])
        if len(axes) > INDICES_MAX:
            message = f"an entry has {len(axes)} indices; {INDICES_MAX} are allowed"
            fail("E013", message, self.label(axes[INDICES_MAX], "one index too many"))
        return Fragment("indices", axes, self.span(children))

    def _words_first(self, place: HasSpan, name: str | None, words: frozenset[str], where: str) -> None:
        """Refuse a clause at the place where the axes should begin.

        The parser would read its words as the names of axes.
        """
        start = place.span.start
        if name in words and self.source.text[start] != '"' and not (self.version > 1 and name in INSTEAD):
            fail(
                "E020",
                f"the clause `{name}` comes before the {where}",
                self.source.label(self.source.span(start, start + len(name)), f"the {where} should stand here"),
                remedy=f"finish the {where} first, () if there are none; the clauses come after it."
                f" As a name it needs quotes: {quote(name)}",
            )

    def shape(self, children: Children) -> Fragment:
        axes = () if isinstance(children[0], Token) else tuple(children)
        if axes:
            first = axes[0].axis if isinstance(axes[0], nodes.Cut) else axes[0]
            if isinstance(first, nodes.Dim):
                self._words_first(first, first.name, CLAUSE_WORDS, "pattern")
        return Fragment("shape", axes, self.span(children))


_SCALES = {1: "scale of w by 128, 128", 2: "scale(w, 128, 128)"}

# ---- models, and statements of both models and layouts
# -----------------------------------------------------------------


class Models(Patterns):
    """Methods of the rules under "model".

    Also `let`, `dim`, `assert`, calls, `use`, `index` and `group`.
    """

    def extent(self, children: Children) -> nodes.Dimension:
        span = self.span(children)
        if children[0].type == "INT":
            return nodes.Dimension(None, self._integer(children[0]), None, span=span)
        bounds = None
        if children[-1].type == "RSQB":
            bounds = children[-2]
            children = children[:-3]
        return nodes.Dimension(self.path(children).value, None, bounds, span=span)

    def typed(self, children: Children) -> Fragment:
        return Fragment("typed", self._element_type(children[1]), self.span(children))

    def kind(self, children: Children) -> Fragment:
        word = self.word(children[1], ("buffer", "frozen", "scale"), "a class of tensors, other than a parameter")
        scaling = children[2] if len(children) > 2 else None
        if (word == "scale") != (scaling is not None):
            fail(
                "E029",
                "a scale names its tensor, and no other class does",
                self.label(children[1], "here"),
                remedy=f"write `is {_SCALES[self.version]}`, or `is buffer`, `is frozen`",
            )
        return Fragment("kind", scaling or word, self.span(children))

    def scaling(self, children: Children) -> nodes.Scaling:
        numbers = children[3:-1:2] if children[0] == "(" else children[3::2]
        return nodes.Scaling(children[1].value, tuple(numbers), span=self.span(children))

    def key(self, children: Children) -> Fragment:
        return Fragment("key", self.string(children[1]), self.span(children))

    def for_groups(self, children: Children) -> Fragment:
        names = tuple(c.value for c in children[1:] if isinstance(c, Fragment))
        return Fragment("groups", names or ("*",), self.span(children))

    of_groups = for_groups  # as version 1 calls it

    def tensor(self, children: Children) -> tuple[nodes.Tensor, ...] | nodes.Gone | tuple[nodes.Gone, ...]:
        if _is_gone(children):
            return self.gone(children)
        dims = tuple(c for c in children if isinstance(c, nodes.Dimension))
        parts = {c.kind: c.value for c in children[1:] if isinstance(c, Fragment)}
        if dims:
            self._words_first(dims[0], dims[0].name, DIM_WORDS, "dims")
        kind = parts.get("kind", "parameter")
        scaling = kind if isinstance(kind, nodes.Scaling) else None
        first = nodes.Tensor(
            children[0].value,
            dims,
            dtype=parts.get("typed"),
            kind="frozen" if scaling else kind,
            when=when_of(children),
            scaling=scaling,
            span=self.span(children),
        )
        others: Children = children[2 : _sign(children) : 2]
        return (first, *(evolve(first, path=c.value, joined=True, span=c.span) for c in others))

    def gone(self, children: Children) -> nodes.Gone | tuple[nodes.Gone, ...]:
        word = children[0]
        names = tuple(c.value for c in children if isinstance(c, Fragment))
        if isinstance(word, Token):
            return nodes.Gone(cast(Literal["alias", "state", "group"], str(word)), names, span=self.span(children))
        first = nodes.Gone("tensor", names[:1], span=self.span(children))
        others = [c for c in children[2:] if isinstance(c, Fragment)]
        return (first, *(nodes.Gone("tensor", (c.value,), joined=True, span=c.span) for c in others))

    def alias(self, children: Children) -> nodes.Alias | nodes.Gone | tuple[nodes.Gone, ...]:
        if _is_gone(children):
            return self.gone(children)
        return nodes.Alias(children[1].value, children[3].value, when_of(children), span=self.span(children))

    def state(self, children: Children) -> nodes.State | nodes.Gone | tuple[nodes.Gone, ...]:
        if _is_gone(children):
            return self.gone(children)
        names = [c.value for c in children if isinstance(c, Fragment) and c.kind == "name"]
        groups = next((c.value for c in children if isinstance(c, Fragment) and c.kind == "groups"), None)
        scalar = any(isinstance(c, Token) and c.type == "SCALAR" for c in children)
        kind = self._element_type([c for c in children if isinstance(c, Fragment) and c.kind == "name"][-1])
        typed = tuple(c for c in children if isinstance(c, nodes.TypedOf))
        without = tuple(c for c in children if isinstance(c, nodes.Without))
        if scalar and (typed or without):
            why = "a state with one number a tensor has no dims, and one type"
            remedy = f"take `{'dtype' if typed else 'without'}` out, or the word `scalar`"
            fail("E001", why, self.label(typed[0] if typed else without[0], "not after `scalar`"), remedy=remedy)
        return nodes.State(tuple(names[:-1]), kind, scalar, groups, typed, without, span=self.span(children))

    def without(self, children: Children) -> nodes.Without:
        word = next((n for n, c in enumerate(children) if isinstance(c, Token) and c.type == "FOR"), len(children))
        of = tuple(c.value for c in children[word + 1 :: 2]) or None
        return nodes.Without(tuple(c.value for c in children[1:word]), of, span=self.span(children))

    def typed_for(self, children: Children) -> nodes.TypedOf:
        names = tuple(c.value for c in children[3::2])
        return nodes.TypedOf(self._element_type(children[1]), names, span=self.span(children))

    typed_of = typed_for

    def default_dtype(self, children: Children) -> nodes.DefaultDtype:
        return nodes.DefaultDtype(self._element_type(children[1]), span=self.span(children))

    def binding(self, children: Children) -> nodes.Binding:
        return nodes.Binding(children[0].value, children[2], span=self.span(children))

    def sized(self, children: Children) -> nodes.Binding:
        by = next((c.value for c in children[1:] if isinstance(c, Fragment)), None)
        return nodes.Binding(children[0].value, children[_sign(children) + 1], by, span=self.span(children))

    def let(self, children: Children) -> nodes.Let:
        return nodes.Let(tuple(children[1::2]), span=self.span(children))

    def dims(self, children: Children) -> nodes.Dims:
        return nodes.Dims(tuple(children[1::2]), span=self.span(children))

    def assert_(self, children: Children) -> nodes.Assert:
        message = self.string(children[3]) if len(children) > 2 else None
        return nodes.Assert(children[1], message, span=self.span(children))

    def argument(self, children: Children) -> nodes.Argument:
        if len(children) == 1:
            value = children[0]
            if isinstance(value, nodes.Binary) and value.operator == "==" and self.source.text[value.span.start] != "(":
                fail(
                    "E001",
                    "`==` compares two numbers; it does not give an argument",
                    self.label(value, "an argument is given by one `=`"),
                    remedy="write one `=`, or parentheses around the comparison",
                )
            return nodes.Argument(None, value, span=self.span(children))
        return nodes.Argument(children[0].value, children[2], span=self.span(children))

    def call(self, children: Children) -> nodes.Call:
        arguments = tuple(children[2:-1:2])
        named: dict[str, nodes.Argument] = {}
        for argument in arguments:
            if argument.name is None:
                if named:
                    last = next(reversed(named.values()))
                    fail(
                        "E018",
                        "an argument without a name follows one with a name",
                        self.label(argument, "which parameter is this?"),
                        self.label(last, "named from here on"),
                    )
            elif argument.name in named:
                self._twice("E008", f"the argument `{argument.name}`", named[argument.name], argument)
            else:
                named[argument.name] = argument
        return nodes.Call(children[0].value, arguments, span=self.span(children))

    def call_text(self, children: Children) -> nodes.Call:
        only = next(c for c in children if not isinstance(c, Token))
        return only if isinstance(only, nodes.Call) else nodes.Call(only.value, (), span=only.span)

    def use(self, children: Children) -> nodes.Use:
        key = next((c.value for c in children if isinstance(c, Fragment) and c.kind == "key"), None)
        ranks = tuple(c for c in children if isinstance(c, nodes.Clause))
        return nodes.Use(children[1], children[3].value, key, ranks, span=self.span(children))

    def index(self, children: Children) -> nodes.Index:
        return nodes.Index(children[1].value, children[3], when_of(children), span=self.span(children))

    def members(self, children: Children) -> Fragment:
        return Fragment("members", tuple(c.value for c in children[::2]), self.span(children))

    def everything(self, children: Children) -> Fragment:
        return Fragment("without", tuple(c.value for c in children[2::2]), self.span(children))

    def stated(self, children: Children) -> Fragment:
        return Fragment("stated", (children[1].value, self.string(children[2])), self.span(children))

    def order(self, children: Children) -> Fragment:
        value = "reversed" if len(children) == 2 else children[2]
        return Fragment("order", value, self.span(children))

    def group(self, children: Children) -> nodes.Group | nodes.Gone | tuple[nodes.Gone, ...]:
        parts = {c.kind: c.value for c in children[2:] if isinstance(c, Fragment)}
        if _is_gone(children):
            if "indices" in parts:
                remedy = f"write: group {children[1].value} = none"
                fail("E001", "a group goes with all of its indices", self.label(children[2], "not here"), remedy=remedy)
            return self.gone(children)
        star = isinstance(children[1], Token)
        return nodes.Group(
            "*" if star else children[1].value,
            parts.get("indices", ()),
            members=parts.get("members"),
            without=parts.get("without"),
            stated=parts.get("stated"),
            of_model=star,
            order=parts.get("order"),
            span=self.span(children),
        )


# ---- layouts and their clauses ---------------------------------------------------------------------------------------

DOMAINS = ("node", "process")
ENTRY_CLASSES = ("parameter", "trainable", "frozen", "buffer", "alias")
ONCE = frozenset(
    {"on", "in", "as", "dtype", "lossy", "exact", "value", "when", "buckets"}
)  # `at` and policies may repeat


def _clause(word: str) -> Callable[[Layouts, Children], Clause]:
    """The method of a clause of one word and one argument."""

    def build(self: Layouts, children: Children) -> Clause:
        argument = children[1]
        if isinstance(argument, Fragment):
            argument = argument.value
        elif isinstance(argument, Token):
            argument = self.string(argument)
        return Clause(word, (argument,), span=self.span(children))

    return build


class Layouts(Models):
    """Methods of the rules under "layout": statements and clauses."""

    def parameter(self, children: Children) -> nodes.Parameter:
        default = children[2] if len(children) > 1 else None
        return nodes.Parameter(children[0].value, default, span=self.span(children))

    def mesh(self, children: Children) -> nodes.Mesh:
        names = [c.value for c in children if isinstance(c, Fragment)]
        named = len(children) > 2 and isinstance(children[2], Token)
        name, axes = (names[0], names[1:]) if named else ("", names)
        for i, axis in enumerate(axes):
            if axis in axes[:i]:
                parts = [c for c in children if isinstance(c, Fragment) and c.value == axis]
                others = " ".join(one for one in axes if one != axis)
                remedy = (
                    f"axes stand side by side, without a sign between\nwrite: mesh {others}" if axis in "xX" else ""
                )
                self._twice("E008", f"the mesh axis `{axis}`", parts[-2], parts[-1], remedy)
        return nodes.Mesh(name, tuple(axes), span=self.span(children))

    def domain(self, children: Children) -> nodes.Domain:
        kind = self.word(children[1], DOMAINS, "a kind of domain")
        return nodes.Domain(kind, self.string(children[3]), span=self.span(children))

    def file(self, children: Children) -> nodes.Files:
        name, form, when = children[1].value, children[3], when_of(children)
        if form.type == "NONE":
            return nodes.Files(name, None, when=when, span=self.span(children))
        key = next((c.value for c in children if isinstance(c, Fragment) and c.kind == "key"), None)
        return nodes.Files(name, str(form), self.string(children[4]), key, when, span=self.span(children))

    def framework(self, children: Children) -> nodes.Framework:
        return nodes.Framework(children[1], span=self.span(children))

    def derive(self, children: Children) -> nodes.Derive:
        return nodes.Derive(children[1].value, children[3].value, when_of(children), span=self.span(children))

    def is_class(self, children: Children) -> Fragment:
        word = self.word(children[1], ENTRY_CLASSES, "a class of tensors")
        return Fragment("class", word, self.span(children))

    of_class = is_class

    def left(self, children: Children) -> Fragment:
        path = "*" if isinstance(children[0], Token) else children[0].value
        parts = {c.kind: c.value for c in children[1:]}
        sides = path, parts.get("indices", ()), parts.get("class"), self._glob(children[0])
        return Fragment("left", sides, self.span(children))

    def entry(self, children: Children) -> tuple[nodes.Entry, ...]:
        parts = {c.kind: c.value for c in children if isinstance(c, Fragment)}
        shape, clauses = parts.get("shape"), self._clauses(children)
        out = []
        for n, side in enumerate(children[: _sign(children) : 2]):
            path, indices, of, glob = side.value
            span = side.span if n else self.span(children)
            out.append(nodes.Entry(path, indices, shape, clauses, of, glob, joined=n > 0, span=span))
        return tuple(out)

    def _glob(self, left: Token | Fragment) -> tuple[str, ...]:
        """Texts between the stars of a quoted left side.

        A star that is written by its number is part of the name.
        """
        if isinstance(left, Token) or left.kind != "quoted":
            return ()
        start = left.span.start
        texts = self.source.text[start + 1 : left.span.stop - 1].split("*")
        return tuple(unquote(f'"{text}"', self.source, start) for text in texts) if len(texts) > 1 else ()

    def states(self, children: Children) -> nodes.States:
        names = tuple(c.value for c in children if isinstance(c, Fragment) and c.kind == "name")
        parts = {c.kind: c.value for c in children if isinstance(c, Fragment)}
        like = next((n for n, c in enumerate(children) if isinstance(c, Token) and c.type == "LIKE"), None)
        count = next((c for c in children if isinstance(c, Token) and c.type == "INT"), None)
        if count is not None and count != "1":
            fail(
                "E001",
                f"`like({count})` has no meaning",
                self.label(count, "not 1"),
                remedy="axes without dims have one element, like(1), or are left out, `like`",
            )
        return nodes.States(
            names or None,
            parts.get("groups"),
            parts.get("shape") if like is None else "like" if count is None else "like(1)",
            self._clauses(children),
            span=self.span(children),
        )

    def fill(self, children: Children) -> nodes.Fill:
        path = "*" if isinstance(children[1], Token) else children[1].value
        parts = {c.kind: c.value for c in children[2:] if isinstance(c, Fragment)}
        return nodes.Fill(
            path,
            parts.get("indices", ()),
            self._filled(children),
            parts.get("class"),
            self._glob(children[1]),
            when_of(children),
            span=self.span(children),
        )

    def fill_states(self, children: Children) -> nodes.FillStates:
        names = tuple(c.value for c in children if isinstance(c, Fragment) and c.kind == "name")
        groups = next((c.value for c in children if isinstance(c, Fragment) and c.kind == "groups"), None)
        value = self._filled(children)
        return nodes.FillStates(names or None, groups, value, when_of(children), span=self.span(children))

    @staticmethod
    def _filled(children: Children) -> nodes.Expr:
        """The value behind `=`."""
        at = next(i for i, c in enumerate(children) if isinstance(c, Token) and c == "=")
        value: nodes.Expr = children[at + 1]
        return value

    def fate(self, children: Children) -> Fragment:
        word = self.word(children[0], ("keep", "first", "remap", "drop"), "a fate of a blob")
        return Fragment("fate", word, self.span(children))

    def blob(self, children: Children) -> nodes.Blob:
        axes = tuple(c.value for c in children if isinstance(c, Fragment) and c.kind == "name")
        fate = next(c.value for c in children if isinstance(c, Fragment) and c.kind == "fate")
        return nodes.Blob(children[1].value, axes, fate, self._clauses(children), span=self.span(children))

    on_mesh, in_file, as_key = _clause("on"), _clause("in"), _clause("as")
    value, when, buckets = _clause("value"), _clause("when"), _clause("buckets")

    def stored_dtype(self, children: Children) -> Clause:
        return Clause("dtype", (self._element_type(children[1]),), span=self.span(children))

    def lossy(self, children: Children) -> Clause:
        return Clause("lossy", (), span=self.span(children))

    def exact(self, children: Children) -> Clause:
        return Clause("exact", (), span=self.span(children))

    def policy(self, children: Children) -> Fragment:
        return Fragment("policy", str(children[0]), self.span(children))

    def copies(self, children: Children) -> Clause:
        axes = tuple(c.value for c in children[2::2])
        return Clause("copies", (children[0].value, axes), span=self.span(children))

    def at(self, children: Children) -> Clause:
        return Clause("at", (children[1].value, children[3]), span=self.span(children))

    def _no_buckets_before(self, start: int) -> None:
        """Refuse the number of a flat in a statement without clauses."""
        for clause in self._buckets:
            if clause.span.start < start:
                why = "the number of a flat is for a line of states or of a tensor"
                fail("E001", why, self.label(clause, "not here"), remedy="take it out: flat(x)")

    def _clauses(self, children: Children) -> tuple[Clause, ...]:
        self._no_buckets_before(self.span(children).start)
        clauses = (*(c for c in children if isinstance(c, Clause)), *self._buckets)
        self._buckets = []
        seen: dict[str, Clause] = {}
        for clause in clauses:
            if clause.word in seen:
                self._twice("E009", f"the clause `{clause.word}`", seen[clause.word], clause)
            if clause.word in ONCE:
                seen[clause.word] = clause
        return clauses


# ---- files -----------------------------------------------------------------------------------------------------------


class Recorder(Layouts):
    """Methods that lark calls, by the names of the rules."""

    def import_(self, children: Children) -> nodes.Import:
        names = tuple(c.value for c in children[3::2])
        return nodes.Import(self.string(children[1]), names, span=self.span(children))

    def model(self, children: Children) -> nodes.Model:
        name, *rest = (c for c in children if not isinstance(c, Token))
        parts = {c.kind: c.value for c in rest if isinstance(c, Fragment)}
        items = tuple(_flat([c for c in rest if not isinstance(c, Fragment)]))
        span = self.span(children)
        return nodes.Model(name.value, items, parts.get("parameters", ()), parts.get("extends"), span=span)

    def parameters(self, children: Children) -> Fragment:
        return Fragment("parameters", tuple(children[1:-1:2]), self.span(children))

    def extends(self, children: Children) -> Fragment:
        return Fragment("extends", children[1], self.span(children))

    def layout(self, children: Children) -> nodes.Layout:
        name, parameters, of, *rest = (c for c in children if not isinstance(c, Token))
        base = rest.pop(0).value if rest and isinstance(rest[0], Fragment) else None
        model, arguments = (of.name, of.arguments) if isinstance(of, nodes.Call) else (of.value, ())
        span = self.span(children)
        return nodes.Layout(name.value, parameters.value, model, base, tuple(_flat(rest)), arguments, span=span)

    def drop(self, children: Children) -> Fragment:
        return Fragment("drop", tuple(c.value for c in children[1::2]), self.span(children))

    def freeze(self, children: Children) -> Fragment:
        return Fragment("freeze", tuple(c.value for c in children[1::2]), self.span(children))

    def train(self, children: Children) -> Fragment:
        named = isinstance(children[-2], Token) and children[-2] == "in"
        group = children[-1].value if named else None
        names = children[1:-2:2] if named else children[1::2]
        return Fragment("train", tuple((c.value, group) for c in names), self.span(children))

    def plan(self, children: Children) -> nodes.Plan:
        drop, freeze, train = (
            tuple(one for part in children[6:] if part.kind == kind for one in part.value)
            for kind in ("drop", "freeze", "train")
        )
        return nodes.Plan(children[1].value, children[3], children[5], drop, freeze, train, span=self.span(children))

    def header(self, children: Children) -> Fragment:
        number = children[1]
        if number not in map(str, VERSIONS):
            known = " and ".join(map(str, VERSIONS))
            fail(
                "E003",
                f"this file is written in version {number[:20]} of the language; this program reads versions {known}",
                self.label(number, "not a version that is known here"),
            )
        return Fragment("header", int(number), self.span(children))

    def start(self, children: Children) -> nodes.File:
        self._no_buckets_before(self.span(children).stop + 1)
        statements = tuple(c for c in children if not isinstance(c, Token | Fragment))
        version = next(c.value for c in children if isinstance(c, Fragment))
        return nodes.File(self.source.name, version, statements, self.source.text)
