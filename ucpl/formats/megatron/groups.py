"""Parameter groups of Megatron-Core's optimizers, whose members no file names.

Megatron's own rule makes the groups: experts have separate ones (`is_expert_parallel`); biases and tensors of one dim
have no weight decay (`wd_mult` 0; with --apply-wd-to-qk-layernorm, norms of queries and keys have some); embeddings and
the output layer are separate if they have another learning rate (--decoupled-lr).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Counted, ParameterGroup
from ucpl.files.groups import differences, each_of, reject_without
from ucpl.formats.megatron.legacy_arguments import arguments_in
from ucpl.formats.megatron.legacy_names import EMBEDDING, OUTPUT
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.extents import Extent, Structure, TrainState
    from ucpl.files.checkpoint import Checkpoint

__all__ = [
    "STEP",
    "DealtGroups",
    "GroupValues",
    "by_rule",
    "has_own_groups",
    "dealt",
    "decay_advice",
    "decays_norms",
    "check_found_again",
    "has_no_decay",
    "has_own_rate",
    "is_decoupled",
    "is_expert",
    "own_dims",
]

STEP = "step"
EXPERTS = re.compile(r"(?<![^.])experts\.", re.DOTALL)  # never `shared_experts.`, which every rank has
_OF_EXPERTS, _DECAY = "is_expert_parallel", "wd_mult"
_DECOUPLED, _OF_ALL = "is_decoupled_lr", "default_config"
# Other marks of groups in Megatron-Core, besides experts and decay; from a source's group if it has them.
_MARKS: dict[str, object] = {"lr_mult": 1.0, _DECOUPLED: False, _OF_ALL: True}
_MARKED = frozenset({_DECAY, "pre_wd_mult"})  # a group of Megatron's has one of these
_WEIGHT_DECAY = "weight_decay"
_QK_NORMS = ("q_layernorm.", "k_layernorm.")
_CONDITIONS = ("apply_wd_to_qk_layernorm", "qwen3_next")
_ADAM, _MOMENTUM = frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"momentum_buffer"})
_KNOWN = _ADAM | _MOMENTUM
_STACKED = re.compile(r"(?<![^.])layers\.(?!\d+\.)", re.DOTALL)  # of all layers: the first dim counts them
_STACKED_EXPERTS = re.compile(r"(?<![^.])experts\.(experts|local_experts)\.(?!\d+\.)", re.DOTALL)


@frozen
class GroupValues:
    """A group's values in files, without `params` and `step`, and its steps."""

    hyper: dict[str, object]
    step: Counted = None


@frozen
class DealtGroups:
    """Groups with their members, and the number of steps of each parameter."""

    groups: tuple[ParameterGroup, ...] = ()
    steps: dict[str, Counted] = field(factory=dict)
    empty: tuple[str, ...] = ()  # numbers of groups that get no parameter


def own_dims(name: str, shape: tuple[int, ...]) -> int:
    """Dims of a parameter of one layer and one expert."""
    return len(shape) - bool(_STACKED.search(name)) - bool(_STACKED_EXPERTS.search(name))


def is_expert(name: str) -> bool:
    return EXPERTS.search(name) is not None


def decays_norms(arguments: Mapping[object, object]) -> bool:
    """Test whether a run gives norms of queries and keys weight decay.

    Qwen3-Next does. Releases before 0.16 call the argument `no_weight_decay_cond_type`.
    """
    return (
        arguments.get("apply_wd_to_qk_layernorm") is True or arguments.get("no_weight_decay_cond_type") in _CONDITIONS
    )


def has_no_decay(name: str, shape: tuple[int, ...], *, norms_decay: bool) -> bool:
    """Test whether Megatron gives a parameter no weight decay.

    norms_decay: it gives some to norms of queries and keys.
    """
    if norms_decay and any(norm in name for norm in _QK_NORMS):
        return False
    return name.endswith(".bias") or own_dims(name, shape) == 1


def has_own_rate(name: str) -> bool:
    """Test whether --decoupled-lr applies to a parameter."""
    return name in (EMBEDDING, OUTPUT)


def is_decoupled(hyper: Mapping[str, object]) -> bool:
    """Test whether a group has the decoupled learning rate.

    Megatron-Core 0.16 leaves `is_decoupled_lr` at False, and records that the rate is not the run's own.
    """
    return hyper.get(_DECOUPLED) is True or hyper.get(_OF_ALL) is False


def by_rule(
    hypers: Iterable[tuple[str, Mapping[str, object]]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    experts_apart: bool,
    norms_decay: bool,
    tensors: Iterable[Extent],
) -> list[ParameterGroup]:
    """Parameters in groups as Megatron makes them.

    hypers: each parameter, and the hyper-parameters of its group in the source; tensors: the source's. experts_apart: whether
    experts are in groups of their own; a parameter that is new has none, and takes those of its group's others. Raises:
    UcplError E471 where one of Megatron's groups is of parameters with different hyper-parameters, E483 where the source has
    none for one.
    """
    found: dict[tuple[bool, bool, bool], tuple[dict[str, object], list[str]]] = {}
    tensors = tuple(tensors)
    for name, hyper in hypers:
        without = has_no_decay(name, shapes[name], norms_decay=norms_decay)
        mark = (without, experts_apart and is_expert(name), is_decoupled(hyper))
        other, members = found.setdefault(mark, (dict(hyper), []))
        members.append(name)
        if not other:
            other.update(hyper)
        key = next(iter(_differences(other, hyper, tensors)), None) if hyper else None
        if key is not None:
            values = [str(one[key])[:40] if key in one else "not set" for one in (other, hyper)]
            fail(
                "E471",
                f"`{members[0]}` and `{name}` are in one parameter group of Megatron's, and in two of the source's: {key} is"
                f" {values[0]} and {values[1]}",
                Label("<source>", where=members[0]),
                Label("<source>", where=name),
                remedy="Megatron distinguishes only weight decay and experts; without the optimizer, the weights are"
                " converted: --drop of its states",
            )
    is_silent = not any(hyper for hyper, _ in found.values())
    out = []
    for (without, of_experts, _), (hyper, members) in sorted(found.items(), key=lambda item: item[0]):
        if not hyper and not is_silent:
            reject_without(members)
        said = {**_MARKS, **hyper, _OF_EXPERTS: of_experts, _DECAY: 0.0 if without else 1.0}
        out.append(ParameterGroup("", tuple(members), said))
    return out


def has_own_groups(state: TrainState) -> bool:
    """True if Megatron made a run's groups; a target keeps these."""
    return any(_DECAY in group.hyper for group in state.groups)


def decay_advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Notes on weight decays that Megatron's schedule changes.

    The source is of no Megatron run. At its first step the schedule sets the weight decay of each group to its own
    times `wd_mult`, whatever the folder has.
    """
    held = each_of(source.state)
    if any(hyper.keys() & _MARKED for hyper in held.values()):
        return ()
    shapes = {tensor.name: tensor.shape for tensor in structure.tensors}
    trained = [name for _, members in structure.groups for name in members if name in shapes and held.get(name)]
    norms_decay = decays_norms(arguments_in(source))
    found: dict[bool, dict[object, list[str]]] = {True: {}, False: {}}
    for name in trained:
        if (decay := held[name].get(_WEIGHT_DECAY)) is not None:
            without = has_no_decay(name, shapes[name], norms_decay=norms_decay)
            found[without].setdefault(decay, []).append(name)
    lost = [name for decay, names in found[True].items() if decay != 0 for name in names]
    out = [
        f"--weight-decay {decay}: Megatron's schedule sets the job's own, and the source has this"
        for decay in found[False]
    ]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        out.append(
            f"Megatron's schedule gives biases and parameters of one dim no weight decay: {lost[0]}{more} has"
            f" {held[lost[0]][_WEIGHT_DECAY]} in the source, and loses it at the first step"
        )
    return tuple(out)


def _differences(
    one: Mapping[str, object], other: Mapping[str, object], tensors: Iterable[Extent] = ()
) -> Iterator[str]:
    """Hyper-parameters that differ, or that one of them lacks."""
    return (key for key in differences(one, other, tensors) if key not in (_DECAY, _OF_EXPERTS))


def dealt(
    said: Sequence[GroupValues],
    shapes: Mapping[str, tuple[int, ...]],
    states: Mapping[str, tuple[str, ...]],
    path: Path,
    *,
    norms_decay: bool,
) -> DealtGroups:
    """Parameters dealt to the groups of the files.

    A group without parameters is left out, and listed so. shapes, states: of the parameters that the optimizer trains.
    path: the file with the groups. Raises: UcplError E531 for a parameter that no group takes.
    """
    left = dict(shapes)
    groups: list[ParameterGroup] = []
    steps: dict[str, Counted] = {}
    for number, one in enumerate(said):
        members = tuple(_members(one, said, left, states, norms_decay))
        for name in members:
            del left[name]
            if one.step is not None:
                steps[name] = one.step
        if members:
            groups.append(ParameterGroup(str(number), members, one.hyper))
    if left and said:
        name = next(iter(left))
        fail(
            "E531",
            f"none of the {len(said)} groups of the optimizer takes `{name}` ({', '.join(states.get(name, ())) or 'no state'})",
            Label(str(path), where="optimizer/param_groups"),
            remedy="which parameter is in which group is in no file: ucpl deals them as Megatron-Core does, by experts and by"
            " weight decay; without the optimizer, the weights are converted: --drop of its states",
        )
    named = {group.name for group in groups}
    return DealtGroups(tuple(groups), steps, tuple(str(n) for n in range(len(said)) if str(n) not in named))


def check_found_again(
    groups: Sequence[ParameterGroup],
    shapes: Mapping[str, tuple[int, ...]],
    states: Mapping[str, tuple[str, ...]],
    path: Path,
    *,
    norms_decay: bool,
) -> None:
    """Check that `dealt` finds the same groups from the written hyper-parameters.

    shapes, states: of all parameters of the groups. path: the file that will have the groups. Raises: UcplError E471 if
    a parameter would be found in another group, or in none.
    """
    try:
        made = dealt(
            [GroupValues(group.hyper) for group in groups], shapes, states, path, norms_decay=norms_decay
        ).groups
    except UcplError as error:
        fail(
            "E471",
            f"{error.diagnostics[0].message}: no loader would find it in the target",
            Label("<source>", where="param_groups"),
            remedy="hyper-parameters that are of the optimizer whose states these are: `betas` of Adam, `momentum` of SGD and"
            " Muon; or weights alone, with --drop of the states",
        )
    found = {name: int(group.name) for group in made for name in group.members}
    for number, group in enumerate(groups):
        for name in group.members:
            if found.get(name, number) != number:
                differing = ", ".join(_differences(group.hyper, groups[found[name]].hyper)) or _DECAY
                fail(
                    "E471",
                    f"`{name}` is in parameter group {number} of the target, and by Megatron's rule it would be found in group"
                    f" {found[name]}: files do not record the groups of parameters. The two groups differ in"
                    f" {differing}",
                    Label("<source>", where=name),
                    remedy="Megatron distinguishes only weight decay, experts, and embeddings with another learning rate;"
                    " without the optimizer, the weights are converted: --drop of its states",
                )


def _members(
    one: GroupValues,
    every: Sequence[GroupValues],
    left: Mapping[str, tuple[int, ...]],
    states: Mapping[str, tuple[str, ...]],
    norms_decay: bool,
) -> Iterator[str]:
    """The group's parameters among those that are not dealt yet."""
    of_experts = bool(one.hyper.get(_OF_EXPERTS))
    has_experts = any(other.hyper.get(_OF_EXPERTS) for other in every)
    # Of one optimizer's groups, those that differ in the decay alone share its parameters out.
    alike = [o for o in every if bool(o.hyper.get(_OF_EXPERTS)) == of_experts and _moments(o) == _moments(one)]
    has_decoupled = any(is_decoupled(other.hyper) for other in alike)
    if has_decoupled and not is_decoupled(one.hyper):
        alike = [o for o in alike if not is_decoupled(o.hyper)]
    is_split = len({repr(other.hyper.get(_DECAY)) for other in alike}) > 1
    for name, shape in left.items():
        if has_experts and is_expert(name) != of_experts:
            continue
        found = set(states.get(name, ()))
        if found & _KNOWN and _moments(one) and not found & _moments(one):
            continue
        if has_decoupled and has_own_rate(name) != is_decoupled(one.hyper):
            continue
        if has_decoupled and is_decoupled(one.hyper):
            yield name
            continue
        if not is_split or (one.hyper.get(_DECAY) == 0) == has_no_decay(name, shape, norms_decay=norms_decay):
            yield name


def _moments(one: GroupValues) -> frozenset[str]:
    """States that an optimizer keeps which has these hyper-parameters."""
    if "betas" in one.hyper:
        return _ADAM
    return _MOMENTUM if any("momentum" in key for key in one.hyper) else frozenset()
