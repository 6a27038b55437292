"""A torch_dist folder as a target: chunks, `.metadata`, common.pt, metadata.json.

Chunks and `.metadata` are in PyTorch's distributed format. Megatron-Core finds tensors by name and by box, so that
chunks may be cut anywhere. The optimizer is written as `fully_reshardable`, which names each parameter, or as
`dp_reshardable`, in buckets (buckets_writing).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import Extent, ParameterGroup, StorageRef, StoredTensor, Structure, TensorRef, size_of
from ucpl.files.carrying import Storages, strides
from ucpl.files.checkpoint import Archive, Carried, Checkpoint, Skeleton, SkeletonFile
from ucpl.files.groups import each_of
from ucpl.files.pickles import unsafe_globals
from ucpl.files.plain_values import encode
from ucpl.files.scalars import number_of
from ucpl.formats.dcp.metadata import METADATA, Step
from ucpl.formats.dcp.writing import DCPWriter, address, whole_shapes
from ucpl.formats.leaving import EMPTY
from ucpl.formats.megatron.buckets_writing import PlacedChunks, placed
from ucpl.formats.megatron.classes import KNOWN_GLOBALS
from ucpl.formats.megatron.folder import INNER, TRACKER
from ucpl.formats.megatron.groups import STEP, by_rule, check_found_again, decays_norms, has_own_groups
from ucpl.formats.megatron.homes import core_of
from ucpl.formats.megatron.legacy_arguments import (
    DEGREES,
    arguments_in,
    at_degrees,
    namespace,
    sizes_of,
    state_of,
    values_of,
)
from ucpl.formats.megatron.reading import (
    BACKEND,
    COMMON,
    CONTENT,
    GIVEN,
    INTEGRITY,
    KEPT,
    OBJECTS,
    OF_ITERATION,
    OPTIMIZER,
    UNTRAINED,
    VERSION,
)
from ucpl.formats.megatron.roles import MASTERS, MOMENTUM, SPLIT, STATES, is_of_optimizer
from ucpl.formats.megatron.stacks import Stacks, blocks_of, stacks_of
from ucpl.formats.run_steps import ITERATION, iteration_of
from ucpl.records import define

__all__ = ["CoreWriter", "skeleton"]

Shape = tuple[int, ...]
ARGUMENTS = "args"
_ITERATION = re.compile(r"iter_[0-9]{7,12}|release")
_WHOLE = "0"  # the storage of a file that is carried as it is
_RANDOM, _WITHOUT_RANDOM = re.compile(r"rng_state/"), "no_save_rng"  # of the arguments: Megatron then looks for none
BARE = "."  # a step that says: no tracker, and no folder of an iteration
_KIND, _SHARDING = "distrib_optim_sharding_type", "param_state_sharding_type"
_CONTENT: dict[str, object] = {
    _KIND: "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
_IN_BUCKETS: dict[str, object] = {_KIND: "dp_reshardable", "chained_optim_avoid_prefix": True}
_BACKEND = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
_DIGITS_MAX = 9
_NUMBERED = re.compile(r"(?:.*\.)?(?<!mtp\.)layers\.\d+\..*", re.DOTALL)  # a layer that is not stacked, and could be
_SINGLE = re.compile(
    r".*\.(?:linear_fc1\.(?:weight|bias)_[wv]|experts\.experts\.\d+\..*)", re.DOTALL
)  # and all entries below
# Modules that save `_extra_state`, one for each layer and expert: None, where nothing is kept in 8 bits.
_LINEAR = re.compile(
    r"(?P<lead>.*(?<![^.])(?:linear_qkv|linear_q_proj|linear_(?:q|kv)_(?:down|up)_proj|linear_proj|linear_fc1|linear_fc2|eh_proj))\.weight(?:_w)?",
    re.DOTALL,
)


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    """The files of a target.

    Raises: UcplError E471 for values that have no place in the format.
    """
    return CoreWriter(structure, targets, source).folder(tag)


@define(eq=False)
class CoreWriter(DCPWriter):
    """A folder under construction.

    Megatron-FSDP's have the same groups, and the same folders of iterations.
    """

    stacks: Stacks = field(factory=Stacks, init=False)
    placed: PlacedChunks = field(factory=PlacedChunks, init=False)  # chunks in buckets

    @property
    def prefix(self) -> str:
        return ""

    @property
    def states(self) -> str:
        return STATES

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.placed = placed(self.targets)
        self.stacks = stacks_of(self.names(), of_layers=bool(self.structure.settings.get("stacked")))

    def chunk(self, rank: int, name: str, offset: Shape, archive: Archive, whole: Shape) -> int:
        """As the format has it; a layer's in the stack of all."""
        found = self.stacks.of(name)
        if found is None:
            return super().chunk(rank, name, offset, archive, whole)
        stack, at, counts = found
        tensor = archive.value
        assert isinstance(tensor, TensorRef)
        shape = (*(1 for _ in at), *tensor.shape)
        made = evolve(archive, value=evolve(tensor, shape=shape, stride=strides(shape)))
        return super().chunk(rank, stack, (*at, *offset), made, (*counts, *whole))

    def tensors(self) -> None:
        """Write tensors: those of the format, flat buckets, and gaps between these."""
        whole = whole_shapes(self.targets)
        for t in sorted(range(len(self.targets)), key=lambda t: self.targets[t].rank):
            target = self.targets[t]
            name, offset = address(target)
            if t not in self.placed.chunks:
                self.tensor(t, name, (offset, target.shape), whole[name])
                continue
            bucket, begin = self.placed.chunks[t]
            self.tensor(t, bucket, ((begin,), (target.numel,)), (self.placed.sizes[bucket],))
        for gap in self.placed.gaps:
            made = TensorRef(StorageRef("0", gap.dtype, gap.numel), 0, (gap.numel,), (1,))
            zeros = Archive(made, {"0": bytes(size_of(gap.dtype, gap.numel))})
            self.chunk(gap.rank, gap.name, (gap.begin,), zeros, (self.placed.sizes[gap.name],))

    def path_of(self, name: str) -> tuple[Step, ...]:
        return (name,)

    def entry_name(self, name: str) -> str:
        """An entry's name: of masters that have two, by whose they are."""
        called = f"{STATES}{SPLIT}."
        if not name.startswith(called):
            return super().entry_name(name)
        owner = name.removeprefix(called)
        return f"{STATES}{MASTERS[owner in self.of_muon]}.{owner}"

    @cached_property
    def of_muon(self) -> frozenset[str]:
        names = (address(target)[0] for target in self.targets if target.state == MOMENTUM)
        stacks = (found[0] if (found := self.stacks.of(name)) is not None else name for name in names)
        return frozenset(name.removeprefix(f"{STATES}{MOMENTUM}.") for name in stacks)

    def planner(self) -> dict[str, tuple[Step, ...]] | None:
        """None: names are all there is."""
        return None

    def folder(self, tag: str | None) -> Skeleton:
        self.tensors()
        self.empty()
        self.objects()
        common = self.common()
        ranks = self.of_ranks()
        backend = SkeletonFile(BACKEND, json.dumps(_BACKEND).encode(), "bytes")
        files = (*ranks, SkeletonFile(METADATA, self.metadata(), "bytes"), common, backend, *self.of_iteration())
        held = [one.value for file in self.files.values() for one in file.archives] + [common.value]
        unsafe = tuple(sorted({name for value in held for name in unsafe_globals(value)} - KNOWN_GLOBALS))
        return self.in_step(tag, files, unsafe)

    def of_iteration(self) -> Iterator[SkeletonFile]:
        """Files of Megatron-Bridge in the source's iteration, as they are."""
        if self.source.format != "megatron_core":
            return
        for name in OF_ITERATION:
            path = self.source.root / name
            if path.is_file():
                size = path.stat().st_size
                whole = Extent(name, (name,), "u8", (size,), (1,), 0, _WHOLE, 0, size)
                yield SkeletonFile(name, size, form="whole", carried=(Carried(whole, _WHOLE),))

    def in_step(self, tag: str | None, files: tuple[SkeletonFile, ...], unsafe: tuple[str, ...]) -> Skeleton:
        """The iteration's folder, and the tracker next to it.

        Raises: UcplError E471.
        """
        step = self.step(tag)
        sums = {f"{step}/{INTEGRITY}" if step else INTEGRITY: ""} if self.has_sums else {}
        if step is None:
            return Skeleton("", files, sums, unsafe_globals=unsafe)
        if step == INNER:
            return Skeleton(step, files, sums, unsafe_globals=unsafe)
        digits = step.removeprefix("iter_")
        number = str(int(digits)) if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX else step
        return Skeleton(step, files, {TRACKER: number, **sums}, unsafe_globals=unsafe)

    @property
    def has_sums(self) -> bool:
        """True if the source has sums of its files.

        The run completes the target's sums once the files are written.
        """
        return self.structure.framework == "megatron_core" and (self.source.root / INTEGRITY).is_file()

    def step(self, tag: str | None) -> str | None:
        """The iteration's folder. None: the target is one."""
        text = tag or str(self.structure.settings.get("step") or "")
        if text == BARE:
            return None
        if text and _ITERATION.fullmatch(text) is None:
            fail(
                "E471",
                f"Megatron-LM has no folder called `{text[:40]}`",
                Label("<call>", where=f"step = {text[:40]!r}"),
                remedy='step = "iter_0000100", "release", or "." for a folder without a tracker',
            )
        if not text and self.source.root.name == INNER and self.source.root != self.source.top:
            return INNER
        own = self.source.tag
        if text or (self.source.format.startswith("megatron") and (own is None or _ITERATION.fullmatch(own))):
            return text or own
        return f"iter_{iteration_of(self.source.state):07d}"  # another framework's, or a legacy folder of another name

    # ---- values that are no tensors of the model
    # -----------------------------------------------------------------------

    def objects(self) -> None:
        """Write values that Megatron divides over ranks, by name.

        If the source has no `_extra_state`, that of linear modules is added.
        """
        held = self.source.state.blobs.get(OBJECTS)
        known: dict[str, object] = {}
        if isinstance(held, dict):
            known = {str(name): value for name, value in held.items()}
        if not any("_extra_state" in name for name in known):
            known |= {name: [None] for name in self.extra_states()}
        is_of_others = bool(self.placed.sizes) and not self.is_meshed_alike
        for name, value in known.items():
            if not (is_of_others and _RANDOM.match(name)):
                self.value((name,), value)
        groups = self.of_optimizers() if self.placed.sizes else {}
        for lead, sizes in self.placed.objects(self.degree("dp")):
            chain = groups[int(lead.startswith("chained_1."))] if 0 in groups else groups
            assert isinstance(chain, dict)
            for key, one in {OPTIMIZER: chain[OPTIMIZER], **sizes}.items():
                self.value((f"{lead}.{key}/shard_0_1",), [one])

    def names(self) -> dict[str, Shape]:
        """The model's tensors under file names, which an architecture's spec may rename."""
        return {n: shape for n, shape in whole_shapes(self.targets).items() if not is_of_optimizer(n)}

    def stored(self) -> dict[str, Shape]:
        """Written tensors with their complete shapes: stacks of layers, and the others."""
        out: dict[str, Shape] = {}
        for one, shape in self.names().items():
            name, _, lead = self.stacks.of(one) or (one, (), ())
            out[name] = (*lead, *shape)
        return out

    def extra_states(self) -> Iterator[str]:
        for name, shape in self.stored().items():
            match = _LINEAR.fullmatch(name)
            lead = match["lead"] if match is not None else ""
            if not lead or "layers." not in lead:
                continue
            counts = shape[: len(shape) - 2]
            if not counts:
                yield f"{lead}._extra_state/shard_0_1"
            elif len(counts) == 1:
                yield from (f"{lead}._extra_state/shard_{n}_{counts[0]}" for n in range(counts[0]))
            else:
                layers, experts = counts[:2]
                both = f"{layers}.{experts}"
                yield from (f"{lead}._extra_state/shard_{n}.{e}_{both}" for n in range(layers) for e in range(experts))

    def common(self) -> SkeletonFile:
        said = self.source.state
        value = values_of(self.source)
        clash = next((key for key in (OPTIMIZER, CONTENT, KEPT) if key in value), None)
        if clash is not None:
            fail(
                "E471",
                f"the run has a value called `{clash}`, which is Megatron's own in {COMMON}",
                Label(COMMON, where=clash),
            )
        given = [key for key in (ITERATION, VERSION, *((ARGUMENTS,) if self.placed.sizes else ())) if key not in value]
        if self.placed.sizes:  # Megatron-LM loads buckets at the degrees that these say, and at no other
            value[ARGUMENTS] = namespace(self.arguments())
        elif self.source.format != "megatron_core" and not self.has_random:
            said_of_run = state_of(value.get(ARGUMENTS))
            if said_of_run is not None:  # or Megatron-LM would request values that ranks of the same degrees have saved
                value[ARGUMENTS] = namespace({**said_of_run, _WITHOUT_RANDOM: True})
        value[VERSION] = 3.0  # earlier versions have q, k and v in another order
        value[ITERATION] = iteration_of(self.source.state)
        groups = self.of_optimizers()
        if groups:
            value[OPTIMIZER] = self.without_groups(groups) if self.placed.sizes else groups
        value[CONTENT] = {**self.content(), **self.keys()}
        blobs = {key: one for key, one in said.blobs.items() if key not in (OBJECTS, EMPTY)}
        kept: dict[str, object] = {"framework": said.framework, "version": said.version, "blobs": encode(blobs)}
        # Stacks of the source are stacks again.
        templates = {} if core_of(self.source).is_unstacked else dict(self.stacks.templates)
        if templates:
            kept["stacks"] = templates
        if untrained := self.untrained():
            kept[UNTRAINED] = untrained
        if given:
            kept[GIVEN] = given
        if blobs or given or templates or untrained:
            value[KEPT] = kept
        storages = Storages(self.lying)
        made = storages.value(value)
        return SkeletonFile(path=COMMON, value=made, carried=tuple(storages.carried))

    def untrained(self) -> list[str]:
        """Weights without states, which buckets do not name.

        Raises: UcplError E471 if a stack of layers has such weights and others: Megatron cannot save it either.
        """
        held = {target.label for target in self.targets if target.state != "weight"}
        found: dict[bool, dict[str, str]] = {True: {}, False: {}}
        for target in self.targets:
            if held and target.state == "weight":
                name = address(target)[0]
                stack = self.stacks.of(name)
                found[target.label in held].setdefault(stack[0] if stack is not None else name, name)
        both = next((stack for stack in found[False] if stack in found[True]), None)
        if both is not None:
            fail(
                "E471",
                f"`{found[True][both]}` is trained and `{found[False][both]}` is frozen, and both are in the stack `{both}`",
                Label(METADATA, where=both),
                remedy="stacked = 0, for a tensor of each layer, as Megatron-Core saves layers that differ",
            )
        return sorted(found[False]) if self.placed.sizes else []

    def content(self) -> dict[str, object]:
        """The form in which Megatron reads the optimizer."""
        return _IN_BUCKETS if self.placed.sizes else _CONTENT

    def without_groups(self, of_optimizers: dict[object, object]) -> dict[object, object]:
        """The rest of optimizers' state dicts without groups."""
        if _SHARDING in of_optimizers:
            return {_SHARDING: self.content()[_KIND]}
        return {number: {_SHARDING: self.content()[_KIND]} for number in of_optimizers}

    def arguments(self) -> dict[object, object]:
        """The run's arguments at the degrees of a target's buckets.

        If the source's ranks differ, they exclude random states.
        """
        alike = self.is_meshed_alike
        out = at_degrees(arguments_in(self.source), self.degree, is_alike=alike)
        out = {**sizes_of(self.structure.tensors), **blocks_of([t.name for t in self.structure.tensors]), **out}
        if not (alike and self.source.format == "megatron_core") and not self.has_random:
            out[_WITHOUT_RANDOM] = True
        return out

    @property
    def has_random(self) -> bool:
        return any(map(_RANDOM.match, self.paths))

    @property
    def is_meshed_alike(self) -> bool:
        """True if the model-parallel ranks are those of the source's run."""
        said = arguments_in(self.source)
        degrees = {name: self.degree(axis) for name, axis in DEGREES.items()}
        return bool(said) and all((said.get(name) or 1) == n for name, n in degrees.items())

    def degree(self, axis: str) -> int:
        value = self.structure.settings.get(axis)
        return value if type(value) is int else 1

    def keys(self) -> dict[str, bool]:
        """Flags for Megatron's names of its tensors: it requests these keys only."""
        names = list(self.stored())
        if not any(map(_NUMBERED.fullmatch, names)):
            return {"singleton_local_shards": False}
        if any(map(_SINGLE.fullmatch, names)):
            return {"singleton_local_shards": True}
        return {"singleton_local_shards": False, "non_homogeneous_layers": True}

    def of_optimizers(self) -> dict[object, object]:
        """State dicts of the optimizers: one, or numbered with one of experts."""
        said = self.source.state
        if not said.scalars and not any(t.states for t in self.structure.tensors):
            return {}  # weights alone
        self.check_steps()
        groups = sorted(self.grouped(), key=lambda group: bool(group.hyper.get("is_expert_parallel")))
        self.check_found(groups)
        rows: dict[bool, list[dict[str, object]]] = {}
        for group in groups:
            rows.setdefault(bool(group.hyper.get("is_expert_parallel")), []).append(
                {**group.hyper, **self.step_of(group)}
            )
        made: list[object] = [
            {
                OPTIMIZER: {"param_groups": rows[key]},
                _SHARDING: self.content()[_KIND],
            }
            for key in sorted(rows)
        ]
        first = made[0] if made else {}
        assert isinstance(first, dict)
        return dict(enumerate(made)) if len(made) > 1 else first

    def check_steps(self) -> None:
        """Of numbers of parameters, Megatron has steps alone. Raises: UcplError E471."""
        others = sorted(set(self.source.state.scalars) - {STEP})
        if others:
            fail(
                "E471",
                f"`{others[0]}` is a number of each parameter, and Megatron keeps none",
                Label(METADATA, where=others[0]),
                remedy=f"--drop {others[0]} leaves it out",
            )

    def check_found(self, groups: list[ParameterGroup]) -> None:
        """Check that Megatron's rule finds the same groups.

        Raises: UcplError E471 if it finds others.
        """
        trained = {name for group in groups for name in group.members}
        held = [tensor for tensor in self.structure.tensors if tensor.name in trained and tensor.states]
        states = {tensor.name: tensor.states for tensor in held}
        check_found_again(
            groups, {tensor.name: tensor.shape for tensor in held}, states, Path(COMMON), norms_decay=self.norms_decay
        )

    def step_of(self, group: ParameterGroup) -> dict[str, object]:
        """Raises: UcplError E471 where parameters of a group are at different steps."""
        steps = self.source.state.scalars.get(STEP, {})
        found = {number_of(steps[name]) for name in group.members if name in steps}
        if len(found) > 1:
            fail(
                "E471",
                f"parameters of one group are at steps {sorted(map(str, found))[:3]}, and Megatron counts one for all",
                Label(COMMON, where=f"param_groups/{group.name}"),
                remedy="--fill step=N gives all of them one",
            )
        return {STEP: found.pop()} if found else {}

    @property
    def norms_decay(self) -> bool:
        return decays_norms(arguments_in(self.source))

    def grouped(self) -> Iterator[ParameterGroup]:
        """Groups as Megatron makes them.

        They are the source's own, if Megatron made it; otherwise experts and parameters without decay are separate.
        """
        said = self.source.state
        if has_own_groups(said):
            yield from said.groups
            return
        held = each_of(said)
        hypers = [(member, held.get(member, {})) for _, members in self.structure.groups for member in members]
        shapes = {t.name: t.shape for t in self.structure.tensors}
        yield from by_rule(
            hypers,
            shapes,
            experts_apart=True,
            norms_decay=self.norms_decay,
            tensors=self.source.carried_extents.values(),
        )
