"""Boxes of a dialect's tensor as boxes of logical tensors.

The dialect puts several logical tensors together in one of its own.

before: `linear_qkv`, rows 0 to 8 at 5     after: attn.q[g=0, r=.., d=..] at 5, attn.k[g=0, ..] at ..., each with its
storage
"""

from __future__ import annotations

from itertools import product

from ucpl.records import frozen

__all__ = ["StridedBox", "DialectPiece", "piece_of", "through", "within"]

Digit = tuple[int, int, int]  # a logical dim, its step along an axis of the named tensor, and its size in the piece
Span = tuple[int, int]


@frozen
class DialectPiece:
    """A box of a logical tensor in a named tensor.

    x[a] = base[a] + sum of step * (index - low) over the digits of axis a.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    base: tuple[int, ...]
    digits: tuple[tuple[Digit, ...], ...]  # of each axis, the widest step first


@frozen
class StridedBox:
    """Logical elements low..high: the first at `offset`, by `stride` along each dim."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


def piece_of(
    shape: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...], offset: int, stride: tuple[int, ...]
) -> DialectPiece:
    """Steps of a box along each axis of a named tensor.

    They follow from the box's place in this shape, row-major.
    """
    rows = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        rows[axis] = rows[axis + 1] * shape[axis + 1]
    digits: list[list[Digit]] = [[] for _ in shape]
    for dim, (a, b, step) in enumerate(zip(low, high, stride, strict=True)):
        if b - a > 1:
            axis = next(x for x, n in enumerate(rows) if n <= step and step < n * shape[x])
            digits[axis].append((dim, step // rows[axis], b - a))
    base = tuple(offset // row % n for row, n in zip(rows, shape, strict=True))
    return DialectPiece(low, high, base, tuple(tuple(sorted(of, key=lambda d: -d[1])) for of in digits))


def within(digits: tuple[Digit, ...], low: int, high: int) -> list[dict[int, Span]]:
    """Boxes of digits with a sum from low to high, each once.

    The sum is that of step * index.
    """
    last = sum(step * (n - 1) for _, step, n in digits)
    if high <= 0 or low > last:
        return []
    if low <= 0 and high > last:
        return [{dim: (0, n) for dim, _, n in digits}]
    (dim, step, n), *others = digits
    rest = tuple(others)
    reach = sum(s * (m - 1) for _, s, m in rest)
    first, end = max(0, -(-low // step)), min(n, (high - reach - 1) // step + 1)  # those with a complete rest
    out: list[dict[int, Span]] = []
    if first < end:
        out.append({dim: (first, end)} | {d: (0, m) for d, _, m in rest})
    for i in range(max(0, -(-(low - reach) // step)), min(n, (high - 1) // step + 1)):
        if not first <= i < end:
            out += [{dim: (i, i + 1)} | found for found in within(rest, low - step * i, high - step * i)]
    return out


def through(
    piece: DialectPiece, low: tuple[int, ...], high: tuple[int, ...], offset: int, stride: tuple[int, ...]
) -> list[StridedBox]:
    """Part of a piece inside a box of the named tensor.

    The box begins at `offset` and has these strides.
    """
    axes = [within(of, a - b, c - b) for of, a, c, b in zip(piece.digits, low, high, piece.base, strict=True)]
    out = []
    for chosen in product(*axes):
        spans: dict[int, Span] = {dim: span for one in chosen for dim, span in one.items()}
        begin = tuple(a + spans[d][0] if d in spans else a for d, a in enumerate(piece.low))
        end = tuple(
            a + spans[d][1] if d in spans else b for d, (a, b) in enumerate(zip(piece.low, piece.high, strict=True))
        )
        steps = [0] * len(begin)
        at = offset
        for of, base, first, step in zip(piece.digits, piece.base, low, stride, strict=True):
            at += step * (base - first + sum(s * spans[d][0] for d, s, _ in of))
            for d, s, _ in of:
                steps[d] = step * s
        out.append(StridedBox(begin, end, at, tuple(steps)))
    return out
