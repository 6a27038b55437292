"""Turn a checkpoint into one of another layout: infer, plan, prove, write beside DST, read back, publish. SRC is only read."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import add_data_plane, add_json, add_sizes, config_of, data_plane, sizes_of
from ucpl.cli.report import plan_lines, plan_object, run_lines, run_object
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.schedule.plan import Plan

EXAMPLE = """
ucpl convert runs/on-4 runs/on-8 --to 'zero1(dp=8)'
ucpl convert runs/on-4 model.pt --to 'plain()'
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="a save folder (its latest step), one step's folder, or a plain file"
    )
    parser.add_argument("target", metavar="DST", help="a new folder, or a new file ending in .pt for plain()")
    parser.add_argument("--to", required=True, metavar="LAYOUT", help="zero1(dp=8), plain(), FILE.ucpl:NAME(tp=2)")
    parser.add_argument("--from", dest="layout", metavar="LAYOUT", help="the source's layout (default: inferred)")
    add_sizes(parser)
    parser.add_argument(
        "--drop", action="append", default=[], metavar="NAME", help="leave out a tensor or a state; may repeat"
    )
    parser.add_argument("--dry-run", action="store_true", help="plan and prove; write nothing")
    add_run(parser)
    add_json(parser)


def add_run(parser: ArgumentParser) -> None:
    """Arguments of verbs that write a target."""
    add_data_plane(parser)
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run into the same DST")
    parser.add_argument(
        "--force", action="store_true", help="replace DST; the old one stays until the new one is whole"
    )
    parser.add_argument("--verify-source", action="store_true", help="check CRCs of members that are read in part, too")
    parser.add_argument(
        "--allow-global", action="append", default=[], metavar="NAME", help="carry this class of a pickle; may repeat"
    )


def run(options: Namespace, console: Console) -> int:
    from ucpl import api
    from ucpl.stores.registry import advice

    target = Path(options.target)
    sizes, config, plane = sizes_of(options), config_of(options), data_plane(options)
    refuse_existing(target, options)
    of_source = sizes if options.layout else None
    opened = api.open_checkpoint(options.source, options.layout, config=config, sizes=of_source)
    here, model = api.source_side(opened, options.layout, config, of_source)
    there = api.target_side(options.to, here, model, config=config, sizes=sizes, drop=options.drop)
    _, plan = api.make_plan(here, there, checkpoint=opened, drop=tuple(options.drop), twice=True)
    console.say("\n".join(plan_lines(plan)))
    for text in advice(opened, plan.target):
        console.say(f"to load it    {text}")
    if options.dry_run:
        console.say(
            "proved        every element of the target has one source, and stands where it belongs; nothing was written"
        )
        console.answer({"plan": plan_object(plan), "written": False})
        return Exit.DONE
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


def refuse_existing(target: Path, options: Namespace) -> None:
    """Before any work. Raises: UcplError E500."""
    if os.path.lexists(target) and not (options.force or options.resume):
        fail("E500", f"{target} exists", Label(str(target)))


def look_again(target: Path, plan: Plan) -> None:
    """Open what was written and find every tensor of the plan where it should be. Raises: UcplError."""
    from attrs import evolve

    from ucpl.runtime.rows import fit
    from ucpl.stores.generic import NAME, open_files
    from ucpl.stores.registry import open_checkpoint

    written = [t for t in plan.targets if t.numel]
    if target.is_file():  # one file, called as DST is
        written = [evolve(t, file=target.name) for t in written]
    described = plan.target.framework == NAME  # files that nothing but a layout describes
    opened = open_files(target, (t.file for t in written)) if described else open_checkpoint(target)
    fit(written, opened.extents, "target")
