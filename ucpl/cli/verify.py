"""Read a checkpoint back whole: digests, zip CRCs, copies that must equal each other, weights against their masters."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text, diagnostic_object
from ucpl.cli.options import add_data_plane, add_json, data_plane
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl verify runs/on-8"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("--from", dest="layout", metavar="LAYOUT", help="its layout (default: inferred)")
    add_data_plane(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api

    found = api.verify(options.checkpoint, layout=options.layout, **data_plane(options))
    files = found.files
    total = files.bytes_protected + files.bytes_unprotected
    console.say(f"read          {bytes_text(files.bytes_read)} in {files.files} files, each against its CRC")
    console.say(
        "manifest      "
        + ("matches, file by file" if files.manifest else "none: this checkpoint was not written by ucpl")
    )
    console.say(f"protected     {files.bytes_protected:,} of {total:,} bytes by a CRC or the manifest")
    for name, size in files.unprotected.items():
        console.say(f"  bare        {size:,} bytes of {name}")
    for note in found.notes:
        console.say(f"              {note}")
    console.say("sound" if found else f"damaged       {len(found.findings)} findings")
    if found.findings:
        console.diagnostics(found.findings)
    console.answer(
        {
            "sound": bool(found),
            "findings": [diagnostic_object(d) for d in found.findings],
            "files": files.files,
            "bytes_read": files.bytes_read,
            "bytes_protected": files.bytes_protected,
            "bytes_unprotected": files.bytes_unprotected,
            "bytes_live_max": files.bytes_live_max,
            "manifest": files.manifest,
            "elements_of_copies": found.copied,
            "weights_against_masters": found.rounded,
            "notes": list(found.notes),
        }
    )
    return Exit.DONE if found else Exit.ANSWER_IS_NO
