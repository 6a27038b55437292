"""Print the path that a restarted job loads.

The newest complete checkpoint of RUN, converted into RUN.resume/ if the ranks need it. RUN is only read. All processes of a
job may run this at once: one converts, the others wait. Behind `--`, a command runs with the path for {}, and in
UCPL_RESUME; both are empty if the run has no checkpoint yet.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ucpl.cli.options import add_data_plane, add_json, data_plane, whole_number
from ucpl.errors import Exit, Label, UcplError, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = """
ucpl resume out --ranks 3
ucpl resume runs/zero2 --to zero3 -- python train.py --resume {}
srun --ntasks 6 ucpl resume out -- python train.py --resume {}
"""
_RANKS_MAX = 1 << 24
_PATH = "UCPL_RESUME"
_NOT_FOUND = "E224"
_LAUNCHERS = ("torchrun",)  # it starts the ranks of its node
_MODULES = ("torch.distributed.run", "torch.distributed.launch")  # behind python -m


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder that a job saves into")
    parser.add_argument("--ranks", metavar="N", help="ranks of the job (default: WORLD_SIZE, or SLURM_NTASKS)")
    parser.add_argument(
        "--to",
        default="",
        metavar="LAYOUT",
        help="zero3, or zero3(dp=2, tp=2) (default: the source's, for these ranks)",
    )
    add_data_plane(parser)
    add_json(parser)
    parser.set_defaults(command=[])


def run(options: Namespace, console: Console) -> int:
    from ucpl.conversion.resuming import resume

    ranks = whole_number("--ranks", options.ranks, _RANKS_MAX) if options.ranks is not None else None
    if ranks is None and "(" not in options.to:
        _refuse_launchers(options.command)
    bounds = data_plane(options)
    try:
        found = resume(
            Path(options.run),
            {"memory": bounds["memory"], "workers": bounds["workers"]},
            ranks=ranks,
            to=options.to,
            say=console.note,
        )
    except UcplError as error:
        if error.diagnostics[0].code != _NOT_FOUND or not options.command:
            raise
        console.note(f"starts anew   {error.diagnostics[0].message}")
        _execute(options.command, "", console)
    for note in found.notes:
        console.note(note)
    if options.command:
        _execute(options.command, str(found.path), console)
    console.say(str(found.path))
    console.answer(
        {
            "path": str(found.path),
            "source": str(found.source),
            "converted": bool(found.layout),
            "layout": found.layout,
            "notes": list(found.notes),
        }
    )
    return Exit.DONE


def _refuse_launchers(command: list[str]) -> None:
    """Raises: UcplError E223 if the command starts ranks of its own."""
    found = next((word for word in command[:3] if Path(word).name in _LAUNCHERS or word in _MODULES), "")
    if found:
        text = f"{Path(found).name} starts the ranks, and their number is unknown before: SLURM_NTASKS counts launchers"
        remedy = "write --ranks N: the nodes times the processes of a node"
        fail("E223", text, Label("<command line>", where=found), remedy=remedy)


def _execute(command: list[str], path: str, console: Console) -> NoReturn:
    """Replace this process by the command. Raises: UcplError E170."""
    console.flush()
    filled = [word.replace("{}", path) for word in command]
    try:
        os.execvpe(filled[0], filled, {**os.environ, _PATH: path})
    except OSError as error:
        fail("E170", f"{filled[0]} cannot be run: {error.strerror}", Label("<command line>", where=filled[0]))
