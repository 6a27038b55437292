"""Trials of a release.

It writes checkpoints, ucpl converts them, and the release loads the targets and trains on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

import ucpl
from tests.interop import processes
from tests.releases.environments import HERE, OVER, ROOT, Limit, Missing, Release, variables

STEPS = 3
NEAR = {"fp32": 1e-5, "bf16": 1e-2}  # of losses after a restart
SECONDS = 900  # of all jobs of a script


@frozen
class Source:
    """A job that trains and saves."""

    do: str  # the end of the job's name, after `train`
    world: int
    run: dict[str, Any]
    call: str  # its own layout


@frozen
class Trial:
    """A column of the page.

    It has a source, its target, and the run that loads it.
    """

    title: str
    source: str
    call: str
    world: int = 2
    run: dict[str, Any] = field(factory=dict)  # differences from the source's
    via: str = ""  # a layout between, of another strategy
    ignores: str = "-"  # differences that begin so: values that the loader leaves as the model made them


@frozen
class Plan:
    """All trials of a framework."""

    script: str
    sources: dict[str, Source]
    trials: tuple[Trial, ...]


@frozen
class Cell:
    """The result of a trial.

    `passed`; `back`: passed, but for the second loss, which is the run's when the target is converted back;
    `refused` by ucpl; `failed`; or `framework`, where its own folder does not load.
    """

    state: str
    why: str = ""


# No run clips gradients: their norm over all ranks is one more number that depends on the degrees.
_NET = {"model": "net", "dtype": "fp32", "optimizer": "adamw", "clip": 0.0}
_PIPE = {"dtype": "fp32", "optimizer": "adamw", "stage": 1, "pp": 2, "method": "uniform", "clip": 0.0}
_MIXTURE = {"dtype": "fp32", "optimizer": "adamw", "stage": 1, "ep": 2, "clip": 0.0}
_GPT = {"dtype": "bf16", "layers": 2, "hidden": 8, "heads": 2, "groups": 2, "kv": 4, "ffn": 6, "vocab": 12}
_GATHERED = {"format": "torch_dist", "kind": "dp_zero_gather_scatter"}
_BUCKETS = {"format": "torch_dist", "kind": "buckets"}  # fully_sharded_bucket_space, dp_reshardable from 0.15 on
_LOOP = {"dtype": "fp32"}
_CKPT = 'torch_file(file="last.ckpt", model="state_dict", optimizer="optimizer_states/0", scheduler="lr_schedulers")'
_FOLDER = {"library": "transformers", "dtype": "fp32"}

PLANS = {
    "deepspeed": Plan(
        "deepspeed_ranks.py",
        {
            "z1": Source("", 2, {**_NET, "stage": 1}, "zero1(dp=2)"),
            "z2": Source("", 2, {**_NET, "stage": 2, "dtype": "bf16"}, "zero2(dp=2)"),
            "z3": Source("", 2, {**_NET, "stage": 3}, "zero3(dp=2)"),
            "pp": Source("_parallel", 2, _PIPE, "zero1(pp=2, dp=1)"),
            "moe": Source("_parallel", 2, _MIXTURE, "zero1(dp=2, ep=2)"),
        },
        (
            Trial("ZeRO-1 to 3 ranks", "z1", "zero1(dp=3)", 3),
            Trial("ZeRO-1 to ZeRO-3", "z1", "zero3(dp=2)", 2, {"stage": 3}),
            Trial("ZeRO-1 to universal", "z1", "universal()", 2, {"universal": True}, ignores="/buffers/"),
            Trial("ZeRO-2 (bf16) to ZeRO-3", "z2", "zero3(dp=2)", 2, {"stage": 3}),
            Trial("ZeRO-3 to ZeRO-1", "z3", "zero1(dp=2)", 2, {"stage": 1}),
            Trial("two stages to one", "pp", "zero1(pp=1, dp=2)", 2, {"pp": 1}),
            Trial("experts, ep=2 to ep=1", "moe", "zero1(dp=2, ep=1)", 2, {"ep": 1}),
        ),
    ),
    "megatron-core": Plan(
        "megatron_ranks.py",
        {
            "dp": Source("", 2, {**_GPT, "saved": {"format": "torch_dist"}}, "megatron_core()"),
            "tp": Source("", 2, {**_GPT, "tp": 2, "saved": {"format": "torch_dist"}}, "megatron_core(tp=2)"),
            "legacy": Source("", 2, {**_GPT, "saved": {"format": "legacy"}}, "megatron_legacy()"),
            "gathered": Source("", 2, {**_GPT, "saved": _GATHERED}, "megatron_core()"),
            "buckets": Source("", 2, {**_GPT, "vocab": 24, "saved": _BUCKETS}, "megatron_core()"),
        },
        (
            Trial("torch_dist, dp=2 to tp=2", "dp", "megatron_core(tp=2)", 2, {"tp": 2}),
            Trial("torch_dist, tp=2 to pp=2", "tp", "megatron_core(pp=2)", 2, {"tp": 1, "pp": 2}),
            Trial("torch_dist to legacy files", "dp", "megatron_legacy()", 2),
            Trial("legacy files to tp=2", "legacy", "megatron_legacy(tp=2)", 2, {"tp": 2}),
            Trial("legacy files to torch_dist", "legacy", "megatron_core(tp=2)", 2, {"tp": 2}),
            Trial("states of one rank to legacy files", "gathered", "megatron_legacy()", 2),
            Trial("buckets to legacy files, tp=2", "buckets", "megatron_legacy(tp=2)", 2, {"tp": 2}),
        ),
    ),
    "torch": Plan(
        "torch_ranks.py",
        {
            "file": Source("", 1, {**_LOOP, "form": "file"}, "torch_file()"),
            "folder": Source("", 1, {**_LOOP, "form": "folder"}, "dcp(fsdp=1)"),
            "fsdp": Source("", 2, {**_LOOP, "form": "fsdp"}, "dcp(fsdp=2)"),
        },
        (
            Trial("one file to FSDP", "file", "dcp(fsdp=2)", 2, {"form": "fsdp"}),
            Trial("one file to one file", "file", "torch_file()", 1),
            Trial("DCP to FSDP", "folder", "dcp(fsdp=2)", 2, {"form": "fsdp"}),
            Trial("FSDP to 3 ranks", "fsdp", "dcp(fsdp=3)", 3),
            Trial("FSDP to DCP without FSDP", "fsdp", "dcp(fsdp=1)", 1, {"form": "folder"}),
            Trial("FSDP to one file", "fsdp", "torch_file()", 1, {"form": "file"}),
        ),
    ),
    "transformers": Plan(
        "libraries_ranks.py",
        {
            "llama": Source("", 1, {**_FOLDER, "class": "Llama", "safe": True}, "safetensors()"),
            "bin": Source("", 1, {**_FOLDER, "class": "Llama", "safe": False}, "safetensors()"),
            "trainer": Source("", 1, {**_LOOP, "library": "trainer"}, "trainer()"),
            "mixtral": Source("", 1, {**_FOLDER, "class": "Mixtral", "safe": True}, "safetensors()"),
        },
        (
            Trial("safetensors to safetensors", "llama", "safetensors()", 1),
            Trial("pytorch_model.bin to safetensors", "bin", "safetensors()", 1),
            Trial("Mixtral to safetensors", "mixtral", "safetensors()", 1),
            Trial("Trainer to FSDP's DCP, and back", "trainer", "trainer()", via="dcp(fsdp=2)", world=1),
            Trial("Trainer to DeepSpeed's ZeRO-2, and back", "trainer", "trainer()", via="zero2(dp=2)", world=1),
        ),
    ),
    "accelerate": Plan(
        "libraries_ranks.py",
        {"loop": Source("", 1, {"library": "accelerate", "dtype": "fp32"}, "accelerate()")},
        (
            Trial("save_state to save_state", "loop", "accelerate()", 1),
            Trial("save_state to FSDP's DCP, and back", "loop", "accelerate()", via="dcp(fsdp=2)", world=1),
            Trial("save_state to DeepSpeed's ZeRO-2, and back", "loop", "accelerate()", via="zero2(dp=2)", world=1),
        ),
    ),
    "lightning": Plan(
        "libraries_ranks.py",
        {"ckpt": Source("", 1, {**_LOOP, "library": "lightning"}, _CKPT)},
        (
            Trial(".ckpt to .ckpt", "ckpt", _CKPT, 1),
            Trial(".ckpt to FSDP's DCP, and back", "ckpt", _CKPT, via="dcp(fsdp=2)", world=1),
            Trial(".ckpt to DeepSpeed's ZeRO-2, and back", "ckpt", _CKPT, via="zero2(dp=2)", world=1),
        ),
    ),
}


def tried(release: Release, python: Path, folder: Path) -> dict[str, Cell]:
    """A cell of each trial."""
    plan = PLANS[release.framework]
    sources_of = {name: evolve(source, run=source.run | release.model) for name, source in plan.sources.items()}
    plan = evolve(plan, sources=sources_of)
    folder.mkdir(parents=True)
    jobs = [
        _job("train", name, source, source.run, source.world, folder, name) for name, source in plan.sources.items()
    ]
    _launch(release, python, plan.script, jobs, folder, "train")
    sources = {name: _result(folder, name) for name in plan.sources}
    refused: dict[str, Cell] = {}
    jobs = []
    for name, source in plan.sources.items():
        if "error" not in sources[name]:
            jobs.append(_job("load", name, source, source.run, source.world, folder, f"own-{name}"))
    for trial in plan.trials:
        if "error" in sources[trial.source]:
            continue
        try:
            source_of = folder / trial.source
            if trial.via:
                ucpl.convert(source_of, folder / f"{_key(trial)}-via", to=trial.via)
                source_of = folder / f"{_key(trial)}-via"
            ucpl.convert(source_of, folder / _key(trial), to=trial.call)
        except ucpl.UcplError as error:
            first = error.diagnostics[0]
            refused[trial.title] = Cell("refused", f"{first.code}: {first.message}"[:200])
            continue
        source = plan.sources[trial.source]
        run = source.run | trial.run | release.runs.get(trial.title, {})
        jobs.append(_job("load", _key(trial), source, run, trial.world, folder, _key(trial), trial.source))
    _launch(release, python, plan.script, jobs, folder, "load")
    cells = {trial.title: refused.get(trial.title) or _cell(trial, plan, sources, folder) for trial in plan.trials}
    steps = [trial for trial in plan.trials if cells[trial.title].state == "back"]
    jobs = []
    for trial in steps:
        source = plan.sources[trial.source]
        call = (
            f"{_own_layout(folder / trial.source)}:stored({source.call.partition('(')[2]}"
            if "pp" in source.run
            else source.call
        )
        ucpl.convert(folder / _key(trial), folder / f"{_key(trial)}-back", to=call)
        name = f"{_key(trial)}-back"
        jobs.append(_job("load", name, source, source.run, source.world, folder, name, trial.source))
    if jobs:
        _launch(release, python, plan.script, jobs, folder, "back")
    for trial in steps:
        found = _result(folder, f"{_key(trial)}-back")
        if "error" in found or found["differences"] or found["after"] != sources[trial.source]["after"]:
            cells[trial.title] = Cell("failed", f"{cells[trial.title].why}; converted back: {_last(str(found))}")
    for title, why in release.limits.items():
        state = cells[title].state
        cells[title] = Cell(state if state in {"passed", "back"} else "framework", why)
    return cells


def _own_layout(source: Path) -> Path:
    """The text of `ucpl infer`, which has the stages of the source.

    DeepSpeed before 0.12 deals layers in another way.
    """
    text = source.with_suffix(".ucpl")
    command = [sys.executable, "-m", "ucpl", "infer", str(source), "-o", str(text)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
    return text


def _key(trial: Trial) -> str:
    return re.sub(r"[^a-z0-9]+", "_", f"{trial.source}_{trial.via}_{trial.call}").strip("_")


def _job(
    verb: str, name: str, source: Source, run: dict[str, Any], world: int, folder: Path, result: str, truth: str = ""
) -> dict[str, Any]:
    out = {"do": f"{verb}{source.do}", "world": world, "run": run, "steps": STEPS, "folder": str(folder / name)}
    files = {"truth": str(folder / f"{truth or name}.truth"), "result": str(folder / f"{result}.json")}
    return {**out, **files, "loose": True}


def _launch(release: Release, python: Path, script: str, jobs: list[dict[str, Any]], folder: Path, name: str) -> None:
    listed = folder / f"{name}.jobs"
    listed.write_text(json.dumps(jobs))
    seconds = Limit.left(SECONDS)
    with (folder / f"{name}.log").open("w") as log:
        try:
            command = [str(python), str(HERE / script), str(listed)]
            processes.run(command, seconds, env=variables(release), cwd=folder, stdout=log, stderr=log)
        except subprocess.TimeoutExpired:
            if Limit.is_over():
                raise Missing(OVER) from None
            log.write(f"no end after {SECONDS} seconds")


def _result(folder: Path, name: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    logs = [log.read_text().strip().splitlines() for log in sorted(folder.glob("*.log"))]
    return {"error": next((lines[-1] for lines in logs if lines), "the job was not reached")}


def _cell(trial: Trial, plan: Plan, sources: dict[str, dict[str, Any]], folder: Path) -> Cell:
    source = sources[trial.source]
    if "error" in source:
        return Cell("framework", f"it does not write this here: {_last(source['error'])}")
    found, own = _result(folder, _key(trial)), _result(folder, f"own-{trial.source}")
    found["differences"] = [d for d in found.get("differences", ()) if not d.startswith(trial.ignores)]
    if "error" in found or found["differences"]:
        what = _last(found["error"]) if "error" in found else "; ".join(found["differences"][:3])
        if "error" in own or own["differences"]:
            return Cell("framework", f"it does not load its own folder here: {what}")
        return Cell("failed", what)
    near = max(
        NEAR[run["dtype"]] for run in (plan.sources[trial.source].run, {**plan.sources[trial.source].run, **trial.run})
    )
    first, *rest = (abs(a - b) for a, b in zip(found["after"], source["after"], strict=True))
    second = max(rest)
    if first > near:
        return Cell("failed", f"the first loss differs by {first:.2g}")
    return Cell("passed") if second <= near else Cell("back", f"the step at these degrees differs by {second:.1g}")


def _last(error: str) -> str:
    """The last line of a traceback."""
    return error.strip().splitlines()[-1][:200]
