"""DeepSpeed loads converted folders into scrambled engines by `load_checkpoint`.

All work is done once: one process is the parent of all ranks that train the sources, another of all that load the
targets.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from tests.interop.parallel import change_moment, convert, launch, result

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("deepspeed_job.py")
STEPS = 3
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of the losses after a restart at another degree or stage

FP32 = {"model": "net", "dtype": "fp32", "optimizer": "adamw"}
BF16 = {"model": "net", "dtype": "bf16", "optimizer": "adamw"}
FROZEN = {**FP32, "freeze": True, "groups": 3, "zero": {"sub_group_size": 40}}
DEALT = {**FP32, "optimizer": "nadam", "zero": {"round_robin_gradients": True, "parameter_alignment": True}}
DEALT_BF16 = {**BF16, "groups": 1, "zero": {"round_robin_gradients": True, "parameter_alignment": True}}
WIDE = {**BF16, "wide_gradients": True}  # BF16_Optimizer at stage 1
FEW = {"model": "few", "dtype": "fp32", "optimizer": "lion", "groups": 3}
SGD = {**FP32, "optimizer": "sgd", "freeze": True}
YOUNG = {**FP32, "steps": 0}
# DeepSpeed keeps no hyper-parameters with it, and cannot load its own: it asks for a step that torch's optimizers keep
# elsewhere.
ELASTIC = {**FP32, "zero": {"elastic_checkpoint": True}, "keeps_no_hyper": True}

# Without ZeRO nothing in the files names the parameters: `order` says it, or weights that are views of a flat buffer.
BACKWARDS = {**FP32, "groups": 5, "order": True}
FUSED = {**BF16, "optimizer": "fused", "groups": 3, "freeze": True}

# name: (stage, dp, the run)
SOURCES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "z1": (1, 2, FP32),
    "z3_frozen_subgroups": (3, 4, FROZEN),
    "z2_dealt_aligned": (2, 3, DEALT),
    "z1_dealt_aligned_bf16": (1, 4, DEALT_BF16),
    "z0": (0, 2, FP32),
    "z0_bf16": (0, 2, BF16),
    "z0_backwards": (0, 2, BACKWARDS),
    "z0_fused": (0, 2, FUSED),
    "z1_bf16": (1, 2, BF16),
    "bf16_optimizer": (1, 2, WIDE),
    "z2_frozen_sgd": (2, 3, SGD),
    "z1_few_lion": (1, 3, FEW),
    "z1_before_the_first_step": (1, 2, YOUNG),
    "z2_elastic": (2, 2, ELASTIC),
}


@frozen
class Target:
    source: str
    stage: int
    dp: int
    via: tuple[str, ...] = field(default=())  # layouts on the way
    spoiled: bool = False  # one moment is changed after the conversion: the check must fail

    def __str__(self) -> str:
        way = "".join(f"-{v.replace('(dp=', '_dp').rstrip('()')}" for v in self.via)
        return f"{self.source}{way}-zero{self.stage}_dp{self.dp}{'-spoiled' if self.spoiled else ''}"

    @property
    def call(self) -> str:
        is_flat = self.stage == 0 and self.run["optimizer"] == "fused"
        return f"zero{self.stage}(dp={self.dp}{', fused=1' if is_flat else ''})"

    @property
    def is_same(self) -> bool:
        stage, dp, _ = SOURCES[self.source]
        return (stage, dp) == (self.stage, self.dp)

    @property
    def run(self) -> dict[str, Any]:
        return {**SOURCES[self.source][2], "stage": self.stage}


TARGETS = (
    # 1 to 3 and back, at every degree
    Target("z1", 3, 1),
    Target("z1", 3, 3),
    Target("z1", 2, 5),
    Target("z1", 0, 2),
    Target("z1", 1, 2, via=("zero3(dp=3)",)),
    Target("z1", 3, 2, via=("plain()",)),
    Target("z1", 3, 2, spoiled=True),
    Target("z3_frozen_subgroups", 1, 2),
    Target("z3_frozen_subgroups", 2, 5),
    Target("z3_frozen_subgroups", 3, 8),
    Target("z3_frozen_subgroups", 3, 4, via=("zero1(dp=8)", "plain()", "zero2(dp=3)")),
    Target("z2_dealt_aligned", 1, 4),
    Target("z2_dealt_aligned", 2, 8),
    Target("z2_dealt_aligned", 3, 2),
    Target("z2_dealt_aligned", 2, 3, via=("zero3(dp=5)", "zero2(dp=4)")),
    Target("z1_dealt_aligned_bf16", 2, 3),
    Target("z1_dealt_aligned_bf16", 1, 4, via=("zero3(dp=2)",)),
    Target("z0", 1, 3),
    Target("z0", 3, 2),
    Target("z0", 0, 2, via=("zero2(dp=3)",)),
    Target("z0_bf16", 2, 3),
    Target("z0_bf16", 3, 1),
    Target("z0_bf16", 0, 2, via=("zero3(dp=4)",)),
    Target("z0_backwards", 2, 3),
    Target("z0_fused", 1, 3),
    Target("z0_fused", 0, 2, via=("zero3(dp=4)",)),
    Target("z1_bf16", 3, 4),
    Target("z1_bf16", 1, 5),
    Target("bf16_optimizer", 2, 3),
    Target("bf16_optimizer", 3, 2),
    Target("bf16_optimizer", 1, 4),
    Target("bf16_optimizer", 1, 2, via=("zero2(dp=3)",)),
    Target("z2_frozen_sgd", 3, 2),
    Target("z2_frozen_sgd", 1, 8),
    Target("z2_frozen_sgd", 0, 3, via=("zero0(dp=2)",)),
    Target("z1_few_lion", 3, 5),
    Target("z1_few_lion", 1, 8),
    Target("z1_few_lion", 2, 1),
    Target("z1_before_the_first_step", 3, 2),
    Target("z1_before_the_first_step", 2, 4),
    Target("z2_elastic", 1, 3),
)


def convert_all(target: Target, folder: Path) -> str:
    here = folder / target.source
    for n, call in enumerate((*target.via, target.call)):
        there = folder / f"{target}.{n}"
        if error := convert(here, there, call):
            return error
        here = there
    if target.spoiled:
        change_moment(here, section="optimizer_state_dict")
    here.rename(folder / str(target))
    return ""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources trained, targets converted and loaded; results are in NAME.json."""
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs: list[dict[str, Any]] = []
    for name, (stage, dp, run) in SOURCES.items():
        job: dict[str, Any] = {"do": "train", "world": dp, "run": {**run, "stage": stage}}
        job |= {"steps": run.get("steps", STEPS)}
        job |= {"folder": str(folder / name), "truth": str(folder / f"{name}.truth")}
        job |= {"names": str(folder / f"{name}.names.json")} if run.get("order") else {}
        jobs.append({**job, "result": str(folder / f"{name}.json")})
    launch("train", jobs, JOB)
    jobs = []
    for target in TARGETS:
        result_file = folder / f"{target}.json"
        if error := convert_all(target, folder):
            result_file.write_text(json.dumps({"error": error}))
            continue
        job = {"do": "load", "world": target.dp, "run": target.run, "steps": target.run.get("steps", STEPS)}
        job |= {"folder": str(folder / str(target)), "truth": str(folder / f"{target.source}.truth")}
        jobs.append({**job, "result": str(result_file)})
    launch("load", jobs, JOB)
    for target in TARGETS:  # not needed any more, and not small all together
        shutil.rmtree(folder / str(target), ignore_errors=True)
    return folder


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.spoiled], ids=str)
def test_deepspeed_loads_what_was_converted_and_trains_on(target: Target, folder: Path) -> None:
    """State bit-equal; losses of an uninterrupted run, bit-equal at equal degrees."""
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == []
    if target.run.get("keeps_no_hyper"):
        return  # the schedule's first step has another learning rate
    if target.is_same:
        assert found["after"] == source["after"]
    else:
        tolerance = TOLERANCE[target.run["dtype"]]
        assert found["after"] == pytest.approx(source["after"], rel=0, abs=tolerance)


@pytest.mark.fault("Against an oracle or the truth", "one changed moment of a target that DeepSpeed loads", "found")
@pytest.mark.parametrize("target", [t for t in TARGETS if t.spoiled], ids=str)
def test_a_changed_moment_is_found(target: Target, folder: Path) -> None:
    source, found = result(folder, target.source), result(folder, str(target))
    assert len(found["differences"]) == 1
    assert found["differences"][0].endswith("/exp_avg differs")
    assert found["after"] != pytest.approx(source["after"], rel=0, abs=TOLERANCE[target.run["dtype"]])


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train(name: str, folder: Path) -> None:
    """Losses that are used as a reference must change."""
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == len(found["before"]) + 2
