"""Convert this room's records to those of the protocol, and back.

Characters become the units that the client counts in.
"""

from __future__ import annotations

import os

from lsprotocol import types
from pygls.uris import from_fs_path, to_fs_path
from pygls.workspace import PositionCodec

from ucpl.lsp.completions import Completion
from ucpl.lsp.definitions import Symbol
from ucpl.lsp.findings import Finding, Related
from ucpl.lsp.hovers import Hover
from ucpl.lsp.references import NameUse
from ucpl.lsp.service import Edit, Service
from ucpl.lsp.targets import Target

__all__ = ["Wire", "path_of", "uri_of"]

_SYMBOLS = {
    "model": types.SymbolKind.Class,
    "layout": types.SymbolKind.Struct,
    "plan": types.SymbolKind.Function,
    "tensor": types.SymbolKind.Field,
    "entry": types.SymbolKind.Property,
    "let": types.SymbolKind.Constant,
    "dim": types.SymbolKind.Constant,
    "axis": types.SymbolKind.EnumMember,
    "mesh": types.SymbolKind.Enum,
    "file": types.SymbolKind.File,
    "group": types.SymbolKind.Array,
    "state": types.SymbolKind.Variable,
    "prefix": types.SymbolKind.Namespace,
}
_COMPLETIONS = {
    "word": types.CompletionItemKind.Keyword,
    "model": types.CompletionItemKind.Class,
    "layout": types.CompletionItemKind.Struct,
    "tensor": types.CompletionItemKind.Field,
    "axis": types.CompletionItemKind.EnumMember,
    "file": types.CompletionItemKind.File,
    "config": types.CompletionItemKind.Property,
    "parameter": types.CompletionItemKind.Variable,
}


def path_of(uri: str) -> str | None:
    """The file of a document.

    None if it is no file: it has a name of its own.
    """
    return to_fs_path(uri) if uri.startswith("file:") else None


def uri_of(path: str) -> str:
    return (from_fs_path(path) or path) if os.path.isabs(path) else path


class Wire:
    """Translates one answer for a client, which counts characters its own way."""

    def __init__(self, service: Service, codec: PositionCodec) -> None:
        self.service = service
        self.codec = codec
        self.lines_of: dict[str, list[str]] = {}

    def offset(self, path: str, position: types.Position) -> int:
        here = self.codec.position_from_client_units(self._lines(path), position)
        return self.service.lines(path).offset(here.line, here.character)

    def _lines(self, path: str) -> list[str]:
        if path not in self.lines_of:
            self.lines_of[path] = [f"{line}\n" for line in (self.service.texts.text(path) or "").split("\n")]
        return self.lines_of[path]

    def range(self, path: str, start: tuple[int, int], stop: tuple[int, int]) -> types.Range:
        lines = self._lines(path)
        begin, end = (self.codec.position_to_client_units(lines, types.Position(*place)) for place in (start, stop))
        return types.Range(begin, end)

    def between(self, path: str, start: int, stop: int) -> types.Range:
        lines = self.service.lines(path)
        return self.range(path, lines.place(start), lines.place(stop))

    def diagnostic(self, path: str, finding: Finding) -> types.Diagnostic:
        severity = types.DiagnosticSeverity.Error if finding.code else types.DiagnosticSeverity.Information
        return types.Diagnostic(
            self.range(path, finding.start, finding.stop),
            finding.message,
            severity=severity,
            code=finding.code or finding.rule or None,
            source="ucpl",
            related_information=[self._related(one) for one in finding.related] or None,
        )

    def _related(self, one: Related) -> types.DiagnosticRelatedInformation:
        place = types.Location(uri_of(one.path), self.range(one.path, one.start, one.stop))
        return types.DiagnosticRelatedInformation(place, one.message)

    def hover(self, path: str, found: Hover) -> types.Hover:
        text = types.MarkupContent(types.MarkupKind.Markdown, found.text)
        return types.Hover(text, self.between(path, found.start, found.stop))

    def target(self, path: str, found: Target) -> types.Location:
        return types.Location(uri_of(found.path), self.between(found.path, found.start, found.stop))

    def use(self, found: NameUse) -> types.Location:
        return types.Location(uri_of(found.path), self.between(found.path, found.start, found.stop))

    def renaming(self, edits: list[tuple[NameUse, str]]) -> types.WorkspaceEdit:
        changes: dict[str, list[types.TextEdit]] = {}
        for one, text in edits:
            edit = types.TextEdit(self.between(one.path, one.start, one.stop), text)
            changes.setdefault(uri_of(one.path), []).append(edit)
        return types.WorkspaceEdit(changes=changes)

    def completion(self, path: str, number: int, found: Completion) -> types.CompletionItem:
        return types.CompletionItem(
            found.label,
            kind=_COMPLETIONS.get(found.kind, types.CompletionItemKind.Constant),
            detail=found.detail or None,
            sort_text=f"{number:04}",
            filter_text=found.label,
            text_edit=types.TextEdit(self.between(path, found.start, found.stop), found.text or found.label),
        )

    def symbol(self, path: str, found: Symbol) -> types.DocumentSymbol:
        return types.DocumentSymbol(
            name=found.name,
            kind=_SYMBOLS.get(found.kind, types.SymbolKind.Constant),
            range=self.between(path, found.first, found.last),
            selection_range=self.between(path, found.start, found.stop),
            detail=found.kind,
            children=[self.symbol(path, inner) for inner in found.children],
        )

    def edit(self, edit: Edit) -> types.TextEdit:
        return types.TextEdit(types.Range(types.Position(edit.first, 0), types.Position(edit.last, 0)), edit.text)
