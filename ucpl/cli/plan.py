"""Plan a conversion and prove it: each target element has one source.

Specs are enough; no tensor is read.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ucpl.cli.options import add_changes, add_json, add_model, add_sizes, given_of, write_text
from ucpl.cli.report import add_bandwidths, bandwidths_of, container_lines, cost_lines, cost_object, plan_object
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.planning import Asked
    from ucpl.conversion.requests import Given
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.layout import Layout
    from ucpl.planning.plan import Plan

EXAMPLE = """
ucpl plan --from runs/on-4 --to 'zero1(dp=8)' -o grow.plan
ucpl plan --from 'zero1(dp=4)' --to 'zero3(dp=3)' --model model.ucpl:gpt
ucpl plan restart.ucpl grow -o grow.plan
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="a .ucpl file with a `plan` statement")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the statement's name")
    parser.add_argument(
        "--from", dest="source", metavar="LAYOUT", help="a layout, or a checkpoint, whose headers are read"
    )
    parser.add_argument("--to", dest="target", metavar="LAYOUT")
    add_model(parser, "where both layouts are of any")
    parser.add_argument(
        "--checkpoint", metavar="CKPT", help="the checkpoint that --from describes: its headers give model and dtypes"
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="the stored tensors that one rank of the target needs; the rest is planned with --prove only",
    )
    add_changes(parser)
    parser.add_argument("--prove", action="store_true", help="prove the finished plan once more, by code of its own")
    parser.add_argument(
        "-o", "--output", metavar="FILE.plan", help="write the plan here; with --rank that rank's share"
    )
    add_bandwidths(parser)
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    known = bandwidths_of(options.bandwidths)  # before anything is planned
    asked, given = asked_of(options)
    if options.rank is not None and not options.prove:
        return one_rank(asked, given, options, console)
    from ucpl.conversion.engine import planned
    from ucpl.planning.cost import cost_of
    from ucpl.planning.text import summary

    made = planned(asked, given)
    plan = made.plan
    mine = None
    if options.rank is not None:
        from ucpl.conversion.share import share_of

        mine = share_of(asked, given, options.rank)
    if options.output:
        save(plan if mine is None else mine.plan, options.output)
    console.say(*summary(plan).rstrip("\n").split("\n"))
    cost = cost_of(plan)
    console.say(*cost_lines(cost, known))
    for text in (*container_lines(made.checkpoint, plan, width=11), *loading_lines(made.checkpoint, plan)):
        console.say(text)
    for text in made.remarks:
        console.say(f"remark     {text}")
    if mine is not None:
        console.say(*rank_lines(mine.plan, mine.rank))
    if options.output:
        console.say(f"written    {options.output}")
    console.answer(
        {
            "plan": plan_object(plan),
            "cost": cost_object(cost, known),
            "output": options.output,
            "remarks": list(made.remarks),
        }
    )
    return Exit.DONE


def save(plan: Plan, file: str) -> None:
    """Raises: UcplError E179."""
    from ucpl.planning.files import plan_bytes

    write_text(Path(file), plan_bytes(plan))


def one_rank(asked: Asked, given: Given, options: Namespace, console: Console) -> int:
    """Plan the share of one rank of the target; not the others'."""
    from ucpl.conversion.share import share_of
    from ucpl.planning.cost import cost_of
    from ucpl.planning.text import moves_of, reads_of, writes_of

    rank, file = options.rank, options.output
    plan = share_of(asked, given, rank).plan
    if file:
        save(plan, file)
    cost = cost_of(plan)
    read = {n for m in plan.moves for n in m.source.tolist()}
    console.say(
        f"rank       {rank}: its stored tensors, and their sources",
        f"source     {plan.source_call}",
        f"target     {plan.target_call}",
        reads_of(plan),
        writes_of(plan),
        *(f"derived    {text}" for text in plan.derived),
        *(f"filled     {text}" for text in plan.filled),
        *moves_of(plan),
        *cost_lines(cost, None),
        *rank_lines(plan, rank),
        *([f"written    {file}: the share of rank {rank}"] if file else []),
    )
    told = {**plan_object(plan), "reads": len(read)}
    console.answer({"plan": told, "cost": cost_object(cost, None), "rank": rank, "output": file, "remarks": []})
    return Exit.DONE


def loading_lines(checkpoint: Checkpoint | None, plan: Plan) -> list[str]:
    """Notes for the loader of the target, as `convert` prints them."""
    if checkpoint is None:
        return []
    from ucpl.registry import format_named

    return [f"to load it {text}" for text in format_named(plan.target.framework).advice(checkpoint, plan.target)]


def asked_of(options: Namespace) -> tuple[Asked, Given]:
    """The plan request: a statement of a file, or two layouts.

    Raises: UcplError E178.
    """
    from attrs import evolve

    from ucpl.conversion.planning import Asked, statement

    given = given_of(options)
    if options.file is None:
        if options.source is None or options.target is None:
            fail("E178", "a plan needs both --from and --to, or FILE NAME", Label("<command line>", where="ucpl plan"))
        return Asked(options.source, options.target, options.checkpoint, twice=options.prove), given
    here = Label("<command line>", where="ucpl plan")
    if options.source or options.target:
        words = " ".join(word for word in (options.file, options.name) if word is not None)
        beside = f"`{words}` conflicts with --{'from' if options.source else 'to'}"
        fail("E178", f"{beside}: a plan is FILE NAME, or --from LAYOUT --to LAYOUT", here, remedy=by_sides(options))
    if os.path.exists(options.file) and not options.file.endswith(".ucpl"):
        fail("E178", f"{options.file} is no .ucpl file", here, remedy=by_sides(options))
    if options.name is None:
        fail("E178", "a plan is FILE NAME, or --from LAYOUT --to LAYOUT", here, remedy=to_write(options.file))
    source, target, said = statement(options.file, options.name, given)
    asked = Asked(source, target, options.checkpoint, said.name, options.prove)
    train = (name if group is None else f"{name}={group}" for name, group in said.train)
    return asked, evolve(
        given,
        drop=(*said.drop, *given.drop),
        freeze=(*said.freeze, *given.freeze),
        train=(*train, *given.train),
        said_by=said,
    )


def by_sides(options: Namespace) -> str:
    """The remedy for words next to --from or --to.

    The missing options are probably the words, in turn.
    """
    words = [word for word in (options.file, options.name) if word is not None]
    output = options.output or next((word for word in words if word.endswith(".plan")), None)
    rest = iter([word for word in words if word != output])
    source = options.source or next(rest, "LAYOUT")
    target = options.target or next(rest, "LAYOUT")
    return f"write ucpl plan --from {quote(source)} --to {quote(target)}" + (f" -o {quote(output)}" if output else "")


def to_write(text: str) -> str:
    """The remedy for a file alone: a list of its plans.

    Raises: UcplError E170 and others.
    """
    from ucpl.conversion.requests import library_of
    from ucpl.language import nodes

    head, colon, name = text.partition(".ucpl:")
    file = f"{head}.ucpl" if colon else text
    if not file.endswith(".ucpl") or not os.path.isfile(file):
        return ""
    if name and "(" not in name:
        return f"write ucpl plan {file} {name}"
    known = [k.node for k in library_of(file).known.values()]
    plans = [node.name for node in known if isinstance(node, nodes.Plan)]
    if plans:
        return "write " + " or ".join(f"ucpl plan {file} {one}" for one in plans[:3])
    layouts = [node.name for node in known if isinstance(node, nodes.Layout) and node.span.file == file][:2]
    calls = [f"'{file}:{one}(...)'" for one in (*layouts, *layouts[:1])[:2]]
    return f"{file} has no plan: ucpl plan --from {calls[0]} --to {calls[1]}" if calls else ""


def demand_rank(rank: int, layout: Layout) -> None:
    """Raises: UcplError E180 where the layout has no such rank."""
    from ucpl.conversion import share

    share.demand_rank(rank, layout)


def rank_lines(plan: Plan, rank: int) -> list[str]:
    """Runs of elements that end in stored tensors of one rank's share.

    Of tensors that are planned as one, runs of one size have one line.
    """
    from ucpl.extents import key_text

    out: dict[object, str] = {}
    counts: Counter[object] = Counter()
    for m in plan.moves:
        if m.kind == "check":
            continue
        columns = (m.tensor, m.source, m.target, m.shape, m.source_offset, m.target_offset)
        for tensor, source, target, shape, first, at in zip(*(c.tolist() for c in columns), strict=True):
            name = plan.tensors[tensor]
            size = "x".join(map(str, [n for n in shape if n > 1] or [1]))
            line: object = (name, m.state, size) if name in plan.families else len(out)
            counts[line] += 1
            if counts[line] > 1:
                continue
            s, t = plan.source_shelves[source], plan.target_shelves[target]
            here, there = f"{s.file} {key_text(s.key)}[{first}..]", f"{t.file} {key_text(t.key)}[{at}..]"
            out[line] = f"rank {rank}     {name} {m.state}: {size} from {here} to {there}"
    lines = [f"{text}, and {counts[line] - 1} more" if counts[line] > 1 else text for line, text in out.items()]
    return lines or [f"rank {rank}     holds nothing that moves"]
