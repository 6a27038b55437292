"""One model under two sets of names.

Optimizer state goes from Hugging Face's to Megatron's and back, at other degrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.cli.command import ucpl as command

HF, DIST, LEGACY = (
    "llama.ucpl:hf()",
    "llama.ucpl:torch_dist(divisible = 8)",
    "llama.ucpl:megatron(tp = 1, divisible = 8)",
)
CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 12, "vocab_size": 21, "intermediate_size": 10,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 6, "vocab_size": 8, "n_positions": 5, "n_head": 2}
STATES = ("weight", "fp32", "exp_avg", "exp_avg_sq")
Params = dict[str, dict[str, Any]]


def shapes() -> dict[str, tuple[int, ...]]:
    h, v, f, q, k = 12, 21, 10, 24, 12
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    for layer in range(3):
        block = {
            "self_attn.q_proj": (q, h), "self_attn.k_proj": (k, h), "self_attn.v_proj": (k, h), "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f),
            "input_layernorm": (h,), "post_attention_layernorm": (h,),
        }  # fmt: skip
        out |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return out | {"model.norm.weight": (h,), "lm_head.weight": (v, h)}


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    h, v, t = 6, 8, 5
    out: dict[str, tuple[int, ...]] = {"wte.weight": (v, h), "wpe.weight": (t, h)}
    for layer in range(2):
        block = {
            "ln_1.weight": (h,), "ln_1.bias": (h,), "attn.c_attn.weight": (h, 3 * h), "attn.c_attn.bias": (3 * h,),
            "attn.c_proj.weight": (h, h), "attn.c_proj.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,),
            "mlp.c_fc.weight": (h, 4 * h), "mlp.c_fc.bias": (4 * h,), "mlp.c_proj.weight": (4 * h, h), "mlp.c_proj.bias": (h,),
        }  # fmt: skip
        out |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    return {f"transformer.{name}": shape for name, shape in (out | {"ln_f.weight": (h,), "ln_f.bias": (h,)}).items()}


def numbered(of: dict[str, tuple[int, ...]]) -> Params:
    """Every element of every state another number; weights are masters rounded."""
    at, out = 0, {}
    for name, shape in of.items():
        mine: dict[str, Any] = {"step": 5}
        for state in STATES[1:]:
            mine[state] = torch.arange(at, at + math.prod(shape), dtype=torch.float32).reshape(shape)
            at += math.prod(shape)
        out[name] = {"weight": mine["fp32"].to(torch.bfloat16), **mine}
    return out


def saved(path: Path, params: Params, split: Callable[[str], bool] = lambda name: False) -> Path:
    groups = [[name for name in params if split(name) is apart] for apart in (False, True)]
    hyper = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    value = {
        "params": params, "buffers": {}, "aliases": {}, "scalars": {},
        "groups": [{**hyper, "weight_decay": 0.1 / (n + 1), "params": names} for n, names in enumerate(groups) if names],
    }  # fmt: skip
    torch.save(value, path)
    return path


def plain(path: Path, out: Path) -> Params:
    ucpl.convert(path, out, to="plain()")
    value: Params = torch.load(out, weights_only=True)["params"]
    return value


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Params]:
    """A bf16 run over transformers' names, three ranks of ZeRO-1."""
    here = tmp_path_factory.mktemp("dialects")
    params = numbered(shapes())
    ucpl.convert(saved(here / "plain.pt", params), here / "zero", to="zero1(dp = 3, bf16 = 1)")
    return here / "zero", params


def moved(source: Path, target: Path, here: str, to: str, config: dict[str, Any] = CONFIG) -> ucpl.api.Converted:
    return ucpl.convert(source, target, to=to, layout=f"of {here}", config=config)


def qkv(params: Params, layer: int, state: str) -> torch.Tensor:
    """As Megatron has it.

    Of each group its queries, its key, its value.
    """
    q, k, v = (params[f"model.layers.{layer}.self_attn.{one}_proj.weight"][state] for one in "qkv")
    rows = [[q[12 * g : 12 * g + 12], k[6 * g : 6 * g + 6], v[6 * g : 6 * g + 6]] for g in range(2)]
    return torch.cat([part for group in rows for part in group])


def test_moments_become_one_tensor_as_the_weights_do(zero: tuple[Path, Params], tmp_path: Path) -> None:
    source, params = zero
    done = moved(source, tmp_path / "there", HF, f"megatron_core(tp = 2, pp = 2) of {DIST}")
    found = plain(tmp_path / "there", tmp_path / "there.pt")
    assert len(found) == 9 and all(one["step"] == 5 for one in found.values())
    for state in STATES:
        stacks = {name.removeprefix("decoder.layers."): found[name][state] for name in found}
        for layer in range(3):
            block = {n.split(".", 3)[3]: p[state] for n, p in params.items() if n.startswith(f"model.layers.{layer}.")}
            assert torch.equal(stacks["self_attention.linear_qkv.weight"][layer], qkv(params, layer, state))
            gated = torch.cat([block["mlp.gate_proj.weight"], block["mlp.up_proj.weight"]])
            assert torch.equal(stacks["mlp.linear_fc1.weight"][layer], gated)
            assert torch.equal(stacks["mlp.linear_fc2.weight"][layer], block["mlp.down_proj.weight"])
            assert torch.equal(stacks["self_attention.linear_proj.weight"][layer], block["self_attn.o_proj.weight"])
        for name, own in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
            rows = found[f"{name}.weight"][state]
            assert torch.equal(rows[:21], params[f"{own}.weight"][state]) and len(rows) == 24 and not rows[21:].any()
    assert "36 elements of output_layer.weight that no tensor of the model has: zero" in done.plan.filled


@pytest.mark.parametrize(
    ("there", "to", "back"),
    [
        (DIST, "megatron_core(tp = 3)", "dcp(fsdp = 4)"),
        (LEGACY, "megatron_legacy(tp = 2, pp = 3)", "dcp(fsdp = 2)"),
        (LEGACY, "megatron_fsdp(dp = 3)", "dcp(fsdp = 2)"),
        ("llama.ucpl:phi3()", "dcp(fsdp = 5)", "dcp(fsdp = 2)"),
        ("llama.ucpl:pairs()", "dcp(fsdp = 2)", "dcp(fsdp = 3)"),
    ],
)
def test_there_and_back_at_other_degrees(
    there: str, to: str, back: str, zero: tuple[Path, Params], tmp_path: Path
) -> None:
    source, params = zero
    moved(source, tmp_path / "there", HF, f"{to} of {there}")
    moved(tmp_path / "there", tmp_path / "back", there, f"{back} of {HF}")
    found = plain(tmp_path / "back", tmp_path / "back.pt")
    assert found.keys() == params.keys()
    for name, states in params.items():
        assert all(torch.equal(found[name][state], states[state]) for state in STATES), name
        assert found[name]["step"] == 5


def test_rotary_halves_and_pairs_are_no_identity(zero: tuple[Path, Params], tmp_path: Path) -> None:
    moved(zero[0], tmp_path / "there", HF, "dcp(fsdp = 2) of llama.ucpl:pairs()")
    found = plain(tmp_path / "there", tmp_path / "there.pt")["model.layers.1.self_attn.k_proj.weight"]
    own = zero[1]["model.layers.1.self_attn.k_proj.weight"]
    for state in STATES:
        assert torch.equal(found[state], own[state][[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]])


def test_what_conv1d_keeps_inputs_first_is_turned_with_its_moments(tmp_path: Path) -> None:
    params = numbered(gpt2_shapes())
    ucpl.convert(saved(tmp_path / "plain.pt", params), tmp_path / "zero", to="zero2(dp = 2, bf16 = 1)")
    to = "megatron_fsdp(dp = 3, halves = 1) of gpt2.ucpl:megatron(tp = 1, divisible = 1)"
    moved(tmp_path / "zero", tmp_path / "there", "gpt2.ucpl:hf()", to, GPT2)
    found = plain(tmp_path / "there", tmp_path / "there.pt")
    for state, kept in (
        ("fp32", "weight"),
        ("exp_avg", "exp_avg"),
        ("exp_avg_sq", "exp_avg_sq"),
    ):  # masters are the weights
        for layer in range(2):
            own = params[f"transformer.h.{layer}.attn.c_attn.weight"][state].T  # (q, k, v) of both heads
            heads = torch.cat(
                [own[6 * part + 3 * head : 6 * part + 3 * head + 3] for head in range(2) for part in range(3)]
            )
            there = found[f"module.decoder.layers.{layer}.self_attention.linear_qkv.weight"][kept]
            assert torch.equal(there, heads)
            up = params[f"transformer.h.{layer}.mlp.c_fc.weight"][state].T
            assert torch.equal(found[f"module.decoder.layers.{layer}.mlp.linear_fc1.weight"][kept], up)


@pytest.mark.parametrize("there", ["megatron", "megatron_local"])
def test_megatrons_buffers_follow_its_modules(there: str, zero: tuple[Path, Params]) -> None:
    """SelfAttention registers linear_proj first, behind its own norm. No file records it."""
    to = f"megatron_legacy() of llama.ucpl:{there}(tp = 1)"
    plan = ucpl.plan(f"{zero[0]} of {HF}", to, config=CONFIG)
    (flat,) = plan.target.flats
    block = [name.split(".", 3)[3] for name, _ in flat.members if name.startswith("decoder.layers.1.")]
    first = ["input_layernorm.weight", "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"]
    if there == "megatron":
        first = [first[1], "self_attention.linear_qkv.layer_norm_weight", first[2]]
    assert block[:3] == first or block[-3:] == first[::-1], block


def test_modules_next_to_megatrons_own_leave_its_buffers_in_their_order(
    zero: tuple[Path, Params], tmp_path: Path
) -> None:
    """Names that Megatron-Core does not have follow those that it registers.

    Those keep their order.
    """
    shipped = (Path(ucpl.__file__).parents[1] / "specs/llama.ucpl").read_text(encoding="utf-8")
    own = 'layout own(tp) of llama extends megatron(tp = tp) {\n  ln2[l] = h  as "decoder.layers.{l.local}.scales"\n}\n'
    (tmp_path / "own.ucpl").write_text(f"{shipped}\n{own}")
    plan = ucpl.plan(f"{zero[0]} of {HF}", f"megatron_legacy() of {tmp_path}/own.ucpl:own(tp = 1)", config=CONFIG)
    (flat,) = plan.target.flats
    block = [name.split(".", 3)[3] for name, _ in flat.members if name.startswith("decoder.layers.1.")]
    core = "self_attention.linear_qkv"
    assert block[::-1][:3] == ["self_attention.linear_proj.weight", f"{core}.layer_norm_weight", f"{core}.weight"], (
        block
    )


def test_a_plan_that_is_kept_names_what_it_renames(zero: tuple[Path, Params], tmp_path: Path) -> None:
    to = f"megatron_core(tp = 2) of {DIST}"
    ucpl.save_plan(ucpl.plan(f"{zero[0]} of {HF}", to, config=CONFIG), tmp_path / "a.plan")
    assert ucpl.load_plan(tmp_path / "a.plan").renamed["decoder.final_layernorm.weight"] == ("model.norm.weight",)
    ucpl.apply(tmp_path / "a.plan", zero[0], tmp_path / "applied")
    moved(zero[0], tmp_path / "converted", HF, to)
    assert ucpl.compare(tmp_path / "applied", tmp_path / "converted")
    assert all(one["step"] == 5 for one in plain(tmp_path / "applied", tmp_path / "a.pt").values())


def refused(source: Path, to: str, here: str = f"of {HF}", **how: Any) -> tuple[str, str]:
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.convert(source, source.parent / "refused", to=to, layout=here, **{"config": CONFIG, **how})
    (found,) = caught.value.diagnostics
    assert not (source.parent / "refused").exists()
    return found.code, found.message


@pytest.mark.parametrize(
    ("here", "to", "code", "said"),
    [
        (f"of {HF}", "megatron_core()", "E335", "the target gives none"),
        ("zero1(dp = 3)", f"megatron_core() of {DIST}", "E335", "the source gives none"),
        (f"of {HF}", "megatron_core() of llama.ucpl:megatron(tp = 2)", "E335", "on 2 ranks"),
        (f"of {HF}", "megatron_legacy() of llama.ucpl:megatron_1p(tp = 1)", "E335", "`ln1` with other values"),
        (f"of {HF}", "dcp(fsdp = 2) of gpt2.ucpl:openai()", "E105", "n_embd"),
        (f"of {HF}", f'megatron_core(optimizer = "dp_reshardable") of {DIST}', "E335", "buckets are of modules"),
        (f"of {HF}", "zero1(dp = 2) of llama.ucpl:megatron(tp = 1)", "E335", "the order in which modules register"),
        (f"of {HF}", f"dcp(fsdp = 2, bf16 = 0) of {HF}", "E335", "trains in f32"),
        (f"of {DIST}", f"dcp(fsdp = 2) of {HF}", "E336", "model.embed_tokens.weight"),
        (f"of {HF}", "megatron_core(tp=2) of llama:torch_dist()", "E335", "of a file"),
        ("of hf()", f"megatron_core() of {DIST}", "E335", "of a file"),
        (f"of {HF}", f"of {DIST}", "E335", "no layout is given before `of`"),
        (f"of {HF}", f"{LEGACY} of {DIST}", "E335", "`megatron` before `of`"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_had(here: str, to: str, code: str, said: str, zero: tuple[Path, Params]) -> None:
    found = refused(zero[0], to, here)
    assert found[0] == code and said in found[1], found


def test_sizes_that_no_config_says_are_of_the_model(zero: tuple[Path, Params], tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("head_dim", "vocab_size")}
    to = f"dcp(fsdp = 2) of {LEGACY}"
    ucpl.convert(zero[0], tmp_path / "there", to, layout=f"of {HF}", config=config, sizes={"d": 6, "v": 21})
    moved(zero[0], tmp_path / "config", HF, to)
    assert ucpl.compare(tmp_path / "there", tmp_path / "config")
    assert refused(zero[0], to, sizes={"dd": 6})[0] == "E115"


@pytest.mark.parametrize("there", ["megatron_core(tp = 2)", "dcp(fsdp = 2)"])
def test_a_run_of_16_bits_is_one_for_deepspeed(there: str, tmp_path: Path) -> None:
    """Files of an optimizer are called `bf16_zero_...`.

    An engine that finds none of its own continues without it.
    """
    names = {"decoder.final_layernorm.weight": (4,), "output_layer.weight": (6, 4)}
    params = numbered(names)
    params["decoder.final_layernorm.weight"]["weight"] = params["decoder.final_layernorm.weight"]["fp32"]
    saved(tmp_path / "plain.pt", params)
    masters = ", masters = 1" if there.startswith("dcp") else ""
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "there", f"{there[:-1]}{masters})")
    ucpl.convert(tmp_path / "there", tmp_path / "back", "zero1(dp = 2)")
    assert [*tmp_path.glob("back/*/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")]
    found = plain(tmp_path / "back", tmp_path / "back.pt")
    assert {name: one["weight"].dtype for name, one in found.items()} == {
        n: p["weight"].dtype for n, p in params.items()
    }


def test_sizes_and_words_of_one_side(zero: tuple[Path, Params]) -> None:
    to = f"megatron_core() of {DIST}"
    assert refused(zero[0], to, config={**CONFIG, "vocab_size": 22}) == (
        "E336", "`model.embed_tokens.weight`: it is [21, 12] in the checkpoint, and [22, 12] by these",
    )  # fmt: skip
    assert refused(zero[0], to, config={**CONFIG, "num_hidden_layers": 4})[0] == "E336"
    assert refused(zero[0], to, drop=("exp_avg",)) == (
        "E335", f"no names can be had from `{DIST}`: --drop speaks of names of one side: convert first, then drop",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "said"),
    [("groups", "groups that differ in weight_decay"), ("dtypes", "other dtypes"), ("step", "other numbers of `step`")],
)
def test_tensors_that_become_one_are_alike(what: str, said: str, tmp_path: Path) -> None:
    params = numbered(shapes())
    key = params["model.layers.1.self_attn.k_proj.weight"]
    if what == "dtypes":
        key["weight"] = key["weight"].float()
    if what == "step":
        key["step"] = 6
    apart = (lambda name: "1.self_attn.k_proj" in name) if what == "groups" else (lambda name: False)
    source = saved(tmp_path / "plain.pt", params, apart)
    code, message = refused(source, f"dcp(fsdp = 2) of {LEGACY}")
    assert code == "E337" and said in message and "k_proj" in message, message


def test_the_command_says_what_it_does(zero: tuple[Path, Params], tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = command(
        "convert", str(zero[0]), str(tmp_path / "there"), "--from", f"of {HF}", "--to", f"dcp(fsdp = 2) of {DIST}",
        "--config", str(tmp_path / "config.json"), "--dry-run",
    )  # fmt: skip
    assert told.status == 0 and "36 elements of output_layer.weight" in told.out, told
