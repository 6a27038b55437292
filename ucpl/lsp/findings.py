"""The findings for an open text: diagnostics with places, reason and remedy."""

from __future__ import annotations

import os

from ucpl.errors import Diagnostic, Label
from ucpl.lint.rules import Remark
from ucpl.lsp.files import EditorTexts, shipped_path
from ucpl.lsp.mending import faults
from ucpl.lsp.outline import Outline
from ucpl.records import frozen

__all__ = ["Finding", "Related", "findings"]


@frozen
class Related:
    """Another place of a finding.

    Lines and characters count from 0, in characters of the text.
    """

    path: str
    start: tuple[int, int]
    stop: tuple[int, int]
    message: str


@frozen
class Finding:
    """One finding about a text.

    `code` is empty of a remark, which may have a rule.
    """

    start: tuple[int, int]
    stop: tuple[int, int]
    code: str
    message: str
    related: tuple[Related, ...] = ()
    rule: str = ""


def findings(texts: EditorTexts, path: str) -> list[Finding]:
    """The findings of `ucpl check` for a file in the editor.

    They are about its text, else about its names and numbers.
    """
    outline = texts.outline(path)
    if outline is None:
        return []
    wrong = faults(outline, path)
    if wrong:
        return [_finding(texts, path, outline, d) for d in wrong]
    from ucpl.conversion.checking import check_text
    from ucpl.conversion.requests import Given

    config = texts.config(path)
    given = Given(config=config.values if config is not None else None)
    checked = check_text(path, outline.text, given, texts.text)
    return [
        *(_finding(texts, path, outline, d) for d in checked.findings),
        *(_remark(outline, one) for one in (*checked.outdated, *checked.noted)),
    ]


def _finding(texts: EditorTexts, path: str, outline: Outline, diagnostic: Diagnostic) -> Finding:
    here = [label for label in diagnostic.labels if label.file == path and label.line is not None]
    first = here[0] if here else None
    others = tuple(_related(texts, path, label) for label in diagnostic.labels if label is not first)
    lines = [diagnostic.message]
    lines += [first.text] if first is not None and first.text else []
    lines += [f"note: {note}" for note in diagnostic.notes]
    lines += [f"help: {diagnostic.remedy}"] if diagnostic.remedy else []
    start, stop = _range(first) if first is not None else _import_of(outline, diagnostic)
    return Finding(start, stop, diagnostic.code, "\n".join(lines), others)


def _range(label: Label) -> tuple[tuple[int, int], tuple[int, int]]:
    line, column = (label.line or 1) - 1, (label.column or 1) - 1
    return (line, column), (line, column + max(1, label.length))


def _related(texts: EditorTexts, path: str, label: Label) -> Related:
    file = label.file if os.path.isabs(label.file) else shipped_path(label.file) or path
    start, stop = _range(label) if label.line is not None else ((0, 0), (0, 1))
    return Related(file, start, stop, label.text or label.where or "here")


def _import_of(outline: Outline, diagnostic: Diagnostic) -> tuple[tuple[int, int], tuple[int, int]]:
    """The place for a finding in another file.

    It is the import that leads there, else the start.
    """
    names = {os.path.basename(label.file) for label in diagnostic.labels}
    for statement in outline.top.statements:
        if statement.word == "from" and len(statement.tokens) > 1:
            token = statement.tokens[1]
            if os.path.basename(token.value) in names:
                return outline.lines.place(token.start), outline.lines.place(token.stop)
    return (0, 0), (0, 1)


def _remark(outline: Outline, remark: Remark) -> Finding:
    """A remark at its model's or layout's name, else at its line."""
    line, name = remark.line - 1, remark.text.partition(" ")[0].strip("`:")
    for block in outline.blocks:
        if block.name == name and block.header is not None and len(block.header.tokens) > 1:
            token = block.header.tokens[1]
            start, stop = outline.lines.place(token.start), outline.lines.place(token.stop)
            if line in (-1, start[0]):
                return Finding(start, stop, "", remark.text, (), remark.rule)
    if not 0 <= line < len(outline.lines.starts):
        return Finding((0, 0), (0, 1), "", remark.text, (), remark.rule)
    written = outline.text[outline.lines.offset(line, 0) : outline.lines.offset(line, len(outline.text))]
    start, stop = (line, len(written) - len(written.lstrip())), (line, len(written.rstrip()))
    return Finding(start, stop, "", remark.text, (), remark.rule)
