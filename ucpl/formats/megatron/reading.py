"""A torch_dist folder as a checkpoint: tensors of DCP, and common.pt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import ClassVar, TypeVar

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import Counted, Extent, Key, NamedTensor, ParameterGroup, Setting, TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.carrying import lifted, mapped, strides
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import tensors_of
from ucpl.files.plain_values import decode
from ucpl.files.skipping import skips_optimizer
from ucpl.files.texts import read_small
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.unknown import unknown_keys
from ucpl.files.values import Value
from ucpl.formats.dcp.cells import placed
from ucpl.formats.dcp.chunks import Chunks
from ucpl.formats.dcp.masters import is_rounded
from ucpl.formats.dcp.metadata import METADATA, Metadata, read_metadata
from ucpl.formats.dcp.reading import Opened
from ucpl.formats.dcp.roles import Roles
from ucpl.formats.megatron.buckets import ChunkBox, ParameterRun, RankShares, buckets_in, runs_of
from ucpl.formats.megatron.coalesced import CompleteBuffers, complete_buffers
from ucpl.formats.megatron.common_state import BACKEND_KEYS, unread_objects, unread_of
from ucpl.formats.megatron.folder import Step
from ucpl.formats.megatron.groups import STEP, DealtGroups, GroupValues, dealt, decays_norms, is_expert
from ucpl.formats.megatron.homes import Core
from ucpl.formats.megatron.legacy_arguments import has_grouped_mlp, part_own, state_of
from ucpl.formats.megatron.roles import (
    BUFFERS,
    DESCRIBES,
    MASTER,
    MASTERS,
    STATES,
    Entries,
    entries_of,
    is_of_optimizer,
    not_read_in,
    unchained,
)
from ucpl.formats.megatron.stacks import apart, is_of_a_layer
from ucpl.records import define
from ucpl.texts import json_object

__all__ = [
    "BACKEND",
    "COMMON",
    "CONTENT",
    "GIVEN",
    "INTEGRITY",
    "KEPT",
    "OBJECTS",
    "OF_ITERATION",
    "OPTIMIZER",
    "UNTRAINED",
    "VERSION",
    "are_turned",
    "opened",
]

Shape = tuple[int, ...]
_T = TypeVar("_T")
COMMON, BACKEND = "common.pt", "metadata.json"
INTEGRITY = "integrity.json"  # sums of the files, which `verify` checks and a target has anew
BACKEND_BYTES_MAX = 1 << 16
COMMON_STATE = "common_state/shard_0_1"
# Files of Megatron-Bridge in an iteration, which its loader reads: carried as they are.
OF_ITERATION = ("run_config.yaml", "train_state.pt", "modelopt_run_config.yaml")
_OF_BRIDGE = "it is Megatron-Bridge's: a target of megatron_core() has it as it is, and other targets have not"
OBJECTS = "sharded_objects"  # value of a run: `_extra_state` of modules, random states
OPTIMIZER, CONTENT = "optimizer", "content_metadata"
_SHARDING, _WITH_ENDS = "param_state_sharding_type", "fully_sharded_bucket_space"
VERSION = "checkpoint_version"
GIVEN = "given"  # key of names of values that the source lacked
UNTRAINED = "untrained"  # key of names of weights without a part in buckets
KEPT = "ucpl"  # key in common.pt of another framework's values


def opened(step: Step) -> Checkpoint:
    """Read the headers of all archives.

    Raises: UcplError E455, E460, E521, E522, E530-E533.
    """
    metadata = read_metadata(step.root)
    if skips_optimizer(*([OPTIMIZER] if any(map(is_of_optimizer, metadata.paths)) else [])):
        metadata = metadata.without(is_of_optimizer)
    metadata = unchained(metadata)
    common = _common(step.root, metadata)
    entries = entries_of(metadata, step.root)
    roles = Roles("", STATES, entries.weights, entries.states)
    dist = _Dist(step.root, metadata, roles, Chunks(step.root), common=common, entries=entries)
    made = evolve(dist.checkpoint(), own=Core(dist.registered))
    others = unread_of(common, is_trained=bool(made.state.groups), empty=dist.dealt.empty)
    backend = unknown_keys(BACKEND, _backend(step.root), BACKEND_KEYS, by="Megatron-Core")
    made = evolve(made, not_read=(*not_read_in(entries), *others, *dist.unread(), *backend))
    if dist.copied:
        shown = ", ".join(dist.copied[:3]) + (", ..." if len(dist.copied) > 3 else "")
        text = f"{len(dist.copied)} tensors have masters and moments on several ranks, and the first rank's are taken: {shown}"
        made = evolve(made, remarks=(*made.remarks, text))
    said = Value.of(common).find(KEPT)
    stacks = said.find("stacks") if said is not None else None
    if stacks is not None:
        made = apart(made, _templates(stacks, {tensor.name: tensor.shape for tensor in made.state.tensors}))
    sums = [INTEGRITY] if (step.root / INTEGRITY).is_file() else []
    files = tuple(dict.fromkeys((*made.files, common.file, BACKEND, *sums)))
    of_bridge = tuple(NotRead(name, _OF_BRIDGE) for name in OF_ITERATION if (step.root / name).is_file())
    return evolve(made, top=step.top, tag=step.tag, files=files, not_read=(*made.not_read, *of_bridge))


def _backend(root: Path) -> object:
    """The content of metadata.json; None if there is none."""
    raw = read_small(root / BACKEND, BACKEND_BYTES_MAX)
    return json_object(raw.decode("utf-8", "replace")) if raw is not None else None


def _common(root: Path, metadata: Metadata) -> TorchFile:
    """All values that are no tensors of the model.

    Common.pt, or an object. From 0.19 on it is an object among the chunks, which is removed from `metadata`. Raises:
    UcplError E400, E455, and errors of reading the file.
    """
    place = metadata.objects.get(COMMON_STATE)
    if place is None or (root / COMMON).exists():
        if place is None and not (root / COMMON).exists():
            fail(
                "E400",
                f"{root} has no {COMMON} and no `{COMMON_STATE}` in {METADATA}, as Megatron-Core 0.19 has it",
                Label(str(root / COMMON), "not there"),
                Label(str(root / METADATA), where=COMMON_STATE),
                remedy="`ucpl formats` lists the releases of Megatron-Core that are read; of one of these, the save did not"
                " end: use the iteration before",
            )
        return read_torch_file(root, COMMON)
    part = Chunks(root).archive(place)
    held = Value.of(part).items()
    if len(held) != 1:
        Value.of(part).wrong("a list of one dict")
    del metadata.objects[COMMON_STATE], metadata.paths[COMMON_STATE]
    return _named_by_place(evolve(part, value=held[0].held), place.start)


def _named_by_place(part: TorchFile, start: int) -> TorchFile:
    """One of several archives of a file, with storages named uniquely."""

    def called(name: str) -> str:
        return f"{start}:{name}"

    value = mapped(part.value, lambda t: evolve(t, storage=evolve(t.storage, name=called(t.storage.name))))
    return evolve(part, value=value, storages={called(name): one for name, one in part.storages.items()})


def _templates(said: Value, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """The original names of stacked tensors.

    Raises: UcplError E455 for names of neither a layer nor one expert.
    """
    out = {}
    for stack, template in said.named():
        text = template.text()
        pieces = text.split("{}")
        if len(pieces) > 3 or any(brace in piece for piece in pieces for brace in "{}"):
            template.wrong("a name, with {} for a layer and for an expert")
        if stack in shapes and len(shapes[stack]) < len(pieces) - 1:
            template.wrong(f"a name with {{}} for each of {len(shapes[stack])} dims at most")
        out[stack] = text
    return out


def _number(part: TorchFile, value: Value) -> Counted:
    """Of steps: a number, or a tensor of one. Raises: UcplError E455."""
    if not isinstance(value.held, TensorRef):
        return value.number()
    if prod(value.held.shape) != 1:
        value.wrong("a number, or a tensor of one element")
    return part.read_scalar(value.key, value.held)


def are_turned(found: Sequence[tuple[Shape, Shape]], arguments: Mapping[object, object]) -> bool:
    """Test whether states of experts are the transposes of weights.

    found: the shape of each, and its weight's. The first shape that is not square decides; if all are square, the
    arguments decide.
    """
    if not all(mine == _turned(whole) for mine, whole in found):
        return False
    return any(mine != whole for mine, whole in found) or has_grouped_mlp(arguments)


def _turned(dims: tuple[_T, ...]) -> tuple[_T, ...]:
    """Of shapes, strides and places, with the last two dims changed over."""
    return (*dims[:-2], *reversed(dims[-2:]))


@define(eq=False)
class _Dist(Opened):
    common: TorchFile = field(kw_only=True)
    entries: Entries = field(kw_only=True)
    dealt: DealtGroups = field(factory=DealtGroups, kw_only=True)
    registered: tuple[str, ...] = field(default=(), kw_only=True)
    copied: list[str] = field(factory=list, kw_only=True)  # moments on several ranks; one copy is used

    framework: ClassVar[str] = "megatron_core"

    def more_states(self) -> None:
        """Those in buckets, as boxes of their parameters. Raises: UcplError E533."""
        if not self.entries.buckets and not self.entries.complete:
            return
        # The first are of parameters that another optimizer of a chain trains.
        own = {*self.roles.states, *self.untrained(), *self.empty}
        names = tuple(n for n in self.roles.weights if n not in own and BUFFERS.fullmatch(n) is None)
        self.check_linear(names)
        whole = self.complete()
        shares = (
            whole.shares(self.metadata, names, self.root, self.arguments)
            if whole is not None
            else RankShares(
                self.metadata,
                names,
                buckets_in(self.entries.buckets, self.root),
                self.root,
                has_ends=self.sharding_type() == _WITH_ENDS,
            )
        )
        if whole is None:
            shares.check_states()
        pieces: dict[str, dict[Key, Extent]] = {}

        def shares_of(run: ParameterRun, entry: str) -> Iterator[tuple[ChunkBox, Extent, int]]:
            """Boxes of a run, their parts of the piece, and begins."""
            piece = self.piece(run, entry, pieces) if whole is None else whole.piece(run, entry)
            first = 0
            for box in run.boxes:
                low, high = max(run.low, first), min(run.low + piece.numel, first + box.numel)
                if low < high:
                    yield box, evolve(piece, shape=(high - low,), offset=piece.offset + low - run.low), low - first
                first += box.numel

        def agree(runs: Sequence[ParameterRun]) -> bool:
            """Test that a sample of each master, rounded, is the weight."""
            masters = ((run, run.bucket.states[name]) for run in runs for name in MASTERS if name in run.bucket.states)
            return all(
                self.is_master(box, mine, low) for run, entry in masters for box, mine, low in shares_of(run, entry)
            )

        runs, self.copied, self.registered = runs_of(shares, agree)
        found: dict[str, dict[str, dict[Key, Extent]]] = {}
        for run in runs:
            for written, entry in run.bucket.states.items():
                state = MASTER if written in MASTERS else written
                for box, mine, low in shares_of(run, entry):
                    name = f"{STATES}{(self.entries.master or MASTERS[0]) if state == MASTER else state}.{box.name}"
                    made = placed(mine, name, box.begin, box.shape, low)
                    found.setdefault(box.name, {}).setdefault(state, {}).update(made)
        for name, states in found.items():
            self.states[name] = tuple(states)
            for extents in states.values():
                self.extents |= {(METADATA, key): one for key, one in extents.items()}
                self.held[name].append(tuple(extents))

    def sharding_type(self) -> object:
        """The form of the distributed optimizer's states.

        Of a chain it is the first one's.
        """
        said = Value.of(self.common).find(OPTIMIZER)
        held = said.held if said is not None else None
        inner = [held, *held.values()] if isinstance(held, dict) else []
        return next((one[_SHARDING] for one in inner if isinstance(one, dict) and _SHARDING in one), None)

    def is_master(self, box: ChunkBox, master: Extent, low: int) -> bool:
        """Test a sample of the box's weight from `low` on.

        It is the master, rounded.
        """
        weight = self.extents.get((METADATA, (box.name, *box.begin)))
        if weight is None or weight.shape != box.shape or weight.stride != strides(box.shape):
            return True
        part = evolve(weight, shape=master.shape, stride=(1,), offset=weight.offset + low)
        return is_rounded(self.root, part, master)

    def piece(self, run: ParameterRun, entry: str, pieces: dict[str, dict[Key, Extent]]) -> Extent:
        """The chunk of a run in a bucket's tensor. Raises: UcplError E533."""
        if entry not in pieces:
            pieces[entry] = self.chunks.extents(entry, self.metadata.tensors[entry])
        piece = pieces[entry].get((entry, run.at))
        if piece is None:
            fail(
                "E533",
                f"`{entry}` has no chunk at {run.at}, and other states of its bucket have one",
                Label(str(self.root / METADATA), where=entry),
            )
        return piece

    def complete(self) -> CompleteBuffers | None:
        """The buffers that ranks saved complete, if they did."""
        if not self.entries.complete:
            return None
        places = ((name, self.metadata.objects[name]) for name in self.entries.complete)
        parts = ((name, _named_by_place(self.chunks.archive(place), place.start)) for name, place in places)
        return complete_buffers(parts, self.extents)

    def untrained(self) -> tuple[str, ...]:
        """Weights without a part in buckets, for folders of a conversion."""
        said = Value.of(self.common).find(KEPT)
        found = said.find(UNTRAINED) if said is not None else None
        return tuple(found.texts()) if found is not None else ()

    @cached_property
    def turned(self) -> frozenset[str]:
        """States that are transposed: GroupedMLP's experts of 0.13 and before."""
        runs = self.metadata.runs_of
        found = {
            entry: (runs[entry], self.metadata.tensors[self.roles.weights[name]].shape)
            for name, states in self.roles.states.items()
            if is_expert(name) and name.endswith(".weight")
            for entry in states.values()
            if entry in runs and len(runs[entry]) > 1
        }
        if not are_turned(list(found.values()), self.arguments):
            return frozenset()
        return frozenset(found)

    def whole(self, entry: str) -> Shape:
        shape = super().whole(entry)
        return _turned(shape) if entry in self.turned else shape

    def as_weight(self, entry: str, found: dict[Key, Extent]) -> dict[Key, Extent]:
        if entry not in self.turned:
            return found
        out: dict[Key, Extent] = {}
        for key, extent in found.items():
            made = (key[0], *_turned(key[1:]))
            out[made] = evolve(extent, key=made, shape=_turned(extent.shape), stride=_turned(extent.stride))
        return out

    @property
    def arguments(self) -> dict[object, object]:
        """Of the run, as far as its files say them."""
        said = Value.of(self.common).find("args")
        return (state_of(said.held) if said is not None else None) or {}

    def check_linear(self, names: tuple[str, ...]) -> None:
        """Check that no experts are in buckets in GroupedMLP's form.

        Raises: UcplError E533 if they are: there a rank's experts are one transposed matrix.
        """
        expert = next((name for name in names if is_expert(name)), None)
        if expert is None or not has_grouped_mlp(self.arguments):
            return
        fail(
            "E533",
            f"the run's arguments say moe_grouped_gemm with Megatron-Core's own modules: experts are those of GroupedMLP, whose"
            f" buckets have a rank's experts in one transposed matrix, and `{expert}` has each as a linear layer has it",
            Label(str(self.common.path), where="args"),
            Label(str(self.root / METADATA), where=expert),
            remedy="load it in such a job, and save it with --dist-ckpt-optim-fully-reshardable, or as legacy files"
            " (--ckpt-format torch): both are read, experts one by one; the weights alone are in every such folder",
        )

    def groups(self) -> tuple[ParameterGroup, ...]:
        """Raises: UcplError E455, E531."""
        if skips_optimizer():
            return ()
        shapes = {name: self.shape(name) for name in self.states}
        said = [one for part, value in self.optimizers() for one in self.groups_of(part, value)]
        norms_decay = decays_norms(self.arguments)
        self.dealt = dealt(said, shapes, self.states, self.common.path, norms_decay=norms_decay)
        for name, step in self.dealt.steps.items():
            self.scalars.setdefault(STEP, {})[name] = step
        return self.dealt.groups

    def unread(self) -> Iterator[NotRead]:
        """Unknown keys of objects for buckets and groups."""
        described = [entry for entry in self.entries.objects if DESCRIBES.fullmatch(entry) is not None]
        yield from unread_objects((entry, self.chunks.archive(self.metadata.objects[entry])) for entry in described)

    def optimizers(self) -> Iterator[tuple[TorchFile, Value]]:
        """State dicts of optimizers, each with its archive.

        There is one, or a chain of numbered ones.
        """
        stated = (self._object(entry) for entry in self.entries.of_groups)  # of those that have buckets
        common = Value.of(self.common).find(OPTIMIZER)
        chain = [common.at(key) for key in common.mapping() if isinstance(key, int)] if common is not None else []
        for held in chain:
            if _has_groups(held):  # Muon, next to an optimizer of the rest
                yield self.common, held
            else:
                yield next(stated, (self.common, held))
        if common is not None and not chain and not self.entries.of_groups:
            yield self.common, common
        yield from stated

    def _object(self, entry: str) -> tuple[TorchFile, Value]:
        place = self.metadata.objects[entry]
        part = _named_by_place(self.chunks.archive(place), place.start)
        top = Value(part.path, part.file, (entry,), part.value)
        held = top.items()
        return part, held[0] if held else top

    def groups_of(self, part: TorchFile, optimizer: Value) -> Iterator[GroupValues]:
        inner = optimizer.find(OPTIMIZER) or optimizer
        if not _has_groups(optimizer):
            return
        state = inner.find("state")
        common = state.find("common_step") if state is not None else None
        for group in inner.at("param_groups").items():
            named = {name: value for name, value in group.named() if name not in ("params", STEP)}
            hyper = {name: self.hyper_of(part, value) for name, value in named.items()}
            step = group.find(STEP) or common
            yield GroupValues(hyper, None if step is None else _number(part, step))

    def hyper_of(self, part: TorchFile, value: Value) -> object:
        """A hyper-parameter, ready to be carried with the tensors in it."""
        for step, tensor in tensors_of(value.held, part.file):
            made = part.extent((*value.key, *step), tensor)
            self.carried[part.file, made.key] = made
        return lifted(mapped(value.held, lambda t: t), part.file)

    def kind(self, name: str) -> str:
        """The kind of a tensor; without an optimizer most are parameters."""
        if BUFFERS.fullmatch(name):
            return "buffer"
        return "parameter" if not self.states or name in self.states else "frozen"

    def aliases(self) -> dict[str, str]:
        """None: a tied tensor has one name."""
        return {}

    def settings(self, tensors: tuple[NamedTensor, ...], aliases: dict[str, str]) -> dict[str, Setting]:
        found = {state for states in self.states.values() for state in states}
        return {
            "file": Setting(METADATA, "its name"),
            "stacked": Setting(int(not any(map(is_of_a_layer, self.roles.weights))), f"names in {METADATA}"),
            "masters": Setting(int("fp32" in found), f"names in {METADATA}"),
            "master": Setting(self.entries.master or "param", f"names in {METADATA}"),
        }

    def kept(self, carried: dict[object, object]) -> tuple[str, str, dict[str, object]]:
        held = {name: self.value(name) for name in self.entries.objects if not is_of_optimizer(name)}
        blobs: dict[str, object] = {OBJECTS: held} if held else {}
        part_own(carried)
        said = Value.of(self.common).find(KEPT)
        if said is None:
            return self.framework, self.version(), blobs
        more = decode(said.at("blobs").held)
        if not isinstance(more, dict) or not all(isinstance(key, str) for key in more):
            said.at("blobs").wrong("a dict whose keys are texts")
        for extent in self.common.extents():
            if extent.key[0] == KEPT:
                self.carried[self.common.file, extent.key] = extent
        lying = {key: lifted(mapped(one, lambda t: t), self.common.file) for key, one in more.items()}
        return said.at("framework").text(), said.at("version").text(), {**blobs, **lying}

    def version(self) -> str:
        value = Value.of(self.common).mapping().get(VERSION, "")
        return str(value) if isinstance(value, int | float | str) else ""

    def rest(self) -> dict[object, object]:
        """The common state without the optimizer, and without added values.

        Added values are those that a target has and its source lacks.
        """
        top = Value.of(self.common)
        said = top.find(KEPT)
        given = said.find(GIVEN) if said is not None else None
        known = {OPTIMIZER, CONTENT, KEPT, *(given.texts() if given is not None else ())}
        kept = {key: one for key, one in top.mapping().items() if key not in known}
        for extent in self.common.extents():
            if extent.key[0] in kept:
                self.carried[self.common.file, extent.key] = extent
        return {key: lifted(mapped(one, lambda t: t), self.common.file) for key, one in kept.items()}


def _has_groups(optimizer: Value) -> bool:
    return (optimizer.find(OPTIMIZER) or optimizer).find("param_groups") is not None
