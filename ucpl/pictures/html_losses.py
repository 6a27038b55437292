"""The picture of what can be run after which loss, as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.pictures.look import binary_text
from ucpl.pictures.losses import Fitting, LossesPicture, OneLoss
from ucpl.pictures.page import bar, page, tag
from ucpl.pictures.svg_losses import HELD, IDLE, KEYS, SENT, USED

__all__ = ["losses_html"]

ROOM = 0.6  # of a row, for the longest bar: what is said of it stands behind it


def losses_html(picture: LossesPicture) -> str:
    """One file. Raises nothing: names are whatever they are."""
    body = [tag("h1", f"After a loss: {picture.source}"), tag("p", picture.said())]
    keys = "".join(f'<li><i class="{_kind(shade)}"></i>{text}</li>' for shade, text in KEYS)
    body.append(f'<ul class="legend">{keys}</ul>')
    for one in picture.losses:
        body += _loss(picture, one)
    return page(f"After a loss: {picture.source}", "\n".join(body))


def _kind(shade: int | None) -> str:
    return "k" if shade is None else f"s{shade}"


def _loss(p: LossesPicture, one: OneLoss) -> Iterator[str]:
    yield tag("h2", p.title(one))
    if not one.choices:
        yield tag("p", "nothing fits")
    for number, choice in enumerate(one.choices, 1):
        yield tag("h3", f"{number}. {choice.label}") + '<div class="rows">'
        yield from _bars(p, one, choice)
        yield "</div>"
    if one.refused:
        count = len(one.refused) + one.more
        yield f"<details><summary>{count:,} that do not fit</summary>"
        yield from (tag("p", f"{degrees}: {why}") for degrees, why in one.refused)
        yield tag("p", f"and {one.more:,} more") if one.more else ""
        yield "</details>"


def _bars(p: LossesPicture, one: OneLoss, choice: Fitting) -> Iterator[str]:
    tip = p.tip(one, choice)
    shares = ((choice.ranks, USED), (one.left - choice.ranks, IDLE), (p.ranks - one.left, None))
    parts = [(ROOM * count / p.ranks, _kind(shade), tip, "") for count, shade in shares if count]
    yield tag("span", "ranks in use") + bar(parts, p.used_text(one, choice))
    held = [(ROOM * choice.held / p.most_held, _kind(HELD), tip, "")]
    yield tag("span", "a rank holds") + bar(held, binary_text(choice.held))
    sent = [(ROOM * choice.sent / p.most_sent, _kind(SENT), tip, "")]
    yield tag("span", "sent between ranks") + bar(sent, binary_text(choice.sent))
    yield tag("span", "plan") + tag("span", choice.plan, kind="name")
