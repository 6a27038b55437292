"""DeepSpeed's universal format: a file per state of each parameter.

Copied files of model states are next to them. Source: deepspeed 0.19.8: checkpoint/ds_to_universal.py (the writer),
checkpoint/universal_checkpoint.py, stage3.py `load_hp_checkpoint_state_from_checkpoint_dir_stage3` and
base_optimizer.py (the loader).

Limits of the loader, which no file can change: it restores neither buffers nor frozen parameters, and at stage 3 it
gives every parameter group the hyper-parameters of the first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, ParameterGroup, Sharding, TensorRef
from ucpl.extents.account import NotRead
from ucpl.extents.parallel_facts import CarriedByRank
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import ahead
from ucpl.files.scalars import is_step
from ucpl.files.skipping import skips, skips_optimizer
from ucpl.files.texts import names_like, read_name
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.unknown import SHARED, unknown_keys, unknown_of_torch
from ucpl.files.values import Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.across_tp import Shapes, cuts_over_tp
from ucpl.formats.deepspeed.blobs import (
    SCALING,
    keep_extra,
    keep_fields,
    keep_left_out,
    keep_module_facts,
    keep_run,
)
from ucpl.formats.deepspeed.cuts import vocabulary_of
from ucpl.formats.deepspeed.flat_shards import hyper_of
from ucpl.formats.deepspeed.gathered import Gathered, StepFacts, StepPlace, callers_of
from ucpl.formats.deepspeed.module import RankModule, groups_of, module_of
from ucpl.formats.deepspeed.names import (
    ATOMS,
    GLOBAL_STATE,
    INFO,
    LATEST_UNIVERSAL,
    StepFiles,
    list_files,
    read_atom,
    read_shard,
)
from ucpl.formats.deepspeed.order import Shape, undeal
from ucpl.formats.deepspeed.topology import not_yet
from ucpl.records import frozen

__all__ = ["read_universal"]

_STATES = ("optimizer_state_dict", "state")
# Keys of an atom, as ds_to_universal.py of DeepSpeed writes them. Releases before 0.13 keep the row that pads words.
_ATOM = frozenset(
    ("param", "cat_dim", "vocab_tensor", "param_n_sub_params", "sub_param_shape", "ds_autotp_universal_checkpoint_meta")
) | {"vocab_divisibility_padding_tensor"}
_SHARD = (("fp32_flat_groups",), ("single_partition_of_fp32_groups",), ("base_optimizer_state",))


def read_universal(path: Path) -> Checkpoint:
    """Read the headers of all atoms and of the model states.

    Raises: UcplError E452-E463.
    """
    return _Universal.of(_step(path)).checkpoint()


def _step(path: Path) -> StepPlace:
    if (path / ATOMS).is_dir():
        return StepPlace(path, path, path.name)
    tag = read_name(path / LATEST_UNIVERSAL) or ""
    root = path / tag
    if not tag or Path(tag).is_absolute() or ".." in Path(tag).parts or not (root / ATOMS).is_dir():
        fail(
            "E450",
            f"{LATEST_UNIVERSAL} names {tag!r}, and there is no such folder of atoms",
            Label(str(path / LATEST_UNIVERSAL), f"says {tag!r}"),
            remedy="give the step's folder itself, or correct the pointer",
        )
    return StepPlace(path, root, tag)


@frozen(eq=False)
class _Universal:
    """A step's folder while it is read."""

    place: StepPlace
    stage: int  # 3, or 1 for all others
    ranks: int  # model-parallel ones of the source
    metas: tuple[TorchFile, ...]
    shared: TorchFile | None  # zero/optimizer_state.pt, which all parameters share
    module: RankModule
    gathered: Gathered
    atoms: list[TorchFile] = field(factory=list)
    words: dict[str, Shape] = field(factory=dict)  # of tensors with words as rows: the shapes of atoms
    forms: dict[bool, TorchFile] = field(
        factory=dict
    )  # whether atoms are dicts, which keep shapes: an atom of each form

    @classmethod
    def of(cls, place: StepPlace) -> _Universal:
        root = place.root
        listing: StepFiles = list_files(root)
        if not listing.models:
            fail("E452", f"{root} has no file of model states", Label(str(root), "holds atoms only"))
        names = [listing.models[at] for at in sorted(listing.models, key=lambda p: (p[1], p[0] or 0))]
        ahead(root / names[0], [partial(read_shard, root, name) for name in names])
        metas = tuple(read_shard(root, name) for name in names)
        has_shared = (root / GLOBAL_STATE).is_file() and not skips_optimizer(GLOBAL_STATE, kind="file")
        shared = read_torch_file(root, GLOBAL_STATE) if has_shared else None
        stage = 3 if any(dp is not None for dp, _ in listing.models) else 1
        if auto_ep.layers_of(metas[0]) is not None:
            not_yet(metas[0].path, "its experts are AutoEP's, in a universal folder")

        module = whole_module(metas, stage)
        ranks = 1 + max(mp for _, mp in listing.models)
        return cls(place, stage, ranks, metas, shared, module, Gathered())

    @property
    def is_whole(self) -> bool:
        """True if model states hold complete weights, besides the masters in atoms.

        Masters may lack the padding of words.
        """
        stripped = any(self.module.shapes.get(name) != shape for name, shape in self.words.items())
        return self.stage < 3 and self.ranks == 1 and bool(self.module.tensors) and not stripped

    @property
    def is_shaped(self) -> bool:
        """True if its atoms are complete tensors with their shapes.

        Raises: UcplError E456.
        """
        if len(self.forms) > 1:
            fail("E456", "atoms of two forms", *(Label(str(part.path)) for part in self.forms.values()))
        return True in self.forms

    @property
    def states(self) -> tuple[TorchFile, ...]:
        """The files of model states with all values.

        At stage 3 one per dp rank.
        """
        ranks = len(self.metas) // self.ranks
        return self.metas[:ranks] if self.stage == 3 else self.metas[:1]

    def checkpoint(self) -> Checkpoint:
        gathered, module = self.gathered, self.module
        shapes = self.masters()
        if self.ranks > 1 and self.stage == 3:
            self.reject_parts()
        self.weights()
        self.settings()
        self.groups()
        self.check_states()
        keep_run(gathered, module.file, "num_experts")
        keep_left_out(gathered, module)
        keep_module_facts(gathered, module)
        keep_extra(gathered, module.file, self.metas[len(self.states) :])
        if self.shared is not None and isinstance(self.shared.value, dict):
            keep_fields(gathered, Value.of(self.shared), SCALING)
            gathered.not_read += unknown_keys(self.shared.file, self.shared.value, SHARED, by="DeepSpeed")
        if self.ranks > 1 and module.tensors:
            gathered.remark(
                "the source was model-parallel: its cut weights in `module` are not read, the masters are complete"
            )

        if lost := lost_buffers(self.metas):
            gathered.remark(f"buffers of a pipeline's layers have no file here: {shown(lost)}")
        is_bare = self.stage == 3 and not self.is_shaped
        whole = {name: shape if is_bare else shapes.get(name, shape) for name, shape in module.shapes.items()}
        shardings = cuts(gathered, module, whole)
        more = (self.shared,) if self.shared is not None else ()
        files = (*self.metas, *more, *self.atoms)
        return gathered.checkpoint(
            self.place,
            "universal",
            files,
            StepFacts(self.named(whole), module.aliases, self.callers(), shardings),
        )

    def callers(self) -> CarriedByRank:
        """client_state of each rank, from its own model states."""
        degrees = Value.of(self.metas[0]).find("checkpoint_parallel_dimensions")
        stated = degrees.find("pp_degree") if degrees is not None else None
        pp = stated.whole(1) if stated is not None else 1
        pp = pp if self.ranks % pp == 0 else 1
        return callers_of(self.metas, pp, self.ranks // pp)

    def named(self, whole: dict[str, Shape]) -> tuple[NamedTensor, ...]:
        """The model's tensors in the module's order."""
        module = self.module
        held = "bf16" if self.config("bf16", "enabled") else "f16" if self.config("fp16", "enabled") else "f32"
        return tuple(
            NamedTensor(
                name,
                whole[name],
                module.tensors[name].storage.dtype if name in module.tensors else held,
                "buffer" if name in module.buffers else "parameter" if name in module.trained else "frozen",
                tuple(self.gathered.states.get(name, ())),
            )
            for name in module.tensors or whole
            if name in whole
        )

    def reject_parts(self) -> None:
        """Reject tensor-parallel ranks at stage 3.

        Each keeps parts of frozen parameters, whose complete shapes are unknown.
        """
        if self.module.frozen or not self.is_shaped:
            what = "frozen parameters of" if self.module.frozen else "tensors without a shape, of"
            not_yet(
                self.module.file.path, f"a universal folder of stage 3 has {what} {self.ranks} tensor-parallel ranks"
            )

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def masters(self) -> dict[str, Shape]:
        """Read every state of every trained parameter, and return complete shapes."""
        root, file = self.place.root, self.module.file
        folders = _folders(root / ATOMS)
        shapes: dict[str, Shape] = {}
        atoms = [folders[n] / a for n in self.module.trained if n in folders for a in names_like(folders[n], ".pt")]
        atoms = [atom for atom in atoms if not skips(atom.stem, needed=atom.stem == "fp32")]
        if atoms:
            ahead(atoms[0], [partial(read_atom, root, atom) for atom in atoms])
        for name in self.module.trained:
            if name not in folders:
                fail(
                    "E452",
                    f"{name} is in param_shapes, and has no folder of atoms",
                    Label(str(root / ATOMS / name), "not there"),
                    Label(str(file.path), where=f"param_shapes/{name}"),
                )
            paths = [folders[name] / atom for atom in names_like(folders[name], ".pt")]
            paths = [path for path in paths if not skips(path.stem, needed=path.stem == "fp32")]
            for path in sorted(paths, key=lambda p: (p.stem != "fp32", p.stem)):
                atom = read_atom(root, path)
                self.atoms.append(atom)
                self.atom(atom, name, path.stem, shapes)
        info = Value.of(file).find(INFO) if self.stage < 3 else None
        words = vocabulary_of(file, info, shapes)
        self.words.update({name: shapes[name] for name in words})
        for name, shape in shapes.items():
            stated = self.module.shapes.get(name, shape)
            is_less = name in words and stated[1:] == shape[1:] and stated[0] > shape[0] == words[name]
            if self.ranks == 1 and prod(shape) != prod(stated) and not is_less:
                fail(
                    "E458",
                    f"the atom of {name} has {prod(shape)} elements, param_shapes says {list(stated)}",
                    Label(str(root / ATOMS / name)),
                    Label(str(file.path), where=f"param_shapes/{name}"),
                )
        extra = sorted(set(folders) - set(self.module.trained))
        if extra:
            self.gathered.not_read += [NotRead(f"{ATOMS}/{name}/", "it is of no trained parameter") for name in extra]
        return shapes

    def atom(self, part: TorchFile, name: str, state: str, shapes: dict[str, Shape]) -> None:
        """Read one file of one state.

        A dict with `param`, a tensor, or a number.
        """
        gathered = self.gathered
        value = Value.of(part)
        is_dict = isinstance(value.held, dict) and "param" in value.held
        if is_dict:
            gathered.not_read += unknown_keys(part.file, value.held, _ATOM, by="DeepSpeed")
            value = value.at("param")
        held = value.held
        if held is None or isinstance(held, int | float | bool | str):
            gathered.scalar(value, state, held, (name,))
            return
        tensor = value.tensor()
        # A parameter without dims has states without dims; a number of a parameter is no dict.
        is_own = is_dict and tensor.shape == self.module.shapes.get(name)
        if (not tensor.shape and not is_own) or is_step(state, tensor.shape):
            gathered.consumed.add((part.file, value.key))
            gathered.scalar(value, state, part.read_scalar(value.key or (name, state), tensor), (name,))
            gathered.scalar_extents.setdefault(state, {})[name] = part.extent(value.key, tensor)
            return
        gathered.keep(part, value.key, tensor)
        gathered.has((name,), state)
        self.forms.setdefault(is_dict, part)
        known = shapes.setdefault(name, tensor.shape)
        if prod(known) != prod(tensor.shape):
            fail(
                "E458",
                f"{state} of {name} is {list(tensor.shape)}, and another state {list(known)}",
                Label(str(part.path), f"{list(tensor.shape)}"),
                Label(str(part.path.parent), f"{list(known)}"),
            )

    def weights(self) -> None:
        """Read tensors of model states: complete weights, buffers, fragments of frozen parameters."""
        gathered, module = self.gathered, self.module
        for part in self.states:
            meta = Value.of(part)
            held = meta.find("module")
            for name, value in held.named() if held is not None else ():
                if not isinstance(value.held, TensorRef) or name in module.empty or name in module.left_out.names:
                    continue
                is_placeholder = name in module.trained or name in module.aliases
                is_placeholder |= name in module.frozen and self.stage == 3
                if is_placeholder and not self.is_whole:
                    gathered.consumed.add((part.file, value.key))
                else:
                    gathered.keep(part, value.key, value.held)
            fragments = meta.find("frozen_param_fragments")
            for _, value in fragments.named() if fragments is not None else ():
                tensor = value.tensor()
                if self.stage == 3 and tensor.shape != (0,):
                    gathered.keep(part, value.key, tensor)
                else:
                    gathered.consumed.add((part.file, value.key))

    def check_states(self) -> None:
        """One optimizer keeps the same states for all of a group."""
        for group in self.gathered.groups:
            for state in dict.fromkeys(s for m in group.members for s in self.gathered.states.get(m, ())):
                for member in group.members:
                    is_full = prod(self.module.shapes.get(member, (0,)))
                    if is_full and state not in self.gathered.states.get(member, {}):
                        fail(
                            "E452",
                            f"{member} has no {state}, and others of its group have",
                            Label(str(self.place.root / ATOMS / member / f"{state}.pt"), "not there"),
                        )

    # ---- values that are no tensors --------------------------------------------------------------------------------

    def settings(self) -> None:
        gathered, file = self.gathered, self.module.file
        origin = f"ds_config of {file.file}"
        gathered.set("stage", self.stage, f"files of {file.file}'s kind")
        gathered.set("files", len(self.states), "number of files of model states")
        if self.stage == 3:
            gathered.set("shaped", int(self.is_shaped), f"form of {next(iter(self.forms.values()), file).file}")
        for section in ("bf16", "fp16"):
            gathered.set(section, int(bool(self.config(section, "enabled"))), origin)
        gathered.set("weights", int(self.is_whole), "number of model-parallel ranks")
        gathered.set("saved_dp", self.saved_dp(), file.file)

    def saved_dp(self) -> int:
        stated = Value.of(self.module.file).find("dp_world_size")
        return stated.whole(1) if stated is not None else 1

    def config(self, section: str, key: str) -> object:
        """A value of ds_config; None where there is none."""
        config = Value.of(self.module.file).find("ds_config")
        found = config.find(section) if config is not None else None
        value = found.find(key) if found is not None else None
        return value.held if value is not None else None

    def groups(self) -> None:
        """Read the optimizer's groups, in the order of the source's files.

        Round robin is undone.
        """
        gathered = self.gathered
        stated = [tuple(group) for group in self.module.groups]
        shared = Value.of(self.shared) if self.shared is not None and isinstance(self.shared.value, dict) else None
        base = shared.find("optimizer_state_dict") if shared is not None and self.stage == 3 else None
        hypers: list[Value] = []
        for place in (base, shared):
            found = place.find("param_groups") if place is not None else None
            if found is not None and not hypers:
                hypers = found.items()
        if self.stage == 3 and hypers and all("params" in hyper.mapping() for hyper in hypers):
            numbers = [[s.whole() for s in hyper.at("params").items()] for hyper in hypers]
            joined = [tuple(n for s in mine if s < len(stated) for n in stated[s]) for mine in numbers]
        else:
            is_dealt = self.stage < 3 and self.config("zero_optimization", "round_robin_gradients")
            joined = [undeal(group, self.saved_dp() if is_dealt else 1) for group in stated]
        if self.shared is not None:
            more = range(len(joined), len(hypers))
            why = "param_shapes has no such group"
            gathered.not_read += [NotRead(f"{self.shared.file}: param_groups/{g}", why, kind="value") for g in more]
        for g, members in enumerate(joined):
            hyper = hyper_of(hypers[g]) if g < len(hypers) else {}
            gathered.groups.append(ParameterGroup(str(g), members, hyper))
        states = base.find("state") if base is not None else None
        if self.shared is not None:  # a copy of one rank's shard, whose tensors atoms hold
            held_twice = (e for e in self.shared.extents() if e.key[:1] in _SHARD or e.key[:2] == _STATES)
            gathered.consumed.update((extent.file, extent.key) for extent in held_twice)
            held, lead = base.held if base is not None else None, "optimizer_state_dict/"
            gathered.not_read += unknown_of_torch(self.shared.file, held, lead, len(stated))
        for s, group in enumerate(stated):
            if self.shared is not None and states is not None and (held := states.find(s)) is not None:
                self.shared_numbers(self.shared, held, group)

    def shared_numbers(self, part: TorchFile, states: Value, members: tuple[str, ...]) -> None:
        """Numbers that all parameters of a sub-group share at stage 3."""
        gathered = self.gathered
        for name, value in states.named():
            held = value.held
            if isinstance(held, TensorRef) and held.shape and not is_step(name, held.shape):
                continue
            kept = gathered.scalars.setdefault(name, {})
            if isinstance(held, TensorRef):
                gathered.consumed.add((part.file, value.key))
                extent = part.extent(value.key, held)
                gathered.scalar_extents.setdefault(name, {}).update(dict.fromkeys(members, extent))
                kept.update(dict.fromkeys(members, part.read_scalar(value.key, held)))
            elif held is None or isinstance(held, int | float | bool | str):
                kept.update(dict.fromkeys(members, held))
            else:
                value.wrong("a number or a tensor")


def _folders(atoms: Path) -> dict[str, Path]:
    """The folders with files of atoms, by names of parameters.

    DeepSpeed makes several folders of a name with `/`.
    """
    found: dict[str, Path] = {}
    for at, inner, files in os.walk(atoms):
        here = Path(at)
        folders = [here] if here != atoms and (files or not inner) else []
        for path in (*folders, *(here / name for name in inner if (here / name).is_symlink())):
            found[path.relative_to(atoms).as_posix()] = path
    return dict(sorted(found.items()))


def shown(names: list[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


# ---- the model in its model states -----------------------------------------------------------------------------------


def whole_module(metas: tuple[TorchFile, ...], stage: int) -> RankModule:
    """The module of all stages.

    metas: the files of model states, by model-parallel rank.
    """
    first = metas[0]
    meta = Value.of(first)
    if meta.find("module") is not None:
        return module_of(first, groups_of(first), 3 if stage == 3 else _stage_of(meta), meta.find("shared_params"))
    groups: list[dict[str, Shape]] = []
    for part in _one_of_each_stage(metas):
        for g, mine in enumerate(groups_of(part)):
            if g == len(groups):
                groups.append({})
            groups[g] |= {name: shape for name, shape in mine.items() if name not in groups[g]}
    return RankModule(first, tuple(groups), shapes={name: shape for mine in groups for name, shape in mine.items()})


def _stage_of(meta: Value) -> int:
    """1 or 2.

    Only stage 2 has a field of excluded frozen parameters.
    """
    config = meta.find("ds_config")
    zero = config.find("zero_optimization") if config is not None else None
    stated = zero.find("stage") if zero is not None else None
    return 2 if stated is not None and stated.held == 2 else 1


def _one_of_each_stage(metas: tuple[TorchFile, ...]) -> tuple[TorchFile, ...]:
    """The first tensor-parallel rank of each stage.

    The last coordinate of a rank's number is that of tp.
    """
    dims = Value.of(metas[0]).find("checkpoint_parallel_dimensions")
    tp = dims.find("tp_degree") if dims is not None else None
    return metas[:: tp.whole(1) if tp is not None else 1]


def lost_buffers(metas: tuple[TorchFile, ...]) -> list[str]:
    """Buffers of a pipeline's layers, whose files are not there."""
    out: dict[str, None] = {}
    for part in metas:
        value = Value.of(part)
        stated = value.find("buffer_names")
        if stated is not None and value.find("module") is None:
            out |= dict.fromkeys(stated.texts())
    return [*out]


def cuts(gathered: Gathered, module: RankModule, shapes: Mapping[str, Shape]) -> dict[str, Sharding]:
    """The cuts of its tensors, from lists of patterns.

    shapes: of complete tensors.
    """
    named: Shapes = {name: (shape,) for name, shape in shapes.items() if shape}
    return cuts_over_tp(gathered, module.file, module, named)
