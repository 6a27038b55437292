"""Generations with gradients alone: their state is replayed from the previous one.

`Replay` has the origin of every named value of a generation: saved bytes, or an optimizer step over the previous
generation. `Over` lays the replayed values over a file of the complete generation.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NoReturn, TypeGuard

from attrs import field

from ucpl.digests import crc32
from ucpl.errors import Label, UcplError, fail
from ucpl.records import define, frozen
from ucpl.storage.vaults.memory import Memory
from ucpl.storage.vaults.records import SavedFile, SavedValue, Shard

__all__ = ["GRADIENT", "Over", "Replay"]

GRADIENT = "grad."  # prefix of a parameter's name
KEPT = 256 << 20  # bytes of tensors that were made last


class _StepRecordError(ValueError):
    """A malformed record of a step."""


@frozen(eq=False)
class _Place:
    """A value as it was saved."""

    memory: Memory
    rank: int
    at: int  # in the rank's arena
    file: SavedFile
    named: SavedValue

    def fill(self, into: memoryview, offset: int) -> None:
        """Raises: UcplError E691."""
        self.memory.fill(self.rank, into, self.at + offset)

    def read(self) -> bytearray:
        """Raises: UcplError E691."""
        room = bytearray(self.named.size)
        self.fill(memoryview(room), 0)
        return room


@frozen(eq=False)
class _Unit:
    """A parameter of a step, on its rank.

    Its names end with the position of its first element.
    """

    group: Mapping[str, object]
    device: str
    by: Mapping[str, object]
    weights: tuple[str, ...]
    moments: Mapping[str, str]
    step: str
    marks: tuple[str, ...]  # of the weight and the moments
    gradient: str

    @property
    def made(self) -> dict[str, str]:
        """The role of each name in the parameter's state."""
        return dict.fromkeys(self.weights, "weight") | {name: what for what, name in self.moments.items()}


@define(eq=False)
class _Step:
    """One generation: the saved values by name, and the replayed ones."""

    memory: Memory
    places: dict[str, _Place] = field(factory=dict)
    units: dict[str, _Unit] = field(factory=dict)  # by each name that it makes

    @classmethod
    def of(cls, memory: Memory) -> _Step:
        """Raises: ValueError."""
        found = cls(memory)
        for shard in memory.commit.shards:
            for file in shard.files:
                for named in file.named:
                    found.places[named.name] = _Place(memory, shard.rank, _in_arena(file, named), file, named)
            for unit in _units(shard) if shard.depth else ():
                found.units |= dict.fromkeys(unit.made, unit)
        return found


def _in_arena(file: SavedFile, named: SavedValue) -> int:
    for one in file.segments:
        if one.begin <= named.at and named.at + named.size <= one.begin + one.size:
            return one.at + named.at - one.begin
    raise _StepRecordError(f"{named.name} was not saved completely")


def _units(shard: Shard) -> Iterator[_Unit]:
    """Raises: ValueError."""
    step_record = shard.replay
    groups, units, by = step_record.get("groups"), step_record.get("units"), step_record.get("by")
    if not isinstance(groups, list) or not isinstance(units, dict) or not isinstance(by, dict):
        raise _StepRecordError("groups, units, by")
    if step_record.get("optimizer") != "AdamW" or not isinstance(by.get("device"), str):
        raise _StepRecordError("the optimizer")
    places = {named.name for file in shard.files for named in file.named}
    for place in sorted(places):
        if not place.startswith(GRADIENT):
            continue
        name, at, offset = place.removeprefix(GRADIENT).rpartition("@")
        unit = units.get(name)
        if not isinstance(unit, dict) or not at:
            raise _StepRecordError(f"{place} has no record")
        group, weights, moments = unit.get("group"), unit.get("weights"), unit.get("moments")
        marks, step = unit.get("marks"), unit.get("step")
        if type(group) is not int or not 0 <= group < len(groups) or not isinstance(groups[group], dict):
            raise _StepRecordError(f"the group of {name}")
        if (
            not _are_texts(weights)
            or not weights
            or not isinstance(moments, dict)
            or not _are_texts([*moments.values()])
        ):
            raise _StepRecordError(f"the replay of {place}")
        if not isinstance(step, str) or not _are_texts(marks) or len(marks) != 1 + len(moments):
            raise _StepRecordError(f"the step of {name}")
        yield _Unit(
            groups[group], by["device"], by, tuple(f"{one}@{offset}" for one in weights),
            {what: f"{one}@{offset}" for what, one in moments.items()}, f"{step}@", tuple(marks), place,
        )  # fmt: skip


def _are_texts(some: object) -> TypeGuard[list[str]]:
    return isinstance(some, list) and all(isinstance(one, str) for one in some)


@define(eq=False)
class Replay:
    """The origin of the values in the newest of several generations."""

    memory: Memory  # with those before it
    _made: dict[str, dict[str, memoryview]] = field(factory=dict)  # by the gradient's name, the last result
    _held: int = 0  # bytes of these
    _crcs: dict[str, int] = field(factory=dict)  # of replayed values by name, if requested
    _lock: threading.RLock = field(factory=threading.RLock)

    @cached_property
    def _steps(self) -> list[_Step]:
        """Raises: UcplError E698."""
        try:
            base, *steps = [_Step.of(one) for one in (*self.memory.before, self.memory)]
        except (ValueError, TypeError) as error:
            self._refuse(f"its record is invalid: {error}")
        for step in steps:
            saved = {name for name in step.places if not name.startswith(GRADIENT)}
            units = {id(unit): unit for unit in step.units.values()}.values()
            needed = saved | {name for unit in units for name in (*unit.made, unit.step)}
            if unknown := sorted(needed - base.places.keys()):
                self._refuse(f"the complete generation has no {unknown[0]}")
            if missing := sorted(base.places.keys() - step.places.keys() - step.units.keys()):
                self._refuse(f"{missing[0]} was not saved, and no step computes it")
            for unit in units:
                kinds = {(p.size, p.dtype, p.shape) for name in unit.weights if (p := base.places[name].named)}
                if len(kinds) != 1:
                    self._refuse(f"names of one tensor have several sizes: {', '.join(unit.weights)}")
        return [base, *steps]

    def over(self, file: str) -> Over:
        """The replayed ranges of a file. Raises: UcplError E698."""
        base, newest = self._steps[0], self._steps[-1]
        over = Over()
        for name, place in base.places.items():
            if place.file.name != file:
                continue
            mine, holes = place.named, _holes(place)
            if name not in newest.units:
                saved = newest.places[name]
                if (saved.named.size, saved.named.dtype, saved.named.shape) != (mine.size, mine.dtype, mine.shape):
                    self._refuse(f"{name} has another size than in the complete generation")
                over.add(mine.at, mine.size, saved.fill)
                over.add_crcs(holes, partial(_crc_of, saved))
            else:
                over.add(mine.at, mine.size, partial(self._fill, name))
                over.replayed.append((mine.at, mine.at + mine.size, self._gradients(name)))
                # Second names of a tensor have one mark.
                mark = crc32(newest.units[name].gradient.encode(), 0)
                over.add_crcs(holes, partial(self._crc, name), mark)
        over.order()
        return over

    def _gradients(self, name: str) -> int:
        """Bytes of gradients that a replay of this value reads."""
        return sum(s.places[s.units[name].gradient].named.size for s in self._steps if name in s.units)

    def attempt(self, rank: int) -> None:
        """Replay the newest step of the smallest parameter of a rank.

        Raises: UcplError E691, E698.
        """
        units = {id(unit): unit for unit in self._steps[-1].units.values()}.values()
        places = self._steps[-1].places
        mine = [(places[u.gradient].named.size, u.weights[0]) for u in units if places[u.gradient].rank == rank]
        if mine:
            self._value(min(mine)[1])

    # ---- making --------------------------------------------------------------------------------------------------------

    def _fill(self, name: str, into: memoryview, offset: int) -> None:
        """Raises: UcplError E691, E698."""
        into[:] = self._value(name)[offset : offset + len(into)]

    def _value(self, name: str) -> memoryview:
        newest = len(self._steps) - 1
        unit = self._steps[newest].units[name]
        with self._lock:
            made = self._made.pop(unit.gradient, None)
            if made is None:
                made = self._stepped(unit, newest)
                self._held += _size(made)
            self._made[unit.gradient] = made  # it was asked for last
            while len(self._made) > 1 and self._held > KEPT:
                self._held -= _size(self._made.pop(next(iter(self._made))))
            return made[name]

    def _crc(self, name: str) -> int:
        if name not in self._crcs:
            self._crcs[name] = crc32(self._value(name), 0)
        return self._crcs[name]

    def _stepped(self, unit: _Unit, number: int) -> dict[str, memoryview]:
        """The result of a step, by name. Raises: UcplError E691, E698."""
        from ucpl.storage.vaults.adamw import Raw, environment, replay_step  # torch, which most that is read needs not
        from ucpl.storage.vaults.state_digests import state_digest

        step = self._steps[number]
        here = environment(unit.device)
        if here != unit.by:
            step_record = (", ".join(f"{name} {value}" for name, value in one.items()) for one in (unit.by, here))
            self._refuse(
                f"it was trained with {next(step_record)}, and this is {next(step_record)}: the bits may differ"
            )
        before = self._steps[number - 1]
        earlier: dict[str, dict[str, memoryview]] = {}

        def had(name: str) -> bytearray | memoryview:
            if (other := before.units.get(name)) is None:
                return before.places[name].read()
            if other.gradient not in earlier:
                earlier[other.gradient] = self._stepped(other, number - 1)
            return earlier[other.gradient][name]

        try:
            names = {"weight": unit.weights[0], **unit.moments, "step": unit.step}
            places = {what: self._steps[0].places[name].named for what, name in names.items()}
            raws = {w: Raw(had(name), places[w].dtype, places[w].shape) for w, name in names.items()}
            gradient = step.places[unit.gradient]
            found = replay_step(
                unit.group, unit.device, raws, Raw(gradient.read(), gradient.named.dtype, gradient.named.shape)
            )
            steps = bytes(step.places[unit.step].read())
        except UcplError:
            raise
        except Exception as error:  # all errors of torch for these inputs
            self._refuse(f"{unit.gradient}: {type(error).__name__}: {str(error)[:200]}")
        is_last = number == len(self._steps) - 1  # an error in an earlier step changes this result too
        for mark, what in zip(unit.marks, ("weight", *unit.moments), strict=True) if is_last else ():
            if " " not in mark:
                self._refuse(f"{names[what]}: it was saved by another version of ucpl")
            if state_digest(found[what], mark) != mark:
                self._refuse(f"{names[what]}: the replayed step differs from the trained value: other code wrote to it")
        if found["step"] != steps:
            self._refuse(f"{unit.step} is not the saved step")
        return {name: found[what] for name, what in unit.made.items()}

    def _refuse(self, why: str) -> NoReturn:
        home, generation = self.memory.home, self.memory.commit.generation
        fail("E698", f"{home}: generation {generation} cannot be replayed: {why}", Label(str(home)))


def _size(made: Mapping[str, memoryview]) -> int:
    """Bytes of memory: second names have none of their own."""
    return sum({id(one.obj): len(one) for one in made.values()}.values())


def _crc_of(place: _Place) -> int:
    return place.file.crcs.get(place.named.storage, 0)


def _holes(place: _Place) -> list[int]:
    """Positions of a storage's CRC in its file."""
    if not place.named.storage:
        return []
    return [late.begin + at for late in place.file.late for name, at in late.holes if name == place.named.storage]


_Fill = Callable[[memoryview, int], None]


@define(eq=False)
class Over:
    """Replayed ranges of a file, ascending."""

    pieces: list[tuple[int, int, _Fill, _Fill]] = field(factory=list)  # exact, and sooner had
    replayed: list[tuple[int, int, int]] = field(factory=list)  # replayed values, and bytes of gradients that they need
    _begins: Sequence[int] = ()

    def add(self, begin: int, size: int, fill: _Fill, sooner: _Fill | None = None) -> None:
        self.pieces.append((begin, begin + size, fill, sooner or fill))

    def add_crcs(self, holes: Sequence[int], crc: Callable[[], int], mark: int | None = None) -> None:
        """Add the positions and the function of a CRC.

        mark: a value in its place for readers that do not need the CRC.
        """

        def fill(into: memoryview, offset: int) -> None:
            into[:] = crc().to_bytes(4, "little")[offset : offset + len(into)]

        def sooner(into: memoryview, offset: int) -> None:
            into[:] = (mark or 0).to_bytes(4, "little")[offset : offset + len(into)]

        for at in holes:
            self.add(at, 4, fill, sooner if mark is not None else None)

    def order(self) -> None:
        self.pieces.sort(key=lambda one: one[:2])
        self.replayed.sort()
        self._begins = [begin for begin, *_ in self.pieces]

    def fill(self, into: memoryview, position: int, under: _Fill, *, exact: bool = True) -> None:
        """Bytes of the file from `position`.

        under: fills the ranges that are not replayed.
        exact: also compute the CRCs.
        """
        at, end = position, position + len(into)
        i = max(0, bisect_right(self._begins, position) - 1)
        while i < len(self.pieces) and self.pieces[i][0] < end:
            begin, high, fill, sooner = self.pieces[i]
            i, fill = i + 1, fill if exact else sooner
            low, high = max(begin, at), min(high, end)
            if low >= high:
                continue
            if at < low:
                under(into[at - position : low - position], at)
            fill(into[low - position : high - position], low - begin)
            at = high
        if at < end:
            under(into[at - position :], at)
