"""Parser of .ucpl text: files, expressions in templates, calls on command lines.

The grammar is the reference (grammar/ucpl.lark). Texts that were read before may be kept as trees (`trees`); the parser
itself (`reading`) is imported when a text is new.
"""

from __future__ import annotations

from functools import lru_cache

from ucpl.language import trees
from ucpl.language.nodes import Call, Expr, File
from ucpl.language.source import CALL, Source

__all__ = ["parse", "parse_call", "parse_expr"]


def parse(text: str, name: str = "<text>", *, keep: bool = False) -> File:
    """Read one file.

    `name` is its name in errors, and the `file` of every span. With `keep`, its tree is looked up among those of
    earlier processes, and left for later ones. Raises: UcplError with a code of E001 .. E049, at the first place that
    cannot be read.
    """
    return _kept_file(text, name) if keep else _file(text, name)


def parse_expr(text: str, *, file: str = "", line: int = 1, column: int = 1) -> Expr:
    """Read one expression, such as one in a name's braces.

    `file`, `line` and `column` are the begin of the text, so that errors and spans point into the file. Raises:
    UcplError, as `parse`.
    """
    return _expr(Source(file or "<expression>", text, line, column))


def parse_call(text: str, *, keep: bool = False) -> Call:
    """Read a layout or model with its arguments.

    Examples: `zero1(dp = 8)`; `zero1` has none. `keep` as in `parse`. Raises: UcplError, as `parse`.
    """
    source = Source(CALL, text)
    call = trees.find(source, "call_text") if keep else None
    if isinstance(call, Call):
        return call
    call = _read(source, "call_text")
    assert isinstance(call, Call)
    if keep:
        trees.store(call, source, "call_text", _read)
    return call


# Results are cached: records are frozen, and both sides of a conversion, each degree that `check` tries and each
# template of a layout that is resolved once more read the same texts. A refused text is refused each time.


@lru_cache(maxsize=8)
def _file(text: str, name: str) -> File:
    source = Source(name, text)
    file = _read(source, "start")
    assert isinstance(file, File)
    from ucpl.language.definitions import check_definitions

    check_definitions(file, source)
    return file


@lru_cache(maxsize=4096)
def _expr(source: Source) -> Expr:
    known = trees.find_hole(source)
    expr = _read(source, "expr_text") if known is None else known
    assert isinstance(expr, Expr)
    return expr


@lru_cache(maxsize=8)
def _kept_file(text: str, name: str) -> File:
    source = Source(name, text)
    kept = trees.find(source, "start")
    if isinstance(kept, File):
        return kept
    file = _file(text, name)
    trees.store(file, source, "start", _read)
    return file


def _read(source: Source, start: str) -> object:
    from ucpl.language.reading import read

    return read(source, start)
