"""safetensors files: a length, a JSON header, and the tensors.

They are read by header, and laid out before writing. Not here: torch, the safetensors library (tests compare with it),
and moving tensors' bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import NoReturn, TypeAlias

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import BY_SAFETENSORS, DTYPES, PAIRED, Extent, in_elements, in_file, size_of
from ucpl.extents.account import NotRead
from ucpl.files.magic import Description, magic_of
from ucpl.files.zips import open_file, read_exactly
from ucpl.records import frozen
from ucpl.texts import is_text

__all__ = [
    "ALIASES",
    "SafetensorsFile",
    "SafetensorsFilePlan",
    "layout_safetensors_file",
    "read_safetensors_file",
]

HEADER_BYTES_MAX = 100_000_000  # the library's own limit
HEADER_BYTES_FREE = 8 << 20  # of a header, whatever the file holds: some 80,000 tensors
DIMS_MAX = 64
_HEAD = 512  # bytes that are enough to recognise files of other programs
_ZIP = b"PK\x03\x04"
_TORCH_FILE = Description(
    "it is a zip archive, as torch.save writes it", "give it the name that it had, as in model.pt"
)
ALIASES = "ucpl.aliases"  # the metadata of a header that ucpl writes: second names of its tensors, as JSON


@frozen
class SafetensorsFile:
    """One safetensors file: its tensors by name, and its header's metadata.

    Tensors are in the order of their bytes.
    """

    root: Path
    file: str  # relative to root, "/" between parts
    tensors: dict[str, Extent] = field(repr=False)
    metadata: dict[str, str] | None  # None where the header has no __metadata__

    @property
    def path(self) -> Path:
        return self.root / self.file

    def aliases(self) -> dict[str, str]:
        """Second names of tensors, from ucpl or from safetensors' save_model.

        save_model writes {left out: kept} with all other metadata, and no loader reads it. Two parameters are tied
        under one attribute name (`lm_head.weight`, `embed.weight`), so an entry without it is taken for metadata of
        another kind.
        """
        metadata = self.metadata or {}
        found = {name: owner for name, owner in metadata.items() if _is_tie(name, owner)}
        with suppress(ValueError, RecursionError):
            ours = json.loads(metadata.get(ALIASES, "{}"))
            found |= {a: o for a, o in ours.items() if isinstance(o, str)} if isinstance(ours, dict) else {}
        return {a: o for a, o in found.items() if o in self.tensors and a not in self.tensors and is_text(a)}

    def unread_metadata(self, *known: str) -> Iterator[NotRead]:
        """Unread entries of the header's metadata. known: names with another reader."""
        ties = self.aliases()
        for key, text in (self.metadata or {}).items():
            if key not in ("format", ALIASES, *known) and key not in ties and not _is_tie(key, text):
                yield NotRead(f"{self.file}: __metadata__/{key}", "no target keeps metadata of a header", kind="value")

    def extents(self) -> tuple[Extent, ...]:
        """Every tensor with the path (name,), in file order.

        There are no CRCs.
        """
        return tuple(self.tensors.values())


def _reject_other(path: Path, file: str, head: bytes) -> None:
    """Reject a file of another program, by its first bytes.

    Raises: UcplError E430.
    """
    found = magic_of(head) or (_TORCH_FILE if head.startswith(_ZIP) else None)
    if found is not None:
        fail("E430", f"{file} is no safetensors file: {found.what}", Label(str(path)), remedy=found.remedy)


def read_safetensors_file(root: str | Path, relative_path: str) -> SafetensorsFile:
    """Read and check the header.

    Dtypes are known, names unique, and tensors cover the data exactly. Raises: UcplError E400, E430-E434, E444.
    """
    root = Path(root)
    path = root / relative_path
    fd = open_file(path, relative_path)
    try:
        size = os.fstat(fd).st_size
        if size < 8:
            fail("E430", f"{relative_path} has {size} bytes, which is no safetensors file", Label(str(path)))
        head = read_exactly(fd, 0, min(size, _HEAD), relative_path)
        (header_size,) = struct.unpack("<Q", head[:8])
        if head[8:9] != b"{":
            _reject_other(path, relative_path, head)
        if header_size > min(HEADER_BYTES_MAX, size - 8):
            fail(
                "E430",
                f"{relative_path} is too short for its header, or no safetensors file",
                Label(str(path), f"a header of {header_size} bytes is announced, the file has {size}"),
            )
        if header_size > HEADER_BYTES_FREE + size - 8 - header_size:
            fail(
                "E444",
                f"{relative_path} has a header of {header_size} bytes for {size - 8 - header_size} bytes of tensors",
                Label(str(path)),
            )
        raw = read_exactly(fd, 8, header_size, relative_path)
    except OSError as error:
        fail("E400", f"{relative_path} cannot be read: {error.strerror}", Label(str(path)))
    finally:
        os.close(fd)
    return _Header(root, path, relative_path, 8 + header_size, size).read(raw)


_INT = {int}  # no bool
_KEYS = frozenset(("dtype", "shape", "data_offsets"))  # of a tensor's entry

Form: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]  # dtype, shape and strides in the file
Forms: TypeAlias = dict[tuple[str, tuple[int, ...]], tuple[int, Form]]  # by dtype and shape, with the bytes


def _is_tie(name: str, owner: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return bool(module) and attribute == owner.rpartition(".")[2] and "." in owner


@frozen
class _Header:
    root: Path
    path: Path
    file: str
    data_start: int
    size: int

    def wrong(self, code: str, message: str, where: str = "") -> NoReturn:
        fail(code, f"{self.file}: {message}", Label(str(self.path), where=where))

    def read(self, raw: bytes) -> SafetensorsFile:
        if not raw.startswith(b"{"):
            self.wrong("E431", "the header is no JSON object")
        try:
            header = json.loads(raw, object_pairs_hook=self._unique, parse_constant=self._constant)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            self.wrong("E431", f"the header is no JSON: {str(error)[:200]}")
        if type(header) is not dict:
            self.wrong("E431", "the header is no JSON object")
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not (
            type(metadata) is dict and all(type(text) is str for text in metadata.values())
        ):
            self.wrong("E431", "__metadata__ holds something that is no text", "__metadata__")
        for name in header:
            if not is_text(name):
                self.wrong("E431", f"the name {name!a} is no text", name)
        forms: Forms = {}
        found = [(*self._entry(name, entry, forms), name) for name, entry in header.items()]
        found.sort(key=itemgetter(0, 1))
        at = 0
        tensors: dict[str, Extent] = {}
        for begin, end, (dtype, shape, stride), name in found:
            if begin != at:
                what = "overlaps the one before" if begin < at else f"leaves {begin - at} bytes before it"
                self.wrong("E433", f"tensor {name!a} {what}", name)
            at = end
            tensors[name] = Extent(
                file=self.file,
                key=(name,),
                dtype=dtype,
                shape=shape,
                stride=stride,
                offset=0,
                storage=name,
                storage_start=self.data_start + begin,
                storage_bytes=end - begin,
            )
        if self.data_start + at != self.size:
            data = self.size - self.data_start
            self.wrong("E433", f"the tensors have {at} bytes, the file has {data} for them")
        return SafetensorsFile(self.root, self.file, tensors, metadata)

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            name = Counter(name for name, _ in pairs).most_common(1)[0][0]
            self.wrong("E432", f"the header gives {name!a} twice", name)
        return made

    def _constant(self, text: str) -> NoReturn:
        self.wrong("E431", f"the header holds {text}")

    def _entry(self, name: str, entry: object, forms: Forms) -> tuple[int, int, Form]:
        """(begin, end, form) of one tensor, in bytes of the data."""
        if type(entry) is not dict or entry.keys() != _KEYS:
            self.wrong("E431", f"tensor {name!a} is not described by dtype, shape and data_offsets", name)
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not (_are_offsets(offsets) and _are_sizes(shape) and len(shape) <= DIMS_MAX):
            self.wrong("E431", f"tensor {name!a} has a wrong shape or place", name)
        dtype = BY_SAFETENSORS.get(entry["dtype"]) if type(entry["dtype"]) is str else None
        if dtype is None:
            self.wrong("E434", f"tensor {name!a} has the unknown dtype {str(entry['dtype'])[:40]!a}", name)
        form = dtype.name, tuple(shape)
        if form not in forms:
            stored = in_file(*form)[1]
            forms[form] = size_of(dtype.name, prod(shape)), (dtype.name, stored, _strides(stored))
        nbytes, found = forms[form]
        begin, end = offsets
        if end - begin != nbytes:
            self.wrong("E433", f"tensor {name!a} has {end - begin} bytes, its shape asks for {nbytes}", name)
        if dtype.name in PAIRED and (not shape or shape[-1] % 2):
            self.wrong("E433", f"tensor {name!a} has the shape {shape}, and a byte holds two elements", name)
        return begin, end, found


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        stride[axis - 1] = stride[axis] * max(shape[axis], 1)
    return tuple(stride)


def _are_offsets(value: object) -> bool:
    """The same as for two sizes: there are most of them."""
    if type(value) is not list or len(value) != 2:
        return False
    begin, end = value
    return type(begin) is int is type(end) and 0 <= begin < 1 << 62 and 0 <= end < 1 << 62


def _are_sizes(value: object) -> bool:
    return (
        type(value) is list and {*map(type, value)} <= _INT and (not value or 0 <= min(value) <= max(value) < 1 << 62)
    )


# ---- laying out ----------------------------------------------------------------------------------------------------


@frozen
class SafetensorsFilePlan:
    """A safetensors file before its payload.

    `fixed` and `tensors` cover bytes 0 to `size` exactly once.
    """

    size: int  # bytes of the complete file
    fixed: tuple[tuple[int, bytes], ...] = field(repr=False)  # (byte position, bytes): the header
    tensors: dict[str, tuple[int, int]]  # name -> (byte position, bytes), in the order of the file

    @property
    def storages(self) -> dict[str, tuple[int, int]]:
        """The same, by the name that TorchFilePlan has for it."""
        return self.tensors

    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
        """Nothing remains: the format states no CRC."""
        return ()


def layout_safetensors_file(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> SafetensorsFilePlan:
    """Lay out a file of tensors in the library's order.

    Wide dtypes are first, then names decide, so every tensor is aligned to its elements. Metadata is sorted: equal
    content gives equal bytes.

    Raises: UcplError E442.
    """
    named: list[tuple[str, str, tuple[int, ...], int]] = []
    seen = {"__metadata__"}
    for name, dtype_name, shape in tensors:
        dtype = DTYPES.get(dtype_name)
        if name in seen:
            fail("E442", f"the name {name} is taken", Label("the file laid out", where=name))
        if dtype is None or dtype.safetensors is None:
            fail("E442", f"tensor {name} of {dtype_name}: safetensors has no such dtype", Label("the file laid out"))
        if dtype_name in PAIRED and not shape:
            fail(
                "E442", f"tensor {name} is one element of {dtype_name}, and a byte has two", Label("the file laid out")
            )
        seen.add(name)
        nbytes = dtype.itemsize
        for n in shape:
            if n < 0:
                fail("E442", f"tensor {name} has the shape {list(shape)}", Label("the file laid out", where=name))
            nbytes *= n
        named.append((name, dtype_name, tuple(shape), nbytes))
    named.sort(key=lambda item: (_place(item[1]), item[0]))
    header: dict[str, object] = {}
    if metadata is not None:
        for name, text in metadata.items():
            if type(name) is not str or type(text) is not str:
                fail("E442", f"metadata {name!a} is no text", Label("the file laid out", where="__metadata__"))
        header["__metadata__"] = dict(sorted(metadata.items()))
    at = 0
    for name, dtype_name, shape, nbytes in named:
        safetensors = DTYPES[dtype_name].safetensors
        header[name] = {
            "dtype": safetensors,
            "shape": list(in_elements(dtype_name, shape)),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    try:
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        fail("E442", f"a name cannot be written: {error.reason}", Label("the file laid out"))
    raw += b" " * (-len(raw) % 8)
    if len(raw) > HEADER_BYTES_MAX:
        fail("E442", f"a header of {len(raw)} bytes is more than readers accept", Label("the file laid out"))
    places: dict[str, tuple[int, int]] = {}
    start = 8 + len(raw)
    for name, _, _, nbytes in named:
        places[name] = (start, nbytes)
        start += nbytes
    return SafetensorsFilePlan(start, ((0, struct.pack("<Q", len(raw)) + raw),), places)


# The library's order of dtypes, widest first.
_WIDEST_FIRST = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)


def _place(dtype_name: str) -> int:
    return _WIDEST_FIRST.index(DTYPES[dtype_name].safetensors or "")
