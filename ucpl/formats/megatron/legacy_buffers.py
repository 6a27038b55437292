"""The place of each parameter in a tensor of `distrib_optim.pt`.

The file does not record it. Megatron's gradient buffers hold parameters in reverse registration order, each at a
multiple of 64 elements. A buffer is closed into a bucket at the size of a bucket, and before and behind an embedding
that two stages share. The padding at a bucket's end is not saved. So positions depend on the bucket size, which neither
file has. All divisions are tried: each must fit the saved length and, if the weights are views of their training buffer
(as Megatron saves them), their places there. If the remaining ones disagree, the conversion stops.

Read in megatron-core 0.16.1, distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucpl.records import frozen

__all__ = ["ALIGNED", "SavedBucket", "BufferParameter", "buckets_of", "divided"]

ALIGNED = 64  # elements: each parameter begins at a multiple of them
_BUCKET = 128  # elements: each bucket does, whatever the degree of data parallelism is
_TRIES_MAX = 4096


@frozen
class BufferParameter:
    """A parameter in a buffer's order.

    `place`: its begin in the buffer, if its weight is a view of that.
    """

    name: str
    numel: int
    place: int | None = None
    is_shared: bool = False  # an embedding that the first and the last stage share: it has a bucket of its own


@frozen
class SavedBucket:
    """Parameters end to end, and their begin in the saved tensor.

    `numel`: up to the last one's end.
    """

    start: int
    names: tuple[str, ...]
    numel: int


def divided(parameters: Sequence[BufferParameter], size: int | None) -> list[tuple[SavedBucket, int]]:
    """The buckets of a buffer, with Megatron's size of each.

    Parameters are in the buffer's order. A size excludes the padding to ranks, but reaches the begin of an embedding
    that closed the bucket. size: of a bucket, in elements; None: no bucket is closed for its size.
    """
    division = _divided(parameters, size)
    ends = [*(bucket.start for bucket in division.buckets[1:]), division.numel]
    return [(bucket, end - bucket.start) for bucket, end in zip(division.buckets, ends, strict=True)]


@frozen
class _Division:
    buckets: tuple[SavedBucket, ...]
    numel: int  # of all, without the padding of their ends
    next_smaller: int  # the greatest bucket size that divides otherwise; 0: none does


def buckets_of(
    parameters: Sequence[BufferParameter], numel: int, said: Sequence[int | None] = ()
) -> list[tuple[SavedBucket, ...]]:
    """Ways to save these parameters as a tensor of `numel` elements.

    The result is one way if the files determine it, and empty if they contradict each other. `said`: bucket sizes by the
    run's arguments or Megatron's rules, None for one bucket: the first that fits is used. Ways that place every
    parameter equally are one way: one bucket, if that has these places.
    """
    alone = _divided(parameters, None, apart=False)
    if all(p.numel % ALIGNED == 0 for p in parameters[:-1]):  # then no division moves any of them
        return [alone.buckets] if alone.numel == numel else []
    known = {_positions(alone.buckets, parameters): alone.buckets} if alone.numel == numel else {}
    for size in said:
        division = _divided(parameters, size)
        if division.numel == numel and _is_as_placed(division, parameters):
            return [known.get(_positions(division.buckets, parameters), division.buckets)]
    found: dict[tuple[int, ...], tuple[SavedBucket, ...]] = {}
    for division in _divisions(parameters):
        if division.numel == numel and _is_as_placed(division, parameters):
            places = _positions(division.buckets, parameters)
            found.setdefault(places, known.get(places, division.buckets))
    return list(found.values())


def _divisions(parameters: Sequence[BufferParameter]) -> Iterator[_Division]:
    """All, by bucket sizes from above."""
    size: int | None = None
    for _ in range(_TRIES_MAX):
        division = _divided(parameters, size)
        yield division
        size = division.next_smaller
        if not size:
            break


def _divided(parameters: Sequence[BufferParameter], size: int | None, apart: bool = True) -> _Division:
    """As Megatron divides a buffer. size: of a bucket; None: one bucket."""
    buckets: list[SavedBucket] = []
    saved = end = smaller = 0  # of the tensor; of the bucket; see next_smaller
    names: list[str] = []
    last = 0  # where the bucket's last parameter ends
    for p in parameters:
        begin = _up(end)
        smaller = max(smaller, end if names else 0)
        if apart and p.is_shared and names:
            buckets.append(SavedBucket(saved, tuple(names), last))
            saved, names, begin = saved + begin, [], 0
        end = last = begin + p.numel
        names.append(p.name)
        if (size is not None and end >= size) or (apart and p.is_shared):
            buckets.append(SavedBucket(saved, tuple(names), last))
            saved, names, end = saved + end, [], 0
    if names:
        buckets.append(SavedBucket(saved, tuple(names), last))
        saved += end
        smaller = max(smaller, end)
    return _Division(tuple(buckets), saved, smaller if size is None or smaller < size else 0)


def _positions(buckets: Sequence[SavedBucket], parameters: Sequence[BufferParameter]) -> tuple[int, ...]:
    sizes = {p.name: p.numel for p in parameters}
    out = []
    for bucket in buckets:
        at = 0
        for name in bucket.names:
            out.append(bucket.start + _up(at))
            at = _up(at) + sizes[name]
    return tuple(out)


def _is_as_placed(division: _Division, parameters: Sequence[BufferParameter]) -> bool:
    """Test whether the weights' own places fit these buckets."""
    by_name = {p.name: p for p in parameters}
    if any(p.place is None for p in parameters):
        return True
    end = 0
    for bucket in division.buckets:
        begin = by_name[bucket.names[0]].place or 0
        if begin < end or begin % _BUCKET or (end == 0 and begin):
            return False
        at = 0
        for name in bucket.names:
            if by_name[name].place != begin + _up(at):
                return False
            at = _up(at) + by_name[name].numel
        end = begin + at
    return True


def _up(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED
