"""Data gathered while a step's files are read, and their Checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
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
    Setting,
    Sharding,
    TensorRef,
    TrainState,
    key_text,
)
from ucpl.extents.account import NotRead
from ucpl.extents.experts import Experts
from ucpl.extents.parallel_facts import CarriedByRank, ParallelFacts
from ucpl.extents.pipeline import Pipeline
from ucpl.files.carrying import lifted, marks_of
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import tensors_of
from ucpl.files.scalars import is_counted, is_step
from ucpl.files.skipping import skips
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import unknown_in
from ucpl.files.values import Value, kind_text
from ucpl.formats.deepspeed.auto_ep import unknown_of
from ucpl.formats.deepspeed.names import OWNED, state_named
from ucpl.formats.deepspeed.order import Shape
from ucpl.formats.deepspeed.rank_copies import unlike_copies
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
        made = Checkpoint(
            top=place.top,
            root=place.root,
            tag=place.tag,
            format=framework,
            version=said,
            extents=self.payload,
            carried_extents={
                where: extent
                for part in files
                for extent in part.extents()
                if (where := (part.file, extent.key)) not in self.payload and where not in self.consumed
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
