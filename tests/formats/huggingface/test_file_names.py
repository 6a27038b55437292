"""File names of a spec: adapters, diffusers' folders, several in one folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from ucpl import api
from ucpl.errors import UcplError

SPEC = """ucpl 1

model lora {
  dim l = 3, r = 2, h = 8
  dtype f32
  a    : l r h
  b    : l h r
  base : l h
}

layout own(shard = "5GB") of lora {
  framework huggingface(shard = shard)
  file weights = safetensors "%s"
  file other   = safetensors "%s"
  a[l]    = r h  as "layers.{l}.lora_A.weight"
  b[l]    = h r  as "layers.{l}.lora_B.weight"
  base[l] = h    in other as "layers.{l}.weight"
}

layout stacked() of lora {
  framework torch()
  file weights = torch "all.pt"
  a    = l r h  as "a"
  b    = l h r  as "b"
  base = l h    as "base"
}
"""
TENSORS = {
    "lora_A": torch.arange(3 * 16.0).view(3, 2, 8),
    "lora_B": 100 + torch.arange(3 * 16.0).view(3, 8, 2),
    "weight": 200 + torch.arange(3 * 8.0).view(3, 8),
}


def spec(folder: Path, weights: str, other: str) -> Path:
    (folder / "lora.ucpl").write_text(SPEC % (weights, other))
    return folder / "lora.ucpl"


def stored(folder: Path) -> Path:
    """The same numbers as one torch file."""
    (folder / "torch").mkdir()
    values = dict(zip(("a", "b", "base"), TENSORS.values(), strict=True))
    torch.save(values, folder / "torch" / "all.pt")
    return folder / "torch"


def tensors(kind: tuple[str, ...]) -> dict[str, torch.Tensor]:
    names = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "weight": "weight"}
    return {f"layers.{i}.{names[k]}": TENSORS[k][i].clone() for k in kind for i in range(3)}


@pytest.mark.parametrize(
    ("weights", "other"),
    [
        ("adapter_model.safetensors", "adapter_model.safetensors"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors"),
        ("adapter_model.safetensors", "model.safetensors"),
        ("unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
    ],
)
@pytest.mark.parametrize("shard", ["5GB", "70B"])
def test_the_named_files_are_written_and_read(tmp_path: Path, weights: str, other: str, shard: str) -> None:
    """In one file or in shards, each with its own index."""
    text = spec(tmp_path, weights, other)
    made = tmp_path / "made"
    ucpl.convert(stored(tmp_path), made, to=f'{text}:own(shard = "{shard}")', layout=f"{text}:stacked()")
    for file, kinds in {weights: ("lora_A", "lora_B"), other: ("weight",)}.items():
        index = made / file.replace(".safetensors", ".safetensors.index.json")
        expected = tensors(("lora_A", "lora_B", "weight") if weights == other else kinds)
        is_whole = shard == "5GB" or file.startswith("adapter_")  # PEFT reads no index
        assert ((made / file).is_file(), index.is_file()) == (is_whole, not is_whole)
        listed = (
            json.loads(index.read_text())["weight_map"] if index.is_file() else dict.fromkeys(expected, Path(file).name)
        )
        assert set(listed) == set(expected)
        for name, shard_name in listed.items():
            assert torch.equal(load_file((made / file).parent / shard_name)[name], expected[name])
    ucpl.convert(made, tmp_path / "again", to=f"{text}:stacked()", layout=f"{text}:own()")
    again = torch.load(tmp_path / "again" / "all.pt", weights_only=True)
    assert all(torch.equal(again[k], v) for k, v in zip(("a", "b", "base"), TENSORS.values(), strict=True))
    assert "/" in weights or ucpl.verify(made)  # without a spec, a folder of folders is no checkpoint


def test_a_plan_reads_the_files_that_it_names(tmp_path: Path) -> None:
    text = spec(tmp_path, "adapter_model.safetensors", "model.safetensors")
    (tmp_path / "source").mkdir()
    save_file(tensors(("lora_A", "lora_B")), tmp_path / "source" / "adapter_model.safetensors")
    save_file(tensors(("weight",)), tmp_path / "source" / "model.safetensors")
    plan = ucpl.plan(f"{text}:own()", f"{text}:stacked()")
    ucpl.apply(plan, tmp_path / "source", tmp_path / "made")
    assert torch.equal(torch.load(tmp_path / "made" / "all.pt", weights_only=True)["base"], TENSORS["weight"])


def test_a_name_that_the_folder_has_not_is_refused_with_the_one_that_it_has(tmp_path: Path) -> None:
    text = spec(tmp_path, "model.safetensors", "model.safetensors")
    (tmp_path / "source").mkdir()
    save_file(tensors(("lora_A", "lora_B", "weight")), tmp_path / "source" / "adapter_model.safetensors")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "source", tmp_path / "made", to=f"{text}:stacked()", layout=f"{text}:own()")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("E380", "model.safetensors is missing: the spec has tensors in it")
    assert 'write file weights = safetensors "adapter_model.safetensors"' in found.remedy
    file = tmp_path / "source" / "adapter_model.safetensors"  # a file that the user names is the one that is meant
    ucpl.convert(file, tmp_path / "made", to=f"{text}:stacked()", layout=f"{text}:own()")
    assert api.open_checkpoint(tmp_path / "source").extents.keys() == {
        ("model.safetensors", (name,)) for name in tensors(("lora_A", "lora_B", "weight"))
    }


def test_shards_of_the_name_are_read_without_an_index_and_none_is_missing(tmp_path: Path) -> None:
    text = spec(tmp_path, "adapter_model.safetensors", "adapter_model.safetensors")
    (tmp_path / "source").mkdir()
    parts = [tensors((kind,)) for kind in TENSORS]
    for i, part in enumerate(parts):
        save_file(part, tmp_path / "source" / f"adapter_model-{i + 1:05d}-of-00003.safetensors")
    for name in ("model.safetensors", "other-00001-of-00002.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / "source" / name)
    ucpl.convert(tmp_path / "source", tmp_path / "made", to=f"{text}:stacked()", layout=f"{text}:own()")
    (tmp_path / "source" / "adapter_model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UcplError, match=r"E380: adapter_model-00002-of-00003\.safetensors is missing"):
        ucpl.convert(tmp_path / "source", tmp_path / "more", to=f"{text}:stacked()", layout=f"{text}:own()")


@pytest.mark.parametrize(
    "name", ["../outside/model.safetensors", "/{outside}/model.safetensors", "unet/../../m.safetensors"]
)
def test_a_file_outside_of_the_folder_is_not_read(tmp_path: Path, name: str) -> None:
    """Neither a spec nor a plan can name it.

    Anybody may have written them.
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    save_file(tensors(("lora_A", "lora_B", "weight")), outside / "model.safetensors")
    source = tmp_path / "source"
    (source / "unet").mkdir(parents=True)
    save_file(tensors(("lora_A", "lora_B", "weight")), source / "model.safetensors")
    save_file(tensors(("lora_A", "lora_B", "weight")), tmp_path / "m.safetensors")
    name = name.replace("/{outside}", str(outside))
    text = spec(tmp_path, name, "model.safetensors")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(source, tmp_path / "made", to=f"{text}:stacked()", layout=f"{text}:own()")
    (found,) = caught.value.diagnostics
    assert (found.code, found.labels[0].where) == ("E393", name)
    with pytest.raises(UcplError, match="E393"):
        ucpl.apply(ucpl.plan(f"{text}:own()", f"{text}:stacked()"), source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_folder_s_own_layout_reads_that_folder_alone(tmp_path: Path) -> None:
    text = spec(tmp_path, "a.safetensors", "a.safetensors")
    ucpl.convert(stored(tmp_path), tmp_path / "made", to=f"{text}:stacked()", layout=f"{text}:stacked()")
    own = tmp_path / "made" / "ucpl" / "layout.ucpl"
    sentence = own.read_text()
    assert api.open_checkpoint(tmp_path / "made").extents and sentence.count('"all.pt"') == 1
    (tmp_path / "made" / "all.pt").rename(tmp_path / "all.pt")
    own.write_text(sentence.replace('"all.pt"', '"../all.pt"'))
    with pytest.raises(UcplError, match="E393"):
        api.open_checkpoint(tmp_path / "made")
