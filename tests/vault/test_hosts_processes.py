"""Real processes on several hosts, killed at each point.

Each host is a folder here.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.vault.keys import keys_of
from tests.vault.small import read
from tests.vault.test_processes import PATIENCE, RANKS, SERVERS, SIZES, WRITERS, Processes
from ucpl.errors import UcplError
from ucpl.storage.vaults import remote_domain
from ucpl.vault import Vault, Writer


class Hosts(Processes):
    """A server and a rank on each."""

    def make(self) -> None:
        """self.home: where one looks who sees the folders of all."""
        self.ports = free_ports(RANKS)
        self.home.mkdir()
        for number in range(RANKS):
            self.make_host(number)
            os.symlink(self.home_of(number) / f"d{number}", self.home / f"d{number}")

    def make_host(self, number: int) -> None:
        at = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        how = {"ranks": RANKS, "domains": RANKS, "protect": "raim5"}
        Vault.make(self.home_of(number), **how, hosts=at, keys=keys_of(number))  # type: ignore[arg-type]

    def home_of(self, number: int) -> Path:
        return self.home.parent / f"host{number}" / "job"

    def writer(self, rank: int, run: str) -> Writer:
        """Once all servers answer."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return super().writer(rank, run)
            except UcplError as error:
                if error.diagnostics[0].code != "E697" or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def lose(self, number: int) -> None:
        """The host is gone; another takes its place, and has nothing yet."""
        shutil.rmtree(self.home_of(number).parent)
        self.make_host(number)


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path / "job")
    yield made
    made.kill()


CASES = [("writer 1", point, hit) for point in WRITERS for hit in (1, 3)]
CASES += [("server 0" if "commit" not in point else "servers", point, hit) for point in SERVERS for hit in (1, 2)]


@pytest.mark.fault(
    "Vaults",
    "several hosts with real connections: SIGKILL at eleven failpoints, lost and replaced hosts (F2 to F8)",
    "as on one host",
)
@pytest.mark.parametrize(("who", "point", "hit"), CASES)
def test_a_killed_process_leaves_one_generation_and_all_are_restarted(hosts, who, point, hit):
    """After one kill, all processes are killed and restarted."""
    traps = [f"server {d}" for d in range(RANKS)] if who == "servers" else [who]
    hosts.start("first", range(1, 7), dict.fromkeys(traps, f"{point}:{hit}:kill"))
    hosts.until([hosts.pid(one) for one in traps], stopped=False)
    hosts.kill()
    there = hosts.read()
    assert there in range(7)
    hosts.start("second", range(10, 12), {})
    hosts.finish()
    assert hosts.read() == 11


@pytest.mark.parametrize("lost", range(RANKS))
def test_a_host_that_dies_in_the_middle_of_a_save_is_replaced(hosts, lost):
    hosts.start("first", range(1, 6), {f"writer {lost}": "vault-chunk:3:kill"})
    hosts.until([hosts.writers[lost]], stopped=False)
    hosts.kill()
    there = hosts.read()
    hosts.lose(lost)
    assert hosts.read() == there
    hosts.start("second", range(10, 13), {})
    hosts.finish()
    assert hosts.read() == 12
    hosts.lose((lost + 1) % RANKS)
    assert hosts.read() == 12


def test_a_hanging_server_blocks_nobody_for_long(hosts, monkeypatch):
    """It does not answer, and no new generation commits.

    Committed ones are read without it. After it resumes, all continue.
    """
    monkeypatch.setattr(remote_domain, "PATIENCE", 0.5)
    hosts.start("first", range(1, 4), {"server 0": "vault-parity:4:stop"})
    hosts.until([hosts.servers[0]], stopped=True)
    there = hosts.read()
    assert there in (0, 1, 2)
    if there:
        assert read(hosts.home_of(1), RANKS, SIZES) == there
    os.kill(hosts.servers[0], signal.SIGCONT)
    hosts.finish()
    assert hosts.read() == 3
