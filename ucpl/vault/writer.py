"""The writer of a rank: copies and records its state.

A generation consists of the saves of all ranks at their n-th call. It is committed after every domain has committed it;
servers do this next to the trainer. A rank has two slots, and never writes into the slot of the newest committed
generation. A failed save is reported, and training continues.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import math
import operator
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NoReturn, TypedDict, Unpack

import torch.distributed as dist

from ucpl.errors import Label, UcplError, fail
from ucpl.live.agreement import text_of
from ucpl.owned import make_owned
from ucpl.records import frozen
from ucpl.runtime.failpoints import failpoint
from ucpl.storage.vaults.checksummed_text import JsonObject, write_whole
from ucpl.storage.vaults.committed import get_commits, get_domains, get_shards, read_commits, silent
from ucpl.storage.vaults.domains import LOOKED_AT, AnyDomain, LocalDomain, hold_lock, is_locked
from ucpl.storage.vaults.hosts import hosts_at
from ucpl.storage.vaults.records import Commit, Job, RunRecord, Shard, slot_of
from ucpl.storage.vaults.snapshot_folder import open_generation
from ucpl.storage.wire import NoAnswer
from ucpl.vault.arenas import Arenas, Written

if TYPE_CHECKING:
    from ucpl.texts import Json
    from ucpl.vault.files import ToSave
    from ucpl.vault.framework_writer import Distributions
    from ucpl.vault.gradient_saves import GradientSaves
    from ucpl.vault.layout_writer import LayoutWriter

__all__ = ["Saved", "ToWrite", "Writer", "why_not_committed"]

_log = logging.getLogger("ucpl")
POLL = 0.002  # seconds between two checks for a commit
STATE_MAX = 64 << 20
GIVES_WAY = 10  # niceness of the background thread
PAUSE_MAX = 0.5  # seconds for which it lets others copy first
STEP_MAX = 10**15  # a float still represents each step up to here exactly
SEATS, SEATED = 20, 0.15  # attempts for a lock whose server is known elsewhere, and seconds between them
HOPELESS = 1.0  # seconds that a save waits for a generation that cannot be committed


@contextmanager
def no_gc() -> Iterator[None]:
    """Pause the garbage collector; if it was off before, it stays off.

    A save creates tens of thousands of small live records. Without the pause, Python would search all objects of the
    trainer again and again meanwhile.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class ToWrite(TypedDict, total=False):
    """The options of a writer besides its rank."""

    layout: str | None  # FILE.ucpl:NAME(...), for values that are given by keys
    # One text for all ranks of a run, and another for each run. By default the ranks of torch.distributed agree on one.
    run: str | None
    wait: float  # seconds that a save waits for the commit of the previous one (default 30)
    strict: bool  # a failed save raises; by default it is reported on standard error, and training continues
    # A thread digests the copied bytes during training (default, unless `strict`). If that fails, the log and
    # `Writer.error` report it.
    beside: bool


@frozen
class Saved:
    """The result of a save. It is true if everything was saved.

    `Writer.committed` reports the commit.
    """

    generation: int
    step: int
    bytes: int  # of this rank
    seconds: float  # that the job was stopped for
    waited: float  # of these, until the save before counted
    replays: int = 0  # saved steps of gradients; 0: the state is complete
    error: UcplError | None = None

    def __bool__(self) -> bool:
        return self.error is None


class Writer:
    """One rank's. Close it, or use it in a `with` statement."""

    def __init__(self, home: Path, job: Job, rank: int, **options: Unpack[ToWrite]) -> None:
        """Raises: UcplError E693, E694."""
        domain = job.domain_of(rank)
        if domain is None:
            what = f"{home} is the vault of a job of {job.ranks} ranks"
            fail("E694", f"{what}: it has no rank {rank}", Label(str(home)))
        self.home, self.job, self.rank, self.here = home, job, rank, LocalDomain(home, domain)
        self.wait, self.strict = options.get("wait", 30.0), options.get("strict", False)
        self.beside = options.get("beside", not self.strict)
        self.error: UcplError | None = None  # of the last save that was not kept
        self._arenas = Arenas()
        self._sealing: threading.Thread | None = None
        self._unrecorded: int | None = None  # a generation without a record, which will not be committed
        self._ends = ExitStack()
        self._pending: int | None = None
        self._is_closed, self._process = False, os.getpid()  # the process that owns the lock
        self._late = 0  # saves one after the other that did not count
        self._patience = math.inf  # smaller, if the last save was not committed for a permanent reason
        self._shares: Distributions | None = None
        self._replaying: GradientSaves | None = None
        make_owned(self.here.folder)
        if not self._ends.enter_context(hold_lock(self.here.lock(f"r{rank}"), wait=LOOKED_AT)):
            self._ends.close()
            fail("E694", f"rank {rank} of {home} is written by another process", Label(str(self.here.folder)))
        try:
            self.run, self._next = self._agreed(options.get("run"))
            call = options.get("layout")
            self.keyed: LayoutWriter | None = None
            if call is not None:
                from ucpl.vault.layout_writer import LayoutWriter

                self.keyed = LayoutWriter.of(call, rank)
        except BaseException:
            self._ends.close()
            raise

    def _agreed(self, run: str | None) -> tuple[str, int]:
        """The name of this run and its first generation.

        Raises: UcplError E693.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return self._agreed_by_all(run or token_hex(8))
        if run is None and self.job.ranks > 1:
            what = "several ranks save, and this run has no name"
            remedy = "call init_process_group first, or give run=, a text that is equal on all ranks and differs between runs"
            fail("E693", what, Label(f"rank {self.rank}"), remedy=remedy)
        return run or token_hex(8), self._first(run)

    def _agreed_by_all(self, run: str) -> tuple[str, int]:
        """The same for ranks that communicate: an error on one ends all.

        Raises: UcplError E695, E697.
        """
        first, error = 0, None
        try:
            first = self._first()
        except UcplError as found:
            error = found
        mine = run, first, None if error is None else (error.diagnostics[0].code, error.diagnostics[0].message)
        if (world := dist.get_world_size()) != self.job.ranks:
            what = f"{self.home} is the vault of a job of {self.job.ranks} ranks, and {world} save"
            remedy = "name another folder: a save is committed only if exactly the ranks of the vault save"
            fail("E694", what, Label(f"rank {self.rank}"), remedy=remedy)
        told: list[tuple[str, int, tuple[str, str] | None]] = [mine] * world
        dist.all_gather_object(told, mine)
        if error is not None:
            raise error
        for rank, (_, _, other) in enumerate(told):
            if other is not None:
                fail(other[0], other[1], Label(f"rank {rank}"))
        return told[0][0], max(one for _, one, _ in told)

    def _first(self, run: str | None = None) -> int:
        """The first generation after all committed and all saved ones.

        A saved generation of an earlier run may be committed at any moment. Ranks of one run that start one after the
        other find the same number. Each records it before it saves, because its save overwrites the files that the
        others derive the number from. Raises: UcplError E695, E697.
        """
        try:
            if hosts_at(self.home) is not None and (none := silent(self.home, self.job)):
                _unheard(self.home, ", ".join(f"d{number}" for number in none))
            holders = get_domains(self.home, self.job)
            last = next((one.generation for one in read_commits(holders, self.job, sure=True)), 0)
            saved = [one for some in get_shards(holders, self.job).values() for one, _ in some]
            first = 1 + max([last, *(one.generation for one in saved)])
            if run is None:
                return first
            # Not earlier: a rank without this record has overwritten nothing.
            for where, ranks in zip(holders, self.job.domains, strict=True):
                for begun in map(where.begun_in, ranks):
                    if begun is not None and (begun.ident, begun.run) == (self.job.ident, run) and begun.first > last:
                        first = begun.first
            write_whole(self.here.begun(self.rank), RunRecord(self.job.ident, run, first).sealed())
        except OSError as error:
            if isinstance(error, NoAnswer):
                _unheard(self.home, str(error.strerror))
            raise _failed(self, error) from error
        return first

    def committed(self) -> tuple[int, int] | None:
        """(generation, step) that a restore would return."""
        return next(((one.generation, one.step) for one in get_commits(self.home, self.job)), None)

    @no_gc()
    def save(self, step: int, what: object, state: Mapping[str, Json] | None = None) -> Saved:
        """Save the state of this rank.

        All ranks call it equally often, with the same step.

        `what`: tensors by the layout's keys; an engine of DeepSpeed; or (module, optimizer), plain or of DTensors.
        state: small JSON of the caller (position in the data, random numbers); a restore returns it.

        Returns after the copy. Then everything may be changed, with one exception: if only gradients are saved
        (`Saved.replays`), weights and moments are digested in the background. The optimizer's next step waits for that.
        Any other write to them before withdraws the save. A write past autograd (`tensor.data`) is not detected, and a
        later read fails with E698.

        Raises: if `strict`, UcplError E693, E695.
        """
        begin, number, extra, waited, met = time.perf_counter(), 0, JsonObject(), 0.0, None
        generation, self._next = self._next, self._next + 1
        try:
            _demand_own(self)
            try:
                _demand_open(self)
                waited = self._settle()  # the previous copy is digested after this
                number, extra = _step(step), _json(state)
            except Exception as error:  # reported to the other ranks, which wait for this one
                met = error
            files, replay = self._collect(number, what, met)
            size, depth = self._save(generation, number, files, (extra, replay))
        except BaseException as error:
            if self._replaying is not None:
                self._replaying.drop()
            if not isinstance(error, Exception):
                raise
            told = self._not_kept(step, error, raises=self.strict)
            if self.strict:
                raise told from error
            return Saved(generation, step, 0, time.perf_counter() - begin, waited, error=told)
        self._pending = generation
        if self._replaying is not None and self._replaying.asked == generation:
            self._replaying.saved(generation)
        return Saved(generation, number, size, time.perf_counter() - begin, waited, depth)

    def _not_kept(self, step: object, error: Exception, *, raises: bool = False) -> UcplError:
        self.error = error if isinstance(error, UcplError) else _failed(self, error)
        if not raises:
            _log.warning("step %s is not saved: %s", _shown(step), self.error.diagnostics[0].message)
        return self.error

    def _collect(self, step: int, what: object, met: Exception | None) -> tuple[list[ToSave], JsonObject | None]:
        """The files to save; for gradients alone, also the step's record.

        met: the error of this rank, if it has nothing to save. The rank's own work comes first. Then all ranks agree to
            continue: otherwise a rank with an error would leave the others inside a collective call.
        Raises: on all ranks, if one has an error.
        """
        if self.keyed is not None:
            if met is not None:
                raise met
            return self.keyed.files(what), None
        from ucpl.vault.framework_writer import Distributions, collect_input, files_of, ranks

        one, replaying, found = None, None, None
        try:
            one = collect_input(what)  # even with an error: this may be a collective call (state_dict of FSDP)
            replaying = self._watching(what) if met is None else None
            found = next(iter(get_commits(self.home, self.job)), None) if replaying is not None else None
        except Exception as error:
            met = met or error
        ranks().agree(met)
        assert one is not None
        if replaying is not None:
            may = found is not None and self._follows(found)
            if may and found is not None:
                self._attempt(replaying, found)
            return replaying.files(one, self._next - 1, may=may)
        if self.job.replays:
            ranks().all_agree(False)  # with ranks that have an optimizer of another kind, which ask
        self._shares = self._shares or Distributions()
        return files_of(one, step, self._shares), None

    def _watching(self, what: object) -> GradientSaves | None:
        """The replay state, if gradients alone may be saved for `what`."""
        if not self.job.replays:
            return None
        from ucpl.vault.gradient_saves import GradientSaves, is_replayable

        if not is_replayable(what):
            return None
        self._replaying = self._replaying or GradientSaves()
        self._replaying.watch(what[1])
        return self._replaying

    def _attempt(self, replaying: GradientSaves, newest: Commit) -> None:
        try:
            replaying.attempt(newest, lambda: open_generation(self.home, newest.generation), self.rank)
        except UcplError as error:  # its base is lost or removed: the next one is tried
            if replaying.is_refused:
                _log.warning("each step is saved completely: %s", error.diagnostics[0].message)
        except Exception as error:  # others wait for this rank: it is tried once more at the next save
            _log.warning("no step was replayed as a test: %s: %s", type(error).__name__, error)

    def _follows(self, newest: Commit) -> bool:
        """True if this save may be replayed from the newest committed one."""
        return (newest.generation, newest.shards[0].run) == (
            self._next - 2,
            self.run,
        ) and newest.depth < self.job.replays

    def _settle(self) -> float:
        """Wait until the previous generation is committed, or withdraw it.

        Returns the seconds. Raises: OSError.
        """
        pending, self._pending = self._pending, None
        begin = time.perf_counter()
        self._join()
        if pending is None or pending == self._unrecorded:
            return time.perf_counter() - begin
        patience, digested = min(self.wait, self._patience), time.perf_counter()
        while pending not in self.here.commits() and time.perf_counter() - digested < patience:
            time.sleep(POLL)
        if pending in self.here.commits():
            self._patience, self._late = math.inf, 0
        elif self.wait:
            self._report_late(pending, time.perf_counter() - begin)
        return time.perf_counter() - begin

    def _report_late(self, generation: int, seconds: float) -> None:
        """Report that the last save is withdrawn, and the reason."""
        self._late += 1
        is_hopeless = False
        try:
            why, is_hopeless = why_not_committed(self.home, self.job, self.run, generation, is_first=self._late == 1)
        except OSError as error:  # of a host that does not answer
            why = error.strerror or str(error)
        if not is_hopeless:
            self._patience = math.inf
        else:  # longer each time: the missing server may return
            self._patience = HOPELESS if self._patience == math.inf else 2 * self._patience
        text = f"generation {generation} is not committed after {seconds:.0f} s, and is withdrawn: {why}"
        try:
            fail("E699", f"{self.home}: {text}", Label(str(self.here.folder), f"rank {self.rank}"))
        except UcplError as error:
            self.error = error
        _log.warning("%s", text)

    def _save(
        self, generation: int, step: int, files: list[ToSave], records: tuple[JsonObject, JsonObject | None]
    ) -> tuple[int, int]:
        """Save the files: (bytes, saved steps of gradients).

        records: the JSON of the caller, and the record of a step.
        Raises: OSError.
        """
        state, replay = records
        # A committer holds this lock of every domain: under it, a generation is either committed or never will be.
        with ExitStack() as locks:
            _lock(locks, [self.here], self.wait)
            newest = self._newest()
            if self._is_open(newest):
                locks.close()
                holders = _lock_all(self, locks)
                newest = self._newest(holders)
            kept = newest.shards[self.rank].base if newest is not None else 1
            if replay is not None and (newest is None or not self._follows(newest)):
                raise OSError(errno.ESTALE, "the generation before its gradients is no longer committed")
            depth = newest.depth + 1 if replay is not None and newest is not None else 0
            base = kept if depth else 1 - kept
            slot = slot_of(depth, base)
            self.here.shard(self.rank, slot).unlink(missing_ok=True)
        failpoint("vault-begun")
        arena = self.here.arena(self.rank, slot)
        marks = self._replaying.marks if replay is not None and self._replaying is not None else None

        def seal(written: Written) -> None:
            job, rank = self.job, self.rank
            shard = Shard(
                job.ident, self.run, generation, step, rank, slot, written.size, written.chunks, written.files, state,
                depth, base, replay or {},
            )  # fmt: skip
            failpoint("vault-copied")
            write_whole(self.here.shard(rank, slot), shard.sealed())
            failpoint("vault-told")

        if not self.beside:
            written = self._arenas.write(arena, files)
            if marks is not None:
                marks.take()
            seal(written)
            return written.size, depth
        begin = time.perf_counter()
        size, told = self._arenas.copy(arena, files)
        if marks is not None:
            marks.fetch()  # all device work that was queued so far, the copies included, has ended
        took = min(time.perf_counter() - begin, PAUSE_MAX)

        def finish() -> None:
            try:
                if marks is not None:
                    marks.pause(took)
                    marks.take()  # for which the next step may wait
                with suppress(OSError):  # training has priority
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GIVES_WAY)
                if marks is None:
                    time.sleep(took)  # other ranks of this host still copy
                seal(told())
            except Exception as error:  # a thread has no caller to raise it to
                self._unrecorded = generation
                self._not_kept(step, error)

        self._sealing = threading.Thread(target=finish, name="ucpl-seals")  # Python waits for it at exit
        try:
            self._sealing.start()
        except RuntimeError:  # there are too many
            self._sealing = None
            finish()
        return size, depth

    def _join(self) -> None:
        """Wait until the last copy is digested and recorded."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None

    def _is_open(self, newest: Commit | None) -> bool:
        """True if this domain's vote may have been committed on another host.

        The record of that commit may not have arrived here. A lock that is held over a network can be lost while its
        holder continues. So a generation with a vote is overwritten only after every domain, under the locks of all,
        denied its commit.
        """
        if hosts_at(self.home) is None:
            return False
        last = newest.generation if newest is not None else 0
        votes = [self.here.vote_in(slot) for slot in range(self.job.slots)]
        return any(v is not None and v.ident == self.job.ident and v.generation > last for v in votes)

    def _newest(self, holders: Sequence[AnyDomain] = ()) -> Commit | None:
        """The newest committed generation of all domains.

        If a committer could not send it to all hosts, it is copied to the rest here.
        holders: all domains, under their locks; each of them must answer.
        Raises: OSError.
        """
        found = read_commits(holders, self.job, sure=True) if holders else get_commits(self.home, self.job)
        if found and found[0].generation not in self.here.commits():
            write_whole(self.here.commit(found[0].generation), found[0].sealed())
        return found[0] if found else None

    def close(self) -> None:
        self._is_closed = True
        self._join()
        self._arenas.close()
        if self._replaying is not None:
            self._replaying.close()
        self._ends.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _unheard(home: Path, who: str) -> NoReturn:
    fail("E697", f"{who} of {home}: no answer, so the newest committed generation is unknown", Label(str(home)))


def _lock_all(writer: Writer, locks: ExitStack) -> list[AnyDomain]:
    """The locks of all domains.

    A restarted server may have another address, which other hosts know first. Raises: OSError.
    """
    for left in reversed(range(SEATS)):
        holders = get_domains(writer.home, writer.job)
        try:
            _lock(locks, holders, writer.wait)
        except OSError as error:
            locks.close()
            if isinstance(error, NoAnswer) or error.errno != errno.EIO or not left:
                raise
            time.sleep(SEATED)
        else:
            break
    return holders


def _lock(locks: ExitStack, holders: Sequence[AnyDomain], wait: float) -> None:
    """Raises: OSError."""
    for one in holders:
        if not locks.enter_context(one.locked(max(1.0, wait))):
            raise OSError(errno.EAGAIN, "the process that commits does not respond")


def _step(step: object) -> int:
    """Raises: UcplError E693."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if not 0 <= number < STEP_MAX:
        fail("E693", f"{_shown(step)!a} is not a step", Label("step"), remedy="give a whole number, 0 or more")
    return number


def _demand_own(writer: Writer) -> None:
    """Reject a forked process before the ranks communicate.

    It shares the connections of its parent. Raises: UcplError E693.
    """
    if os.getpid() != writer._process:
        what = f"the writer of rank {writer.rank} was made by another process, which holds its lock"
        fail("E693", what, Label(str(writer.here.folder)), remedy="make a writer in the process that saves")


def _demand_open(writer: Writer) -> None:
    if writer._is_closed:
        closed = f"the writer of rank {writer.rank} was closed"
        fail("E693", closed, Label(str(writer.here.folder)), remedy="make another")


def _shown(step: object) -> str:
    try:
        return str(step)[:40]
    except Exception:  # of any caller
        return type(step).__name__


def _once(pairs: list[tuple[str, object]]) -> JsonObject:
    """A dict of the pairs.

    Raises: ValueError, if two keys are equal as JSON.
    """
    told = dict(pairs)
    if len(told) < len(pairs):
        raise ValueError(f"two of {len(pairs)} keys are equal as JSON strings")
    return told


def _json(state: object) -> JsonObject:
    """JSON as a restore returns it.

    Raises: UcplError E693, and all errors of the caller's objects.
    """
    try:
        text = json.dumps({} if state is None else state)
        if len(text) > STATE_MAX:
            raise ValueError(f"more than {STATE_MAX:,} bytes of JSON")
        copied = json.loads(text, object_pairs_hook=_once)  # the caller's lists may change once this returns
        if not isinstance(copied, dict):
            raise TypeError(f"it is a {type(state).__name__}, not a dict")
    except (TypeError, ValueError, RecursionError) as error:
        fail("E693", f"the companion state is not small JSON: {error}", Label("state"))
    return copied


def _failed(writer: Writer, error: Exception) -> UcplError:
    where = str(writer.here.folder)
    if not isinstance(error, OSError):  # all other errors of the given values: training continues
        try:
            fail("E693", text_of(error), Label("the saved state"))
        except UcplError as told:
            return told
    free = ""
    with suppress(OSError):
        state = os.statvfs(where)
        free = f"{state.f_bavail * state.f_frsize:,} bytes are free there"
    try:
        if isinstance(error, NoAnswer):
            reason = f"{error.strerror}: the save could overwrite a committed generation there"
            fail("E697", reason, Label(where), remedy="restart its server; the next save tries again")
        fail("E695", f"{where} cannot be written: {error.strerror or error}", Label(where, free))
    except UcplError as told:
        return told


# ---- the reason of a missing commit ----------------------------------------------------------------------------------


def why_not_committed(home: Path, job: Job, run: str, generation: int, *, is_first: bool) -> tuple[str, bool]:
    """(reason, True if waiting does not help).

    A slow running server can be waited for. A missing server, and ranks that save different steps, cannot. is_first:
    the previous generation was committed: a rank without a save may be slow. Raises: OSError, of a domain on another
    host.
    """
    holders = get_domains(home, job)
    saved = get_shards(holders, job)
    steps: dict[int, list[int]] = {}  # by the step that they called it
    unsaved = []
    for rank in range(job.ranks):
        mine = [shard for shard, _ in saved.get(rank, []) if (shard.generation, shard.run) == (generation, run)]
        if mine:
            steps.setdefault(mine[0].step, []).append(rank)
        else:
            unsaved.append(rank)
    if len(steps) > 1:
        text = ", ".join(f"{_ranks(ranks)} step {step}" for step, ranks in sorted(steps.items()))
        return f"all ranks must save the same step, but {text} was saved", True
    if unsaved:
        newer = [r for r in unsaved if any(s.run == run and s.generation > generation for s, _ in saved.get(r, []))]
        if newer:
            return f"{_ranks(newer)} saved more often: all ranks must save equally often", True
        text = f"{_ranks(unsaved)} did not save it, withdrew it or still digests it"
        return f"{text}: all ranks must save equally often", not is_first
    away = [where.number for where in holders if isinstance(where, LocalDomain) and not is_locked(where.lock("server"))]
    if away:
        return f"no server runs for {_domains(away)} (`ucpl vault serve {home} --domain {away[0]}`)", True
    silent = [where.number for where in holders if not any(_votes(where, job, generation))]
    text = f"{_domains(silent)} has not voted" if silent else "all domains voted for it, and it is not committed"
    return f"{text}: see the output of its server", False


def _votes(where: AnyDomain, job: Job, generation: int) -> list[bool]:
    votes = [where.vote_in(slot) for slot in range(job.slots)]
    return [vote is not None and vote.generation == generation for vote in votes]


def _ranks(some: list[int]) -> str:
    return (
        ("rank " if len(some) == 1 else "ranks ") + ", ".join(map(str, some[:8])) + (", ..." if len(some) > 8 else "")
    )


def _domains(some: list[int]) -> str:
    return ", ".join(f"d{number}" for number in some)
