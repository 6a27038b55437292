"""Windows of flat buffers as boxes of logical tensors: intervals of members' local storage, clipped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from ucpl.columns import I64, clip
from ucpl.layout import Storing
from ucpl.regions import flats as fl
from ucpl.regions.entries import EntryPlacer
from ucpl.regions.placement import POLICIES, Pieces
from ucpl.regions.site import Site

__all__ = ["FlatBoxes", "FlatCut"]

FlatCut = tuple[
    fl.Members, fl.Body, fl.Cut, int
]  # members, what they are made of, windows, the number of the first window


@frozen(eq=False)
class FlatBoxes:
    site: Site
    storing: Storing  # of the state line
    cut: tuple[str, ...]  # mesh axes that cut the flat
    involved: tuple[EntryPlacer, ...]

    def clipped(self, cuts: Sequence[FlatCut]) -> Pieces:
        """Intervals of members' local storage as boxes of logical tensors."""
        base: list[Pieces] = []  # boxes of members, each as long as it is
        begin: list[I64] = []  # of each interval: its first row in the base, how many, and where it lies
        count: list[I64] = []
        rows: list[fl.Windows] = []
        done: dict[int, tuple[I64, I64, fl.Members]] = {}
        total = 0
        for members, body, cut, first in cuts:
            if id(members) not in done:
                table, of_member = self.member_boxes(members, body)
                starts = np.cumsum(of_member) - of_member + total
                done[id(members)] = (starts, of_member, members)
                base.append(table)
                total += len(table)
            starts, of_member, _ = done[id(members)]
            begin.append(starts[cut.rows.member])
            count.append(of_member[cut.rows.member])
            rows.append(cut.rows.replace(window=cut.rows.window + first))
        if not base:
            return Pieces.empty(self.site.k)
        table, windows = Pieces.concat(base, self.site.k), fl.Windows.concat(rows)
        first_row, of_row = np.concatenate(begin), np.concatenate(count)
        interval = np.repeat(np.arange(len(first_row)), of_row)
        source = first_row[interval] + np.arange(len(interval)) - np.repeat(np.cumsum(of_row) - of_row, of_row)
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
        cut_ = table.take(row)
        return cut_.replace(
            home=windows.window[at_interval],
            low=cut_.low + low,
            high=cut_.low + high,
            offset=local - windows.start[at_interval] + windows.position[at_interval],
        )

    def member_boxes(self, members: fl.Members, body: fl.Body) -> tuple[Pieces, I64]:
        """Boxes of all members of a flat in their order, and how many each has."""
        tables, owner = [], []
        count = np.zeros(len(members), dtype=np.int64)
        for e in np.unique(members.entry).tolist():
            which = np.flatnonzero(members.entry == e)
            placer, local = self.site.placers[e], body.locals[e]
            rows = len(local.offset)
            if not rows:
                continue
            policy = placer.entry.storing.policy
            low, high = np.tile(local.low, (len(which), 1, 1)), np.tile(local.high, (len(which), 1, 1))
            paths = [placer.entry.targets[label] for label in local.label_of]
            for path in dict.fromkeys(paths):
                mine = [i for i, p in enumerate(paths) if p == path]
                dims, positions = placer.positions(path, body.choices[e])
                for n, dim in enumerate(dims):
                    at_ = positions[members.choice[which], n][:, None]
                    low[:, mine, dim], high[:, mine, dim] = at_, at_ + 1
            k = self.site.k
            every = len(which) * rows
            tables.append(
                Pieces(
                    np.tile(np.array([self.site.number[p] for p in paths], dtype=np.int64), len(which)),
                    np.zeros(every, dtype=np.int64),
                    low.reshape(every, k),
                    high.reshape(every, k),
                    np.tile(local.stride, (len(which), 1)),
                    np.zeros((every, k), dtype=np.int64),
                    np.tile(local.offset, len(which)),
                    np.full(every, POLICIES.index(policy if policy != "same" else self.storing.policy), dtype=np.int64),
                )
            )
            owner.append(np.repeat(which, rows))
            count[which] = rows
        table = Pieces.concat(tables, self.site.k)
        if not owner:
            return table, count
        return table.take(np.argsort(np.concatenate(owner), kind="stable")), count

    def reduced(self, pieces: Pieces, rank: Sequence[int]) -> Pieces:
        """Pieces with the policy that holds at each home's rank."""
        rows = np.flatnonzero((pieces.policy == POLICIES.index("mean")) | (pieces.policy == POLICIES.index("sum")))
        if not len(rows):
            return pieces
        said = {
            self.site.number[path]: (p.entry.storing, p.axes)
            for p in self.involved
            if p.entry.storing.policy != "same"
            for path in p.entry.targets.values()
        }
        policy = pieces.policy.copy()
        for row in rows.tolist():
            storing, own = said.get(int(pieces.tensor[row]), (self.storing, ()))
            kept = self.site.policy_at(storing, (*own, *self.cut), rank[int(pieces.home[row])])
            policy[row] = POLICIES.index(kept)
        return pieces.replace(policy=policy)
