"""The law: the moves of a plan and back change no element."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ucpl.api import parse_target
from ucpl.conversion.requests import Given
from ucpl.conversion.side import located
from ucpl.extents import Key, key_text
from ucpl.graph import build
from ucpl.language import parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.layout.scope import Config, Value
from ucpl.placement import Placement, element_name, locate
from ucpl.planning import Plan, order
from ucpl.records import frozen
from ucpl.testing.numbers import F64, Place, Whole, gather, lay_out, live_numbers, numbered, run
from ucpl.verification.proof.coverage import prove

__all__ = ["Example", "Side", "assert_round_trip"]


@frozen
class Example:
    """A text and a call of a layout, drawn by strategies.

    Prints as something that can be run.
    """

    text: str
    call: str
    name: str = "example.ucpl"

    def __str__(self) -> str:
        return f"{self.text}# {self.call}\n"

    __repr__ = __str__

    def layout(self) -> Layout:
        return resolve(load((self.name, self.text)), parse_call(self.call))


NUMBERED_MAX = 1 << 24  # elements of a model: a number each, of each state, four times over

Side = str | Example | Layout | Placement


def assert_round_trip(
    source: Side,
    target: Side,
    *,
    drop: tuple[str, ...] = (),
    config: Config | None = None,
    sizes: Mapping[str, Value] | None = None,
) -> int:
    """Move by a plan, compare with the target's numbers, and move back.

    Returns the number of elements.

    source, target: layouts of one model, as calls (`"FILE.ucpl:layout(tp = 2)"`), examples, resolved or located.
    drop:           names of tensors and states that the target may leave out; there is no way back then.
    config:         a config.json, of layouts that are given as calls. sizes: of model or layout, by name, as -D gives them.

    Raises AssertionError naming the tensor and the element; UcplError where the plan itself is refused; ValueError for a model
    of more elements than can be numbered.
    """
    given = Given(config=dict(config) if config is not None else None, sizes=dict(sizes or {}))
    here, there = _located(source, given), _located(target, given)
    _refuse_large(here)
    # A source of partial sums has no way back: refused before its copies are taken for addends.
    return_plan = None if drop else _plan(there, here, ())
    same = _derived_from(here, there)
    whole = numbered(here, same)
    stored = lay_out(here, whole)
    moved = _moved(_plan(here, there, drop), (here, there), stored, whole)
    if return_plan is not None:
        back = _moved(return_plan, (there, here), moved, whole)
        for (path, state), array in gather(here, back).items():
            wrong = np.argwhere(array != whole[path, state])
            assert not len(wrong), (
                f"{state} of {element_name(here.layout, path, tuple(wrong[0].tolist()))} came back changed"
            )
    return sum(t.numel for t in here.layout.tensors.values())


def _refuse_large(placement: Placement) -> None:
    count = sum(t.numel for t in placement.layout.tensors.values())
    if count > NUMBERED_MAX:
        raise ValueError(
            f"{placement.layout.call} has {count:,} elements, and each is given a number: at most {NUMBERED_MAX:,}."
            " Give smaller sizes, as in sizes={'h': 8}"
        )


def _located(side: Side, given: Given) -> Placement:
    match side:
        case Placement():
            return side
        case Layout():
            return locate(side)
        case Example():
            return locate(side.layout())
        case str():
            return located(parse_target(side), given).placement


def _derived_from(*placements: Placement) -> dict[str, str]:
    """States that a layout derives.

    They hold the numbers of their origin, on both sides.
    """
    out: dict[str, str] = {}
    for placement in placements:
        for d in placement.layout.derived:
            if out.get(d.source, d.source) != d.state:
                out.setdefault(d.state, out.get(d.source, d.source))
    return {state: origin for state, origin in out.items() if state != origin}


def _plan(source: Placement, target: Placement, drop: tuple[str, ...]) -> Plan:
    tensors = source.layout.tensors
    untyped = {
        (home.file, tuple(map(str, home.key)))
        for part in source.parts
        if part.dtype is None and not any(s.name == part.state for s in source.layout.states)
        if not all(tensors[source.tensors[t]].dtype for t in part.tensors)
        for home in part.homes
    }
    typed = all(t.dtype for t in tensors.values())

    def dtype_of(file: str, key: Key) -> str | None:
        return "f32" if (file, tuple(map(str, key))) in untyped else None

    graph = build(source, target, drop=drop, dtype_of=None if typed else dtype_of)
    prove(graph)
    return order(graph)


def _moved(plan: Plan, sides: tuple[Placement, Placement], stored: dict[Place, F64], whole: Whole) -> dict[Place, F64]:
    """The stored arrays after the moves.

    Raises AssertionError at the first place that differs from the target.
    """
    source, target = sides
    moved = run(plan, stored)
    wanted = lay_out(target, whole, live_numbers(source, whole))
    assert set(moved) == set(wanted), f"stored on one side only: {sorted(set(moved) ^ set(wanted), key=str)[:3]}"
    for place, array in wanted.items():
        got = moved[place]
        wrong = np.flatnonzero((got != array) & ~(np.isnan(got) & np.isnan(array)))
        if len(wrong):
            raise AssertionError(
                f"{key_text(place[1])} of {place[0]}, position {wrong[0]}: {_owner(source, whole, got[wrong[0]])}"
                f" instead of {_owner(target, whole, array[wrong[0]])}"
            )
    return moved


def _owner(placement: Placement, whole: Whole, number: float) -> str:
    """The element that has this number."""
    for (path, state), array in whole.items():
        found = np.argwhere(array == number)
        if len(found):
            return f"{state} of {element_name(placement.layout, path, tuple(found[0].tolist()))}"
    return "nothing" if np.isnan(number) else f"the number {number:g}"
