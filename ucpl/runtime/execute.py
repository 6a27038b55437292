"""Run a plan: read the source in tiles, write the target beside its place, read it back from the disk, publish it.

    fit → skeleton → layout → rows, tiles → lock → files → MOVE → evidence → finish → sync → READ BACK → manifest → publish

Data moves in a few threads over one queue of tiles in the order of the target's files; this thread syncs what they wrote and
journals it. Nothing is decided here that the plan leaves open. The source is only read.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from attrs import evolve, frozen

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.errors import catalogue as codes
from ucpl.runtime.assemble import Assembler
from ucpl.runtime.buffers import Budget, Share, Workspace, share_of
from ucpl.runtime.counters import Counters, Report, Unverified
from ucpl.runtime.crew import Crew, Queue
from ucpl.runtime.evidence import Inspection, allowance, check_blanks, check_members, damage_of, members_of
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.identity import digest_of_files, digest_of_plan, digest_of_sources
from ucpl.runtime.journal import Journal, Past, read_journal
from ucpl.runtime.manifest import FOLDER, LAYOUT, MANIFEST, manifest_of, read_manifest, storage_crcs
from ucpl.runtime.padding import blanks_of
from ucpl.runtime.publish import Lock, Workplace, sync_folder, sync_folders
from ucpl.runtime.reading import Fragments, Reader
from ucpl.runtime.rows import Place, Rows, bind_rows, chosen, fit, without_echoes
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import TargetFiles, TargetPlan, cannot_write, lay_out
from ucpl.runtime.tiles import Tiles, cut_tiles
from ucpl.schedule.plan import Moves, Plan
from ucpl.stores.checkpoint import Checkpoint, Framework, Skeleton

__all__ = ["execute", "moves_of"]

Progress = Callable[[int, int], None]  # (bytes of the target that are done, all of them)

SINGLE = (".pt", ".pth", ".bin")  # a target of this name is one file
SYNC_BYTES = 128 << 20  # written bytes after which they are synced and journalled, at the latest
SYNC_SECONDS = 1.0
_FINAL = ("E505", "E605", "E611", "E612", "E613", "E614")  # what `--resume` cannot go on from


def execute(
    plan: Plan,
    source: Checkpoint,
    framework: Framework,
    target: Path,
    *,
    memory: int = 512 << 20,
    workers: int = 2,
    resume: bool = False,
    force: bool = False,
    verify_source: bool = False,
    progress: Progress | None = None,
    tag: str | None = None,
    allow_globals: Sequence[str] = (),
) -> Report:
    """Write `target` from `source`, exactly as the plan says. `memory` bounds all buffers together, in bytes.

    The target appears as a whole or not at all. Raises: UcplError E500-E508 (the target), E600-E605 (the plan does not
    fit), E610-E613 (the source), E620 (interrupted: the hidden folder stays, `resume` goes on).
    """
    counters = Counters()
    place = _place(Path(target), source)
    with counters.phase("plan"):
        share = share_of(memory, workers)
        sources = fit(plan.sources, source.extents)
        skeleton = framework.skeleton(plan.target, plan.targets, source, tag)
        _refuse_globals(skeleton, allow_globals)
        layout = lay_out(skeleton, plan.targets)
        sources += tuple(where for where, _ in layout.carried)
        rows = bind_rows(without_echoes(moves_of(plan, layout), sources), sources, layout.places)
        counters.bytes_needed = rows.bytes_needed
    run = _Run(plan, source, skeleton, layout, sources, rows, share, memory, workers, counters, place, progress)
    try:
        with Lock(place):
            try:
                return run.go(resume=resume, force=force, verify_source=verify_source)
            except UcplError as error:
                run.close()
                raise run.after(error) from error
            except KeyboardInterrupt:
                run.close()
                raise run.interrupted() from None
            finally:
                run.close()
    except KeyboardInterrupt:
        raise run.interrupted() from None


def moves_of(plan: Plan, layout: TargetPlan) -> tuple[Moves, ...]:
    """The plan's moves, those of carried tensors, and a check in place of a copy to a tensor that shares another's bytes."""
    found: list[Moves] = []
    owners = np.array(layout.owners or (0,), np.int32)
    shared = owners != np.arange(len(owners))
    for m in plan.moves:
        twice = shared[m.target] if len(m) else np.zeros(0, np.bool_)
        if not twice.any():
            found.append(m)
            continue
        found.append(chosen(m, ~twice))
        if m.kind in ("copy", "check"):
            again = chosen(m, twice)
            found.append(evolve(again, kind="check", target=owners[again.target]))
    if layout.carried:
        n, base = len(layout.carried), len(plan.sources)
        source = np.arange(base, base + n, dtype=np.int32)
        target = np.array([t for _, t in layout.carried], np.int32)
        numel = np.array([[where.numel] for where, _ in layout.carried], np.int64)
        none, one, zero = np.full(n, -1, np.int32), np.ones((n, 1), np.int64), np.zeros(n, np.int64)
        found.append(Moves("copy", "carried", none, source, target, numel, zero, one, zero, one))
    return tuple(found)


def _place(target: Path, source: Checkpoint) -> Path:
    """The target's absolute path, its folder's links followed. Raises: UcplError E507."""
    if target.name in ("", "..") or (
        target.name.startswith(".") and target.name.endswith((".ucpl-work", ".ucpl-lock"))
    ):
        fail("E507", f"{target} cannot be the name of a target", Label(str(target)))
    parent = target.absolute().parent
    if not parent.is_dir():
        fail("E507", f"{parent} is no folder", Label(str(target)))
    place = parent.resolve() / target.name
    top = source.top.resolve()
    if place == top or top in place.parents or place in top.parents:
        what = "holds" if place in top.parents else "is, or lies in,"
        fail("E507", f"the target {what} the source {top}", Label(str(place)))
    return place


def _refuse_globals(skeleton: Skeleton, allowed: Sequence[str]) -> None:
    unknown = [name for name in skeleton.unsafe_globals if name not in allowed]
    if unknown:
        raise UcplError(
            *(
                Diagnostic("E504", f"the target's pickles would name {name}", (Label(skeleton.folder or "target"),),
                           remedy=codes()["E504"].remedy)
                for name in unknown
            )
        )  # fmt: skip


class _Run:
    """One run of `execute` from the lock to the rename."""

    def __init__(
        self, plan: Plan, source: Checkpoint, skeleton: Skeleton, layout: TargetPlan, places: tuple[Place, ...], rows: Rows,
        share: Share, memory: int, workers: int, counters: Counters, target: Path, progress: Progress | None,
    ) -> None:  # fmt: skip
        self.plan, self.layout, self.rows, self.places = plan, layout, rows, places
        self.share, self.workers, self.counters, self.progress = share, workers, counters, progress
        self.target = target
        self.work = Workplace(target)
        self.budget = Budget(memory)
        self.single = target.suffix in SINGLE and len(layout.files) == 1
        self.texts = {} if self.single else {**skeleton.texts, LAYOUT: plan.layout_text}
        self.sources = SourceFiles(source.root, (p.file for p in places))
        self.files = TargetFiles(self.work.tree, layout.files)
        self.digests = {
            "digest": digest_of_plan(plan),
            "files": digest_of_files(layout.files, self.texts),
            "content": digest_of_sources(self.sources),
            "spec": plan.spec_digest,
            "structure": plan.structure_digest,
        }
        self.journal: Journal | None = None
        self.fragments = Fragments()  # journalled
        self.unverified: tuple[Unverified, ...] = ()
        self.remarks: tuple[str, ...] = ()
        self.keep = False

    def close(self) -> None:
        self.files.close()
        self.sources.close()
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    # ---- ends ----------------------------------------------------------------------------------------------------

    def after(self, error: UcplError) -> UcplError:
        """The error with what became of the work: kept where it can be resumed, else removed."""
        if not self.keep:
            return error
        first = error.diagnostics[0]
        if first.code in _FINAL:
            self.work.clear()
            return error
        note = f"finished parts are kept in {self.work.folder}: the same command with --resume goes on"
        return UcplError(evolve(first, notes=(*first.notes, note)), *error.diagnostics[1:])

    def interrupted(self) -> UcplError:
        entry = codes()["E620"]
        if not self.keep:
            return UcplError(
                Diagnostic(
                    "E620",
                    "interrupted before anything was written",
                    (Label(str(self.target)),),
                    remedy="Run it again.",
                )
            )
        return UcplError(
            Diagnostic(
                "E620",
                f"interrupted: {self.target} is not there yet",
                (Label(str(self.work.folder), "finished parts are kept here"),),
                remedy=entry.remedy,
            )
        )

    # ---- the run ---------------------------------------------------------------------------------------------------

    def go(self, *, resume: bool, force: bool, verify_source: bool) -> Report:
        past = self._past(resume)
        if past is not None and past.publishing is not None and self._is(past.publishing):
            self.work.clear()
            return self._report(done_before=True)
        if past is None:
            self.work.restore()
        exists = os.path.lexists(self.target)
        if exists and past is None and resume and self._is_finished():
            self.work.clear()
            return self._report(done_before=True)
        if exists and not force:
            code = "E506" if resume and past is None else "E500"
            fail(code, f"{self.target} exists", Label(str(self.target)))
        tile = self._tile_of(past)
        tiles = cut_tiles(self.layout.units, tile)
        with self.counters.phase("create"):
            self._begin(past, tile)
        state = _Tiles(tiles, past)
        self.counters.tiles_resumed = int(state.done.sum())
        if past is not None:
            self.fragments.extend(past.fragments)
        with self.counters.phase("move"):
            self._move(state)
        if self.counters.seconds.get("digest"):
            self.counters.seconds["digest"] /= self.workers
        with self.counters.phase("source"):
            self._check_source(verify_source)
        unit_crc = storage_crcs(self.layout, tiles, state.crc)
        known = self._finish(unit_crc)
        with self.counters.phase("fsync"):
            self.files.sync(range(len(self.files.files)), drop=True)
        failpoint("synced")
        with self.counters.phase("read-back"):
            self._read_back(state, known)
        with self.counters.phase("publish"):
            self._write_texts(manifest_of(self.plan, self.digests, self.layout, unit_crc, known, self.texts))
            self._publish(force)
        self.counters.tiles = len(tiles)
        return self._report()

    def _past(self, resume: bool) -> Past | None:
        """What an interrupted run left, if it is to be resumed. Raises: UcplError E602, E503."""
        if not resume:
            return None
        try:
            past = read_journal(self.work.journal)
        except OSError as error:
            cannot_write(self.work.journal, error)
        if past is None or (past.publishing is not None and self._is(past.publishing)):
            return past
        for name, what in (("digest", "plan"), ("content", "source"), ("files", "target's metadata")):
            if past.header.get(name) != self.digests[name]:
                self.work.restore()
                fail("E602", f"the interrupted run into {self.target} had another {what}", Label(str(self.work.folder)))
        return past

    def _is(self, published: tuple[int, int]) -> bool:
        try:
            status = os.stat(self.target)
        except OSError:
            return False
        return (status.st_ino, status.st_dev) == published

    def _is_finished(self) -> bool:
        """Whether the target is what this run would write: by its manifest, and the sizes of its files."""
        try:
            manifest = read_manifest(self.target)
        except (OSError, ValueError):
            return False
        if manifest is None or not isinstance(manifest.get("plan"), dict):
            return False
        if any(manifest["plan"].get(name) != self.digests[name] for name in ("digest", "files", "content")):
            return False
        try:
            return all((self.target / f.path).stat().st_size == f.plan.size for f in self.layout.files)
        except OSError:
            return False

    def _tile_of(self, past: Past | None) -> int:
        if past is None:
            return self.share.tile
        tile = past.header.get("tile")
        if not isinstance(tile, int) or tile <= 0 or tile % 16:
            fail(
                "E602",
                f"the journal of the interrupted run into {self.target} is damaged",
                Label(str(self.work.journal)),
            )
        if tile > self.share.tile:
            fail("E508", f"the interrupted run used tiles of {tile} bytes, there is memory for {self.share.tile}")
        return tile

    def _begin(self, past: Past | None, tile: int) -> None:
        """Files of their final size, durable names, a journal. Raises: UcplError E501, E503."""
        if past is None:
            self.work.clear()
            self._check_room()
            try:
                self.work.tree.mkdir(parents=True)
            except OSError as error:
                cannot_write(self.work.folder, error, resumable=False)
        try:
            written = self.files.create()
            self.counters.add(written=written)
            sync_folders(self.work.folder)
            sync_folder(self.target.parent)
            if past is not None:
                self.journal = Journal(self.work.journal, past.size)
            else:
                names = ("digest", "files", "content")
                self.journal = Journal.begin(
                    self.work.journal, {"tile": tile, **{name: self.digests[name] for name in names}}
                )
                sync_folder(self.work.folder)
        except (OSError, UcplError) as error:
            if past is None:
                self.work.clear()
            if isinstance(error, UcplError):
                raise
            cannot_write(self.work.folder, error, resumable=past is not None)
        self.keep = True
        failpoint("created")

    def _check_room(self) -> None:
        try:
            room = os.statvfs(self.target.parent)
        except OSError as error:
            cannot_write(self.target.parent, error, resumable=False)
        free = room.f_bavail * room.f_frsize
        if self.layout.size > free:
            fail("E501", f"the target needs {self.layout.size} bytes, {free} are free", Label(str(self.target.parent)))

    def _move(self, state: _Tiles) -> None:
        """Assemble, digest and write every tile that is not done. Raises: what a tile raises; finished ones are journalled."""
        files, tiles = self.files, state.tiles
        targets = np.array([u.target for u in self.layout.units], np.int64)
        assembler = Assembler(
            self.rows,
            self.places,
            self.layout.places,
            [self.sources.index[p.file] for p in self.places],
            self.plan.tensors,
        )
        total = int(tiles.size.sum())
        done_bytes = int(tiles.size[state.done].sum())
        queue = Queue(len(tiles), lambda i: bool(state.done[i]))
        lock = threading.Lock()
        finished: list[tuple[int, int, int, int]] = []
        fresh = Fragments()

        def work(stop: threading.Event) -> None:
            nonlocal done_bytes
            with Workspace(self.share, self.budget) as space:
                reader = Reader(self.sources)
                while not stop.is_set() and (i := queue.take()) is not None:
                    target = int(targets[tiles.unit[i]])
                    itemsize = self.layout.places[target].itemsize
                    low, size = int(tiles.low[i]), int(tiles.size[i])
                    bounds = (low // itemsize, (low + size) // itemsize)
                    try:
                        crc = assembler.assemble(target, *bounds, reader, space)
                    except UcplError as error:
                        raise self._cause(error, target, bounds, space) from None
                    view = space.tile_view[:size]
                    begin = time.perf_counter()
                    if crc is None:
                        crc = zlib.crc32(view)
                    xxh3 = xxhash.xxh3_64_intdigest(view)
                    digest = reader.digest + time.perf_counter() - begin
                    files.write(int(tiles.file[i]), view, int(tiles.position[i]))
                    failpoint("tile-written")
                    with lock:
                        finished.append((i, size, crc, xxh3))
                        fresh.extend(reader.fragments)
                        done_bytes += size
                    self.counters.add(read=reader.bytes_read, written=size, digest=digest)
                    reader.fragments.clear()
                    reader.bytes_read, reader.digest = 0, 0.0

        last = [time.monotonic(), done_bytes]

        def flush() -> None:
            nonlocal finished, fresh
            with lock:
                records, runs = finished, fresh
                finished, fresh = [], Fragments()
            last[:] = [time.monotonic(), done_bytes]
            if not records:
                return
            files.sync(sorted({int(tiles.file[r[0]]) for r in records}))
            failpoint("journal-before")
            assert self.journal is not None
            try:
                self.journal.append(records, runs)
            except OSError as error:
                cannot_write(self.work.journal, error)
            for i, _, crc, xxh3 in records:
                state.done[i], state.crc[i], state.xxh3[i] = True, crc, xxh3
            self.fragments.extend(runs)

        def meanwhile() -> None:
            if self.progress is not None:
                self.progress(done_bytes, total)
            if time.monotonic() - last[0] >= SYNC_SECONDS or done_bytes - last[1] >= SYNC_BYTES:
                flush()

        try:
            Crew(self.workers, work).run(meanwhile)
        finally:
            flush()
        if self.progress is not None:
            self.progress(done_bytes, total)

    def _cause(self, error: UcplError, target: int, bounds: tuple[int, int], space: Workspace) -> UcplError:
        """The damaged members of the source that a tile was made of, where its values are what fails; else the error."""
        if error.diagnostics[0].code not in ("E605", "E613"):
            return error
        within = self.rows.within(target, *bounds)
        used = np.unique(self.rows.source[within.start : within.stop]).tolist()
        members = members_of((self.places[s] for s in used), self.sources)
        found = damage_of(members, Inspection(self.sources, space.tile, self.counters))
        return UcplError(*found) if found else error

    def _check_source(self, verify_source: bool) -> None:
        """Members that were touched against their CRCs, padding against zero. Raises: UcplError E611, E612, E614."""
        self.sources.check_unchanged()
        touched = np.unique(self.rows.source)
        members = members_of((self.places[s] for s in touched.tolist()), self.sources)
        blanks = blanks_of(self.plan.sources, self.places, self.rows, self.sources)
        left = allowance(self.counters.bytes_needed, everything=verify_source)
        with Workspace(self.share, self.budget) as space:
            how = Inspection(self.sources, space.tile, self.counters, left)
            self.unverified = check_members(members, self.fragments, how)
            findings, self.remarks = check_blanks(blanks, how, "E614")
        if findings:
            raise UcplError(*findings[:20])

    def _finish(self, unit_crc: np.ndarray) -> list[list[tuple[int, bytes]]]:
        """Patch what depends on CRCs. Returns, for each file, every byte that is no payload."""
        crcs: list[dict[str, int]] = [{} for _ in self.layout.files]
        for unit, crc in zip(self.layout.units, unit_crc.tolist(), strict=True):
            crcs[unit.file][unit.storage] = crc
        known = []
        for i, file in enumerate(self.layout.files):
            patches = file.plan.finish(crcs[i])
            for position, data in patches:
                self.files.write(i, memoryview(data), position)
                self.counters.add(written=len(data))
            known.append([*file.plan.fixed, *patches])
        return known

    def _read_back(self, state: _Tiles, known: list[list[tuple[int, bytes]]]) -> None:
        """Everything once more, from the disk. Raises: UcplError E505."""
        tiles, files = state.tiles, self.files
        queue = Queue(len(tiles))

        def differs(file: int, position: int, size: int) -> None:
            path = files.path(file)
            fail("E505", f"{path}: bytes {position} to {position + size} are not what was written", Label(str(path)))

        def work(stop: threading.Event) -> None:
            with Workspace(self.share, self.budget) as space:
                while not stop.is_set() and (i := queue.take()) is not None:
                    size, file, position = int(tiles.size[i]), int(tiles.file[i]), int(tiles.position[i])
                    view = space.tile_view[:size]
                    if files.read(file, view, position) != size or xxhash.xxh3_64_intdigest(view) != int(state.xxh3[i]):
                        differs(file, position, size)
                    self.counters.add(read_back=size)

        Crew(self.workers, work).run()
        for file, parts in enumerate(known):
            for position, data in parts:
                found = bytearray(len(data))
                if files.read(file, memoryview(found), position) != len(data) or found != data:
                    differs(file, position, len(data))
                self.counters.add(read_back=len(data))

    def _write_texts(self, manifest: str) -> None:
        """Small files, synced. Raises: UcplError E503."""
        texts = self.texts if self.single else {**self.texts, MANIFEST: manifest}
        path = self.work.tree
        try:
            if not self.single:
                (self.work.tree / FOLDER).mkdir(exist_ok=True)
            for name, text in texts.items():
                path = self.work.tree / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb") as file:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                self.counters.add(written=len(text.encode()))
        except OSError as error:
            cannot_write(path, error)

    def _publish(self, force: bool) -> None:
        self.sources.check_unchanged()
        try:
            sync_folders(self.work.folder)
        except OSError as error:
            cannot_write(self.work.folder, error)
        thing = self.work.tree / self.layout.files[0].path if self.single else self.work.tree
        assert self.journal is not None
        self.files.close()
        self.work.publish(thing, self.journal, force)
        self.keep = False
        self.work.clear()

    def _report(self, *, done_before: bool = False) -> Report:
        c = self.counters
        return Report(
            str(self.target), done_before, c.bytes_needed, c.bytes_read, c.bytes_read_verify, c.bytes_written,
            self.layout.size, c.bytes_read_back, self.budget.live_max, c.source_bytes_checked, c.source_bytes_unverified,
            c.tiles, c.tiles_resumed, len(self.layout.files), dict(c.seconds), c.source_bytes_without_crc, self.unverified,
            self.remarks,
        )  # fmt: skip


@frozen(eq=False, init=False)
class _Tiles:
    """Tiles and what is known of those that are done: digests of their bytes."""

    tiles: Tiles
    done: np.ndarray
    crc: np.ndarray
    xxh3: np.ndarray

    def __init__(self, tiles: Tiles, past: Past | None) -> None:
        n = len(tiles)
        done, crc, xxh3 = np.zeros(n, np.bool_), np.zeros(n, np.uint32), np.zeros(n, np.uint64)
        if past is not None:
            fits = past.tile < n
            done[past.tile[fits]] = True
            crc[past.tile[fits]], xxh3[past.tile[fits]] = past.tile_crc[fits], past.tile_xxh3[fits]
        self.__attrs_init__(tiles, done, crc, xxh3)
