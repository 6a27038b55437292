"""A DCP folder as a target: a file per rank, and `.metadata`.

`.metadata` is known before data moves. Every chunk is an archive in the file of the first rank that holds it; numbers
and other values are in rank 0's. `.metadata` is pickled as in torch 2.13, which later releases read, too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import (
    Extent,
    Global,
    ParameterGroup,
    PickledCall,
    Scalar,
    Size,
    StorageRef,
    StoredTensor,
    Structure,
    TensorRef,
    TorchDType,
    key_text,
)
from ucpl.files.carrying import Place as Lying
from ucpl.files.carrying import Storages, by_place, strides
from ucpl.files.checkpoint import Archive, Carried, Checkpoint, Skeleton, SkeletonFile
from ucpl.files.groups import has_groups_alone
from ucpl.files.inert import LEAVES
from ucpl.files.pickles import dumps, unsafe_globals
from ucpl.files.plain_values import encode
from ucpl.files.scalars import number_of
from ucpl.files.torch_files import layout_archive
from ucpl.formats.dcp.folders import MODEL, OF_STEP, OPTIMIZER
from ucpl.formats.dcp.metadata import ENVELOPE, METADATA, Step
from ucpl.formats.dcp.wrapped import wrapped_of
from ucpl.formats.leaving import EMPTY, META, empty_tensors, with_empty_states
from ucpl.formats.optimizer_hypers import completed, counts_in_tensors
from ucpl.formats.torch_dicts import VALUES
from ucpl.formats.torch_optimizer import EXTRA as OTHERS
from ucpl.records import define
from ucpl.registry import format_named

__all__ = ["RankFile", "DCPWriter", "address", "leaves", "skeleton", "whole_shapes"]

Shape = tuple[int, ...]
_APART = ("model.", "optimizer.state.")  # of the two folders of Accelerate and the Trainer


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint) -> Skeleton:
    """The files of a target.

    Raises: UcplError E471 for a value with the name of another one, E486 for names that no loader looks for.
    """
    return DCPWriter(structure, targets, with_empty_states(source, structure)).skeleton()


@define(eq=False)
class RankFile:
    """One rank's file under construction."""

    archives: list[Archive] = field(factory=list)
    storage_of: dict[int, str] = field(factory=dict)
    carried: list[Carried] = field(factory=list)
    size: int = 0

    def add(self, archive: Archive) -> tuple[int, int, int]:
        """Its number, where it starts, and its bytes."""
        number, start, size = len(self.archives), self.size, layout_archive(archive.value).size
        self.archives.append(archive)
        self.size += size
        return number, start, size


@define(eq=False)
class DCPWriter:
    """A folder under construction."""

    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    files: dict[str, RankFile] = field(factory=dict)
    described: dict[str, PickledCall] = field(factory=dict)  # state_dict_metadata
    chunks: dict[str, list[object]] = field(factory=dict)  # of a tensor: ChunkStorageMetadata
    places: list[tuple[str, PickledCall, PickledCall]] = field(factory=list)  # storage_data, by name
    paths: dict[str, tuple[Step, ...]] = field(factory=dict)  # planner_data
    lying: dict[Lying, Extent] = field(init=False)  # carried tensors, by their place in the source
    owners: frozenset[str] = field(init=False)  # names of the model's tensors

    def __attrs_post_init__(self) -> None:
        self.owners = frozenset(
            (*(t.name for t in self.structure.tensors), *empty_tensors(self.source.state, self.source.root))
        )
        self.lying = by_place(self.source.carried_extents.values())

    @property
    def prefix(self) -> str:
        return str(self.structure.settings.get("prefix", "model."))

    @property
    def states(self) -> str:
        return str(self.structure.settings.get("states") or "optim.state.")

    @property
    def has_states(self) -> bool:
        """True if the target has states, or groups without states."""
        if self.source.state.scalars or any(t.states for t in self.structure.tensors):
            return True
        return has_groups_alone(self.source)

    @property
    def is_flat(self) -> bool:
        """True if the optimizer's names are single keys, with hyper-parameters per parameter."""
        return bool(self.structure.settings.get("flat"))

    def skeleton(self) -> Skeleton:
        self.demand_names()
        self.tensors()
        self.empty()
        self.numbers()
        self.other_states()
        self.groups()
        for steps, value in leaves((), self.source.state.carried):
            self.value(steps, value)
        self.values_of_run()
        files = self.of_ranks()
        more = self.meta()
        held = [one.value for file in self.files.values() for one in file.archives] + [one.value for one in more]
        unsafe = tuple(sorted({name for value in held for name in unsafe_globals(value)} - VALUES))
        described = tuple(SkeletonFile(path, self.metadata(path), "bytes") for path in self.metadatas())
        return Skeleton("", (*files, *described, *more), unsafe_globals=unsafe)

    def of_ranks(self) -> tuple[SkeletonFile, ...]:
        return tuple(
            SkeletonFile(
                path=path,
                value=tuple(file.archives),
                form="archives",
                storage_of=file.storage_of,
                carried=tuple(file.carried),
            )
            for path, file in sorted(self.files.items(), key=lambda item: (len(item[0]), item[0]))
        )

    def meta(self) -> tuple[SkeletonFile, ...]:
        """Lightning's file of all that is in no chunk, as it was."""
        if META not in self.source.state.blobs:
            return ()
        storages = Storages(self.lying)
        value = storages.value(self.source.state.blobs[META])
        return (SkeletonFile(path=META, value=value, carried=tuple(storages.carried)),)

    @property
    def is_apart(self) -> bool:
        """True if model and optimizer have separate folders.

        They have them if the source's have, and in a training framework's folder.
        """
        if self.structure.framework != "dcp" or self.is_of_step:
            return False
        container = self.source.container
        is_held = container is not None and container.kind.holds(format_named(self.structure.framework))
        return is_held or f"{MODEL}/{METADATA}" in self.source.files

    @property
    def is_of_step(self) -> bool:
        """True if one folder inside a step's has model and optimizer.

        The source has such a folder, too.
        """
        container = self.source.container
        return self.structure.framework == "dcp" and container is not None and container.kind.tag == OF_STEP

    def home(self, name: str) -> str:
        """The folder of a value: the optimizer's, or else the model's."""
        if self.is_of_step:
            return f"{OF_STEP}/"
        if not self.is_apart:
            return ""
        return f"{OPTIMIZER}/" if name.startswith(_APART[1].partition(".")[0] + ".") else f"{MODEL}/"

    def demand_names(self) -> None:
        """Check the names of two folders: their loaders look for fixed names.

        Raises: UcplError E471, E486.
        """
        self.demand_states()
        has_states = any(target.state != "weight" for target in self.targets)
        names = self.prefix, self.states if has_states else _APART[1]
        if self.is_apart and (names != _APART or (has_states and self.is_flat)):
            fail(
                "E486",
                f"Accelerate looks for names that begin with `{_APART[0]}` in {MODEL}, with `{_APART[1]}` in {OPTIMIZER},"
                f" and the target's are `{names[0]}` and `{names[1]}`" + ", flattened" * self.is_flat,
                Label(str(self.source.root)),
                remedy="leave prefix, states and flat of dcp(...) out",
            )

    def demand_states(self) -> None:
        """Reject flat names with an ambiguous end of the parameter's name.

        Raises: UcplError E471.
        """
        others = (s for one in self.others.values() for (s, *inner), _ in leaves((), one) if inner or "." in str(s))
        named = (*(s for t in self.structure.tensors for s in t.states), *self.source.state.scalars)
        dotted = [*dict.fromkeys((*(s for s in named if "." in s), *map(str, others)))] if self.is_flat else []
        if dotted:
            fail(
                "E471",
                f"a flattened optimizer has no place for states with parts or dots in their names: {', '.join(dotted)}",
                Label(str(self.source.root)),
                remedy=f"leave them out: {' '.join(f'--drop {state}' for state in dotted)}; or dcp(...) without flat",
            )

    def metadatas(self) -> list[str]:
        """The files that describe the others, each in the folder of those."""
        return sorted({f"{self.home(name)}{METADATA}" for name in self.described} or {METADATA})

    # ---- names with the wraps of the source's modules -----------------------------------------------------------------

    def entry_name(self, name: str) -> str:
        """An entry's name, its parameter called as the source's dict does."""
        return self.wraps(name)[0]

    def entry_steps(self, name: str, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        made, plain, called = self.wraps(name)
        if made == name:
            return steps
        return tuple(one.replace(plain, called, 1) if isinstance(one, str) and plain in one else one for one in steps)

    def wraps(self, name: str) -> tuple[str, str, str]:
        """The written name, and its parameter without and with wrapper steps."""
        top, wrapped = self.states.removesuffix("state."), wrapped_of(self.source)
        for begin, names in (
            (self.states, wrapped.optimizer),
            (f"{top}param_groups.", wrapped.optimizer),
        ):
            owner, key = self.split(name.removeprefix(begin))
            if names and name.startswith(begin) and owner in names:
                return f"{begin}{names[owner]}.{key}", owner, names[owner]
        owner = name.removeprefix(self.prefix)
        if name.startswith(self.prefix) and owner in wrapped.model:
            return self.prefix + wrapped.model[owner], owner, wrapped.model[owner]
        return name, "", ""

    def file(self, rank: int, name: str) -> tuple[str, RankFile]:
        """The file of a rank that a value goes to."""
        path = f"{self.home(name)}__{rank}_0.distcp"
        return path, self.files.setdefault(path, RankFile())

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def tensors(self) -> None:
        whole = whole_shapes(self.targets)
        for t in sorted(range(len(self.targets)), key=lambda t: self.targets[t].rank):
            name, offset = address(self.targets[t])
            self.tensor(t, name, (offset, self.targets[t].shape), whole[name])

    def tensor(self, t: int, name: str, box: tuple[Shape, Shape], whole: Shape) -> None:
        """A target as a chunk. box: where it begins, and its shape."""
        target = self.targets[t]
        made = TensorRef(StorageRef("0", target.dtype, target.numel), 0, box[1], strides(box[1]))
        number = self.chunk(target.rank, name, box[0], Archive(made), whole)
        self.file(target.rank, name)[1].storage_of[t] = f"{number}:0"

    def chunk(self, rank: int, name: str, offset: Shape, archive: Archive, whole: Shape) -> int:
        """Raises: UcplError E471."""
        tensor = archive.value
        assert isinstance(tensor, TensorRef)
        mine = self.chunks.get(name)
        if mine is None:
            self.claim(name, self.path_of(name))
            mine = self.chunks[name] = []
            self.described[name] = _described(tensor.storage.dtype, whole, mine)
        path, file = self.file(rank, name)
        number, start, size = file.add(archive)
        self.places.append((name, _index(self.entry_name(name), offset, len(mine)), _stored(path, start, size)))
        mine.append(_record("ChunkStorageMetadata", {"offsets": Size(offset), "sizes": Size(tensor.shape)}))
        return number

    def claim(self, name: str, steps: tuple[Step, ...]) -> None:
        if name in self.paths:
            fail(
                "E471",
                f"two values of the target would be called `{name}`",
                Label(METADATA, where=name),
                remedy="another `prefix` or `states` of dcp(...) keeps them apart",
            )
        self.paths[name] = steps

    def path_of(self, name: str) -> tuple[Step, ...]:
        """The path of a name in nested dicts: prefix, then name.

        A tensor's name is one step, with its dots.
        """
        if name.startswith(self.states):
            owner, state = self.split(name.removeprefix(self.states))
            steps = self.within("state", owner, state)
        else:
            steps = (*_split(self.prefix), name.removeprefix(self.prefix))
        return steps if ".".join(map(str, steps)) == name else (name,)

    def split(self, text: str) -> tuple[str, str]:
        """Split a parameter's name and a state's: both can have dots."""
        at = len(text)
        while (at := text.rfind(".", 0, at)) > 0:
            if text[:at] in self.owners:
                return text[:at], text[at + 1 :]
        owner, _, state = text.rpartition(".")
        return owner, state

    def within(self, *steps: Step) -> tuple[Step, ...]:
        """The path in the optimizer's dict: one key if flat."""
        top = _split(self.states)[:-1]
        return (*top, ".".join(map(str, steps))) if self.is_flat else (*top, *steps)

    def empty(self) -> None:
        for name, one in empty_tensors(self.source.state, self.source.root).items():
            made = TensorRef(StorageRef("0", one.dtype, 0), 0, one.shape, strides(one.shape))
            self.chunk(0, self.prefix + name, (0,) * len(one.shape), Archive(made), one.shape)
            for state, dtype in one.states.items() if self.has_states else ():
                made = TensorRef(StorageRef("0", dtype, 0), 0, one.shape, strides(one.shape))
                self.chunk(0, f"{self.states}{name}.{state}", (0,) * len(one.shape), Archive(made), one.shape)
            for state, number in one.numbers.items() if self.has_states else ():
                if name not in self.source.state.scalars.get(state, {}):
                    self.number(name, state, number)

    def numbers(self) -> None:
        """Write numbers of parameters: Adam's `step` as a tensor without dims."""
        for state, values in self.source.state.scalars.items():
            for name, value in values.items():
                self.number(name, state, value)

    def number(self, name: str, state: str, value: object) -> None:
        one = _tensor_of(value) if state == "step" and counts_in_tensors(self.group_of.get(name)) else value
        if isinstance(one, Scalar):
            made = TensorRef(StorageRef("0", one.dtype, prod(one.shape)), 0, one.shape, strides(one.shape))
            entry = f"{self.states}{name}.{state}"
            self.chunk(0, entry, (0,) * len(one.shape), Archive(made, {"0": one.data}), one.shape)
        else:
            self.value(self.within("state", name, state), value)

    @cached_property
    def group_of(self) -> dict[str, ParameterGroup]:
        return {name: group for group in self.source.state.groups for name in group.every}

    def other_states(self) -> None:
        """Write states that are neither one value per element nor a number."""
        for name, held in self.others.items():
            for steps, value in leaves((), held) if name in self.owners else ():
                self.value(self.within("state", name, *steps), value)

    @property
    def others(self) -> dict[str, dict[object, object]]:
        """These states by parameter; none without an optimizer."""
        held = self.source.state.blobs.get(OTHERS) if self.has_states else None
        return {str(name): states for name, states in held.items()} if isinstance(held, dict) else {}

    # ---- values that are no tensors of the model
    # -----------------------------------------------------------------------

    def groups(self) -> None:
        if not self.has_states:
            return
        for number, group in enumerate(self.source.state.groups):
            every = group.every
            said = completed(self.source, self.structure, group)
            for owner in every if self.is_flat else (number,):
                for key, value in said.items():
                    self.value(self.within("param_groups", owner, key), value)
            if not self.is_flat:
                called = wrapped_of(self.source)
                self.value(self.within("param_groups", number, "params"), [called.listed(name) for name in every])

    def value(self, steps: tuple[Step, ...], value: object) -> None:
        name = ".".join(map(str, steps))
        storages = Storages(self.lying)
        made = storages.value(value)
        path, file = self.file(0, name)
        if isinstance(made, TensorRef):
            self.claim(name, steps)
            self.chunks[name] = []
            self.described[name] = _described(made.storage.dtype, made.shape, self.chunks[name])
            number = self.chunk(0, name, (0,) * len(made.shape), Archive(made), made.shape)
        else:
            self.claim(name, steps)
            number, start, size = file.add(Archive(made))
            self.described[name] = _record("BytesStorageMetadata", None)
            self.places.append((name, _index(self.entry_name(name), None, None), _stored(path, start, size)))
        file.carried += [evolve(one, storage=f"{number}:{one.storage}") for one in storages.carried]

    def values_of_run(self) -> None:
        """Write a run's other values, which torch.distributed.checkpoint ignores."""
        self.keep(self.source.state.blobs)

    def keep(self, values: Mapping[str, object]) -> None:
        """Values that no state dict has a place for."""
        said = self.source.state
        blobs = {key: value for key, value in values.items() if key not in (EMPTY, META, OTHERS)}
        if blobs:
            self.value(ENVELOPE, {"framework": said.framework, "version": said.version, "blobs": encode(blobs)})

    def planner(self) -> dict[str, tuple[Step, ...]] | None:
        """The paths of names in nested dicts and lists."""
        return dict(self.paths)

    def metadata(self, path: str = METADATA) -> bytes:
        """A file that describes the others of its folder."""
        mine = {name for name in self.described if f"{self.home(name)}{METADATA}" == path}
        paths = self.planner()
        return dumps(
            _record(
                "Metadata",
                {
                    "state_dict_metadata": {
                        self.entry_name(name): one for name, one in self.described.items() if name in mine
                    },
                    "planner_data": paths
                    and {
                        self.entry_name(name): self.entry_steps(name, steps)
                        for name, steps in paths.items()
                        if name in mine
                    },
                    "storage_data": {index: place for name, index, place in self.places if name in mine},
                    "storage_meta": None,
                    "version": "1.0.0",
                },
            )
        )


# ---- records of torch.distributed.checkpoint ---------------------------------------------------------------------------


def _record(name: str, state: object, module: str = "metadata") -> PickledCall:
    return PickledCall(Global(f"torch.distributed.checkpoint.{module}", name), new=True, state=state)


def _index(name: str, offset: Shape | None, number: int | None) -> PickledCall:
    state: dict[str, object] = {"fqn": name, "index": number}
    return _record("MetadataIndex", state if offset is None else {**state, "offset": Size(offset)})


def _stored(path: str, start: int, size: int) -> PickledCall:
    return _record(
        "_StorageInfo", {"relative_path": path.rpartition("/")[2], "offset": start, "length": size}, "filesystem"
    )


def _described(dtype: str, shape: Shape, chunks: list[object]) -> PickledCall:
    # A call and no state: torch before 2.4 has another enum of memory formats in the state.
    properties = PickledCall(Global("torch.distributed.checkpoint.metadata", "TensorProperties"), (TorchDType(dtype),))
    return _record("TensorStorageMetadata", {"properties": properties, "size": Size(shape), "chunks": chunks})


# ---- helpers -----------------------------------------------------------------------------------------------------------


def address(target: StoredTensor) -> tuple[str, Shape]:
    """Name and begin of a chunk, from its key.

    The last steps of the key are numbers, one per dim.
    """
    name, offset = target.key[: len(target.key) - len(target.shape)], target.key[len(target.key) - len(target.shape) :]
    begin = tuple(step for step in offset if isinstance(step, int))
    if len(begin) != len(offset) or not name:
        fail("E471", f"dcp() has no place for {key_text(target.key)}", Label(METADATA, where=key_text(target.key)))
    return "/".join(map(str, name)), begin


def whole_shapes(targets: tuple[StoredTensor, ...]) -> dict[str, Shape]:
    """Of each tensor: as far as its chunks reach."""
    out: dict[str, Shape] = {}
    for target in targets:
        name, begin = address(target)
        ends = tuple(a + n for a, n in zip(begin, target.shape, strict=True))
        out[name] = tuple(map(max, out.get(name, ends), ends)) if ends else ()
    return out


def _split(prefix: str) -> tuple[Step, ...]:
    """ "optim.state." as steps."""
    return tuple(step for step in prefix.split(".") if step)


def _tensor_of(value: object) -> object:
    """A step count as torch keeps it: f32 without dims."""
    number = number_of(value)
    if isinstance(value, Scalar) and value.shape == ():
        return value
    if isinstance(number, int | float) and not isinstance(number, bool):
        for dtype, form in (("f32", "<f"), ("f64", "<d")):
            try:
                data = struct.pack(form, number)
            except OverflowError:
                continue
            if struct.unpack(form, data)[0] == number:
                return Scalar(dtype, (), data)
    return value


def leaves(steps: tuple[Step, ...], value: object) -> Iterator[tuple[tuple[Step, ...], object]]:
    """The leaves of nested dicts, as torch.distributed.checkpoint flattens them.

    A list is flattened if it has dicts or tensors in it.
    """
    if isinstance(value, Mapping) and value and all(type(key) in (str, int) for key in value):
        for key, inner in value.items():
            yield from leaves((*steps, key), inner)
    elif isinstance(value, list) and any(_has_parts(one) for one in value):
        for number, inner in enumerate(value):
            yield from leaves((*steps, number), inner)
    elif steps:
        yield steps, value


def _has_parts(value: object) -> bool:
    if type(value) in LEAVES:
        return False
    return isinstance(value, TensorRef | Mapping) or (isinstance(value, list) and any(map(_has_parts, value)))
