"""The picture of what can be run after which loss, as one SVG file: a row for each layout that fits, the best first."""

from __future__ import annotations

from ucpl.pictures.drawing import Drawing, text_width
from ucpl.pictures.look import binary_text, clipped, shade_of
from ucpl.pictures.losses import Fitting, LossesPicture, OneLoss

__all__ = ["HELD", "IDLE", "KEYS", "SENT", "USED", "losses_svg"]

WIDTH, MARGIN = 1200, 28
RANKED, USED_AT, HELD_AT, SENT_AT, PLAN_AT = 28, 262, 536, 756, 952  # where columns begin
BAR = {USED_AT: 150, HELD_AT: 120, SENT_AT: 100}
USED, IDLE, HELD, SENT = (
    shade_of(2),
    shade_of(3 + 8),
    shade_of(1 + 16),
    shade_of(4 + 24),
)  # colours and hatchings differ
KEYS = (
    (USED, "ranks in use"),
    (IDLE, "idle"),
    (None, "lost"),
    (HELD, "what a rank holds"),
    (SENT, "sent between ranks"),
)
ROW = 22


def losses_svg(picture: LossesPicture) -> str:
    """One file. Raises nothing: names are whatever they are."""
    d = Drawing(WIDTH, f"after a loss: {picture.source}")
    y = _head(d, picture)
    for one in picture.losses:
        y = _loss(d, picture, one, y)
    return d.finished(y + 8)


def _head(d: Drawing, p: LossesPicture) -> float:
    d.text(MARGIN, 40, clipped(p.source, 84), "title", title=p.source)
    d.text(MARGIN, 62, p.said(), "faint")
    x = float(MARGIN)
    for shade, text in KEYS:
        d.cell((x, 78, 22, 12), shade)
        d.text(x + 28, 88, text, "small")
        x += 28 + text_width(text) + 22
    marks = "upright lines: what a rank holds now" + (", and has room for" if p.room is not None else "")
    d.text(x, 88, marks, "small")
    return 112


def _loss(d: Drawing, p: LossesPicture, one: OneLoss, y: float) -> float:
    d.rule(MARGIN, WIDTH - MARGIN, y)
    d.text(MARGIN, y + 24, p.title(one), "title2")
    if one.choices:
        heads = {USED_AT: "ranks in use", HELD_AT: "a rank holds", SENT_AT: "sent between ranks", PLAN_AT: "plan"}
        for x, text in heads.items():
            d.text(x, y + 44, text, "small")
    else:
        d.text(MARGIN, y + 44, "nothing fits", "state")
    y += 50
    with d.group(lost=one.lost, left=one.left):
        for number, choice in enumerate(one.choices, 1):
            _choice(d, p, (one, choice, number), y)
            y += ROW
    for degrees, why in one.refused:
        d.cell((MARGIN, y + 5, 8, 8), None)
        d.text(MARGIN + 14, y + 13, clipped(degrees, 34), "small", title=degrees)
        d.text(USED_AT, y + 13, clipped(f"does not fit: {why}", 150), "small", title=why)
        y += 18
    if one.more:
        d.text(USED_AT, y + 13, f"and {one.more:,} more that do not fit", "small")
        y += 18
    return y + 12


def _choice(d: Drawing, p: LossesPicture, what: tuple[OneLoss, Fitting, int], y: float) -> None:
    one, choice, number = what
    tip = p.tip(one, choice)
    with d.group(call=choice.call, ranks=choice.ranks, held=choice.held, sent=choice.sent):
        d.text(MARGIN, y + 14, f"{number}. {clipped(choice.label, 30)}", "state" if number == 1 else "", title=tip)
        x, scale = float(USED_AT), BAR[USED_AT] / p.ranks
        for count, shade in ((choice.ranks, USED), (one.left - choice.ranks, IDLE), (p.ranks - one.left, None)):
            if count:
                d.cell((x, y + 2, count * scale, 16), shade, tip)
                x += count * scale
        d.text(USED_AT + BAR[USED_AT] + 8, y + 14, p.used_text(one, choice), "small", title=tip)
        for at, amount, most, shade in (
            (HELD_AT, choice.held, p.most_held, HELD),
            (SENT_AT, choice.sent, p.most_sent, SENT),
        ):
            d.cell((at, y + 2, max(1.0, BAR[at] * amount / most), 16), shade, tip)
            d.text(at + BAR[at] + 8, y + 14, binary_text(amount), "small", title=tip)
        for mark in (p.held, p.room):
            if mark is not None:
                d.post(HELD_AT + BAR[HELD_AT] * mark / p.most_held, y - 1, y + 21)
        d.text(PLAN_AT, y + 14, clipped(choice.plan, 36), "small", title=tip)
