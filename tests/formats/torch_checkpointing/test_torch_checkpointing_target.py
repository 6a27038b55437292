"""Items of torch_checkpointing as a target, from a folder that verl wrote.

torch opens them, with a process group that sends nothing.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucpl
from ucpl.errors import UcplError

SOURCE = Path(__file__).parents[2] / "fixtures" / "verl" / "fsdp2_w3"


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    held: dict[str, Any] = torch.load(f"{SOURCE}.truth.pt", weights_only=True)
    return held


def loaded(folder: Path, item: str, rank: int, ranks: int) -> Any:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        return torch.load(folder / f"{item}_{rank}.pt", weights_only=False)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_rank_has_its_items(truth: dict[str, Any], tmp_path: Path, ranks: int) -> None:
    ucpl.convert(SOURCE, tmp_path / "to", f'torch_checkpointing(fsdp={ranks}, device="cpu")')
    for rank in range(ranks):
        model, optimizer = (loaded(tmp_path / "to", item, rank, ranks) for item in ("model", "optimizer"))
        for name, kept in truth["params"].items():
            for state, made in {"weight": model[name], **optimizer["state"][name]}.items():
                if state == "step":
                    assert made == kept["step"]
                    continue
                parts = torch.chunk(kept[state], ranks)
                assert torch.equal(made.to_local(), parts[rank] if rank < len(parts) else kept[state][:0]), (
                    name,
                    state,
                )
        rates = {name: group["lr"] for group in optimizer["param_groups"] for name in group["params"]}
        assert rates == {name: kept["lr"] for name, kept in truth["params"].items()}
        assert torch.equal(model["calls"], truth["buffers"]["calls"])
        assert loaded(tmp_path / "to", "lr_scheduler", rank, ranks)["last_epoch"] == 3
    assert ucpl.verify(tmp_path / "to")
    ucpl.convert(tmp_path / "to", tmp_path / "back", 'verl(fsdp=3, device="cpu", schedule=0)')
    found = ucpl.compare(SOURCE, tmp_path / "back")
    assert [one for one in map(str, found.differences) if "lr_scheduler" not in one] == []


def test_metadata_has_the_cut_of_each_tensor(truth: dict[str, Any], tmp_path: Path) -> None:
    """DefaultResharder finds parts by it."""
    ucpl.convert(SOURCE, tmp_path / "to", 'torch_checkpointing(fsdp=2, device="cpu")')
    held = pickle.loads((tmp_path / "to" / "metadata.pkl").read_bytes())
    assert (held["world_size"], held["version"]) == (2, "2.0")
    assert [*held["metadata"]] == ["model", "optimizer"]
    assert all(one["rank_to_layout_info"] == {0: None, 1: None} for one in held["metadata"].values())
    described = {item: one["nested_path_to_metadata"] for item, one in held["metadata"].items()}
    assert {json.loads(path)[0] for path in described["model"]} == {*truth["params"], *truth["buffers"]}
    states = {tuple(json.loads(path)) for path in described["optimizer"]}
    assert states == {("state", n, s) for n in truth["params"] for s in ("step", "exp_avg", "exp_avg_sq")}
    (one,) = described["model"]['["embed.weight"]']
    mesh = {"device_type": "cpu", "mesh_shape": (2,), "mesh_data": (0, 1), "mesh_dim_names": ("fsdp",)}
    data = {"global_shape": [11, 10], "dtype": "torch.float32", "stride": [10, 1], "mesh_spec": mesh}
    assert one["ranks"] == (0, 1)
    cut = {**data, "placements": [{"type": "Shard", "dim": 0}]}
    assert one["sharding_metadata"] == {"type": "DTensorShardingMetadata", "data": cut}
    (copy,) = described["optimizer"]['["state","gain","step"]']
    assert copy["sharding_metadata"]["data"]["placements"] == [{"type": "Replicate"}]


def test_storages_have_the_numbers_of_torch(tmp_path: Path) -> None:
    """torch computes their offsets by counting them in the pickle."""
    ucpl.convert(SOURCE, tmp_path / "to", "torch_checkpointing(fsdp=2)")
    for name in ("model_0.pt", "optimizer_1.pt"):
        with zipfile.ZipFile(tmp_path / "to" / name) as archive:
            (member,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            texts = [str(arg) for op, arg, _ in pickletools.genops(archive.read(member)) if op.name == "BINUNICODE"]
            order = [int(text) for text in dict.fromkeys(texts) if text.isdecimal() and text != "0"]
            assert order == sorted(order) and len(order) > 5


def test_a_value_whose_name_is_no_file_s_is_refused(tmp_path: Path) -> None:
    value = torch.ones(3)
    torch.save({"model": {"w": value}, "a/b": 1, "model_0": 2}, tmp_path / "run.pt")
    with pytest.raises(UcplError, match=r"E471.*'a/b'"):
        ucpl.convert(tmp_path / "run.pt", tmp_path / "to", "torch_checkpointing(fsdp=2)")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "to", "torch_checkpointing(fsdp=2)", drop=["a/b"])
    assert loaded(tmp_path / "to", "model_0", 1, 2) == 2
