"""Read an entire checkpoint and verify it.

Digests, zip CRCs, copies that must equal each other, weights against their masters. --against compares it with a
genuine checkpoint of the framework, stored tensor by stored tensor, under its one layout: the way to try a spec of
one's own. Each difference is named to the element, with a guess at the error in the spec.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text, diagnostic_object
from ucpl.cli.options import add_data_plane, add_json, add_quiet, add_sizes, data_plane, given_of, whole_number
from ucpl.errors import Exit, Label, fail, plural

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.verification.checkpoint import Verdict
    from ucpl.verification.reference import ReferenceComparison

UNPROVED = "as far as headers show: nothing that was read could have shown a fault"
SECONDS, SECONDS_MAX = 10, 24 * 3600
EXAMPLE = """
ucpl verify runs/on-8
ucpl verify runs/on-8 --quick --seconds 30
ucpl verify mine --from 'model.ucpl:megatron(tp = 2)' --against theirs
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("--from", dest="layout", metavar="LAYOUT", help="its layout (default: inferred)")
    parser.add_argument(
        "--against", metavar="GENUINE", help="a checkpoint of the framework, to hold it against bit by bit"
    )
    parser.add_argument("--reference", metavar="FOLDER", help="a Hugging Face folder of the same weights, as a witness")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="after a save: headers, sizes, and as many digests as fit into --seconds; compare no values",
    )
    parser.add_argument("--seconds", metavar="N", help="of --quick, the time for reading (default 10)")
    parser.add_argument("--no-witness", action="store_true", help="do not run the class that a config.json names")
    add_sizes(parser)
    add_data_plane(parser)
    add_quiet(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api

    given, quick = given_of(options), quick_of(options)
    found = api.verify(
        options.checkpoint,
        against=options.against,
        layout=options.layout,
        config=given.config,
        sizes=given.sizes,
        witness=not options.no_witness,
        reference=options.reference,
        quick=quick,
        **data_plane(options),
    )
    tell(found, console)
    if found.against is not None:
        tell_against(found.against, options.against, console)
    console.answer({**verdict_object(found), **against_object(found.against)})
    return Exit.DONE if found else Exit.ANSWER_IS_NO


def quick_of(options: Namespace) -> float | None:
    """The seconds of `--quick`; None without it. Raises: UcplError E171, E173."""
    if options.seconds is not None and not options.quick:
        fail("E171", "--seconds is the time of --quick", Label("<command line>", where="--seconds"),
             remedy=f"write --quick --seconds {options.seconds}")  # fmt: skip
    if not options.quick:
        return None
    for name in ("against", "reference"):
        if getattr(options, name) is not None:
            fail("E171", f"--quick compares no values, and --{name} does", Label("<command line>", where=f"--{name}"),
                 remedy="leave one of the two out")  # fmt: skip
    return SECONDS if options.seconds is None else whole_number("--seconds", options.seconds, SECONDS_MAX)


def tell(found: Verdict, console: Console) -> None:
    """The bytes that were read, their evidence, and the errors."""
    files = found.files
    total = files.bytes_protected + files.bytes_unprotected
    crc = ", each against its CRC" if files.bytes_protected else ": no CRC and no manifest vouches for them"
    console.say(f"read          {bytes_text(files.bytes_read)} in {plural(files.files, 'file')}{crc}")
    console.say(
        "manifest      "
        + ("matches, file by file" if files.manifest else "none: this checkpoint was not written by ucpl")
    )
    console.say(f"protected     {files.bytes_protected:,} of {total:,} bytes by a CRC, the manifest or integrity.json")
    if files.bytes_left:
        part = files.bytes_read / (files.bytes_read + files.bytes_left)
        console.say(f"not read      {bytes_text(files.bytes_left)} with a digest: the time was over at {part:.1%}")
    for name, size in files.unprotected.items():
        console.say(f"  bare        {size:,} bytes of {name}")
    for note in found.notes:
        console.say(f"              {note}")
    if found.findings:
        console.say(f"damaged       {plural(len(found.findings), 'finding')}")
    elif files.bytes_left:
        console.say("sound         as far as it was read")
    else:
        console.say("sound" if found.is_evidenced else f"sound         {UNPROVED}")
    if found.findings:
        console.diagnostics(found.findings)


def verdict_object(found: Verdict) -> dict[str, object]:
    files = found.files
    return {
        "sound": bool(found),
        "evidenced": found.is_evidenced,
        "findings": [diagnostic_object(d) for d in found.findings],
        "files": files.files,
        "bytes_read": files.bytes_read,
        "bytes_protected": files.bytes_protected,
        "bytes_unprotected": files.bytes_unprotected,
        "bytes_left": files.bytes_left,
        "bytes_live_max": files.bytes_live_max,
        "manifest": files.manifest,
        "elements_of_copies": found.copied,
        "weights_against_masters": found.rounded,
        "notes": list(found.notes),
    }


def tell_against(found: ReferenceComparison, genuine: str, console: Console) -> None:
    """The result of a comparison with a genuine checkpoint."""
    console.say(
        f"against       {genuine}: {plural(found.tensors, 'stored tensor')}, {plural(found.elements, 'element')}"
    )
    if found:
        console.say("              the same, bit by bit, under this layout")
        for text in found.doubts:
            console.say(f"              not witnessed: {text}")
        return
    others = len([one for one in found.findings if one.code == "E709"])
    if found.differing:
        console.say(
            f"differs       in {plural(found.differing, 'stored tensor')}; of those of one line, the first is named"
        )
    if others:
        console.say(f"differs       in {plural(others, 'value')} of the optimizer")
    console.diagnostics(found.findings)


def against_object(found: ReferenceComparison | None) -> dict[str, object]:
    if found is None:
        return {}
    return {
        "against": {
            "equal": bool(found),
            "findings": [diagnostic_object(d) for d in found.findings],
            "tensors": found.tensors,
            "elements": found.elements,
            "differing": found.differing,
            "doubts": list(found.doubts),
        }
    }
