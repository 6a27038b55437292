"""ZeRO-0: the optimizer's own state_dict, which names no parameters.

16-bit training has masters with it, one per parameter or flat.
Source: deepspeed 0.19.8: fp16/unfused_optimizer.py, fp16/fused_optimizer.py (`state_dict` of each), engine.py
(`_do_optimizer_sanity_check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import FlatBuffer, ParameterGroup, TensorRef
from ucpl.files.scalars import counted_states, is_counted, number_of
from ucpl.files.skipping import skips_optimizer
from ucpl.files.values import Value
from ucpl.formats.deepspeed.flat_shards import hyper_of
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import RankModule
from ucpl.formats.deepspeed.names import state_named
from ucpl.formats.deepspeed.numbered import Named, Numbered, NumberedGroup, names_of
from ucpl.formats.deepspeed.order import run
from ucpl.formats.deepspeed.topology import ModelRank, not_yet

_EACH, _FLAT = "fp32_groups", "fp32_groups_flat"  # masters of FP16_UnfusedOptimizer, and of FP16_Optimizer


def read_whole_states(gathered: Gathered, module: RankModule, rank: ModelRank) -> None:
    """Read states of each parameter, by names for the numbers."""
    origin = f"optimizer of {module.file.file}"
    gathered.set("masters", 0, origin)
    gathered.set("fused", 0, origin)
    optimizer = Value.of(module.file).find("optimizer")
    if optimizer is not None and skips_optimizer("optimizer"):
        gathered.consumed.update((e.file, e.key) for e in module.file.extents() if e.key[:1] == ("optimizer",))
        gathered.groups += _of_param_shapes(module)
        return
    found = numbered(module, rank)
    if found is None:
        gathered.remarks.append("there is no optimizer state: weights alone")
        gathered.groups += _of_param_shapes(module)
        return
    names, how = names_of(found)
    gathered.set("parameter_order", rank.origin or how, f"optimizer of {module.file.file} names no parameter")
    if found.is_flat:
        gathered.set("fused", 1, f"optimizer/{_FLAT} of {module.file.file}")
    if found.is_flat or any(group.masters is not None for group in found.groups):
        gathered.set("masters", 1, f"optimizer/{_FLAT if found.is_flat else _EACH} of {module.file.file}")
    idle = _idle(found, names)
    if idle:
        gathered.remark(
            f"frozen, or without a gradient so far: the optimizer has no state of {', '.join(sorted(idle)[:3])}"
        )
    for g, (group, listed) in enumerate(zip(found.groups, names, strict=True)):
        members = tuple(name for name in listed if name not in idle and name not in module.empty)
        more = tuple(listed) if len(members) < len(listed) else ()
        gathered.groups.append(ParameterGroup(str(g), members, hyper_of(group.value), more))
    if found.is_flat:
        _read_flats(gathered, found, names, rank.coordinates)
    else:
        _read_each(gathered, found, names)


def _of_param_shapes(module: RankModule) -> list[ParameterGroup]:
    """The members of groups; their hyper-parameters are in the optimizer."""
    members = [tuple(name for name in group if name not in module.empty) for group in module.groups]
    return [ParameterGroup(str(g), names, {}) for g, names in enumerate(members)]


def _idle(found: Numbered, names: Named) -> list[str]:
    """Parameters with a number and no state, if others have states.

    torch numbers frozen parameters, too.
    """
    if found.is_flat or any(group.masters is not None for group in found.groups):
        return []
    known = {number for number, states in found.states.mapping().items() if states}
    numbers = [number for group in found.groups for number in group.numbers]
    every = [name for members in names for name in members]
    return [name for number, name in zip(numbers, every, strict=True) if known and number not in known]


def numbered(module: RankModule, rank: ModelRank) -> Numbered | None:
    """The groups of a rank's optimizer, without names, or None."""
    optimizer = Value.of(module.file).find("optimizer")
    if optimizer is None:
        return None
    held = optimizer.mapping()
    if "base_optimizer_state" in held:
        not_yet(module.file.path, "its optimizer is BF16_Optimizer, whose shards (bf16_zero_pp_rank_*) are not there")
    has_masters = _EACH in held or _FLAT in held
    base = optimizer.at("optimizer_state_dict") if has_masters else optimizer
    groups = _groups(base, optimizer)
    if not has_masters:  # which parameters without elements have none of
        module = _with_empty(module)
    return Numbered(module, base.at("state"), groups, rank.order, rank.coordinates.get("pp", 0))


def _with_empty(module: RankModule) -> RankModule:
    """A module whose shapes include parameters without elements, which have numbers."""
    more = {name: shape for name, (_, shape) in module.empty.items() if name not in module.buffers}
    shapes = {**module.shapes, **more}
    return evolve(module, shapes={name: shapes[name] for name in module.tensors if name in shapes}) if more else module


def _groups(base: Value, optimizer: Value) -> list[NumberedGroup]:
    key = _FLAT if _FLAT in optimizer.mapping() else _EACH
    masters = optimizer.find(key)
    rows = masters.items() if masters is not None else []
    listed = base.at("param_groups").items()
    if masters is not None and len(rows) != len(listed):
        masters.wrong(f"masters of {len(listed)} groups")
    out = []
    for g, group in enumerate(listed):
        numbers = [number.whole() for number in group.at("params").items()]
        if masters is None:
            out.append(NumberedGroup(group, numbers))
        elif key == _FLAT:
            if len(numbers) != 1 or len(rows[g].tensor().shape) != 1:
                group.wrong("a group of one flat buffer")
            out.append(NumberedGroup(group, numbers, flat=rows[g]))
        else:
            mine = rows[g].items()
            if len(mine) != len(numbers):
                rows[g].wrong("a master for each parameter")
            out.append(NumberedGroup(group, numbers, mine))
    return out


def _read_each(gathered: Gathered, found: Numbered, names: Named) -> None:
    module, states = found.module, found.states
    held_by = [
        (i, name)
        for group, ns in zip(found.groups, names, strict=True)
        for i, name in zip(group.numbers, ns, strict=True)
    ]
    rows = ((module.shapes[name], states.find(i)) for i, name in held_by)
    gathered.counted |= counted_states((shape, dict(_helds(held))) for shape, held in rows if held is not None)
    for group, members in zip(found.groups, names, strict=True):
        for i, (number, name) in enumerate(zip(group.numbers, members, strict=True)):
            held = states.find(number)
            if name in module.empty:
                _keep_empty(gathered, module, name, held)
                continue
            if group.masters is not None:
                gathered.keep(module.file, group.masters[i].key, group.masters[i].tensor())
                gathered.has((name,), "fp32")
            if held is not None:
                gathered.state(module.file, held, (module.shapes[name],), (name,))
            gathered.numbers[module.file.file, name] = number
    _renumber_states(gathered, found, names)


def _keep_empty(gathered: Gathered, module: RankModule, name: str, held: Value | None) -> None:
    """Note the states of a parameter without elements."""
    states: dict[str, str] = {}
    numbers: dict[str, object] = {}
    file = module.file
    for said, one in held.named() if held is not None else ():
        if isinstance(one.held, TensorRef) and 0 in one.held.shape:
            states[state_named(said)] = one.held.storage.dtype
        elif isinstance(one.held, TensorRef) and prod(one.held.shape) == 1:
            numbers[state_named(said)] = number_of(file.read_scalar(one.key, one.held))
        elif is_counted(one.held):
            numbers[state_named(said)] = one.held
        else:
            one.wrong("a number, or a tensor without elements, as the state of one")
        if isinstance(one.held, TensorRef):
            gathered.consumed.add((file.file, one.key))
    if held is not None:
        gathered.of_empty[name] = {"states": states, "numbers": numbers}


def _renumber_states(gathered: Gathered, found: Numbered, names: Named) -> None:
    """Give states the numbers of layouts, which count parameters with states alone."""
    file, lead = found.module.file.file, found.states.key
    idle = {*_idle(found, names), *(name for members in names for name in members if name in found.module.empty)}
    if not idle:
        return
    held = [name for members in names for name in members if name not in idle]
    counts = {gathered.numbers[file, name]: i for i, name in enumerate(held)}
    moved = {}
    for place in [p for p in gathered.payload if p[0] == file and p[1][: len(lead)] == lead]:
        key = place[1]
        moved[file, (*lead, counts[int(key[len(lead)])], *key[len(lead) + 1 :])] = gathered.payload.pop(place)
        gathered.consumed.add(place)
    gathered.payload |= moved
    gathered.numbers |= {(file, name): i for i, name in enumerate(held)}


def _read_flats(gathered: Gathered, found: Numbered, names: Named, coordinates: dict[str, int]) -> None:
    module = found.module
    for g, (group, members) in enumerate(zip(found.groups, names, strict=True)):
        assert group.flat is not None
        shapes = [module.shapes[name] for name in members]
        flat = run(shapes)
        if flat.numel != group.room:
            fail(
                "E458",
                f"the flat buffer of group {g} has {group.room} elements, its parameters make {flat.numel}",
                Label(str(module.file.path), where=f"optimizer/{_FLAT}/{g}"),
            )
        gathered.keep(module.file, group.flat.key, group.flat.tensor())
        gathered.has(tuple(members), "fp32")
        gathered.stated.append(
            FlatBuffer(g, str(g), coordinates, tuple(zip(members, shapes, strict=True)), flat.starts, flat.numel)
        )
        if (held := found.states.find(group.numbers[0])) is not None:
            gathered.state(module.file, held, ((flat.numel,),), tuple(members))


def _helds(states: Value) -> Iterator[tuple[str, object]]:
    return ((state_named(name), value.held) for name, value in states.named())
