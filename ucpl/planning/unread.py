"""The parts of a source that a plan does not read.

Weights next to masters, dropped states, further copies. A plan is made ahead of a restart, and run on the checkpoint
of that time. The parts that it reads are compared with that checkpoint tensor by tensor; newer parts would be dropped
silently if the plan did not know all parts of the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ucpl.digests import crc32
from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.errors import catalogue as codes
from ucpl.extents import Extent, Key, Shelves, StoredTensor, key_text

__all__ = ["Unread", "check_known", "check_known_files", "unread_of"]

Unread = dict[str, tuple[int, ...]]  # file -> a CRC-32 of key, dtype and shape of each stored tensor, ascending
Extents = Mapping[tuple[str, Key], Extent]

SHOWN = 8  # findings that are listed
_NUMBER = re.compile(r"[0-9]+")


def unread_of(extents: Extents, sources: Shelves) -> Unread:
    """Every stored tensor with elements that is none of `sources`."""
    read = {*sources.places}
    found: dict[str, list[int]] = {}
    for (file, key), extent in extents.items():
        if (file, key) not in read and extent.numel:
            found.setdefault(file, []).append(_mark(key, extent))
    return {file: tuple(sorted(marks)) for file, marks in sorted(found.items())}


def check_known(extents: Extents, sources: Iterable[StoredTensor], unread: Unread) -> None:
    """Raises: UcplError E606 for stored tensors that the plan was made without."""
    read = {(t.file, t.key) for t in sources}
    known = {file: frozenset(marks) for file, marks in unread.items()}
    found = []
    for (file, key), extent in extents.items():
        if not extent.numel or (file, key) in read or _mark(key, extent) in known.get(file, ()):
            continue
        text = f"{extent.dtype} {list(extent.shape)}"
        found.append(
            Diagnostic(
                "E606",
                f"{file} has {key_text(key)}, {text}, and the plan was made without it",
                (Label(file, f"source: {text}", where=key_text(key)), Label("plan", "knows of no such tensor")),
                remedy=codes()["E606"].remedy,
            )
        )
        if len(found) == SHOWN:
            break
    if found:
        raise UcplError(*found)


def check_known_files(root: Path, sources: Iterable[StoredTensor], unread: Unread) -> None:
    """Check that no file has the name of another rank's file.

    For files that only a spec describes. Raises: UcplError E606.
    """
    known = {t.file for t in sources} | set(unread)
    forms = {_NUMBER.sub("0", file) for file in known}
    found = []
    for folder in {(root / file).parent for file in known}:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            file = path.relative_to(root).as_posix()
            if file not in known and _NUMBER.sub("0", file) in forms and path.is_file():
                found.append(
                    Diagnostic(
                        "E606",
                        f"{file} is called like a file of the plan's source, and the plan was made without it",
                        (
                            Label(str(path)),
                            Label("plan", f"knows {len(known)} files: {', '.join(sorted(known)[:3])}, ..."),
                        ),
                        remedy=codes()["E606"].remedy,
                    )
                )
    if found:
        raise UcplError(*found[:SHOWN])


def _mark(key: Key, extent: Extent) -> int:
    return crc32(f"{key_text(key)}\0{extent.dtype}\0{extent.shape}".encode())
