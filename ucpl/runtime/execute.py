"""Run a plan: read, write, read back, publish.

    fit → skeleton → layout → rows, tiles → lock → files → MOVE → source checks → finish
        → sync → READ BACK → manifest → publish

The plan decides everything that it can; nothing is added here. The source is only read. The two steps in capitals have
modules of their own (moving, read_back); `resume` reads the remains of an earlier run. If ranks run a plan together,
all of them do these two steps, each for its share of tiles, and the leader does everything else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ucpl.errors import Diagnostic, Label, UcplError, called, fail
from ucpl.errors import catalogue as codes
from ucpl.extents import as_filed
from ucpl.files.checkpoint import Checkpoint, Framework, Skeleton
from ucpl.planning import BoundFiles, Plan, bound
from ucpl.records import frozen
from ucpl.runtime import rank_protocol, resume
from ucpl.runtime.assemble import Assembler
from ucpl.runtime.batches import bands_of
from ucpl.runtime.buffers import Budget, Workspace, share_of
from ucpl.runtime.counters import Counters, Report, Unverified
from ucpl.runtime.disk import at_once, check_own, disk, make_file, make_folders, sync_folder, sync_folders
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.fills import Fills, bind_fills, check_covered
from ucpl.runtime.integrity import with_sums
from ucpl.runtime.journal import Journal, Past
from ucpl.runtime.linux import network_remark
from ucpl.runtime.manifest import FOLDER, LAYOUT, MANIFEST, ManifestContents, manifest_of, storage_crcs
from ucpl.runtime.moving import Clones, Mover
from ucpl.runtime.options import DataPlane, RunOptions
from ucpl.runtime.padding import blanks_of
from ucpl.runtime.process_group import ALONE, ProcessGroup
from ucpl.runtime.publish import Lock, Workplace, limit_modes
from ucpl.runtime.read_back import ReadBack
from ucpl.runtime.reading import Fragments
from ucpl.runtime.resume import IDENTITY, digest_of_files, digest_of_plan, digest_of_sources
from ucpl.runtime.rows import Place, Rows, bind_rows, fit, views_of
from ucpl.runtime.source_checks import Inspection, allowance, check_blanks, check_members, members_of
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import Parts, TargetFiles, TargetPlan, cannot_write, lay_out
from ucpl.runtime.tiles import DoneTiles, Tiles, cut_tiles
from ucpl.runtime.up_to_date import Made, is_same, patches_of
from ucpl.storage.joined import parts_of
from ucpl.storage.resolve_url import get_upload_target
from ucpl.tables import each

if TYPE_CHECKING:
    from ucpl.runtime.shipping import Shipping

__all__ = ["TargetSizes", "execute", "rehearse"]

SINGLE = (".pt", ".pth", ".bin")  # a target of this name is one file
FROM_MEMORY = "pages cannot be dropped from memory here: the read-back may have come from memory instead of the disk"
OF_A_JOB = "if a rank is gone, torchrun ends all ranks: it reports the first one and its exit status"
_BLOCK = 4096  # bytes
_OF_A_RUN = 8  # files and folders that a run makes next to those of a target: its lock, journal, manifest
_FINAL = ("E505", "E605", "E607", "E611", "E612", "E613", "E614")  # `--resume` cannot continue from these


def execute(
    plan: Plan,
    source: Checkpoint,
    framework: Framework,
    target: Path,
    options: RunOptions | None = None,
    team: ProcessGroup = ALONE,
) -> Report:
    """Write `target` from `source`, exactly as the plan says.

    team: the processes that do so together, all of them call this with the same plan and options.

    The target appears completely or not at all. Raises: UcplError E500-E508 (the target), E600-E607 (the plan does not
    fit), E610-E614 (the source), E620 (interrupted; the hidden folder stays for `resume`), E621-E623 (the team).
    """
    options = options or RunOptions()
    counters = Counters()
    place = _place(Path(target), source)
    with counters.phase("plan"):
        share = share_of(options.memory, options.workers)
        bounded, texts = _bind(plan, source, framework, options)
        counters.bytes_needed = bounded.rows.bytes_needed
    plane = DataPlane(options.workers, share, Budget(options.memory), counters)
    run = _Run(bounded, texts, (options, team), plane, place)
    del bounded  # the run drops it before it opens the target
    lock = Lock(place)
    try:
        with lock if run.leads else nullcontext():
            try:
                report = run.go()
            except (UcplError, OSError) as error:
                run.close()
                raise run.after(error if isinstance(error, UcplError) else run.refused(error)) from error
            except KeyboardInterrupt:
                run.close()
                raise run.interrupted() from None
            finally:
                run.close()
    except KeyboardInterrupt:
        raise run.interrupted() from None
    said = (network_remark(place), lock.lacking, "" if run.files.forgets else FROM_MEMORY, lock.left)
    return evolve(report, remarks=(*report.remarks, *filter(None, said)))


@frozen
class TargetSizes:
    """The sizes of a target that is not written yet."""

    size: int
    files: int
    free: int  # bytes of its disk; of a store, 0


def is_single(target: Path, files: Sequence[str]) -> bool:
    """True if a target is one torch file, not a folder.

    A folder with one file for a loader, such as a step's folder or a safetensors file, stays a folder under any name.
    """
    inner = PurePath(files[0]) if len(files) == 1 else None
    is_torch = inner is not None and len(inner.parts) == 1 and inner.suffix != ".safetensors"
    return is_torch and target.suffix in SINGLE


def rehearse(
    plan: Plan, source: Checkpoint, framework: Framework, target: Path, options: RunOptions | None = None
) -> TargetSizes:
    """Do all that `execute` does before it writes.

    A missing parent is one that a run makes. Raises: UcplError as `execute`: E501, E503 to E508, E600 to E607.
    """
    options = options or RunOptions()
    there = target.absolute()
    while not os.path.lexists(there.parent) and there.parent != there:
        there = there.parent
    _place(Path(target), source, parent=there.parent)
    share_of(options.memory, options.workers)
    bounded, _ = _bind(plan, source, framework, options)
    size, files = bounded.layout.size, len(bounded.layout.files)
    if get_upload_target(Path(target)) is not None:
        return TargetSizes(size, files, 0)
    if not os.access(there.parent, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(there.parent).f_flag & os.ST_RDONLY
        why = errno.EROFS if is_read_only else errno.EACCES
        cannot_write(there.parent, OSError(why, os.strerror(why)), resumable=False)
    return TargetSizes(size, files, _check_room(bounded.layout, there))


def _bind(plan: Plan, source: Checkpoint, framework: Framework, options: RunOptions) -> tuple[_Bound, dict[str, str]]:
    """Bind a plan to the source's files, target's files and texts."""
    sources = fit(plan.sources, source.extents)
    skeleton = _skeleton(plan, source, framework, options.tag)
    if source.container is not None:
        from ucpl.formats.folders.fates import with_companions  # most sources have no such folder

        skeleton = with_companions(skeleton, source, plan.target)
    remarks = _check_globals(skeleton, options)
    layout = lay_out(skeleton, plan.targets)
    sources += tuple(where for where, _ in layout.carried)
    found = bound(plan, _files(sources, layout, len(plan.sources)))
    rows, fills = bind_rows(found, sources, layout.places), bind_fills(found, layout.places)
    check_covered(rows, fills, layout.owners, layout.places)
    made = frozenset(c.extent.file for file in skeleton.files for c in file.carried if c.is_made)
    return _Bound(plan, source, layout, sources, rows, fills, made, remarks), skeleton.texts


def _skeleton(plan: Plan, source: Checkpoint, framework: Framework, tag: str | None) -> Skeleton:
    """The target's files, with tensors in the order of files.

    The tensors' numbers are the plan's.
    """
    filed = plan.target_shelves.filed
    if filed is None:
        return framework.skeleton(plan.target, as_filed(plan.targets), source, tag)
    place = np.argsort(filed).tolist()
    targets = [plan.targets[n] for n in filed.tolist()]
    ordered = [t if t.shares is None else evolve(t, shares=place[t.shares]) for t in targets]
    made = framework.skeleton(plan.target, as_filed(ordered), source, tag)
    files = (
        evolve(file, storage_of={int(filed[n]): storage for n, storage in file.storage_of.items()})
        for file in made.files
    )
    return evolve(made, files=tuple(files))


def _files(sources: Sequence[Place], layout: TargetPlan, planned: int) -> BoundFiles:
    """Facts of the files on the plan's tensors.

    They are the tensors that share bytes, and those that are not in the plan.
    """
    carried = tuple(evolve(box, source=planned + i) for i, (_, box) in enumerate(layout.carried))
    return BoundFiles(np.array(layout.owners, np.int64), views_of(sources), carried)


def _place(target: Path, source: Checkpoint, parent: Path | None = None) -> Path:
    """The target's absolute path, its folder's links followed. Raises: UcplError E503, E507.

    parent: the nearest folder that is there, of a target whose own folder is made later.
    """
    if target.name in ("", "..") or (
        target.name.startswith(".") and target.name.endswith((".ucpl-work", ".ucpl-lock", ".ucpl-made"))
    ):
        fail("E507", f"{target} cannot be the name of a target", Label(str(target)))
    rest = target.absolute().relative_to(parent) if parent is not None else Path(target.name)
    parent = parent or target.absolute().parent
    try:
        is_folder = parent.is_dir()
        place = Path(os.path.realpath(parent), rest)
        tops = [path.resolve() for path in parts_of(source.top)]
    except OSError as error:
        cannot_write(parent, error, resumable=False)
    if not is_folder:
        fail("E507", f"{parent} is no folder", Label(str(target)))
    if get_upload_target(place) is not None:  # local files are at the path of their URL
        place, tops, within = Path(called(str(place))), [Path(called(str(top))) for top in tops], place
    else:
        within = place
    for top in (top for top in tops if place == top or top in place.parents or place in top.parents):
        what = "holds" if place in top.parents else "is the same as, or inside,"
        remedy = "choose a DST outside of the source"
        fail("E507", f"the target {what} the source {top}", Label(str(place)), remedy=remedy)
    return within


def _check_globals(skeleton: Skeleton, options: RunOptions) -> tuple[str, ...]:
    """Remarks on classes that are allowed and in no pickle.

    Raises: UcplError E504.
    """
    unknown = [name for name in skeleton.unsafe_globals if name not in options.allow_globals]
    if unknown:
        raise UcplError(
            *(
                Diagnostic("E504", f"the target's pickles would name {name}", (Label(skeleton.folder or "target"),),
                           remedy=codes()["E504"].remedy, about=name)
                for name in unknown
            )
        )  # fmt: skip
    unused = [name for name in options.allow_globals if name not in skeleton.unsafe_globals]
    return tuple(f"--allow-global {name} has no effect: the target's pickles name no such class" for name in unused)


def _check_room(layout: TargetPlan, target: Path) -> int:
    """The free bytes of the target's disk. Raises: UcplError E501, E503."""
    try:
        room = os.statvfs(target.parent)
    except OSError as error:
        cannot_write(target.parent, error, resumable=False)
    free = room.f_bavail * room.f_frsize
    block = min(room.f_frsize, _BLOCK)  # a file takes complete blocks; larger ones are those of a store's own cache
    blocks = sum(-(-file.plan.size // block) for file in layout.files) + _OF_A_RUN
    if layout.size > free or blocks * block > free:
        what = f"the target needs {max(layout.size, blocks * block)} bytes, {free} are free"
        fail("E501", what, Label(str(target.parent)))
    if room.f_files and room.f_favail < len(layout.files) + _OF_A_RUN:
        needed = len(layout.files) + _OF_A_RUN
        what = f"{target.parent} cannot be written: {needed} files are needed, {room.f_favail} can be made"
        fail("E503", what, Label(str(target.parent)), remedy="Remove files, or choose a DST on another disk.")
    return free


def _shipping(target: Path, layout: TargetPlan, single: bool) -> Shipping | None:
    """Shipping of a target into a store; None for a local target."""
    place = get_upload_target(target)
    if place is None:
        return None
    from ucpl.runtime.shipping import Shipping

    return Shipping(place, layout.files, single)


@frozen(eq=False)
class _Bound:
    """A plan bound to the bytes of source and target."""

    plan: Plan
    source: Checkpoint
    layout: TargetPlan
    places: tuple[Place, ...]  # of the source: the plan's, then the carried
    rows: Rows
    fills: Fills
    made: frozenset[str]  # files of the source that were made for this very target
    remarks: tuple[str, ...]


class _Run:
    """One run of `execute` from the lock to the rename."""

    def __init__(
        self, bound: _Bound, texts: dict[str, str], how: tuple[RunOptions, ProcessGroup], plane: DataPlane, target: Path
    ) -> None:
        self.plan, self.layout, self.rows, self.places = bound.plan, bound.layout, bound.rows, bound.places
        self.fills = bound.fills
        (self.options, self.team), self.plane, self.counters = how, plane, plane.counters
        self.leads = self.team.rank == 0
        self.look = self.team.look if self.team.size > 1 else None  # called from time to time during long steps
        self.target = target
        self.work = Workplace(target)
        self.single = is_single(target, [file.path for file in self.layout.files])
        layout = "" if self.single else self.plan.layout_text  # printing it takes long: a line for each tensor
        own = {LAYOUT: layout} if layout else {}
        self.texts = {} if self.single else {**texts, **own}
        self.sources = SourceFiles(bound.source.root, (p.file for p in self.places), bound.source.opened)
        self.files = TargetFiles(self.work.tree, self.layout.files)
        self.digests = {
            "digest": digest_of_plan(self.plan, layout=not self.single),
            "files": digest_of_files(self.layout.files, self.texts),
            "content": digest_of_sources(self.sources, bound.made),
            "spec": self.plan.spec_digest,
            "structure": self.plan.structure_digest,
        }
        self.journal: Journal | None = None
        self.fragments = Fragments()  # journalled
        self.unverified: tuple[Unverified, ...] = ()
        self.remarks = bound.remarks
        self.keep = False
        self.shipping = _shipping(target, self.layout, self.single)

    def close(self) -> None:
        """Close all that is open.

        Written bytes are durable or do not count: an error here adds nothing.
        """
        for opened in (self.files, self.sources, self.journal):
            if opened is not None:
                with suppress(OSError):
                    opened.close()
        self.journal = None

    # ---- ends ----------------------------------------------------------------------------------------------------

    def after(self, error: UcplError) -> UcplError:
        """Error with the state of the work: kept or removed."""
        if self.shipping is not None:
            self.work.clear()
            return self.shipping.undo(error, alone=self.team.size == 1)
        if not self.keep:
            return error
        first = error.diagnostics[0]
        if first.code in _FINAL and self.team.size == 1:  # else others may be writing there
            self.work.clear()
            return error
        is_there = self.team.size > 1 and resume.was_published(self.work, self.digests, self.layout)
        kept = f"finished parts are kept in {self.work.folder}: to continue, repeat the command with --resume"
        note = f"{self.target} is complete: it was published before" if is_there else kept
        return UcplError(evolve(first, notes=(*first.notes, note)), *error.diagnostics[1:])

    def refused(self, error: OSError) -> UcplError:
        """The error of a call that belongs to no single file.

        Examples: to look for a name, or to close written files.
        """
        named = Path(os.fsdecode(error.filename)) if error.filename is not None else self.target
        try:
            cannot_write(named, error, resumable=self.keep)
        except UcplError as said:
            return said

    def interrupted(self) -> UcplError:
        if self.shipping is not None:
            place = Label(str(self.target))
            said = Diagnostic("E620", f"interrupted: {self.target} is not there", (place,), remedy="Run it again.")
            return self.shipping.undo(UcplError(said), alone=self.team.size == 1)
        if not self.keep:
            place, what, remedy = Label(str(self.target)), "before anything was written", "Run it again."
        else:
            place = Label(str(self.work.folder), "finished parts are kept here")
            what, remedy = f"{self.target} is not there yet", codes()["E620"].remedy
        colon = "" if not self.keep else ":"
        notes = (OF_A_JOB,) if self.team.size > 1 else ()
        return UcplError(Diagnostic("E620", f"interrupted{colon} {what}", (place,), notes=notes, remedy=remedy))

    # ---- the run ---------------------------------------------------------------------------------------------------

    def go(self) -> Report:
        agreed = rank_protocol.agree(
            self.team, {**self.digests, "memory": self.options.memory, "workers": self.plane.workers}
        )
        self.digests["content"] = agreed  # of the files as the one that leads sees them
        failpoint("agreed")
        return self._lead() if self.leads else self._follow()

    def _follow(self) -> Report:
        """Move a share of the tiles and read it back."""
        header = rank_protocol.order_of(self.team)
        if header is None:
            return _report_of(self, done_before=True)
        if self.shipping is not None:  # files for a store grow in this process's own place
            self.journal = self._begin(None, header)
            tile, band = header["tile"], header["band"]
            assert isinstance(tile, int) and isinstance(band, int)
            self._fill(DoneTiles.of(self._tiles((tile, band)), None))
            return _report_of(self)
        past = rank_protocol.check_same_run(resume.journal_of(self.work), header, self.team, self.work)
        self.keep = True
        self.journal = rank_protocol.journal_at(self.work.journal_of(self.team.rank), header)
        self._fill(DoneTiles.of(self._tiles(resume.cut_of(past, self.plane.share, self.work)), past))
        return _report_of(self)

    def _lead(self) -> Report:
        if self.shipping is not None and self.options.resume and self.shipping.is_finished(self.digests):
            return self._done_before()
        past = self._past()
        if past is not None and resume.is_published(past, self.target):
            self.work.clear()
            return self._done_before()
        if past is None:
            self.work.restore()
        if os.path.lexists(self.target):
            if past is None and self.options.resume and self._is_finished():
                self.work.clear()
                return self._done_before()
            if not self.options.force:
                code = "E506" if self.options.resume and past is None else "E500"
                fail(code, f"{self.target} exists", Label(str(self.target)))
        share = self.plane.share
        cut = (share.tile, share.band) if past is None else resume.cut_of(past, share, self.work)
        tiles = self._tiles(cut)
        header = self._header(cut) if past is None else past.header
        with self.counters.phase("create"):
            self.journal = self._begin(past, header)
        rank_protocol.give_order(self.team, header)
        known = DoneTiles.of(tiles, past)
        self.counters.tiles, self.counters.tiles_resumed = len(tiles), int(known.done.sum())
        if past is not None:
            self.fragments.extend(past.fragments)
        self._fill(known)
        return _report_of(self)

    def _done_before(self) -> Report:
        rank_protocol.give_order(self.team, None)
        return _report_of(self, done_before=True)

    def _tiles(self, cut: tuple[int, int]) -> Tiles:
        bands = bands_of(self.rows, (self.places, self.layout.places), self.layout.units, *cut)
        return cut_tiles(self.layout.units, cut[0], bands)

    def _past(self) -> Past | None:
        """Journal of an interrupted run that is to be resumed.

        Raises: UcplError E602, E503.
        """
        if not self.options.resume:
            return None
        past = resume.journal_of(self.work)
        if past is None:
            return None
        other = resume.is_other_run(past, self.digests)
        if not other:
            return past
        if resume.is_published(past, self.target):  # that run is done: its remains are of no use
            self.work.clear()
            return None
        self.work.restore()
        fail("E602", f"the interrupted run into {self.target} had another {other}", Label(str(self.work.folder)))

    def _is_finished(self) -> bool:
        """True if the target is the result of this run.

        Its manifest decides, or, without a manifest, every byte.
        """
        if not self.single:
            return resume.is_finished(self.target, {name: self.digests[name] for name in IDENTITY}, self.layout)
        (file,) = self.layout.files
        there = TargetFiles(self.target.parent, [evolve(file, path=self.target.name)])
        try:
            tiles = cut_tiles(self.layout.units, self.plane.share.tile)
            return is_same(there, self.layout, tiles, Made(self.assembler(), self.sources), self.plane)
        except UcplError as error:
            if error.diagnostics[0].code != "E503":  # it cannot be opened: it is none of ours
                raise
            return False
        finally:
            there.close()

    def _begin(self, past: Past | None, header: dict[str, object]) -> Journal:
        """Make files of their final size, durable names, and a journal.

        Raises: UcplError E501, E503.
        """
        if past is None:
            self.work.clear()
            if self.shipping is None:  # else it grows here a few files at a time
                _check_room(self.layout, self.target)
        journal: Journal | None = None
        try:
            if past is None:
                disk().make_folder(self.work.folder, fresh=True)
            check_own(self.work.folder)
            make_folders(self.target.parent, self.work.tree)
            if self.shipping is None:
                self.counters.add(written=self.files.create())
            if past is not None:
                journal = Journal(self.work.journal, past.size)
            else:
                journal = Journal.begin(self.work.journal, header)
            sync_folders(self.work.folder)
            sync_folder(self.target.parent)
        except (OSError, UcplError) as error:
            if journal is not None:
                journal.close()
            if past is None:
                self.work.clear()
            if isinstance(error, UcplError):
                raise
            cannot_write(self.work.folder, error, resumable=past is not None)
        self.keep = True
        failpoint("created")
        return journal

    def _header(self, cut: tuple[int, int]) -> dict[str, object]:
        """Identity of a run and a mark of its own.

        The mark distinguishes its journals from those of other runs.
        """
        identity = {name: self.digests[name] for name in IDENTITY}
        return {"tile": cut[0], "band": cut[1], **identity, "run": os.urandom(8).hex()}

    def assembler(self) -> Assembler:
        file_of = [self.sources.index[p.file] for p in self.places]
        return Assembler(self.rows, self.fills, self.places, self.layout.places, file_of, self.plan.tensors)

    def _fill(self, known: DoneTiles) -> None:
        """All steps from an empty tree to the rename."""
        assert self.journal is not None
        if self.shipping is not None:
            return self._ship(known)
        self.team.all("ready")  # all have read the earlier journals; these grow from here on
        again = ReadBack(self.files, known, self.plane) if self.options.read_back else None
        if again is not None:
            for i, parts in enumerate(patches_of(self.layout, np.zeros(len(self.layout.units), np.uint32))):
                again.late(i, parts)
        clones = Clones(self.sources, self.files) if self.options.reflink and not self.sources.is_remote else None
        Mover(
            self.plane, self.layout, self.assembler(), self.sources, self.files, self.journal, known,
            self.fragments, self.options.progress, again, clones, self.team,
        ).move()  # fmt: skip
        if self.counters.seconds.get("digest"):
            self.counters.seconds["digest"] /= self.plane.workers
        mine = rank_protocol.share_of_done(self.team, known)
        with rank_protocol.waiting(self.team, self.counters):
            self.team.all("moved")
        failpoint("moved")
        if self.leads:
            self._finish_all(known, again, mine)
        else:
            self.team.all("synced")
            if again is not None:
                self.files.sync(sorted(set(each(known.tiles.file[mine]))), drop=True, meanwhile=self.look)
                again.rest((), mine, self.look)
            self.counted()
        self.remarks += rank_protocol.published(self.team, self.target)

    def counted(self) -> None:
        """Counts of this process; for the leader, of all processes."""
        self.counters.bytes_rebuilt = self.sources.bytes_rebuilt
        rank_protocol.counted(self.team, self.counters)

    def _ship(self, known: DoneTiles) -> None:
        from ucpl.runtime.shipping import ship  # most targets are local

        assert self.shipping is not None
        ship(self, self.shipping, known)
        self.keep = False
        self.work.clear()
        self.remarks += rank_protocol.published(self.team, self.target)

    def _finish_all(self, known: DoneTiles, again: ReadBack | None, mine: NDArray[np.bool_]) -> None:
        """All steps from the last tile to the rename.

        mine: tiles that this process reads back.
        """
        if self.team.size > 1:
            self._take_over(known)
        with self.counters.phase("source"):
            self.check_source()
        unit_crc = storage_crcs(self.layout, known.tiles, known.crc)
        patches = patches_of(self.layout, unit_crc)
        beside = self._finish(patches)
        with self.counters.phase("fsync"):
            self.files.sync(range(len(self.files.files)), drop=again is not None, meanwhile=self.look)
        failpoint("synced")
        with rank_protocol.waiting(self.team, self.counters):
            self.team.all("synced")
        if again is not None:
            with self.counters.phase("read-back"):
                again.rest(beside, mine, self.look)
        self.counted()
        with self.counters.phase("publish"):
            self._complete_texts()
            contents = ManifestContents(self.layout, unit_crc, beside, self.texts)
            self._write_texts({} if self.single else {MANIFEST: manifest_of(self.plan, self.digests, contents)})
            del contents, beside, patches
            self._publish()

    def _take_over(self, known: DoneTiles) -> None:
        """Take over the others' journals, which are durable as they are.

        Raises: UcplError E503.
        """
        past = resume.journal_of(self.work)
        if past is None:
            fail("E503", f"{self.work.journal} is gone while it was written", Label(str(self.work.journal)))
        known.take(past)
        self.fragments = past.fragments

    def check_source(self) -> None:
        """Check members that were touched against their CRCs, padding against zero.

        Raises: UcplError E611, E612, E614.
        """
        self.sources.check_unchanged()
        members = members_of((self.places[s] for s in each(self.rows.source)), self.sources)
        blanks = blanks_of(self.plan.sources, self.places, self.rows, self.sources)
        left = allowance(self.counters.bytes_needed, everything=self.options.verify_source)
        with Workspace(self.plane.share, self.plane.budget) as space:
            how = Inspection(self.sources, space.tile, self.counters, left, self.team.look)
            self.unverified = check_members(members, self.fragments, how)
            findings, remarks = check_blanks(blanks, how, "E614")
        self.remarks += remarks
        if findings:
            raise UcplError(*findings[:20])

    def _finish(self, patches: Sequence[Parts]) -> list[Parts]:
        """Patch bytes that depend on CRCs.

        Returns, for each file, every byte that is no payload.
        """
        for i, parts in enumerate(patches):
            self.counters.add(written=self.files.write_parts(i, parts))
        return [[*file.plan.fixed, *parts] for file, parts in zip(self.layout.files, patches, strict=True)]

    def _complete_texts(self) -> None:
        """Fill in the sums of written files. Raises: UcplError E503."""
        files = [file.path for file in self.layout.files]
        try:
            with Workspace(self.plane.share, self.plane.budget) as space:
                self.texts = with_sums(self.work.tree, self.texts, files, space.tile_view)
        except OSError as error:
            cannot_write(self.work.tree, error)

    def _write_texts(self, manifest: dict[str, str]) -> None:
        """Small files, synced. Raises: UcplError E503."""
        texts = self.texts | manifest
        contents = {self.work.tree / name: text.encode() for name, text in texts.items()}
        path = self.work.tree

        def make(path: Path) -> None:
            try:
                make_file(path, contents[path])
            except OSError as error:
                cannot_write(path, error)

        try:
            if not self.single:
                make_folders(self.work.tree, self.work.tree / FOLDER)
            for path in contents:
                make_folders(self.work.tree, path.parent)
            at_once(make, [*contents])
            self.counters.add(written=sum(map(len, contents.values())))
            names = (*(file.path for file in self.layout.files), *self.texts)
            limit_modes(self.work.tree, names, self.sources.root, self.sources.files)
        except OSError as error:
            cannot_write(path, error)

    def _publish(self) -> None:
        self.sources.check_unchanged()
        try:
            sync_folders(self.work.folder)
        except OSError as error:
            cannot_write(self.work.folder, error)
        thing = self.work.tree / self.layout.files[0].path if self.single else self.work.tree
        assert self.journal is not None
        self._drop_records()
        if self.options.look is not None:
            try:
                self.options.look(thing)
            except UcplError:  # the same would come of it once more
                self.keep = False
                self.work.clear()
                raise
        self.work.publish(thing, self.journal, self.options.force)
        self.keep = False
        self.work.clear()

    def _drop_records(self) -> None:
        """Close the files, and drop all records of single tensors.

        To open a target takes as much memory again.
        """
        self.files.close()
        self.layout = self.layout.bare()
        self.files.files = self.layout.files
        del self.rows, self.places, self.fills


def _report_of(run: _Run, *, done_before: bool = False) -> Report:
    c = run.counters
    return Report(
        target=called(str(run.target)),
        done_before=done_before,
        bytes_needed=c.bytes_needed,
        bytes_read=c.bytes_read,
        bytes_received=c.bytes_received,
        bytes_read_verify=c.bytes_read_verify,
        bytes_rebuilt=c.bytes_rebuilt,
        bytes_written=c.bytes_written,
        bytes_cloned=c.bytes_cloned,
        bytes_target=run.layout.size,
        bytes_read_back=c.bytes_read_back,
        bytes_live_max=run.plane.budget.live_max,
        source_bytes_checked=c.source_bytes_checked,
        source_bytes_unverified=c.source_bytes_unverified,
        tiles=0 if done_before else c.tiles,
        tiles_resumed=c.tiles_resumed,
        files=len(run.layout.files),
        seconds=dict(c.seconds),
        source_bytes_without_crc=c.source_bytes_without_crc,
        unverified=run.unverified,
        remarks=run.remarks,
    )
