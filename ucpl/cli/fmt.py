"""Format .ucpl files: statements in columns, comments kept.

The meaning stays the same.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json, write_text
from ucpl.errors import Diagnostic, Exit, UcplError
from ucpl.texts import read_text

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl fmt model.ucpl\nucpl fmt --check specs/*.ucpl"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not tidy")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.language import format_text

    changed: list[str] = []
    findings: list[Diagnostic] = []
    for name in options.files:
        text = read_text(Path(name))
        try:
            tidy = format_text(text, name)
        except UcplError as error:
            findings += error.diagnostics
            continue
        if tidy != text:
            changed.append(name)
            if not options.check:
                write_text(Path(name), tidy)
            console.say(f"{name}: {'is not tidy' if options.check else 'tidied'}")
    if findings:
        console.diagnostics(findings)
    console.answer({"changed": changed, "written": not options.check, "diagnostics": len(findings)})
    return Exit.ANSWER_IS_NO if findings or (options.check and changed) else Exit.DONE
