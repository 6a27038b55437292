"""DeepSpeed's universal format: one small file for each state of each parameter, beside copied files of model states.

Read in deepspeed 0.19.8: checkpoint/ds_to_universal.py (what is written), checkpoint/universal_checkpoint.py, stage3.py
`load_hp_checkpoint_state_from_checkpoint_dir_stage3` and base_optimizer.py (what is loaded).

Known of the loader, which no file can change: it restores neither buffers nor frozen parameters, and at stage 3 it gives every
parameter group the hyper-parameters of the first.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import attrs

from ucpl.errors import Label, fail
from ucpl.extents import (
    Envelope,
    Extent,
    Flat,
    Key,
    NamedTensor,
    ParameterGroup,
    Setting,
    StoredTensor,
    Structure,
    TensorRef,
)
from ucpl.stores.carrying import Storages, lifted
from ucpl.stores.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.stores.deepspeed import reading, writing
from ucpl.stores.deepspeed.names import OWNED, list_files, model_file
from ucpl.stores.deepspeed.order import undeal
from ucpl.stores.pickles import unsafe_globals
from ucpl.stores.torch_files import TorchFile, read_torch_file

ATOMS = "zero"
GLOBAL_STATE = "zero/optimizer_state.pt"
LATEST = "latest_universal"
VERSION = 0.4


class Universal:
    name = "universal"

    def recognises(self, path: Path) -> bool:
        """A folder of atoms, or a save folder whose only pointer is `latest_universal`."""
        if not path.is_dir():
            return False
        if (path / ATOMS).is_dir() and any(p.is_dir() for p in (path / ATOMS).iterdir()):
            return True
        return (path / LATEST).is_file() and not (path / "latest").is_file()

    def open(self, path: Path) -> Checkpoint:
        """Read the headers of all atoms and of the model states. Raises: UcplError E452-E463."""
        root, tag = _step(path)
        return _open(path, root, tag)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A folder that `load_universal` takes at any degree of data parallelism. Raises: UcplError E470-E479."""
        return _skeleton(structure, targets, source, tag)


def _step(path: Path) -> tuple[Path, str]:
    if (path / ATOMS).is_dir():
        return path, path.name
    tag = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    root = path / tag
    if not tag or Path(tag).is_absolute() or ".." in Path(tag).parts or not (root / ATOMS).is_dir():
        fail(
            "E450",
            f"{LATEST} names {tag!r}, and there is no such folder of atoms",
            Label(str(path / LATEST), f"says {tag!r}"),
            remedy="give the step's folder itself, or correct the pointer",
        )
    return root, tag


# ---- reading ---------------------------------------------------------------------------------------------------------


def _open(top: Path, root: Path, tag: str) -> Checkpoint:
    listing = list_files(root)
    if not listing.models:
        fail("E452", f"{root} has no file of model states", Label(str(root), "holds atoms only"))
    names = [listing.models[place] for place in sorted(listing.models, key=lambda p: (p[1], p[0] or 0))]
    metas = [read_torch_file(root, name) for name in names]
    state = read_torch_file(root, GLOBAL_STATE) if (root / GLOBAL_STATE).is_file() else None
    shared = state.value if state is not None and isinstance(state.value, dict) else {}
    stage = 3 if any(dp is not None for dp, _ in listing.models) else 1
    file = metas[0]
    meta = reading._meta(file)
    model = reading._model(file, meta, 3 if stage == 3 else 2)
    ranks = 1 + max(mp for _, mp in listing.models)
    found = reading._Found()
    atoms = {p.name: p for p in sorted((root / ATOMS).iterdir()) if p.is_dir()}
    shapes: dict[str, tuple[int, ...]] = {}
    kept: dict[str, dict[str, Extent]] = {}
    files: list[TorchFile] = []
    for name in model.trained:
        if name not in atoms:
            fail(
                "E452",
                f"{name} is in param_shapes, and has no folder of atoms",
                Label(str(root / ATOMS / name), "not there"),
                Label(str(file.path), where=f"param_shapes/{name}"),
            )
        for path in sorted(atoms[name].glob("*.pt"), key=lambda p: (p.stem != "fp32", p.stem)):
            one = read_torch_file(root, str(path.relative_to(root)))
            files.append(one)
            _atom(found, one, name, path.stem, shapes, kept)
    expected = model.shapes
    for name, shape in shapes.items():
        if ranks == 1 and prod(shape) != prod(expected[name]):
            fail(
                "E458",
                f"the atom of {name} has {prod(shape)} elements, param_shapes says {list(expected[name])}",
                Label(str(root / ATOMS / name)),
                Label(str(file.path), where=f"param_shapes/{name}"),
            )
    whole = {n: (shapes.get(n, s) if stage < 3 else s) for n, s in expected.items()}
    is_whole = stage < 3 and ranks == 1
    for part in metas if stage == 3 else metas[:1]:
        module = part.value.get("module") or {}
        for name, value in module.items():
            if not isinstance(value, TensorRef) or name in model.empty:
                continue
            key: Key = ("module", name)
            if name in model.trained or name in model.aliases or (name in model.frozen and stage == 3):
                if is_whole:
                    found.payload[part.file, key] = part.extent(key, value)
                else:
                    found.consumed.add((part.file, key))
            else:
                found.payload[part.file, key] = part.extent(key, value)
        for name, value in (part.value.get("frozen_param_fragments") or {}).items():
            key = ("frozen_param_fragments", name)
            if stage == 3 and isinstance(value, TensorRef) and value.shape != (0,):
                found.payload[part.file, key] = part.extent(key, value)
            else:
                found.consumed.add((part.file, key))
    _settings(found, meta, file, stage, len(metas) if stage == 3 else 1, is_whole)
    _groups(found, model, file, meta, shared, stage, state)
    for group in found.groups:  # one optimizer keeps the same states for all of a group
        for state_name in dict.fromkeys(s for m in group.members for s in found.states.get(m, ())):
            for member in group.members:
                if prod(expected.get(member, (0,))) and state_name not in found.states.get(member, {}):
                    fail(
                        "E452",
                        f"{member} has no {state_name}, and others of its group have",
                        Label(str(root / ATOMS / member / f"{state_name}.pt"), "not there"),
                    )
    reading._blobs(found, model, [])
    for key_ in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
        if key_ in shared and state is not None:
            found.blobs[key_] = lifted(shared[key_], state.file)
    extra = sorted(set(atoms) - set(model.trained))
    if extra:
        found.remarks.append(
            f"atoms of {', '.join(extra[:6])}{', ...' if len(extra) > 6 else ''} are no trained parameters: not read"
        )
    if ranks > 1:
        found.remarks.append(
            "the source was model-parallel: its cut weights in `module` are not read, the masters are whole"
        )
    client = {key: lifted(value, file.file) for key, value in file.value.items() if key not in OWNED}
    version = str(meta.get("ds_version", ""))
    tensors = tuple(
        NamedTensor(
            name,
            whole[name],
            model.tensors[name].storage.dtype,
            "buffer" if name in model.buffers else "parameter" if name in model.trained else "frozen",
            tuple(found.states.get(name, ())),
        )
        for name in model.tensors
        if name in whole
    )
    return Checkpoint(
        top=top,
        root=root,
        tag=tag,
        framework="universal",
        version=version,
        extents=found.payload,
        carried_extents={
            (part.file, e.key): e
            for part in metas
            for e in part.extents()
            if (part.file, e.key) not in found.payload and (part.file, e.key) not in found.consumed
        },
        envelope=Envelope(
            framework="universal",
            version=version,
            settings=found.settings,
            groups=tuple(found.groups),
            scalars=found.scalars,
            blobs=found.blobs,
            carried=client,
        ),
        tensors=tensors,
        aliases=model.aliases,
        files=tuple(f.file for f in (*metas, *([state] if state else []), *files)),
        remarks=tuple(found.remarks),
        carry={"scalar_extents": found.scalar_extents, "client_state": [client]},
    )


def _atom(
    found: Any,
    part: TorchFile,
    name: str,
    state: str,
    shapes: dict[str, tuple[int, ...]],
    kept: dict[str, dict[str, Extent]],
) -> None:
    """One file of one state: a dict with `param`, a bare tensor, or a number."""
    value = part.value
    key: Key = ()
    if isinstance(value, dict) and "param" in value:
        value, key = value["param"], ("param",)
    if not isinstance(value, TensorRef):
        found.scalars.setdefault(state, {})[name] = value
        return
    if not value.shape or (state == "step" and prod(value.shape) == 1):
        found.scalars.setdefault(state, {})[name] = part.read_scalar(value)
        found.scalar_extents.setdefault(state, {})[name] = part.extent(key, value)
        return
    found.payload[part.file, key] = part.extent(key, value)
    found.states.setdefault(name, {})[state] = None
    known = shapes.setdefault(name, value.shape)
    if prod(known) != prod(value.shape):
        fail(
            "E458",
            f"{state} of {name} is {list(value.shape)}, and another state {list(known)}",
            Label(str(part.path), f"{list(value.shape)}"),
            Label(str(Path(part.path).parent), f"{list(known)}"),
        )


def _settings(found: Any, meta: dict[Any, Any], file: TorchFile, stage: int, dp: int, is_whole: bool) -> None:
    config = meta.get("ds_config") or {}
    origin = f"ds_config of {file.file}"
    found.set("stage", stage, f"files of {file.file}'s kind")
    found.set("files", dp, "number of files of model states")
    found.set("bf16", int(bool((config.get("bf16") or {}).get("enabled"))), origin)
    found.set("fp16", int(bool((config.get("fp16") or {}).get("enabled"))), origin)
    found.set("weights", int(is_whole), "number of model-parallel ranks")
    found.settings["saved_dp"] = Setting(int(meta.get("dp_world_size") or 1), file.file)


def _groups(
    found: Any,
    model: Any,
    file: TorchFile,
    meta: dict[Any, Any],
    shared: dict[Any, Any],
    stage: int,
    part: TorchFile | None,
) -> None:
    """The optimizer's groups: param_shapes in the order that the source's files had, dealt back where it was dealt."""
    stated = [tuple(group) for group in meta.get("param_shapes") or ()]
    base = shared.get("optimizer_state_dict") if stage == 3 else None
    hypers = (base or {}).get("param_groups") or shared.get("param_groups") or []
    zero = (meta.get("ds_config") or {}).get("zero_optimization") or {}
    ways = int(meta.get("dp_world_size") or 1) if zero.get("round_robin_gradients") and stage < 3 else 1
    if stage == 3 and hypers and all("params" in h for h in hypers):
        joined = [tuple(n for s in h["params"] if s < len(stated) for n in stated[s]) for h in hypers]
    else:
        joined = [undeal(group, ways) for group in stated]
    for g, members in enumerate(joined):
        hyper = {k: v for k, v in (hypers[g] if g < len(hypers) else {}).items() if k != "params"}
        found.groups.append(ParameterGroup(str(g), tuple(members), lifted(hyper, file.file)))
    if stage == 3 and base and part is not None:
        for s, state in (base.get("state") or {}).items():
            group = stated[s] if isinstance(s, int) and s < len(stated) else ()
            for name, value in state.items():
                if isinstance(value, TensorRef) and value.shape:
                    continue
                for member in group:
                    if isinstance(value, TensorRef):
                        key = ("optimizer_state_dict", "state", s, name)
                        found.scalar_extents.setdefault(name, {})[member] = part.extent(key, value)
                    kept = part.read_scalar(value) if isinstance(value, TensorRef) else value
                    found.scalars.setdefault(name, {})[member] = kept


# ---- writing ---------------------------------------------------------------------------------------------------------


def _skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    stage = int(structure.settings.get("stage") or 1)
    shapes = {t.name: t.shape for t in structure.tensors}
    flats = []
    for g, (name, members) in enumerate(structure.groups):
        sizes = [prod(shapes[m]) for m in members]
        starts = [sum(sizes[:i]) for i in range(len(members))]
        flats.append(Flat(g, name, {}, tuple((m, shapes[m]) for m in members), tuple(starts), sum(sizes)))
    # Stage 2 would ask for frozen parameters a second time, which no universal folder has.
    settings = {**structure.settings, "dp": 1, "tp": 1, "pp": 1, "stage": 3 if stage == 3 else 1}
    writer = writing._Writer.of(attrs.evolve(structure, flats=tuple(flats), settings=settings), targets, source)
    files: list[tuple[Any, Any]] = []
    for rank in range(int(structure.settings.get("files") or 1) if stage == 3 else 1):
        model = writing._File(model_file(stage, rank, 0), Storages(writer.carried))
        writer.stand(0, rank)
        value = writer.model(model, rank)
        value.setdefault("universal_checkpoint_info", {"universal_checkpoint_version": VERSION})
        files.append((model, value))
    writer.stand(0, 0)
    shared = writing._File(GLOBAL_STATE, Storages(writer.carried))
    files.append((shared, _shared(writer, shared, stage)))
    by_file: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        if i not in writer.used:
            by_file.setdefault(target.file, []).append(i)
    for path, indices in by_file.items():
        file = writing._File(path, Storages(writer.carried))
        (i,) = indices
        made = writer.tensor(file, targets[i].key, path.endswith("/fp32.pt"))
        files.append((file, {"param": made, "cat_dim": 0} if targets[i].key else made))
    if stage < 3:
        for state, held in source.envelope.scalars.items():
            for member in held:
                if member in shapes:
                    file = writing._File(f"{ATOMS}/{member}/{state}.pt", Storages(writer.carried))
                    files.append((file, writer.scalar(file, state, (member,))))
    folder = tag or source.tag or f"global_step{writer.blob('global_steps', 0)}"
    folder = folder if folder.endswith("_universal") else f"{folder}_universal"
    unsafe = {g for _, v in files for g in unsafe_globals(v)} - writing.KNOWN_GLOBALS
    return Skeleton(
        folder=folder,
        files=tuple(
            SkeletonFile(path=f.path, value=v, storage_of=f.storage_of, carried=tuple(f.storages.carried))
            for f, v in files
        ),
        texts={LATEST: folder},
        unsafe_globals=tuple(sorted(unsafe)),
    )


def _shared(writer: Any, file: Any, stage: int) -> dict[str, Any]:
    """zero/optimizer_state.pt: what all parameters share."""
    groups = [{**file.storages.value(hyper), "params": [g]} for g, hyper in enumerate(writer.hypers)]
    out = {
        **writer.scaling(file),
        **writer.clip_grad(),
        "zero_stage": writing._stage(stage),
        "ds_version": writing.FORMAT_VERSION,
    }
    members = [m for _, ms in writer.structure.groups for m in ms]
    if stage == 3:
        state = {
            g: {name: writer.scalar(file, name, ms) for name in writer.source.envelope.scalars}
            for g, (_, ms) in enumerate(writer.structure.groups)
        }
        out["partition_count"] = 1
        out["optimizer_state_dict"] = {
            "state": {g: {k: v for k, v in s.items() if v is not None} for g, s in state.items()},
            "param_groups": groups,
        }
    else:
        out["group_paddings"] = [0] * len(groups)
        out["partition_count"] = [1] * len(groups)
        out["param_alignment_paddings"] = [[0] * len(ms) for _, ms in writer.structure.groups]
    out["param_groups"] = groups
    assert members or not groups
    return out


__all__ = ["Universal"]
