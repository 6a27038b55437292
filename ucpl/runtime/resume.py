"""Identity of a run, and the remains of an earlier one.

Not here: resuming (execute), and the meaning of a journal's bytes (journal).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import xxhash

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import StoredTensor
from ucpl.planning.plan import Plan
from ucpl.runtime.buffers import WorkerMemory
from ucpl.runtime.disk import check_own, disk
from ucpl.runtime.journal import Past, joined, read_journal
from ucpl.runtime.manifest import read_manifest
from ucpl.runtime.publish import Workplace
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import TargetFile, TargetPlan, cannot_write
from ucpl.tables.operations import Fill

__all__ = [
    "cut_of", "is_finished", "is_other_run", "is_published", "journal_of", "was_published", "IDENTITY",
    "digest_of_files", "digest_of_plan", "digest_of_sources",
]  # fmt: skip

IDENTITY = ("digest", "files", "content")  # digests that identify a run


def digest_of_plan(plan: Plan, *, layout: bool = True) -> str:
    """Everything of a plan that has a say in the target's bytes.

    layout: with the text of its layout, which a folder has next to its files.
    """
    state = xxhash.xxh3_128()
    state.update(repr((plan.source_call, plan.target_call, plan.spec_digest, plan.structure_digest)).encode())
    state.update(plan.layout_text.encode() if layout else b"")
    for side in (plan.sources, plan.targets):
        for tensor in side:
            state.update(_line(tensor).encode())
        state.update(b"\0\0")
    for m in plan.moves:
        head = (m.kind, m.state, m.source_value, m.target_value, m.lossy, m.over, len(m))
        state.update(repr(head).encode())
        for column in (m.source, m.target, m.shape, m.source_offset, m.source_stride, m.target_offset, m.target_stride):
            state.update(column.astype("<i8").tobytes())
    for node in plan.nodes:
        if isinstance(node, Fill) and node.value != 0:  # zeros need no Fill: elements that no move reaches are zero
            state.update(repr((node.label, node.state, node.value)).encode())
            for column in (node.boxes.offset, node.boxes.shape, node.boxes.stride):
                state.update(column.astype("<i8").tobytes())
    return state.hexdigest()


def _line(t: StoredTensor) -> str:
    return f"{t.file}\0{t.key!r}\0{t.dtype}\0{t.shape}\0{t.shares}\n"


def digest_of_files(files: Sequence[TargetFile], texts: Mapping[str, str]) -> str:
    """Names, sizes, and every byte that is known before data moves."""
    state = xxhash.xxh3_128()
    for file in files:
        state.update(f"{file.path}\0{file.plan.size}\0{sorted(file.plan.storages.items())}\n".encode())
        for position, data in file.plan.fixed:
            state.update(position.to_bytes(8, "little"))
            state.update(data)
    for name, text in sorted(texts.items()):
        state.update(f"{name}\0{text}\0".encode())
    return state.hexdigest()


def digest_of_sources(sources: SourceFiles, made: Set[str]) -> str:
    """Digest of size, time and inode of every file that is read.

    Files that are `made` for the target, anew each time, count by their size alone.
    """
    state = xxhash.xxh3_128()
    for file, identity in sorted(sources.identity.items()):
        if file in made:
            state.update(f"made\0{identity.size}\n".encode())
            continue
        state.update(f"{file}\0{identity.size}\0{identity.mtime_ns}\0{identity.inode}\0{identity.device}\n".encode())
    return state.hexdigest()


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
