"""Data gathered while a step's files are read, and their Checkpoint."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import (
    Counted,
    Extent,
    FlatBuffer,
    Key,
    NamedTensor,
    ParameterGroup,
    PickledCall,
    Setting,
    Sharding,
    TensorRef,
    TrainState,
    key_text,
)
from ucpl.extents.account import NotRead
from ucpl.extents.parallel_facts import CarriedByRank, Experts, ParallelFacts
from ucpl.extents.pipeline import Pipeline
from ucpl.files.carrying import lifted, marks_of
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import tensors_of
from ucpl.files.scalars import is_counted, is_step
from ucpl.files.skipping import skips
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import Mark, hypers_of, unknown_in, unknown_keys, unlike
from ucpl.files.values import Value, kind_text
from ucpl.formats.deepspeed.auto_ep import unknown_of
from ucpl.formats.deepspeed.names import OWNED, RUN_KEYS, is_apart, is_of_expert, layer_place, place_in_run, state_named
from ucpl.formats.deepspeed.order import Shape
from ucpl.records import frozen, mutable


@frozen
class StepPlace:
    """The path that the user named, and the step's folder."""

    top: Path
    root: Path
    tag: str


@frozen(eq=False)
class StepFacts:
    """Facts of the complete model, from all files."""

    tensors: tuple[NamedTensor, ...]
    aliases: dict[str, str]
    callers: CarriedByRank
    shardings: dict[str, Sharding] = field(factory=dict)
    local_shapes: dict[str, tuple[Shape, ...]] = field(factory=dict)
    pipeline: Pipeline | None = None
    experts: Experts | None = None


@mutable(eq=False)
class Gathered:
    """The data of one step.

    Places of tensors, states of parameters, and other values.
    """

    payload: dict[tuple[str, Key], Extent] = field(factory=dict)
    consumed: set[tuple[str, Key]] = field(factory=set)  # scalars and placeholders: neither payload nor carried
    states: dict[str, dict[str, None]] = field(factory=dict)  # parameter -> its states, in order
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)  # state -> parameter -> value
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    settings: dict[str, Setting] = field(factory=dict)
    blobs: dict[str, object] = field(factory=dict)
    remarks: list[str] = field(factory=list)
    not_read: list[NotRead] = field(factory=list)
    unstored: list[str] = field(factory=list)  # names in the module without data in any file
    lacking: tuple[str, ...] = ()  # missing optimizer shards, if all of them are missing
    groups: list[ParameterGroup] = field(factory=list)
    stated: list[FlatBuffer] = field(factory=list)
    counted: set[str] = field(factory=set)  # states that are one number of a parameter, whatever its shape
    vocabulary: dict[str, int] = field(factory=dict)  # tensor -> words: rows behind them are padding
    of_empty: dict[str, dict[str, object]] = field(factory=dict)  # parameter without elements -> its states and numbers
    numbers: dict[tuple[str, str], int] = field(
        factory=dict
    )  # file of an optimizer without ZeRO, parameter -> its number

    def apart(self) -> Gathered:
        """A copy with its own groups, flats and remarks."""
        return evolve(self, groups=[], stated=[], remarks=[])

    def set(self, name: str, value: int | str, origin: str) -> None:
        self.settings[name] = Setting(value, origin)

    def number(self, name: str) -> int:
        """A setting that is a whole number."""
        return int(self.settings[name].value or 0)

    def remark(self, *texts: str) -> None:
        self.remarks.extend(text for text in texts if text not in self.remarks)

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def keep(self, part: TorchFile, key: Key, tensor: TensorRef) -> None:
        """Keep a tensor as payload, with or without elements.

        A rank that holds padding alone saves masters without elements, and layouts name them, too.
        """
        self.payload[part.file, key] = part.extent(key, tensor)

    def keep_where_full(self, part: TorchFile, key: Key, tensor: TensorRef) -> None:
        """Payload, unless it has no elements."""
        if 0 in tensor.shape:
            self.consumed.add((part.file, key))
        else:
            self.keep(part, key, tensor)

    def has(self, members: tuple[str, ...], state: str) -> None:
        for member in members:
            self.states.setdefault(member, {})[state] = None

    # ---- states: one value for each element, or one for the tensor ---------------------------------------------------

    def state(self, part: TorchFile, states: Value, shapes: tuple[Shape, ...], members: tuple[str, ...]) -> None:
        """Read the states of one flat buffer, or of one parameter.

        A state is a tensor of one of `shapes`, or a number.
        """
        for said, value in states.named():
            name, held = state_named(said), value.held
            if skips(name):
                self.consumed.update((part.file, (*value.key, *step)) for step, _ in tensors_of(held, part.file))
                continue
            if isinstance(held, TensorRef) and held.shape in shapes and not self.is_number(name, held):
                self.keep_state(part, value.key, held, name)
                self.has(members, name)
            elif isinstance(held, TensorRef) and prod(held.shape) == 1:
                self.consumed.add((part.file, value.key))
                self.scalar(value, name, part.read_scalar(value.key, held), members)
                extent = part.extent(value.key, held)
                kept = self.scalar_extents.setdefault(name, {})
                for member in members:
                    kept.setdefault(member, extent)
            elif is_counted(held):
                self.scalar(value, name, held, members)
            else:
                what = f"of shape {list(held.shape)}" if isinstance(held, TensorRef) else kind_text(held)
                fail(
                    "E460",
                    f"{part.file}: the state {name} is {what}: neither one value for each of {shapes[0]} elements nor a number",
                    Label(str(part.path), where=key_text(value.key)),
                )

    def is_number(self, name: str, tensor: TensorRef) -> bool:
        """Test whether a state of a parameter's shape is one number."""
        return name in self.counted or is_step(name, tensor.shape)

    def keep_state(self, part: TorchFile, key: Key, tensor: TensorRef, name: str) -> None:
        """Keep a state as payload under its name in ucpl."""
        here = (*key[:-1], name) if key[-1] != name else key
        self.payload[part.file, here] = part.extent(key, tensor)
        if here != key:
            self.consumed.add((part.file, key))

    def scalar(self, where: Value, name: str, value: Counted, members: tuple[str, ...]) -> None:
        kept = self.scalars.setdefault(name, {})
        for member in members:
            if member in kept and kept[member] != value:
                if name != "step":
                    fail(
                        "E460",
                        f"each rank has a number {name} of its own for {member}",
                        Label(str(where.path), where=key_text(where.key)),
                        remedy="It is of a rank's part (Adafactor's RMS), which no other degree has. Begin from the weights"
                        " (model.safetensors next to the shards, zero_to_fp32.py), with moments at zero.",
                    )
                fail(
                    "E456",
                    f"ranks do not agree on {name} of {member}",
                    Label(str(where.path), where=key_text(where.key)),
                    remedy="They are of different steps: copy all files of one step again.",
                )
            kept[member] = value

    # ---- the end ---------------------------------------------------------------------------------------------------

    def checkpoint(
        self, place: StepPlace, framework: str, files: tuple[TorchFile, ...], facts: StepFacts
    ) -> Checkpoint:
        """Make the Checkpoint.

        files: all of the step; the first one has the common values.
        """
        version = Value.of(files[0]).find("ds_version")
        said = version.held if version is not None and isinstance(version.held, str) else ""
        empty = _empty_in(self.blobs)
        known = {tensor.name for tensor in facts.tensors} | {*empty}
        if held := {name: one for name, one in self.of_empty.items() if name in empty}:
            noted = {name: dict(one) for name, one in empty.items() if isinstance(one, dict)}
            self.blobs["empty_tensors"] = {name: one | held.get(name, {}) for name, one in noted.items()}
        tensors: dict[int, tuple[tuple[Key, TensorRef], ...]] = {}  # by value, which equal files share
        for part in files:
            if id(part.value) not in tensors:
                tensors[id(part.value)] = tuple(tensors_of(part.value, part.file))
        made = Checkpoint(
            top=place.top,
            root=place.root,
            tag=place.tag,
            format=framework,
            version=said,
            extents=self.payload,
            carried_extents={
                where: part.extent(key, tensor)
                for part in files
                for key, tensor in tensors[id(part.value)]
                if (where := (part.file, key)) not in self.payload and where not in self.consumed
            },
            state=TrainState(
                framework=framework,
                version=said,
                tensors=facts.tensors,
                aliases=facts.aliases,
                settings=self.settings,
                groups=tuple(_with_frozen(group, known) for group in self.groups),
                scalars=self.scalars,
                blobs=self.blobs,
                carried=facts.callers.of[0],
                parallel=ParallelFacts(
                    pipeline=facts.pipeline,
                    experts=facts.experts,
                    shardings=facts.shardings,
                    local_shapes=facts.local_shapes,
                    vocabulary=self.vocabulary,
                    flats=tuple(self.stated),
                    carried_by_rank=facts.callers,
                ),
            ),
            files=tuple(part.file for part in files),
            remarks=tuple(self.remarks),
            not_read=(*self.not_read, *(one for part in files for one in (*unknown_in(part), *unknown_of(part)))),
            missing_tensors=tuple(self.unstored),
            missing_files=self.lacking,
            scalar_extents=self.scalar_extents,
        )
        names = {*(tensor.name for tensor in facts.tensors), *facts.aliases}
        stated = {one.name for one in made.not_read}
        copies = (one for one in unlike_copies(files, names, marks_of(made)) if one.name not in stated)
        return evolve(made, not_read=(*made.not_read, *copies))


def callers_of(files: tuple[TorchFile, ...], pp: int = 1, tp: int = 1) -> CarriedByRank:
    """client_state of each rank's model states: the keys that are not DeepSpeed's."""
    states = (
        {key: lifted(value, part.file) for key, value in Value.of(part).mapping().items() if key not in OWNED}
        for part in files
    )
    return CarriedByRank(tuple(states), pp, tp)


def _empty_in(blobs: Mapping[str, object]) -> Mapping[str, object]:
    """Tensors without elements by name."""
    noted = blobs.get("empty_tensors")
    return noted if isinstance(noted, dict) else {}


def _with_frozen(group: ParameterGroup, known: set[str]) -> ParameterGroup:
    """A group with all its names, if torch's `param_names` state them.

    ZeRO's shards number buffers, so that nothing else names the frozen parameters of a group.
    """
    stated = group.hyper.get("param_names")
    if group.listed or not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        return group
    names = [name for name in stated if name in known]
    is_all = set(group.members) < set(names) and [n for n in names if n in group.members] == list(group.members)
    return evolve(group, listed=tuple(names)) if is_all and len(names) == len(stated) else group


# ---- values that each rank's file repeats ----------------------------------------------------------------------------


_DIMENSIONS = "checkpoint_parallel_dimensions"
_INFO, _LAYERS = "universal_checkpoint_info", "ds_autoep_layers"  # AutoEP's layers name the rank that saves them
_OF_ALL = (*RUN_KEYS, "ds_config", "ds_version", _DIMENSIONS)
_OF_RANK = ("param_shapes", "frozen_param_shapes", "shared_params")  # alike on data-parallel ranks alone
_OF_SHARDS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage", "ds_version")
_BASES = ("base_optimizer_state", "optimizer_state_dict")
_SLICES = "param_slice_mappings"
_FRAGMENT = ("numel", "start")  # of fragment_address
_DEGREES = ("pp_degree", "tp_degree")


def unlike_copies(files: tuple[TorchFile, ...], known: Container[str], mark: Mark) -> Iterator[NotRead]:
    """Values that differ from the first rank's, and a rank's own keys.

    known: all names of the model. mark: an equal value for equal values, tensors by their bytes (carrying.marks_of).
    """
    models = [one for one in files if _has(one, "module") and not is_apart(one.file)]
    shards = [one for one in files if _shard_of(one)]
    yield from unlike(((one, "", _fields(one.value, _OF_ALL) | _info(one.value)) for one in models), mark)
    for same_rank in _by_model_rank(models):
        yield from unlike(((one, "", _fields(one.value, _OF_RANK)) for one in same_rank), mark)
    yield from unlike(((one, "optimizer_state_dict/", _fields(_shard_of(one), _OF_SHARDS)) for one in shards), mark)
    configs = [
        (one, "ds_config/", _fields(one.value, ("ds_config",)).get("ds_config")) for one in (*models[:1], *shards)
    ]
    yield from unlike((one for one in configs if one[2] is not None), mark)
    infos = [(one, f"optimizer_state_dict/{_INFO}/", _info(_shard_of(one)).get(_INFO, {})) for one in shards]
    yield from unlike([*((one, "", _info(one.value).get(_INFO, {})) for one in models[:1]), *infos], mark)
    for name in _BASES:
        for same_rank in _by_model_rank([one for one in shards if name in _shard_of(one)]):
            lead = f"optimizer_state_dict/{name}/param_groups/"
            yield from unlike(((one, lead, hypers_of(_shard_of(one)[name])) for one in same_rank), mark)
    names = {name for one in models for name in _named(_fields(one.value, _OF_RANK).get("param_shapes"))}
    yield from _second_names(models, known)
    yield from unlike(((one, "module/", _no_tensors(one.value)) for one in models), mark)
    layers: dict[int, list[TorchFile]] = {}
    for one in files:
        if is_apart(one.file) and not is_of_expert(one.file):
            layers.setdefault(layer_place(one.file)[0], []).append(one)
    for of_layer in layers.values():
        yield from unlike(((one, "", _no_tensors({"module": one.value})) for one in of_layer), mark)
    for one in models:
        yield from _frozen(one, known)
        yield from unknown_keys(one.file, _fields(one.value, (_DIMENSIONS,)).get(_DIMENSIONS), _DEGREES,
                                f"{_DIMENSIONS}/", "DeepSpeed")  # fmt: skip
    for one in shards:
        yield from _slices(one, names)
    for one in files:
        yield from _groups_twice(one, mark)


def _groups_twice(part: TorchFile, mark: Mark) -> Iterator[NotRead]:
    """Hyper-parameters in a universal folder's file, which can repeat them."""
    inner = _shard_of(part)
    if _has(part, "param_groups") and "param_groups" in inner:
        read = f"{_BASES[1]}/param_groups"
        for one in unlike(((part, "", hypers_of(inner)), (part, "param_groups/", hypers_of(part.value))), mark):
            yield evolve(one, why=f"the values of {read} are read")


def _has(part: TorchFile, key: str) -> bool:
    return isinstance(part.value, dict) and key in part.value


def _shard_of(part: TorchFile) -> dict[object, object]:
    held = part.value.get("optimizer_state_dict") if isinstance(part.value, dict) else None
    return held if isinstance(held, dict) else {}


def _fields(value: object, keys: Iterable[str]) -> dict[object, object]:
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else {}


def _info(value: object) -> dict[object, object]:
    info = value.get(_INFO) if isinstance(value, dict) else None
    return {_INFO: {key: one for key, one in info.items() if key != _LAYERS}} if isinstance(info, dict) else {}


def _by_model_rank(parts: list[TorchFile]) -> Iterable[list[TorchFile]]:
    """Files of one model-parallel rank each: their names end in its number."""
    out: dict[int, list[TorchFile]] = {}
    for one in parts:
        place = place_in_run(one.file)
        out.setdefault(place.numbers[-1] if place is not None and place.numbers else 0, []).append(one)
    return out.values()


def _named(shapes: object) -> Iterator[object]:
    for group in shapes if isinstance(shapes, list) else [shapes]:
        yield from group if isinstance(group, dict) else ()


def _second_names(models: list[TorchFile], known: Container[str]) -> Iterator[NotRead]:
    """Entries of `shared_params` whose second name is no tensor of the model.

    Stages of a pipeline have their own.
    """
    for first in (same_rank[0] for same_rank in _by_model_rank(models)):
        stated = _fields(first.value, ("shared_params", "module"))
        shared, module = stated.get("shared_params"), stated.get("module")
        for name in shared if isinstance(shared, dict) else ():
            if name not in known and not (isinstance(module, dict) and name in module):
                yield NotRead(
                    f"{first.file}: shared_params/{name}", "no tensor of the model has this name", kind="value"
                )


def _frozen(part: TorchFile, known: Container[str]) -> Iterator[NotRead]:
    """Shapes and fragments of frozen parameters under names of no tensor."""
    stated = _fields(part.value, ("frozen_param_shapes", "frozen_param_fragments", "module"))
    module = stated.pop("module", None)
    for key, held in stated.items():
        for name in held if isinstance(held, dict) else ():
            if name not in known and not (isinstance(module, dict) and name in module):
                yield NotRead(f"{part.file}: {key}/{name}", "no tensor of the model has this name", kind="value")


def _no_tensors(value: object) -> dict[object, object]:
    """Values of the module that are no tensors."""
    held = _fields(value, ("module",)).get("module")
    return {k: one for k, one in held.items() if not isinstance(one, TensorRef)} if isinstance(held, dict) else {}


def _slices(part: TorchFile, names: set[object]) -> Iterator[NotRead]:
    """Entries that are no part of a parameter.

    They have another name, or more than a begin and a length.
    """
    held = _shard_of(part).get(_SLICES)
    for number, group in enumerate(held if isinstance(held, list) else ()):
        for name, fragment in group.items() if isinstance(group, dict) else ():
            lead = f"optimizer_state_dict/{_SLICES}/{number}/{name}"
            state = fragment.state if isinstance(fragment, PickledCall) else None
            if not isinstance(state, dict) or (names and name not in names):
                yield NotRead(f"{part.file}: {lead}", "it is the place of no parameter of the model", kind="value")
            else:
                yield from unknown_keys(part.file, state, _FRAGMENT, f"{lead}/", "DeepSpeed")
