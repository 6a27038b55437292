"""A rank's state dict of DTensors, and states of its optimizer.

For writers of formats with state dicts of each rank.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from attrs import evolve, field

from ucpl.extents import PickledCall, StoredTensor, Structure, TensorRef, key_text
from ucpl.files.carrying import Storages, by_place, mapped
from ucpl.files.checkpoint import Archive, Checkpoint, Skeleton, SkeletonFile
from ucpl.files.demands import Demands
from ucpl.files.groups import has_groups_alone
from ucpl.files.pickle_writer import dump_pickle
from ucpl.files.pickles import set_attributes
from ucpl.formats.dcp.store import DCP
from ucpl.formats.leaving import EXTRA, empty_tensors, with_empty_states
from ucpl.formats.torch_optimizer import put_numbers
from ucpl.formats.verl.dtensors import Mesh, Shape, dtensor, local_of
from ucpl.records import define
from ucpl.registry import degree_of

__all__ = ["RankFolders", "RankWriter", "StateDictFile", "value_of"]


@define(eq=False)
class StateDictFile:
    """One rank's file of weights or of the optimizer, under construction."""

    path: str
    first: str  # of rank 0
    storages: Storages
    mesh: Mesh
    storage_of: dict[int, str] = field(factory=dict)

    def made(self, value: object) -> SkeletonFile:
        """The file, with its storages numbered in the order of the pickle.

        torch numbers them so, and computes their offsets by it.
        """
        names = {one.name: str(n) for n, one in enumerate(dump_pickle(value)[1])}
        named = mapped(value, lambda t: evolve(t, storage=evolve(t.storage, name=names[t.storage.name])))
        return SkeletonFile(
            path=self.path,
            value=(Archive(named, {names[name]: data for name, data in self.mesh.known.items() if name in names}),),
            form="archives",
            storage_of={t: f"0:{names[name]}" for t, name in self.storage_of.items()},
            carried=tuple(evolve(one, storage=f"0:{names[one.storage]}") for one in self.storages.carried),
        )


@define(eq=False)
class RankWriter:
    """The parts that writers share; a subclass names files."""

    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    ddp: int = field(init=False)
    fsdp: int = field(init=False)
    placed: dict[tuple[str, str], int] = field(init=False)  # the target of a file and a key

    def __attrs_post_init__(self) -> None:
        self.ddp, self.fsdp = (degree_of(self.structure.settings, name) for name in ("ddp", "fsdp"))
        self.placed = {(target.file, key_text(target.key)): t for t, target in enumerate(self.targets)}

    @property
    def ranks(self) -> int:
        return self.ddp * self.fsdp

    @property
    def has_optimizer(self) -> bool:
        return any(t.states for t in self.structure.tensors) or has_groups_alone(self.source)

    def name_of(self, what: str, rank: int) -> str:
        """The name of a rank's file."""
        raise NotImplementedError

    def skeleton(self) -> Skeleton:
        """The files of a target. Raises: UcplError E471."""
        raise NotImplementedError

    def file(self, what: str, rank: int) -> StateDictFile:
        storages = Storages(by_place(self.source.carried_extents.values()))
        device = str(self.structure.settings.get("device", "cuda"))
        mesh = Mesh.of(rank, self.ddp, self.fsdp, device, storages.fresh())
        return StateDictFile(self.name_of(what, rank), self.name_of(what, 0), storages, mesh)

    def value(self, what: str, rank: int, value: object) -> SkeletonFile:
        """A file of another value, the same for all ranks."""
        storages = Storages(by_place(self.source.carried_extents.values()))
        return SkeletonFile(self.name_of(what, rank), storages.value(value), carried=tuple(storages.carried))

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def whole(self, file: StateDictFile, name: str) -> TensorRef | None:
        """A tensor that is not cut, or None without a target."""
        t = self.placed.get((file.path, name))
        return None if t is None else self.filled(file, t)

    def filled(self, file: StateDictFile, t: int) -> TensorRef:
        target = self.targets[t]
        made = file.storages.tensor(target.dtype, target.shape)
        if target.numel:
            file.storage_of[t] = made.storage.name
        return made

    def cut(self, file: StateDictFile, key: str, shape: Shape) -> PickledCall | None:
        """The rank's part of a tensor as a DTensor.

        A rank without elements of it has an empty part. None if no rank has the tensor.
        """
        t = self.placed.get((file.path, key))
        first = self.placed.get((file.first, key))
        if first is None:
            return None
        local = (
            self.filled(file, t) if t is not None else file.storages.empty(self.targets[first].dtype, (0, *shape[1:]))
        )
        return dtensor(local, shape, file.mesh)

    def empty(self, file: StateDictFile, dtype: str, shape: Shape) -> PickledCall:
        """The rank's part of a tensor without elements."""
        return dtensor(file.storages.empty(dtype, local_of(shape, file.mesh.at, self.fsdp)), shape, file.mesh)

    def model(self, file: StateDictFile) -> OrderedDict[object, object]:
        """The rank's state dict in the model's order, with second names."""
        blobs = self.source.state.blobs
        held: dict[str, object] = {}
        for tensor in self.structure.tensors:
            is_cut = tensor.kind != "buffer"
            made = self.cut(file, tensor.name, tensor.shape) if is_cut else self.whole(file, tensor.name)
            if made is not None:
                held[tensor.name] = made
        for name, one in empty_tensors(self.source.state, self.source.root).items():
            plain = one.buffer
            held[name] = file.storages.empty(one.dtype, one.shape) if plain else self.empty(file, one.dtype, one.shape)
        aliases = self.structure.aliases.items()
        held |= {alias: held[owner] for alias, owner in aliases if owner in held}
        extra = blobs.get(EXTRA)
        held |= {str(name): file.storages.value(one) for name, one in extra.items()} if isinstance(extra, dict) else {}
        stated = blobs.get("module_names")
        order = [name for name in stated if name in held] if isinstance(stated, list) else []
        value: OrderedDict[object, object] = OrderedDict((name, held[name]) for name in dict.fromkeys((*order, *held)))
        if isinstance(attributes := blobs.get("module_attributes"), dict):
            set_attributes(value, file.storages.value(attributes))
        return value

    def states(self, file: StateDictFile) -> dict[str, dict[str, object]]:
        """States of the rank's optimizer, by parameter."""
        states: dict[str, dict[str, object]] = {}
        for tensor in self.structure.tensors:
            for state in tensor.states:
                if (made := self.cut(file, f"{tensor.name}/{state}", tensor.shape)) is not None:
                    states.setdefault(tensor.name, {})[state] = made
        for name, one in empty_tensors(self.source.state, self.source.root).items():
            if one.states:
                states[name] = {state: self.empty(file, dtype, one.shape) for state, dtype in one.states.items()}
        put_numbers(self.source, file.storages, states)
        return states


@define(eq=False)
class RankFolders:
    """A store that writes; `dcp` reads the files."""

    name: str
    writer: type[RankWriter]
    demands: Demands = Demands()

    def recognises(self, path: Path) -> bool:
        """Return False: DCP's store reads these files."""
        return False

    def open(self, path: Path) -> Checkpoint:
        return DCP().open(path)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """The files of a target. Raises: UcplError E471."""
        return self.writer(structure, targets, with_empty_states(source, structure)).skeleton()


def value_of(file: SkeletonFile) -> object:
    """The tree of a file, for its classes."""
    return [one.value for one in file.value] if file.form == "archives" else file.value
