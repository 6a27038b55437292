"""Print a layout after a stage of the compiler: resolved, located, joined with another (build), or ordered into a plan.

LAYOUT is a call, a checkpoint (its inferred layout), or a .plan file. `build` and `order` join it with --to, or with itself.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucpl.cli.options import add_json, add_sizes, config_of, sizes_of
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.api import Side
    from ucpl.cli.console import Console
    from ucpl.regions import Placement

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
    parser.add_argument("--to", metavar="LAYOUT", help="the other side, for build and order")
    parser.add_argument("--model", metavar="FILE:NAME", help="the model of a layout that is of any")
    parser.add_argument("--svg", metavar="FILE", help="not yet")
    parser.add_argument("--html", metavar="FILE", help="not yet")
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api

    for form in ("svg", "html"):
        if getattr(options, form) is not None:
            fail("E175", f"--{form} is not made yet", Label("<command line>", where=f"--{form}"))
    if options.layout.endswith(".plan") and Path(options.layout).is_file():
        from ucpl.schedule.text import summary

        text = summary(api.load_plan(options.layout))
        console.raw(text)
        console.answer({"stage": "order", "text": text})
        return Exit.DONE
    here, there, checkpoint = sides(options)
    ranks = max(1, here.layout.ranks)
    if options.rank is not None and not 0 <= options.rank < ranks:
        fail(
            "E180",
            f"--rank {options.rank}: {here.layout.call} has ranks 0 to {ranks - 1}",
            Label("<command line>", where=f"--rank {options.rank}"),
        )
    match options.after:
        case "resolve":
            lines = list(resolved(here))
        case "locate":
            placement = here.placement
            if checkpoint is not None and options.rank is not None:
                from ucpl.frontends.infer import stated_of
                from ucpl.regions import locate

                placement = locate(here.layout, rank=options.rank, stated=stated_of(checkpoint))
            lines = list(located(placement, options.rank))
        case "build":
            from ucpl.graph import build

            lines = str(
                build(here.placement, (there or here).placement, dtype_of=api.dtype_of(checkpoint))
            ).splitlines()
        case _:
            from ucpl.cli.plan import rank_lines
            from ucpl.schedule.text import summary

            _, plan = api.make_plan(here, there or here, checkpoint=checkpoint)
            lines = summary(plan).splitlines()
            if options.rank is not None:
                lines += rank_lines(plan, options.rank)
    console.say("\n".join(lines))
    console.answer({"stage": options.after, "layout": here.layout.call, "text": "\n".join(lines)})
    return Exit.DONE


def sides(options: Namespace) -> tuple[Side, Side | None, Any]:
    """LAYOUT, and --to if there is one; the checkpoint, if LAYOUT is one."""
    from ucpl import api

    sizes, config = sizes_of(options), config_of(options)
    model = api.model_named(options.model) if options.model else None
    if api.is_checkpoint(options.layout):
        opened = api.open_checkpoint(options.layout)
        here, known = api.source_side(opened, None)
        there = api.target_side(options.to, here, model or known, config=config, sizes=sizes) if options.to else None
        return here, there, opened
    if options.to:
        return *api.sides(options.layout, options.to, model=model, config=config, sizes=sizes), None
    one = api.parse_target(options.layout)
    alone = options.rank is not None and options.after == "locate"
    here = api.side(one, model=model, config=config, sizes=sizes, rank=0 if alone else None)
    if alone and 0 < options.rank < here.layout.ranks:  # a layout of thousands of ranks does not enumerate the others
        here = api.side(one, model=model, config=config, sizes=sizes, rank=options.rank)
    return here, None, None


def resolved(one: Side) -> Iterator[str]:
    """Names and numbers, closed; no ranks yet."""
    layout = one.layout
    yield f"layout     {layout.call} of {layout.model_name or 'any'}"
    yield f"framework  {layout.framework or 'none'}" + (
        f"({', '.join(f'{k} = {v}' for k, v in layout.settings.items())})" if layout.settings else ""
    )
    for name, value, origin in layout.origins:
        yield f"origin     {name} = {value}: {origin}"
    for mesh in layout.meshes:
        name = f"{mesh.name}: " if mesh.name else ""
        degrees = " ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.degrees, strict=True))
        yield f"mesh       {name}{degrees}, {layout.ranks} ranks"
    for file in layout.files.values():
        path = f' "{file.path.text}"' if file.path else ""
        yield f"file       {file.name} = {file.form or 'none'}{path}" + (f' key "{file.key.text}"' if file.key else "")
    for path, t in layout.tensors.items():
        dims = " ".join(f"{d}={n}" if "#" not in d else str(n) for d, n in zip(t.dims, t.counts, strict=True))
        yield f"tensor     {path} : {dims} {t.dtype or ''}".rstrip() + (
            "" if t.kind == "parameter" else f" is {t.kind}"
        )
    for alias, owner in layout.aliases.items():
        yield f"alias      {alias} = {owner}"
    for g, members in layout.model_groups:
        yield f"group      {g}: {len(members)} tensors, {', '.join(members[:6])}" + (
            ", ..." if len(members) > 6 else ""
        )
    for state in layout.states:
        yield f"state      {state.name} : {state.dtype}{' scalar' if state.scalar else ''}"
    for entry in layout.entries:
        key = f' as "{entry.storing.key.text}"' if entry.storing.key else ""
        yield f"stores     {', '.join(entry.targets.values())} in {entry.storing.file}{key}"
    for line in layout.state_lines:
        key = f' as "{line.storing.key.text}"' if line.storing.key else ""
        what = f"{', '.join(line.names or ('*',))} of {', '.join(line.groups or ('*',))}"
        yield f"stores     state {what} in {line.storing.file}{key}"
    for d in layout.derived:
        yield f"derives    {d.state} from {d.source}"


def located(placement: Placement, rank: int | None) -> Iterator[str]:
    """Stored tensors with the boxes of logical tensors that they hold."""
    from ucpl.extents import key_text
    from ucpl.regions.placement import element_name

    yield f"layout     {placement.layout.call}" + (
        f", rank {rank}" if rank is not None else f", {max(1, placement.layout.ranks)} ranks"
    )
    for part in placement.parts:
        rows: dict[int, list[int]] = {}
        for row, home in enumerate(part.pieces.home.tolist()):
            rows.setdefault(home, []).append(row)
        for number, home in enumerate(part.homes):
            if rank is not None and home.rank != rank:
                continue
            padding = f", {home.padding} of padding" if home.padding else ""
            yield f"{part.state.ljust(10)} {home.file}: {key_text(home.key)} {list(home.shape)}, rank {home.rank}{padding}"
            for row in rows.get(number, []):
                path = placement.tensors[int(part.pieces.tensor[row])]
                n = len(placement.layout.tensors[path].counts)
                low, high = part.pieces.low[row, :n].tolist(), part.pieces.high[row, :n].tolist()
                first = element_name(placement.layout, path, tuple(low))
                size = "x".join(str(b - a) for a, b in zip(low, high, strict=True)) or "1"
                yield f"           at {int(part.pieces.offset[row])}: {size} from {first}"
