"""Files of `set_crc32_options(False)` have CRCs of 0, which mean none."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.files.values import ENTRY, FIXTURES, bare
from ucpl.api import open_checkpoint
from ucpl.errors import UcplError
from ucpl.files.torch_files import read_torch_file
from ucpl.runtime.verify import verify_files

KINDS = (
    "deepspeed/z1_dp4", "deepspeed/z3_dp2_subgroup", "deepspeed/z0_dp2_bf16", "deepspeed/moe_ep2_dp2_z1",
    "universal/z1_dp4/global_step3_universal", "numbered/pp2", "dcp/fsdp2_w4", "dcp/fsdp1_local_w4", "dcp/fsdp1_params_w3",
    "dcp/fsdp1_units_w3", "dcp/hsdp_2x2", "megatron/dist_adam_tp2", "megatron/dist_tied_vpp2", "trainer/checkpoint-3",
    "accelerate/state", "lightning/step-2.ckpt",
)  # fmt: skip


@pytest.fixture
def no_crcs():
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def test_torch_writes_0_for_every_member(tmp_path: Path, no_crcs: None) -> None:
    torch.save({"a": torch.arange(4.0), "none": torch.zeros(0)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    assert {struct.unpack_from("<I", data, found.end())[0] for found in ENTRY.finditer(data)} == {0}
    bare(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == data
    file = read_torch_file(tmp_path, "a.pt")
    assert {extent.crc for extent in file.extents() if extent.numel} == {None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_as_with_crcs(kind: str, tmp_path: Path) -> None:
    genuine, copy = FIXTURES / kind, tmp_path / Path(kind).name
    shutil.copytree(genuine, copy) if genuine.is_dir() else shutil.copyfile(genuine, copy)
    for path in [copy, *copy.rglob("*")]:
        if path.is_file() and path.read_bytes()[:4] == b"PK\x03\x04":
            bare(path)
    assert ucpl.compare(genuine, copy)
    found = verify_files(open_checkpoint(copy))
    assert found and found.bytes_protected == 0
    assert found.bytes_unprotected == sum(found.unprotected.values()) > 0
    ucpl.convert(copy, tmp_path / "plain.pt", "plain()")
    ucpl.convert(genuine, tmp_path / "genuine.pt", "plain()")
    mine, theirs = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("plain", "genuine"))
    assert list(map(repr, _leaves(mine))) == list(map(repr, _leaves(theirs)))


def _leaves(held: object) -> list[object]:
    if isinstance(held, dict):
        return [leaf for name, value in held.items() for leaf in (name, *_leaves(value))]
    return [held.tolist()] if isinstance(held, torch.Tensor) else [held]


def test_ties_are_found_by_the_bytes(tmp_path: Path, no_crcs: None) -> None:
    """A tied name without states equals only the tensor with equal bytes."""
    wte, other = torch.randn(64, 32), torch.randn(64, 32)
    model = {"wte": wte, "head": wte, "other": other, "free": torch.randn(64, 32)}
    states = {n: {"exp_avg": torch.randn(64, 32), "exp_avg_sq": torch.rand(64, 32)} for n in ("wte", "other")}
    group = {"params": ["wte", "other"], "lr": 0.1}
    save({"model": model, "optimizer": {"state": states, "param_groups": [group]}}, checkpoint_id=tmp_path / "in")
    ucpl.convert(tmp_path / "in", tmp_path / "out.pt", "plain()")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["aliases"] == {"head": "wte"}
    assert set(found["params"]["free"]) == {"weight"}


def test_one_member_that_states_0_is_damaged(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4.0), "b": torch.ones(3)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = next(m.end() for m in ENTRY.finditer(bytes(data)) if data[m.end() + 30 :].startswith(b"a/data/0"))
    data[at : at + 4] = bytes(4)
    (tmp_path / "a.pt").write_bytes(data)
    file = read_torch_file(tmp_path, "a.pt")
    assert 0 in {extent.crc for extent in file.extents()}
    with pytest.raises(UcplError, match="E612"):
        file.check_undamaged("0", "a")
