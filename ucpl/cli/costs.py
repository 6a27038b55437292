"""Print the cost of a plan before it runs."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.errors import plural

if TYPE_CHECKING:
    from ucpl.conversion.bandwidths import Bandwidths
    from ucpl.planning.cost import Cost

__all__ = ["add_bandwidths", "bandwidths_of", "cost_lines", "cost_object"]


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
