"""`ucpl vault` on the command line, with servers as processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import ucpl
from tests.forking import Command
from tests.ports import free_ports
from tests.vault.keys import keys_of
from tests.vault.small import give
from tests.vault.states import Truth, call, memory
from ucpl.cli import main
from ucpl.vault import Vault
from ucpl.vault.files import ToSave, text_file


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1, 2, 3))


@contextmanager
def served(home: Path, *more: str):
    servers = [Command("vault", "serve", home, *more, "--domain", d) for d in range(2)]
    try:
        for one in servers:
            assert one.line().startswith("serving ")
        yield servers
    finally:
        for one in servers:
            one.terminate()
        for one in servers:
            assert one.end() in (130, -9)


def told(capsys, *words: object) -> tuple[int, dict]:
    capsys.readouterr()
    status = main(["vault", *map(str, words), "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out) if out else {}


def until(what) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_servers_keep_what_ranks_save_and_write_every_second_of_it(tmp_path, truth, capsys):
    home, into = tmp_path / "job", tmp_path / "runs"
    with served(home, "--ranks", "2", "--domains", "2", "--every", "2", "--into", str(into)):
        vault = ucpl.vault.Vault.at(home)
        writers = [vault.writer(rank, layout=truth.layout, run="one", strict=True) for rank in range(2)]
        for step in (1, 2, 3):
            for writer in writers:
                assert writer.save(step, truth.cut[step][writer.rank], {"at": step})
            until(lambda step=step: writers[0].committed() == (step, step))
        until((into / "step-2").is_dir)
        status, found = told(capsys, "status", home)
        assert status == 0
        assert [place["is_served"] for place in found["domains"]] == [True, True]
        assert [place["written_by"] for place in found["domains"]] == [[0], [1]]
        assert [one["step"] for one in found["generations"]] == [3, 2]
        assert told(capsys, "gc", tmp_path)[1]["vaults"][0]["what"] == "living"
        for writer in writers:
            writer.close()
    assert sorted(path.name for path in into.iterdir()) == ["step-2"]
    assert truth.step_of(into / "step-2") == 2
    state = json.loads((into / "step-2/ucpl/state.json").read_text())
    assert abs(state.pop("committed_ms") / 1000 - time.time()) < 600
    assert state == {
        "step": 2,
        "generation": 2,
        "vault": vault.job.ident,
        "ranks": {"0": {"at": 2}, "1": {"at": 2}},
    }
    assert told(capsys, "restore", home, tmp_path / "out", "--to", call("dp=3"))[0] == 0
    assert truth.step_of(tmp_path / "out") == 3
    assert told(capsys, "persist", home, tmp_path / "old", "--generation", "2")[1] == {
        "target": str(tmp_path / "old"),
        "generation": 2,
        "step": 2,
        "damaged": [],
    }
    assert truth.step_of(tmp_path / "old") == 2
    assert main(["vault", "persist", str(home), str(tmp_path / "old")]) == 4


def test_damage_is_found_and_healed(tmp_path, truth, capsys):
    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        here.save(truth, 1)
        here.turn()
    home = here.vault.home
    assert told(capsys, "verify", home) == (0, {"generation": 1, "rebuilt": 0, "damaged": []})
    for name in ("d0/r0.s0", "d1/p.s0"):
        with open(home / name, "r+b") as file:
            file.seek(100)
            byte = file.read(1)
            file.seek(100)
            file.write(bytes([byte[0] ^ 4]))
    status, found = told(capsys, "verify", home)
    assert status == 1
    # The same chunk is damaged in both copies of rank 0's shard.
    assert [(one["what"], one["can_be_rebuilt"]) for one in found["damaged"]] == [
        ("d0: shard of rank 0", False),
        ("d1: its redundancy", False),
    ]
    with open(home / "d1/p.s0", "r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 4]))
    status, found = told(capsys, "verify", home)
    assert [(one["what"], one["can_be_rebuilt"], one["chunks"]) for one in found["damaged"]] == [
        ("d0: shard of rank 0", True, 1)
    ]
    assert told(capsys, "scrub", home) == (0, {"generation": 1, "rebuilt": 1, "damaged": []})
    assert told(capsys, "verify", home)[0] == 0
    shutil.rmtree(home / "d1")
    assert truth.step_of(f"vault:{home}") == 1


@pytest.mark.fault(
    "Vaults", "leftovers of dead jobs (F22)", "removed without state, kept with state until `--with-state`"
)
def test_what_dead_jobs_left_goes_and_what_may_be_all_that_is_left_stays(tmp_path, truth, capsys):
    with memory(tmp_path / "counts", truth, domains=2, protect="mirror") as here:
        here.save(truth, 1)
        here.turn()
    with memory(tmp_path / "empty", truth, domains=2, protect="mirror"):
        pass
    with memory(tmp_path / "strange", truth, domains=2, protect="mirror"):
        pass
    (tmp_path / "strange/d0/mine.txt").write_text("not of a vault")
    (tmp_path / "no vault").mkdir()
    _, found = told(capsys, "gc", tmp_path)
    assert [(Path(one["home"]).name, one["what"]) for one in found["vaults"]] == [
        ("counts", "kept"),
        ("empty", "removed"),
        ("strange", "kept"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts", "no vault", "strange"]
    _, found = told(capsys, "gc", tmp_path, "--with-state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["no vault", "strange"]


def test_one_vault_alone_is_removed_by_its_folder(tmp_path, truth, capsys, monkeypatch):
    for name in ("one", "two", "d0"):  # a job may be called as domains are
        with memory(tmp_path / name, truth, domains=2, protect="mirror") as here:
            here.save(truth, 1)
            here.turn()
    status, found = told(capsys, "gc", tmp_path / "one")
    assert status == 0 and [(one["home"], one["what"]) for one in found["vaults"]] == [(str(tmp_path / "one"), "kept")]
    monkeypatch.chdir(tmp_path / "one")
    status, found = told(capsys, "gc", ".", "--with-state")
    assert [(one["home"], one["what"]) for one in found["vaults"]] == [(str(tmp_path / "one"), "removed")]
    monkeypatch.chdir(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d0", "two"]
    _, found = told(capsys, "gc", tmp_path)
    assert [Path(one["home"]).name for one in found["vaults"]] == ["d0", "two"]
    (tmp_path / "file").touch()
    for name, said in (("one", "it does not exist"), ("file", "it is not a folder")):
        assert main(["vault", "gc", str(tmp_path / name)]) == 3
        assert f"error[E692]: {tmp_path / name} is not a vault: {said}" in capsys.readouterr().err


def test_the_vault_of_another_job_says_how_it_is_removed(tmp_path, truth, capsys):
    home = tmp_path / "it's"
    serve = ["vault", "serve", str(home), "--ranks", "4", "--domains", "2", "--domain", "0"]
    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        os.rename(Vault.make(tmp_path / "its", ranks=2, domains=2).home, home)
        assert main(serve[:2] + [str(here.vault.home)] + serve[3:]) == 4
        assert f"`ucpl vault gc {here.vault.home}`" in capsys.readouterr().err
        here.save(truth, 1)
        here.turn()
    assert main(serve[:2] + [str(here.vault.home)] + serve[3:]) == 4
    remedy = f"remove this one with `ucpl vault gc {here.vault.home} --with-state`"
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--hosts", "127.0.0.1:1,127.0.0.1:2", "--keys", str(keys_of(0))]])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/proc/x", "No such file or directory"),
        ("file/y", "{}/file is not a folder"),
        ("file/y/z", "{}/file is not a folder"),
        ("file", "{}/file is not a folder"),
        ("locked", "Is a directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_no_internal_error(tmp_path, capsys, monkeypatch, name, why, more):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("locked/make.lock").mkdir(parents=True)
    assert main(["vault", "serve", name, "--ranks", "2", "--domains", "2", "--domain", "0", *more]) == 4
    printed = capsys.readouterr().err
    assert f"error[E695]: {tmp_path / name} cannot be written: {why.format(tmp_path)}\n" in printed
    assert "name a folder in memory that can be written, as in /dev/shm/ucpl/job" in printed


def test_full_memory_is_reported_with_a_remedy(tmp_path, capsys, monkeypatch):
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("ucpl.vault.create.write_whole", full)
    assert main(["vault", "serve", str(tmp_path / "job"), "--domain", "0", "--ranks", "1"]) == 4
    printed = capsys.readouterr().err
    assert "cannot be written: No space left on device" in printed and "Make room: " in printed


def test_what_is_no_vault_is_not_one_in_which_nothing_counts(tmp_path, capsys, monkeypatch):
    home = Vault.make(tmp_path / "job", ranks=1).home
    (tmp_path / "bare").mkdir()
    last = ["out", "--to", "zero1(dp=2)"]
    for verb, more in (
        ("restore", last),
        ("restore", [*last, "--generation", "3"]),
        ("persist", ["out"]),
        ("status", []),
    ):
        for name, why in (("gone", "it does not exist"), ("bare", "it has no folder d0, d1, ... with a job.json")):
            assert main(["vault", verb, str(tmp_path / name), *more]) == 3
            assert f"error[E692]: {tmp_path / name} is not a vault: {why}" in capsys.readouterr().err
        for name, remedy in (
            (f"vault:{home}", f"write only the folder: {home}\n"),
            (f"{home}@3", f"as an option: {home} --generation 3\n"),
            (f"vault:{home}@3", f"as an option: {home} --generation 3\n"),
        ):
            assert main(["vault", verb, name, *more]) == 3
            printed = capsys.readouterr().err
            assert f"error[E692]: {name} is not a vault: it does not exist" in printed and remedy in printed
    assert main(["vault", "restore", str(tmp_path / "gone"), *last, "--else", str(tmp_path)]) == 3
    assert f"{tmp_path / 'gone'}: there is no vault, and {tmp_path} has no folder step-N" in capsys.readouterr().err
    assert main(["vault", "restore", str(home), *last]) == 3
    assert "nothing is committed" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for name, code in (("vault:job", "E692"), ("s3://bucket/job", "E680")):  # and none is made of that name
        assert main(["vault", "serve", name, "--domain", "0", "--ranks", "1"]) == {"E692": 3, "E680": 2}[code]
        assert code in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "job"]


def test_a_target_that_cannot_be_says_what_holds_for_vaults(tmp_path, truth, capsys):
    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        here.save(truth, 1)
        here.turn()
    (tmp_path / "file").touch()
    home = str(here.vault.home)
    cases = {
        "file": (f"error[E500]: {tmp_path}/file exists\n", "choose another DST"),
        "file/y": (
            f"error[E503]: {tmp_path}/file/y cannot be written: {tmp_path}/file is not a folder\n",
            "remove the cause",
        ),
        "file/y/z": (
            f"error[E503]: {tmp_path}/file/y/z cannot be written: {tmp_path}/file is not a folder\n",
            "choose another",
        ),
    }
    for name, (what, remedy) in cases.items():
        assert main(["vault", "persist", home, str(tmp_path / name)]) == 4
        printed = capsys.readouterr().err
        assert what in printed and remedy in printed and "--resume" not in printed and "--force" not in printed
    for name in ("file", "file/y"):
        assert main(["vault", "restore", home, str(tmp_path / name), "--to", call("tp=2")]) == 4
        printed = capsys.readouterr().err
        assert "another DST" in printed and "--resume" not in printed and "--force" not in printed


def written_by(rank: int, step: int) -> list[ToSave]:
    return [text_file(f"rank-{rank}", b"content")]


@pytest.mark.fault(
    "Vaults",
    "an obstacle in a server's folder, or full memory",
    "reported; the server waits, and commits after its removal",
)
def test_a_server_reports_an_obstacle_and_continues(tmp_path):
    """Full memory, or a folder in the place of a file.

    No generation commits meanwhile, and no server ends.
    """
    home = tmp_path / "job"
    with served(home, "--ranks", "2", "--domains", "2", "--protect", "mirror") as servers:
        (home / "d0" / "p.s0").mkdir()
        writers = [Vault.at(home).writer(r, run="one", wait=0.0, strict=True) for r in range(2)]
        for writer in writers:
            give(writer, partial(written_by, writer.rank))
            writer.save(1, None)
        said = servers[0].line()
        assert said.startswith(f"waits      {home}/d0/p.s0: Is a directory"), said
        assert Vault.at(home).committed() is None
        (home / "d0" / "p.s0").rmdir()
        until(lambda: Vault.at(home).committed() is not None)
        assert all(one.status is None for one in servers)
        for writer in writers:
            writer.close()


@pytest.mark.fault(
    "Vaults", "a domain's folder is removed while its server runs", "the server ends with the command that restarts it"
)
def test_a_server_whose_domain_is_gone_ends_and_says_what_to_do(tmp_path):
    home = tmp_path / "job"
    Vault.make(home, ranks=2, domains=2)
    one = Command("vault", "serve", home, "--domain", 1)
    assert one.line().startswith("serving ")
    shutil.rmtree(home / "d1")
    assert one.end(30) == 4
    assert "d1 is gone, while it was served" in one.err and "start the server once more" in one.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["restore", "J"], "needs DST"),
        (["restore", "J", "out"], "needs --to"),
        (["status", "J", "out"], "one argument too many"),
        (["serve", "J"], "needs --domain"),
        (["serve", "J", "--domain", "0", "--every", "3"], "go together"),
        (["serve", "J", "--domain", "0", "--domains", "0,x"], "names no domains"),
        (
            ["serve", "J", "--domain", "0", "--domains", "2", "--layout", "x.ucpl:y()"],
            "defines ranks and domains",
        ),
        (["verify", "J", "--generation", "x"], "--generation x"),
        (["status", "J", "--lose", "2"], "vault status makes no use of `--lose`, which is for `plan` and `drill`"),
        (["persist", "J", "out", "--to", "zero1(dp=6)"], "makes no use of `--to`, which is for `restore`"),
        (["scrub", "J", "--workers", "4"], "makes no use of `--workers`, which is for `restore`"),
        (["gc", "J", "-D", "n=3"], "makes no use of `-D`, which is for `plan` and `drill`"),
        (["plan", "J.ucpl:j()", "--with-state"], "makes no use of `--with-state`, which is for `gc`"),
        (["fly", "J"], "invalid choice"),
    ],
)
def test_wrong_usage_is_reported(words, said, capsys):
    assert main(["vault", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["serve", "J", "--domain", "0", "--ranks", "0"], "as in --ranks 2"),
        (["serve", "J", "--domain", "0", "--domains", "0"], "as in --domains 2"),
        (["plan", "J.ucpl:j()", "--lose", "0"], "as in --lose 2"),
        (["verify", "J", "--generation", "x"], "as in --generation 2"),
    ],
)
def test_what_to_write_for_a_number_is_of_the_option_at_hand(words, remedy, capsys):
    assert main(["vault", *words]) == 2
    printed = capsys.readouterr().err
    assert f"help: write a whole number from 1 on, {remedy}\n" in printed and "--memory" not in printed


@pytest.mark.parametrize(("option", "other"), [("--protect", "mirror"), ("--replays", "3")])
def test_a_vault_is_served_as_it_was_made(tmp_path, capsys, option, other):
    Vault.make(tmp_path / "job", ranks=3, domains=3, protect="raim5", replays=2)
    assert main(["vault", "serve", str(tmp_path / "job"), "--domain", "0", option, other]) == 4
    assert "was made with --protect 'raim5' and --replays 2" in capsys.readouterr().err


def test_nothing_is_made_for_a_domain_that_there_is_not(tmp_path, capsys):
    serve = ["vault", "serve", str(tmp_path / "job"), "--ranks", "3", "--domains", "3", "--domain"]
    assert main([*serve, "3"]) == 4
    assert "write --domain 0 to --domain 2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@contextmanager
def served_by_hosts(top: Path, *more: str):
    """Two hosts with a folder each, and their start commands."""
    ports = free_ports(2)
    at = ",".join(f"127.0.0.1:{port}" for port in ports)
    shape = ["--ranks", "2", "--domains", "2", "--hosts", at, *more]

    def start(number: int, home: Path) -> Command:
        one = Command("vault", "serve", home, "--domain", number, *shape, "--keys", keys_of(number))
        servers.append(one)
        assert one.line().startswith("serving ")
        return one

    servers: list[Command] = []
    try:
        yield start
    finally:
        for one in servers:
            one.kill()
            one.end()


def test_two_hosts_keep_what_their_ranks_save_and_make_up_for_each_other(tmp_path, truth, capsys):
    homes = [tmp_path / f"host{n}" / "job" for n in range(2)]
    with served_by_hosts(tmp_path) as start:
        servers = [start(n, homes[n]) for n in range(2)]
        vaults = [Vault.at(home) for home in homes]

        def write(run: str):
            until(
                lambda: all(
                    told(capsys, "status", home)[1]["domains"][1 - n]["is_there"] for n, home in enumerate(homes)
                )
            )
            return [vault.writer(n, layout=truth.layout, run=run, strict=True) for n, vault in enumerate(vaults)]

        def save(writers, step: int) -> None:
            for n, writer in enumerate(writers):
                assert writer.save(step, truth.cut[step][n])
            until(lambda: all(writer.committed() and writer.committed()[1] == step for writer in writers))

        writers = write("one")
        save(writers, 1)
        status, found = told(capsys, "status", homes[0])
        assert status == 0
        assert [place["at"].partition(":")[0] for place in found["domains"]] == ["", "127.0.0.1"]
        assert found["generations"][0]["in_domains"] == [0, 1]
        assert told(capsys, "verify", homes[1])[0] == 0
        for writer in writers:
            writer.close()
        servers[0].kill()
        servers[0].end()
        shutil.rmtree(homes[0].parent)
        assert told(capsys, "restore", homes[1], tmp_path / "back", "--to", call("tp=2"))[0] == 0
        assert truth.step_of(tmp_path / "back") == 1
        start(0, homes[0])
        until(lambda: told(capsys, "verify", homes[0])[0] == 0)
        writers = write("two")
        save(writers, 2)
        for writer in writers:
            writer.close()
        ucpl.convert(f"vault:{homes[0]}", tmp_path / "second", to=call(""))
        assert truth.step_of(tmp_path / "second") == 2


def test_hosts_are_given_together_with_the_options_of_the_vault(tmp_path, capsys):
    for more, said in (
        (["--hosts", "a:1,b:2"], "--keys go together"),
        (["--hosts", "a:1,b:2", "--keys", str(keys_of(0))], "needs the shape of the vault, too"),
        (["--hosts", "a:1,b", "--keys", str(keys_of(0)), "--domains", "2"], "is not HOST:PORT"),
    ):
        assert main(["vault", "serve", str(tmp_path / "job"), "--domain", "0", *more]) == 2
        assert said in capsys.readouterr().err
