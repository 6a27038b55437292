"""What every record needs: where it stands, the names and the quoted texts in it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from lark import Token

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.syntax.habits import words
from ucpl.syntax.limits import NAME_CHARACTERS_MAX
from ucpl.syntax.nodes import Clause, Expr, Span
from ucpl.syntax.quoting import unquote
from ucpl.syntax.source import Source
from ucpl.syntax.words import ELEMENT_TYPES

__all__ = ["Children", "Part", "Place", "Places", "when_of"]


class Standing(Protocol):
    """A record or a part."""

    @property
    def span(self) -> Span: ...


Place = Token | Standing
Children = list[Any]  # tokens, records and parts: which of them stand where, the rule says


@frozen
class Part:
    """A value on its way up, and where it stands."""

    kind: str
    value: Any
    span: Span


class Places:
    """Spans, labels and names. `source` is the text that is being parsed."""

    def __init__(self) -> None:
        self.begin(Source("", ""))

    def begin(self, source: Source) -> None:
        """Start on another text."""
        self.source = source
        # Depth of every expression of more than one level, by id: the records live until the text is done.
        self._depth: dict[int, int] = {}

    def span(self, children: Sequence[Place]) -> Span:
        """From the first child to the last."""
        first, last = children[0], children[-1]
        stop: int = (last.end_pos or 0) if isinstance(last, Token) else last.span.stop
        if not isinstance(first, Token):
            at = first.span
            return Span(at.start, stop, at.line, at.column, at.file, at.said)
        source = self.source
        line, column = first.line or 1, first.column or 1
        if source.line != 1 or source.column != 1:
            column += source.column - 1 if line == 1 else 0
            line += source.line - 1
        return Span(first.start_pos or 0, stop, line, column, source.name, source.said)

    def label(self, place: Place, text: str = "") -> Label:
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

    def _element_type(self, part: Part) -> str:
        """The name of an element type. Raises E023 for any other."""
        name = str(part.value)
        if name not in ELEMENT_TYPES:
            near = difflib.get_close_matches(name[:40], sorted(ELEMENT_TYPES), 1)
            close = words().dtypes.get(name) or next(iter(near), "")
            known = ", ".join(sorted(ELEMENT_TYPES))
            remedy = f"write `{close}`" if close else f"there are {known}"
            fail("E023", f"no element type is called `{name}`", self.label(part, "named here"), remedy=remedy)
        return name

    def _twice(self, code: str, what: str, first: Place, second: Place, remedy: str = "") -> NoReturn:
        labels = self.label(second, "again here"), self.label(first, "first here")
        fail(code, f"{what} stands twice", *labels, remedy=remedy)

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

    mesh_name = split_name = changed_in = name
    changed = path

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


def when_of(children: Children) -> Expr | None:
    """The condition of a statement that may carry one."""
    last = children[-1]
    return last.args[0] if isinstance(last, Clause) and last.word == "when" else None
