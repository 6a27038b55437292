"""Steps that a target needs besides a plain `load_checkpoint`."""

from __future__ import annotations

from ucpl.extents import Structure
from ucpl.extents.dtypes import can_train
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.groups import differences
from ucpl.formats.leaving import tied_advice
from ucpl.formats.optimizer_hypers import (
    NUMBERED,
    frozen_in_no_group,
    members_without_states,
    numbered_empty,
    unfactored,
)
from ucpl.formats.run_steps import STEPS, optimizer_steps
from ucpl.registry import format_named

WARM = (
    "the source has no optimizer state: engine.load_checkpoint(..., load_optimizer_states=False,"
    " load_lr_scheduler_states=False) takes the weights and masters, and moments start at zero"
)
WIDENED = "the source has no masters in f32: those of the target are its weights in {dtypes}, widened, and have no more digits"
MOMENTS = (
    "the source states neither groups nor learning rates of an optimizer, which DeepSpeed takes from a file with its moments:"
    ' zero1(..., elastic = 1) or zero2(..., elastic = 1), over a model whose `group "0" = ...` has the parameters in the'
    " optimizer's order, is loaded plainly, and the engine's learning rates stand; of this target"
    " engine.load_checkpoint(..., load_optimizer_states=False) takes the weights and masters"
)


LENIENT = (
    "parameters are not stored: engine.load_checkpoint(..., load_module_strict=False), as Trainer loads PEFT's; the base"
    " model has its own weights before"
)


WHOLE = (
    "at stage 3 DeepSpeed takes each tensor as it is here for a rank's own, so that engines of one tensor-parallel rank load"
    " it; for others universal(stage=1), which engines of stages 1 and 2 load, or zero3(tp=...) at their degree"
)


FIRST = (
    "DeepSpeed's loader of universal folders at stage 3 gives every parameter group the values of the first, and here groups"
    " differ in {keys}: set them after loading (engine.optimizer.param_groups), or take zero3(dp=...), whose loader keeps them"
)


ADAM_ALONE = (
    "DeepSpeed's loader of universal folders at stage 3 takes exp_avg and exp_avg_sq, and one step for all parameters, and here"
    " the states are {states}: it stops, or the optimizer stops at its first step. universal(stage=1), which engines of stages"
    " 1 and 2 load, or zero3(dp=...)"
)
UNRESTORED = (
    "DeepSpeed's loader of universal folders restores neither frozen parameters nor buffers: {names} stay as the job makes"
    " them. Load them into the module first, or take zero1(dp=...), zero2(dp=...) or zero3(dp=...), whose loader restores them"
)


ADAGRAD = (
    "DeepSpeed 0.19.8 loads no Adagrad at stage 3, its own neither: zero1 or zero2 with one group, or"
    " engine.load_checkpoint(..., load_optimizer_states=False)"
)
ADAGRAD_GROUPS = (
    "DeepSpeed 0.19.8 trains Adagrad with one group alone, its own neither (IndexError with {count}): one group in the engine,"
    " over a model with one, or zero0"
)
MIXED = (
    "parameters are of {dtypes}, and an engine without 16 bits takes f32 alone: bf16 = 1 in the call rounds the weights and"
    " keeps their masters in f32, bf16 = 0 widens them"
)
NUMBERED_ALONE = f"{NUMBERED}. zero1, zero2 and zero3 number buffers"
BOOLS = "torch's optimizers make {names} of the parameters' type when they load it, as of their own: bool here, 0 and 1 there"


GUESSED = (
    "{names} count as buffers, since the source's files do not distinguish these from frozen parameters: if one is a"
    " parameter of the job, --freeze NAME: without it DeepSpeed's loader stops at stage 3, and at 2 next to other frozen ones"
)


STEPS_DIFFER = (
    "the source counts no steps, and its optimizer has {few} for some parameters and {most} for others:"
    " global_steps is {most}"
)


def advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on left out or tied parameters, missing states, and unsupported optimizers."""
    tied = tied_advice(source, structure, "engine.load_checkpoint(..., load_module_strict=False)")
    lenient = (LENIENT,) if source.missing_tensors else tied
    stateless = members_without_states(source, structure)
    others = (*_mixed(structure), *_warm(source, structure), *stateless, *_of_optimizer(source, structure))
    return (*lenient, *_guessed(source, structure), *_steps(source), *others)


def _steps(source: Checkpoint) -> tuple[str, ...]:
    """Advice on parameters with fewer steps than the run."""
    counted = optimizer_steps(source.state)
    if len(counted) < 2 or STEPS in source.state.blobs:
        return ()
    return (STEPS_DIFFER.format(few=counted[0], most=counted[-1]),)


def _guessed(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on floating-point buffers that may be frozen parameters.

    Stages 2 and 3 store those apart.
    """
    if structure.settings.get("stage") not in (2, 3) or not format_named(source.format).guesses_buffers:
        return ()
    names = [t.name for t in structure.tensors if t.kind == "buffer" and can_train(t.dtype)]
    from ucpl.formats.torch_optimizer import STATISTICS

    listed = [name for name in names if name.rpartition(".")[2] not in STATISTICS]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return (GUESSED.format(names=", ".join(listed[:3]) + more),) if listed else ()


def _mixed(structure: Structure) -> tuple[str, ...]:
    """Advice on parameters of several dtypes without a training dtype."""
    found = {t.dtype for t in structure.tensors if t.kind == "parameter" and t.dtype}
    if len(found) < 2 or structure.settings.get("bf16") or structure.settings.get("fp16"):
        return ()
    return (MIXED.format(dtypes=" and ".join(sorted(found))),)


def _of_optimizer(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """DeepSpeed's own treatment of this optimizer: docs/decisions/odd-optimizers.md."""
    stage = structure.settings.get("stage")
    states = {state for tensor in structure.tensors for state in tensor.states} - {"weight", "fp32"}
    out = []
    if states == {"sum"} and stage:
        groups = len(structure.groups)
        out += [ADAGRAD] if stage == 3 else [ADAGRAD_GROUPS.format(count=groups)] if groups > 1 else []
    bools = {str(key[-1]) for (_, key), e in source.extents.items() if e.dtype == "bool" and key[-1] in states}
    if not stage and not structure.settings.get("masters"):
        out += frozen_in_no_group(source, structure, NUMBERED_ALONE)
        out += (*numbered_empty(source, structure), *unfactored(source, structure))
    return (*out, *([BOOLS.format(names=", ".join(sorted(bools)))] if bools else []))


def universal_advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on states, groups and tensors that DeepSpeed's loader does not restore."""
    is_cut = any(one.dim is not None for one in source.state.parallel.shardings.values())
    is_bare = structure.settings.get("stage") == 3 and not structure.settings.get("shaped")
    whole = (WHOLE,) if is_cut and is_bare else ()
    stateless = members_without_states(source, structure)
    return (
        *whole,
        *_steps(source),
        *stateless,
        *_first_alone(source, structure),
        *_adam_alone(source, structure),
        *_unrestored(structure),
    )


def _adam_alone(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on stage 3, which has names of Adam's states alone."""
    states = {state for tensor in structure.tensors for state in tensor.states} - {"weight", "fp32"}
    trained = any(tensor.states for tensor in structure.tensors)
    found = sorted((states | source.state.scalars.keys()) - {"step"})
    if structure.settings.get("stage") != 3 or not trained or found == ["exp_avg", "exp_avg_sq"]:
        return ()
    return (ADAM_ALONE.format(states=", ".join(found) or "none"),)


def _unrestored(structure: Structure) -> tuple[str, ...]:
    """Advice on tensors that the loader leaves as they are."""
    found = [tensor.name for tensor in structure.tensors if tensor.kind != "parameter"]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (UNRESTORED.format(names=found[0] + more),) if found else ()


def _first_alone(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on stage 3, which uses the first group's values for all."""
    groups = [group for group in source.state.groups if group.members]
    if structure.settings.get("stage") != 3 or not groups:
        return ()
    tensors = tuple(source.carried_extents.values())
    keys = dict.fromkeys(key for group in groups[1:] for key in differences(groups[0].hyper, group.hyper, tensors))
    return (FIRST.format(keys=", ".join(keys)),) if keys else ()


def _warm(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on groups of weights alone, which have no hyper-parameters."""
    if any(group.hyper for group in source.state.groups):
        return ()
    if any(set(tensor.states) - {"weight", "fp32"} for tensor in structure.tensors):
        is_said = [name for name, _ in structure.groups] not in ([], ["parameters"])
        return () if is_said and structure.settings.get("elastic") else (MOMENTS,)
    narrow = sorted({t.dtype for t in source.state.tensors if t.dtype in ("bf16", "f16")})
    has_masters = any("fp32" in t.states for t in source.state.tensors)
    if narrow and not has_masters and structure.settings.get("stage"):
        return (WARM, WIDENED.format(dtypes=" and ".join(narrow)))
    return (WARM,)
