"""Print a layout after a stage of the compiler: resolved, located, joined with another (build), or ordered into a plan.

LAYOUT is a call, a checkpoint (its inferred layout), or a .plan file. `build` and `order` join it with --to, or with itself.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json, add_model, add_sizes, given_of
from ucpl.cli.plan import demand_rank, rank_lines
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.given import Given
    from ucpl.conversion.side import Side

EXAMPLE = """
ucpl show 'zero1(dp=4)' --model model.ucpl:gpt --rank 1
ucpl show runs/on-4 --after resolve
ucpl show grow.plan
"""
STAGES = ("resolve", "locate", "build", "order")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("layout", metavar="LAYOUT", help="a layout's call, a checkpoint, or a .plan file")
    parser.add_argument("--after", choices=STAGES, default="locate", help="the stage (default: locate)")
    parser.add_argument("--rank", type=int, metavar="R", help="what one rank holds")
    parser.add_argument("--each", action="store_true", help="every stored tensor by itself (what is alike is one row)")
    parser.add_argument("--to", metavar="LAYOUT", help="the other side, for build and order")
    add_model(parser, "of a layout that is of any")
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api
    from ucpl.conversion.planning import dtype_of
    from ucpl.conversion.showing import located, resolved, shown

    if options.layout.endswith(".plan") and os.path.isfile(options.layout):
        from ucpl.schedule.text import graph_text, summary

        plan = api.load_plan(options.layout)
        text = summary(plan) + graph_text(plan)
        console.say(*text.rstrip("\n").split("\n"))
        console.answer({"stage": "order", "text": text})
        return Exit.DONE
    alone = options.rank if options.after == "locate" else None
    given = given_of(options)
    here, there = shown(options.layout, options.to, given, alone)
    if options.rank is not None:
        demand_rank(options.rank, here.layout)
    match options.after:
        case "resolve":
            lines = list(resolved(here))
        case "locate":
            lines = list(located(here.placement, options.rank, each=options.each))
        case "build":
            from ucpl.graph import build

            lines = str(
                build(here.placement, (there or here).placement, dtype_of=dtype_of(here.checkpoint))
            ).splitlines()
        case _:
            from ucpl.schedule.text import summary

            plan = api.make_plan(here, there or here)
            lines = summary(plan).splitlines()
            if options.rank is not None:
                lines += rank_lines(plan, options.rank)
    remarks = tuple(unread(tuple(side for side in (here, there) if side is not None), given))
    console.say(*lines, *(f"remark     {text}" for text in remarks))
    console.answer(
        {"stage": options.after, "layout": here.layout.call, "text": "\n".join(lines), "remarks": list(remarks)}
    )
    return Exit.DONE


def unread(sides: tuple[Side, ...], given: Given) -> Iterator[str]:
    """What was given, and no side asks for: a model, a config."""
    from ucpl.proofs.unused import CONFIG_UNREAD, reads_config

    asking = [side.called for side in sides if side.checkpoint is None]  # a checkpoint has both by itself
    is_open = any(called.is_of_any for called in asking)
    if given.model is not None and not is_open:
        yield "the layout has a model of its own, and --model is of none. Leave it out"
    if given.config is not None and not is_open:
        if not reads_config(file for called in asking for file in called.library.files.values()):
            yield CONFIG_UNREAD
