"""DeepSpeed's AutoTP writes, and loads other degrees and stages by `load_checkpoint`.

One process is the parent of all ranks that train the sources, another of all that load the targets.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.parallel import change_moment, convert, launch, result
from ucpl.extents import Section, Sharding
from ucpl.formats.deepspeed.cuts import info_of
from ucpl.inference.parallel import rule

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("deepspeed_tp_job.py")
STEPS = 3
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of the losses after a restart at another degree or stage

FP32, BF16, FROZEN = {"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "fp32", "freeze": True}
# name: (tp, dp, stage, the run)
SOURCES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "tp2_z1": (2, 2, 1, FP32),
    "tp2_z2_frozen": (2, 2, 2, FROZEN),
    "tp2_z3": (2, 2, 3, FP32),
    "tp2_z3_frozen": (2, 2, 3, FROZEN),
    "tp3_z2_bf16": (3, 1, 2, BF16),
    "dense_z1": (1, 2, 1, FP32),
}

# The cuts of the model, which no dense checkpoint has.
SPEC = """ucpl 1

layout cut(dp, tp) of any extends zero1(dp = dp, tp = tp) {
  attn.qkv.weight    = (_[..24]@spread(tp, 6) + _[24..36]@spread(tp, 3) + _[36..]@spread(tp, 3)) ...  as "attn.qkv.weight"
  attn.qkv.bias      = (_[..24]@spread(tp, 6) + _[24..36]@spread(tp, 3) + _[36..]@spread(tp, 3))      as "attn.qkv.bias"
  attn.o_proj.weight = _ _@spread(tp, 6)                                                              as "attn.o_proj.weight"
  mlp.gate_up.weight = (_[..37]@spread(tp) + _[37..]@spread(tp)) ...                                  as "mlp.gate_up.weight"
  mlp.down.weight    = _ _@spread(tp)                                                                 as "mlp.down.weight"
}
"""


@frozen
class Target:
    source: str
    stage: int
    tp: int
    dp: int
    calls: tuple[str, ...]  # layouts on the way, the target's own last
    spoiled: bool = False  # one moment is changed after the conversion: the check must fail

    def __str__(self) -> str:
        way = "-universal" if self.is_universal else "" if len(self.calls) == 1 else f"-by{len(self.calls) - 1}"
        return f"{self.source}{way}-zero{self.stage}_tp{self.tp}_dp{self.dp}{'-spoiled' if self.spoiled else ''}"

    @property
    def run(self) -> dict[str, Any]:
        return {"tp": self.tp, "stage": self.stage, "universal": self.is_universal, **SOURCES[self.source][3]}

    @property
    def is_universal(self) -> bool:
        return self.calls[-1].startswith("universal")

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def is_same(self) -> bool:
        return SOURCES[self.source][:3] == (self.tp, self.dp, self.stage) and not self.is_universal


TARGETS = (
    Target("tp2_z1", 1, 1, 2, ("zero1(tp=1)",)),
    Target("tp2_z1", 1, 1, 2, ("zero1(tp=1)",), spoiled=True),
    Target("tp2_z1", 3, 1, 3, ("zero3(tp=1, dp=3)",)),
    Target("tp2_z1", 1, 3, 1, ("zero1(tp=3, dp=1, kv_heads=4)",)),
    Target("tp2_z1", 1, 4, 1, ("zero1(tp=4, dp=1, kv_heads=4)",)),
    Target("tp2_z1", 3, 2, 1, ("zero3(dp=1)",)),
    Target("tp2_z1", 1, 2, 2, ("zero3(tp=3, dp=3, kv_heads=4)", "zero2(tp=4, dp=1, kv_heads=4)", "zero1(tp=2, dp=2)")),
    Target("tp2_z3", 1, 1, 2, ("zero1(tp=1)",)),
    Target("tp2_z3", 3, 4, 1, ("zero3(tp=4, dp=1, kv_heads=4)",)),
    Target("tp2_z3", 1, 2, 2, ("zero1(dp=2)",)),
    Target("tp2_z3", 3, 2, 2, ("zero1(dp=3)", "zero3(dp=2)")),
    # Stage 3's loader cuts tensors that have their shape, and takes others for a rank's own.
    Target("tp2_z3", 3, 4, 1, ("universal()",)),
    Target("tp2_z1", 3, 2, 1, ("universal(stage=3)",)),
    Target("tp2_z2_frozen", 3, 3, 1, ("zero3(tp=3, dp=1, kv_heads=4)",)),
    Target("tp2_z2_frozen", 2, 2, 2, ("zero3(dp=3)", "zero2(dp=2)")),
    Target("tp2_z3_frozen", 1, 1, 2, ("zero1(tp=1)",)),
    Target("tp2_z3_frozen", 3, 2, 2, ("zero1(tp=4, dp=3, kv_heads=4)", "zero3(tp=2, dp=2)")),
    Target("tp3_z2_bf16", 1, 1, 2, ("zero1(tp=1, dp=2)",)),
    Target("tp3_z2_bf16", 3, 2, 2, ("zero3(tp=2, dp=2)",)),
    Target("dense_z1", 1, 2, 2, ("SPEC:cut(dp=2, tp=2)",)),
    Target("dense_z1", 1, 3, 1, ("SPEC:cut(dp=1, tp=3)",)),
)


def convert_all(target: Target, folder: Path) -> str:
    """Convert, and return an error text or ""."""
    here = folder / target.source
    for n, call in enumerate(target.calls):
        there = folder / f"{target}.{n}"
        to = call.replace("SPEC", str(folder / "spec.ucpl"))
        if error := convert(here, there, to):
            return error
        here = there
    if target.spoiled:
        change_moment(here)
    here.rename(folder / str(target))
    return ""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources trained, targets converted and loaded; results are in NAME.json."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    (folder / "spec.ucpl").write_text(SPEC)

    def job(do: str, run: dict[str, Any], name: str, truth: str, result: str) -> dict[str, Any]:
        paths = {"folder": str(folder / name), "truth": str(folder / f"{truth}.truth")}
        paths["result"] = str(folder / f"{result}.json")
        return {"do": do, "run": run, "steps": STEPS, **paths}

    jobs = [
        {"world": tp * dp, **job("train", {"tp": tp, "stage": stage, **run}, name, name, name)}
        for name, (tp, dp, stage, run) in SOURCES.items()
    ]
    launch("train", jobs, JOB)
    errors = {target: convert_all(target, folder) for target in TARGETS}
    for target, error in errors.items():
        if error:
            (folder / f"{target}.json").write_text(json.dumps({"error": error}))
    fine = [t for t in TARGETS if not errors[t]]
    jobs = [{"world": t.world, **job("load", t.run, str(t), t.source, str(t))} for t in fine]
    # DeepSpeed's own load of its own files.
    again = [
        {"world": t.world, **job("load", t.run, t.source, t.source, f"{t.source}.again")} for t in fine if t.is_same
    ]
    launch("load", jobs + again, JOB)
    return folder


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.spoiled], ids=str)
def test_deepspeed_loads_what_was_converted_and_trains_on(target: Target, folder: Path) -> None:
    """State bit-equal; losses of an uninterrupted run, or of a plain restart."""
    source, found = result(folder, target.source), result(folder, str(target))
    left = ["/buffers/calls differs"] if target.is_universal else []  # values that this loader never restores
    assert found["differences"] == left
    if target.is_same:
        assert found["after"] == result(folder, f"{target.source}.again")["after"]
    assert found["after"] == pytest.approx(source["after"], rel=0, abs=TOLERANCE[target.run["dtype"]])


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


@pytest.mark.parametrize("call", ["zero1(tp=3, dp=2, kv_heads=4)", "SPEC:cut(dp=2, tp=3)"])
def test_deepspeeds_own_converter_reads_what_was_written(call: str, folder: Path) -> None:
    """ds_to_universal reads ucpl's metadata: full tensors are bit-equal."""
    import torch

    name = "dense_z1" if call.startswith("SPEC") else "tp2_z1"
    there = folder / f"universal_{name}"
    to = call.replace("SPEC", str(folder / "spec.ucpl"))
    assert convert(folder / name, there, to) == ""
    step = there / (there / "latest").read_text()
    made = there / "universal"
    shutil.rmtree(made, ignore_errors=True)
    run = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(step)]
    done = subprocess.run(
        [*run, "--output_folder", str(made), "--num_extract_workers", "1", "--num_merge_workers", "1"],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    truth = torch.load(folder / f"{name}.truth", weights_only=False)["params"]
    for parameter, states in truth.items():
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            atom = torch.load(made / "zero" / parameter / f"{state}.pt", weights_only=False)["param"]
            assert torch.equal(atom, states[state]), (parameter, state)


# ---- DeepSpeed's own functions ------------------------------------------------------------------------------------------


@given(
    st.integers(1, 400),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(1, 70),
    st.sampled_from(["attn.qkv", "mlp.up", "block.up_proj", "moe.w1", "lm_head", "embed_out", "x.lm_head", ""]),
)
def test_widths_are_those_that_deepspeed_makes(size: int, degree: int, heads: int, grain: int, module: str) -> None:
    from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

    meta = AutoTPMeta(num_kv_heads=heads or None, tp_grain_size=grain)
    assert rule(size, degree, heads, grain, module) == tuple(get_shard_size_list(size, degree, meta, module))


@given(st.data())
def test_maps_are_those_that_deepspeed_makes(data: st.DataObject) -> None:
    from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map, segmented_map, sub_param_map

    degree = data.draw(st.integers(2, 4))
    rest = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2)))
    dim = data.draw(st.integers(0, len(rest)))
    pieces = st.lists(st.integers(1, 5), min_size=degree, max_size=degree).map(tuple)
    widths = data.draw(st.lists(st.one_of(pieces, st.none()), min_size=1, max_size=3))
    sections = tuple(Section(3 if w is None else sum(w), w) for w in widths)
    shape = (*rest[:dim], sum(s.size for s in sections), *rest[dim:])
    if widths == [None]:
        mine, theirs = Sharding(shape), replicated_map(shape, degree)
    else:
        mine = Sharding(shape, dim, sections)
        if None in widths:
            cut = [list(w) for w in widths if w is not None]
            theirs = segmented_map(shape, [(s.size, s.widths is None) for s in sections], dim, degree, cut)
        elif len(widths) == 1:
            theirs = contiguous_split_map(shape, list(widths[0] or ()), dim)
        else:
            theirs = sub_param_map(shape, [s.size for s in sections], [list(w or ()) for w in widths], dim)
    affine: Any = info_of({"w": mine}, degree, {})["affine_map"]
    (made,) = affine["params"].values()
    assert made == theirs.to_dict()
