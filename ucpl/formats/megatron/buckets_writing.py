"""The distributed optimizer's buckets of a target (`dp_reshardable`): places of chunks.

The layout gives each chunk's bucket, the bucket's length, and the parameter's number: `BUCKET/1472/3`. A bucket has its
parameters end to end, each at a multiple of 64 elements. The chunks of one parameter, such as the halves of a gated
linear_fc1, have no gap. Gaps are chunks of zeros, too, as Megatron saves them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import lcm
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import BY_TORCH, StoredTensor, TorchDType
from ucpl.formats.dcp.metadata import METADATA
from ucpl.formats.dcp.writing import address
from ucpl.formats.megatron.buckets import ALIGNMENT, Bucket, buckets_in
from ucpl.formats.megatron.roles import MASTER, MASTERS, STATES
from ucpl.records import define, frozen

__all__ = ["Gap", "PlacedChunks", "as_read", "placed"]

_ADDRESS = re.compile(r"(?P<bucket>.+)/(?P<numel>\d{1,18})/(?P<member>\d{1,9})", re.DOTALL)
_ROUNDED = 128  # elements: buckets end at a multiple of them and of the ranks that share them


@frozen
class Gap:
    """Elements of a bucket that are no parameter's."""

    name: str
    begin: int
    numel: int
    dtype: str
    rank: int  # of the file that has it


@define
class PlacedChunks:
    """Places of chunks in buckets.

    chunks: target -> name and begin in it; sizes: of each tensor of a bucket.
    """

    chunks: dict[int, tuple[str, int]] = field(factory=dict)
    sizes: dict[str, int] = field(factory=dict)
    gaps: list[Gap] = field(factory=list)

    def objects(self, dp: int) -> Iterator[tuple[str, dict[str, object]]]:
        """The prefix of each rank's optimizer, and its sizes of buckets.

        dp: ranks of data parallelism, to which ends of buckets are rounded; of experts, the ranks that share one.
        """
        buckets = buckets_in(tuple(self.sizes), Path(METADATA))
        chains = {b.chain for b in buckets}
        per_stage = _groups(buckets, 1) // max(1, _groups(buckets, 0))
        for chain in sorted(chains):
            ranks = max(1, dp // max(1, per_stage)) if chain else dp
            for group in sorted({b.group for b in buckets if b.chain == chain}):
                lead = f"chained_{chain}." if len(chains) > 1 else ""
                mine = [b for b in buckets if (b.chain, b.group) == (chain, group)]
                exact = [_listed(mine, buffer, self.sizes, 1) for buffer in sorted({b.buffer for b in mine})]
                divisor = lcm(ranks, _ROUNDED)
                rounded = [_listed(mine, buffer, self.sizes, divisor) for buffer in sorted({b.buffer for b in mine})]
                yield (
                    f"{lead}optimizer.distributed.dp_group_idx_{group}",
                    {"per_bucket_numel": rounded, "per_bucket_numel_unpadded": exact},
                )


def placed(targets: Sequence[StoredTensor]) -> PlacedChunks:
    """Raises: UcplError E471 for a bucket that is shorter than its parameters."""
    out = PlacedChunks()
    found: dict[str, dict[int, list[int]]] = {}
    for t, target in enumerate(targets):
        name, _ = address(target)
        match = _ADDRESS.fullmatch(name)
        if match is not None:
            out.sizes[match["bucket"]] = int(match["numel"])
            found.setdefault(match["bucket"], {}).setdefault(int(match["member"]), []).append(t)
    for bucket, members in found.items():
        end = 0
        first = targets[next(iter(members.values()))[0]]
        for member in sorted(members):
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            if begin > end:
                out.gaps.append(Gap(bucket, end, begin - end, first.dtype, first.rank))
            end = begin
            for t in sorted(members[member], key=lambda t: address(targets[t])[1]):
                out.chunks[t] = (bucket, end)
                end += targets[t].numel
        size = out.sizes[bucket]
        if size < end:
            fail(
                "E471",
                f"parameters of a bucket have {end} elements, and it is {size} long",
                Label(METADATA, where=bucket),
            )
        if size > end:
            out.gaps.append(Gap(bucket, end, size - end, first.dtype, first.rank))
    return out


def as_read(targets: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Targets by the keys that a reader gives: those of parameters.

    Copies on several ranks are one target.
    """
    out = []
    for target in targets:
        name, begin = address(target)
        if _ADDRESS.fullmatch(name) is not None:
            state = MASTERS[0] if target.state == MASTER else target.state
            target = evolve(target, key=(f"{STATES}{state}.{target.label}", *begin))
        out.append(target)
    return out


def _groups(buckets: Sequence[Bucket], chain: int) -> int:
    return len({b.group for b in buckets if b.chain == chain})


def _listed(
    buckets: Sequence[Bucket], buffer: tuple[int, str], sizes: dict[str, int], divisor: int
) -> dict[object, object]:
    one, _, other = buffer[1].strip("()").partition(", ")
    dtypes = tuple(TorchDType(BY_TORCH[said.removeprefix("torch.")].name) for said in (one, other))
    mine = [sizes[next(iter(b.states.values()))] for b in buckets if b.buffer == buffer]
    return {dtypes: [-(-n // divisor) * divisor for n in mine]}
