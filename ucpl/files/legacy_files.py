"""Files of torch.save before torch 1.6: a row of pickles.

`_use_new_zipfile_serialization=False` still writes them. Pickles: a magic number, the protocol, facts of the machine,
the object, the list of its storages. Behind them is each storage in the order of that list, with its number of elements
in eight bytes first. There are no CRCs.

Source: torch 2.13: serialization.py (`_legacy_save`, `_legacy_load`). Not here: the object's meaning, and older forms
(tar).
"""

from __future__ import annotations

import os
from pathlib import Path

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import DTYPES
from ucpl.files.inert import PICKLE_BYTES_MAX
from ucpl.files.pickles import Pickle, load_pickle
from ucpl.files.zips import Member, read_exactly

__all__ = ["read_legacy"]

_PROTOCOL = 1001
_WINDOW = 1 << 16  # bytes that are read first: most pickles
_COUNT = 8  # bytes of a storage's number of elements
_ELEMENTS_MAX = 1 << 60


def read_legacy(fd: int, path: Path, file: str) -> tuple[Pickle, dict[str, Member]]:
    """The object of a file, and the places of its storages.

    Raises: UcplError E400, E410, E412-E414, E420-E427.
    """
    size = os.fstat(fd).st_size
    window = _WINDOW
    while True:
        try:
            return _read(fd, read_exactly(fd, 0, min(window, size), file), path, file)
        except UcplError:
            if window >= min(size, PICKLE_BYTES_MAX):
                raise
            window *= 16  # it may end within a pickle


def _read(fd: int, data: bytes, path: Path, file: str) -> tuple[Pickle, dict[str, Member]]:
    at = 0
    found: list[Pickle] = []
    for _ in range(5):
        found.append(load_pickle(data[at:], file))
        at += found[-1].size
    _, protocol, machine, made, keys = found
    if protocol.value != _PROTOCOL or not isinstance(machine.value, dict):
        fail(
            "E410",
            f"{file} is of a form before torch 1.6 that is not read: protocol {protocol.value!r:.40}",
            Label(str(path)),
        )
    if machine.value.get("little_endian") is not True:
        fail("E412", f"{file} was written on a big-endian machine", Label(str(path)))
    return made, _storages(fd, (made, keys.value), at, path, file)


def _storages(fd: int, said: tuple[Pickle, object], at: int, path: Path, file: str) -> dict[str, Member]:
    """The place of each storage, from the begin of the first one.

    Raises: UcplError E413, E414.
    """
    made, keys = said
    sizes = {storage.name: DTYPES[storage.dtype].itemsize for storage in made.storages}
    if not isinstance(keys, list) or set(keys) != set(sizes):
        fail("E413", f"{file}: its list of storages is not that of its tensors", Label(str(path)))
    end = os.fstat(fd).st_size
    out: dict[str, Member] = {}
    for key in keys:
        count = int.from_bytes(read_exactly(fd, at, _COUNT, file), "little") if at + _COUNT <= end else _ELEMENTS_MAX
        at += _COUNT
        if key in out or not 0 <= count < _ELEMENTS_MAX or at + count * sizes[key] > end:
            fail("E414", f"{file} ends within storage {key}", Label(str(path), where=f"storage {key}"))
        out[key] = Member(key, at, count * sizes[key], None)
        at += count * sizes[key]
    return out
