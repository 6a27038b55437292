"""Decides which newlines end a statement, and stops a text that is too large, token by token.

It stands between lark's lexer and parser, so a hostile text ends here, before any record of it is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from lark import Token

from ucpl.errors import fail
from ucpl.syntax.limits import DEPTH_MAX, NAME_CHARACTERS_MAX, STATEMENTS_MAX
from ucpl.syntax.source import Source

__all__ = ["LineJoiner"]

_STRING_CHARACTERS_MAX = 16 * NAME_CHARACTERS_MAX  # templates and messages are longer than names


class LineJoiner:
    """Drops newlines inside ( ) and [ ] and after a comma, where they do not end a statement.

    SLIP holds characters that people type from habit. Lexing them as tokens turns "no terminal matches" into an
    unexpected token, which can carry a hint.
    """

    always_accept = ("_NL", "SLIP")

    def __init__(self) -> None:
        self.source = Source("", "")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        """The tokens without the newlines that only break a long line.

        Raises: UcplError E010, E012, E014, at a limit.
        """
        depth = 0
        statements = 0
        before = ""
        for token in stream:
            kind = token.type
            if kind == "_NL":
                if depth or before == "COMMA":
                    continue
                statements += 1
                if statements > STATEMENTS_MAX:
                    self._fail("E012", f"a text has more than {STATEMENTS_MAX} statements", token, "the first one over")
            elif kind == "LPAR" or kind == "LSQB":
                depth += 1
                if depth > DEPTH_MAX:
                    self._fail("E010", f"brackets nest deeper than {DEPTH_MAX} levels", token, "one level too many")
            elif kind == "RPAR" or kind == "RSQB":
                depth -= 1
            elif kind == "NAME" and len(token) > NAME_CHARACTERS_MAX:
                message = f"a name has {len(token)} characters; {NAME_CHARACTERS_MAX} are allowed"
                self._fail("E014", message, token, "")
            elif kind == "STRING" and len(token) > _STRING_CHARACTERS_MAX:
                message = f"a text has {len(token)} characters; {_STRING_CHARACTERS_MAX} are allowed"
                self._fail("E014", message, token, "")
            before = kind
            yield token

    def _fail(self, code: str, message: str, token: Token, text: str) -> None:
        start = token.start_pos or 0
        fail(code, message, self.source.label(self.source.span(start, start + 1), text))
