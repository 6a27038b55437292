"""Files that a layout names: tensors and values at keys, without metadata.

Only headers are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, TrainState, key_text
from ucpl.files.carrying import Place, by_place, lifted
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import ahead, watched
from ucpl.files.model_texts import TEXTS, read_texts
from ucpl.files.pickles import tensors_of
from ucpl.files.safetensors_files import read_safetensors_file
from ucpl.files.texts import check_inside
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.zips import open_file, read_exactly
from ucpl.records import define

__all__ = ["NAME", "Aside", "Values", "below", "open_files"]

NAME = "torch"

_NAMES_SHOWN = 3

Aside = Callable[[str, tuple[str, ...]], bool]


def _nothing(file: str, key: tuple[str, ...]) -> bool:
    return False


@watched
def open_files(top: Path, files: Iterable[str], aside: Aside = _nothing) -> Checkpoint:
    """The files that a spec names, relative to a folder; headers only.

    With a single file, names are relative to its folder. aside: tests whether a value at a key of a file is no part of
    the model (random states, say), so that it is no payload.

    Raises: UcplError E391, E393, and errors of reading files.
    """
    root = top if top.is_dir() else top.parent
    extents: dict[tuple[str, Key], Extent] = {}
    others: dict[tuple[str, Key], Extent] = {}
    names = sorted(set(files))
    check_inside(top, names)
    if names:
        ahead(root / names[0], [partial(_extents, root, name) for name in names])
    for name in names:
        if not (root / name).is_file():
            remedy = _for_missing(root, name)
            fail(
                "E391",
                f"{name} is missing: the spec has tensors in it",
                Label(str(root / name), "not there"),
                remedy=remedy,
            )
        for extent in _extents(root, name):
            is_aside = aside(name, tuple(map(str, extent.key)))
            (others if is_aside else extents)[name, extent.key] = extent
    texts, not_read = read_texts(root) if top.is_dir() else ({}, [])
    texts = {name: text for name, text in texts.items() if not name.startswith("latest")}  # trackers are of one folder
    return Checkpoint(
        top=top,
        root=root,
        tag=None,
        format=NAME,
        version="",
        extents=extents,
        carried_extents=others,
        state=TrainState(NAME, blobs={TEXTS: texts} if texts else {}),
        files=(*names, *(t for t in texts if t not in names)),
        not_read=tuple(not_read),
    )


def _for_missing(root: Path, name: str) -> str:
    """The remedy for a missing file: existing files of its kind."""
    there = sorted(p.name for p in (root / name).parent.glob(f"*{Path(name).suffix}") if p.is_file())
    if not there:
        return ""
    more = f" and {len(there) - _NAMES_SHOWN} more" if len(there) > _NAMES_SHOWN else ""
    return (
        f"there are {', '.join(there[:_NAMES_SHOWN])}{more}: check the degrees in --from, the names that `file` lines make, and"
        " that all ranks' files were copied"
    )


def _extents(root: Path, name: str) -> list[Extent]:
    """Tensors of a torch or a safetensors file.

    Its first bytes decide, or else its name.
    """
    fd = open_file(root / name, name)
    try:
        head = read_exactly(fd, 0, min(9, os.fstat(fd).st_size), name)
    finally:
        os.close(fd)
    is_zip = head.startswith(b"PK")
    if not is_zip and (head[8:9] == b"{" or name.endswith(".safetensors")):
        return list(read_safetensors_file(root, name).extents())
    part = read_torch_file(root, name)
    return [part.extent(key, value) for key, value in tensors_of(part.value, name)]


# ---- values next to tensors
# --------------------------------------------------------------------------------------------


def below(places: Iterable[tuple[str, Key]]) -> Aside:
    """A test for values at some places, and below them."""
    known = {(file, tuple(map(str, key))) for file, key in places}
    return lambda file, key: any((file, key[:n]) in known for n in range(len(key) + 1))


@define
class Values:
    """Inert values of a checkpoint's torch files, by file and key.

    They can be carried, with the tensors in them.
    """

    root: Path
    parts: dict[str, TorchFile] = field(factory=dict)
    extents: dict[Place, Extent] = field(factory=dict)
    found: dict[tuple[str, Key], object] = field(factory=dict)

    def at(self, file: str, key: Key) -> object:
        """The value at a key.

        Raises: UcplError E391 if there is none, and errors of reading the file.
        """
        if (file, key) not in self.found:
            if file not in self.parts:
                if not (self.root / file).is_file():
                    fail(
                        "E391",
                        f"{file} is missing: the spec has values in it",
                        Label(str(self.root / file), "not there"),
                    )
                self.parts[file] = read_torch_file(self.root, file)
            part = self.parts[file]
            value = _stepped(part, file, key)
            inside = list(tensors_of(value, file))
            self.extents |= by_place(part.extent((*key, *step), t) for step, t in inside)
            self.found[file, key] = lifted(value, file)
        return self.found[file, key]


def _stepped(part: TorchFile, file: str, key: Key) -> object:
    value: object = part.value
    for step in key:
        inner = None
        if isinstance(value, dict):
            inner = value.get(step, value.get(str(step), _NONE))
        elif isinstance(value, (list, tuple)) and isinstance(step, int) and step < len(value):
            inner = value[step]
        else:
            inner = _NONE
        if inner is _NONE:
            fail(
                "E391",
                f"{file} has no {key_text(key)}, which the spec names",
                Label(str(part.path), "not in this file", where=key_text(key)),
                remedy="correct the blob's key, or take the line out",
            )
        value = inner
    return value


_NONE = object()
