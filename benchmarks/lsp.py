"""Time the start and the answers of the language server.

Every shipped spec is opened; each question is asked at twenty places of it. llama.ucpl is asked again with the config.json of a
405B model next to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SPECS = Path(__file__).resolve().parent.parent / "specs"
PLACES = 20
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "vocab_size": 128256,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}


LSP_HEAD = ("case", "median", "19 of 20 within", "wanted")


def bench_lsp(rounds: int) -> Iterator[tuple[str, str, str, str]]:
    """Of starting, of the first diagnostics, and of every question."""
    starts: list[tuple[float, float]] = []
    answers: dict[str, list[float]] = {}
    checks: list[float] = []
    for _ in range(rounds):
        start, times, checked = asyncio.run(session())
        starts.append(start)
        checks.append(checked)
        for name, seconds in times.items():
            answers.setdefault(name, []).extend(seconds)
    wall, core = (statistics.median(x) for x in zip(*starts, strict=True))
    yield "`ucpl lsp`, until the client may ask", f"{core:.2f} s of a core ({wall:.2f} s by the clock)", "", "1 s"
    yield "first diagnostics, all shipped specs opened at once", f"{statistics.median(checks):.2f} s", "", ""
    for name, seconds in answers.items():
        middle, late = statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=20)[-1] * 1e3
        yield name, f"{middle:.1f} ms", f"{late:.1f} ms", "100 ms"


async def session() -> tuple[tuple[float, float], dict[str, list[float]], float]:
    """Seconds until the server runs, of each answer, and of all diagnostics."""
    from lsprotocol import types
    from pygls.lsp.client import LanguageClient

    with tempfile.TemporaryDirectory(prefix="ucpl-bench-") as folder:
        paths = copied(Path(folder))
        client = LanguageClient("bench", "1")
        checked: set[str] = set()
        client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda params: checked.add(params.uri))
        begin = time.perf_counter()
        await client.start_io(sys.executable, "-m", "ucpl", "lsp")
        asked = types.InitializeParams(capabilities=types.ClientCapabilities(), process_id=os.getpid())
        await client.initialize_async(asked)
        start = (time.perf_counter() - begin, core_seconds(client._server.pid))
        client.initialized(types.InitializedParams())
        begin = time.perf_counter()
        for path in paths:
            item = types.TextDocumentItem(path.as_uri(), "ucpl", 1, path.read_text(encoding="utf-8"))
            client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        while len(checked) < len(paths):
            await asyncio.sleep(0.01)
        seconds = time.perf_counter() - begin
        await asyncio.sleep(2)  # the data of a hover is computed after the diagnostics
        times: dict[str, list[float]] = {}
        for path in paths:
            await ask(client, path, times)
        await client.shutdown_async(None)
        client.exit(None)
        await client.stop()
    return start, times, seconds


def core_seconds(process: int) -> float:
    """Core seconds of a process so far; other work hardly changes them."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def copied(folder: Path) -> list[Path]:
    """The shipped specs, and the Llama with its config in a folder."""
    sized = folder / "405b"
    sized.mkdir()
    (sized / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    shutil.copy(SPECS / "llama.ucpl", sized)
    return [*(Path(shutil.copy(path, folder)) for path in sorted(SPECS.glob("*.ucpl"))), sized / "llama.ucpl"]


async def ask(client, path: Path, times: dict[str, list[float]]) -> None:  # type: ignore[no-untyped-def]
    """Every question about one text; each at places spread over it."""
    from lsprotocol import types

    document = types.TextDocumentIdentifier(path.as_uri())
    lines = path.read_text(encoding="utf-8").split("\n")
    for line in range(2, len(lines), max(1, len(lines) // PLACES)):
        place = types.Position(line, len(lines[line]) // 2)
        questions = {
            "hover, with sizes and a rank's part": (
                client.text_document_hover_async,
                types.HoverParams(document, place),
            ),
            "definition": (client.text_document_definition_async, types.DefinitionParams(document, place)),
            "completion": (client.text_document_completion_async, types.CompletionParams(document, place)),
        }
        for name, (question, parameters) in questions.items():
            await timed(times, name, question(parameters))
    await timed(times, "outline", client.text_document_document_symbol_async(types.DocumentSymbolParams(document)))
    options = types.FormattingOptions(tab_size=2, insert_spaces=True)
    await timed(
        times, "format", client.text_document_formatting_async(types.DocumentFormattingParams(document, options))
    )


async def timed(times: dict[str, list[float]], name: str, question) -> None:  # type: ignore[no-untyped-def]
    begin = time.perf_counter()
    await question
    times.setdefault(name, []).append(time.perf_counter() - begin)
