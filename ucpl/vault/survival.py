"""The bytes that a loss of domains destroys, computed without a vault.

The inputs are the protection and the data of each domain. In a group of blocks, the remaining blocks replace as many
lost ones as the group has parity blocks. Bytes after the end of a domain's data are zeros and need no source. Rebuilt
bytes are checked against digests, so a chunk of 1 MiB is restored completely or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

from ucpl.records import frozen
from ucpl.storage.vaults.memory import DomainData
from ucpl.storage.vaults.protection import ParityGroup, Protection, block_size, get_sets
from ucpl.storage.vaults.records import CHUNK

__all__ = ["LostRange", "Survival", "SurvivalCount"]

Span = tuple[int, int]
LOOKED_AT = 200_000  # sets of lost domains that are counted; beyond it only the rule of the code is reported


@frozen
class LostRange:
    """Bytes of a rank's arena that cannot be had."""

    rank: int
    low: int
    high: int


@frozen
class SurvivalCount:
    """The survivable losses among all losses of n domains at once."""

    lost: int
    whole: int
    of: int
    example: tuple[int, ...] | None  # the first loss that takes something with it
    is_counted: bool = True  # False: `whole` follows from the rule of the code, and may be too small


@frozen(eq=False)
class Survival:
    """Domains of known sizes under a protection."""

    protection: Protection
    stretches: tuple[DomainData, ...]  # of each domain

    @cached_property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        return get_sets(len(self.stretches), self.protection)

    @cached_property
    def _blocks(self) -> dict[int, int]:
        """Bytes of a block, by the first domain of a set."""
        return {
            among[0]: block_size([self.stretches[d].size for d in among], self.protection.blocks(len(among))[0])
            for among in self.sets
        }

    @cached_property
    def _groups(self) -> dict[int, tuple[ParityGroup, ...]]:
        """The groups by the number of domains of a set."""
        return {size: self.protection.groups(size) for size in {len(among) for among in self.sets}}

    def block(self, among: Sequence[int]) -> int:
        """Bytes of a block in a set."""
        return self._blocks[among[0]]

    def for_others(self, domain: int) -> int:
        """Bytes that a domain holds for others, of one generation."""
        among = next(some for some in self.sets if domain in some)
        return self.protection.blocks(len(among))[1] * self.block(among)

    @property
    def made_of(self) -> int:
        """Bytes that are read to rebuild one."""
        most = max(map(len, self.sets))
        groups = self._groups[most]
        return max((len(g.data) for g in groups), default=0)

    def gone(self, lost: Collection[int]) -> tuple[LostRange, ...]:
        """The data that is lost without these domains, by rank."""
        found: list[LostRange] = []
        for among in self.sets:
            places = [i for i, domain in enumerate(among) if domain in lost]
            spans: dict[int, list[Span]] = {place: [] for place in places}
            for place, span in self._gone(among, places):
                spans[place].append(span)
            for place in places:
                found += _by_rank(self.stretches[among[place]], spans[place])
        return tuple(found)

    def loses(self, lost: Collection[int]) -> bool:
        """True if data is lost without these domains."""
        for among in self.sets:
            places = [i for i, domain in enumerate(among) if domain in lost]
            if self._loses(among, places):
                return True
        return False

    def _loses(self, among: Sequence[int], places: Collection[int]) -> bool:
        return len(places) > self.protection.copies and any(True for _ in self._gone(among, places))

    def survived(self, lost: int) -> SurvivalCount:
        """Every loss of so many domains at once."""
        count = len(self.stretches)
        if lost > count:
            return SurvivalCount(lost, 0, 0, None)
        ways, is_counted = [1] + [0] * lost, True  # of so many domains of the sets so far, the losses that take nothing
        example: tuple[int, ...] | None = None
        for among in self.sets:
            mine = [self._whole(among, size) for size in range(min(lost, len(among)) + 1)]
            is_counted &= all(counted for _, _, counted in mine)
            ways = [sum(ways[n - k] * mine[k][0] for k in range(min(n, len(mine) - 1) + 1)) for n in range(lost + 1)]
            first = next((one for _, one, _ in mine if one is not None), None)
            if first is not None and example is None:
                rest = (d for d in range(count) if d not in first)
                example = tuple(sorted([*first, *(next(rest) for _ in range(lost - len(first)))]))
        return SurvivalCount(lost, ways[lost], comb(count, lost), example, is_counted)

    def _whole(self, among: Sequence[int], size: int) -> tuple[int, tuple[int, ...] | None, bool]:
        """The number of losses without effect, and the first with one.

        The losses are those of n domains of a set.
        """
        if size <= self.protection.copies:
            return comb(len(among), size), None, True
        if comb(len(among), size) > LOOKED_AT:
            return 0, tuple(among[:size]), False
        bad = [some for some in combinations(range(len(among)), size) if self._loses(among, some)]
        first = tuple(among[place] for place in bad[0]) if bad else None
        return comb(len(among), size) - len(bad), first, True

    def _gone(self, among: Sequence[int], places: Collection[int]) -> Iterator[tuple[int, Span]]:
        """(place in the set, bytes of its data) that are lost.

        They are lost without the domains at `places`.
        """
        groups = self._groups[len(among)]
        if not groups:  # nothing is kept for others
            yield from ((place, (0, self.stretches[among[place]].size)) for place in places)
            return
        block = self.block(among)
        for group in groups:
            missing = {
                place: [
                    (max(low, number * block) - number * block, min(high, (number + 1) * block) - number * block)
                    for low, high in _held(self.stretches[among[place]])
                    if low < (number + 1) * block and high > number * block
                ]
                for place, number in group.data
                if place in places
            }
            parity = sum(1 for place, _ in group.parity if place in places)
            numbers = dict(group.data)
            for low, high, mine in _cut(missing):
                if len(mine) + parity > len(group.parity):
                    for place in mine:
                        yield place, (numbers[place] * block + low, numbers[place] * block + high)


def _held(stretch: DomainData) -> Iterator[Span]:
    return ((start, start + size) for start, size in zip(stretch.starts, stretch.sizes, strict=False) if size)


def _cut(spans: Mapping[int, Iterable[Span]]) -> Iterator[tuple[int, int, list[int]]]:
    """Split spans where the set of places changes."""
    ends = sorted({end for some in spans.values() for span in some for end in span})
    for low, high in pairwise(ends):
        mine = [place for place, some in spans.items() if any(a <= low and high <= b for a, b in some)]
        if mine:
            yield low, high, mine


def _by_rank(stretch: DomainData, spans: Iterable[Span]) -> Iterator[LostRange]:
    """Spans of a domain as spans of its arenas.

    They consist of complete chunks, and adjacent ones are joined.
    """
    of_data = sorted(spans)
    for rank, start, size in zip(stretch.ranks, stretch.starts, stretch.sizes, strict=False):
        joined: list[list[int]] = []
        for low, high in of_data:
            a, b = max(low, start) - start, min(high, start + size) - start
            if a >= b:
                continue
            a, b = a // CHUNK * CHUNK, min(size, -(-b // CHUNK) * CHUNK)
            if joined and a <= joined[-1][1]:
                joined[-1][1] = max(b, joined[-1][1])
            else:
                joined.append([a, b])
        yield from (LostRange(rank, a, b) for a, b in joined)
