"""Checkpoints in an in-memory store of this process, for fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from ucpl.storage.objects import RequestCounts
from ucpl.storage.reading import remote_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoint"


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """An empty one."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def upload(store: fsspec.AbstractFileSystem) -> Callable[..., str]:
    """Put a folder or a file there: its URL."""

    def put(source: Path = EXAMPLE, name: str = "bucket/run") -> str:
        for file in [source] if source.is_file() else [f for f in sorted(source.rglob("*")) if f.is_file()]:
            key = f"/{name}/{file.relative_to(source)}" if source.is_dir() else f"/{name}"
            store.pipe_file(key, file.read_bytes())
        return f"memory://{name}"

    return put


def counted(shadow: Path) -> RequestCounts:
    """The request counters of a store for sparse files."""
    file = next(f for f in sorted(shadow.rglob("*")) if f.is_file()) if shadow.is_dir() else shadow
    remote = remote_of(file.stat())
    assert remote is not None
    return remote.listed_by.objects.counted  # type: ignore[attr-defined]
