"""Check that all files of a source are of one step.

Files of two steps show by weights that differ from their masters, and by different learning rates. A sample of every stored
weight is compared with its stored master. The plan lists them (`Plan.masters`), so `apply` needs no code that makes plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ucpl.errors import Diagnostic, Label, UcplError, catalogue, fail
from ucpl.extents import Scalar
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.scalars import number_of
from ucpl.planning.plan import Plan, Runs
from ucpl.runtime.compare import Unequal
from ucpl.runtime.source_checks import damage_in
from ucpl.tables import I64, once
from ucpl.verification.target_check import compare_target

if TYPE_CHECKING:
    from ucpl.placement import Placement

__all__ = ["check_no_drift"]

SAMPLE = 1024  # elements of a run that are looked at


def check_no_drift(
    plan: Plan, source: Checkpoint, memory: int, workers: int, placement: Placement | None = None
) -> None:
    """Compare sampled weights with masters, and learning rates with the schedule.

    placement: the source's, for names of elements in an error; None: the error names the tensor. Raises: UcplError E612 if a
    weight or master is damaged, E615.
    """
    element = None
    if placement is not None:
        from ucpl.verification.masters import elements_of

        element = elements_of(placement)
    _check_rates(source)
    if plan.masters is None or len(source.files) < 2:  # one file is of one step
        return
    try:
        _check_masters(plan.masters, source, memory, workers, element)
    except UcplError as error:
        if error.diagnostics[0].code not in ("E600", "E601"):  # the source does not fit the plan: the run reports it
            raise


def _check_masters(
    masters: Plan,
    checkpoint: Checkpoint,
    memory: int,
    workers: int,
    element: Callable[[Unequal], str] | None,
) -> None:
    some = tuple(_sample(m) for m in masters.moves if m.kind == "copy")
    sampled = masters.of(sources=masters.sources, targets=masters.targets, moves=some)
    compared = compare_target(sampled, checkpoint, checkpoint, memory=memory, workers=workers)
    for unequal in compared:
        _refuse(unequal, checkpoint, element or (lambda u: f"weight of {u.label}"), memory)


def _check_rates(source: Checkpoint) -> None:
    """Compare the rates of a torch scheduler with the optimizer's groups.

    A scheduler stores the rates of its last step, and the groups have the same until the next step. Model states contain the
    scheduler and optimizer shards the groups. Model states of stage 3 contain no trained weight, so no other check can find
    that all of them are of another step. DeepSpeed's own schedulers store no rates.
    """
    schedule = source.state.blobs.get("lr_scheduler")
    rates = schedule.get("_last_lr") if isinstance(schedule, dict) else None
    groups = source.state.groups
    shard = next((file for file in source.files if file.endswith("_optim_states.pt")), None)
    if not isinstance(rates, list) or len(rates) != len(groups) or shard is None:
        return
    for group, rate in zip(groups, rates, strict=True):
        held = group.hyper.get("lr")
        held = number_of(held) if isinstance(held, Scalar) else held
        if isinstance(held, float) and isinstance(rate, float) and held != rate:
            fail(
                "E615",
                f"group {group.name} of the optimizer has the learning rate {held:.9g}, and its schedule gave {rate:.9g}: they"
                " are of different steps",
                Label(shard, f"lr {held:.9g}", where=f"param_groups/{group.name}"),
                Label(source.files[0], f"{rate:.9g}", where="lr_scheduler/_last_lr"),
                remedy="Find the files of one step. If a rate was set by hand without the schedule, --allow-drift"
                " converts anyway.",
            )


def _sample(m: Runs) -> Runs:
    """The start of every stored tensor's first and last run."""
    rows = once(np.concatenate([_ends(m.source), _ends(m.target)]))
    some = m.take(rows)
    shape = some.shape.copy()
    left = np.full(len(rows), SAMPLE, dtype=np.int64)
    for d in reversed(range(shape.shape[1])):  # the last dim is the densest
        shape[:, d] = np.minimum(shape[:, d], left)
        left //= shape[:, d]
        left = np.maximum(left, 1)
    return some.replace(shape=shape)


def _ends(numbers: np.ndarray) -> I64:
    """The first and last place of each number."""
    first = np.unique(numbers, return_index=True)[1]
    last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    return np.concatenate([first, last]).astype(np.int64)


def _refuse(unequal: Unequal, checkpoint: Checkpoint, element: Callable[[Unequal], str], memory: int) -> None:
    named = {(unequal.file, unequal.key), (unequal.source_file, unequal.source_key)}
    if damaged := damage_in(checkpoint, named, memory=memory):
        raise UcplError(*damaged)
    text = f"{element(unequal)}: the weight is not its master, rounded, {unequal.value} is not {unequal.wanted}"
    labels = (
        Label(unequal.file, unequal.value, where=f"{unequal.key}{list(unequal.element)}"),
        Label(unequal.source_file, unequal.wanted, where=f"{unequal.source_key}{list(unequal.source_element)}"),
    )
    from ucpl.verification.masters import shifted_masters_report

    notes, remedy = shifted_masters_report(unequal, checkpoint)
    raise UcplError(Diagnostic("E615", text, labels, notes, remedy or catalogue()["E615"].remedy))
