"""Folders with several files of weights: the loader's tensors are read."""

import json

import pytest
import torch
from safetensors.torch import save_file, save_model

import ucpl
from tests.formats.huggingface.folders import llama_config, llama_shapes, random_of, save
from tests.formats.huggingface.precedence import CASES, INDEX, TWICE, folder, twice
from ucpl import api
from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError

CONFIG = llama_config(num_hidden_layers=1, architectures=["LlamaForCausalLM"])
TENSORS = random_of(llama_shapes(CONFIG))
FIRST = next(iter(TENSORS))


def read(path, out):
    """The value that all elements of the first tensor have, once converted."""
    ucpl.convert(path, out, "plain()")
    (value,) = torch.load(out, weights_only=True)["params"][FIRST]["weight"].unique().tolist()
    return value


@pytest.mark.parametrize("case", CASES)
def test_the_file_that_is_read_is_the_one_that_transformers_takes(case, tmp_path):
    source = folder(tmp_path / "s", TENSORS, CONFIG, case)
    _, _, want, _ = CASES[case]
    assert read(source, tmp_path / "p.pt") == want
    opened = api.open_checkpoint(source)
    assert any("not read" in text for text in (*opened.notes, *map(str, opened.not_read)))
    assert {*opened.notes} <= {*ucpl.verify(source).notes}
    assert {*opened.notes} <= {*planned(Asked(None, "plain()", source), Given()).remarks}


@pytest.mark.parametrize("case", TWICE)
def test_of_a_name_in_several_shards_the_last_file_has_the_tensor(case, tmp_path):
    source = twice(tmp_path / "s", TENSORS, CONFIG, case)
    assert read(source, tmp_path / "p.pt") == TWICE[case][2]
    assert any(f"{FIRST} is in model-00001" in note for note in ucpl.verify(source).notes)


def test_a_name_in_config_json_that_is_no_file_of_the_folder_is_refused(tmp_path):
    for said, code in (
        ("gone.safetensors", "E380"),
        ("../x.safetensors", "E384"),
        ("pytorch_model.bin", "E384"),
        (3, "E384"),
    ):
        source = save(tmp_path / f"s{code}{len(str(said))}", TENSORS, {**CONFIG, "transformers_weights": said})
        with pytest.raises(UcplError, match=code):
            api.open_checkpoint(source)


def test_diffusers_takes_the_index_first_and_peft_its_own_file(tmp_path):
    stem = "diffusion_pytorch_model"
    (tmp_path / "d").mkdir()
    save_file({"w": torch.full((2,), 1.0)}, tmp_path / "d" / f"{stem}.safetensors")
    save_file({"w": torch.full((2,), 2.0)}, tmp_path / "d" / f"{stem}-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"w": f"{stem}-00001-of-00001.safetensors"}}
    (tmp_path / "d" / f"{stem}{INDEX.removeprefix('model')}").write_text(json.dumps(index))
    ((_, extent),) = api.open_checkpoint(tmp_path / "d").extents.items()
    assert extent.file == f"{stem}-00001-of-00001.safetensors"
    (tmp_path / "a").mkdir()
    save_file({"w": torch.full((2,), 1.0)}, tmp_path / "a" / "adapter_model.safetensors")
    save_file({"w": torch.full((2,), 2.0)}, tmp_path / "a" / "embeddings.safetensors")
    ((_, extent),) = api.open_checkpoint(tmp_path / "a").extents.items()
    assert extent.file == "adapter_model.safetensors"


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed.weight


def test_a_second_name_is_what_save_model_left_out_and_no_other_metadata(tmp_path):
    (tmp_path / "s").mkdir()
    save_model(Tied(), str(tmp_path / "s" / "model.safetensors"), {"trained_from": "embed.weight", "format": "pt"})
    opened = api.open_checkpoint(tmp_path / "s")
    assert opened.state.aliases == {"lm_head.weight": "embed.weight"}
    assert any("trained_from" in text for text in opened.notes)
    save_file({"w": torch.ones(2)}, tmp_path / "s" / "model.safetensors", {"trained_from": "w"})
    opened = api.open_checkpoint(tmp_path / "s")
    assert opened.state.aliases == {} and [t.name for t in opened.state.tensors] == ["w"]
    ucpl.convert(tmp_path / "s", tmp_path / "p.pt", "plain()")
    assert torch.load(tmp_path / "p.pt", weights_only=True)["aliases"] == {}
