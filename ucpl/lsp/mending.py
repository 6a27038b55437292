"""Check a text that does not parse statement by statement.

Statements without faults keep their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from attrs import evolve

from ucpl.errors import Diagnostic, UcplError
from ucpl.language import parse
from ucpl.language.source import version_of
from ucpl.lsp.outline import BLOCKS, Outline, Statement, TextBlock
from ucpl.records import frozen
from ucpl.resources import VERSIONS

__all__ = ["faults", "mended"]

STATEMENTS_MAX = 3000  # of a text that is split: a longer one has its first fault alone
FINDINGS_MAX = 50
_AROUND = {
    "top": ("ucpl 1\n", "\n"),
    "model": ("ucpl 1\nmodel m {\n", "\n}\n"),
    "layout": ("ucpl 1\nlayout m() of any {\n", "\n}\n"),
    "header": ("ucpl 1\n", " {\n}\n"),
}


@frozen(eq=False)
class _StatementPart:
    """A single statement: its block and its faults."""

    place: str  # a key of _AROUND
    statement: Statement
    block: TextBlock
    faults: tuple[Diagnostic, ...] = ()


def faults(outline: Outline, path: str) -> list[Diagnostic]:
    """The syntax errors of a text.

    First those of the complete text, then those of each statement.

    Empty for a text that parses.
    """
    first = _whole(outline)
    known = {d.labels[0].line for d in first if d.labels}
    found = list(first)
    for part in _split(outline) if first else ():
        begin = outline.lines.place(part.statement.start)[0] + 1
        end = outline.lines.place(part.statement.stop)[0] + 1
        if part.faults and not any(line is not None and begin <= line <= end for line in known):
            found += [d for d in part.faults if d.labels and begin <= (d.labels[0].line or 0) <= end]
    return [evolve(d, labels=tuple(evolve(b, file=path) for b in d.labels)) for d in found[:FINDINGS_MAX]]


def mended(outline: Outline) -> str | None:
    """The text without its wrong statements; None if too much is missing.

    Places differ from those in the text: it is for meanings and sizes of names.
    """
    if not _whole(outline):
        return outline.text
    good = [part for part in _split(outline) if not part.faults]
    lines = [f"ucpl {_version(outline)}", *(_text(outline, p.statement) for p in good if p.place == "top")]
    for part in good:
        if part.place == "header":
            inner = [_text(outline, p.statement) for p in good if p.block is part.block and p is not part]
            lines += [f"{_text(outline, part.statement)} {{", *inner, "}"]
    text = "\n".join(lines) + "\n"
    return text if not _whole_text(text) else None


@lru_cache(maxsize=16)  # a text is read several times before it changes
def _whole(outline: Outline) -> tuple[Diagnostic, ...]:
    return _whole_text(outline.text)


def _whole_text(text: str) -> tuple[Diagnostic, ...]:
    try:
        parse(text)
    except UcplError as error:
        return error.diagnostics
    return ()


@lru_cache(maxsize=16)
def _split(outline: Outline) -> tuple[_StatementPart, ...]:
    parts = list(_parts(outline))
    return tuple(evolve(p, faults=_faults_of(outline, p)) for p in parts) if len(parts) <= STATEMENTS_MAX else ()


def _parts(outline: Outline) -> Iterator[_StatementPart]:
    for statement in outline.top.statements:
        if statement.word != "ucpl":
            yield _StatementPart("header" if statement.word in BLOCKS else "top", statement, outline.top)
    for block in outline.blocks:
        if block.header is not None:
            yield _StatementPart("header", block.header, block)
        for statement in block.statements:
            yield _StatementPart(block.kind, statement, block)


def _faults_of(outline: Outline, part: _StatementPart) -> tuple[Diagnostic, ...]:
    """The parser's errors for one statement, at its place in the text."""
    before, after = _AROUND[part.place]
    before = before.replace("ucpl 1", f"ucpl {_version(outline)}")
    line, column = outline.lines.place(part.statement.start)
    moved = line - before.count("\n")
    found = _whole_text(f"{before}{' ' * column}{_text(outline, part.statement)}{after}")
    return tuple(evolve(d, labels=tuple(evolve(b, line=(b.line or 1) + moved) for b in d.labels)) for d in found)


def _version(outline: Outline) -> int:
    """The version of the language that a text states, or the first."""
    stated = version_of(outline.text)
    return stated if stated in VERSIONS else VERSIONS[0]


def _text(outline: Outline, statement: Statement) -> str:
    return outline.text[statement.start : statement.stop]
