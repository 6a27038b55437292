"""Values that each rank's file repeats; differing copies are reported.

The first file's copy is read. Not here: client_state, which can differ per rank (gathered.callers_of), and keys that no
release writes (unknown).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from attrs import evolve

from ucpl.extents import PickledCall, TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.repeated_values import Mark, hypers_of, unlike
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import unknown_keys
from ucpl.formats.deepspeed.names import RUN_KEYS, is_apart, is_of_expert, layer_place, place_in_run

__all__ = ["unlike_copies"]

_DIMENSIONS = "checkpoint_parallel_dimensions"
_INFO, _LAYERS = "universal_checkpoint_info", "ds_autoep_layers"  # AutoEP's layers name the rank that saves them
_OF_ALL = (*RUN_KEYS, "ds_config", "ds_version", _DIMENSIONS)
_OF_RANK = ("param_shapes", "frozen_param_shapes", "shared_params")  # alike on data-parallel ranks alone
_OF_SHARDS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage", "ds_version")
_BASES = ("base_optimizer_state", "optimizer_state_dict")
_SLICES = "param_slice_mappings"
_FRAGMENT = ("numel", "start")  # of fragment_address
_DEGREES = ("pp_degree", "tp_degree")


def unlike_copies(files: tuple[TorchFile, ...], known: Container[str], mark: Mark) -> Iterator[NotRead]:
    """Values that differ from the first rank's, and a rank's own keys.

    known: all names of the model. mark: an equal value for equal values, tensors by their bytes (carrying.marks_of).
    """
    models = [one for one in files if _has(one, "module") and not is_apart(one.file)]
    shards = [one for one in files if _shard_of(one)]
    yield from unlike(((one, "", _fields(one.value, _OF_ALL) | _info(one.value)) for one in models), mark)
    for same_rank in _by_model_rank(models):
        yield from unlike(((one, "", _fields(one.value, _OF_RANK)) for one in same_rank), mark)
    yield from unlike(((one, "optimizer_state_dict/", _fields(_shard_of(one), _OF_SHARDS)) for one in shards), mark)
    configs = [
        (one, "ds_config/", _fields(one.value, ("ds_config",)).get("ds_config")) for one in (*models[:1], *shards)
    ]
    yield from unlike((one for one in configs if one[2] is not None), mark)
    infos = [(one, f"optimizer_state_dict/{_INFO}/", _info(_shard_of(one)).get(_INFO, {})) for one in shards]
    yield from unlike([*((one, "", _info(one.value).get(_INFO, {})) for one in models[:1]), *infos], mark)
    for name in _BASES:
        for same_rank in _by_model_rank([one for one in shards if name in _shard_of(one)]):
            lead = f"optimizer_state_dict/{name}/param_groups/"
            yield from unlike(((one, lead, hypers_of(_shard_of(one)[name])) for one in same_rank), mark)
    names = {name for one in models for name in _named(_fields(one.value, _OF_RANK).get("param_shapes"))}
    yield from _second_names(models, known)
    yield from unlike(((one, "module/", _no_tensors(one.value)) for one in models), mark)
    layers: dict[int, list[TorchFile]] = {}
    for one in files:
        if is_apart(one.file) and not is_of_expert(one.file):
            layers.setdefault(layer_place(one.file)[0], []).append(one)
    for of_layer in layers.values():
        yield from unlike(((one, "", _no_tensors({"module": one.value})) for one in of_layer), mark)
    for one in models:
        yield from _frozen(one, known)
        yield from unknown_keys(one.file, _fields(one.value, (_DIMENSIONS,)).get(_DIMENSIONS), _DEGREES,
                                f"{_DIMENSIONS}/", "DeepSpeed")  # fmt: skip
    for one in shards:
        yield from _slices(one, names)
    for one in files:
        yield from _groups_twice(one, mark)


def _groups_twice(part: TorchFile, mark: Mark) -> Iterator[NotRead]:
    """Hyper-parameters in a universal folder's file, which can repeat them."""
    inner = _shard_of(part)
    if _has(part, "param_groups") and "param_groups" in inner:
        read = f"{_BASES[1]}/param_groups"
        for one in unlike(((part, "", hypers_of(inner)), (part, "param_groups/", hypers_of(part.value))), mark):
            yield evolve(one, why=f"the values of {read} are read")


def _has(part: TorchFile, key: str) -> bool:
    return isinstance(part.value, dict) and key in part.value


def _shard_of(part: TorchFile) -> dict[object, object]:
    held = part.value.get("optimizer_state_dict") if isinstance(part.value, dict) else None
    return held if isinstance(held, dict) else {}


def _fields(value: object, keys: Iterable[str]) -> dict[object, object]:
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else {}


def _info(value: object) -> dict[object, object]:
    info = value.get(_INFO) if isinstance(value, dict) else None
    return {_INFO: {key: one for key, one in info.items() if key != _LAYERS}} if isinstance(info, dict) else {}


def _by_model_rank(parts: list[TorchFile]) -> Iterable[list[TorchFile]]:
    """Files of one model-parallel rank each: their names end in its number."""
    out: dict[int, list[TorchFile]] = {}
    for one in parts:
        place = place_in_run(one.file)
        out.setdefault(place.numbers[-1] if place is not None and place.numbers else 0, []).append(one)
    return out.values()


def _named(shapes: object) -> Iterator[object]:
    for group in shapes if isinstance(shapes, list) else [shapes]:
        yield from group if isinstance(group, dict) else ()


def _second_names(models: list[TorchFile], known: Container[str]) -> Iterator[NotRead]:
    """Entries of `shared_params` whose second name is no tensor of the model.

    Stages of a pipeline have their own.
    """
    for first in (same_rank[0] for same_rank in _by_model_rank(models)):
        stated = _fields(first.value, ("shared_params", "module"))
        shared, module = stated.get("shared_params"), stated.get("module")
        for name in shared if isinstance(shared, dict) else ():
            if name not in known and not (isinstance(module, dict) and name in module):
                yield NotRead(
                    f"{first.file}: shared_params/{name}", "no tensor of the model has this name", kind="value"
                )


def _frozen(part: TorchFile, known: Container[str]) -> Iterator[NotRead]:
    """Shapes and fragments of frozen parameters under names of no tensor."""
    stated = _fields(part.value, ("frozen_param_shapes", "frozen_param_fragments", "module"))
    module = stated.pop("module", None)
    for key, held in stated.items():
        for name in held if isinstance(held, dict) else ():
            if name not in known and not (isinstance(module, dict) and name in module):
                yield NotRead(f"{part.file}: {key}/{name}", "no tensor of the model has this name", kind="value")


def _no_tensors(value: object) -> dict[object, object]:
    """Values of the module that are no tensors."""
    held = _fields(value, ("module",)).get("module")
    return {k: one for k, one in held.items() if not isinstance(one, TensorRef)} if isinstance(held, dict) else {}


def _slices(part: TorchFile, names: set[object]) -> Iterator[NotRead]:
    """Entries that are no part of a parameter.

    They have another name, or more than a begin and a length.
    """
    held = _shard_of(part).get(_SLICES)
    for number, group in enumerate(held if isinstance(held, list) else ()):
        for name, fragment in group.items() if isinstance(group, dict) else ():
            lead = f"optimizer_state_dict/{_SLICES}/{number}/{name}"
            state = fragment.state if isinstance(fragment, PickledCall) else None
            if not isinstance(state, dict) or (names and name not in names):
                yield NotRead(f"{part.file}: {lead}", "it is the place of no parameter of the model", kind="value")
            else:
                yield from unknown_keys(part.file, state, _FRAGMENT, f"{lead}/", "DeepSpeed")
