"""Say where an element of a target comes from: file, key and position, of every state. Needs the plan alone."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from itertools import accumulate
from typing import TYPE_CHECKING, TypedDict

from ucpl.cli.options import add_json
from ucpl.errors import Exit, Label, fail
from ucpl.layout.by_index import whole_dim, whole_name

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.columns.operations import Kind
    from ucpl.layout import LogicalTensor
    from ucpl.schedule.plan import Plan
    from ucpl.schedule.runs import Runs

EXAMPLE = "ucpl why grow.plan 'wte.weight[3, 17]'\nucpl why grow.plan wte.weight --state exp_avg"

_ELEMENT = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<index>[^\[\]]*)\])?")
_NUMBER = re.compile(r"[0-9]{1,18}")
_RUNS_SHOWN = 50


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plan", metavar="FILE.plan")
    parser.add_argument(
        "element", metavar="TENSOR[INDEX...]", help="an element, wte.weight[3, 17]; or a tensor, for all its runs"
    )
    parser.add_argument("--state", metavar="STATE", help="only this state: weight, fp32, exp_avg, ...")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl import api

    plan = api.load_plan(options.plan)
    found = _ELEMENT.fullmatch(options.element.strip())
    if found is None:
        fail("E181", f"`{options.element}` is no tensor with an index", Label("<command line>", where=options.element))
    whole = options.element.strip()
    name = whole if whole in plan.tensors else found["name"].strip()
    name = plan.target.aliases.get(name, name)
    said = [t for t in plan.tensors if whole_name(t) == name] if name not in plan.tensors else [name]
    if not said:
        from ucpl.cli.verbs import nearest

        close = nearest(name, [*plan.tensors, *map(whole_name, plan.tensors)])
        fail(
            "E182",
            f"the plan has no tensor `{name}`",
            Label(options.plan, where=name),
            remedy=f"did you mean `{close}`?"
            if close
            else f"it has {', '.join(plan.tensors[:10])}" + (", ..." if len(plan.tensors) > 10 else ""),
        )
    if found["index"] is None or name == whole:
        answers = [a for one in said for a in runs(plan, one, options.state)]
    else:
        answers = element(plan, options, said, found["index"])
    for a in answers[:_RUNS_SHOWN]:
        console.say(*sentence(a))
    if len(answers) > _RUNS_SHOWN:
        console.say(f"... and {len(answers) - _RUNS_SHOWN:,} more; --json has all")
    if not answers:
        console.say(f"{name} has no such state in this plan")
    console.answer({"tensor": name, "from": answers})
    return Exit.DONE if answers else Exit.ANSWER_IS_NO


class Told(TypedDict):
    """One run, or one element of it: from where it goes to where."""

    element: str  # the first one, where it is a run
    state: str
    kind: Kind
    rounded: bool
    elements: int
    source_file: str
    source_key: str
    source_index: list[int]
    target_file: str
    target_key: str
    target_index: list[int]


def sentence(a: Told) -> tuple[str, str, str]:
    """Three lines: what, where it is put, where it is from."""
    what = f"{a['state']} of {a['element']}"
    there = f"{a['target_file']}: {a['target_key']}{a['target_index']}"
    here = f"{a['source_file']}: {a['source_key']}{a['source_index']}"
    verb = {
        "copy": "is",
        "check": "must equal",
        "mean": "is the mean of copies, one of them",
        "sum": "is a sum, one part of it",
        "max": "is the greatest of copies, one of them",
        "scale": "times the scale",
    }[a["kind"]]
    size = f" ({a['elements']:,} elements from there on)" if a["elements"] > 1 else ""
    rounded = ", rounded to nearest even" if a["rounded"] else ""
    return what, f"  at   {there}", f"  {verb.ljust(4)} {here}{size}{rounded}"


def runs(plan: Plan, name: str, state: str | None) -> list[Told]:
    """Every run of a tensor, as the plan moves it."""
    out = []
    for m in plan.moves:
        if state is None or m.state == state:
            for i in (m.tensor == plan.tensors.index(name)).nonzero()[0].tolist():
                begin = int(m.source_offset[i]), int(m.target_offset[i])
                out.append(_told(plan, m, i, *begin, name, int(m.shape[i].prod())))
    return out


def element(plan: Plan, options: Namespace, said: list[str], text: str) -> list[Told]:
    """The moves that put one element where the target stores it. Raises: UcplError E181, E182.

    said: the tensor; or, where a dim has a size for each layer, those of each size, of which one has the element.
    """
    from ucpl.layout import load, resolve
    from ucpl.proofs.where import spots_of
    from ucpl.regions import locate
    from ucpl.regions.placement import element_name
    from ucpl.syntax import nodes

    name = whole_name(said[0])
    if not plan.layout_text:
        fail(
            "E181",
            f"this plan's target is a layout of a model of its own: {name} has no index here",
            Label(options.plan, where=f"{name}[{text}]"),
            remedy=f"`ucpl why {options.plan} '{name}'` lists all its runs",
        )
    layout = resolve(load(("layout.ucpl", plan.layout_text)), nodes.Call("stored"))
    placement = locate(layout)
    lost = next((one for one in said if one not in layout.tensors), None)
    if lost is not None:
        fail("E351", f"{options.plan} is damaged: its layout has no tensor `{lost}`", Label(options.plan, where=lost))
    name, index = _chosen(text, [layout.tensors[one] for one in said])
    element_text = element_name(layout, name, index)
    homes = [(p.state, h) for p in placement.parts for h in p.homes]
    first = [0, *accumulate(len(p.homes) for p in placement.parts)]
    target_of = {(t.file, tuple(map(str, t.key))): i for i, t in enumerate(plan.targets)}
    out: list[Told] = []
    members: set[tuple[int, tuple[int, ...] | None]] = set()  # of each target: what is put together there
    for spot in spots_of(placement, name, index):
        state, home = homes[first[spot.part] + spot.home]
        if options.state is not None and state != options.state:
            continue
        target = target_of.get((home.file, tuple(map(str, home.key))))
        if target is None:
            continue
        for m in plan.moves:
            for i in (m.target == target).nonzero()[0].tolist():
                at = _within(spot.position, int(m.target_offset[i]), m.target_stride[i].tolist(), m.shape[i].tolist())
                if at is not None:
                    source = int(m.source_offset[i]) + sum(
                        a * int(s) for a, s in zip(at, m.source_stride[i], strict=True)
                    )
                    out.append(_told(plan, m, i, source, spot.position, element_text, 1))
                    if (member := _member(plan, m, i)) is not None and (target, member) in members:
                        out[-1]["kind"] = "check"
                    members.add((target, member))
    return out


def _member(plan: Plan, m: Runs, i: int) -> tuple[int, ...] | None:
    """Of a row of a mean or sum: where its rank stands along the axes that it is over. Of others: None."""
    rank = plan.sources[int(m.source[i])].rank
    return tuple(rank // divisor % degree for divisor, degree in m.over) or None


def _told(plan: Plan, m: Runs, i: int, source: int, target: int, element_text: str, elements: int) -> Told:
    from ucpl.extents import key_text

    s, t = plan.sources[int(m.source[i])], plan.targets[int(m.target[i])]
    return {
        "element": element_text,
        "state": m.state,
        "kind": m.kind,
        "rounded": bool(m.lossy),
        "elements": elements,
        "source_file": s.file,
        "source_key": key_text(s.key),
        "source_index": _unravel(source, s.shape),
        "target_file": t.file,
        "target_key": key_text(t.key),
        "target_index": _unravel(target, t.shape),
    }


def _unravel(position: int, shape: tuple[int, ...]) -> list[int]:
    out = []
    for n in reversed(shape):
        out.append(position % n)
        position //= n
    return out[::-1]


def _within(position: int, offset: int, stride: list[int], shape: list[int]) -> list[int] | None:
    """Where in a strided box a position lies; None: it does not."""
    left = position - offset
    at = [0] * len(shape)
    if left < 0:
        return None
    for dim in sorted(range(len(shape)), key=lambda d: -stride[d]):
        if stride[dim] > 0:
            at[dim] = min(left // stride[dim], shape[dim] - 1)
            left -= at[dim] * stride[dim]
    return at if left == 0 else None


def _chosen(text: str, tensors: list[LogicalTensor]) -> tuple[str, tuple[int, ...]]:
    """The tensor that has an element, and where: `3, 17` or `h=3, d=17`, in indices of whole dims. Raises: E181, E182."""
    name = whole_name(tensors[0].path)
    where = Label("<command line>", where=f"{name}[{text}]")
    values = _numbers(text, tensors[0], where)
    for tensor in tensors:
        at = [
            indices.index(value) if value in indices else -1
            for indices, value in zip(tensor.indices, values, strict=False)
        ]
        if len(values) == len(tensor.indices) and -1 not in at:
            return tensor.path, tuple(at)
    dims = [whole_dim(d) if "#" not in d else "" for d in tensors[0].dims]
    there = max((_there(values, tensor) for tensor in tensors), key=lambda one: one[0])[1]
    form = ", ".join(f"{d}={n}" if d else str(n) for d, n in zip(dims, there, strict=True))
    sizes = " or ".join(f"{list(t.counts)}" for t in tensors)
    fail(
        "E182",
        f"`{name}` is {sizes}: it has no element {values}",
        where,
        remedy=f"give an index of each dim, as in '{name}[{form}]'; or '{name}' for all its runs",
    )


def _there(values: list[int], tensor: LogicalTensor) -> tuple[int, list[int]]:
    """An element that a tensor has, with as many of the numbers as it has from the first on, and how many those are."""
    count = 0
    while count < min(len(values), len(tensor.indices)) and values[count] in tensor.indices[count]:
        count += 1
    return count, [*values[:count], *(next(iter(indices), 0) for indices in tensor.indices[count:])]


def _numbers(text: str, tensor: LogicalTensor, where: Label) -> list[int]:
    """The numbers of an index, by the dims' order."""
    parts = [p.strip() for p in text.split(",")] if text.strip() else []
    dims = [whole_dim(d) for d in tensor.dims]
    out: list[int] = []
    for n, part in enumerate(parts):
        dim, equals, number = part.rpartition("=")
        if not _NUMBER.fullmatch(number.strip()) or (equals and (n >= len(dims) or dim.strip() != dims[n])):
            known = ", ".join(f"{d}=0" if "#" not in d else "0" for d in dims)
            remedy = f"write its dims in their order, as in '{whole_name(tensor.path)}[{known}]'"
            fail("E181", f"`{part}` is no index of `{whole_name(tensor.path)}`", where, remedy=remedy)
        out.append(int(number))
    return out
