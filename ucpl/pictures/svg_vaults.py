"""The picture of a vault, as one SVG file: a row for each domain, with both slots, and its blocks by their groups."""

from __future__ import annotations

from ucpl.pictures.drawing import Drawing, text_width
from ucpl.pictures.look import COLOURS, clipped, shade_of
from ucpl.pictures.vaults import DomainShown, SetShown, VaultPicture, bytes_said

__all__ = ["vault_svg"]

WIDTH, MARGIN = 1200, 28
SLOTS_AT, SLOT_WIDTH = 200, 420  # where both slots begin, and how wide the largest is
SAID_AT = SLOTS_AT + SLOT_WIDTH + 12
BLOCKS_AT = 880
ROW, BAR = 44, 15
SAVED, HELD = shade_of(1), shade_of(7 + 16)
PARITY = 2 * len(COLOURS)  # from a group's colour to the hatching of what is held for others


def vault_svg(picture: VaultPicture, *, paper: bool = True) -> str:
    """One file; paper: or else a part of a page. Raises nothing: names are whatever they are."""
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
    d.text(MARGIN, 62, p.said(), "faint")
    x = float(MARGIN)
    keys = ((SAVED, "what a rank saves"), (HELD, "held for others"), (shade_of(0), "a block of data, by its group"),
            (shade_of(0 + PARITY), "what makes up for others of the group"))  # fmt: skip
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
        d.text(SAID_AT, y + 14, bytes_said(domain), "small")
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
