"""The plan of a vault for a layout.

It has the domains, the distribution of the saves, the costs, and the losses that the vault survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from attrs import evolve

from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked, closed_text, described
from ucpl.conversion.requests import Given
from ucpl.errors import Label, fail
from ucpl.extents import Key, StoredTensor, key_text
from ucpl.layout import Layout
from ucpl.layout.layout import domains_of
from ucpl.placement import Placement
from ucpl.planning.cost import width_of
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.storage.vaults.adamw import MOMENTS
from ucpl.storage.vaults.memory import DomainData
from ucpl.storage.vaults.protection import check_partition, even_domains
from ucpl.storage.vaults.records import WHOLE
from ucpl.vault.arenas import get_places
from ucpl.vault.layout_writer import LayoutWriter, get_holders
from ucpl.vault.rank_schemes import Scheme, rank_schemes
from ucpl.vault.survival import LostRange, Survival
from ucpl.verification.elements import Elements

__all__ = [
    "KINDS", "DomainLoss", "Room", "VaultPlan", "plan_vault", "get_domains", "Footprint", "PlacedTensor",
    "get_footprint",
]  # fmt: skip


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
        (state, one), (_, other) = (self._elements.at(number, at) for at in (first, last))
        return f"{state} of {one}" if one == other else f"{state} of {one} to {other}"

    @cached_property
    def _elements(self) -> Elements:
        return Elements(self.placement)

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


KINDS = ("node", "process")  # of `domain` statements, in order of preference


@frozen
class Room:
    """Memory of a domain, in bytes."""

    ranks: tuple[int, ...]
    saved: int  # of one generation
    for_others: int
    gradients: int = 0  # of the generations between two complete ones, with redundancy

    @property
    def total(self) -> int:
        """Two slots of all, and those of gradients."""
        return WHOLE * (self.saved + self.for_others) + self.gradients


@frozen
class DomainLoss:
    """The data that is lost with some domains."""

    domains: tuple[int, ...]
    bytes: int  # of arenas
    tensors: tuple[str, ...]  # stored tensors that lack something, each once: `layer 3/up in weights_0_1.pt`
    first: str  # the first lost elements


@frozen(eq=False)
class VaultPlan:
    """The plan of a vault.

    `scheme` is the requested one, or the best of `ranked`.
    """

    foreseen: Footprint
    domains: tuple[tuple[int, ...], ...]
    scheme: Scheme
    ranked: tuple[Scheme, ...]
    replays: int = 0  # saves between two of all, of gradients alone

    @property
    def guarded(self) -> Survival:
        return self.scheme.guarded

    @property
    def rooms(self) -> tuple[Room, ...]:
        lighter = self._lighter
        return tuple(
            Room(
                ranks, sum(self.foreseen.sizes[r] for r in ranks), self.guarded.for_others(number),
                self.replays * (sum(self.foreseen.gradients[r] for r in ranks) + lighter.for_others(number)) if lighter else 0,
            )
            for number, ranks in enumerate(self.domains)
        )  # fmt: skip

    @property
    def _lighter(self) -> Survival | None:
        """Gradients alone, under the same protection."""
        if not self.replays:
            return None
        stretches = (DomainData.of(some, [self.foreseen.gradients[r] for r in some]) for some in self.domains)
        return Survival(self.scheme.protection, tuple(stretches))

    def loss(self, lost: Sequence[int]) -> DomainLoss:
        """The data that is lost without these domains."""
        ranges = self.guarded.gone(lost)
        tensors: dict[str, None] = {}
        first = ""
        for one in ranges:
            for kept, low, high in self._within(one):
                tensors.setdefault(f"{key_text(kept.tensor.key)} in {kept.tensor.file}")
                first = first or self.foreseen.element(kept, low, high)
        return DomainLoss(tuple(lost), sum(g.high - g.low for g in ranges), tuple(tensors), first)

    def lacking(self, lost: Sequence[int]) -> frozenset[tuple[int, str, str]]:
        """(rank that saved it, file, key) of each damaged stored tensor.

        A tensor is damaged if elements are lost without these domains.
        """
        return frozenset(
            (one.rank, kept.tensor.file, key_text(kept.tensor.key))
            for one in self.guarded.gone(lost)
            for kept, _, _ in self._within(one)
        )

    def _within(self, ranges: LostRange) -> list[tuple[PlacedTensor, int, int]]:
        """The lost range of each tensor of a rank."""
        return [
            (kept, max(ranges.low, kept.at) - kept.at, min(ranges.high, kept.at + kept.size) - kept.at)
            for kept in self.foreseen.kept[ranges.rank]
            if kept.at < ranges.high and ranges.low < kept.at + kept.size
        ]


def _domains_of(layout: Layout, call: str) -> tuple[tuple[int, ...], ...]:
    """The domains of a layout: of nodes, or else of processes.

    Raises: UcplError E690.
    """
    for kind in KINDS:
        if found := domains_of(layout, kind):
            return found
    axis = layout.meshes[0].axes[0] if layout.meshes else "rank"
    fail(
        "E690",
        f"{call} does not state the domains of its ranks",
        Label(call),
        remedy=f'write domain node = "{{{axis}}}" into the layout, or give --domains 4',
    )


def plan_vault(
    call: str,
    domains: Sequence[Sequence[int]] | int | None = None,
    protect: str | None = None,
    *,
    safe: int = 1,
    given: Given | None = None,
    most: int | None = None,
    replays: int = 0,
) -> VaultPlan:
    """The plan of a vault for a layout.

    domains: the ranks of each, or the number of consecutive ranks, or None for the layout's `domain` statement.
    protect: `none`, `mirror(2)`, `raim5`, `rs(6, 2)`; None: the one of least memory that survives the loss of any
        `safe` domains.
    most: the largest number of bytes that a tensor is counted with.
    replays: saves of gradients between two complete ones.

    Raises: UcplError E690, and all errors of planning.
    """
    foreseen = get_footprint(call, given, most)
    if replays and not foreseen.made:
        what = f"{call}: only steps of a module and its AdamW can be replayed, with framework dcp()"
        remedy = "name a layout of dcp.ucpl that has exp_avg and exp_avg_sq"
        fail("E690", what, Label("--replays", where=call), remedy=remedy)
    ranks = len(foreseen.sizes)
    if domains is None:
        domains = _domains_of(foreseen.placement.layout, call)
    elif isinstance(domains, int):
        domains = even_domains(ranks, domains)
    checked = tuple(tuple(some) for some in domains)
    check_partition(checked, ranks, f" of {call}, which has {ranks},")
    if safe > len(checked):
        what = f"{safe} of {len(checked)} domains cannot be lost"
        fail(
            "E690",
            what,
            Label("--lose", where=str(safe)),
            remedy=f"write --lose {len(checked)} or less, or make more domains",
        )
    stretches = [foreseen.stretch(some) for some in checked]
    ranked = rank_schemes(stretches, safe, max(2, safe), protect)
    return VaultPlan(foreseen, checked, ranked[0], tuple(ranked), replays)


def get_domains(call: str, given: Given | None = None) -> tuple[tuple[int, ...], ...]:
    """The domains of a job, from its layout alone.

    Raises: UcplError E690, and all errors of planning.
    """
    here, _, _ = described(Asked(call, call), given or Given())
    return _domains_of(here.layout, call)
