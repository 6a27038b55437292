"""Remains of an earlier run: a journal, or its target.

Not here: resuming (execute), and the meaning of a journal's bytes (journal).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ucpl.errors import Label, UcplError, fail
from ucpl.runtime.buffers import WorkerMemory
from ucpl.runtime.disk import check_own, disk
from ucpl.runtime.identity import IDENTITY
from ucpl.runtime.journal import Past, joined, read_journal
from ucpl.runtime.manifest import read_manifest
from ucpl.runtime.publish import Workplace
from ucpl.runtime.targets import TargetPlan, cannot_write

__all__ = ["cut_of", "is_finished", "is_other_run", "is_published", "journal_of", "was_published"]


def journal_of(work: Workplace) -> Past | None:
    """Joined journals of all ranks of an earlier run, of any number.

    Raises: UcplError E503.
    """
    path = work.journal
    try:
        check_own(work.folder)
        first = read_journal(path)
        if first is None:
            return None
        found = [first]
        for path in work.others:
            if (one := read_journal(path)) is not None and one.header.get("run") == first.header.get("run"):
                found.append(one)
        return joined(found)
    except FileNotFoundError:
        return None
    except OSError as error:
        cannot_write(path, error)


def is_published(past: Past, target: Path) -> bool:
    """True if the target is the one that the earlier run renamed."""
    if past.publishing is None:
        return False
    try:
        return disk().identity(target) == past.publishing
    except OSError:
        return False


def was_published(work: Workplace, digests: Mapping[str, str], layout: TargetPlan) -> bool:
    """True if the files on the disk show the ranks' published target."""
    try:
        past = journal_of(work)
    except UcplError:
        return False
    if past is not None:
        return is_published(past, work.target)
    return is_finished(work.target, {name: digests[name] for name in IDENTITY}, layout)


def is_other_run(past: Past, digests: Mapping[str, str]) -> str:
    """Name the parts in which the earlier run differs.

    They are plan, source, or metadata of the target. Empty: it is this run.
    """
    of = (("digest", "plan"), ("content", "source"), ("files", "target's metadata"))
    return next((what for name, what in of if past.header.get(name) != digests[name]), "")


def cut_of(past: Past, share: WorkerMemory, work: Workplace) -> tuple[int, int]:
    """Bytes of the earlier run's tiles, and its largest bands.

    Raises: UcplError E602, E508.
    """
    tile, band = past.header.get("tile"), past.header.get("band")
    whole = isinstance(tile, int) and isinstance(band, int) and 0 < tile <= band < 1 << 62
    if not isinstance(tile, int) or not isinstance(band, int) or not whole or tile % 16 or band % tile:
        fail("E602", f"the journal of the interrupted run into {work.target} is damaged", Label(str(work.journal)))
    if tile > share.tile:
        fail("E508", f"the interrupted run used tiles of {tile} bytes, there is memory for {share.tile}")
    return tile, band


def is_finished(target: Path, digests: Mapping[str, str], layout: TargetPlan) -> bool:
    """True if a folder is the result of this run.

    Its manifest and the sizes of its files decide.
    """
    try:
        manifest = read_manifest(target)
        return (
            manifest is not None
            and all(manifest.plan.get(name) == digest for name, digest in digests.items())
            and all((target / f.path).stat().st_size == f.plan.size for f in layout.files)
        )
    except (OSError, ValueError):
        return False
