"""Odd but valid files of torch.save, and some that are not.

Every file that torch loads is read bit for bit, or refused with a code.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.files.values import assert_tells, torch_tensor
from ucpl.errors import UcplError
from ucpl.extents import DTYPES
from ucpl.files.torch_files import read_torch_file

KINDS = sorted({getattr(torch, dtype.torch) for dtype in DTYPES.values()}, key=str)
OTHERS = [
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e8m0fnu,
]


Outcome = tuple[str, str]  # ours: "equal", "read", or the code of the refusal; torch's: "" or the type of its exception
EQUAL = ("equal", "")


def outcome(path: Path, inert: type[Exception] | None = None) -> Outcome:
    """The readings of a file by torch and here. inert.

    The exception with which the comparison of the two must end.
    """
    theirs, refusal = None, ""
    try:
        theirs = torch.load(path, map_location="cpu", weights_only=False)
    except (RuntimeError, pickle.UnpicklingError) as error:
        refusal = type(error).__name__
    try:
        file = read_torch_file(path.parent, path.name)
    except UcplError as error:
        return error.diagnostics[0].code, refusal
    if refusal:
        return "read", refusal
    whole = path.read_bytes()

    def tensor(ref: Any) -> torch.Tensor:
        member = file.storages[ref.storage.name]
        return torch_tensor(ref, whole[member.start : member.start + member.size])

    if inert is not None:
        with pytest.raises(inert):
            assert_tells(file.value, theirs, tensor)
        return "read", ""
    assert_tells(file.value, theirs, tensor)
    return EQUAL


def saved(path: Path, value: object, **how: Any) -> Outcome:
    torch.save(value, path, **how)
    return outcome(path)


def of_dtype(kind: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes that differ from one another."""
    size = torch.empty((), dtype=kind).element_size()
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * size, dtype=torch.int64).remainder(2 if kind == torch.bool else 251).to(torch.uint8)
    return raw.view(kind).reshape(shape) if numel else torch.empty(shape, dtype=kind)


FORMS: dict[str, Callable[[torch.dtype], object]] = {
    "contiguous": lambda k: {"w": of_dtype(k, 3, 5)},
    "no dims": lambda k: {"w": of_dtype(k, 1)[0], "v": of_dtype(k, 4)[2]},
    "empty": lambda k: {"w": of_dtype(k, 0), "v": of_dtype(k, 3, 0, 2)},
    "strides": lambda k: {"t": of_dtype(k, 4, 6).t(), "column": of_dtype(k, 4, 6)[:, 1], "every": of_dtype(k, 9)[1::2]},
    "shared": lambda k: (lambda w: {"a": w, "b": w, "row": w[1], "view": w.view(-1)[2:7]})(of_dtype(k, 4, 6)),
    "expanded": lambda k: {
        "w": of_dtype(k, 1, 3).expand(4, 3),
        "overlap": of_dtype(k, 9).as_strided((3, 3), (2, 1), 1),
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_dtype_in_every_form(kind: torch.dtype, form: str, tmp_path: Path) -> None:
    assert saved(tmp_path / "f.pt", FORMS[form](kind)) == EQUAL


@pytest.mark.parametrize("kind", [k for k in OTHERS if k not in KINDS], ids=str)
def test_a_dtype_that_is_not_known_is_refused(kind: torch.dtype, tmp_path: Path) -> None:
    assert saved(tmp_path / "f.pt", {"w": torch.zeros(2, dtype=kind)}) == ("E427", "")


def tagged() -> object:
    made: Any = torch.nn.Parameter(W.clone())
    made.tag = "x"
    return {"w": made}


def circle() -> list[object]:
    made: list[object] = [1]
    made.append({"self": made})
    return made


def with_metadata() -> object:
    made: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    assert made._metadata
    return made


W = torch.arange(12.0).reshape(3, 4)
VALUES: dict[str, Callable[[], object]] = {
    "ordered": lambda: OrderedDict(b=W, a=W.t()),
    "nested": lambda: {"a": {"b": [{"c": (W, [W[0]])}]}},
    "keys of numbers": lambda: {0: W, -1: W + 1, 2.5: W + 3},
    "keys of large numbers": lambda: {1 << 70: W},
    "keys of other types": lambda: {None: W, True: W + 1, b"raw": W + 2, ("t", 0): W + 3, frozenset({1}): 4},
    "names": lambda: {"": W, "a.b": W + 1, "a/b": W + 2, "ä é 漢字 😀": W + 3, "\n\t\0": W + 4, "..": W + 5, "x" * 5000: W + 6},
    "halves of characters": lambda: {"\ud800": 1, "w": W},
    "equal keys": lambda: {"1": W, 1: W + 1, "True": W + 2},
    "numbers": lambda: {"i": [0, -1, 255, 256, 65536, 1 << 31, -(1 << 63), 1 << 64, 1 << 2040], "f": [1e308, -0.0]},
    "constants": lambda: [None, True, False, ..., NotImplemented, 1j, b"", bytearray(b"ab"), slice(1, None, 2), range(3)],
    "sets": lambda: [{1, "a"}, frozenset({2}), set()],
    "empty ones": lambda: [{}, [], (), "", b"", OrderedDict()],
    "tuples": lambda: [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((W,),)],
    "containers": lambda: {"d": defaultdict(list, a=[1]), "q": deque([1]), "c": Counter("aab")},
    "texts": lambda: ["x" * 255, "x" * 256, "é" * 70000, "a\\u0041\r\n"],
    "dtypes and sizes": lambda: {"d": torch.bfloat16, "s": torch.Size((2, 3)), "e": torch.Size(()), "dev": torch.device("cpu")},
    "dates": lambda: {"when": datetime(2026, 1, 2), "much": Decimal("1.5")},
    "shared containers": lambda: (lambda one: [one, one, {"again": one}])([W, {"k": 1}]),
    "circle": circle,
    "parameters": lambda: {"p": torch.nn.Parameter(W.clone()), "q": torch.nn.Parameter(W.clone(), requires_grad=False)},
    "requires grad": lambda: {"w": W.clone().requires_grad_()},
    "state dict": with_metadata,
    "buffer": lambda: {"b": torch.nn.Buffer(W.clone())},
    "storage": lambda: {"s": torch.ones(3).untyped_storage(), "w": W},
    "typed storage": lambda: {"s": torch.FloatStorage([1.0, 2.0]), "w": W},
    "conjugate": lambda: {"w": torch.complex(W, W).conj()},
    "negative": lambda: {"w": torch.complex(W, W).conj().imag},
    "sparse": lambda: {"w": W.to_sparse()},
    "sparse rows": lambda: {"w": W.to_sparse_csr()},
    "quantized": lambda: {"w": torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)},
    "meta": lambda: {"w": torch.empty(3, device="meta")},
    "nested tensor": lambda: {"w": torch.nested.nested_tensor([W[0], W[1, :2]])},
    "numpy": lambda: {"n": W.numpy(), "s": W.numpy()[0, 0]},
    "generator": lambda: {"g": torch.Generator().get_state(), "w": W},
    "optimizer": lambda: torch.optim.AdamW([torch.nn.Parameter(W.clone())], lr=torch.tensor(0.1)).state_dict(),
    "attributes": lambda: tagged(),
    "channels last": lambda: {"w": torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last)},
    "diagonal": lambda: {"w": torch.arange(16.0).reshape(4, 4).diagonal(), "f": W.flip(0), "n": W.narrow(1, 1, 2)},
    "many": lambda: {f"layers.{n}.w": torch.full((2,), float(n)) for n in range(400)},
    "large ints": lambda: {"w": torch.tensor([-(1 << 63), (1 << 63) - 1]), "b": torch.tensor([True, False])},
    "not numbers": lambda: {"w": torch.tensor([float("nan"), float("-inf"), -0.0]).view(torch.int32)},
    "a tensor alone": lambda: W,
    "a number alone": lambda: 7,
}  # fmt: skip
REFUSED_VALUES = {"keys of large numbers": "E423", "quantized": "E427"}
# Values that stay inert here and are objects in torch: both read them, and the comparison ends with this exception.
INERT: dict[str, type[Exception]] = {
    **dict.fromkeys(("storage", "typed storage", "conjugate", "negative", "sparse", "sparse rows"), AssertionError),
    **dict.fromkeys(("meta", "nested tensor", "numpy"), AssertionError),
    "constants": AttributeError,
    "circle": RecursionError,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_torch(name: str, tmp_path: Path) -> None:
    torch.save(VALUES[name](), tmp_path / "f.pt")
    ours = "read" if name in INERT else REFUSED_VALUES.get(name, "equal")
    assert outcome(tmp_path / "f.pt", INERT.get(name)) == (ours, "")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle(protocol: int, tmp_path: Path) -> None:
    value = {"a": W, "b": [W[1], {"c": (1, "é", b"raw", 2.5, 1 << 70)}], "o": OrderedDict(x=W.t())}
    value |= {f"layer.{n}": torch.full((1,), float(n)) for n in range(300)}
    assert saved(tmp_path / "f.pt", value, pickle_protocol=protocol) == EQUAL


# ---- archives ----------------------------------------------------------------------------------------------------------------

Members = list[tuple[str, bytes]]


def members() -> Members:
    data = io.BytesIO()
    torch.save({"a": W, "b": torch.arange(5), "c": torch.zeros(0)}, data)
    with zipfile.ZipFile(data) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def zipped(path: Path, entries: Members, how: Callable[[zipfile.ZipInfo], None] | None = None, **more: Any) -> None:
    with zipfile.ZipFile(path, "w", **more) as archive:
        for name, data in entries:
            info = zipfile.ZipInfo(name)
            if how is not None:
                how(info)
            archive.writestr(info, data)


def streamed(path: Path, entries: Members) -> None:
    """Sizes and CRCs behind the data, as a pipe gets them."""

    class Pipe(io.RawIOBase):
        def __init__(self, file: Any) -> None:
            self.file = file

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return int(self.file.write(data))

    with path.open("wb") as file, zipfile.ZipFile(Pipe(file), "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)


def forced_zip64(path: Path, entries: Members) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as member:
                member.write(data)


def commented(path: Path, entries: Members) -> None:
    zipped(path, entries)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"a comment PK\x05\x06 of many bytes" * 50


def inside(path: Path, entries: Members, before: bytes = b"", after: bytes = b"") -> None:
    zipped(path, entries)
    path.write_bytes(before + path.read_bytes() + after)


def renamed(entries: Members, **names: str) -> Members:
    return [(names.get(name.rpartition("/")[2].replace(".", "_"), name), data) for name, data in entries]


def extra(info: zipfile.ZipInfo) -> None:
    info.extra = struct.pack("<HHI", 0x7075, 4, 7)
    info.comment = b"of a member"


def deflated(info: zipfile.ZipInfo) -> None:
    info.compress_type = zipfile.ZIP_DEFLATED


def without(entries: Members, *ends: str) -> Members:
    return [(name, data) for name, data in entries if not name.endswith(ends)]


def again(entries: Members, end: str, name: str, data: bytes | None = None) -> Members:
    """A second member, in front of or behind the first.

    Another name, or the same one.
    """
    found = next(raw for own, raw in entries if own.endswith(end))
    return [*entries, (name, data if data is not None else bytes(len(found)))]


def other_folder(entries: Members, name: str) -> Members:
    return [(f"{name}/{own.partition('/')[2]}", data) for own, data in entries]


ARCHIVES: dict[str, Callable[[Path, Members], None]] = {
    "as it is": lambda p, m: zipped(p, m),
    "reversed": lambda p, m: zipped(p, m[::-1]),
    "streamed": streamed,
    "zip64": forced_zip64,
    "comment": commented,
    "extra fields": lambda p, m: zipped(p, m, extra),
    "deflated": lambda p, m: zipped(p, m, deflated),
    "bytes before": lambda p, m: inside(p, m, b"#!/bin/sh\n"),
    "bytes after": lambda p, m: inside(p, m, b"", b"\0" * 30),
    "another folder": lambda p, m: zipped(p, other_folder(m, "my model é")),
    "a folder in a folder": lambda p, m: zipped(p, other_folder(m, "a/b")),
    "no byteorder": lambda p, m: zipped(p, without(m, "byteorder")),
    "no version": lambda p, m: zipped(p, without(m, "/version")),
    "no serialization id": lambda p, m: zipped(p, without(m, "serialization_id", "format_version", "storage_alignment")),
    "big endian": lambda p, m: zipped(p, [(n, b"big" if n.endswith("byteorder") else d) for n, d in m]),
    "no pickle": lambda p, m: zipped(p, without(m, "data.pkl")),
    "no storage": lambda p, m: zipped(p, without(m, "data/0")),
    "a storage that is short": lambda p, m: zipped(p, [(n, d[:-4] if n.endswith("data/0") else d) for n, d in m]),
    "a storage that is long": lambda p, m: zipped(p, [(n, d + bytes(8) if n.endswith("data/0") else d) for n, d in m]),
    "a member twice": lambda p, m: zipped(p, again(m, "data/0", next(n for n, _ in m if n.endswith("data/0")))),
    "a pickle twice": lambda p, m: zipped(p, again(m, "data.pkl", next(n for n, _ in m if n.endswith("data.pkl")),
                                                  pickle.dumps(1, 2))),
    "a storage in capitals": lambda p, m: zipped(p, again(m, "data/0", m[0][0].partition("/")[0] + "/DATA/0")),
    "a storage in capitals first": lambda p, m: zipped(p, again(m, "data/0", m[0][0].partition("/")[0] + "/DATA/0")[::-1]),
    "a folder in capitals": lambda p, m: zipped(p, [*m, *((n.upper(), bytes(len(d))) for n, d in m if "/data/" in n)]),
    "a storage in capitals alone": lambda p, m: zipped(p, [(n.replace("data/0", "DATA/0"), d) for n, d in m]),
    "two archives": lambda p, m: zipped(p, [*m, *other_folder(m, "other")]),
    "other files": lambda p, m: zipped(p, [*m, (m[0][0].partition("/")[0] + "/extra/notes.txt", b"hello")]),
}  # fmt: skip
# Outcomes other than EQUAL. torch 2.13 reads some files that are refused here: two members or two readings of one name.
ODD_ARCHIVES: dict[str, Outcome] = {
    "comment": ("read", "RuntimeError"),
    "deflated": ("E403", ""),
    "bytes before": ("E402", "UnpicklingError"),
    "bytes after": ("E401", ""),
    "a folder in a folder": ("E411", "RuntimeError"),
    "no version": ("read", "RuntimeError"),
    "big endian": ("E412", ""),
    "no pickle": ("E411", "RuntimeError"),
    "no storage": ("E413", "RuntimeError"),
    "a storage that is short": ("E414", "RuntimeError"),
    "a storage that is long": ("E414", "RuntimeError"),
    "a member twice": ("E405", ""),
    "a pickle twice": ("E405", ""),
    "a storage in capitals": ("E417", ""),
    "a storage in capitals first": ("E417", ""),
    "a folder in capitals": ("E411", "RuntimeError"),
    "a storage in capitals alone": ("E413", ""),
    "two archives": ("E411", "RuntimeError"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_are_read_as_torch_reads_them(name: str, tmp_path: Path) -> None:
    ARCHIVES[name](tmp_path / "f.pt", members())
    assert outcome(tmp_path / "f.pt") == ODD_ARCHIVES.get(name, EQUAL)


@pytest.mark.parametrize("form", FORMS)
def test_files_from_before_archives_are_read(form: str, tmp_path: Path) -> None:
    found = saved(tmp_path / "f.pt", FORMS[form](torch.float32), _use_new_zipfile_serialization=False)
    assert found == EQUAL


# ---- pickles by hand ----------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Storages as records: (type, key, elements)."""

    def persistent_id(self, value: object) -> object:
        if isinstance(value, Told):
            return ("storage", value.kind, value.key, "cpu", value.numel)
        return None

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, View):
            return torch._utils._rebuild_tensor_v2, (
                value.of,
                value.offset,
                value.shape,
                value.stride,
                False,
                OrderedDict(),
            )
        return NotImplemented


class Told:
    def __init__(self, kind: type, key: str, numel: int) -> None:
        self.kind, self.key, self.numel = kind, key, numel


class View:
    def __init__(self, of: Told, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> None:
        self.of, self.shape, self.stride, self.offset = of, shape, stride, offset


def by_hand(path: Path, value: object, storages: dict[str, bytes]) -> Outcome:
    data = io.BytesIO()
    _Pickler(data, 2).dump(value)
    entries = [("a/data.pkl", data.getvalue()), ("a/byteorder", b"little")]
    entries += [(f"a/data/{key}", raw) for key, raw in storages.items()]
    zipped(path, [*entries, ("a/version", b"3\n")])
    return outcome(path)


RAW = {"0": W.numpy().tobytes()}
F, L, B, H = torch.FloatStorage, torch.LongStorage, torch.ByteStorage, torch.HalfStorage
BY_HAND: dict[str, Callable[[], object]] = {
    "plain": lambda: {"a": View(Told(F, "0", 12), (3, 4), (4, 1))},
    "two dtypes": lambda: {"a": View(Told(F, "0", 12), (3, 4), (4, 1)), "b": View(Told(L, "0", 6), (6,), (1,))},
    "two dtypes, the other first": lambda: {"b": View(Told(L, "0", 6), (6,), (1,)), "a": View(Told(F, "0", 12), (12,), (1,))},
    "two dtypes of one size": lambda: {
        "a": View(Told(F, "0", 12), (12,), (1,)), "b": View(Told(torch.IntStorage, "0", 12), (12,), (1,)),
    },
    "two counts": lambda: {"a": View(Told(F, "0", 12), (12,), (1,)), "b": View(Told(F, "0", 6), (6,), (1,))},
    "two counts, the smaller first": lambda: {"b": View(Told(F, "0", 6), (6,), (1,)), "a": View(Told(F, "0", 12), (12,), (1,))},
    "fewer than there are": lambda: {"a": View(Told(F, "0", 6), (6,), (1,))},
    "more than there are": lambda: {"a": View(Told(F, "0", 24), (24,), (1,))},
    "beyond its end": lambda: {"a": View(Told(F, "0", 12), (4, 4), (4, 1))},
    "negative stride": lambda: {"a": View(Told(F, "0", 12), (3,), (-1,), 5)},
    "bytes": lambda: {"a": View(Told(B, "0", 48), (48,), (1,))},
    "halves": lambda: {"a": View(Told(H, "0", 24), (4, 6), (6, 1))},
    "steps of nothing": lambda: {"a": View(Told(F, "0", 12), (5, 2), (0, 3))},
}  # fmt: skip
ODD_STORAGES: dict[str, Outcome] = {
    "two dtypes": ("E418", ""),
    "two dtypes, the other first": ("E418", "RuntimeError"),
    "two dtypes of one size": ("E418", ""),
    "two counts": ("E414", ""),
    "two counts, the smaller first": ("E414", "RuntimeError"),
    "fewer than there are": ("E414", "RuntimeError"),
    "more than there are": ("E414", "RuntimeError"),
    "beyond its end": ("E415", "RuntimeError"),
    "negative stride": ("E415", "RuntimeError"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_storages_are_what_torch_takes_them_for(name: str, tmp_path: Path) -> None:
    assert by_hand(tmp_path / "f.pt", BY_HAND[name](), RAW) == ODD_STORAGES.get(name, EQUAL)
