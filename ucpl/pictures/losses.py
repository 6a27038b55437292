"""The picture of layouts that fit after a loss, the best first.

As a value, SVG and HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucpl.conversion.contingency import Choice, Loss, LossRequest
from ucpl.pictures.drawing import Drawing, text_width
from ucpl.pictures.look import binary_text, clipped, printable, shade_of, share_text
from ucpl.pictures.page import bar, page, tag
from ucpl.records import frozen

__all__ = ["losses_html", "losses_picture", "losses_svg"]


# ---- values ----------------------------------------------------------------------------------------------------------

REFUSED_MAX = 6  # of a loss


@frozen
class FittingLayout:
    """A layout that fits a loss."""

    label: str  # its degrees
    call: str
    ranks: int  # that it uses
    held: int  # bytes on the dearest rank
    sent: int  # bytes between ranks, on the way there
    plan: str  # the name of its file


@frozen
class OneLoss:
    """A loss: the ranks that are left, and the layouts for them.

    Those that fit, the best first, and the others with the reason.
    """

    lost: int  # units
    left: int  # ranks
    choices: tuple[FittingLayout, ...]
    refused: tuple[tuple[str, str], ...]
    more: int  # that do not fit and are not listed


@frozen
class LossesPicture:
    source: str
    ranks: int
    held: int  # bytes on the dearest rank of the source
    unit: str
    size: int  # ranks of a unit
    room: int | None  # bytes that a rank may hold
    losses: tuple[OneLoss, ...]

    @property
    def most_held(self) -> int:
        return max([self.held, self.room or 0, *(c.held for one in self.losses for c in one.choices)]) or 1

    @property
    def most_sent(self) -> int:
        return max((c.sent for one in self.losses for c in one.choices), default=0) or 1

    def said(self) -> str:
        """One line about the current layout and the request."""
        parts = [f"{self.ranks:,} ranks with at most {binary_text(self.held)} each"]
        parts.append(f"lost at once: a {self.unit} of {self.size:,} rank{'s' * (self.size > 1)}")
        parts += [f"a rank has room for {binary_text(self.room)}"] if self.room is not None else []
        return " · ".join(parts)

    def title(self, one: OneLoss) -> str:
        lost = f"{one.lost:,} {self.unit}{'s' * (one.lost > 1)} lost"
        return f"{lost}: {one.left:,} of {self.ranks:,} rank{'s' * (self.ranks > 1)} left"

    def used_text(self, one: OneLoss, choice: FittingLayout) -> str:
        return f"{choice.ranks:,} of {one.left:,} · {share_text(choice.ranks, one.left)}"

    def tip(self, one: OneLoss, choice: FittingLayout) -> str:
        """The lines that hovering over a row shows."""
        idle = one.left - choice.ranks
        return "\n".join(
            (
                printable(choice.call),
                f"uses {choice.ranks:,} ranks of the {one.left:,} that are left; {idle:,} idle",
                f"a rank holds {choice.held:,} bytes at most, {self.held:,} now",
                f"{choice.sent:,} bytes go between ranks on the way there",
                f"plan {printable(choice.plan)}",
            )
        )


def losses_picture(
    source: str, size: tuple[int, int], unit: str, wish: LossRequest, losses: Sequence[tuple[Loss, Sequence[str]]]
) -> LossesPicture:
    """size: ranks of the source, and bytes on the fullest.

    Losses: each with the names of its choices' plans.
    """
    rows = []
    for loss, names in losses:
        choices = tuple(_fitting(choice, name) for choice, name in zip(loss.choices, names, strict=True))
        refused = tuple(loss.refused[:REFUSED_MAX])
        rows.append(OneLoss(loss.lost, loss.left, choices, refused, len(loss.refused) - len(refused)))
    ranks, held = size
    return LossesPicture(clipped(source, 400), ranks, held, unit, wish.unit, wish.room, tuple(rows))


def _fitting(choice: Choice, name: str) -> FittingLayout:
    label = " · ".join(f"{axis} {degree:,}" for axis, degree in choice.degrees.items())
    return FittingLayout(label, choice.call, choice.ranks, choice.held, choice.cost.bytes_sent, name)


# ---- SVG -------------------------------------------------------------------------------------------------------------

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
    (HELD, "held by a rank"),
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
    marks = "upright lines: held by a rank now" + (", and its room" if p.room is not None else "")
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


def _choice(d: Drawing, p: LossesPicture, what: tuple[OneLoss, FittingLayout, int], y: float) -> None:
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


# ---- HTML ------------------------------------------------------------------------------------------------------------

BAR_SHARE = 0.6  # of a row, for the longest bar: its text is behind it


def losses_html(picture: LossesPicture) -> str:
    """One file. Raises nothing: names are whatever they are."""
    body = [tag("h1", f"After a loss: {picture.source}"), tag("p", picture.said())]
    keys = "".join(f'<li><i class="{_kind(shade)}"></i>{text}</li>' for shade, text in KEYS)
    body.append(f'<ul class="legend">{keys}</ul>')
    for one in picture.losses:
        body += _loss_lines(picture, one)
    return page(f"After a loss: {picture.source}", "\n".join(body))


def _kind(shade: int | None) -> str:
    return "k" if shade is None else f"s{shade}"


def _loss_lines(p: LossesPicture, one: OneLoss) -> Iterator[str]:
    yield tag("h2", p.title(one))
    if not one.choices:
        yield tag("p", "nothing fits")
    for number, choice in enumerate(one.choices, 1):
        yield tag("h3", f"{number}. {choice.label}") + '<div class="rows">'
        yield from _bar_lines(p, one, choice)
        yield "</div>"
    if one.refused:
        count = len(one.refused) + one.more
        yield f"<details><summary>{count:,} that do not fit</summary>"
        yield from (tag("p", f"{degrees}: {why}") for degrees, why in one.refused)
        yield tag("p", f"and {one.more:,} more") if one.more else ""
        yield "</details>"


def _bar_lines(p: LossesPicture, one: OneLoss, choice: FittingLayout) -> Iterator[str]:
    tip = p.tip(one, choice)
    shares = ((choice.ranks, USED), (one.left - choice.ranks, IDLE), (p.ranks - one.left, None))
    parts = [(BAR_SHARE * count / p.ranks, _kind(shade), tip, "") for count, shade in shares if count]
    yield tag("span", "ranks in use") + bar(parts, p.used_text(one, choice))
    held = [(BAR_SHARE * choice.held / p.most_held, _kind(HELD), tip, "")]
    yield tag("span", "a rank holds") + bar(held, binary_text(choice.held))
    sent = [(BAR_SHARE * choice.sent / p.most_sent, _kind(SENT), tip, "")]
    yield tag("span", "sent between ranks") + bar(sent, binary_text(choice.sent))
    yield tag("span", "plan") + tag("span", choice.plan, kind="name")
