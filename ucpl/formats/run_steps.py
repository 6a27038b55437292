"""Steps of a run, for targets that count them."""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.extents import TrainState
from ucpl.files.scalars import number_of
from ucpl.registry import format_named

__all__ = ["ITERATION", "STEPS", "iteration_of", "optimizer_steps", "steps_of"]

STEPS = "global_steps"
ITERATION = "iteration"  # Megatron's counter
_MAX = 1 << 62


def optimizer_steps(state: TrainState) -> list[int]:
    """The optimizer's different numbers of steps."""
    return sorted({n for n in map(_whole, _counted(state)) if n is not None})


def steps_of(state: TrainState) -> int | None:
    """Steps that the run counts, or its optimizer.

    None: neither says any. Of a parameter that was frozen for some steps the optimizer has fewer: the largest counts. An
    `iteration` is the run's counter in Megatron's folders; in others it may be anything, and comes last.
    """
    iteration = state.carried.get(ITERATION)
    counts = (iteration,) if format_named(state.framework).is_of_iterations else ()
    said = *counts, state.blobs.get(STEPS), state.carried.get(STEPS), *optimizer_steps(state)[-1:], iteration
    return next((n for n in map(_whole, said) if n is not None), None)


def iteration_of(state: TrainState) -> int:
    """The iteration in Megatron's folders, of at most nine digits."""
    said = _whole(state.carried.get(ITERATION))
    found = steps_of(state) if said is None else said
    return found if found is not None and found < 10**9 else 0


def _counted(state: TrainState) -> Iterator[object]:
    yield from state.scalars.get("step", {}).values()
    yield from (group.hyper["step"] for group in state.groups if "step" in group.hyper)


def _whole(value: object) -> int | None:
    """A number of steps, or None; torch keeps a float."""
    n = number_of(value)
    return int(n) if isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < _MAX else None
