"""Compare weights with the fp32 masters that they are rounded from.

All of them here; a sample of each before a run (same_step).

Files of two steps in one folder have equal keys and shapes. The optimizer's counters show most of these cases; for an
optimizer
without counters, and for files of weights, only values show it. They change everywhere with a step, so a sample is
enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Diagnostic
from ucpl.graph import build
from ucpl.graph.side import DtypeOf
from ucpl.layout import Derivation
from ucpl.placement import Placement
from ucpl.planning import Plan, order
from ucpl.verification.elements import counted, element_of, finding, only, pairs_of

if TYPE_CHECKING:  # planning does not import the runtime
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.runtime.compare import Comparison, Unequal

__all__ = ["dtype_of", "elements_of", "masters_of", "weights_against_masters"]


def weights_against_masters(
    checkpoint: Checkpoint, placement: Placement, memory: int, workers: int
) -> tuple[Comparison | None, list[Diagnostic]]:
    """Compare every stored weight with its stored master.

    None: not both are stored. Findings are E701.
    """
    from ucpl.verification.target_check import compare_target

    plan = masters_of(placement, dtype_of(checkpoint))
    if plan is None:
        return None, []
    compared = compare_target(plan, checkpoint, checkpoint, memory=memory, workers=workers)
    weights = _weights(placement)
    return compared, [_found(u, weights, checkpoint) for u in compared]


def _found(unequal: Unequal, weights: Placement, checkpoint: Checkpoint) -> Diagnostic:
    from ucpl.verification.known_bugs import shifted_masters_report

    said = finding("E701", unequal, weights, "the weight is not its master, rounded")
    notes, remedy = shifted_masters_report(unequal, checkpoint)
    return evolve(said, notes=notes, remedy=remedy or said.remedy)


def masters_of(placement: Placement, dtypes: DtypeOf | None, without: frozenset[str] = frozenset()) -> Plan | None:
    """Moves from stored masters to stored weights, if both are stored.

    Without: tensors whose masters are not read.
    """
    both = _both(placement) - without
    if not both:
        return None
    masters = only(placement, {(path, "fp32") for path in both})
    masters = evolve(masters, layout=evolve(masters.layout, derived=(Derivation("weight", "fp32"),)))
    weights = counted(only(placement, {(path, "weight") for path in both}))
    return order(build(masters, weights, dtype_of=dtypes), name="masters")


def elements_of(placement: Placement) -> Callable[[Unequal], str]:
    """A function that names an element of such a plan's target."""
    weights = _weights(placement)
    return lambda unequal: element_of(unequal, weights)


def _weights(placement: Placement) -> Placement:
    return counted(only(placement, {(path, "weight") for path in _both(placement)}))


def _both(placement: Placement) -> set[str]:
    pairs = pairs_of(placement)
    return {path for path, state in pairs if state == "weight" and (path, "fp32") in pairs}


def dtype_of(checkpoint: Checkpoint) -> DtypeOf:
    """The dtype that a checkpoint has at a place."""
    return checkpoint.dtype_of
