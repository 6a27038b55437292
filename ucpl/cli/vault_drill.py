"""`ucpl vault drill`: the faults of a vault, tried on a layout of one's own."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import given_of, whole_number
from ucpl.cli.tables import lines_of
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.texts import Json

__all__ = ["run_drill"]

LOSE_MAX = 3
HEAD = ("fault", "cases", "newest", "the one before", "refused, as foretold", "wrong")
MEMORY = Path("/dev/shm")


def run_drill(options: Namespace, domains: int | list[list[int]] | None, console: Console) -> int:
    """Raises: UcplError E690, E693, and what planning raises."""
    from ucpl.vault.drilling import drill
    from ucpl.vault.leftovers import DRILLS, sweep, worked_in

    lose = whole_number("--lose", options.lose, LOSE_MAX) if options.lose else 2
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    sweep(where or Path(tempfile.gettempdir()), DRILLS)  # of drills that were killed
    prefix = DRILLS.rstrip("*")
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as top,
        worked_in(Path(top)),
    ):
        root = Path(top) / "drill"
        plan, cases = drill(options.path, root, domains, options.protect, lose=lose, given=given_of(options))
        console.say(f"drilled    {options.path}: {len(plan.domains)} domains, {plan.scheme.protection}, in {top}")
        console.flush()
        found = list(cases)
    rows = [
        (one.fault, str(one.cases), *(str(n or "") for n in (one.kept, one.before, one.refused, len(one.wrong))))
        for one in found
    ]
    console.say(*lines_of(HEAD, rows))
    wrong = sum(len(one.wrong) for one in found)
    for one in found:
        for case in one.wrong[:3]:
            console.say(f"wrong      {one.fault}: {case}")
    console.say(
        f"drilled    {sum(one.cases for one in found)} cases, {wrong or 'none'} with anything but what was foretold"
    )
    faults: list[Json] = [
        {
            "fault": one.fault, "cases": one.cases, "newest": one.kept, "before": one.before, "refused": one.refused,
            "wrong": list(one.wrong),
        }
        for one in found
    ]  # fmt: skip
    console.answer({"layout": options.path, "protect": str(plan.scheme.protection), "faults": faults})
    return Exit.ANSWER_IS_NO if wrong else Exit.DONE
