"""Damaged texts of a vault: reported and repaired from copies.

They never count as missing.
"""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import ucpl
from tests.forking import run_all
from tests.vault import small
from tests.vault.small import job
from tests.vault.states import Truth, memory
from ucpl.cli import main
from ucpl.storage.vaults.checksummed_text import seal
from ucpl.storage.vaults.committed import get_commits
from ucpl.vault import Vault
from ucpl.vault.inspect import find_damage, repair_texts
from ucpl.vault.restore import restore_newest
from ucpl.vault.server import Server

WORD = "generation 2 of "


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1,))


@pytest.mark.fault(
    "Vaults",
    "a damaged, empty or lost record of a domain (F10, F11)",
    "reported by `verify`; rewritten by `scrub` or a server that starts",
)
@pytest.mark.parametrize("damaged", ["flipped", "empty", "gone"])
@pytest.mark.parametrize("name", ["job.json", "commit.1.json"])
@pytest.mark.parametrize("by", ["scrub", "serve"])
def test_damaged_texts_are_reported_and_repaired(tmp_path, name, damaged, by, capsys):
    with job(tmp_path / "job", 3, "raim5") as here:
        here.save(1)
        here.turn()
        path = here.path(1, name)
        whole = path.read_bytes()
        here.stop(1)
        if damaged == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:] if damaged == "flipped" else b"")
        found = find_damage(tmp_path / "job")[1]
        assert [(one.chunks, one.can_be_rebuilt) for one in found] == [(0, True)] and found[0].what.startswith("d1: ")
        assert main(["vault", "verify", str(tmp_path / "job")]) == 1 and "can be rebuilt" in capsys.readouterr().out
        if by == "scrub":
            assert (
                main(["vault", "scrub", str(tmp_path / "job")]) == 0
                and "repaired   1 records" in capsys.readouterr().out
            )
        else:
            here.serve(1)
        assert path.read_bytes() == whole and repair_texts(tmp_path / "job") == 0
        assert find_damage(tmp_path / "job")[1] == []


def test_a_server_that_starts_mends_what_is_damaged(tmp_path, truth):
    """The next loss could destroy the only commit record."""
    home = tmp_path / "job"
    with memory(home, truth, domains=2, protect="mirror") as here:
        here.save(truth, 1)
        here.turn()
        here.vault.domain(0).commit(1).write_bytes(b"{}")
    vault = Vault.at(home)
    with memory(home, truth, domains=2, protect="mirror", run="second"):
        shutil.rmtree(vault.domain(1).folder)
        assert [one.step for one in get_commits(home, vault.job)] == [1]


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])


@pytest.mark.fault(
    "Vaults",
    "`gc` on a vault with damaged records and next to strangers' folders (F22)",
    "kept until `--with-state`; strangers' folders are never touched",
)
@pytest.mark.parametrize("damaged", ["job.json", "commit.1.json", "job.json is gone", "job.json alone"])
def test_gc_keeps_what_is_damaged_and_may_be_all_that_is_left(tmp_path, damaged, capsys):
    home = tmp_path / "root/job"
    with job(home, 2, "mirror") as here:
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


def test_a_vault_without_identity_record_is_reported_as_damaged(tmp_path):
    vault = Vault.make(tmp_path / "job")
    flip(vault.domain(0).job())
    with pytest.raises(ucpl.UcplError, match=r"E692: .*job\.json is damaged"):
        Vault.at(vault.home)


def test_who_finds_what_counts_damaged_everywhere_says_so(tmp_path):
    with job(tmp_path / "job", 2, "mirror") as here:
        here.save(1)
        here.turn()
        for number in range(2):
            flip(here.path(number, "commit.1.json"))
    with pytest.raises(ucpl.UcplError, match=r"E692: .* are damaged in all domains: commit\.1\.json"):
        ucpl.verify(f"vault:{tmp_path / 'job'}")


@pytest.mark.fault(
    "Vaults",
    "`serve --ranks` or `Vault.make` over a vault with a damaged `job.json`",
    "refused (E692), with the way to replace it",
)
@pytest.mark.parametrize("kept", ["saved", "empty"])
def test_no_vault_is_made_where_the_one_that_is_there_is_damaged(tmp_path, kept, capsys):
    """The server used to report that there was no vault.

    A new vault got a new mark; a writer would have overwritten the remaining data.

    A writer would have overwritten the remaining data.
    """
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
    assert f"error[E692]: {home} is not a vault: job.json is damaged" in err
    assert f"`ucpl vault gc '{tmp_path}/it'\"'\"'s/job' --with-state`" in err
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    with pytest.raises(ucpl.UcplError, match="E692"):
        Vault.make(home)
    assert main(["vault", "gc", str(home), "--with-state"]) == 0 and not home.exists()
    assert Vault.make(home).committed() is None


@pytest.fixture
def older(tmp_path):
    """A vault of two steps.

    The commit record of the newer one is damaged in all domains.
    """

    def made(domains: int) -> Path:
        with job(tmp_path / "job", domains, "none" if domains == 1 else "mirror") as here:
            for step in (10, 20):
                here.save(step)
                here.turn()
            assert here.read() == 20
            for number in range(domains):
                flip(here.path(number, "commit.2.json"))
        return tmp_path / "job"

    return made


@pytest.mark.fault(
    "Vaults",
    "the commit record of the newest snapshot is damaged in all domains (F10)",
    "`verify` ends with 1; each reader names the snapshot; `scrub` restores the record",
)
@pytest.mark.parametrize("domains", [1, 2])
def test_an_older_generation_is_not_reported_as_intact_if_the_newer_record_is_damaged(older, domains, tmp_path, capsys):
    home = older(domains)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert main(["vault", "verify", str(home)]) == 1
    printed = capsys.readouterr().out
    assert (
        printed.count("the commit record of generation 2, newer than the checked 1 (a starting server") == domains
        and "whole" not in printed
    )
    assert main(["vault", "status", str(home)]) == 0
    assert "damaged    generation 2, newer than the committed one: d0/commit.2.json" in capsys.readouterr().out
    assert main(["vault", "status", str(home), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["damaged"]
    assert printed == [{"number": 2, "texts": [str(home / f"d{n}/commit.2.json") for n in range(domains)]}]
    assert main(["vault", "persist", str(home), str(tmp_path / "kept"), "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["damaged"] == [2] and "warning: generation 2 is newer" in out.err
    tried: list[str] = []
    made = restore_newest(home, tried.append)
    assert made.step == 10 and made.passed[0][0] == f"vault:{home}@2" and "d0/commit.2.json" in made.passed[0][1]
    assert restore_newest(home, tried.append, generation=1).passed == ()
    with pytest.raises(ucpl.UcplError, match=r"E692: .*record of generation 2 is damaged: commit\.2\.json"):
        ucpl.verify(f"vault:{home}@2")
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


@pytest.mark.parametrize("domains", [1, 2])
@pytest.mark.parametrize("by", ["scrub", "serve"])
def test_what_all_have_saved_and_voted_for_counts_again(older, domains, by, capsys):
    home = older(domains)
    if by == "scrub":
        assert main(["vault", "scrub", str(home)]) == 0
        assert "committed  generation 2 again" in capsys.readouterr().out
    else:
        with ExitStack() as ends:
            servers = [ends.enter_context(Server(home, number)) for number in range(domains)]
            assert [server.turn() for server in servers] == [2, *[None] * (domains - 1)]
    assert main(["vault", "verify", str(home)]) == 0
    assert small.read(home, domains, (5000, 70_001, 1)) == 20


def test_a_generation_that_cannot_be_committed_again_is_reported_as_lost(older, tmp_path, capsys):
    home = older(2)
    for path in home.glob("d0/p.s*.json"):  # its votes
        path.unlink()
    assert main(["vault", "scrub", str(home)]) == 1
    printed = capsys.readouterr().out
    assert "generation 2, newer than the checked 1: is gone" in printed and "whole" not in printed
    for path in home.glob("d*/commit.1.json"):
        path.unlink()
    with pytest.raises(ucpl.UcplError, match=r"E692: .* are damaged, and .*nothing has no folder step-N"):
        restore_newest(home, print, persisted=tmp_path / "nothing")


def test_who_reads_an_older_generation_hears_of_the_newer_one(tmp_path, capsys):
    """Every verb and function that reads a checkpoint reports it.

    A named generation reports nothing.
    """
    home, weight, model = tmp_path / "job", torch.arange(6.0).reshape(1, 6), torch.nn.Linear(6, 1, bias=False)
    vault = small.weighing(home, weight + 10, weight + 20)
    url = f"vault:{home}"

    def heard(url: str) -> list[int]:
        """The number of warnings of each of them."""
        out = []
        new = iter(tmp_path / f"target{n}.pt" for n in range(len(list(tmp_path.iterdir())), 1000))
        plan = next(new).with_suffix(".plan")
        for verb in (
            ["inspect", url], ["verify", url], ["infer", url], ["compare", url, kept], ["compare", kept, url],
            ["plan", "--from", url, "--to", "plain()", "-o", str(plan)],
            ["convert", url, str(next(new)), "--to", "plain()", "--json"], ["apply", str(plan), url, str(next(new))],
        ):  # fmt: skip
            assert main(verb) in (0, 1), verb  # it may be another state than the one that was kept
            out.append(capsys.readouterr().err.count(WORD))
        made = ucpl.plan(kept, "plain()")
        for call in (
            lambda: ucpl.load_into(model, None, url), lambda: ucpl.verify(url), lambda: ucpl.infer(url),
            lambda: ucpl.compare(url, kept), lambda: ucpl.plan(url, "plain()"), lambda: ucpl.apply(made, url, next(new)),
            lambda: ucpl.convert(url, next(new), "plain()"), lambda: ucpl.StorageReader(url),
        ):  # fmt: skip
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                call()
            out.append(sum(WORD in str(one.message) for one in said))
        return out

    kept = str(tmp_path / "kept")
    assert main(["vault", "persist", str(home), kept]) == 0
    assert heard(url) == [0] * 16 and torch.equal(model.weight, weight + 20)
    flip(vault.domain(0).commit(2))
    assert heard(url) == [1] * 16 and torch.equal(model.weight, weight + 10)
    assert heard(f"{url}@1") == [0] * 16


def loading(rank: int, port: int, home: str, out: str) -> None:
    """The warnings of a rank, if all ranks load together."""
    how = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **how)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reader = ucpl.load_into(torch.nn.Linear(6, 1, bias=False), None, f"vault:{home}")
    told = [reader.generation, sum(WORD in str(one.message) for one in said)]
    Path(out, str(rank)).write_text(json.dumps(told), encoding="utf-8")
    torch.distributed.destroy_process_group()


def test_one_of_several_ranks_says_so(tmp_path):
    home = tmp_path / "job"
    vault = small.weighing(home, torch.ones(1, 6), torch.ones(1, 6))
    flip(vault.domain(0).commit(2))
    run_all(2, loading, str(home), str(tmp_path))
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[1, 1], [1, 0]]


def test_a_newer_text_of_another_vault_is_not_damaged(older):
    """A domain's folder with an older job's texts.

    They belong to another vault and are undamaged.
    """
    home = older(1)
    (home / "d0/commit.2.json").write_bytes(seal({"generation": 2}))
    assert find_damage(home)[1] == []


def test_a_damaged_text_of_what_was_saved_over_stops_nothing(tmp_path):
    """The newest commit is lost, and its slot is rewritten.

    This happens before a server notices.
    """
    with job(tmp_path / "job", 1, "none") as here:
        for step in (1, 2, 3):
            here.save(step)
            here.turn()
        flip(here.path(0, "commit.3.json"))
        for step in (4, 5, 6):
            here.save(step)
            here.turn()
        assert here.read() == 6
