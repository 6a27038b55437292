"""Values that a format's target cannot hold, and values about files.

Not here: client_state and groups, which all formats of runs keep (conversion.accounting).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import ParameterGroup, Structure, TrainState
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.model_texts import TEXTS, config_of
from ucpl.files.scalars import number_of
from ucpl.files.values import Empty, Value
from ucpl.formats.run_steps import STEPS, optimizer_steps
from ucpl.registry import Format, format_named, formats

__all__ = [
    "DESCRIBING",
    "EMPTY",
    "EXTRA",
    "LAYERS",
    "META",
    "OPTIMIZERS",
    "OPTIMIZER_VALUES",
    "SCALE",
    "SCALED",
    "TEXTS",
    "empty_tensors",
    "keeps_all",
    "left_values",
    "objects_advice",
    "other_states",
    "run_values",
    "tied_advice",
    "unstated_empty",
    "with_empty_states",
    "with_names",
    "without_states",
]

# The file of Lightning's FSDPStrategy for values in no chunk: loops, callbacks, schedulers.
META = "meta.pt"
EMPTY = "empty_tensors"  # tensors without elements, which plans do not have
EXTRA = "module_extra"  # values of a module's state dict that are no tensors
SCALE = "loss_scale_config"  # ZeRO-0's numbers of loss scaling: a shard has an object made of them
SCALED = frozenset(
    ("cur_iter", "cur_scale", "dynamic_loss_scale", "last_overflow_iter", "scale_factor", "scale_window")
)
OPTIMIZERS = "optimizers_of_groups"  # the optimizer of each group, where a run has several
OPTIMIZER_VALUES = "optimizer_values"  # states that are neither one value per element nor a number, by parameter
LAYERS = "layer_files"  # of a pipeline, with such values of each layer

# Values that describe the source's own files: each target has its own, made for it.
DESCRIBING = frozenset(
    (
        "ds_version",
        "empty_tensors",
        "experts_optimizers",
        LAYERS,
        "left_out",
        "megatron_without_extra_state",
        "module_attributes",
        "module_names",
        "num_experts",
        "universal_checkpoint_info",
    )
)


def keeps_all(framework: str) -> bool:
    """Test whether a format keeps all values of any run."""
    return format_named(framework).kept_values is None


def left_values(source: Checkpoint, structure: Structure) -> dict[str, str]:
    """Values that a target cannot keep, with the reason for each."""
    target = format_named(structure.framework)
    kept, have = target.kept_values, "has" if target.title.startswith("a ") else "have"
    out: dict[str, str] = {}
    for name in source.state.blobs:
        if kept is not None and name not in kept and name not in DESCRIBING:
            if not (name == STEPS and _is_counted_by_optimizer(source.state, target)):
                out[name] = f"{target.title} {have} no place for it"
        elif why := target.value_dropped(name, structure.settings):
            out[name] = why
    if META in out:
        out[META] = "it is Lightning's file of values outside chunks"
    return out


def _is_counted_by_optimizer(state: TrainState, target: Format) -> bool:
    """Test whether the states of a target have the number of steps."""
    return target.has_optimizer and optimizer_steps(state)[-1:] == [number_of(state.blobs[STEPS])]


# Values of torch_dist, of ranks, and of Megatron-FSDP that are no tensors.
_OBJECTS = ("sharded_objects", "megatron_rng", "megatron_fsdp_rng")


def objects_advice(source: Checkpoint) -> tuple[str, ...]:
    """Advice on values that a target of DeepSpeed cannot hold.

    An empty `_extra_state` does not count.
    """
    names: list[str] = []
    for key in _OBJECTS:
        held = source.state.blobs.get(key)
        names += [str(name) for name, value in held.items() if value != [None]] if isinstance(held, dict) else []
    if not names:
        return ()
    shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    return (f"random states and other objects of Megatron's ranks are left out, {len(names)} in all: {shown}",)


def empty_tensors(state: TrainState, root: Path) -> dict[str, Empty]:
    """Tensors without elements by name; plans do not have them."""
    noted = Value(root, "plain.pt", (), state.blobs, "E481").find(EMPTY)
    return {name: Empty.of(value) for name, value in noted.named()} if noted is not None else {}


def unstated_empty(source: Checkpoint) -> tuple[str, ...]:
    """Parameters without elements that no group of an engine's files lists.

    The files have neither their states nor the flag that they are trained.
    """
    state = source.state
    if not format_named(state.framework).omits_empty_states or not any(group.hyper for group in state.groups):
        return ()
    listed = {name for group in state.groups for name in group.every}
    found = empty_tensors(state, source.root).items()
    return tuple(name for name, one in found if not (one.buffer or one.states or name in listed))


def with_empty_states(source: Checkpoint, structure: Structure) -> Checkpoint:
    """A source with the optimizer's states of parameters without elements.

    Some formats do not store these states. In a job of one group they are those of the other parameters, and their step;
    in the group, they have the places that the module gives them.
    """
    state, alone = source.state, unstated_empty(source)
    found = empty_tensors(state, source.root)
    is_one = len(structure.groups) == len(state.groups) == 1
    groups = tuple(_with_members(source, group, alone) for group in state.groups) if is_one else state.groups
    made = {name: one for group in groups for name, one in _states_of(source, structure, group, found).items()}
    noted = state.blobs.get(EMPTY)
    if not made or not isinstance(noted, dict):
        return source
    blobs = {**state.blobs, EMPTY: {**noted, **{name: {**noted[name], **made[name]} for name in made}}}
    return evolve(source, state=evolve(state, groups=groups, blobs=blobs))


def _with_members(source: Checkpoint, group: ParameterGroup, more: Sequence[str]) -> ParameterGroup:
    """A group with more names, at places that the module gives."""
    stated = source.state.blobs.get("module_names")
    place = {name: at for at, name in enumerate(stated)} if isinstance(stated, list) else {}
    every = [*group.every]
    is_module_s = every == sorted(every, key=lambda name: place.get(name, -1))
    listed = sorted((*every, *more), key=lambda name: place.get(name, -1)) if is_module_s else [*every, *more]
    return evolve(group, listed=tuple(listed)) if more else group


def _states_of(
    source: Checkpoint, structure: Structure, group: ParameterGroup, found: Mapping[str, Empty]
) -> dict[str, dict[str, object]]:
    """States and numbers that files omit: of parameters without elements."""
    lacking = [name for name in group.every if name in found and not (found[name].buffer or found[name].states)]
    if not lacking or not format_named(source.state.framework).omits_empty_states:
        return {}
    counted = {"fp32", *source.state.scalars}
    trained = [tensor for tensor in structure.tensors if tensor.states and tensor.name in group.members]
    states = {state: "f32" for state in (trained[0].states if trained else ()) if state not in counted}
    numbers = {}
    for state, values in source.state.scalars.items():
        held = [number_of(value) for name, value in values.items() if name in group.members]
        several = {number for number in held if isinstance(number, int | float)}
        if len(several) == 1:
            numbers[state] = several.pop()
    return {name: {"states": states, "numbers": {**numbers, **found[name].numbers}} for name in lacking}


def other_states(state: TrainState) -> dict[str, None]:
    """Names of optimizer states that are neither elementwise nor numbers."""
    held = state.blobs.get(OPTIMIZER_VALUES)
    return {name: None for states in held.values() for name in states} if isinstance(held, dict) else {}


def without_states(state: TrainState, names: frozenset[str]) -> TrainState:
    """A train state without these of them."""
    held = state.blobs.get(OPTIMIZER_VALUES)
    if not isinstance(held, dict) or names.isdisjoint(other_states(state)):
        return state
    kept = {owner: {n: one for n, one in states.items() if n not in names} for owner, states in held.items()}
    left = {owner: states for owner, states in kept.items() if states}
    blobs = {key: value for key, value in state.blobs.items() if key != OPTIMIZER_VALUES}
    return evolve(state, blobs={**blobs, OPTIMIZER_VALUES: left} if left else blobs)


def with_names(held: object, made: Mapping[str, Sequence[str]], top: Path) -> object:
    """Other states under the names of a target.

    held: `optimizer_values`, or None. made: a target's tensors, each with the source's that it consists of; other names stay.
    Raises: UcplError E448 for such a state of a tensor that is joined with others, or divided.
    """
    if not isinstance(held, dict):
        return held
    uses = [part for parts in made.values() for part in parts]
    for name, parts in made.items():
        for part in parts:
            if part in held and (len(parts) > 1 or uses.count(part) > 1):
                states = [*map(str, held[part])]
                does = "joins it with others" if len(parts) > 1 else "divides it"
                fail(
                    "E448",
                    f"the optimizer keeps `{states[0]}` of `{part}`, which is neither one value per element nor a number, and"
                    f" the target {does}",
                    Label(str(top), where=part),
                    Label("<target>", where=name),
                    remedy=f"{' '.join(f'--drop {state}' for state in states)} leaves it out; --weights-alone converts the"
                    " weights",
                )
    called = {parts[0]: name for name, parts in made.items()}
    return {called.get(str(name), name): states for name, states in held.items()}


def run_values(carried: Mapping[object, object]) -> dict[object, object]:
    """Values of a run without degrees and files of any format."""
    for one in formats().values():
        carried = one.run_values(carried)
    return dict(carried)


def tied_advice(source: Checkpoint, structure: Structure, remedy: str) -> tuple[str, ...]:
    """Advice on a tied tensor whose second name is unknown.

    remedy: the loader that takes one name.
    """
    config = config_of(source)
    if config is None or config.get("tie_word_embeddings") is not True or structure.aliases:
        return ()
    if any(tensor.name == "lm_head.weight" for tensor in structure.tensors):
        return ()
    return (
        "config.json says tie_word_embeddings, and a Hugging Face folder stores such a tensor once: a module has it under two"
        f" names. With transformers installed both are written; else {remedy} is content with one",
    )
