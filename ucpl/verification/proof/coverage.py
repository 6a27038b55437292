"""Prove a finished graph from the placements and the moves alone.

No code that made the moves is used. A move takes positions of one stored tensor to positions of another. Each side's
placement names the elements at these positions: both
sides of every move are turned back into boxes of logical tensors, and must be the same boxes at the same places of the
move.
Then the filled elements are compared with those that the target keeps, and the read elements with those of the source.
No
check uses a count: a swap, or a hole and an overlap of the same size, keeps every count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.extents import key_text
from ucpl.graph import Graph
from ucpl.layout.layout import Policy
from ucpl.placement import element_name
from ucpl.tables import once
from ucpl.verification.proof.fills import fill_boxes, prove_fills
from ucpl.verification.proof.intervals import (
    I64,
    Boxes,
    MovedBoxes,
    ProofMoves,
    are_exact,
    box_of,
    distinct_boxes,
    first_left,
    halved,
    in_dims,
    joined_boxes,
    ordered,
    pairs_in,
    positions_of,
)
from ucpl.verification.proof.live_rows import check_live_rows
from ucpl.verification.proof.moves import AT_ONCE, ONE_BY_ONE, boxes_of, element_boxes
from ucpl.verification.proof.reductions import brought, check_parts, check_replicas, places, same_places, touching
from ucpl.verification.proof.scales import prove_scales, scales_among
from ucpl.verification.proof.tables import ProofTables


def prove(graph: Graph) -> None:
    """Prove that moves bring every element to its place exactly once.

    Raises UcplError, naming the first element: E340 for one that a move brings to another's place; E341 for one that is filled
    twice, E342 for one that nothing fills; E343 for one of the source that is neither used nor checked nor left out by name;
    E344 for a move from or to a place without an element, E345 for one that is in a tensor twice;
    E346 for one that is put together in another way than its layout says, or without one of its parts;
    E347 for one that is not scaled once by the scale of its block;
    E348 for a live row that both sides have and that stays behind;
    E349 for one that is filled although the source has it, or with a number that no line says.
    """
    check_live_rows(graph)
    _Proof(graph).run()


class _Proof:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tables = ProofTables(graph)

    def run(self) -> None:
        moves = self.tables.moves
        source, target = boxes_of(0, self.tables.source, moves), boxes_of(1, self.tables.target, moves)
        for boxes, side in ((source, 0), (target, 1)):
            held = np.bincount(boxes.move, weights=boxes.volume, minlength=len(moves.state)).astype(np.int64)
            bad = np.flatnonzero(held != moves.numel)
            if len(bad):
                self.outside(int(bad[0]), side)
        self.same_elements(source, target)
        parts = brought(self.tables, source, target)
        where = places(parts, self.tables.k)
        fills = fill_boxes(self.tables)
        read, filled = source.held(), target.held()
        del source, target  # the largest tables there are
        self.filled(filled, where, fills.held())
        self.whole()
        prove_fills(self.tables, fills)
        self.used(read)
        check_replicas(self.tables, read)
        check_parts(self.tables, parts, where)
        prove_scales(self.tables)

    # ---- the three proofs ------------------------------------------------------------------------------------------------

    def same_elements(self, source: Boxes, target: Boxes) -> None:
        """Check that both sides of each move have the same elements."""
        bad = np.flatnonzero(self.agreed(source, target, self.tables.moves) != self.tables.moves.numel)
        if len(bad):
            self.misplaced(int(bad[0]))

    def agreed(self, source: Boxes, target: Boxes, moves: ProofMoves) -> I64:
        """The number of each move's elements that both sides share."""
        i, j = touching(source, target)
        out = np.zeros(len(moves.state))
        for first in range(0, len(i), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            s, t = source.take(i[some]), target.take(j[some])
            out += np.bincount(s.move, weights=self.shared(s, t, moves), minlength=len(out))
        return out.astype(np.int64)

    def shared(self, s: Boxes, t: Boxes, moves: ProofMoves) -> I64:
        """The number of equal elements in pairs of a move's boxes."""
        low, high = np.maximum(s.low, t.low), np.minimum(s.high, t.high)
        same = same_places(s, t, low, high) & (self.tables.source.tensor[s.piece] == self.tables.target.tensor[t.piece])
        same &= self.tables.is_origin(self.tables.source.state[s.piece], moves.state[s.move])
        same &= self.tables.target.state[t.piece] == moves.state[t.move]
        volume: I64 = np.where(same, (high - low).clip(0).prod(axis=1), 0)
        return volume

    def filled(self, target: MovedBoxes, together: MovedBoxes, fills: MovedBoxes) -> None:
        """Check that every element of every stored tensor is filled once.

        It is moved or filled.

        `together`: the places where values are combined, each once.
        """
        pieces = self.tables.target
        both = target
        if not (self.tables.moves.kind == "copy").all():
            copies = target.take((self.tables.moves.kind == "copy")[target.move])
            both = joined_boxes([copies, together])
        if len(fills):
            both = joined_boxes([both, fills])
        i, j = pairs_in(both)
        if len(i):
            index = np.maximum(both.low[i[0]], both.low[j[0]])
            self.blame("E341", "is filled twice", 1, int(both.piece[i[0]]), index)
        low, high = box_of(pieces)
        held = np.bincount(both.piece, weights=both.volume, minlength=len(pieces)).astype(np.int64)
        bad = np.flatnonzero(held != (high - low).prod(axis=1))
        if len(bad):
            piece = int(bad[0])
            mine = np.flatnonzero(both.piece == piece)
            index = first_left(low[piece], high[piece], both.low[mine], both.high[mine])
            assert index is not None
            self.blame("E342", "is filled by nothing", 1, piece, index)

    def whole(self) -> None:
        """Check that the target's pieces cover each tensor that it keeps."""
        pieces, layout, states = self.tables.target, self.graph.target.layout, self.tables.states
        low, high = box_of(pieces)
        group = pieces.tensor * len(states) + pieces.state
        order, fresh = ordered([group, *low.T, *high.T])
        group, low, high = (a.take(order[fresh], axis=0) for a in (group, low, high))
        values, group = np.unique(group, return_inverse=True)
        kept = [(self.graph.target.tensors[v // len(states)], states[v % len(states)]) for v in values.tolist()]
        counts = np.ones((len(kept), self.tables.k), dtype=np.int64)
        for g, (path, state) in enumerate(kept):
            own = layout.placed[path].of(state).counts
            counts[g, : len(own)] = own
        for g in np.flatnonzero(~are_exact(group, counts, low, high)).tolist():
            rows, (path, state) = group == g, kept[g]
            index = first_left(np.zeros(self.tables.k, dtype=np.int64), counts[g], low[rows], high[rows])
            if index is not None:
                fail(
                    "E342",
                    f"{state} of {element_name(layout, path, tuple(index.tolist()))} is nowhere in the target",
                    Label(layout.call, "target", where=f"{path}/{state}"),
                )

    def used(self, source: MovedBoxes) -> None:
        """Check that every element of every piece of the source is used.

        It moves, is checked, has a state that is left out, or is a copy that is not needed. For leading pieces under
        `any`, elements that another home provides are exempt, but not their equals.
        """
        pieces, graph = self.tables.source, self.graph
        boxes = distinct_boxes(source)
        i, _ = pairs_in(boxes)
        crossed = once(boxes.piece[i]) if len(i) else np.zeros(0, dtype=np.int64)
        low, high = box_of(pieces)
        held = np.bincount(boxes.piece, weights=boxes.volume, minlength=len(pieces)).astype(np.int64)
        suspect = held != (high - low).prod(axis=1)
        suspect[crossed] = True
        suspect &= pieces.policy != Policy.ANY
        suspect &= (pieces.tensor < 0) | ~scales_among(self.tables)[
            pieces.tensor
        ]  # factors: their proof is the last one
        left_out = {text.split(": ")[0] for text in graph.dropped}
        order = np.argsort(boxes.piece, kind="stable")
        by_piece = boxes.piece[order]
        for piece in np.flatnonzero(suspect).tolist():
            tensor = graph.target.tensors[int(pieces.tensor[piece])] if pieces.tensor[piece] >= 0 else None
            if tensor is None or self.is_left_out(tensor, self.tables.states[int(pieces.state[piece])], left_out):
                continue
            instead = self.other_homes(piece) if pieces.policy[piece] == Policy.LEAD else ()
            spans = [(np.searchsorted(by_piece, n), np.searchsorted(by_piece, n, "right")) for n in (piece, *instead)]
            mine = np.concatenate([order[a:b] for a, b in spans])
            index = first_left(low[piece], high[piece], boxes.low[mine], boxes.high[mine])
            if index is not None:
                self.blame("E343", "is neither used nor checked as a copy", 0, piece, index)
        for part, stand in zip(graph.source.parts, self.tables.stands[0], strict=True):
            tensors = [graph.source.tensors[t] for t in part.tensors]
            lost = [t for t in tensors if not self.is_left_out(t, part.state, left_out)]
            if lost and stand is None and len(part.homes):
                absent = part.homes.home(0)
                origin = (0,) * len(graph.source.layout.placed[lost[0]].dims)
                element = element_name(graph.source.layout, lost[0], origin)
                fail(
                    "E343",
                    f"{part.state} of {element} is neither used nor checked as a copy",
                    Label(absent.file, "source", where=key_text(absent.key)),
                )

    def is_left_out(self, path: str, state: str, left_out: set[str]) -> bool:
        """True if the state of each tensor of `path` is left out."""
        return all(f"{state} of {name}" in left_out for name in self.graph.source.layout.members(path))

    def other_homes(self, piece: int) -> I64:
        """Pieces of the source that are read instead of a leading one.

        They have its state and tensor, and are not its equals.
        Equals belong to one part and one box: their ranks differ along other axes, and they are checked.
        """
        pieces = self.tables.source
        same = (pieces.tensor == pieces.tensor[piece]) & (pieces.state == pieces.state[piece])
        found = np.flatnonzero(same & (pieces.policy != Policy.ANY))
        low, high = in_dims(pieces.dim[found], pieces.low[found], pieces.low[found] + pieces.size[found])
        own = np.flatnonzero(found == piece)[0]
        equal = (low == low[own]).all(axis=1) & (high == high[own]).all(axis=1)
        others: I64 = found[~(equal & (pieces.part[found] == pieces.part[piece]))]
        return others

    # ---- reports of faults
    # -----------------------------------------------------------------------------------------------

    def outside(self, row: int, side: int) -> NoReturn:
        """Report a move's positions with no element or with two."""
        pieces = self.tables.sides[side]

        def is_bad(part: ProofMoves) -> bool:
            return int(boxes_of(side, pieces, part).volume.sum()) != int(part.numel[0])

        move = self.narrowed(row, is_bad)
        boxes = element_boxes(side, pieces, 0, move)
        count = np.bincount(boxes.begin, minlength=int(move.numel[0]))
        n = int(np.flatnonzero(count != 1)[0])
        home, position = self.tables.place(
            side, int(positions_of(move.offset[side][0], move.shape[0], move.stride[side][0])[n])
        )
        other = element_boxes(1 - side, self.tables.sides[1 - side], 0, move)
        named = self.tables.name_at(other, n, self.tables.sides[1 - side])
        way = ("comes from", "goes to")[side]
        if count[n] > 1:
            two = [
                self.tables.name(pieces, int(boxes.piece[b]), boxes.low[b])
                for b in np.flatnonzero(boxes.begin == n)[:2]
            ]
            fail(
                "E345",
                f"{two[0]} and {two[1]} share one position, {position} of {home[1]}",
                Label(home[0], ("source", "target")[side], where=home[1]),
            )
        fail(
            "E344",
            f"{named} {way} position {position} of {home[1]}, where no element lies",
            Label(home[0], ("source", "target")[side], where=home[1]),
        )

    def misplaced(self, row: int) -> NoReturn:
        """Name the first element of a move that goes to another's place."""

        def is_bad(part: ProofMoves) -> bool:
            sides = boxes_of(0, self.tables.source, part), boxes_of(1, self.tables.target, part)
            return int(self.agreed(*sides, part)[0]) != int(part.numel[0])

        move = self.narrowed(row, is_bad)
        a, b = element_boxes(0, self.tables.source, 0, move), element_boxes(1, self.tables.target, 0, move)
        a, b = a.take(np.argsort(a.begin, kind="stable")), b.take(np.argsort(b.begin, kind="stable"))
        same = (a.low == b.low).all(axis=1) & (self.tables.source.tensor[a.piece] == self.tables.target.tensor[b.piece])
        same &= self.tables.is_origin(self.tables.source.state[a.piece], move.state[a.move])
        same &= self.tables.target.state[b.piece] == move.state[b.move]
        n = int(np.flatnonzero(~same)[0])
        (s, _), (t, _) = (self.tables.place(side, int(move.offset[side][0])) for side in (0, 1))
        fail(
            "E340",
            f"{self.tables.name(self.tables.source, int(a.piece[n]), a.low[n])} is brought to the place of"
            f" {self.tables.name(self.tables.target, int(b.piece[n]), b.low[n])}",
            Label(s[0], "from here", where=s[1]),
            Label(t[0], "to here", where=t[1]),
        )

    def narrowed(self, row: int, is_bad: Callable[[ProofMoves], bool]) -> ProofMoves:
        """The first bad part of a bad move with few elements."""
        m = self.tables.moves
        part = ProofMoves(
            m.kind[row : row + 1],
            m.flow[row : row + 1],
            m.state[row : row + 1],
            (m.offset[0][row : row + 1], m.offset[1][row : row + 1]),
            (m.stride[0][row : row + 1], m.stride[1][row : row + 1]),
            m.shape[row : row + 1],
        )
        while int(part.numel[0]) > ONE_BY_ONE:
            halves = halved(part)
            part = next((half for half in halves if is_bad(half)), halves[-1])
        return part

    def blame(self, code: str, what: str, side: int, piece: int, index: I64) -> NoReturn:
        pieces = self.tables.sides[side]
        low, _ = box_of(pieces)
        stride = np.empty_like(pieces.stride[piece])
        stride[pieces.dim[piece]] = pieces.stride[piece]
        (file, key), _ = self.tables.place(side, int(pieces.first[piece] + ((index - low[piece]) * stride).sum()))
        fail(
            code, f"{self.tables.name(pieces, piece, index)} {what}", Label(file, ("source", "target")[side], where=key)
        )
