"""torch.save files: a zip archive of one pickle and the storages it refers to. Read by headers, laid out before writing.

Reading gives the value tree (inert, see pickles) and where each tensor lies. Writing is planned: every byte but the
storages' own and their CRCs is known before data moves, so a file is preallocated, filled in any order, and finished.

Not here: torch, and moving tensors' bytes (but for scalars).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Extent, Scalar, StorageRef, TensorRef
from ucpl.stores.pickles import load_pickle, walk
from ucpl.stores.zips import Member, open_file, read_exactly, read_member, read_zip_directory

__all__ = ["TorchFile", "read_torch_file"]

REPEATS_MAX = 1 << 31  # elements of a tensor that is larger than its storage (stride 0)
SCALAR_BYTES_MAX = 1 << 20
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number that torch < 1.6 pickles first


@frozen
class TorchFile:
    """One file of torch.save: its value tree and its storages, all checked against the file's size."""

    root: Path
    file: str  # relative to root, "/" between parts
    archive: str  # the folder within the zip
    value: Any
    storages: dict[str, Member] = field(repr=False)  # by the name in StorageRef: only those that the pickle refers to
    version: str = ""  # the archive's `version` record: "3"

    @property
    def path(self) -> Path:
        return self.root / self.file

    def extent(self, key: tuple[str | int, ...], tensor: TensorRef) -> Extent:
        """Where a tensor of this file lies."""
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
        )

    def extents(self) -> tuple[Extent, ...]:
        """Every tensor of the tree with its path (see pickles.walk for the steps), in the order of the file.

        A tensor that is met on several paths is listed on each. Raises: UcplError E425.
        """
        return tuple(self.extent(key, value) for key, value in walk(self.value, self.file) if type(value) is TensorRef)

    def read_scalar(self, tensor: TensorRef) -> Scalar:
        """The value of a small tensor (at most 1 MiB). The storage's CRC is checked where all of it is read.

        Raises: UcplError E400, E408, E415.
        """
        dtype = DTYPES[tensor.storage.dtype]
        numel, last = _reach(tensor)
        member = self.storages[tensor.storage.name]
        size = 0 if numel == 0 else (last - tensor.offset + 1) * dtype.itemsize
        if max(size, numel * dtype.itemsize) > SCALAR_BYTES_MAX:
            fail(
                "E415",
                f"{self.file}: a tensor of shape {list(tensor.shape)} stands where a scalar is expected",
                Label(str(self.path), where=f"storage {tensor.storage.name}"),
            )
        if numel == 0:
            return Scalar(tensor.storage.dtype, tensor.shape, b"")
        fd = open_file(self.path, self.file)
        try:
            if size == member.size:
                raw = read_member(fd, member, self.file)
            else:
                raw = read_exactly(fd, member.start + tensor.offset * dtype.itemsize, size, self.file)
        finally:
            os.close(fd)
        cells = np.frombuffer(raw, dtype=f"V{dtype.itemsize}")
        view = np.lib.stride_tricks.as_strided(
            cells, tensor.shape, tuple(step * dtype.itemsize for step in tensor.stride), writeable=False
        )
        return Scalar(tensor.storage.dtype, tensor.shape, view.tobytes())


def read_torch_file(root: str | Path, relative_path: str, start: int = 0, size: int | None = None) -> TorchFile:
    """Read the headers of one torch file. `start` and `size` choose an archive within a larger file (DCP's .distcp).

    Raises: UcplError E400-E427.
    """
    root = Path(root)
    path = root / relative_path
    file = relative_path
    fd = open_file(path, file)
    try:
        if os.pread(fd, len(_LEGACY), start) == _LEGACY:
            fail("E410", f"{file} is a torch file of the format before torch 1.6", Label(str(path)))
        directory = read_zip_directory(fd, file, start, size)
        members = directory.members
        archive = _archive_name(members, file, path)
        order = members.get(f"{archive}/byteorder")
        if order is not None and (text := read_member(fd, order, file)) != b"little":
            fail("E412", f"{file} has the byte order {text[:20].decode('ascii', 'replace')}", Label(str(path)))
        version = members.get(f"{archive}/version") or members.get(f"{archive}/.data/version")
        version_text = "" if version is None else read_member(fd, version, file)[:20].decode("ascii", "replace").strip()
        pickle = load_pickle(read_member(fd, members[f"{archive}/data.pkl"], file), file)
    except OSError as error:
        fail("E400", f"{file} cannot be read: {error.strerror}", Label(str(path)))
    finally:
        os.close(fd)
    storages: dict[str, Member] = {}
    checked: dict[StorageRef, None] = {}
    for storage in pickle.storages:
        if storage not in checked:
            checked[storage] = None
            storages[storage.name] = _storage_member(storage, members, archive, file, path)
    for tensor in pickle.tensors:
        _check_geometry(tensor, storages[tensor.storage.name], file, path)
    return TorchFile(root, file, archive, pickle.value, storages, version_text)


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
    """(elements, position of the last element in the storage); the latter is of use where there are elements."""
    numel = 1
    last = tensor.offset
    for n, step in zip(tensor.shape, tensor.stride, strict=True):
        numel *= n
        last += (n - 1) * step
    return numel, last


def _check_geometry(tensor: TensorRef, member: Member, file: str, path: Path) -> None:
    numel, last = _reach(tensor)
    where = f"storage {tensor.storage.name}"
    geometry = f"shape {list(tensor.shape)}, stride {list(tensor.stride)}, offset {tensor.offset}"
    negative = tensor.offset < 0 or any(n < 0 for n in tensor.shape) or any(step < 0 for step in tensor.stride)
    elements = member.size // DTYPES[tensor.storage.dtype].itemsize
    if negative or (numel and last >= elements):
        fail(
            "E415",
            f"{file}: a tensor lies outside its storage of {elements} elements",
            Label(str(path), geometry, where=where),
        )
    if numel > REPEATS_MAX and numel > elements:
        fail("E416", f"{file}: a tensor repeats its storage beyond reason", Label(str(path), geometry, where=where))
