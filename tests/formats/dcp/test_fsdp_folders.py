"""FSDP's model and optimizer folders of Accelerate are one checkpoint.

Two ranks wrote them. The truth was gathered by the run itself; targets are loaded by torch.distributed.checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.files.refusals import refusal
from tests.gathered import plain_of
from ucpl.api import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate"
STATE = FIXTURES / "fsdp"
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def truth() -> dict[str, Any]:
    found: dict[str, Any] = torch.load(FIXTURES / "fsdp.truth.pt", weights_only=True)
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(STATE, tmp_path / "state")


def test_both_folders_are_one_checkpoint() -> None:
    found, expected = plain_of(STATE), truth()
    every = {**found["params"], **{name: {"weight": t} for name, t in found.get("buffers", {}).items()}}
    assert every.keys() == expected["model"].keys()
    for name, weight in expected["model"].items():
        assert torch.equal(every[name]["weight"], weight), name
    for name, states in expected["optimizer"]["state"].items():
        for kind, value in states.items():
            assert torch.equal(torch.as_tensor(every[name][kind], dtype=value.dtype), value), (name, kind)
    opened = open_checkpoint(STATE)
    assert [group.hyper["lr"] for group in opened.state.groups] == [
        group["lr"] for group in expected["optimizer"]["param_groups"]
    ]
    assert opened.container is not None and opened.container.kind.name == "accelerate"


def test_a_target_is_two_folders_that_torch_loads(tmp_path: Path) -> None:
    ucpl.convert(STATE, tmp_path / "on3", "dcp(fsdp = 3)")
    expected = truth()
    weights = {"model": {name: torch.zeros_like(weight) for name, weight in expected["model"].items()}}
    load(weights, storage_reader=FileSystemReader(tmp_path / "on3" / MODEL), no_dist=True)
    moments: dict[str, Any] = {
        name: {kind: torch.zeros_like(value) for kind, value in states.items()}
        for name, states in expected["optimizer"]["state"].items()
    }
    load({"optimizer": {"state": moments}}, storage_reader=FileSystemReader(tmp_path / "on3" / OPTIMIZER), no_dist=True)
    for name, weight in expected["model"].items():
        assert torch.equal(weights["model"][name], weight), name
    for name, states in expected["optimizer"]["state"].items():
        assert all(torch.equal(moments[name][kind], value) for kind, value in states.items()), name
    assert not (tmp_path / "on3" / ".metadata").exists()
    assert sorted(file.name for file in (tmp_path / "on3").glob("*.*")) == [
        "random_states_0.pkl", "random_states_1.pkl", "random_states_2.pkl", "scheduler.bin",
    ]  # fmt: skip
    kept = (tmp_path / "on3" / "random_states_2.pkl").read_bytes()
    assert kept == (STATE / "random_states_0.pkl").read_bytes(), "a new rank begins with that of rank 0"


def test_there_and_back_is_equal(tmp_path: Path) -> None:
    ucpl.convert(STATE, tmp_path / "on5", "dcp(fsdp = 5)")
    ucpl.convert(tmp_path / "on5", tmp_path / "on2", "dcp(fsdp = 2)")
    for one in ("on5", "on2"):
        assert ucpl.compare(STATE, tmp_path / one)
        assert ucpl.verify(tmp_path / one)


def test_an_engine_of_the_same_loop_has_the_folder_too(tmp_path: Path) -> None:
    ucpl.convert(STATE, tmp_path / "zero", "zero1(dp = 2)")
    assert ucpl.compare(STATE, tmp_path / "zero")
    assert (tmp_path / "zero" / "scheduler.bin").exists() and (tmp_path / "zero" / "pytorch_model").is_dir()
    ucpl.convert(STATE, tmp_path / "file.pt", "plain()")
    assert ucpl.compare(STATE, tmp_path / "file.pt")


def test_a_trainer_s_folder_is_one_again(state: Path, tmp_path: Path) -> None:
    (state / "trainer_state.json").write_text('{"global_step": 3}')
    for rank in (0, 1):
        (state / f"random_states_{rank}.pkl").rename(state / f"rng_state_{rank}.pth")
    (state / "scheduler.bin").rename(state / "scheduler.pt")
    ucpl.convert(state, tmp_path / "on3", "dcp(fsdp = 3)")
    opened = open_checkpoint(tmp_path / "on3")
    assert opened.container is not None and opened.container.kind.name == "trainer"
    there = {file.name for file in (tmp_path / "on3").iterdir()}
    assert there >= {MODEL, OPTIMIZER, "trainer_state.json", "rng_state_2.pth", "scheduler.pt"}
    assert ucpl.compare(state, tmp_path / "on3")


def test_folders_without_a_run_around_them_stay_two(state: Path, tmp_path: Path) -> None:
    for file in state.glob("*.*"):
        file.unlink()
    ucpl.convert(state, tmp_path / "on3", "dcp(fsdp = 3)")
    assert (tmp_path / "on3" / OPTIMIZER / ".metadata").is_file() and ucpl.compare(state, tmp_path / "on3")


def test_weights_alone_are_read_without_an_optimizer(state: Path, tmp_path: Path) -> None:
    shutil.rmtree(state / OPTIMIZER)
    ucpl.convert(state, tmp_path / "on3", "dcp(fsdp = 3)")
    assert not (tmp_path / "on3" / OPTIMIZER).exists()
    found = plain_of(tmp_path / "on3")["params"]
    assert (
        torch.equal(found["up.weight"]["weight"], truth()["model"]["up.weight"]) and "exp_avg" not in found["up.weight"]
    )


def test_several_models_are_refused_by_their_folders(state: Path) -> None:
    shutil.copytree(state / MODEL, state / "pytorch_model_fsdp_1")
    found = refusal(lambda: open_checkpoint(state), "E487")
    assert "pytorch_model_fsdp_1" in found.message and str(state / MODEL) in found.remedy


def test_a_name_that_both_have_is_refused(state: Path) -> None:
    shutil.rmtree(state / OPTIMIZER)
    shutil.copytree(state / MODEL, state / OPTIMIZER)
    found = refusal(lambda: open_checkpoint(state), "E520")
    assert MODEL in found.message and [label.file for label in found.labels] == [
        str(state / folder / ".metadata") for folder in (MODEL, OPTIMIZER)
    ]


def test_faults_are_reported_at_the_folder_s_own_metadata(state: Path) -> None:
    """A missing file of the optimizer's chunks is reported with its description."""
    (state / OPTIMIZER / "__1_0.distcp").unlink()
    found = refusal(lambda: open_checkpoint(state), "E452")
    assert str(state / OPTIMIZER / "__1_0.distcp") in str(found.labels)


@pytest.mark.parametrize("names", ['prefix = ""', 'states = "optim.state."', "flat = 1"])
def test_names_that_nobody_looks_for_are_refused_before_writing(names: str, tmp_path: Path) -> None:
    found = refusal(lambda: ucpl.convert(STATE, tmp_path / "out", f"dcp(fsdp = 2, {names})"), "E486")
    assert "Accelerate looks for" in found.message and not (tmp_path / "out").exists()


# ---- `model` and `optimizer`, with dicts of two levels in each ----------------------------------------------------------

WEIGHTS = {"model.embed.weight": (7, 4), "model.mlp.weight": (4, 6), "model.norm.weight": (4,)}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step's folder as slime saves it."""
    made = {name: torch.arange(float(torch.Size(shape).numel())).view(shape) for name, shape in WEIGHTS.items()}
    states = {name: {"step": torch.tensor(3.0), "exp_avg": t + 1, "exp_avg_sq": t + 2} for name, t in made.items()}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(made)}]
    top = tmp_path / "iter_0000003"
    for name, held in {
        "model": {"model_state": {"model": made}},
        "optimizer": {"optim_state": {"optim": {"state": states, "param_groups": groups}}},
        "lr_scheduler": {"lr_scheduler_state": {"last_epoch": 3}},
    }.items():
        save(held, checkpoint_id=top / name, no_dist=True)
    torch.save({"torch": torch.get_rng_state()}, top / "rng.pt")
    return top


def test_folders_called_model_and_optimizer_are_one_checkpoint(step: Path) -> None:
    opened, found = open_checkpoint(step), plain_of(step)
    assert opened.state.settings["prefix"].value == "model_state.model."
    assert opened.state.carried["lr_scheduler_state"] == {"last_epoch": 3}
    assert {name: found["params"][name]["exp_avg"].shape for name in WEIGHTS} == WEIGHTS
    assert all(torch.equal(p["weight"] + 1, p["exp_avg"]) for p in found["params"].values())
    account = ucpl.plan(str(step), "dcp(fsdp=2)").account
    assert account is not None
    assert [name for e in account.of("not read") for name in e.names] == ["rng.pt"]


def test_the_optimizer_s_folder_alone_names_the_folder_of_both(step: Path) -> None:
    error = refusal(lambda: open_checkpoint(step / "optimizer"), "E524")
    assert str(step) in error.remedy
    error = refusal(lambda: open_checkpoint(step.parent), "E435")
    assert error.remedy.endswith("iter_0000003")


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("model_state.", {f"model.{name}" for name in WEIGHTS}),
        ("model_state.model.", set(WEIGHTS)),
        ("model_state.model.model.", {name.removeprefix("model.") for name in WEIGHTS}),
    ],
)
def test_a_prefix_of_a_call_is_no_part_of_names(prefix: str, names: set[str], step: Path, tmp_path: Path) -> None:
    how = f'dcp(prefix = "{prefix}")'
    ucpl.convert(step / "model", tmp_path / "made.pt", "plain()", layout=how, weights_alone=True)
    found = torch.load(tmp_path / "made.pt", weights_only=True)["params"]
    assert found.keys() == names
    ucpl.convert(step / "model", tmp_path / "dcp", "dcp(fsdp=2)", layout=how, weights_alone=True)
    assert ucpl.compare(step / "model", tmp_path / "dcp")


def test_a_prefix_that_names_lack_is_refused_with_one_that_they_have(step: Path, tmp_path: Path) -> None:
    for source, prefix in ((step / "model", "other."), (step, "model_state.")):
        how = f'dcp(prefix = "{prefix}")'
        with pytest.raises(ucpl.UcplError, match="E321") as caught:
            ucpl.convert(source, tmp_path / "made", "plain()", layout=how)
        error = caught.value.diagnostics[0]
        assert 'dcp(prefix = "model_state.model.' in error.remedy
