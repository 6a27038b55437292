"""Objects of a store: listed, read by range, written whole or by part, removed; each with patience, and no more than that.

obstore speaks S3, GCS and Azure; fsspec whatever else it knows. Both are asked through `Objects`. What is refused for good
ends as an OSError, like a disk's: a store that cannot be reached is no other kind of error than a disk that cannot be read.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import define, frozen
from ucpl.remotes.urls import OBJECTS

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from obstore.store import ObjectStore

__all__ = ["Counted", "Entry", "Objects", "PART_MIN", "TagDiffers", "objects_at", "part_size", "patiently"]

PART_MIN = 8 << 20  # bytes of a part: S3 takes none below 5 MiB but the last
PARTS_MAX = 9_000  # of an object: S3 takes 10,000
PARTS_AT_ONCE = 4
_STATUS = re.compile(r"status code:? (\d{3})")
T = TypeVar("T")


def _number(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name, ""))
    except ValueError:
        return default


def attempts() -> int:
    """How often a request is made, at most."""
    return max(1, int(_number("UCPL_REMOTE_ATTEMPTS", 6)))


def seconds() -> float:
    """After how many seconds of failing no attempt more is made."""
    return max(0.0, _number("UCPL_REMOTE_SECONDS", 120))


def part_size(size: int) -> int:
    """Bytes of a part of an object of `size` bytes: so many that the parts are not too many."""
    wanted = int(_number("UCPL_REMOTE_PART", PART_MIN))
    return max(wanted, -(-size // PARTS_MAX // (1 << 20)) << 20)


@frozen
class Entry:
    """An object as a listing has it. `tag` changes with its bytes: the ETag, else what the store says of its time."""

    key: str
    size: int
    tag: str
    mtime_ns: int


@define(eq=False)
class Counted:
    """What was asked of stores. Threads add to it one by one: a count that is off by one would do no harm."""

    requests: int = 0
    read: int = 0  # bytes that came, of requests that ended well
    written: int = 0
    repeated: int = 0  # requests that failed and were made again


class TagDiffers(Exception):
    """An object is another one by now: its tag."""


class _ForGood(Exception):
    """What another attempt would not change."""


class Objects(Protocol):
    """The objects below one folder of a store. Keys are relative to it. Each call raises OSError."""

    url: str
    counted: Counted

    def entries(self, below: str) -> list[Entry]:
        """All objects below a folder; "": of the whole."""
        ...

    def entry(self, key: str) -> Entry | None: ...

    def read(self, key: str, low: int, high: int, tag: str) -> memoryview:
        """Bytes [low, high) of an object, all of them. tag: what it must have; empty, any. Raises: TagDiffers, too."""
        ...

    def put(self, key: str, data: bytes) -> None: ...

    def create(self, key: str, data: bytes) -> bool:
        """As `put`, where there is no such object yet; False: there is one. Stores without conditions just put."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """A local file, by part. The object is there whole or not at all, and an upload that fails is aborted."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Objects that may be gone already."""
        ...


def objects_at(url: str) -> Objects:
    """The objects below a URL. Raises: UcplError E680, where nothing speaks its scheme."""
    scheme = url.partition(":")[0]
    if scheme in OBJECTS:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            fail("E680", f"obstore is not installed, which {scheme}:// needs", Label(url))
        retry = {"max_retries": 2}
        options = {"timeout": f"{int(max(1, min(60, seconds())))}s", "connect_timeout": "10s"}
        if os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://"):
            options["allow_http"] = True  # type: ignore[assignment]
        try:
            return OfObstore(url, from_url(url, client_options=options, retry_config=retry))  # type: ignore[call-overload]
        except (BaseError, ValueError) as error:
            fail("E680", f"{url}: {first_line(error)}", Label(url))
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        fail("E680", f"fsspec is not installed, which {scheme}:// needs", Label(url))
    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        fail("E680", f"{url}: {first_line(error)}", Label(url))
    return OfFsspec(url, system, path)


def first_line(error: BaseException) -> str:
    """What an error says, without the dump that some bring along."""
    text = str(error).partition("\n\nDebug")[0]
    return " ".join(text.split())[:400] or type(error).__name__


def patiently(call: Callable[[], T], what: str, counted: Counted) -> T:
    """Ask until there is an answer, for a bounded time. Raises: OSError; TagDiffers and what is for good at once."""
    begin, wait, most = time.monotonic(), 0.1, attempts()
    for n in range(1, most + 1):
        counted.requests += 1
        try:
            return call()
        except (FileNotFoundError, PermissionError, TagDiffers):
            raise
        except _ForGood as error:
            raise OSError(errno.EIO, f"{what}: {error}") from error
        except Exception as error:  # what drivers raise is as various as they are
            if n == most or time.monotonic() - begin + wait > seconds():
                tried = f"after {n} attempt{'s' * (n > 1)} in {time.monotonic() - begin:.0f} s"
                raise OSError(errno.EIO, f"{what}, {tried}: {first_line(error)}") from error
            counted.repeated += 1
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(5.0, wait * 2)
    raise AssertionError


def _nanoseconds(when: object) -> int:
    if isinstance(when, datetime):
        return int(when.timestamp() * 1e6) * 1000
    return int(float(when) * 1e9) if isinstance(when, int | float) else 0


def _bare(tag: str | None) -> str:
    """An ETag without its quotes: listings have them, or not."""
    return (tag or "").removeprefix("W/").strip('"')


@define(eq=False)
class OfObstore:
    """S3, GCS, Azure."""

    url: str
    _store: ObjectStore
    counted: Counted = field(factory=Counted)

    def _ask(self, call: Callable[[], T], what: str) -> T:
        from obstore import exceptions as of

        def once() -> T:
            try:
                return call()
            except of.PermissionDeniedError as error:
                raise PermissionError(errno.EACCES, f"{what}: {first_line(error)}") from error
            except (of.UnauthenticatedError, of.InvalidPathError, of.NotSupportedError) as error:
                raise _ForGood(first_line(error)) from error
            except of.BaseError as error:
                found = _STATUS.search(str(error))
                if found is not None and found[1][0] == "4" and found[1] not in ("408", "429"):
                    raise _ForGood(first_line(error)) from error
                raise

        return patiently(once, what, self.counted)

    def entries(self, below: str) -> list[Entry]:
        import obstore

        found = self._ask(lambda: obstore.list(self._store, prefix=below or None).collect(), f"{self.url} not listed")
        return [self._entry(one["path"], one["size"], one["e_tag"], one["last_modified"]) for one in found]

    def _entry(self, key: str, size: int, tag: str | None, when: datetime) -> Entry:
        return Entry(key, size, _bare(tag) or str(when), _nanoseconds(when) // 10**9 * 10**9)

    def entry(self, key: str) -> Entry | None:
        import obstore

        try:
            found = self._ask(lambda: obstore.head(self._store, key), f"{self.url}/{key} not found")
        except FileNotFoundError:
            return None
        return self._entry(key, found["size"], found["e_tag"], found["last_modified"])

    def read(self, key: str, low: int, high: int, tag: str) -> memoryview:
        import obstore

        def get() -> memoryview:
            answer = obstore.get(self._store, key, options={"range": (low, high)})
            now = _bare(answer.meta["e_tag"])
            if tag and now and now != tag and answer.meta["e_tag"]:
                raise TagDiffers(now)
            data = memoryview(answer.bytes())
            if len(data) != high - low:
                raise OSError(errno.EIO, f"{len(data)} bytes came of {high - low}")
            return data

        data = self._ask(get, f"bytes {low} to {high} not read")
        self.counted.read += len(data)
        return data

    def put(self, key: str, data: bytes) -> None:
        import obstore

        self._ask(lambda: obstore.put(self._store, key, data, use_multipart=False), f"{self.url}/{key} not written")
        self.counted.written += len(data)

    def create(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def call() -> bool:
            try:
                obstore.put(self._store, key, data, mode="create")
                return True
            except AlreadyExistsError:  # by an attempt of ours whose answer was lost?
                return bytes(obstore.get(self._store, key).bytes()) == data

        return self._ask(call, f"{self.url}/{key} not written")

    def put_file(self, key: str, path: Path) -> None:
        import obstore

        size = path.stat().st_size
        part = part_size(size)
        what = f"{self.url}/{key} not written"
        if size <= part:
            self.put(key, path.read_bytes())
            return
        self._ask(
            lambda: obstore.put(
                self._store, key, path, use_multipart=True, chunk_size=part, max_concurrency=PARTS_AT_ONCE
            ),
            what,
        )
        self.counted.written += size

    def remove(self, keys: Sequence[str]) -> None:
        import obstore

        for some in _by(keys, 1000):
            try:
                self._ask(lambda some=some: obstore.delete(self._store, some), f"{self.url}: not removed")  # type: ignore[misc]
            except FileNotFoundError:
                pass


@define(eq=False)
class OfFsspec:
    """Whatever fsspec speaks."""

    url: str
    _system: AbstractFileSystem
    _root: str
    counted: Counted = field(factory=Counted)

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}" if key else self._root

    def entries(self, below: str) -> list[Entry]:
        top = self._path(below)

        def find() -> dict[str, dict[str, object]]:
            self._system.invalidate_cache()
            found: dict[str, dict[str, object]] = self._system.find(top, detail=True)
            return found

        try:
            found = patiently(find, f"{self.url} not listed", self.counted)
        except FileNotFoundError:
            return []
        cut = len(self._root.rstrip("/")) + 1
        inside = top.strip("/") + "/" if top.strip("/") else ""
        return [
            self._entry(name[cut:] if self._root.strip("/") else name.lstrip("/"), info)
            for name, info in found.items()
            if name.lstrip("/").startswith(inside)  # of an object that is called so, find gives itself
        ]

    def _entry(self, key: str, info: dict[str, object]) -> Entry:
        names = ("LastModified", "last_modified", "mtime", "updated", "created", "last_commit")
        when = next((info[name] for name in names if info.get(name) is not None), None)
        tags = ("ETag", "etag", "e_tag", "blob_id", "md5Hash", "checksum")
        tag = next((str(info[name]) for name in tags if info.get(name)), "")
        size = info.get("size")
        return Entry(key, size if isinstance(size, int) else 0, _bare(tag) or str(when), _nanoseconds(when))

    def entry(self, key: str) -> Entry | None:
        def info() -> dict[str, object]:
            self._system.invalidate_cache()
            found: dict[str, object] = self._system.info(self._path(key))
            return found

        try:
            found = patiently(info, f"{self.url}/{key} not found", self.counted)
        except FileNotFoundError:
            return None
        return self._entry(key, found) if found.get("type") == "file" else None

    def read(self, key: str, low: int, high: int, tag: str) -> memoryview:
        def get() -> memoryview:
            data = memoryview(self._system.cat_file(self._path(key), start=low, end=high))
            if len(data) != high - low:
                raise OSError(errno.EIO, f"{len(data)} bytes came of {high - low}")
            return data

        data = patiently(get, f"bytes {low} to {high} not read", self.counted)
        self.counted.read += len(data)
        return data

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)

        def write() -> None:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(path, data)

        patiently(write, f"{self.url}/{key} not written", self.counted)
        self.counted.written += len(data)

    def create(self, key: str, data: bytes) -> bool:
        if (found := self.entry(key)) is not None:
            return bytes(self.read(key, 0, found.size, "")) == data
        self.put(key, data)
        return True

    def put_file(self, key: str, path: Path) -> None:
        goal = self._path(key)

        def write() -> None:
            self._system.makedirs(goal.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(path), goal)

        patiently(write, f"{self.url}/{key} not written", self.counted)
        self.counted.written += path.stat().st_size

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                patiently(lambda key=key: self._system.rm_file(self._path(key)), f"{key} not removed", self.counted)  # type: ignore[misc]
            except FileNotFoundError:
                pass


def _by(keys: Sequence[str], count: int) -> Iterable[list[str]]:
    return (list(keys[i : i + count]) for i in range(0, len(keys), count))


def refuse(error: OSError, url: str) -> NoReturn:
    """A store that does not say what is there. Raises: UcplError E400, always."""
    fail("E400", f"{url} cannot be read: {error.strerror or error}", Label(url))
