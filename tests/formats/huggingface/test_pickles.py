"""Weights in pytorch_model.bin: one file or several, of both forms of torch.save."""

import json

import pytest
import torch
from safetensors.torch import load_file

import ucpl
from tests.formats.huggingface.folders import assert_equal, llama_config, llama_shapes, random_of
from ucpl import api
from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError

CONFIG = llama_config(num_hidden_layers=1, architectures=["LlamaForCausalLM"])
TENSORS = random_of(llama_shapes(CONFIG))
INDEX = "pytorch_model.bin.index.json"


def made(path, tensors=TENSORS, *, cuts=1, zipped=True, index=True, stem="pytorch_model"):
    """A folder whose weights torch.save wrote."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    names: list[str] = list(tensors)
    where: dict[str, str] = {}
    for n in range(cuts):
        part = names[n::cuts]
        file = f"{stem}.bin" if cuts == 1 else f"{stem}-{n + 1:05d}-of-{cuts:05d}.bin"
        torch.save({name: tensors[name] for name in part}, path / file, _use_new_zipfile_serialization=zipped)
        where |= dict.fromkeys(part, file)
    if cuts > 1 and index:
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    return path


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("cuts, index", [(1, False), (3, True), (3, False)])
def test_a_pickled_folder_converts_there_and_back(cuts, index, zipped, tmp_path):
    source = made(tmp_path / "s", cuts=cuts, index=index, zipped=zipped)
    ucpl.convert(source, tmp_path / "st", "safetensors()")
    assert_equal(TENSORS, load_file(tmp_path / "st" / "model.safetensors"))
    ucpl.convert(source, tmp_path / "z", "zero3(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "back", "safetensors()")
    assert ucpl.compare(source, tmp_path / "back") and ucpl.verify(source)


def test_a_spec_of_safetensors_reads_the_pickle_of_the_same_weights(tmp_path):
    source = made(tmp_path / "s", cuts=2)
    ucpl.convert(source, tmp_path / "m", "llama.ucpl:megatron(tp=2, pp=1)", layout="llama.ucpl:hf()")
    ucpl.convert(tmp_path / "m", tmp_path / "back", "llama.ucpl:hf()", layout="llama.ucpl:megatron(tp=2, pp=1)")
    assert_equal(TENSORS, load_file(tmp_path / "back" / "model.safetensors"))


def test_two_names_of_one_storage_are_a_tied_tensor(tmp_path):
    tied = TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"]}
    assert api.open_checkpoint(made(tmp_path / "s", tied)).state.aliases == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    sharded = made(tmp_path / "i", tied)
    weight_map = dict.fromkeys(tied, "pytorch_model.bin")
    (sharded / "pytorch_model.bin").rename(sharded / "pytorch_model-00001-of-00001.bin")
    (sharded / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(weight_map, "pytorch_model-00001-of-00001.bin")})
    )
    assert set(api.open_checkpoint(sharded).state.aliases) == {"lm_head.weight"}


def test_a_pickle_without_tensors_by_name_is_refused(tmp_path):
    source = made(tmp_path / "s", {})
    torch.save({"state_dict": TENSORS}, source / "pytorch_model.bin")
    with pytest.raises(UcplError, match="E390") as caught:
        api.open_checkpoint(source)
    assert "state_dict" in str(caught.value)


def test_values_that_are_no_tensors_are_named(tmp_path):
    source = made(tmp_path / "s", TENSORS | {"version": 3})
    assert [one.name for one in api.open_checkpoint(source).not_read] == ["pytorch_model.bin: version"]


def test_an_adapter_of_a_pickle_is_read(tmp_path):
    source = made(tmp_path / "s", {"base_model.model.q.lora_A.weight": torch.ones(2, 3)}, stem="adapter_model")
    ((place, _),) = api.open_checkpoint(source).extents.items()
    assert place[1] == ("base_model.model.q.lora_A.weight",)


# ---- dtype = ... -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said, now", [("bf16", torch.bfloat16), ("float16", torch.float16)])
def test_an_export_in_another_dtype_rounds_each_weight_once_and_says_so(said, now, tmp_path):
    source = made(tmp_path / "s")
    (source / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    prepared = planned(Asked(None, f'safetensors(dtype="{said}")', source), Given())
    assert "rounded to nearest even" in str(prepared.plan.derived)
    ucpl.convert(source, tmp_path / "t", f'safetensors(dtype="{said}")')
    assert_equal({n: t.to(now) for n, t in TENSORS.items()}, load_file(tmp_path / "t" / "model.safetensors"))
    assert json.loads((tmp_path / "t" / "config.json").read_text())["torch_dtype"] == str(now).removeprefix("torch.")


def test_an_export_in_f32_takes_the_masters_of_a_bf16_run(tmp_path):
    params = {
        "w": {"weight": torch.ones(4, dtype=torch.bfloat16), "fp32": torch.full((4,), 1.001)},
        "frozen": {"weight": torch.full((3,), 2.5, dtype=torch.bfloat16)},
    }
    torch.save({"params": params, "groups": [{"lr": 0.1, "params": ["w"]}]}, tmp_path / "plain.pt")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "t", 'safetensors(dtype="f32")')
    got = load_file(tmp_path / "t" / "model.safetensors")
    assert_equal({"w": torch.full((4,), 1.001), "frozen": torch.full((3,), 2.5)}, got)


def test_a_dtype_of_no_weights_is_refused(tmp_path):
    with pytest.raises(UcplError, match="E220"):
        ucpl.convert(made(tmp_path / "s"), tmp_path / "t", 'safetensors(dtype="int8")')
