"""Format .ucpl files: statements in columns, comments kept.

The meaning stays the same. With --upgrade, a file of version 1 becomes one of version 2.
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

EXAMPLE = "ucpl fmt model.ucpl\nucpl fmt --check specs/*.ucpl\nucpl fmt --upgrade model.ucpl"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not tidy")
    parser.add_argument("--upgrade", action="store_true", help="write files of version 1 of the language in version 2")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.language import format_text, upgraded
    from ucpl.language.source import version_of

    changed: list[str] = []
    findings: list[Diagnostic] = []
    for name in options.files:
        text = read_text(Path(name))
        try:
            tidy = upgraded(text, name) if options.upgrade else format_text(text, name)
        except UcplError as error:
            findings += error.diagnostics
            continue
        if tidy != text:
            changed.append(name)
            if not options.check:
                write_text(Path(name), tidy)
            done = (
                "tidied" if version_of(tidy) == version_of(text) else f"in version {version_of(tidy)} of the language"
            )
            console.say(f"{name}: {'is not tidy' if options.check else done}")
    if findings:
        console.diagnostics(findings)
    console.answer({"changed": changed, "written": not options.check, "diagnostics": len(findings)})
    return Exit.ANSWER_IS_NO if findings or (options.check and changed) else Exit.DONE
