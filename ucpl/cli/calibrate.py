"""Measure this machine and a folder's disk, for the estimates of `ucpl plan`."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.options import WORKERS_MAX, add_json, memory_of, whole_number, write_text
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = """
ucpl calibrate runs
ucpl calibrate /scratch --size 4G --output scratch.json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="on the disk that targets are written to; left as it was")
    parser.add_argument("--size", default="256M", metavar="SIZE", help="how much is written and read (default 256M)")
    parser.add_argument("--workers", default="2", metavar="N", help="threads that move data (default 2)")
    parser.add_argument(
        "-o", "--output", metavar="FILE.json", help="write the figures here (default: where this user's files are kept)"
    )
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from attrs import asdict

    from ucpl.conversion.bandwidths import text_of
    from ucpl.conversion.calibrating import measure

    output = Path(options.output) if options.output else _own_place()
    if not os.path.isdir(output.absolute().parent):  # before anything is measured
        fail("E179", f"{output} cannot be written: its folder is not there", Label(str(output)))
    size = memory_of(options.size, "--size")
    workers = whole_number("--workers", options.workers, WORKERS_MAX)
    found = measure(
        Path(options.folder), size=size, workers=workers, say=lambda text: console.say(f"measured   {text}")
    )
    write_text(output, text_of(found))
    for name, what in (
        ("read", "from the disk"), ("reread", "from memory"), ("write", "into memory"), ("sync", "written until durable"),
        ("copy", "from memory to memory, one core"), ("digest", "both digests"),
    ):  # fmt: skip
        console.say(f"{name:<10} {bytes_text(int(getattr(found, name)))}/s {what}")
    console.say(
        f"call       {found.call * 1e6:.1f} us a read",
        f"file       {found.file * 1e3:.2f} ms until a small file is durable",
        f"start      {found.start:.2f} s until the first byte of a run, {bytes_text(found.memory)} besides its buffers",
        f"written    {output}",
    )
    console.answer({"bandwidths": asdict(found), "output": str(output)})
    return Exit.DONE


def _own_place() -> Path:
    """The file of this user's figures; make its folder.

    Raises: UcplError E179.
    """
    from ucpl.conversion.bandwidths import place

    made = place()
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a home that is somebody else's, as in a container
        remedy = "write them elsewhere with -o FILE.json, and name that file to `ucpl plan --bandwidths`"
        fail("E179", f"{made} cannot be written: {error.strerror}", Label(str(made)), remedy=remedy)
    return made
