"""Removes dropped parameters from a checkpoint's metadata.

Stores write a target's metadata from the plan's structure and from the source's metadata. The source's metadata names
parameters and has places for groups: in values of the module, layers of a pipeline, experts, numbers and learning-rate
schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve

from ucpl.errors import Label, fail

if TYPE_CHECKING:
    from ucpl.extents import ParameterGroup
    from ucpl.extents.parallel_facts import Experts, ParallelFacts
    from ucpl.extents.pipeline import Pipeline
    from ucpl.files.checkpoint import Checkpoint

__all__ = [
    "demand_layers",
    "noted",
    "reject_schedules_of_one",
    "without_dropped",
    "without_frozen",
    "with_trained_members",
    "changed_source",
    "with_changed_groups",
    "schedule_notes",
    "with_places",
]

Gone = Mapping[str, Sequence[str]]  # see changes.Changes.gone
V = TypeVar("V")
Chosen = Callable[[Sequence[object], str], list[object]]

# Lists of torch.optim.lr_scheduler and of DeepSpeed's schedules with one place for each parameter group.
BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def changed_source(checkpoint: Checkpoint, gone: Gone) -> Checkpoint:
    """The source after all four changes, for the layout of a target.

    Raises: UcplError E328.
    """
    for change in (without_dropped, without_frozen, with_changed_groups, with_trained_members):
        checkpoint = change(checkpoint, gone)
    return checkpoint


def without_dropped(checkpoint: Checkpoint, gone: Gone) -> Checkpoint:
    """Without the tensors that are dropped by name.

    Raises: UcplError E328 if a layer keeps a tensor of one expert alone.
    """
    names = frozenset(gone.get("names", ()))
    if not names:
        return checkpoint
    known = checkpoint.state
    blobs = dict(known.blobs)
    for name in ("module_extra", "empty_tensors"):
        if isinstance(held := blobs.get(name), dict):
            blobs[name] = _rest(held, names)
    pipeline, experts = known.parallel.pipeline, known.parallel.experts
    if isinstance(layers := blobs.get("layer_files"), dict) and pipeline is not None:
        blobs["layer_files"] = _layer_files(layers, pipeline, names)
    if experts is not None and isinstance(blobs.get("num_experts"), list):
        blobs["num_experts"] = _counts(experts, names)
    made = _untrained(evolve(checkpoint, state=evolve(known, blobs=blobs)), names & {*gone["numbers"]})
    if (pipeline := made.state.parallel.pipeline) is not None:
        pipeline = evolve(
            pipeline,
            layers=tuple(evolve(x, names=tuple(n for n in x.names if n[1] not in names)) for x in pipeline.layers),
            trusted=_rest(pipeline.trusted, names),
            buffers=tuple(name for name in pipeline.buffers if name not in names),
        )
    experts = None if experts is None else _experts(experts, names)
    return _with_parallel(made, evolve(made.state.parallel, pipeline=pipeline, experts=experts))


def without_frozen(checkpoint: Checkpoint, gone: Gone) -> Checkpoint:
    """Without the optimizer's numbers of parameters that are frozen by name."""
    return _untrained(checkpoint, frozenset(gone.get("numbers", ())) - frozenset(gone.get("names", ())))


def with_changed_groups(checkpoint: Checkpoint, gone: Gone) -> Checkpoint:
    """Remove groups without parameters, and add new groups like old ones."""
    if not gone or not (gone["groups"] or gone["new"]):
        return checkpoint
    known = checkpoint.state
    groups = tuple(group for group in known.groups if group.name not in gone["groups"])
    for new, old in zip(gone["new"], gone["like"], strict=True):
        groups += tuple(evolve(g, name=new, members=(), listed=()) for g in known.groups if g.name == old)
    if groups == known.groups:
        return checkpoint
    kept = _kept(checkpoint, gone)

    def chosen(values: Sequence[object], where: str) -> list[object]:
        return [values[i] for i in kept]

    count = len(known.groups)
    blobs = {key: with_places(held, count, chosen, key) for key, held in known.blobs.items()}
    carried = {key: with_places(held, count, chosen, str(key)) for key, held in known.carried.items()}
    return evolve(checkpoint, state=evolve(known, blobs=blobs, carried=carried, groups=groups))


def with_trained_members(checkpoint: Checkpoint, gone: Gone) -> Checkpoint:
    """With the parameters that are trained from here on in their groups."""
    trained = frozenset(gone.get("trained", ()))
    if not trained:
        return checkpoint
    known = checkpoint.state
    made = evolve(checkpoint, state=evolve(known, groups=tuple(_joined(group, gone) for group in known.groups)))
    return _weighed(made, trained, 1)


def _rest(values: Mapping[str, V], gone: Sequence[str] | frozenset[str]) -> dict[str, V]:
    return {name: value for name, value in values.items() if name not in gone}


def _untrained(checkpoint: Checkpoint, names: frozenset[str]) -> Checkpoint:
    """Without the optimizer's numbers and other states of some parameters.

    Stages of a pipeline count trained elements only.
    """
    from ucpl.formats.leaving import OPTIMIZER_VALUES

    if not names:
        return checkpoint
    known = checkpoint.state
    scalars = {state: _rest(mine, names) for state, mine in known.scalars.items()}
    extents = {state: _rest(mine, names) for state, mine in checkpoint.scalar_extents.items()}
    trained = frozenset(t.name for t in checkpoint.state.tensors if t.kind == "parameter")
    blobs = dict(known.blobs)
    if isinstance(others := blobs.get(OPTIMIZER_VALUES), dict):
        blobs[OPTIMIZER_VALUES] = _rest(others, names)
    made = evolve(checkpoint, state=evolve(known, scalars=scalars, blobs=blobs), scalar_extents=extents)
    return _weighed(made, names & trained, -1)


def _with_parallel(checkpoint: Checkpoint, parallel: ParallelFacts) -> Checkpoint:
    return evolve(checkpoint, state=evolve(checkpoint.state, parallel=parallel))


def _weighed(checkpoint: Checkpoint, names: frozenset[str], sign: int) -> Checkpoint:
    """Add or subtract parameters in the trained elements of a pipeline's layers."""
    pipeline = checkpoint.state.parallel.pipeline
    if pipeline is None or not names:
        return checkpoint
    sizes = {t.name: prod(t.shape) for t in checkpoint.state.tensors}
    mine = ({tensor for _, tensor in layer.names} & names for layer in pipeline.layers)
    elements = (was + sign * sum(sizes[t] for t in some) for was, some in zip(pipeline.elements, mine, strict=True))
    made = evolve(pipeline, elements=tuple(elements), methods=())
    return _with_parallel(checkpoint, evolve(checkpoint.state.parallel, pipeline=made))


def _joined(group: ParameterGroup, gone: Gone) -> ParameterGroup:
    """A group with the parameters that `--train` adds to it.

    It keeps its hyper-parameters even if its other parameters leave.
    """
    new = [name for name, into in zip(gone["trained"], gone["joins"], strict=False) if into == group.name]
    if not new:
        return group
    members, listed = (tuple(dict.fromkeys([*some, *new])) for some in (group.members, group.listed))
    return evolve(group, members=members, listed=listed if group.listed else ())


# ---- schedules ---------------------------------------------------------------------------------------------------------


def schedule_notes(checkpoint: Checkpoint | None, gone: Gone) -> tuple[str, ...]:
    """Notes on a schedule that loses or gains places of groups."""
    if checkpoint is None or not gone:
        return ()
    found: list[str] = []
    with_places(
        checkpoint.state.blobs.get("lr_scheduler"),
        len(checkpoint.state.groups),
        noted(found),
        "lr_scheduler",
    )
    keys = ", ".join(where.removeprefix("lr_scheduler/") for where in found)
    lost = (f"left out: the places of these groups in lr_scheduler ({keys})",) if keys and gone["groups"] else ()
    like = ", ".join(f"{new} as {old}" for new, old in zip(gone["new"], gone["like"], strict=True))
    return (*lost, *([f"new groups have places in lr_scheduler ({keys}): {like}"] if keys and like else []))


def with_places(held: object, count: int | None, chosen: Chosen, where: str) -> object:
    """A value whose schedules have other lists by group, at any depth.

    count: the groups that such a list has now; None: any. chosen: the new list for a list and its place.
    """
    if isinstance(held, list | tuple):
        made = [with_places(one, count, chosen, f"{where}/{n}") for n, one in enumerate(held)]
        is_same = all(one is was for one, was in zip(made, held, strict=True))
        return held if is_same or type(held) not in (list, tuple) else type(held)(made)
    if not isinstance(held, dict):
        return held
    is_schedule = "base_lrs" in held or "_last_lr" in held or where == "lr_scheduler"
    out: dict[object, object] = {}
    for key, value in held.items():
        if is_schedule and key in BY_GROUP and isinstance(value, list) and count in (None, len(value)):
            out[key] = chosen(value, f"{where}/{key}")
        else:
            out[key] = with_places(value, count, chosen, f"{where}/{key}")
    return held if all(out[key] is value for key, value in held.items()) else type(held)(out)


def noted(found: list[str]) -> Chosen:
    """For `with_places`: note the lists, and leave them as they are."""

    def chosen(values: Sequence[object], where: str) -> list[object]:
        found.append(where)
        return [*values]

    return chosen


def reject_schedules_of_one(checkpoint: Checkpoint) -> None:
    """Check that no schedule is of one of several optimizers.

    Its lists have places for some of the source's groups. Raises: UcplError E482.
    """
    from ucpl.formats.leaving import OPTIMIZERS

    state, odd = checkpoint.state, list[str]()
    if OPTIMIZERS not in state.blobs:
        return

    def chosen(values: Sequence[object], where: str) -> list[object]:
        if len(values) != len(state.groups):
            odd.append(where)
        return [*values]

    for key, held in (*state.blobs.items(), *state.carried.items()):
        with_places(held, None, chosen, str(key))
        if odd:
            fail(
                "E482",
                f"{odd[0]} has values for the groups of one of several optimizers, and the target has other groups",
                Label(str(checkpoint.top), where=odd[0]),
                remedy=f"--drop '{key}' leaves it out: make a schedule for the target's groups in the job",
            )


def _kept(checkpoint: Checkpoint, gone: Gone) -> list[int]:
    """The source's number of each kept or new group."""
    names = [group.name for group in checkpoint.state.groups]
    return [i for i, name in enumerate(names) if name not in gone["groups"]] + [names.index(g) for g in gone["like"]]


# ---- pipelines and experts ---------------------------------------------------------------------------------------------


def demand_layers(checkpoint: Checkpoint | None, gone: Gone, is_pipeline: bool) -> None:
    """Reject a pipeline that loses all tensors of a layer.

    Its layers have numbers without gaps. Raises: UcplError E328.
    """
    pipeline = checkpoint.state.parallel.pipeline if checkpoint is not None else None
    for layer in pipeline.layers if pipeline is not None and is_pipeline and gone else ():
        if layer.names and all(tensor in gone["names"] for _, tensor in layer.names):
            fail(
                "E328",
                f"all tensors of layer {layer.number} of the pipeline are dropped, and its layers are called by their numbers",
                Label("<source>", where=layer.file or f"layer {layer.number}"),
                remedy="write a target without a pipeline: --to 'zero3(dp=...)', or 'plain()'",
            )


def _layer_files(layers: dict[object, object], pipeline: Pipeline, names: frozenset[str]) -> dict[object, object]:
    """Values in files of layers besides tensors, without those of dropped names."""
    local = {
        x.file: {name for name, tensor in x.names if tensor in names} for x in pipeline.layers if x.file is not None
    }

    def without(held: object, mine: set[str]) -> object:
        if isinstance(held, dict):
            return {name: value for name, value in held.items() if name not in mine}
        return [name for name in held if name not in mine] if isinstance(held, list) else held

    out: dict[object, object] = {}
    for stem, facts in layers.items():
        mine = local.get(stem, set()) if isinstance(stem, str) else set()
        parts = facts.items() if isinstance(facts, dict) else ()
        out[stem] = {key: without(held, mine) if key in ("names", "extra", "empty") else held for key, held in parts}
    return out


def _counts(experts: Experts, names: frozenset[str]) -> list[object]:
    """Number of experts of each layer that keeps some.

    The order is that of the module, as in DeepSpeed's list.
    """
    return [*{one.module: one.count for name, one in experts.of.items() if name not in names}.values()]


def _experts(experts: Experts, names: frozenset[str]) -> Experts:
    """Experts without tensors that all experts of a layer lose.

    Raises: UcplError E328 if only some experts of a layer lose one.
    """
    kept = {name: one for name, one in experts.of.items() if name not in names}
    left = {(one.module, one.inner): name for name, one in kept.items()}
    for name, one in experts.of.items():
        if name in names and (one.module, one.inner) in left:
            fail(
                "E328",
                f"{name} is dropped, and {left[one.module, one.inner]} of another expert of the layer is not",
                Label("<source>", where=one.module.rstrip(".")),
                remedy=f"experts of a layer are alike: --drop '{one.every}'",
            )
    return evolve(experts, of=kept)
