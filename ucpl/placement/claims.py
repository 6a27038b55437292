"""Places of stored tensors: no two tensors have the same.

The templates of names prove it; names are compared one by one only if these leave it open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np
from attrs import field

from ucpl.errors import fail
from ucpl.extents import Key
from ucpl.language.nodes import NOWHERE, Span
from ucpl.layout import Entry
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_dim
from ucpl.layout.scope import at
from ucpl.placement.homes import Homes
from ucpl.records import define, frozen
from ucpl.tables import I64, distinct
from ucpl.tables.blocks import CHOICE, COORDINATE, Block, Listed, Slot, name_texts

__all__ = ["BufferMark", "Claimant", "Claims", "EntryMark", "Mark", "Place", "Spot", "taken"]

_HOLE = "\0"
_NUMBER = re.compile(r"((?:-?[0-9]|\0)+)")
Tokens = tuple[str | None, ...]  # a name's texts and numbers in turn; None is a number that changes
Mark = object  # the stored tensor: one tensor has one mark, on all its ranks
Place = tuple[str, Key]
Spot = tuple[int, int, int]  # block, coordinate, choice


@frozen(eq=False)
class Claimant:
    """A part that claims the places of its tensors."""

    homes: Homes
    mark: Callable[[Spot], Mark]
    blame: Callable[
        [Place, Claimant, Mark, Mark], NoReturn
    ]  # of the later part: the place, the earlier part, their shared block
    span: Span = NOWHERE

    @property
    def components(self) -> tuple[str, ...]:
        """File and steps of the key, with a hole for each slot.

        They are those of the first block, whose templates all share.
        """
        block = self.homes.blocks[0]
        names = (block.file, *block.key)
        return tuple("".join(p if isinstance(p, str) else _HOLE for p in name) for name in names)

    def each(self) -> list[tuple[Spot, Place]]:
        return [
            ((b, c, j), block.place(c, j))
            for b, block in enumerate(self.homes.blocks)
            for c in range(len(block.rank))
            for j in range(block.choices)
        ]


@define
class Claims:
    """The places of a layout."""

    # By form, by the numbers that change, by the literal text.
    holders: dict[str, dict[tuple[bool, ...], dict[Tokens, list[Claimant]]]] = field(factory=dict)
    wild: list[Claimant] = field(factory=list)  # with texts in their names that are no numbers
    every: list[Claimant] = field(factory=list)
    families: list[_Named] = field(factory=list)  # each under the names of many tensors
    listed: dict[int, dict[Place, tuple[Mark, Claimant]]] = field(factory=dict)
    distinct: dict[object, bool] = field(
        factory=dict
    )  # results of `_are_distinct`, by slots, which tensors and states share

    def claim(self, holder: Claimant) -> list[Spot] | None:
        """Claim places: None if all are new, else the new ones' tensors.

        The others are the same tensor once more. Raises errors of `blame`, if a place is another tensor's.
        """
        if not len(holder.homes):
            return None
        rivals = self._rivals(holder)
        if not rivals and self._are_distinct(holder.homes.blocks):
            return None
        seen: dict[Place, tuple[Mark, Claimant]] = {}
        for other in rivals:
            for place, held in self._listed(other).items():
                seen.setdefault(place, held)
        kept = []
        mine: dict[Place, tuple[Mark, Claimant]] = {}
        for spot, place in holder.each():
            mark = holder.mark(spot)
            known = seen.get(place) or mine.get(place)
            if known is None:
                mine[place] = (mark, holder)
                kept.append(spot)
            elif known[0] != mark:
                holder.blame(place, known[1], mark, known[0])
        self.listed[id(holder)] = mine
        return None if len(kept) == len(holder.homes) else kept

    def _rivals(self, holder: Claimant) -> list[Claimant]:
        """Earlier parts that might have one of the places.

        The part joins them.
        """
        components = holder.components
        if (mine := _Named.of(holder, components)) is not None:
            found = [other.holder for other in self.families if other.meets(mine)]
            found += [other for other in self.every if mine.has(other.components)]
            self.families.append(mine)
            return found
        name = "\1".join(components)
        tokens = tuple(None if _HOLE in t else t for t in _NUMBER.split(name))
        if any(_is_wild(s) for b in holder.homes.blocks for s in b.slots):
            found = list(self.every)
            self.wild.append(holder)
        else:
            changing = tuple(t is None for t in tokens)
            found = list(self.wild)
            form = self.holders.setdefault(_NUMBER.sub("#", name), {})
            for theirs, known in form.items():
                if theirs == changing:
                    found += known.get(tokens, ())
                else:
                    found += [h for other, held in known.items() if _may_meet(other, tokens) for h in held]
            form.setdefault(changing, {}).setdefault(tokens, []).append(holder)
        self.every.append(holder)
        return [*found, *(family.holder for family in self.families if family.has(components))]

    def _are_distinct(self, blocks: tuple[Block, ...]) -> bool:
        """Cached form of the function below.

        Slots stay as long as the parts that claimed their places.
        """
        slots = tuple((len(b.rank), b.choices, *((s.axis, id(s.values)) for s in b.slots)) for b in blocks)
        if slots not in self.distinct:
            self.distinct[slots] = _are_distinct(blocks)
        return self.distinct[slots]

    def _listed(self, holder: Claimant) -> dict[Place, tuple[Mark, Claimant]]:
        if id(holder) not in self.listed:
            self.listed[id(holder)] = {place: (holder.mark(spot), holder) for spot, place in holder.each()}
        return self.listed[id(holder)]


@frozen(eq=False)
class _Named:
    """Places of a family.

    One step of them is a text around the name of a tensor. The others have no names.
    """

    holder: Claimant
    components: tuple[str, ...]
    step: int
    texts: frozenset[str]  # of this step, one a tensor

    @classmethod
    def of(cls, holder: Claimant, components: tuple[str, ...]) -> _Named | None:
        """None: the places have another form."""
        block = holder.homes.blocks[0]
        if block.owned is not None:
            return cls._of_bundle(holder, components, block.owned)
        if any(block.named is None for block in holder.homes.blocks):
            return None
        steps = [n for n, name in enumerate((block.file, *block.key)) if any(_is_choice(part) for part in name)]
        if len(steps) != 1:
            return None
        step, texts = steps[0], set[str]()
        for block in holder.homes.blocks:
            name = (block.file, *block.key)[step]
            if any(isinstance(part, Slot) and part.axis == COORDINATE for part in name):
                return None
            texts.update(name_texts(name, (0,) * block.choices, range(block.choices)))
        return cls(holder, components, step, frozenset(texts))

    @classmethod
    def _of_bundle(cls, holder: Claimant, components: tuple[str, ...], owned: Listed) -> _Named | None:
        """Its tensors are coordinates of one block."""
        (block,) = holder.homes.blocks
        names = (block.file, *block.key)
        steps = [n for n, name in enumerate(names) if any(_is_owned(part, owned) for part in name)]
        if len(steps) != 1 or sum(isinstance(part, Slot) for part in names[steps[0]]) != 1:
            return None
        before, _, after = "".join(p if isinstance(p, str) else _HOLE for p in names[steps[0]]).partition(_HOLE)
        return cls(holder, components, steps[0], frozenset([before + name + after for name in owned.texts]))

    def meets(self, other: _Named) -> bool:
        """True if two families may have a place in common."""
        if self.step != other.step or len(self.components) != len(other.components):
            return len(self.components) == len(other.components)
        apart = self._differ(other.components)
        return not apart and not self.texts.isdisjoint(other.texts)

    def has(self, components: tuple[str, ...]) -> bool:
        """True if one of the family's places may be one of these."""
        if len(components) != len(self.components) or self._differ(components):
            return False
        return _HOLE in components[self.step] or components[self.step] in self.texts

    def _differ(self, components: tuple[str, ...]) -> bool:
        """True if another step has other text."""
        pairs = zip(self.components, components, strict=True)
        return any(a != b and _HOLE not in a + b for n, (a, b) in enumerate(pairs) if n != self.step)


def _is_choice(part: str | Slot) -> bool:
    return isinstance(part, Slot) and part.axis == CHOICE


def _is_owned(part: str | Slot, owned: Listed) -> bool:
    return isinstance(part, Slot) and part.values is owned


def _may_meet(a: Tokens, b: Tokens) -> bool:
    """True if two names of one form can be equal.

    If both are literal, they are.
    """
    return all(x == y for x, y in zip(a, b, strict=True) if x is not None and y is not None)


def _is_wild(slot: Slot) -> bool:
    texts = slot.values.texts if isinstance(slot.values, Listed) else slot.values
    return isinstance(texts, tuple) and not all(v.isdigit() for v in texts)


def _codes(block: Block, axis: int) -> list[tuple[str, ...]] | I64:
    """Values of an axis' slots: a row per coordinate or choice."""
    slots = [s for s in block.slots if s.axis == axis]
    count = block.choices if axis == CHOICE else len(block.rank)
    if block.owned is not None and axis == COORDINATE:  # names of a model differ: so do their numbers
        owned = block.owned.at
        slots = [Slot(s.axis, owned) if s.values is block.owned else s for s in slots]
    if any(isinstance(s.values, tuple | Listed) for s in slots):
        return [*zip(*(s.texts(range(count)) for s in slots), strict=True)]
    columns = [s.values for s in slots if not isinstance(s.values, tuple | Listed)]
    return np.stack(columns, axis=1) if columns else np.zeros((count, 0), dtype=np.int64)


def _different(tables: list[list[tuple[str, ...]] | I64]) -> int:
    """Number of different rows of the tables."""
    numbers = [t for t in tables if not isinstance(t, list)]
    if len(numbers) == len(tables):
        columns = list(np.concatenate(numbers).T)
        return len(distinct(columns)) if len(columns) else min(1, sum(len(t) for t in tables))
    return len({tuple(row) for table in tables for row in (table if isinstance(table, list) else table.tolist())})


def _are_distinct(blocks: tuple[Block, ...]) -> bool:
    """True if no two tensors of the blocks have one place.

    The blocks share their templates. Two are distinct if their slots of coordinates differ, or those of choices. So
    they are, if both are distinct within each block, and one of the two over all blocks.
    """
    if len(blocks) == 1 and len(blocks[0]) == 1:
        return True
    tables = [[_codes(b, axis) for b in blocks] for axis in (COORDINATE, CHOICE)]
    over_all = False
    for of_axis in tables:
        counts = [len(t) for t in of_axis]
        if any(_different([t]) != n for t, n in zip(of_axis, counts, strict=True)):
            return False
        over_all = over_all or len(blocks) == 1 or _different(of_axis) == sum(counts)
    return over_all


# --- Two tensors at one place ---------------------------------------------------------------------------------------

_STATE = 'name the state in the key, as in "{key}.{state}"; or give each state a file of its own'
_APART = "name the index or mesh axis that distinguishes them in the file's or the key's template"


class EntryMark(NamedTuple):
    """Tensor of an entry at one place.

    One tensor is equal on all its ranks.
    """

    state: str
    targets: tuple[tuple[str | None, str], ...]
    shape: tuple[ax.Axis, ...]
    coordinates: tuple[tuple[str, int], ...]  # along the mesh axes that cut it
    digits: tuple[tuple[str, int], ...]


class BufferMark(NamedTuple):
    """A flat buffer of a state line.

    It has the line, the state, and the numbers of buffer and piece.
    """

    line: int
    state: str
    spot: Spot


def taken(span: Span, entry: Entry | None = None) -> Callable[[Place, Claimant, Mark, Mark], NoReturn]:
    """The error for a part of these lines.

    `entry`: whose tensor it is; None for a flat buffer.
    """

    def blame(place: Place, other: Claimant, mine: Mark, theirs: Mark) -> NoReturn:
        fail(
            "E215",
            f"two tensors, or two pieces of one, have one place: {'/'.join(map(str, place[1]))} of {place[0]}",
            at(span, "this one"),
            at(other.span, "and this one"),
            remedy=_remedy(place, entry, mine, theirs, one_line=span == other.span),
        )

    return blame


def _remedy(place: Place, entry: Entry | None, mine: Mark, theirs: Mark, *, one_line: bool) -> str:
    key = "/".join(map(str, place[1]))
    if not place[0]:
        return 'the file has no name: file weights = torch "rank_{tp}.pt"'
    if isinstance(mine, BufferMark) and isinstance(theirs, BufferMark) and one_line:
        lacks = "state" if mine.state != theirs.state else "bucket"
        more = "; where ranks differ, the mesh axis in the file's name, as {dp}" if lacks == "bucket" else ""
        return f'a line of many buffers names each in its key by {{{lacks}}}, as in "{{bucket}}/{{state}}"{more}'
    if entry is None or not isinstance(mine, EntryMark) or not isinstance(theirs, EntryMark):
        return _telling_apart(key, ())
    if mine.state != theirs.state:
        return _STATE
    if mine.targets != theirs.targets:
        names = [" + ".join(path for _, path in one.targets) for one in (mine, theirs)]
        if one_line:
            word = "{key}" if mine.state != "weight" else "{name}"
            of = ": {name} is the same for all layers, {key} is not" if word == "{key}" else ""
            return f'the line is for {names[0]} and {names[1]}: name the tensor in the key, as in "{word}"{of}'
        indices = "".join(f".{{{name}}}" for axis in entry.indices for name in list(ax.dims_of(axis))[:1])
        text = f"they are two tensors, {names[0]} and {names[1]}: give one of them another key"
        if f"{entry.path}{indices}" == key:  # its own: the other one's is to be another
            return f'{text}\nwrite: as "{names[1]}"'
        return f'{text}\nwrite: as "{entry.path}{indices}"'
    differing = [n for (n, a), (_, b) in zip(mine.digits, theirs.digits, strict=False) if a != b]
    cut = [n for (n, a), (_, b) in zip(mine.coordinates, theirs.coordinates, strict=False) if a != b]
    if mine.state != "weight" and differing and not cut:
        return f'name the tensor in the key by {{key}}, which has its {" and ".join(differing)}: "{{state}}/{{key}}"'
    return _telling_apart(key, (*differing, *cut))


def _telling_apart(key: str, by: tuple[str, ...]) -> str:
    """The remedy with the corrected key.

    It is for a key with a sign of another tool in the place of an index.
    """
    sign = next((s for s in ("%d", "%s", "*", "\\d+") if s in key), "")
    if sign:
        return f'{_APART}: an index is written in braces, as in "{key.replace(sign, "{l}")}"'
    return (
        f"{_APART}: {' and '.join(f'{{{whole_dim(name)}}}' for name in by)}" if by else f"{_APART}, as {{l}} or {{tp}}"
    )
