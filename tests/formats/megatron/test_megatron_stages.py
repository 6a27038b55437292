"""Uneven stages, and layers of multi-token prediction on the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from ucpl.errors import UcplError
from ucpl.formats.megatron.homes import legacy_of
from ucpl.formats.megatron.legacy_arguments import at_degrees
from ucpl.formats.megatron.legacy_names import NameRules
from ucpl.formats.megatron.orders import orders_of, registered
from ucpl.formats.opening import open_checkpoint

EMBEDDING, HEAD, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
LAYER = {
    "input_layernorm.weight": (4,),
    "self_attention.linear_proj.weight": (4, 4),
    "self_attention.linear_qkv.weight": (12, 4),
    "pre_mlp_layernorm.weight": (4,),
    "mlp.linear_fc1.weight": (6, 4),
    "mlp.linear_fc2.weight": (4, 6),
}
AHEAD = {"enorm.weight": (4,), "hnorm.weight": (4,), "eh_proj.weight": (4, 8), "final_layernorm.weight": (4,)}


def modules(layers: int, ahead: int, is_tied: bool = False) -> dict[str, tuple[int, ...]]:
    """In order of registration."""
    out: dict[str, tuple[int, ...]] = {EMBEDDING: (10, 4)}
    for number in range(layers):
        out |= {f"decoder.layers.{number}.{name}": shape for name, shape in LAYER.items()}
    out[NORM] = (4,)
    for number in range(ahead):
        head = f"mtp.layers.{number}."
        out |= {head + name: shape for name, shape in list(AHEAD.items())[:3]}
        out |= {f"{head}transformer_layer.{name}": shape for name, shape in LAYER.items()}
        out[f"{head}final_layernorm.weight"] = (4,)
    return out if is_tied else {**out, HEAD: (10, 4)}


def run(folder: Path, layers: int, ahead: int = 0, is_tied: bool = False) -> Path:
    """A plain file of an fp32 run, in an odd order."""
    params: dict[str, Any] = {}
    for name, shape in sorted(modules(layers, ahead, is_tied).items()):
        weight = torch.randn(shape)
        params[name] = {
            "weight": weight,
            "fp32": weight,
            "exp_avg": torch.randn(shape),
            "exp_avg_sq": torch.randn(shape),
        }
    torch.save({"params": params}, folder / "run.pt")
    return folder / "run.pt"


def layers_of(root: Path) -> list[int]:
    """The number of layers of each virtual stage, by its files.

    First ones of all stages come before the second ones.
    """
    out: dict[tuple[str, str], int] = {}
    for path in sorted(root.glob("iter_*/mp_rank_00_*/model_optim_rng.pt")):
        state = torch.load(path, weights_only=False)
        for chunk in sorted(key for key in state if key.startswith("model")):
            found = {name.split(".")[2] for name in state[chunk] if name.startswith("decoder.layers.")}
            out[chunk, path.parent.name] = len(found)
    return [out[key] for key in sorted(out)]


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        ("megatron_legacy(stages=[1, 3, 1])", [1, 3, 1]),
        ("megatron_legacy(vpp=2, stages=[0, 2, 2, 1])", [0, 2, 2, 1]),
    ],
)
def test_layers_are_on_the_stages_of_the_call(tmp_path: Path, call: str, sizes: list[int]) -> None:
    source = run(tmp_path, 5)
    ucpl.convert(source, tmp_path / "made", to=call)
    assert layers_of(tmp_path / "made") == sizes
    ucpl.convert(tmp_path / "made", tmp_path / "back.pt", to="plain()")
    made, wanted = (torch.load(p, weights_only=True)["params"] for p in (tmp_path / "back.pt", source))
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[n][state], wanted[n][state]) for n in wanted for state in wanted[n])


def test_as_many_stages_as_the_source_s_are_dealt_as_its_are(tmp_path: Path) -> None:
    ucpl.convert(run(tmp_path, 3), tmp_path / "made", to="megatron_legacy(stages=[1, 2])")
    ucpl.convert(tmp_path / "made", tmp_path / "again", to="megatron_legacy()")
    assert layers_of(tmp_path / "again") == [1, 2]
    plan = ucpl.plan(str(tmp_path / "made"), 'megatron_core(optimizer="dp_reshardable", pp=2)')
    assert ("layers of stages", "[1, 2]", "as the source's") in [(o.name, o.value, o.origin) for o in plan.origins]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("megatron_legacy(pp=2)", "5 layers do not divide by pp = 2"),
        ("megatron_legacy(stages=[2, 2])", "stages = [2, 2] are 2 stages with 4 layers, and the model has 5 on pp = 2"),
        ("megatron_legacy(pp=3, stages=[2, 3])", "are 2 stages with 5 layers, and the model has 5 on pp = 3"),
        ("megatron_legacy(stages=[6, 0 - 1])", "stages = "),
        ("megatron_legacy(stages=5)", "stages = 5: how many layers each has"),
        ("megatron_core(stages=[2, 3])", "stages has no effect on a fully_reshardable folder"),
    ],
)
def test_stages_that_there_cannot_be_are_refused(tmp_path: Path, call: str, message: str) -> None:
    with pytest.raises(UcplError) as found:
        ucpl.convert(run(tmp_path, 5), tmp_path / "made", to=call)
    (said,) = found.value.diagnostics
    assert said.code == "E547" and message in said.message and not (tmp_path / "made").exists()


def test_what_predicts_tokens_ahead_is_on_the_last_stage_with_an_embedding_there(tmp_path: Path) -> None:
    """As Megatron-Core's modules register it: distrib_optim.pt follows that, reversed."""
    ucpl.convert(run(tmp_path, 3, ahead=2), tmp_path / "made", to="megatron_legacy(stages=[2, 1])")
    names = list(modules(3, 2))
    held = []
    for stage in range(2):
        path = tmp_path / "made" / "iter_0000000" / f"mp_rank_00_00{stage}" / "model_optim_rng.pt"
        held.append(list(torch.load(path, weights_only=False)["model"]))
    assert held[0] == [
        name for name in names if name == EMBEDDING or name.startswith(("decoder.layers.0.", "decoder.layers.1."))
    ]
    last = [name.replace("layers.2.", "layers.0.") for name in names if name.startswith("decoder.layers.2.")]
    assert held[1] == [EMBEDDING, *last, *names[names.index(NORM) :]]
    legacy = legacy_of(open_checkpoint(tmp_path / "made"))
    assert legacy is not None
    assert {(home.stage, home.key[1]) for home in legacy.homes[EMBEDDING]} == {(0, EMBEDDING), (1, EMBEDDING)}


@pytest.mark.parametrize("call", ["pp=2", "vpp=2, stages=[1, 1, 0, 1]", "stages=[1, 2]"])
def test_buckets_of_what_predicts_tokens_ahead_are_read_again(tmp_path: Path, call: str) -> None:
    source = run(tmp_path, 2 if call == "pp=2" else 3, ahead=1)
    ucpl.convert(source, tmp_path / "made", to=f'megatron_core({call}, optimizer="dp_reshardable")')
    ucpl.convert(tmp_path / "made", tmp_path / "back", to="megatron_legacy(pp=1)")
    ucpl.convert(tmp_path / "back", tmp_path / "back.pt", to="plain()")
    made, wanted = (torch.load(p, weights_only=True)["params"] for p in (tmp_path / "back.pt", source))
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[n][state], wanted[n][state]) for n in wanted for state in wanted[n])


def test_a_tied_head_with_layers_ahead_is_refused_on_stages(tmp_path: Path) -> None:
    source = run(tmp_path, 2, ahead=1, is_tied=True)
    with pytest.raises(UcplError, match="Megatron-Core does not save a tied head with layers") as found:
        ucpl.convert(source, tmp_path / "made", to="megatron_legacy(pp=2)")
    assert found.value.diagnostics[0].code == "E547"
    ucpl.convert(source, tmp_path / "made", to="megatron_legacy()")


def test_orders_of_registration_have_layers_ahead_before_the_head() -> None:
    names = list(modules(2, 2))
    assert list(registered(sorted(names), fused=False)) == names
    stacked = [n for n in names if not n.startswith("decoder.layers.1.")]
    _, found, *_ = orders_of(tuple(sorted(n.replace("layers.0.", "layers.", 1) if n[0] == "d" else n for n in stacked)))
    outside = [n for n in found if "decoder.layers." not in n]
    assert outside == [n for n in names if "decoder.layers." not in n]


def test_a_run_s_arguments_say_nothing_of_other_stages() -> None:
    """Megatron-LM takes this one from a checkpoint, and interleaves by it."""
    said: dict[object, object] = {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4}
    made = {alike: at_degrees(said, lambda _: 1, is_alike=alike) for alike in (True, False)}
    assert [made[alike]["num_layers_per_virtual_pipeline_stage"] for alike in (True, False)] == [1, None]


LATENT = {
    "input_layernorm.weight": (4,),
    "self_attention.linear_proj.weight": (4, 4),
    "self_attention.linear_q_down_proj.weight": (6, 4),
    "self_attention.linear_q_up_proj.weight": (8, 6),
    "self_attention.linear_kv_down_proj.weight": (10, 4),
    "self_attention.linear_kv_up_proj.weight": (8, 8),
}
NORMS = {
    "own": {"self_attention.q_layernorm.weight": (6,), "self_attention.kv_layernorm.weight": (8,)},
    "engine": {
        "self_attention.linear_q_up_proj.layer_norm_weight": (6,),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (8,),
    },
    "none": {},
}


@pytest.mark.parametrize(("norms", "blocks", "cut"), [
    ("own", "", True),
    ("own", "transformer_engine", True),  # names say more than arguments
    ("engine", "", False),
    ("none", "local", True),
    ("none", "transformer_engine", False),
])  # fmt: skip
def test_down_projections_are_cut_in_megatron_core_s_own_blocks_alone(norms: str, blocks: str, cut: bool) -> None:
    """As Megatron-Core 0.16.1 makes them: ColumnParallelLinear, and Transformer Engine's Linear, `duplicated`."""
    shapes = {f"decoder.layers.0.{name}": shape for name, shape in (LATENT | NORMS[norms]).items()}
    dialect = NameRules(shapes, 1, {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_pos_emb_head_dim": 2}, "x", blocks)
    for which, rows in (("q", 6), ("kv", 10)):
        found = dialect.sharding(f"decoder.layers.0.self_attention.linear_{which}_down_proj.weight", 2)
        assert (found.dim, found.local(1)) == ((0, (rows // 2, 4)) if cut else (None, (rows, 4)))


def test_down_projections_without_a_known_cut_are_refused() -> None:
    dialect = NameRules(
        {f"decoder.layers.0.{name}": shape for name, shape in LATENT.items()}, 1, {"q_lora_rank": 6}, "x"
    )
    with pytest.raises(UcplError, match="transformer_impl") as found:
        dialect.sharding("decoder.layers.0.self_attention.linear_q_down_proj.weight", 2)
    assert found.value.diagnostics[0].code == "E542"
