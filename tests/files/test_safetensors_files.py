"""safetensors files: the library's are read, and it loads ucpl's."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as library
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.files.values import FIXTURES, built, same_bits
from ucpl.errors import UcplError
from ucpl.extents import DTYPES
from ucpl.files import safetensors_files
from ucpl.files.safetensors_files import layout_safetensors_file, read_safetensors_file


def typed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of a dtype; torch cannot cast to two elements per byte."""
    return values.to(torch.uint8).view(dtype) if dtype == torch.float4_e2m1fn_x2 else values.to(dtype)


def tensors() -> dict[str, torch.Tensor]:
    found = {
        f"{n % 3}.{dtype.name}": typed(torch.arange(3 * (n % 4)).reshape(3, n % 4), getattr(torch, dtype.torch))
        for n, dtype in enumerate(DTYPES.values())
        if dtype.safetensors
    }
    return {**found, 'é"x': torch.ones(2), "scalar": torch.tensor(2.0)}


def test_what_the_library_writes_is_read_and_laid_out_alike(tmp_path: Path) -> None:
    library.save_file(tensors(), tmp_path / "a.safetensors", metadata={"format": "pt"})
    whole = (tmp_path / "a.safetensors").read_bytes()
    file = read_safetensors_file(tmp_path, "a.safetensors")
    assert file.metadata == {"format": "pt"} and len(file.extents()) == len(tensors())
    payload = {}
    for name, tensor in tensors().items():
        extent = file.tensors[name]
        assert extent.shape == tuple(tensor.shape) and extent.key == (name,)
        assert extent.is_contiguous or not extent.numel
        assert extent.dtype == next(d.name for d in DTYPES.values() if getattr(torch, d.torch) == tensor.dtype)
        payload[name] = whole[extent.storage_start : extent.storage_start + extent.storage_bytes]
        assert (
            payload[name] == bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist()) if tensor.dim() else True
        )
    plan = layout_safetensors_file([(e.storage, e.dtype, e.shape) for e in file.extents()][::-1], file.metadata)
    assert built(plan, payload) == whole


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.rglob("*.safetensors")), ids=lambda p: p.relative_to(FIXTURES).as_posix()
)
def test_real_files(path: Path, tmp_path: Path) -> None:
    file = read_safetensors_file(path.parent, path.name)
    whole = path.read_bytes()
    plan = layout_safetensors_file([(n, e.dtype, e.shape) for n, e in file.tensors.items()], file.metadata)
    copy = built(plan, {n: whole[e.storage_start :][: e.storage_bytes] for n, e in file.tensors.items()})
    (tmp_path / "copy").write_bytes(copy)
    expected, got = library.load_file(path), library.load_file(tmp_path / "copy")
    assert expected.keys() == got.keys() == file.tensors.keys()
    assert all(same_bits(expected[name], got[name]) for name in expected)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
# The library writes the two types of scaled blocks, and does not read them.
dtypes = st.sampled_from([d.name for d in DTYPES.values() if d.safetensors and d.safetensors not in ("F4", "F8_E8M0")])


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.tuples(dtypes, shapes), max_size=8),
    st.none() | st.dictionaries(st.text(), st.text()),
)
def test_any_layout_is_loaded_by_the_library(
    tmp_path: Path, wanted: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    wanted.pop("__metadata__", None)
    try:
        plan = layout_safetensors_file([(name, *rest) for name, rest in wanted.items()], metadata)
    except UcplError as error:
        assert error.diagnostics[0].code == "E442" and "\\ud" in repr(metadata)
        return
    data = built(plan, {name: bytes(nbytes) for name, (_, nbytes) in plan.tensors.items()})
    (tmp_path / "a").write_bytes(data)
    loaded = library.load(data)
    assert {name: tuple(t.shape) for name, t in loaded.items()} == {name: shape for name, (_, shape) in wanted.items()}
    file = read_safetensors_file(tmp_path, "a")
    assert {n: (e.dtype, e.shape) for n, e in file.tensors.items()} == wanted and file.metadata == metadata
    assert plan.fixed[0][1][8:].startswith(b"{") and len(plan.fixed[0][1]) % 8 == 0


@pytest.mark.parametrize("letters", range(1, 9))
def test_tensors_begin_at_a_multiple_of_eight_whatever_their_names_are(letters: int) -> None:
    plan = layout_safetensors_file([("w" * letters, "f32", (2,))], None)
    assert len(plan.fixed[0][1]) % 8 == 0


def with_header(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.fault("Hostile input", "invalid safetensors headers", "refused")
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "E430"),
        (b"1234567", "E430"),
        (struct.pack("<Q", 100) + b"{}", "E430"),
        (struct.pack("<Q", 2**63) + b"{}", "E430"),
        (with_header(b""), "E431"),
        (with_header(b" {}"), "E431"),
        (with_header(b"[]"), "E431"),
        (with_header(b"{"), "E431"),
        (with_header(b"\xff{}"), "E431"),
        (with_header(b'{"a":' + b"[" * 100_000), "E431"),
        (with_header(b'{"a":' + b"9" * 10_000 + b"}"), "E431"),
        (with_header({"a": 1}), "E431"),
        (with_header({"a": {"dtype": "F32"}}), "E431"),
        (with_header({"a": entry(shape=[-1])}, b"12345678"), "E431"),
        (with_header({"a": entry(shape=[2.0])}, b"12345678"), "E431"),
        (with_header({"a": entry(shape=[True])}, b"12345678"), "E431"),
        (with_header({"a": entry(shape=[1] * 100)}, b"12345678"), "E431"),
        (with_header({"a": entry(offsets=[0])}, b"12345678"), "E431"),
        (with_header({"a": entry(offsets=[float("nan"), 8])}, b"12345678"), "E431"),
        (with_header({"__metadata__": {"a": 1}}), "E431"),
        (with_header({"__metadata__": []}), "E431"),
        (with_header(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'), "E432"),
        (with_header(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "E432"),
        (with_header({"a": entry("F6_E2M3")}, b"12345678"), "E434"),
        (with_header({"a": entry("F4", shape=[15])}, b"12345678"), "E433"),
        (with_header({"a": entry("F4", shape=[])}, b"12345678"), "E433"),
        (with_header({"a": entry(["F32"])}, b"12345678"), "E434"),
        (with_header({"a": entry(shape=[3])}, b"12345678"), "E433"),
        (with_header({"a": entry(offsets=[8, 0])}, b"12345678"), "E433"),
        (with_header({"a": entry()}, b"1234567"), "E433"),
        (with_header({"a": entry()}, b"123456789"), "E433"),
        (with_header({"a": entry(), "b": entry(offsets=[4, 12])}, b"1" * 12), "E433"),
        (with_header({"a": entry(), "b": entry(offsets=[12, 20])}, b"1" * 20), "E433"),
        (with_header({"a": entry(shape=[2**40, 2**40], offsets=[0, 8])}, b"1" * 8), "E433"),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, data: bytes, code: str) -> None:
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(UcplError, match=rf"^{code}: bad") as caught:
        read_safetensors_file(tmp_path, "bad")
    assert caught.value.exit_status == 3 and caught.value.diagnostics[0].remedy


def test_what_cannot_be_laid_out() -> None:
    for wanted in (
        [("a", "f32", (1,)), ("a", "f32", (1,))],
        [("__metadata__", "f32", (1,))],
        [("a", "c128", (1,))],
        [("a", "f7", (1,))],
        [("a", "f32", (-1,))],
    ):
        with pytest.raises(UcplError, match="E442"):
            layout_safetensors_file(wanted)


def test_limits_of_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = with_header({"a": entry(), "__metadata__": {"k": "v" * 100}}, b"12345678")
    (tmp_path / "wide").write_bytes(data)
    header = len(data) - 16
    monkeypatch.setattr(safetensors_files, "HEADER_BYTES_FREE", header - 9)
    with pytest.raises(UcplError, match=f"E444: wide has a header of {header} bytes for 8 bytes of tensors"):
        read_safetensors_file(tmp_path, "wide")
    monkeypatch.setattr(safetensors_files, "HEADER_BYTES_FREE", header - 8)
    assert list(read_safetensors_file(tmp_path, "wide").tensors) == ["a"]
    monkeypatch.setattr(safetensors_files, "HEADER_BYTES_MAX", header - 1)
    with pytest.raises(UcplError, match="E430"):
        read_safetensors_file(tmp_path, "wide")
    with pytest.raises(UcplError, match=r"E442: a header of .* more than readers accept"):
        layout_safetensors_file([("a", "f32", (2,))], {"k": "v" * 200})


def test_texts_that_cannot_be_laid_out() -> None:
    for metadata in ({"k": 1}, {1: "v"}):
        with pytest.raises(UcplError, match=r"E442: metadata .* is no text"):
            layout_safetensors_file([("a", "f32", (1,))], metadata)  # type: ignore[arg-type]
    for name, texts in (("\ud800", {}), ("a", {"k": "\ud800"})):
        with pytest.raises(UcplError, match="E442: a name cannot be written"):
            layout_safetensors_file([(name, "f32", (1,))], texts)
