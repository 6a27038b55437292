"""Real DeepSpeed checkpoints through every verb, compared with the gathered training state."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.command import CHECKPOINTS, FIXTURES, digest, good, ucpl

WITH_TRUTH = [name for name in CHECKPOINTS if (FIXTURES / name / "truth.pt").exists()]
DEGREES = (1, 2, 3, 5)
# Of each checkpoint every stage, and every stage at every degree: `make walk` takes any of all three.
INTO = [
    pytest.param(name, f"zero{stage}(dp={dp})", dp, id=f"{name}-zero{stage}-dp{dp}")
    for i, name in enumerate(CHECKPOINTS)
    for stage in (1, 2, 3)
    for dp in [DEGREES[(i + stage) % len(DEGREES)]]
]


def plain_of(source: Path, target: Path) -> dict[str, Any]:
    good("convert", source, target, "--to", "plain()")
    value = torch.load(target, weights_only=True)
    assert isinstance(value, dict)
    return value


@cache
def plain_bytes(source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        plain_of(source, Path(scratch) / "plain.pt")
        return (Path(scratch) / "plain.pt").read_bytes()


def plain_to_change(source: Path) -> dict[str, Any]:
    """The result of `plain_of` for an unchanged checkpoint, made once."""
    value: dict[str, Any] = torch.load(io.BytesIO(plain_bytes(source)), weights_only=True)
    return value


def number(text: str) -> float:
    """The value in `3.0 (bits 40400000)`."""
    return float(text.split()[0])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, with dtype and shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.contiguous().reshape(-1).view(torch.uint8).numpy() for t in (a, b))
    return np.array_equal(x, y)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_is_inspected_inferred_checked_and_verified(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name
    before = digest(source)
    facts = good("inspect", source, "--json").json
    assert facts["framework"] == "deepspeed" and facts["version"] == "0.19.8"
    assert facts["mesh"]["dp"] == int(name.partition("_dp")[2][0])
    assert facts["settings"]["stage"]["value"] == int(name[1])
    assert facts["aliases"] == {"lm_head.weight": "wte.weight"}
    assert facts["buffers"] == ["calls"] and facts["unknown_globals"] == []
    assert len(facts["groups"]) == 2 and facts["groups"][0]["hyper"]["lr"] == 0.01 / 1.3
    inferred = tmp_path / "inferred.ucpl"
    good("infer", source, "-o", inferred)
    good("check", inferred)
    good("fmt", "--check", inferred)
    sound = good("verify", source, "--json").json
    assert sound["sound"] and sound["bytes_protected"] > 0.8 * (sound["bytes_unprotected"] + sound["bytes_protected"])
    assert sound["elements_of_copies"] >= 67 * 24 or name.startswith("z3")  # the tied head
    assert digest(source) == before


@pytest.mark.fault(
    "Against an oracle or the truth",
    "each folder of DeepSpeed into one plain file",
    "equal to the state of the running engine, bit for bit",
)
@pytest.mark.parametrize("name", WITH_TRUTH)
def test_plain_is_the_truth_bit_for_bit(name: str, tmp_path: Path) -> None:
    truth = torch.load(FIXTURES / name / "truth.pt", weights_only=True)
    plain = plain_of(FIXTURES / name, tmp_path / "plain.pt")
    extra = truth["extra"]
    assert set(plain["params"]) == set(truth["params"])
    compared = 0
    for path, states in truth["params"].items():
        ours = plain["params"][path]
        for state, value in states.items():
            if state == "frozen":
                assert same(ours["weight"], value) and set(ours) == {"weight"}, path
            else:
                assert same(ours[state], value), (path, state)
            compared += 1
        if "fp32" in states:
            assert same(ours["weight"], ours["fp32"].to(ours["weight"].dtype)), path
            assert set(ours) - {"weight", "step"} == set(states), path
    assert compared == sum(map(len, truth["params"].values())) > 60 or "sgdm" in name
    assert plain["aliases"] == {"lm_head.weight": "wte.weight"}
    assert set(plain["buffers"]) == {"calls"} and same(plain["buffers"]["calls"], extra["calls"])
    assert [g["lr"] for g in plain["groups"]] == extra["lr"]
    if "elastic" not in name:  # DeepSpeed's elastic form keeps only the hyper-parameters of its schedule
        assert [g["weight_decay"] for g in plain["groups"]] == extra["wd"]
    assert plain["scalars"]["global_steps"] == extra["global_steps"] == 3
    steps = {float(states["step"]) for states in plain["params"].values() if "step" in states}
    assert steps == {step for step in extra["steps"] if step >= 0}


def test_plain_of_one_file_is_that_file(tmp_path: Path) -> None:
    """ZeRO-0 keeps everything in one file.

    Weights by name, optimizer state by number, masters by group.
    """
    (file,) = (FIXTURES / "z0_dp2_bf16").glob("*/mp_rank_00_model_states.pt")
    stored = torch.load(file, weights_only=False)
    plain = plain_of(FIXTURES / "z0_dp2_bf16", tmp_path / "plain.pt")
    module, optimizer = stored["module"], stored["optimizer"]
    named = {**{p: v["weight"] for p, v in plain["params"].items()}, **plain["buffers"]}
    for name, value in module.items():
        assert same(named[plain["aliases"].get(name, name)], value), name
    number = 0
    inner = optimizer["optimizer_state_dict"]
    for group, masters in zip(plain["groups"], optimizer["fp32_groups"], strict=True):
        for path, master in zip(group["params"], masters, strict=True):
            assert same(plain["params"][path]["fp32"], master.detach()), path
            for state in ("exp_avg", "exp_avg_sq"):
                assert same(plain["params"][path][state], inner["state"][number][state]), (path, state)
            number += 1
    assert number == len(plain["params"]) == 26


@pytest.mark.fault(
    "Against an oracle or the truth", "each folder to other degrees and stages", "`compare` prints equal"
)
@pytest.mark.parametrize(("name", "layout", "dp"), INTO)
def test_any_degree_and_stage_holds_the_same_state(name: str, layout: str, dp: int, tmp_path: Path) -> None:
    target = tmp_path / "converted"
    report = good("convert", FIXTURES / name, target, "--to", layout, "--json").json["report"]
    assert report["bytes_read"] <= 1.02 * report["bytes_needed"]
    assert report["bytes_read_back"] == report["bytes_target"]
    found = good("compare", FIXTURES / name, target, "--json").json
    assert found["equal"] and found["tensors"] == 27 and found["elements"] > 30_000
    step = target / (target / "latest").read_text()
    optim = len(list(step.glob("*_optim_states.pt")))
    assert optim == dp
    assert (target / "ucpl" / "layout.ucpl").is_file() and (target / "ucpl" / "manifest.json").is_file()


@pytest.mark.fault(
    "Against an oracle or the truth", "through three other layouts and back", "equal to the state of the running engine"
)
@pytest.mark.parametrize("name", ["z1_dp4", "z3_dp2_subgroup", "z2_dp2_roundrobin"])
def test_through_three_others_and_back_is_the_truth(name: str, tmp_path: Path) -> None:
    here = FIXTURES / name
    for i, layout in enumerate(("zero3(dp=3)", "zero1(dp=5)", "zero2(dp=1)")):
        there = tmp_path / str(i)
        good("convert", here, there, "--to", layout)
        here = there
    plain = plain_of(here, tmp_path / "plain.pt")
    truth = torch.load(FIXTURES / name / "truth.pt", weights_only=True)
    for path, states in truth["params"].items():
        for state, value in states.items():
            assert same(plain["params"][path][state], value), (path, state)


CHANGED = {"exp_avg": ("blocks.1.mlp.down.weight", 23, 36), "exp_avg_sq": ("mix", 0, 0), "fp32": ("wte.weight", 41, 7)}


@pytest.mark.fault("Against an oracle or the truth", "one changed value", "tensor, state and index are named")
@pytest.mark.parametrize("layout", ["zero1(dp=3)", "zero2(dp=5)", "zero3(dp=2)", "plain()"])
def test_each_changed_value_is_named(layout: str, tmp_path: Path) -> None:
    """Torch makes the changes in a plain file.

    No placement of ours affects their place.
    """
    source = FIXTURES / "z1_dp2_bf16"
    plain = plain_to_change(source)
    for state, (tensor, *index) in CHANGED.items():
        plain["params"][tensor][state][tuple(index)] += 1
    torch.save(plain, tmp_path / "changed.pt")
    good("convert", tmp_path / "changed.pt", tmp_path / "changed", "--to", layout)
    done = ucpl("compare", source, tmp_path / "changed", "--json")
    text = ucpl("compare", tmp_path / "changed", source)
    assert done.status == text.status == 1
    differences = done.json["differences"]
    for state, (tensor, *index) in CHANGED.items():
        (found,) = (d for d in differences if d["state"] == state)
        assert found["name"] == tensor and found["kind"] == "value"
        assert found["element"] == f"{tensor}{index}"
        now = float(plain["params"][tensor][state][tuple(index)])
        assert number(found["b"]) == pytest.approx(now, rel=1e-6) and number(found["a"]) != number(found["b"])
        assert f"{state} of {tensor}{index}" in text.out
    assert {d["state"] for d in differences} <= {*CHANGED, "weight"}


@pytest.mark.fault("Against an oracle or the truth", "one changed value that is no tensor", "named")
@pytest.mark.parametrize(
    "what", ["lr", "weight_decay", "step", "lr_scheduler", "global_steps", "client_state", "rng", "buffer"]
)
def test_a_changed_value_next_to_tensors_is_named(what: str, tmp_path: Path) -> None:
    source = FIXTURES / "z1_dp4"
    plain = plain_to_change(source)
    carried = plain["envelope"]["carried"]
    match what:
        case "lr" | "weight_decay":
            plain["groups"][1][what] += 0.5
        case "step":
            plain["params"]["mix"]["step"] = torch.tensor(4.0)
        case "lr_scheduler":
            plain["envelope"]["blobs"]["lr_scheduler"]["last_epoch"] = 9
        case "global_steps":
            plain["scalars"]["global_steps"] = 4
        case "client_state":
            carried["foo"] = "baz"
        case "rng":
            carried["rng"][17] ^= 1
        case "buffer":
            plain["buffers"]["calls"][1] = 0
    torch.save(plain, tmp_path / "changed.pt")
    done = ucpl("compare", source, tmp_path / "changed.pt", "--json")
    assert done.status == 1, done.out
    (found,) = done.json["differences"]
    named = {
        "lr": "group 1.lr",
        "weight_decay": "group 1.weight_decay",
        "step": "step.mix",
        "lr_scheduler": "lr_scheduler.last_epoch",
        "global_steps": "global_steps",
        "client_state": "client_state.foo",
        "rng": "client_state.rng[17]",
        "buffer": "calls",
    }
    assert found["name"] == named[what]
    if what == "buffer":
        assert found["element"] == "calls[1]" and (number(found["a"]), number(found["b"])) == (3.0, 0.0)


def test_a_missing_tensor_state_and_key_are_named(tmp_path: Path) -> None:
    source = FIXTURES / "z1_dp4"
    plain = plain_to_change(source)
    del plain["params"]["ln_f.bias"]
    plain["groups"][1]["params"].remove("ln_f.bias")
    for states in plain["params"].values():
        del states["exp_avg_sq"]
    del plain["envelope"]["carried"]["foo"]
    torch.save(plain, tmp_path / "less.pt")
    done = ucpl("compare", source, tmp_path / "less.pt", "--json")
    assert done.status == 1
    found = {(d["kind"], d["name"], d["state"]) for d in done.json["differences"]}
    assert ("tensor", "ln_f.bias", "") in found
    assert ("tensor", "mix", "exp_avg_sq") in found
    assert ("carried", "client_state.foo", "") in found


@pytest.mark.fault("Against an oracle or the truth", "little memory, every verb", "buffers within the budget")
def test_memory_bounds_the_buffers_of_every_verb(tmp_path: Path) -> None:
    source = FIXTURES / "z1_dp4"
    for verb in (
        ("verify", source),
        ("compare", source, source),
        ("convert", source, tmp_path / "a", "--to", "zero3(dp=3)"),
    ):
        done = good(*verb, "--memory", "1M", "--workers", "1", "--json").json
        live = done["report"]["bytes_live_max"] if "report" in done else done["bytes_live_max"]
        assert 0 < live <= 1 << 20, verb
