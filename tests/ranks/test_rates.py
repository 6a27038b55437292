"""Hyper-parameters that are tensors, such as a learning rate.

The job's form is kept, and the saved value is filled in.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from ucpl.vault import Vault
from ucpl.vault.server import Server


def trained(rate: object) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)  # type: ignore[arg-type]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("saved", [torch.tensor(0.25), 0.25], ids=["tensor", "number"])
@pytest.mark.parametrize("here", [torch.tensor(0.5, dtype=torch.float64), 0.5], ids=["tensor", "number"])
def test_a_rate_is_filled_as_the_job_keeps_it(tmp_path, saved, here):
    model, optimizer = trained(saved)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=tmp_path / "there", no_dist=True)
    other, its = trained(here)
    ucpl.load_into(other, its, tmp_path / "there")
    found = its.param_groups[0]["lr"]
    assert type(found) is type(here) and float(found) == 0.25
    if isinstance(here, torch.Tensor):
        assert found.dtype == here.dtype
    for one in (model, other):
        one(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    its.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_containers_of_tensors_are_filled(tmp_path):
    model, optimizer = trained(0.25)
    kept = {"lr": 0.25, "betas": (torch.tensor(0.8), torch.tensor(0.9))}
    optimizer.param_groups[0].update(kept)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=tmp_path / "there", no_dist=True)
    for here in ((0.1, 0.2), (torch.tensor(0.1), torch.tensor(0.2))):
        other, its = trained(0.5)
        its.param_groups[0]["betas"] = here
        ucpl.load_into(other, its, tmp_path / "there")
        found = its.param_groups[0]["betas"]
        assert [type(one) for one in found] == [type(one) for one in here]
        assert [round(float(one), 6) for one in found] == [0.8, 0.9]


def test_dcp_loads_a_rate_that_is_a_tensor(tmp_path):
    model, optimizer = trained(torch.tensor(0.25))
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    save({"model": get_model_state_dict(model), **state}, checkpoint_id=tmp_path / "there", no_dist=True)
    optimizer.param_groups[0]["lr"].fill_(7)
    load(
        {"optim.param_groups.0.lr": (found := torch.tensor(3.0))}, storage_reader=ucpl.StorageReader(tmp_path / "there")
    )
    assert found == 0.25


def test_a_fill_from_a_vault_returns_the_generation(tmp_path):
    """The generation selects the JSON: a server may commit a new one."""
    vault = Vault.make(tmp_path / "job")
    model, optimizer = trained(0.25)
    with vault.writer(0, strict=True) as writer, Server(vault.home, 0) as server:
        for step in (7, 9):
            writer.save(step, (model, optimizer), {"at": step})
            server.turn()
        assert ucpl.load_into(model, optimizer, f"vault:{vault.home}").generation == 2
        reader = ucpl.load_into(model, optimizer, f"vault:{vault.home}@1")
        assert reader.generation == 1 and vault.state(0, reader.generation) == {"at": 7}
    save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "there", no_dist=True)
    assert ucpl.load_into(model, None, tmp_path / "there").generation is None


def test_a_rate_of_another_shape_is_filled_as_it_was_saved(tmp_path):
    """torch judges the new shape.

    An empty value is rejected at the read.
    """
    for saved, code in ((torch.ones(2), ""), (torch.zeros(0), "E460")):
        model, optimizer = trained(0.25)
        optimizer.param_groups[0]["lr"] = saved
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        save(state, checkpoint_id=tmp_path / f"there{code}", no_dist=True)
        other, its = trained(torch.tensor(0.5))
        if code:
            with pytest.raises(ucpl.UcplError, match=f"{code}: .*lr"):
                ucpl.load_into(other, its, tmp_path / f"there{code}")
        else:
            ucpl.load_into(other, its, tmp_path / "there")
            assert torch.equal(torch.as_tensor(its.param_groups[0]["lr"]), saved)
