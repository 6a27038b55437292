"""A target that trains in another dtype.

Weights rounded from masters, masters and moments bit for bit, all of it reported.

Expected values are computed by torch alone, from the source's state.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from tests.cli.command import FIXTURES, ROOT
from tests.cli.command import ucpl as command
from ucpl.api import open_checkpoint
from ucpl.extents import Global, PickledCall

UNIVERSAL = next((ROOT / "tests" / "fixtures" / "universal" / "z1_dp4").glob("*_universal"))
TYPES = {"bf16=1": torch.bfloat16, "fp16=1": torch.float16, "bf16=0": torch.float32}
CASES = [
    ("z1_dp4", "zero0(dp=2, bf16=1)"),
    ("z1_dp4", "zero1(dp=2, bf16=1, bf16_optimizer=1)"),
    ("z1_dp4", "zero2(dp=3, fp16=1)"),
    ("z1_dp4", "universal(bf16=1)"),
    ("z1_dp2_sgdm", "zero3(dp=3, bf16=1)"),
    ("z2_dp2_roundrobin", "zero2(dp=3, bf16=1)"),
    ("z2_dp3_frozen", "zero3(dp=2, fp16=1)"),
    ("z3_dp2_subgroup", "zero1(dp=3, bf16=1)"),
    ("pp2_dp2_z1", "zero3(dp=2, fp16=1)"),
    ("tp2_dp2_z1_uneven", "zero1(dp=1, bf16=1)"),
    ("tp2_dp2_z1_uneven", "zero0(tp=1, dp=2, fp16=1)"),
    ("moe_ep2_dp2_z1", "zero1(ep=4, dp=4, fp16=1)"),
    ("pp2_ep2_dp2_z1", "zero1(bf16=1)"),
    ("z0_dp2_bf16", "zero2(dp=3, fp16=1)"),
    ("z1_dp2_bf16", "zero1(dp=3, bf16=0)"),
    ("z1_dp2_bf16", "universal(bf16=0)"),
    ("z1_dp2_bf16opt", "zero1(dp=3, bf16=0)"),
    ("z1_dp2_bf16opt", "zero0(dp=1, fp16=1)"),
    ("tp2_pp2_dp2_z1_bf16", "zero1(tp=1, pp=1, bf16=0)"),
    ("tp2_pp2_dp2_z1_bf16", "zero3(dp=2, tp=1, pp=1, fp16=1)"),
    ("z1_dp4", "dcp(fsdp=3, bf16=1)"),
    ("z1_dp2_bf16", "dcp(fsdp=3, bf16=0)"),
    ("../megatron/dist_adam_tp2", "dcp(fsdp=3, bf16=0)"),
]
MODEL = 'ucpl 1\nmodel m {\n  w : 6 4 dtype bf16\n  group "0" = w\n  state fp32, exp_avg : f32\n}\n'


def plain(source: Path, target: Path, **how: Any) -> dict[str, Any]:
    ucpl.convert(source, target, to="plain()", **how)
    value: dict[str, Any] = torch.load(target, weights_only=True)
    return value


@cache
def held(name: str) -> dict[str, Any]:
    """The state of a fixture, which no test changes."""
    with tempfile.TemporaryDirectory() as scratch:
        return plain(FIXTURES / name, Path(scratch) / "plain.pt")


def folder(path: Path) -> Path:
    """Of weights alone."""
    (path / "w").mkdir()
    return path / "w"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def model_states(target: Path) -> dict[str, Any]:
    step = target / (target / "latest").read_text()
    value: dict[str, Any] = torch.load(min(step.glob("*mp_rank_00_model_states.pt")), weights_only=False)
    return value


def scaler_of(target: Path) -> tuple[str, dict[object, object], dict[str, object]]:
    blobs = open_checkpoint(target).state.blobs
    found = blobs["loss_scaler"]
    assert isinstance(found, PickledCall) and isinstance(found.function, Global)
    assert isinstance(found.state, dict)
    return found.function.name, found.state, blobs


def refused(source: Path | str, to: str, **how: str) -> str:
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.plan(str(source), to, **how)  # type: ignore[arg-type]
    (found,) = caught.value.diagnostics
    return found.code


@pytest.mark.parametrize(("name", "to"), CASES)
def test_weights_are_masters_rounded_once(name: str, to: str, tmp_path: Path) -> None:
    flag = next(flag for flag in TYPES if flag in to)
    before = held(name)
    ucpl.convert(FIXTURES / name, tmp_path / "x", to=to)
    after = plain(tmp_path / "x", tmp_path / "b.pt")
    assert after["params"].keys() == before["params"].keys() and before["params"]
    for path, states in before["params"].items():
        wanted = {**states, "weight": states.get("fp32", states["weight"]).to(TYPES[flag])}
        found = after["params"][path]
        if to.startswith(("zero0", "dcp")) and TYPES[flag] == torch.float32:  # its weights are its masters
            found.setdefault("fp32", found["weight"])
        assert found.keys() == wanted.keys(), path
        for state, value in wanted.items():
            assert same(found[state], value) if torch.is_tensor(value) else found[state] == value, (path, state)
    for path, value in before["buffers"].items():
        assert same(after["buffers"][path], value), path


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_file_that_deepspeed_reads(stage: int, tmp_path: Path) -> None:
    """Not through our own reader.

    The module's tensors, and the engine's settings.
    """
    truth = torch.load(FIXTURES / "z1_dp4" / "truth.pt", weights_only=True)["params"]
    ucpl.convert(FIXTURES / "z1_dp4", tmp_path / "x", to=f"zero{stage}(dp=2, bf16=1)")
    stored = model_states(tmp_path / "x")
    for path, states in truth.items():
        assert same(stored["module"][path], states["fp32"].to(torch.bfloat16)), path
    assert stored["module"]["calls"].dtype == torch.int64 or stored["module"]["calls"].dtype == torch.float32
    assert stored["ds_config"]["bf16"] == {"enabled": True}
    assert len(list((tmp_path / "x").glob("*/bf16_zero_pp_rank_*_optim_states.pt"))) == (2 if stage else 0)
    if stage == 0:
        masters = [m for group in stored["optimizer"]["fp32_groups"] for m in group]
        assert {m.dtype for m in masters} == {torch.float32} and len(masters) == len(truth)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("z1_dp4", "bf16=1"),
        ("z1_dp4", "fp16=1"),
        ("z3_dp2_subgroup", "fp16=1"),
        ("tp2_dp2_z1_uneven", "bf16=1"),
    ],
)
def test_there_and_back_gives_masters_and_moments_bit_for_bit(name: str, other: str, tmp_path: Path) -> None:
    """And the weights with them: an f32 run's weights are its masters.

    Degrees change on the way.
    """
    before = held(name)
    away = "zero2" if "tp" not in name else "zero1"
    ucpl.convert(FIXTURES / name, tmp_path / "x", to=f"{away}(dp=3, {other})")
    ucpl.convert(tmp_path / "x", tmp_path / "y", to=f"zero1(dp=2, {other[:4]}=0)")
    after = plain(tmp_path / "y", tmp_path / "b.pt")
    for path, states in before["params"].items():
        for state, value in states.items():
            found = after["params"][path][state]
            assert same(found, value) if torch.is_tensor(value) else found == value, (path, state)


def with_master(file: Path, element: int, value: float) -> None:
    """One master of the first group another, in the archive itself.

    Nothing of its pickle is loaded.
    """
    held = open_checkpoint(file.parents[1])
    extent = next(
        e
        for (f, key), e in held.extents.items()
        if Path(f).name == file.name and "single_partition_of_fp32_groups" in key
    )
    with zipfile.ZipFile(file) as archive:
        members = [(m, archive.read(m), m.header_offset) for m in archive.infolist()]
    changed = max((m for m in members if m[2] < extent.storage_start), key=lambda m: m[2])[0]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for member, data, _ in members:
            if member is changed:
                data = data[: 4 * element] + struct.pack("<f", value) + data[4 * element + 4 :]
            archive.writestr(member.filename, data)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_master_that_fp16_does_not_hold_is_refused_by_its_tensor_and_element(stage: int, tmp_path: Path) -> None:
    """A flat buffer's element has the tensor's own name, too.

    In bf16 the same goes over.
    """
    shutil.copytree(FIXTURES / "z1_dp4", tmp_path / "in")
    (file,) = (tmp_path / "in").glob("*/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with_master(file, 7, -70000.0)
    ucpl.convert(tmp_path / "in", tmp_path / "fits", to=f"zero{stage}(dp=2, bf16=1)", allow_drift=True)
    with pytest.raises(ucpl.UcplError, match="E607") as caught:
        ucpl.convert(tmp_path / "in", tmp_path / "over", to=f"zero{stage}(dp=2, fp16=1)", allow_drift=True)
    (found,) = caught.value.diagnostics
    path = found.message.partition(":")[0]
    after = plain(tmp_path / "fits", tmp_path / "fits.pt")["params"][path]["fp32"]
    index = [int(i) for i in (after == -70000.0).nonzero()[0]]
    assert f"-70000.0 at {index}" in found.message and not (tmp_path / "over").exists()
    assert found.labels[0].where.endswith("[7]") and "zero_pp_rank_0" in found.labels[0].file


def test_what_zero3_rounds_itself_is_reported_and_not_looked_at() -> None:
    for call, is_said in (
        ("zero3(dp=2, fp16=1)", True),
        ("zero3(dp=2, bf16=1)", False),
        ("zero2(dp=2, fp16=1)", False),
    ):
        made = ucpl.plan(str(FIXTURES / "z1_dp4"), call)
        assert any("beyond 65504" in text for text in made.derived) == is_said


def test_what_has_no_master_is_rounded_itself_and_named(tmp_path: Path) -> None:
    """A frozen parameter.

    Its buffer stays as it is, as DeepSpeed leaves it.
    """
    made = ucpl.plan(str(FIXTURES / "z2_dp3_frozen"), "zero2(dp=2, bf16=1)")
    assert "training in bf16: the source trains in f32" in made.derived
    alone = [text for text in made.derived if "no master" in text]
    assert alone == ["weight of `wpe.weight` is rounded to nearest even, f32 to bf16: no master of it is read"]
    assert any(text.startswith("weight of 25 tensors is derived from fp32") for text in made.derived)


def test_of_the_source_s_own_dtype_nothing_is_reported() -> None:
    for name, to in (("z1_dp4", "zero1(dp=2, bf16=0, fp16=0)"), ("z1_dp2_bf16", "zero1(dp=3, bf16=1)")):
        made = ucpl.plan(str(FIXTURES / name), to)
        assert not any("training" in text or "derived" in text for text in made.derived)


def test_an_option_of_bf16_is_not_taken_over() -> None:
    """BF16_Optimizer is bf16 training's.

    `grad_accum_dtype` creates it again on the way back.
    """
    name = str(FIXTURES / "z1_dp2_bf16opt")
    made = ucpl.plan(name, "zero1(dp=3, bf16=0)")
    assert "bf16_optimizer = 0" in made.target_call
    assert "fp16 = 1" in ucpl.plan(name, "zero1(dp=3, fp16=1)").target_call


def test_grad_accum_dtype_makes_bf16_optimizer_on_the_way_back(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "z1_dp2_bf16opt", tmp_path / "x", to="zero1(dp=3, bf16=0)")
    made = ucpl.plan(str(tmp_path / "x"), "zero1(dp=2, bf16=1)")
    assert "bf16_optimizer = 1" in made.target_call
    said = {o.name: o.origin for o in made.origins}
    assert "grad_accum_dtype" in said["bf16_optimizer"]


# ---- loss scaling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_scaled_in_fp16_and_nowhere_else(stage: int, tmp_path: Path) -> None:
    """As DeepSpeed begins: dynamic, 2 ** 16, hysteresis 2.

    A fixed scale of another dtype would never move.
    """
    made = ucpl.convert(FIXTURES / "z1_dp2_bf16", tmp_path / "x", to=f"zero{stage}(dp=2, fp16=1)").plan
    assert "loss_scaler is new, for fp16 training: dynamic, from 65536 (DeepSpeed's defaults)" in made.derived
    name, state, blobs = scaler_of(tmp_path / "x")
    assert name == "DynamicLossScaler"
    wanted = {"cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
    wanted |= {"min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 2, "dynamic": True}
    assert {key: state[key] for key in wanted} == wanted
    assert blobs["dynamic_loss_scale"] is True and blobs["overflow"] is False
    back = ucpl.convert(tmp_path / "x", tmp_path / "y", to=f"zero{stage}(dp=2, bf16=1)").plan
    assert "loss_scaler of fp16 training is left out: losses are not scaled" in back.derived
    name, state, blobs = scaler_of(tmp_path / "y")
    assert name == "LossScaler" and state == {"cur_scale": 1.0, "dynamic": False}
    assert blobs["dynamic_loss_scale"] is False


def test_zero0_keeps_numbers_instead_of_an_object(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "z1_dp2_bf16", tmp_path / "x", to="zero0(dp=2, fp16=1)")
    held = model_states(tmp_path / "x")["optimizer"]
    assert held["dynamic_loss_scale"] is True and held["cur_scale"] == 65536 and held["cur_iter"] == 0
    assert held["last_overflow_iter"] == -1 and held["scale_factor"] == 2.0 and held["scale_window"] == 1000
    ucpl.convert(tmp_path / "x", tmp_path / "y", to="zero0(dp=2, bf16=1)")
    held = model_states(tmp_path / "y")["optimizer"]
    assert held["dynamic_loss_scale"] is False and held["cur_scale"] == 1.0 and "scale_window" not in held


# ---- wishes that are none, or two -------------------------------------------------------------------------------------------


def test_both_at_once() -> None:
    for name in ("z1_dp4", "z1_dp2_bf16"):
        assert refused(FIXTURES / name, "zero1(dp=2, bf16=1, fp16=1)") == "E188"


def test_a_universal_source(tmp_path: Path) -> None:
    before = plain(UNIVERSAL, tmp_path / "a.pt")
    ucpl.convert(UNIVERSAL, tmp_path / "x", to="zero1(dp=2, bf16=1)")
    after = plain(tmp_path / "x", tmp_path / "b.pt")
    for path, states in before["params"].items():
        assert same(after["params"][path]["weight"], states["fp32"].to(torch.bfloat16)), path
        assert same(after["params"][path]["exp_avg"], states["exp_avg"]), path


def test_a_plain_file_keeps_how_its_source_trained(tmp_path: Path) -> None:
    truth = plain(FIXTURES / "z1_dp4", tmp_path / "a.pt")["params"]
    ucpl.convert(tmp_path / "a.pt", tmp_path / "x", to="zero1(dp=2, bf16=1)")
    weights = {path: states["fp32"].to(torch.bfloat16) for path, states in truth.items()}
    assert all(same(model_states(tmp_path / "x")["module"][path], w) for path, w in weights.items())
    assert not ucpl.plan(str(tmp_path / "a.pt"), "zero1(dp=2, bf16=0)").derived


@pytest.mark.parametrize(
    ("dtype", "to", "now"),
    [
        (torch.float32, "zero1(dp=2, bf16=1)", torch.bfloat16),
        (torch.float32, "zero1(dp=2, fp16=1)", torch.float16),
        (torch.float32, "zero1(dp=2, bf16=0)", torch.float32),
        (torch.float32, "zero1(dp=2)", torch.float32),
        (torch.bfloat16, "zero1(dp=2, bf16=1)", torch.bfloat16),
        (torch.bfloat16, "zero1(dp=2, bf16=0)", torch.float32),
        (torch.bfloat16, "zero1(dp=2, fp16=1)", torch.float16),
        (torch.float16, "zero1(dp=2, fp16=1)", torch.float16),
        (torch.float16, "zero1(dp=2, bf16=1)", torch.bfloat16),
    ],
)
def test_weights_alone(dtype: torch.dtype, to: str, now: torch.dtype, tmp_path: Path) -> None:
    """A folder of weights has no settings.

    Each weight that is not of the dtype asked for is cast, and the plan names it.
    """
    weights = {"a": torch.randn(40, dtype=torch.float64).to(dtype), "b": torch.arange(15.0).reshape(3, 5).to(dtype) / 7}
    save_file(weights, folder(tmp_path) / "model.safetensors")
    made = ucpl.convert(tmp_path / "w", tmp_path / "x", to=to).plan
    assert bool([text for text in made.derived if "`a`, `b`" in text]) == (dtype != now)
    stored = model_states(tmp_path / "x")["module"]
    assert all(same(stored[name], value.to(now)) for name, value in weights.items())


def test_masters_of_weights_alone_are_made_of_what_is_stored(tmp_path: Path) -> None:
    """`fill state fp32 = weight`: in full, though the target's weights are rounded."""
    weights = {"a": torch.randn(40), "b": torch.randn(3, 5)}
    save_file(weights, folder(tmp_path) / "model.safetensors")
    ucpl.convert(tmp_path / "w", tmp_path / "x", to="zero2(dp=2, bf16=1)", fill=["fp32=weight", "exp_avg=0"])
    after = plain(tmp_path / "x", tmp_path / "b.pt")["params"]
    for name, value in weights.items():
        assert same(after[name]["fp32"], value) and same(after[name]["weight"], value.to(torch.bfloat16))


def test_of_weights_alone_one_of_another_dtype_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(3)}, folder(tmp_path) / "model.safetensors")
    done = command("plan", "--from", tmp_path / "w", "--to", "zero1(dp=2, bf16=1)")
    assert done.status == 0 and "weight of `b` is rounded" in done.out + done.err and "`a`" not in done.out + done.err


def test_safetensors_of_another_dtype_s_run(tmp_path: Path) -> None:
    """A format that knows no training changes none.

    The weights are the source's.
    """
    ucpl.convert(FIXTURES / "z1_dp2_bf16", tmp_path / "x", to="safetensors()")
    (file,) = (tmp_path / "x").glob("*.safetensors")
    assert {t.dtype for n, t in load_file(file).items() if n != "calls"} == {torch.bfloat16}


def test_what_is_reported_of_states_that_the_target_makes_of_others() -> None:
    """Masters made later of bf16 weights are not those of the run.

    Nothing claims that they are.
    """
    plans = {to: ucpl.plan(str(FIXTURES / "z1_dp2_bf16"), to).dropped for to in ("safetensors()", "zero3(dp=2)")}
    masters = [text for text in plans["safetensors()"] if text.startswith("fp32 of ")]
    assert masters and {text.partition(": ")[2] for text in masters} == {
        "the target stores no fp32; a copy that is made of its weights later has their precision"
    }
    assert "weight of wte.weight: the target stores no weight, and makes it of fp32" in plans["zero3(dp=2)"]


def test_specs_alone(tmp_path: Path) -> None:
    """Without a checkpoint the source's call gives its training dtype, for both."""
    (tmp_path / "m.ucpl").write_text(MODEL)
    model = f"{tmp_path}/m.ucpl:m"
    made = ucpl.plan("zero1(dp=4, bf16=1)", "zero1(dp=2)", model=model)
    assert "bf16 = 1" in made.target_call and ("bf16", "the source's layout") in {
        (o.name, o.origin) for o in made.origins
    }
    made = ucpl.plan("zero1(dp=4, bf16=1)", "zero1(dp=2, bf16=0)", model=model)
    assert "training in f32: the source trains in bf16" in made.derived
    assert {t.dtype for t in made.targets} == {"f32"}
    assert ucpl.plan("zero1(dp=4, fp16=1)", "zero3(dp=2, bf16=1)", model=model).derived


def test_a_layout_that_extends_a_shipped_one_wishes_it_too(tmp_path: Path) -> None:
    (tmp_path / "own.ucpl").write_text("ucpl 1\nlayout own(dp) of any extends zero1(dp = dp, bf16 = 1) {\n}\n")
    made = ucpl.plan(str(FIXTURES / "z1_dp4"), f"{tmp_path}/own.ucpl:own(dp=2)")
    assert "training in bf16: the source trains in f32" in made.derived
    assert {t.dtype for t in made.targets if "model_states" in t.file and t.key[-1] != "calls"} == {"bf16"}
    assert not ucpl.plan(str(FIXTURES / "z1_dp2_bf16"), f"{tmp_path}/own.ucpl:own(dp=2)").derived


OWN = """ucpl 1
model m {{
  w : 6 4{}
  group "0" = w
  state fp32, exp_avg : f32
}}
layout a(dp) of m extends zero1(dp = dp{}) {{
}}
"""


@pytest.mark.parametrize(("dtype", "good"), [(" dtype bf16", True), (" dtype f32", False), ("", False)])
def test_a_target_of_a_named_model_says_its_dtypes_itself(dtype: str, good: bool, tmp_path: Path) -> None:
    (tmp_path / "a.ucpl").write_text(OWN.format(" dtype f32", ""))
    (tmp_path / "b.ucpl").write_text(OWN.format(dtype, ", bf16 = 1"))
    sides = f"{tmp_path}/a.ucpl:a(dp=4)", f"{tmp_path}/b.ucpl:a(dp=2)"
    if good:
        assert ucpl.plan(*sides).derived
    else:
        assert refused(*sides) == "E187"


def test_the_target_describes_itself_in_its_new_dtype(tmp_path: Path) -> None:
    """Its own layout file: the next conversion reads it, and continues."""
    ucpl.convert(FIXTURES / "z2_dp3_frozen", tmp_path / "x", to="zero2(dp=2, bf16=1)")
    text = (tmp_path / "x" / "ucpl" / "layout.ucpl").read_text()
    assert "dtype bf16" in text and "state fp32" in text.replace("state exp_avg, exp_avg_sq, fp32", "state fp32")
    said = json.loads((tmp_path / "x" / "ucpl" / "manifest.json").read_text())["derived"]
    assert any("training in bf16" in line for line in said)
    assert ucpl.verify(tmp_path / "x")


def test_frozen_ones_that_are_trained_from_here_on_begin_with_all_that_was_stored(tmp_path: Path) -> None:
    """Their masters are the f32 weights, from which new weights are rounded.

    Those of frozen parameters are rounded from masters.
    """
    name = FIXTURES / "z2_dp3_frozen"
    frozen = torch.load(name / "truth.pt", weights_only=True)["params"]["wpe.weight"]["frozen"]
    ucpl.convert(name, tmp_path / "x", to="zero2(dp=2, bf16=1)", train=["wpe.weight"], freeze=["ln_f.weight"])
    after = plain(tmp_path / "x", tmp_path / "b.pt")["params"]
    assert same(after["wpe.weight"]["fp32"], frozen) and same(after["wpe.weight"]["weight"], frozen.bfloat16())
    assert list(after["ln_f.weight"]) == ["weight"] and after["ln_f.weight"]["weight"].dtype == torch.bfloat16


def test_a_text_of_bf16_optimizer_fixes_what_its_lines_were_chosen_by(tmp_path: Path) -> None:
    """Its buffers are padded.

    A source of ZeRO-2, which says `bf16_optimizer = 0`, does not make it another's.
    """
    text = tmp_path / "home.ucpl"
    text.write_text(ucpl.infer(FIXTURES / "z1_dp2_bf16opt").text())
    ucpl.convert(FIXTURES / "z1_dp2_bf16opt", tmp_path / "a", to="zero2(dp=1)")
    ucpl.convert(tmp_path / "a", tmp_path / "b", to=f"{text}:stored(dp=4)")
    there, here = plain(tmp_path / "b", tmp_path / "b.pt")["params"], held("z1_dp2_bf16opt")["params"]
    assert there.keys() == here.keys()
    assert all(same(there[path][state], here[path][state]) for path in here for state in ("weight", "fp32", "exp_avg"))
    with pytest.raises(ucpl.UcplError, match="E117: `stored` has no parameter `bf16_optimizer`") as e:
        ucpl.convert(tmp_path / "a", tmp_path / "c", to=f"{text}:stored(dp=4, bf16_optimizer=0)")
    assert "fixes it with `let bf16_optimizer" in e.value.diagnostics[0].remedy
