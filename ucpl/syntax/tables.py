"""The parser, built once a process. Its tables are kept between processes, as JSON, in the user's own cache folder.

lark would keep them as a pickle, which runs whatever it holds. JSON can only describe tables; a file that does not
belong to this user alone, or does not fit, is ignored and the tables are built anew (about 0.2 s).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path

import lark
import platformdirs
from attrs import frozen
from lark import Lark
from lark.grammar import Rule
from lark.lexer import TerminalDef

from ucpl.resources import grammar_text
from ucpl.syntax.joiner import LineJoiner
from ucpl.syntax.recorder import Recorder

__all__ = ["STARTS", "Tables", "cache_folder", "tables"]

STARTS = ["start", "expr_text", "call_text"]


@frozen
class Tables:
    """lark's parser, and the two objects that must know which text it is at."""

    lark: Lark
    joiner: LineJoiner
    recorder: Recorder


@cache
def tables() -> Tables:
    """The parser of the language."""
    joiner, recorder = LineJoiner(), Recorder()
    text = grammar_text()
    path = _cache_path(text)
    parser = _load(path, joiner, recorder) if path else None
    if parser is None:
        parser = build(text, joiner, recorder)
        if path is not None:
            _save(parser, path)
    return Tables(parser, joiner, recorder)


def build(text: str, joiner: LineJoiner, recorder: Recorder | None, strict: bool = False) -> Lark:
    """The parser of one grammar. `strict` also refuses terminals that collide (slow: for the tests)."""
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


def cache_folder() -> Path | None:
    """Where the tables are kept; None: nowhere (`UCPL_CACHE` is empty)."""
    if "UCPL_CACHE" in os.environ:
        return Path(os.environ["UCPL_CACHE"]) if os.environ["UCPL_CACHE"] else None
    return platformdirs.user_cache_path("ucpl", appauthor=False)


def _cache_path(text: str) -> Path | None:
    folder = cache_folder()
    made_from = "\0".join((text, lark.__version__, sys.version, repr(STARTS)))
    return folder / f"tables-{hashlib.sha256(made_from.encode()).hexdigest()[:32]}.json" if folder else None


def _belongs_to_user(status: os.stat_result) -> bool:
    if sys.platform == "win32":
        return True  # the profile's folders are private by default, and there are no owners to compare
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _load(path: Path, joiner: LineJoiner, recorder: Recorder) -> Lark | None:
    """The parser as it was kept, or None if there is none that can be trusted and read."""
    try:
        if not _belongs_to_user(path.parent.stat()):
            return None
        with path.open("rb") as file:
            if not _belongs_to_user(os.fstat(file.fileno())):
                return None
            kept = _decode(json.load(file))
        return Lark.__new__(Lark)._load(kept, postlex=joiner, transformer=recorder)
    except Exception:
        # Whatever is wrong with a file that we can do without: build the tables again.
        return None


def _save(parser: Lark, path: Path) -> None:
    """Keep the tables: whole or not at all, and never loudly."""
    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        data, memo = parser.memo_serialize([TerminalDef, Rule])
        for option in ("postlex", "transformer"):  # objects of this process: given anew at loading
            del data["options"][option]
        text = json.dumps(_encode({"data": data, "memo": memo}), separators=(",", ":"))
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tables-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


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


def _decode(value: object) -> object:
    if isinstance(value, dict):
        if "#pairs" in value:
            return {key: _decode(item) for key, item in value["#pairs"]}
        if "#set" in value:
            return set(value["#set"])
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
