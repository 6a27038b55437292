"""A process of another user, without keys, reads and changes nothing.

It is on the loopback address of the same host. Under root it has a user of its own. Otherwise it has the same user, and
the checks of the kernel between users are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from tests.cli.command import ROOT
from tests.vault.keys import authority, forged, keys_of
from tests.vault.small import job
from tests.vault.test_hosts import Cluster, cluster, listed
from ucpl.api import resume
from ucpl.cli import main
from ucpl.errors import UcplError
from ucpl.ranks.scattered_files import FileServer, Peer
from ucpl.storage import wire
from ucpl.storage.authentication import UnixConnector, UnixListener
from ucpl.storage.keys import Keys
from ucpl.storage.vaults import remote_domain
from ucpl.storage.vaults.domains import is_locked
from ucpl.storage.vaults.remote_domain import RemoteDomain
from ucpl.vault import Vault, cleanup, peers
from ucpl.vault.cleanup import remove_vaults
from ucpl.vault.inspect import scrub
from ucpl.vault.restore import restore_newest

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
other_users = pytest.mark.skipif(not IS_ROOT, reason="only root can start a process of another user")


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A place for everybody, as /dev/shm is."""
    with tempfile.TemporaryDirectory(prefix="ucpl-attack-") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


class Attack:
    """The process of an attacker, while members work."""

    def __init__(self, shared: Path, what: str, *arguments: object) -> None:
        script, user = Path(__file__).with_name("attacker.py"), str(NOBODY if IS_ROOT else 0)
        command = [sys.executable, "-I", str(script), user, what, json.dumps(arguments)]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, cwd=shared)

    def is_there(self) -> None:
        self.says("there")

    def says(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == f'"{word}"', self.process.communicate(timeout=60)

    def answer(self) -> Any:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return json.loads(out.strip().splitlines()[-1])


@pytest.fixture(autouse=True)
def asked_at_once(monkeypatch):
    monkeypatch.setattr(remote_domain, "SILENT", 0.0)
    monkeypatch.setattr(peers, "EVERY", 0.0)


@pytest.fixture
def made(tmp_path) -> Iterator[Cluster]:
    with cluster(tmp_path) as three:
        three.serve()
        three.write("first")
        three.step(10)
        yield three


def all_files(made: Cluster) -> dict[Path, bytes]:
    return {path: path.read_bytes() for home in made.homes for path in home.rglob("*") if path.is_file()}


@pytest.mark.fault(
    "Vaults",
    "strangers without keys: old TLS, foreign certificates, relay, replay, 1,000 slow connections",
    "nothing is read or changed; members save",
)
def test_strangers_get_no_answer_whatever_they_say(made, shared, tmp_path):
    """Requests of strangers: reads, the lock, a commit and a seat.

    They come without TLS, without a certificate, with another authority's, or in TLS 1.2.
    """
    foreign = shared / token_hex(4)
    shutil.copytree(authority("second") / "d1", foreign)
    for path in (foreign, *foreign.iterdir()):
        os.chmod(path, 0o755)
    before, port = all_files(made), made.ports[1]
    attacks = [Attack(shared, "plain", port)]
    attacks += [Attack(shared, "tls", port, keys, how) for keys in ("", str(foreign)) for how in ("", "older")]
    for attack in attacks:
        for answer in map(bytes.fromhex, attack.answer()):
            assert len(answer) < 64 and b"+" not in answer and b"job" not in answer  # an alert of TLS at most
    assert all_files(made) == before
    made.step(20)
    assert [made.read(n) for n in range(3)] == [20, 20, 20]


BAD_CERTIFICATES: dict[str, dict[str, Any]] = {
    "expired": {"days": (-9, -1)},
    "not yet": {"days": (1, 9)},
    "signed by a member": {"signer": keys_of(2)},
    "signed by itself": {"by_itself": True},
    "of a server alone": {"use": "server"},
    "for code": {"use": "code"},
}


@pytest.mark.parametrize("how", ["expired", "not yet", "signed by a member", "signed by itself", "for code"])
def test_a_server_is_not_asked_or_begun_by_a_bad_certificate(made, tmp_path, how):
    """A process at a dead host's address may have an expired certificate."""
    bad = forged(tmp_path / "bad", "d1", **BAD_CERTIFICATES[how])
    with pytest.raises(UcplError, match="E687"):
        Keys(bad).demand(frozenset(("ucpl:d1",)), "d1")
    made.servers.pop(1)._ends.close()
    before = all_files(made)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(bad / "tls.crt", bad / "tls.key")
    heard: list[bytes] = []

    def sit() -> None:
        with listener, suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with suppress(OSError), context.wrap_socket(plain, server_side=True) as channel:
                    heard.append(channel.recv(1 << 16))

    listener = socket.create_server(("127.0.0.1", made.ports[1]))
    thread = threading.Thread(target=sit)
    thread.start()
    remote_domain._silent.clear()
    remote_domain._lines.clear()
    with pytest.raises(OSError, match=r"no certificate of this vault's authority"):
        RemoteDomain(made.homes[0], 1, listed(made.homes[0])).ask({"op": "names"})
    wire.end_connection(listener)
    thread.join()
    assert not any(heard) and all_files(made) == before


def test_members_alone_come_in_and_by_tls_1_3_alone(made, tmp_path):
    """Requests by another program than ours.

    It has good keys, no certificate, one with no name of this vault, or TLS 1.2.
    """
    request = struct.pack("!Q", 27) + b'{"op": "names","domain": 1}'
    tickets: list[bool] = []

    def asked(keys: Path | None, highest: ssl.TLSVersion) -> bytes:
        context = ssl.create_default_context(cafile=str(authority() / "ca.crt"))
        context.check_hostname, context.maximum_version = False, highest
        if keys is not None:
            context.load_cert_chain(keys / "tls.crt", keys / "tls.key")
        try:
            with (
                socket.create_connection(("127.0.0.1", made.ports[1]), timeout=5) as under,
                context.wrap_socket(under) as channel,
            ):
                channel.sendall(request)
                found = channel.recv(1 << 16)
                tickets.append(channel.session is not None and channel.session.has_ticket)
                return found
        except OSError:
            return b""

    newest = ssl.TLSVersion.MAXIMUM_SUPPORTED
    assert b"job.json" in asked(keys_of(0), newest)
    assert tickets == [False]  # no session to resume
    assert b"job.json" in asked(forged(tmp_path / "good", "d0"), newest)
    for name, how in BAD_CERTIFICATES.items():
        assert asked(forged(tmp_path / name, "d0", **how), newest) == b"", name
    assert asked(None, newest) == asked(keys_of(5), newest) == asked(keys_of(0), ssl.TLSVersion.TLSv1_2) == b""


def test_members_save_while_a_thousand_strangers_say_little(made, shared, monkeypatch):
    monkeypatch.setattr(wire, "GREETING", 3.0)
    attack = Attack(shared, "slow", made.ports[1], 1000)
    attack.is_there()
    most = 0
    for saved in range(1, 5):
        for one in (made.homes[0], made.homes[2]):  # by connections of their own, too
            remote_domain._lines.clear()
            assert RemoteDomain(one, 1, listed(one)).is_there()
        made.step(10 + 10 * saved)
        assert made.servers[1].here.commits()[0] == saved + 1
        most = max(most, sum(thread.name == "ucpl-serving" for thread in threading.enumerate()))
    assert attack.process.poll() is None
    assert most < wire.STRANGERS + 32
    assert attack.answer() > 0  # they were disconnected
    assert made.read(0) == 50


def test_a_greeting_ends_in_time_however_many_bytes_come(made, shared, monkeypatch):
    monkeypatch.setattr(wire, "GREETING", 0.5)
    attack = Attack(shared, "slow", made.ports[1], 1, 400)
    attack.is_there()
    attack.says("closed")
    assert attack.answer() >= 1


@pytest.mark.parametrize("other", [0, 1])
def test_who_sits_at_the_address_of_a_host_that_is_down_is_nobody(made, shared, other):
    """All bytes are relayed to a server, and sent once more afterwards.

    The server is the caller's own or another.
    """
    made.servers.pop(2)._ends.close()
    before = all_files(made)
    attack = Attack(shared, "between", made.ports[2], made.ports[other], 1.0)
    attack.is_there()
    remote_domain._silent.clear()
    with pytest.raises(OSError, match=rf"is another process: its certificate is of ucpl:d{other}"):
        RemoteDomain(made.homes[0], 2, listed(made.homes[0])).ask({"op": "names"})
    with suppress(OSError):  # the next turn tries again
        made.servers[0].turn()
    found = attack.answer()
    assert found["calls"] >= 1 and not found["answered"] and found["replayed"] < 64 * 64
    assert {path: data for path, data in all_files(made).items() if path.suffix != ".lock"} == {
        path: data for path, data in before.items() if path.suffix != ".lock"
    }
    remote_domain._silent.clear()
    made.serve(2)
    made.turn()
    made.step(20)
    assert [made.read(n) for n in range(3)] == [20, 20, 20]


def test_a_member_speaks_for_its_own_domain_alone(made, tmp_path):
    """A server does not start with another domain's keys.

    A running one is not accepted for that domain; readers read.
    """
    made.servers.pop(1)._ends.close()
    how = {"domains": 3, "ranks": 3, "protect": "raim5", "hosts": made.listed}
    Vault.make(made.homes[1], **how, keys=keys_of(0))
    with pytest.raises(UcplError, match=r"E687: .*is not the certificate of d1"):
        made.serve(1)
    reader = Vault.make(tmp_path / "reader/job", **how, keys=authority() / "reader")
    one = RemoteDomain(reader.home, 0, listed(reader.home))
    assert "job.json" in one.names()
    seats = listed(made.homes[0]).to_table()
    for question in ({"op": "lock", "wait": 0, "by": seats["seats"]}, {"op": "hosts", **seats}, {"op": "commit"}):
        with pytest.raises(OSError, match="a reader changes nothing"):
            one.ask(question)
    assert len(json.loads(one.ask({"op": "hosts"}))["at"]) == 3
    large = {"op": "names", "more": "x" * (1 << 20)}
    with pytest.raises(OSError, match="does not answer"):
        one.ask(large)
    remote_domain._silent.clear()
    assert "job.json" in RemoteDomain(made.homes[2], 0, listed(made.homes[2])).ask(large).decode()


def test_a_member_that_moves_another_domain_away_stops_saves_until_that_restarts(made):
    """Its certificate is valid for its own seat alone.

    News of a replacement may come from any member.
    """
    at = [("127.0.0.1", port) for port in made.ports]
    seats = [0, 1 << 61, 0]
    RemoteDomain(made.homes[0], 1, listed(made.homes[0])).ask(
        {"op": "hosts", "at": [at[0], at[0], at[2]], "seats": seats}
    )
    with pytest.raises(UcplError, match=r"E694: d1 of .* is now served by .*: this server ends"):
        made.servers[1].turn()
    made.servers.pop(1)._ends.close()
    assert made.read(1) == 10
    with pytest.raises(OSError, match=r"d1 of job, at .*, is another process: its certificate is of ucpl:d0"):
        RemoteDomain(made.homes[2], 1, listed(made.homes[1])).ask({"op": "names"})
    remote_domain._silent.clear()
    made.serve(1)
    made.turn()
    made.step(20)
    assert [made.read(n) for n in range(3)] == [20, 20, 20]


@other_users
def test_ranks_on_one_host_serve_processes_of_their_own_user_alone(tmp_path, shared):
    (tmp_path / "a").write_bytes(b"0123456789")
    way = UnixConnector(token_hex(8))
    server = FileServer({"a": tmp_path / "a"}, UnixListener(way.name))
    try:
        assert Attack(shared, "local", way.name).answer() == ""
        room = bytearray(4)
        assert Peer(0, way, lambda size: None).read("a", [memoryview(room)], 3) == 4 and room == b"3456"
    finally:
        server.close()


@other_users
def test_a_vault_in_a_place_for_everybody_is_its_owners_alone(shared):
    home = shared / token_hex(4) / "job"
    vault = Vault.make(home, ranks=1)
    with vault.writer(0) as writer:
        assert writer.save(1, {"w": 1})
    assert Attack(shared, "files", str(home)).answer() == []
    for path in (home.parent, *home.parent.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@other_users
def test_nothing_of_a_member_is_readable_in_proc(made, shared):
    """Keys, state and environment of a process that serves and saves."""
    told = bytes.fromhex(Attack(shared, "seen", os.getpid()).answer())
    assert b"Uid:" in told  # its status, which everybody sees
    keys = [keys_of(n).joinpath("tls.key").read_bytes() for n in range(3)]
    held = [data for path, data in all_files(made).items() if len(data) > 64]
    assert len(held) > 9 and not [data for data in (*keys, *held, b"PATH=") if data[:64] in told]


@other_users
@pytest.mark.parametrize("place", ["root", "job"])
@pytest.mark.parametrize("kind", ["file", "pipe", "socket", "name", "link"])
def test_no_folder_of_another_user_gets_nothing(shared, kind, place):
    root = Path(Attack(shared, "squat", str(shared), f"no-{kind}-{place}").answer())
    for keys in ({}, {"hosts": "127.0.0.1:1", "keys": keys_of(0)}):
        with pytest.raises(UcplError, match=r"E695: .* is not a folder|E686: .* is not safe from other users"):
            Vault.make(root / "job", ranks=1, **keys)  # type: ignore[arg-type]
    assert not any(path.stat().st_size for path in shared.glob("*no-*") if path.is_file())
    assert {path.name for path in (shared / "mine", *root.rglob("*"))} <= {"mine", "job"}


@other_users
@pytest.mark.parametrize("how", ["folder", "closed", "link", "job", "job-link"])
def test_a_folder_that_another_user_made_first_gets_nothing(shared, how):
    root = Path(Attack(shared, "squat", str(shared), how).answer())
    for keys in ({}, {"hosts": "127.0.0.1:1", "keys": keys_of(0)}):
        with pytest.raises(UcplError, match=r"E686: .*is not safe from other users"):
            Vault.make(root / "job", ranks=1, **keys)  # type: ignore[arg-type]
    assert [path for path in (*root.rglob("*"), *(shared / "mine").rglob("*")) if path.is_file()] == []


@pytest.mark.parametrize("swapped", ["job", "root"])
def test_gc_removes_nothing_through_a_link_that_was_put_there_meanwhile(shared, tmp_path, monkeypatch, swapped):
    """The vault is the attacker's own, and gc removes it as root."""
    victim = tmp_path / "root/job"
    (victim / "d0").mkdir(parents=True)
    for name in ("job.json", "r0.s0"):
        (victim / "d0" / name).write_text("of another vault")
    top = shared / token_hex(4)
    home = Vault.make(top / "root/job", ranks=1).home
    if IS_ROOT:
        for path in (top, *top.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    removed = cleanup._removed

    def swap(found: Path) -> Any:
        place, to = (home, victim) if swapped == "job" else (home.parent, victim.parent)
        assert Attack(shared, "swap", str(place), str(to)).answer() == str(place)
        return removed(found)

    monkeypatch.setattr(cleanup, "_removed", swap)
    assert [one.what for one in remove_vaults(top / "root", with_state=False)] == ["kept"]
    assert sorted(path.name for path in victim.rglob("*")) == ["d0", "job.json", "r0.s0"]


def test_a_look_at_a_lock_makes_no_file(tmp_path, monkeypatch):
    """Another user removes it meanwhile, and links its folder."""
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    assert not is_locked(tmp_path / "server.lock") and not list(tmp_path.iterdir())


@other_users
def test_root_writes_nothing_through_links_in_a_vault_of_another_user(tmp_path):
    """A restore counts its attempts in the vault; scrub rewrites files."""
    home, precious = tmp_path / "job", tmp_path / "precious"
    with job(home, 2, "mirror") as here:
        here.save(1)
        here.turn()
    precious.write_text("root's own")
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.symlink(precious, home / "tries.1")
    (home / "d1/job.json").write_text("damaged")
    with pytest.raises(UcplError, match=r"E686: .*belongs to user"):
        scrub(home)
    assert (home / "d1/job.json").read_text() == "damaged"
    assert restore_newest(home, lambda source: None).source == f"vault:{home}@1"
    assert precious.read_text() == "root's own" and (home / "tries.1").is_symlink()


@other_users
def test_who_reads_a_vault_of_another_user_is_warned(tmp_path, capsys):
    """After a restart of the host, its place is free."""
    home = tmp_path / "job"
    with job(home, 2, "mirror") as here:
        here.save(1)
        here.turn()
    assert main(["vault", "persist", str(home), str(tmp_path / "mine")]) == 0
    assert "warning" not in capsys.readouterr().err
    os.chown(home, NOBODY, NOBODY)
    assert main(["vault", "persist", str(home), str(tmp_path / "theirs")]) == 0
    text = f"warning: {home} is not safe from other users: it belongs to user {NOBODY}"
    assert text in " ".join(capsys.readouterr().err.split())
    assert main(["vault", "restore", str(home), str(tmp_path / "restored"), "--to", "plain()"]) != 0  # no tensors
    assert text in " ".join(capsys.readouterr().err.split())


@other_users
def test_a_restore_reads_no_step_that_a_stranger_put_there(shared, tmp_path):
    """Everybody can write to the folder of --else; the newest would win."""
    home, persisted = tmp_path / "job", shared / "persisted"
    with job(home, 2, "mirror") as here:
        here.save(1)
        here.turn()
    persisted.mkdir()
    os.chmod(persisted, 0o1777)
    made = persisted / "step-99"
    saved = {"step": 99, "generation": 7, "vault": "theirs", "committed_ms": 1 << 42}
    (made / "ucpl").mkdir(parents=True)
    (made / "ucpl/state.json").write_text(json.dumps(saved))
    assert restore_newest(home, lambda source: None, persisted=persisted).source == str(made)  # it is mine
    os.chown(made, NOBODY, NOBODY)
    restored = restore_newest(home, lambda source: None, persisted=persisted)
    assert restored.source == f"vault:{home}@1"
    assert restored.passed == ((str(made), f"user {NOBODY} put it into {persisted}, and everybody can write there"),)
    with pytest.raises(UcplError, match=r"E692: .* has no folder step-N of yours"):
        restore_newest(tmp_path / "none", lambda source: None, persisted=persisted)


@other_users
@pytest.mark.parametrize("whose", ["step", "converted", "link"])
def test_a_resume_uses_nothing_that_a_stranger_put_there(shared, whose):
    run = shared / f"run-{whose}"
    for step in (3, 12):
        shutil.copytree(ROOT / "tests/fixtures/trainer/checkpoint-3", run / f"checkpoint-{step}")
    os.chmod(run, 0o1777)
    beside = Path(f"{run}.resume")
    if whose == "step":
        os.chown(run / "checkpoint-12", NOBODY, NOBODY)
        assert resume(run, ranks=2) == str(run / "checkpoint-3")
        os.chown(run / "checkpoint-3", NOBODY, NOBODY)
        with pytest.raises(UcplError, match=r"E686: .* has checkpoints of other users only"):
            resume(run, ranks=2)
        return
    if whose == "link":
        (shared / "elsewhere").mkdir()
        beside.symlink_to(shared / "elsewhere")
    else:
        beside.mkdir()
    os.chown(beside, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UcplError, match=r"E686: .* is not safe from other users"):
        resume(run, ranks=3)
    assert not list(beside.iterdir())
