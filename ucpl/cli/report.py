"""Print a plan, its cost and a run, or their `--json` objects."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.errors import plural

if TYPE_CHECKING:
    from ucpl.conversion.bandwidths import Bandwidths
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.cost import Cost
    from ucpl.planning.plan import Plan
    from ucpl.runtime.counters import Report

__all__ = [
    "container_lines", "container_object", "plan_lines", "plan_object", "run_lines", "run_object", "add_bandwidths",
    "bandwidths_of", "cost_lines", "cost_object",
]  # fmt: skip


def add_bandwidths(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--bandwidths",
        metavar="FILE.json",
        help="figures of `ucpl calibrate` for the estimate (default: those of this user)",
    )


def bandwidths_of(given: str | None) -> Bandwidths | None:
    """The measured figures, if they exist.

    An unreadable home, as in a container, has none.

    Raises: UcplError E170, E176.
    """
    from ucpl.conversion.bandwidths import bandwidths_at, place

    path = Path(given) if given else place()
    return bandwidths_at(path) if given or os.access(path, os.R_OK) else None


def cost_lines(cost: Cost, known: Bandwidths | None) -> list[str]:
    dear = cost.dear
    lines = [
        f"cost       reads {bytes_text(cost.bytes_read)} in {plural(cost.runs, 'run')}{_files(cost.files_read, 'of')},"
        f" writes {bytes_text(cost.bytes_written)}{_files(cost.files_written, 'in')}"
    ]
    if len(cost.read) > 1:
        share = cost.bytes_sent / cost.bytes_read if cost.bytes_read else 0.0
        lines.append(
            f"cost       {share:.1%} of the bytes read belong to another rank; rank {dear} has the most work: it reads"
            f" {bytes_text(int(cost.read[dear]))}, {bytes_text(int(cost.sent[dear]))} of that from others, and writes"
            f" {bytes_text(int(cost.written[dear]))}"
        )
    if known is None:
        return lines
    from ucpl.conversion.bandwidths import estimate

    told = estimate(cost, known)
    lines.append(
        f"estimate   {told.warm:.3g} s in one process, {told.cold:.3g} s where the source is not in memory;"
        f" {bytes_text(told.memory)} of memory (measured at {known.folder}, {known.when})"
    )
    return lines


def _files(count: int | None, word: str) -> str:
    return "" if count is None else f" {word} {plural(count, 'file')}"


def cost_object(cost: Cost, known: Bandwidths | None) -> dict[str, object]:
    from attrs import asdict

    from ucpl.conversion.bandwidths import estimate

    whole = {"read": cost.bytes_read, "sent": cost.bytes_sent, "written": cost.bytes_written, "runs": cost.runs}
    ranks = {"read": cost.read, "sent": cost.sent, "given": cost.given, "written": cost.written, "runs": cost.seeks}
    return {
        **whole,
        "files_read": cost.files_read,
        "files_written": cost.files_written,
        "ranks": {name: column.tolist() for name, column in ranks.items()},
        "estimate": None if known is None else asdict(estimate(cost, known)),
    }


_SHOWN = 12


def plan_lines(plan: Plan, *, verbose: bool = False) -> list[str]:
    """verbose: with each value that is a layout's default."""
    from ucpl.extents.train_state import is_of_default
    from ucpl.planning.text import dropped_of, left_lines, rebuilt_of, replayed_of  # most verbs print no plan

    out = [f"from          {plan.source_call}", f"to            {plan.target_call}"]
    shown = [o for o in plan.origins if verbose or not is_of_default(o.origin)]
    out += [f"  {o.name} = {o.value}: {o.origin}" for o in shown]
    out += [f"changed       {text}" for text in plan.changed]
    out += [f"derived       {text}" for text in plan.derived]
    out += [f"filled        {text}" for text in plan.filled]
    out += [f"rebuilds      {text}" for text in rebuilt_of(plan)]
    out += [f"replays       {text}" for text in replayed_of(plan)]
    out += [f"carried       {blob.said}" for blob in plan.target.blobs]
    out += [f"left out      {text}" for text in dropped_of(plan)]
    return out + left_lines(plan, 14)


def container_lines(source: Checkpoint | None, plan: Plan, width: int = 14) -> list[str]:
    """The folder around the shards, and each file's policy."""
    if source is None or source.container is None:
        return []
    from ucpl.formats.folders.fates import sorted_into

    kept = source.container.without({name for name, fate in plan.carry.items() if fate == "drop"})
    said = sorted_into(kept, plan.target, source).said
    return ["container".ljust(width) + kept.kind.title, *("companions".ljust(width) + text for text in said)]


def container_object(source: Checkpoint | None, plan: Plan) -> dict[str, object]:
    """The same for scripts.

    Each file of the target with its source file, and the dropped files.
    """
    if source is None or source.container is None:
        return {}
    from ucpl.formats.folders.fates import sorted_into

    kept = source.container.without({name for name, fate in plan.carry.items() if fate == "drop"})
    made = sorted_into(kept, plan.target, source)
    return {"container": {"kind": kept.kind.name, "files": {p.name: p.of.name for p in made.placed}, "left": made.left}}


def plan_object(plan: Plan) -> dict[str, object]:
    from ucpl.planning.text import rebuilt_of, replayed_of

    return {
        "name": plan.name,
        "source": plan.source_call,
        "target": plan.target_call,
        "origins": [{"name": o.name, "value": o.value, "origin": o.origin} for o in plan.origins],
        "changed": list(plan.changed),
        "derived": list(plan.derived),
        "dropped": list(plan.dropped),
        "account": plan.account.facts() if plan.account is not None else None,
        "filled": list(plan.filled),
        "rebuilds": rebuilt_of(plan),
        "replays": replayed_of(plan),
        "carried": {blob.name: blob.said for blob in plan.target.blobs},
        "spec": plan.spec_digest,
        "structure": plan.structure_digest,
        "reads": len(plan.source_shelves),
        "writes": len(plan.target_shelves),
        "moves": [{"state": t.state, "kind": t.kind, "runs": t.runs, "elements": t.elements} for t in plan.tallies],
    }


def run_lines(report: Report) -> list[str]:
    if report.done_before:
        return [f"done          {report.target} was finished by an earlier run: nothing was moved"]
    where = "store" if "://" in report.target else "disk"
    out = [
        f"read          {bytes_text(report.bytes_read)}, {report.bytes_needed:,} needed",
        *([f"received      {report.bytes_received:,} bytes of disks of other ranks"] if report.bytes_received else []),
        *([f"rebuilt       {report.bytes_rebuilt:,} bytes, from other domains"] if report.bytes_rebuilt else []),
        f"written       {bytes_text(report.bytes_written)}, the target is {report.bytes_target:,} in"
        f" {plural(report.files, 'file')}",
        *([f"shared        {report.bytes_cloned:,} bytes of the source's blocks"] if report.bytes_cloned else []),
        f"buffers       {bytes_text(report.bytes_live_max)} at most",
        f"verified      {report.bytes_read_back:,} bytes read back from the {where} equal the written bytes"
        if report.bytes_read_back or not report.bytes_written
        else f"not verified  the target was not read back: ucpl verify {report.target}",
    ]
    if report.source_bytes_checked or not report.source_bytes_without_crc:
        out.append(f"              {report.source_bytes_checked:,} bytes of the source match their CRC")
    if report.source_bytes_without_crc:
        out.append(f"              {report.source_bytes_without_crc:,} bytes of the source: no CRC in this format")
    if report.source_bytes_unverified:
        out.append(
            f"unverified    {report.source_bytes_unverified:,} bytes are in partly read storages:"
            " --verify-source reads them in full"
        )
        out += [f"              {member}" for member in report.unverified[:_SHOWN]]
        if len(report.unverified) > _SHOWN:
            out.append(f"              and {len(report.unverified) - _SHOWN} more")
    out += [f"remark        {text}" for text in report.remarks]
    if report.tiles_resumed:
        out.append(f"resumed       {report.tiles_resumed} of {report.tiles} tiles were done before")
    return out


def run_object(report: Report) -> dict[str, object]:
    import attrs

    account = report.account.facts() if report.account is not None else None
    return {**attrs.asdict(attrs.evolve(report, account=None)), "account": account}
