"""Reads .ucpl text: a whole file, the expression inside a name's template, the call on a command line.

The grammar is the reference (grammar/ucpl.lark); this module brings text, tables and diagnostics together.
"""

from __future__ import annotations

import threading

from lark.exceptions import UnexpectedInput

from ucpl.errors import UcplError, fail
from ucpl.syntax.definitions import check_definitions
from ucpl.syntax.limits import TEXT_CHARACTERS_MAX
from ucpl.syntax.nodes import Call, Expr, File
from ucpl.syntax.slips import diagnose
from ucpl.syntax.source import Source
from ucpl.syntax.tables import tables

__all__ = ["parse", "parse_call", "parse_expr"]

_LOCK = threading.Lock()  # the recorder knows one text at a time


def parse(text: str, name: str = "<text>") -> File:
    """Read one file. `name` is what errors call it, and the `file` of every span.

    Raises: UcplError with a code of E001 .. E049, at the first place that cannot be read.
    """
    source = Source(name, text)
    file = _run(source, "start")
    assert isinstance(file, File)
    check_definitions(file, source)
    return file


def parse_expr(text: str, *, file: str = "", line: int = 1, column: int = 1) -> Expr:
    """Read one expression, such as stands inside the braces of a name's template.

    `file`, `line` and `column` say where the text begins, so that errors and spans point into the file.
    Raises: UcplError, as `parse`.
    """
    expr = _run(Source(file or "<expression>", text, line, column), "expr_text")
    assert isinstance(expr, Expr)
    return expr


def parse_call(text: str) -> Call:
    """Read a layout or model with its arguments, as a command line gives it: `zero1(dp = 8)`; `zero1` has none.

    Raises: UcplError, as `parse`.
    """
    call = _run(Source("<call>", text), "call_text")
    assert isinstance(call, Call)
    return call


def _run(source: Source, start: str) -> object:
    if len(source.text) > TEXT_CHARACTERS_MAX:
        fail(
            "E011",
            f"a text has {len(source.text)} characters; {TEXT_CHARACTERS_MAX} are allowed",
            source.label(source.span(0, 1)),
        )
    with _LOCK:
        parser = tables()
        parser.joiner.source = source
        parser.recorder.begin(source)
        try:
            # The last line may lack its newline; the grammar asks for one after every statement.
            return parser.lark.parse(source.text + "\n", start=start)
        except UnexpectedInput as error:
            problem = UcplError(diagnose(error, source, parser.lark))
        finally:
            parser.recorder.begin(Source("", ""))  # let the text and its records go
    raise problem from None
