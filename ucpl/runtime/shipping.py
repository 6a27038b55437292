"""Target in a store: uploaded files, completed by the manifest.


    mark the run as unfinished → [files grow here → upload → read back → removed here] ... → texts → manifest

Objects cannot be renamed, so no single step makes a folder of them appear. A reader goes by the manifest, which is
written last; until then `ucpl/unfinished.json` marks the target as incomplete. A single file needs neither: an object
appears completely or not at all.

Ranks of a job send files each: neighbours, of about equal bytes. The leader marks the run as unfinished, and writes
texts and manifest once all have sent their files and the CRCs of their tiles.

Not here: moving data (moving), and requests (remotes).
"""

from __future__ import annotations

import json
import os
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import numpy as np
from attrs import evolve, field
from numpy.typing import NDArray

from ucpl.errors import Label, UcplError, fail
from ucpl.planning import Plan
from ucpl.records import define
from ucpl.runtime.assemble import Assembler
from ucpl.runtime.counters import Counters
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.integrity import is_open
from ucpl.runtime.journal import Journal
from ucpl.runtime.manifest import MANIFEST, ManifestContents, manifest_of, storage_crcs
from ucpl.runtime.moving import Mover
from ucpl.runtime.options import DataPlane, Progress, RunOptions
from ucpl.runtime.process_group import ProcessGroup, Within, shares
from ucpl.runtime.rank_protocol import waiting
from ucpl.runtime.read_back import ReadBack
from ucpl.runtime.reading import Fragments
from ucpl.runtime.resume import IDENTITY
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import Parts, TargetFile, TargetFiles, TargetPlan
from ucpl.runtime.tiles import DoneTiles
from ucpl.runtime.up_to_date import patches_of
from ucpl.runtime.worker_pool import Queue, run_through
from ucpl.storage.cache_dirs import staging
from ucpl.storage.error_mapping import reject_target
from ucpl.storage.objects import ObjectEntry, TagDiffers, read_whole
from ucpl.storage.sparse_files import UNFINISHED, write_at
from ucpl.storage.upload_target import UploadTarget

__all__ = ["Shipping", "ship"]

UPLOADS = 4  # files that go up at once
FETCH, FETCHES = 4 << 20, 8  # bytes of a request that reads back, and how many there are at once


class ShippedRun(Protocol):
    """Part of a run (execute) that shipping uses."""

    plan: Plan
    layout: TargetPlan
    plane: DataPlane
    counters: Counters
    sources: SourceFiles
    files: TargetFiles
    journal: Journal | None
    fragments: Fragments
    options: RunOptions
    team: ProcessGroup
    texts: dict[str, str]
    digests: dict[str, str]

    def assembler(self) -> Assembler: ...
    def check_source(self) -> None: ...
    def counted(self) -> None: ...


@define(eq=False)
class Shipping:
    """One run into a store."""

    place: UploadTarget
    files: Sequence[TargetFile]
    single: bool
    begun: bool = False
    _run: str = field(factory=lambda: token_hex(8))
    _sent: set[str] = field(factory=set)  # keys that may be there by now
    _tags: dict[int, str] = field(factory=dict)  # of files that went up

    def _key(self, index: int) -> str:
        return self.place.name if self.single else self.place.key(self.files[index].path)

    def share(self, team: ProcessGroup) -> range:
        """The files that this process sends."""
        if self.single and team.size > 1:
            return range(len(self.files) if team.rank == 0 else 0)
        whose = shares(np.array([1 + file.plan.size for file in self.files], np.int64), team.size)
        return range(int(np.searchsorted(whose, team.rank)), int(np.searchsorted(whose, team.rank, "right")))

    def waves(self, mine: range) -> Iterator[range]:
        """Files that grow here together, in order, as many as fit.

        Raises: UcplError E501.
        """
        room, first, size = staging(), mine.start, 0
        for i in mine:
            if i > first and size + self.files[i].plan.size > room:
                yield self._with_room(range(first, i), size)
                first, size = i, 0
            size += self.files[i].plan.size
        if mine:
            yield self._with_room(range(first, mine.stop), size)

    def _with_room(self, wave: range, size: int) -> range:
        here = self.place.path.parent
        room = os.statvfs(here)
        if size > (free := room.f_bavail * room.f_frsize):
            what = f"{size} bytes of {self.place.url} grow in {here} before they go up, {free} are free"
            fail("E501", what, Label(str(here)), remedy="Free some space, or name another folder: UCPL_REMOTE_DIR.")
        return wave

    def is_finished(self, digests: Mapping[str, str]) -> bool:
        """True if a run with these digests has written the target already.

        Raises: UcplError E503, E506 if another run has.
        """
        entries = self.place.entries()
        if not entries or self.place.is_unfinished:
            return False
        manifest = next((entry for entry in entries if entry.key == self.place.key(MANIFEST)), None)
        try:
            data = b"{}" if manifest is None else read_whole(self.place.objects, evolve(manifest, tag=""))
            plan = json.loads(data).get("plan", {})
        except OSError as error:
            reject_target(error, self.place.url)
        except ValueError:
            plan = {}
        if not all(plan.get(name) == digests[name] for name in IDENTITY):
            fail("E506", f"{self.place.url} exists", Label(self.place.url))
        return True

    # ---- steps ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Remove an earlier run's remains and the old target; mark this run.

        Raises: UcplError E502, E503.
        """
        mark = json.dumps({"run": self._run, "by": "ucpl", "is": "an incomplete target"}).encode()
        key, objects = self.place.key(UNFINISHED), self.place.objects
        old = [entry.key for entry in self.place.entries()]
        with self._writing():
            self.begun = True
            if self.single:
                return
            if old:
                objects.put(key, mark)  # before anything is gone
                objects.remove([self.place.key(MANIFEST)])
                objects.remove([one for one in old if one not in (key, self.place.key(MANIFEST))])
            elif not objects.create(key, mark):
                self.begun = False
                fail("E502", f"another ucpl is writing {self.place.url}", Label(self.place.url, where=UNFINISHED))
            self._sent.add(key)
        failpoint("ship-begun")

    def send(self, wave: range, path_of: Callable[[int], Path]) -> None:
        """Send files that are complete here. Raises: UcplError E503, E505."""
        queue = Queue(len(wave))

        def work(stop: threading.Event) -> None:
            while not stop.is_set() and (i := queue.take()) is not None:
                self._send(wave[i], path_of(wave[i]))

        run_through(queue, work, UPLOADS)
        failpoint("ship-sent")

    def _send(self, index: int, path: Path) -> None:
        key = self._key(index)
        self._sent.add(key)
        size = self.files[index].plan.size
        with self._writing():
            self.place.objects.put_file(key, path)
            found = self.place.objects.entry(key)
        if found is None or found.size != size:
            has = "nothing" if found is None else f"{found.size} bytes"
            fail("E505", f"{path}: {size} bytes were sent, {has} is there", Label(str(path)))
        self._tags[index] = found.tag

    def fetch(self, wave: range, path_of: Callable[[int], Path]) -> None:
        """Fetch uploaded files from the store to the place where they grew.

        They replace the files there. Raises: UcplError E503, E505.
        """
        ranges: list[tuple[int, int, int]] = []
        for i in wave:
            size = self.files[i].plan.size
            with self._writing():
                os.truncate(path_of(i), 0)
                os.truncate(path_of(i), size)
            ranges += ((i, low, min(low + FETCH, size)) for low in range(0, size, FETCH))
        queue = Queue(len(ranges))

        def work(stop: threading.Event) -> None:
            while not stop.is_set() and (n := queue.take()) is not None:
                self._fetch(path_of(ranges[n][0]), *ranges[n])

        run_through(queue, work, FETCHES)

    def _fetch(self, path: Path, index: int, low: int, high: int) -> None:
        with self._writing():
            try:
                data = self.place.objects.read(self._key(index), low, high, self._tags[index])
            except TagDiffers:
                fail("E505", f"{path} was written by somebody else", Label(str(path)))
            write_at(path, data, low)

    def publish(self, texts: Mapping[str, str], *, read_back: bool) -> None:
        """Write the texts, the manifest last: from then on the target exists.

        Raises: UcplError E502, E503, E505.
        """
        objects, mark = self.place.objects, self.place.key(UNFINISHED)
        for name in sorted(texts, key=lambda name: name == MANIFEST):
            if name == MANIFEST:
                failpoint("ship-manifest")
                self._check_alone()
            key, data = self.place.key(name), texts[name].encode()
            self._sent.add(key)
            with self._writing():
                objects.put(key, data)
                found = read_whole(objects, ObjectEntry(key, len(data), "", 0)) if read_back else data
            if found != data:
                fail(
                    "E505",
                    f"{self.place.url}/{name} differs from the bytes that were sent",
                    Label(f"{self.place.url}/{name}"),
                )
        with suppress(OSError):  # it says nothing where the manifest is
            objects.remove([mark])
        self.begun = False

    def _check_alone(self) -> None:
        """Nobody else began to write there. Raises: UcplError E502, E503."""
        with self._writing():
            entry = self.place.objects.entry(self.place.key(UNFINISHED))
            data = b"" if entry is None else bytes(self.place.objects.read(entry.key, 0, entry.size, ""))
        if self._run.encode() not in data:
            fail("E502", f"another ucpl is writing {self.place.url}", Label(self.place.url, where=UNFINISHED))

    # ---- an end before its time ------------------------------------------------------------------------------------

    def undo(self, error: UcplError, *, alone: bool = True) -> UcplError:
        """Remove this run's files, and return the state of the target.

        alone: no other process may be sending a file still.
        """
        if not self.begun:
            return error
        self.begun = False
        first = error.diagnostics[0]
        if first.code == "E502":  # the existing files are another run's
            return error
        mark = self.place.key(UNFINISHED)
        try:
            self.place.objects.remove([self.place.key(MANIFEST)] if not self.single else [])
            if alone or self.single:
                self.place.objects.remove([key for key in sorted(self._sent) if key != mark])
                self.place.objects.remove([mark] if not self.single else [])
                note = f"nothing of it is left in {self.place.url}: the same command begins again"
            else:
                self.place.objects.remove([entry.key for entry in self.place.entries() if entry.key != mark])
                note = (
                    f"the rest in {self.place.url} does not count as a target: the same command with --resume clears it and"
                    " begins again"
                )
        except OSError as again:
            note = (
                f"{self.place.url} could not be cleared ({again.strerror or again}): it does not count as there, and"
                " the same command with --resume clears it and begins again"
            )
        notes = tuple(n for n in first.notes if not n.startswith("finished parts"))
        return UcplError(evolve(first, notes=(*notes, note)), *error.diagnostics[1:])

    def _writing(self) -> _Writing:
        return _Writing(self.place)


def ship(run: ShippedRun, shipping: Shipping, known: DoneTiles) -> None:
    """All steps from an empty place to a manifest in it.

    known: all tiles, none of them done. Raises: UcplError E501, E502, E503, E505, and errors of moving.
    """
    assert run.journal is not None
    tiles, counters, layout = known.tiles, run.counters, run.layout
    assembler = run.assembler()
    beside: list[Parts] = [()] * len(layout.files)
    unit_crc = np.zeros(len(layout.units), np.uint32)
    if run.team.rank == 0:
        shipping.begin()
    run.team.all("begun")
    files, team = shipping.share(run.team), Within(run.team) if run.team.size > 1 else run.team
    for wave in shipping.waves(files):
        mine = (tiles.file >= wave.start) & (tiles.file < wave.stop)
        others = int(tiles.size[~mine].sum()) - int(tiles.size[known.done].sum())
        part = evolve(known, done=~mine)
        counters.add(written=run.files.create(wave))
        Mover(
            run.plane, layout, assembler, run.sources, run.files, run.journal, part, run.fragments,
            _less(run.options.progress, others), None, None, team,
        ).move()  # fmt: skip
        known.done[mine] = True
        crcs = storage_crcs(layout, tiles, known.crc, wave)
        for i, patch in zip(wave, patches_of(layout, crcs, wave), strict=True):
            counters.add(written=run.files.write_parts(i, patch))
            beside[i] = (*layout.files[i].plan.fixed, *patch)
        unit_crc |= crcs
        with counters.phase("upload"):
            run.files.close()  # closed before files are removed, so that their space is free
            try:
                shipping.send(wave, run.files.path)
            except UcplError:
                run.team.look()  # if another rank failed, its sent files may be removed: its error is the one to report
                raise
        if run.options.read_back:
            with counters.phase("read-back"):
                shipping.fetch(wave, run.files.path)
                again = ReadBack(run.files, known, run.plane)
                again.rest([beside[i] if i in wave else () for i in range(len(beside))], mine)
                run.files.close()
        for i in wave:
            os.unlink(run.files.path(i))
    _gather(run, files, unit_crc, beside)
    run.counted()
    if run.team.rank != 0:
        return
    with counters.phase("source"):
        run.check_source()
    with counters.phase("publish"):
        run.sources.check_unchanged()
        # The files are gone from this disk: their sums cannot be made any more.
        run.texts = {name: text for name, text in run.texts.items() if not is_open(name, text)}
        texts = dict(run.texts)
        if not shipping.single:
            texts[MANIFEST] = manifest_of(run.plan, run.digests, ManifestContents(layout, unit_crc, beside, run.texts))
        shipping.publish(texts, read_back=run.options.read_back)


def _gather(run: ShippedRun, files: range, unit_crc: NDArray[np.uint32], beside: list[Parts]) -> None:
    """Gather the results of the others at the leader.

    Raises: UcplError E621.
    """
    if run.team.size == 1:
        return
    fixed = [len(file.plan.fixed) for file in run.layout.files]
    mine: dict[str, object] = {}
    if run.team.rank != 0:
        mine = {
            "crc": _text(unit_crc.tobytes()),
            "beside": {str(i): [[at, _text(data)] for at, data in beside[i][fixed[i] :]] for i in files},
            "read": [_text(column) for column in run.fragments.all_bytes()],
        }
    with waiting(run.team, run.counters):
        told = run.team.all(mine)
    for one in told[1:] if run.team.rank == 0 else ():
        assert isinstance(one, dict)
        unit_crc |= np.frombuffer(b64decode(one["crc"]), np.uint32)
        run.fragments.extend(Fragments.of([b64decode(column) for column in one["read"]]))
        for i, patch in one["beside"].items():
            parts = ((int(at), b64decode(data)) for at, data in patch)
            beside[int(i)] = (*run.layout.files[int(i)].plan.fixed, *parts)


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _less(progress: Progress | None, others: int) -> Progress | None:
    """Progress of a wave.

    Its mover takes tiles of later waves for done.
    """
    return None if progress is None else lambda done, total: progress(done - others, total)


class _Writing:
    """Turn refusals by a store into errors with a place: E503."""

    def __init__(self, place: UploadTarget) -> None:
        self._place = place

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            reject_target(error, self._place.url)
