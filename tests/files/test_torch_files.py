"""torch files.

Read as in torch, and written for torch, zipfile and ucpl.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.files.values import FIXTURES, assert_same, assert_tells, built, same_bits, torch_tensor, torch_value
from ucpl.errors import UcplError
from ucpl.extents import DTYPES, StorageRef, TensorRef, TorchDType
from ucpl.files.pickles import set_attributes, unsafe_globals
from ucpl.files.torch_files import TorchFile, layout_archive, layout_torch_file, read_torch_file
from ucpl.runtime.joined_crcs import crc_of_zeros

# ShardedTensor and DTensor: torch makes them in a process group alone.
IN_A_JOB = "dcp/fsdp1_*_w3/model_*", "verl/*/model_*", "verl/*/optim_*"
REAL = sorted(
    path
    for path in FIXTURES.rglob("*.pt")
    if zipfile.is_zipfile(path) and not any(map(path.relative_to(FIXTURES).match, IN_A_JOB))
)


def storages_of(file: TorchFile) -> dict[str, bytes]:
    whole = file.path.read_bytes()
    return {name: whole[m.start : m.start + m.size] for name, m in file.storages.items()}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.relative_to(FIXTURES).as_posix())
def test_a_real_file_is_read_as_torch_reads_it_and_written_back(path: Path) -> None:
    file = read_torch_file(path.parent, path.name)
    raw = storages_of(file)
    compared = assert_tells(
        file.value, torch_value(path.read_bytes()), lambda ref: torch_tensor(ref, raw[ref.storage.name])
    )
    extents = file.extents()
    assert compared <= len(extents)  # theirs are not walked within objects' arguments
    for extent in extents:
        assert extent.crc == zlib.crc32(raw[extent.storage])
        assert extent.storage_bytes == len(raw[extent.storage])
    copy = built(layout_torch_file(file.value, file.archive), raw)
    archive = zipfile.ZipFile(io.BytesIO(copy))
    assert archive.testzip() is None
    assert archive.namelist() == zipfile.ZipFile(path).namelist()
    assert_tells(file.value, torch_value(copy), lambda ref: torch_tensor(ref, raw[ref.storage.name]))


def odd_value() -> dict[str, Any]:
    """Tensors of every dtype, views, aliases, empty ones, parameters."""
    generator = torch.Generator().manual_seed(1)
    value: dict[str, Any] = OrderedDict()
    for n, dtype in enumerate(DTYPES.values()):
        data = torch.randint(0, 2, (3, 5 + n), generator=generator, dtype=torch.uint8)
        kind = getattr(torch, dtype.torch)
        value[dtype.name] = (
            data.view(kind) if kind == torch.float4_e2m1fn_x2 else data.to(kind)
        )  # no cast makes the former
    value["t"] = value["f32"].t()
    value["row"] = value["f32"][1:, 2:4]
    value["scalar"] = torch.tensor(3.5)
    value["empty"] = torch.zeros(0, 4)
    value["expanded"] = torch.ones(1).expand(3, 4)
    value["parameter"] = torch.nn.Parameter(torch.full((2, 2), 7.0))
    value["nested"] = [value["f32"], {"again": value["f64"], "dtype": torch.bfloat16, "size": value["f32"].shape}]
    return value


def test_torch_loads_what_is_laid_out(tmp_path: Path) -> None:
    value = odd_value()
    torch.save(value, tmp_path / "source.pt")
    file = read_torch_file(tmp_path, "source.pt")
    assert unsafe_globals(file.value) == []
    target = tmp_path / "target.pt"
    target.write_bytes(built(layout_torch_file(file.value, "target"), storages_of(file)))
    for options in (
        {"weights_only": True},
        {"weights_only": True, "mmap": True},
        {"weights_only": False, "mmap": True},
    ):
        loaded = torch.load(target, **options)  # type: ignore[arg-type]
        assert list(loaded) == list(value)
        for name, tensor in value.items():
            if name != "nested":
                assert loaded[name].dtype == tensor.dtype and loaded[name].stride() == tensor.stride()
                assert same_bits(loaded[name], tensor), name
        assert loaded["nested"][0] is loaded["f32"] and loaded["nested"][1]["again"] is loaded["f64"]
        assert loaded["t"].untyped_storage().data_ptr() == loaded["f32"].untyped_storage().data_ptr()
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None


def test_torch_may_calculate_offsets_of_what_is_laid_out(tmp_path: Path) -> None:
    """torch can compute offsets if the writer pads exactly like its own."""
    torch.save(odd_value(), tmp_path / "source.pt")
    file = read_torch_file(tmp_path, "source.pt")
    (tmp_path / "target.pt").write_bytes(built(layout_torch_file(file.value, "target"), storages_of(file)))
    config = torch.utils.serialization.config.load
    before = config.calculate_storage_offsets
    config.calculate_storage_offsets = True
    try:
        loaded = torch.load(tmp_path / "target.pt", mmap=True)
    finally:
        config.calculate_storage_offsets = before
    assert same_bits(loaded["u16"], odd_value()["u16"])


def test_the_container_is_torchs_own_byte_for_byte(tmp_path: Path) -> None:
    """Except for the serialization id, with a value of only one pickle."""
    torch.save([], tmp_path / "a.pt")
    theirs = (tmp_path / "a.pt").read_bytes()
    ours = built(layout_torch_file([], "a"), {})
    assert len(ours) == len(theirs)
    differ = [n for n in range(len(ours)) if ours[n] != theirs[n]]
    at = theirs.index(b".data/serialization_id")
    directory = theirs.index(b"PK\x01\x02")
    assert all(at < n < directory or n > theirs.rindex(b"PK\x01\x02") for n in differ)


def test_equal_values_give_equal_files() -> None:
    ref = StorageRef("0", "f32", 6)
    plans = [layout_torch_file({"a": TensorRef(ref, 0, (2, 3), (3, 1)), "b": {"x", "y"}}) for _ in range(2)]
    assert plans[0] == plans[1]


def test_every_storage_is_aligned() -> None:
    refs = [StorageRef(str(n), "u8", n) for n in range(200)]
    plan = layout_torch_file([TensorRef(ref, 0, (ref.numel,), (1,)) for ref in refs], "a_rather_long_name")
    assert all(start % 64 == 0 for start, _ in plan.storages.values())
    data = built(plan, {ref.name: bytes(range(ref.numel)) for ref in refs})
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert [t.tolist() for t in loaded] == [list(range(n)) for n in range(200)]


def test_more_members_than_the_old_directory_counts(tmp_path: Path) -> None:
    refs = [StorageRef(str(n), "u8", 1) for n in range(66_000)]
    value = [TensorRef(ref, 0, (1,), (1,)) for ref in refs]
    plan = layout_torch_file(value)
    out = bytearray(plan.size)
    crc = zlib.crc32(b"\0")
    for start, data in plan.fixed + plan.finish({ref.name: crc for ref in refs}):
        out[start : start + len(data)] = data
    path = tmp_path / "many.pt"
    path.write_bytes(out)
    assert len(zipfile.ZipFile(path).namelist()) == 66_006
    assert len(read_torch_file(tmp_path, "many.pt").storages) == 66_000
    # As torch looks for its members: building all of these tensors takes it longer than all the rest.
    theirs = torch._C.PyTorchFileReader(str(path))
    assert len(theirs.get_all_records()) == 66_006 and theirs.get_record("data/65999") == b"\0"

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return (lambda storage, *_: storage) if name == "_rebuild_tensor_v2" else super().find_class(module, name)

        def persistent_load(self, pid: Any) -> Any:
            return pid[2]

    assert Names(io.BytesIO(theirs.get_record("data.pkl"))).load() == [ref.name for ref in refs]


def test_files_and_members_beyond_4_gib(tmp_path: Path) -> None:
    """Sparse files: headers are real, the payload is a hole.

    Its CRC is known without reading it.
    """
    value: dict[str, Any] = {}
    for n, numel in enumerate((5 << 30, 3, 0, (1 << 32) - 1, (1 << 32) - 2, 8)):
        ref = StorageRef(str(n), "u8", numel)
        value[f"t{n}"] = TensorRef(ref, 0, (numel,), (1,))
    plan = layout_torch_file(value, "big")
    path = tmp_path / "big.pt"
    marks = {name: bytes([65 + int(name)]) * min(nbytes, 8) for name, (_, nbytes) in plan.storages.items()}
    with path.open("wb") as file:
        try:
            file.truncate(plan.size)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.EINVAL, errno.ENOSPC, errno.EOPNOTSUPP):
                raise
            pytest.skip(f"a file of {plan.size >> 30} GiB that is a hole: {error.strerror}")
        crcs = {name: crc_of_zeros(nbytes) for name, (_, nbytes) in plan.storages.items()}
        for name in ("1", "5"):
            crcs[name] = zlib.crc32(marks[name])
            os.pwrite(file.fileno(), marks[name], plan.storages[name][0])
        for start, data in plan.fixed + plan.finish(crcs):
            os.pwrite(file.fileno(), data, start)
    read = read_torch_file(tmp_path, "big.pt")
    assert {name: (m.start, m.size) for name, m in read.storages.items()} == plan.storages
    assert {name: m.crc for name, m in read.storages.items()} == {**crcs, "2": 0}
    with zipfile.ZipFile(path) as archive:
        for name in ("1", "5"):
            assert archive.read(f"big/data/{name}") == marks[name]  # checks the CRC too
        assert archive.getinfo("big/data/0").file_size == 5 << 30
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded["t5"].tolist() == [70] * 8 and loaded["t1"].tolist() == [66] * 3 and loaded["t0"].numel() == 5 << 30
    config = torch.utils.serialization.config.load
    config.calculate_storage_offsets = True
    try:
        assert torch.load(path, mmap=True, weights_only=True)["t5"].tolist() == [70] * 8
    finally:
        config.calculate_storage_offsets = False


def test_an_archive_within_a_larger_file(tmp_path: Path) -> None:
    data = io.BytesIO()
    torch.save({"a": torch.arange(4)}, data)
    (tmp_path / "two.distcp").write_bytes(b"x" * 100 + data.getvalue() + b"y" * 50)
    file = read_torch_file(tmp_path, "two.distcp", 100, len(data.getvalue()))
    (extent,) = file.extents()
    raw = (tmp_path / "two.distcp").read_bytes()[extent.storage_start :][: extent.storage_bytes]
    assert np.frombuffer(raw, np.int64).tolist() == [0, 1, 2, 3]


def test_an_archive_with_a_long_comment_is_read(tmp_path: Path) -> None:
    """Its end is before the bytes of the first read."""
    torch.save({"a": torch.arange(3)}, tmp_path / "a.pt")
    raw, comment = (tmp_path / "a.pt").read_bytes(), b"PK\x05\x06" * 2000
    (tmp_path / "b.pt").write_bytes(raw[:-2] + len(comment).to_bytes(2, "little") + comment)
    assert read_torch_file(tmp_path, "b.pt").value == read_torch_file(tmp_path, "a.pt").value


def test_known_bytes_of_one_tensor_are_used_for_equal_ones_only(tmp_path: Path) -> None:
    """Equal tensors may have attributes that differ, and those can change."""
    storage = StorageRef("0", "f32", 6)
    plain, turned = TensorRef(storage, 0, (2, 3), (3, 1)), TensorRef(storage, 0, (2, 3), (1, 2))
    named = TensorRef(storage, 0, (2, 3), (3, 1), attributes={"id": 1})
    for one in (plain, turned, named, plain):
        assert layout_archive(one) == layout_torch_file(one)
    value = torch.zeros(2, 3)
    torch.save(value, tmp_path / "b.pt")
    vars(value)["id"] = 1
    torch.save(value, tmp_path / "a.pt")
    first, again = (read_torch_file(tmp_path, "a.pt").value for _ in range(2))
    assert isinstance(first, TensorRef) and isinstance(again, TensorRef)
    assert first.attributes == {"id": 1} == again.attributes and first.attributes is not again.attributes
    assert [read_torch_file(tmp_path, "b.pt").value for _ in range(2)] == [plain, plain]


def test_scalars_are_read_by_position(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.int32)
    value = {
        "s": torch.tensor(7.0),
        "one": base[5],
        "t": base.view(3, 4).t()[1:, :2],
        "e": torch.zeros(0),
        "x": base[:1].expand(2),
    }
    torch.save(value, tmp_path / "a.pt")
    file = read_torch_file(tmp_path, "a.pt")
    held: Any = file.value
    for name, tensor in value.items():
        found = file.read_scalar((name,), held[name])
        assert found.shape == tuple(tensor.shape)
        assert found.data == tensor.contiguous().numpy().tobytes(), name
    torch.save(torch.zeros(1 << 20), tmp_path / "b.pt")
    big = read_torch_file(tmp_path, "b.pt")
    assert isinstance(big.value, TensorRef)
    with pytest.raises(UcplError, match="E415"):
        big.read_scalar((), big.value)


@pytest.mark.parametrize("value", [torch.tensor(7.0), torch.arange(5.0)[1]])
def test_a_flipped_bit_in_a_scalar_is_seen(tmp_path: Path, value: torch.Tensor) -> None:
    """In a storage of its own, and in a shared one.

    Anywhere in it.
    """
    torch.save({"state": {"step": value}}, tmp_path / "a.pt")
    file = read_torch_file(tmp_path, "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[file.storages["0"].start] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    held: Any = file.value
    with pytest.raises(UcplError, match=r"E408.* a/data/0 do not match their CRC; it holds state/step"):
        file.read_scalar(("state", "step"), held["state"]["step"])


def test_what_cannot_be_laid_out() -> None:
    def tensor(name: str, numel: int) -> TensorRef:
        return TensorRef(StorageRef(name, "f32", numel), 0, (numel,), (1,))

    for value in ([tensor("0", 1), tensor("0", 2)], tensor("../x", 1), tensor("", 1), tensor("0", -1)):
        with pytest.raises(UcplError, match=r"E44[01]"):
            layout_torch_file(value)
    with pytest.raises(UcplError, match="E441"):
        layout_torch_file([], "a/b")
    with pytest.raises(UcplError, match="E443"):
        layout_torch_file(tensor("0", 1)).finish({})


def test_attributes_and_state_survive_torch(tmp_path: Path) -> None:
    ref = StorageRef("0", "f32", 2)
    tensor = TensorRef(ref, 0, (2,), (1,), attributes={"ds_id": "1_2"})
    parameter = TensorRef(ref, 0, (2,), (1,), True, True, {"note": [1]})
    state = OrderedDict(w=tensor, p=parameter, plain=TensorRef(ref, 0, (2,), (1,), True, True), d=TorchDType("bf16"))
    set_attributes(state, {"_metadata": OrderedDict()})
    data = built(layout_torch_file(state), {"0": np.array([1, 2], "<f4").tobytes()})
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded["w"].ds_id == "1_2" and loaded["p"].note == [1] and isinstance(loaded["p"], torch.nn.Parameter)
    assert isinstance(loaded["plain"], torch.nn.Parameter) and loaded["plain"].tolist() == [1, 2]
    assert loaded._metadata == OrderedDict() and loaded["d"] is torch.bfloat16
    (tmp_path / "a.pt").write_bytes(data)
    assert_same(read_torch_file(tmp_path, "a.pt").value, state)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(UcplError, match="E411"):
        read_torch_file(tmp_path, "a.npz")
    with pytest.raises(UcplError, match="E400"):
        read_torch_file(tmp_path, "missing.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(UcplError, match=r"E401.*empty"):
        read_torch_file(tmp_path, "empty.pt")
    (tmp_path / "text.pt").write_bytes(b"hello" * 100)
    with pytest.raises(UcplError, match="E401"):
        read_torch_file(tmp_path, "text.pt")
    with pytest.raises(UcplError, match="E400"):
        read_torch_file(tmp_path, ".")


def test_nothing_here_imports_torch() -> None:
    code = """
import sys, tempfile
from ucpl.files import pickles, safetensors_files, torch_files, zips
from ucpl.extents import StorageRef, TensorRef
root = sys.argv[1]
file = torch_files.read_torch_file(root, "z3_optim_states.pt")
file.extents(); file.read_scalar((), next(v for k, v in pickles.walk(file.value) if type(v) is TensorRef))
torch_files.layout_torch_file(file.value, "a").finish({n: 0 for n in file.storages})
safetensors_files.layout_safetensors_file([("a", "f32", (2,))])
safetensors_files.read_safetensors_file(root, "hf_llama.safetensors").extents()
pickles.unsafe_globals(file.value)
print(*sorted({"torch", "safetensors", "pickle", "deepspeed", "zipfile"} & set(sys.modules)))
"""
    root = FIXTURES / "containers"
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], cwd=FIXTURES.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split() and "deepspeed" not in done.stdout.split()


def test_a_dtype_without_a_storage_of_its_own_counts_elements(tmp_path: Path) -> None:
    """torch states such a storage in bytes."""
    torch.save({"t": torch.arange(6).to(torch.uint16)[1:]}, tmp_path / "t.pt")
    file = read_torch_file(tmp_path, "t.pt")
    held: Any = file.value
    ref = held["t"]
    assert (ref.storage.dtype, ref.storage.numel, ref.offset, ref.shape) == ("u16", 6, 1, (5,))
    assert [e.storage_bytes for e in file.extents()] == [12]
