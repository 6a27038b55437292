"""Second names that a class ties.

A Hugging Face folder stores one of them, or both, and DeepSpeed asks for all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl as api
from tests.cli.command import good, ucpl
from ucpl.errors import Label, fail
from ucpl.formats.deepspeed.advice import advice
from ucpl.formats.opening import open_checkpoint
from ucpl.inference.hf.modules import Module, Network

EMBED, HEAD = "model.embed.weight", "head.weight"
TENSORS = {EMBED: torch.arange(12.0).reshape(4, 3), "model.norm.weight": torch.ones(3)}
CALLS = ["zero1(dp=2)", "zero2(dp=3, bf16=1)", "zero0(dp=1)"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shapes = {name: tuple(t.shape) for name, t in TENSORS.items()}
    network = Network(Module("", "tiny.Tiny", "", {}, (), True), shapes, {HEAD: EMBED})
    monkeypatch.setattr("ucpl.inference.hf.networks.network_of", lambda config: network)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return tmp_path


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "source" / "model.safetensors", {"format": "pt"})
    return folder / "source"


def module_of(target: Path) -> dict[str, Any]:
    step = target / (target / "latest").read_text()
    return dict(torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)["module"])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("names", [(EMBED,), (HEAD,), (EMBED, HEAD)])
def test_the_module_has_both_names_of_one_tensor(folder: Path, call: str, names: tuple[str, ...]) -> None:
    tensors = {name: TENSORS[EMBED].clone() for name in names} | {"model.norm.weight": TENSORS["model.norm.weight"]}
    source = saved(folder, tensors)
    good("convert", source, folder / "t", "--to", call)
    module = module_of(folder / "t")
    assert set(module) == {EMBED, HEAD, "model.norm.weight"}
    assert torch.equal(module[HEAD].float(), TENSORS[EMBED]) and torch.equal(module[EMBED], module[HEAD])
    assert module[HEAD].data_ptr() == module[EMBED].data_ptr()
    assert len(open_checkpoint(folder / "t").state.tensors) == 2
    assert "load_module_strict" not in " ".join(advice(open_checkpoint(source), api.plan(str(source), call).target))


@pytest.mark.parametrize("names", [(EMBED,), (HEAD,), (EMBED, HEAD)])
def test_a_job_of_torch_finds_both_names(folder: Path, names: tuple[str, ...]) -> None:
    tensors = {name: TENSORS[EMBED].clone() for name in names} | {"model.norm.weight": TENSORS["model.norm.weight"]}
    source = saved(folder, tensors)
    good("convert", source, folder / "t", "--to", "dcp(fsdp=2)")
    state = {"model": {name: torch.zeros_like(TENSORS.get(name, TENSORS[EMBED])) for name in (*TENSORS, HEAD)}}
    load(state, checkpoint_id=folder / "t")
    assert torch.equal(state["model"][HEAD], TENSORS[EMBED]) and torch.equal(state["model"][EMBED], TENSORS[EMBED])
    good("convert", source, folder / "t.pt", "--to", 'torch_file(model="")')
    loaded = torch.load(folder / "t.pt")
    assert torch.equal(loaded[HEAD], TENSORS[EMBED]) and torch.equal(loaded[EMBED], TENSORS[EMBED])


def test_a_tie_is_reported_with_what_says_it(folder: Path) -> None:
    source = saved(folder, TENSORS)
    out = good("convert", source, folder / "t", "--to", "zero1(dp=2)", "--dry-run").out
    assert f"  alias = {HEAD} of {EMBED}: tied in Tiny\n" in out


def test_two_tensors_that_are_tied_and_differ_are_refused(folder: Path) -> None:
    source = saved(folder, {**TENSORS, HEAD: TENSORS[EMBED] + 1})
    done = ucpl("convert", source, folder / "t", "--to", "zero1(dp=2)")
    assert done.status == 3 and HEAD in done.err and not (folder / "t").exists()


def test_what_the_config_unties_stays_two_tensors(folder: Path) -> None:
    (folder / "source" / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    good("convert", saved(folder, {**TENSORS, HEAD: TENSORS[EMBED] + 1}), folder / "t", "--to", "zero1(dp=2)")
    assert len(open_checkpoint(folder / "t").state.tensors) == 3


def test_a_class_that_cannot_be_asked_ties_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: object) -> Network:
        fail("E396", "transformers is not installed", Label("config.json"))

    monkeypatch.setattr("ucpl.inference.hf.networks.network_of", missing)
    out = good("convert", saved(folder, TENSORS), folder / "t", "--to", "zero1(dp=2)").out
    assert "load_module_strict=False" in out and set(module_of(folder / "t")) == set(TENSORS)
    out = good("convert", folder / "source", folder / "d", "--to", "dcp(fsdp=2)").out
    assert "DefaultLoadPlanner(allow_partial_load=True)" in out


def test_a_common_class_needs_no_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: object) -> Network:
        fail("E396", "transformers is not installed", Label("config.json"))

    monkeypatch.setattr("ucpl.inference.hf.networks.network_of", missing)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 4,
        "hidden_size": 3, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    }  # fmt: skip
    words = {"model.embed_tokens.weight": TENSORS[EMBED], "model.norm.weight": TENSORS["model.norm.weight"]}
    source = saved(folder, words)
    (source / "config.json").write_text(json.dumps(config))
    out = good("convert", source, folder / "t", "--to", "dcp(fsdp=2)", "--dry-run").out
    assert "alias = lm_head.weight of model.embed_tokens.weight: tied in Qwen2ForCausalLM" in out


def test_weights_alone_are_written_as_they_were(folder: Path) -> None:
    """No engine, no names of a module: the class is not asked."""
    source = saved(folder, {**TENSORS, HEAD: TENSORS[EMBED] + 1})
    good("convert", source, folder / "t", "--to", "safetensors()")
    assert len(open_checkpoint(folder / "t").state.tensors) == 3


NAMED_TWICE = """ucpl 1
model m {
  dim v = 6, h = 4
  wte : v h
  alias head = wte
}
layout one() of m {
  framework torch()
  file weights = torch "one.pt"
  wte = ... as "wte"
}
layout cut(tp) of m {
  framework torch()
  mesh tp
  file weights = torch "rank_{tp}.pt"
  wte        = v@tp h as "wte"
  * of alias = CUT as "{alias}"
}
"""


@pytest.mark.parametrize(("of_alias", "is_shared"), [("v@tp h", True), ("...", False)])
@pytest.mark.parametrize("tp", [2, 3])
def test_the_second_name_of_a_layout_that_states_no_dtype(
    tmp_path: Path, of_alias: str, is_shared: bool, tp: int
) -> None:
    """The owner's group decides, as the source records it.

    One storage where both are cut alike, or the numbers once more.
    """
    (tmp_path / "m.ucpl").write_text(NAMED_TWICE.replace("CUT", of_alias))
    held = torch.arange(24.0, dtype=torch.bfloat16).reshape(6, 4)
    torch.save({"wte": held}, tmp_path / "one.pt")
    spec = f"{tmp_path}/m.ucpl"
    api.convert(tmp_path / "one.pt", tmp_path / "there", to=f"{spec}:cut(tp={tp})", layout=f"{spec}:one()")
    for rank, mine in enumerate(held.chunk(tp)):
        made = torch.load(tmp_path / "there" / f"rank_{rank}.pt")
        assert torch.equal(made["wte"], mine) and torch.equal(made["head"], mine if is_shared else held)
        assert made["wte"].dtype == made["head"].dtype == torch.bfloat16
        assert (made["wte"].data_ptr() == made["head"].data_ptr()) == is_shared
