"""Check that all files of a source are of one step.

Files of two steps show by weights that differ from their masters, and by different learning rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Scalar

if TYPE_CHECKING:
    from ucpl.conversion.keywords import DataPlane
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.placement import Placement
    from ucpl.planning.plan import Plan

__all__ = ["demand_no_drift"]


def demand_no_drift(plan: Plan, source: Checkpoint, bounds: DataPlane, placement: Placement | None = None) -> None:
    """Compare sampled weights with masters, and learning rates with the schedule.

    placement: the source's, for names of elements in an error; None: the error names the tensor.

    Raises: UcplError E612, E615.
    """
    from ucpl.conversion.keywords import options_from
    from ucpl.verification.same_step import check_same_step

    element = None
    if placement is not None:
        from ucpl.verification.masters import elements_of

        element = elements_of(placement)
    bound = options_from(bounds)
    _demand_rates(source)
    try:
        check_same_step(plan.masters, source, bound.memory, bound.workers, element)
    except UcplError as error:
        if error.diagnostics[0].code not in ("E600", "E601"):  # the source does not fit the plan: the run reports it
            raise


def _demand_rates(source: Checkpoint) -> None:
    """Compare the rates of a torch scheduler with the optimizer's groups.

    A scheduler stores the rates of its last step, and the groups have the same until the next step. Model states contain the
    scheduler and optimizer shards the groups. Model states of stage 3 contain no trained weight, so no other check can find
    that all of them are of another step. DeepSpeed's own schedulers store no rates.
    """
    from ucpl.files.scalars import number_of

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
