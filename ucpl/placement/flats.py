"""Flat buffers as intervals of the tensors' local storage.

A buffer is `flat(x)` of the tensors of a group, padded, cut and bucketed. Most lines are a chain: wrappers of `each`
inside `flat`, wrappers of `flat` outside. Chains are computed with arrays, all cuts at once; anything else goes through
the tree of cells. A test checks that both give the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import FlatBuffer
from ucpl.layout import Group, Layout, States
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_name
from ucpl.layout.scope import at
from ucpl.placement.bundles import BundleRows
from ucpl.placement.cells import Cells, Concat, DimRange, Labelled, Padding, build, padding_of, pieces_of
from ucpl.placement.entries import Choices, EntryPlacer, LocalBoxes
from ucpl.records import frozen
from ucpl.tables import I64, Bools, Table, column, each, within

Stated = Callable[[str, str, dict[str, int]], list[list[tuple[str, tuple[int, ...]]]]]
Places = list[tuple[dict[str, int], int]]  # coordinates, each with the first rank there


@frozen(eq=False)
class Members(Table):
    """Tensors of a flat in its order.

    For each: an entry, a choice of its indices, and its length on these ranks.
    """

    entry: I64 = column()
    choice: I64 = column()
    length: I64 = column()  # elements of its local storage
    real: I64 = column()  # ... without padding of its own at the end


@frozen(eq=False)
class Body:
    """Bodies of a flat's members, on the ranks that share it.

    By entry: its stored boxes and its choices.
    """

    locals: dict[int, LocalBoxes]
    choices: dict[int, Choices]
    names: dict[int, tuple[str, ...]]  # stored names, by choice
    bundles: dict[int, BundleRows] = field(factory=dict)  # entries of tensors of different sizes: a row for each choice

    def shape(self, entry: int, choice: int) -> tuple[int, ...]:
        rows = self.bundles.get(entry)
        return self.locals[entry].shape if rows is None else tuple(rows.shape[choice].tolist())

    def name(self, members: Members, i: int) -> str:
        return self.names[int(members.entry[i])][int(members.choice[i])]

    def names_of(self, members: Members) -> list[str]:
        return [self.names[e][c] for e, c in zip(members.entry.tolist(), members.choice.tolist(), strict=True)]

    def is_undefined(self, members: Members) -> bool:
        return any(self.locals[e].undefined for e in each(members.entry) if e in self.locals)

    def is_live(self, members: Members) -> bool:
        return any(self.locals[e].live for e in each(members.entry) if e in self.locals)


@frozen(eq=False)
class Windows(Table):
    """Stored pieces of one flat.

    They are intervals [start, stop) of members' local storage at positions of window `window`. A row is of `count`
    members of a family, which follow each other in it and have the same interval: each is `pace` positions further.
    """

    window: I64 = column()
    member: I64 = column()  # the first one
    start: I64 = column()
    stop: I64 = column()
    position: I64 = column()
    count: I64 = column()
    pace: I64 = column()

    @classmethod
    def singly(cls, window: I64, member: I64, start: I64, stop: I64, position: I64) -> Windows:
        """A row for each member."""
        return cls(window, member, start, stop, position, np.ones_like(window), np.zeros_like(window))


@frozen(eq=False)
class Alike:
    """Members of families in a flat.

    entry: of each, or -1. choice: its place in the family.
    """

    entry: I64
    choice: I64

    def folded(self, rows: Windows) -> Windows:
        """One row for members that are cut alike at even distances."""
        if not len(rows):
            return rows
        entry, choice = self.entry[rows.member], self.choice[rows.member]
        order = np.lexsort((choice, rows.stop, rows.start, entry, rows.window))
        r, entry, choice = rows.take(order), entry[order], choice[order]
        step = np.diff(r.position, prepend=0)
        follows = np.zeros(len(r), dtype=np.bool_)
        follows[1:] = (entry[1:] == entry[:-1]) & (entry[1:] >= 0) & (choice[1:] == choice[:-1] + 1)
        for of in (r.window, r.start, r.stop):
            follows[1:] &= of[1:] == of[:-1]
        follows &= step >= r.stop - r.start
        # The second row of a run gives its pace. Of steps that each differ from the one before, every other one ends a run.
        differs = follows.copy()
        differs[1:] &= follows[:-1] & (step[1:] != step[:-1])
        differs[0] = False
        rank = np.arange(len(r))
        last_alike = np.maximum.accumulate(np.where(differs, -1, rank))
        starts = np.flatnonzero(~follows | (differs & ((rank - last_alike) % 2 == 1)))
        count = np.diff(starts, append=len(r))
        head = r.take(starts)
        pace = np.where(count > 1, step[np.minimum(starts + 1, len(r) - 1)], 0)
        return head.replace(count=count, pace=pace).sort(head.window, head.position)


@frozen(eq=False)
class BufferWindows:
    """One flat, cut: a window a coordinate.

    `rows` are in order of windows and positions.
    """

    places: Places
    length: I64  # (W,)
    undefined: Bools  # (W,) whether padding of the flat itself may hold anything
    rows: Windows
    padding: I64 = field()  # (W,)


def real_length(local: LocalBoxes) -> int:
    """Length of a local tensor without its own padding at the end."""
    if not local.padding:
        return local.numel
    last = local.offset + ((local.high - local.low - 1).clip(0) * local.stride).sum(axis=1)
    return int(last.max(initial=-1)) + 1


def module_order(
    placers: Sequence[EntryPlacer], which: Sequence[int], choices: dict[int, Choices]
) -> list[tuple[int, int]]:
    """(entry, choice) in the order of model.parameters().

    Entries that share the first k indices are one loop body.
    """

    def walk(run: Sequence[int], depth: int, fixed: dict[int, list[int]]) -> Iterable[tuple[int, int]]:
        for lead, same in groupby(run, key=lambda e: placers[e].entry.indices[depth : depth + 1]):
            body = list(same)
            if not lead:
                for e in body:
                    for choice in fixed[e]:
                        yield e, choice
                continue
            name = next(iter(ax.dims_of(lead[0])), "")
            seen: dict[tuple[int, int], None] = {}
            buckets: dict[int, dict[tuple[int, int], list[int]]] = {}
            for e in body:
                known = choices[e].variables
                per: dict[tuple[int, int], list[int]] = {}
                if fixed[e]:
                    # Place of the choice in the index's own order, and its value.
                    columns = (np.asarray(known[index]).tolist() for index in (f"{name}.local", name))
                    of_choice = list(zip(*columns, strict=True))
                    for choice in fixed[e]:
                        per.setdefault(of_choice[choice], []).append(choice)
                        seen.setdefault(of_choice[choice])
                buckets[e] = per
            # The values in the order of the index itself, which all entries of the body share.
            for key in sorted(seen, key=lambda k: k[0]):
                yield from walk(body, depth + 1, {e: buckets[e].get(key, []) for e in body})

    return list(walk(which, 0, {e: list(range(len(choices[e]))) for e in which}))


def listed_order(placers: Sequence[EntryPlacer], which: Sequence[int], names: Iterable[str]) -> I64:
    """(entry, choice) in the order of the tensors' names."""
    order = {name: n for n, name in enumerate(names)}
    rows = [(order[name], e, c) for e in which for c, name in enumerate(placers[e].names)]
    return np.array(sorted(rows), dtype=np.int64).reshape(len(rows), 3)[:, 1:]


def present(layout: Layout, group: Group | None, placers: Sequence[EntryPlacer], here: dict[str, int]) -> list[int]:
    """Entries of a group's tensors on ranks `here`, in the group's order."""
    found = [e for e, p in enumerate(placers) if p.is_here(here)]
    if group is not None and group.members is not None:
        by_path: dict[str, list[int]] = {}
        for e in found:
            by_path.setdefault(placers[e].names[0], []).append(e)
        named = (list(one) for _, one in groupby(group.members, key=whole_name))  # layers of all sizes: line by line
        found = [e for one in named for e in sorted(e for m in one for e in by_path.get(m, ()))]
    elif group is not None and group.without is not None:
        out = {m for g in group.without for m in (layout.groups[g].members or ())}
        found = [e for e in found if placers[e].names[0] not in out and is_trained(layout, placers[e])]
    elif group is None or group.stated is not None:
        found = [e for e in found if is_trained(layout, placers[e])]
    return found


def ordered(placers: Sequence[EntryPlacer], which: list[int], sequence: I64, body: Body) -> Members:
    """Members of a group in the order of the flat.

    `dealt` and `reversed` come later. `sequence`: (M, 2), entry and choice.
    """
    own = [e for e in which if placers[e].entry.alias is None]  # a second name of a parameter is no member
    homes = Counter(path for e in own for path in placers[e].entry.paths)
    sizes = np.zeros((max(which, default=0) + 1, 2), dtype=np.int64)
    for e in own:
        if e in body.locals:
            sizes[e] = body.locals[e].numel, real_length(body.locals[e])
    entry, choice = sequence[:, 0], sequence[:, 1]
    size, real = sizes[entry].T
    for e in own:
        if e in body.bundles:
            mine = entry == e
            size[mine] = real[mine] = body.bundles[e].shape.prod(axis=1)[choice[mine]]
    keep = size > 0
    if any(n > 1 for n in homes.values()):
        held: dict[str, list[tuple[I64, I64]]] = {}  # boxes of tensors that several entries store
        for i, (e, c) in enumerate(zip(entry.tolist(), choice.tolist(), strict=True)):
            entry_ = placers[e].entry
            paths = entry_.bundle[c : c + 1] or entry_.targets.values()
            if keep[i] and any(homes[path] > 1 for path in paths):
                keep[i] = _is_new(_boxes(placers[e], body, e, c), held)
    return Members(entry[keep], choice[keep], size[keep], real[keep])


def _boxes(placer: EntryPlacer, body: Body, entry: int, choice: int) -> list[tuple[str, I64, I64]]:
    """Boxes of a member, each with its tensor."""
    rows = body.bundles.get(entry)
    if rows is not None:
        return [(rows.names[choice], rows.low[choice], rows.high[choice])]
    local, choices = body.locals[entry], body.choices[entry]
    return [placer.box(local, row, choices, choice) for row in range(len(local.offset))]


def _is_new(boxes: list[tuple[str, I64, I64]], held: dict[str, list[tuple[I64, I64]]]) -> bool:
    """True if no member so far holds one of these elements.

    A second home on this rank is the same parameter.
    """
    if any((a < high).all() and (low < b).all() for path, low, high in boxes for a, b in held.get(path, ())):
        return False
    for path, low, high in boxes:
        held.setdefault(path, []).append((low, high))
    return True


def is_trained(layout: Layout, placer: EntryPlacer) -> bool:
    return all(layout.placed[t].kind == "parameter" for t in placer.entry.targets.values())


def dealt(members: Members, group: Group | None) -> Members:
    if group is None:
        return members
    if group.is_reversed:
        return members.take(slice(None, None, -1))
    if group.dealt > 1:
        return members.take(np.concatenate([np.arange(i, len(members), group.dealt) for i in range(group.dealt)]))
    return members


# ---- chains ----------------------------------------------------------------------------------------------------------


@frozen
class Chain:
    """Wrappers in their order: on each member, then on the complete flat."""

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
    """Members inside the flat.

    Visible elements [start, stop), length of the slot, and a mask of undefined padding.
    """
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
            raise ax.UnevenCut(f"{bad} does not divide by {split.mesh_axis} = {ways}", split, bad, ways)
        step = length // ways
        return step * here, step * (here + 1)
    pairs = [ax.piece_of(split, n, ways, here) for n in length.tolist()]
    both = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2)
    return both[:, 0], both[:, 1]


def windows_of_chain(
    chain: Chain,
    lengths: I64,
    degrees: dict[str, int],
    places: Places,
    reals: I64 | None = None,
    alike: Alike | None = None,
) -> BufferWindows:
    """Stored pieces of one flat, one a coordinate of its cutting axes.

    `reals`: lengths without padding at the end. `alike`: members of families; several of them can be one row.
    """

    def cut(here: dict[str, int], of: Places) -> BufferWindows:
        made = _outer_windows(chain, *slots(chain, lengths, degrees, here, reals), degrees, of)
        return made if alike is None else evolve(made, rows=alike.folded(made.rows))

    if any(isinstance(op, ax.Cut) for op in chain.inner):  # the members' own slots differ from rank to rank
        return _side_by_side([cut(here, [(here, rank)]) for here, rank in places])
    return cut(places[0][0] if places else {}, places)


def _outer_windows(
    chain: Chain, start: I64, stop: I64, slot: I64, undefined: bool, degrees: dict[str, int], places: Places
) -> BufferWindows:
    """Windows of a flat with given members.

    Visible elements [start, stop) of each are given, one slot after the other.
    """
    begin = np.cumsum(slot) - slot
    visible = stop - start
    low, high, length, loose = (np.empty(len(places), dtype=np.int64) for _ in range(4))
    first_cut = next((i for i, op in enumerate(chain.outer) if isinstance(op, ax.Cut)), len(chain.outer))
    whole = (0, int(slot.sum()), int(slot.sum()), undefined)
    for op in chain.outer[:first_cut]:  # the same for all
        whole = _wrapped(op, whole, begin, visible, degrees, {})
    for i, (here, _) in enumerate(places):
        now = whole
        for op in chain.outer[first_cut:]:
            now = _wrapped(op, now, begin, visible, degrees, here)
        low[i], high[i], length[i], loose[i] = now
    first = np.searchsorted(begin + visible, low, side="right")
    last = np.searchsorted(begin, high, side="left")
    count = np.maximum(last - first, 0)
    window = np.repeat(np.arange(len(places)), count)
    member = within(count) + first[window]
    a = np.maximum(low[window] - begin[member], 0)
    b = np.minimum(high[window] - begin[member], visible[member])
    keep = b > a
    window, member, a, b = window[keep], member[keep], a[keep], b[keep]
    held = np.bincount(window, weights=b - a, minlength=len(places)).astype(np.int64)
    rows = Windows.singly(window, member, start[member] + a, start[member] + b, begin[member] + a - low[window])
    return BufferWindows(places, length, loose.astype(np.bool_), rows, length - held)


def _wrapped(
    op: ax.Axis,
    now: tuple[int, int, int, bool],
    begin: I64,
    visible: I64,
    degrees: dict[str, int],
    here: dict[str, int],
) -> tuple[int, int, int, bool]:
    """One wrapper of a flat.

    The axis is `length` long; positions low..high of the flat begin it, and padding follows.
    """
    low, high, length, undefined = now
    match op:
        case ax.Trim():
            some = (visible > 0) & (begin < high)
            high = min(high, int((begin + visible)[some].max(initial=low)))
            length = max(0, high - low)
        case ax.Pad(multiple=n, kind=kind):
            tail = -length % n
            length += tail
            undefined = undefined or (kind == "undefined" and tail > 0)
        case ax.Cut(splits=splits):
            for split in splits:
                a, b = ax.piece_of(split, length, degrees[split.mesh_axis], here[split.mesh_axis])
                low, length = low + a, b - a
            high = min(high, low + length)
    return low, high, length, undefined


def _side_by_side(cuts: list[BufferWindows]) -> BufferWindows:
    rows = [c.rows.replace(window=c.rows.window + i) for i, c in enumerate(cuts)]
    return BufferWindows(
        [place for c in cuts for place in c.places],
        np.concatenate([c.length for c in cuts]) if cuts else np.zeros(0, dtype=np.int64),
        np.concatenate([c.undefined for c in cuts]) if cuts else np.zeros(0, dtype=np.bool_),
        Windows.concat(rows),
        np.concatenate([c.padding for c in cuts]) if cuts else np.zeros(0, dtype=np.int64),
    )


def windows_of_tree(
    axis: ax.Axis, members: Members, layout: Layout, degrees: dict[str, int], places: Places
) -> BufferWindows:
    """The same through the tree of cells: any pattern, slower."""
    flat: list[Cells] = [
        Labelled(None, Concat((DimRange("each", 0, real), Padding(length - real))), i)
        for i, (length, real) in enumerate(zip(members.length.tolist(), members.real.tolist(), strict=True))
    ]
    cuts = []
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
            rows += [(0, piece.tag, a, b, p) for a, b, p in steps]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
        pads = padding_of(cells)
        cuts.append(
            BufferWindows(
                [(here, rank)],
                np.array([cells.length], dtype=np.int64),
                np.array(["undefined" in pads], dtype=np.bool_),
                Windows.singly(*(table[:, i] for i in range(5))),
                np.array([sum(pads.values())], dtype=np.int64),
            )
        )
    return _side_by_side(cuts)


def buckets_of(
    line: States, members: Members, layout: Layout, degrees: dict[str, int], here: dict[str, int]
) -> list[Members]:
    """Members dealt into flats.

    A flat closes once this rank holds `buckets` elements of it.
    """
    if line.buckets is None:
        return [members] if len(members) else []
    if line.buckets < 1:
        fail("E210", f"buckets {line.buckets}", at(line.span))
    assert isinstance(line.shape, tuple)
    chain = chain_of(line.shape[0])
    if chain is not None:
        slot = slots(chain, members.length, degrees, here, members.real)[2].tolist()
    else:
        slot = _slots_of_tree(line.shape[0], members, layout, degrees, here)
    out: list[Members] = []
    first, held = 0, 0
    for i, n in enumerate(slot):
        held += n
        if held >= line.buckets:
            out.append(members.take(slice(first, i + 1)))
            first, held = i + 1, 0
    if first < len(members):
        out.append(members.take(slice(first, None)))
    return out


def _slots_of_tree(
    axis: ax.Axis, members: Members, layout: Layout, degrees: dict[str, int], here: dict[str, int]
) -> list[int]:
    """Length of each member's slot inside a flat that is no chain."""
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
    return [
        build(
            axis, layout.sizes, degrees, here, None, None, [Concat((DimRange("each", 0, real), Padding(length - real)))]
        ).length
        for length, real in zip(members.length.tolist(), members.real.tolist(), strict=True)
    ]


def stated_order(
    group: Group, members: Members, body: Body, stated: Stated | None, here: dict[str, int]
) -> list[Members]:
    """The flats that the checkpoint itself lists.

    Raises E211 without a checkpoint, E212 if names or sizes disagree.
    """
    assert group.stated is not None
    file, key = group.stated
    if stated is None:
        fail(
            "E211",
            f'group `{group.name}` is stated by a checkpoint (from {file} "{key}"), and none is given',
            at(group.span),
            remedy="give the checkpoint, or run `ucpl infer` on it and use the closed layout that it writes",
        )
    by_name = {name: i for i, name in enumerate(body.names_of(members))}
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
            if size != members.length[member]:
                fail(
                    "E212",
                    f"`{name}`: the checkpoint says {list(shape)}, the layout"
                    f" {list(body.shape(int(members.entry[member]), int(members.choice[member])))}",
                    at(group.span),
                    Label(file, where=f"{key}: {name}"),
                )
            row.append(member)
        out.append(members.take(np.array(row, dtype=np.int64)))
    return out


def flat_record(flat: FlatBuffer, members: Members, chain: Chain | None) -> FlatBuffer:
    """Record of an uncut flat for a store: each member's begin."""
    slot = members.length.copy()
    if chain is not None:
        for op in chain.inner:
            if isinstance(op, ax.Pad):
                slot = -(-slot // op.multiple) * op.multiple
            elif isinstance(op, ax.Trim):
                slot = members.length.copy()
    begin = np.cumsum(slot) - slot
    numel = int(begin[-1] + members.length[-1]) if len(members) else 0
    return evolve(flat, starts=tuple(begin.tolist()), numel=numel)
