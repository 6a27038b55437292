"""A language server for editors, over standard input and output.

Diagnostics while typing, sizes, definitions, completion. An editor starts it. `editors/vscode` is a ready extension.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl lsp\nucpl lsp --config config.json"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="CONFIG.JSON",
        default="",
        help="sizes of `config.NAME` (default: the one in the folder of each file)",
    )
    parser.add_argument("--stdio", action="store_true", help="as editors ask for it; there is no other way")


def run(options: Namespace, console: Console) -> int:
    try:
        import pygls.lsp.server  # noqa: F401
    except ImportError:
        fail(
            "E195",
            "the language server needs pygls, which is not installed",
            Label("<command line>", where="ucpl lsp"),
            remedy="pip install 'pygls>=2.1,<3', or install ucpl with its extra: pip install '.[lsp]' in its folder",
        )
    from ucpl.lsp.server import serve

    serve(options.config)
    return Exit.DONE
