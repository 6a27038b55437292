"""Windows of flat buffers as boxes of logical tensors: intervals of members' local storage, clipped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ucpl.columns import I64, clip, each, numbered, within
from ucpl.layout import Storing
from ucpl.records import frozen
from ucpl.regions import flats as fl
from ucpl.regions.entries import EntryPlacer
from ucpl.regions.placement import Pieces
from ucpl.regions.site import Site

__all__ = ["FlatBoxes", "FlatCut"]

_ROW_BITS = 32
FlatCut = tuple[
    fl.Members, fl.Body, fl.Cut, int
]  # members, what they are made of, windows, the number of the first window


@frozen(eq=False)
class _Base:
    start: int  # its first row in the table of all
    table: Pieces
    boxes: I64  # (members,) how many of them each member has
    first: I64  # (members,) and the first of those, in the table of all

    def lies_as(self, other: _Base) -> bool:
        """Whether the boxes are of the same sizes at the same places of local storage, whatever elements they are."""
        a, b = self.table, other.table
        return self is other or (
            np.array_equal(self.boxes, other.boxes)
            and np.array_equal(a.offset, b.offset)
            and np.array_equal(a.stride, b.stride)
            and np.array_equal(a.high - a.low, b.high - b.low)
        )


def _alike(cuts: Sequence[FlatCut], base: Sequence[_Base]) -> I64:
    """Of each cut, the first that has the same windows of members that lie as its own do."""
    first: dict[tuple[int, int], list[int]] = {}
    out = []
    for i, (_, _, cut, _) in enumerate(cuts):
        known = first.setdefault((id(cut.rows), len(base[i].table)), [])
        found = next((j for j in known if base[i].lies_as(base[j])), i)
        if found == i:
            known.append(i)
        out.append(found)
    return np.array(out, dtype=np.int64)


@frozen(eq=False)
class FlatBoxes:
    site: Site
    storing: Storing  # of the state line
    cut: tuple[str, ...]  # mesh axes that cut the flat
    involved: tuple[EntryPlacer, ...]

    def clipped(self, cuts: Sequence[FlatCut]) -> Pieces:
        """Intervals of members' local storage as boxes of logical tensors.

        Flats whose members lie alike in storage (ranks of tensor parallelism hold other elements in the same places) and that
        are cut alike are clipped once.
        """
        if not cuts:
            return Pieces.empty(self.site.k)
        base, table = self.bases(cuts)
        like = _alike(cuts, base)
        first, which = np.unique(like, return_inverse=True)  # the cuts that are clipped, and of each cut which of them
        windows = fl.Windows.concat(
            [r.replace(window=r.window + n) for r, n in ((cuts[i][2].rows, cuts[i][3]) for i in first)]
        )
        of_row = np.concatenate([base[i].boxes[cuts[i][2].rows.member] for i in first])
        first_row = np.concatenate([base[i].first[cuts[i][2].rows.member] for i in first])
        interval = np.repeat(np.arange(len(first_row)), of_row)
        source = first_row[interval] + within(of_row)
        picked, low, high = clip(
            table.offset[source],
            table.high[source] - table.low[source],
            table.stride[source],
            windows.start[interval],
            windows.stop[interval],
        )
        row, at_interval = source[picked], interval[picked]
        local = table.offset[row] + (low * table.stride[row]).sum(axis=1)
        order = np.lexsort((local, at_interval))
        row, at_interval, local, low, high = row[order], at_interval[order], local[order], low[order], high[order]
        # Each cut has the boxes of the one that it is like, in its own rows of the table and in its own windows.
        cut_of_row = np.repeat(np.arange(len(first)), [len(cuts[i][2].rows) for i in first])
        boxes = np.bincount(cut_of_row[at_interval], minlength=len(first))
        taken = np.repeat((np.cumsum(boxes) - boxes)[which], boxes[which]) + within(boxes[which])
        place = np.array([(b.start, cut[3]) for b, cut in zip(base, cuts, strict=True)])
        shift = np.repeat(place - place[like], boxes[which], axis=0)
        at_interval, local = at_interval[taken], local[taken]
        cut_ = table.take(row[taken] + shift[:, 0])
        return cut_.replace(
            home=windows.window[at_interval] + shift[:, 1],
            low=cut_.low + low[taken],
            high=cut_.low + high[taken],
            offset=local - windows.start[at_interval] + windows.position[at_interval],
        )

    def bases(self, cuts: Sequence[FlatCut]) -> tuple[list[_Base], Pieces]:
        """Boxes of the members of each cut, each as long as it is, and all of them in one table."""
        done: dict[int, _Base] = {}
        total = 0
        for members, body, _, _ in cuts:
            if id(members) not in done:
                table, boxes = self.member_boxes(members, body)
                done[id(members)] = _Base(total, table, boxes, np.cumsum(boxes) - boxes + total)
                total += len(table)
        return [done[id(members)] for members, *_ in cuts], Pieces.concat([b.table for b in done.values()], self.site.k)

    def member_boxes(self, members: fl.Members, body: fl.Body) -> tuple[Pieces, I64]:
        """Boxes of all members of a flat in their order, and how many each has."""
        tables, owner = [], []
        count = np.zeros(len(members), dtype=np.int64)
        for e in each(members.entry):
            (which,) = (members.entry == e).nonzero()
            placer, local = self.site.placers[e], body.locals[e]
            rows = len(local.offset)
            if not rows:
                continue
            low, high = (np.concatenate([ends[None]] * len(which)) for ends in (local.low, local.high))
            paths = [placer.entry.targets[label] for label in local.label_of]
            for path in dict.fromkeys(paths):
                mine = [i for i, p in enumerate(paths) if p == path]
                dims, positions = placer.positions(path, body.choices[e])
                for n, dim in enumerate(dims):
                    at_ = positions[members.choice[which], n][:, None]
                    low[:, mine, dim], high[:, mine, dim] = at_, at_ + 1
            k = self.site.k
            every = len(which) * rows
            # Whose member a box is, and which row of it, where that tells what is said of it: `trusted` puts that here.
            apart = bool(self.site.partly_loose(self.said(placer)[0], placer))
            whose = (e << _ROW_BITS) + (np.arange(rows, dtype=np.int64) if apart else np.zeros(rows, dtype=np.int64))
            tables.append(
                Pieces(
                    np.array([self.site.number[p] for p in paths] * len(which), dtype=np.int64),
                    np.zeros(every, dtype=np.int64),
                    low.reshape(every, k),
                    high.reshape(every, k),
                    np.concatenate([local.stride] * len(which)),
                    np.zeros((every, k), dtype=np.int64),
                    np.concatenate([local.offset] * len(which)),
                    np.concatenate([whose] * len(which)),
                    np.zeros(every, dtype=np.int64),
                )
            )
            owner.append(np.repeat(which, rows))
            count[which] = rows
        table = Pieces.concat(tables, self.site.k)
        if not owner:
            return table, count
        return table.take(np.argsort(np.concatenate(owner), kind="stable")), count

    def trusted(self, pieces: Pieces, rank: Sequence[int]) -> Pieces:
        """Pieces with what holds of copies at each home's rank: as the tensor's own entry says, or else the line.

        Until then, `policy` is the number of that entry, and of a row of it.
        """
        if not any(s.speaks_of_copies for s in (self.storing, *(p.entry.storing for p in self.involved))):
            return pieces.replace(policy=np.zeros_like(pieces.policy))
        at_rank = np.array(rank, dtype=np.int64)[pieces.home]
        _, first, which = np.unique(numbered([pieces.policy, at_rank]), return_index=True, return_inverse=True)
        policy, over = [], []
        for row in first.tolist():
            placer = self.site.placers[int(pieces.policy[row]) >> _ROW_BITS]
            storing, cut = self.said(placer)
            local = placer.local({a: int(self.site.ranks.columns[a][at_rank[row]]) for a in placer.shape_axes})
            policies = self.site.policies(storing, cut, placer, int(at_rank[row]), local)
            policy.append(int(policies[int(pieces.policy[row]) & ((1 << _ROW_BITS) - 1)]) if len(policies) else 0)
            over.append(self.site.over(storing))
        return pieces.replace(
            policy=np.array(policy, dtype=np.int64)[which], over=np.array(over, dtype=np.int64)[which]
        )

    def said(self, placer: EntryPlacer) -> tuple[Storing, frozenset[str]]:
        """What speaks of a member's copies, and the axes along which no two ranks hold the same of it."""
        own = placer.entry.storing
        cut = frozenset(placer.axes) - placer.partly | frozenset(self.cut)
        return (own if own.speaks_of_copies else self.storing), cut
