"""A DeepSpeed checkpoint of a model that has grown.

Thawed layers, new rows. Groups, orders and flat buffers are made for another degree and stage, missing values are
filled, and DeepSpeed loads the target plainly: trained values are bit-equal, the rest follows the spec, and training
continues.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ucpl
from tests.interop.parallel import launch, result
from tests.interop.test_deepspeed import JOB, ROOT

pytestmark = pytest.mark.interop

STAGES = (0, 1, 2, 3)
RUN = {"model": "net", "dtype": "fp32", "optimizer": "adamw", "groups": 1}
ORDER = "gain, shift, embed.weight, conv.weight, conv.bias, norm.weight, norm.bias, up.weight, up.bias, down.weight"
LAYOUT = """
layout grown{0}(dp) of checkpoint extends zero{0}(dp = dp) {{
  fill embed.weight              = 0
  fill shift                     = 0
  fill state fp32                = weight
  fill state exp_avg, exp_avg_sq = 0
  fill state step                = 0
}}
"""


def spec_of(source: Path) -> str:
    """The inferred model with its changes, and layouts that fill missing values."""
    text, _, _ = ucpl.infer(source).text().partition("layout ")
    text = text.replace(" is frozen", "").replace("embed.weight : 11 6", "embed.weight : 13 6")
    text = re.sub(r'group "0" = .*', f'group "0" = {ORDER}', text)
    text = text.replace("\n  calls ", "\n  shift : 6  dtype f32\n  calls ")  # where the module has it
    return text + "".join(LAYOUT.format(stage) for stage in STAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    old, truth = folder / "old", str(folder / "truth.pt")
    train = {"do": "train", "world": 2, "run": {**RUN, "freeze": True, "stage": 2}, "steps": 3, "folder": str(old)}
    launch("train", [{**train, "truth": truth, "result": str(folder / "train.json")}], JOB)
    (folder / "grown.ucpl").write_text(spec_of(old))
    jobs = []
    for stage in STAGES:
        target = folder / f"grown{stage}"
        call = f"{folder / 'grown.ucpl'}:grown{stage}(dp = 3)"
        command = [sys.executable, "-m", "ucpl", "convert", str(old), str(target), "--to", call]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "exp_avg with 0: 113 elements" in done.stdout, done.stdout
        run = {**RUN, "model": "grown", "stage": stage}
        job = {"do": "grown", "world": 3, "run": run, "folder": str(target), "truth": truth}
        jobs.append({**job, "result": str(folder / f"loaded{stage}.json")})
    launch("load", jobs, JOB)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_trained_is_kept_and_what_is_new_is_filled(stage: int, folder: Path) -> None:
    found = result(folder, f"loaded{stage}")
    assert found["differences"] == []
    assert len(set(found["after"])) == 3
    if stage:  # of a flat buffer all parameters have one step; without, those that are new begin at 0
        assert found["after"] == pytest.approx(result(folder, "loaded1")["after"], rel=0, abs=1e-5), "one training"
