"""Turns what the parser recognises into records, one method per rule of the grammar, while it parses.

lark calls a method as soon as its rule is complete, so no tree is built in between. All tokens are kept as children:
the first and the last say where the record stands. A rule whose value is not a record hands up a `Part`.

Not here: anything that needs more than one statement (see definitions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from attrs import evolve, frozen
from lark import Token

from ucpl.errors import Label, fail
from ucpl.syntax import nodes
from ucpl.syntax.limits import DEPTH_MAX, INDICES_MAX, INTEGER_MAX, NAME_CHARACTERS_MAX
from ucpl.syntax.nodes import Clause, Expr, Span
from ucpl.syntax.quoting import quote, unquote
from ucpl.syntax.source import Source
from ucpl.syntax.words import CLAUSE_WORDS, DIM_WORDS, PATTERN_WORDS

__all__ = ["ENTRY_CLASSES", "ONCE", "VERSION", "Part", "Recorder"]

VERSION = 1
ENTRY_CLASSES = ("parameter", "trainable", "frozen", "buffer", "alias")
ONCE = frozenset({"on", "in", "as", "dtype", "lossy", "value", "when", "buckets"})  # `at` and policies may repeat

Children = list[Any]  # tokens, records and parts


@frozen
class Part:
    """A value on its way up, and where it stands."""

    kind: str
    value: Any
    span: Span


def _clause(word: str) -> Callable[[Recorder, Children], Clause]:
    """The method of a clause of one word and one argument."""

    def build(self: Recorder, children: Children) -> Clause:
        argument = children[1]
        if isinstance(argument, Part):
            argument = argument.value
        elif isinstance(argument, Token):
            argument = self.string(argument)
        return Clause(word, (argument,), span=self.span(children))

    return build


class Recorder:
    """The methods that lark calls, by the names of the rules. `source` is the text that is being parsed."""

    def __init__(self) -> None:
        self.begin(Source("", ""))

    def begin(self, source: Source) -> None:
        """Start on another text."""
        self.source = source
        # Depth of every expression of more than one level, by id: the records live until the text is done.
        self._depth: dict[int, int] = {}

    # -- places -------------------------------------------------------------------------------------------------------

    def span(self, children: Sequence[Any]) -> Span:
        """From the first child to the last."""
        first, last = children[0], children[-1]
        stop: int = (last.end_pos or 0) if isinstance(last, Token) else last.span.stop
        if not isinstance(first, Token):
            at = first.span
            return Span(at.start, stop, at.line, at.column, at.file)
        source = self.source
        line, column = first.line or 1, first.column or 1
        if source.line != 1 or source.column != 1:
            column += source.column - 1 if line == 1 else 0
            line += source.line - 1
        return Span(first.start_pos or 0, stop, line, column, source.name)

    def label(self, place: Any, text: str = "") -> Label:
        """A label at a token, a record or a part."""
        return self.source.label(self.span([place]), text)

    def string(self, token: Token) -> str:
        """What a quoted token stands for."""
        return unquote(token, self.source, token.start_pos or 0)

    def word(self, token: Token, words: tuple[str, ...], what: str) -> str:
        """One word out of a list. A rule would make each a keyword; a list also says what else could stand there."""
        if token in words:
            return str(token)
        known = ", ".join(f"`{word}`" for word in words)
        fail("E016", f"`{token}` is not {what}", self.label(token, f"one of {known} stands here"))

    def _too_deep(self, place: Any) -> NoReturn:
        fail("E010", f"an expression nests deeper than {DEPTH_MAX} levels", self.label(place, "one level too many"))

    def _deepen(self, expr: Any, place: Any, *inner: Any) -> Any:
        depth = 1 + max((self._depth.get(id(e), 1) for e in inner), default=0)
        if depth > DEPTH_MAX:
            self._too_deep(place)
        self._depth[id(expr)] = depth
        return expr

    # -- names --------------------------------------------------------------------------------------------------------

    def path(self, children: Children) -> Part:
        first = children[0]
        if len(children) == 1:
            if first.type == "STRING":
                return Part("quoted", self._name_of(first), self.span(children))
            return Part("path", str(first), self.span(children))
        value = "".join(children)
        if len(value) > NAME_CHARACTERS_MAX:
            self._long_name(self.span(children))
        return Part("path", value, self.span(children))

    def name(self, children: Children) -> Part:
        token = children[0]
        return Part("name", self._name_of(token) if token.type == "STRING" else str(token), self.span(children))

    mesh_name = split_name = name

    def _name_of(self, token: Token) -> str:
        value = self.string(token)
        if value in ("", "*"):
            message = f"a name cannot be {'`*`, which means all' if value else 'empty'}"
            fail("E017", message, self.label(token, "not a name"), remedy="give it a name")
        if len(value) > NAME_CHARACTERS_MAX:
            self._long_name(self.span([token]))
        return value

    def _long_name(self, span: Span) -> NoReturn:
        message = f"a name has {span.stop - span.start} characters; {NAME_CHARACTERS_MAX} are allowed"
        fail("E014", message, self.source.label(span))

    # -- numbers ------------------------------------------------------------------------------------------------------

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
        return self._deepen(nodes.Function(str(children[0]), args, span=self.span(children)), children[0], *args)  # type: ignore[no-any-return]

    def list(self, children: Children) -> Expr:
        items = tuple(children[1:-1:2])
        return self._deepen(nodes.List(items, span=self.span(children)), children[0], *items)  # type: ignore[no-any-return]

    def unary(self, children: Children) -> Expr:
        operator, operand = children
        return self._deepen(nodes.Unary(operator.value, operand, span=self.span(children)), operator, operand)  # type: ignore[no-any-return]

    def binary(self, children: Children) -> Expr:
        left, operator, right = children
        record = nodes.Binary(str(operator), left, right, span=self.span(children))
        return self._deepen(record, operator, left, right)  # type: ignore[no-any-return]

    def inner(self, children: Children) -> Expr:
        expr = evolve(children[1], span=self.span(children))  # the parentheses belong to its place
        self._depth[id(expr)] = self._depth.get(id(children[1]), 1)
        return expr  # type: ignore[no-any-return]

    def expr_text(self, children: Children) -> Expr:
        return next(c for c in children if not isinstance(c, Token))  # type: ignore[no-any-return]

    # -- patterns -----------------------------------------------------------------------------------------------------

    def dim(self, children: Children) -> nodes.Axis:
        span = self.span(children)
        bounds = None
        if children[-1].type == "RSQB":
            bounds = children[-2].value
            children = children[:-3]
        part = self.path(children)
        # Quotes make a name of a word of the language. Any other quoted text here lacks the clause word before it.
        if part.kind == "quoted" and part.value != "_" and part.value.partition(".")[0] not in PATTERN_WORDS:
            fail(
                "E017",
                "a quoted text stands where an axis is expected",
                self.label(part, "not an axis"),
                remedy=f"to name what is stored, put the clause word before it: as {self._literal(part)}",
            )
        if part.value == "_" and part.kind == "path":
            return nodes.Any_(bounds, span=span)
        return nodes.Dim(part.value, bounds, span=span)

    def bounds(self, children: Children) -> Part:
        dots = next(i for i, child in enumerate(children) if isinstance(child, Token))
        start = children[0] if dots else None
        stop = children[-1] if dots + 1 < len(children) else None
        return Part("bounds", (start, stop), self.span(children))

    def _literal(self, part: Part) -> str:
        return self.source.text[part.span.start : part.span.stop]

    def cut(self, children: Children) -> nodes.Axis:
        return nodes.Cut(children[0], tuple(children[1:]), span=self.span(children))

    def stack(self, children: Children) -> nodes.Axis:
        return nodes.Stack(tuple(children[1:-1:2]), span=self.span(children))

    def label_(self, children: Children) -> Part:
        return Part("label", self.path(children[:-1]).value, self.span(children))

    def term(self, children: Children) -> nodes.Term:
        first = children[0]
        if isinstance(first, Part):
            return nodes.Term(first.value, tuple(children[1:]), span=self.span(children))
        return nodes.Term(None, tuple(children), span=self.span(children))

    def pad(self, children: Children) -> nodes.Axis:
        axis, multiple = children[2], children[4]
        kind: Any = "zero"
        if len(children) > 6:
            kind = self.word(children[6], ("zero", "live", "undefined"), "a kind of padding")
        return nodes.Pad(axis, multiple, kind, span=self.span(children))

    def trim(self, children: Children) -> nodes.Axis:
        return nodes.Trim(children[2], span=self.span(children))

    def flat(self, children: Children) -> nodes.Axis:
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

    def indices(self, children: Children) -> Part:
        axes = tuple(children[1:-1:2])
        if len(axes) > INDICES_MAX:
            message = f"an entry has {len(axes)} indices; {INDICES_MAX} are allowed"
            fail("E013", message, self.label(axes[INDICES_MAX], "one index too many"))
        return Part("indices", axes, self.span(children))

    def _words_first(self, place: Any, name: str | None, words: frozenset[str], where: str) -> None:
        """Refuse a clause where the axes should begin: the parser would read its words as the names of axes."""
        start = place.span.start
        if name in words and self.source.text[start] != '"':
            fail(
                "E020",
                f"the clause `{name}` stands before the {where}",
                self.source.label(self.source.span(start, start + len(name)), f"the {where} should stand here"),
                remedy=f"finish the {where} first; the clauses come after it. As a name it stands in quotes: {quote(name)}",
            )

    def shape(self, children: Children) -> Part:
        axes = () if isinstance(children[0], Token) else tuple(children)
        if axes:
            first = axes[0].axis if isinstance(axes[0], nodes.Cut) else axes[0]
            if isinstance(first, nodes.Dim):
                self._words_first(first, first.name, CLAUSE_WORDS, "pattern")
        return Part("shape", axes, self.span(children))

    # -- model --------------------------------------------------------------------------------------------------------

    def extent(self, children: Children) -> nodes.Dimension:
        span = self.span(children)
        if children[0].type == "INT":
            return nodes.Dimension(None, self._integer(children[0]), None, span=span)
        bounds = None
        if children[-1].type == "RSQB":
            bounds = children[-2].value
            children = children[:-3]
        return nodes.Dimension(self.path(children).value, None, bounds, span=span)

    def range(self, children: Children) -> Part:
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
        return Part("range", (start, stop, step), self.span(children))

    def typed(self, children: Children) -> Part:
        return Part("typed", children[1].value, self.span(children))

    def kind(self, children: Children) -> Part:
        word = self.word(children[1], ("buffer", "frozen"), "what a tensor can be, beside a parameter")
        return Part("kind", word, self.span(children))

    def key(self, children: Children) -> Part:
        return Part("key", self.string(children[1]), self.span(children))

    def of_groups(self, children: Children) -> Part:
        names = tuple(c.value for c in children[1:] if isinstance(c, Part))
        return Part("groups", names or ("*",), self.span(children))

    def tensor(self, children: Children) -> nodes.Tensor:
        dims = tuple(c for c in children if isinstance(c, nodes.Dimension))
        parts = {c.kind: c.value for c in children[1:] if isinstance(c, Part)}
        if dims:
            self._words_first(dims[0], dims[0].name, DIM_WORDS, "dims")
        return nodes.Tensor(
            children[0].value,
            dims,
            dtype=parts.get("typed"),
            kind=parts.get("kind", "parameter"),
            when=_when_of(children),
            span=self.span(children),
        )

    def alias(self, children: Children) -> nodes.Alias:
        return nodes.Alias(children[1].value, children[3].value, _when_of(children), span=self.span(children))

    def state(self, children: Children) -> nodes.State:
        names = [c.value for c in children if isinstance(c, Part) and c.kind == "name"]
        groups = next((c.value for c in children if isinstance(c, Part) and c.kind == "groups"), None)
        scalar = any(isinstance(c, Token) and c.type == "SCALAR" for c in children)
        return nodes.State(tuple(names[:-1]), names[-1], scalar, groups, span=self.span(children))

    def default_dtype(self, children: Children) -> nodes.DefaultDtype:
        return nodes.DefaultDtype(children[1].value, span=self.span(children))

    # -- statements shared --------------------------------------------------------------------------------------------

    def binding(self, children: Children) -> nodes.Binding:
        return nodes.Binding(children[0].value, children[2], span=self.span(children))

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
                    remedy="write one `=`, or parentheses around what is meant to compare",
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
        key = children[4].value if len(children) > 4 else None
        return nodes.Use(children[1], children[3].value, key, span=self.span(children))

    def index(self, children: Children) -> nodes.Index:
        return nodes.Index(children[1].value, children[3], span=self.span(children))

    def members(self, children: Children) -> Part:
        return Part("members", tuple(c.value for c in children[::2]), self.span(children))

    def everything(self, children: Children) -> Part:
        return Part("without", tuple(c.value for c in children[2::2]), self.span(children))

    def stated(self, children: Children) -> Part:
        return Part("stated", (children[1].value, self.string(children[2])), self.span(children))

    def order(self, children: Children) -> Part:
        value = "reversed" if len(children) == 2 else children[2]
        return Part("order", value, self.span(children))

    def group(self, children: Children) -> nodes.Group:
        parts = {c.kind: c.value for c in children[2:] if isinstance(c, Part)}
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

    # -- layout -------------------------------------------------------------------------------------------------------

    def parameter(self, children: Children) -> nodes.Parameter:
        default = children[2] if len(children) > 1 else None
        return nodes.Parameter(children[0].value, default, span=self.span(children))

    def mesh(self, children: Children) -> nodes.Mesh:
        names = [c.value for c in children if isinstance(c, Part)]
        named = len(children) > 2 and isinstance(children[2], Token)
        name, axes = (names[0], names[1:]) if named else ("", names)
        for i, axis in enumerate(axes):
            if axis in axes[:i]:
                parts = [c for c in children if isinstance(c, Part) and c.value == axis]
                self._twice("E008", f"the mesh axis `{axis}`", parts[-2], parts[-1])
        return nodes.Mesh(name, tuple(axes), span=self.span(children))

    def file(self, children: Children) -> nodes.Files:
        name, form, when = children[1].value, children[3], _when_of(children)
        if form.type == "NONE":
            return nodes.Files(name, None, when=when, span=self.span(children))
        key = next((c.value for c in children if isinstance(c, Part) and c.kind == "key"), None)
        return nodes.Files(name, str(form), self.string(children[4]), key, when, span=self.span(children))

    def framework(self, children: Children) -> nodes.Framework:
        return nodes.Framework(children[1], span=self.span(children))

    def derive(self, children: Children) -> nodes.Derive:
        return nodes.Derive(children[1].value, children[3].value, _when_of(children), span=self.span(children))

    def of_class(self, children: Children) -> Part:
        word = self.word(children[1], ENTRY_CLASSES, "a class of tensors")
        return Part("class", word, self.span(children))

    def entry(self, children: Children) -> nodes.Entry:
        path = "*" if isinstance(children[0], Token) else children[0].value
        parts = {c.kind: c.value for c in children[1:] if isinstance(c, Part)}
        return nodes.Entry(
            path,
            parts.get("indices", ()),
            parts.get("shape"),
            self._clauses(children),
            parts.get("class"),
            span=self.span(children),
        )

    def states(self, children: Children) -> nodes.States:
        names = tuple(c.value for c in children if isinstance(c, Part) and c.kind == "name")
        parts = {c.kind: c.value for c in children if isinstance(c, Part)}
        like = any(isinstance(c, Token) and c.type == "LIKE" for c in children)
        return nodes.States(
            names or None,
            parts.get("groups"),
            "like" if like else parts.get("shape"),
            self._clauses(children),
            span=self.span(children),
        )

    def fate(self, children: Children) -> Part:
        word = self.word(children[0], ("keep", "first", "drop"), "a fate of a blob")
        return Part("fate", word, self.span(children))

    def blob(self, children: Children) -> nodes.Blob:
        axes = tuple(c.value for c in children if isinstance(c, Part) and c.kind == "name")
        fate = next(c.value for c in children if isinstance(c, Part) and c.kind == "fate")
        return nodes.Blob(children[1].value, axes, fate, self._clauses(children), span=self.span(children))

    # -- clauses ------------------------------------------------------------------------------------------------------

    on_mesh, in_file, as_key, stored_dtype = _clause("on"), _clause("in"), _clause("as"), _clause("dtype")
    value, when, buckets = _clause("value"), _clause("when"), _clause("buckets")

    def lossy(self, children: Children) -> Clause:
        return Clause("lossy", (), span=self.span(children))

    def policy(self, children: Children) -> Part:
        return Part("policy", str(children[0]), self.span(children))

    def copies(self, children: Children) -> Clause:
        axes = tuple(c.value for c in children[2::2])
        return Clause("copies", (children[0].value, axes), span=self.span(children))

    def at(self, children: Children) -> Clause:
        return Clause("at", (children[1].value, children[3]), span=self.span(children))

    def _clauses(self, children: Children) -> tuple[Clause, ...]:
        clauses = tuple(c for c in children if isinstance(c, Clause))
        seen: dict[str, Clause] = {}
        for clause in clauses:
            if clause.word in seen:
                self._twice("E009", f"the clause `{clause.word}`", seen[clause.word], clause)
            if clause.word in ONCE:
                seen[clause.word] = clause
        return clauses

    def _twice(self, code: str, what: str, first: Any, second: Any) -> NoReturn:
        fail(code, f"{what} stands twice", self.label(second, "again here"), self.label(first, "first here"))

    # -- files --------------------------------------------------------------------------------------------------------

    def import_(self, children: Children) -> nodes.Import:
        names = tuple(c.value for c in children[3::2])
        return nodes.Import(self.string(children[1]), names, span=self.span(children))

    def model(self, children: Children) -> nodes.Model:
        items = tuple(c for c in children[3:] if not isinstance(c, Token))
        return nodes.Model(children[1].value, items, span=self.span(children))

    def extends(self, children: Children) -> Part:
        return Part("extends", children[1], self.span(children))

    def layout(self, children: Children) -> nodes.Layout:
        name, *rest = (c for c in children if not isinstance(c, Token))
        parameters = tuple(c for c in rest if isinstance(c, nodes.Parameter))
        of, *bases = (c.value for c in rest if isinstance(c, Part))
        items = tuple(c for c in rest if not isinstance(c, Part | nodes.Parameter))
        base = bases[0] if bases else None
        return nodes.Layout(name.value, parameters, of, base, items, span=self.span(children))

    def drop(self, children: Children) -> Part:
        return Part("drop", tuple(c.value for c in children[1::2]), self.span(children))

    def plan(self, children: Children) -> nodes.Plan:
        drop = children[6].value if len(children) > 6 else ()
        return nodes.Plan(children[1].value, children[3], children[5], drop, span=self.span(children))

    def header(self, children: Children) -> Part:
        number = children[1]
        if number != str(VERSION):
            fail(
                "E003",
                f"this file is written in version {number[:20]} of the language; this program reads version {VERSION}",
                self.label(number, "not a version that is known here"),
            )
        return Part("header", VERSION, self.span(children))

    def start(self, children: Children) -> nodes.File:
        statements = tuple(c for c in children if not isinstance(c, Token | Part))
        return nodes.File(self.source.name, VERSION, statements, self.source.text)


def _when_of(children: Children) -> Expr | None:
    """The condition of a statement that may carry one."""
    last = children[-1]
    return last.args[0] if isinstance(last, Clause) and last.word == "when" else None
