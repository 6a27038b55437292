"""Sparse files for remote checkpoints: names and sizes without bytes.

Fetched bytes are written into the sparse file and read from there, so a byte that several target tensors need is
fetched once. Beyond `cache_dirs.room()` bytes nothing more is kept, and each read is fetched again. Fetches use blocks of
a grid where `want` announced that the neighbourhood is read anyway; otherwise they are exact.

Not here: requests and retries (objects); the check of the bytes, which CRCs do as for local files.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from attrs import field

from ucpl.errors import Label, calling, fail
from ucpl.records import define
from ucpl.storage import cache_dirs
from ucpl.storage.cache_dirs import current_scope
from ucpl.storage.error_mapping import reject_source
from ucpl.storage.objects import ObjectEntry, Objects, TagDiffers, objects_at, read_whole
from ucpl.storage.reading import Range, sparse_file_registry
from ucpl.storage.urls import split

__all__ = ["MANIFEST", "UNFINISHED", "ObjectTree", "lay", "make_sparse", "write_at"]

MANIFEST, UNFINISHED = "ucpl/manifest.json", "ucpl/unfinished.json"
BLOCK = 4 << 20  # bytes of a request, at most
AT_ONCE = 16  # requests of a hint
HINT_GAP = 4096  # bytes between two ranges of a hint that are fetched with them
WASTE = 100  # one part in so many may be fetched though nothing needs it
OBJECTS_MAX = 1_000_000
MANIFEST_MAX = 1 << 30


@cache
def _hands() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ucpl-remote")


@define(eq=False)
class ObjectTree:
    """The listed objects of one checkpoint, and their local folder."""

    url: str
    objects: Objects
    name: str  # of the checkpoint, below the objects' folder; "": all of them
    root: Path  # its shadow
    files: dict[str, SparseFile] = field(factory=dict)  # by key
    _lock: threading.Lock = field(factory=threading.Lock)

    def listed(self) -> list[ObjectEntry]:
        """The current objects. Raises: OSError."""
        found = self.objects.entries(self.name)
        if not found and self.name and (one := self.objects.entry(self.name)) is not None:
            found = [one]
        return found

    def look_again(self) -> None:
        now = {entry.key: entry for entry in self.listed()}
        for key, one in self.files.items():
            one.now = now.get(key)

    def url_of(self, key: str) -> str:
        return f"{self.objects.url}/{key}"


_KEPT = [0]  # bytes that are in shadows
_KEEPING = threading.RLock()  # reentrant: a garbage collection inside may release space


def _may_keep(size: int, *, surely: bool) -> bool:
    room = cache_dirs.room()
    with _KEEPING:
        if not surely and _KEPT[0] + size > room:
            return False
        _KEPT[0] += size
        return True


def _give_back(tree: ObjectTree) -> None:
    """Release the cache space of a checkpoint that is removed."""
    _keep_less(sum(one.kept for one in tree.files.values()))


def _keep_less(size: int) -> None:
    with _KEEPING:
        _KEPT[0] = max(0, _KEPT[0] - size)


def _keep_no_more() -> None:
    """Stop keeping bytes: the disk is full earlier than it reported."""
    room = cache_dirs.room()
    with _KEEPING:
        _KEPT[0] = max(_KEPT[0], room + 1)


@define(eq=False)
class SparseFile:
    """One object and its shadow."""

    tree: ObjectTree
    first: ObjectEntry  # as it was listed, and must stay
    path: Path
    now: ObjectEntry | None
    _lows: list[int] = field(factory=list)  # of fetched ranges: disjoint, sorted, not adjacent
    _highs: list[int] = field(factory=list)
    _wanted: tuple[list[int], list[int]] = field(factory=lambda: ([], []))
    _lock: threading.Lock = field(factory=threading.Lock)
    _blocks: tuple[threading.Lock, ...] = field(factory=lambda: tuple(threading.Lock() for _ in range(4)))

    # ---- the interface of `reading` --------------------------------------------------------------------------------

    def read(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        high = min(position + sum(map(len, views)), self.first.size)
        if position >= high:
            return 0
        if self._have_all(self._units(position, high)):
            return os.preadv(fd, views, position)
        done = 0
        for low in range(position, high, BLOCK):
            data = self._fetch(low, min(high, low + BLOCK))
            for view in _between(views, done, done + len(data)):
                view[:] = data[: len(view)]
                data = data[len(view) :]
                done += len(view)
        return done

    def hint(self, ranges: Iterable[Range], *, payload: bool) -> None:
        """Fetch ranges that are read soon.

        Headers are joined over small gaps; for payload only the exact ranges are fetched.
        """
        units: dict[Range, None] = {}
        for low, high in _generously(ranges) if payload else _joined(ranges, HINT_GAP):
            units.update(dict.fromkeys(self._units(low, min(high, self.first.size))))
        self._have_all(list(units), surely=not payload)

    def _have_all(self, units: list[Range], *, surely: bool = False) -> bool:
        """Fetch the missing units, several in parallel.

        False: there is no space to keep some of them.
        """
        unfetched = [unit for unit in units if self._missing(*unit)]
        if len(unfetched) < 2:
            return all(self._have(unit, surely=surely) for unit in unfetched)
        return all(list(_hands().map(lambda unit: self._have(unit, surely=surely), unfetched)))

    def want(self, ranges: Iterable[Range]) -> None:
        with self._lock:
            known = zip(*self._wanted, strict=True)
            spans = _generously([*known, *ranges])
            self._wanted = [low for low, _ in spans], [high for _, high in spans]

    def identity(self) -> tuple[int, int, int, int]:
        if self.now is None:
            raise FileNotFoundError(2, "the object is gone", str(self.path))
        url = self.tree.url_of(self.first.key)
        return self.now.size, self.now.mtime_ns, _number(self.now.tag), _number(url)

    @property
    def listed_by(self) -> ObjectTree:
        return self.tree

    # ---- fetched ranges --------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """Bytes."""
        with self._lock:
            return sum(self._highs) - sum(self._lows)

    def _units(self, low: int, high: int) -> list[Range]:
        """The units of a fetch for bytes [low, high).

        A unit is a block of announced ranges, or else the exact range.
        """
        lows, highs = self._wanted
        found: list[Range] = []
        while low < high:
            begin = low // BLOCK * BLOCK
            i = bisect_right(lows, low) - 1
            if i >= 0 and low < highs[i]:
                unit = max(lows[i], begin), min(highs[i], begin + BLOCK)
            else:
                end = min(high, begin + BLOCK, lows[i + 1] if i + 1 < len(lows) else high)
                unit = low, end
            found.append(unit)
            low = unit[1]
        return found

    def _missing(self, low: int, high: int) -> list[Range]:
        with self._lock:
            found = []
            i = bisect_right(self._highs, low)
            while low < high:
                if i == len(self._lows) or self._lows[i] >= high:
                    found.append((low, high))
                    break
                if self._lows[i] > low:
                    found.append((low, self._lows[i]))
                low = self._highs[i]
                i += 1
            return found

    def _add(self, low: int, high: int) -> None:
        with self._lock:
            a, b = bisect_left(self._highs, low), bisect_right(self._lows, high)
            if a < b:
                low, high = min(low, self._lows[a]), max(high, self._highs[b - 1])
            self._lows[a:b], self._highs[a:b] = [low], [high]

    def _have(self, unit: Range, *, surely: bool) -> bool:
        """Fetch one unit into the sparse file.

        False: there is no space to keep it. Raises: OSError, UcplError E611.
        """
        if not self._missing(*unit):
            return True
        with self._blocks[unit[0] // BLOCK % len(self._blocks)]:
            for low, high in self._missing(*unit):
                if not _may_keep(high - low, surely=surely):
                    return False
                try:
                    data = self._fetch(low, high)
                except BaseException:
                    _keep_less(high - low)
                    raise
                try:
                    write_at(self.path, data, low)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    _keep_no_more()
                    if not surely:
                        return False
                    here = str(self.tree.root.parent.parent)  # next to the folder, so that the name is the URL
                    what = f"no space in {here} for the bytes of {self.tree.url_of(self.first.key)}"
                    remedy = "Free some space, or name another folder: UCPL_REMOTE_DIR."
                    fail("E501", what, Label(here), remedy=remedy)
                self._add(low, high)
        return True

    def _fetch(self, low: int, high: int) -> memoryview:
        objects, key = self.tree.objects, self.first.key
        try:
            return objects.read(key, low, high, self.first.tag)
        except TagDiffers as error:
            url = self.tree.url_of(key)
            fail("E611", f"{url} changed while it was read: tag {self.first.tag}, now {error}", Label(url))
        except FileNotFoundError:  # reported as for a local file
            raise
        except OSError as error:
            reject_source(error, self.tree.url_of(key))


def write_at(path: Path, data: memoryview, position: int) -> None:
    """Write bytes into an existing file. Raises: OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], position + done)
    finally:
        os.close(fd)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())


def _between(views: Sequence[memoryview], low: int, high: int) -> list[memoryview]:
    """The parts of consecutive views that bytes [low, high) go to."""
    found, at = [], 0
    for view in views:
        a, b = max(low, at), min(high, at + len(view))
        if a < b:
            found.append(view[a - at : b - at])
        at += len(view)
    return found


def _joined(ranges: Iterable[Range], gap: int) -> list[Range]:
    found: list[Range] = []
    for low, high in sorted(one for one in ranges if one[0] < one[1]):
        if found and low <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _generously(ranges: Iterable[Range]) -> list[Range]:
    """Ranges, joined over their smallest gaps.

    All joined gaps are at most one percent of the bytes.
    """
    apart = _joined(ranges, 0)
    left = sum(high - low for low, high in apart) // WASTE
    gaps = sorted((b[0] - a[1], i) for i, (a, b) in enumerate(pairwise(apart)))
    closed = set()
    for gap, i in gaps:
        left -= gap
        if left < 0:
            break
        closed.add(i)
    found: list[Range] = []
    for i, one in enumerate(apart):
        if found and i - 1 in closed:
            found[-1] = found[-1][0], one[1]
        else:
            found.append(one)
    return found


# ---- making them -----------------------------------------------------------------------------------------------------


def make_sparse(path: str | Path) -> Path:
    """The sparse files of the current objects at a URL.

    If there are none, the path does not exist. Raises: UcplError E685 if the store gives no answer, E680, E681, E682,
    E683.
    """
    url, above, name = split(path)
    root = cache_dirs.fresh()
    root = root / (name or url.rpartition("/")[2])
    current_scope().enter_context(calling(str(root), url))
    tree = ObjectTree(url, objects_at(above), name, root)
    try:
        return lay(tree)
    except OSError as error:
        reject_source(error, url)


def lay(tree: ObjectTree) -> Path:
    """Make the files of a shadow. Raises: OSError, UcplError E681, E682, E683."""
    entries = _usable(tree)
    is_file = [entry.key for entry in entries] == [tree.name]
    cut = 0 if is_file or not tree.name else len(tree.name) + 1
    current_scope().callback(_give_back, tree)
    register = sparse_file_registry()
    names = {entry.key[cut:]: entry for entry in entries}
    if not is_file:
        _demand_whole(tree, names)
        names = _without_unfinished(names)
    for name, entry in names.items():
        path = tree.root if is_file else tree.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, entry.size)
            status = os.fstat(fd)
        finally:
            os.close(fd)
        tree.files[entry.key] = one = SparseFile(tree, entry, path, entry)
        register(status, one)
    if MANIFEST in names and not is_file:
        _demand_manifest(tree, names)
    return tree.root


def _usable(tree: ObjectTree) -> list[ObjectEntry]:
    """The objects that a folder can contain, without folder markers.

    Raises: OSError, UcplError E683.
    """
    entries = tree.listed()
    if len(entries) > OBJECTS_MAX:
        fail("E683", f"{tree.url} has more than {OBJECTS_MAX:,} objects", Label(tree.url))
    above = {key[:i] for key in (e.key for e in entries) for i in range(len(key)) if key[i] == "/"}
    found = []
    for entry in entries:
        if entry.size == 0 and (entry.key in above or (entry.key == tree.name and len(entries) > 1)):
            continue
        steps = entry.key.split("/")
        if entry.key in above or any(step in ("", ".", "..") or "\0" in step or len(step) > 255 for step in steps):
            fail("E683", f"{tree.url} has an object {entry.key!a}, which cannot be a file name", Label(tree.url))
        found.append(entry)
    return found


def _demand_whole(tree: ObjectTree, names: dict[str, ObjectEntry]) -> None:
    """Reject a target of an unfinished run. Raises: OSError, UcplError E681."""
    unfinished = UNFINISHED in names and MANIFEST not in names
    above = tree.name.rpartition("/")[0]
    outer = f"{above}/{UNFINISHED}" if above else UNFINISHED
    place = tree.url
    if not unfinished and tree.name and names and MANIFEST not in names and tree.objects.entry(outer) is not None:
        outer_manifest = f"{above}/{MANIFEST}" if above else MANIFEST
        unfinished = tree.objects.entry(outer_manifest) is None
        place = tree.objects.url + (f"/{above}" if above else "")
    if unfinished:
        what = f"{place} is incomplete: the run that writes it is active or was interrupted"
        fail("E681", what, Label(place, "records an active run", where=UNFINISHED))


def _without_unfinished(names: dict[str, ObjectEntry]) -> dict[str, ObjectEntry]:
    """The objects without unfinished targets in subfolders."""
    begun = [name.removesuffix(UNFINISHED) for name in names if name.endswith(f"/{UNFINISHED}")]
    gone = tuple(folder for folder in begun if folder + MANIFEST not in names)
    return {name: entry for name, entry in names.items() if not (gone and name.startswith(gone))}


def _demand_manifest(tree: ObjectTree, names: dict[str, ObjectEntry]) -> None:
    """Check that each file of a manifest exists with its size.

    `verify` checks the rest of a manifest. Raises: OSError, UcplError E682.
    """
    entry = names[MANIFEST]
    if entry.size > MANIFEST_MAX:
        return
    try:
        value = json.loads(read_whole(tree.objects, entry))
        files = value["files"]
        sizes = {str(name): int(one["size"]) for name, one in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    except TagDiffers:
        fail("E682", f"{tree.url} is being written", Label(tree.url, where=MANIFEST))
    for name, size in sizes.items():
        found = names.get(name)
        if found is None or found.size != size:
            has = "is not there" if found is None else f"has {found.size} bytes"
            what = f"{tree.url}/{name} {has}, the manifest says {size}"
            fail("E682", what, Label(f"{tree.url}/{name}"), Label(tree.url, "says so", where=MANIFEST))
