"""The Python API: the verbs of the command line as functions.

`import ucpl` gives these names.

Texts and paths come in, records of `conversion` go down. Rooms are imported where they are needed: a plan from specs alone
waits for no store, `apply` for no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from attrs import evolve

from ucpl.conversion.companion_checks import companion_notes, compare_companions, findings_of, held_weights
from ucpl.conversion.demanded import found_in
from ucpl.conversion.engine import Engine, asked_of, planned
from ucpl.conversion.keywords import MoveBounds, ToApply, ToConvert, ToPlan, ToVerify, bounds_of, given_from
from ucpl.conversion.opening import load_plan, open_alike
from ucpl.conversion.opening import open_checkpoint as open_headers
from ucpl.conversion.ordering import demand_used, order_of
from ucpl.conversion.planning import Asked, make_plan
from ucpl.conversion.requests import Given, called, library_of, model_named
from ucpl.conversion.side import Side
from ucpl.conversion.sides import families_of, in_families, is_by_tensor, with_common_families, without_families
from ucpl.conversion.sides import source_side as describe
from ucpl.conversion.sides import target_side as aim
from ucpl.conversion.weights import in_names_of_both, open_for_comparison, open_for_inspection
from ucpl.errors import UcplError
from ucpl.records import frozen
from ucpl.storage.cache_dirs import scoped
from ucpl.storage.resolve_url import is_resolved, resolve_source, resolve_target

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.inference.infer import Inferred
    from ucpl.language import nodes
    from ucpl.planning.plan import Plan
    from ucpl.runtime.counters import Report
    from ucpl.verification.checkpoint import Verdict
    from ucpl.verification.compare import Likeness

__all__ = [
    "Converted",
    "apply",
    "compare",
    "convert",
    "export",
    "infer",
    "load",
    "load_plan",
    "make_plan",
    "open_checkpoint",
    "parse_target",
    "plan",
    "resume",
    "save_plan",
    "source_side",
    "target_side",
    "verify",
]

Here = str | Path
load = library_of
parse_target = called


@frozen(eq=False)
class Converted:
    """The result of `convert`: its plan and the run's report.

    It prints as the report.
    """

    plan: Plan
    report: Report

    def __str__(self) -> str:
        return str(self.report)


@scoped()
def plan(source: str, target: str, **how: Unpack[ToPlan]) -> Plan:
    """Make and prove the plan from one layout to another.

    `source` may be a checkpoint; layouts of any model need it or `model`.
    """
    model = how.get("model")
    source = source if is_resolved(source) else str(resolve_source(source))
    asked = Asked(source, target, how.get("checkpoint"), how.get("name", "convert"), how.get("prove", False))
    return planned(asked, given_from(how, model_named(model) if model else None)).plan


def save_plan(plan: Plan, path: Here) -> None:
    """A plan into a file; the same plan gives the same bytes."""
    from ucpl.planning.files import save_plan as write

    write(plan, Path(path))


@scoped()
def apply(plan: Plan | Here, source: Here | Checkpoint, target: Here, **how: Unpack[ToApply]) -> Report:
    """Run exactly that plan.

    Raises: UcplError E600-E606 if the source does not fit the plan, E615.
    """
    return Engine(resolve_target(target), how).apply(plan, source).report


@scoped()
def convert(source: Here, target: Here, to: str, **how: Unpack[ToConvert]) -> Converted:
    """Infer the source, plan, prove, write the target, check it.

    `layout` may describe the source instead.
    """
    model = how.get("model")
    given = given_from(how, model_named(model) if model else None)
    done = Engine(resolve_target(target), how).convert(asked_of(resolve_source(source), to, how.get("layout")), given)
    made, known, report = done.ready.prepared, done.ready.companions, done.report
    assert made is not None
    assert known is not None
    return Converted(done.ready.plan, evolve(report, remarks=(*made.odd, *report.remarks, *known.said)))


@scoped()
def export(
    source: Here, target: Here, *, dtype: str = "", shard: str = "5GB", spec: str = "", **how: Unpack[ToConvert]
) -> Converted:
    """Write a Hugging Face folder that from_pretrained loads strictly.

    config: a folder or its config.json. spec: the .ucpl file with the names of the source. Raises: UcplError E221, E222.
    """
    from ucpl.conversion.exporting import demand_strict, folder_config, request

    config = how.get("config")
    if isinstance(config, str | Path):
        how["config"] = folder_config(config)
    here = resolve_source(source)
    made = request(here, given_from(how), dtype=dtype, shard=shard, spec=spec, layout=how.get("layout"))
    engine = Engine(resolve_target(target), how, demand_strict)
    done = engine.convert(asked_of(here, made.to, made.layout), made.given)
    return Converted(done.ready.plan, evolve(done.report, remarks=(*made.notes, *done.report.remarks)))


@scoped()
def resume(run: Here, *, ranks: int | None = None, to: str = "", **how: Unpack[ToApply]) -> str | None:
    """The path of a run's newest checkpoint for the ranks at hand.

    It is converted if needed, by one process; others wait. None: the run has no checkpoint. Raises: UcplError E223.
    """
    from ucpl.conversion.resuming import resume as find

    try:
        return str(find(Path(run), how, ranks=ranks, to=to).path)
    except UcplError as error:
        if error.diagnostics[0].code != "E224":
            raise
        return None


@scoped()
def compare(
    a: Here,
    b: Here,
    *,
    a_layout: str | None = None,
    b_layout: str | None = None,
    weights: bool = False,
    order: str = "",
    config: Here | None = None,
    **bounds: Unpack[MoveBounds],
) -> Likeness:
    """Compare the logical state of two checkpoints.

    True if equal, in any layouts.

    weights: compare these alone, those of two dtypes in the narrower one. order: a file with the names of an optimizer's
    numbers, or "model". config: a config.json with the sizes of the layouts.
    """
    from ucpl.verification.compare import likeness

    numbered: list[Here] = []  # sides that need an order
    sizes = given_from({"config": config})

    def side_of(path: Here, layout: str | None) -> tuple[Checkpoint, Side]:
        described = called(layout) if layout is not None else None

        def read(given: Given) -> tuple[Checkpoint, Side]:
            if described is not None:
                given = evolve(given, config=sizes.config, config_file=sizes.config_file)
            opened = open_headers(path, described, given)
            numbered.extend([path] if given.order else [])
            return opened, in_families(opened, described, given)

        return open_for_inspection(read) if weights else open_for_comparison(read, order)

    def both() -> tuple[tuple[Checkpoint, Side], tuple[Checkpoint, Side]]:
        return side_of(a, a_layout), side_of(b, b_layout)

    (ours, here), (theirs, there) = in_names_of_both(both)
    if order and not numbered:
        demand_used(order_of(None, order), ours.top)
    here, there = with_common_families(here, there)
    found = likeness(ours, here.placement, theirs, there.placement, weights=weights, **bounds)
    return evolve(found, around=compare_companions(ours, theirs))


@scoped()
def verify(checkpoint: Here, *, against: Here | None = None, **how: Unpack[ToVerify]) -> Verdict:
    """Read a checkpoint back: digests, CRCs, copies, weights against masters.

    True if nothing is wrong.

    against: a genuine checkpoint of the framework in the same layout, which must hold the same bits.
    """
    from ucpl.extents.account import entries_of
    from ucpl.formats.overlooked import not_read_of
    from ucpl.verification.checkpoint import verdict
    from ucpl.verification.evidence import EvidenceRequest
    from ucpl.verification.reference import compare_with_reference

    layout, given = how.get("layout"), given_from(how)
    described = called(layout) if layout is not None else None

    def read(given: Given) -> Side:
        opened = open_headers(checkpoint, described, given)
        place = describe if against is not None or is_by_tensor(opened) else in_families
        return place(opened, described, given)

    side = open_for_inspection(read, given)
    opened = side.checkpoint
    assert opened is not None
    reference = how.get("reference")
    quick = how.get("quick")
    if quick is not None:
        found = verdict(opened, side.placement, quick=quick, **bounds_of(how))
        passed = entries_of(("not read", one.kind, one.name, one.why) for one in not_read_of(opened))
        return evolve(found, notes=(*found.notes, *(f"not read: {entry}" for entry in passed)))
    asked = (
        EvidenceRequest(side, resolve_source(reference) if reference is not None else None)
        if how.get("witness", True)
        else None
    )
    is_folded = bool(side.layout.families)
    folded = families_of(side) if described is None and not is_folded else None
    single = partial(without_families, side) if is_folded else None
    found = verdict(opened, side.placement, asked=asked, folded=folded, single=single, **bounds_of(how))
    held = held_weights(opened, side.placement, bounds_of(how))
    loader = found_in(opened, of_class=how.get("witness", True))
    passed = entries_of(("not read", one.kind, one.name, one.why) for one in not_read_of(opened))
    notes = (
        *found.notes,
        *companion_notes(opened),
        *(f"not read: {entry}" for entry in passed),
        *(str(one) for one in held if not one.differs),
        *loader.notes,
    )
    found = evolve(found, findings=(*found.findings, *findings_of(opened, held), *loader.wrong), notes=notes)
    if against is None:
        return found
    same = compare_with_reference(opened, side.placement, open_alike(against, side.placement))
    is_shown = bool(same) and not same.doubts
    notes = tuple(n for n in found.notes if not (is_shown and n.startswith("not witnessed:")))
    return evolve(found, against=same, notes=notes, is_evidenced=found.is_evidenced or same.is_witness)


def infer(checkpoint: Here) -> Inferred:
    """Infer the model and layout of an unknown checkpoint.

    `.text()` is the .ucpl.
    """
    from ucpl.conversion.sides import inferred

    return open_for_inspection(lambda given: inferred(open_headers(checkpoint, None, given)))


# ---- the steps of a conversion, one by one -----------------------------------------------------------------------------


def open_checkpoint(path: Here, layout: str | None = None) -> Checkpoint:
    """A checkpoint's headers. A layout describes files without a framework.

    Raises: UcplError, exit 3.
    """
    return open_headers(path, called(layout) if layout is not None else None)


def source_side(checkpoint: Checkpoint, layout: str | None = None) -> tuple[Side, nodes.Model]:
    """The source of a conversion and its model.

    It is inferred, or a spec describes it. Raises: UcplError E320-E323.
    """
    made = describe(checkpoint, called(layout) if layout is not None else None, Given())
    assert made.model is not None
    return made, made.model


def target_side(target: str, source: Side, model: nodes.Model | None = None, *, drop: Sequence[str] = ()) -> Side:
    """The target of a conversion.

    Values that its call leaves open come from the source, with their origin.
    """
    return aim(called(target), source, Given(model=model, drop=tuple(drop)))
