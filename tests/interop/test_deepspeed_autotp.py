"""Dense checkpoints of transformers' classes become AutoTP's, by config alone.

A source is a checkpoint or a folder of weights. DeepSpeed with `"tensor_parallel": {"autotp_size": N}` and nothing else
loads it. Two to three minutes on two quiet cores. BLOOM is loaded and compared, not trained on: transformers' own
forward does not run on parts of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.inference.autotp_records import cuts_in, recorded
from tests.interop.autotp_models import CONFIGS
from tests.interop.parallel import change_moment, launch, result

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("autotp_job.py")
STEPS = 3
TOLERANCE = 1e-5  # of the losses after a restart at another degree


@frozen
class Source:
    """A run that is trained and saved, or a folder of weights."""

    of: str
    tp: int = 1
    dp: int = 2
    stage: int = 1
    do: str = "train"


SOURCES = {
    "llama": Source("llama"),
    "llama_tp2": Source("llama", tp=2, stage=2),
    "qwen2": Source("qwen2", stage=2),
    "opt": Source("opt"),
    "bloom": Source("bloom"),
    "folder": Source("qwen2", do="weights"),
}


@frozen
class Target:
    source: str
    stage: int
    tp: int
    dp: int
    calls: tuple[str, ...]
    spoiled: bool = False
    config: tuple[tuple[str, object], ...] = ()  # of tensor_parallel

    def __str__(self) -> str:
        way = "" if len(self.calls) == 1 else f"-by{len(self.calls) - 1}"
        more = "-spoiled" if self.spoiled else "".join(f"-{key}" for key, _ in self.config)
        return f"{self.source}{way}-zero{self.stage}_tp{self.tp}_dp{self.dp}{more}"

    @property
    def run(self) -> dict[str, Any]:
        of = SOURCES[self.source].of
        return {"class": of, "tp": self.tp, "stage": self.stage, "dtype": "fp32", "is_still": of == "bloom"} | {
            "tensor_parallel": dict(self.config)
        }


TARGETS = (
    Target("llama", 1, 4, 1, ("zero1(tp=4, dp=1)",)),
    Target("llama", 1, 4, 1, ("zero1(tp=4, dp=1)",), spoiled=True),
    Target("llama", 3, 2, 2, ("zero3(tp=2, dp=2)",)),
    Target("llama", 2, 3, 1, ("zero2(tp=3, dp=1)",)),  # four key-value heads on three ranks
    Target("llama_tp2", 1, 4, 1, ("zero1(tp=1, dp=3)", "zero1(tp=4, dp=1)")),
    Target("qwen2", 1, 4, 1, ("zero1(tp=4, dp=1)",)),
    Target("qwen2", 2, 2, 2, ("zero2(tp=2, vocab_parallel_lm_head=0)",), config=(("vocab_parallel_lm_head", False),)),
    Target("opt", 2, 2, 2, ("zero2(tp=2)",)),
    Target("bloom", 1, 4, 1, ("zero1(tp=4, dp=1)",)),
    Target("folder", 1, 2, 2, ("zero1(tp=2, dp=2)",)),
    Target("folder", 1, 1, 2, ("zero1(dp=2)",)),  # tied: a strict load asks for both names
)


def convert_all(target: Target, folder: Path) -> str:
    """Convert, and return an error text or ""."""
    here = folder / target.source
    of = SOURCES[target.source].of
    for n, call in enumerate(target.calls):
        there = folder / f"{target}.{n}"
        command = [sys.executable, "-m", "ucpl", "convert", str(here), str(there), "--to", call]
        if not (here / "config.json").exists():  # a folder of weights has one
            command += ["--config", str(folder / f"{of}.json.config")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if done.returncode:
            return f"{call}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        here = there
    if target.spoiled:
        change_moment(here, "zero_pp_rank_0_mp_rank_*")  # the embedding is not cut: every rank has a copy
    here.rename(folder / str(target))
    return ""


def job(do: str, run: dict[str, Any], name: str, truth: str, into: Path) -> dict[str, Any]:
    paths = {"folder": str(into / name), "truth": str(into / f"{truth}.truth"), "result": str(into / f"{name}.json")}
    return {"do": do, "run": run, "steps": STEPS, **paths}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources trained, targets converted and loaded; results are in NAME.json."""
    folder = tmp_path_factory.mktemp("autotp")
    for name, said in CONFIGS.items():
        (folder / f"{name}.json.config").write_text(json.dumps(said))
    jobs = []
    for name, s in SOURCES.items():
        run = {"class": s.of, "tp": s.tp, "stage": s.stage, "dtype": "fp32"}
        jobs.append({"world": s.tp * s.dp, **job(s.do, run, name, name, folder)})
    launch("train", jobs, JOB)
    jobs = []
    for target in TARGETS:
        if error := convert_all(target, folder):
            (folder / f"{target}.json").write_text(json.dumps({"error": error}))
            continue
        do = "warm" if SOURCES[target.source].do == "weights" else "load"
        jobs.append({"world": target.tp * target.dp, **job(do, target.run, str(target), target.source, folder)})
    launch("load", jobs, JOB)
    return folder


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.spoiled], ids=str)
def test_deepspeed_loads_what_a_config_cut_and_trains_on(target: Target, folder: Path) -> None:
    """State bit-equal; losses of an uninterrupted run, or of weights alone."""
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == []
    if not target.run["is_still"]:
        assert found["after"] == pytest.approx(source["after"], rel=0, abs=TOLERANCE)
        assert len(set(found["after"])) == len(found["after"]) >= 2


def test_a_changed_moment_is_found(folder: Path) -> None:
    (spoiled,) = (t for t in TARGETS if t.spoiled)
    found = result(folder, str(spoiled))
    assert len(found["differences"]) == 1 and found["differences"][0].endswith("/exp_avg differs")


# ---- DeepSpeed's own cuts, in one process ------------------------------------------------------------------------------


def test_the_fixture_is_what_this_deepspeed_makes() -> None:
    from tests.interop import autotp_truth as truth
    from ucpl.inference.hf.networks import network_of

    found = json.loads(truth.FIXTURE.read_text())
    for name in ("llama", "qwen2_tied", "bloom", "opt"):
        for degree in truth.DEGREES:
            assert cuts_in(truth.maps_of(truth.CLASSES[name], degree)) == found[name]["cuts"][str(degree)], (
                name,
                degree,
            )
        made = recorded(network_of(truth.CLASSES[name]))
        assert json.loads(json.dumps(made)) == found[name]["network"], name


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "phi3"])
def test_deepspeed_refuses_what_is_refused(name: str) -> None:
    from tests.interop import autotp_truth as truth

    with pytest.raises((AssertionError, ValueError), match=r"AutoTP not supported|unsupported partition style"):
        truth.maps_of(truth.CLASSES[name], 2)
