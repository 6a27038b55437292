"""Stock `dcp.load` and `set_state_dict` load converted DCP folders and train.

Jobs of gloo have 2, 3 and 4 ranks, and losses are those of the saved run. One process is the parent of all ranks that
train the sources, another of all that load the targets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import field, frozen

import ucpl
from tests.interop import dcp_models, models
from tests.interop.parallel import launch, result, spoil_chunk
from ucpl.errors import UcplError

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("dcp_job.py")
STEPS = 3
TOLERANCE = 1e-5  # fp32

NET = {"model": "net", "optimizer": "adamw"}  # tied, a gain of one element, a convolution, buffers
CUT = {"model": "cut", "optimizer": "adamw"}
ENGINE = {**NET, "dtype": "fp32", "clip": 0.0}

# name: (ranks, its maker, the run)
SOURCES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp": (2, "fsdp_train", NET),
    "fsdp_frozen_sgd": (2, "fsdp_train", {**CUT, "freeze": True, "optimizer": "sgd"}),
    "fsdp_flat": (2, "fsdp_train", {**CUT, "flat": True}),
    "fsdp_tp": (4, "fsdp_train", {**CUT, "tp": 2}),
    "tp": (4, "fsdp_train", {**CUT, "tp": 4}),
    "hsdp": (4, "fsdp_train", {**CUT, "copies": 2}),
    "columns": (2, "fsdp_train", {**CUT, "across": True}),
    "fsdp1": (2, "fsdp_train", {**CUT, "old": True, "groups": 1}),
    "zero1": (2, "engine_train", {**ENGINE, "stage": 1}),
    "zero3": (2, "engine_train", {**ENGINE, "stage": 3}),
    "llama": (2, "fsdp_train", {"model": "llama", "optimizer": "adamw"}),
}


@frozen
class Target:
    """A target of a source, and the run that loads it."""

    source: str
    call: str
    world: int
    run: dict[str, Any] = field(factory=dict)  # differences from the source's
    do: str = "fsdp_load"
    spoiled: bool = False  # one moment is changed after the conversion: the check must fail
    is_of_files: bool = False  # of a training script's files of the source: MODEL+OPTIMIZER

    def __str__(self) -> str:
        if not self.call:
            return f"{self.source}-straight-w{self.world}"
        call = "".join(c if c.isalnum() else "_" for c in self.call).strip("_")
        return f"{self.source}-{call}-w{self.world}" + "-spoiled" * self.spoiled + "-files" * self.is_of_files


STRAIGHT = {"straight": True, "sched": False}  # by ucpl.load_into from the source's own folder, without a conversion
BARE = {"sched": False}  # the schedule of another framework's run is the script's own affair
TARGETS = (
    Target("fsdp", "dcp(fsdp=2)", 2),
    Target("fsdp", "dcp(fsdp=3)", 3),
    Target("fsdp", "dcp(fsdp=4)", 4),
    Target("fsdp", "dcp(fsdp=3)", 3, spoiled=True),
    Target("fsdp", "dcp(fsdp=3)", 3, BARE, is_of_files=True),
    Target("fsdp_frozen_sgd", "dcp(fsdp=3)", 3),
    Target("fsdp_flat", "dcp(fsdp=3)", 3),
    Target("fsdp_tp", "dcp(fsdp=3, tp=1)", 3, {"tp": 1}),
    Target("fsdp_tp", "dcp(fsdp=1, tp=4)", 4, {"tp": 4}),
    Target("tp", "dcp(fsdp=2, tp=2)", 4, {"tp": 2}),
    Target("hsdp", "dcp(fsdp=4)", 4, {"copies": 0}),
    Target("columns", "dcp(fsdp=3, tp=1)", 3, {"across": False}),
    Target("fsdp1", "dcp(fsdp=3)", 3, {"old": False}),
    Target("zero1", "dcp(fsdp=3)", 3, BARE),
    Target("zero3", "dcp(fsdp=4)", 4, BARE),
    Target("fsdp", "safetensors_shards(fsdp=4)", 3, do="shards_load"),
    Target("fsdp_tp", "safetensors_shards(fsdp=3, tp=1)", 4, do="shards_load"),
    Target("zero3", "safetensors_shards(fsdp=2)", 3, BARE, "shards_load"),
    Target("fsdp", "", 3, STRAIGHT),
    Target("fsdp_frozen_sgd", "", 3, STRAIGHT),
    Target("fsdp_tp", "", 3, {**STRAIGHT, "tp": 1}),
    Target("tp", "", 4, {**STRAIGHT, "tp": 2}),
    Target("fsdp1", "", 3, {**STRAIGHT, "old": False}),
    Target("zero1", "", 4, STRAIGHT),
    Target("zero3", "", 3, STRAIGHT),
    Target("fsdp", "zero1(dp=2)", 2, {**ENGINE, "stage": 1}, "engine_load"),
    Target("fsdp", "zero3(dp=3)", 3, {**ENGINE, "stage": 3}, "engine_load"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dcp")
    jobs = [{"world": world, **described(do, run, name, name, out)} for name, (world, do, run) in SOURCES.items()]
    launch("train", jobs, JOB)
    jobs = []
    for target in TARGETS:
        if error := made(target, out):
            (out / f"{target}.json").write_text(json.dumps({"error": error}))
            continue
        run = {**SOURCES[target.source][2], **target.run}
        jobs.append({"world": target.world, **described(target.do, run, str(target), target.source, out)})
    launch("load", jobs, JOB)
    return out


def described(do: str, run: dict[str, Any], name: str, source: str, out: Path) -> dict[str, Any]:
    job = {"do": do, "run": run, "steps": STEPS, "folder": str(out / (source if run.get("straight") else name))}
    job["weights"] = bool(SOURCES[source][2].get("old"))
    return {**job, "truth": str(out / f"{source}.truth"), "result": str(out / f"{name}.json")}


def made(target: Target, out: Path) -> str:
    """Convert, and return an error text or ""."""
    if not target.call:
        return ""
    source = str(out / target.source)
    try:
        if target.is_of_files:
            files = out / f"{target}.files"
            ucpl.convert(source, files, 'torch_file(file="model.pt", optimizer_file="optimizer.pt", model="")')
            source = f"{files / 'model.pt'}+{files / 'optimizer.pt'}"
        ucpl.convert(source, out / str(target), target.call)
    except UcplError as error:
        return f"{target.call}: {error}"
    if target.spoiled:
        spoil_chunk(out / str(target), "optim.state.up.weight.exp_avg")
    return ""


@pytest.mark.parametrize("name", SOURCES)
def test_sources_learn(folder: Path, name: str) -> None:
    """Losses that are used as a reference must change."""
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) >= STEPS + 2


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.spoiled], ids=str)
def test_a_job_of_other_ranks_loads_what_was_converted_and_trains_on(folder: Path, target: Target) -> None:
    """State bit-equal; losses of an uninterrupted run, bit-equal at equal degrees."""
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == []
    is_same = (target.world, target.run) == (SOURCES[target.source][0], {})
    tolerance = 0.0 if is_same else TOLERANCE
    wanted = source["after"][: len(found["after"])]
    assert found["after"][: len(wanted)] == pytest.approx(wanted, rel=0, abs=tolerance)


def test_a_moment_that_was_changed_is_found(folder: Path) -> None:
    target = next(t for t in TARGETS if t.spoiled)
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == ["/params/up.weight/exp_avg differs"]
    assert found["after"] != pytest.approx(source["after"], rel=0, abs=TOLERANCE)


def test_transformers_loads_what_fsdp_trained(folder: Path) -> None:
    """A run's folder as safetensors with the model's config.

    from_pretrained has its weights, and computes its loss.
    """
    import transformers

    made, trained = folder / "as_hf", result(folder, "llama")
    ucpl.convert(folder / "llama", made, "safetensors()")
    transformers.LlamaConfig(**dcp_models.LLAMA).save_pretrained(made)
    model, told = transformers.LlamaForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    truth = torch.load(folder / "llama.truth", weights_only=False)["params"]
    assert {n for n, p in model.named_parameters() if torch.equal(p, truth[n]["weight"])} == set(truth)
    assert loss_of(model) == pytest.approx(trained["after"][0], rel=0, abs=TOLERANCE)


def test_dcp_loads_what_transformers_saved(tmp_path: Path) -> None:
    """A folder of transformers as three ranks' chunks, for stock dcp.load.

    A module with other tensors gets its weights.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    torch.manual_seed(5)
    source = dcp_models.llama()
    source.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    ucpl.convert(tmp_path / "hf", tmp_path / "dcp", "dcp(fsdp=3)")
    module = dcp_models.llama()
    state = {"model": module.state_dict()}
    assert not all(torch.equal(t, source.state_dict()[n]) for n, t in state["model"].items())
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    module.load_state_dict(state["model"])
    assert loss_of(module) == loss_of(source)


def loss_of(model: Any) -> float:
    x, _ = models.batch(STEPS)
    with torch.no_grad():
        return float(model(input_ids=x, labels=x).loss)
