"""Llama, Mixtral and GPT-2 through their dialects.

Hand-written expectations in plain torch, odd sizes, value changes.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import ucpl
from tests.formats.huggingface.folders import (
    WRITTEN,
    assert_equal,
    llama_config,
    llama_shapes,
    random_of,
    save,
    tensors_of,
)
from ucpl.errors import UcplError
from ucpl.texts import Json

MEGATRON_CORE = Path(__file__).parents[1] / "fixtures" / "megatron"  # written by megatron-core itself

KINDS = {
    "untied": llama_config(),
    "tied": llama_config(tie_word_embeddings=True),
    "biased": llama_config(attention_bias=True, mlp_bias=True),
    "qwen2": llama_config(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": llama_config(model_type="qwen3"),
    "every head its own": llama_config(num_key_value_heads=9),
}


def llama(folder, config, dtype=torch.float32):
    tensors = random_of(llama_shapes(config), dtype)
    save(folder, tensors, config)
    return tensors


def there_and_back(folder, first: str, second: str, *, back: str = "hf()"):
    """hf() -> a dialect -> hf(), all by the shipped specs.

    Sizes come from config.json, which goes along.
    """
    ucpl.convert(folder / "hf", folder / "there", second, layout=first)
    ucpl.convert(folder / "there", folder / "back", f"{first.partition(':')[0]}:{back}", layout=second)
    return tensors_of(folder / "back")


def megatron_file(folder, tp, pp):
    return torch.load(folder / "release" / f"mp_rank_{tp:02}_{pp:03}" / "model_optim_rng.pt", weights_only=True)[
        "model"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_llama_through_megatron_and_back(kind, tmp_path):
    tensors = llama(tmp_path / "hf", KINDS[kind])
    assert_equal(tensors, there_and_back(tmp_path, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2, pp=2)"))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == KINDS[kind]
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    assert not (tmp_path / "back" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_every_megatron_tensor_of_llama_is_what_megatron_s_own_formula_gives(tied, tmp_path):
    """Not by the spec.

    Q, k, v interleaved by group, gate and up halves per rank, vocabulary padded, stages cut.
    """
    config = llama_config(
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=tied
    )  # as Megatron itself needs it
    t = llama(tmp_path / "hf", config)
    ucpl.convert(tmp_path / "hf", tmp_path / "m", "llama.ucpl:megatron(tp=2, pp=2)", layout="llama.ucpl:hf()")
    g, r, d, h, v = 4, 2, 4, 36, 67
    padded = torch.cat([t["model.embed_tokens.weight"], torch.zeros(256 - v, h)])
    head = padded if tied else torch.cat([t["lm_head.weight"], torch.zeros(256 - v, h)])
    for tp in range(2):
        for pp in range(2):
            want = {}
            if pp == 0:
                want["embedding.word_embeddings.weight"] = padded.chunk(2)[tp]
            for local, l in enumerate(range(2 * pp, 2 * pp + 2)):
                p, q = f"model.layers.{l}.", f"decoder.layers.{local}."
                groups = []
                for i in range(g):
                    groups.append(t[p + "self_attn.q_proj.weight"][i * r * d : (i + 1) * r * d])
                    groups.append(t[p + "self_attn.k_proj.weight"][i * d : (i + 1) * d])
                    groups.append(t[p + "self_attn.v_proj.weight"][i * d : (i + 1) * d])
                want[q + "self_attention.linear_qkv.layer_norm_weight"] = t[p + "input_layernorm.weight"]
                want[q + "self_attention.linear_qkv.weight"] = torch.cat(groups).chunk(2)[tp]
                want[q + "self_attention.linear_proj.weight"] = t[p + "self_attn.o_proj.weight"].chunk(2, 1)[tp]
                want[q + "mlp.linear_fc1.layer_norm_weight"] = t[p + "post_attention_layernorm.weight"]
                halves = [t[p + f"mlp.{name}_proj.weight"].chunk(2)[tp] for name in ("gate", "up")]
                want[q + "mlp.linear_fc1.weight"] = torch.cat(halves)
                want[q + "mlp.linear_fc2.weight"] = t[p + "mlp.down_proj.weight"].chunk(2, 1)[tp]
            if pp == 1:
                want["decoder.final_layernorm.weight"] = t["model.norm.weight"]
                want["output_layer.weight"] = head.chunk(2)[tp]
            assert_equal(want, megatron_file(tmp_path / "m", tp, pp))


def test_degrees_of_megatron_change_without_a_detour(tmp_path):
    tensors = llama(tmp_path / "hf", llama_config())
    ucpl.convert(tmp_path / "hf", tmp_path / "a", "llama.ucpl:megatron(tp=2, pp=2)", layout="llama.ucpl:hf()")
    ucpl.convert(
        tmp_path / "a", tmp_path / "b", "llama.ucpl:megatron(tp=1, pp=4)", layout="llama.ucpl:megatron(tp=2, pp=2)"
    )
    ucpl.convert(tmp_path / "b", tmp_path / "c", "llama.ucpl:hf()", layout="llama.ucpl:megatron(tp=1, pp=4)")
    assert_equal(tensors, tensors_of(tmp_path / "c"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("there", ["megatron(tp=2, pp=2)", "megatron(tp=1, pp=1)"])
def test_what_transformers_wrote_comes_back(name, there, tmp_path):
    shutil.copytree(WRITTEN / name, tmp_path / "hf")
    found = there_and_back(tmp_path, f"{name}.ucpl:hf()", f"{name}.ucpl:{there}", back='hf(shard="20KB")')
    assert_equal(tensors_of(tmp_path / "hf"), found)


def gpt2(folder):
    c = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 20,
        "n_head": 5,
        "n_positions": 11,
        "vocab_size": 61,
        "n_inner": 34,
    }
    h, f = 20, 34
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (61, h), "transformer.wpe.weight": (11, h)}
    for i in range(2):
        for name, shape in {
            "ln_1.weight": (h,), "ln_1.bias": (h,), "attn.c_attn.weight": (h, 3 * h), "attn.c_attn.bias": (3 * h,),
            "attn.c_proj.weight": (h, h), "attn.c_proj.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,),
            "mlp.c_fc.weight": (h, f), "mlp.c_fc.bias": (f,), "mlp.c_proj.weight": (f, h), "mlp.c_proj.bias": (h,),
        }.items():  # fmt: skip
            shapes[f"transformer.h.{i}.{name}"] = shape
    shapes |= {"transformer.ln_f.weight": (h,), "transformer.ln_f.bias": (h,)}
    tensors = random_of(shapes)
    save(folder, tensors, c)
    return tensors


def test_gpt2_s_matrices_are_turned_square_ones_too(tmp_path):
    t = gpt2(tmp_path / "hf")
    assert_equal(t, there_and_back(tmp_path, "gpt2.ucpl:hf()", "gpt2.ucpl:megatron(tp=2, pp=2)"))
    for tp in range(2):
        made = megatron_file(tmp_path / "there", tp, 1)
        one = "transformer.h.1."
        q = "decoder.layers.0."
        assert torch.equal(
            made[q + "self_attention.linear_proj.weight"], t[one + "attn.c_proj.weight"].T.chunk(2, 1)[tp]
        )
        assert torch.equal(made[q + "mlp.linear_fc1.weight"], t[one + "mlp.c_fc.weight"].T.chunk(2)[tp])
        assert torch.equal(made[q + "mlp.linear_fc2.weight"], t[one + "mlp.c_proj.weight"].T.chunk(2, 1)[tp])
        by_head = t[one + "attn.c_attn.weight"].T.reshape(3, 5, 4, 20).transpose(0, 1).reshape(60, 20)
        assert torch.equal(made[q + "self_attention.linear_qkv.weight"], by_head.chunk(2)[tp])
        # tied: the last stage has the embedding again
        padded = torch.cat([t["transformer.wte.weight"], torch.zeros(256 - 61, 20)])
        assert torch.equal(made["output_layer.weight"], padded.chunk(2)[tp])


def test_a_tied_copy_that_differs_is_refused_with_both_places(tmp_path):
    gpt2(tmp_path / "hf")
    ucpl.convert(tmp_path / "hf", tmp_path / "m", "gpt2.ucpl:megatron(tp=2, pp=2)", layout="gpt2.ucpl:hf()")
    path = tmp_path / "m" / "release" / "mp_rank_00_001" / "model_optim_rng.pt"
    value = torch.load(path, weights_only=True)
    value["model"]["output_layer.weight"][7, 3] += 1
    torch.save(value, path)
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "m", tmp_path / "back", "gpt2.ucpl:hf()", layout="gpt2.ucpl:megatron(tp=2, pp=2)")
    (found,) = caught.value.diagnostics
    assert found.code == "E613" and "[7, 3]" in str(found)
    assert {label.file.rpartition("release/")[2] for label in found.labels} == {
        "mp_rank_00_000/model_optim_rng.pt", "mp_rank_00_001/model_optim_rng.pt"
    }  # fmt: skip
    assert not (tmp_path / "back").exists()


def test_openai_s_names_of_gpt2(tmp_path):
    t = gpt2(tmp_path / "hf")
    ucpl.convert(tmp_path / "hf", tmp_path / "o", "gpt2.ucpl:openai()", layout="gpt2.ucpl:hf()")
    assert_equal({n.removeprefix("transformer."): x for n, x in t.items()}, tensors_of(tmp_path / "o"))


def test_rotary_pairs_and_halves(tmp_path):
    """Against the permutation of transformers' own convert_llama_weights_to_hf.py, and back."""
    config = llama_config()
    t = llama(tmp_path / "hf", config)
    assert_equal(t, there_and_back(tmp_path, "llama.ucpl:hf()", "llama.ucpl:pairs()"))
    pairs = tensors_of(tmp_path / "there")
    for name, heads in (("q_proj", 9), ("k_proj", 3)):
        for l in range(4):
            w = pairs[f"model.layers.{l}.self_attn.{name}.weight"]
            permuted = w.view(heads, 2, 2, 36).transpose(1, 2).reshape(heads * 4, 36)
            assert torch.equal(permuted, t[f"model.layers.{l}.self_attn.{name}.weight"])
            assert not torch.equal(w, t[f"model.layers.{l}.self_attn.{name}.weight"])
    same = [n for n in t if "q_proj" not in n and "k_proj" not in n]
    assert_equal({n: t[n] for n in same}, {n: pairs[n] for n in same})


def test_norms_minus_one(tmp_path):
    config = llama_config()
    t = llama(tmp_path / "hf", config)
    assert_equal(t, there_and_back(tmp_path, "llama.ucpl:hf()", "llama.ucpl:megatron_1p(tp=2, pp=2)"))
    for pp, name in ((0, "model.layers.1.input_layernorm.weight"), (1, "model.layers.3.input_layernorm.weight")):
        made = megatron_file(tmp_path / "there", 1, pp)
        assert torch.equal(made["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"], t[name] - 1)
    assert torch.equal(made["decoder.final_layernorm.weight"], t["model.norm.weight"] - 1)


def test_a_norm_that_minus_one_cannot_keep_is_refused_not_rounded(tmp_path):
    config = llama_config(num_hidden_layers=2)
    tensors = random_of(llama_shapes(config))
    tensors["model.norm.weight"][5] = 1e-9  # 1e-9 - 1 is -1 in float32
    save(tmp_path / "hf", tensors, config)
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "hf", tmp_path / "m", "llama.ucpl:megatron_1p(tp=1)", layout="llama.ucpl:hf()")
    assert caught.value.diagnostics[0].code == "E605" and "[5]" in str(caught.value.diagnostics[0])


def test_what_was_trained_minus_one_is_rounded_where_the_target_admits_it(tmp_path):
    llama(tmp_path / "hf", llama_config())
    there = "llama.ucpl:megatron_1p(tp=1)"
    ucpl.convert(tmp_path / "hf", tmp_path / "m", there, layout="llama.ucpl:hf()")
    path = tmp_path / "m" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    value = torch.load(path, weights_only=True)
    value["model"]["decoder.final_layernorm.weight"][5] = 1e-9
    torch.save(value, path)
    assert refused(tmp_path / "m", tmp_path / "x", "llama.ucpl:hf()", layout=there).code == "E605"
    ucpl.convert(tmp_path / "m", tmp_path / "x", "llama.ucpl:hf_rounded()", layout=there)
    assert tensors_of(tmp_path / "x")["model.norm.weight"][5] == 1


@pytest.mark.parametrize("tp", [2, 3])
def test_autotp_cuts_uneven_groups_and_rows(tp, tmp_path):
    t = llama(tmp_path / "hf", llama_config())
    assert_equal(t, there_and_back(tmp_path, "llama.ucpl:hf()", f"llama.ucpl:autotp(tp={tp})"))
    first = torch.load(tmp_path / "there" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    rows = {2: (2, 11), 3: (1, 8)}[tp]  # kv groups of 3, rows of 22
    assert first["model.layers.0.self_attn.k_proj.weight"].shape == (rows[0] * 4, 36)
    assert first["model.layers.0.self_attn.o_proj.weight"].shape == (36, rows[0] * 12)
    assert torch.equal(first["model.layers.0.mlp.up_proj.weight"], t["model.layers.0.mlp.up_proj.weight"][: rows[1]])


def mixtral(folder):
    c = {**llama_config(num_hidden_layers=2), "model_type": "mixtral", "num_local_experts": 3}
    h, f = c["hidden_size"], c["intermediate_size"]
    shapes = {n: s for n, s in llama_shapes(c).items() if ".mlp." not in n}
    for l in range(2):
        p = f"model.layers.{l}.block_sparse_moe."
        shapes[p + "gate.weight"] = (3, h)
        for e in range(3):
            shapes |= {p + f"experts.{e}.{w}.weight": (f, h) if w != "w2" else (h, f) for w in ("w1", "w2", "w3")}
    tensors = random_of(shapes)
    save(folder, tensors, c)
    return tensors


@pytest.mark.parametrize("there", ["mixtral_stacked()", "megatron_moe(tp=2, pp=2)"])
def test_mixtral(there, tmp_path):
    t = mixtral(tmp_path / "hf")
    assert_equal(t, there_and_back(tmp_path, "llama.ucpl:mixtral()", f"llama.ucpl:{there}", back="mixtral()"))
    if there == "mixtral_stacked()":
        made = tensors_of(tmp_path / "there")["model.layers.1.mlp.experts.gate_up_proj"]
        p = "model.layers.1.block_sparse_moe.experts."
        assert torch.equal(
            made, torch.stack([torch.cat([t[f"{p}{e}.w1.weight"], t[f"{p}{e}.w3.weight"]]) for e in range(3)])
        )


# ---- refusals ----------------------------------------------------------------------------------------------------------


def refused(*args, **more):
    with pytest.raises(UcplError) as caught:
        ucpl.convert(*args, **more)
    return caught.value.diagnostics[0]


def test_a_spec_of_another_model_is_refused_with_a_place(tmp_path):
    gpt2(tmp_path / "hf")
    found = refused(tmp_path / "hf", tmp_path / "m", "llama.ucpl:megatron(tp=2)", layout="llama.ucpl:hf()")
    assert found.code.startswith("E1")  # its config has no hidden_size
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **llama_config()}))
    found = refused(tmp_path / "hf", tmp_path / "m", "llama.ucpl:megatron(tp=2)", layout="llama.ucpl:hf()")
    assert found.code == "E321" and "model.embed_tokens.weight" in found.message


def test_a_tensor_that_the_spec_lacks_is_refused(tmp_path):
    config = llama_config()
    save(tmp_path / "hf", {**random_of(llama_shapes(config)), "extra": torch.ones(3)}, config)
    found = refused(tmp_path / "hf", tmp_path / "m", "llama.ucpl:megatron(tp=2)", layout="llama.ucpl:hf()")
    assert found.code == "E320" and "extra" in found.message


def test_a_wrong_degree_for_the_source_is_refused(tmp_path):
    llama(tmp_path / "hf", llama_config())
    ucpl.convert(tmp_path / "hf", tmp_path / "m", "llama.ucpl:megatron(tp=2, pp=2)", layout="llama.ucpl:hf()")
    found = refused(tmp_path / "m", tmp_path / "x", "llama.ucpl:hf()", layout="llama.ucpl:megatron(tp=2, pp=4)")
    assert found.code == "E391" and "mp_rank_00_002" in found.message
    found = refused(tmp_path / "m", tmp_path / "x", "llama.ucpl:hf()", layout="llama.ucpl:megatron(tp=1, pp=2)")
    assert found.code == "E322"


def test_names_of_several_shipped_files_need_their_file(tmp_path):
    llama(tmp_path / "hf", llama_config())
    found = refused(tmp_path / "hf", tmp_path / "m", "megatron(tp=2)")
    assert found.code == "E383" and "gpt2.ucpl" in found.message and "llama.ucpl" in found.message


def test_a_plan_file_of_a_spec_alone_runs_on_the_folder(tmp_path):
    tensors = llama(tmp_path / "hf", llama_config())
    there, back = "llama.ucpl:megatron(tp=2, pp=2)", "llama.ucpl:hf()"
    plan = ucpl.plan(back, there, checkpoint=tmp_path / "hf")
    ucpl.save_plan(plan, tmp_path / "a.plan")
    ucpl.apply(tmp_path / "a.plan", tmp_path / "hf", tmp_path / "m")
    ucpl.save_plan(ucpl.plan(there, back, checkpoint=tmp_path / "m"), tmp_path / "b.plan")
    ucpl.apply(tmp_path / "b.plan", tmp_path / "m", tmp_path / "back")
    assert_equal(tensors, tensors_of(tmp_path / "back"))
    assert ucpl.compare(tmp_path / "hf", tmp_path / "m", a_layout=back, b_layout=there)
    assert ucpl.verify(tmp_path / "m", layout=there)


def test_a_named_model_goes_into_layouts_of_any_model_and_back(tmp_path):
    """One tensor per line of the model, layers and heads as axes.

    Also the shipped ZeRO, as for a new training.
    """
    config = llama_config()
    tensors = llama(tmp_path / "hf", config)
    ucpl.convert(tmp_path / "hf", tmp_path / "p.pt", "plain()", layout="llama.ucpl:hf()")
    params = torch.load(tmp_path / "p.pt", weights_only=True)["params"]
    assert params["attn.q"]["weight"].shape == (4, 3, 3, 4, 36)
    one = tensors["model.layers.2.self_attn.k_proj.weight"].reshape(3, 4, 36)
    assert torch.equal(params["attn.k"]["weight"][2], one)
    named = refused(tmp_path / "hf", tmp_path / "s", "safetensors()", layout="llama.ucpl:hf()")
    assert named.code == "E399"  # the class of config.json knows none of the model's names
    ucpl.convert(tmp_path / "hf", tmp_path / "z", "zero1(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "back", "safetensors()")
    assert_equal(tensors, tensors_of(tmp_path / "back"))


# ---- folders that Megatron wrote ----------------------------------------------------------------------------------------

MEGATRON: dict[str, Json] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


def formula(key: str, *shape: int) -> torch.Tensor:
    """The generator's values of a tensor of the fixture.

    By the name and shape that Megatron itself gives the full tensor.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_megatron_s_own_folder_in_hugging_face_s_form(tmp_path):
    """megatron-core 0.16.1, legacy format, tp 2, pp 2.

    Each tensor by Megatron's own formula, stacked over layers.
    """
    there = 'llama.ucpl:megatron_local(tp=2, pp=2, divisible=1, step="iter_0000010")'
    ucpl.convert(MEGATRON_CORE, tmp_path / "hf", "llama.ucpl:hf()", layout=there, config=MEGATRON)
    found = tensors_of(tmp_path / "hf")
    assert set(found) == set(llama_shapes({**MEGATRON, "head_dim": 8}))
    qkv = formula("decoder.layers.self_attention.linear_qkv.weight", 4, 64, 32).reshape(4, 2, 4, 8, 32)
    fc1 = formula("decoder.layers.mlp.linear_fc1.weight", 4, 96, 32)
    fc1b = formula("decoder.layers.mlp.linear_fc1.bias", 4, 96)
    out = formula("decoder.layers.self_attention.linear_proj.weight", 4, 32, 32)
    for l in range(4):
        p = f"model.layers.{l}."
        assert torch.equal(found[p + "self_attn.q_proj.weight"], qkv[l, :, :2].reshape(32, 32))
        assert torch.equal(found[p + "self_attn.k_proj.weight"], qkv[l, :, 2].reshape(16, 32))
        assert torch.equal(found[p + "self_attn.v_proj.weight"], qkv[l, :, 3].reshape(16, 32))
        assert torch.equal(found[p + "self_attn.o_proj.weight"], out[l])
        assert torch.equal(found[p + "mlp.gate_proj.weight"], fc1[l, :48])
        assert torch.equal(found[p + "mlp.up_proj.weight"], fc1[l, 48:])
        assert torch.equal(found[p + "mlp.up_proj.bias"], fc1b[l, 48:])
    assert torch.equal(found["model.embed_tokens.weight"], formula("embedding.word_embeddings.weight", 96, 32))
    assert torch.equal(found["lm_head.weight"], formula("output_layer.weight", 96, 32))
    ucpl.convert(tmp_path / "hf", tmp_path / "again", there, layout="llama.ucpl:hf()", config=MEGATRON)
    for path in MEGATRON_CORE.glob("iter_*/*/*.pt"):
        theirs = torch.load(path, weights_only=False)["model"]
        ours = torch.load(tmp_path / "again" / path.relative_to(MEGATRON_CORE), weights_only=True)["model"]
        assert_equal({n: t for n, t in theirs.items() if t is not None}, ours)


def test_torch_dist_has_complete_stacked_tensors_and_what_modules_keep_next_to(tmp_path):
    """By torch's own reader of the format.

    `_extra_state` of each linear module is asked for by Megatron when it loads.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    tensors = llama(tmp_path / "hf", KINDS["untied"])
    there = "llama.ucpl:torch_dist(tp=3, pp=2)"
    ucpl.convert(tmp_path / "hf", tmp_path / "m", there, layout="llama.ucpl:hf()")
    folder = tmp_path / "m" / "iter_0000000"
    known = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    linear = ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv")
    assert {n for n in known if "_extra_state" in n} == {
        f"decoder.layers.{name}._extra_state/shard_{layer}_4" for name in linear for layer in range(4)
    }
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    made = torch.load(tmp_path / "whole.pt", weights_only=False)
    halves = [torch.cat([tensors[f"model.layers.{l}.mlp.{n}_proj.weight"] for n in ("gate", "up")]) for l in range(4)]
    assert torch.equal(made["decoder.layers.mlp.linear_fc1.weight"], torch.stack(halves))
    ucpl.convert(tmp_path / "m", tmp_path / "back", "llama.ucpl:hf()", layout=there, config=KINDS["untied"])
    assert_equal(tensors, tensors_of(tmp_path / "back"))
