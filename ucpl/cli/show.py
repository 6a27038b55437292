"""Print a layout after a stage of the compiler.

Resolved, located, joined with another (build), or ordered into a plan. LAYOUT is a call, a checkpoint (its inferred
layout), or a .plan file. `build` and `order` join it with --to, or with itself. --svg and --html draw the ranks that
have each part of a tensor; for a plan, the moves. --serve opens a page in which a .ucpl file is edited, and findings and
picture follow; the file is not changed.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json, add_model, add_sizes, given_of, write_text
from ucpl.cli.plan import demand_rank, rank_lines
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.requests import Given
    from ucpl.conversion.side import Side
    from ucpl.planning.plan import Plan

EXAMPLE = """
ucpl show 'zero1(dp=4)' --model model.ucpl:gpt --rank 1
ucpl show runs/on-4 --after resolve
ucpl show grow.plan
ucpl show grow.plan --passes
ucpl show runs/on-4 --svg on-4.svg
ucpl show grow.plan --html grow.html
ucpl show model.ucpl --serve 0
ucpl show 'job.ucpl:job(dp=4)' --domains 4 --svg vault.svg
"""
STAGES = ("resolve", "locate", "build", "order")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("layout", metavar="LAYOUT", help="a layout's call, a checkpoint, or a .plan file")
    parser.add_argument("--after", choices=STAGES, default="locate", help="the stage (default: locate)")
    parser.add_argument("--rank", type=int, metavar="R", help="the stored tensors of one rank")
    parser.add_argument(
        "--each", action="store_true", help="one row per stored tensor (default: one row for similar ones)"
    )
    parser.add_argument("--to", metavar="LAYOUT", help="the other side, for build and order")
    parser.add_argument(
        "--passes", action="store_true", help="of a plan: the changes of the source's metadata, pass by pass"
    )
    drawing = parser.add_mutually_exclusive_group()
    drawing.add_argument("--svg", metavar="FILE", help="draw it into this file, which replaces one that is there")
    drawing.add_argument("--html", metavar="FILE", help="the same in a page for browsers, with a table")
    drawing.add_argument(
        "--serve", metavar="PORT", type=int, help="edit FILE.ucpl in a page of this machine; 0: any free port"
    )
    parser.add_argument(
        "--domains", metavar="N", help="draw a vault of it: over so many domains, or the ranks of each: 0,1/2,3"
    )
    parser.add_argument("--protect", metavar="HOW", help="draw a vault of it: under raim5, rs(6, 2), mirror, none")
    add_model(parser, "of a layout that is of any")
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api
    from ucpl.conversion.planning import dtype_of
    from ucpl.conversion.showing import located, resolved, shown

    if options.serve is not None:
        return served(options, console)
    if options.domains is not None or options.protect is not None:
        return drawn_vault(options, console)
    if options.layout.endswith(".plan") and os.path.isfile(options.layout):
        from ucpl.planning.text import graph_text, summary

        plan = api.load_plan(options.layout)
        if options.passes:
            return listed_passes(plan, console)
        if picture_at(options):
            return drawn_plan(plan, options, console)
        text = summary(plan) + graph_text(plan)
        console.say(*text.rstrip("\n").split("\n"))
        console.answer({"stage": "order", "text": text})
        return Exit.DONE
    if options.passes and (options.after != "order" or picture_at(options)):
        remedy = "name a .plan file, or a source with --to LAYOUT --after order"
        fail("E171", "--passes is about a plan", Label("<command line>", where="--passes"), remedy=remedy)
    if picture_at(options):
        return drawn(options, console)
    alone = options.rank if options.after == "locate" else None
    given = given_of(options)
    is_folded = options.after == "locate" and options.to is None and not options.each
    here, there = shown(options.layout, options.to, given, alone, fold=is_folded)
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
            from ucpl.planning.text import summary

            plan = api.make_plan(here, there or here)
            if options.passes:
                return listed_passes(plan, console)
            lines = summary(plan).splitlines()
            if options.rank is not None:
                lines += rank_lines(plan, options.rank)
    remarks = tuple(unread(tuple(side for side in (here, there) if side is not None), given))
    console.say(*lines, *(f"remark     {text}" for text in remarks))
    console.answer(
        {"stage": options.after, "layout": here.layout.call, "text": "\n".join(lines), "remarks": list(remarks)}
    )
    return Exit.DONE


def served(options: Namespace, console: Console) -> int:
    """Serve a spec until Ctrl-C. Raises: UcplError E170, E171."""
    from ucpl.lsp.playground import Sheet, serving
    from ucpl.texts import read_text

    file, _, call = options.layout.partition(".ucpl:")
    path = Path(f"{file}.ucpl" if call else options.layout)
    where = Label("<command line>", where="--serve")
    others = [options.rank is not None, options.each, options.to, options.domains, options.protect, options.model]
    others += [options.sizes, options.passes, options.after != "locate", options.json]
    if path.suffix != ".ucpl" or any(others):
        remedy = "write ucpl show FILE.ucpl --serve 0, or 'FILE.ucpl:LAYOUT(...)'; of the other options, only --config"
        fail("E171", "--serve edits a .ucpl file", where, remedy=remedy)
    sheet = Sheet(os.path.abspath(path), read_text(path), call)
    sheet.service.configure(os.path.abspath(options.config) if options.config else "")
    try:
        with serving(sheet, options.serve) as (address, server):
            console.say(f"open       {address}", "end        Ctrl-C; the file is not changed")
            server.serve_forever()
    except (OSError, OverflowError) as error:
        remedy = "name a port from 1024 to 65535 that is free, or 0 for any"
        fail(
            "E171",
            f"port {options.serve} cannot be used: {getattr(error, 'strerror', '') or error}",
            where,
            remedy=remedy,
        )
    except KeyboardInterrupt:  # the way to end it
        console.say()
    return Exit.DONE


def picture_at(options: Namespace) -> str:
    """The option of a picture, `--svg` or `--html`; empty without one."""
    return "--svg" if options.svg is not None else "--html" if options.html is not None else ""


def listed_passes(plan: Plan, console: Console) -> int:
    """Every pass in its order, with its changes of this plan's source."""
    from ucpl.conversion.source_passes import SOURCE_PASSES
    from ucpl.conversion.target_passes import TARGET_PASSES

    lines, found = [], []
    for side, passes in (("source", SOURCE_PASSES), ("target", TARGET_PASSES)):
        for one in passes:
            did = [passed.text for passed in plan.passes if passed.name == one.name]
            lines.append(f"{side:<10} {one.name:<13} {one.text}")
            lines += [f"           - {text}" for text in did or ["nothing"]]
            found.append({"side": side, "name": one.name, "text": one.text, "did": did})
    console.say(*lines)
    console.answer({"stage": "order", "passes": found})
    return Exit.DONE


def drawn_plan(plan: Plan, options: Namespace, console: Console) -> int:
    """The picture of a plan. Raises: UcplError E171, E179."""
    from ucpl.pictures.flows import plan_picture
    from ucpl.pictures.svg_plan import plan_html, plan_svg

    asked = picture_at(options)
    if options.rank is not None or options.each or options.to is not None:
        remedy = "leave --rank, --to and --each out: the picture has all ranks, from their groups down to single ones"
        fail("E171", "a picture of a plan is of all of it", Label("<command line>", where=asked), remedy=remedy)
    picture = plan_picture(plan)
    file = options.svg or options.html
    write_text(Path(file), plan_svg(picture) if asked == "--svg" else plan_html(picture))
    console.say(f"written    {file}")
    console.answer({"stage": "order", "output": file})
    return Exit.DONE


def drawn_vault(options: Namespace, console: Console) -> int:
    """The picture of a vault of a layout: data by domain.

    Raises: UcplError E171, E179, E690.
    """
    from ucpl.cli.vault_options import domains_of
    from ucpl.cli.vault_plan import picture_of
    from ucpl.pictures.vaults import vault_html, vault_svg

    asked = picture_at(options)
    if not asked or options.rank is not None or options.each or options.to is not None or options.after != "locate":
        where = "--domains" if options.domains is not None else "--protect"
        remedy = "say --svg FILE or --html FILE, and neither --rank, --to, --each nor --after; as text: ucpl vault plan"
        fail("E171", f"{where} is for a picture of a vault", Label("<command line>", where=where), remedy=remedy)
    picture = picture_of(options, domains_of(options.domains) if options.domains is not None else None)
    file = options.svg or options.html
    write_text(Path(file), vault_svg(picture) if asked == "--svg" else vault_html(picture))
    console.say(f"written    {file}")
    console.answer({"stage": "locate", "layout": options.layout, "output": file})
    return Exit.DONE


def drawn(options: Namespace, console: Console) -> int:
    """The picture of a located layout. Raises: UcplError E171, E179."""
    from ucpl.conversion.showing import shown
    from ucpl.pictures.layouts import layout_picture
    from ucpl.pictures.svg import layout_html, layout_svg

    asked = picture_at(options)
    if options.after != "locate" or options.to is not None or options.each:
        remedy = "leave --after, --to and --each out; a picture of both sides is one of a plan"
        fail("E171", "a picture is of one layout, located", Label("<command line>", where=asked), remedy=remedy)
    given = given_of(options)
    here, _ = shown(options.layout, None, given, options.rank)
    if options.rank is not None:
        demand_rank(options.rank, here.layout)
    picture = layout_picture(here.placement, options.rank)
    file = options.svg or options.html
    write_text(Path(file), layout_svg(picture) if asked == "--svg" else layout_html(picture))
    remarks = tuple(unread((here,), given))
    console.say(f"written    {file}", *(f"remark     {text}" for text in remarks))
    console.answer({"stage": "locate", "layout": here.layout.call, "output": file, "remarks": list(remarks)})
    return Exit.DONE


def unread(sides: tuple[Side, ...], given: Given) -> Iterator[str]:
    """Options that no side asks for: a model, a config."""
    from ucpl.lint.unused_names import CONFIG_UNREAD, reads_config

    asking = [side.called for side in sides if side.checkpoint is None]  # a checkpoint has both of its own
    is_open = any(called.is_of_any for called in asking)
    if given.model is not None and not is_open:
        yield "the layout has a model of its own, and --model is of none. Leave it out"
    if given.config is not None and not is_open:
        if not reads_config(file for called in asking for file in called.library.files.values()):
            yield CONFIG_UNREAD
