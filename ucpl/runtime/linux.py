"""Linux: system calls that Python lacks, and types of file systems.

Each call documents its result if the kernel or the file system lacks it. On a network file system some promises of a
disk are those of its server.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from functools import cache
from pathlib import Path

__all__ = ["allocate", "clone_range", "exchange", "kind_of", "network_remark", "rename_new", "start_writing"]

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_WRITE = 2  # of sync_file_range: begin to write dirty pages out, wait for none
_FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range)
_LACKING = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@cache
def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def allocate(fd: int, size: int) -> None:
    """Give a file its size, and reserve blocks if possible.

    Not posix_fallocate: if the file system cannot, glibc writes into every block. Raises: OSError (ENOSPC, ...).
    """
    libc = _libc()
    call = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if size and call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        while call(fd, 0, 0, size) != 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number in _LACKING:
                break
            raise OSError(number, os.strerror(number))
    os.ftruncate(fd, size)


def clone_range(source: tuple[int, int], target: tuple[int, int], size: int) -> None:
    """Share the blocks of a file's range with another file.

    Each: (descriptor, position). Raises: OSError.
    """
    fcntl.ioctl(target[0], _FICLONERANGE, struct.pack("=qQQQ", source[0], source[1], size, target[1]))


def start_writing(fd: int, position: int, size: int) -> None:
    """Ask the kernel to begin writing these bytes to the disk.

    A hint: nothing is durable by it, nothing is lost without it.
    """
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        call(fd, position, size, _WRITE)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Call renameat2; False if this system has no such call.

    Raises: OSError.
    """
    call = getattr(_libc(), "renameat2", None)
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))


def rename_new(source: Path, target: Path) -> None:
    """Rename to a name that must be free. Raises: FileExistsError, OSError."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; False if the file system cannot.

    Some cannot in part: overlayfs moves no folder of a lower layer. Raises: OSError.
    """
    try:
        return _renameat2(one, other, _EXCHANGE)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise


# --- Types of mounted file systems ----------------------------------------------------------------------------------

TABLE = Path("/proc/self/mountinfo")
NETWORKS = frozenset(
    (
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    )
)
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def kind_of(place: Path, table: Path = TABLE) -> str:
    """Type of a path's file system, such as ext4 or nfs4.

    Empty if it is unknown.
    """
    try:
        lines = table.read_bytes().splitlines()
    except OSError:
        return ""
    here, best, kind = os.fsencode(os.path.realpath(place)), -1, b""
    for line in lines:
        fields, _, rest = line.partition(b" - ")
        parts = fields.split(b" ")
        if len(parts) < 5 or not rest:
            continue
        at = _ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 255]), parts[4])
        if (here + b"/").startswith(at.rstrip(b"/") + b"/") and len(at) >= best:  # the last one mounted there is on top
            best, kind = len(at), rest.split(b" ")[0]
    return kind.decode("ascii", "replace")


def network_remark(place: Path, table: Path = TABLE) -> str:
    """Missing guarantees of a network's or program's file system.

    Empty for a disk.
    """
    kind = kind_of(place, table)
    if kind not in NETWORKS and not kind.startswith("fuse."):
        return ""
    return (
        f"{place} is on {kind}: this file system may not make syncs durable, renames atomic, or locks visible to other"
        " machines, and the read-back may come from its cache"
    )
