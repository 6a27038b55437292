"""integrity.json, which Megatron-Core writes under --verify-integrity.

It has a SHA-256 of each file of an iteration.


    {"algorithm": "sha256", "files": {"__0_0.distcp": "9fd2...", ".metadata": "5bda..."}}

Read in megatron-core 0.18.2 and 0.19.2. Not here: our own manifest, and CRCs of members (verify).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from attrs import field

from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.errors import catalogue as codes
from ucpl.records import define
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.disk import disk
from ucpl.runtime.worker_pool import Queue, run_through
from ucpl.texts import json_object, read_text

__all__ = ["INTEGRITY", "Sums", "is_open", "with_sums"]

INTEGRITY = "integrity.json"
_ALGORITHM = "sha256"


def with_sums(tree: Path, texts: Mapping[str, str], files: Iterable[str], view: memoryview) -> dict[str, str]:
    """Texts of a target with the sums of its written files.

    An integrity.json without a text is one to complete: it has the files of its own folder.
    """
    out = dict(texts)
    for name in [one for one, text in texts.items() if is_open(one, text)]:
        folder = PurePosixPath(name).parent
        mine = sorted(file for file in files if PurePosixPath(file).is_relative_to(folder))
        sums = {str(PurePosixPath(one).relative_to(folder)): _sum_of(tree / one, view)[0] for one in mine}
        out[name] = json.dumps({"algorithm": _ALGORITHM, "files": sums}, indent=2)
    return out


def is_open(name: str, text: str) -> bool:
    """Test for an integrity.json whose sums are not known yet."""
    return not text and PurePosixPath(name).name == INTEGRITY


def _sum_of(path: Path, view: memoryview, stopped: Callable[[], bool] = lambda: False) -> tuple[str, int]:
    """The SHA-256 of a file, and the bytes that were read."""
    made, done = hashlib.sha256(), 0
    fd = disk().open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while not stopped() and (got := disk().read(fd, [view], done)):
            made.update(view[:got])
            done += got
    finally:
        disk().close(fd)
    return made.hexdigest(), done


@define
class Sums:
    """The sums of a folder's files, held against their bytes."""

    root: Path
    stated: dict[str, str] = field(factory=dict)  # file, relative to root -> its sum
    findings: list[Diagnostic] = field(factory=list)
    read: int = 0  # bytes

    @classmethod
    def of(cls, root: Path) -> Sums:
        """Digests of a folder; none without an integrity.json.

        An unreadable file is a finding.
        """
        out = cls(root)
        path = root / INTEGRITY
        if not path.is_file():
            return out
        try:
            held = json_object(read_text(path))
        except UcplError as error:
            held = str(error)
        if isinstance(held, str):
            return out._unread(held)
        files, algorithm = held.get("files"), held.get("algorithm")
        if algorithm != _ALGORITHM or not isinstance(files, dict):
            return out._unread(f"its algorithm is {algorithm!r:.40}, and {_ALGORITHM} is known here")
        for name, said in files.items():
            parts = PurePosixPath(name).parts
            if not isinstance(said, str) or not parts or name.startswith("/") or ".." in parts:
                return out._unread(f"its entry of {name[:100]!a} is no sum of a file of the folder")
            out.stated[name] = said.lower()
        return out

    def _unread(self, why: str) -> Sums:
        what = f"{INTEGRITY} cannot be read: {why}"
        self.findings.append(
            Diagnostic("E632", what, (Label(str(self.root / INTEGRITY)),), remedy=codes()["E632"].remedy)
        )
        return Sums(self.root, findings=self.findings)

    def check(self, workspace: Callable[[], Workspace], workers: int) -> None:
        """Read all of these files."""
        names = sorted(self.stated)
        queue, lock = Queue(len(names)), threading.Lock()

        def work(stop: threading.Event) -> None:
            with workspace() as space:
                while not stop.is_set() and (i := queue.take()) is not None:
                    found, size = self._check(names[i], space.tile_view, stop)
                    with lock:
                        self.findings += found
                        self.read += size

        run_through(queue, work, workers)

    def _check(self, name: str, view: memoryview, stop: threading.Event) -> tuple[list[Diagnostic], int]:
        path = self.root / name
        try:
            made, done = _sum_of(path, view, stop.is_set)
        except FileNotFoundError:
            return [self._wrong(name, f"{name} is missing, and {INTEGRITY} has it", "not there")], 0
        except OSError as error:
            what = f"{name} cannot be read: {error.strerror or error}"
            return [Diagnostic("E633", what, (Label(str(path)),), remedy=codes()["E633"].remedy)], 0
        if stop.is_set() or made == self.stated[name]:
            return [], done
        text = f"{_ALGORITHM} {self.stated[name][:16]} stated, {made[:16]} of the bytes"
        return [self._wrong(name, f"{name} does not match {INTEGRITY}", text)], done

    def _wrong(self, name: str, what: str, said: str) -> Diagnostic:
        return Diagnostic("E635", what, (Label(str(self.root / name), said),), remedy=codes()["E635"].remedy)
