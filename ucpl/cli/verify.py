"""Read an entire checkpoint and verify it.

Digests, zip CRCs, copies that must equal each other, weights against their masters. --against compares it with a
genuine checkpoint of the framework, stored tensor by stored tensor, under its one layout: the way to try a spec of
one's own. Each difference is named to the element, with a guess at the error in the spec.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text, diagnostic_object
from ucpl.cli.options import add_data_plane, add_json, add_quiet, add_sizes, data_plane, given_of
from ucpl.errors import Exit, plural

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.verification.checkpoint import Verdict
    from ucpl.verification.reference import ReferenceComparison

UNPROVED = "as far as headers show: nothing that was read could have shown a fault"
EXAMPLE = "ucpl verify runs/on-8\nucpl verify mine --from 'model.ucpl:megatron(tp = 2)' --against theirs"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("--from", dest="layout", metavar="LAYOUT", help="its layout (default: inferred)")
    parser.add_argument(
        "--against", metavar="GENUINE", help="a checkpoint of the framework, to hold it against bit by bit"
    )
    parser.add_argument("--reference", metavar="FOLDER", help="a Hugging Face folder of the same weights, as a witness")
    parser.add_argument("--no-witness", action="store_true", help="do not run the class that a config.json names")
    add_sizes(parser)
    add_data_plane(parser)
    add_quiet(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api

    given = given_of(options)
    found = api.verify(
        options.checkpoint,
        against=options.against,
        layout=options.layout,
        config=given.config,
        sizes=given.sizes,
        witness=not options.no_witness,
        reference=options.reference,
        **data_plane(options),
    )
    tell(found, console)
    if found.against is not None:
        tell_against(found.against, options.against, console)
    console.answer({**verdict_object(found), **against_object(found.against)})
    return Exit.DONE if found else Exit.ANSWER_IS_NO


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
    for name, size in files.unprotected.items():
        console.say(f"  bare        {size:,} bytes of {name}")
    for note in found.notes:
        console.say(f"              {note}")
    if found.findings:
        console.say(f"damaged       {plural(len(found.findings), 'finding')}")
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
