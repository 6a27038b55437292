"""Odd safetensors files.

Files that the library loads are read bit for bit, or refused with a code; files that it refuses are refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as library
import torch
from safetensors import SafetensorError

from tests.files.values import same_bits
from ucpl.errors import UcplError
from ucpl.extents import DTYPES
from ucpl.files.safetensors_files import read_safetensors_file

NAMES = sorted(d.name for d in DTYPES.values() if d.safetensors)


Outcome = tuple[str, bool]  # "equal" or the code of the refusal; whether the library loads the file
EQUAL = ("equal", True)


def outcome(path: Path) -> Outcome:
    """The readings of a file by the library and here. Raises.

    AssertionError if values differ, or only ours reads.
    """
    theirs: dict[str, torch.Tensor] | None
    try:
        theirs = library.load_file(path)
    except SafetensorError:
        theirs = None
    try:
        file = read_safetensors_file(path.parent, path.name)
    except UcplError as error:
        return error.diagnostics[0].code, theirs is not None
    assert theirs is not None, "the library refuses it"
    assert set(file.tensors) == set(theirs)
    whole = path.read_bytes()
    for name, extent in file.tensors.items():
        raw = bytearray(whole[extent.storage_start : extent.storage_start + extent.storage_bytes])
        kind = getattr(torch, DTYPES[extent.dtype].torch)
        ours = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        assert ours.numel() == theirs[name].numel() and ours.dtype == theirs[name].dtype
        assert same_bits(ours.reshape(theirs[name].shape), theirs[name]), name
    return EQUAL


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, data: bytes, *, before: str = "", after: str = "", text: str = "") -> None:
    raw = (before + (text or json.dumps(header)) + after).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


A, B = entry("F32", [2, 2], 0, 16), entry("I64", [1], 16, 24)
DATA = bytes(range(24))
TEXT = f': {json.dumps(A)}, "b": {json.dumps(B)}}}'
TWICE = json.dumps({"a": A})[:-1] + ', "a": ' + json.dumps(A) + "}"

BY_HAND: dict[str, Callable[[Path], object]] = {
    "plain": lambda p: write(p, {"a": A, "b": B}, DATA),
    "header in another order": lambda p: write(p, {"b": B, "a": A}, DATA),
    "spaces behind": lambda p: write(p, {"a": A, "b": B}, DATA, after=" " * 99),
    "spaces before": lambda p: write(p, {"a": A, "b": B}, DATA, before="  "),
    "tabs and line ends": lambda p: write(p, {"a": A, "b": B}, DATA, after="\n\t "),
    "zeros behind": lambda p: write(p, {"a": A, "b": B}, DATA, after="\0\0"),
    "indented": lambda p: write(p, None, DATA, text=json.dumps({"a": A, "b": B}, indent=3)),
    "not aligned": lambda p: write(p, {"a": entry("U8", [3], 0, 3), "b": entry("F32", [1], 3, 7)}, DATA[:7]),
    "empty in the middle": lambda p: write(p, {"a": A, "e": entry("F32", [0, 3], 16, 16), "b": B}, DATA),
    "empty at the end": lambda p: write(p, {"a": A, "b": B, "e": entry("BOOL", [0], 24, 24)}, DATA),
    "empty at zero": lambda p: write(p, {"a": A, "b": B, "e": entry("BOOL", [2, 0], 0, 0)}, DATA),
    "empty alone": lambda p: write(p, {"e": entry("F32", [0], 0, 0)}, b""),
    "no tensors": lambda p: write(p, {}, b""),
    "no dims": lambda p: write(p, {"a": entry("F64", [], 0, 8)}, DATA[:8]),
    "many dims": lambda p: write(p, {"a": entry("F32", [1] * 20 + [2, 2], 0, 16)}, DATA[:16]),
    "metadata": lambda p: write(p, {"__metadata__": {"format": "pt", "a": "b", "b": "x"}, "a": A, "b": B}, DATA),
    "metadata last": lambda p: write(p, {"a": A, "b": B, "__metadata__": {}}, DATA),
    "metadata of numbers": lambda p: write(p, {"__metadata__": {"step": 3}, "a": A, "b": B}, DATA),
    "metadata of nothing": lambda p: write(p, {"__metadata__": None, "a": A, "b": B}, DATA),
    "names": lambda p: write(p, {"": A, "ä é 漢字 😀/.. \n": B}, DATA),
    "escaped names": lambda p: write(p, None, DATA, text=r'{"\u0061\n\""' + TEXT),
    "half a character": lambda p: write(p, None, DATA, text=r'{"\ud800"' + TEXT),
    "a name twice": lambda p: write(p, None, DATA[:16], text=TWICE),
    "one place for two": lambda p: write(p, {"a": A, "b": A}, DATA[:16]),
    "overlapping": lambda p: write(p, {"a": A, "b": entry("I64", [1], 8, 16)}, DATA[:16]),
    "a hole": lambda p: write(p, {"a": A, "b": entry("I64", [1], 24, 32)}, bytes(32)),
    "a hole before": lambda p: write(p, {"a": entry("F32", [2, 2], 8, 24)}, DATA),
    "bytes behind": lambda p: write(p, {"a": A, "b": B}, DATA + b"x"),
    "bytes missing": lambda p: write(p, {"a": A, "b": B}, DATA[:-1]),
    "another size": lambda p: write(p, {"a": entry("F32", [2, 3], 0, 16)}, DATA[:16]),
    "turned round": lambda p: write(p, {"a": entry("F32", [2, 2], 16, 0)}, DATA[:16]),
    "a float for a size": lambda p: write(p, None, DATA[:16], text=json.dumps({"a": A}).replace("[2, 2]", "[2.0, 2]")),
    "a negative size": lambda p: write(p, {"a": entry("F32", [-2, -2], 0, 16)}, DATA[:16]),
    "a large size": lambda p: write(p, {"a": entry("F32", [1 << 33, 1 << 33], 0, 16)}, DATA[:16]),
    "one key more": lambda p: write(p, {"a": {**A, "note": 1}, "b": B}, DATA),
    "one key less": lambda p: write(p, {"a": {"dtype": "F32", "shape": [2, 2]}}, DATA[:16]),
    "an unknown dtype": lambda p: write(p, {"a": entry("F33", [4], 0, 16)}, DATA[:16]),
    "a dtype in small letters": lambda p: write(p, {"a": entry("f32", [4], 0, 16)}, DATA[:16]),
    "a list": lambda p: write(p, [], b""),
    "no header": lambda p: p.write_bytes(b""),
    "a header beyond the end": lambda p: p.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
    "halves of bytes": lambda p: write(p, {"a": entry("F4", [2, 6], 0, 6)}, DATA[:6]),
    "an odd number of halves": lambda p: write(p, {"a": entry("F4", [5], 0, 3)}, DATA[:3]),
}  # fmt: skip
# Outcomes other than EQUAL. The library takes the last of two tensors of one name, and leaves out keys that it does not know.
ODD: dict[str, Outcome] = {
    "spaces before": ("E431", True),
    "a name twice": ("E432", True),
    "one key more": ("E431", True),
    **dict.fromkeys(("no header", "a header beyond the end"), ("E430", False)),
    **dict.fromkeys(("zeros behind", "metadata of numbers", "half a character", "one key less"), ("E431", False)),
    **dict.fromkeys(("a float for a size", "a negative size", "a list"), ("E431", False)),
    **dict.fromkeys(("one place for two", "overlapping", "a hole", "a hole before", "bytes behind"), ("E433", False)),
    **dict.fromkeys(("bytes missing", "another size", "turned round", "a large size"), ("E433", False)),
    "an odd number of halves": ("E433", False),
    **dict.fromkeys(("an unknown dtype", "a dtype in small letters"), ("E434", False)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_files_by_hand_are_read_as_the_library_reads_them(name: str, tmp_path: Path) -> None:
    BY_HAND[name](tmp_path / "f.safetensors")
    assert outcome(tmp_path / "f.safetensors") == ODD.get(name, EQUAL)


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_of_the_library(name: str, tmp_path: Path) -> None:
    kind = getattr(torch, DTYPES[name].torch)
    size = torch.empty((), dtype=kind).element_size()
    raw = torch.arange(24 * size, dtype=torch.int64).remainder(2 if kind == torch.bool else 251).to(torch.uint8)
    whole = raw.view(kind).reshape(4, 6)
    tensors = {
        "w": whole,
        "v": whole[0].clone(),
        "e": torch.empty(0, 3, dtype=kind),
    }
    if kind != torch.float4_e2m1fn_x2:  # two of them are a byte
        tensors["one"] = whole.reshape(-1)[3].clone()
    library.save_file(tensors, tmp_path / "f.safetensors")
    assert outcome(tmp_path / "f.safetensors") == EQUAL
