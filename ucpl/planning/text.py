"""A plan as readable text: moves, decisions and their origins.

The head of a .plan file.
"""

from __future__ import annotations

from itertools import product

from ucpl.errors import plural
from ucpl.extents import Shelf, Shelves, Structure, size_of
from ucpl.planning.plan import Plan, Tally
from ucpl.registry import format_named
from ucpl.tables import Slot
from ucpl.tables.blocks import name_texts
from ucpl.tables.operations import Recompute, Reconstruct, net_text

_FEW = 3  # tensors that a line names


def summary(plan: Plan) -> str:
    """Stable text: the same plan gives the same lines."""
    lines = [
        f"plan       {plan.name}",
        f"source     {plan.source_call}",
        f"target     {plan.target_call}",
        *([] if plan.rank is None else [f"rank       {plan.rank}: its share alone, which is not run"]),
        f"spec       sha256:{plan.spec_digest}",
        f"structure  sha256:{plan.structure_digest}",
        reads_of(plan),
        writes_of(plan),
    ]
    lines += [f"origin     {o.name} = {o.value!r}: {o.origin}" for o in plan.origins]
    lines += [f"changed    {text}" for text in plan.changed]
    lines += [f"derived    {text}" for text in plan.derived]
    lines += [f"filled     {text}" for text in plan.filled]
    lines += [f"carried    {blob.said}" for blob in plan.target.blobs]
    lines += [f"dropped    {text}" for text in dropped_of(plan)]
    lines += left_lines(plan, 11)
    lines += [f"rebuilds   {text}" for text in rebuilt_of(plan)]
    lines += [f"replays    {text}" for text in replayed_of(plan)]
    lines += moves_of(plan)
    return "\n".join(line.replace("\n", "\ufffd") for line in lines) + "\n"  # a name breaks no line


def reads_of(plan: Plan) -> str:
    """`reads      56 stored tensors in 8 files`; of a rank's share those alone that something moves from."""
    if plan.rank is None:
        count, files = len(plan.source_shelves), files_of(plan.source_shelves)
    else:
        read = {n for m in plan.moves for n in m.source.tolist()}
        count, files = len(read), len({plan.source_shelves[n].file for n in read})
    return f"reads      {plural(count, 'stored tensor')}{in_files(files, plan.source)}"


def writes_of(plan: Plan) -> str:
    """`writes     24 stored tensors in 6 files, 22,080 bytes`."""
    targets = plan.target_shelves
    where = f"{plural(len(targets), 'stored tensor')}{in_files(files_of(targets), plan.target)}"
    return f"writes     {where}, {plural(bytes_of(targets), 'byte')}"


def in_files(count: int, side: Structure) -> str:
    """` in 6 files`; "" for formats that distribute tensors over own files."""
    return "" if format_named(side.framework).has_own_files else f" in {plural(count, 'file')}"


def dropped_of(plan: Plan) -> list[str]:
    """One line per reason, with the states and the number of tensors.

    Names only if there are few.
    """
    reasons: dict[tuple[str, str], list[str]] = {}
    for text in plan.dropped:
        what, _, reason = text.partition(": ")
        state, _, tensor = what.partition(" of ")
        reasons.setdefault((state, reason), []).append(tensor)
    out = []
    for (state, reason), tensors in reasons.items():
        names = ", ".join(tensors) if len(tensors) <= _FEW else f"{len(tensors):,} tensors"
        out.append(f"{state}{f' of {names}' if names else ''}: {reason}")
    return out


def left_lines(plan: Plan, width: int) -> list[str]:
    """The dropped parts of the source, and the account of it."""
    if plan.account is None:
        return []
    said = {text.partition(": ")[0] for text in plan.dropped}
    out = []
    for word, fate in (("left out", "dropped"), ("not read", "not read")):
        for entry in plan.account.entries:
            if (
                entry.fate == fate
                and not entry.kind.startswith("tensor")
                and f"{entry.kind} of {entry.names[0]}" not in said
            ):
                out.append(f"{word.ljust(width)}{entry}")
    return [*out, f"{'account'.ljust(width)}{plan.account}"]


def rebuilt_of(plan: Plan) -> list[str]:
    """`4,096 bytes that d2 lost, of what d0, d1, d3 hold, by raim5: 3 are read for each`; nothing, where nothing is lost."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...], str, int], int] = {}
    for node in plan.nodes:
        if isinstance(node, Reconstruct):
            what = node.lost, node.others, node.scheme, node.times
            found[what] = found.get(what, 0) + node.size
    return [
        f"{size:,} bytes that {_domains(lost)} lost, from {_domains(others)}, by {scheme}: {times} are read for each"
        for (lost, others, scheme, times), size in sorted(found.items())
    ]


def replayed_of(plan: Plan) -> list[str]:
    """`81,920 bytes by 2 steps of AdamW, of 54,613 bytes of gradients`; nothing, where all was saved."""
    found: dict[tuple[int, str], list[int]] = {}
    for node in plan.nodes:
        if isinstance(node, Recompute):
            sizes = found.setdefault((node.steps, node.optimizer), [0, 0])
            sizes[0], sizes[1] = sizes[0] + node.size, max(sizes[1], node.gradients)
    return [
        f"{size:,} bytes by {steps} steps of {optimizer}, of {gradients:,} bytes of gradients"
        for (steps, optimizer), (size, gradients) in sorted(found.items())
    ]


def _domains(some: tuple[int, ...]) -> str:
    return ", ".join(f"d{d}" for d in some)


def moves_of(plan: Plan) -> list[str]:
    """Moves, a line per state and kind."""
    return [_line(t) for t in plan.tallies]


def graph_text(plan: Plan) -> str:
    """The running graph: a node per line, in order, with its inputs."""
    return net_text(plan.net) + "\n"


def files_of(shelves: Shelves) -> int:
    """The number of files."""
    names: set[str] = set()
    seen: set[object] = set()
    for shelf in shelves.shelves:
        mark = tuple(p if isinstance(p, str) else (p.axis, id(p.values), p.format) for p in shelf.block.file)
        if mark in seen:  # most tensors share the files of others
            continue
        seen.add(mark)
        slots = [p for p in shelf.block.file if isinstance(p, Slot)]
        coordinates = range(len(shelf.block.rank)) if any(not s.axis for s in slots) else range(min(1, len(shelf)))
        choices = range(shelf.block.choices if any(s.axis for s in slots) else 1)
        names.update(name_texts(shelf.block.file, *zip(*product(coordinates, choices), strict=True)))
    return len(names)


def bytes_of(shelves: Shelves) -> int:
    """Bytes of all tensors that have storage of their own."""
    return sum(_bytes(s) for s in shelves.shelves)


def _bytes(shelf: Shelf) -> int:
    if len(shelf.dtypes) == 1 and shelf.shares is None:
        numel = int(shelf.block.shape.prod(axis=1).sum()) * shelf.block.choices
        return size_of(shelf.dtypes[0], numel) if shelf.dtypes[0] else 0
    each = (shelf.tensor(i) for i in range(len(shelf)))
    return sum(size_of(t.dtype, t.numel) for t in each if t.shares is None and t.dtype)


def _line(t: Tally) -> str:
    word = {
        "copy": "extract, merge, split",
        "check": "check",
        "mean": "reduce by mean",
        "sum": "reduce by sum",
        "max": "reduce by max",
        "scale": "times the scales of blocks",
    }[t.kind]
    value = ", values changed" if t.changes_values else ""
    return f"moves      {t.state}: {word}, {t.runs:,} runs, {t.elements:,} elements{value}"
