"""Weights are always obtainable.

This holds for any optimizer and any state of its files, on request.

A run whose optimizer shards are gone is converted as weights only where somebody says that this is meant.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.cli.command import ucpl as command
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl.errors import UcplError
from ucpl.formats.dcp.metadata import read_metadata
from ucpl.formats.opening import open_checkpoint

FIXTURES = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[1] / "fixtures")) / "deepspeed"
GONE = {
    "z1_dp4": "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 3 more",
    "z1_dp2_bf16": "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 1 more",
    "z2_dp3_frozen": "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 2 more",
    "pp2_dp2_z1": "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 3 more",
}


def without_shards(name: str, to: Path) -> Path:
    shutil.copytree(FIXTURES / name, to)
    for shard in to.glob("global_step*/*_optim_states.pt"):
        shard.unlink()
    return to


@pytest.mark.parametrize("name", GONE)
def test_it_is_refused_by_the_files_that_are_gone(name: str, tmp_path: Path) -> None:
    source = without_shards(name, tmp_path / "source")
    with pytest.raises(ucpl.UcplError, match=f"E467.*{GONE[name]}"):
        ucpl.convert(source, tmp_path / "target", "plain()")
    with pytest.raises(ucpl.UcplError, match="E467"):
        ucpl.plan(str(source), "plain()")
    assert not (tmp_path / "target").exists()
    assert "no shard of the optimizer is there" in command("inspect", source).out


@pytest.mark.parametrize("name", GONE)
def test_the_weights_are_converted_on_request(name: str, tmp_path: Path) -> None:
    source = without_shards(name, tmp_path / "source")
    done = command("convert", source, tmp_path / "target", "--to", "plain()", "--weights-alone")
    assert done.status == 0, done.err
    found = torch.load(tmp_path / "target" / "plain.pt", weights_only=True)["params"]
    whole = ucpl.convert(FIXTURES / name, tmp_path / "whole", "plain()")
    assert whole
    held = torch.load(tmp_path / "whole" / "plain.pt", weights_only=True)["params"]
    assert found.keys() == held.keys()
    for tensor, states in held.items():
        for state in ("weight", "buffer"):
            assert state not in states or torch.equal(found[tensor][state], states[state])


def test_a_folder_that_never_had_an_optimizer_needs_no_word(tmp_path: Path) -> None:
    source = without_shards("z1_dp4", tmp_path / "source")
    ucpl.convert(source, tmp_path / "there", "zero0(dp=2)", weights_alone=True)
    ucpl.convert(tmp_path / "there", tmp_path / "back", "plain()")


# ---- an optimizer that is there ----------------------------------------------------------------------------------------

ALL = FIXTURES.parent
RUNS = [
    "deepspeed/z0_dp2_bf16",
    "deepspeed/z1_dp2_bf16",
    "deepspeed/z1_dp2_elastic",
    "deepspeed/z2_dp3_frozen",
    "deepspeed/pp2_dp2_z1",
    "deepspeed/moe_ep2_dp2_z1",
    "deepspeed/z3_dp2_subgroup",
    "dcp/fsdp1_local_w4",
    "dcp/fsdp2_w4",
    "megatron/dist_adam_tp2",
    "megatron/dist_dp_reshardable_tp2",
    "megatron/legacy_buckets",
    "megatron/fsdp_tp2",
    "universal/z1_dp4",
    "accelerate/fsdp",
]
MASTERED = (
    "z3_",
    "moe_",
    "universal",
)  # whose weights and masters are in shards of the optimizer, or are read with them


def run_of(name: str, to: Path) -> Path:
    shutil.copytree(ALL / name, to)
    if name.startswith("universal"):
        (to / "latest_universal").write_text(next(p.name for p in to.iterdir() if p.is_dir()))
    return to


def plain_of(source: Path, to: Path, *, weights_alone: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    ucpl.convert(source, to, "plain()", weights_alone=weights_alone)
    found = torch.load(to / "plain.pt", weights_only=True)
    return {**found["params"], **{name: {"weight": buffer} for name, buffer in found["buffers"].items()}}


@pytest.mark.parametrize("name", RUNS)
def test_an_optimizer_that_is_there_is_left_out(name: str, tmp_path: Path) -> None:
    """As it was ignored where shards lie.

    The target has the weights, and nothing of the optimizer but its masters.
    """
    source = run_of(name, tmp_path / "source")
    held, found = plain_of(source, tmp_path / "whole"), plain_of(source, tmp_path / "alone", weights_alone=True)
    assert any(len(states) > 1 for states in held.values())
    assert found.keys() == held.keys()
    assert all(torch.equal(found[n]["weight"], held[n]["weight"]) for n in held)
    kept = {"weight", "fp32"} if any(mark in name for mark in MASTERED) else {"weight"}
    assert {state for states in found.values() for state in states} <= kept
    made = ucpl.plan(str(source), "plain()", weights_alone=True)
    assert made.account is not None
    left = made.account.of("not read")
    assert any("--weights-alone" in entry.why for entry in left)
    ucpl.apply(made, source, tmp_path / "applied")
    assert (tmp_path / "applied" / "plain.pt").stat().st_size == (tmp_path / "alone" / "plain.pt").stat().st_size


def test_a_pipeline_whose_shards_name_its_tensors_gives_its_weights(tmp_path: Path) -> None:
    """BF16_Optimizer without ZeRO.

    No other file names the parameters of a stage, and the tied ones.
    """
    source = ALL / "numbered" / "pp2_bf16"
    held, found = plain_of(source, tmp_path / "whole"), plain_of(source, tmp_path / "alone", weights_alone=True)
    assert found.keys() == held.keys() and all(torch.equal(found[n]["weight"], held[n]["weight"]) for n in held)
    assert {state for states in found.values() for state in states} == {"weight"}
    for change in (Path.unlink, truncated):
        less = shutil.copytree(source, tmp_path / change.__name__)
        for shard in less.rglob("bf16_zero_*"):
            change(shard)
        with pytest.raises(ucpl.UcplError) as caught:
            ucpl.convert(less, tmp_path / "refused", "plain()")
        assert any("--weights-alone" in note for note in caught.value.diagnostics[0].notes)
        apart = plain_of(
            less, tmp_path / f"of_{change.__name__}", weights_alone=True
        )  # tied layers: each by its own name
        bits = {tuple(states["weight"].view(-1).tolist()) for states in apart.values()}
        assert bits == {tuple(states["weight"].view(-1).tolist()) for states in held.values()}


GROUPED = [
    "deepspeed/z1_dp4",
    "deepspeed/z2_dp3_frozen",
    "deepspeed/pp2_dp2_z1_functions",
    "numbered/pp2",
    "numbered/pp2_bf16",
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", GROUPED)
def test_frozen_parameters_and_groups_are_kept(name: str, stage: int, tmp_path: Path) -> None:
    """A job with the same groups loads the weights and masters."""
    source = open_checkpoint(ALL / name).state
    ucpl.convert(ALL / name, tmp_path / "target", f"zero{stage}(dp = 2)", weights_alone=True)
    target = open_checkpoint(tmp_path / "target").state
    assert {t.name: t.kind for t in target.tensors} == {t.name: t.kind for t in source.tensors}
    assert [{*group.members} for group in target.groups] == [{*group.members} for group in source.groups]
    assert len(target.groups) == 2


OF_MEGATRON = ["legacy_buckets", "legacy_moe", "legacy_vpp", "fsdp_tp2", "dist_adam_tp2", "dist_dp_reshardable_tp2"]


@pytest.mark.parametrize("target", ["zero1(dp = 2)", "zero3(dp = 3)", "universal()", "megatron_core()"])
@pytest.mark.parametrize("name", OF_MEGATRON)
def test_masters_of_weights_alone_are_made_of_the_weights(name: str, target: str, tmp_path: Path) -> None:
    """A Megatron target that stores masters begins with the weights."""
    source = ALL / "megatron" / name
    ucpl.convert(source, tmp_path / "made", target, weights_alone=True)
    if target == "universal()":
        (tmp_path / "made" / "latest_universal").write_text(next((tmp_path / "made").glob("*/zero")).parent.name)
    held, made = (
        plain_of(source, tmp_path / "whole", weights_alone=True),
        plain_of(tmp_path / "made", tmp_path / "back"),
    )
    for tensor, states in made.items():
        assert set(states) <= {"weight", "fp32"}
        assert "fp32" not in states or torch.equal(states["fp32"], states["weight"].float()), tensor
        if tensor in held:
            assert torch.equal(states["weight"], held[tensor]["weight"]), tensor
    assert target == "megatron_core()" or any("fp32" in states for states in made.values())


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(folder: Path, prefix: str) -> None:
    """Archives of the optimizer in chunks of DCP, overwritten."""
    metadata = read_metadata(folder)
    places = [c.place for name, one in metadata.tensors.items() if name.startswith(prefix) for c in one.chunks]
    assert places
    for place in places:
        with (folder / place.file).open("r+b") as file:
            file.seek(place.start)
            file.write(bytes(place.size or 0))


def one_shard_lost(source: Path) -> None:
    next(source.glob("global_step*/*_rank_1_*optim_states.pt")).unlink()


def one_shard_damaged(source: Path) -> None:
    truncated(next(source.glob("global_step*/*_rank_1_*optim_states.pt")))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deepspeed/z1_dp2_bf16": one_shard_lost,
    "deepspeed/z1_dp4": one_shard_damaged,
    "deepspeed/z2_dp3_frozen": one_shard_lost,
    "deepspeed/pp2_dp2_z1": one_shard_lost,
    "dcp/fsdp2_w4": lambda source: zeroed(source, "optim."),
    "megatron/dist_adam_tp2": lambda source: zeroed(step_of(source), "optimizer."),
    "megatron/legacy_buckets": lambda source: truncated(next(source.rglob("distrib_optim.pt"))),
    "universal/z1_dp4": lambda source: truncated(next(source.rglob("exp_avg.pt"))),
    "accelerate/fsdp": lambda source: truncated(next(source.rglob("optimizer_0/.metadata"))),
}


def step_of(source: Path) -> Path:
    return next(source.rglob(".metadata")).parent


@pytest.mark.parametrize("name", DAMAGE)
def test_an_optimizer_that_is_damaged_stops_no_weights(name: str, tmp_path: Path) -> None:
    source = run_of(name, tmp_path / "source")
    held = plain_of(source, tmp_path / "whole")
    DAMAGE[name](source)
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.convert(source, tmp_path / "run", "plain()")
    assert any("--weights-alone" in note for note in caught.value.diagnostics[0].notes), caught.value.diagnostics[0]
    found = plain_of(source, tmp_path / "alone", weights_alone=True)
    assert found.keys() == held.keys() and all(torch.equal(found[n]["weight"], held[n]["weight"]) for n in held)
    account = ucpl.plan(str(source), "plain()", weights_alone=True).account
    assert account is not None
    files = [file for e in account.of("not read") if e.kind == "file" for file in e.names]
    assert not [(a, b) for a in files for b in files if b.endswith(f"/{a}")]  # each is named once


MOE = {
    "moe_ep2_dp4_z1": [5, 5, 24, 12],  # members of the groups that the target has
    "moe_of_0.17.6": [26, 8],  # whose model states name no groups: experts are apart
    "moe_of_0.9.5": [25, 8],
    "pp2_ep2_dp2_z1": [7, 9, 16],
    "autoep_ep2_dp4_z1": [12, 5, 24],
}


@pytest.mark.parametrize("name", MOE)
def test_experts_are_read_without_the_optimizers_shards(name: str, tmp_path: Path) -> None:
    whole = plain_of(ALL / "deepspeed" / name, tmp_path / "whole")
    for damage in (truncated, Path.unlink):
        source = tmp_path / damage.__name__
        shutil.copytree(ALL / "deepspeed" / name, source)
        for shard in source.rglob("*optim_states.pt"):
            damage(shard)
        with pytest.raises(ucpl.UcplError) as caught:
            ucpl.convert(source, tmp_path / "run", "plain()")
        error = caught.value.diagnostics[0]
        assert error.code == ("E401" if damage is truncated else "E467"), error
        assert "--weights-alone" in "".join((error.remedy, *error.notes))
        found = plain_of(source, tmp_path / f"{damage.__name__}_alone", weights_alone=True)
        second = found.keys() - whole.keys()
        assert second <= {"lm_head.weight"} and found.keys() - second == whole.keys()
        assert all(torch.equal(found[n]["weight"], whole[n]["weight"]) for n in whole)
    made = tmp_path / "made"
    ucpl.convert(tmp_path / "unlink", made, "zero1(dp = 2, ep = 2)", weights_alone=True)
    assert [len(group.members) for group in open_checkpoint(made).state.groups] == MOE[name]


def test_an_optimizer_of_experts_without_zero_is_named(tmp_path: Path) -> None:
    shutil.copytree(ALL / "deepspeed" / "moe_of_0.9.5", tmp_path / "source")
    for shard in tmp_path.rglob("*optim_states.pt"):
        shard.unlink()
    step = next((tmp_path / "source").glob("global_step*"))
    torch.save({"optimizer": {"state": {}, "param_groups": []}}, step / "expp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ucpl.UcplError, match=r"E457.*an optimizer of experts and no shard of ZeRO") as caught:
        ucpl.convert(tmp_path / "source", tmp_path / "run", "plain()")
    assert any("--weights-alone" in note for note in caught.value.diagnostics[0].notes)
    assert plain_of(tmp_path / "source", tmp_path / "alone", weights_alone=True)


class Codes(torch.Tensor):
    """A tensor as torchao's optimizers keep their moments.

    A class of its own, with codes in it.
    """

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return False if func is torch.ops.aten.is_pinned.default else cls(args[0].codes)


@pytest.fixture
def of_codes(tmp_path: Path) -> Path:
    """A folder of DCP whose moments are of such a class."""
    codes = torch.ones(4, 3, dtype=torch.uint8)
    state = {"w": {"step": torch.tensor(2.0), "exp_avg": Codes(codes), "exp_avg_sq": Codes(codes)}}
    groups = [{"lr": 0.1, "params": ["w"]}]
    tree = {"model": {"w": torch.arange(12.0).reshape(4, 3)}, "optimizer": {"state": state, "param_groups": groups}}
    save(tree, checkpoint_id=tmp_path / "codes", no_dist=True)
    return tmp_path / "codes"


@pytest.fixture
def of_parts(of_codes: Path) -> Path:
    """The same of two ranks: two objects of two rows per moment."""
    said = pickle.loads((of_codes / ".metadata").read_bytes())
    file = of_codes / "__0_0.distcp"
    for state in ("exp_avg", "exp_avg_sq"):
        name = f"optimizer.state.w.{state}"
        chunks = said.state_dict_metadata[name].chunks
        index = next(one for one in said.storage_data if one.fqn == name)
        place = said.storage_data[index]
        raw = file.read_bytes()
        file.write_bytes(raw + raw[place.offset : place.offset + place.length])
        said.storage_data[replace(index, offset=torch.Size([2, 0]), index=1)] = replace(place, offset=len(raw))
        half = replace(chunks[0], sizes=torch.Size([2, 3]))
        said.state_dict_metadata[name].chunks = [half, replace(half, offsets=torch.Size([2, 0]))]
    (of_codes / ".metadata").write_bytes(pickle.dumps(said))
    return of_codes


@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("safetensors()", {}),
        ("plain()", {"weights_alone": True}),
        ("dcp(fsdp = 2)", {"drop": ["exp_avg", "exp_avg_sq"]}),
        ("plain()", {"drop": ["exp_avg", "exp_avg_sq", "step"]}),
        ("zero1(dp = 2)", {"weights_alone": True}),
    ],
)
def test_states_of_a_class_of_their_own_are_named_and_left_out(
    of_parts: Path, tmp_path: Path, target: str, how: dict[str, Any]
) -> None:
    for goal in ("dcp(fsdp = 2)", "plain()"):
        with pytest.raises(
            ucpl.UcplError, match=r"E460: `exp_avg` of `w` is a tensor of the class .*\.Codes"
        ) as caught:
            ucpl.convert(of_parts, tmp_path / "run", goal)
        found = caught.value.diagnostics[0]
        assert "--drop exp_avg --drop exp_avg_sq" in found.remedy and any(
            "--weights-alone" in note for note in found.notes
        )
    done = ucpl.convert(of_parts, tmp_path / "target", target, **how)
    assert done.plan.account is not None
    assert "exp_avg" in [name for entry in done.plan.account.of("not read") for name in entry.names]
    ucpl.convert(tmp_path / "target", tmp_path / "back", "plain()")
    found = torch.load(tmp_path / "back" / "plain.pt", weights_only=True)["params"]
    assert torch.equal(found["w"]["weight"], torch.arange(12.0).reshape(4, 3))


def test_a_look_at_such_a_folder_names_what_is_not_read(of_parts: Path) -> None:
    done = command("inspect", of_parts)
    assert done.status == 0, done.err
    assert (
        "not read      step, exp_avg, exp_avg_sq: it cannot be read: `exp_avg` of `w` is a tensor of the class"
        in done.out
    )


def test_verify_and_infer_name_what_is_not_read_of_such_a_folder(of_parts: Path, tmp_path: Path) -> None:
    passed = "not read: step, exp_avg, exp_avg_sq: it cannot be read: `exp_avg` of `w` is a tensor of the class"
    found = ucpl.verify(of_parts)
    assert found and any(note.startswith(passed) for note in found.notes)
    assert f"# {passed}" in ucpl.infer(of_parts).text()
    assert command("check", written(tmp_path, ucpl.infer(of_parts).text())).status == 0
    ucpl.convert(of_parts, tmp_path / "alone", "plain()", weights_alone=True)
    assert ucpl.compare(of_parts, tmp_path / "alone", weights=True)
    with pytest.raises(ucpl.UcplError, match="E460") as caught:
        ucpl.compare(of_parts, tmp_path / "alone")
    assert caught.value.diagnostics[0].remedy == "compare the weights alone: --weights"


def test_complete_objects_of_a_class_are_carried_if_it_is_allowed(of_codes: Path, tmp_path: Path) -> None:
    with pytest.raises(ucpl.UcplError, match=r"E504.*\.Codes"):
        ucpl.convert(of_codes, tmp_path / "run", "dcp(fsdp = 2)")
    ucpl.convert(of_codes, tmp_path / "run", "dcp(fsdp = 2)", allow_globals=[f"{__name__}.Codes"])
    held: dict[str, Any] = {"optimizer": {"state": {"w": {"exp_avg": Codes(torch.zeros(4, 3, dtype=torch.uint8))}}}}
    load(held, checkpoint_id=tmp_path / "run", no_dist=True)
    assert bool((held["optimizer"]["state"]["w"]["exp_avg"].codes == 1).all())
    ucpl.convert(of_codes, tmp_path / "less", "dcp(fsdp = 2)", drop=["exp_avg", "exp_avg_sq"])
    assert "optimizer_values" not in open_checkpoint(tmp_path / "less").state.blobs


def written(folder: Path, text: str) -> Path:
    (folder / "inferred.ucpl").write_text(text)
    return folder / "inferred.ucpl"


def test_an_optimizer_alone_is_no_weights(tmp_path: Path) -> None:
    moments = {"w": {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(1.0)}}
    groups = [{"params": ["w"], "lr": 0.1}]
    (tmp_path / "run" / "model").mkdir(parents=True)
    source = tmp_path / "run" / "optimizer"
    save({"optim": {"state": moments, "param_groups": groups}}, checkpoint_id=source, no_dist=True)
    for to in ("safetensors()", "plain()", "zero1(dp=2)"):
        more = ("--weights-alone",) if to == "zero1(dp=2)" else ()
        done = command("convert", source, tmp_path / "out", "--to", to, *more)
        assert done.status == 3 and ("E439" if more else "E524") in done.err, done.err
        assert more or f"model-dcp+{source} names both" in done.err.replace("\n", " "), done.err
        assert not (tmp_path / "out").exists()


def test_a_lost_shard_of_stage_3_cannot_be_rescued(tmp_path: Path) -> None:
    source = shutil.copytree(ALL / "deepspeed" / "z3_dp2_subgroup", tmp_path / "source")
    next(source.rglob("zero_pp_rank_1_*optim_states.pt")).unlink()
    for weights_alone in (False, True):
        with pytest.raises(ucpl.UcplError, match="E452") as caught:
            ucpl.convert(source, tmp_path / "no", "zero3(dp=2)", weights_alone=weights_alone)
        assert any("weights are in that file, too" in note for note in caught.value.diagnostics[0].notes)


class Options:
    """A script's own class, which no reader loads."""


@pytest.mark.parametrize("to", ["torch_file()", "zero1(dp=2)", "dcp(fsdp=2)", "plain()"])
@pytest.mark.parametrize("is_object", [False, True])
def test_objects_of_foreign_classes_do_not_keep_weights_back(to: str, is_object: bool, tmp_path: Path) -> None:
    """The optimizer may be an object, and the options of a script."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    states: object = optimizer if is_object else optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": states, "args": Options(), "epoch": 3}, tmp_path / "a.pt")
    if to != "plain()":  # which keeps them as they are
        with pytest.raises(UcplError, match="E504"):
            ucpl.convert(tmp_path / "a.pt", tmp_path / "all", to)
    done = command("convert", tmp_path / "a.pt", tmp_path / "out", "--to", to, "--weights-alone")
    assert done.status == 0, done.err
    assert "args: left out by --weights-alone" in done.out and "optimizer: left out by --weights-alone" in done.out
    plan = tmp_path / "x.plan"
    assert command("plan", "--from", tmp_path / "a.pt", "--to", to, "--weights-alone", "-o", plan).status == 0
    assert command("apply", plan, tmp_path / "a.pt", tmp_path / "again").status == 0
    ucpl.convert(tmp_path / "again", tmp_path / "plain.pt", "plain()")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    assert {name: torch.equal(found[name]["weight"], one) for name, one in model.state_dict().items()} == {
        "weight": True,
        "bias": True,
    }
