"""ZeRO-0: the optimizer's own state_dict, and masters beside it in 16-bit training. It numbers parameters and names none.

Read in deepspeed 0.19.8: fp16/unfused_optimizer.py, fp16/fused_optimizer.py, bf16_optimizer.py (`state_dict` of each).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from attrs import field, frozen

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Extent, ParameterGroup, TensorRef
from ucpl.stores.deepspeed.flat_shards import hyper_of
from ucpl.stores.deepspeed.gathered import Gathered
from ucpl.stores.deepspeed.module import Module
from ucpl.stores.deepspeed.order import Shape, match
from ucpl.stores.deepspeed.states import named
from ucpl.stores.deepspeed.topology import not_yet
from ucpl.stores.scalars import counted_states
from ucpl.stores.values import Value

_COMPARED_BYTES_MAX = 1 << 20  # of a weight and its master, where the order has to be found by content


@frozen(eq=False)
class _Group:
    """One group of the optimizer: the numbers of its parameters, and where there are masters those."""

    value: Value
    numbers: list[int]
    masters: list[Value] | None


def read_whole_states(gathered: Gathered, module: Module) -> None:
    """States of each parameter, by the names that the module's order gives to the numbers."""
    optimizer = Value.of(module.file).find("optimizer")
    gathered.set("masters", 0, f"optimizer of {module.file.file}")
    if optimizer is None:
        gathered.remarks.append("there is no optimizer state: weights alone")
        return
    if "fp32_groups_flat" in optimizer.mapping():
        not_yet(module.file.path, "its masters are flat (FP16_Optimizer of a fused Adam without ZeRO)")
    has_masters = "fp32_groups" in optimizer.mapping()
    base = optimizer.at("optimizer_state_dict") if has_masters else optimizer
    groups = _groups(base, optimizer.at("fp32_groups") if has_masters else None)
    states = base.at("state")
    names = _names(gathered, module, states, groups)
    gathered.set("masters", int(has_masters), f"optimizer/fp32_groups of {module.file.file}")
    held_by = (
        (i, name)
        for group, members in zip(groups, names, strict=True)
        for i, name in zip(group.numbers, members, strict=True)
    )
    rows = ((module.shapes[name], states.find(i)) for i, name in held_by)
    gathered.counted |= counted_states((shape, dict(_helds(held))) for shape, held in rows if held is not None)
    for g, (group, members) in enumerate(zip(groups, names, strict=True)):
        gathered.groups.append(ParameterGroup(str(g), tuple(members), hyper_of(group.value)))
        for i, (number, name) in enumerate(zip(group.numbers, members, strict=True)):
            if group.masters is not None:
                gathered.keep(module.file, group.masters[i].key, group.masters[i].tensor())
                gathered.has((name,), "fp32")
            if (held := states.find(number)) is not None:
                gathered.state(module.file, held, (module.shapes[name],), (name,))


def _helds(states: Value) -> Iterator[tuple[str, object]]:
    return ((named(name), value.held) for name, value in states.named())


def _groups(base: Value, masters: Value | None) -> list[_Group]:
    rows = masters.items() if masters is not None else []
    out = []
    for g, group in enumerate(base.at("param_groups").items()):
        numbers = [number.whole() for number in group.at("params").items()]
        mine = None
        if masters is not None:
            mine = rows[g].items() if g < len(rows) else []
            if len(mine) != len(numbers):
                (rows[g] if g < len(rows) else masters).wrong("a master for each parameter")
        out.append(_Group(group, numbers, mine))
    return out


def _shape(states: Value | None) -> Shape | None:
    """The shape of a parameter by its states; None where they do not tell."""
    held = states.mapping().values() if states is not None else ()
    return next((value.shape for value in held if isinstance(value, TensorRef) and value.shape), None)


def _names(gathered: Gathered, module: Module, states: Value, groups: list[_Group]) -> list[list[str]]:
    """Names for the numbers of each group. Raises: UcplError E461 where there is no way, or more than one."""
    names = [(name, module.shapes[name]) for name in module.parameters()]
    shapes = [
        [_shape(states.find(number)) for number in group.numbers]
        if group.masters is None
        else [master.tensor().shape for master in group.masters]
        for group in groups
    ]
    found = match(names, shapes)
    how = "shapes, in the module's order"
    if found == 2 and groups and groups[0].masters is not None:
        found = match(names, shapes, _Contents(module, groups).agree)
        how = "shapes and values of the masters, in the module's order"
    if isinstance(found, int):
        several = "several ways" if found else "no way"
        path = str(module.file.path)
        fail(
            "E461",
            f"ZeRO-0 numbers the optimizer's parameters and names none: there is {several} to match them to the module's",
            Label(path, f"groups of {[len(group) for group in shapes]} parameters", where="optimizer/param_groups"),
            Label(path, f"{len(names)} parameters", where="module"),
        )
    gathered.set("parameter_order", how, f"optimizer of {module.file.file} names no parameter")
    return found


@frozen(eq=False)
class _Contents:
    """Whether a weight is its master, rounded to nearest even: tells parameters of one shape apart."""

    module: Module
    groups: list[_Group]
    _known: dict[tuple[str, int, int], bool] = field(factory=dict)
    _bytes: dict[Extent, bytes] = field(factory=dict)

    def agree(self, name: str, g: int, i: int) -> bool:
        key = (name, g, i)
        if key not in self._known:
            masters = self.groups[g].masters or []
            self._known[key] = self._compare(self.module.tensors[name], masters[i].tensor())
        return self._known[key]

    def _compare(self, weight: TensorRef, master: TensorRef) -> bool:
        import numpy as np

        if master.storage.dtype != "f32":
            return True
        a, b = self._read(weight), self._read(master)
        wide = np.frombuffer(b, dtype="<f4")
        match weight.storage.dtype:
            case "f32":
                return a == b
            case "bf16":
                bits = wide.view("<u4").astype(np.uint64)
                rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            case "f16":
                with np.errstate(over="ignore"):
                    rounded = wide.astype("<f2").view("<u2")
            case _:
                return True
        held = min(len(a) // 2, len(rounded))
        return bool((np.frombuffer(a, dtype="<u2")[:held] == rounded[:held]).all())

    def _read(self, tensor: TensorRef) -> bytes:
        """The first elements of a tensor, as far as they are compared."""
        extent = self.module.file.extent((), tensor)
        if extent not in self._bytes:
            itemsize = DTYPES[extent.dtype].itemsize
            size = min(extent.numel, _COMPARED_BYTES_MAX // 4) * itemsize if extent.is_contiguous else 0
            with self.module.file.path.open("rb") as file:
                self._bytes[extent] = os.pread(file.fileno(), size, extent.storage_start + extent.offset * itemsize)
        return self._bytes[extent]
