"""Keys of torch.optim's parameter groups that a source lacks.

A key is written if its value is known; otherwise it is left out and reported. `torch.distributed.checkpoint.load`
requests each key of the job's optimizer, and rejects a folder that lacks one. `torch.optim.Adam.__setstate__` (torch
2.13) has the defaults for missing keys. AdamW shares them, except for `decoupled_weight_decay`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail
from ucpl.files.groups import Hyper, named_hyper
from ucpl.files.masters import FP32, SETTING
from ucpl.formats.leaving import unstated_empty
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.extents import ParameterGroup, Structure
    from ucpl.files.checkpoint import Checkpoint

__all__ = [
    "NUMBERED",
    "advice",
    "completed",
    "counts_in_tensors",
    "frozen_in_no_group",
    "masters_as_states",
    "members_without_states",
    "numbered_empty",
    "unfactored",
]

_SHOWN = 3
NUMBERED = (
    ", so the target's optimizer has no number for them. A job that gives them to its optimizer gets torch's `doesn't match"
    " the size of optimizer's group`: give it the trained ones alone, and add the others after loading"
)
UNLISTED = (
    ", so the target's groups do not list them. A job that gives them to its optimizer gets `Missing key` from torch, or a"
    " group without lr: give it the trained ones alone, and add the others after loading"
)
_ADAFACTOR, _VARIANCE = "beta2_decay", "variance"  # of torch.optim.Adafactor
DECOUPLED = "decoupled_weight_decay"
_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
# Options of the computation of a step, and `maximize`: optimizers minimise without it.
_NEUTRAL: dict[str, object] = {
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip
# Groups of Adam have one of these (torch's, and the fused ones of DeepSpeed, apex and Transformer Engine) ...
_SIGNS = frozenset({"amsgrad", "bias_correction"})
# ... and no key but these: NAdam, LAMB and the like have others.
_KNOWN = frozenset(
    {
        "lr", "betas", "eps", "weight_decay", "initial_lr", "step", "name", "moe", "param_names", DECOUPLED,
        "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config", "max_lr", "min_lr", "pre_wd_mult",
        "pre_lr_mult",
    }
) | _SIGNS | _NEUTRAL.keys()  # fmt: skip


def completed(source: Checkpoint, structure: Structure, group: ParameterGroup) -> dict[str, object]:
    """Add the keys of torch.optim.Adam that the source or the target determines.

    torch's names of a group's parameters (`param_names`) are those of the target's group.

    Raises: UcplError E471 if the target states another `decoupled_weight_decay` than the source.
    """
    states = {state for tensor in structure.tensors if tensor.name in group.members for state in tensor.states}
    stated, hyper = _stated(structure), named_hyper(group.hyper, group.every)
    if not states >= _ADAM or not (stated is not None or _is_adam(hyper)):
        return dict(hyper)
    made = {"amsgrad": "max_exp_avg_sq" in states, **_NEUTRAL}
    decoupled = stated if stated is not None else _of_config(source, hyper)
    if decoupled is not None:
        made[DECOUPLED] = decoupled
    if stated is not None and hyper.get(DECOUPLED, stated) != stated:
        fail(
            "E471",
            f"the source has {DECOUPLED} = {hyper[DECOUPLED]}, and the target {stated}",
            Label("<target>", where=f"{DECOUPLED} = {int(stated)}"),
            remedy=f"leave {DECOUPLED} out of dcp(...)",
        )
    return {**made, **hyper}


def counts_in_tensors(group: ParameterGroup | None) -> bool:
    """Test for an optimizer whose `step` is a tensor.

    torch's own Adam and AdamW have one since torch 1.12. A bare number of another optimizer stays one:
    `torch.distributed.checkpoint.load` rejects a stored tensor where the job's optimizer has a number.
    """
    return group is None or not group.hyper or _is_adam(named_hyper(group.hyper, group.every))


def advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Notes on keys added to groups, and on states without a group."""
    if not any(tensor.states for tensor in structure.tensors) or not any(g.hyper for g in source.state.groups):
        return ()
    frozen = frozen_in_no_group(source, structure, UNLISTED)
    return (*_of_keys(source, structure), *_of_empty(source, structure), *frozen, *unfactored(source, structure))


def frozen_in_no_group(source: Checkpoint, structure: Structure, consequence: str) -> tuple[str, ...]:
    """Advice on frozen parameters whose groups no file of an engine states.

    consequence: of their absence from a target's groups.
    """
    if not any(group.hyper for group in source.state.groups) or not format_named(source.state.framework).has_engine:
        return ()
    if not any(tensor.states for tensor in structure.tensors):
        return ()
    listed = {name for group in source.state.groups for name in group.every}
    found = [tensor.name for tensor in structure.tensors if tensor.kind == "frozen" and tensor.name not in listed]
    if not found:
        return ()
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    names = ", ".join(found[:_SHOWN]) + more
    alone = [group.name for group in source.state.groups if not group.every]
    which = f" Group {', '.join(alone)} has no other parameters." if alone else ""
    return (f"no file of the source states the groups of frozen parameters ({names}){consequence}.{which}",)


def masters_as_states(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on masters of another format that a target keeps as states."""
    if source.format == structure.framework or not structure.settings.get("masters"):
        return ()
    state = str(structure.settings.get(SETTING, FP32))
    flag = "fp16" if structure.settings.get("fp16") else "bf16"
    return (
        f"the masters are the states `{state}`, which torch's own optimizers do not use:"
        f" --to '{structure.framework}(..., {flag} = 0)' has them as the weights",
    )


def members_without_states(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on members of groups without states in the source.

    torch makes the states at the first gradient. Engines make them for each trained parameter.
    """
    if format_named(source.state.framework).has_engine or not any(tensor.states for tensor in structure.tensors):
        return ()
    listed = {name for group in source.state.groups for name in group.every}
    found = [tensor.name for tensor in structure.tensors if tensor.kind == "frozen" and tensor.name in listed]
    if not found:
        return ()
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"{', '.join(found[:_SHOWN])}{more}: in groups of the source's optimizer, without states, since frozen or not reached"
        f" by a gradient. The target takes them for frozen; --train {found[0]} trains them, with states of zero",
    )


def _of_empty(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Parameters without elements whose group the source's files do not state."""
    found = unstated_empty(source)
    if not found or len(structure.groups) == 1:
        return ()
    return (
        f"{_first_of(found)} has no elements, and DeepSpeed's files do not say its group: its optimizer states are left out."
        " If the optimizer trains it, load with DefaultLoadPlanner(allow_partial_load=True)",
    )


def numbered_empty(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on parameters without elements for an optimizer that numbers its parameters."""
    found = unstated_empty(source)
    if not found or not any(tensor.states for tensor in structure.tensors):
        return ()
    text = f"{_first_of(found)} has no elements, and DeepSpeed's files do not say"
    if len(structure.groups) == 1:
        return (
            f"{text} if the optimizer trains it: it has a number and states here. For an optimizer without it, take its"
            " number out of the group",
        )
    return (
        f"{text} its group: the target's optimizer has no number for it. A job whose optimizer has it gets torch's `doesn't"
        " match the size of optimizer's group`: give it the others alone, and add it after loading",
    )


def unfactored(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on Adafactor's states of flat buffers for complete parameters."""
    of_adafactor = {name for group in source.state.groups if _ADAFACTOR in group.hyper for name in group.every}
    found = [t.name for t in structure.tensors if len(t.shape) > 1 and _VARIANCE in t.states and t.name in of_adafactor]
    if not found:
        return ()
    return (
        f"{_first_of(found)}: `{_VARIANCE}` has a value for each element, as flat buffers have it, and torch's Adafactor keeps"
        " means of a matrix's rows and columns: it stops at its first step (KeyError: 'row_var'). zero1, zero2 and zero3 keep"
        " flat buffers; with --weights-alone the optimizer begins anew",
    )


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _of_keys(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Notes on keys added to groups, and on an unknown one."""
    added: dict[str, object] = {}
    is_open = False
    for group in source.state.groups:
        made = completed(source, structure, group)
        added |= {key: value for key, value in made.items() if key not in group.hyper}
        is_open |= _lacks_kind(structure, group.members, made)
    out = []
    if added:
        shown = ", ".join(f"{key} = {value}" for key, value in added.items())
        out.append(f"param_groups of the source lack keys that follow from the optimizer's kind and states: {shown}")
    if is_open:
        out.append(
            f"param_groups of the source lack {DECOUPLED}, which torch 2.7 and later ask for (`Missing key`): state it with"
            f" dcp(..., {DECOUPLED} = 1) for AdamW, or = 0 for Adam"
        )
    return tuple(out)


def _lacks_kind(structure: Structure, members: Collection[str], hyper: Hyper) -> bool:
    """Test whether a group is Adam's or AdamW's without a decision."""
    states = {state for tensor in structure.tensors if tensor.name in members for state in tensor.states}
    return states >= _ADAM and DECOUPLED not in hyper and hyper.keys() <= _KNOWN


def _stated(structure: Structure) -> bool | None:
    value = structure.settings.get(DECOUPLED)
    return bool(value) if value in (0, 1) else None


def _is_adam(hyper: Hyper) -> bool:
    return not _SIGNS.isdisjoint(hyper) and hyper.keys() <= _KNOWN


def _of_config(source: Checkpoint, hyper: Hyper) -> bool | None:
    """Read the flag from ds_config's optimizer, if DeepSpeed itself makes it.

    The caller may set torch's own keys.
    """
    config = source.state.blobs.get("ds_config")
    said = config.get("optimizer") if isinstance(config, Mapping) else None
    if not isinstance(said, Mapping) or "bias_correction" not in hyper:
        return None
    kind, params = str(said.get("type", "")).lower(), said.get("params")
    if kind == "adamw":
        return True
    if kind != "adam":
        return None
    return bool(params.get("adam_w_mode", True)) if isinstance(params, Mapping) else True
