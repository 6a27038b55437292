"""DCP folders with a flattened optimizer, as in torchtitan.

The run's other values are kept, too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step of AdamW over two groups."""
    torch.manual_seed(seed)
    made = nn.ModuleDict({"tok_embeddings": nn.Embedding(7, 4), "output": nn.Linear(4, 7)})
    made.register_buffer("freqs_cis", torch.randn(3, dtype=torch.complex64).real.contiguous())
    wide: list[nn.Parameter] = [p for p in made.parameters() if p.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": wide}, {"params": [made["output"].bias], "weight_decay": 0.0}]
    chosen = torch.optim.AdamW(groups, lr=0.01 * seed)
    made["output"](made["tok_embeddings"](torch.arange(5))).square().mean().backward()
    chosen.step()
    return made, chosen


def state(seed: int, *, old: bool = False) -> dict[str, Any]:
    """The model's tensors next to the optimizer's dict.

    `old`: losses as in torchtitan 0.1, a BytesIO.
    """
    weights, optimizer = get_state_dict(*model(seed), options=FLAT)
    losses = io.BytesIO()
    torch.save([float(seed)], losses)
    train = {"step": torch.tensor(seed, dtype=torch.int32), "ntokens_seen": torch.tensor(100 * seed)}
    return {
        **weights,
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": seed},
        "dataloader": {"dp_rank_0": pickle.dumps({"sample": seed}), "world_size": 1},
        "train_state": {**train, "global_avg_losses": losses} if old else train,
    }


def leaves(held: object, where: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(held, dict):
        for key, value in held.items():
            yield from leaves(value, f"{where}/{key}")
    else:
        yield where, held.getvalue() if isinstance(held, io.BytesIO) else held


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    mine, theirs = dict(leaves(found)), dict(leaves(wanted))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        held = mine[name]
        assert type(held) is type(value), name
        if isinstance(value, torch.Tensor):
            assert isinstance(held, torch.Tensor) and held.dtype == value.dtype and torch.equal(held, value), name
        else:
            assert held == value, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flat") / "step-3"
    save(state(3), checkpoint_id=out, no_dist=True)
    return out


def test_names_groups_and_other_values(folder: Path) -> None:
    found = open_checkpoint(folder)
    settings = found.state.settings
    assert (settings["prefix"].value, settings["states"].value, settings["flat"].value) == ("", "optimizer.state.", 1)
    wide, flat = found.state.groups
    assert wide.members == ("tok_embeddings.weight", "output.weight") and flat.members == ("output.bias",)
    assert (flat.hyper["weight_decay"], wide.hyper["weight_decay"], wide.hyper["lr"]) == (0.0, 0.01, 0.03)
    assert set(found.state.carried) == {"lr_scheduler", "dataloader", "train_state"}
    assert {t.name for t in found.state.tensors} == set(state(3)) - {*found.state.carried, "optimizer"}


def test_weights_and_moments_are_read_exactly(folder: Path, tmp_path: Path) -> None:
    ucpl.convert(folder, tmp_path / "plain.pt", to="plain()")
    params = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    optimizer = state(3)["optimizer"]
    for name, p in model(3)[0].named_parameters():
        assert torch.equal(params[name]["weight"], p)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(torch.as_tensor(params[name][key]), optimizer[f"state.{name}.{key}"])


@pytest.mark.parametrize(
    "way", [(), ('dcp(fsdp=2, flat=0, prefix="model.", states="optim.state.")',)], ids=("as_it_was", "by_way_of_nested")
)
def test_the_run_s_own_state_dict_is_filled(folder: Path, tmp_path: Path, way: tuple[str, ...]) -> None:
    """Flat dicts stay flat; nested ones become flat again on request."""
    here = folder
    for number, call in enumerate(
        (*way, 'dcp(fsdp=3, flat=1, prefix="", states="optimizer.state.")' if way else "dcp(fsdp=3)")
    ):
        ucpl.convert(here, tmp_path / str(number), to=call)
        here = tmp_path / str(number)
    held = state(8)
    load(held, checkpoint_id=here, no_dist=True)
    assert_same(held, state(3))


def test_a_nested_target_of_a_flat_source_has_groups(folder: Path, tmp_path: Path) -> None:
    ucpl.convert(folder, tmp_path / "nested", to='dcp(fsdp=2, flat=0, prefix="model.", states="optim.state.")')
    weights, optimizer = get_state_dict(*model(8))
    held: dict[str, Any] = {"model": weights, "optim": optimizer}
    load(held, checkpoint_id=tmp_path / "nested", no_dist=True)
    wanted_weights: Any
    wanted: Any
    wanted_weights, wanted = get_state_dict(*model(3))
    assert_same(held["model"], wanted_weights)
    assert_same(held["optim"]["state"], wanted["state"])
    assert [g["lr"] for g in held["optim"]["param_groups"]] == [0.03, 0.03]
    assert [g["weight_decay"] for g in held["optim"]["param_groups"]] == [0.01, 0.0]


def test_losses_in_a_buffer_go_along_where_their_class_is_allowed(tmp_path: Path) -> None:
    save(state(3, old=True), checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(UcplError, match=r"_io\.BytesIO") as found:
        ucpl.convert(tmp_path / "old", tmp_path / "made", to="dcp(fsdp=2)")
    assert found.value.diagnostics[0].code == "E504"
    ucpl.convert(tmp_path / "old", tmp_path / "made", to="dcp(fsdp=2)", allow_globals=("_io.BytesIO",))
    held = state(8, old=True)
    load(held, checkpoint_id=tmp_path / "made", no_dist=True)
    assert_same(held, state(3, old=True))
