"""torch.save files: a zip archive of one pickle and its storages.

They are read by headers, and laid out before writing. Reading gives the value tree (inert, see pickles) and the place
of each tensor. Writing is planned: every byte but the storages' own and their CRCs is known before data moves, so a
file is preallocated, filled in any order, and finished.

Not here: torch, and moving tensors' bytes (but for scalars).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import numpy as np
from attrs import field

from ucpl.digests import crc32
from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Extent, Key, Scalar, StorageRef, TensorRef, key_text
from ucpl.files.pickles import Pickle, dump_pickle, load_pickle, tensors_of
from ucpl.files.zips import Member, crc_of_bytes, open_file, read_exactly, read_member, read_zip_directory
from ucpl.records import frozen
from ucpl.storage.reading import pread

__all__ = ["Pickles", "TorchFile", "TorchFilePlan", "crc_of", "layout_archive", "layout_torch_file", "read_torch_file"]

REPEATS_MAX = 1 << 31  # elements of a tensor that is larger than its storage (stride 0)
SCALAR_BYTES_MAX = 1 << 20
RECORD_BYTES_MAX = 64  # of the records `version` and `byteorder`, which have a few


@frozen
class TorchFile:
    """One torch.save file: value tree and storages, checked against its size."""

    root: Path
    file: str  # relative to root, "/" between parts
    archive: str  # the folder within the zip
    value: object
    storages: dict[str, Member] = field(repr=False)  # by the name in StorageRef: only those that the pickle refers to
    version: str = ""  # the archive's `version` record: "3"
    _shared: dict[str, bytes] = field(
        factory=dict, init=False, eq=False, repr=False
    )  # small storages of several numbers

    @property
    def path(self) -> Path:
        return self.root / self.file

    def extent(self, key: tuple[str | int, ...], tensor: TensorRef) -> Extent:
        """The extent of a tensor of this file."""
        member = self.storages[tensor.storage.name]
        return Extent(
            file=self.file,
            key=key,
            dtype=tensor.storage.dtype,
            shape=tensor.shape,
            stride=tensor.stride,
            offset=tensor.offset,
            storage=tensor.storage.name,
            storage_start=member.start,
            storage_bytes=member.size,
            crc=member.crc,
            made=member.made,
        )

    def extents(self) -> tuple[Extent, ...]:
        """Every tensor of the tree with its path, in file order.

        `pickles.walk` defines the steps. A tensor on several paths is listed on each. Raises: UcplError E425.
        """
        return tuple(self.extent(key, value) for key, value in tensors_of(self.value, self.file))

    def check_undamaged(self, storage: str, holds: str) -> None:
        """Compare a storage's bytes with its CRC, if it has one.

        holds: its content. Raises: UcplError E400, E612.
        """
        member = self.storages[storage]
        if member.crc is None or member.made:
            return
        with self.path.open("rb") as file:
            found = crc_of_bytes(file.fileno(), member.start, member.size, self.file)
        if found != member.crc:
            fail(
                "E612",
                f"{self.file}: storage {storage} does not match its CRC; it holds {holds}",
                Label(self.file, f"CRC {member.crc:08x} stated, {found:08x} of the bytes", where=storage),
            )

    def read_scalar(self, key: Key, tensor: TensorRef) -> Scalar:
        """The value of a small tensor (at most 1 MiB) at `key`.

        Its storage is compared with the CRC, unless it is larger and shared with tensors that are read later.
        Raises: UcplError E400, E408, E415.
        """
        dtype = DTYPES[tensor.storage.dtype]
        numel, last = _reach(tensor)
        member = self.storages[tensor.storage.name]
        size = 0 if numel == 0 else (last - tensor.offset + 1) * dtype.itemsize
        if max(size, numel * dtype.itemsize) > SCALAR_BYTES_MAX:
            fail(
                "E415",
                f"{self.file}: a tensor of shape {list(tensor.shape)} is found where a scalar is expected",
                Label(str(self.path), where=f"storage {tensor.storage.name}"),
            )
        if numel == 0:
            return Scalar(tensor.storage.dtype, tensor.shape, b"")
        raw = self._bytes(key, member, tensor.offset * dtype.itemsize, size)
        cells = np.frombuffer(raw, dtype=f"V{dtype.itemsize}")
        view = np.lib.stride_tricks.as_strided(
            cells, tensor.shape, tuple(step * dtype.itemsize for step in tensor.stride), writeable=False
        )
        return Scalar(tensor.storage.dtype, tensor.shape, view.tobytes())

    def _bytes(self, key: Key, member: Member, start: int, size: int) -> bytes:
        kept = self._shared.get(member.name)
        if kept is None:
            fd = open_file(self.path, self.file)
            try:
                if member.size > SCALAR_BYTES_MAX:
                    return read_exactly(fd, member.start + start, size, self.file)
                kept = read_member(fd, member, self.file, holds=key_text(key))
            finally:
                os.close(fd)
            if size != member.size:
                self._shared[member.name] = kept
        return kept[start : start + size]


def read_torch_file(
    root: str | Path, relative_path: str, start: int = 0, size: int | None = None, known: Pickles | None = None
) -> TorchFile:
    """Read the headers of one torch file.

    `start` and `size` choose an archive within a larger file (DCP's .distcp). known: pickles of other files; those of equal
    bytes have one value, which nobody may change. Raises: UcplError E400-E427.
    """
    root = Path(root)
    path = root / relative_path
    file = relative_path
    fd = open_file(path, file)
    try:
        if not start and pread(fd, len(_LEGACY), 0) == _LEGACY:
            from ucpl.files.legacy_files import read_legacy

            return _of_legacy(root, file, *read_legacy(fd, path, file))
        directory = read_zip_directory(fd, file, start, size)
        members = directory.members
        archive = _archive_name(members, file, path)
        if len({name.lower() for name in members}) != len(members):
            _reject_cases(members, file, path)
        order = f"{archive}/byteorder"
        if order in members and (text := directory.read(fd, order, RECORD_BYTES_MAX)) != b"little":
            fail("E412", f"{file} has the byte order {text[:20].decode('ascii', 'replace')}", Label(str(path)))
        version = next((n for n in (f"{archive}/version", f"{archive}/.data/version") if n in members), None)
        said = b"" if version is None else directory.read(fd, version, RECORD_BYTES_MAX)
        version_text = said[:20].decode("ascii", "replace").strip()
        pickle = _pickle_of(directory.read(fd, f"{archive}/data.pkl"), file, known)
    except OSError as error:
        fail("E400", f"{file} cannot be read: {error.strerror}", Label(str(path)))
    finally:
        os.close(fd)
    return _checked(TorchFile(root, file, archive, pickle.value, {}, version_text), pickle, members)


def _of_legacy(root: Path, file: str, pickle: Pickle, storages: dict[str, Member]) -> TorchFile:
    archive = Path(file).stem
    members = {f"{archive}/data/{name}": member for name, member in storages.items()}
    return _checked(TorchFile(root, file, archive, pickle.value, {}), pickle, members)


def _checked(found: TorchFile, pickle: Pickle, members: dict[str, Member]) -> TorchFile:
    """A file with its storages, checked to have room for its tensors.

    Raises: UcplError E413-E416.
    """
    file, path = found.file, found.path
    checked: dict[StorageRef, None] = {}
    dtypes: dict[str, str] = {}
    for storage in pickle.storages:
        if dtypes.setdefault(storage.name, storage.dtype) != storage.dtype:
            fail(
                "E418",
                f"{file}: storage {storage.name} is of {dtypes[storage.name]}, and of {storage.dtype} further on",
                Label(str(path), where=storage.name),
            )
        if storage not in checked:
            checked[storage] = None
            found.storages[storage.name] = _storage_member(storage, members, found.archive, file, path)
    for tensor in pickle.tensors:
        _check_geometry(tensor, found.storages[tensor.storage.name], file, path)
    return found


def crc_of(root: Path, extent: Extent) -> int:
    """The CRC-32 of a tensor's storage, from its file or computed.

    Raises: UcplError E400.
    """
    if extent.crc is not None:
        return extent.crc
    fd = open_file(root / extent.file, extent.file)
    try:
        return crc_of_bytes(fd, extent.storage_start, extent.storage_bytes, extent.file)
    finally:
        os.close(fd)


def _fills(extent: Extent) -> bool:
    """Test for a tensor of any form that fills its storage."""
    held = 1
    for stride, size in sorted(zip(extent.stride, extent.shape, strict=True)):
        if size != 1 and stride:
            if stride != held:
                return False
            held *= size
    return extent.numel > 0 and not extent.offset and held * DTYPES[extent.dtype].itemsize == extent.storage_bytes


def check_same_bytes(root: Path, name: str, kept: Extent, other: Extent) -> None:
    """Check that copies of one tensor have equal bytes.

    CRCs are compared, so only storages that their tensors fill completely are checked, in one form. Raises: UcplError E400,
    E700.
    """
    fill = [e.numel and e.is_contiguous for e in (kept, other)]
    is_alike = kept.shape == other.shape and kept.stride == other.stride and _fills(kept) and _fills(other)
    if not (all(fill) or is_alike) or kept.storage_bytes != other.storage_bytes:
        return
    mine, theirs = crc_of(root, kept), crc_of(root, other)
    if mine != theirs:
        fail(
            "E700",
            f"copies of `{name}` differ: {kept.file} and {other.file} have other values",
            Label(str(root / kept.file), f"CRC {mine:08x}", where=name),
            Label(str(root / other.file), f"CRC {theirs:08x}", where=name),
            remedy="find out which rank is right before you convert: replicas of one run are equal",
        )


# Pickles of one tensor and nothing else, by their bytes: torch.distributed.checkpoint writes one for each chunk of each state,
# and those of one shape are the same.
_ALONE: dict[bytes, Pickle] = {}
_ALONE_MAX = 4096
_ALONE_BYTES_MAX = 512


Pickles = dict[bytes, Pickle]  # by their bytes
_KNOWN_MAX = 16  # as many as a node has devices, whose numbers are in pickles of its ranks


def _pickle_of(data: bytes, file: str, others: Pickles | None = None) -> Pickle:
    known = _ALONE.get(data) or (others or {}).get(data)
    if known is not None:
        return known
    found = load_pickle(data, file)
    if others is not None and len(others) < _KNOWN_MAX:
        others[data] = found
    if type(found.value) is TensorRef and found.value.attributes is None and len(data) <= _ALONE_BYTES_MAX:
        if len(_ALONE) >= _ALONE_MAX:
            _ALONE.clear()
        _ALONE[data] = found
    return found


def _archive_name(members: dict[str, Member], file: str, path: Path) -> str:
    found = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        what = "no NAME/data.pkl" if not found else f"{len(found)} of NAME/data.pkl"
        fail("E411", f"{file} is a zip archive, but not of torch.save: it has {what}", Label(str(path)))
    archive = found[0].removesuffix("/data.pkl")
    if f"{archive}/constants.pkl" in members:
        fail("E411", f"{file} is a TorchScript archive", Label(str(path), where=f"{archive}/constants.pkl"))
    for name in members:
        if not name.startswith(archive + "/"):
            fail("E411", f"{file} has a member outside {archive}/", Label(str(path), where=name))
    return archive


def _reject_cases(members: dict[str, Member], file: str, path: Path) -> NoReturn:
    """Reject members whose names differ in case only: torch ignores case.

    Raises: UcplError E417.
    """
    seen: dict[str, str] = {}
    for name in members:
        if (other := seen.setdefault(name.lower(), name)) != name:
            break
    fail(
        "E417",
        f"{file} has the members {other} and {name}, which are one name to torch",
        Label(str(path), where=name),
    )


def _storage_member(storage: StorageRef, members: dict[str, Member], archive: str, file: str, path: Path) -> Member:
    name = f"{archive}/data/{storage.name}"
    member = members.get(name)
    if member is None:
        fail("E413", f"{file}: storage {storage.name} is not in the file", Label(str(path), where=name))
    itemsize = DTYPES[storage.dtype].itemsize
    # An untyped storage may end within an element.
    if not 0 <= member.size - storage.numel * itemsize < itemsize:
        fail(
            "E414",
            f"{file}: storage {storage.name} has {member.size} bytes, its pickle says {storage.numel * itemsize}",
            Label(str(path), where=name),
        )
    return member


def _reach(tensor: TensorRef) -> tuple[int, int]:
    """(elements, position of the last element in the storage).

    The latter is valid only if there are elements.
    """
    numel = 1
    last = tensor.offset
    for n, step in zip(tensor.shape, tensor.stride, strict=True):
        numel *= n
        last += (n - 1) * step
    return numel, last


def _check_geometry(tensor: TensorRef, member: Member, file: str, path: Path) -> None:
    numel, last = _reach(tensor)
    negative = min(tensor.offset, *tensor.shape, *tensor.stride) < 0 if tensor.shape else tensor.offset < 0
    elements = member.size // DTYPES[tensor.storage.dtype].itemsize
    is_outside = negative or (numel and last >= elements)
    if not is_outside and numel <= REPEATS_MAX:
        return
    where = f"storage {tensor.storage.name}"
    geometry = f"shape {list(tensor.shape)}, stride {list(tensor.stride)}, offset {tensor.offset}"
    if is_outside:
        fail(
            "E415",
            f"{file}: a tensor is outside its storage of {elements} elements",
            Label(str(path), geometry, where=where),
        )
    if numel > REPEATS_MAX and numel > elements:
        fail("E416", f"{file}: a tensor repeats its storage beyond reason", Label(str(path), geometry, where=where))


# ---- laying out ----------------------------------------------------------------------------------------------------

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle before torch 1.6: a number that torch chose
_ALIGNMENT = 64  # bytes, of every member's data, as torch.save aligns it
_SERIALIZATION_ID = b"0" * 40  # torch distinguishes archives by it in logs only; here, equal content gives equal bytes
_U32 = 0xFFFFFFFF
_U16 = 0xFFFF
_UTF8, _LATER = 0x800, 0x8
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@frozen
class _Slot:
    """The places of a storage's CRC: its descriptor, and its directory entry."""

    descriptor: int  # byte position in the file
    entry: int  # byte position of the CRC within the directory
    size: int
    wide: bool  # the descriptor states sizes of 8 bytes


@frozen
class TorchFilePlan:
    """A torch file before its payload.

    `fixed`, the storages and `finish` cover bytes 0 to `size` exactly once.
    """

    size: int  # bytes of the complete file
    fixed: tuple[tuple[int, bytes], ...] = field(repr=False)  # (byte position, bytes), ascending
    storages: dict[str, tuple[int, int]]  # name in StorageRef -> (byte position, bytes), in the order of the file
    _directory_start: int = field(repr=False)
    _directory: bytes = field(repr=False)
    _slots: dict[str, _Slot] = field(repr=False)

    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
        """The remaining bytes once the CRC-32 of each storage is known.

        Each is (byte position, bytes), ascending. Storages without bytes need no CRC. Raises: UcplError E443.
        """
        directory = bytearray(self._directory)
        found: list[tuple[int, bytes]] = []
        for name, slot in self._slots.items():
            crc = crcs.get(name)
            if crc is None or not 0 <= crc <= _U32:
                fail("E443", f"storage {name} has no CRC", Label("the file laid out", where=name))
            struct.pack_into("<I", directory, slot.entry, crc)
            sizes = struct.pack("<2Q" if slot.wide else "<2I", slot.size, slot.size)
            found.append((slot.descriptor, b"PK\x07\x08" + struct.pack("<I", crc) + sizes))
        found.append((self._directory_start, bytes(directory)))
        return tuple(found)

    def holes(self) -> tuple[tuple[int, bytes, tuple[tuple[str, int], ...]], ...]:
        """The bytes of `finish` with zeros for CRCs, and the CRCs' places.

        Each is (byte position, bytes, ((storage, place of its CRC), ...)).
        """
        known = self.finish(dict.fromkeys(self._slots, 0))
        places = [((name, 4),) for name in self._slots] + [tuple((n, slot.entry) for n, slot in self._slots.items())]
        return tuple((at, data, some) for (at, data), some in zip(known, places, strict=True))


def layout_torch_file(value: object, archive_name: str = "archive") -> TorchFilePlan:
    """Lay out the file that torch.save would write for `value`.

    Its tensors refer to storages by name ("0", "1", ...). torch calls the archive by the file's stem. Members, their
    order, alignment, flags and headers are those of torch.save (2.13); times are zero and the serialization id is
    fixed, so that equal values give equal files.

    Raises: UcplError E440, E441.
    """
    if not _SAFE_NAME.fullmatch(archive_name):
        fail("E441", f"{archive_name!a} cannot be the name of an archive", Label("the file laid out"))
    data, refs = dump_pickle(value)
    sizes: dict[str, int] = {}
    for ref in refs:
        nbytes = ref.numel * DTYPES[ref.dtype].itemsize
        if not _SAFE_NAME.fullmatch(ref.name):
            fail("E441", f"{ref.name!a} cannot be the name of a storage", Label("the file laid out", where=ref.name))
        known = sizes.setdefault(ref.name, nbytes)
        if nbytes < 0 or known != nbytes:
            what = f"storage {ref.name} has both {known} and {nbytes} bytes" if nbytes >= 0 else "a negative length"
            fail("E441", what, Label("the file laid out", where=ref.name))
    archive = _Archive(archive_name)
    archive.add_known("data.pkl", data)
    archive.add_known(".format_version", b"1")
    archive.add_known(".storage_alignment", str(_ALIGNMENT).encode())
    archive.add_known("byteorder", b"little")
    for name, nbytes in sizes.items():
        archive.add_storage(name, nbytes)
    archive.add_known("version", b"3\n")
    archive.add_known(".data/serialization_id", _SERIALIZATION_ID)
    return archive.plan()


def layout_archive(value: object) -> TorchFilePlan:
    """As `layout_torch_file`, of one archive among many in a file.

    Archives of one tensor are laid out once per shape. Raises: UcplError E440, E441.
    """
    if type(value) is TensorRef and value.attributes is None:
        return _layout_alone(value)
    return layout_torch_file(value)


@lru_cache(maxsize=4096)
def _layout_alone(value: TensorRef) -> TorchFilePlan:
    return layout_torch_file(value)


@frozen(eq=False)
class _Archive:
    """A zip archive under construction, equal to that of torch's writer (miniz)."""

    name: str
    fixed: list[tuple[int, bytes]] = field(factory=list)
    storages: dict[str, tuple[int, int]] = field(factory=dict)
    slots: dict[str, _Slot] = field(factory=dict)
    directory: bytearray = field(factory=bytearray)
    _entries: list[int] = field(factory=list)  # where each entry starts in the directory
    _run: list[bytes] = field(factory=list)  # known bytes since the last storage
    _run_size: list[int] = field(factory=lambda: [0, 0])  # where the run starts, and its bytes

    def _known(self, data: bytes) -> None:
        self._run.append(data)
        self._run_size[1] += len(data)

    def _header(self, member: str, size: int, crc: int) -> tuple[int, bool]:
        """Local header and directory entry of the next member.

        Returns the begin of its data, and a flag for sizes of 8 bytes.
        """
        name = f"{self.name}/{member}".encode()
        offset = sum(self._run_size)
        zip64 = b""
        if size >= _U32:
            zip64 += struct.pack("<2Q", size, size)
        if offset >= _U32:
            zip64 += struct.pack("<Q", offset)
        if zip64:
            zip64 = struct.pack("<2H", 1, len(zip64)) + zip64
        flags = _UTF8 | (_LATER if size else 0)
        padding = -(offset + 30 + len(name) + len(zip64) + 4) % _ALIGNMENT
        extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        self._known(local + name + extra)
        self._entries.append(len(self.directory))
        small = min(size, _U32)
        self.directory.extend(
            struct.pack(
                "<4s6H3I5H2I",
                *(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, small, small),
                *(len(name), len(zip64), 0, 0, 0, 0, min(offset, _U32)),
            )
        )
        self.directory.extend(name + zip64)
        return offset + len(local) + len(name) + len(extra), bool(zip64)

    def add_known(self, member: str, data: bytes) -> None:
        crc = crc32(data)
        _, wide = self._header(member, len(data), crc)
        self._known(data)
        if data:
            self._known(b"PK\x07\x08" + struct.pack("<I2Q" if wide else "<I2I", crc, len(data), len(data)))

    def add_storage(self, name: str, size: int) -> None:
        start, wide = self._header(f"data/{name}", size, 0)
        self.storages[name] = (start, size)
        if size:
            self.slots[name] = _Slot(start + size, self._entries[-1] + 16, size, wide)
            self._cut(start + size + (24 if wide else 16))

    def _cut(self, next_start: int) -> None:
        """The run of known bytes ends; the next one starts there."""
        self.fixed.append((self._run_size[0], b"".join(self._run)))
        self._run.clear()
        self._run_size[:] = [next_start, 0]

    def plan(self) -> TorchFilePlan:
        start, size, count = sum(self._run_size), len(self.directory), len(self._entries)
        self._cut(start)
        end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, size, start)
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
        few = min(count, _U16)
        end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, few, few, min(size, _U32), min(start, _U32), 0)
        directory = bytes(self.directory) + end64 + locator + end
        return TorchFilePlan(start + len(directory), tuple(self.fixed), self.storages, start, directory, self.slots)
