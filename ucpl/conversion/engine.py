"""The engine of a conversion: open, plan, check, run and verify.

The command line, Python, the ranks of a job and vaults all use these functions. The command line prints the engine's events.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve

from ucpl.conversion.keywords import ToApply, bounds_of, options_from
from ucpl.conversion.places import clear_made, refuse_existing, refuse_file_name, with_made, with_parents
from ucpl.conversion.running import rehearsed, run
from ucpl.conversion.target_passes import AfterPasses, apply_target_passes
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.conversion.companion_checks import DecidedCompanions
    from ucpl.conversion.planning import Asked, Prepared
    from ucpl.conversion.requests import Given
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.placement import Placement
    from ucpl.planning.plan import Plan
    from ucpl.runtime.counters import Report
    from ucpl.runtime.execute import TargetSizes
    from ucpl.runtime.options import Progress
    from ucpl.runtime.process_group import ProcessGroup

__all__ = ["Engine", "Event", "Finished", "Ready", "Rehearsed", "asked_of", "planned", "run"]


@frozen(eq=False)
class Ready:
    """A proved plan and its checked source, before the first write."""

    plan: Plan
    source: Checkpoint
    prepared: Prepared | None = None  # None: the plan was made earlier
    companions: DecidedCompanions | None = None

    @property
    def remarks(self) -> tuple[str, ...]:
        return () if self.prepared is None else self.prepared.remarks


@frozen(eq=False)
class Rehearsed:
    """All checks of a run passed; nothing is written."""

    ready: Ready
    sizes: TargetSizes


@frozen(eq=False)
class Finished:
    """The target is published and was opened once more."""

    ready: Ready
    report: Report
    target: Path


Event = Ready | Rehearsed | Finished
E = TypeVar("E", Ready, Rehearsed, Finished)
Bar = Callable[[str], AbstractContextManager["Progress | None"]]


def _ignore(event: Event) -> None:
    """No caller watches."""


def planned(asked: Asked, given: Given) -> Prepared:
    """Open the source, describe both sides, plan and prove."""
    from ucpl.conversion.planning import folded

    return folded(lambda how: _planned(asked, how), asked, given)


def _planned(asked: Asked, given: Given) -> Prepared:
    from ucpl.conversion.demanded import demand_loadable
    from ucpl.conversion.model_files import with_model_files
    from ucpl.conversion.planning import Prepared, described, is_unread, plan_of
    from ucpl.files.header_watch import reading

    here, there, names = described(asked, given)
    source = here.checkpoint
    with reading(source.top) if source is not None else nullcontext():
        here = with_model_files(here, there)
        made, after = plan_of(here, there, name=asked.name, twice=asked.twice, names=names)
        notes = demand_loadable(made, here, there)
    is_named = given.model is not None and not any(one.called.is_of_any for one in (here, there))
    unread = is_unread((here, there), given)
    return Prepared(made, here, there, after, notes, config_unread=unread, model_unread=is_named)


def asked_of(source: str | Path, to: str, layout: str | None) -> Asked:
    """The request of a conversion, with a second proof of its moves."""
    from ucpl.conversion.dialects import described_as
    from ucpl.conversion.planning import Asked

    described, names = described_as(layout)
    return Asked(described, to, source, called=names, twice=True)


def _after_passes(ready: Ready, source: Checkpoint) -> AfterPasses:
    """The metadata from planning, with the checked companion files."""
    assert ready.prepared is not None
    after = ready.prepared.after
    assert after is not None
    container = source.container.without({*ready.plan.left_out}) if source.container is not None else None
    return evolve(after, final=evolve(after.final, container=container))


@frozen(eq=False)
class Engine:
    """All steps of a conversion into one target, in their order.

    watch: gets each event. bar: shows the progress of a run. team: processes that run a plan together; the first one checks the
    source.
    """

    target: Path
    how: ToApply
    watch: Callable[[Event], None] = _ignore
    bar: Bar | None = None
    team: ProcessGroup | None = None

    def convert(self, asked: Asked, given: Given) -> Finished:
        """Open the source, plan, prove, check, run, verify. Raises: UcplError."""
        refuse_existing(self.target, self.how, asked.checkpoint or asked.source)
        with with_parents(self.target):
            ready = self._ready(asked, given, look=True)
            assert ready.companions is not None
            with with_made(ready.companions, self.target, self.how) as source:
                return self._run(evolve(ready, source=source), _after_passes(ready, source))

    def rehearse(self, asked: Asked, given: Given) -> Rehearsed:
        """All steps of `convert` before it writes. Raises: UcplError as `convert`."""
        refuse_existing(self.target, self.how, asked.checkpoint or asked.source)
        ready = self._ready(asked, given, look=False)
        sizes = rehearsed(ready.plan, _after_passes(ready, ready.source).final, self.target, self.how)
        return self._watched(Rehearsed(ready, sizes))

    def apply(self, plan: Plan | str | Path, source: Checkpoint | str | Path) -> Finished:
        """Run a finished plan.

        Raises: UcplError E600 to E607 if the source is not the one of the plan, E615.
        """
        if self._leads:
            refuse_existing(self.target, self.how, source)
        with with_parents(self.target):
            opened = self._opened(plan, source)
            refuse_file_name(self.target, opened.plan)
            ready = self._watched(opened)
            if self._leads:  # the other ranks wait for its next message
                self._demand_one_step(ready, None)
                clear_made(self.target)
            return self._run(ready, apply_target_passes(ready.source, ready.plan))

    @property
    def _leads(self) -> bool:
        return self.team is None or self.team.rank == 0

    def _watched(self, event: E) -> E:
        self.watch(event)
        return event

    def _ready(self, asked: Asked, given: Given, *, look: bool) -> Ready:
        """Open, plan and check. look: compare companion weights with the shards, too."""
        from ucpl.conversion.accounting import with_account
        from ucpl.conversion.companion_checks import decide_companions

        made = planned(asked, given)
        known = decide_companions(made, bounds_of(self.how), look=look)
        plan = made.plan if known.source is made.checkpoint else with_account(made.plan, known.source)
        refuse_file_name(self.target, plan)
        ready = self._watched(Ready(plan, known.source, made, known))
        self._demand_one_step(ready, made.source.placement)
        return ready

    @staticmethod
    def _opened(plan: Plan | str | Path, source: Checkpoint | str | Path) -> Ready:
        """A finished plan and its source, without the compiler."""
        from ucpl.conversion.accounting import demand_account
        from ucpl.conversion.opening import load_plan, open_for

        made = load_plan(plan) if isinstance(plan, str | Path) else plan
        opened = open_for(made, source) if isinstance(source, str | Path) else source
        return Ready(demand_account(made, opened), opened)

    def _demand_one_step(self, ready: Ready, placement: Placement | None) -> None:
        """Raises: UcplError E612, E615 if the files are of two steps."""
        if self.how.get("allow_drift"):
            return
        from ucpl.verification.same_step import check_no_drift

        bounds = options_from(bounds_of(self.how))
        check_no_drift(ready.plan, ready.source, bounds.memory, bounds.workers, placement)

    def _run(self, ready: Ready, after: AfterPasses) -> Finished:
        """Write, read back, publish, open once more."""
        own = self.how.get("progress")
        with nullcontext(own) if self.bar is None else self.bar(str(self.target)) as progress:
            how: ToApply = {**self.how, "progress": progress}
            report = run(ready.plan, after, self.target, how, self.team)
        return self._watched(Finished(ready, report, self.target))
