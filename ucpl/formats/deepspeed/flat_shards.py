"""Optimizer shards of stages 1 and 2.

One flat buffer per parameter group. The buffer is cut over the ranks that share it. Source: deepspeed 0.19.8:
stage_1_and_2.py, bf16_optimizer.py (`state_dict` of each).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, FlatBuffer, ParameterGroup, TensorRef, key_text
from ucpl.extents.parallel_facts import pack, slice_numel
from ucpl.files.carrying import lifted
from ucpl.files.skipping import skips
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import RankModule, differ
from ucpl.formats.deepspeed.order import PlacedRun, alignment_elements, run, undeal
from ucpl.formats.deepspeed.topology import not_yet
from ucpl.records import frozen

_STATE = "optimizer_state_dict"
_BASE = "base_optimizer_state"
_MASTERS = "single_partition_of_fp32_groups"


@frozen(eq=False)
class Sharers:
    """Ranks that share flat buffers.

    Those of a tp, pp and ep coordinate.
    """

    optims: tuple[TorchFile, ...]  # theirs, in order
    coordinates: dict[str, int] = field(factory=dict)  # of the axes that there are
    only: frozenset[int] | None = None  # the groups that they share; None: all
    cut: str = "dp"  # the axis along which they stand
    parts: dict[str, tuple[str, ...]] = field(factory=dict)  # the tensors of a member, if it is several

    def has(self, g: int) -> bool:
        return self.only is None or g in self.only

    def tensors(self, members: Iterable[str]) -> tuple[str, ...]:
        """The tensors that members of a flat buffer are."""
        return tuple(name for member in members for name in self.parts.get(member, (member,)))

    @property
    def degree(self) -> int:
        return len(self.optims)


def read_flat_shards(gathered: Gathered, module: RankModule, sharers: Sharers) -> None:
    """Read masters and states of the groups, and their members in order."""
    read = _Read.of(gathered, module, sharers)
    for rank, part in enumerate(sharers.optims):
        read.shard(part, rank)
    read.state_groups()


@frozen(eq=False)
class _Read:
    gathered: Gathered
    module: RankModule
    sharers: Sharers
    runs: tuple[PlacedRun, ...]  # of each group
    is_plain_bf16: bool  # BF16_Optimizer: it states no stage, and pads masters, too
    is_elastic: bool

    @classmethod
    def of(cls, gathered: Gathered, module: RankModule, sharers: Sharers) -> _Read:
        first = sharers.optims[0]
        state = Value.of(first).at(_STATE)
        is_plain_bf16 = "zero_stage" not in state.mapping()
        gathered.set("bf16_optimizer", int(is_plain_bf16), f"zero_stage of {first.file}")
        alignment = _alignment(gathered, module, first)
        gathered.set("alignment", alignment, gathered.settings["parameter_alignment"].origin)
        runs = tuple(run([*group.values()], alignment) for group in module.groups)
        is_elastic = _is_elastic(state.at(_BASE))
        gathered.set("elastic", int(is_elastic), f"base_optimizer_state of {first.file}")
        return cls(gathered, module, sharers, runs, is_plain_bf16, is_elastic)

    def is_ours(self, g: int) -> bool:
        return self.sharers.has(g)

    # ---- one rank's ------------------------------------------------------------------------------------------------

    def shard(self, part: TorchFile, rank: int) -> None:
        state = Value.of(part).at(_STATE)
        base = state.at(_BASE)
        if _is_elastic(base) != self.is_elastic:
            differ(self.sharers.optims[0], part, f"{_STATE}/{_BASE}", "form")
        check_partition_count(part, self.sharers.degree, self.sharers.only)
        masters = state.at(_MASTERS).items()
        if len(masters) != len(self.runs):
            fail(
                "E456",
                f"{part.file} holds {len(masters)} flat buffers, param_shapes states {len(self.runs)} groups",
                Label(str(part.path), where=f"{_STATE}/{_MASTERS}"),
                Label(str(self.module.file.path), where="param_shapes"),
            )
        for g, flat in enumerate(self.runs):
            if not self.is_ours(g):
                continue
            whole, lean = flat.part(self.sharers.degree), flat.lean(self.sharers.degree, rank)
            master = masters[g].tensor()
            if not self.is_plain_bf16 and master.shape == (flat.trimmed_last(self.sharers.degree, rank),):
                masters[g] = evolve(masters[g], held=evolve(master, shape=(lean,)))  # padding follows
            check_flat(masters[g], whole if self.is_plain_bf16 else lean, self.module)
            self.gathered.keep(part, masters[g].key, masters[g].tensor())
            members = tuple(self.module.groups[g])
            self.gathered.has(members, "fp32")
            states = base.find(g) if self.is_elastic else _states_of(base, g)
            if states is not None:
                self.check_cut_momentum(part, states, g, rank)
                # A rank that holds padding alone has states without elements; elastic lists may hold a pad there.
                numel = lean if self.is_elastic else whole
                shapes = ((numel,), (whole,)) if numel == 0 else ((numel,),)
                self.gathered.state(part, states, shapes, members)

    def check_cut_momentum(self, part: TorchFile, states: Value, g: int, rank: int) -> None:
        """Check that no tensor with a Muon momentum is cut.

        The momentum is of complete tensors that the rank's part touches. If none is cut, it equals the part.
        """
        momentum = states.find("momentum_buffer")
        held = momentum.held if momentum is not None else None
        if not isinstance(held, TensorRef) or self.is_elastic or skips("momentum_buffer"):
            return
        flat, group = self.runs[g], self.module.groups[g]
        low, high = rank * flat.part(self.sharers.degree), (rank + 1) * flat.part(self.sharers.degree)
        ends = [
            (start, start + prod(shape), name) for start, (name, shape) in zip(flat.starts, group.items(), strict=True)
        ]
        touched = [(first, last, name) for first, last, name in ends if first < high and last > low]
        cut = next((name for first, last, name in touched if first < low or last > high), None)
        if cut is not None and held.shape == (sum(last - first for first, last, _ in touched),) != (high - low,):
            not_yet(
                part.path,
                f"its part cuts {cut}, which Muon trains: DeepSpeed keeps the full momentum of such a tensor on each rank that"
                " has a part of it, and layouts cannot describe this yet. At ZeRO-3, at one rank, or if no part ends within a"
                " tensor, it can be read",
            )

    # ---- all ranks' ------------------------------------------------------------------------------------------------

    def state_groups(self) -> None:
        gathered, sharers = self.gathered, self.sharers
        hypers = self._schedule_alone() if self.is_elastic else self._hypers()
        is_dealt = gathered.settings["round_robin"].value and not self.is_plain_bf16
        for g, (group, flat, hyper) in enumerate(zip(self.module.groups, self.runs, hypers, strict=True)):
            if not self.is_ours(g):
                continue
            members = undeal(tuple(group), sharers.degree if is_dealt else 1)
            gathered.groups.append(ParameterGroup(str(g), members, hyper))
            gathered.stated.append(
                FlatBuffer(g, str(g), sharers.coordinates, tuple(group.items()), flat.starts, flat.numel, sharers.cut)
            )

    def _hypers(self) -> list[dict[str, object]]:
        first = self.sharers.optims[0]
        groups = Value.of(first).at(_STATE, _BASE, "param_groups").items()
        if len(groups) != len(self.runs):
            fail(
                "E456",
                f"the optimizer has {len(groups)} parameter groups, param_shapes states {len(self.runs)}",
                Label(str(first.path), where=f"{_STATE}/{_BASE}/param_groups"),
                Label(str(self.module.file.path), where="param_shapes"),
            )
        return [hyper_of(group) for group in groups]

    def _schedule_alone(self) -> list[dict[str, object]]:
        """Hyper-parameters of an elastic checkpoint: the schedule's learning rates, and the step."""
        gathered = self.gathered
        hypers = _rates(self.module, len(self.runs))
        gathered.remarks.append(
            "elastic_checkpoint keeps no hyper-parameters: weight decay, betas and the like are not in this checkpoint"
            + (
                "; learning rates are those of the schedule"
                if hypers[:1] != [{}]
                else ", and learning rates are missing, too"
            )
        )
        step = Value.of(self.sharers.optims[0]).at(_STATE).find(f"{_BASE}_step")
        if step is None or "step" in gathered.scalars:
            return hypers
        return [{**hyper, "step": lifted(step.held, step.file)} for hyper in hypers]


def _is_elastic(base: Value) -> bool:
    if not isinstance(base.held, list | dict):
        base.wrong("a dict or a list")
    return isinstance(base.held, list)


def _states_of(base: Value, g: int) -> Value | None:
    """The states of a group's flat buffer; None before the first step."""
    groups = base.at("param_groups").items()
    params = groups[g].at("params").items() if g < len(groups) else []
    if len(params) != 1:
        (groups[g] if g < len(groups) else base.at("param_groups")).wrong("a group of one flat buffer")
    return base.at("state").find(params[0].whole())


def _rates(module: RankModule, count: int) -> list[dict[str, object]]:
    """Learning rates of an elastic checkpoint's groups, from the schedule."""
    schedule = Value.of(module.file).find("lr_scheduler")
    held = schedule.held if schedule is not None and isinstance(schedule.held, dict) else {}
    out: list[dict[str, object]] = [{} for _ in range(count)]
    for key, name in (("_last_lr", "lr"), ("base_lrs", "initial_lr")):
        rates = held.get(key)
        if isinstance(rates, list) and len(rates) == count and all(isinstance(rate, (int, float)) for rate in rates):
            for hyper, rate in zip(out, rates, strict=True):
                hyper[name] = rate
    return out


# ---- checks that stage 3 uses, too
# -------------------------------------------------------------------------------------


def hyper_of(group: Value) -> dict[str, object]:
    """A group's hyper-parameters: all but the numbers of its parameters."""
    return {name: lifted(value.held, value.file) for name, value in group.named() if name != "params"}


def check_flat(masters: Value, numel: int, module: RankModule) -> None:
    """Check that a rank's flat buffer has the elements of its parameters."""
    tensor = masters.tensor()
    if tensor.shape != (numel,):
        fail(
            "E458",
            f"{masters.file}: the flat buffer has {prod(tensor.shape)} elements, its parameters make {numel} here",
            Label(str(masters.path), f"shape {list(tensor.shape)}", where=key_text(masters.key)),
            Label(str(module.file.path), where="param_shapes"),
        )


def check_partition_count(part: TorchFile, degree: int, only: frozenset[int] | None = None) -> None:
    """Check the number of ranks in a shard, for each group."""
    stated = Value.of(part).at(_STATE).find("partition_count")
    if stated is None:
        return
    for g, value in enumerate(stated.items() if isinstance(stated.held, list | tuple) else [stated]):
        count = value.whole()
        if count != degree and (only is None or g in only):
            fail(
                "E454",
                f"{part.file} was written by {count} data-parallel ranks, the folder has files of {degree}",
                Label(str(part.path), f"partition_count {count}", where=f"{_STATE}/partition_count"),
            )


def _alignment(gathered: Gathered, module: RankModule, part: TorchFile) -> int:
    """The multiple at which each parameter starts.

    It comes from parameter_alignment, and is checked against the paddings in the file.
    """
    stated = Value.of(part).at(_STATE).find("param_alignment_paddings")
    if stated is None:
        return 1
    alignment = 1
    if gathered.settings["parameter_alignment"].value:
        dtypes = {module.tensors[next(iter(group))].storage.dtype for group in module.groups if group}
        sizes = {DTYPES[dtype].itemsize for dtype in dtypes}
        if len({alignment_elements(size) for size in sizes}) > 1:
            not_yet(part.path, "its groups are of several dtypes and aligned")
        alignment = alignment_elements(max(sizes, default=4))
    if module.stated_groups and alignment > 1:
        _reject_gaps(part, module, alignment)
    expected = []
    for group in module.stated_groups or module.groups:
        flat = run([*group.values()], alignment)
        ends = [start + prod(shape) for start, shape in zip(flat.starts, group.values(), strict=True)]
        afters = (*flat.starts[1:], flat.numel) if ends else ()
        expected.append([after - end for after, end in zip(afters, ends, strict=True)])
    found = [[gap.whole() for gap in gaps.items()] for gaps in stated.items()]
    for g, (gaps, wanted) in enumerate(zip(found, expected, strict=False)):
        if len(gaps) != len(wanted):
            fail(
                "E456",
                f"group {g} has paddings of {len(gaps)} parameters, and param_shapes names {len(wanted)} of it",
                Label(str(part.path), where=f"{_STATE}/param_alignment_paddings/{g}"),
                Label(str(module.file.path), where="param_shapes"),
            )
    if found != expected:
        fail(
            "E456",
            "param_alignment_paddings are not those that ds_config's parameter_alignment makes",
            Label(str(part.path), where=f"{_STATE}/param_alignment_paddings"),
            Label(str(module.file.path), f"alignment {alignment}", where="ds_config/zero_optimization"),
        )
    return alignment


def _reject_gaps(part: TorchFile, module: RankModule, alignment: int) -> None:
    """Reject gaps between members that are parts of one tensor.

    Each of them must begin at a multiple of the alignment.
    """
    stated = {name for group in module.stated_groups for name in group}
    for group in module.groups:
        for name, shape in group.items():
            if name not in stated and prod(shape) % alignment:
                not_yet(part.path, f"{name} is a part of a tensor that is aligned, and has {prod(shape)} elements")


# ---- slices of every parameter, of stage 3 ---------------------------------------------------------------------------


_SLICED_MASTERS = "fp32_flat_groups"


def read_sliced_shards(gathered: Gathered, module: RankModule, sharers: Sharers) -> None:
    """Read masters and states of the sub-groups, and the group of each.

    module: its groups are the sub-groups, of all ranks.
    """
    numels = [sum(slice_numel(shape, sharers.degree) for shape in group.values()) for group in module.groups]
    for part in sharers.optims:
        _shard(gathered, module, part, sharers, numels)
    groups = Value.of(sharers.optims[0]).at(_STATE, _STATE, "param_groups").items()
    owner = _owners(module, sharers.optims[0], groups)
    for g, group in enumerate(groups):
        mine = [s for s in range(len(module.groups)) if owner[s] == g and sharers.has(s)]
        if not mine and sharers.only is not None and (sharers.parts or group.at("params").items()):
            continue  # the other sharers' group; one without parameters is of those of no expert
        shapes = {name: shape for s in mine for name, shape in module.groups[s].items()}
        gathered.groups.append(ParameterGroup(str(g), sharers.tensors(shapes), hyper_of(group)))
        packed = pack([*shapes.values()], sharers.degree, gathered.number("sub_group_size"))
        if packed != [len(module.groups[s]) for s in mine]:
            size = gathered.number("sub_group_size")
            fail(
                "E456",
                f"sub-groups of {[len(module.groups[s]) for s in mine]} parameters contradict sub_group_size {size}",
                Label(str(module.file.path), "a list for each sub-group", where="param_shapes"),
                Label(
                    str(module.file.path), f"{packed} parameters", where="ds_config/zero_optimization/sub_group_size"
                ),
            )
    for s, held in enumerate(module.groups):
        if not sharers.has(s):
            continue
        # Each parameter is padded and cut separately: `starts` count complete parameters with their padding.
        starts, begin, end = [], 0, 0
        for shape in held.values():
            starts.append(begin)
            end = begin + prod(shape)
            begin += slice_numel(shape, sharers.degree) * sharers.degree
        gathered.stated.append(
            FlatBuffer(s, str(owner[s]), sharers.coordinates, tuple(held.items()), tuple(starts), end, sharers.cut)
        )


def _shard(gathered: Gathered, module: RankModule, part: TorchFile, sharers: Sharers, numels: list[int]) -> None:
    """Read one rank's. numels: elements of each sub-group on a rank."""
    state = Value.of(part).at(_STATE)
    if sharers.only is None:
        if "ds_zero_partition_groups" in state.mapping():
            not_yet(part.path, "its experts are partitioned by groups of their own (AutoEP)")
        check_partition_count(part, sharers.degree)
    masters = state.at(_SLICED_MASTERS).items()
    states = state.at(_STATE, "state")
    if len(masters) != len(module.groups):
        fail(
            "E456",
            f"{part.file} holds {len(masters)} sub-groups, param_shapes states {len(module.groups)}",
            Label(str(part.path), where=f"{_STATE}/{_SLICED_MASTERS}"),
            Label(str(module.file.path), where="param_shapes"),
        )
    for s, group in enumerate(module.groups):
        if not sharers.has(s):
            continue
        check_flat(masters[s], numels[s], module)
        gathered.keep(part, masters[s].key, masters[s].tensor())
        members = sharers.tensors(group)
        gathered.has(members, "fp32")
        if (held := states.find(s)) is not None:
            gathered.state(part, held, ((numels[s],),), members)


def _owners(module: RankModule, part: TorchFile, groups: list[Value]) -> dict[int, int]:
    """The optimizer's group of each sub-group."""
    owner = {s.whole(): g for g, group in enumerate(groups) for s in group.at("params").items()}
    if sorted(owner) != list(range(len(module.groups))):
        fail(
            "E456",
            f"the optimizer's groups name the sub-groups {sorted(owner)}, param_shapes states {len(module.groups)}",
            Label(str(part.path), where=f"{_STATE}/{_STATE}/param_groups"),
            Label(str(module.file.path), where="param_shapes"),
        )
    return owner
