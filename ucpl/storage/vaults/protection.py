"""Redundancy between domains: sets, groups of blocks, and their codes.

Domains form *sets*. With `raim5` in a set of n domains, each domain's data is n - 1 blocks. Each of n *groups* has one
block of every domain but one; this one stores the XOR of the blocks. A set survives the loss of any one domain. `rs(k,
m)` has m such domains per group, which store m Reed-Solomon codes: a set survives the loss of any m domains.
`mirror(m)` stores the data of a domain on the next m domains of its set, with the same result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from ucpl.errors import Label, fail
from ucpl.records import frozen

__all__ = [
    "BLOCK",
    "CODED_MAX",
    "ParityGroup",
    "Protection",
    "block_size",
    "check_partition",
    "even_domains",
    "get_sets",
]

BLOCK = 4096  # bytes that blocks are multiples of
SHOWN = 4  # ranks that a message names
CODED_MAX = 32  # domains of a set with rs: the limit of pyeclib
_CALL = re.compile(r"\s*([a-z][a-z0-9]*)\s*(?:\(\s*(\d{1,4})\s*(?:,\s*(\d{1,4})\s*)?\))?\s*")
_FORMS = (
    "none, mirror, mirror(2), raim5, raim5(4) for sets of four domains, or rs(6, 2) for sets of eight that may lose two"
)


@frozen
class ParityGroup:
    """Blocks that can be computed from each other.

    Each is (place in the set, number of the block on that domain). With `rs`, the n-th parity block is the n-th code.
    """

    data: tuple[tuple[int, int], ...]
    parity: tuple[tuple[int, int], ...]


@frozen
class Protection:
    """The redundancy of a vault.

    `size`: domains per set, 0: all of them.
    `copies`: domains of a set that may be lost.
    """

    name: str  # none, mirror, raim5, rs
    size: int = 0
    copies: int = 1

    @classmethod
    def parse(cls, text: str) -> Protection:
        """`none`, `mirror`, `mirror(2)`, `raim5`, `raim5(4)`, `rs(6, 2)`. Raises: UcplError E690."""
        found = _CALL.fullmatch(text)
        name, *said = (found[1], found[2], found[3]) if found is not None else ("",)
        numbers = [int(one) for one in said if one is not None]
        match name, numbers:
            case "none", []:
                return cls("none", 1, 0)
            case "mirror", [] | [_] if 0 not in numbers:
                copies = numbers[0] if numbers else 1
                return cls("mirror", copies + 1, copies)
            case "raim5", []:
                return cls("raim5")
            case "raim5", [size] if size > 1:
                return cls("raim5", size)
            case "rs", [data, codes] if data and codes:
                return cls("rs", data + codes, codes)
        fail("E690", f"{text!r} is not a protection", Label("--protect", where=text), remedy=f"write {_FORMS}")

    def __str__(self) -> str:
        if self.name == "mirror":
            return f"mirror({self.copies})"
        if self.name == "rs":
            return f"rs({self.size - self.copies}, {self.copies})"
        return f"raim5({self.size})" if self.name == "raim5" and self.size else self.name

    def blocks(self, size: int) -> tuple[int, int]:
        """(data blocks, redundancy blocks) of a domain in such a set."""
        if self.name == "none":
            return 1, 0
        if self.name == "mirror":
            return 1, self.copies
        return size - self.copies, self.copies

    def groups(self, size: int) -> tuple[ParityGroup, ...]:
        """The groups of a set of so many domains."""
        if self.name == "none":
            return ()
        copies = self.copies
        if self.name == "mirror":
            return tuple(
                ParityGroup(((g, 0),), tuple(((g + 1 + j) % size, j) for j in range(copies))) for g in range(size)
            )
        return tuple(
            ParityGroup(
                tuple((p, (p - g) % size - copies) for p in range(size) if (p - g) % size >= copies),
                tuple(((g + j) % size, j) for j in range(copies)),
            )
            for g in range(size)
        )


def even_domains(ranks: int, domains: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks, equally many per domain. Raises: UcplError E690."""
    if domains < 1 or ranks % domains:
        what = f"{ranks} ranks do not divide into {domains} domains"
        fail("E690", what, Label("--domains", where=str(domains)), remedy="list the ranks of each domain")
    each = ranks // domains
    return tuple(tuple(range(d * each, (d + 1) * each)) for d in range(domains))


def check_partition(domains: Sequence[Sequence[int]], ranks: int | None = None, of: str = "") -> None:
    """Check that each rank is in one domain. Raises: UcplError E690.

    ranks: their number; None: the highest rank plus one.
    of: the object that has this number of ranks.
    """
    places: dict[int, list[int]] = {}
    for number, some in enumerate(domains):
        for rank in some:
            places.setdefault(rank, []).append(number)
    count = ranks if ranks is not None else max((*places, 0)) + 1
    lines = [f"rank {r} is in {' and '.join(f'd{n}' for n in at)}" for r, at in sorted(places.items()) if len(at) > 1]
    lines += islice((f"rank {r} is in none" for r in range(count) if r not in places), SHOWN)
    lines += [f"rank {r} does not exist" for r in sorted(places) if not 0 <= r < count]
    if lines:
        more = f", and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        what = f"each rank{of} must be in one domain: {', '.join(lines[:SHOWN])}{more}"
        remedy = "name each rank from 0 on once, as in --domains 0,1/2,3"
        fail(
            "E690",
            what,
            Label("--domains", where="/".join(",".join(map(str, some)) for some in domains)[:60]),
            remedy=remedy,
        )


def get_sets(domains: int, protection: Protection) -> tuple[tuple[int, ...], ...]:
    """The domains of each set, in order; sets have about equal sizes.

    Raises: UcplError E690.
    """
    size = protection.size or domains
    if domains < size or (protection.name != "none" and size < 2):
        what = f"{protection} is for {max(2, size)} domains or more, there are {domains}"
        remedy = "name more domains, or --protect none"
        fail("E690", what, Label("--domains", where=str(domains)), remedy=remedy)
    count = domains // size
    each, more = divmod(domains, count)
    if protection.name == "rs" and each + bool(more) > CODED_MAX:
        what = f"{protection} over {domains} domains has sets of {each + bool(more)} domains; the limit is {CODED_MAX}"
        fail("E690", what, Label("--protect", where=str(protection)), remedy="name fewer blocks")
    ends = [0]
    for i in range(count):
        ends.append(ends[-1] + each + (i < more))
    return tuple(tuple(range(ends[i], ends[i + 1])) for i in range(count))


def block_size(lengths: Sequence[int], blocks: int) -> int:
    """Bytes per block for domains with these data lengths."""
    most = -(-max(lengths, default=0) // blocks)
    return -(-most // BLOCK) * BLOCK
