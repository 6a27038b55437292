"""Is a finished graph right? Proved from the two placements and the moves alone, by none of the code that made the moves.

A move takes positions of one stored tensor to positions of another. Each side's placement says which elements lie there: both
sides of every move are turned back into boxes of logical tensors, and must be the same boxes at the same places of the move.
Then what the moves fill is held against what the target keeps, and what they read against what the source has. Nothing is
decided by a count: a swap, or a hole beside an overlap of its size, keeps every count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.extents import Shelves, key_text
from ucpl.graph import Graph
from ucpl.proofs.alike import followers, placed
from ucpl.proofs.joins import (
    I64,
    Boxes,
    Mask,
    Moves,
    Pieces,
    between,
    box_of,
    distinct_boxes,
    first_left,
    halved,
    is_exact,
    joined_boxes,
    meet,
    pairs_in,
    positions_of,
    rows_by,
)
from ucpl.regions import Placement, element_name

ONE_BY_ONE = 1 << 20  # elements of a move that are looked at one by one, at most; of a longer one, a part is


def prove(graph: Graph) -> None:
    """Prove that every move brings every element to its own place, and that nothing is missing or filled twice.

    Raises UcplError, naming the first element: E340 for one that a move brings to another's place; E341 for one that is filled
    twice, E342 for one that nothing fills; E343 for one of the source that is neither used nor checked nor left out by name;
    E344 for a move from or to a place where no element lies, E345 for one that stands in a tensor twice.
    """
    _Proof(graph).run()


class _Proof:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.number = {path: i for i, path in enumerate(graph.target.tensors)}
        parts = (*graph.source.parts, *graph.target.parts)
        self.k = max([1, *(p.folded.low.shape[1] for p in parts)])
        self.bits = tuple(space.bits for space in graph.spaces)
        self.stands = (placed(graph.source, graph.sources), placed(graph.target, graph.targets))
        # What is proved of a state holds for those that are stored and moved just as it is.
        self.flows = graph.flows
        self.led = followers(graph, self.flows, self.stands)
        self.states = list(dict.fromkeys([p.state for p in parts] + [x.state for f in self.flows for x in f.lanes]))
        self.source = self.pieces(0, graph.source, {lane.origin for lane in self.led})
        self.target = self.pieces(1, graph.target, {lane.state for lane in self.led})
        self.moves = self.table()

    def run(self) -> None:
        moves = self.moves
        source = self.boxes(0, self.source)
        target = self.boxes(1, self.target)
        for boxes, side in ((source, 0), (target, 1)):
            held = np.bincount(boxes.move, weights=boxes.volume, minlength=len(moves.state)).astype(np.int64)
            bad = np.flatnonzero(held != moves.numel)
            if len(bad):
                self.outside(int(bad[0]), side)
        self.same_elements(source, target)
        self.filled(target)
        self.used(source)

    # ---- tables ----------------------------------------------------------------------------------------------------------

    def pieces(self, side: int, placement: Placement, led: set[str]) -> Pieces:
        k, one = self.k, 1 << self.bits[side]
        blank = ("low", "high", "stride")
        wide: dict[str, list[I64]] = {n: [] for n in ("offset", "tensor", "state", "policy", *blank)}
        common = np.array([self.number.get(p, -1) for p in placement.tensors] or [-1], dtype=np.int64)
        for part, stand in zip(placement.parts, self.stands[side], strict=True):
            if stand is None or part.state in led:
                continue
            p = part.folded
            if stand.hidden is not None:  # second names, whose storage another tensor is
                p = part.pieces.take(~stand.hidden[part.pieces.home])
            if not len(p):
                continue
            missing = k - p.low.shape[1]
            wide["offset"].append((p.home + stand.first) * one + p.offset)
            wide["tensor"].append(common[p.tensor])
            wide["state"].append(np.full(len(p), self.states.index(part.state)))
            wide["policy"].append(p.policy)
            for name, array, fill in (
                ("low", p.low, 0),
                ("high", p.high, 1),
                ("stride", p.stride + p.home_stride * one, 0),
            ):
                wide[name].append(np.pad(array, ((0, 0), (0, missing)), constant_values=fill))
        empty = {n: np.zeros((0, k) if n in blank else 0, dtype=np.int64) for n in wide}
        flat = {n: np.concatenate(v) if v else empty[n] for n, v in wide.items()}
        keep = (flat["high"] > flat["low"]).all(axis=1)
        flat = {n: v[keep] for n, v in flat.items()}
        order = np.argsort(flat["offset"], kind="stable")
        flat = {n: v[order] for n, v in flat.items()}
        size = flat["high"] - flat["low"]
        stride = np.where(size > 1, flat["stride"], 0)
        dim = np.argsort(-stride, axis=1, kind="stable")
        size, stride, low = (np.take_along_axis(a, dim, 1) for a in (size, stride, flat["low"]))
        last = flat["offset"] + ((size - 1) * stride).sum(axis=1) + 1
        return Pieces(flat["offset"], last, flat["tensor"], flat["state"], flat["policy"], size, stride, dim, low)

    def table(self) -> Moves:
        """The moves of every state that is not led by another one."""
        found = [
            (
                flow.kind,
                self.states.index(lane.state),
                flow.moves,
                lane.source << self.bits[0],
                lane.target << self.bits[1],
            )
            for flow in self.flows
            for lane in flow.lanes
            if lane not in self.led and len(flow.moves)
        ]
        d = max([1, *(m.shape.shape[1] for _, _, m, _, _ in found)])

        def wide(arrays: list[I64]) -> I64:
            rows = [np.pad(a, ((0, 0), (0, d - a.shape[1])), constant_values=1) for a in arrays]
            out: I64 = np.concatenate(rows or [np.zeros((0, d), np.int64)])
            return out

        def flat(arrays: list[I64]) -> I64:
            out: I64 = np.concatenate(arrays or [np.zeros(0, np.int64)])
            return out

        counts = [len(m) for _, _, m, _, _ in found]
        return Moves(
            np.repeat(np.array([kind for kind, *_ in found] or ["copy"]), counts or [0]),
            np.repeat(np.array([state for _, state, *_ in found] or [0], dtype=np.int64), counts or [0]),
            (flat([m.source + s for _, _, m, s, _ in found]), flat([m.target + t for _, _, m, _, t in found])),
            (wide([m.source_stride for _, _, m, _, _ in found]), wide([m.target_stride for _, _, m, _, _ in found])),
            wide([m.shape for _, _, m, _, _ in found]),
        )

    # ---- moves as boxes --------------------------------------------------------------------------------------------------

    def boxes(self, side: int, pieces: Pieces, moves: Moves | None = None) -> Boxes:
        """Both kinds of move: runs, which may cross many pieces, and strided boxes, which lie in one piece."""
        moves = self.moves if moves is None else moves
        wide = moves.shape > 1
        is_run = wide[:, 1:].sum(axis=1) == 0
        is_run &= (moves.stride[side][:, 0] == 1) | ~wide[:, 0]
        runs, boxes = np.flatnonzero(is_run), np.flatnonzero(~is_run)
        return joined_boxes(
            [self.run_boxes(side, pieces, runs, moves), self.strided_boxes(side, pieces, boxes, moves)], self.k
        )

    def run_boxes(self, side: int, pieces: Pieces, rows: I64, moves: Moves) -> Boxes:
        start = moves.offset[side][rows]
        stop = start + moves.numel[rows]
        i, piece = meet(np.zeros_like(start), start, stop, np.zeros_like(pieces.first), pieces.first, pieces.last)
        at, low, high = between(pieces, piece, start[i] - pieces.first[piece], stop[i] - pieces.first[piece])
        i, piece = i[at], piece[at]
        begin = pieces.first[piece] + (low * pieces.stride[piece]).sum(axis=1) - start[i]
        return self.logical(pieces, rows[i], piece, low, high, begin, pieces.stride[piece])

    def strided_boxes(self, side: int, pieces: Pieces, rows: I64, moves: Moves) -> Boxes:
        """A box of a move as a box of the piece that holds its first element: each dim of the move walks digits of it."""
        k = self.k
        offset = moves.offset[side][rows]
        i, piece = meet(
            np.zeros_like(offset), offset, offset + 1, np.zeros_like(pieces.first), pieces.first, pieces.last
        )
        rest = offset[i] - pieces.first[piece]
        digit = np.zeros((len(i), k), dtype=np.int64)
        for c in range(k):
            step = np.maximum(pieces.stride[piece, c], 1)
            digit[:, c] = np.where(pieces.size[piece, c] > 1, np.minimum(rest // step, pieces.size[piece, c] - 1), 0)
            rest = rest - digit[:, c] * pieces.stride[piece, c]
        inside = rest == 0
        i, piece, digit = i[inside], piece[inside], digit[inside]
        low, high, step = digit.copy(), digit + 1, np.zeros_like(digit)
        size, stride = pieces.size[piece], pieces.stride[piece]
        fits = np.ones(len(i), dtype=bool)
        weight = np.ones(len(i), dtype=np.int64)
        taken = np.zeros_like(digit, dtype=bool)
        every = np.arange(len(i))
        for d in range(moves.shape.shape[1] - 1, -1, -1):
            left = moves.shape[rows[i], d].copy()
            pace = moves.stride[side][rows[i], d].copy()
            for _ in range(k):
                open_ = fits & (left > 1)
                if not open_.any():
                    break
                match = (stride == pace[:, None]) & (size > 1) & ~taken
                fits &= ~open_ | match.any(axis=1)
                column = match.argmax(axis=1)
                room = size[every, column] - digit[every, column]
                ends = open_ & fits & (left <= room)
                whole = open_ & fits & ~ends & (digit[every, column] == 0) & (left % size[every, column] == 0)
                fits &= ~open_ | ends | whole
                count = np.where(ends, left, size[every, column])
                some = ends | whole
                high[every[some], column[some]] = low[every[some], column[some]] + count[some]
                step[every[some], column[some]] = weight[some]
                taken[every[some], column[some]] = True
                left = np.where(some, left // count, left)
                pace = np.where(some, pace * count, pace)
                weight = np.where(some, weight * count, weight)
            fits &= left == 1
        good = np.flatnonzero(fits)
        found = self.logical(
            pieces, rows[i[good]], piece[good], low[good], high[good], np.zeros(len(good), dtype=np.int64), step[good]
        )
        lone = rows[~np.isin(np.arange(len(rows)), i[good])]
        few = lone[moves.numel[lone] <= ONE_BY_ONE]  # a longer one counts as a move of what does not lie there
        return joined_boxes([found, *(self.element_boxes(side, pieces, int(row), moves) for row in few)], self.k)

    def element_boxes(self, side: int, pieces: Pieces, row: int, moves: Moves) -> Boxes:
        """A move that is no box of one piece: its elements one by one."""
        positions = positions_of(moves.offset[side][row], moves.shape[row], moves.stride[side][row])
        n = len(positions)
        none, of_piece = np.zeros(n, dtype=np.int64), np.zeros_like(pieces.first)
        i, piece = meet(none, positions, positions + 1, of_piece, pieces.first, pieces.last)
        at, low, high = between(
            pieces, piece, positions[i] - pieces.first[piece], positions[i] - pieces.first[piece] + 1
        )
        i, piece = i[at], piece[at]
        return self.logical(pieces, np.full(len(i), row), piece, low, high, i, np.zeros_like(low))

    def logical(self, pieces: Pieces, move: I64, piece: I64, low: I64, high: I64, begin: I64, step: I64) -> Boxes:
        """Columns of a piece put back in the order of the tensor's dims."""
        dim, base = pieces.dim[piece], pieces.low[piece]
        out = [np.empty_like(low) for _ in range(3)]
        for array, values in zip(out, (base + low, base + high, np.where(high - low > 1, step, 0)), strict=True):
            np.put_along_axis(array, dim, values, 1)
        return Boxes(move, piece, out[0], out[1], begin, out[2])

    # ---- the three proofs ------------------------------------------------------------------------------------------------

    def same_elements(self, source: Boxes, target: Boxes) -> None:
        """Both sides of each move are the same elements at the same places of the move."""
        bad = np.flatnonzero(self.agreed(source, target, self.moves) != self.moves.numel)
        if len(bad):
            self.misplaced(int(bad[0]))

    def agreed(self, source: Boxes, target: Boxes, moves: Moves) -> I64:
        """How many elements of each move are the same on both sides."""
        ends = [b.begin + ((b.high - b.low - 1) * b.step).sum(axis=1) + 1 for b in (source, target)]
        order = np.lexsort((target.begin, target.move))
        t = target.take(order)
        i, j = meet(source.move, source.begin, ends[0], t.move, t.begin, ends[1][order])
        s, t = source.take(i), t.take(j)
        low, high = np.maximum(s.low, t.low), np.minimum(s.high, t.high)
        shared = (low < high).all(axis=1) & (self.source.tensor[s.piece] == self.target.tensor[t.piece])
        shared &= self.is_origin(self.source.state[s.piece], moves.state[s.move])
        shared &= self.target.state[t.piece] == moves.state[t.move]
        at_s = s.begin + ((low - s.low) * s.step).sum(axis=1)
        at_t = t.begin + ((low - t.low) * t.step).sum(axis=1)
        shared &= (at_s == at_t) & ((high - low == 1) | (s.step == t.step)).all(axis=1)
        volume = np.where(shared, (high - low).clip(0).prod(axis=1), 0)
        return np.bincount(s.move, weights=volume, minlength=len(moves.state)).astype(np.int64)

    def is_origin(self, have: I64, want: I64) -> Mask:
        """Whether a state of the source may fill a state of the target: its own, or one that is derived from it."""
        allowed = np.eye(len(self.states), dtype=bool)
        for d in self.graph.source.layout.derived:
            if d.state in self.states and d.source in self.states:
                allowed[self.states.index(d.source), self.states.index(d.state)] = True
        out: Mask = allowed[have, want]
        return out

    def filled(self, target: Boxes) -> None:
        """Every element of every stored tensor of the target once; every tensor of the target as a whole."""
        pieces = self.target
        copies = target.take(self.moves.kind[target.move] == "copy")
        reduced = target.take(np.isin(self.moves.kind[target.move], ("mean", "sum")))
        both = joined_boxes([copies, distinct_boxes(reduced)], self.k)  # all rows of a mean go to one place
        i, j = pairs_in(both)
        if len(i):
            index = np.maximum(both.low[i[0]], both.low[j[0]])
            piece = int(both.piece[i[0]])
            self.blame("E341", "is filled twice", 1, piece, index)
        low, high = box_of(pieces)
        held = np.bincount(both.piece, weights=both.volume, minlength=len(pieces)).astype(np.int64)
        bad = np.flatnonzero(held != (high - low).prod(axis=1))
        if len(bad):
            piece = int(bad[0])
            mine = np.flatnonzero(both.piece == piece)
            index = first_left(low[piece], high[piece], both.low[mine], both.high[mine])
            assert index is not None
            self.blame("E342", "is filled by nothing", 1, piece, index)
        self.whole()

    def whole(self) -> None:
        """The pieces of the target together are all of each tensor that it keeps."""
        pieces, layout = self.target, self.graph.target.layout
        low, high = box_of(pieces)
        group = pieces.tensor * len(self.states) + pieces.state
        distinct = np.unique(np.concatenate([group[:, None], low, high], axis=1), axis=0)
        group, low, high = distinct[:, 0], distinct[:, 1 : self.k + 1], distinct[:, self.k + 1 :]
        for g, rows in rows_by(group):
            path, state = self.graph.target.tensors[g // len(self.states)], self.states[g % len(self.states)]
            counts = np.ones(self.k, dtype=np.int64)
            counts[: len(layout.tensors[path].counts)] = layout.tensors[path].counts
            if len(rows) == 1 and (low[rows[0]] == 0).all() and (high[rows[0]] == counts).all():
                continue
            if is_exact(counts, low[rows], high[rows]):
                continue
            index = first_left(np.zeros(self.k, dtype=np.int64), counts, low[rows], high[rows])
            if index is not None:
                fail(
                    "E342",
                    f"{state} of {element_name(layout, path, tuple(index.tolist()))} is nowhere in the target",
                    Label(layout.call, "target", where=f"{path}/{state}"),
                )

    def used(self, source: Boxes) -> None:
        """Every element of every piece of the source moves or is checked, unless its state is left out or any copy will do."""
        pieces, graph = self.source, self.graph
        boxes = distinct_boxes(source)
        i, _ = pairs_in(boxes)
        crossed = np.unique(boxes.piece[i]) if len(i) else np.zeros(0, dtype=np.int64)
        low, high = box_of(pieces)
        held = np.bincount(boxes.piece, weights=boxes.volume, minlength=len(pieces)).astype(np.int64)
        suspect = held != (high - low).prod(axis=1)
        suspect[crossed] = True
        suspect &= pieces.policy != 3  # any
        left_out = {text.split(": ")[0] for text in graph.dropped}
        order = np.argsort(boxes.piece, kind="stable")
        by_piece = boxes.piece[order]
        for piece in np.flatnonzero(suspect).tolist():
            tensor = graph.target.tensors[int(pieces.tensor[piece])] if pieces.tensor[piece] >= 0 else None
            if tensor is None or f"{self.states[int(pieces.state[piece])]} of {tensor}" in left_out:
                continue
            mine = order[np.searchsorted(by_piece, piece) : np.searchsorted(by_piece, piece, side="right")]
            index = first_left(low[piece], high[piece], boxes.low[mine], boxes.high[mine])
            if index is not None:
                self.blame("E343", "is neither used nor checked as a copy", 0, piece, index)
        for part, stand in zip(graph.source.parts, self.stands[0], strict=True):
            tensors = [graph.source.tensors[t] for t in part.tensors]
            lost = [t for t in tensors if f"{part.state} of {t}" not in left_out]
            if lost and stand is None and len(part.homes):
                absent = part.homes.home(0)
                origin = (0,) * len(graph.source.layout.tensors[lost[0]].dims)
                element = element_name(graph.source.layout, lost[0], origin)
                fail(
                    "E343",
                    f"{part.state} of {element} is neither used nor checked as a copy",
                    Label(absent.file, "source", where=key_text(absent.key)),
                )

    # ---- what is wrong ---------------------------------------------------------------------------------------------------

    def outside(self, row: int, side: int) -> NoReturn:
        """A move from or to positions where no element lies (padding, or past the end), or where two do."""
        pieces = (self.source, self.target)[side]

        def is_bad(part: Moves) -> bool:
            return int(self.boxes(side, pieces, part).volume.sum()) != int(part.numel[0])

        move = self.narrowed(row, is_bad)
        boxes = self.element_boxes(side, pieces, 0, move)
        count = np.bincount(boxes.begin, minlength=int(move.numel[0]))
        n = int(np.flatnonzero(count != 1)[0])
        home, position = self.place(
            side, int(positions_of(move.offset[side][0], move.shape[0], move.stride[side][0])[n])
        )
        other = self.element_boxes(1 - side, (self.target, self.source)[side], 0, move)
        named = self.name_at(other, n, (self.target, self.source)[side])
        way = ("comes from", "goes to")[side]
        if count[n] > 1:
            two = [self.name(pieces, int(boxes.piece[b]), boxes.low[b]) for b in np.flatnonzero(boxes.begin == n)[:2]]
            fail(
                "E345",
                f"{two[0]} and {two[1]} lie on one position, {position} of {home[1]}",
                Label(home[0], ("source", "target")[side], where=home[1]),
            )
        fail(
            "E344",
            f"{named} {way} position {position} of {home[1]}, where no element lies",
            Label(home[0], ("source", "target")[side], where=home[1]),
        )

    def misplaced(self, row: int) -> NoReturn:
        """Name the first element of a move that goes to another's place."""

        def is_bad(part: Moves) -> bool:
            boxes = self.boxes(0, self.source, part), self.boxes(1, self.target, part)
            return int(self.agreed(*boxes, part)[0]) != int(part.numel[0])

        move = self.narrowed(row, is_bad)
        a, b = self.element_boxes(0, self.source, 0, move), self.element_boxes(1, self.target, 0, move)
        a, b = a.take(np.argsort(a.begin, kind="stable")), b.take(np.argsort(b.begin, kind="stable"))
        same = (a.low == b.low).all(axis=1) & (self.source.tensor[a.piece] == self.target.tensor[b.piece])
        same &= self.is_origin(self.source.state[a.piece], move.state[a.move])
        same &= self.target.state[b.piece] == move.state[b.move]
        n = int(np.flatnonzero(~same)[0])
        (s, _), (t, _) = (self.place(side, int(move.offset[side][0])) for side in (0, 1))
        fail(
            "E340",
            f"{self.name(self.source, int(a.piece[n]), a.low[n])} is brought to the place of"
            f" {self.name(self.target, int(b.piece[n]), b.low[n])}",
            Label(s[0], "from here", where=s[1]),
            Label(t[0], "to here", where=t[1]),
        )

    def narrowed(self, row: int, is_bad: Callable[[Moves], bool]) -> Moves:
        """A part of a move that is bad, too, of few enough elements to be looked at one by one: the first such part."""
        m = self.moves
        part = Moves(
            m.kind[row : row + 1],
            m.state[row : row + 1],
            (m.offset[0][row : row + 1], m.offset[1][row : row + 1]),
            (m.stride[0][row : row + 1], m.stride[1][row : row + 1]),
            m.shape[row : row + 1],
        )
        while int(part.numel[0]) > ONE_BY_ONE:
            halves = halved(part)
            part = next((half for half in halves if is_bad(half)), halves[-1])
        return part

    def place(self, side: int, position: int) -> tuple[tuple[str, str], int]:
        """File and key of the stored tensor that a position is of, and where in that it is."""
        stored: Shelves = (self.graph.sources, self.graph.targets)[side]
        home, at = divmod(position, 1 << self.bits[side])
        tensor = stored[min(max(home, 0), len(stored) - 1)]
        return (tensor.file, key_text(tensor.key)), at

    def name_at(self, boxes: Boxes, n: int, pieces: Pieces) -> str:
        found = np.flatnonzero(boxes.begin == n)
        return self.name(pieces, int(boxes.piece[found[0]]), boxes.low[found[0]]) if len(found) else "an element"

    def name(self, pieces: Pieces, piece: int, index: I64) -> str:
        path = self.graph.target.tensors[int(pieces.tensor[piece])]
        element = element_name(self.graph.target.layout, path, tuple(index.tolist()))
        return f"{self.states[int(pieces.state[piece])]} of {element}"

    def blame(self, code: str, what: str, side: int, piece: int, index: I64) -> NoReturn:
        pieces = (self.source, self.target)[side]
        low, _ = box_of(pieces)
        stride = np.empty_like(pieces.stride[piece])
        stride[pieces.dim[piece]] = pieces.stride[piece]
        (file, key), _ = self.place(side, int(pieces.first[piece] + ((index - low[piece]) * stride).sum()))
        fail(code, f"{self.name(pieces, piece, index)} {what}", Label(file, ("source", "target")[side], where=key))
