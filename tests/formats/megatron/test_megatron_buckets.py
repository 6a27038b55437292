"""Written torch_dist with buckets (`dp_reshardable`) equals Megatron-Core's own."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.formats.megatron.test_megatron_core import FIXTURES
from ucpl.errors import UcplError
from ucpl.formats.megatron.legacy_arguments import arguments_in
from ucpl.formats.opening import open_checkpoint

BUCKETS = 'optimizer="dp_reshardable"'


def held(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, list[tuple[int, int]]]]:
    """Tensors, other values, and pieces of buckets, by torch."""
    root = open_checkpoint(folder).root
    metadata = FileSystemReader(root).read_metadata()
    listed = metadata.state_dict_metadata.items()
    described = {n: m for n, m in listed if isinstance(m, TensorStorageMetadata)}
    tensors = {n: torch.zeros(m.size, dtype=m.properties.dtype) for n, m in described.items()}
    load(tensors, checkpoint_id=root, no_dist=True)
    values = {}
    for index, place in metadata.storage_data.items():
        if index.fqn not in tensors:
            data = (root / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            values[index.fqn] = torch.load(BytesIO(data), weights_only=False)
    pieces = {
        n: sorted((c.offsets[0], c.offsets[0] + c.sizes[0]) for c in described[n].chunks)
        for n in tensors
        if ".bucket_idx_" in n
    }
    return tensors, values, pieces


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("dist_dp_reshardable_tp2", "tp=2, dp=2"),
        ("dist_buckets", "pp=2, vpp=2, dp=2"),
        ("dist_moe_buckets", "tp=2, ep=2, dp=2"),
    ],
)
def test_buckets_are_those_that_megatron_saved(tmp_path: Path, name: str, degrees: str) -> None:
    """Names, sizes, groups and each element; zeros in gaps.

    Megatron leaves gaps uninitialised.
    """
    ucpl.convert(FIXTURES / name, tmp_path / "made", to=f"megatron_core({degrees}, {BUCKETS})")
    (was, told, pieces), (now, said, mine) = held(FIXTURES / name), held(tmp_path / "made")
    assert was.keys() == now.keys() and told.keys() == said.keys()
    for entry, tensor in was.items():
        if entry not in pieces:
            assert torch.equal(tensor, now[entry]), entry
            continue
        assert [end for _, end in mine[entry]] == [*(b for b, _ in mine[entry][1:]), len(tensor)], "the whole bucket"
        # Of Megatron's pieces those that begin at a multiple of 64 are a parameter's, or continue one.
        for begin, end in pieces[entry]:
            if begin % 64 == 0:
                assert torch.equal(tensor[begin:end], now[entry][begin:end]), (entry, begin)
    sizes = [key for key in told if "per_bucket_numel" in key]
    assert sizes and all(told[key] == said[key] for key in sizes if "unpadded" in key)
    groups = [key for key in told if key.endswith(".optimizer/shard_0_1")]
    assert groups and all(told[key] == said[key] for key in groups)


def plain(folder: Path, made: Path) -> dict[str, dict[str, torch.Tensor]]:
    ucpl.convert(folder, made, to="plain()")
    return torch.load(made / "plain.pt", weights_only=True)["params"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dist_moe", "tp=2, ep=2"),
        ("dist_split", "tp=2, bucket_size=300"),
        ("legacy_vpp", "tp=2, pp=2, vpp=2, bucket_size=1000"),
    ],
)
def test_what_goes_into_buckets_comes_out(tmp_path: Path, name: str, call: str) -> None:
    source = FIXTURES / name
    ucpl.convert(source, tmp_path / "made", to=f"megatron_core({call}, {BUCKETS})")
    ucpl.convert(source, tmp_path / "legacy", to="megatron_legacy(tp=1, pp=1, ep=1, vpp=1)")  # by modules
    ucpl.convert(tmp_path / "made", tmp_path / "again", to="megatron_legacy(tp=1, pp=1, ep=1, vpp=1)")
    wanted, found = (plain(tmp_path / folder, tmp_path / f"{folder}.plain") for folder in ("legacy", "again"))
    here = {alike(parameter): states for parameter, states in found.items()}
    assert len(here) == len(wanted)
    for parameter, states in wanted.items():
        for state, tensor in states.items():
            assert torch.equal(torch.as_tensor(here[alike(parameter)][state]), torch.as_tensor(tensor)), (
                parameter,
                state,
            )


@pytest.mark.parametrize(("name", "call"), [("dist_buckets", "pp=2, vpp=2"), ("dist_moe_buckets", "tp=2, ep=2")])
def test_blocks_stay_whose_they_are_without_what_says_it(tmp_path: Path, name: str, call: str) -> None:
    """Megatron-Core's own blocks register a norm before linear_proj.

    This is the evidence after linear_proj is dropped.
    """
    ucpl.convert(FIXTURES / name, tmp_path / "made", to=f"megatron_core({call}, {BUCKETS})", drop=("*.linear_proj.*",))
    opened = open_checkpoint(tmp_path / "made")
    assert arguments_in(opened)["transformer_impl"] == "local"
    wanted, found = (plain(f, tmp_path / f"{f.name}.plain") for f in (FIXTURES / name, tmp_path / "made"))
    assert found.keys() == {parameter for parameter in wanted if ".linear_proj." not in parameter}
    for parameter, states in found.items():
        for state, tensor in states.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(wanted[parameter][state])), (parameter, state)


def alike(name: str) -> str:
    """Norms are called as Megatron-Core's own blocks have them, or Transformer Engine's."""
    renamed = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return renamed.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def test_sizes_of_buckets_are_those_of_megatrons_rule(tmp_path: Path) -> None:
    """A bucket is closed at its size, on the first stage only.

    Each parameter begins at a multiple of 64.
    """
    value = {
        "params": {
            name: {state: torch.randn(shape) for state in ("weight", "exp_avg", "exp_avg_sq")}
            for name, shape in {
                "embedding.word_embeddings.weight": (6, 10),
                "decoder.layers.0.mlp.linear_fc2.weight": (10, 8),
                "decoder.layers.1.mlp.linear_fc2.weight": (10, 8),
                "decoder.final_layernorm.weight": (10,),
            }.items()
        }
    }
    torch.save(value, tmp_path / "plain.pt")
    found = {}
    for size in (0, 1, 81):
        ucpl.convert(
            tmp_path / "plain.pt", tmp_path / f"{size}", to=f"megatron_core(dp=3, bucket_size={size}, {BUCKETS})"
        )
        _, values, _ = held(tmp_path / f"{size}")
        lead = "optimizer.distributed.dp_group_idx_0.per_bucket_numel"
        found[size] = [next(iter(values[f"{lead}{end}/shard_0_1"][0][0].values())) for end in ("_unpadded", "")]
    assert found == {
        0: [[64 + 128 + 128 + 60], [384]],
        1: [[10, 80, 80, 60], [384] * 4],
        81: [[64 + 80, 128 + 60], [384] * 2],
    }
    # Tied, on two stages: the first stage's embedding has a bucket, which is the last one's first.
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "tied", to=f"megatron_core(pp=2, bucket_size=1, {BUCKETS})")
    tensors, values, _ = held(tmp_path / "tied")
    sizes = [values[f"optimizer.distributed.dp_group_idx_{n}.per_bucket_numel_unpadded/shard_0_1"] for n in (0, 1)]
    assert [next(iter(one[0][0].values())) for one in sizes] == [[80, 60], [60, 64 + 80]]
    entry = (
        "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_{}.exp_avg"
    )
    moments = value["params"]["embedding.word_embeddings.weight"]["exp_avg"].flatten()
    assert torch.equal(tensors[entry.format(0, 1)], moments) and torch.equal(tensors[entry.format(1, 0)], moments)
    weights = value["params"]["decoder.layers.0.mlp.linear_fc2.weight"]["weight"].flatten()
    assert torch.equal(tensors[entry.format(0, 0).replace("exp_avg", "param")], weights), "fp32 trains the weights"


def test_megatron_gets_the_degrees(tmp_path: Path) -> None:
    """Megatron-LM loads buckets at the degrees of the run's arguments.

    It loads random states unless the arguments exclude them.
    """
    source = FIXTURES / "dist_adam_tp2"
    ucpl.convert(source, tmp_path / "same", to=f"megatron_core(tp=2, {BUCKETS})")
    ucpl.convert(source, tmp_path / "other", to=f"megatron_core(pp=2, {BUCKETS})")
    found = {}
    for name in ("same", "other"):
        said = arguments_in(open_checkpoint(tmp_path / name))
        has_random = any(key.startswith("rng_state") for key in held(tmp_path / name)[1])
        degrees = said["tensor_model_parallel_size"], said["pipeline_model_parallel_size"]
        found[name] = (degrees, said["use_distributed_optimizer"], has_random, bool(said.get("no_save_rng")))
    assert found == {"same": ((2, 1), True, True, False), "other": ((1, 2), True, False, True)}


def test_a_plan_from_stacks_to_buckets_is_applied(tmp_path: Path) -> None:
    call = f"megatron_core(tp=2, {BUCKETS})"
    ucpl.save_plan(ucpl.plan(str(FIXTURES / "dist_split"), call), tmp_path / "it.plan")
    ucpl.apply(tmp_path / "it.plan", FIXTURES / "dist_split", tmp_path / "applied")
    ucpl.convert(FIXTURES / "dist_split", tmp_path / "converted", to=call)
    assert ucpl.compare(tmp_path / "applied", tmp_path / "converted")


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("dist_split", 'optimizer="fully_sharded_model_space"', '"fully_sharded_model_space" is not written'),
        ("dist_split", "bucket_size=4", "bucket_size has no effect on a fully_reshardable folder"),
        ("dist_split", "ep=2", "ep has no effect"),
        ("dist_split", f"bucket_size=0-1, {BUCKETS}", "bucket_size = -1"),
        ("dist_split", f"pp=4, {BUCKETS}", "layers do not divide by pp = 4"),
        ("dist_muon", BUCKETS, "the source has momentum_buffer"),
        ("dist_stacked_moe_tp2_ep2", f"ep=2, {BUCKETS}", "of weights alone there are no buckets"),
    ],
)
def test_what_has_no_buckets_is_refused(tmp_path: Path, name: str, call: str, message: str) -> None:
    with pytest.raises(UcplError) as found:
        ucpl.convert(FIXTURES / name, tmp_path / "made", to=f"megatron_core({call})")
    (said,) = found.value.diagnostics
    assert said.code == "E547" and message in said.message
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("shapes", "call", "message"),
    [
        (
            {"decoder.layers.0.mlp.linear_fc2.weight": torch.float16},
            "",
            "state of its loss scaler, which is not written",
        ),
        (
            {
                "decoder.layers.0.mlp.linear_fc2.weight": torch.float32,
                "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight": torch.float32,
                "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight": torch.float32,
            },
            "pp=2, ep=2, ",
            "stage 0 has no experts at ep = 2",
        ),
    ],
)
def test_what_megatron_would_ask_for_otherwise_is_refused(
    tmp_path: Path, shapes: dict[str, torch.dtype], call: str, message: str
) -> None:
    states = {"fp32": torch.ones(4, 4), "exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4)}
    value = {"params": {name: {"weight": torch.ones(4, 4, dtype=dtype), **states} for name, dtype in shapes.items()}}
    torch.save(value, tmp_path / "plain.pt")
    with pytest.raises(UcplError) as found:
        ucpl.convert(tmp_path / "plain.pt", tmp_path / "made", to=f"megatron_core({call}{BUCKETS})")
    assert found.value.diagnostics[0].code == "E547" and message in found.value.diagnostics[0].message


@pytest.mark.parametrize("call", [f"megatron_core({BUCKETS})", "megatron_legacy()"])
def test_a_source_s_own_order_is_none_of_registration(tmp_path: Path, call: str) -> None:
    """Names may be in any order.

    Buffers follow the modules, layer by layer.
    The state dict has the same order.
    """
    shapes = {
        "output_layer.weight": (6, 8),
        "decoder.layers.1.mlp.linear_fc2.weight": (8, 8),
        "decoder.layers.0.mlp.linear_fc2.weight": (8, 8),
        "decoder.layers.1.self_attention.linear_qkv.weight": (12, 8),
        "decoder.layers.0.self_attention.linear_qkv.weight": (12, 8),
        "decoder.layers.1.self_attention.linear_proj.weight": (8, 4),
        "decoder.layers.0.self_attention.linear_proj.weight": (8, 4),
        "embedding.word_embeddings.weight": (6, 8),
    }
    params = {
        name: {s: torch.randn(shape) for s in ("weight", "exp_avg", "exp_avg_sq")} for name, shape in shapes.items()
    }
    torch.save({"params": params}, tmp_path / "plain.pt")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "made", to=call)
    layer = [f"self_attention.linear_{n}.weight" for n in ("proj", "qkv")] + ["mlp.linear_fc2.weight"]
    layers = [f"decoder.layers.{n}.{name}" for n in range(2) for name in layer]
    order = ["embedding.word_embeddings.weight", *layers, "output_layer.weight"]
    ends = [params[name]["exp_avg"].flatten() for name in reversed(order)]
    flat = torch.cat([torch.cat([one, torch.zeros(-len(one) % 64)]) for one in ends])[: -(-48 % 64)]
    if "core" in call:
        tensors, _, _ = held(tmp_path / "made")
        (found,) = (tensor for name, tensor in tensors.items() if name.endswith("bucket_idx_0.exp_avg"))
    else:
        folder = open_checkpoint(tmp_path / "made").root / "mp_rank_00"
        assert list(torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]) == order
        (found,) = (b["exp_avg"] for b in torch.load(folder / "distrib_optim.pt", weights_only=False)[0].values())
    assert torch.equal(found, flat)


# ---- parameters without states --------------------------------------------------------------------------------------

FROZEN = {
    "embedding": ["embedding.word_embeddings.weight"],
    "stack": [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(2)],
    "layer": ["decoder.layers.0."],
}


def without_states(tmp_path: Path, names: list[str]) -> Path:
    """A plain file of a run whose optimizer lacks parameters."""
    ucpl.convert(FIXTURES / "legacy_buckets", tmp_path / "all.pt", "plain()")
    held = torch.load(tmp_path / "all.pt", weights_only=False)
    gone = {one for one in held["params"] if one.startswith(tuple(names))}
    held["params"] |= {name: {"weight": held["params"][name]["weight"]} for name in gone}
    for group in held["groups"]:
        group["params"] = [one for one in group["params"] if one not in gone]
    torch.save(held, tmp_path / "frozen.pt")
    return tmp_path / "frozen.pt"


@pytest.mark.parametrize(
    ("names", "more"), [("embedding", ""), ("stack", ""), ("stack", ", pp = 2"), ("layer", ", stacked = 0")]
)
def test_buckets_lack_frozen_parameters(names: str, more: str, tmp_path: Path) -> None:
    source = without_states(tmp_path, FROZEN[names])
    ucpl.convert(source, tmp_path / "made", f'megatron_core(optimizer = "dp_reshardable"{more})')
    ucpl.convert(tmp_path / "made", tmp_path / "again.pt", "plain()")
    first, again = (torch.load(path, weights_only=False)["params"] for path in (source, tmp_path / "again.pt"))
    assert first.keys() == again.keys()
    for name, states in first.items():
        assert states.keys() == again[name].keys(), name
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(again[name][s])) for s, v in states.items()), name


@pytest.mark.parametrize("form", ["dp_reshardable", "fully_reshardable"])
def test_a_stack_with_a_frozen_layer_names_the_way_round(form: str, tmp_path: Path) -> None:
    source = without_states(tmp_path, FROZEN["layer"])
    with pytest.raises(ucpl.UcplError, match=r"E471.*is frozen") as caught:
        ucpl.convert(source, tmp_path / "made", f'megatron_core(optimizer = "{form}")')
    assert "stacked = 0" in caught.value.diagnostics[0].remedy
    ucpl.convert(source, tmp_path / "made", f'megatron_core(optimizer = "{form}", stacked = 0)')


@pytest.mark.parametrize(
    "to",
    ["megatron_core(tp = 3)", 'megatron_core(optimizer = "dp_reshardable")', "megatron_legacy()", "megatron_fsdp()"],
)
@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_a_buffer_that_no_axis_cuts_goes_along(shape: tuple[int, ...], to: str, tmp_path: Path) -> None:
    source = without_states(tmp_path, ["nothing"])
    held = torch.load(source, weights_only=False)
    held["buffers"]["decoder.num_calls"] = torch.full(shape, 7)
    torch.save(held, source)
    ucpl.convert(source, tmp_path / "made", to)
    ucpl.convert(tmp_path / "made", tmp_path / "again.pt", "plain()")
    found = torch.load(tmp_path / "again.pt", weights_only=False)
    every = {**found["buffers"], **found["params"]}
    found = next((value for name, value in every.items() if name.endswith("decoder.num_calls")), None)
    found = found["weight"] if isinstance(found, dict) else found
    if found is None:
        account = ucpl.plan(str(source), to).account
        assert account is not None
        assert any("decoder.num_calls" in e.names for e in account.of("dropped"))
        assert (shape, to) == ((0,), "megatron_legacy()")
    else:
        assert torch.equal(found, torch.full(shape, 7))
