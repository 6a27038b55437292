"""Files of torch.save without a zip archive are read like others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ucpl
from tests.files.refusals import refusal
from tests.files.values import FIXTURES, assert_tells, torch_tensor
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl.files.torch_files import TorchFile, read_torch_file

KINDS = ("deepspeed/z1_dp4", "deepspeed/z3_dp2_subgroup", "deepspeed/pp2_dp2_z1", "deepspeed/moe_ep2_dp2_z1")


def old(path: Path) -> None:
    """A file in the form before torch 1.6."""
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)


def read(folder: Path) -> TorchFile:
    return read_torch_file(folder, "old.pt")


def save(value: object, folder: Path) -> bytes:
    torch.save(value, folder / "old.pt", _use_new_zipfile_serialization=False)
    return (folder / "old.pt").read_bytes()


def test_every_tensor_is_as_torch_loads_it(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    value = {
        "w": base, "column": base[:, 1], "t": base.t(), "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0, 3),
        "n": torch.tensor(7), "c": torch.tensor([1 + 2j]), "flags": torch.tensor([True, False]), "rest": [1, "a", (None,)],
        "many": {str(i): torch.full((3,), i) for i in range(3000)},  # the pickles are longer than the first read
    }  # fmt: skip
    save(value, tmp_path)
    file = read(tmp_path)
    data = file.path.read_bytes()
    raw = {name: data[m.start : m.start + m.size] for name, m in file.storages.items()}
    loaded = torch.load(tmp_path / "old.pt", weights_only=True)
    assert_tells(file.value, loaded, lambda ref: torch_tensor(ref, raw[ref.storage.name]))
    assert {extent.crc for extent in file.extents()} == {None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_the_old_form_is_the_same_run(kind: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / kind, tmp_path / "old")
    for path in (tmp_path / "old").rglob("*.pt"):
        old(path)
    assert ucpl.compare(FIXTURES / kind, tmp_path / "old")
    found = ucpl.verify(tmp_path / "old")
    assert found and found.files.bytes_protected == 0


def _cut(data: bytes) -> bytes:
    return data[:-3]


def _short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _big_endian(data: bytes) -> bytes:
    at = data.index(b"little_endian")
    return data[:at] + data[at:].replace(b"\x88", b"\x89", 1)


def _protocol(data: bytes) -> bytes:
    return data.replace(b"\x80\x02M\xe9\x03.", b"\x80\x02M\xe8\x03.", 1)


@pytest.mark.parametrize(
    ("change", "code"), [(_cut, "E414"), (_short, "E420"), (_big_endian, "E412"), (_protocol, "E410")]
)
def test_what_is_no_such_file_is_refused(change: Callable[[bytes], bytes], code: str, tmp_path: Path) -> None:
    data = save({"w": torch.ones(4)}, tmp_path)
    assert change(data) != data
    (tmp_path / "old.pt").write_bytes(change(data))
    refusal(lambda: read(tmp_path), code)
