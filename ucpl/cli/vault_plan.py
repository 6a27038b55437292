"""`ucpl vault plan`: the properties of a vault, before it exists."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.options import given_of, memory_of, whole_number
from ucpl.cli.report import bandwidths_of
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.bandwidths import Bandwidths
    from ucpl.pictures.vaults import VaultPicture
    from ucpl.texts import Json
    from ucpl.vault.planning import VaultPlan
    from ucpl.vault.rank_schemes import Scheme

__all__ = ["picture_of", "run_plan"]

LOSE_MAX = 4
COPIES = 8  # a step of AdamW takes as long as so many copies of its result, as `benchmarks/vault.py` measures it
SHOWN = 8  # domains with a line each
HEAD = ("protection", "per byte", "any that may be lost", "a lost byte is made of", "survived of two lost")


def run_plan(options: Namespace, domains: int | list[list[int]] | None, console: Console) -> int:
    """Print the plan of a vault.

    Raises: UcplError E690, E696, and the errors of planning.
    """
    from ucpl.storage.vaults.records import REPLAYS_MAX
    from ucpl.vault.planning import plan_vault

    lose = whole_number("--lose", options.lose, LOSE_MAX) if options.lose else 1
    known = bandwidths_of(options.bandwidths)
    replays = whole_number("--replays", options.replays, REPLAYS_MAX) if options.replays else 0
    made = plan_vault(options.path, domains, options.protect, safe=lose, given=given_of(options), replays=replays)
    if options.room:
        _fitting(made, memory_of(options.room, "--room"))
    console.say(*_saved(made), *_replayed(made, known), *_rooms(made, known), *_table(made.ranked))
    console.say(f"protect    {made.scheme.protection}: {_reason(made, lose, options.protect is not None)}")
    console.say(*(f"survives   {line}" for line in _survived(made)))
    console.say(f"serve      ucpl vault serve ROOT/JOB {_how(made, options)} --domain 0")
    console.answer(_plan_json(made, lose, known))
    is_good = made.scheme.safe >= lose or not options.lose
    return Exit.DONE if is_good else Exit.ANSWER_IS_NO


def _survived(made: VaultPlan) -> list[str]:
    """The survivors of each number of losses, and the first fatal one."""
    lines = []
    for one in made.scheme.survived:
        text = (
            f"any {one.lost} of {len(made.domains)} domains lost: {_count(one.whole, one.of, one.is_counted)} leave all"
        )
        if one.example is None:
            lines.append(text)
            continue
        loss = made.loss(one.example)
        names = ", ".join(f"d{d}" for d in loss.domains)
        others = len(loss.tensors) - 1
        more = f" and {others} other tensor{'s' * (others > 1)}" if others > 0 else ""
        what = f"{loss.first}, {loss.tensors[0]}{more}" if loss.tensors else "the values that are no tensors"
        lines.append(f"{text}; lose {{{names}}}: {what}, {bytes_text(loss.bytes)}")
    return lines


def picture_of(options: Namespace, domains: int | list[list[int]] | None) -> VaultPicture:
    """The plan of a layout's vault, for `ucpl show`.

    Raises: UcplError E690, and the errors of planning.
    """
    from ucpl.pictures.vaults import vault_picture
    from ucpl.vault.planning import plan_vault

    made = plan_vault(options.layout, domains, options.protect, given=given_of(options))
    sizes = made.foreseen.sizes
    shown = [(room.ranks, [sizes[r] for r in room.ranks], room.for_others) for room in made.rooms]
    return vault_picture(made.foreseen.call, made.scheme.protection, shown, _survived(made))


def _fitting(made: VaultPlan, room: int) -> None:
    """Raises: UcplError E696."""
    number, dear = max(enumerate(made.rooms), key=lambda one: one[1].total)
    if dear.total <= room:
        return
    what = f"d{number} needs {bytes_text(dear.total)} in memory, and may have {bytes_text(room)}"
    each = f"{bytes_text(dear.saved)} that its ranks save and {bytes_text(dear.for_others)} that it holds for others"
    gradients = f", {bytes_text(dear.gradients)} for gradients" if dear.gradients else ""
    text = f"two slots of {each}{gradients}"
    less = [s for s in made.ranked if s.safe >= made.scheme.safe and s.for_others < made.scheme.for_others]
    remedy = (
        f"--protect '{less[0].protection}' takes less"
        if less
        else "make more domains of the ranks, or give them more memory"
    )
    fail("E696", what, Label(made.foreseen.call, text), remedy=remedy)


def _saved(made: VaultPlan) -> list[str]:
    foreseen = made.foreseen
    spared = (
        f"; {bytes_text(foreseen.spared)} more are held by several ranks alike, and saved once, by each of them a part"
        if foreseen.spared and foreseen.is_exact
        else ""
    )
    lines = [
        f"layout     {foreseen.call}: {len(foreseen.sizes):,} ranks in {len(made.domains):,} domains",
        f"saved      {bytes_text(foreseen.saved)} at each step{spared}",
    ]
    if not foreseen.is_exact:
        lines.append("saved      tensors alone are counted: files of its framework have more in them")
    lines += [f"derived    {state} is made of {source}: it is not saved" for state, source in foreseen.derived]
    return lines


def _replay_time(made: VaultPlan, known: Bandwidths) -> float:
    """Seconds of one core for the steps of a restore, at most."""
    return made.replays * made.foreseen.made * COPIES / known.copy


def _replayed(made: VaultPlan, known: Bandwidths | None) -> list[str]:
    if not made.replays:
        return []
    time = f", {_replay_time(made, known):.2g} s of one core" if known is not None else ""
    return [
        f"replays    {made.replays} of {made.replays + 1} saves keep gradients alone,"
        f" {bytes_text(sum(made.foreseen.gradients))}; {bytes_text(made.foreseen.made)} are made of them,"
        f" by {made.replays} steps of AdamW at most{time}"
    ]


def _rooms(made: VaultPlan, known: Bandwidths | None) -> list[str]:
    lines = []
    for number, room in enumerate(made.rooms[:SHOWN]):
        ranks = ", ".join(map(str, room.ranks)) if len(room.ranks) <= SHOWN else f"{len(room.ranks)} of them"
        lines.append(
            f"d{number:<9} ranks {ranks}: {bytes_text(room.saved)} saved, {bytes_text(room.for_others)} for others,"
            f" {bytes_text(room.total)} in {'all' if made.replays else 'two'} slots{_time(made, number, known)}"
        )
    if len(made.rooms) > SHOWN:
        dear = max(made.rooms, key=lambda room: room.total)
        lines.append(f"...        {len(made.rooms) - SHOWN:,} more; the dearest takes {bytes_text(dear.total)}")
    return lines


def _times(made: VaultPlan, number: int, known: Bandwidths) -> tuple[float, float]:
    """Seconds of a stop of the slowest rank, and until protection.

    Computed from copies.
    """
    room, guarded = made.rooms[number], made.guarded
    still = max((made.foreseen.sizes[rank] for rank in room.ranks), default=0) / known.copy
    reads = room.for_others * max(1, guarded.made_of) + room.saved  # its own are held against their digests
    return still, reads / known.copy


def _time(made: VaultPlan, number: int, known: Bandwidths | None) -> str:
    if known is None:
        return ""
    still, behind = _times(made, number, known)
    return f", a rank stops for {still:.2g} s, protected {behind:.2g} s later"


def _table(ranked: tuple[Scheme, ...]) -> list[str]:
    from ucpl.cli.console import table_lines

    rows = []
    for one in ranked:
        share = one.for_others / one.saved if one.saved else 0.0
        two = next((s for s in one.survived if s.lost == 2), None)
        made = str(one.guarded.made_of or "nothing")
        rows.append(
            (
                str(one.protection), f"{share:.2f}", str(one.safe), made,
                _count(two.whole, two.of, two.is_counted) if two is not None else "",
            )
        )  # fmt: skip
    return table_lines(HEAD, rows)


def _count(whole: int, of: int, is_counted: bool) -> str:
    return f"{'' if is_counted else 'at least '}{whole:,} of {of:,}"


def _reason(made: VaultPlan, lose: int, is_asked: bool) -> str:
    scheme = made.scheme
    if is_asked:
        better = next((s for s in made.ranked[1:] if s.safe >= lose and s.for_others < scheme.for_others), None)
        also = f"; {better.protection} takes less and survives any {better.safe} lost" if better is not None else ""
        return f"as asked; {scheme.why}{also}"
    if scheme.safe < lose:
        return f"no protection brings all back, whichever {lose} of {len(made.domains)} domains are lost; {scheme.why}"
    return f"the least memory under which any {lose} may be lost; {scheme.why}"


def _how(made: VaultPlan, options: Namespace) -> str:
    text = f"--protect '{made.scheme.protection}'" + (f" --replays {made.replays}" if made.replays else "")
    if not options.domains:
        return f"--layout '{made.foreseen.call}' {text}"
    if options.domains.isdigit():
        return f"--ranks {len(made.foreseen.sizes)} --domains {options.domains} {text}"
    return f"--domains {options.domains} {text}"


def _plan_json(made: VaultPlan, lose: int, known: Bandwidths | None) -> dict[str, object]:
    schemes: list[Json] = [
        {
            "protect": str(one.protection), "for_others": one.for_others, "safe": one.safe, "made_of": one.guarded.made_of,
            "survived": [
                {"lost": s.lost, "whole": s.whole, "of": s.of, "counted": s.is_counted,
                 "example": list(s.example) if s.example is not None else None}
                for s in one.survived
            ],
        }
        for one in made.ranked
    ]  # fmt: skip
    domains: list[Json] = []
    for number, room in enumerate(made.rooms):
        told: dict[str, Json] = {
            "gradients": room.gradients,
            "ranks": list(room.ranks),
            "saved": room.saved,
            "for_others": room.for_others,
            "memory": room.total,
        }
        if known is not None:
            told["stands_still"], told["protected_after"] = _times(made, number, known)
        domains.append(told)
    losses: list[Json] = []
    for one in made.scheme.survived:
        if one.example is not None:
            loss = made.loss(one.example)
            losses.append(
                {"domains": list(loss.domains), "bytes": loss.bytes, "tensors": list(loss.tensors), "first": loss.first}
            )
    return {
        "layout": made.foreseen.call,
        "saved": made.foreseen.saved,
        "spared": made.foreseen.spared,
        "exact": made.foreseen.is_exact,
        "derived": [list(one) for one in made.foreseen.derived],
        "replays": made.replays,
        "replayed": made.foreseen.made if made.replays else 0,
        "gradients": sum(made.foreseen.gradients) if made.replays else 0,
        "protect": str(made.scheme.protection),
        "lose": lose,
        "domains": domains,
        "schemes": schemes,
        "losses": losses,
    }
