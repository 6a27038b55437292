"""A plan: the dependency graph, and the stored tensors of both sides.

Stored tensors are named by (file, key). A plan is made from specs alone. It names (file, key, element range); stores
bind byte positions when it is applied, which plans nothing anew. Tensors that are stored alike are one row;
`sources`, `targets` and `moves` expand them tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, field

from ucpl.extents import Shelves, StoredTensor, Structure
from ucpl.extents.account import Account
from ucpl.planning.runs import Runs, sole
from ucpl.planning.unread import Unread
from ucpl.records import frozen
from ucpl.tables import I64, Moves, Space, expanded, join_runs, straighten
from ucpl.tables.operations import Flow, Kind, Lane, Node, flows, in_order, net_text

if TYPE_CHECKING:  # a reader of headers alone does not wait for it
    import networkx as nx

__all__ = ["ClosedText", "Kind", "Origin", "Passed", "Plan", "Recipe", "Runs", "Tally"]

RUNS_MAX = 1 << 28  # of a plan whose rows are expanded by tensor: more is no plan but a mistake


@frozen
class Origin:
    """A value that the plan used, and its origin: nothing is guessed."""

    name: str
    value: object
    origin: str


@frozen
class Tally:
    """Elements of one state that move in one way."""

    state: str
    kind: Kind
    runs: int  # at most: those over layers in one row may join when they are expanded
    elements: int
    changes_values: bool


@frozen
class Passed:
    """A pass that changed something, and a text of the change."""

    name: str
    text: str


@frozen(eq=False, slots=False)
class ClosedText:
    """A text that is printed on its first use.

    It has a line for each tensor, and most calls of `plan` need none of them.
    """

    printed: Callable[[], str]

    @cached_property
    def text(self) -> str:
        return self.printed()


@frozen(eq=False, slots=False, kw_only=True)
class Recipe:
    """The decisions of a plan besides its moves, for the target passes."""

    target: Structure
    source_shelves: Shelves
    target_shelves: Shelves
    derived: tuple[str, ...] = ()  # sentences: "weight is derived from fp32 by rounding to nearest even"
    dropped: tuple[str, ...] = ()  # names of tensors and states of the source that are left out on purpose
    changed: tuple[str, ...] = ()  # "left out by --drop head.*: 2 tensors, 24 elements"
    filled: tuple[str, ...] = ()  # "exp_avg with 0: 4 elements of `b` (the source lacks them)"
    gone: dict[str, tuple[str, ...]] = field(factory=dict)  # parameters of the passes drop, freeze, groups and train
    renamed: dict[str, tuple[str, ...]] = field(
        factory=dict
    )  # name in the target -> those of the source, of the pass rename
    begun: dict[str, dict[str, float]] = field(factory=dict)  # state -> parameter -> number, of the pass fill
    carry: dict[str, str] = field(factory=dict)  # fate of values by name: keep, first, drop
    passes: tuple[Passed, ...] = ()  # that changed something of the source, in their order

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        return self.source_shelves.each

    @property
    def targets(self) -> tuple[StoredTensor, ...]:
        return self.target_shelves.each

    @property
    def left_out(self) -> frozenset[str]:
        """Values, numbers and files that are dropped by name."""
        return frozenset(name for name, fate in self.carry.items() if fate == "drop")


@frozen(eq=False, slots=False, kw_only=True)
class Plan(Recipe):
    """All inputs of `apply`.

    `source` and `target` carry the facts about the framework on each side that stores need.
    """

    name: str
    source_call: str  # "zero1(dp = 4)"
    target_call: str
    source: Structure
    tensors: tuple[str, ...]  # names that tables point into
    net: nx.DiGraph[Node] = field(repr=False)
    spaces: tuple[Space, Space] = (Space(1), Space(1))  # of the positions in its tables
    origins: tuple[Origin, ...] = ()
    spec_digest: str = ""
    structure_digest: str = ""
    account: Account | None = None  # of all that the source has; None: planned from specs alone, or a rank's share
    unread: Unread | None = None  # other parts of the source, which no move reads; None: planned from specs alone
    closed: str | ClosedText = field(default="", alias="layout_text", repr=False)
    rank: int | None = None  # of the target, whose share this is and no more: it is looked at, and not run
    families: dict[str, tuple[str, ...]] = field(factory=dict)  # tensors of the model behind a name of `tensors`
    masters: Plan | None = None  # from the source's stored masters to its stored weights: shows files of two steps

    def __str__(self) -> str:
        return f"{self.name}: {self.source_call} -> {self.target_call}\n{net_text(self.net)}"

    @property
    def layout_text(self) -> str:
        """The target's closed .ucpl text: becomes ucpl/layout.ucpl."""
        return self.closed if isinstance(self.closed, str) else self.closed.text

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The graph's nodes in the order in which they run."""
        return tuple(in_order(self.net))

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        return tuple(flows(self.net, self.nodes))

    # ---- expanded by tensor
    # ---------------------------------------------------------------------------------------------

    @cached_property
    def moves(self) -> tuple[Runs, ...]:
        """Every flow of every state, bound to single stored tensors.

        Similar ones are in one table, in the target's order.
        """
        if sum(_count(f.moves, self.spaces) * len(f.lanes) for f in self.flows) > RUNS_MAX:
            raise ValueError(f"more than {RUNS_MAX} runs")
        found: dict[tuple[object, ...], list[Runs]] = {}
        for state in self.states:
            for flow in self.flows:
                each = [lane for lane in flow.lanes if lane.state == state]
                for lane in each:
                    alike = (state, flow.kind, flow.extract.value, flow.place.value, flow.lossy, flow.over)
                    found.setdefault(alike, []).append(self.bound(flow, lane))
        return tuple(Runs.joined(runs) for runs in found.values())

    @cached_property
    def states(self) -> tuple[str, ...]:
        """States with moves, in the order of the target's stored tensors."""
        moved = {lane.state for f in self.flows for lane in f.lanes}
        return tuple(s for s in dict.fromkeys(s.state for s in self.target_shelves.shelves) if s in moved) + tuple(
            sorted(moved - {s.state for s in self.target_shelves.shelves})
        )

    def bound(self, flow: Flow, lane: Lane) -> Runs:
        """One state of a flow: a row per box of stored tensors."""
        source, target = self.spaces
        m = flow.moves
        each = expanded(m, source, target)
        if len(each) > len(m):  # one row over layers may be one run in each, or of all
            m = join_runs(straighten(each))
        return Runs(
            flow.kind,
            lane.state,
            m.tensor.astype(np.int32),
            (source.home(m.source) + lane.source).astype(np.int32),
            (target.home(m.target) + lane.target).astype(np.int32),
            m.shape,
            source.position(m.source),
            m.source_stride,
            target.position(m.target),
            m.target_stride,
            flow.extract.value,
            flow.place.value,
            flow.lossy,
            flow.over,
            np.full(len(m), self._number[flow.way], np.int32),
        )

    @cached_property
    def _number(self) -> dict[Node, int]:
        return {node: i for i, node in enumerate(self.nodes)}

    @property
    def tallies(self) -> list[Tally]:
        """Moves by state and by kind, without expanding them by tensor."""
        found: dict[tuple[str, Kind, bool], list[int]] = {}
        for state in self.states:
            for flow in self.flows:
                count = sum(lane.state == state for lane in flow.lanes)
                if count:
                    changes = (flow.extract.value, flow.place.value) != ((1.0, 0.0), (1.0, 0.0))
                    total = found.setdefault((state, flow.kind, changes), [0, 0])
                    total[0] += count * _count(flow.moves, self.spaces)
                    total[1] += count * flow.moves.elements
        return [Tally(state, kind, n, m, changes) for (state, kind, changes), (n, m) in found.items()]

    # ---- made by hand --------------------------------------------------------------------------------------------------

    def of(
        self,
        *,
        sources: Sequence[StoredTensor] | None = None,
        targets: Sequence[StoredTensor] | None = None,
        moves: Sequence[Runs] | None = None,
    ) -> Plan:
        """The plan with other stored tensors, or other moves between them."""
        here, there = (
            Shelves.of(self.sources if sources is None else sources),
            Shelves.of(self.targets if targets is None else targets),
        )
        spaces = tuple(
            Space(max(40, Space.over(len(s), max((t.numel for t in s), default=1)).bits)) for s in (here, there)
        )
        told = self.moves if moves is None else moves
        return evolve(
            self,
            source_shelves=here,
            target_shelves=there,
            spaces=(spaces[0], spaces[1]),
            net=sole(told, here, there, (spaces[0], spaces[1])),
        )


def _count(moves: Moves, spaces: tuple[Space, Space]) -> int:
    """Rows of moves that are expanded by tensor."""
    source, target = spaces
    over = (moves.source_stride >= source.step) | (moves.target_stride >= target.step)
    count: I64 = np.where(over, moves.shape, 1).prod(axis=1)
    return int(count.sum())
