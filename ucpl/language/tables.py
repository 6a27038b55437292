"""The parser, built once a process, its tables kept between processes.

They are kept as JSON in the user's own cache folder. lark would keep them as a pickle, which runs code. JSON can only
describe tables; a file that cannot be trusted (`cache`), or does not fit, is ignored and the tables are built anew
(about 0.6 s).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lark
from lark import Lark, Token
from lark.grammar import Rule
from lark.lexer import TerminalDef

from ucpl.errors import fail
from ucpl.language.cache import cache_folder, keep, kept
from ucpl.language.recorder import Recorder
from ucpl.language.source import DEPTH_MAX, NAME_CHARACTERS_MAX, STATEMENTS_MAX, Source
from ucpl.records import frozen
from ucpl.resources import VERSION, grammar_text

__all__ = ["STARTS", "LineJoiner", "Tables", "tables"]


# ---- tokens, between lark's lexer and its parser ---------------------------------------------------------------------

_STRING_CHARACTERS_MAX = 16 * NAME_CHARACTERS_MAX  # templates and messages are longer than names


class LineJoiner:
    """Filter of newlines inside brackets and after a comma.

    They do not end a statement there. SLIP holds characters that people type from habit. Lexing them as tokens turns
    "no terminal matches" into an unexpected token, which can carry a hint.
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


# ---- the parser and its tables ---------------------------------------------------------------------------------------

STARTS = ["start", "expr_text", "call_text"]


@frozen
class Tables:
    """lark's parser of one version, with its joiner and its recorder."""

    lark: Lark
    joiner: LineJoiner
    recorder: Recorder
    version: int


@cache
def tables(version: int = VERSION) -> Tables:
    """The parser of one version of the language."""
    joiner, recorder = LineJoiner(), Recorder()
    text = grammar_text(version)
    path = _cache_path(text)
    parser = _load(path, joiner, recorder) if path else None
    if parser is None:
        parser = build(text, joiner, recorder)
        if path is not None:
            _save(parser, path)
    return Tables(parser, joiner, recorder, version)


def build(text: str, joiner: LineJoiner, recorder: Recorder | None, strict: bool = False) -> Lark:
    """The parser of one grammar.

    `strict` also refuses terminals that collide (slow: for the tests).
    """
    return Lark(
        text,
        parser="lalr",
        lexer="contextual",
        postlex=joiner,
        transformer=recorder,
        keep_all_tokens=True,
        maybe_placeholders=False,
        strict=strict,
        start=STARTS,
    )


def _cache_path(text: str) -> Path | None:
    folder = cache_folder()
    made_from = "\0".join((text, lark.__version__, sys.version, repr(STARTS)))
    return folder / f"tables-{hashlib.sha256(made_from.encode()).hexdigest()[:32]}.json" if folder else None


def _load(path: Path, joiner: LineJoiner, recorder: Recorder) -> Lark | None:
    """The kept parser, or None if none can be trusted and read."""
    text = kept(path)
    if text is None:
        return None
    try:
        found = json.loads(text, object_hook=_decoded)
        return Lark.__new__(Lark)._load(found, postlex=joiner, transformer=recorder)
    except (
        Exception
    ):  # lark promises nothing for tables that it did not write: whatever it raises, they are built again
        return None


def _save(parser: Lark, path: Path) -> None:
    data, memo = parser.memo_serialize([TerminalDef, Rule])
    # Objects of this process stay out, and are given anew at loading. The options are the parser's own: a copy loses them.
    options = {name: value for name, value in data["options"].items() if name not in ("postlex", "transformer")}
    data = {**data, "options": options}
    keep(path, json.dumps(_encode({"data": data, "memo": memo}), separators=(",", ":")))


# JSON has no tuples and no numbers as keys; lark's tables have both.


def _encode(value: object) -> object:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _encode(item) for key, item in value.items()}
        return {"#pairs": [[key, _encode(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"#set": sorted(value)}
    return value


def _decoded(value: dict[str, list[object]]) -> object:
    """One object of the JSON; the objects in it are decoded already."""
    if "#pairs" in value:
        return {pair[0]: pair[1] for pair in value["#pairs"] if isinstance(pair, list)}
    return set(value["#set"]) if "#set" in value else value
