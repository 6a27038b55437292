"""Folders of Megatron-Core, read completely: each element equals its formula."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.gathered import plain_of
from tests.megatron_truth import FIXTURES, NAMES, State, described, stored, truth
from ucpl.files.pickles import loads
from ucpl.formats.megatron.orders import orders_of

RATES = ("lr", "weight_decay", "betas", "eps")  # of groups


def held(source: Path) -> State:
    """{name: {state: tensor or number}} of parameters and buffers, without groups."""
    plain = plain_of(source)
    return plain["params"] | {name: {"weight": tensor} for name, tensor in plain["buffers"].items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_element_is_its_formulas(name: str) -> None:
    told = described(name)
    wanted = stored(truth(name), told["run"], told["saved"].get("unstacked", False))
    found = held(FIXTURES / name)
    assert found.keys() == wanted.keys()
    for parameter, states in wanted.items():
        states = {state: value for state, value in states.items() if state not in RATES}
        assert found[parameter].keys() == states.keys(), parameter
        for state, value in states.items():
            mine = found[parameter][state]
            if torch.is_tensor(value):
                assert mine.dtype == value.dtype, (parameter, state)
                assert torch.equal(mine, value), (parameter, state)
            else:
                assert float(mine) == value, (parameter, state)


@pytest.mark.parametrize("name", [n for n in NAMES if described(n)["run"]["optimizer"] != "none"])
def test_hyper_parameters_are_those_of_the_job(name: str) -> None:
    told = described(name)
    wanted = stored(truth(name), told["run"], told["saved"].get("unstacked", False))
    groups = plain_of(FIXTURES / name)["groups"]
    assert sum(len(group["params"]) for group in groups) == sum("lr" in states for states in wanted.values())
    for group in groups:
        for parameter in group["params"]:
            for rate in ("lr", "weight_decay", "eps"):
                assert group[rate] == wanted[parameter][rate], (parameter, rate)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dist_stacked_tp2_pp2_fully", {"singleton_local_shards": False}),
        ("dist_unstacked_moe_ep2", {"singleton_local_shards": True}),
        # its job's arguments and random states name classes of Megatron's and numpy's own, which it trusts
        ("dist_adam_tp2", {"singleton_local_shards": False}),
    ],
)
def test_a_target_says_by_which_keys_megatron_is_to_ask(tmp_path: Path, name: str, said: dict[str, bool]) -> None:
    ucpl.convert(FIXTURES / name, tmp_path / "made", "megatron_core(tp = 3)")
    (file,) = (tmp_path / "made").glob("iter_*/common.pt")
    content = common_of(file)["content_metadata"]
    assert {key: content.get(key) for key in said} == said
    assert "non_homogeneous_layers" not in content


def common_of(file: Path) -> dict[str, Any]:
    """Inert: this environment has no Megatron."""
    with zipfile.ZipFile(file) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        value = loads(archive.read(member))
    assert isinstance(value, dict)
    return value


def test_layers_by_number_with_one_fc1_are_layers_that_differ(tmp_path: Path) -> None:
    """Legacy folders have them so: neither stacked, nor as separate halves."""
    tensors = {f"decoder.layers.{n}.mlp.linear_fc1.weight": torch.ones(4, 3) for n in range(2)}
    torch.save({"params": {name: {"weight": t} for name, t in tensors.items()}}, tmp_path / "plain.pt")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "made", "megatron_core(stacked=0)")
    (file,) = (tmp_path / "made").glob("**/common.pt")
    content = common_of(file)["content_metadata"]
    assert (content["singleton_local_shards"], content["non_homogeneous_layers"]) == (False, True)


def test_orders_of_registration_are_those_of_megatrons_modules() -> None:
    """A norm is a layer's first module, or in the linear one."""
    norm, out = "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_proj.weight"
    rest = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")  # fmt: skip
    around = ["decoder.final_layernorm.weight", "output_layer.weight"]
    fused, apart = ([f"decoder.layers.{name}" for name in (*first, *rest)] for first in ((out, norm), (norm, out)))
    listed = tuple(sorted(fused + around))
    found = [list(order) for order in orders_of(listed)]
    assert found == [around + fused, around + apart, list(listed)]
