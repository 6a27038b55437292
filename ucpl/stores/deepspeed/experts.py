"""A step's folder of a model with deepspeed.moe layers: each expert in a file of its own, its optimizer state in flat buffers
that fewer ranks share.

Experts have global numbers in their files and local ones (0 to experts / ep - 1) in param_shapes and in the live module; a
tensor's name here has the global number. Of the `dp` ranks of the dense parameters, `ep` hold different experts, and
dp / ep hold the same ones and cut their optimizer state among them. Read in deepspeed 0.19.8: runtime/engine.py
(`_save_moe_checkpoint`, `load_moe_state_dict`), utils/groups.py (`_create_expert_and_data_parallel`), moe/utils.py.

Not here: AutoEP's fused experts, experts without ZeRO (expp_rank files), beside tensor or pipeline parallelism (E457).
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Envelope, NamedTensor, ParameterGroup, TensorRef
from ucpl.extents.experts import Expert, Experts
from ucpl.stores.carrying import lifted
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.deepspeed.names import OWNED, Listing
from ucpl.stores.deepspeed.order import Shape, alignment_elements
from ucpl.stores.deepspeed.pipeline import evolve_found
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
    _param_shapes,
    _section,
    _settings,
    _stage,
)
from ucpl.stores.torch_files import TorchFile, read_torch_file

_FILE = re.compile(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt\Z")
_MARK = ".deepspeed_moe.experts.deepspeed_experts."
_NAME = re.compile(rf"(?P<module>.*{re.escape(_MARK)})(?P<number>\d+)\.(?P<inner>.+)\Z")


def open_experts(top: Path, root: Path, tag: str, listing: Listing) -> Checkpoint:
    """Read all headers of one step. Raises: UcplError E400-E427, E45x, E46x."""
    name = listing.models.get((None, 0))
    if any(mp for _, mp in (*listing.models, *listing.optims)):
        _not_yet(root / listing.experts[0], "it has experts beside tensor or pipeline parallelism")
    if name is None:
        missing = root / "mp_rank_00_model_states.pt"
        fail(
            "E452",
            f"{missing.name} is missing",
            Label(str(missing), "not there"),
            Label(str(root / listing.experts[0])),
        )
    if not listing.optims:
        _not_yet(root / listing.experts[0], "it has experts and no ZeRO")
    file = read_torch_file(root, name)
    meta = _meta(file)
    if meta.get("ds_autoep_layers") or meta.get("autoep_layers"):
        _not_yet(file.path, "its experts are AutoEP's")
    dp = _degree(listing, meta, file, False)
    optims = [read_torch_file(root, listing.optims[rank, 0]) for rank in range(dp)]
    stage = _stage(optims, False)
    found = _Found()
    _settings(found, meta, file, listing, stage, dp, optims)
    tensors, of, expert_files = _expert_files(listing)
    shapes = _param_shapes(file, meta.get("param_shapes"))
    kinds = [{_NAME.match(n) is not None for n in group} for group in shapes]
    for g, kind in enumerate(kinds):
        if len(kind) > 1:
            _not_yet(file.path, f"parameter group {g} has experts and others")
    ours = frozenset(g for g, kind in enumerate(kinds) if True in kind)
    dense = frozenset(range(len(shapes))) - ours
    if not ours:
        _not_yet(file.path, "no group of the optimizer has experts")
    if min(ours) < max(dense, default=-1):
        _not_yet(file.path, "a parameter group of experts stands before another")
    edp = _expert_degree(optims[0], ours, dp)
    ep = dp // edp
    is_data_first = bool(_section({"c": meta.get("ds_config")}, "c").get("use_data_before_expert_parallelism"))
    origin = f"partition_count of {optims[0].file}"
    found.set("ep", ep, origin)
    found.set("data_first", int(is_data_first), f"use_data_before_expert_parallelism in ds_config of {file.file}")
    experts = Experts(ep, is_data_first, of)
    _check_counts(file, meta, of, ep, shapes, ours)

    # the dense part is as without experts
    plain = evolve(file, value={**meta, "param_shapes": [shapes[g] for g in sorted(dense)]})
    model = _model(plain, plain.value, stage)
    _model_payload(found, model, [plain], stage, dp)
    for (path, key), (part, ref) in expert_files.items():
        found.payload[path, key] = part.extent(key, ref)
    # What the configuration makes of it, whose own files are checked below.
    every = {**model.tensors, **tensors}
    wide = max((DTYPES[every[n].storage.dtype].itemsize for n in (*model.trained, *tensors)), default=4)
    aligned = found.settings["parameter_alignment"]
    found.set("alignment", alignment_elements(wide) if aligned.value else 1, aligned.origin)
    first = _local_model(file, meta, every, shapes, experts, 0)
    mine = evolve_found(found)
    _flat_shards(mine, first, optims, dp, dense)
    found.groups += mine.groups
    found.stated += mine.stated
    found.remarks += mine.remarks
    locals_of: list[list[ParameterGroup]] = []
    for e in range(ep):
        mine = evolve_found(found)
        ranks = [rank for rank in range(dp) if (rank // edp if is_data_first else rank % ep) == e]
        here = _local_model(file, meta, every, shapes, experts, e)
        _flat_shards(mine, here, [optims[rank] for rank in ranks], edp, ours)
        locals_of.append(mine.groups)
        found.stated += [evolve(flat, coordinates={"ep": e}, cut="edp") for flat in mine.stated]
    for i, g in enumerate(sorted(ours)):
        members = _members(file, g, [locals_of[e][i].members for e in range(ep)], of)
        # Its name is that of the ranks that share it, ep_size_2: the target's is made anew.
        hyper = {key: value for key, value in locals_of[0][i].hyper.items() if key != "name"}
        found.groups.append(ParameterGroup(str(g), members, hyper))
    ordered = (file, *(part for part in _files(expert_files)), *optims)
    carried = {
        (part.file, extent.key): extent
        for part in ordered
        for extent in part.extents()
        if (place := (part.file, extent.key)) not in found.payload and place not in found.consumed
    }
    client = {key: lifted(value, file.file) for key, value in meta.items() if key not in OWNED}
    _blobs(found, model, optims)
    version = str(meta.get("ds_version", ""))
    trained = {t for group in found.groups for t in group.members}
    return Checkpoint(
        top=top,
        root=root,
        tag=tag,
        framework="deepspeed",
        version=version,
        extents=found.payload,
        carried_extents=carried,
        envelope=Envelope(
            framework="deepspeed",
            version=version,
            settings=found.settings,
            groups=tuple(found.groups),
            scalars=found.scalars,
            blobs=found.blobs,
            carried=client,
        ),
        tensors=(
            *_named(model, found),
            *(
                NamedTensor(
                    n,
                    t.shape,
                    t.storage.dtype,
                    "parameter" if n in trained else "frozen",
                    tuple(found.states.get(n, ())),
                )
                for n, t in tensors.items()
            ),
        ),
        aliases=model.aliases,
        stated=tuple(found.stated),
        files=tuple(part.file for part in ordered),
        remarks=tuple(found.remarks),
        carry={"scalar_extents": found.scalar_extents, "client_state": [client]},
        experts=experts,
    )


def _expert_files(
    listing: Listing,
) -> tuple[dict[str, TensorRef], dict[str, Expert], dict[tuple[str, tuple[str]], tuple[TorchFile, TensorRef]]]:
    """All tensors of experts by global name, layer by layer and expert by expert."""
    tensors: dict[str, TensorRef] = {}
    of: dict[str, Expert] = {}
    places: dict[tuple[str, tuple[str]], tuple[TorchFile, TensorRef]] = {}
    numbers: dict[int, set[int]] = {}
    sorted_files = []
    for name in listing.experts:
        found = _FILE.match(name)
        if found is None:
            _not_yet(listing.root / name, "it has experts and no ZeRO, or was written before layers had numbers")
        numbers.setdefault(int(found["layer"]), set()).add(int(found["expert"]))
        sorted_files.append((int(found["layer"]), int(found["expert"]), name))
    for layer, present in numbers.items():
        lacking = sorted(set(range(max(present) + 1)) - present)
        if lacking:
            missing = f"layer_{layer}_expert_{lacking[0]}_mp_rank_00_model_states.pt"
            fail(
                "E452",
                f"{missing} is missing",
                Label(str(listing.root / missing), "not there"),
                Label(str(listing.root)),
            )
    for layer, number, name in sorted(sorted_files):
        part = read_torch_file(listing.root, name)
        if not isinstance(part.value, dict):
            fail("E455", f"{name} is no dict of tensors", Label(str(part.path)))
        for key, ref in part.value.items():
            match = _NAME.match(key) if isinstance(key, str) else None
            if match is None or not isinstance(ref, TensorRef) or int(match["number"]) != number:
                fail(
                    "E455",
                    f"{name}: {key} is no tensor of expert {number}, which DeepSpeed would have written",
                    Label(str(part.path), where=str(key)),
                )
            if key in tensors or not prod(ref.shape):
                _not_yet(part.path, f"{key} is there twice, or has no elements")
            tensors[key] = ref
            of[key] = Expert(name, key, match["module"], number, len(numbers[layer]), match["inner"])
            places[name, (key,)] = (part, ref)
    return tensors, of, places


def _files(places: dict[tuple[str, tuple[str]], tuple[TorchFile, TensorRef]]) -> list[TorchFile]:
    return list({part.file: part for part, _ in places.values()}.values())


def _expert_degree(part: TorchFile, ours: frozenset[int], dp: int) -> int:
    """How many ranks share an expert's optimizer state: the same for all groups, and a divisor of dp."""
    counts = part.value["optimizer_state_dict"].get("partition_count")
    degrees = {counts[g] for g in ours} if isinstance(counts, list) and len(counts) > max(ours) else set()
    if len(degrees) != 1:
        _not_yet(part.path, f"its experts are parallel to several degrees: partition_count {counts}")
    degree = degrees.pop()
    if type(degree) is not int or degree < 1 or dp % degree:
        fail(
            "E454",
            f"{degree} ranks share an expert, of {dp} data-parallel ranks",
            Label(str(part.path), where="optimizer_state_dict/partition_count"),
        )
    return degree


def _check_counts(
    file: TorchFile,
    meta: dict[Any, Any],
    of: dict[str, Expert],
    ep: int,
    shapes: list[dict[str, Shape]],
    ours: frozenset[int],
) -> None:
    """num_experts, the files and the local numbers of param_shapes must agree."""
    counts = {one.module: one.count for one in of.values()}
    stated = meta.get("num_experts")
    if isinstance(stated, list) and sorted(stated) != sorted(counts.values()):
        fail(
            "E456",
            f"num_experts is {stated}, and there are files of {list(counts.values())} experts",
            Label(str(file.path), where="num_experts"),
            Label(str(file.path.parent), "layer_L_expert_E_mp_rank_00_model_states.pt"),
        )
    local: dict[str, set[int]] = {}
    for g in ours:
        for name in shapes[g]:
            match = _NAME.match(name)
            assert match is not None
            local.setdefault(match["module"], set()).add(int(match["number"]))
    for module, numbers in local.items():
        if counts.get(module, 0) != ep * (max(numbers) + 1):
            fail(
                "E456",
                f"{module}: {counts.get(module, 0)} experts have files, and each of {ep} ranks holds {max(numbers) + 1}",
                Label(str(file.path), where="param_shapes"),
                Label(str(file.path.parent), f"{counts.get(module, 0)} files a layer"),
            )


def _renamed(name: str, experts: Experts, e: int) -> str:
    """A name of param_shapes on expert-parallel rank `e`, with the global number."""
    match = _NAME.match(name)
    if match is None:
        return name
    count = next(one.count for one in experts.of.values() if one.module == match["module"])
    return f"{match['module']}{e * (count // experts.ep) + int(match['number'])}.{match['inner']}"


def _local_model(
    file: TorchFile,
    meta: dict[Any, Any],
    tensors: dict[str, TensorRef],
    shapes: list[dict[str, Shape]],
    experts: Experts,
    e: int,
) -> _Model:
    """What a rank with the experts of `e` would state in its param_shapes, by global names."""
    named = [{_renamed(name, experts, e): shape for name, shape in group.items()} for group in shapes]
    for group in named:
        for name, shape in group.items():
            if name in experts.of and tensors[name].shape != shape:
                fail(
                    "E458",
                    f"{name} has the shape {list(tensors[name].shape)} in its file and {list(shape)} in param_shapes",
                    Label(str(file.path.parent / experts.of[name].file), where=name),
                    Label(str(file.path), where="param_shapes"),
                )
            if name not in tensors:
                fail(
                    "E459",
                    f"{name} is in param_shapes and in no expert's file",
                    Label(str(file.path), where="param_shapes"),
                    Label(str(file.path.parent)),
                )
    return _Model(file, {**meta, "param_shapes": named}, tensors, frozenset(), {}, (), (), {}, {})


def _members(file: TorchFile, g: int, by_rank: list[tuple[str, ...]], of: dict[str, Expert]) -> tuple[str, ...]:
    """A group over all experts, in the order of the module: layer by layer, expert by expert."""
    held = {name for members in by_rank for name in members}
    modules = list(dict.fromkeys(of[name].module for name in by_rank[0]))
    inners: dict[str, list[str]] = {}
    for name in by_rank[0]:
        if of[name].inner not in inners.setdefault(of[name].module, []):
            inners[of[name].module].append(of[name].inner)

    def place(name: str) -> tuple[int, int, int]:
        one = of[name]
        return modules.index(one.module), one.number, inners[one.module].index(one.inner)

    members = tuple(sorted(held, key=place))
    for mine in by_rank:
        if list(mine) != [name for name in members if name in set(mine)]:
            _not_yet(file.path, f"the experts of parameter group {g} are not in the order of the module")
    return members


__all__ = ["open_experts"]
