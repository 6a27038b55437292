"""What can be run after which loss, as a value: the layouts that fit, ranked, and those that do not, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.conversion.contingency import Choice, Loss, Wish
from ucpl.pictures.look import binary_text, clipped, printable, share_text
from ucpl.records import frozen

__all__ = ["Fitting", "LossesPicture", "OneLoss", "losses_picture"]

REFUSED_MAX = 6  # of a loss


@frozen
class Fitting:
    """A layout that fits a loss."""

    label: str  # its degrees
    call: str
    ranks: int  # that it uses
    held: int  # bytes on the dearest rank
    sent: int  # bytes between ranks, on the way there
    plan: str  # the name of its file


@frozen
class OneLoss:
    """A loss: the ranks that are left, what fits them, the best first, and what does not, with the reason."""

    lost: int  # units
    left: int  # ranks
    choices: tuple[Fitting, ...]
    refused: tuple[tuple[str, str], ...]
    more: int  # that do not fit and are not told


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
        """One line of what runs now, and of what is asked."""
        parts = [f"{self.ranks:,} ranks, of which one holds {binary_text(self.held)} at most"]
        parts.append(f"lost at once: a {self.unit} of {self.size:,} rank{'s' * (self.size > 1)}")
        parts += [f"a rank has room for {binary_text(self.room)}"] if self.room is not None else []
        return " · ".join(parts)

    def title(self, one: OneLoss) -> str:
        lost = f"{one.lost:,} {self.unit}{'s' * (one.lost > 1)} lost"
        return f"{lost}: {one.left:,} of {self.ranks:,} rank{'s' * (self.ranks > 1)} left"

    def used_text(self, one: OneLoss, choice: Fitting) -> str:
        return f"{choice.ranks:,} of {one.left:,} · {share_text(choice.ranks, one.left)}"

    def tip(self, one: OneLoss, choice: Fitting) -> str:
        """What hovering a row says: a line each."""
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
    source: str, size: tuple[int, int], unit: str, wish: Wish, losses: Sequence[tuple[Loss, Sequence[str]]]
) -> LossesPicture:
    """size: ranks of the source, and bytes on its dearest. losses: each with the names of its choices' plans."""
    rows = []
    for loss, names in losses:
        choices = tuple(_fitting(choice, name) for choice, name in zip(loss.choices, names, strict=True))
        refused = tuple(loss.refused[:REFUSED_MAX])
        rows.append(OneLoss(loss.lost, loss.left, choices, refused, len(loss.refused) - len(refused)))
    ranks, held = size
    return LossesPicture(clipped(source, 400), ranks, held, unit, wish.unit, wish.room, tuple(rows))


def _fitting(choice: Choice, name: str) -> Fitting:
    label = " · ".join(f"{axis} {degree:,}" for axis, degree in choice.degrees.items())
    return Fitting(label, choice.call, choice.ranks, choice.held, choice.cost.bytes_sent, name)
