"""Words of the language that can follow a text, for completions."""

from __future__ import annotations

from lark.exceptions import UnexpectedInput, UnexpectedToken

from ucpl.errors import UcplError
from ucpl.language.reading import LOCK, tables_of
from ucpl.language.slips import expected_kinds
from ucpl.language.source import TEXT_CHARACTERS_MAX, Source

__all__ = ["words_after"]

_NOTHING = " ~"  # lexed everywhere, accepted nowhere


def words_after(text: str) -> frozenset[str]:
    """Words and signs that the grammar accepts behind a text.

    There are none behind a text that is wrong itself. A name, a number and a quoted text are `NAME`, `INT` and
    `STRING`.
    """
    if len(text) > TEXT_CHARACTERS_MAX:
        return frozenset()
    source = Source("", text + _NOTHING)
    with LOCK:
        parser = tables_of(text)
        parser.joiner.source = source
        parser.recorder.begin(source, parser.version)
        try:
            parser.lark.parse(source.text, start="start")
        except UnexpectedToken as error:
            at_end = error.token.start_pos == len(text) + 1
            kinds = expected_kinds(error) if at_end else set()
        except (UnexpectedInput, UcplError):
            kinds = set()
        else:
            kinds = set()
        finally:
            parser.recorder.begin(Source("", ""))
    written = {t.name: t.pattern.value for t in parser.lark.terminals if t.pattern.type == "str"}
    return frozenset(written.get(kind, kind) for kind in kinds)
