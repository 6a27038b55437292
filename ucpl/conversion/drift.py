"""Before a run: files of two steps in one folder are found by weights that are not their masters, and by learning rates."""

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
    """A sample of the source's weights against their masters, and the optimizer's learning rates against its schedule's.

    Raises: UcplError E612, E615.

    placement: the source's, by which an element is named; without it, its tensor is.
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
        if error.diagnostics[0].code not in ("E600", "E601"):  # not what the plan was made for: the run says that
            raise


def _demand_rates(source: Checkpoint) -> None:
    """A torch scheduler keeps the rates that it gave last, which are the groups' own until the next step.

    Model states have the one and optimizer shards the others: of stage 3, whose model states hold no weight of what is
    trained, nothing else tells that all of them are of another step. DeepSpeed's own schedulers keep no rates.
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
                remedy="Find the files of one step. Where a rate was set by hand behind the schedule's back, --allow-drift"
                " converts all the same.",
            )
