"""Write the .ucpl of a checkpoint: its model and its layout.

The text converts as the checkpoint does.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json, write_text
from ucpl.errors import Exit, UcplError

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl infer runs/step-1000 -o inferred.ucpl"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="a save folder, one step's folder, or a plain file")
    parser.add_argument("-o", "--output", metavar="FILE", help="write here instead of to standard output")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api

    try:
        found = api.infer(options.checkpoint)
    except UcplError as error:
        if options.output and error.diagnostics[0].code == "E464":
            _start(options, console)
        raise
    text = found.text()
    if options.output:
        write_text(Path(options.output), text)
        console.say(f"{options.output}: model {found.model.name}, layout {found.call_text()}")
    else:
        console.raw(text)
    console.answer(
        {
            "layout": found.layout.call,
            "tensors": len(found.layout.tensors),
            "origins": {name: {"value": v, "origin": o} for name, (v, o) in found.inherited.items()},
            "text": text,
        }
    )
    return Exit.DONE


def _start(options: Namespace, console: Console) -> None:
    """The parts to complete by hand, if cuts are unknown."""
    from ucpl import api
    from ucpl.inference.parallel import started

    write_text(Path(options.output), started(api.open_checkpoint(Path(options.checkpoint))))
    console.say(f"{options.output}: layout mine, to be completed where lines are marked as open")
