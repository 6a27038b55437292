"""One account of a source.

Each item is moved, derived, dropped by name or not read, an optimizer too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.cli.command import ucpl as command
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)

FIXTURES = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[1] / "fixtures"))
RUN = FIXTURES / "deepspeed" / "z1_dp2_bf16"
STATE = {"moments": {0: torch.ones(4, 3)}}  # a form of its own


def accounted(*argv: object) -> dict[tuple[str, str], Any]:
    done = command(*argv, "--json")
    assert done.status == 0, done.err
    made = json.loads(done.out)
    found = made["plan"]["account"]
    assert found["items"] == sum(found[fate] for fate in ("moved", "derived", "dropped", "not_read"))
    if made.get("report"):
        assert made["report"]["account"] == found
    return {(e["fate"], e["kind"]): e for e in found["entries"]}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of a model as `save_pretrained` writes them."""
    (tmp_path / "run").mkdir()
    save_file({"w": torch.ones(4, 3), "b": torch.ones(3)}, tmp_path / "run" / "model.safetensors")
    return tmp_path / "run"


def test_every_item_of_a_run_has_a_fate(tmp_path: Path) -> None:
    """26 parameters and a buffer with their states.

    `step` of 26, 12 values of the run, 2 of client_state, 2 groups, files.
    """
    found = accounted("convert", RUN, tmp_path / "model", "--to", "safetensors()")
    assert {key: e["count"] for key, e in found.items() if e["kind"].startswith("tensor")} == {
        ("moved", "tensor weight"): 27,
        ("dropped", "tensor fp32"): 26,
        ("dropped", "tensor exp_avg"): 26,
        ("dropped", "tensor exp_avg_sq"): 26,
    }
    assert sorted(found["dropped", "client_state"]["names"]) == ["foo", "rng"]
    assert found["dropped", "step"]["count"] == 26 and found["dropped", "group"]["names"] == ["0", "1"]
    assert "lr_scheduler" in found["dropped", "value"]["names"]
    found = accounted("plan", "--from", RUN, "--to", "zero1(dp=3)")
    assert not any(fate == "dropped" for fate, _ in found)


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin", "optimizer_0.bin", "optimizer_1.pt", "optim.pth"])
@pytest.mark.parametrize("target", ["zero1(dp=2)", "dcp(fsdp=2)", "plain()", "universal()"])
def test_a_run_taken_for_weights_is_refused(weights: Path, tmp_path: Path, name: str, target: str) -> None:
    """An optimizer of unknown form lies next to the weights."""
    torch.save(STATE, weights / name)
    done = command("convert", weights, tmp_path / "target", "--to", target)
    assert done.status == 3 and "E467" in done.err and name in done.err and "--weights-alone" in done.err
    assert not (tmp_path / "target").exists()
    assert command("plan", "--from", weights, "--to", target).status == 3
    found = accounted("convert", weights, tmp_path / "target", "--to", target, "--weights-alone")
    assert found["not read", "file"]["names"] == [name]


def test_an_export_of_weights_names_the_optimizer(weights: Path, tmp_path: Path) -> None:
    torch.save(STATE, weights / "optimizer.bin")
    for folder in ("optimizer", "empty"):
        (weights / folder).mkdir()
    (weights / "optimizer" / "0.bin").write_bytes(b"1")
    (weights / "optimizer_config.json").write_text("{}")
    done = command("convert", weights, tmp_path / "model", "--to", "safetensors()")
    assert done.status == 0 and "not read      optimizer/, optimizer.bin: its optimizer state" in done.out
    assert "not read      optimizer/, optimizer.bin: its" in command("inspect", weights).out
    assert "empty" not in done.out
    assert "not read: optimizer/, optimizer.bin: its" in command("verify", weights).out
    made = ucpl.convert(weights, tmp_path / "again", "safetensors()")
    assert made.report.account is not None and "optimizer.bin" in str(made)


@pytest.mark.parametrize(
    "name", ["optimizer/x.bin", "optimizer.pt", "training_state/optimizer_0/x.bin", "train/optim.pt"]
)
def test_an_optimizer_next_to_a_folder_of_weights_is_named(weights: Path, tmp_path: Path, name: str) -> None:
    """A run may keep `model/` and `optimizer/` as separate checkpoints."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"1")
    (tmp_path / "unlike" / "optimizer").mkdir(parents=True)
    text = f"../{name.removesuffix('x.bin')}"
    found = accounted("convert", weights, tmp_path / "target", "--to", "dcp(fsdp=2)")
    assert found["not read", "file"]["names"] == [text]
    assert accounted("plan", "--from", weights, "--to", "zero1(dp=2)")["not read", "file"]["names"] == [text]
    assert text in command("verify", weights).out and text in command("inspect", weights).out
    made = ucpl.convert(weights, tmp_path / "again", "plain()")
    assert text in str(made)


@pytest.mark.parametrize("name", ["training_state/optimizer_state.safetensors", "training_state/optimizer_0/x.bin"])
def test_a_step_whose_model_and_optimizer_are_apart_is_refused_with_both_named(tmp_path: Path, name: str) -> None:
    """As lerobot saves a step."""
    step = tmp_path / "checkpoints" / "000003"
    (step / "pretrained_model").mkdir(parents=True)
    (step / name).parent.mkdir(parents=True)
    save_file({"head.weight": torch.ones(2, 3)}, step / "pretrained_model" / "model.safetensors")
    save_file({"state/0/exp_avg": torch.ones(2, 3)}, step / name)
    for path in (step, step.parent):
        done = command("convert", path, tmp_path / "out", "--to", "zero1(dp=2)")
        near = step / "/".join(name.split("/")[:2])
        text = f"its model, {step / 'pretrained_model'}, and its optimizer, {near}, are apart: "
        text += "name the model" if near.suffix else f"{step / 'pretrained_model'}+{near} names both; --weights-alone"
        assert done.status == 3 and text in done.err.replace("\n", " "), done.err
    weights = step / "pretrained_model"
    assert command("convert", weights, tmp_path / "out", "--to", "zero1(dp=2)", "--weights-alone").status == 0


def test_the_remedy_for_chunks_next_to_a_model_of_safetensors_reads_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lerobot saves a step, with `last` as a link to it."""
    monkeypatch.chdir(tmp_path)
    model, chunks = Path("run/000003/pretrained_model"), Path("run/000003/training_state/optimizer_0")
    model.mkdir(parents=True)
    Path("run/last").symlink_to("000003")
    weights = {"policy.head.weight": torch.randn(2, 3), "policy.head.bias": torch.randn(2)}
    save_file(weights, model / "model.safetensors")
    states = {name: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(w)} for name, w in weights.items()}
    save({"optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": [*weights]}]}}, checkpoint_id=chunks)
    way = f"`ucpl convert {model} model-dcp --to dcp -D fsdp=1` makes a DCP folder of the model, and then model-dcp+{chunks}"
    for source in ("run", f"{model}+{chunks}"):
        done = command("convert", source, "made.pt", "--to", "plain()")
        assert done.status == 3 and way in done.err.replace("\n", " ")
    assert command("convert", model, "model-dcp", "--to", "dcp", "-D", "fsdp=1").status == 0
    assert command("convert", f"model-dcp+{chunks}", "made.pt", "--to", "plain()").status == 0
    made = torch.load("made.pt")["params"]
    for name, weight in weights.items():
        assert torch.equal(made[name]["weight"], weight) and torch.equal(made[name]["exp_avg"], states[name]["exp_avg"])


def test_an_optimizer_next_to_a_file_of_weights_is_named(weights: Path, tmp_path: Path) -> None:
    torch.save(STATE, weights / "optimizer.pt")
    found = accounted("convert", weights / "model.safetensors", tmp_path / "target", "--to", "zero1(dp=2)")
    assert found["not read", "file"]["names"] == ["optimizer.pt"]


def test_a_plan_keeps_its_account(tmp_path: Path) -> None:
    """Tensors are counted as it was planned.

    The rest as the source is when the plan is run.
    """
    shutil.copytree(RUN, tmp_path / "run")
    assert command("plan", "--from", tmp_path / "run", "--to", "safetensors()", "-o", tmp_path / "x.plan").status == 0
    kept = ucpl.load_plan(tmp_path / "x.plan").account
    assert kept is not None and kept == ucpl.plan(str(tmp_path / "run"), "safetensors()").account
    (tmp_path / "run" / "global_step3" / "notes.bin").write_bytes(b"1")
    (tmp_path / "run" / "late.txt").write_text("1")
    found = accounted("apply", tmp_path / "x.plan", tmp_path / "run", tmp_path / "model")
    assert {"late.txt", "global_step3/notes.bin"} <= {*found["not read", "file"]["names"]}


@pytest.fixture
def of_specs(tmp_path: Path) -> Path:
    """A plan that no checkpoint was there for."""
    (tmp_path / "m.ucpl").write_text("ucpl 1\nmodel m {\n  w : 4 3  dtype f32\n  b : 3  dtype f32\n}\n")
    model, plan = f"{tmp_path / 'm.ucpl'}:m", tmp_path / "of_specs.plan"
    done = command("plan", "--model", model, "--from", "safetensors()", "--to", "dcp(fsdp=2)", "-o", plan)
    assert done.status == 0, done.err
    return plan


def test_a_plan_of_specs_alone_meets_an_optimizer(weights: Path, of_specs: Path, tmp_path: Path) -> None:
    torch.save(STATE, weights / "optimizer.bin")
    done = command("apply", of_specs, weights, tmp_path / "target")
    assert done.status == 3 and "E467" in done.err and "optimizer.bin" in done.err and "ucpl plan" in done.err
    assert not (tmp_path / "target").exists()
    with pytest.raises(ucpl.UcplError, match="E467"):
        ucpl.apply(of_specs, weights, tmp_path / "target")


def test_a_plan_of_specs_alone_accounts_for_its_source(weights: Path, of_specs: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 3), "b": torch.ones(3), MARK: torch.ones(2)}, weights / "model.safetensors")
    (weights / "notes.bin").write_bytes(b"1")
    done = command("apply", of_specs, weights, tmp_path / "target")
    if done.status:  # a stored tensor that the plan does not know
        assert "E606" in done.err and MARK in done.err, done.err
        save_file({"w": torch.ones(4, 3), "b": torch.ones(3)}, weights / "model.safetensors")
    found = accounted("apply", of_specs, weights, tmp_path / "target", "--force")
    assert found["not read", "file"]["names"] == ["notes.bin"] and found["moved", "tensor stored"]["count"] == 2


def test_lines_are_few(tmp_path: Path) -> None:
    """`plan` says a line for each reason, and none for each tensor."""
    out = command("plan", "--from", RUN, "--to", "safetensors()").out.splitlines()
    assert len([line for line in out if line.startswith("dropped")]) == 4
    assert len(out) < 40


# ---- companions of a run ------------------------------------------------------------------------------------------------


def trainer(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "trainer" / "checkpoint-3", tmp_path / "checkpoint-3"))


def trainer_of_ddp(top: Path) -> Path:
    """A run of DDP, with random numbers of its first rank alone."""
    ucpl.convert(FIXTURES / "trainer" / "checkpoint-3", top / "ddp", "trainer(dp=2)")
    (top / "ddp" / "rng_state_1.pth").unlink()
    return top / "ddp"


def of_step_6(folder: Path, name: str) -> None:
    """A companion as the run would have saved it three steps later."""
    if name.endswith(".json"):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), "global_step": 6}))
        return
    held = torch.load(folder / name, weights_only=True)
    torch.save({**held, "last_epoch": 6, "_step_count": 7}, folder / name)


@pytest.mark.parametrize("name", ["trainer_state.json", "scheduler.pt"])
@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_a_companion_of_another_step_is_reported(tmp_path: Path, verb: str, name: str) -> None:
    folder = trainer(tmp_path)
    argv = {
        "plan": ("plan", "--from", folder, "--to", "zero1(dp=2)"),
        "convert": ("convert", folder, tmp_path / "target", "--to", "zero1(dp=2)"),
    }[verb]
    text = f"{name} is of step 6, the shards are of step 3"
    assert "is of step" not in command(*argv).out
    shutil.rmtree(tmp_path / "target", ignore_errors=True)
    of_step_6(folder, name)
    assert text in command(*argv).out
    shutil.rmtree(tmp_path / "target", ignore_errors=True)
    assert text in json.loads(command(*argv, "--json").out)["remarks"]
    assert text in command("inspect", folder).out


def test_accelerate_steps_a_schedule_once_a_rank(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "accelerate" / "state", tmp_path / "state"))
    held = torch.load(folder / "scheduler.bin", weights_only=True)
    for count, is_odd in ((2, False), (4, False), (3, True), (6, True)):
        torch.save({**held, "last_epoch": count}, folder / "scheduler.bin")
        assert ("scheduler.bin is of step" in command("plan", "--from", folder, "--to", "zero1(dp=2)").out) is is_odd


@pytest.mark.parametrize(("run", "rank", "name"), [
    ("trainer/checkpoint-3", 1, "rng_state_1.pth"),
    ("trainer/checkpoint-3", 0, "rng_state_0.pth"),
    ("accelerate/state", 1, "random_states_1.pkl"),
    ("accelerate/fsdp", 1, "random_states_1.pkl"),
])  # fmt: skip
def test_a_missing_file_of_a_rank_is_reported(tmp_path: Path, run: str, rank: int, name: str) -> None:
    folder = Path(shutil.copytree(FIXTURES / run, tmp_path / "run"))
    (folder / name).unlink()
    target = "zero1(dp=2)" if run != "accelerate/fsdp" else "dcp(fsdp=3)"
    done = command("plan", "--from", folder, "--to", target)
    assert f"{name} is missing: random numbers of rank {1 - rank} alone" in done.out, done.err + done.out


@pytest.mark.parametrize(("gone", "said"), [
    ("trainer_state.json", "trainer_state.json is missing: Trainer.train(resume_from_checkpoint=...) needs it"),
    ("rng_state_*.pth", "rng_state_0.pth is missing: random numbers begin anew"),
])  # fmt: skip
def test_what_a_resumed_run_looks_for_is_missed_by_conversions(tmp_path: Path, gone: str, said: str) -> None:
    folder = trainer(tmp_path)
    for path in folder.glob(gone):
        path.unlink()
    for argv in (("inspect", folder), ("plan", "--from", folder, "--to", "zero1(dp=2)")):
        assert said in command(*argv).out


@pytest.mark.parametrize(("run", "target"), [
    ("without_engine", "accelerate(dp=2)"), ("without_engine", "zero1(dp=2)"), ("fsdp", "dcp(fsdp=3)"),
])  # fmt: skip
def test_a_folder_of_accelerate_without_random_numbers_is_one(tmp_path: Path, run: str, target: str) -> None:
    """Other files of `save_state` are marks of its folders, too."""
    folder = Path(shutil.copytree(FIXTURES / "accelerate" / run, tmp_path / "run"))
    for path in folder.glob("random_states_*.pkl"):
        path.unlink()
    done = ucpl.convert(folder, tmp_path / "target", target)
    assert "random_states_0.pkl is missing: random numbers begin anew" in done.report.remarks
    assert (tmp_path / "target" / "scheduler.bin").read_bytes() == (folder / "scheduler.bin").read_bytes()


@pytest.mark.parametrize("of", ["trainer", "ddp", "weights"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_text_of_settings_is_reported(tmp_path: Path, of: str, name: str) -> None:
    folder = trainer(tmp_path) if of == "trainer" else trainer_of_ddp(tmp_path)
    if of == "weights":
        for path in (*folder.glob("*.p*"), *folder.glob("trainer_*"), folder / "training_args.bin"):
            path.unlink()
    (folder / name).write_bytes(b"[1, 2")
    text = f"{name} is no JSON object: loaders cannot read it"
    for argv in (
        ("inspect", folder),
        ("verify", folder),
        ("plan", "--from", folder, "--to", "zero1(dp=2)", "--weights-alone"),
    ):
        assert command(*argv).out.count(text) == 1


def test_links_that_go_round_are_no_files(tmp_path: Path) -> None:
    folder = trainer(tmp_path)
    for name in ("trainer_state.json", "scheduler.pt", "loop"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(name)
    assert "trainer_state.json is missing" in command("inspect", folder).out
    with pytest.raises(ucpl.UcplError, match=r"E507: .*loop is no folder"):
        ucpl.convert(folder, folder / "loop" / "x", "zero1(dp=2)")
    weights = folder / "global_step3" / "mp_rank_00_model_states.pt"
    weights.unlink()
    weights.symlink_to(weights.name)
    for alone in (False, True):
        with pytest.raises(ucpl.UcplError, match="E452"):
            ucpl.convert(folder, tmp_path / "target", "zero1(dp=2)", weights_alone=alone)


def test_a_numbered_file_alone_is_one_of_several_ranks(tmp_path: Path) -> None:
    folder = trainer_of_ddp(tmp_path)
    assert "rng_state_1.pth is missing: random numbers of rank 0 alone" in command("inspect", folder).out
    (folder / "rng_state_0.pth").rename(folder / "rng_state.pth")
    assert "is missing: random" not in command("inspect", folder).out


def test_the_trainer_loads_no_optimizer_without_a_schedule(tmp_path: Path) -> None:
    """transformers, `_load_optimizer_and_scheduler`: both files, or neither."""
    folder = trainer(tmp_path)
    (folder / "scheduler.pt").unlink()
    ucpl.convert(folder, tmp_path / "engine", "zero1(dp=2)")
    for target in ("trainer(dp=2)", "dcp(fsdp=2)"):
        with pytest.raises(ucpl.UcplError, match=r"E471: Trainer.train.* loads no optimizer without scheduler.pt"):
            ucpl.convert(folder, tmp_path / "target", target)
    ucpl.convert(folder, tmp_path / "weights", "trainer(dp=2)", weights_alone=True)
    (found := trainer_of_ddp(tmp_path / "ddp")).joinpath("scheduler.pt").unlink()
    assert "scheduler.pt is missing" in command("inspect", found).out


def test_files_of_another_iteration_are_reported(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "megatron" / "legacy_adam" / "iter_0000010", tmp_path / "iter_0000007")
    done = command("plan", "--from", tmp_path / "iter_0000007", "--to", "plain()")
    assert "iter_0000007 has files of iteration" in done.out, done.err


def test_client_state_of_other_ranks_is_named(tmp_path: Path) -> None:
    """ZeRO-3 saves client_state once a rank.

    At another degree all ranks of the target take the first one's.
    """
    shutil.copytree(FIXTURES / "deepspeed" / "z3_dp2_subgroup", tmp_path / "run")
    file = tmp_path / "run" / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=False)
    torch.save({**held, "rng": held["rng"] + 1, "mine": 1}, file)
    found = accounted("plan", "--from", tmp_path / "run", "--to", "zero3(dp=3)")
    assert sorted(found["dropped", "client_state"]["names"]) == ["mine of rank 1", "rng of rank 1"]
    assert "rng of rank 1" in command("convert", tmp_path / "run", tmp_path / "target", "--to", "zero3(dp=3)").out
    assert ("dropped", "client_state") not in accounted("plan", "--from", tmp_path / "run", "--to", "zero3(dp=2)")
    found = accounted("plan", "--from", tmp_path / "run", "--to", "zero3(dp=2)", "--drop", "rng")
    assert sorted(found["dropped", "client_state"]["names"]) == ["rng", "rng of rank 1"]


# ---- values planted in a source are named, kept or refused ------------------------------------------------------------

MARK = "planted_7f3a"


def planted(tmp_path: Path, change: Callable[[Any], object], name: str, run: Path = RUN) -> Path:
    """The run with one file changed."""
    shutil.copytree(run, tmp_path / "run")
    value = torch.load(tmp_path / "run" / name, weights_only=False)
    change(value)
    torch.save(value, tmp_path / "run" / name)
    return tmp_path / "run"


def is_lost(source: Path, target: Path, call: str) -> bool:
    """Return True if a conversion silently loses the planted item."""
    try:
        made = ucpl.convert(source, target, call)
    except ucpl.UcplError:
        return False
    assert made.report.account is not None
    names = [name for entry in made.report.account.entries for name in entry.names]
    files = [target] if target.is_file() else [file for file in target.rglob("*") if file.is_file()]
    return not any(MARK in name for name in names) and not any(MARK.encode() in file.read_bytes() for file in files)


SHARD = "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
STATES = "global_step3/mp_rank_00_model_states.pt"
PLANTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "client_state": (STATES, lambda v: v.update({MARK: 1})),
    "a tensor in client_state": (STATES, lambda v: v.update({MARK: torch.arange(5)})),
    "a value in the module": (STATES, lambda v: v["module"].update({MARK: "x"})),
    "a tensor in the module": (STATES, lambda v: v["module"].update({MARK: torch.ones(3)})),
    "a shard": (SHARD, lambda v: v.update({MARK: 1})),
    "a shard's optimizer": (SHARD, lambda v: v["optimizer_state_dict"].update({MARK: [1]})),
    "a tensor in a shard": (SHARD, lambda v: v["optimizer_state_dict"].update({MARK: torch.ones(3)})),
    "the base optimizer": (SHARD, lambda v: v["optimizer_state_dict"]["base_optimizer_state"].update({MARK: 1})),
    "its states": (SHARD, lambda v: v["optimizer_state_dict"]["base_optimizer_state"]["state"].update({MARK: 1})),
    "a state": (SHARD, lambda v: v["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update({MARK: 1})),
    "a group": (
        SHARD.replace("rank_1", "rank_0"),
        lambda v: v["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1].update({MARK: 1}),
    ),
}
TARGETS = (
    "safetensors()",
    "plain()",
    "dcp(fsdp=2)",
    "zero1(dp=3)",
    "zero3(dp=2)",
    "universal()",
    "megatron_core(dp=2)",
)


@pytest.mark.parametrize("what", PLANTS)
def test_a_planted_key_is_kept_named_or_refused(tmp_path: Path, what: str) -> None:
    """The name of a group represents its keys.

    Three targets for each place.
    """
    name, change = PLANTS[what]
    source = planted(tmp_path, change, name)
    first = len(what) % len(TARGETS)
    for n, call in enumerate((TARGETS * 2)[first : first + 3]):
        is_named = what == "a group" and call == "safetensors()"
        assert is_named or not is_lost(source, tmp_path / f"target{n}", call), call


@pytest.mark.parametrize("target", ["safetensors()", "zero0(dp=2)", "universal()", "plain()", "zero1(dp=1)"])
@pytest.mark.parametrize("item", ["x", torch.empty(0, 3)], ids=["text", "no elements"])
def test_a_value_in_a_layer_s_file_is_kept_or_named(tmp_path: Path, target: str, item: object) -> None:
    """Values like `_extra_state` of Transformer Engine modules, over a pipeline."""
    name = "global_step3/layer_01-model_states.pt"
    source = planted(tmp_path, lambda v: v.update({MARK: item}), name, FIXTURES / "deepspeed" / "pp2_dp2_z1")
    assert not is_lost(source, tmp_path / "target", target)
    account = ucpl.plan(str(source), target).account
    assert account is not None and any(f"layer_01/{MARK} of the module" in e.names for e in account.of("dropped")) is (
        target in ("safetensors()", "zero0(dp=2)", "universal()")
    )


@pytest.mark.parametrize("where", ["", "global_step3"])
def test_a_planted_file_is_named(tmp_path: Path, where: str) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    (tmp_path / "run" / where / f"{MARK}.bin").parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / "run" / where / f"{MARK}.bin").write_bytes(b"1")
    (tmp_path / "run" / "global_step3" / f"more_{MARK}").mkdir()
    (tmp_path / "run" / "global_step3" / f"more_{MARK}" / "file").write_bytes(b"1")
    found = accounted("plan", "--from", tmp_path / "run", "--to", "zero1(dp=3)")["not read", "file"]["names"]
    assert f"global_step3/more_{MARK}/" in found
    assert any(Path(name).name == f"{MARK}.bin" for name in found)


@pytest.mark.parametrize(("run", "name"), [
    ("z1_dp2_bf16", "mp_rank_00_model_states.pt"),
    ("pp2_dp2_z1", "mp_rank_00_model_states.pt"),
    ("pp2_dp2_z1", "mp_rank_01_model_states.pt"),
])  # fmt: skip
def test_a_second_name_of_no_tensor_is_named(tmp_path: Path, run: str, name: str) -> None:
    """Each stage of a pipeline has its own `shared_params`."""
    change = lambda v: v.update(shared_params={**(v["shared_params"] or {}), MARK: "nothing"})  # noqa: E731
    source = planted(tmp_path, change, f"global_step3/{name}", FIXTURES / "deepspeed" / run)
    found = accounted("plan", "--from", source, "--to", "zero1(dp=3)")["not read", "value"]
    assert f"{name}: shared_params/{MARK}" in found["names"]


@pytest.mark.parametrize("target", ["zero1(dp=3)", "zero3(dp=2)", "safetensors()", "plain()", "universal()"])
def test_a_value_in_the_module_of_a_universal_folder_is_kept_or_named(tmp_path: Path, target: str) -> None:
    """As `_extra_state` of modules of Transformer Engine.

    DeepSpeed's converter copies the model states.
    """
    ucpl.convert(FIXTURES / "deepspeed" / "z1_dp4", tmp_path / "first", "universal()")
    name = "global_step3_universal/mp_rank_00_model_states.pt"
    source = planted(tmp_path, lambda v: v["module"].update({MARK: "x"}), name, tmp_path / "first")
    assert not is_lost(source, tmp_path / "target", target)
    account = ucpl.plan(str(source), target).account
    assert account is not None
    assert any(f"{MARK} of the module" in e.names for e in account.of("dropped")) is (target == "safetensors()")
    if target.startswith(("zero", "universal")):
        held = [torch.load(file, weights_only=True) for file in (tmp_path / "target").rglob("*model_states.pt")]
        assert held and all(one["module"][MARK] == "x" for one in held)


def test_a_key_in_the_cuts_of_experts_is_named(tmp_path: Path) -> None:
    """AutoEP's list of sub-groups at stage 3."""
    run = FIXTURES / "deepspeed" / "autoep_ep2_dp4_z3"
    shard = next(path.relative_to(run) for path in sorted(run.rglob("*zero_pp_rank_0*optim_states.pt")))
    cuts = "ds_zero_partition_groups"
    source = planted(tmp_path, lambda v: v["optimizer_state_dict"][cuts][0].update({MARK: 1}), str(shard), run)
    account = ucpl.plan(str(source), "zero3(dp=4, ep=2)").account
    assert account is not None
    assert any(f"optimizer_state_dict/{cuts}/0/{MARK}" in n for e in account.of("not read") for n in e.names)
