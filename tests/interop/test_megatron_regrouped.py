"""Hyper-parameters of each parameter in Megatron's loaded optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.interop.parallel import launch
from ucpl.errors import UcplError

pytestmark = pytest.mark.interop

TRAIN = Path(__file__).with_name("megatron_job.py")
LOAD = Path(__file__).with_name("megatron_groups_job.py")
RUN = {"dtype": "bf16", "layers": 1, "hidden": 16, "kv": 4, "ffn": 32, "vocab": 48}
MATRICES = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-6}
NORMS = {"lr": 0.02, "weight_decay": 0.0, "betas": (0.7, 0.95), "eps": 1e-5}
FROZEN = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
TARGETS = {
    "core": "megatron_core()",
    "buckets": 'megatron_core(optimizer = "dp_reshardable")',
    "legacy": "megatron_legacy()",
    "fsdp": "megatron_fsdp()",
}
CASES = ("renamed", "split", "joined", "empty", "frozen")
# From each of Megatron's forms to another: these are sources, too.
ONWARDS = (("core", "legacy"), ("legacy", "fsdp"), ("fsdp", "buckets"), ("buckets", "core"))
WAYS = [(case, (target,)) for case in CASES for target in TARGETS] + [
    (case, way) for case in ("split", "frozen") for way in ONWARDS
]
# Megatron-FSDP 0.16.1 registers a hook on the gradient of each parameter, so that it takes no frozen one.
ALL = [one for one in WAYS if one[0] != "frozen" or "fsdp" not in one[1]]


def grouped(plain: dict[str, Any], case: str) -> dict[str, dict[str, Any]]:
    """Write groups of a case into a plain file; return their values."""
    names = [name for group in plain["groups"] for name in group["params"]]
    frozen = FROZEN if case == "frozen" else []
    for name in frozen:
        plain["params"][name] = {"weight": plain["params"][name]["weight"]}
    shapes = {name: plain["params"][name]["weight"].shape for name in names if name not in frozen}
    norms = [name for name, shape in shapes.items() if len(shape) == 1 or name.endswith(".bias")]
    rest = [name for name in shapes if name not in norms]
    two = [{"params": norms, **NORMS}, {"params": rest, **MATRICES}]  # in another order than Megatron's
    plain["groups"] = {
        "renamed": two,
        "split": [{"params": rest[1:], **MATRICES}, two[0], {"params": rest[:1], **MATRICES}],
        "joined": [{"params": [*rest, *norms], **MATRICES}],
        "empty": [{"params": [], **NORMS, "lr": 7.0}, *two],
        "frozen": two,
    }[case]
    if frozen:
        plain["envelope"] = {**plain.get("envelope", {}), "in_groups": {"0": [*norms, FROZEN[1]]}}
    return {name: {k: v for k, v in g.items() if k != "params"} for g in plain["groups"] for name in g["params"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("regrouped")
    saves = {str(top / "run"): {"format": "legacy"}}
    job = {"do": "train", "world": 1, "run": RUN, "steps": 1, "saves": saves, "truth": str(top / "run.truth")}
    launch("train", [{**job, "result": str(top / "run.json")}], TRAIN)
    ucpl.convert(top / "run", top / "run.pt", "plain()")
    return top


def source(top: Path, case: str) -> tuple[Path, dict[str, dict[str, Any]]]:
    plain = torch.load(top / "run.pt", weights_only=False)
    wanted = grouped(plain, case)
    torch.save(plain, top / f"{case}.pt")
    return top / f"{case}.pt", wanted


@pytest.fixture(scope="module")
def loaded(trained: Path) -> dict[tuple[str, tuple[str, ...]], tuple[Any, Any]]:
    jobs: dict[Any, dict[str, Any]] = {}
    wanted: dict[Any, Any] = {}
    for case, way in ALL:
        here, wanted[case, way] = source(trained, case)
        for target in way:
            there = here.with_name(f"{here.stem}-{target}")
            if not there.exists():
                ucpl.convert(here, there, TARGETS[target])
            here = there
        run = {**RUN, "fsdp": way[-1] == "fsdp", "frozen": FROZEN if case == "frozen" else []}
        job = {"do": "load", "world": 1, "run": run, "folder": str(here)}
        jobs[case, way] = {**job, "result": str(here.with_name(f"{here.name}.json"))}
    launch("load", list(jobs.values()), LOAD)
    return {one: (json.loads(Path(job["result"]).read_text()), wanted[one]) for one, job in jobs.items()}


@pytest.mark.parametrize("one", ALL, ids=lambda one: "-".join((one[0], *one[1])))
def test_megatrons_optimizer_has_the_values_that_each_parameter_had(one: Any, loaded: Any) -> None:
    found, wanted = loaded[one]
    assert "error" not in found, found
    assert found["differences"] == []
    told = {
        n: {k: tuple(v) if k == "betas" else v for k, v in r.items() if k != "step"} for n, r in found["rates"].items()
    }
    assert told == wanted


@pytest.mark.parametrize("target", TARGETS)
def test_groups_that_are_one_group_of_megatrons_are_refused(target: str, trained: Path, tmp_path: Path) -> None:
    plain = torch.load(trained / "run.pt", weights_only=False)
    grouped(plain, "split")
    plain["groups"][2]["lr"] = 0.7
    torch.save(plain, tmp_path / "three.pt")
    with pytest.raises(UcplError, match="lr is") as refused:
        ucpl.convert(tmp_path / "three.pt", tmp_path / "made", TARGETS[target])
    assert refused.value.diagnostics[0].code == "E471" and not (tmp_path / "made").exists()
