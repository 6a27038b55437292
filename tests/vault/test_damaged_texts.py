"""Texts of a vault that are damaged: they are told, mended while another says what they said, and never taken for nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ucpl
from tests.vault.held import Truth, memory
from tests.vault.small import job
from ucpl.cli import main
from ucpl.remotes.vaults.counted import committed
from ucpl.vault import Vault
from ucpl.vault.looking import damage, mend_texts


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1,))


@pytest.mark.parametrize("damaged", ["flipped", "empty", "gone"])
@pytest.mark.parametrize("name", ["job.json", "commit.1.json"])
@pytest.mark.parametrize("by", ["scrub", "serve"])
def test_damaged_texts_are_told_and_mended(tmp_path, name, damaged, by, capsys):
    with job(tmp_path / "job", 3, "raim5") as here:
        here.start("first")
        for number in range(3):
            here.serve(number)
        here.save(1)
        here.turn()
        path = here.path(1, name)
        whole = path.read_bytes()
        here.stop(1)
        if damaged == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:] if damaged == "flipped" else b"")
        found = damage(tmp_path / "job")[1]
        assert [(one.chunks, one.can_be_rebuilt) for one in found] == [(0, True)] and found[0].what.startswith("d1: ")
        assert main(["vault", "verify", str(tmp_path / "job")]) == 1 and "can be rebuilt" in capsys.readouterr().out
        if by == "scrub":
            assert (
                main(["vault", "scrub", str(tmp_path / "job")]) == 0 and "mended     1 texts" in capsys.readouterr().out
            )
        else:
            here.serve(1)
        assert path.read_bytes() == whole and mend_texts(tmp_path / "job") == 0
        assert damage(tmp_path / "job")[1] == []


def test_a_server_that_starts_mends_what_is_damaged(tmp_path, truth):
    """The next loss would take with it what alone says that a generation counts."""
    home = tmp_path / "job"
    with memory(home, truth, domains=2, protect="mirror") as here:
        here.save(truth, 1)
        here.turn()
        here.vault.domain(0).commit(1).write_bytes(b"{}")
    vault = Vault.at(home)
    with memory(home, truth, domains=2, protect="mirror", run="second"):
        shutil.rmtree(vault.domain(1).folder)
        assert [one.step for one in committed(home, vault.job)] == [1]


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])


@pytest.mark.parametrize("damaged", ["job.json", "commit.1.json", "job.json is gone", "job.json alone"])
def test_gc_keeps_what_is_damaged_and_may_be_all_that_is_left(tmp_path, damaged, capsys):
    home = tmp_path / "root/job"
    with job(home, 2, "mirror") as here:
        here.start("first")
        for number in range(2):
            here.serve(number)
        here.save(1)
        here.turn()
    for number in range(2):
        path = here.path(number, damaged.split()[0])
        if damaged.endswith("gone"):
            path.unlink()
        else:
            flip(path)
        if damaged.endswith("alone"):
            here.path(number, "commit.1.json").unlink()
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert main(["vault", "gc", str(tmp_path / "root")]) == 0
    assert "kept" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert main(["vault", "gc", str(tmp_path / "root"), "--with-state"]) == 0
    assert "removed" in capsys.readouterr().out and not home.exists()


def test_a_vault_of_which_no_text_says_what_it_is_is_called_damaged(tmp_path):
    vault = Vault.make(tmp_path / "job")
    flip(vault.domain(0).job())
    with pytest.raises(ucpl.UcplError, match=r"E692: .*job\.json, which says which job it is of, is damaged"):
        Vault.at(vault.home)


def test_who_finds_what_counts_damaged_everywhere_says_so(tmp_path):
    with job(tmp_path / "job", 2, "mirror") as here:
        here.start("first")
        for number in range(2):
            here.serve(number)
        here.save(1)
        here.turn()
        for number in range(2):
            flip(here.path(number, "commit.1.json"))
    with pytest.raises(ucpl.UcplError, match=r"E692: .* is damaged in each domain: commit\.1\.json"):
        ucpl.verify(f"vault:{tmp_path / 'job'}")


@pytest.mark.parametrize("kept", ["saved", "empty"])
def test_no_vault_is_made_where_the_one_that_is_there_is_damaged(tmp_path, kept, capsys):
    """The server said that there was none, and what made it a new mark; a writer would have saved over what was left."""
    home = tmp_path / "it's/job"
    with job(home, 1, "none") as here:
        if kept == "saved":
            here.save(1)
            here.turn()
    flip(home / "d0/job.json")
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    line = ["vault", "serve", str(home), "--ranks", "1", "--domains", "1", "--domain", "0"]
    assert main(line) == 3
    err = capsys.readouterr().err
    assert f"error[E692]: {home} is no vault: job.json, which says which job it is of, is damaged" in err
    assert f"`ucpl vault gc '{tmp_path}/it'\"'\"'s/job' --with-state` makes way" in err
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    with pytest.raises(ucpl.UcplError, match="E692"):
        Vault.make(home)
    assert main(["vault", "gc", str(home), "--with-state"]) == 0 and not home.exists()
    assert Vault.make(home).committed() is None
