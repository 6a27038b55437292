"""The server of a domain: saved shards outlive the trainer.

It checks the shards of its ranks against their digests, and computes the redundancy of its domain. After every domain
has done this, the generation is committed in all of them. The server can be killed and restarted at any point.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash
from attrs import field

from ucpl.errors import Label, UcplError, fail
from ucpl.owned import demand_owned, make_owned
from ucpl.records import define, frozen
from ucpl.runtime.disk import disk, write_all
from ucpl.runtime.failpoints import failpoint
from ucpl.storage.authentication import Address
from ucpl.storage.vaults.checksummed_text import read_sealed, write_whole
from ucpl.storage.vaults.committed import (
    get_commits,
    get_domain,
    get_domains,
    get_replay_chain,
    get_shards,
    read_commits,
    read_job,
    reject_no_vault,
)
from ucpl.storage.vaults.domains import LOOKED_AT, AnyDomain, LocalDomain, hold_lock
from ucpl.storage.vaults.hosts import hosts_at
from ucpl.storage.vaults.memory import Bytes, ChunkedFile, LostBytes, Memory, get_domain_data
from ucpl.storage.vaults.protection import block_size, get_sets
from ucpl.storage.vaults.records import CHUNK, WHOLE, Commit, Job, Parity, Shard, slot_of
from ucpl.vault.arenas import allocate
from ucpl.vault.create import check_domain
from ucpl.vault.path_conflicts import report_not_written
from ucpl.vault.peers import Peers

__all__ = ["Say", "Server", "has_commit", "heal", "repair_commit", "repair_job"]

LOCKED = 30.0  # seconds for which the locks of all domains are waited for
Say: TypeAlias = Callable[[str], None]


@frozen(eq=False)
class _Round:
    """The shards of all ranks for one uncommitted generation."""

    generation: int
    run: str
    shards: tuple[Shard, ...]  # by rank
    marks: Mapping[str, str]


@define(eq=False)
class Server:
    """The server of one domain, for a `with` statement.

    A second server of the domain is rejected.
    """

    home: Path
    number: int
    say: Say = lambda _: None
    job: Job = field(init=False)
    here: LocalDomain = field(init=False)
    at: Address | None = None  # the address for other hosts; None: from the vault's list of hosts
    _ends: ExitStack = field(factory=ExitStack)
    _others: Peers | None = None  # of a vault on several hosts
    _bad: set[str] = field(factory=set)  # digests of shards that differ from their records

    def __enter__(self) -> Server:
        """Raises: UcplError E686, E687, E692, E694, E695."""
        job = read_job(self.home)
        if job is None:
            reject_no_vault(self.home)
        check_domain(job, self.number, self.home)
        self.job, self.here = job, LocalDomain(self.home, self.number)
        try:
            demand_owned(self.home)
            make_owned(self.here.folder)
            if not self._ends.enter_context(hold_lock(self.here.lock("server"), wait=LOOKED_AT)):
                self._ends.close()
                fail("E694", f"d{self.number} of {self.home} has a server already", Label(str(self.here.folder)))
            repair_job(self.here, job)
            if hosts_at(self.home) is not None:
                self._others = Peers(self.here, job, self.say)
                self._ends.callback(self._others.close)
                self._others.sit(self.at)
            else:
                self._take_up()
        except UcplError:
            self._ends.close()
            raise
        except OSError as error:
            self._ends.close()
            report_not_written(self.here.folder, error)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _take_up(self) -> None:
        """Copy commits of other domains; rebuild the lost part of this domain.

        Raises: OSError, also if a server of another host does not answer for lost parts. Try again then.
        """
        found = read_commits(self._holders(), self.job, sure=True)
        for commit in found[: self.job.kept]:
            repair_commit(self.here, commit, self.job)
        if not found:
            return
        for commit in get_replay_chain(found[0], found):
            memory = Memory(self.home, self.job, commit)
            try:
                count = heal(memory, self.number)
                if self._others is not None and not _is_all_there(memory, self.number):
                    self._others.demand_all()
            finally:
                memory.close()
            if count:
                self.say(f"d{self.number}: generation {commit.generation}: {count} chunks were rebuilt")

    def alive(self) -> list[int]:
        """Domains that exist."""
        return [n for n in range(len(self.job.domains)) if get_domain(self.home, n).is_there()]

    def _make_ready(self) -> None:
        """Allocate all slots of a rank when its first shard arrives.

        A later save does not wait for this.
        """
        for rank in self.job.domains[self.number]:
            for kind in (range(WHOLE), range(WHOLE, self.job.slots)):
                sizes = {}
                for slot in kind:
                    with suppress(OSError):
                        sizes[slot] = self.here.arena(rank, slot).stat().st_size
                for slot in kind if sizes else ():
                    if slot not in sizes:
                        _have_room(self.here.arena(rank, slot), max(sizes.values()))

    def _copy_commit(self, newest: Commit) -> None:
        """Copy a commit record that another host received. Raises: OSError."""
        if not has_commit(self.here, newest, self.job):
            with self.here.locked(LOCKED) as mine:
                if mine:
                    self.here.put_commit(newest.generation, newest.sealed(), self.job)

    # ---- a turn ------------------------------------------------------------------------------------------------------

    def turn(self) -> int | None:
        """Do all work that is possible now; return the committed generation.

        Raises: OSError; UcplError E694, if the domain has another server now.
        """
        if self._others is not None and not self._others.have_answered(self._take_up):
            return None
        holders = self._holders()
        newest = next(iter(read_commits(holders, self.job, sure=True)), None)
        if newest is not None and self._others is not None:
            self._copy_commit(newest)
        found = self._round(holders, newest)
        if found is None:
            return None
        vote = self._vote_on(found, self.here)
        if vote is None and not self._protect(found, newest):
            return None
        done = self._commit(found)
        self._make_ready()
        return done

    def _holders(self) -> list[AnyDomain]:
        return get_domains(self.home, self.job)

    def _round(self, holders: Sequence[AnyDomain], newest: Commit | None) -> _Round | None:
        """The newest uncommitted generation that all ranks of one run have saved."""
        # Gradients after the committed generation can only be in one slot.
        behind = newest.depth + 1 if newest is not None else 1
        slots = [*range(WHOLE), *([slot_of(behind, 0)] if behind <= self.job.replays else [])]
        saved = get_shards(holders, self.job, slots)
        if len(saved) != self.job.ranks:
            return None
        before = newest.generation if newest is not None else 0
        among = [
            {(s.generation, s.run): (s, m) for s, m in saved[r] if s.generation > before} for r in range(self.job.ranks)
        ]
        both = set(among[0]).intersection(*among[1:])
        if not both:
            return None
        which = max(both)
        shards = tuple(some[which][0] for some in among)
        marks = {str(rank): some[which][1] for rank, some in enumerate(among)}
        if len({shard.step for shard in shards}) != 1 or self._bad & set(marks.values()):
            return None
        return _Round(*which, shards, marks) if _follows(shards, newest) else None

    def _vote_on(self, found: _Round, where: AnyDomain) -> Parity | None:
        """The parity that a domain computed from exactly these shards."""
        depth = found.shards[0].depth
        for slot in (slot_of(depth, 0),) if depth else range(WHOLE):
            vote = where.vote_in(slot)
            if vote is not None and (vote.ident, vote.run, vote.generation) == (
                self.job.ident,
                found.run,
                found.generation,
            ):
                if dict(vote.shards) == dict(found.marks):
                    return vote
        return None

    def _protect(self, found: _Round, newest: Commit | None) -> bool:
        """Check the shards of this domain's ranks, and compute its redundancy.

        False: not now. Raises: OSError.
        """
        depth, kept = found.shards[0].depth, newest.parity[self.number].base if newest is not None else 1
        base = kept if depth else 1 - kept
        slot = slot_of(depth, base)
        among = next(some for some in get_sets(len(self.job.domains), self.job.protection) if self.number in some)
        blocks, keeps = self.job.protection.blocks(len(among))
        block = block_size([get_domain_data(self.job.domains[d], found.shards).size for d in among], blocks)
        blank = [
            Parity(self.job.ident, found.run, found.generation, d, 0, block, 0, (), {})
            for d in range(len(self.job.domains))
        ]
        memory = Memory(self.home, self.job, Commit(found.generation, found.shards[0].step, found.shards, tuple(blank)))
        with self.here.locked(LOCKED) as mine:
            # A generation that was committed after the last look has its parity in the other slot. The ranks that saved
            # this round know that commit.
            before = newest.generation if newest is not None else 0
            if not mine or any(
                generation > before
                and (generation == found.generation or self.here.commit_in(generation, self.job) is not None)
                for generation in self.here.commits()
            ):
                memory.close()
                return False
            self.here.vote(slot).unlink(missing_ok=True)
        try:
            for rank in self.job.domains[self.number]:
                if not self._is_intact(memory, rank):
                    self._bad.add(found.marks[str(rank)])
                    self.say(
                        f"d{self.number}: the shard of rank {rank} at step {found.shards[0].step} is damaged: not committed"
                    )
                    return False
            chunks = self._write_redundancy(memory, slot, keeps * block)
        finally:
            memory.close()
        if chunks is None:
            return False
        vote = Parity(
            self.job.ident, found.run, found.generation, self.number, slot, block, keeps * block, chunks, found.marks,
            depth, base,
        )  # fmt: skip
        failpoint("vault-protected")
        write_whole(self.here.vote(slot), vote.sealed())
        failpoint("vault-voted")
        return True

    def _is_intact(self, memory: Memory, rank: int) -> bool:
        piece = memory.arena(rank)
        assert piece is not None
        return all(piece.is_intact(low) for low in range(0, piece.size, CHUNK))

    def _write_redundancy(self, memory: Memory, slot: int, size: int) -> tuple[int, ...] | None:
        """Write the redundancy of this domain; return the digests of its chunks.

        None: shards of another domain differ from their records. Raises: OSError.
        """
        fd = disk().open(self.here.parity(slot), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        chunks: list[int] = []
        try:
            allocate(fd, size)
            room = np.empty(CHUNK, np.uint8)
            for low in range(0, size, CHUNK):
                some = room[: min(CHUNK, size - low)]
                try:
                    memory.make_parity(self.number, low, some)
                except LostBytes:
                    return None
                chunks.append(xxhash.xxh3_64_intdigest(some.data))
                write_all(fd, some.data, low)
                failpoint("vault-parity")
        finally:
            disk().close(fd)
        return tuple(chunks)

    def _commit(self, found: _Round) -> int | None:
        """Commit, if every domain voted and no rank withdrew its save.

        Raises: OSError.
        """
        holders = self._holders()
        if not all(self._vote_on(found, where) for where in holders):
            return None
        with ExitStack() as locks:
            for where in holders:
                try:
                    if not locks.enter_context(where.locked(LOCKED)):
                        return None
                except FileNotFoundError:  # the domain was removed
                    return None
            # The holders of the locks are asked over the same connections. If a lock was lost meanwhile, the answer is
            # missing.
            newest = next(iter(read_commits(holders, self.job, sure=True)), None)
            again = self._round(holders, newest)
            if again is None or dict(again.marks) != dict(found.marks):
                return None
            sure = [self._vote_on(again, where) for where in holders]
            at = max(time.time_ns() // 1_000_000, newest.at + 1 if newest is not None else 1)  # clocks are set back
            step, parity = found.shards[0].step, tuple(v for v in sure if v is not None)
            commit = Commit(found.generation, step, found.shards, parity, at)
            if len(commit.parity) != len(sure):
                return None
            try:
                commit.files()
            except ValueError as error:
                self._bad |= set(found.marks.values())
                self.say(f"step {commit.step} is not committed: parts of {error} are missing or overlap")
                return None
            text = commit.sealed()
            failpoint("vault-commit")
            for where in holders:
                try:
                    where.put_commit(commit.generation, text, self.job)
                except OSError as error:  # another host gets the record later
                    if isinstance(where, LocalDomain):
                        raise
                    lacks = f"d{where.number} has no record of it: {error.strerror}"
                    self.say(f"generation {commit.generation} is committed, but {lacks}")
                failpoint("vault-committed")
        self.say(f"generation {commit.generation}, step {commit.step}, is committed")
        return commit.generation


def has_commit(here: LocalDomain, commit: Commit, job: Job) -> bool:
    """True if a domain has an undamaged commit record of the generation."""
    with suppress(OSError):
        return here.commit_in(commit.generation, job) is not None
    return False


def repair_commit(here: LocalDomain, commit: Commit, job: Job) -> bool:
    """Write the commit record of a generation in a domain, if needed.

    Returns True if it was missing or damaged. Raises: OSError.
    """
    if has_commit(here, commit, job):
        return False
    with here.locked(LOCKED) as mine:  # a committer writes the same text
        if mine:
            write_whole(here.commit(commit.generation), commit.sealed())
    return mine


def repair_job(here: LocalDomain, job: Job) -> bool:
    """The same for the identity record of the vault. Raises: OSError."""
    with suppress(OSError):
        if read_sealed(here.job()) == job.sealed():
            return False
    write_whole(here.job(), job.sealed())
    return True


def _follows(shards: Sequence[Shard], newest: Commit | None) -> bool:
    """True if the shards can be replayed from `newest`.

    True too if they are complete: then they do not depend on another generation.
    """
    depths = {shard.depth for shard in shards}
    if depths == {0}:
        return True
    if len(depths) != 1 or newest is None:
        return False
    before = newest.shards[0]
    return (newest.generation + 1, before.run, newest.depth + 1) == (
        shards[0].generation,
        shards[0].run,
        shards[0].depth,
    ) and all(one.base == other.base for one, other in zip(shards, newest.shards, strict=True))


def _have_room(path: Path, size: int) -> None:
    with suppress(OSError):  # no room: the save that needs it says so
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if size and not os.fstat(fd).st_size:
                os.posix_fallocate(fd, 0, size)  # which never makes a file shorter
        finally:
            os.close(fd)


def _is_all_there(memory: Memory, number: int) -> bool:
    pieces = [memory.arena(rank) for rank in memory.job.domains[number]] + [memory.parity(number)]
    return all(p is not None and all(p.is_intact(low) for low in range(0, p.size, CHUNK)) for p in pieces)


def heal(memory: Memory, number: int) -> int:
    """Rebuild a domain's lost and damaged chunks of a committed generation.

    Returns the number of rebuilt chunks. Other damage remains; a later read rejects it. Raises: OSError.
    """
    here = LocalDomain(memory.home, number)
    count = 0
    for rank in memory.job.domains[number]:
        piece = memory.arena(rank)
        assert piece is not None
        count += _healed(memory, here, piece, partial(memory.made, rank))
    kept = memory.parity(number)
    if kept is not None and kept.size:
        count += _healed(memory, here, kept, partial(memory.parity_made, number))
    return count


def _healed(memory: Memory, here: LocalDomain, piece: ChunkedFile, made: Callable[[int, Bytes], None]) -> int:
    count = 0
    for low in range(0, piece.size, CHUNK):
        if piece.is_intact(low):
            continue
        data = np.empty(min(CHUNK, piece.size - low), np.uint8)
        with suppress(LostBytes):
            made(low, data)
            with hold_lock(here.lock("commit"), wait=LOCKED) as mine:  # while it is held, no slot is released
                newest = next(iter(get_commits(memory.home, memory.job)), None)
                if not mine or newest is None or not newest.needs(memory.commit.generation):
                    return count
                _put(piece, low, data)
                failpoint("vault-healed")
            count += 1
    return count


def _put(piece: ChunkedFile, low: int, data: Bytes) -> None:
    """Raises: OSError."""
    fd = os.open(piece.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        allocate(fd, piece.size)
        write_all(fd, data.data, low)
    except OSError as error:  # an error of an open file does not name the file
        error.filename = error.filename or str(piece.path)
        raise
    finally:
        os.close(fd)
    piece.mark_rewritten(low // CHUNK)
