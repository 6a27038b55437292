"""Legacy folders of Megatron-LM are read: every value equals its formula."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ucpl
from tests.formats.megatron.megatron_of import FIXTURES, LEGACY, assert_exact
from ucpl.formats.opening import open_checkpoint


@pytest.mark.parametrize("name", LEGACY)
def test_each_number_is_the_formulas(tmp_path: Path, name: str) -> None:
    ucpl.convert(FIXTURES / f"legacy_{name}", tmp_path / "plain", to="plain()")
    value = assert_exact(name, tmp_path / "plain" / "plain.pt")
    names = [n for group in value["groups"] for n in group["params"]]
    assert sorted(names) == sorted(value["params"]), "every parameter is in a group"
    for group in value["groups"]:
        decays = {value["params"][n]["weight"].ndim > 1 and not n.endswith(".bias") for n in group["params"]}
        assert decays == {group["wd_mult"] == 1.0}
        assert {".experts." in n for n in group["params"]} == {group["is_expert_parallel"]}
    assert value["scalars"]["global_steps"] == 10


def test_a_folder_of_weights_alone(tmp_path: Path) -> None:
    opened = open_checkpoint(FIXTURES)
    assert opened.tag == "iter_0000010" and opened.format == "megatron_legacy"
    assert {n: s.value for n, s in opened.state.settings.items() if n in ("tp", "pp", "ep")} == {
        "tp": 2,
        "pp": 2,
        "ep": 1,
    }
    ucpl.convert(FIXTURES / "iter_0000010", tmp_path / "plain", to="plain()")
    found = torch.load(tmp_path / "plain" / "plain.pt", weights_only=True)["params"]
    fc1 = found["decoder.layers.3.mlp.linear_fc1.weight"]["weight"]
    rank = [
        torch.load(FIXTURES / "iter_0000010" / f"mp_rank_0{tp}_001" / "model_optim_rng.pt", weights_only=False)
        for tp in (0, 1)
    ]
    parts = [one["model"]["decoder.layers.1.mlp.linear_fc1.weight"].chunk(2) for one in rank]
    assert torch.equal(fc1, torch.cat([gate for gate, _ in parts] + [up for _, up in parts])), "gate, then up"


@pytest.mark.parametrize("name", LEGACY)
def test_what_is_inferred_is_the_same_text(tmp_path: Path, name: str) -> None:
    source = FIXTURES / f"legacy_{name}"
    text = tmp_path / "own.ucpl"
    text.write_text(ucpl.infer(source).text())
    ucpl.convert(source, tmp_path / "one", to="plain()")
    ucpl.convert(source, tmp_path / "two", layout=f"{text}:stored()", to="plain()")
    assert (tmp_path / "one" / "plain.pt").read_bytes() == (tmp_path / "two" / "plain.pt").read_bytes()


def test_other_forms_take_it_completely(tmp_path: Path) -> None:
    """Stages and ranks of Megatron's are none of another framework's."""
    for to in ("zero1(dp=3)", "dcp(fsdp=2)", "universal()", "zero3(dp=2)"):
        there = tmp_path / to.partition("(")[0]
        ucpl.convert(FIXTURES / "legacy_vpp", there, to=to)
        back = tmp_path / f"{there.name}.plain"
        ucpl.convert(there, back, to="plain()")
        assert_exact("vpp", back / "plain.pt")


def test_verify_holds_masters_and_copies(tmp_path: Path) -> None:
    assert not ucpl.verify(FIXTURES / "legacy_vpp").findings
    broken = tmp_path / "broken"
    shutil.copytree(FIXTURES / "legacy_vpp", broken)
    part = broken / "iter_0000010" / "mp_rank_01_001" / "distrib_optim.pt"
    value = torch.load(part, weights_only=False)
    value[1][next(iter(value[1]))]["param"][100] += 1
    torch.save(value, part)
    assert ucpl.verify(broken).findings, "a master that does not round to its weight"


@pytest.mark.parametrize("name", ["alone", "buckets"])
def test_tensors_without_elements_are_kept_or_named(name: str, tmp_path: Path) -> None:
    """A buffer of the distributed optimizer has no place for them."""
    shutil.copytree(FIXTURES / f"legacy_{'buckets' if name == 'buckets' else 'adam'}", tmp_path / "run")
    empty = {"decoder.layers.0.mlp.void.weight": (0,), "decoder.none.weight": (0, 4)}
    for path in (tmp_path / "run").rglob("model_optim_rng.pt"):
        value = torch.load(path, weights_only=False)
        value["model"] |= {key: torch.empty(shape) for key, shape in empty.items()}
        if name == "alone":
            del value["optimizer"]
            value["args"].no_save_optim = True
        torch.save(value, path)
    ucpl.convert(tmp_path / "run", tmp_path / "plain", to="plain()")
    found = torch.load(tmp_path / "plain" / "plain.pt", weights_only=True)["params"]
    assert {key: tuple(found[key]["weight"].shape) for key in empty} == empty
    ucpl.convert(tmp_path / "run", tmp_path / "dcp", to="dcp(fsdp = 2)")
    assert ucpl.compare(tmp_path / "run", tmp_path / "dcp")
    account = ucpl.plan(str(tmp_path / "run"), "megatron_legacy(tp = 1)").account
    assert account is not None
    dropped = {one for entry in account.entries if entry.fate == "dropped" for one in entry.names}
    assert empty.keys() <= dropped
