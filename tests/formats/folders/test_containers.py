"""A folder of transformers' Trainer around shards: each file has its fate."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

import ucpl as ucpl_api
from tests.cli.command import digest, good, ucpl
from ucpl.conversion.companion_writing import own_names
from ucpl.errors import Label, UcplError, fail
from ucpl.extents import NamedTensor
from ucpl.extents.containers import CompanionRule
from ucpl.formats.folders.kinds import KINDS
from ucpl.formats.opening import open_checkpoint
from ucpl.runtime.failpoints import set_failpoints

FIXTURE = Path(__file__).parents[2] / "fixtures" / "trainer" / "checkpoint-3"
ALIKE = ("config.json", "generation_config.json", "model.safetensors", "scheduler.pt", "trainer_state.json")
DRAWN = "rng_state_{}.pth"


class Runs:
    """A value whose pickle runs a command at load."""

    def __reduce__(self):
        return os.system, ("true",)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy with different files of ranks, as in real runs."""
    made = tmp_path / "checkpoint-3"
    shutil.copytree(FIXTURE, made)
    torch.save({"rank": 1}, made / DRAWN.format(1))
    return made


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """The weights next to the shards, with some of them changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def holds_masters(folder: Path, name: str = "model.safetensors") -> int:
    """Tensors of a file next to the shards that equal rounded masters.

    Each is bit-equal to its master of the source, rounded to the file's dtype.
    """
    whole = load_file(FIXTURE / "model.safetensors")
    found = load_file(folder / name) if name.endswith(".safetensors") else torch.load(folder / name)
    assert all(torch.equal(t, whole[n].to(t.dtype)) for n, t in found.items())
    return len(found)


@pytest.fixture(autouse=True)
def no_failpoints():
    yield
    set_failpoints("")


def files_of(folder: Path) -> set[str]:
    """Files next to the shards."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {
        name
        for name in (p.relative_to(folder).as_posix() for p in folder.rglob("*"))
        if name.startswith(("global_step3/", "ucpl/")) or name == "latest"
    }


@pytest.mark.parametrize(
    ("call", "ranks"), [("zero1(dp=2)", 2), ("zero2(dp=3)", 3), ("zero3(dp=1)", 1), ("zero1(dp=5)", 5)]
)
def test_a_target_is_a_folder_of_the_trainer_again(source: Path, tmp_path: Path, call: str, ranks: int) -> None:
    before, target = digest(source), tmp_path / "target"
    done = good("convert", source, target, "--to", call)
    assert digest(source) == before
    drawn = ["rng_state.pth"] if ranks == 1 else [DRAWN.format(r) for r in range(ranks)]
    assert files_of(target) == {*ALIKE, "training_args.bin", *drawn}
    for name in (*ALIKE, "training_args.bin"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    for rank, name in enumerate(drawn):
        assert (target / name).read_bytes() == (source / DRAWN.format(rank % 2)).read_bytes()
    assert "container     transformers' Trainer" in done.out
    assert (target / "latest").read_text() == "global_step3"
    assert "sound" in good("verify", target).out
    assert good("compare", source, target).out.endswith("equal\n")


def test_the_rule_for_new_ranks_is_reported(source: Path, tmp_path: Path) -> None:
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=4)", "--dry-run").out
    assert (
        "companions    random numbers of 2 ranks for 4: ranks that remain keep their own; rank 2 begins with that of rank 0,"
        " rank 3 begins with that of rank 1\n"
    ) in out
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=1)", "--dry-run").out
    assert "random numbers of 2 ranks for 1: each rank keeps its own" in out
    assert "left out: rng_state_1.pth: rank 1 is not there any more" in out
    assert not (tmp_path / "t").exists()


def test_from_one_rank_to_two_and_back(source: Path, tmp_path: Path) -> None:
    good("convert", source, tmp_path / "one", "--to", "zero3(dp=1)")
    good("convert", tmp_path / "one", tmp_path / "two", "--to", "zero1(dp=2)")
    first = (source / DRAWN.format(0)).read_bytes()
    assert [(tmp_path / "two" / DRAWN.format(r)).read_bytes() for r in range(2)] == [first, first]


def test_every_file_is_in_the_manifest_and_a_flipped_bit_is_found(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    good("convert", source, target, "--to", "zero1(dp=3)")
    stated = json.loads((target / "ucpl" / "manifest.json").read_text())["files"]
    assert files_of(target) <= set(stated)
    file = target / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    done = ucpl("verify", target)
    assert done.status == 1 and "E631" in done.err and "model.safetensors" in done.err


def test_inspect_says_what_the_folder_is(source: Path) -> None:
    (source / "notes.txt").write_text("mine")
    out = good("inspect", source).out
    assert "container     transformers' Trainer, 9 files next to the shards" in out
    assert "  one a rank  rng_state_0.pth, rng_state_1.pth\n" in out
    assert "  weights     model.safetensors\n" in out
    assert "  not known   notes.txt\n" in out
    assert json.loads(good("inspect", source, "--json").out)["container"]["kind"] == "trainer"
    assert "container" not in good("inspect", source / "global_step3").out


@pytest.mark.fault(
    "Hostile input", "links, pipes and files of other steps next to the shards", "left out, each by name"
)
def test_odd_files_are_carried_or_named(source: Path, tmp_path: Path) -> None:
    (source / "notes.txt").write_text("mine")
    (source / "empty").write_bytes(b"")
    (source / "runs").mkdir()
    (source / "runs" / "events.1").write_bytes(b"x" * 100_000)
    os.mkfifo(source / "pipe")
    (tmp_path / "elsewhere").write_text("secret")
    (source / "link").symlink_to(tmp_path / "elsewhere")
    (source / "inner").symlink_to("notes.txt")
    (source / "loop").symlink_to(source)
    shutil.copytree(source / "global_step3", source / "global_step2")
    target = tmp_path / "target"
    out = good("convert", source, target, "--to", "zero2(dp=3)").out
    assert "not known here, and carried as they are: empty, inner, notes.txt, runs/events.1" in out
    for name in ("empty", "inner", "notes.txt", "runs/events.1"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    for name, why in (
        ("pipe", "no regular file"),
        ("link", "a link that leads out of the folder"),
        ("loop/", "a link to a folder"),
        ("global_step2/", "another step"),
    ):
        assert f"left out: {name}: {why}" in out
        assert not os.path.lexists(target / name)


def test_a_file_is_left_out_by_its_name(source: Path, tmp_path: Path) -> None:
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)", "--drop", "training_args.bin").out
    assert "left out      file of training_args.bin: dropped by name" in out
    assert "training_args.bin" not in files_of(tmp_path / "t")


def test_a_plan_writes_the_same_folder(source: Path, tmp_path: Path) -> None:
    out = good("plan", "--from", source, "--to", "zero1(dp=3)", "--drop", "scheduler.pt", "-o", tmp_path / "p.plan").out
    assert "container  transformers' Trainer\n" in out
    good("apply", tmp_path / "p.plan", source, tmp_path / "applied")
    good("convert", source, tmp_path / "converted", "--to", "zero1(dp=3)", "--drop", "scheduler.pt")
    assert digest(tmp_path / "applied") == digest(tmp_path / "converted")
    assert "scheduler.pt" not in files_of(tmp_path / "applied")


def test_a_universal_folder_keeps_the_ranks_that_there_were(source: Path, tmp_path: Path) -> None:
    (source / "latest_universal").write_text("global_step2_universal")
    good("convert", source, tmp_path / "t", "--to", "universal()")
    assert (tmp_path / "t" / "latest_universal").read_text() == "global_step3_universal"
    for rank in range(2):
        assert (tmp_path / "t" / DRAWN.format(rank)).read_bytes() == (source / DRAWN.format(rank)).read_bytes()
    assert "container     transformers' Trainer, 8 files" in good("inspect", tmp_path / "t").out
    good("convert", tmp_path / "t", tmp_path / "u", "--to", "zero1(dp=3)")
    assert {*ALIKE, "training_args.bin", *map(DRAWN.format, range(3))} < files_of(tmp_path / "u")
    assert not (tmp_path / "u" / "latest_universal").exists()


@pytest.mark.parametrize("call", ["plain()", "safetensors()"])
def test_what_is_no_folder_of_the_trainer_says_what_stays(source: Path, tmp_path: Path, call: str) -> None:
    target = tmp_path / ("t.pt" if call == "plain()" else "t")
    out = good("convert", source, target, "--to", call).out
    count = 8 if call == "plain()" else 6
    assert f"companions    {count} files next to the shards are left out: a target of " in out
    assert target.is_file() or not (target / "trainer_state.json").exists()


def test_weights_alone_keep_what_describes_the_model(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    printed = good("convert", source, tmp_path / "t", "--to", "safetensors()").out
    assert "companions    as they are: generation_config.json, tokenizer.json\n" in printed
    assert files_of(tmp_path / "t") == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert (tmp_path / "t" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    good("verify", tmp_path / "t")


def test_a_step_named_alone_is_no_container(source: Path, tmp_path: Path) -> None:
    out = good("convert", source / "global_step3", tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "container" not in out and not files_of(tmp_path / "t")


def test_a_class_is_asked_by_the_folder_s_own_config(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def network_of(config: dict[str, object]) -> None:
        asked.append(config)
        fail("E396", "there is no such class", Label("config.json"))

    monkeypatch.setattr("ucpl.inference.hf.networks.network_of", network_of)
    assert "E396" in ucpl("convert", source, tmp_path / "t", "--to", "zero1(tp=2)").err
    assert asked and all(one["architectures"] == ["GPT2LMHeadModel"] for one in asked)


# ---- weights next to the shards
# ---------------------------------------------------------------------------------------


def test_weights_are_held_against_the_shards(source: Path, tmp_path: Path) -> None:
    out = good("convert", source, tmp_path / "t", "--to", "zero3(dp=3)").out
    assert "companions    model.safetensors equals the shards: " in out
    for folder in (source, tmp_path / "t"):
        assert "model.safetensors equals the shards: " in good("verify", folder).out


@pytest.mark.parametrize("name", ["transformer.h.0.mlp.c_fc.weight", "lm_head.weight"])
def test_one_bit_of_them_is_found_and_they_are_written_anew(source: Path, tmp_path: Path, name: str) -> None:
    """A second name, too.

    In the file it is a tensor of its own.
    """
    changed(source, lambda tensors: tensors[name].view(torch.int32).view(-1)[-1].bitwise_xor_(1))
    done = ucpl("verify", source)
    assert done.status == 1 and "error[E708]: model.safetensors differs from the shards" in done.err
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "companions    written anew: model.safetensors: model.safetensors differs from the shards" in out
    assert holds_masters(tmp_path / "t") == 17
    assert "model.safetensors equals the shards" in good("verify", tmp_path / "t").out


def test_weights_that_cannot_be_compared_are_reported(source: Path, tmp_path: Path) -> None:
    changed(source, lambda tensors: tensors.update(odd=torch.zeros(2)))
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "1 tensors are not compared: odd is no tensor of the shards" in out
    (source / "model.safetensors").write_bytes(b"no file of tensors")
    out = good("convert", source, tmp_path / "v", "--to", "zero1(dp=3)").out
    assert "model.safetensors is not compared with the shards: " in out


def test_weights_in_several_files_are_one(source: Path, tmp_path: Path) -> None:
    tensors = sorted(load_file(source / "model.safetensors").items())
    (source / "model.safetensors").unlink()
    names = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    for name, part in zip(names, (dict(tensors[:5]), dict(tensors[5:])), strict=True):
        save_file(part, source / name)
    listed = {n: names[i >= 5] for i, (n, _) in enumerate(tensors)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "companions    model.safetensors equals the shards: 17 tensors" in out
    assert {*names, "model.safetensors.index.json"} < files_of(tmp_path / "t")
    good("convert", source, tmp_path / "narrow", "--to", "zero1(dp=3, bf16=1)")
    assert sum(holds_masters(tmp_path / "narrow", name) for name in names) == 17
    index = json.loads((tmp_path / "narrow" / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 2 * sum(t.numel() for _, t in tensors)}, "weight_map": listed}
    (source / names[1]).unlink()
    out = good("convert", source, tmp_path / "u", "--to", "zero1(dp=3)").out
    assert f"model.safetensors is not compared with the shards: {names[1]} is missing" in out


def test_weights_of_another_dtype_are_held_against_masters(source: Path, tmp_path: Path) -> None:
    changed(source, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    out = good("verify", source).out
    assert "in a folder of transformers' Trainer: 8 files" in out
    assert "model.safetensors equals the shards: 17 tensors" in out
    changed(source, lambda tensors: tensors["lm_head.weight"].view(torch.int16)[0].bitwise_xor_(1))
    assert "E708" in ucpl("verify", source).err


def test_verify_reads_files_next_to_the_shards(source: Path, tmp_path: Path) -> None:
    file = source / "training_args.bin"
    raw = bytearray(file.read_bytes())
    raw[raw.index(b"TrainingArguments")] ^= 1
    file.write_bytes(raw)
    done = ucpl("verify", source)
    assert done.status == 1 and "training_args.bin" in done.err
    good("convert", FIXTURE, tmp_path / "t", "--to", "zero1(dp=3)")
    (tmp_path / "t" / "trainer_state.json").unlink()
    done = ucpl("verify", tmp_path / "t")
    assert done.status == 1 and "E633" in done.err and "trainer_state.json is missing" in done.out


def test_python_does_what_the_command_does(source: Path, tmp_path: Path) -> None:
    changed(source, lambda tensors: tensors["lm_head.weight"].zero_())
    made = ucpl_api.convert(source, tmp_path / "t", "zero1(dp=3)")
    assert any(
        "model.safetensors is written anew: model.safetensors differs from" in text for text in made.report.remarks
    )
    good("convert", source, tmp_path / "u", "--to", "zero1(dp=3)")
    assert digest(tmp_path / "t") == digest(tmp_path / "u")
    assert [d.code for d in ucpl_api.verify(source, witness=False).findings] == ["E708"]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_next_to_the_shards_follow_the_training_dtype(source: Path, tmp_path: Path, name: str) -> None:
    if name == "pytorch_model.bin":
        tensors = load_file(source / "model.safetensors")
        torch.save(tensors | {"lm_head.weight": tensors["transformer.wte.weight"]}, source / name)
        (source / "model.safetensors").unlink()
    command = ("convert", source, tmp_path / "t", "--to", "zero1(dp=3, bf16=1)")
    assert f"written anew: {name}: in bf16, f32 in the source's\n" in good(*command, "--dry-run").out
    assert not list(tmp_path.glob(".t*"))
    assert "written anew: config.json: as the weights are now\n" in good(*command).out
    assert holds_masters(tmp_path / "t", name) == 17
    assert json.loads((tmp_path / "t" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not list(tmp_path.glob(".t*"))
    good("convert", tmp_path / "t", tmp_path / "u", "--to", "zero3(dp=2, bf16=0)")
    assert holds_masters(tmp_path / "u", name) == 17
    assert (tmp_path / "u" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    if name == "model.safetensors":
        assert digest(tmp_path / "u" / name) == digest(source / name)
        assert "model.safetensors equals the shards" in good("verify", tmp_path / "t").out


def test_weights_of_masters_next_to_narrow_shards_are_unchanged(source: Path, tmp_path: Path) -> None:
    """They follow no training dtype: somebody has put them there."""
    good("convert", source, tmp_path / "narrow", "--to", "zero1(dp=2, bf16=1)")
    shutil.copy(source / "model.safetensors", tmp_path / "narrow" / "model.safetensors")
    out = good("convert", tmp_path / "narrow", tmp_path / "t", "--to", "zero1(dp=3, fp16=1)").out
    assert "weights next to the shards, bit for bit: model.safetensors" in out
    assert "model.safetensors equals the shards: 17 tensors" in out
    changed(tmp_path / "narrow", lambda tensors: tensors["transformer.ln_f.bias"].add_(1))
    good("convert", tmp_path / "narrow", tmp_path / "u", "--to", "zero1(dp=3)")
    assert digest(tmp_path / "u" / "model.safetensors") == digest(source / "model.safetensors")


def test_dropped_and_new_parameters_change_weights_next_to_the_shards(source: Path, tmp_path: Path) -> None:
    gone = "transformer.h.0.mlp.c_fc.bias"
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)", "--drop", gone).out
    assert f"written anew: model.safetensors: {gone} is left out\n" in out
    assert holds_masters(tmp_path / "t") == 16
    assert gone not in load_file(tmp_path / "t" / "model.safetensors")
    text = good("infer", source).out
    (tmp_path / "grown.ucpl").write_text(
        text.replace("model checkpoint {\n", "model checkpoint {\n  extra : 3 dtype f32 is frozen\n")
    )
    more = ("--model", f"{tmp_path}/grown.ucpl:checkpoint", "--fill", "extra=2")
    out = good("convert", source, tmp_path / "u", "--to", "zero1(dp=3)", *more).out
    assert "written anew: model.safetensors: extra is new\n" in out
    found = load_file(tmp_path / "u" / "model.safetensors")
    assert len(found) == 18 and found["extra"].tolist() == [2.0, 2.0, 2.0]


def test_what_the_shards_cannot_say_is_left_out_by_name(source: Path, tmp_path: Path) -> None:
    changed(source, lambda tensors: tensors.update(odd=torch.zeros(2)))
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3, bf16=1)").out
    assert (
        "left out: model.safetensors: in bf16, f32 in the source's; the shards have no odd, which model.safetensors has"
        in out
    )
    assert "model.safetensors" not in files_of(tmp_path / "t")


def test_a_plan_that_is_applied_makes_no_weights(source: Path, tmp_path: Path) -> None:
    good("plan", "--from", source, "--to", "zero1(dp=3, bf16=1)", "-o", tmp_path / "p.plan")
    out = good("apply", tmp_path / "p.plan", source, tmp_path / "t").out
    assert "left out: model.safetensors: the target has transformer.wte.weight in bf16: `ucpl convert" in out
    assert "model.safetensors" not in files_of(tmp_path / "t")


def test_an_adapter_is_called_without_its_name() -> None:
    named = NamedTensor("base.q.lora_A.default.weight", (1,), "f32", "parameter")
    saved = NamedTensor("base.head.modules_to_save.default.weight", (1,), "f32", "parameter")
    other = NamedTensor("base.q.lora_A.two.weight", (1,), "f32", "parameter")
    bare = open_checkpoint(FIXTURE)
    known = evolve(bare, state=evolve(bare.state, tensors=(named, saved, other)))
    assert own_names(known, "adapter_model.safetensors") == {
        "base.q.lora_A.weight": named.name, "base.head.weight": saved.name, other.name: other.name,
    }  # fmt: skip
    assert own_names(known, "two/adapter_model.safetensors")["base.q.lora_A.weight"] == other.name
    assert own_names(known, "saved/adapter_model.safetensors")["base.q.lora_A.weight"] == named.name
    assert own_names(known, "model.safetensors") == {}


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "two/adapter_model.safetensors"])
def test_weights_of_an_adapter_are_held_against_the_shards(source: Path, tmp_path: Path, name: str) -> None:
    tensors = {n: t for n, t in load_file(source / "model.safetensors").items() if "c_fc" in n}
    (source / name).parent.mkdir(exist_ok=True)
    save_file(tensors, source / name)
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)").out
    assert f"companions    {name} equals the shards: 2 tensors, 48 elements, bit for bit\n" in out
    assert (tmp_path / "t" / name).read_bytes() == (source / name).read_bytes()
    tensors["transformer.h.0.mlp.c_fc.bias"][3] += 1
    save_file(tensors, source / name)
    out = good("convert", source, tmp_path / "u", "--to", "zero1(dp=3)").out
    assert f"{name} differs from the shards: transformer.h.0.mlp.c_fc.bias[3] is " in out
    assert holds_masters(tmp_path / "u", name) == 2
    good("convert", source, tmp_path / "v", "--to", "zero1(dp=3, fp16=1)")
    assert holds_masters(tmp_path / "v", name) == 2 and holds_masters(tmp_path / "v") == 17


def test_two_folders_side_by_side(source: Path, tmp_path: Path) -> None:
    good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)")
    (tmp_path / "t" / "trainer_state.json").write_text("{}")
    out = good("compare", source, tmp_path / "t").out
    assert "companions    both in folders of transformers' Trainer\n" in out
    assert "companions    another in B: trainer_state.json\n" in out
    assert "companions    in B alone: rng_state_2.pth\n" in out
    assert "rng_state_1.pth, scheduler.pt" in out and out.endswith("equal\n")
    good("convert", source / "global_step3", tmp_path / "u", "--to", "zero1(dp=1)")
    out = good("compare", source, tmp_path / "u").out
    assert "companions    A is in a folder of transformers' Trainer, the other is in none\n" in out


def test_an_unreadable_file_next_to_the_shards_is_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)")

    def refuse(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "t" / "config.json"):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("ucpl.conversion.companion_checks.fetch_all", refuse)
    done = ucpl("compare", source, tmp_path / "t")
    assert done.status == 3 and f"error[E400]: {tmp_path / 't' / 'config.json'} cannot be read" in done.err


# ---- pickles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["training_args.bin", "rng_state_1.pth", "mine.pkl"])
@pytest.mark.parametrize("bare", [False, True])
def test_a_pickle_that_would_run_code_is_refused(source: Path, tmp_path: Path, name: str, bare: bool) -> None:
    if bare:
        (source / name).write_bytes(pickle.dumps(Runs()))
    else:
        torch.save(Runs(), source / name)
    command = ("convert", source, tmp_path / "t", "--to", "zero1(dp=3)")
    done = ucpl(*command)
    assert done.status == 4 and "error[E504]: the target's pickles would name posix.system" in done.err
    assert f"--drop {name}" in done.err and not (tmp_path / "t").exists()
    assert f"{name} names posix.system" in good("inspect", source).out
    if not bare:
        good(*command, "--drop", name)
        assert name not in files_of(tmp_path / "t") or name == "rng_state_1.pth"
        shutil.rmtree(tmp_path / "t")
    good(*command, "--allow-global", "posix.system")
    assert (tmp_path / "t" / name).read_bytes() == (source / name).read_bytes()


TWO = pickle.dumps(1) + pickle.dumps(Runs())  # torch before 1.6 wrote one behind the other, and a loader runs all


@pytest.mark.fault(
    "Hostile input",
    "companion pickles of protocol 0, concatenated, or of an unknown form",
    "refused until left out or allowed by name",
)
@pytest.mark.parametrize("data", [pickle.dumps(Runs(), 0), TWO, b"any bytes"], ids=["0", "two", "none"])
def test_what_is_called_a_pickle_is_one_and_alone(source: Path, tmp_path: Path, data: bytes) -> None:
    (source / "training_args.bin").write_bytes(data)
    done = ucpl("convert", source, tmp_path / "t", "--to", "zero1(dp=3)")
    assert "training_args.bin cannot be looked at" in done.err or "training_args.bin: names posix.system" in done.err
    assert not (tmp_path / "t").exists()


def test_an_archive_that_is_no_file_of_torch_is_bytes(source: Path, tmp_path: Path) -> None:
    np.savez(source / "numbers.npz", x=np.arange(3))
    out = good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)").out
    assert "not known here, and carried as they are: numbers.npz" in out


def test_no_rule_names_a_class_that_leads_further() -> None:
    """Only full class names are trusted.

    A dotted name is looked up by getattr: a trusted package would allow everything that it imports.
    """
    for rule in (rule for kind in KINDS for rule in kind.rules):
        assert all(
            name.rpartition(".")[2][:1].isupper() or name.rpartition(".")[2] in ("_reconstruct", "ndarray", "dtype")
            for name in rule.named
        )


@pytest.mark.parametrize("name", ["training_args.bin", "rng_state_0.pth", "scheduler.pt"])
def test_a_damaged_file_is_refused_until_it_is_left_out(source: Path, tmp_path: Path, name: str) -> None:
    file = source / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = ucpl("convert", source, tmp_path / "t", "--to", "zero1(dp=2)")
    assert done.status == 3 and f"error[E488]: {name} cannot be looked at" in done.err and f"--drop {name}" in done.err
    assert f"{name} cannot be looked at" in good("inspect", source).out
    good("convert", source, tmp_path / "t", "--to", "zero1(dp=2)", "--drop", name)


# ---- missing files -----------------------------------------------------------------------------------------------------


def test_what_resuming_needs_is_missed(source: Path) -> None:
    (source / "trainer_state.json").unlink()
    assert (
        "looks wrong   trainer_state.json is missing: Trainer.train(resume_from_checkpoint=...) needs it"
        in good("inspect", source).out
    )
    (source / "trainer_state.json").write_text("{")
    assert "looks wrong   trainer_state.json is no JSON" in good("inspect", source).out


def test_a_rank_without_its_random_numbers(source: Path, tmp_path: Path) -> None:
    (source / DRAWN.format(0)).unlink()
    assert "looks wrong   rng_state_0.pth is missing: random numbers of rank 1 alone" in good("inspect", source).out
    good("convert", source, tmp_path / "t", "--to", "zero1(dp=3)")
    only = (source / DRAWN.format(1)).read_bytes()
    assert all((tmp_path / "t" / DRAWN.format(r)).read_bytes() == only for r in range(3))


def test_a_folder_with_a_data_set_in_it_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucpl.formats.folders.reading.FILES_MAX", 9)
    good("inspect", source)
    (source / "one_more").write_text("")
    done = ucpl("inspect", source)
    assert done.status == 3 and "E489" in done.err


# ---- as all that is written --------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes(source: Path, tmp_path: Path) -> None:
    command = ("convert", source, tmp_path / "t", "--to", "zero1(dp=3)")
    set_failpoints("publish-before:1:enospc")
    assert ucpl(*command).status == 4
    assert not (tmp_path / "t").exists()
    set_failpoints("")
    assert "resumed" in good(*command, "--resume").out
    good("convert", source, tmp_path / "u", "--to", "zero1(dp=3)")
    assert digest(tmp_path / "t") == digest(tmp_path / "u")


def test_made_files_are_made_again_if_a_run_resumes(source: Path, tmp_path: Path) -> None:
    command = ("convert", source, tmp_path / "t", "--to", "zero1(dp=3, bf16=1)")
    set_failpoints("publish-before:2:enospc")  # the first is of the weights alone
    assert ucpl(*command).status == 4
    assert {p.name for p in tmp_path.glob(".t*")} == {".t.ucpl-work"}
    set_failpoints("")
    assert "resumed" in good(*command, "--resume").out
    good("convert", source, tmp_path / "u", "--to", "zero1(dp=3, bf16=1)")
    assert digest(tmp_path / "t") == digest(tmp_path / "u")
    assert "was finished by an earlier run" in good(*command, "--resume").out
    assert not list(tmp_path.glob(".t*"))
    set_failpoints("publish-before:1:enospc")
    assert ucpl("convert", source, tmp_path / "v", "--to", "zero1(dp=3, bf16=1)").status == 4
    assert not list(tmp_path.glob(".v*"))


def test_a_changed_file_next_to_the_shards_is_another_source(source: Path, tmp_path: Path) -> None:
    command = ("convert", source, tmp_path / "t", "--to", "zero1(dp=3)")
    set_failpoints("publish-before:1:enospc")
    ucpl(*command)
    set_failpoints("")
    (source / "trainer_state.json").write_text((source / "trainer_state.json").read_text().replace("0.75", "0.76"))
    done = ucpl(*command, "--resume")
    assert done.status == 5 and "E602" in done.err


@pytest.mark.fault("Hostile input", "a companion file that grows between two reads", "refused")
def test_a_file_next_to_the_shards_that_grew_since_it_was_opened(source: Path, tmp_path: Path) -> None:
    plan, opened = ucpl_api.plan(str(source), "zero1(dp=3)"), open_checkpoint(source)
    with (source / "trainer_state.json").open("a") as file:
        file.write("more")
    with pytest.raises(UcplError, match=r"E611.*trainer_state.json changed"):
        ucpl_api.apply(plan, opened, tmp_path / "t")
    assert not (tmp_path / "t").exists()


# ---- patterns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "rank"),
    [
        ("rng_state_{rank}.pth", "rng_state_10.pth", 10),
        ("rng_state_{rank}.pth", "rng_state_01.pth", None),
        ("rng_state_{rank}.pth", "rng_state_.pth", None),
        ("rng_state_{rank}.pth", "xrng_state_1.pth", None),
        ("rng_state_{rank}.pth", "rng_state_1_pth", None),
        ("*.model", "tokenizer.model", -1),
        ("*.model", "a/tokenizer.model", None),
        ("*/adapter_model.bin", "a/adapter_model.bin", -1),
        ("*/adapter_model.bin", "a/b/adapter_model.bin", None),
        ("global_step*/**", "global_step7/zero/a/b", -1),
        ("global_step*/**", "global_step7", None),
    ],
)
def test_a_pattern_and_a_name(pattern: str, name: str, rank: int | None) -> None:
    assert CompanionRule(pattern, "carry", "").rank_of(name) == rank


# ---- a vocabulary that grows ------------------------------------------------------------------------------------------


def grown(source: Path, to: Path) -> str:
    """The source's model with nine words more."""
    text = ucpl_api.infer(source).text()
    head = text[: text.index("layout ")]
    line = next(line for line in head.splitlines() if "transformer.wte.weight" in line and "61" in line)
    to.write_text(head.replace(line, line.replace("61", "70")))
    return f"{to}:{head.split('model ', 1)[1].split()[0]}"


def test_config_json_has_the_vocabulary_of_the_weights(source: Path, tmp_path: Path) -> None:
    """In a model's folder, and next to shards with new weights."""
    model = grown(source, tmp_path / "grown.ucpl")
    how = ("--model", model, "--fill", "transformer.wte.weight=0", "--fill", "state exp_avg, exp_avg_sq=0")
    printed = good("convert", source, tmp_path / "t", "--to", "safetensors()", *how[:4]).out
    assert "config.json: vocab_size = 61 becomes 70" in printed
    good("convert", source, tmp_path / "z", "--to", "zero1(dp=3)", *how)
    for folder in ("t", "z"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["vocab_size"] == 70
    (source / "model.safetensors").unlink()
    printed = good("convert", source, tmp_path / "y", "--to", "zero1(dp=3)", *how).out
    assert "config.json has vocab_size = 61" in printed
