"""`ucpl vault drill`: inject all faults into a vault of a layout.

Real processes are killed, folders are removed, bytes are changed. Each case begins with a vault in which step 1 and
step 2 are committed. After the fault, a read either returns the exact bytes of one step that is at least the committed
one, or it fails and lacks exactly the tensors that the plan predicted. Tensors are small: a larger tensor than `MOST`
becomes a row of `MOST` bytes.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Literal

import torch
from attrs import field

from ucpl.conversion.requests import Given
from ucpl.errors import Label, UcplError, fail
from ucpl.extents import DTYPES, StoredTensor, key_text
from ucpl.live.tensors import flat_bytes, memory_of
from ucpl.records import define, frozen
from ucpl.runtime.failpoints import set_failpoints
from ucpl.storage.vaults.committed import get_commits, read_job
from ucpl.storage.vaults.domains import LocalDomain
from ucpl.storage.vaults.snapshot_folder import open_generation
from ucpl.vault.cleanup import remove_vaults
from ucpl.vault.create import Vault
from ucpl.vault.planning import VaultPlan, plan_vault
from ucpl.vault.server import Server
from ucpl.vault.writer import Writer

__all__ = ["DrillResult", "drill"]

_log = logging.getLogger("ucpl")
MOST = 20_000  # bytes of a tensor
POINTS_MAX = 100_000  # of a save and all that follows
KNOWN = 2  # the committed step before each fault
Outcome = Literal["kept", "before", "refused", "wrong"]


@define
class DrillResult:
    """The results of one kind of fault."""

    fault: str
    cases: int = 0
    kept: int = 0  # the newest step that can have been kept
    before: int = 0  # the previous step, if the fault was during the newer one
    refused: int = 0  # with the loss that the plan predicted
    wrong: list[str] = field(factory=list)  # cases in which anything else was read

    def count(self, outcome: Outcome, case: str) -> None:
        self.cases += 1
        match outcome:
            case "kept":
                self.kept += 1
            case "before":
                self.before += 1
            case "refused":
                self.refused += 1
            case "wrong":
                self.wrong.append(case)


def drill(
    call: str,
    root: Path,
    domains: Sequence[Sequence[int]] | int | None,
    protect: str | None,
    *,
    lose: int = 2,
    given: Given | None = None,
) -> tuple[VaultPlan, Generator[DrillResult]]:
    """Inject the faults in a folder, which is empty again afterwards.

    Raises: UcplError E690, E693 if a layout does not save by keys, and all errors of planning.
    """
    plan = plan_vault(call, domains, protect, given=given, most=MOST)
    if not plan.foreseen.keyed:
        what = f"{call} is a layout of a framework's files: a drill needs a layout with keys"
        fail("E693", what, Label(call), remedy="give a layout of framework torch()")
    return plan, _Drill(plan, root, lose).all()


@frozen(eq=False)
class _Drill:
    plan: VaultPlan
    root: Path
    lose: int

    @property
    def ranks(self) -> int:
        return len(self.plan.foreseen.sizes)

    def all(self) -> Generator[DrillResult]:
        base = self.root / "base"
        try:
            self._create(base)
            yield from self._lost(base)
            yield self._flipped(base)
            yield self._records(base)
            yield self._arenas(base)
            yield self._full(base)
            yield self._different_steps(base)
            yield self._twice(base)
            yield self._changed(base)
            yield self._stale(base)
            yield from self._killed(base)
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    # ---- a job --------------------------------------------------------------------------------------------------------

    def value(self, tensor: StoredTensor, step: int) -> torch.Tensor:
        """Random bytes for a stored tensor, equal on all its ranks."""
        seed = blake2b(f"{step} {tensor.file} {key_text(tensor.key)}".encode(), digest_size=7).digest()
        bare = self._bare(tensor)
        size = bare.numel() * bare.element_size()
        some = torch.randint(
            0, 256, (size,), generator=torch.Generator().manual_seed(int.from_bytes(seed)), dtype=torch.uint8
        )
        return some.view(bare.dtype).reshape(bare.shape) if size else bare

    @staticmethod
    def _bare(tensor: StoredTensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=getattr(torch, DTYPES[tensor.dtype].torch))

    def _state(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        return {text: self.value(tensor, step) for text, tensor in self.plan.foreseen.keyed[rank].wanted.items()}

    def _create(self, home: Path) -> None:
        """Make a vault with both slots in use.

        Step 1 and step 2 are committed.
        """
        Vault.make(home, domains=self.plan.domains, protect=str(self.plan.scheme.protection))
        for step in (1, KNOWN):
            self._save_step(home, step)

    def _writers(self, home: Path, ends: ExitStack, run: str) -> list[Writer]:
        made = []
        for rank in range(self.ranks):
            writer = ends.enter_context(Vault.at(home).writer(rank, run=run, wait=0.0, strict=True))
            writer.keyed = self.plan.foreseen.keyed[rank]
            made.append(writer)
        return made

    def _save_step(self, home: Path, step: int) -> None:
        """Start a job that saves a step, and commit it."""
        with ExitStack() as ends:
            for writer in self._writers(home, ends, f"run {step}"):
                writer.save(step, self._state(writer.rank, step))
            self._served(home, ends)

    def _served(self, home: Path, ends: ExitStack) -> None:
        servers = [ends.enter_context(Server(home, d)) for d in range(len(self.plan.domains))]
        for server in [*servers, *servers]:
            server.turn()

    # ---- the reading after a fault -----------------------------------------------------------------------------------

    def outcome(self, home: Path, lost: Sequence[int] = (), newest: int = KNOWN) -> Outcome:
        """The result of reading a vault. lost: removed domains."""
        try:
            memory = open_generation(home)
        except UcplError:
            return "refused" if len(lost) == len(self.plan.domains) else "wrong"
        unread = set()
        step = memory.commit.step
        try:
            for rank, kept in enumerate(self.plan.foreseen.kept):
                for one in kept:
                    room = bytearray(one.size)
                    try:
                        memory.fill(rank, memoryview(room), one.at)
                    except UcplError:
                        unread.add((rank, one.tensor.file, key_text(one.tensor.key)))
                        continue
                    if bytes(room) != memory_of(self.value(one.tensor, step)):
                        return "wrong"
        finally:
            memory.close()
        if unread != self.plan.lacking(lost) or step not in (newest, KNOWN):
            return "wrong"
        return "refused" if unread else "kept" if step == newest else "before"

    def _continues(self, home: Path, step: int) -> bool:
        """True if a new job can save its next step.

        Only that step may be readable then.
        """
        self._save_step(home, step)
        return self.outcome(home, newest=step) == "kept"

    def _copy(self, home: Path, name: str = "case") -> Path:
        away = self.root / name
        shutil.rmtree(away, ignore_errors=True)
        return Path(shutil.copytree(home, away))

    def _without(self, home: Path, lost: Sequence[int]) -> Path:
        for domain in lost:
            shutil.rmtree(LocalDomain(home, domain).folder)
        return home

    # ---- the faults ---------------------------------------------------------------------------------------------------

    def _killed(self, base: Path) -> Iterator[DrillResult]:
        """F1 to F3, F5, F6, F8: kills during a save.

        The kills happen at each point of the save and of its commit.
        """
        alone = DrillResult("all killed, at each point of a save and its commit")
        lost = DrillResult("the same, and a domain lost")
        for point in range(1, POINTS_MAX):
            home = self._copy(base, "killed")
            if not self._is_killed(home, point):
                break
            what = f"point {point}"
            alone.count(self.outcome(home, newest=KNOWN + 1), what)
            for domain in range(len(self.plan.domains)):
                there = self._without(self._copy(home), [domain])
                lost.count(self.outcome(there, [domain], KNOWN + 1), f"{what}, d{domain} lost")
            if not self._continues(home, KNOWN + 2):
                alone.wrong.append(f"{what}, then restarted")
        yield alone
        yield lost

    def _is_killed(self, home: Path, point: int) -> bool:
        """Kill a job at point n of its work.

        False if it ended before.
        """
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                set_failpoints(f"vault-*:{point}:kill")
                self._save_step(home, KNOWN + 1)
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return True
        if status:
            what = f"the job of a drill cannot save in {home}, up to point {point}: check the free space"
            fail("E695", what, Label(str(home), f"status {status}"))
        return False

    def _lost(self, base: Path) -> Iterator[DrillResult]:
        """F7, F9: the loss of each set of domains.

        The size of a set is at most the requested one.
        """
        count = len(self.plan.domains)
        for size in range(1, min(self.lose, count) + 1):
            found = DrillResult(f"{size} of {count} domains lost")
            for lost in combinations(range(count), size):
                home = self._without(self._copy(base), lost)
                outcome = self.outcome(home, lost)
                found.count(outcome, f"{lost}")
                if outcome == "kept" and not self._continues(home, KNOWN + 1):
                    found.wrong.append(f"{lost}, then restarted")
            yield found

    def _data_files(self, base: Path) -> Iterator[tuple[int, Path]]:
        """Files of the committed generation: the shards and the redundancy."""
        job = read_job(base)
        assert job is not None
        commit = get_commits(base, job)[0]
        for number, ranks in enumerate(job.domains):
            here = LocalDomain(base, number)
            files = [here.arena(rank, commit.shards[rank].slot) for rank in ranks if commit.shards[rank].size]
            files += [here.parity(commit.parity[number].slot)] if commit.parity[number].size else []
            yield from ((number, path) for path in files)

    def _damage_each(self, base: Path, found: DrillResult, how: Callable[[Path], None], what: str) -> None:
        """Damage each file of bytes in turn.

        If the vault survives the loss of one domain, the damage is repaired; otherwise the read is rejected.
        """
        for number, path in self._data_files(base):
            home = self._copy(base)
            there = home / path.relative_to(base)
            how(there)
            outcome = self.outcome(home)
            if outcome == "wrong" and self.plan.guarded.loses([number]):
                outcome = self._refused(home)
            found.count(outcome, f"{what} {path.relative_to(base)}")
            if outcome == "kept":
                with ExitStack() as ends:
                    self._served(home, ends)  # heals
                if there.read_bytes() != path.read_bytes():
                    found.wrong.append(f"{what} {path.relative_to(base)}, not healed")

    def _refused(self, home: Path) -> Outcome:
        """Check that an incomplete read returns no bytes of another step."""
        memory = open_generation(home)
        try:
            for rank, kept in enumerate(self.plan.foreseen.kept):
                for one in kept:
                    room = bytearray(one.size)
                    with suppress(UcplError):
                        memory.fill(rank, memoryview(room), one.at)
                        if bytes(room) != memory_of(self.value(one.tensor, KNOWN)):
                            return "wrong"
        finally:
            memory.close()
        return "refused"

    def _flipped(self, base: Path) -> DrillResult:
        """F10."""

        def flip(path: Path) -> None:
            with open(path, "r+b") as file:
                at = path.stat().st_size // 2
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 4]))

        found = DrillResult("a flipped bit, in saves of ranks and in redundancy")
        self._damage_each(base, found, flip, "flipped")
        return found

    def _arenas(self, base: Path) -> DrillResult:
        """F11."""
        found = DrillResult("bytes truncated, emptied, removed")
        for what, how in (
            ("truncated", lambda path: os.truncate(path, path.stat().st_size // 2)),
            ("emptied", lambda path: os.truncate(path, 0)),
            ("removed", Path.unlink),
        ):
            self._damage_each(base, found, how, what)
        return found

    def _records(self, base: Path) -> DrillResult:
        """F10, F11: damaged commit records and a damaged identity record.

        The commit records of all domains but one are damaged, and the identity record of one domain.
        """
        found = DrillResult("commit records damaged, in all domains but one")
        count = len(self.plan.domains)
        for kept in range(count):
            for data in (b"", b"{}", None):
                home = self._copy(base)
                for number in range(count):
                    if number != kept:
                        for path in LocalDomain(home, number).folder.glob("commit.*.json"):
                            path.write_bytes(path.read_bytes()[:-3] if data is None else data)
                found.count(self.outcome(home), f"all but d{kept}")
        return found

    def _full(self, base: Path) -> DrillResult:
        """F12, F19: no room for a rank's save or for redundancy.

        A write that fails.
        """
        found = DrillResult("no memory, and writes that fail")
        for trap in ("vault-room:1:enospc", "vault-room:2:enospc", "vault-chunk:1:eio", "vault-copied:1:eio"):
            home = self._copy(base)
            with ExitStack() as ends:
                writers = self._writers(home, ends, "full")
                set_failpoints(trap)
                _log.disabled = True  # a save that fails says so, and is meant to
                try:
                    saved = []
                    for writer in writers:
                        writer.strict = False
                        saved.append(bool(writer.save(KNOWN + 1, self._state(writer.rank, KNOWN + 1))))
                finally:
                    set_failpoints("")
                    _log.disabled = False
                self._served(home, ends)
            outcome = self.outcome(home, newest=KNOWN + 1)
            found.count("wrong" if outcome == "kept" and not all(saved) else outcome, trap)
            if not self._continues(home, KNOWN + 2):
                found.wrong.append(f"{trap}, then restarted")
        return found

    def _different_steps(self, base: Path) -> DrillResult:
        """F14: some ranks have saved a step that others have not."""
        found = DrillResult("ranks at different steps")
        for missing in range(self.ranks if self.ranks > 1 else 0):
            home = self._copy(base)
            with ExitStack() as ends:
                for writer in self._writers(home, ends, "apart"):
                    if writer.rank != missing:
                        writer.save(KNOWN + 1, self._state(writer.rank, KNOWN + 1))
                self._served(home, ends)
            found.count(self.outcome(home), f"without rank {missing}")
        return found

    def _twice(self, base: Path) -> DrillResult:
        """F17."""
        found = DrillResult("a second writer of a rank, a second server of a domain")
        home = self._copy(base)
        with ExitStack() as ends:
            vault = Vault.at(home)
            ends.enter_context(vault.writer(0, run="one"))
            ends.enter_context(Server(home, 0))
            for who, second in (
                ("writer", lambda: vault.writer(0, run="two")),
                ("server", lambda: Server(home, 0).__enter__()),
            ):
                try:
                    second()
                except UcplError as error:
                    found.count("refused" if error.diagnostics[0].code == "E694" else "wrong", who)
                else:
                    found.count("wrong", who)
        return found

    def _changed(self, base: Path) -> DrillResult:
        """F21."""
        found = DrillResult("state changed right after a save")
        home = self._copy(base)
        with ExitStack() as ends:
            for writer in self._writers(home, ends, "changed"):
                state = self._state(writer.rank, KNOWN + 1)
                writer.save(KNOWN + 1, state)
                for tensor in state.values():
                    flat_bytes(tensor).bitwise_not_() if tensor.dim() else tensor.zero_()
            self._served(home, ends)
        found.count(self.outcome(home, newest=KNOWN + 1), "changed")
        return found

    def _stale(self, base: Path) -> DrillResult:
        """F22: files of a dead job and of a running one."""
        found = DrillResult("files of a dead job, next to a running one")
        above = self.root / "left"
        above.mkdir()
        dead, living = (Path(shutil.copytree(base, above / name)) for name in ("dead", "living"))
        with Vault.at(living).writer(0, run="lives"):
            remove_vaults(above, with_state=True)
        found.count("kept" if not dead.exists() and self.outcome(living) == "kept" else "wrong", "gc")
        return found
