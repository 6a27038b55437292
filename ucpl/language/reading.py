"""Parser of one text with its tables and diagnostics.

It is imported only if no kept tree fits.
"""

from __future__ import annotations

import re
import threading

from attrs import evolve
from lark.exceptions import UnexpectedInput

from ucpl.errors import Diagnostic, UcplError, fail
from ucpl.language.forms import form_of
from ucpl.language.refused_lines import comma_above, standing, standing_call
from ucpl.language.slips import GENERAL, diagnose
from ucpl.language.source import TEXT_CHARACTERS_MAX, Source, version_of
from ucpl.language.suggestions import instead_of
from ucpl.language.tables import Tables, tables
from ucpl.language.words import INSTEAD
from ucpl.resources import VERSIONS

__all__ = ["LOCK", "read", "tables_of"]

LOCK = threading.Lock()  # the recorder knows one text at a time
# Where a line to write is looked for.
_OF_HABIT = frozenset({"E001", "E002", "E004", "E005", "E016", "E017", "E019", "E020", "E023"})


def tables_of(text: str, start: str = "start") -> Tables:
    """The parser of the version that a text states.

    Expressions and calls, which state none, are alike in all versions.
    """
    stated = version_of(text) if start == "start" else VERSIONS[-1]
    return tables(stated if stated in VERSIONS else VERSIONS[0])


def read(source: Source, start: str) -> object:
    """The record of a complete text; `start` is its rule.

    Raises: UcplError, at the first place that cannot be read.
    """
    if len(source.text) > TEXT_CHARACTERS_MAX:
        fail(
            "E011",
            f"a text has {len(source.text)} characters; {TEXT_CHARACTERS_MAX} are allowed",
            source.label(source.span(0, 1)),
        )
    with LOCK:
        parser = tables_of(source.text, start)
        parser.joiner.source = source
        parser.recorder.begin(source, parser.version)
        try:
            # The last line may lack its newline; the grammar asks for one after every statement.
            return parser.lark.parse(source.text + "\n", start=start)
        except UnexpectedInput as error:
            problem = UcplError(_with_the_line(diagnose(error, source, parser.lark), source, start, parser))
        except UcplError as error:
            problem = UcplError(*(_with_the_line(d, source, start, parser) for d in error.diagnostics))
        finally:
            parser.recorder.begin(Source("", ""))  # let the text and its records go
    raise problem from None


def _with_the_line(found: Diagnostic, source: Source, start: str, parser: Tables) -> Diagnostic:
    """The diagnostic with the line to write instead, or the statement's form."""
    found = _of_another_version(found, source, parser.version)
    if found.code not in _OF_HABIT or start not in ("start", "call_text"):
        return found
    label = found.labels[0]
    place = _offset(source.text, label.line or 1, label.column or 1)
    is_call = start == "call_text"
    at = standing_call(source.text, place) if is_call else standing(source.text, place, found.code == "E002")
    if at is None:
        return found
    if not is_call and (comma := comma_above(source.text, place)) is not None:
        line = source.text.count("\n", 0, comma) + 1
        label = source.label(source.span(comma, comma + 1), "the line continues after a comma")
        why = f"take the comma at the end of line {line} out: a statement ends with its line"
        return evolve(found, labels=(label, *found.labels), remedy=why)
    instead = instead_of(at, parser)
    if instead is not None and (found.code != "E016" or found.about is None):
        return evolve(found, remedy=instead.remedy)
    if found.code == "E001" and found.about == GENERAL:
        return evolve(found, remedy=form_of(at.place, (at.before + at.line).strip(), parser.version))
    return found


def _of_another_version(found: Diagnostic, source: Source, version: int) -> Diagnostic:
    """The diagnostic, or E024 at a word that version 2 does without."""
    label = found.labels[0]
    start = _offset(source.text, label.line or 1, label.column or 1)
    word = next(iter(re.findall(r"\A[a-z]+\b", source.text[start : start + 20])), "")
    before = re.search(r"\b(buckets|domain)[ \t]+\Z", source.text[:start])
    if before is not None:  # read as a name: the word behind it is refused
        word, start = before[1], before.start(1)
    if version == 1 or word not in INSTEAD or found.code != "E001":
        return found
    here = source.label(source.span(start, start + len(word)), "here")
    return Diagnostic("E024", f"version {version} has no `{word}`", (here,), remedy=INSTEAD[word])


def _offset(text: str, line: int, column: int) -> int:
    place = 0
    for _ in range(line - 1):
        place = text.find("\n", place) + 1
    return place + column - 1
