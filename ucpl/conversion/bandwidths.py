"""Bandwidths of a disk and this machine, and estimates from them.

They are measured once and stored for this user. Other work of the machine during the measurement lowers the figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict, fields

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.texts import json_object, read_text

if TYPE_CHECKING:
    from ucpl.planning.cost import Cost

__all__ = ["Bandwidths", "Estimate", "bandwidths_at", "estimate", "place", "text_of"]

TILE = 1 << 20
BUFFERS = 4  # tiles of a thread
_ANEW = "`ucpl calibrate FOLDER` measures them anew"
_FOREIGN = ("folder", "when")


@frozen
class Bandwidths:
    """Bytes a second of all threads together, and seconds of small operations.

    Small operations are one call, one file, and a run that moves almost nothing.
    """

    folder: str
    when: str  # UTC
    workers: int
    read: float  # from the disk
    reread: float  # from memory, of a file that was read before
    write: float  # into memory
    sync: float  # written until it is durable, from the first byte on
    copy: float  # from memory to memory, one core
    digest: float  # both digests
    call: float  # s, of a read
    file: float  # s, until a new small file is durable
    start: float  # s, until the first byte of a run, its plan with it
    memory: int  # bytes that a run needs besides its buffers


@frozen
class Estimate:
    """Seconds and bytes of memory of a run in one process.

    warm: seconds with the source in memory. cold: seconds without.
    """

    warm: float
    cold: float
    memory: int


def place() -> Path:
    """The default path of the figures."""
    import platformdirs

    return platformdirs.user_data_path("ucpl", appauthor=False) / "bandwidths.json"


def bandwidths_at(path: Path) -> Bandwidths:
    """Read the measured figures. Raises: UcplError E170, E176."""
    found = json_object(read_text(path))
    if isinstance(found, str):
        fail("E176", f"{path} is no JSON object", Label(str(path), found), remedy=_ANEW)
    known: dict[str, object] = {}
    for one in fields(Bandwidths):
        value = found.get(one.name)
        is_good = isinstance(value, str) if one.name in _FOREIGN else _is_positive(value)
        if not is_good:
            fail(
                "E176",
                f"{path} are no bandwidths: `{one.name}` is {value!r}",
                Label(str(path), where=one.name),
                remedy=_ANEW,
            )
        known[one.name] = value
    return Bandwidths(**known)  # type: ignore[arg-type]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def text_of(found: Bandwidths) -> str:
    return json.dumps(asdict(found), indent=1) + "\n"


# ---- estimates ---------------------------------------------------------------------------------------------------------


def estimate(cost: Cost, known: Bandwidths) -> Estimate:
    """Estimate seconds and memory of one process with the complete plan.

    Threads read, digest and write a tile in turn, so their seconds add up. The disk works at the same time.
    The estimate is the start plus the longer of the two.
    """
    read, written = cost.bytes_read, cost.bytes_written
    calls = (cost.runs + (read + 2 * written) / TILE) * known.call
    threads = read / known.reread + written * (1 / known.write + 1 / known.digest) + calls
    threads += written * (1 / known.reread + 1 / known.digest)
    # The read-back runs at the speed of the disk, even if the source was in memory.
    disk = written / known.sync + written / known.read
    first = known.start + (cost.files_written or 0) * known.file / known.workers
    memory = known.memory + BUFFERS * TILE * known.workers
    cold = max(threads - read / known.reread + read / known.read, disk + read / known.read)
    return Estimate(first + max(threads, disk), first + cold, memory)
