"""Megatron-Core loads its saves after a conversion to another form, and trains.

GPTModels at tensor, pipeline, interleaved and expert parallel degrees, four ranks each. Each source is trained and
saved in several forms by one job.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import field, frozen

import ucpl
from tests.interop.jobs import differences
from tests.interop.parallel import launch, result, spoil_chunk
from tests.megatron_truth import stored
from ucpl.errors import UcplError

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("megatron_job.py")
WORLD = 4
STEPS = 3
RATES = ("lr", "weight_decay", "betas", "eps")  # of groups
TOLERANCE = {"fp32": 5e-4, "bf16": 3e-2}  # of losses of about 4.5, six steps of Adam apart

DENSE = {"dtype": "fp32"}
# sizes without a padded end of a bucket: 0.16.1 saves others wrong if stages share an embedding
TIED = {"tie": True, "hidden": 64, "heads": 2, "groups": 2, "kv": 2, "ffn": 6, "vocab": 24, "qkv_bias": False}
MIXTURE = {"experts": 4, "shared": 6}
ADAM = {"dtype": "bf16", "optimizer": "adam", "rms": False, "swiglu": False, "bias": True, "qkv_bias": False}

RUNS: dict[str, dict[str, Any]] = {
    "dense": {**DENSE, "tp": 2},
    "tied": {**TIED, "pp": 2, "vpp": 2},
    "mixture": {**MIXTURE, "ep": 2, "pp": 2},
    "adam": {**ADAM, "tp": 2},
    # uneven stages, and a layer that predicts tokens ahead
    "ahead": {**TIED, "tie": False, "layers": 3, "ahead": 1, "pp": 2, "first": 2},
    "mixed": {**MIXTURE, "layers": 3, "dense_first": True, "ep": 2},  # layers that differ
    # norms of queries and keys, and three heads of a group, an odd number of groups
    "normed": {"dtype": "bf16", "heads": 9, "groups": 3, "kv": 4, "qk_norm": True, "layers": 2, "pp": 2},
    # frozen: a tensor of its own, and one layer of a stack
    "frozen": {"layers": 2, "frozen": ["embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc2.weight"]},
}
DISTRIBUTED, LEGACY = {"format": "torch_dist"}, {"format": "legacy"}
BUCKETS = {**DISTRIBUTED, "kind": "dp_reshardable"}
UNSTACKED = {**DISTRIBUTED, "unstacked": True}

# name: (the run, how it is saved)
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", DISTRIBUTED),
    "dense_unstacked": ("dense", UNSTACKED),
    "dense_buckets": ("dense", BUCKETS),
    "dense_legacy": ("dense", LEGACY),
    "tied": ("tied", DISTRIBUTED),
    "tied_legacy": ("tied", LEGACY),
    "mixture": ("mixture", DISTRIBUTED),
    "mixture_unstacked": ("mixture", UNSTACKED),
    "mixture_legacy": ("mixture", LEGACY),
    "adam": ("adam", DISTRIBUTED),
    "adam_legacy": ("adam", LEGACY),
    "ahead_buckets": ("ahead", BUCKETS),
    "ahead_legacy": ("ahead", LEGACY),
    "mixed_unstacked": ("mixed", UNSTACKED),
    "mixed_legacy": ("mixed", LEGACY),
    "normed": ("normed", DISTRIBUTED),
    "normed_legacy": ("normed", LEGACY),
    "frozen_buckets": ("frozen", BUCKETS),
}
# Of buckets that are not read: Megatron loads the folder, and saves it in another form.
UNREAD = "frozen_buckets"
AGAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen_unstacked": ("frozen", UNSTACKED),
    "frozen_legacy": ("frozen", LEGACY),
}
READ = {name: of for name, of in SAVED.items() if name != UNREAD} | AGAIN


@frozen
class Target:
    """A target of a folder, and the run that loads it.

    Without a call, Megatron loads its own folder.
    """

    saved: str
    call: str
    run: dict[str, Any] = field(factory=dict)  # differences from the source's
    spoiled: bool = False  # one moment is changed: the check must fail

    def __str__(self) -> str:
        call = re.sub("[^a-z0-9]+", "_", self.call).strip("_") or "own"
        degrees = "_".join(f"{k}{v}" for k, v in self.run.items()) or "same"
        return "-".join((self.saved, call, degrees)) + "-spoiled" * self.spoiled

    @property
    def source(self) -> str:
        return READ[self.saved][0]


OWN = (
    Target("dense", "", {"tp": 1, "pp": 4}),
    Target("dense", "", {"tp": 1, "pp": 4}, spoiled=True),
    Target("dense_unstacked", "", {"tp": 1, "pp": 2}),
    Target("dense_buckets", ""),
    Target("dense_legacy", ""),
    Target("tied", "", {"tp": 2, "pp": 1, "vpp": 0}),
    Target("mixture", "", {"ep": 4, "pp": 1}),
    Target("adam", "", {"pp": 2}),
)
LEGACIES = (
    Target("dense_legacy", "megatron_legacy(tp=1, pp=4)", {"tp": 1, "pp": 4}),
    Target("tied_legacy", "megatron_legacy(tp=2, pp=1, vpp=1)", {"tp": 2, "pp": 1, "vpp": 0}),
    Target("mixture_legacy", "megatron_legacy(pp=1, ep=4)", {"ep": 4, "pp": 1}),
    Target("adam_legacy", "megatron_legacy(pp=2)", {"pp": 2, "optimizer": "distributed"}),
)
CORES = (
    Target("dense", "megatron_core(tp=1, pp=4)", {"tp": 1, "pp": 4}),
    Target("dense_unstacked", "megatron_core(pp=2)", {"tp": 1, "pp": 2}),
    Target("dense_buckets", "megatron_core(tp=2, pp=2)", {"pp": 2}),  # Megatron itself cannot: it is dp_reshardable
    Target("tied", "megatron_core(tp=2)", {"tp": 2, "pp": 1, "vpp": 0}),
    Target("mixture", "megatron_core()", {"ep": 4, "pp": 1}),
    Target("adam", "megatron_core()", {"pp": 2}),
)
ACROSS = (
    Target("dense", "megatron_legacy(pp=2)", {"tp": 1, "pp": 2}),
    Target("dense_legacy", "megatron_core()", {"tp": 1, "pp": 4}),
    Target("mixture_legacy", "megatron_core(tp=2)", {"ep": 4, "pp": 1}),
    Target("ahead_buckets", "megatron_legacy(stages=[1, 2])", {"first": 1}),
    Target("ahead_legacy", "megatron_core()", {"tp": 2, "pp": 1, "first": 0}),
    Target("mixed_legacy", "megatron_core()", {"ep": 4}),
    Target("mixed_unstacked", "megatron_legacy(ep=4)", {"ep": 4}),
    Target("normed", "megatron_legacy()", {"pp": 1}),
    Target("normed_legacy", "megatron_core()", {"pp": 1}),
    Target("adam", "megatron_legacy(pp=2)", {"tp": 1, "pp": 2, "optimizer": "distributed"}),
    Target("adam_legacy", "megatron_core()", {"tp": 1, "optimizer": "distributed"}),
    Target("adam_legacy", 'megatron_core(master="fp32_param")', {"tp": 1}),
    Target("frozen_unstacked", "megatron_legacy()"),
    Target("frozen_legacy", "megatron_core(stacked=0)"),
)
IN_BUCKETS = 'optimizer="dp_reshardable"'  # only a job of the same degrees loads it
BUCKETED = (
    Target("dense_buckets", f"megatron_core(tp=2, dp=2, {IN_BUCKETS})"),
    Target("dense_legacy", f"megatron_core(tp=2, pp=2, {IN_BUCKETS}, bucket_size=500)", {"pp": 2, "bucket": 500}),
    Target("tied_legacy", f"megatron_core(pp=2, vpp=2, {IN_BUCKETS})"),
    Target("tied", f"megatron_core(tp=2, pp=2, {IN_BUCKETS})", {"tp": 2, "pp": 2, "vpp": 0}),
    Target("mixture", f"megatron_core(pp=2, ep=2, {IN_BUCKETS})"),
    Target("ahead_legacy", f"megatron_core(stages=[2, 1], {IN_BUCKETS})"),
    Target("mixed_legacy", f"megatron_core(ep=2, {IN_BUCKETS})"),
    Target("normed", f"megatron_core(pp=2, {IN_BUCKETS})"),
)
TARGETS = (*OWN, *CORES, *LEGACIES, *ACROSS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("megatron")
    listed = []
    for name, run in RUNS.items():
        saves = {str(out / saved): form for saved, (source, form) in SAVED.items() if source == name}
        job = {"do": "train", "world": WORLD, "run": run, "steps": STEPS, "saves": saves}
        listed.append({**job, "truth": str(out / f"{name}.truth"), "result": str(out / f"{name}.json")})
    launch("train", listed, JOB)
    saves = {str(out / name): form for name, (_, form) in AGAIN.items()}
    job = {"do": "again", "world": WORLD, "run": RUNS[SAVED[UNREAD][0]], "folder": str(out / UNREAD), "saves": saves}
    launch("again", [{**job, "result": str(out / "again.json")}], JOB)
    for name, targets in (("load", TARGETS), ("buckets", BUCKETED)):
        listed = []
        for target in targets:
            result_file = out / f"{target}.json"
            if error := made(target, out):
                result_file.write_text(json.dumps({"error": error}))
                continue
            run = {**RUNS[target.source], **target.run}
            job = {"do": "load", "world": WORLD, "run": run, "folder": str(out / f"{target}.made")}
            listed.append({**job, "truth": str(out / f"{target.source}.truth"), "result": str(result_file)})
        launch(name, listed, JOB)
    return out


def made(target: Target, out: Path) -> str:
    """Convert, and return an error text or ""."""
    there = out / f"{target}.made"
    if not target.call:
        shutil.copytree(out / target.saved, there)
    else:
        try:
            ucpl.convert(out / target.saved, there, target.call)
        except UcplError as error:
            return f"{target.call}: {error}"
    if target.spoiled:
        (step,) = there.glob("iter_*")
        spoil_chunk(step, "optimizer.state.exp_avg.decoder.final_layernorm.weight")
    return ""


@pytest.mark.parametrize("name", RUNS)
def test_sources_learn(folder: Path, name: str) -> None:
    """Losses that are used as a reference must change."""
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == STEPS + 3


@pytest.mark.parametrize("target", [t for t in (*TARGETS, *BUCKETED) if not t.spoiled], ids=str)
def test_megatron_loads_it_and_trains_on(folder: Path, target: Target) -> None:
    """State bit-equal, no missing or extra keys; losses of an uninterrupted run."""
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == []
    run = RUNS[target.source]
    tolerance = TOLERANCE[run.get("dtype", "fp32")] if target.run else 0.0
    assert found["after"] == pytest.approx(source["after"], rel=0, abs=tolerance)


def test_a_moment_that_was_changed_is_found(folder: Path) -> None:
    (target,) = (t for t in TARGETS if t.spoiled)
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == ["/decoder.final_layernorm.weight/exp_avg differs"]
    assert found["after"] != pytest.approx(source["after"], rel=0, abs=TOLERANCE["fp32"])


def test_buckets_of_a_run_with_frozen_parameters_are_refused(folder: Path) -> None:
    """The remedy's two forms are in READ."""
    with pytest.raises(UcplError, match="E533") as refused:
        ucpl.convert(folder / UNREAD, folder / "unread", "plain()")
    assert "frozen" in refused.value.diagnostics[0].remedy
    assert result(folder, "again")["differences"] == []


@pytest.mark.parametrize("name", READ)
def test_a_plain_file_has_what_the_running_job_had(folder: Path, name: str) -> None:
    """Weights, masters, moments and steps, gathered from ranks: each element."""
    source, form = READ[name]
    wanted = torch.load(folder / f"{source}.truth", weights_only=False)
    if form["format"] == "torch_dist":
        wanted = stored(wanted, {"swiglu": True, "dense_first": False, **RUNS[source]}, form.get("unstacked", False))
    ucpl.convert(folder / name, folder / f"{name}.pt", "plain()")
    plain = torch.load(folder / f"{name}.pt", weights_only=False)
    held = plain["params"] | {buffer: {"weight": tensor} for buffer, tensor in plain["buffers"].items()}
    assert held.keys() == wanted.keys()
    for parameter, states in wanted.items():
        mine = {state: value for state, value in states.items() if state not in RATES}
        assert differences(numbers(held[parameter]), numbers(mine), parameter) == []


def numbers(states: dict[str, Any]) -> dict[str, Any]:
    """Steps are numbers, whatever kept them."""
    return {state: float(value) if state == "step" else value for state, value in states.items()}
