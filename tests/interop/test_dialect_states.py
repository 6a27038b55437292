"""transformers' Llama under DeepSpeed continues as Megatron-Core's GPTModel.

It has its optimizer, and the other way works, too. Both train over the same sequences at one steady rate: the losses
after the change are those of the unchanged run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.interop.parallel import launch, result

pytestmark = pytest.mark.interop

STEPS, RATE = 3, 1e-2
ENGINE = Path(__file__).with_name("llama_job.py")
MEGATRON = Path(__file__).with_name("megatron_job.py")
TOLERANCE = 1e-5  # of losses of about 4: other kernels
RUN: dict[str, Any] = {"qkv_bias": False}  # sizes are megatron_models.PLAIN's
CONFIG: dict[str, Any] = {
    "vocab_size": 46, "hidden_size": 20, "intermediate_size": 22, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
HF, DIST = "llama.ucpl:hf()", "llama.ucpl:torch_dist(divisible=1)"
LEGACY = "llama.ucpl:megatron_local(tp=1, divisible=1)"
# name: (source, target, names there, loader)
THERE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "torch_dist": ("megatron_core()", DIST, {"tp": 2}),
    "torch_dist_pp": ("megatron_core(tp=2, pp=2)", DIST, {"pp": 2}),
    "buckets": ('megatron_core(dp=2, optimizer="dp_reshardable")', LEGACY, {}),
    "legacy": ("megatron_legacy(tp=2)", LEGACY, {"tp": 2}),
}
BACK = {"zero1": ("zero1(dp=2)", 1), "zero3": ("zero3(dp=2)", 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dialects")
    engine = {"config": CONFIG, "stage": 2, "steps": STEPS, "rate": RATE}
    job = {"do": "train", "world": 2, **engine, "folder": str(out / "zero"), "result": str(out / "zero.json")}
    launch("engine", [job], ENGINE)
    saves = {str(out / "dist"): {"format": "torch_dist"}, str(out / "old"): {"format": "legacy"}}
    job = {"do": "train", "world": 2, "run": {**RUN, "tp": 2}, "steps": STEPS, "rate": RATE, "saves": saves}
    job |= {"truth": str(out / "megatron.truth"), "result": str(out / "megatron.json")}
    launch("megatron", [job], MEGATRON)
    config = json.loads((out / "zero" / "config.json").read_text())
    listed = []
    for name, (call, names, run) in THERE.items():
        ucpl.convert(out / "zero", out / name, f"{call} of {names}", layout=f"of {HF}", config=config)
        for file in (*(out / name).glob("iter_*/mp_rank_*/model_optim_rng.pt"), *(out / name).glob("iter_*/common.pt")):
            state = torch.load(file, weights_only=False)
            if "args" in state:  # no ZeRO folder knows it, as `convert` says
                state["args"].num_attention_heads = CONFIG["num_attention_heads"]
                torch.save(state, file)
        job = {"do": "go_on", "world": 2, "run": {**RUN, **run}, "steps": STEPS, "folder": str(out / name)}
        listed.append({**job, "result": str(out / f"{name}.json")})
    launch("there", listed, MEGATRON)
    listed = []
    for source, names in (("dist", DIST), ("old", LEGACY)):
        for name, (call, stage) in BACK.items():
            place = out / f"{source}_{name}"
            ucpl.convert(out / source, place, f"{call} of {HF}", layout=f"of {names}", config=config)
            job = {"do": "load", "world": 2, "config": CONFIG, "stage": stage, "steps": STEPS, "folder": str(place)}
            listed.append({**job, "result": f"{place}.json"})
    launch("back", listed, ENGINE)
    return out


@pytest.mark.parametrize("name", ["zero", "megatron"])
def test_sources_learn(folder: Path, name: str) -> None:
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == STEPS + 3


@pytest.mark.parametrize("name", THERE)
def test_megatron_continues_as_the_engine_would(folder: Path, name: str) -> None:
    found = result(folder, name)
    assert found["differences"] == []
    assert found["after"] == pytest.approx(result(folder, "zero")["after"], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("source", ["dist", "old"])
@pytest.mark.parametrize("name", BACK)
def test_the_engine_continues_as_megatron_would(folder: Path, name: str, source: str) -> None:
    found = result(folder, f"{source}_{name}")
    assert found["rates"] == [RATE, RATE]
    assert found["after"] == pytest.approx(result(folder, "megatron")["after"], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("source", ["dist", "old"])
def test_transformers_loads_an_export_with_the_loss_of_the_next_step_of_megatron(
    source: str, folder: Path, tmp_path: Path
) -> None:
    import transformers

    from tests.cli.command import good

    good("export", folder / source, tmp_path / "made", "--config", folder / "zero" / "config.json")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    drawn = torch.Generator().manual_seed(1000 + STEPS)
    tokens = torch.randint(CONFIG["vocab_size"], (12, 9), generator=drawn)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(result(folder, "megatron")["after"][0], rel=0, abs=TOLERANCE)
