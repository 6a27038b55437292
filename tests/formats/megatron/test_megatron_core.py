"""Folders of Megatron-Core's distributed format, written by megatron-core 0.16.1 and 0.13.1: exact.

Weights, masters and moments are a formula of each tensor's name, so that they do not depend on ucpl's reader.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError
from ucpl.formats.dcp.cells import boxes_of_run
from ucpl.formats.dcp.metadata import ByteRange, ChunkedTensor, Metadata, StoredChunk
from ucpl.formats.leaving import objects_advice
from ucpl.formats.megatron.buckets import RankShares, buckets_in, runs_of
from ucpl.formats.opening import open_checkpoint
from ucpl.registry import format_named

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
SUFFIXES = {
    "weight": "",
    "fp32": "",
    "exp_avg": ".exp_avg",
    "exp_avg_sq": ".exp_avg_sq",
    "momentum_buffer": ".momentum_buffer",
}


def drawn(key: str, shape: list[int]) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def value_of(said: dict[str, object], state: str) -> torch.Tensor:
    """A fixture's tensor by its formula.

    States in f32, weights in their dtype.
    """
    shape, index = said["fshape"], said.get("index", [])
    assert isinstance(shape, list) and isinstance(index, list)
    whole = drawn(f"{said['f']}{SUFFIXES[state]}", shape)[tuple(index)]
    if "half" in said:
        whole = whole.chunk(2, 0)[int(str(said["half"]))]
    return whole.to(getattr(torch, str(said["dtype"]))) if state == "weight" else whole


def truth(name: str) -> dict[str, dict[str, object]]:
    """Of weights and buffers, by name."""
    told = json.loads((FIXTURES / f"{name}.truth.json").read_text())["tensors"]
    return {key: said for key, said in told.items() if "f" in said and "optimizer." not in key}


States = dict[str, torch.Tensor]


def plain_of(name: str, folder: Path) -> tuple[dict[str, States], States]:
    """Parameters and buffers."""
    ucpl.convert(FIXTURES / name, folder, to="plain()")
    held = torch.load(folder / "plain.pt", weights_only=True)
    return held["params"], held["buffers"]


def assert_as_written(name: str, states: tuple[str, ...], folder: Path) -> None:
    parameters, buffers = plain_of(name, folder)
    wanted = truth(name)
    assert parameters.keys() | buffers.keys() == wanted.keys()
    for key, said in wanted.items():
        if key in buffers:
            assert torch.equal(buffers[key], value_of(said, "weight")), key
            continue
        found = parameters[key]
        assert found.keys() - {"step"} <= {"weight", *states}
        for state in found.keys() - {"step"}:
            assert torch.equal(found[state], value_of(said, state)), (key, state)
        if states:
            assert {"fp32"} < found.keys() and ("exp_avg" in found or "momentum_buffer" in found), key


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("dist_moe", ("fp32", "exp_avg", "exp_avg_sq")),
        ("dist_muon", ("fp32", "exp_avg", "exp_avg_sq", "momentum_buffer")),
        ("dist_buckets", ("fp32", "exp_avg", "exp_avg_sq")),
        ("dist_moe_buckets", ("fp32", "exp_avg", "exp_avg_sq")),
        ("dist_split", ("fp32", "exp_avg", "exp_avg_sq")),  # three data-parallel ranks: runs end within rows
        ("dist_of_0_19", ("fp32", "exp_avg", "exp_avg_sq")),  # no common.pt
    ],
)
def test_each_value_is_as_megatron_wrote_it(tmp_path: Path, name: str, states: tuple[str, ...]) -> None:
    assert_as_written(name, states, tmp_path / "plain")


def test_the_common_state_of_0_19_is_an_object_among_the_chunks(tmp_path: Path) -> None:
    """A folder with an object equals one with common.pt."""
    folder = tmp_path / "in"
    shutil.copytree(FIXTURES / "dist_of_0_19", folder)
    found = open_checkpoint(folder)
    assert "common.pt" not in found.files
    assert "common_state/shard_0_1" not in str(found.state.blobs)
    assert {"iteration", "checkpoint_version", "megatron"} <= found.state.carried.keys()
    assert set(found.state.scalars["step"].values()) == {1.0}
    ucpl.convert(folder, tmp_path / "out", to="megatron_core()")
    assert (tmp_path / "out" / "common.pt").is_file() and ucpl.compare(folder, tmp_path / "out")

    held = pickle.loads((folder / ".metadata").read_bytes())
    del held.state_dict_metadata["common_state/shard_0_1"]
    held.storage_data = {index: at for index, at in held.storage_data.items() if index.fqn != "common_state/shard_0_1"}
    (folder / ".metadata").write_bytes(pickle.dumps(held))
    with pytest.raises(UcplError, match=r"E400.*no common\.pt and no `common_state/shard_0_1`"):
        open_checkpoint(folder)


def test_groups_are_dealt_by_megatrons_rule_and_steps_are_counted(tmp_path: Path) -> None:
    train_state = open_checkpoint(FIXTURES / "dist_moe").state
    found = [(g.hyper["wd_mult"], g.hyper["is_expert_parallel"], len(g.members)) for g in train_state.groups]
    assert found == [(1.0, False, 5), (0.0, False, 4), (1.0, True, 2)]
    assert set(train_state.scalars["step"].values()) == {1.0} and len(train_state.scalars["step"]) == 11
    muon = open_checkpoint(FIXTURES / "dist_muon")
    by_name = {g.name: g.members for g in muon.state.groups}
    states = {t.name: t.states for t in muon.state.tensors}
    assert all("momentum_buffer" in states[n] for n in by_name["0"]) and len(by_name["0"]) == 4
    assert all("exp_avg" in states[n] for n in (*by_name["1"], *by_name["2"]))
    steps = muon.state.scalars["step"]
    assert steps.keys() == {*by_name["1"], *by_name["2"]}, "Muon counts no steps"


def test_copies_of_moments_are_reported() -> None:
    """Each tp rank has moments of norms; the first rank's are read."""
    (told,) = open_checkpoint(FIXTURES / "dist_moe_buckets").remarks
    assert "the first rank's are taken" in told and "layer_norm_weight" in told


def test_runs_of_flattened_parts_as_megatron_0_13_wrote_them(tmp_path: Path) -> None:
    """Its masters are the weights; moments are joined by hand here."""
    held, _ = plain_of("dist_old", tmp_path / "plain")
    assert len(held) == 13
    for name, states in held.items():
        assert states.keys() == {"weight", "fp32", "exp_avg", "exp_avg_sq", "step"}
        assert torch.equal(states["weight"], drawn(name, list(states["weight"].shape)))
        assert torch.equal(states["fp32"], states["weight"])
        assert not torch.equal(states["exp_avg"], torch.zeros_like(states["exp_avg"]))
    qkv = open_checkpoint(FIXTURES / "dist_old").extents
    key = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    assert {e.shape for (_, k), e in qkv.items() if k[0] == key} == {(1, 32, 32)}


def test_a_run_with_a_tracker_is_opened_at_its_newest_iteration(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "dist_moe", tmp_path / "run" / "iter_0000010")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    found = open_checkpoint(tmp_path / "run")
    assert found.tag == "iter_0000010" and found.root == tmp_path / "run" / "iter_0000010"
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(UcplError) as refused:
        open_checkpoint(tmp_path / "run")
    said = refused.value.diagnostics[0]
    assert said.code == "E532" and "says '20'" in said.message and "iter_0000010" in said.remedy


def boxes_by_hand(shape: tuple[int, ...], low: int, high: int) -> set[tuple[int, ...]]:
    places = torch.arange(prod(shape)).reshape(shape)
    return {tuple(at) for at in ((places >= low) & (places < high)).nonzero().tolist()}


def runs() -> Iterator[tuple[tuple[int, ...], int, int]]:
    for shape in ((7,), (3, 4), (2, 3, 4), (3, 1, 2), (1, 5)):
        for low in range(prod(shape) + 1):
            for high in range(low, prod(shape) + 1):
                yield shape, low, high


def test_a_run_of_elements_is_few_boxes() -> None:
    for shape, low, high in runs():
        found = list(boxes_of_run(shape, low, high))
        assert len(found) <= 2 * len(shape) - 1
        places = torch.arange(prod(shape)).reshape(shape)
        covered: list[tuple[int, ...]] = []
        for begin, size, first in found:
            inside = places[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
            assert int(inside.flatten()[0]) == first
            covered += [tuple(i) for n in inside.flatten().tolist() for i in (places == n).nonzero().tolist()]
        assert len(covered) == len(set(covered)) and set(covered) == boxes_by_hand(shape, low, high)


def repickled(folder: Path, change: object) -> None:
    """common.pt with another value."""
    value = torch.load(folder / "common.pt", weights_only=False)
    assert callable(change)
    change(value)
    torch.save(value, folder / "common.pt")


def refusal(folder: Path) -> tuple[str, str]:
    with pytest.raises(UcplError) as refused:
        open_checkpoint(folder)
    return refused.value.diagnostics[0].code, str(refused.value)


def test_a_parameter_that_no_group_takes_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "dist_moe", tmp_path / "dist")
    repickled(folder, lambda value: value["optimizer"].pop(0))
    code, text = refusal(folder)
    assert code == "E531" and "`output_layer.weight`" in text


def metadata_without(folder: Path, name: str) -> None:
    value = pickle.loads((folder / ".metadata").read_bytes())
    del value.state_dict_metadata[name]
    value.storage_data = {index: place for index, place in value.storage_data.items() if index.fqn != name}
    value.all_local_plans = None
    (folder / ".metadata").write_bytes(pickle.dumps(value))


def test_a_moment_of_no_tensor_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "dist_muon", tmp_path / "dist")
    metadata_without(folder, "output_layer.weight")
    code, text = refusal(folder)
    assert code == "E530" and "output_layer.weight" in text


def test_buckets_that_are_not_the_parameters_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "dist_buckets", tmp_path / "dist")
    metadata_without(folder, "decoder.final_layernorm.weight")
    code, text = refusal(folder)
    assert code == "E533" and "2 groups" in text


def with_exchanged_norms(folder: Path, listed: bool) -> None:
    """Exchange two norms in `.metadata`.

    listed: the places of their names; else their weights.
    """
    value = pickle.loads((folder / ".metadata").read_bytes())
    one, other = (f"decoder.layers.{n}.layer_norm_weight" for n in ("self_attention.linear_qkv", "mlp.linear_fc1"))
    names = {one: other, other: one}
    if listed:
        described = {names.get(name, name): of for name, of in value.state_dict_metadata.items()}
        assert described.keys() == value.state_dict_metadata.keys()
        value.state_dict_metadata = {name: value.state_dict_metadata[name] for name in described}
    else:
        places = value.storage_data.items()
        value.storage_data = {evolve_index(at, names.get(at.fqn, at.fqn)): place for at, place in places}
    value.all_local_plans = None
    (folder / ".metadata").write_bytes(pickle.dumps(value))


def evolve_index(at: Any, name: str) -> Any:
    return type(at)(name, at.offset, at.index)


def test_parameters_in_another_order_than_the_listed_one_are_found(tmp_path: Path) -> None:
    """Sizes agree with several orders, and masters with one."""
    folder = shutil.copytree(FIXTURES / "dist_buckets", tmp_path / "dist")
    with_exchanged_norms(folder, listed=True)
    ucpl.convert(folder, tmp_path / "one", to="plain()")
    ucpl.convert(FIXTURES / "dist_buckets", tmp_path / "two", to="plain()")
    assert ucpl.compare(tmp_path / "one", tmp_path / "two")


def test_parameters_in_another_order_are_no_masters_of_the_weights(tmp_path: Path) -> None:
    """Sizes agree if weights are exchanged, and masters do not."""
    folder = shutil.copytree(FIXTURES / "dist_buckets", tmp_path / "dist")
    with_exchanged_norms(folder, listed=False)
    with pytest.raises(UcplError) as refused:
        ucpl.convert(folder, tmp_path / "plain", to="plain()")
    (said,) = refused.value.diagnostics
    assert said.code == "E615" and "layer_norm_weight" in said.message and not said.notes, "another's, not moved"
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("name", ["dist_moe", "dist_buckets", "dist_old"])
def test_the_text_of_a_folder_describes_it(tmp_path: Path, name: str) -> None:
    text = ucpl.infer(FIXTURES / name).text()
    (tmp_path / "it.ucpl").write_text(text)
    ucpl.convert(FIXTURES / name, tmp_path / "one", to="plain()", layout=f"{tmp_path}/it.ucpl:stored()")
    ucpl.convert(FIXTURES / name, tmp_path / "two", to="plain()")
    assert ucpl.compare(tmp_path / "one", tmp_path / "two")


# ---- targets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target"), [("dist_moe", "megatron_core(tp=3)"), ("dist_buckets", "megatron_core(tp=2, pp=2)")]
)
def test_torch_finds_each_tensor_in_a_target(tmp_path: Path, name: str, target: str) -> None:
    """By name, complete, from any ranks, as Megatron requests its parts."""
    ucpl.convert(FIXTURES / name, tmp_path / "made", to=target)
    wanted = {key: value_of(said, "weight") for key, said in truth(name).items()}
    for key, said in truth(name).items():
        if not key.endswith("expert_bias"):
            states = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            wanted |= {f"optimizer.state.{s}.{key}": value_of(said, state) for s, state in states.items()}
    found = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    load(found, checkpoint_id=tmp_path / "made", no_dist=True)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    common = torch.load(tmp_path / "made" / "common.pt", weights_only=False)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    optimizers = common["optimizer"] if 0 in common["optimizer"] else {0: common["optimizer"]}
    groups = [group for one in optimizers.values() for group in one["optimizer"]["param_groups"]]
    assert len(optimizers) == (2 if name == "dist_moe" else 1)
    assert all(group["step"] == 1.0 and group["lr"] == 0.001 for group in groups)
    assert json.loads((tmp_path / "made" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    source = open_checkpoint(FIXTURES / name).state
    assert open_checkpoint(tmp_path / "made").state.blobs.keys() == source.blobs.keys() == {"sharded_objects"}
    assert common["iteration"] == 10 and common["args"].optim == source.carried["args"].state["optim"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["dcp(fsdp=3)", "zero1(dp=3)", "universal()"])
def test_there_and_back_through_other_forms(tmp_path: Path, form: str) -> None:
    ucpl.convert(FIXTURES / "dist_moe", tmp_path / "there", to=form)
    ucpl.convert(tmp_path / "there", tmp_path / "back", to="megatron_core(pp=2)")
    assert ucpl.compare(FIXTURES / "dist_moe", tmp_path / "back")
    was, now = open_checkpoint(FIXTURES / "dist_moe"), open_checkpoint(tmp_path / "back")
    assert now.tag == "iter_0000010"
    assert [g.members for g in now.state.groups] == [g.members for g in was.state.groups]


RANDOM = ("rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2")


def test_random_states_go_through_dcp_and_are_reported_by_deepspeed(tmp_path: Path) -> None:
    source = open_checkpoint(FIXTURES / "dist_adam_tp2")
    ucpl.convert(FIXTURES / "dist_adam_tp2", tmp_path / "dcp", to="dcp(fsdp=3)")
    ucpl.convert(tmp_path / "dcp", tmp_path / "back", to="megatron_core(pp=2)")
    held, back = (one.state.blobs["sharded_objects"] for one in (source, open_checkpoint(tmp_path / "back")))
    assert isinstance(held, dict) and isinstance(back, dict) and set(RANDOM) < held.keys()
    assert held.keys() == back.keys()
    for name in RANDOM:
        was, now = (one[name][0][0] for one in (held, back))
        assert was.keys() == now.keys() and len(was["random_rng_state"][1]) == 625
        assert was["random_rng_state"] == now["random_rng_state"]
    (told,) = objects_advice(source)
    assert "2 in all: " + ", ".join(RANDOM) in told
    assert objects_advice(open_checkpoint(FIXTURES / "dist_moe")) == (), "None in every `_extra_state`"
    for form in ("zero1(dp=2)", "universal()"):
        plan = planned(Asked(None, form, FIXTURES / "dist_adam_tp2"), Given()).plan
        assert told in format_named(plan.target.framework).advice(source, plan.target)


def test_other_files_next_to_chunks_are_no_megatrons(tmp_path: Path) -> None:
    """metadata.json is a common name: Megatron-Core's says its backend."""
    ucpl.convert(FIXTURES / "dist_moe", tmp_path / "dcp", to="dcp(fsdp=2)")
    (tmp_path / "dcp" / "metadata.json").write_text('{"run": "mine"}')
    assert open_checkpoint(tmp_path / "dcp").format == "dcp"
    root = Path(shutil.copytree(FIXTURES / "dist_moe", tmp_path / "moe"))
    for text in ("{", '{"sharded_backenb": "torch_dist"}'):  # damaged: its states are no weights of a DCP folder
        (root / "metadata.json").write_text(text)
        assert open_checkpoint(root).format == "megatron_core"


def test_runs_of_an_optimizer_are_boxes_whoever_is_asked_for_them(tmp_path: Path) -> None:
    """A folder of Megatron-Core 0.13 without its own two files.

    Each tensor has its name and full shape.
    """
    root = Path(shutil.copytree(FIXTURES / "dist_old", tmp_path / "old"))
    root = next(root.rglob(".metadata")).parent
    (root / "metadata.json").unlink()
    (root / "common.pt").unlink()
    ucpl.convert(root, tmp_path / "plain", to="plain()")
    held = torch.load(tmp_path / "plain" / "plain.pt", weights_only=True)
    tensors = {name: states["weight"] for name, states in held["params"].items()} | held["buffers"]
    whole, _ = plain_of("dist_old", tmp_path / "whole")
    for name, states in whole.items():
        for state, entry in (("exp_avg", "exp_avg"), ("fp32", "fp32_param")):
            assert torch.equal(tensors[f"optimizer.state.{entry}.{name}"], states[state]), (name, state)


def test_a_run_below_a_folder_is_named_whatever_another_ones_tracker_says(tmp_path: Path) -> None:
    for run in ("a", "b"):
        shutil.copytree(FIXTURES / "dist_moe", tmp_path / run / "iter_0000010")
        (tmp_path / run / "latest_checkpointed_iteration.txt").write_text("10" if run == "b" else "20")
    with pytest.raises(UcplError) as refused:
        open_checkpoint(tmp_path)
    assert refused.value.diagnostics[0].code == "E435" and str(tmp_path / "b") in refused.value.diagnostics[0].remedy


def common_with(tmp_path: Path, fixture: str, change: Callable[[dict[object, object]], object]) -> Path:
    root = Path(shutil.copytree(FIXTURES / fixture, tmp_path / fixture))
    root = next(root.rglob("common.pt")).parent
    value = torch.load(root / "common.pt", weights_only=False)
    change(value)
    torch.save(value, root / "common.pt")
    return root


def stepped(value: dict[object, object], step: object) -> None:
    top = value["optimizer"]
    assert isinstance(top, dict)
    one = top.get(0, top)
    for group in one["optimizer"]["param_groups"]:
        group["step"] = step


def kept(value: dict[object, object], stack: str, template: object) -> None:
    value["ucpl"] = {"framework": "x", "version": "", "blobs": {}, "stacks": {stack: template}}


FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda value: stepped(value, "x"), "expected is a number"),
        (lambda value: stepped(value, [[]]), "expected is a number"),
        (lambda value: stepped(value, torch.ones(3)), "a tensor of one element"),
        (lambda value: kept(value, FC1, "a.{}.{}.{}"), "a name, with {}"),
        (lambda value: kept(value, FC1, "a.{}.b.{0}"), "a name, with {}"),
        (lambda value: kept(value, FC1, "a.{x.__class__}"), "a name, with {}"),
        (lambda value: kept(value, FC1, 5), "a text"),
        (
            lambda value: kept(value, "decoder.final_layernorm.weight", "a.{}.{}"),
            "for each of 1 dims at most",
        ),
    ],
    ids=["text", "lists", "tensor", "three slots", "number in a slot", "attribute", "number", "more slots than dims"],
)
def test_values_of_common_are_what_megatron_or_we_write(
    tmp_path: Path, change: Callable[[dict[object, object]], object], text: str
) -> None:
    root = common_with(tmp_path, "dist_moe", change)
    with pytest.raises(UcplError, match=re.escape(text)) as refused:
        open_checkpoint(root)
    assert refused.value.diagnostics[0].code == "E455"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"decoder.layers.999999999.mlp.linear_fc1.weight": (4, 2)}, "is of layers"),
        ({"decoder.layers.0.mlp.experts.local_experts.999999999.linear_fc1.weight": (4, 2)}, "is of experts"),
        ({"decoder.layers.mlp.linear_fc1.weight": (10**9, 2)}, "is of layers"),
        ({"decoder.layers.mlp.experts.experts.linear_fc1.weight": (1,)}, "is of experts"),
        ({"decoder.layers.mlp.linear_fc1.weight": ()}, "is of layers"),
    ],
    ids=["layer", "expert", "dim", "no dim of experts", "no dim"],
)
def test_numbers_of_layers_are_bounded_by_what_is_stored(names: dict[str, tuple[int, ...]], text: str) -> None:
    """A name of forty bytes must not create a billion layers."""
    tensors = {}
    for name, shape in names.items():
        at, size = (0,) * len(shape), (1,) * len(shape)
        tensors[name] = ChunkedTensor("bf16", shape, (StoredChunk(at, size, ByteRange("a", 0, None)),))
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16).bucket_idx_0.param"
    tensors[bucket] = ChunkedTensor("f32", (8,), (StoredChunk((0,), (8,), ByteRange("a", 0, None)),))
    root = Path("run")
    with pytest.raises(UcplError, match=text) as refused:
        runs_of(RankShares(Metadata(tensors=tensors), tuple(names), buckets_in((bucket,), root), root), lambda _: True)
    assert refused.value.diagnostics[0].code == "E533"


def test_groups_of_buckets_without_end_are_refused(tmp_path: Path) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    bucket = "optimizer.distributed.dp_group_idx_999999999.gbuf_idx_0.dtype_(torch.bfloat16).bucket_idx_0.param"
    place = ByteRange("a", 0, None)
    tensors = {
        name: ChunkedTensor("bf16", (4, 2), (StoredChunk((0, 0), (4, 2), place),)),
        bucket: ChunkedTensor("f32", (8,), (StoredChunk((0,), (8,), place),)),
    }
    with pytest.raises(UcplError) as refused:
        runs_of(
            RankShares(Metadata(tensors=tensors), (name,), buckets_in((bucket,), tmp_path), tmp_path), lambda _: True
        )
    assert refused.value.diagnostics[0].code == "E533"


@pytest.mark.parametrize("form", ["megatron_core(tp=2)", "megatron_legacy(tp=2)"])
def test_two_rates_in_one_group_of_megatrons_are_refused(tmp_path: Path, form: str) -> None:
    names = [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in (0, 1)]
    one = {state: torch.ones(4, 2) for state in ("weight", "exp_avg", "exp_avg_sq")}
    params = {name: {**one, "step": 7.0} for name in names}
    groups = [{"params": [name], "lr": rate} for name, rate in zip(names, (0.5, 0.25), strict=True)]
    torch.save({"params": params, "groups": groups}, tmp_path / "plain.pt")
    with pytest.raises(UcplError) as refused:
        ucpl.convert(tmp_path / "plain.pt", tmp_path / "made", to=form)
    said = refused.value.diagnostics[0]
    assert said.code == "E471" and "lr is 0.5 and 0.25" in said.message and names[1] in said.message


def test_groups_of_another_framework_are_dealt_as_megatron_deals_them(tmp_path: Path) -> None:
    """One group of torch becomes two, one of them without decay.

    Every linear module has an `_extra_state`.
    """
    names = ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.bias"]
    weights = {name: torch.arange(6.0).reshape((3, 2) if "weight" in name else 6) for name in names}
    params = {n: {"weight": t, "exp_avg": t + 1, "exp_avg_sq": t + 2, "step": 7.0} for n, t in weights.items()}
    plain = {"params": params, "groups": [{"params": names, "lr": 0.5, "weight_decay": 0.1}]}
    torch.save(plain, tmp_path / "plain.pt")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "made", to="megatron_core(tp=2)")
    found = open_checkpoint(tmp_path / "made")
    assert found.tag == "iter_0000007"
    groups = [(g.members, g.hyper["wd_mult"], g.hyper["lr"]) for g in found.state.groups]
    assert groups == [((names[0],), 1.0, 0.5), ((names[1],), 0.0, 0.5)]
    assert not any({"max_lr", "min_lr"} & g.hyper.keys() for g in found.state.groups), "the schedule's own"
    objects = found.state.blobs["sharded_objects"]
    assert objects == {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_1": [None]}
    common = torch.load(found.root / "common.pt", weights_only=False)
    assert common["checkpoint_version"] == 3.0, "before it, q, k and v were in another order"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plain: plain["params"]["output_layer.weight"].update(step=3.0), "at steps"),
        (lambda plain: plain["params"]["output_layer.weight"].update(eta=0.5), "`eta`"),
    ],
    ids=["two steps", "another number"],
)
def test_what_megatron_has_no_place_for_is_refused(tmp_path: Path, change: object, text: str) -> None:
    names = [WORDS, "output_layer.weight"]
    params = {n: {"weight": torch.ones(2, 2), "exp_avg": torch.ones(2, 2), "step": 7.0, "eta": 0.5} for n in names}
    if "eta" not in text:
        params = {n: {k: v for k, v in states.items() if k != "eta"} for n, states in params.items()}
    plain = {"params": params, "groups": [{"params": names, "lr": 0.5}]}
    assert callable(change)
    change(plain)
    torch.save(plain, tmp_path / "plain.pt")
    with pytest.raises(UcplError, match=text) as refused:
        ucpl.convert(tmp_path / "plain.pt", tmp_path / "made", to="megatron_core()")
    assert refused.value.diagnostics[0].code == "E471" and not (tmp_path / "made").exists()


@pytest.mark.parametrize("step", ["iter_12", "last"])
def test_a_step_that_megatron_does_not_look_for_is_refused(tmp_path: Path, step: str) -> None:
    with pytest.raises(UcplError, match=step) as refused:
        ucpl.convert(FIXTURES / "dist_moe", tmp_path / "made", to=f'megatron_core(step="{step}")')
    assert refused.value.diagnostics[0].code == "E471"


# ---- errors in saves of Megatron-Core up to 0.19.2
# -----------------------------------------------------------------------------

WORDS = "embedding.word_embeddings.weight"


def test_states_that_megatron_moved_are_diagnosed_and_what_is_there_is_saved(tmp_path: Path) -> None:
    """Masters and moments behind a padded bucket begin 64 elements late."""
    verdict = ucpl.verify(FIXTURES / "dist_bug")
    (found,) = verdict.findings
    assert found.code == "E701" and f"weight of {WORDS}[0, 0]" in found.message
    assert (
        "from element 64 on: Megatron-Core up to 0.19.2 saves" in found.notes[0]
        and f"--freeze '{WORDS}'" in found.remedy
    )
    with pytest.raises(UcplError) as refused:
        ucpl.convert(FIXTURES / "dist_bug", tmp_path / "plain", to="plain()")
    assert refused.value.diagnostics[0].code == "E615" and refused.value.diagnostics[0].notes == found.notes
    ucpl.convert(FIXTURES / "dist_bug", tmp_path / "plain", to="plain()", freeze=[WORDS])
    held = torch.load(tmp_path / "plain" / "plain.pt", weights_only=True)["params"]
    for name, said in truth("dist_bug").items():
        states = {"weight"} if name == WORDS else {"weight", "fp32", "exp_avg", "exp_avg_sq"}
        assert held[name].keys() - {"step"} == states
        assert all(torch.equal(held[name][state], value_of(said, state)) for state in states), name


def test_the_saved_part_is_complete(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "dist_bug", tmp_path / "dist", to="megatron_core(tp=2)", freeze=[WORDS])
    assert ucpl.verify(tmp_path / "dist")


def test_the_metadata_of_megatron_0_15_is_a_class_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`MCoreMetadata` of strategies/torch.py extends torch's Metadata.

    It has `mcore_data` and plans of its own class.
    """
    shutil.copytree(FIXTURES / "dist_muon", tmp_path / "in")
    held = pickle.loads((tmp_path / "in" / ".metadata").read_bytes())
    module = "megatron.core.dist_checkpointing.strategies.torch"
    own: Any = type("MCoreMetadata", (type(held),), {"__module__": module})
    for name in (module, "megatron"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[module], "MCoreMetadata", own, raising=False)
    made = own.__new__(own)
    vars(made).update(vars(held), mcore_data={}, all_local_plans=[])
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(made))
    assert b"MCoreMetadata" in (tmp_path / "in" / ".metadata").read_bytes()
    assert ucpl.compare(FIXTURES / "dist_muon", tmp_path / "in")


def test_masters_of_muon_have_another_name_than_those_of_a_distributed_optimizer(tmp_path: Path) -> None:
    """0.19 saves a split run so; 0.16 calls all of them `fp32_param`."""
    folder = tmp_path / "in"
    shutil.copytree(FIXTURES / "dist_muon", folder)
    held = pickle.loads((folder / ".metadata").read_bytes())
    first, second = "optimizer.state.param.", "optimizer.state.fp32_param."
    entries = held.state_dict_metadata
    others = {n for n in entries if n.startswith(second) and n.replace("fp32_param", "exp_avg", 1) in entries}
    assert others and len(others) < sum(n.startswith(second) for n in entries)
    called = {name: name.replace(second, first) for name in others}
    held.state_dict_metadata = {called.get(name, name): one for name, one in entries.items()}
    held.storage_data = {
        replace(index, fqn=called.get(index.fqn, index.fqn)): one for index, one in held.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(held))
    assert ucpl.compare(FIXTURES / "dist_muon", folder)
    ucpl.convert(folder, tmp_path / "out", to="megatron_core()")
    made = pickle.loads((tmp_path / "out" / ".metadata").read_bytes()).state_dict_metadata
    assert {n for n in made if ".fp32_param." in n or ".param." in n} == {
        n for n in held.state_dict_metadata if ".fp32_param." in n or ".param." in n
    }
    assert ucpl.compare(folder, tmp_path / "out")


@pytest.mark.parametrize("inner", ["iter_0000003", "."])
def test_a_folder_of_zarr_arrays_is_refused_by_its_name(tmp_path: Path, inner: str) -> None:
    """Megatron-Core up to 0.15 reads them; they have no `.metadata`."""
    step = tmp_path / "run" / inner
    step.mkdir(parents=True)
    said = {"sharded_backend": "zarr", "sharded_backend_version": 1, "common_backend": "torch"}
    (step / "metadata.json").write_text(json.dumps(said))
    torch.save({"iteration": 3, "checkpoint_version": 3.0}, step / "common.pt")
    (step / "output_layer.weight").mkdir()
    (step / "output_layer.weight" / ".zarray").write_text('{"chunks": [4, 4], "dtype": "<f4", "shape": [8, 4]}')
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UcplError, match=r"E457.* a zarr array for each tensor") as refused:
        ucpl.convert(tmp_path / "run", tmp_path / "made", to="safetensors()")
    assert "--ckpt-format torch_dist" in refused.value.diagnostics[0].remedy
