"""Vaults of several hosts; each host is a folder with a port.

A host's folder does not contain the others' domains. Servers communicate over real connections of this machine. A cut
network gives no answer to requests of one side, even to pending ones.
"""

from __future__ import annotations

import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.vault.keys import authority, keys_of
from tests.vault.small import content, give, read
from ucpl.errors import UcplError
from ucpl.storage import wire
from ucpl.storage.vaults import committed, remote_domain
from ucpl.storage.vaults.committed import get_commits, get_domains
from ucpl.storage.vaults.domains import AnyDomain
from ucpl.storage.vaults.hosts import Hosts, hosts_at
from ucpl.storage.vaults.records import Job
from ucpl.storage.vaults.remote_domain import RemoteDomain
from ucpl.storage.wire import NoAnswer
from ucpl.vault import Vault, Writer, arenas, peers
from ucpl.vault import server as server_module
from ucpl.vault import writer as writer_module
from ucpl.vault.files import ToSave, text_file
from ucpl.vault.inspect import find_damage
from ucpl.vault.server import Server

SIZES = (2_100_000, 2_000_000, 1_900_000)


def listed(home: Path) -> Hosts:
    found = hosts_at(home)
    assert found is not None
    return found


class Cluster:
    """One domain and one rank per host; the network can be cut."""

    def __init__(self, top: Path, hosts: int, protect: str = "raim5") -> None:
        self.top, self.count, self.protect = top, hosts, protect
        self.ports = free_ports(hosts)
        self.homes = [top / f"host{n}" / "job" for n in range(hosts)]
        self.vaults = [self.made(n) for n in range(hosts)]
        self.servers: dict[int, Server] = {}
        self.writers: dict[int, Writer] = {}
        self.said: list[str] = []

    @property
    def listed(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def made(self, n: int) -> Vault:
        how = {"domains": self.count, "ranks": self.count, "protect": self.protect}
        return Vault.make(self.homes[n], **how, hosts=self.listed, keys=keys_of(n))  # type: ignore[arg-type]

    def serve(self, *numbers: int) -> None:
        for n in numbers or range(self.count):
            at = ("127.0.0.1", self.ports[n])
            self.servers[n] = Server(self.homes[n], n, self.said.append, at=at)
            self.servers[n].__enter__()

    def write(self, run: str) -> None:
        for writer in self.writers.values():
            writer.close()
        for n in range(self.count):
            self.writers[n] = self.vaults[n].writer(n, run=run, wait=0.0, strict=True)
            give(self.writers[n], self._files(n))

    def _files(self, n: int):
        def files(step: int) -> list[ToSave]:
            return [text_file(f"rank-{n}", content(step, n, SIZES))]

        return files

    def turn(self, *numbers: int) -> None:
        for _ in range(3):
            for n in numbers or tuple(self.servers):
                with suppress(OSError):  # the next turn tries again
                    self.servers[n].turn()

    def step(self, step: int) -> None:
        for n in range(self.count):
            self.writers[n].save(step, None)
        self.turn()

    def lose(self, n: int) -> None:
        """The host, and all that was in its memory."""
        self.servers.pop(n)._ends.close()
        self.writers.pop(n).close()
        shutil.rmtree(self.homes[n].parent)

    def read(self, n: int) -> int:
        """The step that is read on a host."""
        return read(self.homes[n], self.count, SIZES)

    def damaged(self, n: int) -> list[str]:
        """The lost or damaged parts, as seen on one host."""
        memory, found = find_damage(self.homes[n])
        memory.close()
        return [one.what for one in found]

    def voted_for(self, step: int, numbers: tuple[int, ...]) -> None:
        """All ranks save, and these servers vote; nothing counts yet."""
        for n in range(self.count):
            self.writers[n].save(step, None)
        for n in numbers:
            self.servers[n].turn()

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        for server in self.servers.values():
            server._ends.close()


@contextmanager
def cluster(top: Path, hosts: int = 3, protect: str = "raim5") -> Iterator[Cluster]:
    made = Cluster(top, hosts, protect)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def asked_at_once(monkeypatch):
    """Retry at once, and ask all peers in each turn.

    Tests know the moment when a peer returns.
    """
    monkeypatch.setattr(remote_domain, "SILENT", 0.0)
    monkeypatch.setattr(peers, "EVERY", 0.0)


class Network:
    """The pairs of hosts and domains without a connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cut: set[tuple[Path, int]] = set()
        ask, locked = RemoteDomain.ask, RemoteDomain.locked

        def cut_ask(one: RemoteDomain, *args: object, **named: object) -> bytes:
            self._demand(one)
            return ask(one, *args, **named)  # type: ignore[arg-type]

        def cut_locked(one: RemoteDomain, wait: float):
            self._demand(one)
            return locked(one, wait)

        monkeypatch.setattr(RemoteDomain, "ask", cut_ask)
        monkeypatch.setattr(RemoteDomain, "locked", cut_locked)

    def _demand(self, one: RemoteDomain) -> None:
        if (one.home, one.number) in self.cut:
            raise NoAnswer("cut")

    def between(self, made: Cluster, a: int, b: int) -> set[tuple[Path, int]]:
        return {(made.homes[a], b), (made.homes[b], a)}


def test_what_ranks_of_several_hosts_save_counts_and_is_read_on_each(tmp_path):
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        for step in (10, 20, 30):
            made.step(step)
        assert [made.read(n) for n in range(3)] == [30, 30, 30]
        for n, home in enumerate(made.homes):
            assert sorted(p.name for p in home.iterdir() if p.is_dir()) == [f"d{n}"]
            assert made.servers[n].here.commits() == [3, 2]


def test_a_host_that_is_lost_is_made_up_for_and_replaced_elsewhere(tmp_path):
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.step(20)
        made.lose(1)
        assert [made.read(n) for n in (0, 2)] == [20, 20]
        # A replacement host with another address; the two remaining hosts have no news of it.
        made.ports[1], made.homes[1] = free_ports(1)[0], tmp_path / "other" / "job"
        made.vaults[1] = made.made(1)
        made.serve(1)
        made.turn()
        assert all(listed(home).at[1][1] == made.ports[1] for home in made.homes)
        assert [made.read(n) for n in range(3)] == [20, 20, 20]
        assert made.damaged(0) == []  # it was made anew
        made.write("second")
        made.step(30)
        made.lose(2)  # the replaced host survives the next loss
        assert [made.read(n) for n in (0, 1)] == [30, 30]


def test_two_lost_hosts_of_three_are_more_than_parity_bears(tmp_path):
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.lose(1)
        made.lose(2)
        with pytest.raises(UcplError, match="cannot be rebuilt: d1, d2"):
            made.read(0)


def test_a_server_votes_for_nothing_before_it_has_heard_all_others(tmp_path):
    """The missing peer may have the only newer commit record."""
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.servers.pop(2)._ends.close()
        made.servers.pop(0)._ends.close()
        made.serve(0)
        assert made.servers[0].turn() is None
        assert made.said[-1] == f"d0: waits for d2 at 127.0.0.1:{made.ports[2]}"
        made.writers.pop(0).close()
        with pytest.raises(UcplError, match=r"d2 of .*: no answer, so the newest committed generation is unknown"):
            made.vaults[0].writer(0, run="second")
        made.serve(2)
        made.write("second")
        made.step(20)
        assert made.read(0) == 20


@pytest.mark.fault(
    "Vaults",
    "a host is cut off right before it hears of a commit",
    "its next save fails; it overwrites nothing, and hears of the commit later",
)
def test_a_host_without_the_commit_record_overwrites_nothing(tmp_path, monkeypatch):
    """The host is cut off before it receives the record.

    Its next save fails, since it cannot know the commit. After the cut it receives the record.
    """
    network = Network(monkeypatch)
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.step(20)
        for n in range(3):
            made.writers[n].save(30, None)
        made.servers[1].turn()  # it votes
        tell = RemoteDomain.put_commit

        def put_or_cut(one: RemoteDomain, generation: int, text: bytes, job: Job) -> None:
            if one.number == 1:
                network.cut = network.between(made, 0, 1) | network.between(made, 2, 1)
                raise NoAnswer("cut")
            tell(one, generation, text, job)

        with monkeypatch.context() as cutting:
            cutting.setattr(RemoteDomain, "put_commit", put_or_cut)
            made.turn(0, 2)
        assert network.cut and made.servers[1].here.commits() == [2, 1]
        assert made.damaged(2) != []  # d1 is cut off, and its data is rebuilt
        assert 3 in made.servers[0].here.commits() or 3 in made.servers[2].here.commits()
        with pytest.raises(UcplError, match=r"E697: .*could overwrite"):
            made.writers[1].save(40, None)
        network.cut.clear()
        assert made.read(2) == 30
        made.turn()
        assert 3 in made.servers[1].here.commits()
        made.write("second")
        made.step(50)
        assert [made.read(n) for n in range(3)] == [50, 50, 50]


def test_a_vote_for_what_never_counted_is_taken_back_once_all_say_so(tmp_path, monkeypatch):
    network = Network(monkeypatch)
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.writers[0].save(20, None)
        made.writers[1].save(20, None)
        made.writers[2].save(20, None)
        made.servers[1].turn()  # it votes; the job is killed before another does
        made.write("second")
        network.cut = network.between(made, 0, 1)
        with pytest.raises(UcplError, match=r"E697: .*could overwrite"):
            made.writers[1].save(30, None)
        network.cut.clear()
        made.write("third")
        made.step(40)
        assert made.read(1) == 40


@pytest.mark.fault("Vaults", "a replaced host returns", "it gets no data, and ends")
def test_a_replaced_host_that_returns_gets_no_answer(tmp_path):
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        old, old_home, old_port = made.servers[1], made.homes[1], made.ports[1]
        made.ports[1], made.homes[1] = free_ports(1)[0], tmp_path / "other" / "job"
        with pytest.raises(UcplError, match=f"has a server already, at 127.0.0.1:{old_port}"):
            made.vaults[1] = made.made(1)
            made.serve(1)  # the old one answers: nothing is replaced by mistake
        assert old._others is not None and old._others._giving is not None
        old._others._giving.close()  # cut off, and taken for lost
        made.serve(1)
        made.turn()
        stale = RemoteDomain(old_home, 0, listed(old_home))
        with pytest.raises(OSError, match="d1 is now served by "), stale.locked(0.0):
            pass
        with pytest.raises(UcplError, match=r"is now served by .*: this server ends"):
            old.turn()
        assert made.read(1) == 10
        old._ends.close()


def test_a_host_that_hears_nobody_when_it_starts_replaces_none_that_lives(tmp_path, monkeypatch):
    network = Network(monkeypatch)
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        old, old_home, old_vault = made.servers[1], made.homes[1], made.vaults[1]
        old_port, made.ports[1], made.homes[1] = made.ports[1], free_ports(1)[0], tmp_path / "other" / "job"
        made.vaults[1] = made.made(1)
        network.cut = network.between(made, 1, 0) | network.between(made, 1, 2)
        made.serve(1)  # a second one, cut off from all
        new = made.servers[1]
        assert new._others is not None and new._others.seat == 0
        assert new.turn() is None
        network.cut.clear()
        remote_domain._silent.clear()
        with pytest.raises(UcplError, match=f"has a server already, at 127.0.0.1:{old_port}"):
            new.turn()
        new._ends.close()
        made.servers[1], made.homes[1], made.vaults[1] = old, old_home, old_vault
        made.step(20)
        assert [made.read(n) for n in range(3)] == [20, 20, 20]


@pytest.mark.fault(
    "Vaults", "a host without a certificate, requests for other files, a commit without the lock", "refused"
)
def test_hosts_without_a_certificate_get_nothing_and_members_only_what_a_vault_has(tmp_path):
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        hosts = listed(made.homes[0])
        (made.homes[1].parent / "other").write_text("mine")
        good = RemoteDomain(made.homes[0], 1, hosts)
        assert good.ask({"op": "bytes", "name": "r1.s0", "low": 0, "high": 4}) == content(10, 1, SIZES)[:4]
        for name in ("../other", "server.lock", "r1.s0.json.new", "/etc/passwd", "r1.s2", "", 3):
            with pytest.raises(OSError, match=r"does not answer|says"):
                good.ask({"op": "bytes", "name": name, "low": 0, "high": 4})
        text = good.text("commit.1.json", "raw", bytes)
        assert text is not None
        for question in (
            {"op": "commit", "generation": 1, "text": text.decode()},
            {"op": "unknown"},
            {},
            {"op": "lock"},
        ):
            with pytest.raises(OSError, match=r"does not answer|says"):
                good.ask(question)
        with good.locked(0.0) as mine:
            assert mine
            with pytest.raises(OSError, match="no generation of the vault"):
                good.put_commit(7, text, made.vaults[0].job)
            other = RemoteDomain(made.homes[0], 1, hosts)
            with other.locked(0.0) as theirs:
                assert not theirs
        with other.locked(5.0) as theirs:  # it is free once the connection has ended
            assert theirs
        keys = authority("second") / "d0"
        stranger = Vault.make(tmp_path / "stranger/job", domains=3, ranks=3, hosts=made.listed, keys=keys)
        with pytest.raises(OSError, match="has no certificate of this vault's authority"):
            RemoteDomain(stranger.home, 1, listed(stranger.home)).ask({"op": "names"})
        assert get_commits(stranger.home, stranger.job) == []


def test_a_server_that_was_started_anew_answers_at_once(tmp_path):
    """Though the connection is of the one before."""
    with cluster(tmp_path) as made:
        made.serve()
        one = RemoteDomain(made.homes[0], 1, listed(made.homes[0]))
        assert one.names() == ["job.json"]
        made.servers.pop(1)._ends.close()
        made.serve(1)
        assert one.ask({"op": "names"}) == b'["job.json"]'


def put_nothing(one: RemoteDomain, generation: int, text: bytes, job: Job) -> None:
    """A replacement of `RemoteDomain.put_commit` that sends no commit record."""
    raise NoAnswer("cut")


@pytest.mark.fault("Vaults", "a host with a lock stops", "the lock is released; a late commit of that host is refused")
def test_a_lock_of_a_silent_host_is_released(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "HOLDS", 0.2)
    with cluster(tmp_path) as made:
        made.serve()
        made.turn()
        one, other = (RemoteDomain(made.homes[0], 1, listed(made.homes[0])) for _ in range(2))
        with one.locked(0.0) as mine:
            assert mine
            end = time.monotonic() + 10
            theirs = False
            while not theirs and time.monotonic() < end:
                with other.locked(0.1) as theirs:
                    pass
            assert theirs
            with pytest.raises(OSError, match="does not answer"):
                one.put_commit(1, b"", made.vaults[0].job)


def test_a_host_that_has_given_its_lock_and_says_no_more_ends_what_needs_it(tmp_path, monkeypatch):
    """It may have the only commit record.

    Silence is no permission to overwrite the generation.
    """
    ask = RemoteDomain.ask

    def silent(one: RemoteDomain, *args: object, **named: object) -> bytes:
        if one.number == 0:
            raise NoAnswer("it says no more")
        return ask(one, *args, **named)  # type: ignore[arg-type]

    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.step(20)
        made.voted_for(30, (1, 2))
        with monkeypatch.context() as cutting:
            cutting.setattr(RemoteDomain, "put_commit", put_nothing)
            made.servers[0].turn()
        assert [made.servers[n].here.commits()[0] for n in range(3)] == [3, 2, 2]
        with monkeypatch.context() as cutting:
            cutting.setattr(RemoteDomain, "ask", silent)
            for n in (1, 2):
                with pytest.raises(UcplError, match="it says no more"):
                    made.writers[n].save(40, None)
        assert made.read(0) == 30
        assert made.damaged(0) == []


def test_a_server_that_was_restarted_is_asked_under_its_lock_though_it_was_silent_a_moment_ago(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_domain, "SILENT", 30.0)

    with cluster(tmp_path) as made:
        made.serve()
        for server in made.servers.values():
            server._others.have_answered(server._take_up)  # type: ignore[union-attr]
        remote_domain._silent.clear()
        made.turn()
        made.write("first")
        made.step(10)
        made.step(20)
        made.voted_for(30, (1, 2))
        with monkeypatch.context() as cutting:
            cutting.setattr(RemoteDomain, "put_commit", put_nothing)
            made.servers[0].turn()
        made.servers.pop(0)._ends.close()
        with pytest.raises(UcplError, match=r"E697: .*could overwrite"):
            made.writers[1].save(40, None)  # from now on d0 is not asked for a while
        made.serve(0)
        remote_domain._silent.clear()
        made.turn(0)
        remote_domain._silent[("127.0.0.1", made.ports[0])] = time.monotonic() + 30, 30.0
        assert made.writers[1].save(50, None), "it was told what counts, and writes where that is not"
        remote_domain._silent.clear()
        assert made.read(0) == 30
        assert made.damaged(0) == []


def test_parity_of_what_counts_since_it_was_looked_at_is_not_written_over(tmp_path, monkeypatch):
    """Between the look and the write, another server commits.

    All ranks save once more.
    """
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.step(20)
        made.voted_for(30, (1, 2))
        before, meanwhile = committed.get_shards, [made.homes[1]]

        def slow(holders, job, slots):
            if meanwhile:
                meanwhile.clear()
                made.servers[0].turn()
                for n in range(3):
                    made.writers[n].save(40, None)
            return before(holders, job, slots)

        monkeypatch.setattr(server_module, "get_shards", slow)
        made.servers[1].turn()
        assert get_commits(made.homes[0], made.vaults[0].job)[0].generation == 3
        assert made.damaged(0) == []
        made.turn()
        assert made.read(0) == 40


def test_what_could_not_be_taken_up_is_taken_up_later(tmp_path, monkeypatch):
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        made.lose(1)
        made.ports[1], made.homes[1] = free_ports(1)[0], tmp_path / "other" / "job"
        made.vaults[1] = made.made(1)
        made.serve(1)
        full = iter(range(1))

        def room(name: str) -> None:
            if name == "vault-room" and next(full, None) is not None:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(arenas, "failpoint", room)
        with pytest.raises(OSError, match="No space"):
            made.servers[1].turn()
        assert made.damaged(0) != []
        made.turn()
        assert made.damaged(0) == []


def test_half_a_question_holds_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "HOLDS", 0.2)
    monkeypatch.setattr(wire, "STALLED", 0.2)
    with cluster(tmp_path) as made:
        made.serve()
        made.turn()
        one, other = (RemoteDomain(made.homes[0], 1, listed(made.homes[0])) for _ in range(2))
        with one.locked(0.0) as mine:
            assert mine and one._holds is not None
            one._holds.socket.sendall(struct.pack("!Q", 1000) + b'{"op":')
            end, theirs = time.monotonic() + 10, False
            while not theirs and time.monotonic() < end:
                with other.locked(0.1) as theirs:
                    pass
            assert theirs


def test_strangers_who_say_nothing_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "STALLED", 2.0)
    with cluster(tmp_path, 2, "mirror") as made:
        made.serve()
        with ExitStack() as ends:
            for _ in range(wire.STRANGERS + 40):
                ends.enter_context(socket.create_connection(("127.0.0.1", made.ports[1])))
            end, answered, most = time.monotonic() + 15, False, 0
            while not answered and time.monotonic() < end:
                most = max(most, sum(thread.name == "ucpl-serving" for thread in threading.enumerate()))
                answered = (
                    most > wire.STRANGERS // 2 and RemoteDomain(made.homes[0], 1, listed(made.homes[0])).is_there()
                )
            assert answered
            assert most <= wire.STRANGERS + 8


NOT_A_NUMBER = b'{"op": "lock", "wait": NaN, "by": [0, 0], "domain": 1}'


@pytest.mark.parametrize("garbage", [b"[]", b"3", b"{", b"[" * 100_000, NOT_A_NUMBER])
def test_what_is_no_question_ends_its_connection_and_nothing_else(tmp_path, garbage):
    with cluster(tmp_path, 2, "mirror") as made:
        made.serve()
        one = RemoteDomain(made.homes[0], 1, listed(made.homes[0]))
        channel = one._line().taken()
        channel.send(garbage)
        with suppress(EOFError, OSError):
            assert channel.poll(5) and channel.receive()
        channel.close()
        assert one.is_there()


def test_a_list_of_hosts_that_is_damaged_is_not_taken_for_none(tmp_path):
    """Without the list, a rank would overwrite a possibly committed save."""
    with cluster(tmp_path) as made:
        made.serve()
        made.write("first")
        made.step(10)
        (made.homes[1] / "hosts.json").write_bytes(b"{")
        with pytest.raises(UcplError, match="the list of hosts is damaged"):
            made.writers[1].save(20, None)
        made.servers.pop(1)._ends.close()
        with pytest.raises(UcplError, match="the list of hosts is damaged"):
            made.serve(1)
        made.servers.pop(1, None)
        made.made(1)  # `ucpl vault serve --hosts` makes it anew
        made.serve(1)
        made.turn()
        assert made.read(1) == 10


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"hosts": "a:1,b:2"}, "`hosts` and `keys` go together"),
        ({"hosts": "a:1,b", "keys": "good"}, "`b` is not HOST:PORT"),
        ({"hosts": "a:1,b:70000", "keys": "good"}, "`b:70000` is not HOST:PORT"),
        ({"hosts": "a:1,b:2,c:3", "keys": "good"}, "3 hosts are listed for 2 domains"),
        ({"hosts": "a:1,b:2", "keys": "open"}, "E687: .*tls.key: its mode, 0644, lets other users read or change it"),
        ({"hosts": "a:1,b:2", "keys": "mixed"}, "E687: .*tls.crt and tls.key cannot be used: key values mismatch"),
        ({"hosts": "a:1,b:2", "keys": "foreign"}, "E687: .*it is not valid under ca.crt"),
        ({"hosts": "a:1,b:2", "keys": "absent"}, "E687: absent|E687: .*absent/ca.crt: No such file"),
        ({"hosts": "a:1,b:2", "keys": "d5"}, "E687: .*is not the certificate of a host of this vault"),
    ],
)
def test_a_list_of_hosts_must_fit_the_vault(tmp_path, monkeypatch, said, match):
    monkeypatch.chdir(tmp_path)
    for name in ("good", "open", "mixed", "foreign"):
        shutil.copytree(keys_of(0), name)
    shutil.copytree(keys_of(5), "d5")
    Path("open/tls.key").chmod(0o644)
    shutil.copy(keys_of(1) / "tls.key", "mixed")
    shutil.copy(authority("second") / "ca.crt", "foreign")
    with pytest.raises(UcplError, match=match):
        Vault.make(tmp_path / "job", domains=2, ranks=2, **said)


def test_hosts_of_one_authority_are_one_vault_and_of_another_another(tmp_path):
    with cluster(tmp_path) as made:
        assert len({vault.job.ident for vault in made.vaults}) == 1
        assert (made.homes[0] / "hosts.json").stat().st_mode & 0o077 == 0
        how = {"domains": 3, "ranks": 3, "protect": "raim5", "keys": authority("second") / "d0"}
        with pytest.raises(UcplError, match="is the vault of another job, or its keys are of another authority"):
            Vault.make(made.homes[0], hosts=made.listed, **how)  # type: ignore[arg-type]


def test_a_server_that_is_begun_anew_is_known_at_once(tmp_path):
    """Requests with the old list are rejected.

    A save in between would be lost.
    """
    with cluster(tmp_path) as here:
        here.serve()
        here.write("first")
        here.step(1)
        here.servers.pop(0)._ends.close()
        here.serve(0)
        seats = [listed(home).seats[0] for home in here.homes]
        assert seats[0] and len(set(seats)) == 1


def test_who_asks_with_an_older_list_asks_once_more(tmp_path, monkeypatch):
    """A rank with an open vote reads the list again.

    Its own server has updated the list.
    """
    with cluster(tmp_path) as here:
        here.serve()
        here.write("first")
        here.step(1)
        here.voted_for(2, (0,))
        old, tried = listed(here.homes[0]), []

        def stale(home: Path, job: Job) -> list[AnyDomain]:
            tried.append(home)
            found = get_domains(home, job)
            for one in found if len(tried) < 3 else ():
                if isinstance(one, RemoteDomain):
                    one.hosts = Hosts(old.keys, old.at, tuple(0 for _ in old.seats), old.job)
            return found

        monkeypatch.setattr(writer_module, "get_domains", stale)
        assert here.writers[0].save(3, None) and len(tried) >= 3
