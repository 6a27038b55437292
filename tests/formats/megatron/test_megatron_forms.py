"""Conversions among Megatron's forms, with the optimizer.

The forms are stacks or single layers, and files of ranks or chunks.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.formats.megatron.test_megatron_core import FIXTURES, truth, value_of
from ucpl.formats.megatron.legacy_arguments import arguments_in, namespace
from ucpl.formats.megatron.stacks import in_modules, stacks_of, templates_of
from ucpl.formats.opening import open_checkpoint

STATES = ("weight", "fp32", "exp_avg", "exp_avg_sq")


def name_of(stack: str, at: tuple[int, ...]) -> str:
    """The module's name of one layer, and of one expert."""
    lead, rest = stack.split("layers.")
    inner = rest.replace("experts.experts.", f"experts.local_experts.{at[1]}.") if len(at) > 1 else rest
    return f"{lead}layers.{at[0]}.{inner}"


OWN = {"dist_buckets", "dist_moe_buckets"}  # whose buckets are in the order of Megatron-Core's own blocks


def in_blocks(module: str) -> str:
    renamed = module.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return renamed.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def by_module(name: str) -> dict[str, dict[str, torch.Tensor]]:
    """A stacked fixture's truth per layer and expert."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for stack, said in truth(name).items():
        states = {state: value_of(said, state) for state in STATES}
        leads = 0 if "layers." not in stack else 2 if "experts.experts." in stack else 1
        if leads == 0:
            out[stack] = states
            continue
        counts = states["weight"].shape[:leads]
        for number in range(prod(counts)):
            at = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), counts))
            out[name_of(stack, at)] = {state: tensor[at] for state, tensor in states.items()}
    return {in_blocks(module): states for module, states in out.items()} if name in OWN else out


def held_by(folder: Path, made: Path) -> dict[str, dict[str, torch.Tensor]]:
    ucpl.convert(folder, made, to="plain()")
    plain = torch.load(made / "plain.pt", weights_only=True)
    return plain["params"] | {name: {"weight": tensor} for name, tensor in plain["buffers"].items()}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("dist_moe", "megatron_legacy(tp=2, ep=2)"),
        ("dist_buckets", "megatron_legacy(pp=2, vpp=2)"),
        ("dist_moe_buckets", "megatron_legacy(tp=2, ep=4)"),
    ],
)
def test_stacks_go_to_files_of_ranks_and_back(tmp_path: Path, name: str, target: str) -> None:
    ucpl.convert(FIXTURES / name, tmp_path / "legacy", to=target)
    wanted = by_module(name)
    found = held_by(tmp_path / "legacy", tmp_path / "one")
    assert found.keys() == wanted.keys()
    ucpl.convert(tmp_path / "legacy", tmp_path / "core", to="megatron_core(tp=3)")
    again = held_by(tmp_path / "core", tmp_path / "two")
    for module, states in wanted.items():
        for state in found[module].keys() - {"step"}:
            assert torch.equal(found[module][state], states[state]), (module, state)
            assert torch.equal(again[module][state], states[state]), (module, state)
    assert ucpl.compare(tmp_path / "legacy", tmp_path / "core")
    stored = {key: value_of(said, "weight") for key, said in truth(name).items()}
    read = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    load(read, checkpoint_id=open_checkpoint(tmp_path / "core").root, no_dist=True)
    assert all(torch.equal(read[key], tensor) for key, tensor in stored.items()), "stacked, as Megatron asks for them"


def test_a_chunk_of_two_layers_is_split(tmp_path: Path) -> None:
    """A target of one rank has all layers in one chunk."""
    ucpl.convert(FIXTURES / "dist_split", tmp_path / "whole", to="megatron_core()")
    ucpl.convert(FIXTURES / "dist_moe", tmp_path / "experts", to="megatron_core()")
    for name, folder in (("dist_split", "whole"), ("dist_moe", "experts")):
        ucpl.convert(tmp_path / folder, tmp_path / f"{folder}_legacy", to="megatron_legacy()")
        found = held_by(tmp_path / f"{folder}_legacy", tmp_path / f"{folder}_plain")
        wanted = by_module(name)
        assert all(torch.equal(found[module]["weight"], wanted[module]["weight"]) for module in wanted)


def test_a_plan_from_stacks_to_modules_is_applied(tmp_path: Path) -> None:
    plan = ucpl.plan(str(FIXTURES / "dist_moe"), "megatron_legacy(tp=2)")
    ucpl.save_plan(plan, tmp_path / "it.plan")
    ucpl.apply(tmp_path / "it.plan", FIXTURES / "dist_moe", tmp_path / "applied")
    ucpl.convert(FIXTURES / "dist_moe", tmp_path / "converted", to="megatron_legacy(tp=2)")
    assert ucpl.compare(tmp_path / "applied", tmp_path / "converted")


def test_values_of_classes_that_megatron_alone_has_go_through_other_forms(tmp_path: Path) -> None:
    """A run's arguments name its enums, which only Megatron can unpickle.

    No target's pickle has them.
    """
    source = FIXTURES / "dist_stacked_tp2_pp2_fully"
    ucpl.convert(source, tmp_path / "there", to="zero1(dp=2)")
    ucpl.convert(tmp_path / "there", tmp_path / "back", to="megatron_core()")
    was, now = open_checkpoint(source), open_checkpoint(tmp_path / "back")
    said = {**arguments_in(was), "no_save_rng": True}  # there are no random states: Megatron-LM is to look for none
    assert repr(said) == repr(arguments_in(now)) and "attention_backend" in arguments_in(now)
    assert ucpl.compare(source, tmp_path / "back")


def test_modules_are_called_as_the_run_s_arguments_say(tmp_path: Path) -> None:
    """Stacks have the names of Transformer Engine's blocks for all models."""
    opened = open_checkpoint(FIXTURES / "dist_moe")
    norm = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert templates_of(opened)[norm] == "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"
    carried = {**opened.state.carried, "args": namespace({"transformer_impl": "local"})}
    local = evolve(opened, state=evolve(opened.state, carried=carried))
    assert templates_of(local)[norm] == "decoder.layers.{}.input_layernorm.weight"
    assert templates_of(local)["decoder.layers.mlp.linear_fc1.layer_norm_weight"] == (
        "decoder.layers.{}.pre_mlp_layernorm.weight"
    )


@pytest.mark.parametrize(("blocks", "first"), [("local", 0), ("transformer_engine", 1)])
def test_parameters_are_in_order_of_registration(blocks: str, first: int) -> None:
    """distrib_optim.pt has the reverse order, each at a multiple of 64.

    `.metadata` may have any order.
    """
    opened = open_checkpoint(FIXTURES / "dist_moe")
    carried = {**opened.state.carried, "args": namespace({"transformer_impl": blocks})}
    other = evolve(opened, state=evolve(opened.state, carried=carried, tensors=opened.state.tensors[::-1]))
    names = [tensor.name for tensor in in_modules(other).state.tensors]
    assert names[0] == "embedding.word_embeddings.weight" and names[-1] == "output_layer.weight"
    layer = [name.removeprefix("decoder.layers.0.") for name in names if name.startswith("decoder.layers.0.")]
    norm = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")[first]
    assert layer[first] == norm and layer[1 - first] == "self_attention.linear_proj.weight"
    assert layer[2:4] == ["self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"]
    experts = [name for name in layer if ".experts." in name]
    assert experts == [f"mlp.experts.local_experts.{e}.linear_fc{n}.weight" for e in range(4) for n in (1, 2)]


def test_names_of_megatrons_own_blocks_are_those_that_it_saves() -> None:
    shapes = {
        **{f"decoder.layers.{n}.input_layernorm.weight": (8,) for n in range(2)},
        **{f"decoder.layers.{n}.pre_mlp_layernorm.weight": (8,) for n in range(2)},
        **{f"decoder.layers.{n}.mlp.experts.local_experts.{e}.w": (8, 2) for n in range(2) for e in range(3)},
    }
    found = stacks_of(shapes)
    assert found.counts == {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2,),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2,),
        "decoder.layers.mlp.experts.experts.w": (2, 3),
    }
    assert found.of("optimizer.state.exp_avg.decoder.layers.1.mlp.experts.local_experts.2.w") == (
        "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.w",
        (1, 2),
        (2, 3),
    )


def test_layers_that_differ_have_the_names_that_megatron_saves() -> None:
    """A dense first layer, and multi-token prediction.

    Norms of own blocks are renamed, and experts are stacked.
    """
    layer, ahead = "decoder.layers.{}.", "mtp.layers.0.transformer_layer."
    norms = {
        f"{head}{n}": (8,)
        for head in (layer.format(0), layer.format(1), ahead)
        for n in ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    }
    experts = {f"{head}mlp.experts.local_experts.{e}.w": (8, 2) for head in (layer.format(1), ahead) for e in range(3)}
    found = stacks_of(
        {**norms, **experts, "mtp.layers.0.enorm.weight": (8,), "decoder.layers.0.mlp.linear_fc1.weight": (8, 2)}
    )
    assert found.of(f"{layer.format(0)}input_layernorm.weight") == (
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        (),
        (),
    )
    assert found.of(f"optimizer.state.fp32.{layer.format(1)}mlp.experts.local_experts.2.w") == (
        "optimizer.state.fp32.decoder.layers.1.mlp.experts.experts.w",
        (2,),
        (3,),
    )
    assert found.of(f"{ahead}pre_mlp_layernorm.weight") == (f"{ahead}mlp.linear_fc1.layer_norm_weight", (), ())
    assert found.of(f"{ahead}mlp.experts.local_experts.0.w") == (f"{ahead}mlp.experts.experts.w", (0,), (3,))
    assert found.of("mtp.layers.0.enorm.weight") is None and found.of("decoder.layers.0.mlp.linear_fc1.weight") is None


def test_norms_of_latent_attention_and_of_transformer_engine_keep_their_names() -> None:
    """Megatron-Core renames them only in its own blocks without latent attention."""
    latent = {
        "input_layernorm.weight": (4,),
        "pre_mlp_layernorm.weight": (4,),
        "self_attention.linear_kv_down_proj.weight": (2, 4),
    }
    other = {
        "pre_mlp_layernorm.weight": (4,),
        "self_attention.linear_qkv.layer_norm_weight": (4,),
        "mlp.experts.linear_fc1.weight0": (2, 2),
        "mlp.experts.linear_fc1.weight1": (2, 2),
    }
    assert set(stacks_of({f"decoder.layers.0.{n}": shape for n, shape in latent.items()}).counts) == {
        f"decoder.layers.{n}" for n in latent
    }
    assert stacks_of({f"decoder.layers.0.{n}": shape for n, shape in other.items()}).counts == {
        "decoder.layers.pre_mlp_layernorm.weight": (1,),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (1,),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (1, 2),
    }


@pytest.mark.parametrize(
    "shapes",
    [
        {"layers.0.a": (2,), "layers.1.a": (3,)},
        {"layers.0.a": (2,), "layers.1.a": (2,), "layers.1.b": (2,)},
        {"layers.0.input_layernorm.weight": (2,), "layers.0.self_attention.linear_qkv.layer_norm_weight": (2,)},
    ],
    ids=["shapes", "tensors", "names"],
)
def test_layers_that_differ_are_not_stacked(shapes: dict[str, tuple[int, ...]]) -> None:
    assert stacks_of(shapes).places == {}
