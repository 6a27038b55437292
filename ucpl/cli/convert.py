"""Convert a checkpoint to another layout.

Infer, plan, prove, write next to DST, read back, publish. SRC is only read.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.job import refuse_several
from ucpl.cli.options import add_changes, add_data_plane, add_json, add_model, add_sizes, given_of, run_options
from ucpl.cli.report import container_lines, container_object, plan_lines, plan_object, run_lines, run_object
from ucpl.errors import Exit, called, plural
from ucpl.remotes.entrance import target_at

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.given import Given
    from ucpl.conversion.keywords import How
    from ucpl.runtime.counters import Report
    from ucpl.runtime.team import Team
    from ucpl.schedule.plan import Plan
    from ucpl.stores.checkpoint import Checkpoint

_ASSUMED = 200 << 20  # bytes a second, where nothing is measured
_START = 0.1  # seconds, at least

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
    parser.add_argument(
        "--from",
        dest="layout",
        metavar="LAYOUT",
        help="the source's layout (default: inferred); `of FILE.ucpl:DIALECT()` gives the names of its tensors",
    )
    add_sizes(parser)
    add_model(parser, "of a target whose parameters are others than the source's")
    add_changes(parser)
    parser.add_argument("--dry-run", action="store_true", help="plan and prove; write nothing")
    add_run(parser)
    add_json(parser)


def add_run(parser: ArgumentParser) -> None:
    """Arguments of verbs that write a target."""
    add_data_plane(parser)
    parser.add_argument("--resume", action="store_true", help="resume an interrupted run into the same DST")
    parser.add_argument(
        "--force", action="store_true", help="replace DST; the old one stays until the new one is complete"
    )
    parser.add_argument("--verify-source", action="store_true", help="check CRCs of members that are read in part, too")
    parser.add_argument(
        "--read-back",
        choices=("all", "none"),
        default="all",
        help="none: publish synced files without reading them back from the disk (default all)",
    )
    parser.add_argument(
        "--reflink",
        choices=("auto", "never"),
        default="auto",
        help="never: write data that a file system could share with the source (default auto)",
    )
    parser.add_argument(
        "--allow-global", action="append", default=[], metavar="NAME", help="carry this class of a pickle; may repeat"
    )
    parser.add_argument(
        "--allow-drift", action="store_true", help="convert weights that are not their masters, which they lose to"
    )


def run(options: Namespace, console: Console) -> int:
    from ucpl.conversion.running import refuse_existing, with_parents

    refuse_several("convert")
    target, given, how = target_at(options.target), given_of(options), run_options(options)
    refuse_existing(target, how)
    with nullcontext() if options.dry_run else with_parents(target):
        return _run(options, console, target, given, how)


def _run(options: Namespace, console: Console, target: Path, given: Given, how: How) -> int:
    from ucpl.conversion.accounting import with_account
    from ucpl.conversion.beside import checked
    from ucpl.conversion.dialects import described_as
    from ucpl.conversion.drift import demand_no_drift
    from ucpl.conversion.keywords import bounds_of
    from ucpl.conversion.planning import Asked, prepare
    from ucpl.conversion.running import rehearsed
    from ucpl.conversion.staging import with_made
    from ucpl.registry import format_named

    described, names = described_as(options.layout)
    made = prepare(Asked(described, options.to, options.source, called=names, twice=True), given)
    assert made.checkpoint is not None
    known = checked(made, bounds_of(how), look=not options.dry_run)
    plan = with_account(made.plan, known.source)
    console.say(*plan_lines(plan))
    for text in made.checkpoint.unstored:
        console.say(f"not stored    {text}")
    for text in made.odd:
        console.say(f"remark        {text}")
    for text in format_named(plan.target.framework).advice(made.checkpoint, plan.target):
        console.say(f"to load it    {text}")
    for text in (*container_lines(known.source, plan), *(f"companions    {one}" for one in known.held)):
        console.say(text)
    if not options.allow_drift:
        demand_no_drift(plan, known.source, bounds_of(how), made.source.placement)
    if options.dry_run:
        found = rehearsed(plan, known.source, target, how)
        sizes = f"{bytes_text(found.size)} in {plural(found.files, 'file')}"
        console.say(
            f"would write   {sizes}" + (f"; {bytes_text(found.free)} are free there" if found.free else ""),
            *_estimate(plan),
            "proved        every element of the target has one source, at its own place; nothing was written",
        )
        console.answer(
            {
                "plan": plan_object(plan),
                **container_object(known.source, plan),
                "remarks": list(made.remarks),
                "written": False,
                "bytes": found.size,
                "files": found.files,
                "free": found.free,
            }
        )
        return Exit.DONE
    with with_made(known, target, how) as source:
        return write(plan, source, target, how, console, remarks=made.remarks)


def _estimate(plan: Plan) -> list[str]:
    """Estimated seconds of a run, with this machine's figures if they exist.

    `ucpl calibrate` measures them.
    """
    from ucpl.cli.costs import bandwidths_of, cost_lines
    from ucpl.schedule.cost import cost_of

    cost, known = cost_of(plan), bandwidths_of(None)
    if known is None:
        seconds = max(_START, (cost.bytes_read + 2 * cost.bytes_written) / _ASSUMED)  # written bytes are read back
        return [
            f"estimate      {seconds:.2g} s at {_ASSUMED >> 20} MiB/s, which is assumed:"
            " `ucpl calibrate FOLDER` measures this machine once"
        ]
    return [line.replace("estimate   ", "estimate      ", 1) for line in cost_lines(cost, known)[-1:]]


def write(
    plan: Plan,
    source: Checkpoint,
    target: Path,
    how: How,
    console: Console,
    team: Team | None = None,
    remarks: tuple[str, ...] = (),
) -> int:
    """Run the plan, and print a report."""
    from ucpl.conversion.running import run as carry_out

    with console.progress(str(target)) as progress:
        report = carry_out(plan, source, target, {**how, "progress": progress}, team)
    console.say(*run_lines(report))
    console.say(f"done          {target}{_duration(report)}", f"next          ucpl verify {quote(called(str(target)))}")
    beside = container_object(source, plan)
    console.answer(
        {"plan": plan_object(plan), **beside, "remarks": list(remarks), "written": True, "report": run_object(report)}
    )
    return Exit.DONE


def _duration(report: Report) -> str:
    """The seconds and the write rate of a run."""
    seconds = sum(report.seconds.values())
    if report.done_before or not seconds:
        return ""
    rate = report.bytes_written / seconds
    return f" in {seconds:.3g} s" + (f", {rate / (1 << 20):.3g} MiB/s" if report.bytes_written else "")
