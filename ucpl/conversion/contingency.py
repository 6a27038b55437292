"""Layouts for the remaining ranks after a loss, each with its plan.

A layout is called at other degrees. The data-parallel axis takes all available ranks; the other axes keep their degree or take
one of a few others. Degrees do not fit if the spec rejects them (a cut with a remainder, an assert) or if a rank lacks memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from attrs import evolve, field

from ucpl.conversion.degrees import degrees_of
from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked
from ucpl.conversion.requests import Given, called, is_checkpoint
from ucpl.conversion.side import Side, located
from ucpl.errors import Label, UcplError, fail
from ucpl.planning.cost import Cost, cost_of, width_of
from ucpl.records import define, frozen

if TYPE_CHECKING:
    from ucpl.conversion.requests import Called
    from ucpl.layout import Layout
    from ucpl.planning.plan import Plan

__all__ = ["Choice", "Loss", "LossRequest", "contingencies"]

DATA = (
    "dp",
    "fsdp",
    "dp_shard",
    "edp",
)  # axes that take all available ranks; without these, the one of the greatest degree
DATA_TRIED = 16  # degrees of it, from the greatest on, until one holds
TRIED_MAX = 48  # combinations of other degrees, for one loss

Degrees = dict[str, int]


@frozen
class LossRequest:
    """The request: lost units, ranks per unit, and conditions."""

    lose: tuple[int, ...]
    unit: int
    keep: frozenset[str] = frozenset()  # axes whose degree stays
    room: int | None = None  # bytes that a rank may hold
    best: int = 3  # choices of each loss that are planned


@frozen(eq=False)
class Choice:
    """A layout that fits, and the plan to get there."""

    call: str
    degrees: Degrees
    ranks: int  # that it uses
    held: int  # bytes on the dearest rank that was looked at
    plan: Plan
    cost: Cost


@frozen(eq=False)
class Loss:
    """One loss: remaining ranks, and layouts for them, the best first."""

    lost: int  # units
    left: int  # ranks
    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...]  # calls that do not fit, and why; those that would have used most ranks first


def contingencies(source: str, wish: LossRequest, given: Given) -> tuple[tuple[int, int], Iterator[Loss]]:
    """The result of each loss, and the source's size.

    The source's size is its number of ranks, and the bytes of its largest rank. It is the first result.

    Raises: UcplError E171 if no degree can be changed.
    """
    one, base = _opened(source, given)
    search = _Search(source, one, base, given, wish)
    return (max(1, base.layout.ranks), _held(base.layout)), (search.after(lost) for lost in wish.lose)


def _opened(source: str, given: Given) -> tuple[Called, Side]:
    if is_checkpoint(source):
        from ucpl.conversion.opening import open_checkpoint
        from ucpl.conversion.sides import source_side

        side = source_side(open_checkpoint(source, None, given), None, evolve(given, model=None))
        return side.called, side
    one = called(source)
    return one, located(one, evolve(given, bare=True))


@define
class _Search:
    source: str
    one: Called
    base: Side
    given: Given
    wish: LossRequest
    plans: dict[tuple[tuple[str, int], ...], Choice] = field(factory=dict)

    @property
    def layout(self) -> Layout:
        return self.base.layout

    def after(self, lost: int) -> Loss:
        """Choices for one loss.

        The order is: most ranks first, then fewest bytes sent between ranks.
        """
        left = max(1, self.layout.ranks) - lost * self.wish.unit
        if left < 1:
            return Loss(lost, max(0, left), (), ())
        found: list[tuple[Degrees, int, int]] = []
        refused: list[tuple[str, str]] = []
        for degrees in self.combinations(left):
            if len(found) >= 2 * self.wish.best and degrees and self.ranks(degrees) < found[-1][1]:
                break
            fitting = self.fitting(degrees, left, refused)
            if fitting is not None:
                found.append(fitting)
        found.sort(key=lambda one: -one[1])  # among equal numbers of ranks, the cost decides
        least = found[: self.wish.best][-1][1] if found else 0
        choices = [self.planned(*each) for each in found[: 2 * self.wish.best] if each[1] >= least]
        choices.sort(key=lambda c: (-c.ranks, c.cost.bytes_sent, c.call))
        return Loss(lost, left, tuple(choices[: self.wish.best]), tuple(refused))

    # ---- degrees ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> Degrees:
        """The degrees of the source."""
        names = degrees_of(self.one.library, self.one.layout)
        return {n: v for n, v, _ in self.layout.origins if n in names and isinstance(v, int) and v > 0}

    @property
    def data(self) -> str:
        """The axis that takes all available ranks. Raises: UcplError E171."""
        axes = self.layout.meshes[0].axes if self.layout.meshes else ()
        if unknown := sorted(self.wish.keep - self.now.keys()):
            what = f"--keep {','.join(unknown)}: {self.layout.call} has no such degree"
            has = f"it has {', '.join(self.now)}"
            fail("E171", what, Label("<command line>", where=f"--keep {','.join(unknown)[:60]}"), remedy=has)
        free = {n: v for n, v in self.now.items() if n in axes and n not in self.wish.keep}
        if not free:
            fail(
                "E171",
                f"no degree of {self.layout.call} can be changed",
                Label("<command line>", where="--from"),
                remedy="a layout whose mesh axes are parameters, as zero1(dp=8), and an axis that --keep does not name",
            )
        return next((n for n in DATA if n in free), max(free, key=lambda n: free[n]))

    def combinations(self, left: int) -> list[Degrees]:
        """Degrees to try.

        The order is: most ranks first, then fewest changes.
        """
        now, data = self.now, self.data
        others = [n for n in now if n != data]
        lists = [[now[n]] if n in self.wish.keep else _near(now[n]) for n in others]
        out = []
        for values in product(*lists):
            degrees = dict(zip(others, values, strict=True))
            each = self.ranks({**degrees, data: 1})
            if each <= left:
                out.append({**degrees, data: left // each})
        out.sort(
            key=lambda d: (-self.ranks(d), sum(d[n] != now[n] for n in others), [abs(d[n] - now[n]) for n in others])
        )
        return out[:TRIED_MAX]

    def ranks(self, degrees: Degrees) -> int:
        """The number of ranks of a call.

        It is the product of the axes of its first mesh. Axes that are no parameters keep their size.
        """
        mesh = self.layout.meshes[0]
        return prod(degrees.get(axis, n) for axis, n in zip(mesh.axes, mesh.degrees, strict=True))

    # ---- fitting degrees -------------------------------------------------------------------------------------------------

    def fitting(self, degrees: Degrees, left: int, refused: list[tuple[str, str]]) -> tuple[Degrees, int, int] | None:
        """The greatest data-parallel degree at which these degrees fit.

        Returns: degrees, ranks, and bytes on the largest rank.
        """
        data = self.data
        why = ""
        for n in range(degrees[data], max(0, degrees[data] - DATA_TRIED), -1):
            tried = {**degrees, data: n}
            try:
                side = self.side(self.called(tried))
                if side.layout.ranks > left:
                    continue
                held = _held(side.layout)
            except UcplError as error:
                why = why or error.diagnostics[0].message
                continue
            if self.wish.room is not None and held > self.wish.room:
                refused.append((_text(tried), f"a rank would hold {held:,} bytes, and has room for {self.wish.room:,}"))
                return None
            return tried, side.layout.ranks, held
        refused.append((_text(degrees), why))
        return None

    def side(self, one: Called) -> Side:
        """A layout as a target of the source, resolved."""
        if self.base.checkpoint is None:
            return located(one, evolve(self.given, bare=True))
        from ucpl.conversion.sides import target_side

        return target_side(one, self.base, evolve(self.given, bare=True))

    def called(self, degrees: Degrees) -> Called:
        """The source's call at other degrees."""
        from ucpl.conversion.requests import Called
        from ucpl.language import nodes

        call, names = self.one.call, [p.name for p in self.one.layout.parameters]
        said = {a.name or names[i]: a.value for i, a in enumerate(call.arguments)}
        said |= {n: nodes.Number(v) for n, v in degrees.items() if n in said or v != self.now[n]}
        arguments = tuple(nodes.Argument(n, value) for n, value in said.items())
        return Called(self.one.library, evolve(call, arguments=arguments))

    def planned(self, degrees: Degrees, ranks: int, held: int) -> Choice:
        known = tuple(degrees.items())
        if known not in self.plans:  # of several losses it may be the same
            self.plans[known] = self.made(degrees, ranks, held)
        return self.plans[known]

    def made(self, degrees: Degrees, ranks: int, held: int) -> Choice:
        made = planned(Asked(self.source, self.called(degrees), name="contingency"), self.given)
        return Choice(made.plan.target_call, degrees, ranks, held, made.plan, cost_of(made.plan))


def _near(degree: int) -> list[int]:
    """Degrees to try for one: its divisors, and its double."""
    return [n for n in range(1, degree + 1) if degree % n == 0] + ([2 * degree] if degree > 1 else [])


def _text(degrees: Degrees) -> str:
    return ", ".join(f"{name} = {n}" for name, n in degrees.items())


def _held(layout: Layout) -> int:
    """Bytes of the stored tensors of the largest rank.

    Only ranks at the first, the middle and the last place of each axis are looked at.
    """

    return max(_bytes_on(layout, rank) for rank in sorted(_looked_at(layout)))


def _looked_at(layout: Layout) -> set[int]:
    out = {0, max(1, layout.ranks) - 1}
    divisor = 1
    mesh = layout.meshes[0] if layout.meshes else None
    for degree in reversed(mesh.degrees if mesh is not None else ()):
        out |= {divisor * at for at in (degree // 2, degree - 1)}
        divisor *= degree
    return out


def _bytes_on(layout: Layout, rank: int) -> int:
    from ucpl.graph.side import GraphSide as Stored
    from ucpl.placement import locate

    placement = locate(layout, rank=rank)
    stored = Stored(placement, placement.tensors, layout)
    total = 0.0
    for part in placement.parts:
        if part.is_alias or not len(part.homes):
            continue
        numel = [n for b in part.homes.blocks for n in b.shape.prod(axis=1).repeat(b.choices).tolist()]
        dtypes = stored.said(part)
        each = dtypes if len(dtypes) > 1 else dtypes * len(numel)
        total += sum(n * width_of(dtype) for n, dtype in zip(numel, each, strict=True))
    return round(total)
