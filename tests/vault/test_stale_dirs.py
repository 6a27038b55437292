"""Remainders of killed servers, persists and drills, and other files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.forking import Command
from tests.vault.keys import keys_of
from tests.vault.states import Truth
from ucpl import UcplError, verify
from ucpl.cli import main
from ucpl.vault import Vault
from ucpl.vault.path_conflicts import DRILLS, WORKS, open_work_dir, remove_stale, work_dir
from ucpl.vault.restore import restore_newest


def test_work_that_was_left_is_removed_and_that_of_the_living_is_not(tmp_path, monkeypatch):
    left, living, file = (work_dir(tmp_path / f"step-{n}") for n in (2, 3, 4))
    elsewhere = tmp_path / ".step-5.another host.0123.ucpl-vault"
    for path in (left, living, elsewhere, tmp_path / "ucpl-drill-a", tmp_path / "other"):
        (path / "in").mkdir(parents=True)
    file.write_text("no folder")
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert remove_stale(tmp_path, WORKS) == []
    with open_work_dir(living):
        assert remove_stale(tmp_path, WORKS) == [left]
    assert remove_stale(tmp_path, DRILLS) == [tmp_path / "ucpl-drill-a"]
    assert {path.name for path in tmp_path.iterdir()} == {living.name, file.name, elsewhere.name, "other"}


def serving(home: Path, runs: Path, fails: str = "") -> Command:
    return Command("vault", "serve", home, "--domain", 0, "--every", 1, "--into", runs, UCPL_FAIL_AT=fails)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


@pytest.mark.fault(
    "Vaults", "SIGKILL of a server while it persists", "the next server writes it again and removes the rest"
)
def test_a_server_that_was_killed_while_it_wrote_writes_it_once_more(tmp_path):
    """Its remainder is removed.

    A step from before the run's return stays next to the new one.
    """
    home, runs = tmp_path / "job", tmp_path / "runs"
    vault = Vault.make(home, ranks=1)
    work_dir(runs / "step-9").mkdir(parents=True)
    one = Truth(tmp_path / "one", "dp=1", (1, 2))
    with vault.writer(0, layout=one.layout, strict=True, wait=60) as writer:
        killed = serving(home, runs, "vault-persist:1:kill")
        writer.save(1, one.cut[1][0])
        assert killed.end(60) == -signal.SIGKILL and any(p.name.startswith(".step-1.") for p in runs.glob(WORKS))
        living = serving(home, runs)
        try:
            wait_for(runs / "step-1")
            assert not list(runs.glob(WORKS))
            writer.save(2, one.cut[2][0])
            writer.save(1, one.cut[1][0])
            wait_for(runs / "step-1.generation-3")
            assert one.step_of(runs / "step-1.generation-3") == 1 and one.step_of(runs / "step-2") == 2
        finally:
            living.terminate()
            living.end(60)


def test_a_step_that_several_vaults_made_anew_saved_is_written_each_time(tmp_path):
    """Each is written under its own name.

    The third vault found both names taken, and its step was never written.
    """
    home, runs = tmp_path / "job", tmp_path / "runs"
    one = Truth(tmp_path / "one", "dp=1", (1,))
    names = ["step-1", "step-1.generation-1", "step-1.generation-1.2", "step-1.generation-1.3"]
    for name in names:
        vault = Vault.make(home, ranks=1)
        with vault.writer(0, layout=one.layout, strict=True, wait=60) as writer:
            living = serving(home, runs)
            try:
                writer.save(1, one.cut[1][0])
                wait_for(runs / name)
            finally:
                living.terminate()
                living.end(60)
        shutil.rmtree(home)
    tried: list[str] = []

    def read(source: str) -> None:
        tried.append(Path(source).name)
        verify("vault:/nowhere")

    with pytest.raises(UcplError):
        restore_newest(home, read, persisted=runs)
    assert tried == names[::-1] and sorted(path.name for path in runs.iterdir()) == names


def test_gc_leaves_what_is_no_vaults(tmp_path, capsys):
    """A folder d0 alone is no vault, and a name prefix neither."""
    for name, file in (("data", "r_results.csv"), ("more", "commit.message"), ("empty", "")):
        (tmp_path / name / "d0").mkdir(parents=True)
        if file:
            (tmp_path / name / "d0" / file).write_text("mine")
    Vault.make(tmp_path / "mixed")
    (tmp_path / "mixed/d0/r_results.csv").write_text("mine")
    assert main(["vault", "gc", str(tmp_path), "--with-state"]) == 0
    out = capsys.readouterr().out
    assert "kept       " in out and "mixed" in out and "data" not in out and "empty" not in out
    assert (tmp_path / "data/d0/r_results.csv").exists() and (tmp_path / "mixed/d0/r_results.csv").exists()
    assert (tmp_path / "more/d0/commit.message").exists() and (tmp_path / "empty/d0").exists()


def files_in(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.fault(
    "Vaults",
    "strangers' files with a vault's names, links as domains, `gc --with-state` (F22)",
    "never touched: a record of a vault has a seal",
)
@pytest.mark.parametrize("state", [[], ["--with-state"]])
def test_gc_removes_nothing_of_a_stranger_whatever_it_is_called(tmp_path, capsys, state):
    """Other programs may use our names.

    A folder without our checksummed texts is not removed.
    """
    strange = {
        "app1/hosts.json": '{"web": []}', "app2/hosts.json": "", "app3/d0/job.json": '{"queue": "gpu"}',
        "app4/d0/server.lock": "17", "app5/d0/r0.s0": "mine", "app6/d0/commit.1.json": '{"message": "first"}\n',
        "app7/d0/job.json": "d41d8cd98f00b204e9800998ecf8427e\n", "app7/d0/server.lock": "", "app8/d0/r0.lock": "",
    }  # fmt: skip
    for name, text in strange.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = files_in(tmp_path)
    for place in (tmp_path, tmp_path / "app1", tmp_path / "app5"):
        assert main(["vault", "gc", str(place), *state]) == 0
    out = capsys.readouterr().out
    assert files_in(tmp_path) == before
    assert "removed" not in out and "app1: " not in out and "app3" not in out
    assert f"kept       {tmp_path / 'app5'}: it has files with a vault's names, but no intact record of one" in out


def flipped(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])


@pytest.mark.parametrize("damaged", ["hosts.json", "d0/job.json"])
def test_a_damaged_text_of_ours_is_known_by_its_seal(tmp_path, capsys, damaged):
    """The vault has nothing else.

    It is kept until the user allows the removal.
    """
    home = tmp_path / "root/job"
    if damaged == "hosts.json":
        Vault.make(home, ranks=2, domains=2, hosts="127.0.0.1:1,127.0.0.1:2", keys=keys_of(0))
    else:
        Vault.make(home)
    flipped(home / damaged)
    assert main(["vault", "gc", str(home.parent)]) == 0
    assert f"{damaged.split('/')[-1]} is damaged or missing" in capsys.readouterr().out and (home / damaged).exists()
    assert main(["vault", "gc", str(home.parent), "--with-state"]) == 0
    assert not home.exists()


def test_gc_follows_no_link_in_place_of_a_domain(tmp_path, capsys):
    Vault.make(tmp_path / "root/job", ranks=2, domains=2)
    os.rename(tmp_path / "root/job/d1", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "root/job/d1")
    before = files_in(tmp_path)
    assert main(["vault", "gc", str(tmp_path / "root"), "--with-state"]) == 0
    assert "it contains files that do not belong to a vault" in capsys.readouterr().out
    assert files_in(tmp_path) == before


def test_vaults_below_a_vault_go_before_it(tmp_path):
    outer, inner = Vault.make(tmp_path / "job").home, Vault.make(tmp_path / "job/inner").home
    assert main(["vault", "gc", str(outer)]) == 0
    assert outer.exists() and not inner.exists()
    assert main(["vault", "gc", str(outer)]) == 0
    assert not outer.exists()
