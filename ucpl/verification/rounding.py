"""Compare checkpoints of two training dtypes, up to rounding.

If a side has masters, its weights are rounded from them, so a narrower type loses nothing: each weight is the other
side's
master rounded, or its weight rounded. A parameter without a master (a frozen one) loses the rounded bits. The distance
is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from attrs import evolve, field

from ucpl.extents import EXACT
from ucpl.files.checkpoint import Checkpoint
from ucpl.graph import build
from ucpl.layout.layout import Derivation, Policy
from ucpl.placement import Placement
from ucpl.planning import Plan, order
from ucpl.records import define, frozen
from ucpl.runtime.compare import Measured, Unequal
from ucpl.verification.elements import Elements, counted, only, pairs_of
from ucpl.verification.target_check import compare_target, measure_target
from ucpl.verification.train_states import Difference

__all__ = [
    "Bounds",
    "DtypeDistance",
    "Rounded",
    "Side",
    "compare_narrower",
    "compare_rounded",
    "weights_in_narrower_dtype",
    "weights_in_two_dtypes",
    "named",
]

Side = tuple[Checkpoint, Placement]
Bounds = dict[str, int]  # memory, workers
_FLAGS = {"bf16": "bf16", "fp16": "f16"}
_WHOLE, _MASTER = "f32", "fp32"


@frozen
class Rounded:
    """A weight that A and B keep in two types.

    If nothing is lost, each is a master of the other side, rounded.
    """

    name: str
    a: str
    b: str
    elements: int
    differ: int
    largest: float
    is_lost: bool  # a side that rounded it keeps no master

    def __str__(self) -> str:
        how = f"{self.differ:,} of {self.elements:,} elements differ, by {self.largest:.3g} at most"
        return (
            f"weight of {self.name}: {self.a} in A, {self.b} in B; {how if self.differ else 'all elements are equal'}"
        )


@frozen
class DtypeDistance:
    """The distance of weights in two training dtypes."""

    rounded: tuple[Rounded, ...] = ()
    differences: tuple[Difference, ...] = ()
    elements: int = 0
    bytes_read: int = 0


def weights_in_two_dtypes(a: Side, b: Side, dtypes: Sequence[Difference]) -> dict[str, tuple[str, str]]:
    """Parameters whose weights have two training dtypes, one on each side.

    `dtypes`: pairs of two types.
    """
    ours, theirs = _trains_in(a[0]), _trains_in(b[0])
    if ours is None or theirs is None or ours == theirs:
        return {}
    tensors = b[1].layout.placed
    return {
        d.name: (d.a, d.b)
        for d in dtypes
        if d.state == "weight" and (d.a, d.b) == (ours, theirs) and tensors[d.name].kind != "buffer"
    }


def compare_rounded(a: Side, b: Side, dtypes: dict[str, tuple[str, str]], bounds: Bounds) -> DtypeDistance:
    """Compare weights with those that the other side implies. Bit for bit.

    It also measures the distance.
    """
    if not dtypes:
        return DtypeDistance()
    mastered = _mastered(a, dtypes), _mastered(b, dtypes)
    held = _RoundedWeights()
    for turned in (False, True):
        masters = mastered[turned]
        alone = {p for p in dtypes.keys() - masters if _can_be_rounded(dtypes[p], turned)}
        if masters or alone:
            held.hold((b, a) if turned else (a, b), (masters, alone), turned, bounds)
    apart, read = measure_target(_plan(a, b, (set(), {*dtypes}), once=True), a[0], b[0], **bounds)
    rounded = tuple(_rounded(path, both, apart[path], mastered) for path, both in dtypes.items())
    wrong = held.wrong(mastered[0] | mastered[1])
    lost = [r for r in rounded if r.is_lost and r.name not in {d.name for d in wrong}]
    said = [Difference("dtype", r.name, "weight", a=r.a, b=r.b) for r in lost]
    return DtypeDistance(rounded, (*wrong, *said), held.elements, held.bytes_read + read)


def weights_in_narrower_dtype(dtypes: Sequence[Difference]) -> dict[str, str]:
    """Weights in fp32 on one side and 16 bits on the other.

    The narrower dtype, by tensor.
    """
    found = {}
    for d in dtypes:
        for wide, narrow in ((d.a, d.b), (d.b, d.a)):
            if wide == _WHOLE and narrow in _FLAGS.values():
                found[d.name] = narrow
    return found


def compare_narrower(a: Side, b: Side, dtypes: Sequence[Difference], bounds: Bounds) -> DtypeDistance:
    """Compare weights in the narrower of their two dtypes.

    Fp32 is rounded to nearest even, 16 bits are unchanged.
    """
    narrow = weights_in_narrower_dtype(dtypes)
    wide_in_b = {d.name for d in dtypes if d.name in narrow and d.b == _WHOLE}
    elements = read = 0
    wrong: list[Difference] = []
    for turned, paths in ((False, narrow.keys() - wide_in_b), (True, wide_in_b)):
        if paths:
            x, y = (b, a) if turned else (a, b)
            compared = compare_target(_plan(x, y, (set(), {*paths})), x[0], y[0], **bounds)
            elements += compared.elements
            read += compared.report.bytes_read
            wrong += named(compared, _target(y[1], {*paths}), turned)
    return DtypeDistance((), tuple(wrong), elements, read)


def _mastered(side: Side, dtypes: dict[str, tuple[str, str]]) -> set[str]:
    return {path for path, state in pairs_of(side[1]) if state == _MASTER} & dtypes.keys()


def _rounded(path: str, dtypes: tuple[str, str], apart: Measured, mastered: tuple[set[str], set[str]]) -> Rounded:
    """The loss: rounded bits of a narrow side without a master."""
    narrow = [mine for dtype, mine in zip(dtypes, mastered, strict=True) if dtype != _WHOLE]
    is_lost = apart.differ > 0 and any(path not in mine for mine in narrow)
    return Rounded(path, *dtypes, apart.elements, apart.differ, apart.largest, is_lost)


@define
class _RoundedWeights:
    """Compare weights of either side with those that the other implies."""

    found: list[Difference] = field(factory=list)
    tried: Counter[str] = field(factory=Counter)  # how many ways each tensor was held
    failed: Counter[str] = field(factory=Counter)
    elements: int = 0
    bytes_read: int = 0

    def hold(self, sides: tuple[Side, Side], paths: tuple[set[str], set[str]], turned: bool, bounds: Bounds) -> None:
        """Compare two sides.

        `paths`: weights that are masters rounded, and those that are the other side's weights rounded.
        """
        x, y = sides
        every = paths[0] | paths[1]
        compared = compare_target(_plan(x, y, paths), x[0], y[0], **bounds)
        self.elements += compared.elements
        self.bytes_read += compared.report.bytes_read
        self.tried.update(every)
        found = named(compared, _target(y[1], every), turned)
        self.failed.update({d.name for d in found})
        self.found += found

    def wrong(self, mastered: set[str]) -> list[Difference]:
        """Wrong weights.

        Of two narrow weights without masters, either may have been rounded from the other.
        """
        return [d for d in self.found if d.name in mastered or self.failed[d.name] >= self.tried[d.name]]


def _can_be_rounded(dtypes: tuple[str, str], turned: bool) -> bool:
    """Return True if the weight may be the source of a rounding.

    It may not if the other side is wider.
    """
    source, target = dtypes[::-1] if turned else dtypes
    return (source, target) not in EXACT


def _plan(x: Side, y: Side, paths: tuple[set[str], set[str]], *, once: bool = False) -> Plan:
    """From x to the weights of y: of masters, and of weights."""
    masters, alone = paths
    every = masters | alone
    source = only(x[1], {(p, _MASTER) for p in masters} | {(p, "weight") for p in alone}, every)
    derived = dict.fromkeys((*source.layout.derived, Derivation("weight", _MASTER)))
    source = evolve(source, layout=evolve(source.layout, derived=tuple(derived)))
    target = _target(y[1], every)
    graph = build(source, _once(target) if once else target, dtype_of=x[0].dtype_of)
    return order(graph, name="compare")


def _target(placement: Placement, paths: set[str]) -> Placement:
    """Weights alone, and any cast is wanted."""
    whole = evolve(placement, layout=evolve(placement.layout, fillings=()))
    made = counted(only(whole, {(p, "weight") for p in paths}))
    return evolve(made, parts=tuple(evolve(part, lossy=True) for part in made.parts))


def _once(placement: Placement) -> Placement:
    """Each element in one of its places."""
    parts = tuple(
        evolve(p, folded=p.folded.replace(policy=np.full_like(p.folded.policy, Policy.ANY))) for p in placement.parts
    )
    return counted(evolve(placement, parts=parts))


def _trains_in(checkpoint: Checkpoint) -> str | None:
    settings = checkpoint.state.settings
    found = {flag: settings[flag].value for flag in _FLAGS if flag in settings}
    return next((_FLAGS[flag] for flag, on in found.items() if on), _WHOLE) if found else None


def named(compared: Iterable[Unequal], placement: Placement, turned: bool) -> list[Difference]:
    """Wrong elements of the target: their names and places.

    `turned`: it is A's.
    """
    elements = Elements(placement)
    return [_named(u, *elements.wrong(u), turned) for u in compared]


def _named(u: Unequal, state: str, element: str, turned: bool) -> Difference:
    there = f"{u.file}: {u.key}{list(u.element)}"
    here = f"{u.source_file}: {u.source_key}{list(u.source_element)}" if u.source_file else ""
    found = Difference("value", element.partition("[")[0], state, element, u.wanted, u.value, here, there)
    return evolve(found, a=u.value, b=u.wanted, a_place=there, b_place=here) if turned else found
