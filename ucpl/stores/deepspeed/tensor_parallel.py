"""A step's folder whose ranks hold parts of tensors: each tensor-parallel rank's files are those of a dense model of its own.

How the parts make up whole tensors is in universal_checkpoint_info (cuts). Where that says nothing of a tensor, its shape
here is rank 0's, and a layout of the user's has to say it: `infer` refuses.

Not here: tensor parallelism together with pipeline stages or experts (E457).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Envelope, Sharding
from ucpl.stores.carrying import lifted
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.deepspeed.cuts import INFO, shardings_of
from ucpl.stores.deepspeed.names import OWNED, Listing
from ucpl.stores.deepspeed.order import alignment_elements
from ucpl.stores.deepspeed.reading import (
    _blobs,
    _degree,
    _flat_shards,
    _Found,
    _meta,
    _Model,
    _model,
    _model_payload,
    _named,
    _not_yet,
    _section,
    _settings,
    _sliced_shards,
    _stage,
    _whole,
)
from ucpl.stores.torch_files import TorchFile, read_torch_file


def open_tensor_parallel(top: Path, root: Path, tag: str, listing: Listing) -> Checkpoint:
    """Read all headers of one step. Raises: UcplError E400-E427, E45x, E46x."""
    is_sliced = any(dp is not None for dp, _ in listing.models)  # stage 3
    degree = 1 + max(mp for _, mp in (*listing.models, *listing.optims))
    parts = [_of_rank(listing, tp) for tp in range(degree)]
    metas = [_model_files(root, part, is_sliced) for part in parts]
    first = metas[0][0]
    dims = first.value.get("checkpoint_parallel_dimensions") or {}
    if dims.get("pp_degree", 1) != 1:
        _not_yet(first.path, "it is both pipeline and tensor parallel")
    world = first.value.get("mp_world_size", degree)
    if world != degree:
        fail(
            "E454",
            f"there are files of {degree} model-parallel ranks, and mp_world_size is {world}",
            Label(str(first.path), where="mp_world_size"),
            Label(str(root)),
        )
    dp = 0
    optims: list[list[TorchFile]] = []
    for part, (meta, *_) in zip(parts, metas, strict=True):
        dp = _degree(part, meta.value, meta, is_sliced)
        optims.append([read_torch_file(root, part.optims[rank, 0]) for rank in range(dp)] if part.optims else [])
    stage = _stage([file for row in optims for file in row], is_sliced)
    found = _Found()
    _settings(found, first.value, first, parts[0], stage, dp, optims[0])
    found.set("tp", degree, f"names of the files of {root.name}, and mp_world_size of {first.file}")
    grain = _section(first.value.get("ds_config"), "tensor_parallel").get("tp_grain_size")
    if isinstance(grain, int) and grain > 0:
        found.set("tp_grain_size", int(grain), f"ds_config of {first.file}")
    else:
        found.set("tp_grain_size", 1, "DeepSpeed's default")
    models: list[_Model] = []
    ranks: list[_Found] = []
    for tp, (files, row) in enumerate(zip(metas, optims, strict=True)):
        mine = _Found(
            found.payload,
            found.consumed,
            found.states,
            found.scalars,
            found.scalar_extents,
            found.settings,
            found.blobs,
        )
        files = files[:dp] if is_sliced else files[:1]
        said: dict[Any, Any] = files[0].value
        # `shared_params` stands in the first rank's file alone.
        if tp and not said.get("shared_params"):
            said = {**said, "shared_params": first.value.get("shared_params")}
        model = _model(files[0], said, stage)
        _same_names(models[0] if models else model, model)
        models.append(model)
        _model_payload(mine, model, files, stage, dp)
        if tp == 0:
            parameters = [model.tensors[n] for n in model.shapes if n not in model.buffers]
            wide = max((DTYPES[t.storage.dtype].itemsize for t in parameters), default=4)
            aligned = found.settings["parameter_alignment"]
            found.set("alignment", alignment_elements(wide) if aligned.value else 1, aligned.origin)
        if stage in (1, 2):
            _flat_shards(mine, model, row, dp)
        elif stage == 3:
            _sliced_shards(mine, model, row, files, dp)
        else:
            _whole(mine, model)
        ranks.append(mine)
    _same_groups(ranks, models)
    found.groups = ranks[0].groups
    found.stated = [evolve(flat, coordinates={"tp": tp}) for tp, mine in enumerate(ranks) for flat in mine.stated]
    found.remarks = list(dict.fromkeys(remark for mine in ranks for remark in mine.remarks))
    local = {name: [model.shapes[name] for model in models] for name in models[0].shapes}
    buffers = models[0].buffers
    of_parameters = {name: shapes for name, shapes in local.items() if name not in buffers}
    shardings = shardings_of(first, first.value.get(INFO), of_parameters)
    shardings |= {
        name: Sharding(shapes[0], origin=f"buffer_names of {first.file}: buffers of one shape are copies")
        for name, shapes in local.items()
        if name in buffers and len(set(shapes)) == 1
    }
    whole = {name: shardings[name].shape if name in shardings else shapes[0] for name, shapes in local.items()}
    unknown = [name for name in local if name not in shardings]
    if unknown:
        found.remarks.append(
            f"nothing says how {unknown[0]} is cut over tp"
            + (f", nor {len(unknown) - 1} more" if len(unknown) > 1 else "")
            + ": a layout has to"
        )
    _blobs(found, models[0], optims[0])
    every = [file for row in metas for file in (row[:dp] if is_sliced else row[:1])]
    ordered = (*every, *(file for row in optims for file in row))
    client = [{k: lifted(v, file.file) for k, v in file.value.items() if k not in OWNED} for file in every]
    version = str(first.value.get("ds_version", ""))
    return Checkpoint(
        top=top,
        root=root,
        tag=tag,
        framework="deepspeed",
        version=version,
        extents=found.payload,
        carried_extents={
            (part.file, extent.key): extent
            for part in ordered
            for extent in part.extents()
            if (place := (part.file, extent.key)) not in found.payload and place not in found.consumed
        },
        envelope=Envelope(
            framework="deepspeed",
            version=version,
            settings=found.settings,
            groups=tuple(found.groups),
            scalars=found.scalars,
            blobs=found.blobs,
            carried=client[0],
        ),
        tensors=_named(evolve(models[0], shapes=whole), found),
        aliases=models[0].aliases,
        stated=tuple(found.stated),
        files=tuple(part.file for part in ordered),
        remarks=tuple(found.remarks),
        carry={
            "scalar_extents": found.scalar_extents,
            # of each tp rank, and within it of each dp rank where each wrote a file (stage 3)
            "client_state": client,
            "client_state_tp": degree,
            "local_shapes": local,
        },
        shardings=shardings,
    )


def _of_rank(listing: Listing, tp: int) -> Listing:
    """One rank's files, as a folder without model parallelism would have them."""
    return Listing(
        listing.root,
        {(dp, 0): name for (dp, mp), name in listing.models.items() if mp == tp},
        {(dp, 0): name for (dp, mp), name in listing.optims.items() if mp == tp},
        listing.prefix,
    )


def _model_files(root: Path, part: Listing, is_sliced: bool) -> list[TorchFile]:
    some = next(iter((*part.models.values(), *part.optims.values())), "")
    if not part.models:
        fail("E452", "a tensor-parallel rank has no file of model states", Label(str(root)), Label(str(root / some)))
    order = sorted(part.models, key=lambda key: -1 if key[0] is None else key[0])
    if is_sliced and order[0][0] != 0:
        missing = f"zero_pp_rank_0_{part.models[order[0]].partition('_rank_')[2].partition('_')[2]}"
        fail("E452", f"{missing} is missing", Label(str(root / missing), "not there"), Label(str(root)))
    files = [read_torch_file(root, part.models[key]) for key in order]
    for file in files:
        _meta(file)
    return files


def _same_names(one: _Model, other: _Model) -> None:
    """All ranks have the same tensors, in one order, of the same kinds, and each has some of each."""
    for what, mine, theirs in (
        ("tensors", list(one.tensors), list(other.tensors)),
        ("trained parameters", list(one.trained), list(other.trained)),
        ("frozen parameters", list(one.frozen), list(other.frozen)),
        ("buffers", sorted(one.buffers), sorted(other.buffers)),
        ("aliases", sorted(one.aliases), sorted(other.aliases)),
        ("tensors without elements", sorted(one.empty), sorted(other.empty)),
    ):
        if mine != theirs:
            differ = sorted(set(mine) ^ set(theirs)) or [a for a, b in zip(mine, theirs, strict=False) if a != b]
            fail(
                "E463",
                f"tensor-parallel ranks do not have the same {what}: {differ[0]}",
                Label(str(one.file.path), where="module"),
                Label(str(other.file.path), where="module"),
            )
    for name in one.shapes:
        if len(one.shapes[name]) != len(other.shapes[name]):
            fail(
                "E463",
                f"{name} is {list(one.shapes[name])} on one tensor-parallel rank and {list(other.shapes[name])} on another",
                Label(str(one.file.path), where=f"module/{name}"),
                Label(str(other.file.path), where=f"module/{name}"),
            )


def _same_groups(ranks: list[_Found], models: list[_Model]) -> None:
    """The optimizer's groups are one model's: the same members in the same order on every rank."""
    for mine, model in zip(ranks[1:], models[1:], strict=True):
        if [g.members for g in mine.groups] != [g.members for g in ranks[0].groups]:
            fail(
                "E463",
                "tensor-parallel ranks do not have the same parameter groups",
                Label(str(models[0].file.path), where="param_shapes"),
                Label(str(model.file.path), where="param_shapes"),
            )
