"""Run a plan as it is.

Nothing is planned anew: a source that the plan was not made for is an error (5).

Under torchrun the ranks of a job run it together.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.cli.convert import add_run, how_of, printer
from ucpl.cli.options import add_json, whole_number
from ucpl.errors import Exit
from ucpl.storage.resolve_url import resolve_target

if TYPE_CHECKING:
    from ucpl.cli.console import Console

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
    from ucpl.conversion.engine import Engine

    wait = whole_number("--wait", options.wait, WAIT_MAX, "write --wait 600, in seconds")
    with member(console, wait) as team, seen_by_all(team, options.source, options.keys) as source:
        engine = Engine(resolve_target(options.target), how_of(options), printer(console), console.progress, team)
        engine.apply(options.plan, source)
    return Exit.DONE
