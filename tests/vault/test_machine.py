"""A state machine over a vault, with all events in any order.

A read returns one committed generation or an error. Processes are objects here, and a kill is an exception at a
failpoint. It ends the current work, and frees the locks as the kernel does. `test_processes.py` does a part of this
with real processes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ucpl.errors import UcplError
from ucpl.storage.vaults.checksummed_text import JsonObject
from ucpl.storage.vaults.committed import get_commits, read_job
from ucpl.storage.vaults.memory import ChunkedFile, Memory
from ucpl.storage.vaults.snapshot_folder import SnapshotFile, SnapshotFolder, open_generation
from ucpl.vault import Vault, Writer, arenas, server, writer
from ucpl.vault.files import ToSave, text_file
from ucpl.vault.server import Server

STEPS_MAX = 60
SHAPES = [(2, 1, "mirror"), (2, 1, "raim5"), (3, 1, "raim5"), (3, 2, "mirror"), (4, 1, "raim5"), (5, 1, "raim5(2)"),
          (3, 1, "mirror(2)"), (2, 2, "none"), (4, 1, "rs(2, 2)"), (5, 1, "rs(3, 2)")]  # fmt: skip


class Killed(BaseException):
    """This process is no more."""


class Death:
    """Ends whoever passes the n-th failpoint from now on."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, name: str) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed(name)


def saved_bytes(run: int, generation: int, rank: int) -> dict[str, bytes]:
    """The bytes of a rank's save, unique per rank and generation.

    Files have unequal sizes; one is empty.
    """
    mark = f"{run}.{generation}.{rank}.".encode()
    return {f"r{rank}/a.txt": mark * (1 + 700 * ((rank + generation) % 3)), f"r{rank}/b.txt": mark[: rank % 2]}


class Machine(RuleBasedStateMachine):
    """One job, its vault, and the oracle: the saves of all runs.

    If the vault allows replays, ranks save gradients when possible, except for every fifth save.
    """

    @initialize(shape=st.sampled_from(SHAPES), replays=st.sampled_from([0, 0, 1, 2, 3]))
    def begin(self, shape: tuple[int, int, str], replays: int) -> None:
        self.top, self.replays = Path(tempfile.mkdtemp(prefix="ucpl-machine-")), replays
        domains, each, _ = shape
        self.domains, self.ranks = domains, domains * each
        self.vault = self._made(shape)
        self.copies = self.vault.job.protection.copies
        self.saves, self.serves = Death(), Death()
        arenas.failpoint, writer.failpoint, server.failpoint = self.saves, self.saves, self.serves  # type: ignore[attr-defined]
        self.run = 0
        self.writers: list[Writer] = []
        self.servers: list[Server | None] = [None] * domains
        self.hurt: set[int] = set()  # domains that lack something since they were healed
        self.acknowledged = 0
        self._start_job()
        for number in range(domains):
            self._start_server(number)

    def _made(self, shape: tuple[int, int, str]) -> Vault:
        """The vault as one sees it who sees all domains."""
        how = {"ranks": self.ranks, "domains": self.domains, "protect": shape[2], "replays": self.replays}
        return Vault.make(self.top / "job", **how)  # type: ignore[arg-type]

    def _vault(self, number: int) -> Vault:
        """The vault as seen from a domain."""
        return self.vault

    def _server(self, number: int) -> Server:
        return Server(self.vault.home, number)

    # ---- processes
    # -----------------------------------------------------------------------------------------------------

    def _start_job(self) -> None:
        for one in self.writers:
            one.close()
        self.run += 1
        self.writers = []
        self.calls = [0] * self.ranks
        for rank in range(self.ranks):
            made = self._vault(self.vault.job.domain_of(rank) or 0).writer(
                rank, run=str(self.run), wait=0.0, beside=False
            )
            made._collect = self._collect(rank, made)  # type: ignore[method-assign]
            self.writers.append(made)

    def _collect(self, rank: int, made: Writer):
        def told(*_: object) -> tuple[list[ToSave], JsonObject | None]:
            generation = made._next - 1
            newest = made._newest()  # which another rank may not know yet
            follows = newest is not None and made._follows(newest) and generation % 5 != 0
            files = [text_file(n, data) for n, data in saved_bytes(self.run, generation, rank).items()]
            return files, {} if follows else None

        return told

    def _start_server(self, number: int) -> None:
        one = self._server(number)
        try:
            one.__enter__()
        except Killed:
            one._ends.close()
            return
        except UcplError as error:  # all domains are gone: nobody knows any more whose vault it was
            assert error.diagnostics[0].code == "E692"
            assert len(self.hurt) == self.domains
            return
        self.servers[number] = one
        self._look_whether_healed(number)

    def _stop_server(self, number: int) -> None:
        if (one := self.servers[number]) is not None:
            one._ends.close()
            self.servers[number] = None

    def _look_whether_healed(self, number: int) -> None:
        """Check that a started server healed its domain."""
        found = get_commits(self.vault.home, self.vault.job)
        if not found:
            self.hurt.discard(number)
            return
        memory = open_generation(self.vault.home)
        pieces: list[ChunkedFile | None] = []
        for one in (*memory.before, memory):
            pieces += [*map(one.arena, self.vault.job.domains[number]), one.parity(number)]
        if all(p is not None and all(p.is_intact(low) for low in range(0, p.size, 1 << 20)) for p in pieces):
            self.hurt.discard(number)
        memory.close()

    # ---- events
    # ----------------------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 9))
    def save(self, rank: int) -> None:
        rank %= self.ranks
        if self.calls[rank] > min(self.calls):  # ranks save in step with each other
            return
        self.calls[rank] += 1
        try:
            saved = self.writers[rank].save(self.calls[rank], None)
            assert saved.error is None or saved.error.diagnostics[0].code != "E693", (
                saved.error
            )  # there is a state to save
        except Killed:
            self._start_job()

    @rule()
    def save_all(self) -> None:
        for rank in range(self.ranks):
            self.save(rank)

    @rule(number=st.integers(0, 9))
    def turn(self, number: int) -> None:
        number %= self.domains
        one = self.servers[number]
        if one is None:
            return
        try:
            one.turn()
        except Killed:
            self._stop_server(number)
        except OSError:  # its folder is gone
            self._stop_server(number)
        self._acknowledge()

    @rule()
    def turn_all(self) -> None:
        for _ in range(2):
            for number in range(self.domains):
                self.turn(number)

    @rule()
    def step(self) -> None:
        self.save_all()
        self.turn_all()

    @rule(after=st.integers(0, 15))
    def die_in_a_save(self, after: int) -> None:
        self.saves.left = after

    @rule(after=st.integers(0, 25))
    def die_in_a_server(self, after: int) -> None:
        self.serves.left = after

    @rule(number=st.integers(0, 9))
    def restart_server(self, number: int) -> None:
        number %= self.domains
        self._stop_server(number)
        self._start_server(number)

    @rule()
    def restart_job(self) -> None:
        self._start_job()

    @precondition(lambda self: len(self.hurt) < self.copies + 1)
    @rule(number=st.integers(0, 9))
    def lose(self, number: int) -> None:
        """A node: its folder, its server, and with its ranks the job."""
        number %= self.domains
        self._stop_server(number)
        shutil.rmtree(self.vault.domain(number).folder, ignore_errors=True)
        self.hurt.add(number)
        self._start_job()

    @precondition(lambda self: len(self.hurt) < self.copies + 1)
    @rule(number=st.integers(0, 9), which=st.integers(0, 99), at=st.integers(0, 10**6), bit=st.integers(0, 7))
    def flip(self, number: int, which: int, at: int, bit: int) -> None:
        number %= self.domains
        folder = self.vault.domain(number).folder
        files = sorted(p for p in folder.glob("*") if p.is_file() and p.stat().st_size and p.suffix != ".lock")
        if not files or (read_job(self.vault.home) is None):
            return
        path = files[which % len(files)]
        if path.name == "job.json":  # a majority has the same text; with two domains there is none
            return
        data = bytearray(path.read_bytes())
        data[at % len(data)] ^= 1 << bit
        with open(path, "r+b") as file:
            file.write(data)
        self.hurt.add(number)

    def _acknowledge(self) -> None:
        """Record the commit that a rank with an intact domain knows."""
        for number in range(self.domains):
            if number not in self.hurt:
                self.acknowledged = max(self.acknowledged, *self.vault.domain(number).commits(), 0)

    # ---- invariants
    # --------------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_read_is_one_generation(self) -> None:
        if not hasattr(self, "vault"):
            return
        try:
            memory = open_generation(self.vault.home)
        except UcplError as error:
            assert error.diagnostics[0].code == "E692", error
            assert self.acknowledged == 0 or len(self.hurt) > self.copies, "a generation that counted is gone"
            self.acknowledged = 0  # more domains were lost than allowed
            return
        try:
            run, generation = int(memory.commit.shards[0].run), memory.commit.generation
            assert memory.commit.depth == len(memory.before) <= self.replays
            for at, one in enumerate((*memory.before, memory), generation - len(memory.before)):
                self._demand_saved(evolve(one, before=()), run, at)
            assert generation >= self.acknowledged or len(self.hurt) > self.copies
            self.acknowledged = min(self.acknowledged, generation)
        except UcplError as error:
            assert error.diagnostics[0].code == "E691", error
            assert len(self.hurt) > self.copies, f"lost though {self.copies} may be: {sorted(self.hurt)}: {error}"
        finally:
            memory.close()

    def _demand_saved(self, memory: Memory, run: int, generation: int) -> None:
        view, parts = SnapshotFolder(memory, "vault:", Path()), memory.commit.files()
        for rank in range(self.ranks):
            for name, data in saved_bytes(run, generation, rank).items():
                room = bytearray(len(data))
                if data:
                    SnapshotFile(view, name, parts[name]).fill(memoryview(room), 0)
                assert bytes(room) == data, (name, generation, run)

    def teardown(self) -> None:
        from ucpl.runtime.failpoints import failpoint

        for module in (arenas, server, writer):
            module.failpoint = failpoint  # type: ignore[attr-defined]
        if hasattr(self, "vault"):
            for one in self.writers:
                one.close()
            for number in range(self.domains):
                self._stop_server(number)
            shutil.rmtree(self.top, ignore_errors=True)


@pytest.mark.fault(
    "Vaults",
    "all of it in any order (a Hypothesis state machine)",
    "after each step the bytes of one snapshot, at least the last committed one that the protection covers",
)
@pytest.mark.parametrize("lives", [8, 30])
def test_whatever_happens_what_is_read_is_one_generation(lives: int) -> None:
    how = settings(
        max_examples=lives, stateful_step_count=STEPS_MAX, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Machine, settings=how)
