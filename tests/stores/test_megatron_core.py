"""Folders of Megatron-Core's distributed format, written by megatron-core 0.16.1 and 0.13.1, and of Megatron-FSDP: exact.

Weights, masters and moments are a formula of each tensor's name, so that no reader of ours has a say in what is right.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.errors import UcplError
from ucpl.stores.dcp.cells import boxes_of_run
from ucpl.stores.registry import open_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron"
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
    """A tensor of a fixture by the formula that made it: of a state in f32, of a weight in its own type."""
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
    ],
)
def test_each_value_is_as_megatron_wrote_it(tmp_path: Path, name: str, states: tuple[str, ...]) -> None:
    assert_as_written(name, states, tmp_path / "plain")


def test_groups_are_dealt_by_megatrons_rule_and_steps_are_counted(tmp_path: Path) -> None:
    envelope = open_checkpoint(FIXTURES / "dist_moe").envelope
    found = [(g.hyper["wd_mult"], g.hyper["is_expert_parallel"], len(g.members)) for g in envelope.groups]
    assert found == [(1.0, False, 5), (0.0, False, 4), (1.0, True, 2)]
    assert set(envelope.scalars["step"].values()) == {1.0} and len(envelope.scalars["step"]) == 11
    muon = open_checkpoint(FIXTURES / "dist_muon")
    by_name = {g.name: g.members for g in muon.envelope.groups}
    states = {t.name: t.states for t in muon.tensors}
    assert all("momentum_buffer" in states[n] for n in by_name["0"]) and len(by_name["0"]) == 4
    assert all("exp_avg" in states[n] for n in (*by_name["1"], *by_name["2"]))
    steps = muon.envelope.scalars["step"]
    assert steps.keys() == {*by_name["1"], *by_name["2"]}, "Muon counts no steps"


def test_runs_of_flattened_parts_as_megatron_0_13_wrote_them(tmp_path: Path) -> None:
    """Its masters are the weights, and the moments those of the runs, put together by hand here."""
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


def test_a_folder_of_megatron_fsdp(tmp_path: Path) -> None:
    held, _ = plain_of("fsdp_tp2", tmp_path / "plain")
    told = json.loads((FIXTURES / "fsdp_tp2.truth.json").read_text())["truth"]
    assert held.keys() == told["model"].keys() == told["exp_avg"].keys()
    for state, tensors in told.items():
        for name, said in tensors.items():
            wanted = drawn(said["f"], said["fshape"])
            wanted = wanted.chunk(2, 0)[said["half"]] if "half" in said else wanted
            assert torch.equal(held[name]["weight" if state == "model" else state], wanted), (state, name)
            assert int(held[name]["step"]) == 1
    groups = open_checkpoint(FIXTURES / "fsdp_tp2").envelope.groups
    assert [(g.hyper["wd_mult"], len(g.members)) for g in groups] == [(1.0, 7), (0.0, 4)]


def test_a_run_with_a_tracker_is_opened_at_its_newest_iteration(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "dist_moe", tmp_path / "run" / "iter_0000010")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    found = open_checkpoint(tmp_path / "run")
    assert found.tag == "iter_0000010" and found.root == tmp_path / "run" / "iter_0000010"
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(UcplError) as refused:
        open_checkpoint(tmp_path / "run")
    assert refused.value.diagnostics[0].code == "E532" and "iter_0000020" in str(refused.value)


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


def test_parameters_in_another_order_are_no_masters_of_the_weights(tmp_path: Path) -> None:
    """Sizes agree where two norms change places; the masters tell."""
    folder = shutil.copytree(FIXTURES / "dist_buckets", tmp_path / "dist")
    value = pickle.loads((folder / ".metadata").read_bytes())
    one, other = (f"decoder.layers.{n}.layer_norm_weight" for n in ("self_attention.linear_qkv", "mlp.linear_fc1"))
    names = {one: other, other: one}
    described = {names.get(name, name): of for name, of in value.state_dict_metadata.items()}
    assert described.keys() == value.state_dict_metadata.keys()
    value.state_dict_metadata = {name: value.state_dict_metadata[name] for name in described}
    value.all_local_plans = None
    (folder / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(UcplError) as refused:
        ucpl.convert(folder, tmp_path / "plain", to="plain()")
    assert refused.value.diagnostics[0].code == "E615" and "layer_norm_weight" in str(refused.value)
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("name", ["dist_moe", "dist_buckets", "dist_old"])
def test_the_text_of_a_folder_describes_it(tmp_path: Path, name: str) -> None:
    text = ucpl.infer(FIXTURES / name).text()
    (tmp_path / "it.ucpl").write_text(text)
    ucpl.convert(FIXTURES / name, tmp_path / "one", to="plain()", layout=f"{tmp_path}/it.ucpl:stored()")
    ucpl.convert(FIXTURES / name, tmp_path / "two", to="plain()")
    assert ucpl.compare(tmp_path / "one", tmp_path / "two")
