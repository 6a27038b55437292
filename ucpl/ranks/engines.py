"""Fill a DeepSpeed engine from any checkpoint.

Each rank reads its own part of the masters and of the optimizer's states. An engine is recognised by its attributes,
and deepspeed is not imported. ZeRO cuts flat buffers of groups: the part of a parameter that a rank has is an
interval of its elements, which DCP's planner gets as boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Protocol, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageReader

from ucpl.errors import Label, fail
from ucpl.extents import Counted, Scalar, TrainState
from ucpl.files.groups import agreed
from ucpl.formats.run_steps import STEPS, steps_of
from ucpl.live.agreement import JobRanks
from ucpl.live.tensors import Goal, unwritable
from ucpl.ranks.box_index import number_as_tensor
from ucpl.ranks.load_checks import Index, LoadRequest, check_fit
from ucpl.records import frozen

__all__ = ["TrainingEngine", "KnownStates", "as_kept", "fill", "is_engine"]

STATES = "optim.state."
LINKED = "_hp_optimizer_states_linked"
SCALE = "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"  # of a loss scale that is found by trying
COUNTERS = (STEPS, "global_samples", "skipped_steps")
Ints = tuple[int, ...]
Numbers = dict[str, tuple[Counted, torch.Tensor]]  # as a checkpoint keeps them, and as tensors


class TrainingEngine(Protocol):
    """The attributes of a DeepSpeedEngine that are used."""

    module: nn.Module
    optimizer: object
    lr_scheduler: object

    def zero_optimization_stage(self) -> int: ...


def is_engine(model: object) -> TypeGuard[TrainingEngine]:
    return isinstance(getattr(model, "module", None), nn.Module) and hasattr(model, "zero_optimization_stage")


_EXTRA = "_extra_state"  # as torch calls it


@frozen(eq=False)
class _Share:
    """The interval of a parameter that a rank has in a buffer.

    Elements [start, stop) are at `at` and after it.
    """

    param: nn.Parameter
    start: int
    stop: int
    at: int


@frozen(eq=False)
class _Flat:
    """A flat buffer of masters, one of its group's parameters in turn."""

    group: int  # of the inner optimizer
    masters: torch.Tensor
    shares: tuple[_Share, ...]
    params: tuple[nn.Parameter, ...]  # of all ranks'


@frozen(eq=False)
class KnownStates:
    """The content of a checkpoint, from StorageReader."""

    metadata: Mapping[str, object]
    values: Mapping[str, object]  # of numbers
    state: TrainState


class _Parts:
    """Consecutive elements of a tensor, as boxes for DCP's planner.

    The boxes, and the place of each.
    """

    def __init__(self, shape: Ints) -> None:
        self._shape = shape
        self._boxes: list[tuple[Ints, Ints, torch.Tensor]] = []

    def add(self, start: int, flat: torch.Tensor) -> None:
        """Add `flat`, whose first element is element `start`."""
        for low, sizes, at in boxes(start, start + flat.numel(), self._shape):
            self._boxes.append((low, sizes, flat[at : at + prod(sizes)].view(sizes)))

    def size(self) -> torch.Size:
        return torch.Size(self._shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(low), torch.Size(sizes)) for low, sizes, _ in self._boxes]

    def at(self, index: MetadataIndex) -> torch.Tensor:
        return next(goal for low, _, goal in self._boxes if torch.Size(low) == index.offset)


def boxes(start: int, stop: int, shape: Ints) -> Iterator[tuple[Ints, Ints, int]]:
    """Elements [start, stop) of a tensor in boxes, in order.

    Each box has its offset, its sizes, and the number of elements before it.
    """
    if stop <= start:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape), 0
        return
    inner, at = prod(shape[1:]), start
    while at < stop:
        row, within = divmod(at, inner)
        whole = (stop - at) // inner if within == 0 else 0
        end = at + whole * inner if whole else min(stop, (row + 1) * inner)
        if whole:
            yield (row, *(0,) * (len(shape) - 1)), (whole, *shape[1:]), at - start
        else:
            for low, sizes, before in boxes(within, within + end - at, shape[1:]):
                yield (row, *low), (1, *sizes), at - start + before
        at = end


class _Planner(DefaultLoadPlanner):
    """DCP's own planner over parts of tensors."""

    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        parts = self.state_dict[index.fqn]
        assert isinstance(parts, _Parts)
        return parts.at(index)


class _Filling:
    """The requests to a checkpoint for an engine, by its names."""

    def __init__(
        self, engine: TrainingEngine, known: KnownStates, names: Mapping[nn.Parameter, tuple[str, ...]]
    ) -> None:
        self.engine, self.known, self.names = engine, known, names
        self.wanted: dict[str, _Parts] = {}
        self.goals: list[Goal] = []
        self._having: dict[str, set[str]] = {}  # state: parameters that have it element by element
        for name, found_group in known.metadata.items():
            if name.startswith(STATES) and isinstance(found_group, TensorStorageMetadata) and name not in known.values:
                param, _, state = name.removeprefix(STATES).rpartition(".")
                self._having.setdefault(state, set()).add(param)

    def name(self, param: nn.Parameter, of: str = "model.{}") -> str:
        """A tied parameter has the name that the checkpoint knows it by."""
        names = [of.format(name) for name in self.names[param]]
        return next((name for name in names if name in self.known.metadata), names[0])

    def weights(self, module: nn.Module, rename: Callable[[str], str]) -> dict[str, object]:
        """Everything in the engine on all ranks, without bytes.

        It is listed under each name of the checkpoint.
        """
        found: dict[str, object] = {}
        shapes = [(self.names[param], shape_of(param)) for param in self.names]
        shapes += [(tuple(map(rename, names)), tuple(buffer.shape)) for names, buffer in _buffers(module)]
        for names, shape in shapes:
            known = [name for name in names if f"model.{name}" in self.known.metadata] or names[:1]
            found |= {f"model.{name}": torch.empty(shape, device="meta") for name in known}
        # Other values that modules keep are no tensors of theirs, and no engine is filled with them.
        beside = (name for name in self.known.metadata if name.startswith("model.") and name.endswith(_EXTRA))
        return {**dict.fromkeys(beside), **found}

    def ask(self, name: str, shape: Ints, start: int, flat: torch.Tensor) -> None:
        if name not in self.known.metadata:
            return  # there is nothing to fill, or nothing to fill it with: `check_fit` asked for all that must be
        self.wanted.setdefault(name, _Parts(shape)).add(start, flat)

    def ask_whole(self, name: str, tensor: torch.Tensor) -> None:
        """Request an entire tensor.

        A tensor that is not contiguous gets its elements in `put`.
        """
        if why := unwritable(tensor):
            reject(f"{name} of the engine is {why}")
        goal = Goal.of(tensor)
        self.goals.append(goal)
        self.ask(name, tuple(tensor.shape), 0, goal.flat)

    def put(self) -> None:
        for goal in self.goals:
            goal.put()

    def master(self, param: nn.Parameter) -> str:
        """The master of a parameter.

        The weight, if the checkpoint has no masters.
        """
        kept = self.name(param, f"{STATES}{{}}.fp32")
        return kept if kept in self.known.metadata else self.name(param)

    def states(self, params: Sequence[nn.Parameter]) -> tuple[str, ...]:
        """Moments of these parameters: those of one flat buffer.

        Raises: UcplError E645 if some have none.
        """
        found, full = [], [p for p in params if 0 not in shape_of(p)]
        for state, having in self._having.items():
            missing = [p for p in full if not having & {*self.names[p]}]
            if state == "fp32" or len(missing) == len(full):
                continue
            if missing:
                first = self.names[missing[0]][0]
                reject(f"a flat buffer has {state} of all its parameters, and the checkpoint has none of {first}")
            found.append(state)
        return tuple(found)

    def numbers(self, params: Sequence[nn.Parameter]) -> Numbers:
        """Numbers that an optimizer counts once for a flat buffer.

        Each in the stored form and as a tensor. Raises: UcplError E645.
        """
        train_state = self.known.state
        found: Numbers = {}
        for state, each in train_state.scalars.items():
            begun = train_state.initial_scalars.get(state, frozenset())
            of = {name for p in params for name in self.names[p] if name in each and name not in begun}
            counted = {name: number_as_tensor(each[name]) for name in sorted(of)}
            tensors = {name: value for name, value in counted.items() if value is not None}
            if not tensors:
                continue
            first, one = next(iter(tensors.items()))
            if other := next((name for name, value in tensors.items() if not torch.equal(value, one)), ""):
                text = f"{state} of {first} is {one.item()} and of {other} {tensors[other].item()}"
                reject(f"{text}: they are in one flat buffer, which has one number")
            found[state] = each[first], one
        return found


def reject(what: str) -> None:
    fail("E645", what, Label("the engine"))


def why_unsupported(engine: TrainingEngine) -> str:
    """The reason why an engine cannot be filled; empty if it can."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    config = getattr(getattr(engine, "_config", None), "zero_config", None)
    checks = {
        "has stages of a pipeline": bool(getattr(engine, "pipeline_parallelism", False)),
        "has experts (MoE)": bool(getattr(engine, "has_moe_layers", False)),
        "cuts its tensors (tensor parallelism)": int(getattr(engine, "mp_world_size", 1) or 1) > 1,
        "offloads its optimizer or its parameters": any(
            getattr(config, name, None) is not None for name in ("offload_optimizer", "offload_param")
        )
        or bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)),
        "keeps second copies of its parameters (zero_hpz_partition_size)": int(
            getattr(config, "zero_hpz_partition_size", 1) or 1
        )
        > 1,
        "shards within smaller groups (mics_shard_size)": int(getattr(config, "mics_shard_size", -1) or -1) > 0,
        "is ZenFlow's": getattr(config, "zenflow", None) is not None,
        "is of ZeRO stage 0: give engine.module and, of an engine in fp32, engine.optimizer": stage == 0,
        f"has an optimizer that is not known ({type(optimizer).__name__})": not any(
            hasattr(optimizer, name)
            for name in (
                "single_partition_of_fp32_groups",
                "fp32_groups_flat_partition",
                "fp32_partitioned_groups_flat",
            )
        ),
    }
    return next((what for what, holds in checks.items() if holds), "")


class _Zero(Protocol):
    """ZeRO 1 and 2."""

    single_partition_of_fp32_groups: list[torch.Tensor]
    round_robin_bit16_groups: list[list[nn.Parameter]]
    round_robin_bit16_offsets: list[list[int]]
    real_dp_process_group: list[dist.ProcessGroup]

    def update_lp_params(self) -> None: ...


class _Bf16(Protocol):
    """BF16_Optimizer, which is ZeRO 1 with gradients in f32."""

    fp32_groups_flat_partition: list[torch.Tensor]
    bf16_groups: list[list[nn.Parameter]]
    real_dp_process_group: list[dist.ProcessGroup]

    def update_lp_params(self) -> None: ...


class _Zero3(Protocol):
    fp16_groups: list[list[nn.Parameter]]
    fp32_partitioned_groups_flat: list[torch.Tensor]
    sub_group_to_group_id: Mapping[int, int]
    dp_process_group: dist.ProcessGroup

    def checkpoint_event_prologue(self) -> None: ...
    def checkpoint_event_epilogue(self) -> None: ...


class _Cut(Protocol):
    """A parameter of ZeRO-3."""

    ds_tensor: torch.Tensor
    ds_shape: torch.Size
    ds_numel: int


def flats_of(optimizer: _Bf16) -> list[_Flat]:
    """The buffers of this rank, of stages 1 and 2.

    An equal part of a group's parameters, which are end to end or at offsets.

    DeepSpeed's own `_hp_mapping` is of the order before parameters are dealt round robin, and is not request.
    """
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        zero = cast("_Zero", optimizer)
        masters, params = zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups
        offsets = zero.round_robin_bit16_offsets
    else:
        masters, params = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        offsets = [[0, *accumulate(p.numel() for p in each)][: len(each)] for each in params]
    found = []
    for group, flat in enumerate(masters):
        low = dist.get_rank(optimizer.real_dp_process_group[group]) * flat.numel()
        shares = []
        for param, offset in zip(params[group], offsets[group], strict=True):
            start, stop = max(offset, low), min(offset + param.numel(), low + flat.numel())
            if start < stop:
                shares.append(_Share(param, start - offset, stop - offset, start - low))
        found.append(_Flat(group, flat, tuple(shares), tuple(params[group])))
    return found


def flats_of_stage_3(optimizer: _Zero3) -> list[_Flat]:
    """The buffers of this rank: an equal part of each parameter.

    The parts are one after the other.
    """
    found = []
    for number, (params, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        at, shares = 0, []
        for param in params:
            start, stop, size = cut_of(param, optimizer.dp_process_group)
            shares.append(_Share(param, start, stop, at))
            at += size
        found.append(_Flat(optimizer.sub_group_to_group_id[number], flat, tuple(shares), tuple(params)))
    return found


def cut_of(param: nn.Parameter, group: dist.ProcessGroup) -> tuple[int, int, int]:
    """The elements of a ZeRO-3 parameter on this rank, with padding."""
    cut = cast("_Cut", param)
    size = cut.ds_tensor.numel()
    start = min(dist.get_rank(getattr(param, "ds_process_group", group)) * size, cut.ds_numel)
    return start, min(start + size, cut.ds_numel), size


def shape_of(param: nn.Parameter) -> Ints:
    return tuple(getattr(param, "ds_shape", param.shape))


@torch.no_grad()
def fill(
    engine: TrainingEngine, reader: StorageReader, known: KnownStates, rename: Callable[[str], str], ranks: JobRanks,
    *, states: bool, strict: bool = True, src: str = "",
) -> None:  # fmt: skip
    """Fill masters, weights and buffers of an engine.

    With `states` also its optimizer, schedule, loss scale and counters.

    Raises: UcplError E645 for engines that are not filled, and for states that no flat buffer can hold; E646 for tensors that
    are not those of the checkpoint.
    """
    with ranks.agreeing():
        if why := why_unsupported(engine):
            reject(f"the engine {why}")
        if states and not known.state.groups and not known.state.scalars:
            reject("the checkpoint has no optimizer: give None for the engine's, and weights alone are filled")
        module, optimizer, is_cut = engine.module, engine.optimizer, engine.zero_optimization_stage() == 3
        names: dict[nn.Parameter, tuple[str, ...]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names[param] = (*names.get(param, ()), rename(name))
        filling = _Filling(engine, known, names)
        request = LoadRequest(filling.weights(module, rename), src=src, has_shapes_alone=True)
    check_fit(request, cast("Index", known.metadata), strict, ranks)
    if is_cut:
        cast("_Zero3", optimizer).checkpoint_event_prologue()  # parameters that are together are cut
    with ranks.agreeing():
        flats = flats_of_stage_3(cast("_Zero3", optimizer)) if is_cut else flats_of(cast("_Bf16", optimizer))
        numbers = [filling.numbers(flat.params) if states else {} for flat in flats]
        made = [_ask(filling, flat, states=states) for flat in flats]
        _ask_others(filling, {p for flat in flats for p in flat.params}, is_cut=is_cut)
        for of, buffer in _buffers(module):
            called = [f"model.{rename(name)}" for name in of]
            filling.ask_whole(next((name for name in called if name in known.metadata), called[0]), buffer)
    wanted = cast("dict[str, object]", filling.wanted)
    with ranks.agreeing(in_words=True):
        planner = _Planner()
        planner.set_up_planner(wanted, reader.read_metadata())
        reader.read_data(planner.create_local_plan(), planner)
    with ranks.agreeing():
        filling.put()
        for flat in flats if is_cut else ():
            for share in flat.shares:
                size = share.stop - share.start
                cast("_Cut", share.param).ds_tensor[:size].copy_(flat.masters[share.at : share.at + size])
    if is_cut:
        cast("_Zero3", optimizer).checkpoint_event_epilogue()
    else:
        cast("_Zero", optimizer).update_lp_params()  # each rank rounds its own masters, and has those of all others
    with ranks.agreeing():
        if states:
            _settle(filling, zip(flats, made, numbers, strict=True))
            _go_on(engine, known.state)


def _ask(filling: _Filling, flat: _Flat, *, states: bool) -> dict[str, torch.Tensor]:
    """Request a buffer's masters and its states.

    States that the optimizer has not made yet are new tensors.
    """
    inner = inner_of(filling.engine.optimizer)
    there = inner.state.get(flat.masters, {}) if states else {}
    made: dict[str, torch.Tensor] = {}
    for state in filling.states(flat.params) if states else ():
        known = there.get(state)
        is_like = isinstance(known, torch.Tensor) and known.shape == flat.masters.shape
        made[state] = cast("torch.Tensor", known) if is_like else torch.zeros_like(flat.masters)
    for share in flat.shares:
        size, shape = share.stop - share.start, shape_of(share.param)
        here = slice(share.at, share.at + size)
        filling.ask(filling.master(share.param), shape, share.start, flat.masters[here])
        for state, whole in made.items():
            name = filling.name(share.param, f"{STATES}{{}}.{state}")
            filling.ask(name, shape, share.start, whole[here])
    return made


def _ask_others(filling: _Filling, trained: set[nn.Parameter], *, is_cut: bool) -> None:
    """Request parameters that no optimizer has: entire, or this rank's part."""
    for param in filling.engine.module.parameters():
        if param in trained:
            continue
        if is_cut:
            start, stop, _ = cut_of(param, cast("_Zero3", filling.engine.optimizer).dp_process_group)
            flat = cast("_Cut", param).ds_tensor[: stop - start]
            filling.ask(filling.name(param), shape_of(param), start, flat)
        else:
            filling.ask_whole(filling.name(param), param.data)


def _buffers(module: nn.Module) -> Iterable[tuple[list[str], torch.Tensor]]:
    """Buffers that a checkpoint has, each with all of its names.

    A module that is used twice is saved twice.
    """
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each.named_buffers(prefix, recurse=False, remove_duplicate=False):
            if name.rpartition(".")[2] not in each._non_persistent_buffers_set:
                found.setdefault(id(buffer), ([], buffer))[0].append(name)
    return found.values()


def inner_of(optimizer: object) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return inner


def as_kept(value: object, here: object) -> object:
    """A hyper-parameter in the job's form: a tensor or a number.

    A tensor is on the job's device.
    """
    if isinstance(here, list | tuple) and isinstance(value, list | tuple) and len(here) == len(value):
        return type(here)(map(as_kept, value, here))
    if isinstance(here, torch.Tensor):
        if isinstance(value, int | float):
            return torch.full_like(here, value)
        if isinstance(value, torch.Tensor) and value.numel() == here.numel():
            return value.to(here.device, here.dtype).reshape(here.shape).clone()
        return value
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _settle(filling: _Filling, made: Iterable[tuple[_Flat, dict[str, torch.Tensor], Numbers]]) -> None:
    """Put states and numbers into the optimizer, and take over its groups."""
    inner = inner_of(filling.engine.optimizer)
    held = {member for group in filling.known.state.groups for member in group.members}
    members: dict[int, list[str]] = {}
    for flat, tensors, numbers in made:
        if tensors or numbers:
            state = inner.state[flat.masters]
            state.update(tensors)
            for name, (kept, value) in numbers.items():
                state[name] = _counted(inner, state.get(name, kept), value)
        named = (next((name for name in filling.names[p] if name in held), None) for p in flat.params)
        members.setdefault(flat.group, []).extend(name for name in named if name is not None)
    wanted = [(str(number), tuple(names)) for number, names in members.items()]
    for number, found_group in zip(members, agreed(filling.known.state.groups, wanted), strict=True):
        group = inner.param_groups[number]
        found_group = found_group or {}
        group.update({k: as_kept(value, group[k]) for k, value in found_group.items() if k in group and k != "params"})
    optimizer = filling.engine.optimizer
    if hasattr(
        optimizer, LINKED
    ):  # otherwise DeepSpeed's own functions look for states at the old place, or find none before a step
        setattr(optimizer, LINKED, False)
        optimizer._lazy_init_hp_params_optimizer_state()  # type: ignore[attr-defined]


def _counted(inner: torch.optim.Optimizer, like: object, value: torch.Tensor) -> object:
    """A number in the form of this optimizer.

    torch has tensors, DeepSpeed has numbers, others keep their present form.
    """
    modules = {c.__module__.partition(".")[0] for c in type(inner).__mro__ if c is not torch.optim.Optimizer}
    if "deepspeed" not in modules and ("torch" in modules or isinstance(like, torch.Tensor | Scalar)):
        return value.clone()
    number = value.item()
    return int(number) if number == int(number) and not isinstance(like, float) else number


def _go_on(engine: TrainingEngine, train_state: TrainState) -> None:
    """Set the schedule, the loss scale and the counters, if present."""
    blobs: dict[str, object] = {STEPS: steps_of(train_state), **train_state.blobs}
    for name in COUNTERS:
        if isinstance(blobs.get(name), int):
            setattr(engine, name, blobs[name])
    schedule, kept = engine.lr_scheduler, blobs.get("lr_scheduler")
    if schedule is not None and isinstance(kept, dict):
        schedule.load_state_dict(_plain(kept))  # type: ignore[attr-defined]
    scaler, record = getattr(engine.optimizer, "loss_scaler", None), blobs.get("loss_scaler")
    state = getattr(record, "state", None)
    if isinstance(state, dict) and state.get("dynamic") == getattr(scaler, "dynamic", None) is True:
        for name in SCALE:
            if isinstance(state.get(name), int | float):
                setattr(scaler, name, state[name])


def _plain(value: object) -> object:
    """Numbers, texts and lists of them.

    Raises: UcplError E645 for instances of classes, which are not created here.
    """
    match value:
        case dict():
            return {_plain(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_plain(each) for each in value)
        case None | bool() | int() | float() | str():
            return value
    reject(f"the schedule of learning rates has a value of {type(value).__name__}")
    return None
