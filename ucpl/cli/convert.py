"""Convert a checkpoint to another layout.

Infer, plan, prove, write next to DST, read back, publish. SRC is only read.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.job import refuse_several
from ucpl.cli.options import (
    add_changes,
    add_data_plane,
    add_json,
    add_model,
    add_quiet,
    add_sizes,
    given_of,
    run_options,
)
from ucpl.cli.report import container_lines, container_object, plan_lines, plan_object, run_lines, run_object
from ucpl.errors import Exit, called, plural
from ucpl.storage.resolve_url import resolve_target

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.engine import Event, Ready
    from ucpl.conversion.keywords import ToApply
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.plan import Plan
    from ucpl.runtime.counters import Report
    from ucpl.runtime.execute import TargetSizes

_ASSUMED = 200 << 20  # bytes a second, where nothing is measured
_START = 0.1  # seconds, at least

EXAMPLE = """
ucpl convert runs/on-4 runs/on-8 --to 'zero1(dp=8)'
ucpl convert runs/on-4 model.pt --to 'plain()'
ucpl convert examples/checkpoint on-3 --to zero3 -D dp=3   # in a checkout
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a save folder (its latest step), one step's folder, or a file; MODEL+OPTIMIZER names two as one",
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
    add_quiet(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print defaults of the layout, moves, and the seconds of each phase",
    )
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
    from ucpl.conversion.engine import Engine, asked_of

    refuse_several("convert")
    engine = Engine(resolve_target(options.target), how_of(options), printer(console), console.progress)
    given, asked = given_of(options), asked_of(options.source, options.to, options.layout)
    if options.dry_run:
        engine.rehearse(asked, given)
    else:
        engine.convert(asked, given)
    return Exit.DONE


def how_of(options: Namespace) -> ToApply:
    """Options of a run, of a verb with `add_run`. Raises: UcplError E173."""
    return {**run_options(options), "allow_drift": options.allow_drift}


def checking(target: Path) -> str:
    """The command that verifies a target."""
    return f"ucpl verify {quote(called(str(target)))}"


def printer(console: Console, after: Callable[[Path], str] = checking) -> Callable[[Event], None]:
    """Print each event of the engine.

    after: the next step of a user, for a written target.
    """

    def said(event: Event) -> None:
        from ucpl.conversion.engine import Finished, Ready, Rehearsed

        match event:
            case Ready():
                console.say(*_ready_lines(event, verbose=console.verbose))
            case Rehearsed(ready, sizes):
                console.say(*_rehearsed_lines(ready, sizes))
                console.answer(
                    {
                        **_answer(ready),
                        "written": False,
                        "bytes": sizes.size,
                        "files": sizes.files,
                        "free": sizes.free,
                    }
                )
            case Finished(ready, report, target):
                if console.verbose:
                    console.say(*_moved_lines(ready.plan, report))
                console.say(
                    *run_lines(report), *_finished_lines(ready.plan, ready.source, report, target, after(target))
                )
                console.answer({**_answer(ready), "written": True, "report": run_object(report)})

    return said


def _answer(ready: Ready) -> dict[str, object]:
    return {
        "plan": plan_object(ready.plan),
        **container_object(ready.source, ready.plan),
        "remarks": list(ready.remarks),
    }


def _ready_lines(ready: Ready, *, verbose: bool) -> list[str]:
    """The plan, remarks, advice to load the target, and the companion files."""
    from ucpl.registry import format_named

    plan, source = ready.plan, ready.source
    out = plan_lines(plan, verbose=verbose)
    if ready.prepared is not None and ready.companions is not None:
        out += [f"not stored    {text}" for text in source.missing_tensors]
        out += [f"remark        {text}" for text in ready.prepared.odd]
        out += [f"to load it    {text}" for text in format_named(plan.target.framework).advice(source, plan.target)]
        return out + container_lines(source, plan) + [f"companions    {one}" for one in ready.companions.held]
    out += container_lines(source, plan)
    files = source.container.files if source.container is not None else ()
    if any(f.rule is not None and f.rule.fate == "weights" for f in files):
        out.append("companions    weights are not compared with the shards here: run `ucpl verify` on the target")
    return out


def _rehearsed_lines(ready: Ready, sizes: TargetSizes) -> list[str]:
    text = f"{bytes_text(sizes.size)} in {plural(sizes.files, 'file')}"
    return [
        f"would write   {text}" + (f"; {bytes_text(sizes.free)} are free there" if sizes.free else ""),
        *_estimate(ready.plan),
        "proved        every element of the target has one source, at its own place; nothing was written",
    ]


def _estimate(plan: Plan) -> list[str]:
    """Estimated seconds of a run, with this machine's figures if they exist.

    `ucpl calibrate` measures them.
    """
    from ucpl.cli.report import bandwidths_of, cost_lines
    from ucpl.planning.cost import cost_of

    cost, known = cost_of(plan), bandwidths_of(None)
    if known is None:
        seconds = max(_START, (cost.bytes_read + 2 * cost.bytes_written) / _ASSUMED)  # written bytes are read back
        return [
            f"estimate      {seconds:.2g} s at {_ASSUMED >> 20} MiB/s, which is assumed:"
            " `ucpl calibrate FOLDER` measures this machine once"
        ]
    return [line.replace("estimate   ", "estimate      ", 1) for line in cost_lines(cost, known)[-1:]]


def _moved_lines(plan: Plan, report: Report) -> list[str]:
    """Moves of a plan, and seconds of each phase."""
    from ucpl.planning.text import moves_of, reads_of, writes_of

    lines = [reads_of(plan), writes_of(plan), *moves_of(plan)]
    out = [f"{line[:11].ljust(14)}{line[11:]}" for line in lines]
    return [*out, "seconds       " + ", ".join(f"{name} {seconds:.3g}" for name, seconds in report.seconds.items())]


def _finished_lines(plan: Plan, source: Checkpoint, report: Report, target: Path, after: str) -> list[str]:
    from ucpl.registry import format_named

    job = format_named(plan.target.framework).job(source, plan.target.settings)
    out = [f"done          {target}{_duration(report)}", f"next          {after}"]
    return out + ([f"then          start {job}"] if job else [])


def _duration(report: Report) -> str:
    """The seconds and the write rate of a run."""
    seconds = sum(report.seconds.values())
    if report.done_before or not seconds:
        return ""
    rate = report.bytes_written / seconds
    return f" in {seconds:.3g} s" + (f", {rate / (1 << 20):.3g} MiB/s" if report.bytes_written else "")
