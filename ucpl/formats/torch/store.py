"""Files that only a spec describes: tensors at keys, without metadata.

A target's file is a nested dict made of the keys; it is a safetensors file if its name ends so, otherwise one of
torch.save. A source is the files that the spec names, each in its own form. `framework torch(tracker = "latest.txt",
step = "release")` also writes a small text. config.json and similar files are copied, so that sizes are found on the
way back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, StoredTensor, Structure, TensorRef, TrainState, key_text
from ucpl.files.ahead import ahead
from ucpl.files.carrying import Place, Storages, by_place, lifted
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.demands import Demands
from ucpl.files.pickles import tensors_of, unsafe_globals
from ucpl.files.safetensors_files import read_safetensors_file
from ucpl.files.texts import check_inside
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.watching import watched
from ucpl.files.zips import open_file, read_exactly
from ucpl.formats.huggingface.store import TEXTS, carried_texts, read_texts
from ucpl.records import define, frozen

__all__ = ["Aside", "Generic", "Values", "below", "open_files"]

NAME = "torch"


class Generic:
    name = NAME
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        """Return False: only a spec describes such a folder, for `open_files`."""
        return False

    def open(self, path: Path) -> Checkpoint:
        """Raise UcplError E435: a path alone does not describe its files."""
        fail("E435", f"{path} says nothing of itself: a spec of framework torch() does", Label(str(path)))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """Files as the keys say. Raises: UcplError E392."""
        by_file: dict[str, list[int]] = {}
        for t, target in enumerate(targets):
            by_file.setdefault(target.file, []).append(t)
        beside: dict[str, list[tuple[Key, object]]] = {}
        values = Values(source.root)
        for way in (w for blob in structure.blobs for w in blob.ways):
            value = values.at(way.source_file, way.source_key)
            beside.setdefault(way.file, []).append((way.key, value))
        names = dict.fromkeys([*by_file, *beside])
        files = tuple(
            _written(path, (by_file.get(path, []), targets), (beside.get(path, []), values.extents)) for path in names
        )
        texts = carried_texts(source)
        tracker = structure.settings.get("tracker")
        if tracker:
            if str(tracker) in {*names, *texts}:
                fail(
                    "E507",
                    f"the tracker `{tracker}` is another file of the target, too",
                    Label("<target>", where=f'tracker = "{tracker}"'),
                    remedy='tracker = "latest.txt", or another name that no file of the target has',
                )
            texts[str(tracker)] = f"{structure.settings.get('step', '')}\n"
        held = [value for found in beside.values() for _, value in found]
        unsafe = tuple(sorted({name for value in held for name in unsafe_globals(value)}))
        return Skeleton(folder="", files=files, texts=texts, unsafe_globals=unsafe)


# ---- reading ---------------------------------------------------------------------------------------------------------


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


# ---- writing ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Held:
    """A value that is copied as it is.

    Its dicts are no steps of keys.
    """

    value: object


@define
class _Tree:
    """Nested dicts under construction.

    A dict whose keys count from 0 becomes a list; a value without a key is the file.
    """

    file: str
    top: dict[str | int, object] = field(factory=dict)
    bare: TensorRef | _Held | None = None

    def put(self, key: Key, value: TensorRef | _Held) -> None:
        if self.bare is not None or (not key and self.top):
            self.clash(key)
        if not key:
            self.bare = value
            return
        node = self.top
        for step in key[:-1]:
            inner = node.setdefault(step, {})
            if not isinstance(inner, dict):
                self.clash(key)
            node = inner
        if key[-1] in node:
            self.clash(key)
        node[key[-1]] = value

    def clash(self, key: Key) -> NoReturn:
        fail(
            "E392",
            f"{key_text(key) or 'all'} of {self.file} is a tensor or a blob, and something else, too",
            Label(self.file, where=key_text(key)),
        )


def _settled(value: object) -> object:
    if isinstance(value, _Held):
        return value.value
    if not isinstance(value, dict):
        return value
    if value and set(value) == set(range(len(value))):
        return [_settled(value[i]) for i in range(len(value))]
    return {key: _settled(item) for key, item in value.items()}


def _written(
    path: str,
    tensors: tuple[list[int], tuple[StoredTensor, ...]],
    beside: tuple[list[tuple[Key, object]], dict[Place, Extent]],
) -> SkeletonFile:
    """One file of a target.

    `tensors`: its members, and all targets; `beside`: values at keys, and the tensors in them.
    """
    members, targets = tensors
    is_safetensors = PurePosixPath(path).suffix == ".safetensors"
    storages = Storages(beside[1])
    storage_of: dict[int, str] = {}
    made: dict[int, TensorRef] = {}
    tree = _Tree(path)
    flat: dict[str, TensorRef] = {}
    for t in sorted(members, key=lambda t: (targets[t].shares is not None, t)):
        target = targets[t]
        shares = target.shares if target.shares in made and not is_safetensors else None
        ref = made[shares] if shares is not None else storages.tensor(target.dtype, target.shape)
        made[t] = ref
        storage_of[t] = ref.storage.name
        if not is_safetensors:
            tree.put(target.key, ref)
        elif (name := "/".join(map(str, target.key))) in flat:
            tree.clash(target.key)
        else:
            flat[name] = ref
    if is_safetensors:
        return SkeletonFile(path, flat, "safetensors", {"format": "pt"}, storage_of)
    for key, value in beside[0]:
        tree.put(key, _Held(storages.value(value)))
    value = _settled(tree.top if tree.bare is None else tree.bare)
    return SkeletonFile(path, value, storage_of=storage_of, carried=tuple(storages.carried))
