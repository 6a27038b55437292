"""The state machine over several hosts, with a network that is cut.

Each host has its own folder, and queries the others over real connections. The oracle is compared with a reader of all
folders. A cut may delay a host's commit record, and must never undo a commit.
"""

from __future__ import annotations

import os
import shutil

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.ports import free_ports
from tests.vault.keys import keys_of
from tests.vault.test_machine import STEPS_MAX, Machine
from ucpl.errors import UcplError
from ucpl.storage.vaults import remote_domain
from ucpl.storage.vaults.remote_domain import RemoteDomain
from ucpl.storage.wire import NoAnswer
from ucpl.vault import Vault, Writer, peers
from ucpl.vault.server import Server

SHAPES = [
    (2, 1, "none"),
    (3, 1, "none"),
    (2, 1, "mirror"),
    (3, 1, "raim5"),
    (3, 2, "mirror"),
    (4, 1, "raim5"),
    (3, 1, "mirror(2)"),
    (4, 1, "rs(2, 2)"),
]


class HostsMachine(Machine):
    """A host for each domain."""

    @initialize(shape=st.sampled_from(SHAPES), replays=st.sampled_from([0, 0, 2]))
    def begin(self, shape: tuple[int, int, str], replays: int) -> None:
        self.cut: set[frozenset[int]] = set()
        self.fuses: list[tuple[int, frozenset[int]]] = []  # (number of questions until the cut, hosts to cut off)
        self._real = RemoteDomain.ask, RemoteDomain.locked, remote_domain.SILENT, peers.EVERY
        ask, locked = RemoteDomain.ask, RemoteDomain.locked

        def cut_ask(one: RemoteDomain, *args: object, **named: object) -> bytes:
            self._demand(one)
            return ask(one, *args, **named)  # type: ignore[arg-type]

        def cut_locked(one: RemoteDomain, wait: float):
            self._demand(one)
            return locked(one, min(wait, 0.2))

        RemoteDomain.ask, RemoteDomain.locked = cut_ask, cut_locked  # type: ignore[method-assign,assignment]
        remote_domain.SILENT = peers.EVERY = 0.0
        super().begin(shape, replays)

    def _demand(self, one: RemoteDomain) -> None:
        here = self.homes.index(one.home)
        self.fuses = [(left - 1, pair) for left, pair in self.fuses]
        self.cut |= {pair for left, pair in self.fuses if left < 0}
        self.fuses = [(left, pair) for left, pair in self.fuses if left >= 0]
        if frozenset((here, one.number)) in self.cut:
            raise NoAnswer(f"cut between {here} and {one.number}")

    def _made(self, shape: tuple[int, int, str]) -> Vault:
        self.shape = shape
        self.ports = free_ports(self.domains)
        self.homes = [self.top / f"host{n}" / "job" for n in range(self.domains)]
        self.vaults = [self._on_host(n) for n in range(self.domains)]
        everywhere = self.top / "everywhere" / "job"
        everywhere.mkdir(parents=True)
        for n, home in enumerate(self.homes):
            os.symlink(home / f"d{n}", everywhere / f"d{n}")
        return Vault(everywhere, self.vaults[0].job)

    def _on_host(self, n: int) -> Vault:
        at = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        how = {"ranks": self.ranks, "domains": self.domains, "protect": self.shape[2], "replays": self.replays}
        return Vault.make(self.homes[n], **how, hosts=at, keys=keys_of(n))  # type: ignore[arg-type]

    def _vault(self, number: int) -> Vault:
        return self.vaults[number]

    def _server(self, number: int) -> Server:
        return Server(self.homes[number], number)

    def _start_job(self) -> None:
        """Ranks begin where all domains answer; until then there are none."""
        try:
            super()._start_job()
        except UcplError as error:
            assert error.diagnostics[0].code == "E697", error
            self._end_job()

    def _end_job(self) -> None:
        for one in self.writers:
            one.close()
        self.writers: list[Writer] = []

    def _start_server(self, number: int) -> None:
        super()._start_server(number)
        if not self.writers:
            self._start_job()

    # ---- events
    # ------------------------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 9))
    def save(self, rank: int) -> None:
        if self.writers:
            super().save(rank)

    @rule(number=st.integers(0, 9))
    def turn(self, number: int) -> None:
        number %= self.domains
        one = self.servers[number]
        super().turn(number)
        if one is not None and self.servers[number] is None and self.vaults[number].domain(number).is_there():
            self._start_server(number)  # it did not die: another did not answer
        if number in self.hurt and self.servers[number] is not None:
            self._look_whether_healed(number)

    @rule(a=st.integers(0, 9), b=st.integers(0, 9))
    def cut_between(self, a: int, b: int) -> None:
        if a % self.domains != b % self.domains:
            self.cut.add(frozenset((a % self.domains, b % self.domains)))

    @rule(number=st.integers(0, 9), after=st.integers(0, 60))
    def cut_off_in_a_while(self, number: int, after: int) -> None:
        """Cut the network during the later questions."""
        number %= self.domains
        self.fuses += [(after, frozenset((number, n))) for n in range(self.domains) if n != number]

    @rule()
    def mend(self) -> None:
        self.cut.clear()
        self.fuses.clear()

    @rule(number=st.integers(0, 9))
    def lose(self, number: int) -> None:
        """A host, which another replaces that has nothing yet."""
        number %= self.domains
        if len(self.hurt | {number}) > self.copies:
            return
        self._stop_server(number)
        self._end_job()
        shutil.rmtree(self.homes[number].parent)
        self.hurt.add(number)
        self.vaults[number] = self._on_host(number)

    @rule()
    def all_well(self) -> None:
        """Repair the network, and start servers and a job.

        Its save is committed in the end.
        """
        self.mend()
        self.saves.left = self.serves.left = None
        for number in range(self.domains):
            if self.servers[number] is None:
                self._start_server(number)
        for _ in range(2):
            self.turn_all()
        self._start_job()
        if len(self.writers) == self.ranks:
            self.step()

    def _acknowledge(self) -> None:
        """Record a commit that more intact domains have than may be lost."""
        told = [set(self.vault.domain(n).commits()) for n in range(self.domains) if n not in self.hurt]
        for generation in set().union(*told):
            if sum(generation in some for some in told) > self.copies:
                self.acknowledged = max(self.acknowledged, generation)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "_real"):
            RemoteDomain.ask, RemoteDomain.locked, remote_domain.SILENT, peers.EVERY = self._real  # type: ignore[method-assign]


@pytest.mark.fault(
    "Vaults",
    "all of it in any order, with network cuts (a Hypothesis state machine)",
    "one committed snapshot, as read from all folders",
)
@pytest.mark.parametrize("lives", [5, 15])
def test_whatever_happens_between_hosts_what_counts_is_one_generation(lives: int) -> None:
    how = settings(
        max_examples=lives, stateful_step_count=STEPS_MAX, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(HostsMachine, settings=how)
