"""Folders with several files of weights, with transformers' choice, as data.

`tests/interop` runs transformers.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
FP16 = "model.fp16.safetensors.index.json"
Value = float | dict[str, float]
PICKLES = "pytorch_model.bin.index.json"
P_ONE, P_TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

# case: ({file: value of its tensors}, transformers' value, ucpl's value, further keys of config.json)
# The value of an index is a pair: {shard: value}; all but the last shard hold half of the tensors, and the last one the rest.
# `first`: the value of the first tensor alone.
CASES: dict[str, tuple[dict[str, Value], float, float, dict[str, object]]] = {
    "single before index": ({"model.safetensors": 2.0, INDEX: {ONE: 1.0, TWO: 1.0}}, 2.0, 2.0, {}),
    "single before pickle": ({"model.safetensors": 2.0, "pytorch_model.bin": 5.0}, 2.0, 2.0, {}),
    "index before pickle": ({INDEX: {ONE: 1.0, TWO: 1.0}, "pytorch_model.bin": 5.0}, 1.0, 1.0, {}),
    "variant beside": ({"model.fp16.safetensors": 3.0, "model.safetensors": 2.0}, 2.0, 2.0, {}),
    "index of a variant": ({FP16: {"model.fp16-00001-of-00001.safetensors": 3.0}, "model.safetensors": 2.0}, 2.0, 2.0, {}),
    "index of a variant and pickle": (
        {FP16: {"model.fp16-00001-of-00001.safetensors": 3.0}, "pytorch_model.bin": 5.0}, 5.0, 5.0, {},
    ),
    "another name and pickle": ({"consolidated.safetensors": 3.0, "pytorch_model.bin": 5.0}, 5.0, 5.0, {}),
    "adapter and pickle": ({"adapter_model.safetensors": 3.0, "pytorch_model.bin": 5.0}, 5.0, 5.0, {}),
    "pickle before its index": ({"pytorch_model.bin": 5.0, PICKLES: {P_ONE: 1.0, P_TWO: 1.0}}, 5.0, 5.0, {}),
    "index of pickles and another name": (
        {"consolidated.safetensors": 3.0, PICKLES: {P_ONE: 1.0, P_TWO: 1.0}}, 1.0, 1.0, {},
    ),
    "another name and index": ({"consolidated.safetensors": 3.0, INDEX: {ONE: 1.0, TWO: 1.0}}, 1.0, 1.0, {}),
    "another name and single": ({"consolidated.safetensors": 3.0, "model.safetensors": 1.0}, 1.0, 1.0, {}),
    "explicit file": (
        {"model.safetensors": 2.0, "mine.safetensors": 7.0}, 7.0, 7.0, {"transformers_weights": "mine.safetensors"},
    ),
    "explicit index": (
        {"model.safetensors": 2.0, FP16: {"model.fp16-00001-of-00001.safetensors": 3.0}}, 3.0, 3.0,
        {"transformers_weights": FP16},
    ),
    "explicit single over index": (
        {"model.safetensors": 2.0, INDEX: {ONE: 1.0, TWO: 1.0}}, 1.0, 1.0, {"transformers_weights": INDEX},
    ),
}  # fmt: skip


def folder(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object], case: str) -> Path:
    """The folder of a case, with one value per file."""
    files, _, _, more = CASES[case]
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**config, **more}))
    for name, value in files.items():
        if isinstance(value, dict):
            sharded(path, tensors, name, value)
        else:
            saved({k: torch.full_like(t, value) for k, t in tensors.items()}, path / name)
    return path


def saved(tensors: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, {"format": "pt"})


def sharded(path: Path, tensors: dict[str, torch.Tensor], index: str, shards: dict[str, float]) -> None:
    names, count = list(tensors), len(shards)
    where: dict[str, str] = {}
    for i, (file, value) in enumerate(shards.items()):
        part = names[i::count]
        saved({k: torch.full_like(tensors[k], value) for k in part}, path / file)
        where |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    (path / index).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))


# Values of the first tensor in three shards (None: absent), and the shard of the index.
TWICE: dict[str, tuple[tuple[float | None, ...], int, float]] = {
    "index says the first": ((1.0, 3.0, None), 0, 3.0),
    "index says the last": ((1.0, 3.0, None), 1, 3.0),
    "three times": ((1.0, 3.0, 4.0), 1, 4.0),
    "index says another": ((1.0, 3.0, None), 2, 3.0),
}


def twice(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object], case: str) -> Path:
    """A folder of three shards; several have the first tensor."""
    values, stated, _ = TWICE[case]
    names = list(tensors)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    files = [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
    where: dict[str, str] = {}
    for i, file in enumerate(files):
        part = {k: torch.full_like(tensors[k], 9.0) for k in names[1:][i::3]}
        where |= dict.fromkeys(part, file)
        if (value := values[i]) is not None:
            part[names[0]] = torch.full_like(tensors[names[0]], value)
        save_file(part, path / file, {"format": "pt"})
    where[names[0]] = files[stated]
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    return path
