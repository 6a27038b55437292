"""A protocol client, and `ucpl lsp` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from lsprotocol import types
from pygls.lsp.client import LanguageClient

from tests.cli.command import ucpl
from tests.lsp.test_answers import CONFIG, LAYOUT, MODEL
from ucpl.language import format_text

WAIT = 120  # seconds until an answer counts as none


class Editor:
    """One file open in an editor.

    `say` types, `diagnostics` waits for the text's findings.
    """

    def __init__(self, client: LanguageClient, said: asyncio.Queue[types.PublishDiagnosticsParams], path: Path) -> None:
        self.client, self.said, self.uri, self.version = client, said, path.as_uri(), 1
        self.document = types.TextDocumentIdentifier(self.uri)

    def open(self, text: str) -> None:
        item = types.TextDocumentItem(self.uri, "ucpl", self.version, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def replace(self, line: int, begin: int, end: int, text: str) -> None:
        """Type over characters begin ..

        End of a line (UTF-16 units, as editors count).
        """
        self.version += 1
        here = types.Range(types.Position(line, begin), types.Position(line, end))
        document = types.VersionedTextDocumentIdentifier(uri=self.uri, version=self.version)
        change = types.TextDocumentContentChangePartial(here, text)
        self.client.text_document_did_change(types.DidChangeTextDocumentParams(document, [change]))

    async def diagnostics(self) -> list[types.Diagnostic]:
        """The findings of the newest text."""
        while True:
            found = await asyncio.wait_for(self.said.get(), WAIT)
            if found.uri == self.uri and found.version == self.version:
                return list(found.diagnostics)

    async def faults(self) -> list[types.Diagnostic]:
        """Diagnostics that are no remarks."""
        return [one for one in await self.diagnostics() if one.severity != types.DiagnosticSeverity.Information]


async def talk(path: Path, tell: Callable[[Editor], Awaitable[None]], *arguments: str) -> None:
    client = LanguageClient("test", "1")
    said: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()
    logged: list[str] = []
    client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda params: said.put_nowait(params))
    client.feature(types.WINDOW_LOG_MESSAGE)(lambda params: logged.append(params.message))
    client.feature(types.WINDOW_SHOW_MESSAGE)(lambda params: logged.append(params.message))
    await client.start_io(sys.executable, "-m", "ucpl", "lsp", *arguments)
    try:
        asked = types.InitializeParams(
            capabilities=types.ClientCapabilities(), process_id=os.getpid(), root_uri=path.parent.as_uri()
        )
        answer = await asyncio.wait_for(client.initialize_async(asked), WAIT)
        able = answer.capabilities
        assert able.hover_provider and able.definition_provider and able.completion_provider
        assert able.document_formatting_provider and able.document_symbol_provider
        assert able.references_provider and able.rename_provider
        client.initialized(types.InitializedParams())
        await tell(Editor(client, said, path))
        await asyncio.wait_for(client.shutdown_async(None), WAIT)
        assert logged == []
    finally:
        client.exit(None)
        await asyncio.wait_for(client.stop(), WAIT)


def test_an_editor_is_answered(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    path = tmp_path / "gpt.ucpl"
    text = format_text(MODEL + LAYOUT.replace("layout parallel", "# \U0001f600\nlayout parallel", 1))
    lines = text.split("\n")

    def place(line: str, character: str) -> types.Position:
        number = next(i for i, one in enumerate(lines) if line in one)
        return types.Position(number, lines[number].index(character) + 1)

    async def tell(editor: Editor) -> None:
        client, document = editor.client, editor.document
        editor.open(text)
        assert await editor.faults() == []
        where = place("head = h@tp", "@")

        hover = await client.text_document_hover_async(types.HoverParams(document, place("ln     : l h", "h")))
        assert hover is not None and isinstance(hover.contents, types.MarkupContent)
        assert "dim `h` = **64**" in hover.contents.value

        asked = types.DefinitionParams(document, place("attn.qk[l]", "q: "))
        found = await client.text_document_definition_async(asked)
        assert isinstance(found, list) and isinstance(found[0], types.Location)
        assert (found[0].uri, found[0].range.start) == (editor.uri, types.Position(7, 2))

        proposed = await client.text_document_completion_async(types.CompletionParams(document, where))
        assert isinstance(proposed, types.CompletionList)
        assert [one.label for one in proposed.items][:2] == ["pp", "tp"]

        symbols = await client.text_document_document_symbol_async(types.DocumentSymbolParams(document))
        assert symbols is not None and [one.name for one in symbols] == ["heads", "gpt", "parallel", "wide"]

        number = where.line
        editor.replace(number, where.character, where.character + 2, "4")
        (one,) = await editor.diagnostics()
        assert one.code == "E001" and one.range.start == types.Position(number, where.character)
        assert "help: " in one.message and "mesh axis" in one.message

        editor.replace(number, where.character, where.character + 1, "tp")
        assert await editor.faults() == []
        editor.replace(next(i for i, line in enumerate(lines) if "head   : h" in line), 2, 9, "head ")
        assert await editor.faults() == []
        options = types.FormattingOptions(tab_size=2, insert_spaces=True)
        edits = await client.text_document_formatting_async(types.DocumentFormattingParams(document, options))
        assert edits is not None and [edit.new_text for edit in edits] == ["  head   : h\n"]

    asyncio.run(talk(path, tell))


def test_characters_are_counted_as_the_editor_counts_them(tmp_path: Path) -> None:
    """Two UTF-16 units for one character.

    The rest of the line is not shifted.
    """
    text = 'ucpl 2\nmodel m {\n  "\U0001f600\U0001f600" : 4\n  "\U0001f600" : | 5\n}\n'

    async def tell(editor: Editor) -> None:
        editor.open(text)
        (one,) = await editor.diagnostics()
        assert (one.range.start, one.range.end) == (types.Position(3, 9), types.Position(3, 10))
        editor.replace(3, 9, 11, "")
        assert await editor.diagnostics() == []

    asyncio.run(talk(tmp_path / "a.ucpl", tell))


def test_a_name_is_found_and_renamed(tmp_path: Path) -> None:
    text = MODEL + LAYOUT
    line = text.split("\n").index('  file optim   = torch "optim_{tp}.pt"')

    async def tell(editor: Editor) -> None:
        editor.open(text)
        place = types.Position(4, 7)  # the model's name
        context = types.ReferenceContext(include_declaration=False)
        asked = types.ReferenceParams(context, editor.document, place)
        found = await editor.client.text_document_references_async(asked)
        assert found is not None and [one.range.start.line for one in found] == [12, 23]
        part = await editor.client.text_document_prepare_rename_async(types.PrepareRenameParams(editor.document, place))
        assert part == types.Range(types.Position(4, 6), types.Position(4, 9))
        rename = types.RenameParams(editor.document, place, "small")
        edit = await editor.client.text_document_rename_async(rename)
        assert edit is not None and edit.changes is not None
        assert {one.new_text for one in edit.changes[editor.uri]} == {"small"} and len(edit.changes[editor.uri]) == 3
        taken = types.RenameParams(editor.document, types.Position(line, 8), "mesh")
        with pytest.raises(Exception, match="`mesh` is a word of the language"):
            await editor.client.text_document_rename_async(taken)

    asyncio.run(talk(tmp_path / "a.ucpl", tell))


def test_settings_name_a_config_and_texts_import_each_other(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"hidden_size": 10}')
    (tmp_path / "gpt.ucpl").write_text(MODEL)
    text = 'ucpl 2\nfrom "gpt.ucpl" import gpt\n' + LAYOUT

    async def tell(editor: Editor) -> None:
        editor.open(text)
        remarks = await editor.diagnostics()
        assert [one.code for one in remarks] == [None, "unused-file"]
        assert remarks[1].range.start.line > 0
        assert "there is no config" in remarks[0].message and "no line is in `file optim`" in remarks[1].message
        settings = {"ucpl": {"config": "other.json"}}
        editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(settings))
        assert await editor.faults() == []
        model = Editor(editor.client, editor.said, tmp_path / "gpt.ucpl")
        model.open(MODEL.replace("head   : h", "heda   : h"))
        found = await editor.faults()
        assert {one.code for one in found} == {"E137"} and all("`head`" in one.message for one in found)

    asyncio.run(talk(tmp_path / "layout.ucpl", tell))


def test_a_server_that_begins_has_loaded_no_more_than_it_needs() -> None:
    heavy = "{'lark', 'networkx', 'numpy', 'torch'}"
    code = f"import sys, ucpl.lsp.server as s; s.made(); print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_without_pygls_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pygls")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pygls", None)
    done = ucpl("lsp")
    assert done.status == 2
    assert done.err == (
        "error[E195]: the language server needs pygls, which is not installed\n"
        " --> <command line>: ucpl lsp\n"
        "  = help: pip install 'pygls>=2.1,<3', or install ucpl with its extra: pip install '.[lsp]' in its folder\n"
    )


@pytest.mark.parametrize("where", ["findings", "prepare"])
def test_a_fault_of_ours_is_reported_and_ends_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for both background tasks.

    The text is checked again at the next key.
    """
    from ucpl.lsp import server as room

    made, said = room.made(), []
    made.uris["/a.ucpl"] = "file:///a.ucpl"
    monkeypatch.setattr(room, "PAUSE", 0)
    monkeypatch.setattr(made, "publish", lambda path, found: said.append(f"{path}: {len(found)}"))
    monkeypatch.setattr(made, "window_log_message", lambda params: said.append(params.message))
    monkeypatch.setattr(type(made.service), "findings", lambda self, path: [])
    monkeypatch.setattr(type(made.service), "prepare", lambda self, path: None)
    monkeypatch.setattr(type(made.service), where, lambda self, path: [][1])
    asyncio.run(made._check("/a.ucpl"))
    fault = "IndexError: list index out of range"
    assert said == ([fault] if where == "findings" else ["/a.ucpl: 0", fault])
