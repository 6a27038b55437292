"""Flat buffers: `flat(x)` of the tensors of a group, padded, cut and bucketed, as intervals of the tensors' local storage.

Most lines are a chain: wrappers of `each` inside `flat`, wrappers of `flat` outside. Chains are worked out with arrays, all
cuts at once; anything else goes through the tree of cells. A test says that both give the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.extents import Flat
from ucpl.layout import Group, Layout, States
from ucpl.layout import axes as ax
from ucpl.layout.scope import at
from ucpl.regions.cells import Cells, Concat, CutError, Labelled, Padding, Range, build, padding_of, pieces_of
from ucpl.regions.entries import Choice, EntryPlacer, Local

I64 = NDArray[np.int64]

Stated = Callable[[str, str, dict[str, int]], list[list[tuple[str, tuple[int, ...]]]]]


@frozen(eq=False)
class Member:
    """One tensor in a flat: an entry, a choice of its indices, and what of it lies on these ranks."""

    entry: int
    choice: Choice
    local: Local
    name: str  # the stored name
    length: int

    @property
    def real(self) -> int:
        """Its length without padding of its own at the end."""
        last = self.local.offset + ((self.local.high - self.local.low - 1).clip(0) * self.local.stride).sum(axis=1)
        return int(last.max(initial=-1)) + 1 if self.local.padding else self.length


@frozen(eq=False)
class Window:
    """One stored piece of a flat on one rank: intervals [start, stop) of members' local storage at positions of the piece."""

    here: dict[str, int]
    rank: int
    length: int
    padding: int
    undefined: bool
    member: I64
    start: I64
    stop: I64
    position: I64


def module_order(
    placers: list[EntryPlacer], which: list[int], choices: Callable[[int], list[Choice]]
) -> list[tuple[int, Choice]]:
    """(entry, choice) as model.parameters() would give them: entries that share the first k indices are one loop body."""

    def walk(run: list[int], depth: int, fixed: dict[int, list[Choice]]) -> Iterable[tuple[int, Choice]]:
        for lead, same in groupby(run, key=lambda e: placers[e].entry.indices[depth : depth + 1]):
            body = list(same)
            if not lead:
                for e in body:
                    for choice in fixed[e]:
                        yield e, choice
                continue
            seen: dict[tuple[Any, ...], None] = {}
            buckets: dict[int, dict[tuple[Any, ...], list[Choice]]] = {}
            for e in body:
                per: dict[tuple[Any, ...], list[Choice]] = {}
                for choice in fixed[e]:
                    key = _nth(placers[e], choice, depth)
                    per.setdefault(key, []).append(choice)
                    seen.setdefault(key)
                buckets[e] = per
            # The values in the order of the index itself, which all entries of the body share.
            for key in sorted(seen, key=lambda k: k[0]):
                yield from walk(body, depth + 1, {e: buckets[e].get(key, []) for e in body})

    return list(walk(which, 0, {e: choices(e) for e in which}))


def _nth(placer: EntryPlacer, choice: Choice, depth: int) -> tuple[Any, ...]:
    """Where the choice of the index at `depth` stands in its own order, and its value."""
    name = _index_name(placer.entry.indices[depth])
    return choice.variables[f"{name}.local"], choice.variables[name]


def _index_name(axis: ax.Axis) -> str:
    return next(iter(ax.dims_of(axis)), "")


def ordered(
    layout: Layout,
    group: Group | None,
    placers: list[EntryPlacer],
    names: list[str],
    here: dict[str, int],
    key_of: Callable[[int, Choice, dict[str, int]], str],
) -> list[Member]:
    """The members of a group on the ranks `here`, in the order of the flat (before `dealt` or `reversed`)."""
    present = [e for e, p in enumerate(placers) if p.is_here(here)]
    if group is not None and group.members is not None:
        wanted = list(group.members)
        by_path: dict[str, list[int]] = {}
        for e in present:
            by_path.setdefault(placers[e].entry.path, []).append(e)
        present = [e for m in wanted for e in by_path.get(m, ())]
    elif group is not None and group.without is not None:
        out = {m for g in group.without for m in (layout.groups[g].members or ())}
        present = [e for e in present if placers[e].entry.path not in out and _trained(layout, placers[e])]
    elif group is None or group.stated is not None:
        present = [e for e in present if _trained(layout, placers[e])]
    sequence = module_order(placers, present, lambda e: placers[e].choices(here))
    members: list[Member] = []
    homes = Counter(
        path for e in present if placers[e].entry.alias is None for path in placers[e].entry.targets.values()
    )
    held: dict[str, list[tuple[I64, I64]]] = {}  # boxes of tensors that several entries store
    for e, choice in sequence:
        placer = placers[e]
        if placer.entry.alias is not None:
            continue  # a second name of a parameter
        local = placer.local(here)
        if not local.numel:
            continue
        if any(homes[path] > 1 for path in placer.entry.targets.values()):
            boxes = [placer.box(local, row, choice) for row in range(len(local.offset))]
            if boxes and any(
                (a <= boxes[0][1]).all() and (boxes[0][1] < b).all() for a, b in held.get(boxes[0][0], ())
            ):
                continue  # a second home on this rank is the same parameter
            for path, low, high in boxes:
                held.setdefault(path, []).append((low, high))
        members.append(Member(e, choice, local, key_of(e, choice, here), local.numel))
    return members


def _trained(layout: Layout, placer: EntryPlacer) -> bool:
    return all(layout.tensors[t].kind == "parameter" for t in placer.entry.targets.values())


def dealt(members: list[Member], group: Group | None) -> list[Member]:
    if group is None:
        return members
    if group.is_reversed:
        return members[::-1]
    if group.dealt > 1:
        return [m for i in range(group.dealt) for m in members[i :: group.dealt]]
    return members


# ---- chains ----------------------------------------------------------------------------------------------------------


@frozen
class Chain:
    """Wrappers in the order in which they are applied: to each member, then to the whole flat."""

    inner: tuple[ax.Axis, ...]
    outer: tuple[ax.Axis, ...]


def chain_of(axis: ax.Axis) -> Chain | None:
    """The chain of a pattern, or None where it is no chain."""
    outer: list[ax.Axis] = []
    while not isinstance(axis, ax.Flat):
        if not isinstance(axis, ax.Pad | ax.Trim | ax.Cut):
            return None
        outer.append(axis)
        axis = axis.axis
    inner: list[ax.Axis] = []
    node = axis.axis
    while not isinstance(node, ax.Each):
        if not isinstance(node, ax.Pad | ax.Trim | ax.Cut):
            return None
        inner.append(node)
        node = node.axis
    return Chain(tuple(reversed(inner)), tuple(reversed(outer)))


def slots(
    chain: Chain, lengths: I64, degrees: dict[str, int], here: dict[str, int], reals: I64 | None = None
) -> tuple[I64, I64, I64, bool]:
    """Each member inside the flat: visible elements [start, stop), length of its slot; whether padding is undefined."""
    start, stop, slot = np.zeros_like(lengths), (lengths if reals is None else reals).copy(), lengths.copy()
    undefined = False
    for op in chain.inner:
        match op:
            case ax.Pad(multiple=n, kind=kind):
                slot = -(-slot // n) * n
                undefined |= kind == "undefined"
            case ax.Trim():
                slot = stop - start
            case ax.Cut(splits=splits):
                for split in splits:
                    low, high = _pieces(split, slot, degrees[split.mesh_axis], here[split.mesh_axis])
                    base = start
                    start = np.minimum(base + low, stop)
                    stop = np.minimum(base + high, stop)
                    slot = high - low
    return start, stop, slot, undefined


def _pieces(split: ax.Split, length: I64, ways: int, here: int) -> tuple[I64, I64]:
    if split.kind == "equal":
        if (length % ways).any():
            bad = int(length[length % ways != 0][0])
            raise CutError(f"{bad} does not divide by {split.mesh_axis} = {ways}")
        step = length // ways
        return step * here, step * (here + 1)
    pairs = []
    for n in length.tolist():
        try:
            pairs.append(ax.piece_of(split, n, ways, here))
        except ValueError as error:
            raise CutError(str(error)) from None
    both = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2)
    return both[:, 0], both[:, 1]


def windows_of_chain(
    chain: Chain,
    lengths: I64,
    degrees: dict[str, int],
    places: list[tuple[dict[str, int], int]],
    reals: I64 | None = None,
) -> list[Window]:
    """All stored pieces of one flat, one a coordinate of the axes that cut it. `reals`: lengths without padding at the end."""
    inner_axes = {s.mesh_axis for op in chain.inner if isinstance(op, ax.Cut) for s in op.splits}
    out = []
    memo: Any = None
    for here, rank in places:
        if memo is None or inner_axes:
            start, stop, slot, undefined = slots(chain, lengths, degrees, here, reals)
            begin = np.cumsum(slot) - slot
            memo = (start, stop, begin, undefined, int(slot.sum()))
        start, stop, begin, undefined, total = memo
        # The axis is `length` long; positions low..high of the flat begin it, and padding follows.
        low, high, length = 0, total, total
        for op in chain.outer:
            match op:
                case ax.Trim():
                    some = (stop > start) & (begin < high)
                    high = min(high, int((begin + (stop - start))[some].max(initial=low)))
                    length = max(0, high - low)
                case ax.Pad(multiple=n, kind=kind):
                    tail = -length % n
                    length += tail
                    undefined = undefined or (kind == "undefined" and tail > 0)
                case ax.Cut(splits=splits):
                    for split in splits:
                        try:
                            a, b = ax.piece_of(split, length, degrees[split.mesh_axis], here[split.mesh_axis])
                        except ValueError as error:
                            raise CutError(str(error)) from None
                        low, length = low + a, b - a
                    high = min(high, low + length)
        visible = stop - start
        first = int(np.searchsorted(begin + visible, low, side="right"))
        last = int(np.searchsorted(begin, high, side="left"))
        member = np.arange(first, max(first, last))
        a = np.maximum(low - begin[member], 0)
        b = np.minimum(high - begin[member], visible[member])
        keep = b > a
        member, a, b = member[keep], a[keep], b[keep]
        held = int((b - a).sum())
        out.append(
            Window(
                here,
                rank,
                length,
                length - held,
                undefined,
                member,
                start[member] + a,
                start[member] + b,
                begin[member] + a - low,
            )
        )
    return out


def windows_of_tree(
    axis: ax.Axis,
    members: list[Member],
    layout: Layout,
    degrees: dict[str, int],
    places: list[tuple[dict[str, int], int]],
) -> list[Window]:
    """The same through the tree of cells: any pattern, slower."""
    flat: list[Cells] = [
        Labelled(None, Concat((Range("each", 0, m.real), Padding(m.length - m.real))), i) for i, m in enumerate(members)
    ]
    out = []
    for here, rank in places:
        cells = build(axis, layout.sizes, degrees, here, None, None, flat)
        rows = []
        for piece in pieces_of(cells):
            ((_, low, high, stride),) = piece.digits
            steps = (
                [(low, high, piece.offset)]
                if stride == 1
                else [(v, v + 1, piece.offset + (v - low) * stride) for v in range(low, high)]
            )
            rows += [(piece.tag, a, b, p) for a, b, p in steps]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
        pads = padding_of(cells)
        out.append(
            Window(
                here,
                rank,
                cells.length,
                sum(pads.values()),
                "undefined" in pads,
                table[:, 0],
                table[:, 1],
                table[:, 2],
                table[:, 3],
            )
        )
    return out


def buckets_of(
    line: States, members: list[Member], layout: Layout, degrees: dict[str, int], here: dict[str, int]
) -> list[list[Member]]:
    """Members dealt into flats: a flat closes once what this rank holds of it has `buckets` elements."""
    if line.buckets is None:
        return [members] if members else []
    if line.buckets < 1:
        fail("E210", f"buckets {line.buckets}", at(line.span))
    assert isinstance(line.shape, tuple)
    chain = chain_of(line.shape[0])
    axis = line.shape[0]
    while not isinstance(axis, ax.Flat):
        match axis:
            case (
                ax.Pad(axis=inner)
                | ax.Trim(axis=inner)
                | ax.Cut(axis=inner)
                | ax.Stack(terms=(ax.Term(axes=(inner,)),))
            ):
                axis = inner
            case _:
                break
    lengths = np.array([m.length for m in members], dtype=np.int64)
    if chain is not None:
        slot = slots(chain, lengths, degrees, here, np.array([m.real for m in members], dtype=np.int64))[2]
    else:
        slot = np.array(
            [
                build(
                    axis,
                    layout.sizes,
                    degrees,
                    here,
                    None,
                    None,
                    [Concat((Range("each", 0, m.real), Padding(m.length - m.real)))],
                ).length
                for m in members
            ]
        )
    out: list[list[Member]] = []
    full: list[Member] = []
    held = 0
    for member, n in zip(members, slot.tolist(), strict=True):
        full.append(member)
        held += n
        if held >= line.buckets:
            out.append(full)
            full, held = [], 0
    if full:
        out.append(full)
    return out


def stated_order(
    layout: Layout,
    group: Group,
    members: list[Member],
    stated: Stated | None,
    here: dict[str, int],
) -> list[list[Member]]:
    """The flats that the checkpoint itself states. Raises E211 without a checkpoint, E212 where names or sizes disagree."""
    assert group.stated is not None
    file, key = group.stated
    if stated is None:
        fail(
            "E211",
            f'group `{group.name}` is stated by a checkpoint (from {file} "{key}"), and none is given',
            at(group.span),
            remedy="give the checkpoint, or run `ucpl infer` on it and use the closed layout that it writes",
        )
    by_name = {m.name: m for m in members}
    out = []
    for flat in stated(file, key, here):
        row = []
        for name, shape in flat:
            if name not in by_name:
                fail(
                    "E212",
                    f"the checkpoint states `{name}` in a flat buffer, and the layout has no such tensor",
                    at(group.span),
                    Label(file, where=f"{key}: {name}"),
                )
            member = by_name.pop(name)
            size = 1
            for n in shape:
                size *= n
            if size != member.length:
                fail(
                    "E212",
                    f"`{name}`: the checkpoint says {list(shape)}, the layout {list(member.local.shape)}",
                    at(group.span),
                    Label(file, where=f"{key}: {name}"),
                )
            row.append(member)
        out.append(row)
    return out


def flat_record(
    bucket: int,
    group: str,
    here: dict[str, int],
    members: list[Member],
    chain: Chain | None,
    degrees: dict[str, int],
    cut_axis: str | None,
) -> Flat:
    """What a store is told of a flat: names, local shapes, where each member begins when the flat is whole."""
    lengths = np.array([m.length for m in members], dtype=np.int64)
    slot = lengths.copy()
    if chain is not None:
        for op in chain.inner:
            if isinstance(op, ax.Pad):
                slot = -(-slot // op.multiple) * op.multiple
            elif isinstance(op, ax.Trim):
                slot = lengths.copy()
    begin = np.cumsum(slot) - slot
    numel = int(begin[-1] + lengths[-1]) if len(members) else 0
    return Flat(
        bucket=bucket,
        group=group,
        coordinates=here,
        members=tuple((m.name, m.local.shape) for m in members),
        starts=tuple(begin.tolist()),
        numel=numel,
        cut=cut_axis,
    )
