"""A folder of verl 0.9.1, and targets in its form.

torch opens them, with a process group that sends nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucpl
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDER = FIXTURES / "verl" / "fsdp2_w3"
BF16 = FIXTURES / "deepspeed" / "z1_dp2_bf16"
RANKS = 3
LIVE = ("_hash", "_pg_registry")  # of a mesh in a process


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    """Complete tensors, as the job gathered them."""
    held: dict[str, Any] = torch.load(f"{FOLDER}.truth.pt", weights_only=True)
    return held


@contextmanager
def job(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def loaded(folder: Path, what: str, rank: int, ranks: int) -> Any:
    """A rank's file, as torch unpickles it."""
    with job(rank, ranks):
        return torch.load(folder / f"{what}_world_size_{ranks}_rank_{rank}.pt", weights_only=False)


def part(whole: torch.Tensor, at: int, ways: int) -> torch.Tensor:
    found = torch.chunk(whole, ways)
    return found[at] if at < len(found) else whole[:0]


def test_verl_s_own_folder_is_read_exactly(truth: dict[str, Any], tmp_path: Path) -> None:
    ucpl.convert(FOLDER, tmp_path / "plain.pt", "plain()")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert plain["params"].keys() == truth["params"].keys()
    for name, kept in truth["params"].items():
        for state in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(plain["params"][name][state], kept[state]), (name, state)
        assert plain["params"][name]["step"] == kept["step"]
    rates = {name: group["lr"] for group in plain["groups"] for name in group["params"]}
    assert rates == {name: kept["lr"] for name, kept in truth["params"].items()}
    assert torch.equal(plain["buffers"]["calls"], truth["buffers"]["calls"])


@pytest.mark.parametrize(("fsdp", "ddp"), [(2, 1), (3, 1), (5, 1), (16, 1), (2, 2)])
def test_each_rank_has_its_chunks_at_any_degree(truth: dict[str, Any], tmp_path: Path, fsdp: int, ddp: int) -> None:
    """torch unpickles the parts of torch.chunk, and the way back is equal."""
    ucpl.convert(FOLDER, tmp_path / "to", f'verl(fsdp={fsdp}, ddp={ddp}, device="cpu")')
    ranks = fsdp * ddp
    for rank in range(ranks):
        model, optim = (loaded(tmp_path / "to", what, rank, ranks) for what in ("model", "optim"))
        names = [name for group in optim["ucpl_names"] for name in group]
        assert [n for group in optim["param_groups"] for n in group["params"]] == [*range(len(names))]
        for name, kept in truth["params"].items():
            for state, made in {"weight": model[name], **optim["state"][names.index(name)]}.items():
                if state == "step":
                    assert made == kept["step"]
                    continue
                assert isinstance(made, DTensor) and made.shape == kept[state].shape
                assert made.device_mesh.mesh_dim_names == (("ddp", "fsdp") if ddp > 1 else ("fsdp",))
                assert torch.equal(made.to_local(), part(kept[state], rank % fsdp, fsdp)), (name, state)
        assert torch.equal(model["calls"], truth["buffers"]["calls"])
        assert loaded(tmp_path / "to", "extra_state", rank, ranks)["lr_scheduler"]["last_epoch"] == 3
    assert ucpl.verify(tmp_path / "to")
    ucpl.convert(tmp_path / "to", tmp_path / "back", f'verl(fsdp={RANKS}, device="cpu")')
    assert ucpl.compare(FOLDER, tmp_path / "back")


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_target_of_the_same_ranks_is_as_verl_wrote_it(tmp_path: Path, rank: int) -> None:
    ucpl.convert(FOLDER, tmp_path / "to", f'verl(fsdp={RANKS}, device="cpu")')
    config = json.loads((tmp_path / "to" / "fsdp_config.json").read_text())
    assert config == json.loads((FOLDER / "fsdp_config.json").read_text())
    assert (tmp_path / "to" / "huggingface" / "config.json").read_bytes() == (
        FOLDER / "huggingface" / "config.json"
    ).read_bytes()
    for what in ("model", "optim"):
        ours, own = (loaded(folder, what, rank, RANKS) for folder in (tmp_path / "to", FOLDER))
        ours.pop("ucpl_names", None)
        assert list(alike(ours, own)) == []
    ours, own = (loaded(folder, "extra_state", rank, RANKS) for folder in (tmp_path / "to", FOLDER))
    assert ours == {"lr_scheduler": own["lr_scheduler"]}


def alike(ours: Any, own: Any, where: str = "") -> Iterator[str]:
    """Places that differ, DTensors with their meshes and placements."""
    if isinstance(own, dict):
        if ours.keys() != own.keys() or (not where and [*ours] != [*own]):  # the model's order
            yield f"{where}: {[*ours]}, not {[*own]}"
        for key in own:
            yield from alike(ours[key], own[key], f"{where}/{key}")
    elif isinstance(own, DTensor):
        one, other = ours._spec, own._spec
        fields = ("mesh", "placements", "tensor_meta", "shard_order")
        yield from (f"{where}: {name}" for name in fields if getattr(one, name) != getattr(other, name))
        meshes = ({k: v for k, v in vars(spec.mesh).items() if k not in LIVE} for spec in (one, other))
        first, second = ({k: v.tolist() if torch.is_tensor(v) else v for k, v in mesh.items()} for mesh in meshes)
        if first != second or not torch.equal(ours.to_local(), own.to_local()):
            yield where
    elif isinstance(own, torch.Tensor):
        if not torch.equal(ours, own):
            yield where
    elif isinstance(own, list | tuple):
        yield from (place for n, one in enumerate(own) for place in alike(ours[n], one, f"{where}/{n}"))
    elif ours != own:
        yield where


def test_weights_are_the_masters_of_a_16_bit_run(tmp_path: Path) -> None:
    """A job of verl keeps no masters: bf16 weights would lose them."""
    ucpl.convert(BF16, tmp_path / "plain.pt", "plain()")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    for way in ("", "dcp(fsdp=2)"):
        source = BF16
        if way:
            source = tmp_path / "dcp"
            ucpl.convert(BF16, source, way)
        ucpl.convert(source, tmp_path / f"to{way}", 'verl(fsdp=1, device="cpu")')
        model = loaded(tmp_path / f"to{way}", "model", 0, 1)
        for name, kept in plain.items():
            assert torch.equal(model[name].to_local(), kept["fp32"]), name
            assert kept["weight"].dtype == torch.bfloat16


def test_random_numbers_of_ranks_are_named() -> None:
    made = ucpl.plan(str(FOLDER), 'verl(fsdp=2, device="cpu")')
    assert made.account is not None
    found = {name for entry in made.account.of("not read") for name in entry.names}
    assert found == {f"extra_state_world_size_3_rank_{rank}.pt: rng" for rank in range(RANKS)}


def test_another_class_of_schedule_is_refused_and_dropped(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FOLDER, tmp_path / "run"))
    for rank in range(RANKS):
        path = source / f"extra_state_world_size_{RANKS}_rank_{rank}.pt"
        held = torch.load(path, weights_only=False)
        torch.save({**held, "lr_scheduler": {"last_batch_iteration": 3}}, path)
    with pytest.raises(UcplError, match=r"E471.*LambdaLR") as caught:
        ucpl.convert(source, tmp_path / "to", "verl(fsdp=2)")
    assert "verl(fsdp = 2, schedule = 0)" in caught.value.diagnostics[0].remedy
    made = ucpl.plan(str(source), "verl(fsdp=2, schedule=0)")
    assert made.account is not None
    assert "lr_scheduler" in {name for entry in made.account.of("dropped") for name in entry.names}
    ucpl.convert(source, tmp_path / "to", "verl(fsdp=2, schedule=0)")
    assert loaded(tmp_path / "to", "extra_state", 1, 2) == {"lr_scheduler": None}


def test_weights_alone_have_no_optimizer_file(tmp_path: Path) -> None:
    ucpl.convert(FOLDER, tmp_path / "to", "verl(fsdp=2)", weights_alone=True)
    assert sorted(path.name for path in (tmp_path / "to").glob("*.pt")) == [
        f"{what}_world_size_2_rank_{rank}.pt" for what in ("extra_state", "model") for rank in range(2)
    ]
    assert not open_checkpoint(tmp_path / "to").state.groups
