"""Turn moves back into logical boxes, from one side's pieces."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from ucpl.verification.proof.intervals import (
    I64,
    Boxes,
    ProofMoves,
    ProofPieces,
    between,
    in_dims,
    joined_boxes,
    meet,
    positions_of,
)

__all__ = ["AT_ONCE", "ONE_BY_ONE", "boxes_at", "boxes_of", "element_boxes"]

AT_ONCE = 1 << 14  # moves, or pairs of boxes: a limit for intermediate tables
ONE_BY_ONE = 1 << 20  # elements of a move that are looked at one by one, at most; of a longer one, a part is


def boxes_of(side: int, pieces: ProofPieces, moves: ProofMoves) -> Boxes:
    """The boxes of both kinds of move. Runs may cross many pieces.

    Strided boxes are in one piece.
    """
    wide = moves.shape > 1
    is_run = wide[:, 1:].sum(axis=1) == 0
    is_run &= (moves.stride[side][:, 0] == 1) | ~wide[:, 0]
    runs, boxes = np.flatnonzero(is_run), np.flatnonzero(~is_run)
    found = [_run_boxes(side, pieces, runs[n : n + AT_ONCE], moves) for n in range(0, len(runs), AT_ONCE)]
    return joined_boxes([*found, _strided_boxes(side, pieces, boxes, moves)])


def _run_boxes(side: int, pieces: ProofPieces, rows: I64, moves: ProofMoves) -> Boxes:
    start = moves.offset[side][rows]
    stop = start + moves.numel[rows]
    i, piece = meet(np.zeros_like(start), start, stop, np.zeros_like(pieces.first), pieces.first, pieces.last)
    at, low, high = between(pieces, piece, start[i] - pieces.first[piece], stop[i] - pieces.first[piece])
    i, piece = i[at], piece[at]
    begin = pieces.first[piece] + (low * pieces.stride[piece]).sum(axis=1) - start[i]
    return _logical(pieces, rows[i], piece, low, high, begin, pieces.stride[piece])


def _strided_boxes(side: int, pieces: ProofPieces, rows: I64, moves: ProofMoves) -> Boxes:
    """Convert boxes of moves to boxes of their first elements' pieces.

    Each dim of the move walks digits of the piece.
    """
    k = pieces.size.shape[1]
    offset = moves.offset[side][rows]
    i, piece = meet(np.zeros_like(offset), offset, offset + 1, np.zeros_like(pieces.first), pieces.first, pieces.last)
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
    found = _logical(
        pieces, rows[i[good]], piece[good], low[good], high[good], np.zeros(len(good), dtype=np.int64), step[good]
    )
    lone = rows[~np.isin(np.arange(len(rows)), i[good])]
    few = lone[moves.numel[lone] <= ONE_BY_ONE]  # a longer one counts as a move without an element
    return joined_boxes([found, *(element_boxes(side, pieces, int(row), moves) for row in few)])


def element_boxes(side: int, pieces: ProofPieces, row: int, moves: ProofMoves) -> Boxes:
    """Split a move that is no box of one piece into elements."""
    boxes = boxes_at(pieces, positions_of(moves.offset[side][row], moves.shape[row], moves.stride[side][row]))
    return evolve(boxes, move=np.full(len(boxes), row), begin=boxes.move)


def boxes_at(pieces: ProofPieces, positions: I64) -> Boxes:
    """The elements at positions, one by one.

    A box of one element is of the move that has its place among the positions.
    """
    none, of_piece = np.zeros(len(positions), dtype=np.int64), np.zeros_like(pieces.first)
    i, piece = meet(none, positions, positions + 1, of_piece, pieces.first, pieces.last)
    at, low, high = between(pieces, piece, positions[i] - pieces.first[piece], positions[i] - pieces.first[piece] + 1)
    i, piece, order = i[at], piece[at], np.argsort(i[at], kind="stable")
    found = _logical(pieces, i, piece, low, high, np.zeros(len(i), dtype=np.int64), np.zeros_like(low))
    return found.take(order)


def _logical(pieces: ProofPieces, move: I64, piece: I64, low: I64, high: I64, begin: I64, step: I64) -> Boxes:
    """Reorder the columns of a piece to the dims of the tensor."""
    dim, base = pieces.dim.take(piece, axis=0), pieces.low.take(piece, axis=0)
    first, last, steps = in_dims(dim, base + low, base + high, np.where(high - low > 1, step, 0))
    return Boxes(move, piece, first, last, begin, steps)
