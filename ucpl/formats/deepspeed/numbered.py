"""Names for the numbers of ZeRO-0's optimizer.

The optimizer numbers parameters without names. The evidence, in this order: `param_shapes`, in files that ucpl wrote;
the caller's order; weights that are views of one flat buffer; torch's `param_names`; values of masters; shapes, in the
module's order. If more than one way remains, the conversion stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, TensorRef
from ucpl.files.checkpoint import Order
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.module import RankModule
from ucpl.formats.matching import Shape, Slots, Unclear, check_order, match, match_consecutive
from ucpl.formats.torch_dicts import NamedTensors
from ucpl.records import frozen
from ucpl.storage.reading import pread

_COMPARED_MAX = 1 << 14  # elements of a weight and its master, where the order has to be found by content
_MASTERS_KEPT = 64  # places whose masters are kept in memory while weights are held against them
Named = list[list[str]]  # the parameters of each group, in the optimizer's order


@frozen(eq=False)
class NumberedGroup:
    """One group of the optimizer.

    Its numbers, and its masters if it has them.
    """

    value: Value
    numbers: list[int]
    masters: list[Value] | None = None  # one a parameter
    flat: Value | None = None  # or one flat buffer for all, which has the group's one number

    @property
    def room(self) -> int:
        """Parameters, or elements of the flat buffer."""
        return len(self.numbers) if self.flat is None else prod(self.flat.tensor().shape)


@frozen(eq=False)
class Numbered:
    """An optimizer's groups, and the candidates for their parameters."""

    module: RankModule
    states: Value
    groups: list[NumberedGroup]
    order: Order | None = None  # as the caller says
    stage: int = 0  # of a pipeline
    files: Mapping[str, TorchFile] = field(factory=dict)  # of weights that are not in the module's own
    apart: frozenset[str] = (
        frozenset()
    )  # copies whose weights are in no file: masters may be others' than those that are

    @property
    def is_flat(self) -> bool:
        return any(group.flat is not None for group in self.groups)

    @property
    def parameters(self) -> list[tuple[str, Shape]]:
        return [(name, self.module.shapes[name]) for name in self.module.parameters()]

    def find_all(self, names: Sequence[str]) -> list[str | None]:
        """The parameters of these names; None for a name of no parameter."""
        module, known = self.module, {name for name, _ in self.parameters}
        found = NamedTensors(module.tensors, {}, module.aliases, {}).find_all(names)
        return [name if name in known else None for name in found]

    def cost(self, shape: Shape) -> int:
        """The units of a group that a parameter takes.

        One number, or its elements.
        """
        return prod(shape) if self.is_flat else 1

    def shape(self, g: int, i: int) -> Shape | None:
        """The shape of a number by its master or states, or None."""
        group = self.groups[g]
        if group.masters is not None:
            return group.masters[i].tensor().shape
        states = self.states.find(group.numbers[i])
        held = states.mapping().values() if states is not None else ()
        return next((value.shape for value in held if isinstance(value, TensorRef) and value.shape), None)

    def slots(self, agrees: _Contents | None = None) -> list[Slots]:
        """The groups as room for parameters, by shapes and contents."""
        return [
            Slots(group.room, lambda name, shape, at, g=g: self._fits(g, shape, at, name, agrees))  # type: ignore[misc]
            for g, group in enumerate(self.groups)
        ]

    def _fits(self, g: int, shape: Shape, at: int, name: str, agrees: _Contents | None) -> bool:
        if not self.is_flat and self.shape(g, at) not in (None, shape):
            return False
        return agrees is None or agrees.agree(name, g, at)


def names_of(found: Numbered) -> tuple[Named, str]:
    """Names for the numbers of each group, and the evidence.

    Raises: UcplError E461 if there is no way, or more than one; E466 if the caller's order does not fit.
    """
    if found.module.groups:
        if found.order is not None:
            found.order.take()  # which the files of a conversion need no longer
        return _stated(found), f"param_shapes of {found.module.file.file}"
    if found.order is not None:
        return _in_order(found, found.order.take()), found.order.origin
    if (views := _of_views(found)) is not None:
        return views, "weights are views of the groups' flat buffers"
    if (named := _of_param_names(found)) is not None:
        return named, "param_names of the optimizer's groups"
    made = matched(found)
    if isinstance(made, Unclear):
        _check_undamaged(found)
        _reject(found, made)
    return made


def _stated(found: Numbered) -> Named:
    named = [list(group) for group in found.module.groups]
    for name in (name for names in named for name in names if name not in found.module.shapes):
        owner = found.module.aliases.get(name)
        fail(
            "E456",
            f"param_shapes names {name}, which {f'is a second name of {owner}' if owner else 'has no elements'}",
            Label(str(found.module.file.path), where="param_shapes"),
            Label(str(found.module.file.path), where=f"module/{name}"),
        )
    for g, (group, names) in enumerate(zip(found.groups, named, strict=False)):
        if sum(found.cost(found.module.shapes[name]) for name in names) != group.room:
            group.value.wrong(f"a group of the {len(names)} parameters that param_shapes has in group {g}")
    if len(named) != len(found.groups):
        (found.groups[0].value if found.groups else found.states).wrong(f"{len(named)} groups, as param_shapes has")
    return named


# ---- as the caller says ----------------------------------------------------------------------------------------------------


def _in_order(found: Numbered, order: Order) -> Named:
    if not order.names:
        return _one_behind_another(found, found.parameters)
    module, whose = found.module, Label(str(found.module.file.path), where="optimizer/param_groups")
    names = order.at(found.stage)
    if names is None:
        fail("E466", f"{order.origin} says nothing of stage {found.stage}", whose)
    if _has_masters(found):  # which parameters without elements have none of
        names = tuple(name for name in names if name not in module.empty)
    known = dict(found.parameters)
    owners = check_order(order, names, found.find_all(names), "parameter of the module", whose)
    if _has_masters(found) and sum(found.cost(known[n]) for n in owners) > sum(group.room for group in found.groups):
        return _one_behind_another(
            found, [(name, known[name]) for name in owners]
        )  # 16 bits: frozen ones have no number
    out: Named = []
    rest = list(owners)
    for g, group in enumerate(found.groups):
        mine: list[str] = []
        held = 0
        while rest and held < group.room:
            _check_fitting(found, order, (g, held), rest[0])
            held += found.cost(known[rest[0]])
            mine.append(rest.pop(0))
        if held != group.room:
            fail("E466", f"{order.origin} ends in group {g}, or a parameter is cut by its end", whose)
        out.append(mine)
    if rest:
        fail("E466", f"{order.origin} names {len(owners)} parameters, and the optimizer ends before {rest[0]}", whose)
    return out


def _check_fitting(found: Numbered, order: Order, place: tuple[int, int], name: str) -> None:
    g, at = place
    shape = found.module.shapes[name]
    known = shape if found.is_flat else found.shape(g, at)
    if known not in (None, shape):
        fail(
            "E466",
            f"{order.origin} has {name} of shape {list(shape)} as number {at} of group {g}, whose shape is {list(known)}",
            Label(str(found.module.file.path), where=f"optimizer/param_groups/{g}"),
        )


def _one_behind_another(found: Numbered, listed: list[tuple[str, Shape]]) -> Named:
    """The groups' parameters in this order, with others (frozen) between them."""
    made = match_consecutive(listed, found.slots(), found.cost)
    if isinstance(made, Unclear) and made.is_several and _has_masters(found):
        made = match_consecutive(listed, found.slots(_Contents(found)), found.cost)
    if isinstance(made, Unclear):
        _reject(found, made)
    return made


# ---- evidence in the files
# ---------------------------------------------------------------------------------------------------


def _of_views(found: Numbered) -> Named | None:
    """Names by offsets: FP16_Optimizer saves weights as views of its flat buffers."""
    if not found.groups or any(group.flat is None for group in found.groups):
        return None
    packed = _packed(found.module)
    contents = _Contents(found)
    out: Named = []
    for g, group in enumerate(found.groups):
        fitting = []
        for names in packed:
            ends = [0]
            for name in names:
                ends.append(ends[-1] + prod(found.module.shapes[name]))
            if ends[-1] == group.room and all(contents.agree(n, g, at) for n, at in zip(names, ends, strict=False)):
                fitting.append(names)
        if len(fitting) != 1 or fitting[0] in out:
            return None
        out.append(fitting[0])
    return out


def _packed(module: RankModule) -> list[list[str]]:
    """Parameters that fill one storage each, end to end."""
    held: dict[str, list[tuple[int, str]]] = {}
    for name in module.parameters():
        tensor = module.tensors[name]
        held.setdefault(tensor.storage.name, []).append((tensor.offset, name))
    out = []
    for mine in held.values():
        end = 0
        for offset, name in sorted(mine):
            if offset != end:
                break
            end += prod(module.shapes[name])
        else:
            out.append([name for _, name in sorted(mine)])
    return out


def _of_param_names(found: Numbered) -> Named | None:
    """Names by torch's `param_names`, with frozen parameters in 16-bit training.

    torch keeps them if the optimizer was given named_parameters().
    """
    known = dict(found.parameters)
    contents = _Contents(found) if _has_masters(found) else None
    out: Named = []
    for g, group in enumerate(found.groups):
        stated = group.value.find("param_names")
        if stated is None or not isinstance(stated.held, list):
            return None
        names = found.find_all(stated.texts())
        if None in names:
            return None  # names of another module
        listed = [(name, known[name]) for name in dict.fromkeys(names) if name is not None]
        made = match(listed, [found.slots()[g]], found.cost)
        if isinstance(made, Unclear) and made.is_several and contents is not None:
            made = match(listed, [found.slots(contents)[g]], found.cost)
        if isinstance(made, Unclear):
            return None
        out.append(made[0])
    return out


def matched(found: Numbered) -> tuple[Named, str] | Unclear:
    """Names by values of masters, or by shapes in the module's order.

    If several parameters are alike, the module's order is used.
    """
    contents = None
    how = "shapes, in the module's order"
    if _has_masters(found):
        contents = _Contents(found)
        if (by_value := _of_values(found, contents)) is not None:
            return by_value, "shapes and values of the masters"
        how = "shapes and values of the masters, in the module's order"
    made = match(found.parameters, found.slots(contents), found.cost)
    return made if isinstance(made, Unclear) else (made, how)


def _of_values(found: Numbered, contents: _Contents) -> Named | None:
    """Each number's only parameter whose weight is its rounded master, or None."""
    rest = dict(found.parameters)
    out: Named = []
    for group, slots in zip(found.groups, found.slots(contents), strict=True):
        mine: list[str] = []
        at = 0
        while at < group.room:
            whole = {name: shape for name, shape in rest.items() if at + found.cost(shape) <= group.room}
            fitting = [name for name, shape in whole.items() if slots.fits(name, shape, at)]
            if len(fitting) != 1:
                return None
            at += found.cost(rest.pop(fitting[0]))
            mine.append(fitting[0])
        out.append(mine)
    return out


def _has_masters(found: Numbered) -> bool:
    return bool(found.groups) and (found.is_flat or found.groups[0].masters is not None)


def _check_undamaged(found: Numbered) -> None:
    """Check masters and weights for damage before values are compared.

    A damaged value fits nothing; then that is the error. Raises: UcplError E612.
    """
    if not _has_masters(found):
        return
    module = found.module
    for name, _ in found.parameters:
        found.files.get(name, module.file).check_undamaged(module.tensors[name].storage.name, name)
    for g, group in enumerate(found.groups):
        masters = group.masters if group.flat is None else [group.flat]
        for i, master in enumerate(masters or ()):
            module.file.check_undamaged(master.tensor().storage.name, f"master {i} of group {g}")


def _reject(found: Numbered, unclear: Unclear) -> NoReturn:
    path = str(found.module.file.path)
    rooms = [group.room for group in found.groups]
    what = "none of their orders fits"
    if unclear.is_several:
        what = "several orders fit"
    labels = [
        Label(
            path, f"groups of {rooms} {'elements' if found.is_flat else 'parameters'}", where="optimizer/param_groups"
        ),
        Label(path, f"{len(found.parameters)} parameters", where="module"),
    ]
    if unclear.places:
        unit = "element" if found.is_flat else "number"
        may = [f"{unit} {at} of group {g}" if g >= 0 else "frozen, and none of them" for g, at in unclear.places]
        shape = list(found.module.shapes[unclear.name])
        labels.append(Label(path, f"of shape {shape}, may be {', or '.join(may)}", where=f"module/{unclear.name}"))
    fail("E461", f"ZeRO-0 numbers the optimizer's parameters: {what}", *labels)


@frozen(eq=False)
class _Contents:
    """A comparison of weights with masters, rounded to nearest even.

    It distinguishes parameters of one shape.
    """

    found: Numbered
    _known: dict[tuple[str, int, int], bool] = field(factory=dict)
    _weights: dict[str, bytes] = field(factory=dict)
    _masters: dict[tuple[int, int, str], bytes] = field(factory=dict)  # rounded, by group, place and dtype

    def agree(self, name: str, g: int, at: int) -> bool:
        """Compare a weight with a place in a group.

        at: the number in the group, or the element of its flat buffer at which the parameter begins.
        """
        key = (name, g, at)
        if key not in self._known:
            self._known[key] = name in self.found.apart or self._compare(name, g, at)
        return self._known[key]

    def _compare(self, name: str, g: int, at: int) -> bool:
        dtype = self.found.module.tensors[name].storage.dtype
        rounded = self._rounded(g, at, dtype)
        if rounded is None:
            return True
        if name not in self._weights:
            part = self.found.files.get(name, self.found.module.file)
            self._weights[name] = self._read(part, self.found.module.tensors[name])
        held = self._weights[name]
        if dtype == "f32":
            return held == rounded[: len(held)]
        size = min(len(held), len(rounded))
        return held[:size] == rounded[:size]

    def _rounded(self, g: int, at: int, dtype: str) -> bytes | None:
        """The master at a place, rounded to the weight's dtype, or None.

        It is read once for all weights.
        """
        import numpy as np

        master = self._master(g, at)
        if master is None or master.storage.dtype != "f32" or dtype not in ("f32", "bf16", "f16"):
            return None
        if (g, at, dtype) not in self._masters:
            wide = np.frombuffer(self._read(self.found.module.file, master), dtype="<f4")
            if dtype == "bf16":
                bits = wide.view("<u4").astype(np.uint64)
                wide = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            elif dtype == "f16":
                with np.errstate(over="ignore"):
                    wide = wide.astype("<f2")
            if len(self._masters) >= _MASTERS_KEPT:
                self._masters.clear()
            self._masters[g, at, dtype] = wide.tobytes()
        return self._masters[g, at, dtype]

    def _master(self, g: int, at: int) -> TensorRef | None:
        group = self.found.groups[g]
        if group.flat is not None:
            flat = group.flat.tensor()
            size = min(_COMPARED_MAX, max(0, group.room - at))  # as far as any weight is compared, whichever it is
            return TensorRef(flat.storage, flat.offset + at, (size,), (1,))
        return group.masters[at].tensor() if group.masters is not None else None

    def _read(self, part: TorchFile, tensor: TensorRef) -> bytes:
        """The first elements of a tensor, as far as they are compared."""
        extent = part.extent((), tensor)
        itemsize = DTYPES[extent.dtype].itemsize
        size = min(extent.numel, _COMPARED_MAX) * itemsize if extent.is_contiguous else 0
        with part.path.open("rb") as file:
            return pread(file.fileno(), size, extent.storage_start + extent.offset * itemsize)
