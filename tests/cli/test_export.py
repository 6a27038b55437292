"""`ucpl export`: the config that it finds, names of Megatron's, and refusals.

tests/interop/test_export.py has transformers load the results.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucpl as package
from tests.cli.command import good, ucpl
from tests.formats.huggingface.folders import llama_config, llama_shapes, random_of, save
from ucpl.errors import UcplError

CONFIG = llama_config(num_hidden_layers=2, architectures=["LlamaForCausalLM"])
DIST = "megatron_core(tp=2) of llama.ucpl:torch_dist(divisible=1)"
LEGACY = "megatron_legacy() of llama.ucpl:megatron_local(tp=1, divisible=1)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder: weights, config.json and a tokenizer."""
    made: Path = save(tmp_path / "hf", random_of(llama_shapes(CONFIG)), CONFIG)
    (made / "tokenizer.json").write_text("{}")
    return made


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("to", [DIST, LEGACY, "zero3(dp=3)", "dcp(fsdp=2)", "plain()"])
def test_a_checkpoint_of_each_framework_is_the_same_folder_again(to: str, folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "runs" / "one" / ("all.pt" if to == "plain()" else "step")
    package.convert(folder, there, to, layout="of llama.ucpl:hf()" if " of " in to else None)
    done = good("export", there, tmp_path / "made", "--config", folder, "--shard", "8KB")
    assert done.out.endswith(f'next          AutoModelForCausalLM.from_pretrained("{tmp_path / "made"}")\n')
    ours, theirs = weights(tmp_path / "made"), weights(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "made" / name).read_text()) == json.loads((folder / name).read_text())


@pytest.mark.parametrize("place", ["", "..", "../..", "huggingface", "../huggingface", "../hf"])
def test_a_config_near_the_source_is_found(place: str, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "runs" / "one" / "step"
    package.convert(folder, source, "zero2(dp=2)")
    near = (source / place).resolve()
    near.mkdir(exist_ok=True)
    (near / "config.json").write_text(json.dumps(CONFIG))
    assert "config.json" in good("export", source, tmp_path / "made").out
    assert json.loads((tmp_path / "made" / "config.json").read_text()) == CONFIG


def test_a_config_of_another_program_is_none(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "runs" / "one" / "ckpt.pt"
    source.parent.mkdir(parents=True)
    torch.save({"model": weights(folder)}, source)
    (source.parent / "config.json").write_text('{"learning_rate": 1}')
    done = ucpl("export", source, tmp_path / "made")
    assert done.status == 2 and "error[E221]" in done.err and "--config FOLDER" in done.err


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--dtype", "fp17"), "E173", "--dtype bf16"),
        (("--model", "lama"), "E178", "--model llama"),
        (("--shard", "lots"), "E387", "5GB"),
        (("--config", "nowhere"), "E170", "nowhere"),
        (("--model", "gpt2"), "E399", "--model FILE.ucpl"),
    ],
)
def test_a_wrong_option_says_the_right_one(
    more: tuple[str, ...], code: str, said: str, folder: Path, tmp_path: Path
) -> None:
    package.convert(folder, tmp_path / "dist", DIST, layout="of llama.ucpl:hf()")
    config = () if "--config" in more else ("--config", folder)
    done = ucpl("export", tmp_path / "dist", tmp_path / "made", *config, *more)
    assert done.status in (2, 3, 4) and f"error[{code}]" in done.err and said in done.err
    assert not (tmp_path / "made").exists()


def test_a_dry_run_checks_the_class_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    state = weights(folder)
    torch.save({"model": state}, tmp_path / "whole.pt")
    torch.save({"model": {n: t for n, t in state.items() if "layers.1." not in n}}, tmp_path / "half.pt")
    common = ("--config", folder, "--dry-run", "--json")
    found = good("export", tmp_path / "whole.pt", tmp_path / "made", *common).json
    assert found["written"] is False and found["files"] >= 1
    done = ucpl("export", tmp_path / "half.pt", tmp_path / "made", *common)
    assert done.json["diagnostics"][0]["code"] in ("E222", "E388") and not (tmp_path / "made").exists()


def test_python_has_the_same_verb(folder: Path, tmp_path: Path) -> None:
    package.convert(folder, tmp_path / "run", "zero3(dp=2)")
    made = package.export(tmp_path / "run", tmp_path / "made", dtype="bfloat16", config=folder)
    assert made.report.bytes_written and {t.dtype for t in weights(tmp_path / "made").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "made" / "config.json").read_text()).get("dtype", "bfloat16") == "bfloat16"
    with pytest.raises(UcplError, match="E173"):
        package.export(tmp_path / "run", tmp_path / "more", dtype="int3", config=folder)
