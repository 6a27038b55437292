"""Folders of Accelerate and Lightning around shards.

Recognised, each file with a fate.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucpl as python
from tests.cli.command import digest, good, ucpl
from ucpl.errors import UcplError

FIXTURES = Path(__file__).parents[2] / "fixtures"
DRAWN = "random_states_{}.pkl"
CARRIED = ("scheduler.bin", "custom_checkpoint_0.pkl", "zero_to_fp32.py")
SCRIPT = "print('as DeepSpeed writes it')\n"


class Runs:
    """A value whose pickle runs a command at load."""

    def __reduce__(self):
        return os.system, ("true",)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A copy of a real folder of Accelerate's."""
    made = tmp_path / "state"
    shutil.copytree(FIXTURES / "accelerate" / "state", made)
    (made / "zero_to_fp32.py").write_text(SCRIPT)
    return made


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A copy of a real folder of Lightning's."""
    made = tmp_path / "step-2.ckpt"
    shutil.copytree(FIXTURES / "lightning" / "step-2.ckpt", made)
    (made / "zero_to_fp32.py").write_text(SCRIPT)
    return made


def beside(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.is_file()} - {"latest"}


def test_a_model_saved_next_to_a_state_follows_it(state: Path, tmp_path: Path) -> None:
    good("convert", state, tmp_path / "m", "--to", "safetensors()")
    (state / "model.safetensors").write_bytes((tmp_path / "m" / "model.safetensors").read_bytes())
    out = good("convert", state, tmp_path / "t", "--to", "zero2(dp=3)").out
    assert "weights next to the shards, bit for bit: model.safetensors" in out
    out = good("convert", state, tmp_path / "u", "--to", "zero2(dp=3, bf16=1)").out
    assert "written anew: model.safetensors: in bf16, f32 in the source's\n" in out
    before, after = (load_file(f / "model.safetensors") for f in (state, tmp_path / "u"))
    assert before.keys() == after.keys() and all(torch.equal(t.bfloat16(), after[n]) for n, t in before.items())


def test_a_grown_vocabulary_grows_in_the_files_of_the_trainer(tmp_path: Path) -> None:
    """A dim of the model's text has its size there."""
    text = python.infer(FIXTURES / "trainer" / "checkpoint-3").text()
    text = re.sub(r"(transformer.wte.weight *): 61 ", r"\1: vocab ", text, count=1)
    (tmp_path / "grown.ucpl").write_text(re.sub(r"(?m)^model.*$", r"\g<0>\n  dim vocab = 69", text, count=1))
    asked = ("--to", "zero2(dp=2)", "--model", f"{tmp_path}/grown.ucpl:checkpoint", "--fill", "state *=0")
    fill = "transformer.wte.weight[vocab[61..]]=0"
    good("convert", FIXTURES / "trainer" / "checkpoint-3", tmp_path / "t", *asked, "--fill", fill)
    assert json.loads((tmp_path / "t" / "config.json").read_text())["vocab_size"] == 69
    before, after = (
        load_file(f / "model.safetensors") for f in (FIXTURES / "trainer" / "checkpoint-3", tmp_path / "t")
    )
    wide = after.pop("transformer.wte.weight")
    assert wide.shape == (69, 3) and torch.equal(wide[:61], before["transformer.wte.weight"]) and not wide[61:].any()


# ---- Accelerate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "ranks"), [("zero3(dp=3)", 3), ("zero2(dp=1)", 1), ("zero1(dp=2)", 2)])
def test_a_target_is_a_state_again(state: Path, tmp_path: Path, call: str, ranks: int) -> None:
    target = tmp_path / "target"
    before = digest(state)
    out = good("convert", state, target, "--to", call).out
    assert digest(state) == before and "container     Accelerate's save_state\n" in out
    assert beside(target) == {*CARRIED, *(DRAWN.format(r) for r in range(ranks))}
    for name in CARRIED:
        assert (target / name).read_bytes() == (state / name).read_bytes()
    for rank in range(ranks):
        assert (target / DRAWN.format(rank)).read_bytes() == (state / DRAWN.format(rank % 2)).read_bytes()
    assert (target / "latest").read_text() == "pytorch_model" and (target / "pytorch_model").is_dir()
    assert good("compare", state, target).out.endswith("equal\n")
    assert "sound" in good("verify", target).out


def test_values_that_depend_on_the_ranks_are_reported(state: Path, tmp_path: Path) -> None:
    def said(call: str) -> str:
        return good("convert", state, tmp_path / "t", "--to", call, "--dry-run").out

    assert "companions    scheduler.bin, of 2 ranks for 3: Accelerate steps it once for each rank" in said(
        "zero1(dp=3)"
    )
    assert "rank 2 begins with that of rank 0" in said("zero1(dp=3)")
    assert "Accelerate steps it" not in said("zero3(dp=2)")
    for rank in range(2):
        (state / DRAWN.format(rank)).unlink()
    assert "Accelerate steps it" not in said("zero1(dp=3)"), "of how many ranks it is, is not known then"


def test_the_place_of_a_stateful_loader_is_copied_and_reported(state: Path, tmp_path: Path) -> None:
    """accelerate 1.15 with torchdata 0.11.

    Batches of 6 on 2 ranks, 3 of them.
    On 3 ranks `load_state` continues with sample 36 with batches of 4, and with sample 54 with those of 6.
    """
    place = {"_index_sampler_state": None, "_sampler_iter_yielded": 3, "_num_yielded": 3, "_iterator_finished": False}
    for name in ("dl_state_dict.bin", "dl_state_dict_1.bin"):
        torch.save(place, state / name)
    out = good("convert", state, tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "dl_state_dict.bin, of 2 ranks for 3: it counts batches, and is at the same place where those of all" in out
    for name in ("dl_state_dict.bin", "dl_state_dict_1.bin"):
        assert (tmp_path / "t" / name).read_bytes() == (state / name).read_bytes()
    assert "it counts batches" not in good("convert", state, tmp_path / "u", "--to", "zero3(dp=2)").out


def test_a_state_without_random_numbers_is_found_by_its_shards(state: Path, tmp_path: Path) -> None:
    for rank in range(2):
        (state / DRAWN.format(rank)).unlink()
    assert "Accelerate's save_state, 3 files" in good("inspect", state).out
    (state / "pytorch_model").rename(state / "global_step2")
    (state / "latest").write_text("global_step2")
    assert "Accelerate's save_state" in good("inspect", state).out  # whose files are there
    for name in ("scheduler.bin", "custom_checkpoint_0.pkl"):
        (state / name).unlink()
    assert "container" not in good("inspect", state).out


def test_a_rank_that_is_missing_is_named(state: Path) -> None:
    (state / DRAWN.format(0)).unlink()
    assert f"looks wrong   {DRAWN.format(0)} is missing: random numbers of rank 1 alone" in good("inspect", state).out


def test_an_odd_file_is_carried_and_named(state: Path, tmp_path: Path) -> None:
    (state / "unet").mkdir()
    (state / "unet" / "config.json").write_text("{}")
    out = good("convert", state, tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "not known here, and carried as they are: unet/config.json" in out
    assert (tmp_path / "t" / "unet" / "config.json").read_text() == "{}"


def test_the_shards_named_alone_are_no_state(state: Path, tmp_path: Path) -> None:
    out = good("convert", state / "pytorch_model", tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "container" not in out and not beside(tmp_path / "t")


def test_two_engines_are_converted_one_by_one(state: Path, tmp_path: Path) -> None:
    shutil.copytree(state / "pytorch_model", state / "pytorch_model_1")
    for latest in ("pytorch_model", "pytorch_model_1"):
        (state / "latest").write_text(latest)
        done = ucpl("convert", state, tmp_path / "t", "--to", "zero1(dp=3)")
        assert done.status == 3 and "error[E487]" in done.err and "pytorch_model, pytorch_model_1" in done.err
    good("convert", state / "pytorch_model_1", tmp_path / "t", "--to", "zero1(dp=3)")
    assert (tmp_path / "t" / "pytorch_model_1").is_dir()


def test_shards_of_another_name_would_not_be_found(state: Path, tmp_path: Path) -> None:
    with pytest.raises(UcplError) as found:
        python.convert(state, tmp_path / "t", to="zero1(dp=3)", tag="global_step2")
    said = found.value.diagnostics[0]
    assert said.code == "E486" and "Accelerator.load_state" in said.message and "pytorch_model" in said.remedy
    assert not (tmp_path / "t").exists()
    python.convert(state, tmp_path / "t", to="zero1(dp=3)", tag="pytorch_model")


# ---- pickles -------------------------------------------------------------------------------------------------------------


def one_behind_another() -> bytes:
    """torch's form before 1.6: the loaded value is not the first pickle."""
    return pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(Runs(), protocol=2)


HOSTILE = {
    "one behind another": one_behind_another(),
    "of protocol 2": pickle.dumps(Runs(), protocol=2),
    "of protocol 0": pickle.dumps(Runs(), protocol=0),
    "of protocol 1": pickle.dumps([Runs()], protocol=1),
    "text": b"hello\n",
}


@pytest.mark.parametrize("form", HOSTILE)
@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "scheduler.bin"])
def test_unpickled_files_are_checked_completely(state: Path, tmp_path: Path, form: str, name: str) -> None:
    """`load_state` unpickles registered objects without restriction, whatever their first bytes are."""
    (state / name).write_bytes(HOSTILE[form])
    command = ("convert", state, tmp_path / "t", "--to", "zero1(dp=2)")
    done = ucpl(*command)
    seen = "of protocol" in form
    assert done.status == (4 if seen else 3), done.err
    assert ("posix.system" if seen else f"error[E488]: {name} cannot be looked at") in done.err
    assert f"--drop {name}" in done.err and not (tmp_path / "t").exists()
    good(*command, "--drop", name)


def test_a_sampler_that_names_classes_of_the_user_s_is_asked_for(state: Path, tmp_path: Path) -> None:
    torch.save(Runs(), state / "sampler.bin")
    command = ("convert", state, tmp_path / "t", "--to", "zero1(dp=2)")
    assert "error[E504]" in ucpl(*command).err
    good(*command, "--allow-global", "posix.system")
    assert (tmp_path / "t" / "sampler.bin").read_bytes() == (state / "sampler.bin").read_bytes()


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", DRAWN.format(0), "scheduler.bin"])
def test_a_damaged_file_is_refused_until_it_is_left_out(state: Path, tmp_path: Path, name: str) -> None:
    file = state / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = ucpl("convert", state, tmp_path / "t", "--to", "zero1(dp=2)")
    assert done.status == 3 and f"error[E488]: {name} cannot be looked at" in done.err
    good("convert", state, tmp_path / "t", "--to", "zero1(dp=2)", "--drop", name)


# ---- Lightning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["zero3(dp=3)", "zero1(dp=1)"])
def test_a_target_is_a_folder_of_lightning_again(ckpt: Path, tmp_path: Path, call: str) -> None:
    target = tmp_path / "other.ckpt"
    out = good("convert", ckpt, target, "--to", call).out
    assert "container     Lightning's DeepSpeedStrategy\n" in out
    assert (target / "zero_to_fp32.py").read_text() == SCRIPT
    assert (target / "latest").read_text() == "checkpoint" and (target / "checkpoint").is_dir()
    facts = json.loads(good("inspect", target, "--json").out)
    assert facts["container"]["kind"] == "lightning"
    assert {"loops", "callbacks", "lr_schedulers", "hyper_parameters", "counted"} <= set(facts["client_state"])
    assert good("compare", ckpt, target).out.endswith("equal\n")


def test_a_folder_of_deepspeed_s_is_not_taken_for_lightning_s(ckpt: Path, tmp_path: Path) -> None:
    good("convert", ckpt, tmp_path / "t", "--to", "zero1(dp=2)", "--drop", "pytorch-lightning_version")
    assert json.loads(good("inspect", tmp_path / "t", "--json").out)["container"] is None


@pytest.mark.parametrize("skipped", [0, 3])
def test_a_count_of_steps_that_no_state_has_is_named(skipped, state, tmp_path):
    """Without an engine only the optimizer counts steps."""
    for file in (state / "pytorch_model").glob("mp_rank_*"):
        value = torch.load(file, weights_only=False)
        value["global_steps"] += skipped
        torch.save(value, file)
    found = good("convert", state, tmp_path / "out", "--to", "accelerate()").out
    left = [line for line in found.splitlines() if line.startswith("left out")]
    assert any("global_steps" in line for line in left) == bool(skipped)
