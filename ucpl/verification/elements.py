"""Map positions of stored tensors to the model's elements, and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, field
from numpy.typing import NDArray

from ucpl.errors import Diagnostic, Label, catalogue
from ucpl.extents import key_text
from ucpl.layout.layout import Policy
from ucpl.placement import Home, Homes, Part, Pieces, Placement
from ucpl.placement.boxes import subtract
from ucpl.placement.placement import LOOSE, element_name
from ucpl.records import define, frozen
from ucpl.tables import I64

if TYPE_CHECKING:  # planning does not import the runtime
    from ucpl.runtime.compare import Unequal

__all__ = ["Elements", "Spot", "counted", "element_in", "only", "pairs_of", "spots_of"]

Pair = tuple[str, str]  # (tensor, state)


@frozen
class Spot:
    """One place of an element: part, home, row-major position in it."""

    part: int
    home: int
    position: int


def pairs_of(placement: Placement) -> set[Pair]:
    """The states of each tensor that a placement stores."""
    return {(placement.tensors[t], p.state) for p in placement.parts for t in p.tensors}


def only(placement: Placement, pairs: set[Pair], tensors: set[str] | None = None) -> Placement:
    """The placement with these pairs alone.

    Homes and their order stay, so that numbers of homes keep their meaning.
    """
    parts = []
    wanted = {  # by state: parts are as many as tensors where these are not stored alike
        state: np.array([(path, state) in pairs for path in placement.tensors] or [False])
        for state in {part.state for part in placement.parts}
    }
    for part in placement.parts:
        keep = np.flatnonzero(wanted[part.state][part.folded.tensor])
        if len(keep) == len(part.folded):
            parts.append(part)
        elif len(keep):
            parts.append(evolve(part, folded=part.folded.take(keep), homes=_unpadded(part.homes)))
    known = {path for path, _ in pairs} if tensors is None else tensors
    families = {
        path: one
        for path, one in placement.layout.families.items()
        if path in known or (tensors is not None and known.issuperset(one.names))
    }
    known = known.union(*(one.names for one in families.values()))
    of = {p: t for p, t in placement.layout.tensors.items() if p in known}
    layout = evolve(placement.layout, tensors=of, families=families)
    return Placement(layout, placement.tensors, tuple(parts), placement.flats, placement.blobs)


def counted(placement: Placement) -> Placement:
    """The places that a conversion reads. Copies under `any` are left out.

    The first of them is kept for elements that have no other place. The values of the others are not checked.
    """
    parts = list(placement.parts)
    for state in dict.fromkeys(p.state for p in parts if _is_loose(p.folded.policy).any()):
        numbers = sorted((n for n, p in enumerate(parts) if p.state == state), key=lambda n: parts[n].is_alias)
        held = _PlacedBoxes()
        for n in numbers:
            held.add(parts[n].folded.take(~_is_loose(parts[n].folded.policy)))
        for n in numbers:
            if _is_loose(parts[n].folded.policy).any():
                kept = held.first(parts[n].folded)
                homes = parts[n].homes
                if homes.padding and kept.volume.sum() < parts[n].folded.volume.sum():
                    homes = _unpadded(homes)
                parts[n] = evolve(parts[n], folded=kept, homes=homes)
    return Placement(placement.layout, placement.tensors, tuple(parts), placement.flats, placement.blobs)


def _unpadded(homes: Homes) -> Homes:
    """Without padding: elements that are left open are none."""
    return Homes(tuple(evolve(b, padding=np.zeros_like(b.padding)) for b in homes.blocks)) if homes.padding else homes


def _is_loose(policy: I64) -> NDArray[np.bool_]:
    """A mask of loose pieces.

    (Written out: tables are many and small, and NumPy's `isin` sorts.)
    """
    found: NDArray[np.bool_] = policy == LOOSE[0]
    for other in LOOSE[1:]:
        found |= policy == other
    return found


@define
class _PlacedBoxes:
    """Boxes of one state that have a place, by tensor, without duplicates."""

    boxes: dict[int, dict[bytes, tuple[I64, I64]]] = field(factory=dict)

    def add(self, pieces: Pieces) -> None:
        for tensor, low, high in zip(pieces.tensor.tolist(), pieces.low, pieces.high, strict=True):
            self.boxes.setdefault(tensor, {})[low.tobytes() + high.tobytes()] = (low, high)

    def first(self, pieces: Pieces) -> Pieces:
        """The pieces without boxes under `any` that already have a place.

        The rest counts as held from now on.
        Boxes that are equal to a leading box that stays also stay: they are checked as copies.
        """
        is_loose = _is_loose(pieces.policy)
        kept = [pieces.take(~is_loose)]
        led: set[tuple[int, bytes]] = set()
        for row in sorted(np.flatnonzero(is_loose).tolist(), key=lambda row: int(pieces.policy[row] != Policy.LEAD)):
            one = pieces.take(np.array([row]))
            low, high = one.low[0], one.high[0]
            known = self.boxes.get(int(one.tensor[0]), {})
            box = low.tobytes() + high.tobytes()
            if pieces.policy[row] == Policy.LEAD and (int(one.tensor[0]), box) in led:
                kept.append(one)
            elif box not in known:
                if pieces.policy[row] == Policy.LEAD:
                    led.add((int(one.tensor[0]), box))
                others = [np.array(side) for side in zip(*known.values(), strict=True)] or [low[:0], low[:0]]
                kept += [_within(one, *box) for box in subtract(low, high, others[0], others[1])]
                self.add(one)
        return Pieces.concat(kept)


def _within(piece: Pieces, low: I64, high: I64) -> Pieces:
    """The part low..high of a single box."""
    step = low - piece.low[0]
    return piece.replace(
        low=low[None],
        high=high[None],
        home=piece.home + (step * piece.home_stride[0]).sum(),
        offset=piece.offset + (step * piece.stride[0]).sum(),
    )


@frozen(eq=False, slots=False)
class Elements:
    """Names of a placement's elements, by stored tensor.

    Stored tensors are counted over all parts.
    """

    placement: Placement

    @cached_property
    def starts(self) -> I64:
        """(parts + 1,): the number of each part's first stored tensor."""
        return np.cumsum([0, *(len(part.homes) for part in self.placement.parts)])

    @cached_property
    def by_key(self) -> dict[str, list[int]]:
        """Numbers of the stored tensors with each key."""
        found: dict[str, list[int]] = {}
        places = (place for part in self.placement.parts for _, some in part.homes.places() for place in some)
        for number, (_, key) in enumerate(places):
            found.setdefault(key_text(key), []).append(number)
        return found

    def find(self, number: int) -> tuple[Part, int]:
        """Part of a stored tensor, and its number there."""
        n = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.placement.parts[n], number - int(self.starts[n])

    def home(self, number: int) -> Home:
        part, home = self.find(number)
        return part.homes.home(home)

    def at(self, number: int, position: int) -> tuple[str, str]:
        """(state, element) at a row-major position of a stored tensor.

        A position of padding is named by the stored tensor.
        """
        part, home = self.find(number)
        return part.state, element_in(self.placement, part, home, position)

    def wrong(self, u: Unequal) -> tuple[str, str]:
        """The same, for a target whose stored tensors these are."""
        return self.at(u.target, u.position(self.home(u.target).shape))

    def of(self, u: Unequal) -> str:
        """The name of a wrong element of a target: `weight of a[0, 1]`."""
        same = self.by_key[u.key]
        # Of chunks, a layout names the file that describes them, and `u` the one that has the bytes.
        number = next((n for n in same if self.home(n).file == u.file), same[0])
        return " of ".join(self.at(number, u.position(self.home(number).shape)))

    def finding(self, code: str, u: Unequal, text: str) -> Diagnostic:
        """A finding for the first wrong element of a stored tensor."""
        return Diagnostic(
            code,
            f"{self.of(u)}: {text}, {u.value} is not {u.wanted}",
            (
                Label(u.file, u.value, where=f"{u.key}{list(u.element)}"),
                Label(u.source_file, u.wanted, where=f"{u.source_key}{list(u.source_element)}"),
            ),
            remedy=catalogue()[code].remedy,
        )


def element_in(placement: Placement, part: Part, home: int, position: int) -> str:
    """The element at a row-major position of a part's stored tensor.

    In padding, the tensor.
    """
    found = _in_home(part, home, position)
    if found is None:
        block, coordinate, choice = part.homes.find(home)
        return f"{block.owner(coordinate, choice, part.label)} (padding)"
    tensor, index = found
    path = placement.tensors[tensor]
    return element_name(placement.layout, path, index[: len(placement.layout.placed[path].counts)])


def _in_home(part: Part, home: int, position: int) -> tuple[int, tuple[int, ...]] | None:
    pieces = part.pieces_of(home)
    size = pieces.high - pieces.low
    last = pieces.offset + ((size - 1) * pieces.stride).sum(axis=1)
    for row in np.flatnonzero((pieces.offset <= position) & (position <= last)).tolist():
        left = position - int(pieces.offset[row])
        index = pieces.low[row].tolist()
        for dim in np.argsort(-pieces.stride[row], kind="stable").tolist():
            step, count = int(pieces.stride[row, dim]), int(size[row, dim])
            if step > 0:
                steps = min(left // step, count - 1)
                index[dim] += steps
                left -= steps * step
        if left == 0:
            return int(pieces.tensor[row]), tuple(int(i) for i in index)
    return None


def spots_of(placement: Placement, path: str, index: tuple[int, ...]) -> Iterator[Spot]:
    """Every place of one element, of all states."""
    tensor = placement.tensors.index(path)
    for number, part in enumerate(placement.parts):
        pieces = part.pieces
        wide = np.zeros(pieces.low.shape[1], dtype=np.int64)
        wide[: len(index)] = index
        inside = (pieces.tensor == tensor) & (pieces.low <= wide).all(axis=1) & (wide < pieces.high).all(axis=1)
        for row in np.flatnonzero(inside).tolist():
            position = int(pieces.offset[row] + ((wide - pieces.low[row]) * pieces.stride[row]).sum())
            yield Spot(number, int(pieces.home[row]), position)
