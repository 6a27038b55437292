"""A universal folder before its tensors' bytes: model states, a file for each state of each parameter, and what all share."""

from __future__ import annotations

from math import prod

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Flat, StoredTensor, Structure
from ucpl.stores.carrying import Storages
from ucpl.stores.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.stores.deepspeed.model_states import model_states
from ucpl.stores.deepspeed.names import model_file
from ucpl.stores.deepspeed.optimizer_states import clip_grad, scaling, stage_of
from ucpl.stores.deepspeed.target import FORMAT_VERSION, KNOWN_GLOBALS, TargetFile, Writer
from ucpl.stores.pickles import unsafe_globals

ATOMS = "zero"
GLOBAL_STATE = "zero/optimizer_state.pt"
LATEST = "latest_universal"
VERSION = 0.4


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    layers = source.pipeline.layers if source.pipeline is not None else ()
    experts = source.experts.of.values() if source.experts is not None else ()
    apart = next((one.file for one in (*layers, *experts) if one.file is not None), None)
    if apart is not None:
        fail("E471", f"a universal folder has no place for files such as {apart}", Label(str(source.root / apart)))
    stage = int(structure.settings.get("stage") or 1)
    shapes = {t.name: t.shape for t in structure.tensors}
    flats = []
    for g, (name, members) in enumerate(structure.groups):
        sizes = [prod(shapes[m]) for m in members]
        starts = [sum(sizes[:i]) for i in range(len(members))]
        flats.append(Flat(g, name, {}, tuple((m, shapes[m]) for m in members), tuple(starts), sum(sizes)))
    # Stage 2 would ask for frozen parameters a second time, which no universal folder has.
    settings = {**structure.settings, "dp": 1, "tp": 1, "pp": 1, "stage": 3 if stage == 3 else 1}
    writer = Writer.of(evolve(structure, flats=tuple(flats), settings=settings), targets, source)
    files: list[tuple[TargetFile, object]] = []
    for rank in range(int(structure.settings.get("files") or 1) if stage == 3 else 1):
        model = TargetFile(model_file(stage, rank, 0), Storages(writer.carried))
        writer.stand(0, rank)
        value = model_states(writer, model, rank)
        value.setdefault("universal_checkpoint_info", {"universal_checkpoint_version": VERSION})
        files.append((model, value))
    writer.stand(0, 0)
    shared = TargetFile(GLOBAL_STATE, Storages(writer.carried))
    files.append((shared, _shared(writer, shared, stage)))
    by_file: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        if i not in writer.used:
            by_file.setdefault(target.file, []).append(i)
    for path, indices in by_file.items():
        file = TargetFile(path, Storages(writer.carried))
        (i,) = indices
        made = writer.tensor(file, targets[i].key, path.endswith("/fp32.pt"))
        files.append((file, {"param": made, "cat_dim": 0} if targets[i].key else made))
    if stage < 3:
        for state, held in source.envelope.scalars.items():
            for member in held:
                if member in shapes:
                    file = TargetFile(f"{ATOMS}/{member}/{state}.pt", Storages(writer.carried))
                    files.append((file, writer.scalar(file, state, (member,))))
    folder = tag or writer.folder
    folder = folder if folder.endswith("_universal") else f"{folder}_universal"
    unsafe = {g for _, v in files for g in unsafe_globals(v)} - KNOWN_GLOBALS
    return Skeleton(
        folder=folder,
        files=tuple(
            SkeletonFile(path=f.path, value=v, storage_of=f.storage_of, carried=tuple(f.storages.carried))
            for f, v in files
        ),
        texts={LATEST: folder},
        unsafe_globals=tuple(sorted(unsafe)),
    )


def _shared(writer: Writer, file: TargetFile, stage: int) -> dict[str, object]:
    """zero/optimizer_state.pt: what all parameters share."""
    groups = [{**file.storages.value(hyper), "params": [g]} for g, hyper in enumerate(writer.hypers)]
    out = {
        **scaling(writer, file),
        **clip_grad(writer),
        "zero_stage": stage_of(stage),
        "ds_version": FORMAT_VERSION,
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
