"""Sparse checkpoints of any size: true headers, true CRCs, holes for values.

Every value is 0, and a hole is read as zeros, so that 2^33 elements are written in a moment. The values around the tensors
(groups, settings, schedulers) is that of small checkpoints of DeepSpeed in this repository.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from ucpl.extents import DTYPES, Global, PickledCall, Size, StorageRef, TensorRef
from ucpl.files.torch_files import layout_torch_file, read_torch_file
from ucpl.runtime.joined_crcs import crc_of_zeros

__all__ = ["MAKERS", "Shapes", "deepseek_v3", "huggingface", "llama_405b", "tensors_like", "unlike"]

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "deepspeed"
STEP = "global_step3"
FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # of the model's tensors, in the optimizer's order


def tensors_like(count: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """So many tensors of one shape, in layers of ten: `layers.0.part_0.weight`."""
    return {f"layers.{n // 10}.part_{n % 10}.weight": shape for n in range(count)}


def unlike(count: int) -> dict[str, tuple[int, ...]]:
    """So many tensors of different sizes, which do not fold."""
    return {f"part_{n}.weight": (1 + n % 450, 1 + n // 450) for n in range(count)}


def deepseek_v3() -> dict[str, tuple[int, ...]]:
    """DeepSeek-V3: 45,395 tensors in bf16."""
    attention: Shapes = {
        "q_a_proj": (1536, 7168),
        "q_a_layernorm": (1536,),
        "q_b_proj": (24576, 1536),
        "kv_a_proj_with_mqa": (576, 7168),
        "kv_a_layernorm": (512,),
        "kv_b_proj": (32768, 512),
        "o_proj": (7168, 16384),
    }
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (129280, 7168)}
    for layer in range(61):
        at = f"model.layers.{layer}"
        made |= {f"{at}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        if layer >= 3:
            made |= {f"{at}.mlp.gate.weight": (256, 7168), f"{at}.mlp.gate.e_score_correction_bias": (256,)}
        experts = [f"mlp.experts.{n}" for n in range(256)] + ["mlp.shared_experts"] if layer >= 3 else ["mlp"]
        width = 2048 if layer >= 3 else 18432
        for name in experts:
            made |= {f"{at}.{name}.{side}_proj.weight": (width, 7168) for side in ("gate", "up")}
            made[f"{at}.{name}.down_proj.weight"] = (7168, width)
        made |= {f"{at}.input_layernorm.weight": (7168,), f"{at}.post_attention_layernorm.weight": (7168,)}
    return made | {"model.norm.weight": (7168,), "lm_head.weight": (129280, 7168)}


def llama_405b() -> dict[str, tuple[int, ...]]:
    """Llama 3.1 405B: 1,137 tensors in bf16."""
    hidden, wide, narrow, vocabulary = 16384, 53248, 1024, 128256
    layer: Shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    layers = {f"model.layers.{n}.{name}.weight": shape for n in range(126) for name, shape in layer.items()}
    ends = {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return {"model.embed_tokens.weight": (vocabulary, hidden), **layers, **ends}


class Storages:
    """Names of the storages of one torch file, in request order."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, numel: int) -> StorageRef:
        self.count += 1
        return StorageRef(str(self.count - 1), "f32", numel)

    def flat(self, numel: int) -> TensorRef:
        """A tensor of one dim with its own storage, like a shard."""
        return TensorRef(self.of(numel), 0, (numel,), (1,))

    def step(self) -> TensorRef:
        return TensorRef(self.of(1), 0, (), ())

    def views(self, shapes: Shapes) -> OrderedDict[str, TensorRef]:
        """All tensors as views of one storage, like modules' parameters under ZeRO-1."""
        sizes = [prod(shape) for shape in shapes.values()]
        storage = self.of(sum(sizes))
        starts = accumulate(sizes, initial=0)
        return OrderedDict(
            (name, TensorRef(storage, start, shape, rows(shape)))
            for (name, shape), start in zip(shapes.items(), starts, strict=False)
        )


def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def write_torch(path: Path, value: object) -> None:
    """Write the file that torch.save would write, with holes for zero storages."""
    plan = layout_torch_file(value, path.stem)
    crcs = {name: crc_of_zeros(size) for name, (_, size) in plan.storages.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for at, data in (*plan.fixed, *plan.finish(crcs)):
            file.seek(at)
            file.write(data)
        file.truncate(plan.size)


def huggingface(folder: Path, shapes: Shapes, files: int) -> None:
    """Shards with an index, bf16."""
    folder.mkdir(parents=True)
    names, size = list(shapes), DTYPES["bf16"].itemsize
    weight_map: dict[str, str] = {}
    for n in range(files):
        file = f"model-{n + 1:05}-of-{files:05}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names[n * len(names) // files : (n + 1) * len(names) // files]:
            end = at + prod(shapes[name]) * size
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, end]}
            weight_map[name], at = file, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
    total = sum(map(prod, shapes.values())) * size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "sparse"}))


def plain(path: Path, shapes: Shapes, files: int) -> None:
    """Write one file, each tensor with its own storage. `files` is 1."""
    storages = Storages()
    params = {
        name: {"weight": TensorRef(storages.of(prod(shape)), 0, shape, rows(shape))} for name, shape in shapes.items()
    }
    write_torch(path, {"version": 1, "params": params, "buffers": {}, "aliases": {}, "groups": [], "scalars": {}})


def shard(fixture: str, kind: str) -> Any:
    """The value of the first rank's file of a small DeepSpeed checkpoint."""
    (path,) = (FIXTURES / fixture / STEP).glob(
        f"*_0_mp_rank_00_{kind}.pt" if "z3" in fixture or "optim" in kind else f"mp_*{kind}.pt"
    )
    return read_torch_file(path.parent, path.name).value


def module(fixture: str, shapes: Shapes, ranks: int, views: Mapping[str, TensorRef]) -> Any:
    """Model states: the fixture's other values, with one group of all tensors."""
    found = shard(fixture, "model_states")
    del found["rng"]
    found["module"] = views
    found["param_shapes"] = [OrderedDict((name, Size(shape)) for name, shape in shapes.items())]
    found["buffer_names"], found["shared_params"], found["lr_scheduler"] = [], {}, None
    found["dp_world_size"] = ranks
    return found


def adam(group: Mapping[str, object], storages: Storages, numel: int) -> dict[str, object]:
    """A torch optimizer's state of one flat parameter."""
    state = {"step": storages.step(), "exp_avg": storages.flat(numel), "exp_avg_sq": storages.flat(numel)}
    return {"state": {0: state}, "param_groups": [{**group, "params": [0]}]}


def fragments(sizes: Mapping[str, int], low: int, high: int) -> Iterator[tuple[str, PickledCall]]:
    """Yield the tensors between two positions of the flat buffer.

    The same as DeepSpeed's `fragment_address`.
    """
    at = 0
    for name, size in sizes.items():
        first, last = max(at, low), min(at + size, high)
        if first < last:
            yield name, PickledCall(FRAGMENT, (), {}, True, {"numel": last - first, "start": first - low}, [], [])
        at += size


def zero1(folder: Path, shapes: Shapes, files: int) -> None:
    """ZeRO-1: `files` ranks' files of optimizer states, and one of model states."""
    write_torch(folder / STEP / "mp_rank_00_model_states.pt", module("z1_dp4", shapes, files, Storages().views(shapes)))
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    numel = sum(sizes.values())
    share = -(-numel // (2 * files)) * 2  # DeepSpeed aligns a rank's piece to two elements
    template = shard("z1_dp4", "optim_states")
    group = template["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]
    owners = _by_rank(sizes, share, files)
    for rank in range(files):
        storages, value = Storages(), copy(template)
        found = value["optimizer_state_dict"] = copy(template["optimizer_state_dict"])
        padding = share * files - numel if rank == files - 1 else 0  # which masters are saved without
        found["base_optimizer_state"] = adam(group, storages, share)
        found["single_partition_of_fp32_groups"] = [storages.flat(share - padding)]
        found["group_paddings"] = [padding]
        found["param_alignment_paddings"] = [[0] * len(sizes)]
        found["partition_count"] = [files]
        found["param_slice_mappings"] = [owners[rank]]
        write_torch(folder / STEP / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", value)
    (folder / "latest").write_text(STEP)


def _by_rank(sizes: Mapping[str, int], share: int, ranks: int) -> list[OrderedDict[str, PickledCall]]:
    """Each rank's fragments, in one pass over the tensors."""
    found: list[OrderedDict[str, PickledCall]] = [OrderedDict() for _ in range(ranks)]
    at = 0
    for name, size in sizes.items():
        for rank in range(at // share, -(-(at + size) // share)):
            low = rank * share
            for _, call in fragments({name: size}, low - at, low + share - at):
                found[rank][name] = call
        at += size
    return found


def zero3(folder: Path, shapes: Shapes, files: int) -> None:
    """ZeRO-3: every tensor is cut over `files` ranks, with two files each."""
    share = sum(-(-prod(shape) // files) for shape in shapes.values())
    template = shard("z3_dp2_subgroup", "optim_states")
    group = template["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]
    empty = TensorRef(StorageRef("0", "f32", 0), 0, (0,), (1,))
    model = module("z3_dp2_subgroup", shapes, files, OrderedDict.fromkeys(shapes, empty))
    model["ds_config"]["zero_optimization"]["sub_group_size"] = 1 << 40
    for rank in range(files):
        storages, value = Storages(), copy(template)
        found = value["optimizer_state_dict"] = copy(template["optimizer_state_dict"])
        found["partition_count"] = files
        found["optimizer_state_dict"] = adam(group, storages, share)
        found["fp32_flat_groups"] = [storages.flat(share)]
        value["ds_config"] = model["ds_config"]
        write_torch(folder / STEP / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", value)
        write_torch(folder / STEP / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model)
    (folder / "latest").write_text(STEP)


MAKERS: dict[str, Callable[[Path, Shapes, int], None]] = {
    "huggingface": huggingface,
    "plain": plain,
    "zero1": zero1,
    "zero3": zero3,
}
