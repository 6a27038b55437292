"""A target's files under construction.

Targets by tensor, and values from the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import Extent, FlatBuffer, Key, NamedTensor, Plain, Scalar, StoredTensor, Structure, TensorRef
from ucpl.extents.pipeline import Pipeline
from ucpl.files.carrying import Place, Storages, by_place
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.pickles import unsafe_globals
from ucpl.files.scalars import number_of
from ucpl.files.values import Empty, Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.config import blobs_of, regenerated
from ucpl.formats.deepspeed.module import BLOB as LEFT_OUT
from ucpl.formats.deepspeed.module import LeftOut
from ucpl.formats.deepspeed.names import KNOWN_GLOBALS, is_apart, is_of_expert, layer_number
from ucpl.formats.run_steps import STEPS, steps_of
from ucpl.records import mutable
from ucpl.registry import format_named

FORMAT_VERSION = "0.19.8"  # the release whose form is written

# Settings that are numbers, and shape the files: a spec's `framework deepspeed(...)` may say anything.
_NUMBERS = (
    "stage", "dp", "tp", "pp", "ep", "files", "alignment", "sub_group_size", "round_robin", "elastic", "bf16", "fp16",
    "bf16_optimizer", "masters", "fused",
)  # fmt: skip


def check_numbers(settings: Mapping[str, Plain], needed: Sequence[str] = ()) -> None:
    """Check that the settings of the files are whole numbers, and complete.

    Raises: UcplError E471.
    """
    for name in _NUMBERS:
        value = settings.get(name)
        if value is None and name in needed:
            _reject(name, "is not set", f"framework deepspeed({name} = ...)")
        if value is not None and (not isinstance(value, int) or not 0 <= value < 1 << 62):
            _reject(name, "is no whole number", f"{name} = {value!r}")


def _reject(name: str, what: str, said: str) -> NoReturn:
    fail(
        "E471",
        f"`{name}` of the target {what}, and DeepSpeed's files are shaped by it",
        Label("<target>", where=said),
        remedy=f"Say a number in the layout: framework deepspeed({name} = 1).",
    )


@mutable
class FileBuilder:
    """One file under construction."""

    path: str
    storages: Storages
    storage_of: dict[int, str] = field(factory=dict)


Made = list[tuple[FileBuilder, object]]  # files, each with its value tree


@mutable
class StepWriter:
    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    stage: int
    dp: int
    settings: dict[str, Plain]
    index: dict[tuple[str, tuple[str, ...]], int]  # by file and key, whose numbers are texts
    below: dict[tuple[str, tuple[str, ...]], dict[str, int]]  # (file, key without its last step) -> state -> target
    carried: dict[Place, Extent]
    config: dict[object, object]
    names: list[str]  # the module's, in its order
    kinds: dict[str, NamedTensor]
    empty: dict[str, Empty]
    left_out: dict[str, LeftOut]
    hypers: list[dict[str, object]]  # by group of the structure
    listed: list[tuple[str, ...]]  # the parameters that the optimizer has in each group, frozen ones, too
    here: dict[str, int] = field(factory=dict)  # coordinates of the rank whose file is being made
    flats: list[FlatBuffer] = field(factory=list)  # that rank's, by bucket
    used: set[int] = field(factory=set)

    @classmethod
    def of(cls, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint) -> StepWriter:
        settings = dict(structure.settings)
        check_numbers(settings, ("stage", "dp"))
        blobs, groups = blobs_of(source), source.state.groups
        index: dict[tuple[str, tuple[str, ...]], int] = {}
        below: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
        for i, target in enumerate(targets):
            key = text_of(target.key)
            index[target.file, key] = i
            if key:
                below.setdefault((target.file, key[:-1]), {})[key[-1]] = i
        kinds = {tensor.name: tensor for tensor in structure.tensors}
        empty = _empty(blobs.find("empty_tensors"))
        extra = blobs.find("module_extra")
        left_out = _left_out(blobs.find(LEFT_OUT))
        known = {
            **kinds,
            **structure.aliases,
            **empty,
            **left_out,
            **(dict(extra.named()) if extra is not None else {}),
        }
        names = blobs.find("module_names")
        stated = [name for name in names.texts() if name in known] if names is not None else []
        return cls(
            structure=structure,
            targets=targets,
            source=source,
            stage=int(settings["stage"] or 0),
            dp=int(settings["dp"] or 1),
            settings=settings,
            index=index,
            below=below,
            carried=by_place(source.carried_extents.values()),
            config=regenerated(blobs.find("ds_config"), settings),
            names=list(dict.fromkeys((*_with_new(stated, kinds), *known))),
            kinds=kinds,
            empty=empty,
            left_out={name: one for name, one in left_out.items() if name not in kinds},
            hypers=[group.hyper for group in groups],
            listed=[tuple(name for name in group.every if name in kinds or name in empty) for group in groups],
        )

    def file(self, path: str) -> FileBuilder:
        """A file to be made, nothing in it yet."""
        return FileBuilder(path, Storages(self.carried))

    @property
    def degree(self) -> int:
        """Tensor-parallel ranks, each with files of its own."""
        return int(self.settings.get("tp") or 1)

    @property
    def stages(self) -> int:
        """Pipeline stages, each with files of its own."""
        return int(self.settings.get("pp") or 1)

    @property
    def tp(self) -> int:
        return self.here["tp"]

    @property
    def has_layers(self) -> bool:
        """True if weights are in files of layers, for any source."""
        return any(is_apart(t.file) and not is_of_expert(t.file) for t in self.targets)

    @property
    def pipeline(self) -> Pipeline | None:
        """The source's layers, where the target has files of layers."""
        return self.source.state.parallel.pipeline if self.has_layers else None

    @property
    def files(self) -> int:
        """Files of model states of one model-parallel rank."""
        number = format_named(self.structure.framework).files_of_callers(self.structure.settings)
        return max(number, 1)

    def is_on_stage(self, file: FileBuilder, name: str) -> bool:
        """Test whether the current file's rank holds a tensor of the module."""
        if self.stages == 1 or (file.path, ("module", name)) in self.index:
            return True
        number, layers = layer_number(name), self.source.state.parallel.pipeline
        if layers is None or number is None or number >= len(layers.layers) or name in self.kinds:
            return False
        return layers.stage(number) == self.here["pp"]  # it has no elements, or is no tensor

    def of_stage(self) -> set[str]:
        """Tensors in files of layers on the current file's stage."""
        ranks = self.dp * self.degree  # of a stage
        return {t.label for t in self.targets if t.rank // ranks == self.here["pp"] and is_apart(t.file)}

    def numbered(self, file: FileBuilder) -> set[str] | None:
        """Without ZeRO, the parameters that a stage's optimizer numbers; None: all.

        They are those of its layers, and its copies of tied ones, which have states of their own.
        """
        if self.stages == 1:
            return None
        flat = {name for one in self.flats for name in one.names}
        return flat | self.of_stage() | {t.label for t in self.targets if t.file == file.path and t.state != "weight"}

    def is_numbered(self, file: FileBuilder, here: set[str] | None, name: str) -> bool:
        """Test whether the optimizer of a file's stage numbers a parameter.

        here: those that it numbers, with elements.
        """
        return here is None or name in here or (name in self.empty and self.is_on_stage(file, name))

    def groups_numbered(self) -> list[tuple[str, ...]]:
        """Without ZeRO, the parameters of each group that have a number.

        torch's optimizer numbers frozen ones, too; engines with masters take them out.
        """
        if self.settings.get("masters"):
            return [members for _, members in self.structure.groups]
        return self.listed

    def turn_to(self, mp: int, rank: int) -> None:
        """Turn to the files of one rank."""
        experts, ep = self.source.state.parallel.experts, int(self.settings.get("ep") or 1)
        edp = int(self.settings.get("edp") or self.dp // ep)
        place = rank  # among those that experts are dealt over: the dp ranks of a tp coordinate, or all of a stage
        if edp * ep == self.dp * self.degree:
            place = rank * self.degree + mp % self.degree
        if experts is not None and experts.is_data_first:
            expert = {"ep": place // edp, "edp": place % edp}
        else:
            expert = {"edp": place // ep, "ep": place % ep}
        self.here = {"pp": mp // self.degree, "tp": mp % self.degree, "dp": rank, **expert}
        found: dict[int, FlatBuffer] = {}
        for flat in self.structure.flats:
            if all(self.here.get(axis, place) == place for axis, place in flat.coordinates.items()):
                found.setdefault(flat.bucket, flat)
        self.flats = [found[bucket] for bucket in sorted(found)]

    def blob(self, name: str, default: object = None) -> object:
        """A value that the source carries under a name."""
        return self.source.state.blobs.get(name, default)

    @property
    def folder(self) -> str:
        """The step's folder, if neither call nor source names it."""
        return self.source.tag or f"global_step{steps_of(self.source.state) or 0}"

    def counters(self) -> dict[object, object]:
        """The run's counters.

        DeepSpeed computes samples that no file states from the steps and the job's batch.
        """
        steps = steps_of(self.source.state) or 0
        samples = {} if steps and "global_samples" not in self.source.state.blobs else {"global_samples": 0}
        begun = {"skipped_steps": 0, STEPS: steps, **samples}
        return {key: self.blob(key, value) for key, value in begun.items()}

    def tensor(self, file: FileBuilder, key: Key, requires_grad: bool = False) -> TensorRef | None:
        """The tensor that a target fills, or None."""
        i = self.index.get((file.path, text_of(key)))
        if i is None:
            return None
        self.used.add(i)
        target = self.targets[i]
        made = file.storages.tensor(target.dtype, target.shape, requires_grad)
        if target.numel == 0:
            return made
        if target.shares is not None and self.targets[target.shares].file == file.path:
            owner = target.shares
            if owner not in file.storage_of:
                self.tensor(file, self.targets[owner].key)
            if owner not in file.storage_of:
                where = Label(file.path, where="/".join(text_of(self.targets[owner].key)))
                fail("E351", "two stored tensors of the plan have one name", where, remedy="make the plan anew")
            storage = file.storage_of[owner]
            made = TensorRef(
                type(made.storage)(storage, target.dtype, target.numel), 0, made.shape, made.stride, requires_grad
            )
        file.storage_of[i] = made.storage.name
        return made

    def scalar(self, file: FileBuilder, name: str, members: tuple[str, ...]) -> object:
        """One number for all members, in its original form.

        Raises: UcplError E470.
        """
        kept, begun = self.source.state.scalars[name], self.source.state.initial_scalars.get(name, frozenset())
        found = [(m, kept[m]) for m in sorted(members, key=lambda m: m in begun) if m in kept]
        if not found:
            return None
        first, value = found[0]
        for member, other in found[1:]:
            if other != value and member not in begun:
                fail(
                    "E470",
                    f"{name} is {number_of(value)} for {first} and {number_of(other)} for {member}, of one flat buffer",
                    Label(file.path, where=name),
                    remedy=_remedy(name),
                )
        if not isinstance(value, Scalar):
            return value
        extent = self.source.scalar_extents.get(name, {}).get(first)
        # Never one storage for two: optimizers count in place.
        return file.storages.extent(extent) if extent is not None else number_of(value)

    def saved(self, flat: FlatBuffer) -> FlatBuffer:
        """A flat buffer by names of the rank's module.

        Tensors that are one tensor there are one member.
        """
        experts = self.source.state.parallel.experts
        one = flat if experts is None else auto_ep.together(flat, experts, int(self.settings.get("ep") or 1))
        return evolve(one, members=tuple((self.live(name), shape) for name, shape in one.members))

    def tensors_in(self, flat: FlatBuffer) -> tuple[str, ...]:
        """The model's tensors in a flat buffer; a member can be several."""
        experts = self.source.state.parallel.experts
        if experts is None or not experts.is_fused:
            return flat.names
        ep = int(self.settings.get("ep") or 1)
        here = [n for n in experts.of if n in self.kinds and experts.rank(n, ep) == self.here["ep"]]
        fused: dict[str, list[str]] = {}
        for name in here:
            fused.setdefault(experts.of[name].fused, []).append(name)
        return tuple(name for member in flat.names for name in fused.get(member, [member]))

    def live(self, name: str) -> str:
        """A tensor's name in the module of a rank that holds it."""
        experts = self.source.state.parallel.experts
        if experts is None or name not in experts.of:
            return name
        one = experts.of[name]
        if one.is_fused:
            return one.fused
        return f"{one.module}{one.number % (one.count // int(self.settings.get('ep') or 1))}.{one.inner}"


def _with_new(stated: Sequence[str], kinds: Mapping[str, NamedTensor]) -> list[str]:
    """The module's names, with new tensors in the model's order."""
    behind: dict[str | None, list[str]] = {name: [] for name in (None, *stated)}
    last = None
    for name in kinds if stated else ():
        if name in behind:
            last = name
        else:
            behind[last].append(name)
    return [name for known, new in behind.items() for name in ((known, *new) if known is not None else new)]


def skeleton_of(folder: str, latest: str, files: Made) -> Skeleton:
    """A target of these files.

    latest: the small text next to the step's folder that names it.
    """
    unsafe = {name for _, value in files for name in unsafe_globals(value)} - KNOWN_GLOBALS
    return Skeleton(
        folder=folder,
        files=tuple(
            SkeletonFile(path=file.path, value=value, storage_of=file.storage_of, carried=tuple(file.storages.carried))
            for file, value in files
        ),
        texts={latest: folder},
        unsafe_globals=tuple(sorted(unsafe)),
    )


def _empty(noted: Value | None) -> dict[str, Empty]:
    return {name: Empty.of(one) for name, one in noted.named()} if noted is not None else {}


def _left_out(noted: Value | None) -> dict[str, LeftOut]:
    return {name: LeftOut.of(one) for name, one in noted.named()} if noted is not None else {}


def text_of(key: Key) -> tuple[str, ...]:
    """A key with its numbers as texts."""
    return tuple(map(str, key))


def _remedy(number: str) -> str:
    """The remedy for a number that differs within a flat buffer."""
    if number == "step":
        return "put parameters with another step into a group of their own"
    return (
        f"a rank's flat buffer has one {number} in all: --drop {number} leaves it out, where the optimizer computes it anew;"
        " plain(), dcp() and torch_file() keep one for each parameter"
    )
