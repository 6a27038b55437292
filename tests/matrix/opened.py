"""Record the files that are opened, made or renamed during a run.

An audit hook of the interpreter sees the files that any thread opens. It cannot be removed again: there is one a process, which
sleeps between. It does not see files that native code opens; the files of a target are written by Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import ClassVar

from attrs import define, field

import ucpl
from ucpl.language.cache import cache_folder
from ucpl.resources import example_folder

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (1,), "os.mkdir": (0,)}  # event -> its paths
_STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")  # whose files nobody would see


def _ours() -> tuple[Path, ...]:
    """Python's folders, this product's own files, and the kernel's.

    Its own are code, specs and cached trees.
    """
    package = Path(ucpl.__file__).parent
    root = example_folder().parent  # of the checkout
    kept = cache_folder()
    found = [package, root / "specs", root / "grammar", Path(__file__).parent, Path("/proc"), Path(os.devnull)]
    found += [Path(sys.prefix), Path(sys.base_prefix), *([kept] if kept is not None else [])]
    return tuple(found + ([Path(sys.pycache_prefix)] if sys.pycache_prefix else []))


@define
class Opened:
    """Paths as they were named, made absolute.

    Folders that are only looked at are not among them.
    """

    ours: ClassVar[tuple[Path, ...]] = _ours()
    read: set[Path] = field(factory=set)
    written: set[Path] = field(factory=set)
    changed: set[Path] = field(factory=set)

    def sees(self, event: str, arguments: tuple[object, ...]) -> None:
        assert event not in _STARTS, f"{event} starts a process"
        if event in _CHANGES:
            self.changed |= {_path(arguments[n]) for n in _CHANGES[event]}
        elif event == "open" and not isinstance(arguments[0], int):
            flags = arguments[2]
            assert isinstance(flags, int)
            if not flags & os.O_DIRECTORY:
                (self.written if flags & _WRITING else self.read).add(_path(arguments[0]))


def _path(named: object) -> Path:
    assert isinstance(named, (str, bytes, os.PathLike))
    return Path(os.path.abspath(os.fsdecode(named)))


@define
class _Hook:
    now: Opened | None = None

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.now is not None and (event == "open" or event in _CHANGES or event in _STARTS):
            self.now.sees(event, arguments)


@cache
def _hook() -> _Hook:
    hook = _Hook()
    sys.addaudithook(hook)
    return hook


@contextmanager
def watching() -> Iterator[Opened]:
    """Record opened files until the end of the block, in all threads."""
    hook = _hook()
    hook.now = seen = Opened()
    try:
        yield seen
    finally:
        hook.now = None
