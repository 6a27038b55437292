"""A PipelineModule without ZeRO, whose stages and numbers must be found.

No file has the layers of a stage, the tied ones, or the names of the optimizer's numbers. Files that ucpl wrote have
param_shapes. Otherwise the caller gives the names by stage (`order`), or torch's `param_names` do, or the stages are
found: consecutive layers are on each, and each stage's optimizer has a number for each parameter, in the module's
order, tied modules first. Source: deepspeed 0.19.8: runtime/pipe/module.py (`_build`, `save_state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NoReturn

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import TensorRef
from ucpl.files.checkpoint import Order
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.module import Groups, RankModule, groups_of
from ucpl.formats.deepspeed.names import layer_number, list_files
from ucpl.formats.deepspeed.numbered import Named, Numbered, matched, names_of
from ucpl.formats.deepspeed.stages import refs_of
from ucpl.formats.deepspeed.topology import ModelRank, Topology, topology_of
from ucpl.formats.deepspeed.whole_states import numbered
from ucpl.formats.matching import Unclear
from ucpl.records import frozen

_TIED = "tied_modules."
_WAYS_MAX = 2  # one is enough, and two are too many
Files = dict[int, TorchFile]  # of layers, by number


@frozen(eq=False)
class ShardGroups:
    """The groups of each shard's optimizer, as param_shapes would state them."""

    groups: tuple[Groups, ...]
    origin: str = ""  # where param_shapes do not
    remarks: tuple[str, ...] = ()


def shard_groups(topology: Topology, by_tp: list[Files], order: Order | None) -> ShardGroups:
    """The parameters of each shard's optimizer.

    Raises: UcplError E461 if they cannot be found, E466 if `order` does not fit.
    """
    stated = tuple(groups_of(shard.first) for shard in topology.shards)
    if any(stated) or all(Value.of(s.first).find("optimizer") is None for s in topology.shards):
        return ShardGroups(stated)
    if topology.stage:
        return _of_slices(topology, by_tp)
    if _is_of_shards(topology):
        try:
            every = topology_of(list_files(topology.first.path.parent))
            return _of_slices(every, by_tp) if every.optims else ShardGroups(stated)
        except UcplError:  # damaged: the layers keep their own names
            return ShardGroups(stated)
    finder = _Finder.of(topology, by_tp[0], order or _param_names(topology))
    found = finder.by_order() if finder.order is not None else finder.found()
    groups = []
    for shard in topology.shards:
        shapes = _Tensors.of(by_tp[shard.tp], finder.tied)
        groups.append(tuple({name: shapes[name][0].shape for name in names} for names in found[shard.pp]))
    how = (
        finder.order.origin
        if finder.order is not None
        else "shapes and values of each stage's optimizer, in the module's order"
    )
    remarks: tuple[str, ...] = ()
    if topology.pp == 1 and finder.order is None:
        remarks = ("a pipeline without ZeRO does not record its tied layers: on more stages each is separate",)
    return ShardGroups(tuple(groups), how, remarks)


def _is_of_shards(topology: Topology) -> bool:
    """Test whether only unread shards name the parameters of stages."""
    held = [Value.of(shard.first).find("optimizer") for shard in topology.shards]
    return any(one is not None and "base_optimizer_state" in one.mapping() for one in held)


def _of_slices(topology: Topology, by_tp: list[Files]) -> ShardGroups:
    """Groups of BF16_Optimizer without ZeRO, from `param_slice_mappings`.

    DeepSpeed makes it for a PipelineModule in bf16. It saves shards as ZeRO-1 does, without param_shapes, and cannot
    load them. `param_slice_mappings` have the names of each rank's parts, in order.
    """
    named: list[list[list[str]]] = []
    for shard in topology.shards:
        mine: list[dict[str, None]] = []
        for part in shard.optims:
            slices = Value.of(part).at("optimizer_state_dict", "param_slice_mappings").items()
            mine += ({} for _ in slices[len(mine) :])
            for group, held in zip(mine, slices, strict=False):
                group |= dict.fromkeys(name for name, _ in held.named())
        named.append([[*group] for group in mine])
    tied = _tied_layers({n for groups in named for names in groups for n in names}, by_tp[0])
    groups = []
    for shard, mine_ in zip(topology.shards, named, strict=True):
        tensors = _Tensors.of(by_tp[shard.tp], tied)
        lacking = next((n for names in mine_ for n in names if n not in tensors), None)
        if lacking is not None:
            where = Label(str(shard.optims[0].path), where="param_slice_mappings")
            fail("E459", f"{lacking} is in param_slice_mappings and in no layer's file", where)
        groups.append(tuple({name: tensors[name][0].shape for name in names} for names in mine_))
    return ShardGroups(tuple(groups), f"param_slice_mappings of {topology.optims[0].file}")


def _tied_layers(names: set[str], files: Files) -> dict[str, int]:
    """The layer of each tied module in these names.

    One that no stage names.
    """
    own = {number for name in names if (number := layer_number(name)) is not None}
    inner: dict[str, set[str]] = {}
    for name in sorted(names):
        if name.startswith(_TIED) and name.count(".") > 1:
            key, _, rest = name.removeprefix(_TIED).partition(".")
            inner.setdefault(key, set()).add(rest)
    tied: dict[str, int] = {}
    for key, held in inner.items():
        free = (
            n for n, file in files.items() if n not in own and n not in tied.values() and held <= refs_of(file).keys()
        )
        if (layer := next(free, None)) is not None:
            tied[key] = layer
    return tied


def _param_names(topology: Topology) -> Order | None:
    """torch's own, where every group of every stage has them."""
    out = []
    for shard in topology.shards[:: topology.tp]:
        found = numbered(RankModule(shard.first), ModelRank({}))
        named = [group.value.find("param_names") for group in found.groups] if found is not None else [None]
        if any(one is None or not isinstance(one.held, list) for one in named):
            return None
        out.append(tuple(name for one in named if one is not None for name in one.texts()))
    return Order(tuple(out), "param_names of the optimizer's groups")


Tensors = dict[str, tuple[TensorRef, TorchFile]]


class _Tensors:
    """Tensors of layers by full names; tied ones by both names."""

    @staticmethod
    def of(files: Files, tied: dict[str, int]) -> Tensors:
        keys: dict[int, list[str]] = {}
        for key, layer in tied.items():
            keys.setdefault(layer, []).append(f"{_TIED}{key}.")
        out: Tensors = {}
        for number, file in files.items():
            for prefix in keys.get(number, [f"{number}."]):
                out |= {prefix + name: (ref, file) for name, ref in refs_of(file).items() if prod(ref.shape)}
        return out


@frozen(eq=False)
class _Finder:
    topology: Topology
    files: Files
    order: Order | None
    buffers: tuple[frozenset[str], ...]  # of each stage
    tied: dict[str, int] = field(factory=dict)  # key of a tied module -> its layer with a file
    closed: set[tuple[int, int]] = field(factory=set)  # (stage, layers left) from which no way leads on

    @classmethod
    def of(cls, topology: Topology, files: Files, order: Order | None) -> _Finder:
        metas = [shard.first for shard in topology.shards[:: topology.tp]]
        stated = [Value.of(meta).find("buffer_names") for meta in metas]
        return cls(topology, files, order, tuple(frozenset(n.texts() if n is not None else ()) for n in stated))

    def numbers(self, stage: int, tensors: Tensors) -> Numbered:
        """A stage's optimizer, and its candidate parameters in the module's order."""
        meta = self.topology.shards[stage * self.topology.tp].first
        refs = {name: ref for name, (ref, _) in tensors.items()}
        shapes = {name: ref.shape for name, ref in refs.items()}
        module = RankModule(meta, (), refs, self.buffers[stage] & refs.keys(), shapes)
        found = numbered(module, ModelRank({"pp": stage}, self.order))
        if found is None:
            fail(
                "E461", f"stage {stage} has no optimizer, and another has one", Label(str(meta.path), where="optimizer")
            )
        return evolve(found, files={name: file for name, (_, file) in tensors.items()})

    # ---- as names say -----------------------------------------------------------------------------------------------------

    def by_order(self) -> list[Named]:
        """The names by the caller's order or torch's names.

        A tied module is a layer that no stage has by number.
        """
        assert self.order is not None
        if not self.order.names:  # "model": one way is to be left
            return evolve(self, order=None).found()
        self.tied.update(_tied_layers({name for names in self.order.names for name in names}, self.files))
        tensors = _Tensors.of(self.files, self.tied)
        return [names_of(self.numbers(s, tensors))[0] for s in range(self.topology.pp)]

    # ---- names from the numbers
    # -------------------------------------------------------------------------------------------

    def found(self) -> list[Named]:
        """The only assignment of layers to stages that fits all numbers."""
        for whole in (True, False):  # all that a stage holds is trained; else some of it is frozen
            for layer in (None, *self.files):
                made = list(_first(self.ways(layer, whole)))
                if len(made) > 1:
                    self._reject("there are several ways")
                if made:
                    if layer is not None:
                        self.tied[str(layer)] = layer
                    return made[0]
        self._reject("there is no way")

    def _reject(self, what: str) -> NoReturn:
        first = self.topology.first
        fail(
            "E461",
            f"a PipelineModule without ZeRO names no parameter: {what} to deal its layers to the stages' optimizers",
            Label(str(first.path), where="optimizer/param_groups"),
            Label(str(first.root), f"{len(self.files)} files of layers"),
            remedy="say the names of each stage's optimizer, which its ranks list: --order names.json,"
            " [[[names of a group], ...], ...], a list a stage",
        )

    def ways(self, tied: int | None, whole: bool) -> Iterator[list[Named]]:
        """Names of each stage's numbers, way by way.

        tied: a layer that other stages have a copy of.
        """
        self.closed.clear()
        for made, copied in self._dealt(0, [*self.files], tied, whole):
            if tied is None or copied:
                yield made

    def _dealt(
        self, stage: int, layers: list[int], tied: int | None, whole: bool
    ) -> Iterator[tuple[list[Named], bool]]:
        """Assignments of these layers to the stages from this one on.

        Each has a flag: some stage has a copy of a layer without a file.
        """
        if stage == self.topology.pp:
            if not layers:
                yield [], False
            return
        if (stage, len(layers)) in self.closed:
            return
        is_open = False
        for count in range(len(layers) + 1):
            mine, rest = layers[:count], layers[count:]
            for copies in (False, True) if tied is not None and tied not in mine else (False,):
                names = self._of_stage(stage, mine, tied if copies or tied in mine else None, whole)
                if names is None:
                    continue
                for others, copied in self._dealt(stage + 1, rest, tied, whole):
                    is_open = True
                    yield [names, *others], copies or copied
        if not is_open:
            self.closed.add((stage, len(layers)))

    def _of_stage(self, stage: int, layers: list[int], tied: int | None, whole: bool) -> Named | None:
        """The numbers' names, if the stage has these layers."""
        own = {n: self.files[n] for n in layers if n != tied}
        tensors = _Tensors.of(own, {})
        if tied is not None:
            tensors = {**_Tensors.of({tied: self.files[tied]}, {str(tied): tied}), **tensors}
        buffers = {name for name in self.buffers[stage] if not name.startswith(_TIED)}
        if not buffers <= tensors.keys():  # it names one of each of its layers
            return None
        found = self.numbers(stage, tensors)
        if tied not in layers:
            found = evolve(found, apart=frozenset(name for name in tensors if name.startswith(_TIED)))
        room, held = sum(group.room for group in found.groups), sum(found.cost(shape) for _, shape in found.parameters)
        if room > held or (whole and room < held):
            return None
        made = matched(found)
        return None if isinstance(made, Unclear) else made[0]


def _first(ways: Iterator[list[Named]]) -> Iterator[list[Named]]:
    """The first ways that are not alike."""
    out: list[list[Named]] = []
    for way in ways:
        if way not in out:
            out.append(way)
            yield way
        if len(out) == _WAYS_MAX:
            return
