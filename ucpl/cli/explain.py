"""Print the meaning of a diagnostic code, an example and the remedy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.cli.options import SHOWN, add_json
from ucpl.errors import Exit, Label, catalogue, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl explain E500"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="a code, as in error[E500]")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    codes = catalogue()
    code = options.code.upper()
    entry = codes.get(code)
    if entry is None:
        close = sorted(codes, key=lambda known: (_distance(code, known), known))[0]
        fail(
            "E174",
            f"no code is called `{options.code[:SHOWN]}`",
            Label("<command line>", where=options.code[:SHOWN]),
            remedy=f"the nearest is {close}: {codes[close].title}",
        )
    console.say(f"{entry.code}: {entry.title} (exit status {entry.status_text})", "", *entry.meaning.split("\n"), "")
    console.say("example:", *(f"    {line}" for line in entry.example.splitlines()))
    console.say("", *f"remedy: {entry.remedy}".split("\n"))
    console.answer(
        {
            "code": entry.code,
            "title": entry.title,
            "exit_status": entry.exit_status,
            "meaning": entry.meaning,
            "example": entry.example,
            "remedy": entry.remedy,
        }
    )
    return Exit.DONE


def _distance(code: str, known: str) -> float:
    """By number, where there is one; by letters otherwise."""
    digits = "".join(c for c in code if c in "0123456789")
    if digits:
        return abs(int(digits[:6]) - int(known[1:]))
    from difflib import SequenceMatcher

    return 1 - SequenceMatcher(None, code, known).ratio()
