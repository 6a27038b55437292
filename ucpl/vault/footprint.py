"""The footprint of a vault, computed from the layout alone."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

from attrs import evolve

from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked, closed_text
from ucpl.conversion.requests import Given
from ucpl.errors import Label, fail
from ucpl.extents import Key, StoredTensor, key_text
from ucpl.placement import Placement
from ucpl.planning.cost import width_of
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.storage.vaults.adamw import MOMENTS
from ucpl.storage.vaults.memory import DomainData
from ucpl.vault.arenas import get_places
from ucpl.vault.layout_writer import LayoutWriter, get_holders
from ucpl.verification.elements import element_at

__all__ = ["Footprint", "PlacedTensor", "get_footprint"]


@frozen
class PlacedTensor:
    """A complete stored tensor in the arena of its rank."""

    tensor: StoredTensor
    at: int  # byte in the arena
    size: int  # bytes


@frozen(eq=False)
class Footprint:
    """The tensors that all ranks save at each step."""

    call: str
    placement: Placement
    sizes: tuple[int, ...]  # bytes of each rank's arena
    kept: tuple[tuple[PlacedTensor, ...], ...]  # of each rank, in order
    spared: int  # bytes of tensors that ranks hold and others save
    is_exact: bool  # to the byte; else tensors alone are counted, and files have more in them
    derived: tuple[tuple[str, str], ...]  # states that no rank saves: (state, the state it is derived from)
    keyed: tuple[LayoutWriter, ...]  # of each rank, if it saves by keys

    @property
    def saved(self) -> int:
        return sum(self.sizes)

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of each rank for a save of gradients.

        They include the values that no step computes.
        """
        return tuple(sum(k.size for k in some if not self._is_moment(k)) for some in self.kept)

    @cached_property
    def made(self) -> int:
        """Bytes that a step computes from gradients, over all ranks.

        0 if the step cannot be replayed.
        """
        return sum(k.size for some in self.kept for k in some if k.tensor.label in self._stepped)

    def _is_moment(self, kept: PlacedTensor) -> bool:
        return kept.tensor.label in self._stepped and kept.tensor.state in MOMENTS

    @cached_property
    def _stepped(self) -> frozenset[str]:
        """Labels of parameters with all moments of AdamW.

        Empty, if the framework does not save each of them separately.
        """
        of = format_named(self.placement.layout.framework)
        if not (of.has_chunks and of.has_names_of_modules):
            return frozenset()
        states: dict[str, set[str]] = {}
        for kept in (k for some in self.kept for k in some):
            states.setdefault(kept.tensor.label, set()).add(kept.tensor.state)
        least = {"weight", *MOMENTS[:2]}
        return frozenset(label for label, some in states.items() if least <= some <= {"weight", *MOMENTS})

    def stretch(self, ranks: tuple[int, ...]) -> DomainData:
        return DomainData.of(ranks, [self.sizes[rank] for rank in ranks])

    def element(self, kept: PlacedTensor, low: int, high: int) -> str:
        """Elements at bytes [low, high) of a tensor: `exp_avg of up[l=3, f=0, h=0] to up[l=3, f=4, h=7]`."""
        width = width_of(kept.tensor.dtype)
        first, last = (int(at / width) for at in (low, max(low, high - 1)))
        number = self.numbers[kept.tensor.file, kept.tensor.key]
        (state, one), (_, other) = (element_at(self.placement, number, at) for at in (first, last))
        return f"{state} of {one}" if one == other else f"{state} of {one} to {other}"

    @property
    def numbers(self) -> dict[tuple[str, Key], int]:
        """The number of each stored tensor among the homes of all parts."""
        homes = (home for part in self.placement.parts for home in part.homes)
        found: dict[tuple[str, Key], int] = {}
        for number, home in enumerate(homes):
            found.setdefault((home.file, home.key), number)
        return found


def get_footprint(call: str, given: Given | None, most: int | None) -> Footprint:
    """The footprint of a layout.

    The files are those of its keys, or those that its framework assigns to each rank.

    most: the largest size of a tensor in bytes; a larger one becomes a row of this size.
    Raises: UcplError, as planning does.
    """
    made = planned(Asked(call, call), given or Given())
    layout, targets = made.target.layout, made.plan.targets
    if most is not None:
        targets = tuple(_lessened(tensor, most) for tensor in targets)
    ranks = max(1, layout.ranks)
    if format_named(layout.framework).is_of_a_spec:
        files, exact = _by_keys(call, ranks, targets, (get_holders(layout), closed_text(made.target))), True
    else:
        files, exact = _by_rank(ranks, targets), False
    held = sum(_size(t) * len(h) for h, t in files.holders)
    saved = sum(kept.size for some in files.kept for kept in some)
    derived = tuple((d.state, d.source) for d in layout.derived)
    spared = max(0, held - saved)
    return Footprint(call, made.target.placement, files.sizes, files.kept, spared, exact, derived, files.keyed)


@frozen(eq=False)
class _Files:
    sizes: tuple[int, ...]
    kept: tuple[tuple[PlacedTensor, ...], ...]
    holders: tuple[tuple[tuple[int, ...], StoredTensor], ...]
    keyed: tuple[LayoutWriter, ...] = ()


def _size(tensor: StoredTensor) -> int:
    return int(tensor.numel * width_of(tensor.dtype))


def _lessened(tensor: StoredTensor, most: int) -> StoredTensor:
    count = int(most // width_of(tensor.dtype))
    return tensor if tensor.numel <= count else evolve(tensor, shape=(count,))


def _by_keys(
    call: str, ranks: int, targets: tuple[StoredTensor, ...], holders_and_text: tuple[dict[str, tuple[int, ...]], str]
) -> _Files:
    """The files that `Writer(layout=...)` saves.

    `holders_and_text`: the ranks of each file, and the closed layout.
    """
    holders, text = holders_and_text
    wanted: list[dict[str, StoredTensor]] = [{} for _ in range(ranks)]
    for tensor in targets:
        for rank in holders[tensor.file]:
            key = key_text(tensor.key)
            if (other := wanted[rank].setdefault(key, tensor)) is not tensor:
                what = f"two tensors of rank {rank} have the key {key}, in {other.file} and {tensor.file}"
                fail("E640", what, Label(tensor.file, where=key))
    sizes, kept = [], []
    keyed = tuple(LayoutWriter(call, rank, wanted[rank], holders, text) for rank in range(ranks))
    for one in keyed:
        files = one.foreseen()
        places, size = get_places([file for file, _ in files])
        sizes.append(size)
        tensors = [(files[number][1][storage], at) for number, storage, at in places]
        kept.append(tuple(PlacedTensor(tensor, at, _size(tensor)) for tensor, at in tensors))
    return _Files(tuple(sizes), tuple(kept), tuple((holders[t.file], t) for t in targets), keyed)


def _by_rank(ranks: int, targets: tuple[StoredTensor, ...]) -> _Files:
    """Each tensor by the first rank that holds it, end to end."""
    mine: list[list[StoredTensor]] = [[] for _ in range(ranks)]
    for tensor in targets:
        if tensor.shares is None:
            mine[tensor.rank].append(tensor)
    kept, sizes = [], []
    for some in mine:
        some.sort(key=lambda t: t.file)
        *starts, size = accumulate(map(_size, some), initial=0)
        kept.append(tuple(PlacedTensor(t, at, _size(t)) for t, at in zip(some, starts, strict=True)))
        sizes.append(size)
    return _Files(tuple(sizes), tuple(kept), tuple(((t.rank,), t) for some in mine for t in some))
