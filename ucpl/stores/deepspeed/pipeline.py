"""A step's folder of a PipelineModule: weights in a file a layer, optimizer shards a stage.

Names are those of param_shapes: `3.weight` of layer 3, `tied_modules.embed.weight` of a tied module. Read in deepspeed
0.19.8: runtime/pipe/module.py (`save_state_dict`, `_build`, `_index_tied_modules`), runtime/pipe/engine.py.

Only the weights named by tied_weight_attr are kept alike on all stages that hold a tied module; its other tensors go their
own ways where no gradient reaches them. Moments that are zero throughout tell such a copy.

Not here: pipelines that are tensor parallel, too (E457), and those without ZeRO, whose files name no tied module.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Envelope, Extent, NamedTensor, ParameterGroup, TensorRef
from ucpl.extents.pipeline import METHODS, Layer, Pipeline, deal
from ucpl.stores.carrying import lifted
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.deepspeed.names import OWNED, RUN_KEYS, Listing
from ucpl.stores.deepspeed.order import Shape, alignment_elements
from ucpl.stores.deepspeed.reading import (
    _degree,
    _flat_shards,
    _Found,
    _Model,
    _not_yet,
    _param_shapes,
    _settings,
    _stage,
    _wrong,
)
from ucpl.stores.pickles import attributes_of
from ucpl.stores.torch_files import TorchFile, read_torch_file

_LAYER = re.compile(r"layer_(?P<number>\d+)-model_states\.pt\Z")
_TIED = "tied_modules."
_SPARE_LAYERS_MAX = 3  # functions behind the last layer with a file that are thought of
_BLOCK_BYTES = 1 << 20

Shapes = list[dict[str, Shape]]  # a dict a parameter group


def open_pipeline(top: Path, root: Path, tag: str, listing: Listing) -> Checkpoint:
    """Read all headers of one step. Raises: UcplError E400-E427, E45x, E46x."""
    stages = 1 + max((mp for _, mp in (*listing.models, *listing.optims)), default=0)
    metas = _metas(listing, stages)
    shapes = [_param_shapes(meta, meta.value.get("param_shapes")) for meta in metas]
    layers = _layer_files(listing)
    if not listing.optims:
        _not_yet(metas[0].path, "a PipelineModule without ZeRO: its files do not name what is tied")
    pipeline, empty = _pipeline(layers, metas, shapes)
    tensors = {t: ref for x in pipeline.layers if x.file for t, ref in _named_refs(x, layers[x.number])}
    dp = 0
    optims: list[list[TorchFile]] = []
    for s, meta in enumerate(metas):
        part = Listing(
            listing.root,
            {(None, 0): meta.file},
            {(r, 0): f for (r, mp), f in listing.optims.items() if mp == s},
            listing.prefix,
        )
        dp = _degree(part, meta.value, meta, False)
        optims.append([read_torch_file(root, part.optims[rank, 0]) for rank in range(dp)])
    stage = _stage([part for row in optims for part in row], False)
    if stage > 1:
        _not_yet(optims[0][0].path, f"a PipelineModule at ZeRO stage {stage}, which DeepSpeed does not train")
    found = _Found()
    _settings(found, metas[0].value, metas[0], listing, stage, dp, optims[0])
    found.set("pp", stages, f"files mp_rank_NN of {root.name}, each with param_shapes of its stage")
    wide = max((DTYPES[t.storage.dtype].itemsize for t in tensors.values()), default=4)
    aligned = found.settings["parameter_alignment"]
    found.set("alignment", alignment_elements(wide) if aligned.value else 1, aligned.origin)
    for file in layers.values():
        for name, ref in file.value.items():
            if isinstance(ref, TensorRef):
                if prod(ref.shape):
                    found.payload[file.file, (name,)] = file.extent((name,), ref)
                else:
                    found.consumed.add((file.file, (name,)))
    hypers: list[list[dict[str, Any]]] = []
    for s, (meta, row) in enumerate(zip(metas, optims, strict=True)):
        mine = evolve_found(found)
        model = _Model(meta, meta.value, tensors, frozenset(), {}, (), (), {}, {})
        _flat_shards(mine, model, row, dp)
        hypers.append([group.hyper for group in mine.groups])
        found.groups += [evolve(group, name=f"{s}/{group.name}") for group in mine.groups]
        found.stated += [evolve(flat, coordinates={"pp": s}) for flat in mine.stated]
        found.remarks += [remark for remark in mine.remarks if remark not in found.remarks]
    names = _canonical(pipeline)
    groups = _groups(metas, found.groups, hypers, names)
    pipeline = evolve(pipeline, trusted=_trusted(root, pipeline, found))
    for tensor, held in pipeline.trusted.items():
        found.set(f"copy of {tensor}", f"stage {held}", "moments that are zero throughout on its other stages")
    trained = {t for group in groups for t in group.members}
    buffers = set(pipeline.buffers)
    ordered = (*metas, *layers.values(), *(part for row in optims for part in row))
    client = [{k: lifted(v, meta.file) for k, v in meta.value.items() if k not in OWNED} for meta in metas]
    _blobs(found, metas, layers, optims[0][0], empty)
    version = str(metas[0].value.get("ds_version", ""))
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
            groups=groups,
            scalars=found.scalars,
            blobs=found.blobs,
            carried=client[0],
        ),
        tensors=tuple(
            NamedTensor(
                name,
                tensors[name].shape,
                tensors[name].storage.dtype,
                "buffer" if name in buffers else "parameter" if name in trained else "frozen",
                tuple(found.states.get(name, ())),
            )
            for name in names
            if prod(tensors[name].shape)
        ),
        aliases={},
        stated=tuple(found.stated),
        files=tuple(part.file for part in ordered),
        remarks=tuple(found.remarks),
        carry={"scalar_extents": found.scalar_extents, "client_state": client, "client_state_of": "stage"},
        pipeline=pipeline,
    )


def evolve_found(found: _Found) -> _Found:
    """A record that gathers groups and flats of its own and shares everything else."""
    return _Found(
        found.payload, found.consumed, found.states, found.scalars, found.scalar_extents, found.settings, found.blobs
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def _metas(listing: Listing, stages: int) -> list[TorchFile]:
    out = []
    for s in range(stages):
        name = listing.models.get((None, s))
        if name is None:
            missing = f"mp_rank_{s:02d}_model_states.pt"
            fail(
                "E452",
                f"{missing} is missing",
                Label(str(listing.root / missing), "not there"),
                Label(str(listing.root)),
            )
        meta = read_torch_file(listing.root, name)
        if not isinstance(meta.value, dict) or "module" not in meta.value:
            _wrong(meta, ("module",), "there")
        if meta.value["module"] is not None:
            _not_yet(meta.path, "it has a module beside the files of layers")
        dims = meta.value.get("checkpoint_parallel_dimensions") or {}
        if dims.get("tp_degree", 1) != 1:
            _not_yet(meta.path, f"a pipeline that is tensor parallel, too (tp {dims['tp_degree']})")
        if meta.value.get("mp_world_size", stages) != stages:
            fail(
                "E454",
                f"mp_world_size is {meta.value['mp_world_size']}, and there are files of {stages} stages",
                Label(str(meta.path), where="mp_world_size"),
            )
        out.append(meta)
    return out


def _layer_files(listing: Listing) -> dict[int, TorchFile]:
    out = {}
    for name in listing.layers:
        found = _LAYER.match(name)
        if found is None:
            _not_yet(listing.root / name, "a pipeline that is tensor parallel, too")
        file = read_torch_file(listing.root, name)
        if not isinstance(file.value, dict) or not all(isinstance(key, str) for key in file.value):
            _wrong(file, (), "a dict of tensors by name")
        out[int(found["number"])] = file
    return dict(sorted(out.items()))


def _refs(file: TorchFile) -> dict[str, TensorRef]:
    return {name: value for name, value in file.value.items() if isinstance(value, TensorRef)}


def _named_refs(layer: Layer, file: TorchFile) -> list[tuple[str, TensorRef]]:
    refs = _refs(file)
    return [(tensor, refs[name]) for name, tensor in layer.names]


# ---- which layer is what, and on which stage ---------------------------------------------------------------------------


def _pipeline(
    files: dict[int, TorchFile], metas: list[TorchFile], shapes: list[Shapes]
) -> tuple[Pipeline, dict[str, tuple[str, Shape]]]:
    flat = [{name: shape for group in mine for name, shape in group.items()} for mine in shapes]
    buffers = [list(meta.value.get("buffer_names") or ()) for meta in metas]
    held: list[dict[str, dict[str, Shape]]] = []  # a stage: key of a tied module -> trained tensor, in it -> shape
    for mine in flat:
        keys: dict[str, dict[str, Shape]] = {}
        for name, shape in mine.items():
            if name.startswith(_TIED):
                key, _, inner = name.removeprefix(_TIED).partition(".")
                keys.setdefault(key, {})[inner] = shape
        held.append(keys)
    own: dict[int, int] = {}  # layer -> stage
    for s, (mine, kept) in enumerate(zip(flat, buffers, strict=True)):
        for name in (*mine, *kept):
            number = name.partition(".")[0]
            if number.isdigit():
                if own.setdefault(int(number), s) != s:
                    fail(
                        "E456",
                        f"stages {own[int(number)]} and {s} both say that they hold layer {number}",
                        Label(str(metas[own[int(number)]].path), where="param_shapes"),
                        Label(str(metas[s].path), where="param_shapes"),
                    )
    for number, s in own.items():
        if number not in files:
            missing = f"layer_{number:02d}-model_states.pt"
            fail(
                "E452",
                f"{missing} is missing: stage {s} holds layer {number}",
                Label(str(metas[s].root / missing), "not there"),
                Label(str(metas[s].path), where="param_shapes"),
            )
    layers: dict[int, Layer] = {}
    empty: dict[str, tuple[str, Shape]] = {}
    for number, file in files.items():
        refs = _refs(file)
        tied = None if number in own else _tied_key(number, file, refs, held)
        prefix = f"{_TIED}{tied}." if tied is not None else f"{number}."
        layers[number] = Layer(number, file.file, tuple((name, prefix + name) for name in refs), tied)
        for name, ref in refs.items():
            stated = next((mine[prefix + name] for mine in flat if prefix + name in mine), ref.shape)
            if stated != ref.shape:
                fail(
                    "E458",
                    f"{prefix}{name} has the shape {list(ref.shape)} in its layer's file and {list(stated)} in param_shapes",
                    Label(str(file.path), where=name),
                    Label(str(metas[own.get(number, 0)].path), where="param_shapes"),
                )
            if not prod(ref.shape):
                empty[prefix + name] = (ref.storage.dtype, ref.shape)
    known = {tensor for layer in layers.values() for _, tensor in layer.names}
    for s, mine in enumerate(flat):
        for name in mine:
            if name not in known:
                fail(
                    "E459",
                    f"{name} is in param_shapes of stage {s} and in no layer's file",
                    Label(str(metas[s].path), where="param_shapes"),
                    Label(str(metas[s].root), f"{len(files)} files of layers"),
                )
    made = _dealt(layers, own, [set(keys) for keys in held], flat, metas)
    return evolve(made, buffers=tuple(dict.fromkeys(_buffers(layers, buffers)))), empty


def _buffers(layers: dict[int, Layer], buffers: list[list[str]]) -> list[str]:
    known = {tensor for layer in layers.values() for _, tensor in layer.names}
    return [name for mine in buffers for name in mine if name in known]


def _tied_key(
    number: int, file: TorchFile, refs: dict[str, TensorRef], held: list[dict[str, dict[str, Shape]]]
) -> str | None:
    """The tied module that a layer is: the one whose trained tensors are all in its file, with their shapes."""
    keys = {
        key
        for keys in held
        for key, inner in keys.items()
        if all(name in refs and refs[name].shape == shape for name, shape in inner.items())
    }
    if len(keys) > 1:
        _not_yet(
            file.path, f"its layer {number} may be any of the tied modules {', '.join(sorted(keys))}, which are alike"
        )
    return next(iter(keys), None)


def _elements(layers: tuple[Layer, ...], flat: list[dict[str, Shape]]) -> tuple[int, ...]:
    """Trained elements of all layers in turn, as DeepSpeed counts them: a tied module each time that it is a layer."""
    trained = {name: prod(shape) for mine in flat for name, shape in mine.items()}
    own = {x.number: sum(trained.get(tensor, 0) for _, tensor in x.names) for x in layers}
    of_key = {x.tied: own[x.number] for x in layers if x.tied is not None and x.names}
    return tuple(own[x.number] if x.names else of_key.get(x.tied or "", 0) for x in layers)


def _dealt(
    files: dict[int, Layer],
    own: dict[int, int],
    held: list[set[str]],
    flat: list[dict[str, Shape]],
    metas: list[TorchFile],
) -> Pipeline:
    """Bounds of the stages. Nothing states them: they follow from which stage holds which layer, and from what deals so."""
    stages, last = len(held), max(files, default=-1)
    for is_last_behind in (True, False):
        for count in range(last + 1, last + 2 + _SPARE_LAYERS_MAX):
            direct = _direct(own, stages, count)
            guess = _completed(files, count, held, direct, is_last_behind)
            fitting: dict[str, tuple[tuple[Layer, ...], tuple[int, ...]]] = {}
            for method in METHODS:
                if method == "parameters" and guess is None:
                    continue
                elements = _elements(guess, flat) if guess is not None else ()
                bounds = deal(method, elements if guess is not None else (0,) * count, stages)
                layers = _completed(files, count, held, bounds, is_last_behind)
                if layers is None or not _agrees(layers, bounds, own, held):
                    continue
                if method == "uniform" or _elements(layers, flat) == elements:
                    fitting[method] = (layers, bounds)
            if fitting:
                layers, bounds = next(iter(fitting.values()))
                how = " and ".join(fitting)
                origin = (
                    f"param_shapes of each stage; partition_method {how} deals so"
                    if stages > 1
                    else "there is one stage"
                )
                methods = tuple(m for m, found in fitting.items() if found == (layers, bounds))
                return Pipeline(layers, bounds, _elements(layers, flat), methods, origin)
        for count in range(last + 1, last + 2 + _SPARE_LAYERS_MAX):
            bounds = _direct(own, stages, count)
            made = _completed(files, count, held, bounds, is_last_behind)
            if made is not None and _agrees(made, bounds, own, held):
                return Pipeline(made, bounds, _elements(made, flat), (), "param_shapes of each stage")
    _not_yet(metas[0].path, "its layers do not lie on stages one after another")


def _direct(own: dict[int, int], stages: int, count: int) -> tuple[int, ...]:
    """A stage begins with its first layer that is known to be on it, or behind the last that is known of those before."""
    bounds = [0]
    for s in range(1, stages):
        mine = [number for number, stage in own.items() if stage == s]
        before = [number + 1 for number, stage in own.items() if stage < s]
        bounds.append(min(mine) if mine else max([*before, bounds[-1] + 1]))
    return (*bounds, count)


def _completed(
    files: dict[int, Layer], count: int, held: list[set[str]], bounds: tuple[int, ...], is_last_behind: bool
) -> tuple[Layer, ...] | None:
    """All layers, functions too. A tied module that a stage holds without a file of it is a function there.

    A tied module is two layers at least. The last stage's function stands behind all files, if `is_last_behind`.
    """
    out = [files.get(n, Layer(n)) for n in range(count)]
    last = max(files, default=-1)
    for s, keys in enumerate(held):
        low, high = bounds[s], bounds[s + 1]
        is_behind = is_last_behind and s == len(held) - 1
        free = [n for n in range(low, high) if n not in files and (not is_behind or n > last)]
        for key in sorted(keys):
            here = [n for n in range(low, high) if out[n].tied == key]
            elsewhere = any(x.tied == key for x in out[:low]) or any(key in other for other in held[s + 1 :])
            if here and (elsewhere or len(here) > 1):
                continue
            if not free:
                return None
            number = free.pop()
            out[number] = Layer(number, tied=key)
    return tuple(out)


def _agrees(layers: tuple[Layer, ...], bounds: tuple[int, ...], own: dict[int, int], held: list[set[str]]) -> bool:
    """Whether every stage holds what its param_shapes say, and nothing else."""
    if any(not bounds[s] <= number < bounds[s + 1] for number, s in own.items()):
        return False
    return all({x.tied for x in layers[bounds[s] : bounds[s + 1]]} - {None} == keys for s, keys in enumerate(held))


def _canonical(pipeline: Pipeline) -> list[str]:
    """All tensors as a PipelineModule names them: tied modules first, in the order of their first layers, then layers."""
    tied = [t for x in pipeline.layers if x.tied is not None for _, t in x.names]
    rest = [t for x in pipeline.layers if x.tied is None for _, t in x.names]
    return list(dict.fromkeys((*tied, *rest)))


# ---- what stages share ---------------------------------------------------------------------------------------------------


def _groups(
    metas: list[TorchFile], groups: list[ParameterGroup], hypers: list[list[dict[str, Any]]], names: list[str]
) -> tuple[ParameterGroup, ...]:
    """Parameter groups over all stages. Their order on each stage is the module's own, or there is no common one."""
    counts = {len(mine) for mine in hypers}
    if len(counts) > 1:
        fail(
            "E456",
            f"stages state {' and '.join(map(str, sorted(counts)))} parameter groups",
            *(Label(str(meta.path), where="param_shapes") for meta in metas[:2]),
        )
    place = {name: i for i, name in enumerate(names)}
    out = []
    for g in range(counts.pop()):
        mine = [(s, group) for s in range(len(metas)) for group in groups if group.name == f"{s}/{g}"]
        for s, group in mine:
            if list(group.members) != sorted(group.members, key=place.__getitem__):
                _not_yet(metas[s].path, f"the parameters of group {g} are not in the order of the module on stage {s}")
            if not group.members:
                _not_yet(metas[s].path, f"stage {s} has no parameter in group {g}")
            if _told(group.hyper) != _told(mine[0][1].hyper):
                fail(
                    "E456",
                    f"stages 0 and {s} do not agree on the hyper-parameters of group {g}",
                    Label(str(metas[0].path)),
                    Label(str(metas[s].path)),
                    remedy="They are of different steps: copy all files of one step again.",
                )
        members = sorted({name for _, group in mine for name in group.members}, key=place.__getitem__)
        out.append(ParameterGroup(str(g), tuple(members), mine[0][1].hyper))
    return tuple(out)


def _told(hyper: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hyper.items() if isinstance(value, (int, float, str, bool, tuple))}


def _trusted(root: Path, pipeline: Pipeline, found: _Found) -> dict[str, int]:
    """Tensors of tied modules that get a gradient on some of their stages alone, and the first stage where they do.

    Where no stage moves it, the first counts. There is no such evidence before the first step, or where the optimizer keeps
    no moments: then copies must be alike.
    """
    out: dict[str, int] = {}
    for tensor, places in pipeline.places().items():
        stages = sorted({s for s, _, _ in places})
        if len(stages) < 2 or tensor not in found.states:
            continue
        moments = [name for name in found.states[tensor] if name != "fp32"]
        moving = []
        for s in stages:
            extents = [x for name in moments for x in _parts(found, tensor, s, name)]
            if any(not _is_zero(root, *part) for part in extents):
                moving.append(s)
        if moments and len(moving) < len(stages):
            out[tensor] = moving[0] if moving else stages[0]
    return out


def _parts(found: _Found, tensor: str, stage: int, state: str) -> list[tuple[Extent, int, int]]:
    """Where a state of a tensor lies in a stage's shards: (flat part, first element, end) a data-parallel rank."""
    flat = next(
        (f for f in found.stated if f.coordinates.get("pp") == stage and any(n == tensor for n, _ in f.members)), None
    )
    if flat is None:
        return []
    start = next(b for b, (n, _) in zip(flat.starts, flat.members, strict=True) if n == tensor)
    stop = start + next(prod(shape) for n, shape in flat.members if n == tensor)
    out, position = [], 0
    wanted = [
        (file, extent)
        for (file, key), extent in found.payload.items()
        if key[-1] == state
        and key[-2] == flat.bucket
        and f"mp_rank_{stage:02d}_" in file
        and "base_optimizer_state" in key
    ]
    for _, extent in sorted(wanted, key=lambda x: _dp_rank(x[0])):
        low, high = max(start - position, 0), min(stop - position, extent.numel)
        if low < high:
            out.append((extent, low, high))
        position += extent.numel
    return out


def _dp_rank(file: str) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file)
    return int(found[1]) if found else 0


def _is_zero(root: Path, extent: Extent, low: int, high: int) -> bool:
    """Whether elements low..high are all 0, whatever their sign."""
    import numpy as np

    itemsize = DTYPES[extent.dtype].itemsize
    start = extent.storage_start + (extent.offset + low) * itemsize
    stop = start + (high - low) * itemsize
    with (root / extent.file).open("rb") as file:
        while start < stop:
            block = os.pread(file.fileno(), min(stop - start, _BLOCK_BYTES), start)
            if not block:
                return False
            words = np.frombuffer(block, "u1").reshape(-1, itemsize).copy()
            words[:, -1] &= 0x7F  # the sign of a little-endian float
            if words.any():
                return False
            start += len(block)
    return True


# ---- what is not a tensor ------------------------------------------------------------------------------------------------


def _blobs(
    found: _Found,
    metas: list[TorchFile],
    layers: dict[int, TorchFile],
    optim: TorchFile,
    empty: dict[str, tuple[str, Shape]],
) -> None:
    meta = metas[0]
    for key in (*RUN_KEYS, "ds_config", "ds_version", "universal_checkpoint_info"):
        if meta.value.get(key) is not None:
            found.blobs[key] = lifted(meta.value[key], meta.file)
    state = optim.value["optimizer_state_dict"]
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
        if key in state:
            found.blobs[key] = lifted(state[key], optim.file)
    kept = found.blobs["layer_files"] = {}
    for file in layers.values():
        kept[file.file] = {
            "names": [*file.value],
            "extra": {k: lifted(v, file.file) for k, v in file.value.items() if not isinstance(v, TensorRef)},
            "empty": {
                k: {"dtype": v.storage.dtype, "shape": list(v.shape)}
                for k, v in _refs(file).items()
                if not prod(v.shape)
            },
            "attributes": lifted(attributes_of(file.value), file.file) if isinstance(file.value, OrderedDict) else None,
        }
