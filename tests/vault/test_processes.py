"""Real processes of a small job and its servers, killed or hanging.

This happens at each point of their work. They are forked, because an import of torch takes a second. This process reads
their files; then all are restarted.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.vault.small import content, give, read
from ucpl.errors import UcplError
from ucpl.runtime.failpoints import set_failpoints
from ucpl.vault import Vault, Writer, arenas
from ucpl.vault.files import ToSave, text_file
from ucpl.vault.server import Server

RANKS, SIZES = 3, (5000, 2_100_000, 1)
WRITERS = ("vault-begun", "vault-room", "vault-chunk", "vault-copied", "vault-told")
SERVERS = ("vault-room", "vault-parity", "vault-protected", "vault-voted", "vault-commit", "vault-committed")
PATIENCE = 20.0


def forked(act: Callable[[], None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class Processes:
    """Ranks and servers of one vault."""

    def __init__(self, home: Path) -> None:
        self.home, self.beside = home, False
        self.make()
        self.writers: dict[int, int] = {}
        self.servers: dict[int, int] = {}

    def make(self) -> None:
        Vault.make(self.home, ranks=RANKS, domains=RANKS, protect="raim5")

    def home_of(self, number: int) -> Path:
        """The vault as seen from a domain, and its rank."""
        return self.home

    def start(
        self, run: str, steps: range, traps: dict[str, str], first: Callable[[int], None] = lambda _: None
    ) -> None:
        """Start the processes.

        traps: the fault of "writer 0" or "server 2".
        first: an action of each writer before its work.
        """

        def serve(number: int) -> None:
            set_failpoints(traps.get(f"server {number}", ""))
            with Server(self.home_of(number), number) as server:
                while True:
                    with suppress(OSError):  # another host does not answer
                        server.turn()
                    time.sleep(0.006)

        def write(rank: int) -> None:
            first(rank)
            set_failpoints(traps.get(f"writer {rank}", ""))
            with self.writer(rank, run) as writer:

                def files(step: int) -> list[ToSave]:
                    return [text_file(f"rank-{rank}", content(step, rank, SIZES))]

                give(writer, files)
                for step in steps:
                    writer.save(step, None)
                end = time.monotonic() + PATIENCE
                while (writer.committed() or (0, 0))[1] != steps[-1] and time.monotonic() < end:
                    time.sleep(0.002)

        for number in range(RANKS):
            self.servers[number] = forked(lambda number=number: serve(number))  # type: ignore[misc]
        for rank in range(RANKS):
            self.writers[rank] = forked(lambda rank=rank: write(rank))  # type: ignore[misc]

    def writer(self, rank: int, run: str) -> Writer:
        return Vault.at(self.home_of(rank)).writer(rank, run=run, wait=PATIENCE, strict=True, beside=self.beside)

    def pid(self, who: str) -> int:
        kind, _, number = who.partition(" ")
        return (self.writers if kind == "writer" else self.servers)[int(number)]

    def until(self, pids: list[int], *, stopped: bool) -> None:
        """Wait until one of these processes is dead or hangs."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for pid in pids:
                found, status = os.waitpid(pid, os.WNOHANG | (os.WUNTRACED if stopped else 0))
                if found:
                    assert os.WIFSTOPPED(status) if stopped else os.WTERMSIG(status) == signal.SIGKILL
                    for some in (self.writers, self.servers) if not stopped else ():
                        for key in [key for key, one in some.items() if one == pid]:
                            del some[key]
                    return
            time.sleep(0.002)
        raise AssertionError("nothing happened")

    def finish(self) -> None:
        """Wait until all ranks end, and stop the servers."""
        for pid in self.writers.values():
            assert os.waitpid(pid, 0)[1] == 0
        self.writers.clear()
        self.kill()

    def kill(self) -> None:
        for some in (self.writers, self.servers):
            for pid in some.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            some.clear()

    def read(self) -> int:
        """The step that is there; 0: none was committed."""
        try:
            return read(self.home, RANKS, SIZES)
        except UcplError as error:
            assert error.diagnostics[0].code == "E692"
            return 0


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path / "job")
    yield made
    made.kill()


CASES = [("writer 1", point, hit) for point in WRITERS for hit in (1, 3)]
CASES += [("server 0" if "commit" not in point else "servers", point, hit) for point in SERVERS for hit in (1, 2)]


@pytest.mark.fault(
    "Vaults",
    "SIGKILL of a rank, a server or all, at eleven failpoints of real processes (F1 to F3, F5, F6)",
    "one committed snapshot, to the byte; the job continues and commits",
)
@pytest.mark.parametrize(("who", "point", "hit"), CASES)
def test_a_killed_process_leaves_one_generation_and_all_are_restarted(processes, who, point, hit):
    """F1 to F6: after one kill, all processes are killed and restarted.

    Any server may commit.
    """
    traps = [f"server {d}" for d in range(RANKS)] if who == "servers" else [who]
    processes.start("first", range(1, 7), dict.fromkeys(traps, f"{point}:{hit}:kill"))
    processes.until([processes.pid(one) for one in traps], stopped=False)
    processes.kill()
    assert processes.read() in range(7)
    processes.start("second", range(10, 12), {})
    processes.finish()
    assert processes.read() == 11


@pytest.mark.fault("Vaults", "SIGSTOP of a process (F4)", "no new snapshot commits; committed ones stay")
@pytest.mark.parametrize(("who", "point"), [("writer 1", "vault-chunk"), ("server 0", "vault-parity")])
def test_a_hanging_process_only_delays_new_commits(processes, who, point):
    """F4."""
    processes.start("first", range(1, 4), {who: f"{point}:4:stop"})
    processes.until([processes.pid(who)], stopped=True)
    there = processes.read()
    time.sleep(0.1)
    assert processes.read() == there
    assert there in (0, 1, 2)
    processes.kill()
    assert processes.read() == there


GROUPS = (  # folders of control groups, their memory limit, and the kernel's count of kills
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"),
    ("/sys/fs/cgroup", "memory.max", "memory.events"),
)


@pytest.fixture
def limited():
    """(a control group of 96 MiB, the number of kills there)."""
    for top, limit, told in GROUPS:
        group = Path(top, f"ucpl-test-{os.getpid()}")
        if not Path(top, "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
            (group / limit).write_text(str(96 << 20))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        yield group, lambda told=group / told: int(re.findall(r"^oom_kill (\d+)$", told.read_text(), re.MULTILINE)[0])
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:  # its processes are gone, and yet for a moment counted
            with suppress(OSError):
                group.rmdir()
                return
            time.sleep(0.01)
        raise AssertionError(f"{group} is still used")
    pytest.skip("no control group of memory can be made here")


@pytest.mark.fault(
    "Vaults",
    "the kernel kills a rank for its memory, in a control group of 96 MiB (F13)",
    "committed snapshots stay; all continue",
)
@pytest.mark.parametrize("hit", [1, 3, 7])
def test_a_rank_that_the_kernel_kills_for_its_memory(processes, limited, hit):
    """F13, by the kernel: a rank exceeds its memory during a save."""
    group, killed = limited

    def greedy(rank: int) -> None:
        if rank != 1:
            return
        (group / "cgroup.procs").write_text(str(os.getpid()))
        left = iter(range(hit - 1))

        def take(name: str) -> None:
            taken = []
            while name == "vault-chunk" and next(left, None) is None:
                taken.append(bytearray(b"x" * (8 << 20)))

        arenas.__dict__["failpoint"] = take

    processes.start("first", range(1, 7), {}, greedy)
    processes.until([processes.writers[1]], stopped=False)
    assert killed() == 1
    processes.kill()
    assert processes.read() in range(7)
    processes.start("second", range(10, 12), {})
    processes.finish()
    assert processes.read() == 11


@pytest.mark.fault(
    "Vaults",
    "a node (rank, server and folder) is lost during a save (F7, F8)",
    "reads rebuild it; its replacement tolerates the next loss",
)
@pytest.mark.parametrize("lost", range(RANKS))
def test_a_node_that_dies_in_the_middle_of_a_save_is_made_anew(processes, lost):
    """F7, F8: a rank, its server and its folder are lost.

    This happens in the third save; then the job restarts in other processes.
    """
    processes.start("first", range(1, 6), {f"writer {lost}": "vault-chunk:3:kill"})
    processes.until([processes.writers[lost]], stopped=False)
    there = processes.read()
    processes.kill()
    shutil.rmtree(processes.home / f"d{lost}")
    assert processes.read() == max(there, processes.read())
    processes.start("second", range(10, 13), {})
    processes.finish()
    assert processes.read() == 12
    shutil.rmtree(processes.home / f"d{(lost + 1) % RANKS}")
    assert processes.read() == 12


@pytest.mark.parametrize(("point", "hit"), [(point, hit) for point in WRITERS for hit in (1, 3)])
def test_a_kill_during_the_background_digest_leaves_one_generation(processes, point, hit):
    """The save had returned.

    It can be committed only after the digest and the record.
    """
    processes.beside = True
    processes.start("first", range(1, 7), {"writer 1": f"{point}:{hit}:kill"})
    processes.until([processes.pid("writer 1")], stopped=False)
    processes.kill()
    assert processes.read() in range(7)
    processes.start("second", range(10, 12), {})
    processes.finish()
    assert processes.read() == 11
