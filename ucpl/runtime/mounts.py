"""Which file system a place is on, as Linux tells it: on one of a network, some promises of a disk are its server's word."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["kind_of", "network_remark"]

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
    """The type of the file system that a path is on, such as ext4 or nfs4; empty where nothing tells."""
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
    """What is not promised where a place is on a network, or on what a program serves; else empty."""
    kind = kind_of(place, table)
    if kind not in NETWORKS and not kind.startswith("fuse."):
        return ""
    return (
        f"{place} is on {kind}: whether a sync is durable, a rename one step and a lock seen on other machines is that file"
        " system's word, and what was read back may come from a cache of its own"
    )
