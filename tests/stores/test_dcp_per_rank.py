"""State dicts of DTensors that each rank saves by itself: made by torch, over a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucpl
from ucpl.errors import UcplError
from ucpl.stores.registry import open_checkpoint

RANKS, TP = 4, 2
W = torch.arange(7.0 * 6).reshape(7, 6)
COLUMN = torch.arange(100.0, 100 + 4 * 5).reshape(4, 5)
NORM = torch.arange(200.0, 205.0).bfloat16()


def chunk(tensor: torch.Tensor, dim: int, at: int, ways: int = 2) -> torch.Tensor:
    """As torch.chunk gives it; nothing, where there are fewer chunks."""
    found = torch.chunk(tensor, ways, dim)
    return found[at].clone() if at < len(found) else tensor.narrow(dim, 0, 0).clone()


def state_dict(rank: int) -> dict[str, torch.Tensor]:
    """What a rank of FSDP2 over tensor parallelism holds: (fsdp, tp) is (rank // 2, rank % 2)."""
    mesh = init_device_mesh("cpu", (RANKS // TP, TP), mesh_dim_names=("fsdp", "tp"))
    fsdp, tp = divmod(rank, TP)

    def made(local: torch.Tensor, whole: torch.Tensor, *placements: Shard | Replicate | _StridedShard) -> DTensor:
        return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)

    return {
        "w": made(chunk(chunk(W, 0, tp), 0, fsdp), W, _StridedShard(0, split_factor=TP), Shard(0)),
        "column": made(chunk(chunk(COLUMN, 1, tp), 0, fsdp), COLUMN, Shard(0), Shard(1)),
        "norm": made(chunk(NORM, 0, fsdp), NORM, Shard(0), Replicate()),
        "counted": torch.tensor(3),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            torch.save(state_dict(rank), tmp_path / f"model_world_size_{RANKS}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    yield tmp_path


def test_ranks_are_read_exactly_and_converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = tmp_path_factory.mktemp("made")
    found = open_checkpoint(folder)
    assert (found.envelope.settings["fsdp"].value, found.envelope.settings["tp"].value) == (2, 2)
    assert {t.name: t.kind for t in found.tensors} == dict.fromkeys(("w", "column", "norm"), "parameter") | {
        "counted": "buffer"
    }
    ucpl.convert(folder, made / "plain.pt", to="plain()")
    plain = torch.load(made / "plain.pt", weights_only=True)
    for name, wanted in (("w", W), ("column", COLUMN), ("norm", NORM)):
        assert torch.equal(plain["params"][name]["weight"], wanted), name
    assert plain["buffers"]["counted"] == 3
    ucpl.convert(folder, made / "dcp", to="dcp(fsdp = 3, tp = 1)")
    assert ucpl.compare(folder, made / "dcp")


def test_replicas_that_differ_are_refused(folder: Path) -> None:
    path = folder / "model_world_size_4_rank_1.pt"
    part = path.read_bytes()
    assert ucpl.verify(folder)
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    try:
        state = state_dict(1)
        state["norm"].to_local().add_(1)  # type: ignore[attr-defined]
        torch.save(state, path)
    finally:
        dist.destroy_process_group()
    assert path.read_bytes() != part
    for verb in (ucpl.verify, open_checkpoint):  # nothing is converted of it
        with pytest.raises(UcplError, match="copies of `norm` differ") as found:
            verb(folder)
        assert found.value.diagnostics[0].code == "E700"


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        (
            torch.zeros(7, 6),
            "E456",
            r"`w` is .* over _StridedShard\(0\), Shard\(0\) in one file, and \[7, 6\] f32 in another",
        ),
        ("a text", "E455", "expected is a tensor or a DTensor"),
        (torch.nn.Linear, "E455", "expected is a tensor or a DTensor"),
    ],
)
def test_what_is_no_part_of_a_tensor_is_refused(folder: Path, value: object, code: str, said: str) -> None:
    """A rank that has it whole, or something else there: nothing is left out without a word."""
    path = folder / "model_world_size_4_rank_3.pt"
    torch.save({"w": value}, path)
    with pytest.raises(UcplError, match=said) as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == code


def test_a_rank_that_is_gone_and_another_run_are_refused(folder: Path) -> None:
    path = folder / "model_world_size_4_rank_2.pt"
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(UcplError, match=r"model_world_size_4_rank_2\.pt is missing") as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == "E452"
    path.write_bytes(kept)
    (folder / "model_world_size_8_rank_0.pt").write_bytes(kept)
    with pytest.raises(UcplError, match="runs of 4 and of 8 ranks") as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == "E454"


def test_a_part_that_is_not_what_its_placements_make_is_refused(folder: Path) -> None:
    """Coordinates of another rank: its file was renamed."""
    (folder / "model_world_size_4_rank_0.pt").write_bytes((folder / "model_world_size_4_rank_3.pt").read_bytes())
    with pytest.raises(UcplError, match=r"element \[0, 0\] of `w` is in no chunk") as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == "E521"
