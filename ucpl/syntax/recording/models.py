"""Statements of models, and those that models and layouts share."""

from __future__ import annotations

from typing import Literal, cast

from lark import Token

from ucpl.errors import fail
from ucpl.syntax import nodes
from ucpl.syntax.recording.patterns import Patterns
from ucpl.syntax.recording.places import Children, Part, when_of
from ucpl.syntax.words import DIM_WORDS

__all__ = ["Models"]


class Models(Patterns):
    """Methods of the rules under "model"; `let`, `dim`, `assert`, calls, `use`, `index` and `group`."""

    def extent(self, children: Children) -> nodes.Dimension:
        span = self.span(children)
        if children[0].type == "INT":
            return nodes.Dimension(None, self._integer(children[0]), None, span=span)
        bounds = None
        if children[-1].type == "RSQB":
            bounds = children[-2]
            children = children[:-3]
        return nodes.Dimension(self.path(children).value, None, bounds, span=span)

    def typed(self, children: Children) -> Part:
        return Part("typed", self._element_type(children[1]), self.span(children))

    def kind(self, children: Children) -> Part:
        word = self.word(children[1], ("buffer", "frozen", "scale"), "what a tensor can be, beside a parameter")
        scaling = children[2] if len(children) > 2 else None
        if (word == "scale") != (scaling is not None):
            fail(
                "E029",
                "a scale is one of a tensor, and nothing else is `of` one",
                self.label(children[1], "here"),
                remedy="write `is scale of w by 128, 128`, or `is buffer`, `is frozen`",
            )
        return Part("kind", scaling or word, self.span(children))

    def scaling(self, children: Children) -> nodes.Scaling:
        return nodes.Scaling(children[1].value, tuple(children[3::2]), span=self.span(children))

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
        kind = parts.get("kind", "parameter")
        scaling = kind if isinstance(kind, nodes.Scaling) else None
        return nodes.Tensor(
            children[0].value,
            dims,
            dtype=parts.get("typed"),
            kind="frozen" if scaling else kind,
            when=when_of(children),
            scaling=scaling,
            span=self.span(children),
        )

    def gone(self, children: Children) -> nodes.Gone:
        word = children[0]
        kind: Literal["tensor", "alias", "state", "group"] = "tensor"
        if isinstance(word, Token):
            kind = cast(Literal["alias", "state", "group"], str(word))
        names = tuple(c.value for c in children if isinstance(c, Part))
        return nodes.Gone(kind, names, span=self.span(children))

    def alias(self, children: Children) -> nodes.Alias:
        return nodes.Alias(children[1].value, children[3].value, when_of(children), span=self.span(children))

    def state(self, children: Children) -> nodes.State:
        names = [c.value for c in children if isinstance(c, Part) and c.kind == "name"]
        groups = next((c.value for c in children if isinstance(c, Part) and c.kind == "groups"), None)
        scalar = any(isinstance(c, Token) and c.type == "SCALAR" for c in children)
        kind = self._element_type([c for c in children if isinstance(c, Part) and c.kind == "name"][-1])
        typed = tuple(c for c in children if isinstance(c, nodes.TypedOf))
        return nodes.State(tuple(names[:-1]), kind, scalar, groups, typed, span=self.span(children))

    def typed_of(self, children: Children) -> nodes.TypedOf:
        names = tuple(c.value for c in children[3::2])
        return nodes.TypedOf(self._element_type(children[1]), names, span=self.span(children))

    def default_dtype(self, children: Children) -> nodes.DefaultDtype:
        return nodes.DefaultDtype(self._element_type(children[1]), span=self.span(children))

    def binding(self, children: Children) -> nodes.Binding:
        return nodes.Binding(children[0].value, children[2], span=self.span(children))

    def sized(self, children: Children) -> nodes.Binding:
        by = children[4].value if len(children) > 3 else None
        return nodes.Binding(children[0].value, children[2], by, span=self.span(children))

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
        key = next((c.value for c in children if isinstance(c, Part) and c.kind == "key"), None)
        ranks = tuple(c for c in children if isinstance(c, nodes.Clause))
        return nodes.Use(children[1], children[3].value, key, ranks, span=self.span(children))

    def index(self, children: Children) -> nodes.Index:
        return nodes.Index(children[1].value, children[3], when_of(children), span=self.span(children))

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
