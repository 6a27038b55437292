"""Run exactly that plan. Nothing is planned anew: a source that the plan was not made for is refused (5)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.convert import add_run, look_again, refuse_existing
from ucpl.cli.options import add_json, data_plane
from ucpl.cli.report import plan_lines, plan_object, run_lines, run_object
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = """
ucpl plan --from runs/on-4 --to 'zero1(dp=8)' -o grow.plan
ucpl apply grow.plan runs/on-4 runs/on-8
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plan", metavar="FILE.plan")
    parser.add_argument(
        "source", metavar="SRC", help="the checkpoint that the plan was made for, or one of the same structure"
    )
    parser.add_argument("target", metavar="DST", help="a new folder (or a new file ending in .pt)")
    add_run(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api

    target, plane = Path(options.target), data_plane(options)
    refuse_existing(target, options)
    plan = api.load_plan(options.plan)
    opened = api.open_checkpoint(options.source, plan=plan)
    console.say("\n".join(plan_lines(plan)))
    with console.progress(str(target)) as progress:
        report = api.apply(
            plan,
            opened,
            target,
            resume=options.resume,
            force=options.force,
            verify_source=options.verify_source,
            allow_globals=options.allow_global,
            progress=progress,
            **plane,
        )
    look_again(target, plan)
    console.say("\n".join(run_lines(report)))
    console.say(f"done          {target}")
    console.answer({"plan": plan_object(plan), "written": True, "report": run_object(report)})
    return Exit.DONE
