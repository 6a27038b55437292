"""One text through the parser: text, tables and diagnostics come together. Who finds a kept tree imports none of it."""

from __future__ import annotations

import threading

from lark.exceptions import UnexpectedInput

from ucpl.errors import UcplError, fail
from ucpl.syntax.limits import TEXT_CHARACTERS_MAX
from ucpl.syntax.slips import diagnose
from ucpl.syntax.source import Source
from ucpl.syntax.tables import tables

__all__ = ["LOCK", "read"]

LOCK = threading.Lock()  # the recorder knows one text at a time


def read(source: Source, start: str) -> object:
    """The record of a whole text; `start` is its rule. Raises: UcplError, at the first place that cannot be read."""
    if len(source.text) > TEXT_CHARACTERS_MAX:
        fail(
            "E011",
            f"a text has {len(source.text)} characters; {TEXT_CHARACTERS_MAX} are allowed",
            source.label(source.span(0, 1)),
        )
    with LOCK:
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
