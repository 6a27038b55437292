"""A target's files before their tensors' bytes: metadata for its stage and degree, and everything that is carried.

What depends on the layout is made anew from the Structure; what continues a run comes from the source's Envelope. The form
is that of deepspeed 0.19.8, whatever release wrote the source.

Not here: recovery scripts (zero_to_fp32.py), which are DeepSpeed's own code.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import Any

from attrs import field, mutable

from ucpl.errors import Label, fail
from ucpl.extents import (
    Call,
    Extent,
    Flat,
    Global,
    Key,
    NamedTensor,
    Scalar,
    Size,
    StoredTensor,
    Structure,
    TensorRef,
    key_text,
)
from ucpl.stores.carrying import Place, Storages, by_place
from ucpl.stores.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.stores.deepspeed.config import loss_scale_numbers, loss_scaler, regenerated
from ucpl.stores.deepspeed.cuts import INFO, info_of
from ucpl.stores.deepspeed.names import LATEST, model_file, optim_file
from ucpl.stores.deepspeed.order import Run, slice_numel
from ucpl.stores.pickles import set_attributes, unsafe_globals
from ucpl.stores.scalars import number_of

FORMAT_VERSION = "0.19.8"  # the release whose form is written

# Classes that DeepSpeed's own files name: torch.load(weights_only=True) refuses them, DeepSpeed does not use it.
KNOWN_GLOBALS = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    """All files of a target that a plain `engine.load_checkpoint` takes.

    Raises: UcplError E470 where one number is needed and several are there, E471 where the form has no place for something.
    """
    return _Writer.of(structure, targets, source).skeleton(tag)


@mutable
class _File:
    """One file under construction."""

    path: str
    storages: Storages
    storage_of: dict[int, str] = field(factory=dict)


@mutable
class _Writer:
    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    stage: int
    dp: int
    settings: dict[str, Any]
    index: dict[tuple[str, tuple[str, ...]], int]  # by file and key, whose numbers are told by their text
    below: dict[tuple[str, tuple[str, ...]], dict[str, int]]  # (file, key without its last step) -> state -> target
    carried: dict[Place, Extent]
    config: dict[str, Any]
    names: list[str]  # the module's, in its order
    kinds: dict[str, NamedTensor]
    empty: dict[str, dict[str, Any]]
    hypers: list[dict[str, Any]]  # by group of the structure
    here: dict[str, int] = field(factory=dict)  # coordinates of the rank whose file is being made
    flats: list[Flat] = field(factory=list)  # that rank's, by bucket
    used: set[int] = field(factory=set)

    @classmethod
    def of(cls, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint) -> _Writer:
        settings = dict(structure.settings)
        blobs = source.envelope.blobs
        index: dict[tuple[str, tuple[str, ...]], int] = {}
        below: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
        for i, target in enumerate(targets):
            key = _text(target.key)
            index[target.file, key] = i
            if key:
                below.setdefault((target.file, key[:-1]), {})[key[-1]] = i
        kinds = {tensor.name: tensor for tensor in structure.tensors}
        empty = dict(blobs.get("empty_tensors") or {})
        known = {**kinds, **structure.aliases, **empty, **(blobs.get("module_extra") or {})}
        stated = [name for name in blobs.get("module_names") or () if name in known]
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
            config=regenerated(blobs.get("ds_config"), settings),
            names=list(dict.fromkeys((*stated, *known))),
            kinds=kinds,
            empty=empty,
            hypers=_hypers(structure, source),
        )

    def skeleton(self, tag: str | None) -> Skeleton:
        files: list[tuple[_File, Any]] = []
        for path, names in apart(self.targets, self.source).items():
            file = _File(path, Storages(self.carried))
            files.append((file, self.parts(file, names)))
        for mp in range(self.stages * self.degree):
            for rank in range(self.dp if self.stage == 3 else 1):
                self.stand(mp, rank)
                file = _File(model_file(self.stage, rank, mp), Storages(self.carried))
                files.append((file, self.model(file, rank)))
        for mp in range(self.stages * self.degree):
            for rank in range(self.dp if self.stage else 0):
                self.stand(mp, rank)
                file = _File(optim_file(bool(self.settings.get("bf16")), rank, mp), Storages(self.carried))
                files.append((file, self.shard(file)))
        for i, target in enumerate(self.targets):
            if i not in self.used:
                fail(
                    "E471",
                    f"stage {self.stage} at dp {self.dp}, tp {self.degree} has no place for {key_text(target.key)} of"
                    f" {target.file}",
                    Label(target.file, where=key_text(target.key)),
                )
        folder = tag or self.source.tag or f"global_step{self.blob('global_steps', 0)}"
        unsafe = {name for _, value in files for name in unsafe_globals(value)} - KNOWN_GLOBALS
        return Skeleton(
            folder=folder,
            files=tuple(
                SkeletonFile(
                    path=file.path, value=value, storage_of=file.storage_of, carried=tuple(file.storages.carried)
                )
                for file, value in files
            ),
            texts={LATEST: folder},
            unsafe_globals=tuple(sorted(unsafe)),
        )

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

    def stand(self, mp: int, rank: int) -> None:
        """Turn to the files of one rank."""
        experts, ep = self.source.experts, int(self.settings.get("ep") or 1)
        edp = self.dp // ep
        if experts is not None and experts.is_data_first:
            expert = {"ep": rank // edp, "edp": rank % edp}
        else:
            expert = {"edp": rank // ep, "ep": rank % ep}
        self.here = {"pp": mp // self.degree, "tp": mp % self.degree, "dp": rank, **expert}
        found: dict[int, Flat] = {}
        for flat in self.structure.flats:
            if all(self.here.get(axis, place) == place for axis, place in flat.coordinates.items()):
                found.setdefault(flat.bucket, flat)
        self.flats = [found[bucket] for bucket in sorted(found)]

    def blob(self, name: str, default: Any = None) -> Any:
        return self.source.envelope.blobs.get(name, default)

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def tensor(self, file: _File, key: Key, requires_grad: bool = False) -> TensorRef | None:
        """The tensor that a target fills, or None where the plan has none there."""
        i = self.index.get((file.path, _text(key)))
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
            storage = file.storage_of[owner]
            made = TensorRef(
                type(made.storage)(storage, target.dtype, target.numel), 0, made.shape, made.stride, requires_grad
            )
        file.storage_of[i] = made.storage.name
        return made

    # ---- model states ------------------------------------------------------------------------------------------------

    def model(self, file: _File, rank: int) -> dict[str, Any]:
        frozen = [t for t in self.structure.tensors if t.kind == "frozen"]
        layers = self.blob("layer_files")
        value: dict[str, Any] = {"module": self.module(file) if layers is None else None}
        on_stage = None if layers is None else self.tensors_of_stage()
        value["buffer_names"] = [n for n in self.names if self.is_buffer(n) and (on_stage is None or n in on_stage)]
        value["optimizer"] = self.whole(file) if self.stage == 0 else None
        value["param_shapes"] = self.param_shapes() if self.stage else None
        keeps_frozen = self.stage >= 2
        empties = {name: Size(e["shape"]) for name, e in self.empty.items() if not e["buffer"]}
        shapes = {t.name: Size(self.local(t)) for t in frozen} | empties
        in_order = [name for name in self.names if name in shapes]
        value["frozen_param_shapes"] = OrderedDict((n, shapes[n]) for n in in_order) if keeps_frozen else None
        if self.stage:
            is_first = rank == 0 and self.tp == 0 and self.here["pp"] == 0
            value["shared_params"] = dict(self.structure.aliases) if is_first else {}
        else:
            value["shared_params"] = None
        fragments: OrderedDict[str, Any] | None = None
        if keeps_frozen:
            fragments = OrderedDict((name, self.fragment(file, name)) for name in in_order)
        value["frozen_param_fragments"] = fragments
        for key in ("lr_scheduler", "data_sampler", "random_ltd"):
            value[key] = file.storages.value(self.blob(key))
        for key in ("skipped_steps", "global_steps", "global_samples"):
            value[key] = self.blob(key, 0)
        value["dp_world_size"] = self.dp
        value["mp_world_size"] = self.stages * self.degree
        value["checkpoint_parallel_dimensions"] = {"pp_degree": self.stages, "tp_degree": self.degree}
        value["ds_config"] = file.storages.value(self.config)
        value["ds_version"] = FORMAT_VERSION
        if self.source.experts is not None:
            value |= {"num_experts": self.blob("num_experts"), "ds_autoep_layers": None}
        if (universal := self.universal()) is not None:
            value["universal_checkpoint_info"] = file.storages.value(universal)
        client: dict[str, Any] = file.storages.value(self.client_state(rank))
        return value | client

    def client_state(self, rank: int) -> dict[str, Any]:
        """Each rank's own where both sides have a file a rank and as many ranks; else the first rank's for all."""
        kept = self.source.carry.get("client_state")
        if self.source.carry.get("client_state_of") == "stage" and kept and len(kept) == self.stages:
            of_stage: dict[str, Any] = kept[self.here["pp"]]
            return of_stage
        if not kept or "client_state_of" in self.source.carry:
            return self.source.envelope.carried
        degree = self.source.carry.get("client_state_tp", 1)
        each = len(kept) // degree  # files of a tensor-parallel rank
        tp = self.tp if degree == self.degree else 0
        mine: dict[str, Any] = kept[tp * each + (rank if self.stage == 3 and each == self.dp else 0)]
        return mine

    def universal(self) -> Any:
        """universal_checkpoint_info: as the model's class gave it, and with tensor parallelism what AutoTP says of the cuts."""
        kept = self.blob(INFO)
        is_autotp = isinstance(kept, dict) and "tp_replicated_parameter_patterns" in kept
        if self.degree == 1:
            is_of_ranks = isinstance(kept, dict) and bool({"affine_map", "sub_param_shard_widths"} & kept.keys())
            return None if is_of_ranks or (is_autotp and self.source.shardings) else kept
        known = self.structure.shardings
        parameters = [t.name for t in self.structure.tensors if t.kind != "buffer"]
        if any(name not in known for name in parameters):
            return None  # cut in a way that has no name there
        return info_of({name: known[name] for name in parameters}, self.degree, kept if is_autotp else {})

    def local(self, tensor: NamedTensor) -> tuple[int, ...]:
        """A tensor's shape on this tensor-parallel rank."""
        known = self.structure.shardings.get(tensor.name)
        return tensor.shape if known is None else known.local(self.tp)

    def is_buffer(self, name: str) -> bool:
        return self.kinds[name].kind == "buffer" if name in self.kinds else bool(self.empty.get(name, {}).get("buffer"))

    def module(self, file: _File) -> OrderedDict[str, Any]:
        module: OrderedDict[str, Any] = OrderedDict()
        extra = self.blob("module_extra") or {}
        experts = self.source.experts
        for name in self.names:
            if experts is not None and name in experts.of:
                continue  # in a file of its own
            if name in extra:
                module[name] = file.storages.value(extra[name])
                continue
            owner = self.kinds.get(self.structure.aliases.get(name, name))
            made = self.tensor(file, ("module", name))
            if made is None and owner is not None and (self.stage == 3 and owner.kind != "buffer"):
                made = file.storages.empty(owner.dtype)  # the values are in the shards and fragments
            if made is None and name in self.empty:
                here = self.empty[name]
                shape = (0,) if self.stage == 3 and not here["buffer"] else tuple(here["shape"])
                made = file.storages.empty(here["dtype"], shape)
            if made is None and owner is not None and prod(owner.shape) == 0:
                made = file.storages.empty(owner.dtype, owner.shape)
            if made is None and owner is not None and name in self.structure.aliases:
                module[name] = module.get(owner.name)  # one tensor under two names
                if module[name] is None:
                    module[name] = self.tensor(file, ("module", owner.name))
                continue
            if made is None:
                fail("E471", f"the plan writes no weight of {name}", Label(file.path, where=f"module/{name}"))
            module[name] = made
        set_attributes(module, file.storages.value(self.blob("module_attributes")))
        return module

    def parts(self, file: _File, names: list[str]) -> dict[str, Any]:
        """The file of one layer of a pipeline, or of one expert."""
        known = (self.blob("layer_files") or {}).get(file.path)
        out: dict[str, Any] = {} if known is None else OrderedDict()
        for name in names if known is None else known["names"]:
            made = self.tensor(file, (name,))
            if made is None and known is not None and name in known["empty"]:
                made = file.storages.empty(known["empty"][name]["dtype"], tuple(known["empty"][name]["shape"]))
            if made is None and known is not None and name in known["extra"]:
                out[name] = file.storages.value(known["extra"][name])
                continue
            if made is None:
                fail("E471", f"the plan writes no {name} of {file.path}", Label(file.path, where=name))
            out[name] = made
        if isinstance(out, OrderedDict) and known is not None:
            set_attributes(out, file.storages.value(known["attributes"]))
        return out

    def tensors_of_stage(self) -> set[str]:
        """Tensors in files of layers on the stage whose file is being made."""
        assert self.source.pipeline is not None
        names = {(x.file, local): tensor for x in self.source.pipeline.layers for local, tensor in x.names}
        ranks = self.dp * self.degree  # of a stage
        return {
            names[t.file, str(t.key[0])]
            for t in self.targets
            if t.rank // ranks == self.here["pp"] and (t.file, str(t.key[0])) in names
        }

    def fragment(self, file: _File, name: str) -> TensorRef:
        made = self.tensor(file, ("frozen_param_fragments", name))
        if made is not None:
            return made
        if name in self.empty:
            return file.storages.empty(
                self.empty[name]["dtype"], (0,) if self.stage == 3 else tuple(self.empty[name]["shape"])
            )
        fail("E471", f"the plan writes no fragment of the frozen {name}", Label(file.path, where=name))

    def param_shapes(self) -> list[OrderedDict[str, Size]]:
        """Names are those of this rank's module: experts have local numbers there."""
        return [OrderedDict((self.live(name), Size(shape)) for name, shape in flat.members) for flat in self.flats]

    def live(self, name: str) -> str:
        """What a tensor is called in the module of a rank that holds it."""
        experts = self.source.experts
        if experts is None or name not in experts.of:
            return name
        one = experts.of[name]
        return f"{one.module}{one.number % (one.count // int(self.settings.get('ep') or 1))}.{one.inner}"

    def hyper(self, file: _File, hyper: dict[str, Any]) -> dict[str, Any]:
        """A group's hyper-parameters; a group of experts is called by the degree of expert parallelism."""
        value: dict[str, Any] = file.storages.value(hyper)
        if self.source.experts is not None and value.get("moe") is True:
            value = {**value, "name": f"ep_size_{self.settings.get('ep') or 1}"}
        return value

    def cut(self, flat: Flat) -> tuple[int, int]:
        """How many ranks share a flat buffer, and which of them this one is."""
        axis = flat.cut if flat.cut is not None and flat.cut in self.here else "dp"
        return int(self.settings.get(axis) or self.dp), self.here[axis]

    # ---- optimizer -----------------------------------------------------------------------------------------------------

    def states(self, file: _File, key: Key, members: tuple[str, ...]) -> dict[str, Any]:
        """The state_dict entry of one flat buffer or parameter: numbers first, as torch's optimizers make them."""
        out: dict[str, Any] = {}
        for name in self.source.envelope.scalars:
            value = self.scalar(file, name, members)
            if value is not None:
                out[name] = value
        for name in self.below.get((file.path, _text(key)), {}):
            made = self.tensor(file, (*key, name))
            if made is not None:
                out[name] = made
        return out

    def scalar(self, file: _File, name: str, members: tuple[str, ...]) -> Any:
        """One number for all members, in the form that it had. Raises: UcplError E470."""
        kept = self.source.envelope.scalars[name]
        found = [(member, kept[member]) for member in members if member in kept]
        if not found:
            return None
        first, value = found[0]
        for member, other in found[1:]:
            if other != value:
                fail(
                    "E470",
                    f"{name} is {number_of(value)} for {first} and {number_of(other)} for {member}, of one flat buffer",
                    Label(file.path, where=name),
                )
        if not isinstance(value, Scalar):
            return value
        extent = self.source.carry.get("scalar_extents", {}).get(name, {}).get(first)
        # Never one storage for two: optimizers count in place.
        return file.storages.extent(extent) if extent is not None else number_of(value)

    def whole(self, file: _File) -> dict[str, Any] | None:
        """ZeRO-0: numbered parameters, in the order of the groups."""
        if not self.structure.groups:
            return None
        masters = bool(self.settings.get("masters"))
        inner: Key = ("optimizer", "optimizer_state_dict", "state") if masters else ("optimizer", "state")
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        flats: list[list[TensorRef | None]] = []
        number = 0
        for g, ((_, members), hyper) in enumerate(zip(self.structure.groups, self.hypers, strict=True)):
            ids = list(range(number, number + len(members)))
            number += len(members)
            groups.append({**file.storages.value(hyper), "params": ids})
            flats.append([self.tensor(file, ("optimizer", "fp32_groups", g, i), True) for i in range(len(members))])
            for i, name in zip(ids, members, strict=True):
                held = self.states(file, (*inner, i), (name,))
                if held:
                    state[i] = held
        base = {"state": state, "param_groups": groups}
        if not masters:
            return base
        numbers = file.storages.value(loss_scale_numbers(self.source.envelope.blobs))
        return {**numbers, "optimizer_state_dict": base, "fp32_groups": flats}

    def shard(self, file: _File) -> dict[str, Any]:
        state = self.sliced(file) if self.stage == 3 else self.flat(file)
        return {
            "optimizer_state_dict": state,
            "ds_config": file.storages.value(self.config),
            "ds_version": FORMAT_VERSION,
        }

    def scaling(self, file: _File) -> dict[str, Any]:
        blobs = self.source.envelope.blobs
        scaler = loss_scaler(blobs, self.config, bool(self.settings.get("fp16")))
        dynamic = scaler.state.get("dynamic", False) if isinstance(scaler.state, dict) else False
        return {
            "loss_scaler": file.storages.value(scaler),
            "dynamic_loss_scale": self.blob("dynamic_loss_scale", dynamic),
            "overflow": self.blob("overflow", False),
        }

    def clip_grad(self) -> dict[str, Any]:
        """Where neither the source nor its ds_config says it, the engine that loads keeps its own."""
        value = self.blob("clip_grad", self.config.get("gradient_clipping"))
        return {"clip_grad": value} if isinstance(value, (int, float)) else {}

    def flat(self, file: _File) -> dict[str, Any]:
        """A shard of stages 1 and 2."""
        if self.stages > 1 and len(self.flats) < len(self.structure.groups):
            lacking = next(
                g for g, (name, _) in enumerate(self.structure.groups) if name not in {f.group for f in self.flats}
            )
            fail(
                "E471",
                f"stage {self.here['pp']} of the pipeline holds no parameter of group {lacking}, and DeepSpeed flattens none",
                Label(file.path),
                remedy="Deal the layers otherwise: stages = [...] beside pp.",
            )
        if len(self.flats) != len(self.structure.groups):
            fail(
                "E471",
                f"stage {self.stage} keeps one flat buffer a parameter group: {len(self.structure.groups)} groups make "
                f"{len(self.flats)}",
                Label(file.path),
            )
        is_bf16_optimizer = bool(self.settings.get("bf16_optimizer"))
        out: dict[str, Any] = {} if is_bf16_optimizer else self.scaling(file)
        out |= self.clip_grad()
        here: Key = ("optimizer_state_dict",)
        runs = [Run(flat.starts, flat.numel) for flat in self.flats]
        if self.settings.get("elastic"):
            out["base_optimizer_state"] = [
                self.states(file, (*here, "base_optimizer_state", g), _members(flat))
                for g, flat in enumerate(self.flats)
            ]
            # Without it DeepSpeed refuses to load; it saves it for optimizers alone that keep `step` in their groups.
            counts = [hyper["step"] for hyper in self.hypers if "step" in hyper]
            counts += self.source.envelope.scalars.get("step", {}).values()
            out["base_optimizer_state_step"] = number_of(counts[0]) if counts else self.blob("global_steps", 0)
        else:
            held = {
                g: self.states(file, (*here, "base_optimizer_state", "state", g), _members(flat))
                for g, flat in enumerate(self.flats)
            }
            out["base_optimizer_state"] = {
                "state": {g: state for g, state in held.items() if state},
                "param_groups": [{**self.hyper(file, hyper), "params": [g]} for g, hyper in enumerate(self.hypers)],
            }
        key: Key = (*here, "single_partition_of_fp32_groups")
        out["single_partition_of_fp32_groups"] = [
            self.tensor(file, (*key, g), True) or file.storages.empty("f32", (0,), True) for g in range(len(runs))
        ]
        shared = [(*self.cut(flat), run) for flat, run in zip(self.flats, runs, strict=True)]
        if is_bf16_optimizer:
            out["group_paddings"] = [
                run.part(ways) * ways - run.numel if place == ways - 1 else 0 for ways, place, run in shared
            ]
        else:
            out["zero_stage"] = _stage(self.stage)
            out["group_paddings"] = [run.part(ways) - run.lean(ways, place) for ways, place, run in shared]
            out["param_alignment_paddings"] = [_gaps(flat) for flat in self.flats]
        out["partition_count"] = [ways for ways, _, _ in shared]
        out["ds_version"] = FORMAT_VERSION
        out["param_slice_mappings"] = [
            OrderedDict(
                (self.live(name), where)
                for name, where in _fragments(flat, place * run.part(ways), (place + 1) * run.part(ways)).items()
            )
            for flat, (ways, place, run) in zip(self.flats, shared, strict=True)
        ]
        return out

    def sliced(self, file: _File) -> dict[str, Any]:
        """A shard of stage 3."""
        here: Key = ("optimizer_state_dict",)
        held = {
            s: self.states(file, (*here, "optimizer_state_dict", "state", s), _members(flat))
            for s, flat in enumerate(self.flats)
        }
        groups = [
            {
                **file.storages.value(hyper),
                "params": [s for s, flat in enumerate(self.flats) if flat.group == name],
            }
            for (name, _), hyper in zip(self.structure.groups, self.hypers, strict=True)
        ]
        flats = [self.tensor(file, (*here, "fp32_flat_groups", s), True) for s in range(len(self.flats))]
        if None in flats:
            s = flats.index(None)
            fail(
                "E471", f"the plan writes no masters of sub-group {s}", Label(file.path, where=f"fp32_flat_groups/{s}")
            )
        return {
            "zero_stage": _stage(3),
            **self.scaling(file),
            "partition_count": self.dp,
            "optimizer_state_dict": {
                "state": {s: state for s, state in held.items() if state},
                "param_groups": groups,
            },
            "fp32_flat_groups": flats,
        }


def apart(targets: tuple[StoredTensor, ...], source: Checkpoint) -> dict[str, list[str]]:
    """Files of layers and of experts, with the names in each, in order."""
    kept: dict[str, Any] = source.envelope.blobs.get("layer_files") or {}
    out: dict[str, list[str]] = {file: [] for file in kept}
    files = set(kept) | ({one.file for one in source.experts.of.values()} if source.experts is not None else set())
    for target in targets:
        if target.file in files:
            out.setdefault(target.file, []).append(str(target.key[0]))
    return dict(sorted(out.items()))


def _hypers(structure: Structure, source: Checkpoint) -> list[dict[str, Any]]:
    """Hyper-parameters of the target's groups: those of the source's group of that name, or with those members."""
    by_name = {group.name: group.hyper for group in source.envelope.groups}
    by_members = {frozenset(group.members): group.hyper for group in source.envelope.groups}
    out = []
    for g, (name, members) in enumerate(structure.groups):
        hyper = by_members.get(frozenset(members), by_name.get(name))
        if hyper is None and len(source.envelope.groups) == len(structure.groups):
            hyper = source.envelope.groups[g].hyper
        out.append(hyper or {})
    return out


def _text(key: Key) -> tuple[str, ...]:
    return tuple(map(str, key))


def _stage(stage: int) -> Call:
    return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def _members(flat: Flat) -> tuple[str, ...]:
    return tuple(name for name, _ in flat.members)


def _gaps(flat: Flat) -> list[int]:
    """Padding behind each member: none behind the last."""
    ends = [start + prod(shape) for start, (_, shape) in zip(flat.starts, flat.members, strict=True)]
    return [after - end for after, end in zip((*flat.starts[1:], flat.numel), ends, strict=True)]


def _fragments(flat: Flat, low: int, high: int) -> OrderedDict[str, Call]:
    """Where each member's part lies inside the rank's part [low, high)."""
    out: OrderedDict[str, Call] = OrderedDict()
    for start, (name, shape) in zip(flat.starts, flat.members, strict=True):
        first, last = max(start, low), min(start + prod(shape), high)
        if first < last:
            state = {"numel": last - first, "start": first - low}
            out[name] = Call(Global("deepspeed.utils.tensor_fragment", "fragment_address"), new=True, state=state)
    return out


__all__ = ["FORMAT_VERSION", "KNOWN_GLOBALS", "skeleton", "slice_numel"]
