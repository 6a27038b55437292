"""The picture of a vault: domains, slots, and blocks.

Blocks replace each other. As a value, SVG and HTML.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.pictures.drawing import Drawing, text_width
from ucpl.pictures.look import COLOURS, binary_text, clipped, shade_of
from ucpl.pictures.page import picture_page
from ucpl.records import frozen
from ucpl.storage.vaults.protection import Protection, get_sets

__all__ = ["BlockShown", "VaultPicture", "vault_html", "vault_picture", "vault_svg"]


# ---- values ----------------------------------------------------------------------------------------------------------

DOMAINS_MAX = 64  # that are drawn one by one
GROUPS_MAX = 16  # of a set


@frozen
class DomainShown:
    """A domain, and the bytes in one slot of it."""

    number: int
    ranks: tuple[int, ...]
    saved: tuple[int, ...]  # by each rank
    for_others: int

    @property
    def slot(self) -> int:
        return sum(self.saved) + self.for_others


@frozen
class BlockShown:
    """A block of a domain in a group: own data, or parity."""

    group: int
    domain: int
    is_parity: bool
    number: int  # of its data, or of its parity


@frozen
class SetShown:
    """Domains that protect each other, and their groups.

    Any block of a group can be computed from enough others.
    """

    domains: tuple[int, ...]
    groups: int
    needed: int  # blocks of a group that make the others
    blocks: tuple[BlockShown, ...]
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

    def text(self) -> str:
        ranks = sum(len(d.ranks) for d in self.domains)
        more = f" and {self.more:,} more" if self.more else ""
        return f"{ranks:,} ranks in {len(self.domains):,} domains{more} · {self.protection} · two slots of each"

    def tip(self, domain: DomainShown, rank: int) -> str:
        return f"d{domain.number}: rank {rank} saves {domain.saved[domain.ranks.index(rank)]:,} bytes at each step"

    def parity_tip(self, domain: DomainShown) -> str:
        return f"d{domain.number} holds {domain.for_others:,} bytes for others"

    def block_tip(self, block: BlockShown, shown: SetShown) -> str:
        what = "its data for others" if block.is_parity else "its data"
        blocks = sum(1 for other in shown.blocks if other.group == block.group)
        others = f"any {shown.needed} of {blocks} make the others"
        return f"d{block.domain}: block {block.number} of {what}; group {block.group}: {others}"


def vault_picture(
    call: str,
    protection: Protection,
    domains: Sequence[tuple[tuple[int, ...], Sequence[int], int]],
    survived: Sequence[str],
) -> VaultPicture:
    """domains: ranks, bytes that ranks save, bytes for other domains."""
    shown = tuple(
        DomainShown(number, ranks, tuple(saved), for_others)
        for number, (ranks, saved, for_others) in enumerate(domains[:DOMAINS_MAX])
    )
    sets = tuple(
        _set(protection, among)
        for among in get_sets(len(domains), protection)
        if protection.name != "none" and among[-1] < DOMAINS_MAX
    )
    return VaultPicture(clipped(call, 400), str(protection), shown, len(domains) - len(shown), sets, tuple(survived))


def _set(protection: Protection, among: tuple[int, ...]) -> SetShown:
    groups = protection.groups(len(among))
    blocks = []
    for number, group in enumerate(groups[:GROUPS_MAX]):
        blocks += [BlockShown(number, among[place], False, which) for place, which in group.data]
        blocks += [BlockShown(number, among[place], True, which) for place, which in group.parity]
    needed = max(len(group.data) for group in groups)
    return SetShown(among, min(len(groups), GROUPS_MAX), needed, tuple(blocks), max(0, len(groups) - GROUPS_MAX))


def bytes_text(domain: DomainShown) -> str:
    """The text behind a slot."""
    return f"{binary_text(sum(domain.saved))} saved, {binary_text(domain.for_others)} for others"


# ---- SVG -------------------------------------------------------------------------------------------------------------

WIDTH, MARGIN = 1200, 28
SLOTS_AT, SLOT_WIDTH = 200, 420  # the begin of both slots, and the width of the largest
SAID_AT = SLOTS_AT + SLOT_WIDTH + 12
BLOCKS_AT = 880
ROW, BAR = 44, 15
SAVED, HELD = shade_of(1), shade_of(7 + 16)
PARITY = 2 * len(COLOURS)  # from a group's colour to the hatching of data for others


def vault_svg(picture: VaultPicture, *, paper: bool = True) -> str:
    """One file, or part of a page without paper.

    Raises nothing: names may be any text.
    """
    d = Drawing(WIDTH, f"a vault of {picture.call}")
    y = _head(d, picture)
    shown = {number: one for one in picture.sets for number in one.domains}
    before: SetShown | None = None
    for domain in picture.domains:
        mine = shown.get(domain.number)
        if mine is not None and mine is not before:
            d.rule(MARGIN, WIDTH - MARGIN, y - 5)
            _groups(d, mine, y + 8)
            y += 16
        before = mine
        _domain(d, picture, domain, mine, y)
        y += ROW
    for line in (f"and {picture.more:,} domains more",) * bool(picture.more) + picture.survived:
        d.text(MARGIN, y + 14, clipped(line, 190), "small", title=line)
        y += 18
    return d.finished(y + 14, paper=paper)


def _head(d: Drawing, p: VaultPicture) -> float:
    d.text(MARGIN, 40, clipped(f"a vault of {p.call}", 84), "title", title=p.call)
    d.text(MARGIN, 62, p.text(), "faint")
    x = float(MARGIN)
    keys = ((SAVED, "saved by a rank"), (HELD, "held for others"), (shade_of(0), "a block of data, by its group"),
            (shade_of(0 + PARITY), "parity of its group"))  # fmt: skip
    for shade, text in keys:
        d.cell((x, 78, 22, 12), shade)
        d.text(x + 28, 88, text, "small")
        x += 28 + text_width(text) + 22
    return 118


def _groups(d: Drawing, one: SetShown, y: float) -> None:
    for group in range(one.groups):
        d.text(BLOCKS_AT + _cell(one) * (group + 0.5), y, f"g{group}", "middle")
    if one.more:
        d.text(BLOCKS_AT + _cell(one) * one.groups + 4, y, f"+ {one.more}", "small")


def _cell(one: SetShown) -> float:
    return min(44.0, (WIDTH - MARGIN - BLOCKS_AT - 30) / max(1, one.groups))


def _domain(d: Drawing, p: VaultPicture, domain: DomainShown, among: SetShown | None, y: float) -> None:
    scale = SLOT_WIDTH / p.largest
    ranks = f"rank{'s' * (len(domain.ranks) > 1)} {', '.join(map(str, domain.ranks))}"
    with d.group(domain=domain.number, saved=sum(domain.saved), held=domain.for_others):
        d.text(MARGIN, y + 14, f"d{domain.number}", "state")
        d.text(MARGIN + 36, y + 14, clipped(ranks, 22), "small", title=ranks)
        for slot in (0, 1):
            x, top = float(SLOTS_AT), y + 2 + slot * (BAR + 3)
            for rank, size in zip(domain.ranks, domain.saved, strict=True):
                if size:
                    d.cell((x, top, size * scale, BAR), SAVED, p.tip(domain, rank), labels=(f"r{rank}",))
                x += size * scale
            if domain.for_others:
                tip = p.parity_tip(domain)
                d.cell((x, top, domain.for_others * scale, BAR), HELD, tip, labels=("for others",))
        d.text(SAID_AT, y + 14, bytes_text(domain), "small")
        d.text(SAID_AT, y + 31, "and as much in the other slot", "small")
    if among is None:
        return
    with d.group(blocks=domain.number):
        for block in among.blocks:
            if block.domain == domain.number:
                shade = shade_of(block.group % len(COLOURS) + PARITY * block.is_parity)
                place = (BLOCKS_AT + _cell(among) * block.group, y + 2, _cell(among) - 2, 2.0 * BAR + 3)
                label = f"P{block.number}" if block.is_parity else str(block.number)
                d.cell(place, shade, p.block_tip(block, among), labels=(label,))


# ---- HTML ------------------------------------------------------------------------------------------------------------


def vault_html(picture: VaultPicture) -> str:
    """The same in a page, with a table of the domains."""
    rows = [(f"d{d.number}", ", ".join(map(str, d.ranks)), bytes_text(d)) for d in picture.domains]
    svg = vault_svg(picture, paper=False)
    return picture_page(f"A vault of {picture.call}", svg, ("domain", "ranks", "a slot"), rows)
