"""Patterns: the axes of what is stored, and the brackets of entries."""

from __future__ import annotations

from typing import Literal, cast, get_args

from attrs import evolve
from lark import Token

from ucpl.errors import fail
from ucpl.syntax import nodes
from ucpl.syntax.limits import INDICES_MAX
from ucpl.syntax.quoting import quote
from ucpl.syntax.recording.numbers import Numbers
from ucpl.syntax.recording.places import Children, Part, Standing
from ucpl.syntax.words import CLAUSE_WORDS, PATTERN_WORDS

__all__ = ["Patterns"]

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
                "a quoted text stands where an axis is expected",
                self.label(part, "not an axis"),
                remedy=f"to name what is stored, put the clause word before it: as {self._literal(part)}",
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
                    "`not` stands in front of all that is in the brackets, once",
                    self.label(item, "not here"),
                    remedy="write it first: l[not 1, 4] has all but 1 and 4",
                )
        denied = self._denied(first)
        if denied is not None:
            first = evolve(first, start=denied) if isinstance(first, nodes.Range) else denied
        return nodes.Among((first, *rest), denied is not None, span=self.span(children))

    def _denied(self, item: nodes.Range | nodes.Expr) -> nodes.Expr | None:
        """What a `not` in front of an item denies, where it is not in parentheses."""
        expr = item.start if isinstance(item, nodes.Range) else item
        is_bare = isinstance(expr, nodes.Unary) and expr.operator == "not" and self.source.text[expr.span.start] == "n"
        return expr.operand if is_bare and isinstance(expr, nodes.Unary) else None

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
        kind: PadKind = "zero"
        if len(children) > 6:
            kind = cast(PadKind, self.word(children[6], PAD_KINDS, "a kind of padding"))
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

    def _words_first(self, place: Standing, name: str | None, words: frozenset[str], where: str) -> None:
        """Refuse a clause where the axes should begin: the parser would read its words as the names of axes."""
        start = place.span.start
        if name in words and self.source.text[start] != '"':
            fail(
                "E020",
                f"the clause `{name}` stands before the {where}",
                self.source.label(self.source.span(start, start + len(name)), f"the {where} should stand here"),
                remedy=f"finish the {where} first, () where there are none; the clauses come after it."
                f" As a name it stands in quotes: {quote(name)}",
            )

    def shape(self, children: Children) -> Part:
        axes = () if isinstance(children[0], Token) else tuple(children)
        if axes:
            first = axes[0].axis if isinstance(axes[0], nodes.Cut) else axes[0]
            if isinstance(first, nodes.Dim):
                self._words_first(first, first.name, CLAUSE_WORDS, "pattern")
        return Part("shape", axes, self.span(children))
