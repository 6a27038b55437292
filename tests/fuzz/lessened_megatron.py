"""Megatron's stored checkpoints, reduced to each kind of structure.

The amount of read data grows with their parameters.

Of a torch_dist folder `.metadata` loses parameters, their states and most of `_extra_state`, and the files of chunks
lose data that
nothing names any more: the rest stays as Megatron wrote it, with its runs of flattened parts, halves of a gate, plans of ranks.
Buckets and the files of ranks hold many parameters in one tensor: those are written anew by the product, without some of them.
"""

from __future__ import annotations

import tempfile
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import ucpl
from tests.fuzz.containers import FIXTURES
from ucpl.files.pickles import dumps, loads
from ucpl.formats.dcp.metadata import METADATA

STORED = FIXTURES / "megatron"
ENDS = ("embedding.*", "output_layer.*")
ATTENTION = ("decoder.layers.self_attention.*",)
# Of each folder of torch_dist that is cut down by names: which parameters go, each with its states.
CUT = {
    "dist_moe": (*ENDS, *ATTENTION, "*.linear_fc2._extra_state/*", "*_extra_state/shard_0.[13]*"),
    "dist_unstacked_moe_ep2": (
        *ENDS,
        "*.self_attention.*",
        "*.mlp.experts.experts.[13].*",
        "*.linear_fc2._extra_state/*",
    ),
    "dist_muon": (*ENDS, "*.linear_qkv.*", "*.mlp.linear_fc2.*", "*.mlp.linear_fc1.weight", "*_extra_state/shard_1_*"),
    "dist_old": (*ENDS, *ATTENTION, "*.mlp.linear_fc1.weight", "*.mlp.linear_fc1.bias", "*_extra_state/shard_1_*"),
    "dist_old_grouped": (*ENDS, *ATTENTION, "*_extra_state/*"),
    "dist_tied_vpp2": ("output_layer.*", *ATTENTION, "*.mlp.linear_fc1.weight", "*_extra_state/shard_[123]_*"),
    "dist_adam_tp2": (*ENDS, *ATTENTION, "*.mlp.linear_fc1.weight", "*_extra_state/*"),
}
HYPER = tuple(
    f"*.{name}"
    for name in ("m??_lr", "lr_mult", "betas", "eps", "bias_correction", "default_config", "is_decoupled_lr")
)
CUT_FSDP = {
    "fsdp_tp2": (*HYPER, "*.layers.1.*", "*.self_attention.*", "*embedding.*", "*output_layer.*"),
    "fsdp_moe": (*HYPER, "*.self_attention.*", "*embedding.*", "*output_layer.*", "*.local_experts.[13].*"),
}
# Folders that the product writes: the source folder, the layout, and the dropped tensors.
BUCKETS = {
    "vpp_buckets": (
        "dist_buckets",
        'megatron_core(pp=2, vpp=2, optimizer="dp_reshardable", bucket_size=300)',
        ("*.linear_fc1.*", "*.linear_qkv.*"),
    ),
    "moe_buckets": (
        "dist_moe_buckets",
        'megatron_core(tp=2, ep=2, optimizer="dp_reshardable")',
        ("embedding.*", "output_layer.*", "*.linear_qkv.*"),
    ),
    "split_buckets": (
        "dist_split",
        'megatron_core(dp=3, optimizer="dp_reshardable")',
        ("embedding.*", "*.linear_fc1.weight"),
    ),
}
FSDP = {"fsdp_moe": ("dist_moe", "megatron_fsdp(dp=2)", ())}
RANKS = ("embedding.*", "*.self_attention.*")
LEGACY = {
    "vpp": ("legacy_vpp", "megatron_legacy(tp=2, pp=2, vpp=2, bf16=1)", ("*.self_attention.*", "*.linear_fc1.*")),
    "moe": ("legacy_moe", "megatron_legacy(tp=2, ep=2, bf16=1)", RANKS),
}
STATES = "optimizer.state.*."
LISTED = 2  # items that a plan of a rank keeps: no reader asks for them


def cut(name: str, folder: Path) -> Path:
    """A stored folder of DCP's with some of its parameters.

    The folder that `.metadata` is in.
    """
    made = folder / f"{name}-few"
    if not made.exists():
        made.mkdir()
        for file, data in _cut(name).items():
            (made / file).write_bytes(data)
    return made


@cache
def _cut(name: str) -> dict[str, bytes]:
    if name in FSDP:
        files = {file: data for file, data in _written(name).items() if "/" not in file}
    else:
        source = next((STORED / name).rglob(METADATA)).parent
        files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    dropped = {**CUT, **CUT_FSDP}[name]
    metadata: Any = loads(files[METADATA])
    state = metadata.state
    tensors = state["state_dict_metadata"]
    kept = {entry for entry in tensors if not any(_is_of(entry, pattern) for pattern in dropped)}
    for table in ("state_dict_metadata", "planner_data", "mcore_data"):
        if state.get(table):
            state[table] = {entry: said for entry, said in state[table].items() if entry in kept}
    places = {index: place for index, place in state["storage_data"].items() if index.state["fqn"] in kept}
    state["storage_data"] = places
    for plan in state.get("all_local_plans", ()):
        plan.state["items"] = plan.state["items"][:LISTED]
    chunks: dict[str, bytearray] = {}
    for info in sorted((place.state for place in places.values()), key=lambda info: info["offset"]):
        file, start = info["relative_path"], info["offset"]
        made = chunks.setdefault(file, bytearray())
        info["offset"] = len(made)
        made += files[file][start : start + info["length"]]
    beside = {file: data for file, data in files.items() if not file.endswith(".distcp")}
    return {**beside, METADATA: dumps(metadata), **{file: bytes(data) for file, data in chunks.items()}}


def _is_of(entry: str, pattern: str) -> bool:
    return fnmatchcase(entry, pattern) or fnmatchcase(entry, STATES + pattern)


def written(name: str, folder: Path) -> Path:
    """A stored folder that the product wrote anew with fewer parameters."""
    made = folder / name
    if not made.exists():
        for file, data in _written(name).items():
            (made / file).parent.mkdir(parents=True, exist_ok=True)
            (made / file).write_bytes(data)
    return made


@cache
def _written(name: str) -> dict[str, bytes]:
    source, to, dropped = {**BUCKETS, **FSDP, **LEGACY}[name]
    with tempfile.TemporaryDirectory(prefix="ucpl-fuzz-") as folder:
        made = Path(folder) / "few"
        ucpl.convert(str(STORED / source), str(made), to, workers=1, drop=dropped)
        return {p.relative_to(made).as_posix(): p.read_bytes() for p in sorted(made.rglob("*")) if p.is_file()}
