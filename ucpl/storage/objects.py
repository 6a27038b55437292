"""Objects of a store: list, read ranges, write and remove, with retries.

obstore implements S3, GCS and Azure; fsspec implements other schemes. Both have the interface `Objects`. The number of
retries is limited. A permanent error is an OSError, like an error of a disk.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import define, frozen
from ucpl.storage.error_mapping import server_message, status_of, store_error
from ucpl.storage.urls import OBJECTS

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from obstore.store import ObjectStore

__all__ = [
    "PART_MIN",
    "RequestCounts",
    "ObjectEntry",
    "Objects",
    "TagDiffers",
    "objects_at",
    "part_size",
    "with_retries",
    "read_whole",
]

PART_MIN = 8 << 20  # bytes of a part: S3 takes none below 5 MiB but the last
PARTS_MAX = 9_000  # of an object: S3 takes 10,000
PARTS_AT_ONCE = 4
PART_RETRIES = 2  # of each part of a file, before the complete file is sent again
ANSWER_MAX = 60  # seconds for a complete answer
WAIT_MAX = 15.0  # seconds between two attempts
T = TypeVar("T")


def _number(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name, ""))
    except ValueError:
        return default


def attempts() -> int:
    """The maximum number of attempts of a request."""
    return max(1, int(_number("UCPL_REMOTE_ATTEMPTS", 8)))


def seconds() -> float:
    """After how many seconds of failing no attempt more is made."""
    return max(0.0, _number("UCPL_REMOTE_SECONDS", 120))


def part_size(size: int) -> int:
    """Bytes per part of an object of `size` bytes.

    The number of parts stays below the limit of the stores.
    """
    wanted, least = int(_number("UCPL_REMOTE_PART", PART_MIN)), -(-size // PARTS_MAX)
    return wanted if wanted >= least else -(-least // (1 << 20)) << 20


@frozen
class ObjectEntry:
    """One object in a listing.

    `tag` changes with the bytes: it is the ETag, or else derived from the time of the object.
    """

    key: str
    size: int
    tag: str
    mtime_ns: int


@define(eq=False)
class RequestCounts:
    """Counters of requests to stores.

    Threads increment them without a lock; a small error is harmless.
    """

    requests: int = 0
    read: int = 0  # bytes that came, of requests that ended well
    written: int = 0
    repeated: int = 0  # requests that failed and were made again


class TagDiffers(Exception):
    """The object changed: its tag differs."""


class _PermanentError(Exception):
    """An error that another attempt would not change."""


class Objects(Protocol):
    """The objects below one folder of a store.

    Keys are relative to the folder. Each call raises OSError.
    """

    url: str
    counted: RequestCounts

    def entries(self, below: str) -> list[ObjectEntry]:
        """All objects below a subfolder; "": below the folder itself."""
        ...

    def entry(self, key: str) -> ObjectEntry | None: ...

    def read(self, key: str, low: int, high: int, tag: str) -> memoryview:
        """All bytes [low, high) of an object.

        tag: the required tag; empty: any. Also raises TagDiffers.
        """
        ...

    def put(self, key: str, data: bytes) -> None: ...

    def create(self, key: str, data: bytes) -> bool:
        """Like `put`, if there is no such object yet.

        Returns False if there is one. Stores without conditional writes overwrite it.
        """
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload a local file in parts.

        The object appears complete or not at all; a failed upload is aborted.
        """
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are no error."""
        ...


def read_whole(objects: Objects, entry: ObjectEntry) -> bytes:
    """All bytes of an object, in requests of at most one part.

    Raises: OSError, TagDiffers.
    """
    ranges = ((low, min(low + PART_MIN, entry.size)) for low in range(0, entry.size, PART_MIN))
    return b"".join(objects.read(entry.key, low, high, entry.tag) for low, high in ranges)


def objects_at(url: str) -> Objects:
    """The objects below a URL.

    Raises: UcplError E680, if there is no driver for its scheme.
    """
    scheme = url.partition(":")[0]
    if scheme in OBJECTS:
        try:
            from obstore.exceptions import BaseError
        except ImportError:
            fail("E680", f"obstore is not installed, which {scheme}:// needs", Label(url))
        limit = int(max(1, min(ANSWER_MAX, seconds() / 2)))  # so that one that never comes leaves time to ask again
        options = {"timeout": f"{limit}s", "connect_timeout": "10s"}
        if os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://"):
            options["allow_http"] = True  # type: ignore[assignment]
        try:
            return OfObstore(url, _obstore(url, options, 0), _obstore(url, options, PART_RETRIES))
        except (BaseError, ValueError) as error:
            account = "set AZURE_STORAGE_ACCOUNT_NAME" if "Account must be" in str(error) else ""
            fail("E680", f"{url}: {server_message(error)}", Label(url), remedy=account)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        fail("E680", f"fsspec is not installed, which {scheme}:// needs", Label(url))
    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        fail("E680", f"{url}: {server_message(error)}", Label(url))
    return OfFsspec(url, system, path)


def _obstore(url: str, options: dict[str, str], retries: int) -> ObjectStore:
    from obstore.store import from_url

    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds())}
    return from_url(url, client_options=options, retry_config=retry)  # type: ignore[call-overload, no-any-return]


def with_retries(call: Callable[[], T], what: str, counted: RequestCounts) -> T:
    """Repeat a call until it succeeds, within a time limit.

    Raises: OSError; TagDiffers and permanent errors without a retry.
    """
    begin, wait, most = time.monotonic(), 0.1, attempts()
    for n in range(1, most + 1):
        counted.requests += 1
        try:
            return call()
        except TagDiffers:
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, f"{what}: there is no such object") from error
        except PermissionError as error:
            raise store_error(what, error) from error
        except _PermanentError as error:
            raise store_error(what, error.__cause__ or error) from error
        except Exception as error:  # drivers raise many kinds of errors
            if n == most or time.monotonic() - begin + wait > seconds():
                tried = f"after {n} attempt{'s' * (n > 1)} in {time.monotonic() - begin:.0f} s"
                raise store_error(what, error, f", {tried}") from error
            counted.repeated += 1
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(WAIT_MAX, wait * 2)
    raise AssertionError


def _place(url: str, key: str) -> str:
    return f"{url}/{key}" if key else url


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
    _by_part: ObjectStore  # the same; it repeats a failed part itself
    counted: RequestCounts = field(factory=RequestCounts)

    def _ask(self, call: Callable[[], T], what: str) -> T:
        from obstore import exceptions as of

        def once() -> T:
            try:
                return call()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise _PermanentError from error
                raise
            except (
                of.PermissionDeniedError, of.UnauthenticatedError, of.InvalidPathError, of.NotSupportedError,
            ) as error:  # fmt: skip
                raise _PermanentError from error
            except of.BaseError as error:
                status = status_of(error)
                if 400 <= status < 500 and status not in (408, 429):
                    raise _PermanentError from error
                raise

        return with_retries(once, what, self.counted)

    def entries(self, below: str) -> list[ObjectEntry]:
        import obstore

        found = self._ask(
            lambda: obstore.list(self._store, prefix=below or None).collect(), f"{_place(self.url, below)} not listed"
        )
        return [self._entry(one["path"], one["size"], one["e_tag"], one["last_modified"]) for one in found]

    def _entry(self, key: str, size: int, tag: str | None, when: datetime) -> ObjectEntry:
        return ObjectEntry(key, size, _bare(tag) or str(when), _nanoseconds(when) // 10**9 * 10**9)

    def entry(self, key: str) -> ObjectEntry | None:
        import obstore

        try:
            found = self._ask(lambda: obstore.head(self._store, key), f"{_place(self.url, key)} not looked up")
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

        data = self._ask(get, f"{_place(self.url, key)}: bytes {low} to {high} not read")
        self.counted.read += len(data)
        return data

    def put(self, key: str, data: bytes) -> None:
        import obstore

        part = part_size(len(data))
        what = f"{_place(self.url, key)} not written"
        if len(data) <= part:
            self._ask(lambda: obstore.put(self._store, key, data, use_multipart=False), what)
            self.counted.written += len(data)
        else:
            self._put_by_part(key, data, part)

    def _put_by_part(self, key: str, data: bytes | Path, part: int) -> None:
        import obstore

        def call() -> None:
            try:
                obstore.put(
                    self._by_part, key, data, use_multipart=True, chunk_size=part, max_concurrency=PARTS_AT_ONCE
                )
            except FileNotFoundError as error:  # the first answer to its end was lost, and it was sent twice
                raise OSError(errno.EIO, "no such upload any more") from error

        self._ask(call, f"{_place(self.url, key)} not written")
        self.counted.written += len(data) if isinstance(data, bytes) else data.stat().st_size

    def create(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def call() -> bool:
            try:
                obstore.put(self._store, key, data, mode="create")
                return True
            except AlreadyExistsError:  # possibly by our own attempt, whose answer was lost
                return bytes(obstore.get(self._store, key).bytes()) == data

        return self._ask(call, f"{_place(self.url, key)} not written")

    def put_file(self, key: str, path: Path) -> None:
        size = path.stat().st_size
        if size <= (part := part_size(size)):
            self.put(key, path.read_bytes())
        else:
            self._put_by_part(key, path, part)

    def remove(self, keys: Sequence[str]) -> None:
        import obstore

        for some in (list(keys[n : n + 1000]) for n in range(0, len(keys), 1000)):
            try:
                self._ask(partial(obstore.delete, self._store, some), f"{_place(self.url, some[0])} not removed")
            except FileNotFoundError:
                pass


@define(eq=False)
class OfFsspec:
    """The objects of a scheme that fsspec implements."""

    url: str
    _system: AbstractFileSystem
    _root: str
    counted: RequestCounts = field(factory=RequestCounts)

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}" if key else self._root

    def entries(self, below: str) -> list[ObjectEntry]:
        top = self._path(below)

        def find() -> dict[str, dict[str, object]]:
            self._system.invalidate_cache()
            found: dict[str, dict[str, object]] = self._system.find(top, detail=True)
            return found

        try:
            found = with_retries(find, f"{_place(self.url, below)} not listed", self.counted)
        except FileNotFoundError:
            return []
        cut = len(self._root.rstrip("/")) + 1
        inside = top.strip("/") + "/" if top.strip("/") else ""
        return [
            self._entry(name[cut:] if self._root.strip("/") else name.lstrip("/"), info)
            for name, info in found.items()
            if name.lstrip("/").startswith(inside)  # of an object that is called so, find gives itself
        ]

    def _entry(self, key: str, info: dict[str, object]) -> ObjectEntry:
        names = ("LastModified", "last_modified", "mtime", "updated", "created", "last_commit")
        when = next((info[name] for name in names if info.get(name) is not None), None)
        tags = ("ETag", "etag", "e_tag", "blob_id", "md5Hash", "checksum")
        tag = next((str(info[name]) for name in tags if info.get(name)), "")
        size = info.get("size")
        return ObjectEntry(key, size if isinstance(size, int) else 0, _bare(tag) or str(when), _nanoseconds(when))

    def entry(self, key: str) -> ObjectEntry | None:
        def info() -> dict[str, object]:
            self._system.invalidate_cache()
            found: dict[str, object] = self._system.info(self._path(key))
            return found

        try:
            found = with_retries(info, f"{_place(self.url, key)} not looked up", self.counted)
        except FileNotFoundError:
            return None
        return self._entry(key, found) if found.get("type") == "file" else None

    def read(self, key: str, low: int, high: int, tag: str) -> memoryview:
        def get() -> memoryview:
            data = memoryview(self._system.cat_file(self._path(key), start=low, end=high))
            if len(data) != high - low:
                raise OSError(errno.EIO, f"{len(data)} bytes came of {high - low}")
            return data

        data = with_retries(get, f"{_place(self.url, key)}: bytes {low} to {high} not read", self.counted)
        self.counted.read += len(data)
        return data

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)

        def write() -> None:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(path, data)

        with_retries(write, f"{_place(self.url, key)} not written", self.counted)
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

        with_retries(write, f"{_place(self.url, key)} not written", self.counted)
        self.counted.written += path.stat().st_size

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                with_retries(
                    partial(self._system.rm_file, self._path(key)), f"{_place(self.url, key)} not removed", self.counted
                )
            except FileNotFoundError:
                pass
