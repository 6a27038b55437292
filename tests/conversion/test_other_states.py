"""Other states of an optimizer than values per element and numbers.

They follow their parameter: renamed, dropped and frozen with it. A target without a place for them refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.conversion.planting import Place, plant
from tests.conversion.test_account_of_fixtures import FIXTURES
from tests.conversion.test_dialects import CONFIG, HF, LEGACY, numbered, shapes
from tests.conversion.test_planted import MARK, copied
from ucpl.api import open_checkpoint

NORM, KEY = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
CODES = torch.arange(7.0)


def saved(path: Path, owner: str, *, is_frozen: bool = False) -> Path:
    """A torch file whose optimizer keeps `codes` of one parameter.

    is_frozen: the parameter has no states instead.
    """
    params = numbered(shapes())
    names = list(params)
    state: dict[int, dict[str, Any]] = {}
    for number, one in enumerate(params.values()):
        state[number] = {"step": torch.tensor(5.0), "exp_avg": one["exp_avg"], "exp_avg_sq": one["exp_avg_sq"]}
    at = names.index(owner)
    state[at] = {} if is_frozen else {**state[at], "codes": CODES}
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "params": [*state], "param_names": names}
    model = {name: one["fp32"] for name, one in params.items()}
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}}, path)
    return path


def others_of(path: Path) -> dict[str, Any]:
    held: Any = open_checkpoint(path).state.blobs.get("optimizer_values", {})
    return dict(held)


@pytest.mark.parametrize("target", ["dcp(fsdp = 2)", "torch_file()"])
def test_they_have_the_target_s_name_of_their_parameter(target: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "run.pt", NORM)
    ucpl.convert(source, tmp_path / "there", f"{target} of {LEGACY}", layout=f"of {HF}", config=CONFIG)
    assert [*others_of(tmp_path / "there")] == ["decoder.final_layernorm.weight"]
    ucpl.convert(tmp_path / "there", tmp_path / "again", "torch_file()")
    states = torch.load(tmp_path / "again" / "checkpoint.pt")["optimizer"]["state"].values()
    (codes,) = [held["codes"] for held in states if "codes" in held]
    assert torch.equal(codes, CODES)
    with pytest.raises(ucpl.UcplError, match=r"E448.*`codes` of `.*k_proj.*joins it with others"):
        ucpl.convert(
            saved(tmp_path / "run.pt", KEY), tmp_path / "x", f"{target} of {LEGACY}", layout=f"of {HF}", config=CONFIG
        )


@pytest.mark.parametrize("target", ["dcp(fsdp = 2)", "torch_file()"])
def test_frozen_parameters_in_groups_have_the_target_s_names(target: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "run.pt", NORM, is_frozen=True)
    ucpl.convert(source, tmp_path / "there", f"{target} of {LEGACY}", layout=f"of {HF}", config=CONFIG)
    (group,) = open_checkpoint(tmp_path / "there").state.groups
    assert {*group.every} - {*group.members} == {"decoder.final_layernorm.weight"}
    assert group.hyper["param_names"] == [*group.every]


@pytest.mark.parametrize("target", ["dcp(fsdp = 2)", "torch_file()", "plain()"])
@pytest.mark.parametrize("option", ["freeze", "drop"])
def test_they_go_with_a_parameter_that_is_frozen_or_dropped(option: str, target: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "run.pt", NORM)
    options: dict[str, Any] = {option: [NORM]}
    account = ucpl.convert(source, tmp_path / "there", target, **options).plan.account
    assert account is not None
    assert f"{NORM} of the optimizer" in {name for e in account.of("dropped") for name in e.names}
    assert not others_of(tmp_path / "there")
    assert NORM not in {t.name for t in open_checkpoint(tmp_path / "there").state.tensors if t.kind == "parameter"}


def test_a_folder_of_megatron_fsdp_gives_them_or_refuses(tmp_path: Path) -> None:
    source = copied(FIXTURES / "megatron" / "fsdp_tp2", tmp_path)
    owner = "decoder.layers.0.self_attention.linear_proj.weight"
    plant(source, Place("entry", ".metadata", (("p", f"optimizer.state.module.module.module.{owner}"),)), MARK)
    with pytest.raises(ucpl.UcplError, match=f"E471: `{MARK}` of `{owner}`: Megatron-FSDP saves"):
        ucpl.convert(source, tmp_path / "x", "megatron_fsdp(dp=2)")
    ucpl.convert(source, tmp_path / "there", "dcp(fsdp=2)")
    assert [*others_of(tmp_path / "there")] == [owner]
