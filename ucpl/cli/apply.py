"""Run a plan as it is.

Nothing is planned anew: a source that the plan was not made for is an error (5).

Under torchrun the ranks of a job run it together.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.convert import add_run, write
from ucpl.cli.options import add_json, run_options, whole_number
from ucpl.cli.report import container_lines, plan_lines
from ucpl.remotes.entrance import target_at

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.runtime.team import Team

EXAMPLE = """
ucpl plan --from runs/on-4 --to 'zero1(dp=8)' -o grow.plan
ucpl apply grow.plan runs/on-4 runs/on-8
torchrun --nproc-per-node 4 -m ucpl apply grow.plan runs/on-4 runs/on-8
"""


WAIT, WAIT_MAX = 300, 7 * 24 * 3600  # seconds


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plan", metavar="FILE.plan")
    parser.add_argument(
        "source", metavar="SRC", help="the checkpoint that the plan was made for, or one of the same structure"
    )
    parser.add_argument("target", metavar="DST", help="a new folder (or a new file ending in .pt)")
    add_run(parser)
    parser.add_argument(
        "--wait",
        default=str(WAIT),
        metavar="SECONDS",
        help="of ranks of a job: how long those that are there wait for one that has not started (default 300)",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        help="of ranks on several hosts, each with files of its own: the keys of this host (ucpl vault keys)",
    )
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.cli.job import member, seen_by_all
    from ucpl.conversion.running import with_parents

    wait = whole_number("--wait", options.wait, WAIT_MAX, "write --wait 600, in seconds")
    with (
        member(console, wait) as team,
        seen_by_all(team, options.source, options.keys) as source,
        with_parents(target_at(options.target)),
    ):
        return _run(options, console, team, source)


def _run(options: Namespace, console: Console, team: Team | None, source: Path) -> int:
    from ucpl.conversion.accounting import demand_account
    from ucpl.conversion.drift import demand_no_drift
    from ucpl.conversion.keywords import bounds_of
    from ucpl.conversion.opening import load_plan, open_for
    from ucpl.conversion.running import refuse_existing
    from ucpl.conversion.staging import clear_made

    target, how = target_at(options.target), run_options(options)
    leads = team is None or team.rank == 0
    if leads:
        refuse_existing(target, how)
    plan = load_plan(options.plan)
    opened = open_for(plan, source)
    plan = demand_account(plan, opened)
    console.say(*plan_lines(plan), *container_lines(opened, plan))
    if any(
        f.rule is not None and f.rule.fate == "weights" for f in (opened.container.files if opened.container else ())
    ):
        console.say("companions    weights are not compared with the shards here: run `ucpl verify` on the target")
    if leads:  # the other ranks wait for its next message
        if not options.allow_drift:
            demand_no_drift(plan, opened, bounds_of(how))
        clear_made(target)
    return write(plan, opened, target, how, console, team)
