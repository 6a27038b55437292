"""Shared ranges of two files on a disk (FICLONERANGE), instead of copies.

btrfs and XFS can do so. If a tile is one run of one source file, and both places agree modulo the file system's block,
it shares all complete blocks of the run; the ends are written. The run is read all the same: digests are computed from
bytes, and bytes that are read back are compared with them. If the file system refuses for any reason, the bytes are
written, and no clone is tried again between these two files.
"""

from __future__ import annotations

import errno
import os

from ucpl.runtime.disk import disk
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import TargetFiles

__all__ = ["CLONE_MIN", "Clones"]

CLONE_MIN = 1 << 16  # bytes below which a call costs more than writing
_NEVER_HERE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EXDEV)


class Clones:
    """Shared blocks between the files of a source and of a target.

    All threads of a run use it.
    """

    def __init__(self, sources: SourceFiles, files: TargetFiles) -> None:
        self._sources, self._files = sources, files
        self._refused: set[tuple[int, int]] = set()
        self._never = False
        try:
            status = os.statvfs(files.root)
            self._block = max(status.f_bsize, status.f_frsize, 512)
        except OSError:
            self._never = True

    def put(self, origin: tuple[int, int], file: int, view: memoryview, position: int) -> int:
        """Share as much of a run as possible and write the rest.

        Returns the bytes that are shared, or 0. origin: (index of the source's file, byte position) of the same bytes.
        Raises: UcplError E503.
        """
        source, at = origin
        head = -position % self._block if not self._never else 0
        size = (len(view) - head) // self._block * self._block if not self._never else 0
        if size < CLONE_MIN or (at - position) % self._block or (source, file) in self._refused:
            return 0
        if not self._shared((source, at + head), (file, position + head), size):
            return 0
        if head:
            self._files.write(file, view[:head], position)
        if head + size < len(view):
            self._files.write(file, view[head + size :], position + head + size)
        return size

    def _shared(self, here: tuple[int, int], there: tuple[int, int], size: int) -> bool:
        source, goal = self._sources.descriptor(here[0]), self._files.descriptor(there[0])
        try:
            disk().clone((source, here[1]), (goal, there[1]), size)
        except OSError as error:
            self._refused.add((here[0], there[0]))
            self._never |= error.errno in _NEVER_HERE
            return False
        return True
