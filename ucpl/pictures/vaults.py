"""What a vault holds where, as a value: domains, what lies in their two slots, and which blocks make up for each other."""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.pictures.look import binary_text, clipped
from ucpl.records import frozen
from ucpl.remotes.vaults.codes import Protection, sets_of

__all__ = ["Block", "DomainShown", "SetShown", "VaultPicture", "vault_picture"]

DOMAINS_MAX = 64  # that are drawn one by one
GROUPS_MAX = 16  # of a set


@frozen
class DomainShown:
    """A domain, and what one slot of it holds, in bytes."""

    number: int
    ranks: tuple[int, ...]
    saved: tuple[int, ...]  # by each rank
    for_others: int

    @property
    def slot(self) -> int:
        return sum(self.saved) + self.for_others


@frozen
class Block:
    """A block of a domain in a group: of its data, or of what it holds for others."""

    group: int
    domain: int
    is_parity: bool
    number: int  # of its data, or of what it holds


@frozen
class SetShown:
    """Domains that protect each other, and their groups: any of a group's blocks can be made of enough others."""

    domains: tuple[int, ...]
    groups: int
    needed: int  # blocks of a group that make the others
    blocks: tuple[Block, ...]
    more: int  # groups that are not drawn


@frozen
class VaultPicture:
    call: str
    protection: str
    domains: tuple[DomainShown, ...]
    more: int  # domains that are not drawn
    sets: tuple[SetShown, ...]
    survived: tuple[str, ...]

    @property
    def largest(self) -> int:
        """Bytes of the largest slot."""
        return max((d.slot for d in self.domains), default=0) or 1

    def said(self) -> str:
        ranks = sum(len(d.ranks) for d in self.domains)
        more = f" and {self.more:,} more" if self.more else ""
        return f"{ranks:,} ranks in {len(self.domains):,} domains{more} · {self.protection} · two slots of each"

    def tip(self, domain: DomainShown, rank: int) -> str:
        return f"d{domain.number}: rank {rank} saves {domain.saved[domain.ranks.index(rank)]:,} bytes at each step"

    def parity_tip(self, domain: DomainShown) -> str:
        return f"d{domain.number} holds {domain.for_others:,} bytes for others"

    def block_tip(self, block: Block, shown: SetShown) -> str:
        what = "what it holds for others" if block.is_parity else "its data"
        blocks = sum(1 for other in shown.blocks if other.group == block.group)
        others = f"any {shown.needed} of {blocks} make the others"
        return f"d{block.domain}: block {block.number} of {what}; group {block.group}: {others}"


def vault_picture(
    call: str,
    protection: Protection,
    domains: Sequence[tuple[tuple[int, ...], Sequence[int], int]],
    survived: Sequence[str] = (),
) -> VaultPicture:
    """domains: ranks of each, the bytes that each of them saves, and the bytes that the domain holds for others."""
    shown = tuple(
        DomainShown(number, ranks, tuple(saved), for_others)
        for number, (ranks, saved, for_others) in enumerate(domains[:DOMAINS_MAX])
    )
    sets = tuple(
        _set(protection, among)
        for among in sets_of(len(domains), protection)
        if protection.name != "none" and among[-1] < DOMAINS_MAX
    )
    return VaultPicture(clipped(call, 400), str(protection), shown, len(domains) - len(shown), sets, tuple(survived))


def _set(protection: Protection, among: tuple[int, ...]) -> SetShown:
    groups = protection.groups(len(among))
    blocks = []
    for number, group in enumerate(groups[:GROUPS_MAX]):
        blocks += [Block(number, among[place], False, which) for place, which in group.data]
        blocks += [Block(number, among[place], True, which) for place, which in group.parity]
    needed = max(len(group.data) for group in groups)
    return SetShown(among, min(len(groups), GROUPS_MAX), needed, tuple(blocks), max(0, len(groups) - GROUPS_MAX))


def bytes_said(domain: DomainShown) -> str:
    """What stands behind a slot."""
    return f"{binary_text(sum(domain.saved))} saved, {binary_text(domain.for_others)} for others"
