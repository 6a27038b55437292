"""The server, over standard input and output, with pygls's messages.

Each message is answered from the current texts. A thread computes diagnostics a moment after the last key; the answer
to a newer text replaces one that is late.
"""

from __future__ import annotations

import asyncio
import os

from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidRequest
from pygls.lsp.server import LanguageServer

from ucpl import __version__
from ucpl.lsp.findings import Finding
from ucpl.lsp.protocol import Wire, path_of
from ucpl.lsp.references import NotRenamed
from ucpl.lsp.service import Service

__all__ = ["EditorServer", "serve"]

PAUSE = 0.15  # seconds after the last key before a text is checked


class EditorServer(LanguageServer):
    """Texts by path. Those that are no files (`untitled:`) have their URI."""

    def __init__(self, config: str = "") -> None:
        super().__init__("ucpl", __version__)
        self.service = Service()
        self.service.configure(config)
        self.waiting: dict[str, asyncio.Task[None]] = {}
        self.uris: dict[str, str] = {}  # of open texts, by path, as the client writes them

    @property
    def wire(self) -> Wire:
        return Wire(self.service, self.workspace.position_codec)

    def path(self, uri: str) -> str:
        path = path_of(uri)
        return os.path.normpath(path) if path is not None else uri

    def read(self, uri: str) -> None:
        """The text of a document has changed."""
        path = self.path(uri)
        self.uris[path] = uri
        self.service.put(path, self.workspace.get_text_document(uri).source)
        self.check_all()

    def leave(self, uri: str) -> None:
        path = self.path(uri)
        self.uris.pop(path, None)
        self.service.put(path, None)
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))
        self.check_all()

    def settings(self, given: object) -> None:
        """Read `{"ucpl": {"config": PATH}}`, or its inner value."""
        inner = given.get("ucpl", given) if isinstance(given, dict) else {}
        config = inner.get("config") if isinstance(inner, dict) else None
        if isinstance(config, str):
            self.service.configure(config)
            self.check_all()

    def check_all(self) -> None:
        """Check the open texts again, soon: they can import each other."""
        for path in self.uris:
            late = self.waiting.pop(path, None)
            if late is not None:
                late.cancel()
            self.waiting[path] = asyncio.get_running_loop().create_task(self._check(path))

    async def _check(self, path: str) -> None:
        await asyncio.sleep(PAUSE)
        service, version = self.service, self.service.version
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(None, service.findings, path)
            if version != service.version or path not in self.uris:
                return
            self.publish(path, found)
            await loop.run_in_executor(None, service.prepare, path)
        except Exception as error:  # report our own error, and check again at the next key
            self.window_log_message(types.LogMessageParams(types.MessageType.Error, f"{type(error).__name__}: {error}"))

    def publish(self, path: str, found: list[Finding]) -> None:
        """Send the findings of an open text to the client."""
        wire, uri = self.wire, self.uris[path]
        diagnostics = [wire.diagnostic(path, one) for one in found]
        version = self.workspace.get_text_document(uri).version
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, diagnostics, version))


def serve(config: str = "") -> None:
    """Answer a client over standard input and output until it leaves.

    `config`: the config.json for sizes.
    """
    made(config).start_io()


def made(config: str = "") -> EditorServer:
    """The server with everything that it answers."""
    server = EditorServer(config)
    _texts(server)
    _answers(server)
    return server


def warm() -> None:
    """Import the modules of the first answers while the editor starts."""
    from ucpl.language.expected import words_after

    words_after("ucpl 1\n")


def _texts(server: EditorServer) -> None:
    @server.feature(types.INITIALIZED)
    def _(ls: EditorServer, params: types.InitializedParams) -> None:
        root = ls.workspace.root_path
        ls.service.texts.root = root or ""
        asyncio.get_running_loop().run_in_executor(None, warm)

    @server.feature(types.INITIALIZE)
    def _(ls: EditorServer, params: types.InitializeParams) -> None:
        ls.settings(params.initialization_options)

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def _(ls: EditorServer, params: types.DidOpenTextDocumentParams) -> None:
        ls.read(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def _(ls: EditorServer, params: types.DidChangeTextDocumentParams) -> None:
        ls.read(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def _(ls: EditorServer, params: types.DidSaveTextDocumentParams) -> None:
        ls.service.version += 1
        ls.check_all()

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def _(ls: EditorServer, params: types.DidCloseTextDocumentParams) -> None:
        ls.leave(params.text_document.uri)

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def _(ls: EditorServer, params: types.DidChangeConfigurationParams) -> None:
        ls.settings(params.settings)

    @server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def _(ls: EditorServer, params: types.DidChangeWatchedFilesParams) -> None:
        ls.service.version += 1
        ls.check_all()


def _answers(server: EditorServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def _(ls: EditorServer, params: types.HoverParams) -> types.Hover | None:
        path, offset = _place(ls, params)
        found = ls.service.hover(path, offset)
        return ls.wire.hover(path, found) if found is not None else None

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    def _(ls: EditorServer, params: types.DefinitionParams) -> list[types.Location]:
        path, offset = _place(ls, params)
        return [ls.wire.target(path, one) for one in ls.service.targets(path, offset)]

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    def _(ls: EditorServer, params: types.ReferenceParams) -> list[types.Location]:
        path, offset = _place(ls, params)
        found = [ls.wire.use(one) for one in ls.service.references(path, offset)]
        if params.context.include_declaration:
            return found
        defined = [ls.wire.target(path, one) for one in ls.service.targets(path, offset)]
        return [one for one in found if one not in defined]

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    def _(ls: EditorServer, params: types.PrepareRenameParams) -> types.Range | None:
        path, offset = _place(ls, params)
        found = ls.service.renamed_part(path, offset)
        return ls.wire.between(path, found.start, found.stop) if found is not None else None

    @server.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    def _(ls: EditorServer, params: types.RenameParams) -> types.WorkspaceEdit:
        path, offset = _place(ls, params)
        try:
            return ls.wire.renaming(ls.service.renamed(path, offset, params.new_name))
        except NotRenamed as error:
            raise JsonRpcException(str(error), JsonRpcInvalidRequest.CODE) from None

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=["@", ".", "{", "("]))
    def _(ls: EditorServer, params: types.CompletionParams) -> types.CompletionList:
        path, offset = _place(ls, params)
        found = ls.service.completions(path, offset)
        return types.CompletionList(False, [ls.wire.completion(path, i, one) for i, one in enumerate(found)])

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def _(ls: EditorServer, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
        path = ls.path(params.text_document.uri)
        return [ls.wire.symbol(path, one) for one in ls.service.symbols(path)]

    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    def _(ls: EditorServer, params: types.DocumentFormattingParams) -> list[types.TextEdit]:
        path = ls.path(params.text_document.uri)
        return [ls.wire.edit(one) for one in ls.service.formatting(path)]


Placed = (
    types.HoverParams
    | types.DefinitionParams
    | types.CompletionParams
    | types.ReferenceParams
    | types.PrepareRenameParams
    | types.RenameParams
)


def _place(ls: EditorServer, params: Placed) -> tuple[str, int]:
    """The file and the offset that a question is about."""
    path = ls.path(params.text_document.uri)
    return path, ls.wire.offset(path, params.position)
