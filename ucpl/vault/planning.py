"""The plan of a vault for a layout.

It has the domains, the distribution of the saves, the costs, and the losses that the vault survives.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.conversion.planning import Asked, described
from ucpl.conversion.requests import Given
from ucpl.errors import Label, fail
from ucpl.extents import key_text
from ucpl.layout import Layout
from ucpl.layout.domains import domains_of
from ucpl.records import frozen
from ucpl.storage.vaults.memory import DomainData
from ucpl.storage.vaults.protection import check_partition, even_domains
from ucpl.storage.vaults.records import WHOLE
from ucpl.vault.footprint import Footprint, PlacedTensor, get_footprint
from ucpl.vault.rank_schemes import Scheme, rank_schemes
from ucpl.vault.survival import LostRange, Survival

__all__ = ["KINDS", "DomainLoss", "Room", "VaultPlan", "plan_vault", "get_domains"]

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
