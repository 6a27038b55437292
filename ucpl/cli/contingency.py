"""Plan ahead of a loss: rank the layouts for the remaining ranks.

Each is compiled into a plan that is ready to run.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import table_lines
from ucpl.cli.options import add_json, add_model, add_sizes, given_of, memory_of, write_text
from ucpl.cli.report import add_bandwidths, bandwidths_of
from ucpl.errors import Exit, Label, fail
from ucpl.pictures.look import binary_text

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.bandwidths import Bandwidths
    from ucpl.conversion.contingency import Choice, Loss

EXAMPLE = """
ucpl contingency --from 'llama.ucpl:megatron(tp=8, pp=16, dp=128)' --lose 1..4 --unit node=8 --keep tp -o plans
ucpl contingency --from runs/on-16 --lose 1 --unit rank=1 --room 20G -o plans
ucpl contingency --from 'zero.ucpl:zero(tp=2, dp=4)' --lose 1..3
"""
_LOSE = re.compile(r"([1-9][0-9]{0,5})(?:\.\.([1-9][0-9]{0,5}))?")
_UNIT = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,30})=([1-9][0-9]{0,5})")
LOSSES_MAX = 64
REFUSED_SHOWN = 3
HEAD = ("lost", "left", "run", "ranks used", "a rank holds", "sent between ranks", "plan")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="source", required=True, metavar="LAYOUT", help="the running layout, or a checkpoint of it"
    )
    parser.add_argument("--lose", default="1", metavar="N", help="how many units are lost: 1, or 1..4 (default 1)")
    parser.add_argument(
        "--unit", default="rank=1", metavar="NAME=RANKS", help="the ranks that are lost at once, as in node=8"
    )
    parser.add_argument("--keep", default="", metavar="AXES", help="axes whose degree stays, as in tp,ep")
    parser.add_argument("--room", metavar="SIZE", help="memory of a rank for weights and states, as in 60G")
    parser.add_argument("--best", default="3", metavar="N", help="choices of each loss that are planned (default 3)")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="write the plans, and contingency.json, here")
    add_bandwidths(parser)
    add_model(parser, "where the layout is of any")
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.cli.options import whole_number
    from ucpl.conversion.contingency import LossRequest, contingencies

    unit, size = unit_of(options.unit)
    lose = losses_of(options.lose)
    keep = frozenset(name.strip() for name in options.keep.split(",") if name.strip())
    room = memory_of(options.room, "--room") if options.room else None
    wish = LossRequest(lose, size, keep, room, whole_number("--best", options.best, LOSSES_MAX, "write --best 3"))
    known = bandwidths_of(options.bandwidths)
    folder = Path(options.output) if options.output else None
    (ranks, held), losses = contingencies(options.source, wish, given_of(options))
    console.say(
        f"from       {options.source}: {ranks:,} ranks with at most {binary_text(held)} each",
        f"unit       {unit} of {size:,} ranks",
    )
    found, rows = [], []
    for loss in losses:
        mine = [(choice, written(choice, loss, folder)) for choice in loss.choices]
        rows += [cells(loss, unit, choice, name) for choice, name in mine]
        rows += [] if mine else [(f"{loss.lost} {unit}", f"{loss.left:,}", "nothing fits", "", "", "", "")]
        found.append(loss_json(loss, mine, known))
        for call, why in loss.refused[:REFUSED_SHOWN]:
            console.say(f"not        {loss.lost} {unit}: {call}: {why}")
    console.say(*table_lines(HEAD, rows))
    answer = {
        "from": options.source,
        "ranks": ranks,
        "held": held,
        "unit": {"name": unit, "ranks": size},
        "losses": found,
    }
    if folder is not None:
        make(folder)
        write_text(folder / "contingency.json", json.dumps(answer, indent=1) + "\n")
        console.say(f"written    {folder}")
    console.answer({**answer, "output": options.output})
    return Exit.DONE if all(loss["choices"] for loss in found) else Exit.ANSWER_IS_NO


def unit_of(text: str) -> tuple[str, int]:
    """Raises: UcplError E171."""
    found = _UNIT.fullmatch(text)
    if found is None:
        here = Label("<command line>", where=f"--unit {text[:60]}")
        fail("E171", f"--unit {text[:60]}: not of the form NAME=RANKS", here, remedy="write --unit node=8")
    return found[1], int(found[2])


def losses_of(text: str) -> tuple[int, ...]:
    """Raises: UcplError E171."""
    found = _LOSE.fullmatch(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found is not None else (1, 0)
    if not first <= last < first + LOSSES_MAX:
        here = Label("<command line>", where=f"--lose {text[:60]}")
        remedy = f"write --lose 1, or --lose 1..4: {LOSSES_MAX} losses at most"
        fail("E171", f"--lose {text[:60]}: no number of units", here, remedy=remedy)
    return tuple(range(first, last + 1))


def written(choice: Choice, loss: Loss, folder: Path | None) -> str:
    """The name of a choice's plan in the named folder.

    Raises: UcplError E179.
    """
    degrees = "-".join(f"{name}{n}" for name, n in choice.degrees.items())
    name = f"lose-{loss.lost}-{degrees}.plan"
    if folder is not None:
        from ucpl.planning.files import plan_bytes

        make(folder)
        write_text(folder / name, plan_bytes(choice.plan))
    return name


def make(folder: Path) -> None:
    """Raises: UcplError E179."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail("E179", f"{folder} cannot be made: {error.strerror}", Label(str(folder)))


def cells(loss: Loss, unit: str, choice: Choice, name: str) -> tuple[str, ...]:
    degrees = ", ".join(f"{n} = {v}" for n, v in choice.degrees.items())
    used = f"{choice.ranks:,} ({choice.ranks / loss.left:.1%})"
    held, sent = binary_text(choice.held), binary_text(choice.cost.bytes_sent)
    return (f"{loss.lost} {unit}", f"{loss.left:,}", degrees, used, held, sent, name)


def loss_json(loss: Loss, choices: list[tuple[Choice, str]], known: Bandwidths | None) -> dict[str, object]:
    from ucpl.cli.report import cost_object

    def one(choice: Choice, name: str) -> dict[str, object]:
        cost = cost_object(choice.cost, known)
        return {
            "call": choice.call,
            "degrees": choice.degrees,
            "ranks": choice.ranks,
            "used": choice.ranks / loss.left,
            "held": choice.held,
            "cost": {name: value for name, value in cost.items() if name != "ranks"},
            "plan": name,
        }

    return {
        "lost": loss.lost,
        "left": loss.left,
        "choices": [one(*each) for each in choices],
        "refused": [{"degrees": call, "why": why} for call, why in loss.refused],
    }
