"""Try the layouts of a spec there and back through changed degrees: every element numbered, moved, and compared."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json, add_sizes, config_of, sizes_of
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl roundtrip model.ucpl\nucpl roundtrip model.ucpl:megatron --examples 50"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE[:LAYOUT]", help="a .ucpl file, or one layout of it")
    parser.add_argument(
        "--examples", default="20", metavar="N", help="pairs of degrees to try for each layout (default 20)"
    )
    parser.add_argument("--model", metavar="FILE:NAME", help="the model of layouts that are of any")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed tries other degrees")
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api
    from ucpl.testing import roundtrip

    if not options.examples.isdigit() or int(options.examples) == 0:
        fail(
            "E173",
            f"--examples {options.examples}: a number from 1 is needed",
            Label("<command line>", where=f"--examples {options.examples}"),
            remedy="write --examples 20",
        )
    head, colon, layout = options.file.partition(".ucpl:")
    name = head + ".ucpl" if colon else options.file
    sizes = {k: v for k, v in sizes_of(options).items() if isinstance(v, int)}
    try:
        reports = roundtrip(
            api.read_text(Path(name)),
            layout or None,
            int(options.examples),
            name=name,
            model=api.model_named(options.model) if options.model else None,
            config=config_of(options),
            sizes=sizes,
            seed=options.seed,
        )
    except AssertionError as error:
        console.say(f"differs       {error}")
        console.answer({"good": False, "difference": str(error)})
        return Exit.ANSWER_IS_NO
    for report in reports:
        console.say(str(report))
    good = all(report.tried for report in reports)
    if not good:
        console.say("no pair of degrees suits the sizes: give others with -D")
    console.answer(
        {
            "good": good,
            "layouts": [
                {
                    "layout": r.layout,
                    "tried": list(r.tried),
                    "refused": list(r.refused),
                    "sizes": r.sizes,
                    "elements": r.elements,
                }
                for r in reports
            ],
        }
    )
    return Exit.DONE if good else Exit.ANSWER_IS_NO
