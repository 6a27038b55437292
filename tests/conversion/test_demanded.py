"""Demands of loaders on targets.

Names that Megatron looks for, config.json against the tensors, files of a model's folder.
"""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from tests.formats.huggingface.folders import llama_config, llama_shapes, random_of, save
from ucpl import api
from ucpl.cli import main
from ucpl.conversion import demanded
from ucpl.errors import UcplError
from ucpl.inference.hf.classes import ClassTensors
from ucpl.inference.hf.fitting import _fitted

CONFIG = llama_config(num_hidden_layers=2, architectures=["LlamaForCausalLM"])
WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tensors():
    return random_of(llama_shapes(CONFIG))


def refused(code, *args, **how):
    with pytest.raises(UcplError) as caught:
        ucpl.convert(*args, **how)
    assert caught.value.diagnostics[0].code == code, caught.value
    return caught.value.diagnostics[0]


# ---- names -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["megatron_core(tp=2)", "megatron_legacy()", "megatron_fsdp(dp=2)"])
@pytest.mark.parametrize("source", ["hf", "bart", "plain"])
def test_names_that_no_megatron_model_has_are_refused(to, source, tensors, tmp_path):
    """BART's decoder.layers.0.self_attn is none of Megatron's, whose modules have other names there."""
    made = {"hf": tensors, "bart": {f"decoder.layers.0.self_attn.{p}_proj.weight": torch.ones(4, 4) for p in "qkv"}}
    here = tmp_path / "s"
    if source == "plain":
        here = tmp_path / "s.pt"
        torch.save({"params": {name: {"weight": t} for name, t in tensors.items()}}, here)
    else:
        save(here, made[source])
    found = refused("E549", here, tmp_path / "made", to)
    assert "--to llama.ucpl:torch_dist" in found.remedy and not (tmp_path / "made").exists()


def test_names_of_a_dialect_and_of_a_spec_are_those_of_megatron(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, CONFIG)
    hf = "llama.ucpl:hf()"
    ucpl.convert(source, tmp_path / "one", "megatron_core(tp=2) of llama.ucpl:torch_dist()", layout=f"of {hf}")
    ucpl.convert(source, tmp_path / "two", "llama.ucpl:megatron(tp=1)", layout=hf)
    assert (tmp_path / "one" / "latest_checkpointed_iteration.txt").exists()


# ---- config.json ---------------------------------------------------------------------------------------------------------


def grown(source, tmp_path, rows, name="grown"):
    """The model of a folder with more words, as a text."""
    text = ucpl.infer(source).text()
    path = tmp_path / f"{name}.ucpl"
    head = text[: text.index("layout ")]
    for word in (WORDS, HEAD):
        line = next(line for line in head.splitlines() if word in line)
        head = head.replace(line, line.replace("67", str(rows)))
    path.write_text(head)
    return f"{path}:{head.split('model ', 1)[1].split()[0]}"


@pytest.mark.parametrize("nested", [False, True])
def test_a_vocabulary_that_grows_is_in_config_json(nested, tensors, tmp_path, capsys):
    inner = {"vocab_size": CONFIG["vocab_size"], "hidden_size": CONFIG["hidden_size"]}
    config = {"model_type": "some_vl", "text_config": inner} if nested else CONFIG
    source = save(tmp_path / "s", tensors, config)
    how = ["--fill", f"{WORDS}=0", "--fill", f"{HEAD}=0", "--model", grown(source, tmp_path, 80)]
    assert main(["convert", str(source), str(tmp_path / "made"), "--to", "safetensors()", *how]) == 0
    assert "config.json: vocab_size = 67 becomes 80" in capsys.readouterr().out
    now = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (now["text_config"] if nested else now)["vocab_size"] == 80
    assert ucpl.verify(tmp_path / "made", witness=False)
    shutil.copy(source / "config.json", tmp_path / "made" / "config.json")
    (tmp_path / "made" / "ucpl" / "manifest.json").unlink()
    found = ucpl.verify(tmp_path / "made", witness=False)
    assert [d.code for d in found.findings] == ["E388"] and "vocab_size = 67" in found.findings[0].message


def test_sizes_of_text_config_are_those_of_the_language_model(tensors, tmp_path):
    """LLaVA's config of transformers 4.36 has vocab_size = 32000 next to text_config.

    It does so for every model.
    """
    config = {"model_type": "llava", "vocab_size": 32000, "text_config": CONFIG}
    source = save(tmp_path / "s", tensors, config)
    assert ucpl.verify(source, witness=False)
    ucpl.convert(source, tmp_path / "made", "safetensors()")
    assert (tmp_path / "made" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    how = {"fill": [f"{WORDS}=0", f"{HEAD}=0"], "model": grown(source, tmp_path, 80)}
    ucpl.convert(source, tmp_path / "more", "safetensors()", **how)
    now = json.loads((tmp_path / "more" / "config.json").read_text())
    assert (now["vocab_size"], now["text_config"]["vocab_size"]) == (32000, 80)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"hidden_size": 40}, "hidden_size = 40"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3"),
        ({"num_hidden_layers": 1}, ": 2 would fit"),
        ({"intermediate_size": 20}, "intermediate_size = 20"),
    ],
)
def test_a_size_that_is_no_tensor_s_is_refused_and_found(more, says, tensors, tmp_path):
    source = save(tmp_path / "s", tensors, {**CONFIG, **more})
    assert says in refused("E388", source, tmp_path / "made", "safetensors()").message
    found = ucpl.verify(source, witness=False)
    assert not found and says in str([d.message for d in found.findings])
    (tmp_path / "right.json").write_text(json.dumps(CONFIG))
    ucpl.convert(source, tmp_path / "made", "safetensors()", config=tmp_path / "right.json")
    assert json.loads((tmp_path / "made" / "config.json").read_text()) == CONFIG


def test_layers_of_multi_token_prediction_are_beyond_the_count(tmp_path):
    config = {**CONFIG, "num_nextn_predict_layers": 1, "num_hidden_layers": 1}
    source = save(tmp_path / "s", random_of(llama_shapes(CONFIG)), config)
    assert ucpl.verify(source, witness=False)
    ucpl.convert(source, tmp_path / "made", "safetensors()")


def test_names_and_shapes_are_held_against_the_class(monkeypatch, tensors, tmp_path):
    """The class is transformers' own in tests/interop; here a stand-in."""
    shapes = {**llama_shapes(CONFIG), "model.layers.0.self_attn.q_proj.weight": (3, 3)}
    saved = ClassTensors("LlamaForCausalLM", shapes, prefix="model")
    monkeypatch.setattr("ucpl.inference.hf.fitting.saved_of", lambda _: saved)
    (tmp_path / "p.json").write_text(json.dumps(CONFIG))
    for case, names, code in (("wrong", tensors, "E388"), ("foreign", {"x.y": torch.ones(2)}, "E399")):
        torch.save({"params": {n: {"weight": t} for n, t in names.items()}}, tmp_path / f"{case}.pt")
        refused(code, tmp_path / f"{case}.pt", tmp_path / "made", "safetensors()", config=tmp_path / "p.json")
    found = _fitted(ClassTensors("M", {"model.a": (2,), "model.b": (2,), "c": (1,)}, frozenset({"c"}), (r"\.inv",), "model"),
                    {"a": (2,), "x.inv": (1,), "z": (3,)})  # fmt: skip
    assert (found.missing, found.unexpected, found.mismatched, found.common) == (("model.b",), ("z",), (), 1)
    assert demanded.Found().notes == ()


@pytest.mark.parametrize(
    ("kind", "more", "code"),
    [
        ("llama", {}, ""),
        ("llama", {"num_key_value_heads": 1}, "E388"),
        ("llama", {"head_dim": 3}, "E388"),
        ("mistral", {"num_attention_heads": 3}, "E388"),
        ("qwen2", {}, "note"),
        ("qwen3", {}, "note"),
        ("llama", {"mlp_bias": True}, "note"),
    ],
)
def test_a_common_class_is_checked_without_transformers(kind, more, code, tensors, tmp_path, capsys):
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = {**CONFIG, "model_type": kind, "architectures": [f"{names[kind]}ForCausalLM"], **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"params": {n: {"weight": t} for n, t in tensors.items()}}, tmp_path / "s.pt")
    how = ["--to", "safetensors()", "--config", str(tmp_path / "config.json")]
    there = str(tmp_path / "made")
    assert (main(["convert", str(tmp_path / "s.pt"), there, *how]) == 0) == (code != "E388")
    printed = capsys.readouterr()
    assert ("E388" in printed.err) == (code == "E388") and ("random numbers" in printed.out) == (code == "note")


@pytest.mark.parametrize(
    ("kind", "part", "code"), [("gpt2", "attn.c_attn", "E399"), ("mixtral", "block_sparse_moe", "")]
)
def test_a_config_of_another_model_is_noticed_without_transformers(
    kind, part, code, tensors, monkeypatch, tmp_path, capsys
):
    """A conversion notes missing parts; an export stops."""
    monkeypatch.setattr("ucpl.inference.hf.fitting.saved_of", lambda _: None)
    source = save(tmp_path / "s", tensors, CONFIG)
    (tmp_path / "other.json").write_text(json.dumps({"model_type": kind, "vocab_size": CONFIG["vocab_size"]}))
    text = f"layers of {kind} in config.json have `{part}"
    with pytest.raises(UcplError) as caught:
        ucpl.export(source, tmp_path / "model", config=tmp_path / "other.json")
    assert caught.value.diagnostics[0].code == (code or "E222") and text in caught.value.diagnostics[0].message
    how = ["--to", "safetensors()", "--config", str(tmp_path / "other.json")]
    assert (main(["convert", str(source), str(tmp_path / "made"), *how]) == 0) == (not code)
    assert text in "".join(capsys.readouterr())


# ---- files -------------------------------------------------------------------------------------------------------------------


def test_code_and_tokenizer_go_along_and_those_next_to_a_given_config_too(tensors, tmp_path):
    config = {**CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    source = save(tmp_path / "s", tensors, config)
    raw = b"\x0a\xff\x00sentencepiece"
    (source / "modeling_x.py").write_text("from .configuration_x import C\n")
    (source / "configuration_x.py").write_text("C = 1\n")
    (source / "tokenizer.model").write_bytes(raw)
    ucpl.convert(source, tmp_path / "made", "safetensors()")
    ucpl.convert(source, tmp_path / "plain.pt", "plain()")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "back", "safetensors()")
    save_file(tensors, tmp_path / "bare.safetensors", {"format": "pt"})
    ucpl.convert(tmp_path / "bare.safetensors", tmp_path / "other", "safetensors()", config=source / "config.json")
    for folder in ("made", "back", "other"):
        for name in ("modeling_x.py", "configuration_x.py", "tokenizer.model", "config.json"):
            assert (tmp_path / folder / name).read_bytes() == (source / name).read_bytes(), (folder, name)


def test_code_that_no_config_names_is_left_out_and_reported(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, CONFIG)
    (source / "train.py").write_text("")
    ucpl.convert(source, tmp_path / "made", "safetensors()")
    assert not (tmp_path / "made" / "train.py").exists()
    assert "train.py" in {one.name for one in api.open_checkpoint(source).not_read}


@pytest.mark.parametrize("to", ["plain()", "zero1(dp=2)", "dcp(fsdp=2)", "universal()"])
@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w2.weight", "llama.ucpl:mixtral_stacked()"),
        ("qwen3_moe", "model.layers.0.mlp.experts.0.up_proj.weight", "llama.ucpl:qwen_moe_stacked()"),
        ("olmoe", "model.layers.0.mlp.experts.0.up_proj.weight", "look for other names"),
        ("gpt_neox", "embed_out.weight", "look for other names"),
        ("llava", "language_model.model.norm.weight", "look for other names"),
        ("llama", "model.layers.0.mlp.up_proj.weight", ""),
    ],
)
def test_names_that_transformers_renames_are_noted(to, kind, name, says, tmp_path):
    source = save(tmp_path / "s", {name: torch.ones(2, 2), "x.weight": torch.ones(3)}, {"model_type": kind})
    said = [one for one in ucpl.convert(source, tmp_path / "made", to).report.remarks if "transformers" in one]
    assert [name in one and says in one for one in said] == [True] * bool(says)
    back = ucpl.convert(source, tmp_path / "back", "safetensors()").report.remarks
    assert not any("transformers" in one for one in back)


# ---- names that a loader looks for ------------------------------------------------------------------------------------


def plain(path, names):
    params = {name: {"weight": torch.full((2, 2), float(i))} for i, name in enumerate(names)}
    torch.save({"params": params}, path)
    return path


@pytest.mark.parametrize("lead", ["module.", "model_state.model.", "_orig_mod.module.", ""])
def test_the_prefix_of_a_wrapper_is_taken_off(lead, tmp_path, capsys):
    source = plain(tmp_path / "s.pt", [f"{lead}model.a.weight", f"{lead}lm_head.weight"])
    assert main(["convert", str(source), str(tmp_path / "made"), "--to", "safetensors()"]) == 0
    assert set(load_file(tmp_path / "made" / "model.safetensors")) == {"model.a.weight", "lm_head.weight"}
    assert ("names = without" in capsys.readouterr().out) == bool(lead)


def test_a_prefix_that_one_tensor_lacks_or_the_class_has_is_kept(monkeypatch, tmp_path):
    source = plain(tmp_path / "s.pt", ["module.a", "b"])
    ucpl.convert(source, tmp_path / "made", "safetensors()")
    assert set(load_file(tmp_path / "made" / "model.safetensors")) == {"module.a", "b"}
    saved = ClassTensors("M", {"module.a": (2, 2)})
    monkeypatch.setattr("ucpl.inference.hf.classes.saved_of", lambda _: saved)
    source = plain(tmp_path / "t.pt", ["_orig_mod.module.a"])
    ucpl.convert(source, tmp_path / "other", "safetensors()", config={"model_type": "m"})
    assert set(load_file(tmp_path / "other" / "model.safetensors")) == {"module.a"}


LORA = "base_model.model.model.layers.0.q_proj"


def test_an_adapter_is_named_as_peft_names_it_and_asks_for_its_config(tmp_path):
    names = [f"{LORA}.lora_A.default.weight", f"{LORA}.lora_B.default.weight", f"{LORA}.base_layer.weight"]
    names += [
        "base_model.model.lm_head.modules_to_save.default.weight",
        "base_model.model.lm_head.original_module.weight",
    ]
    source = plain(tmp_path / "s.pt", names)
    found = refused("E394", source, tmp_path / "made", "safetensors()")
    assert "--config PATH/adapter_config.json" in found.remedy
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    ucpl.convert(source, tmp_path / "made", "safetensors()", config=tmp_path / "adapter_config.json")
    own = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert set(own) == {f"{LORA}.lora_A.weight", f"{LORA}.lora_B.weight", "base_model.model.lm_head.weight"}
    assert own["base_model.model.lm_head.weight"].unique().tolist() == [3.0]
    base = load_file(tmp_path / "made" / "model.safetensors")
    assert set(base) == {"model.layers.0.q_proj.weight", "lm_head.weight"}
    assert (tmp_path / "made" / "adapter_config.json").read_text() == '{"peft_type": "LORA"}'
    two = plain(tmp_path / "t.pt", [*names, f"{LORA}.lora_A.other.weight"])
    refused("E394", two, tmp_path / "again", "safetensors()", config=tmp_path / "adapter_config.json")


def test_an_adapter_that_peft_saved_keeps_its_names_and_its_file(tmp_path):
    """`lora_A.weight` is no adapter called weight.

    PEFT reads no index, however large a file is.
    """
    names = [f"{LORA}.lora_A.weight", f"{LORA}.lora_B.weight", f"{LORA}.lora_magnitude_vector"]
    names += ["base_model.model.embed.lora_embedding_A", "base_model.model.lm_head.weight"]
    source = tmp_path / "s"
    source.mkdir()
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    own = {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)}
    save_file(own, source / "adapter_model.safetensors", {"format": "pt"})
    for via in ("", "plain()", "dcp(fsdp=2)"):
        here, made = source, tmp_path / f"made{via}"
        if via:
            here = tmp_path / via
            ucpl.convert(source, here, via)
        ucpl.convert(here, made, 'safetensors(shard="40B")')
        there = load_file(made / "adapter_model.safetensors")
        assert set(there) == set(own) and all(torch.equal(there[n], t) for n, t in own.items())
        assert not list(made.glob("model*")) and (made / "adapter_config.json").exists()


@pytest.mark.parametrize("via", ["", "plain()", "zero1(dp=2)"])
@pytest.mark.parametrize("shard", ["5GB", "20B"])
def test_weights_of_diffusers_are_in_the_file_that_it_looks_for(via, shard, tmp_path):
    own = {f"conv.{i}.weight": torch.full((2, 2), float(i)) for i in range(3)}
    source = save(tmp_path / "s", own, {"_class_name": "UNet2DModel", "_diffusers_version": "0.30.0"})
    (source / "model.safetensors").rename(source / "diffusion_pytorch_model.safetensors")
    here = source
    how: dict[str, Any] = {}
    if via:
        here, how = tmp_path / via, {"config": source / "config.json"}
        ucpl.convert(source, here, via)
    ucpl.convert(here, tmp_path / "made", f'safetensors(shard="{shard}")', **how)
    files = {path.name for path in (tmp_path / "made").glob("*model*")}
    stem = "diffusion_pytorch_model"
    many = {f"{stem}-0000{n}-of-00003.safetensors" for n in (1, 2, 3)} | {f"{stem}.safetensors.index.json"}
    assert files == ({f"{stem}.safetensors"} if shard == "5GB" else many)
    assert ucpl.verify(tmp_path / "made", witness=False)


# ---- texts that would mislead a loader --------------------------------------------------------------------------------


def test_the_config_of_an_adapter_that_is_not_read_is_left_out(tensors, tmp_path, capsys):
    """from_pretrained would look for the adapter's weights next to it, and stop."""
    source = save(tmp_path / "s", tensors, CONFIG)
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({f"{LORA}.lora_A.weight": torch.ones(2, 2)}, source / "adapter_model.safetensors", {"format": "pt"})
    assert main(["convert", str(source), str(tmp_path / "made"), "--to", "safetensors()", "--json"]) == 0
    account = json.loads(capsys.readouterr().out)["plan"]["account"]["entries"]
    fates = {name: entry["fate"] for entry in account for name in entry["names"]}
    assert fates == {"adapter_config.json": "dropped", "adapter_model.safetensors": "not read"}
    assert not (tmp_path / "made" / "adapter_config.json").exists()


def test_a_key_that_names_the_file_of_weights_is_left_out(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, {**CONFIG, "transformers_weights": "other.safetensors"})
    (source / "model.safetensors").rename(source / "other.safetensors")
    made = ucpl.convert(source, tmp_path / "made", "safetensors()")
    assert any("transformers_weights = other.safetensors is left out" in one for one in made.report.remarks)
    assert json.loads((tmp_path / "made" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize(("kind", "now"), [("hf", "float16"), ("plain", "bfloat16")])
def test_the_dtype_of_config_json_changes_with_the_tensors_alone(kind, now, tensors, tmp_path):
    """from_pretrained(dtype="auto") loads in the dtype of config.json, whatever the files have."""
    narrow = {name: t.bfloat16() for name, t in tensors.items()}
    source = save(tmp_path / "s", narrow, {**CONFIG, "dtype": "float16"})
    torch.save({"params": {n: {"weight": t} for n, t in narrow.items()}}, tmp_path / "s.pt")
    here = source if kind == "hf" else tmp_path / "s.pt"
    made = ucpl.convert(here, tmp_path / "made", "safetensors()", config=source / "config.json")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == now
    said = [one for one in made.report.remarks if "dtype" in one]
    assert said == ["config.json: dtype = float16 becomes bfloat16"] * (kind == "plain")
