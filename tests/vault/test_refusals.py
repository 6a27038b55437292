"""Rejected requests to a vault."""

from __future__ import annotations

import shutil

import pytest
import torch

import ucpl
from tests.vault.states import JOB, Truth, memory
from ucpl.cli import main
from ucpl.storage.vaults.snapshot_folder import _parted
from ucpl.vault import Vault
from ucpl.vault.server import Server


def refused(code: str, said: str):
    return pytest.raises(ucpl.UcplError, match=f"(?s){code}: .*{said}")


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1, 2))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"ranks": 5, "domains": 2}, "5 ranks do not divide into 2 domains"),
        ({"ranks": 4, "domains": 0}, "do not divide"),
        ({"ranks": 2, "domains": 2, "protect": "raid6"}, "'raid6' is not a protection"),
        ({"ranks": 2, "domains": 2, "protect": "mirror(0)"}, "is not a protection"),
        ({"ranks": 2, "domains": 2, "protect": "raim5(1)"}, "is not a protection"),
        ({"ranks": 2, "domains": 2, "protect": "mirror(2)"}, r"mirror\(2\) is for 3 domains or more, there are 2"),
        ({"ranks": 1, "domains": 1, "protect": "raim5"}, "raim5 is for 2 domains or more, there are 1"),
        ({"domains": [[0], [0, 1]]}, "each rank must be in one domain: rank 0 is in d0 and d1$"),
        ({"domains": [[0], [2]]}, "each rank must be in one domain: rank 1 is in none$"),
        ({"domains": [[0, 1, 1], [2, 3], [4, 5]]}, "rank 1 is in d0 and d0$"),
        ({"domains": [[0, -1], []]}, "rank -1 does not exist$"),
        ({"domains": [[1 << 60]]}, "rank 0 is in none, rank 1 is in none, rank 2 is in none, rank 3 is in none$"),
        ({"domains": [[r, r] for r in range(6)]}, "rank 3 is in d3 and d3, and 2 more$"),
        ({"domains": []}, "rank 0 is in none$"),
    ],
)
def test_a_vault_that_cannot_be_is_not_made(tmp_path, made, said):
    with refused("E690", said):
        Vault.make(tmp_path / "job", **made)
    assert not (tmp_path / "job").exists()


def test_a_name_that_no_folder_should_have_is_refused(tmp_path):
    with refused("E690", "cannot be the name of a job"):
        Vault.make(tmp_path / "a job\n")


def test_a_folder_without_vault_and_uncommitted_generations_are_reported(tmp_path, truth):
    with refused("E692", "is not a vault"):
        Vault.at(tmp_path)
    with refused("E692", "is not a vault"):
        ucpl.verify(f"vault:{tmp_path}")
    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        with refused("E692", "nothing is committed"):
            ucpl.verify(here.url)
        here.save(truth, 1)
        here.turn()
        with refused("E692", "generation 7 is not committed"):
            ucpl.verify(f"{here.url}@7")
        assert truth.step_of(f"{here.url}@1") == 1


def test_the_json_of_a_rank_that_there_is_not_is_refused(tmp_path, truth):
    """-1 gave that of the last one."""
    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        for rank in (2, 99, -1):
            with refused("E694", f"has no rank {rank}") as raised:
                here.vault.state(rank)
            assert raised.value.diagnostics[0].remedy == "it has rank 0 to rank 1"
        here.save(truth, 1)
        here.turn()
        with refused("E694", "has no rank -1"):
            here.vault.state(-1)
        assert here.vault.state(1) == {"at": 1}


def test_a_vault_is_named_relative_to_the_current_folder(tmp_path, truth, monkeypatch, capsys):
    with memory(tmp_path / "a/job", truth, domains=2, protect="mirror") as here:
        here.save(truth, 1)
        here.turn()
        (tmp_path / "a/b").mkdir()
        for folder, url in (("a", "vault:job"), ("", "vault:a/job@1"), ("a/b", "vault:../job"), ("a", "vault:./job")):
            monkeypatch.chdir(tmp_path / folder)
            assert truth.step_of(url) == 1
            assert main(["inspect", url]) == 0
            assert ucpl.StorageReader(url).generation == 1
        monkeypatch.chdir(tmp_path / "a")
        assert _parted("vault:job@1") == (tmp_path / "a/job", 1)  # who reads it later may stand elsewhere
        capsys.readouterr()
        assert main(["inspect", "vault:none"]) == 3
        assert f"error[E692]: {tmp_path}/a/none is not a vault: it does not exist" in capsys.readouterr().err
        assert main(["convert", "vault:job", "vault:out", "--to", "zero1(dp=2)"]) == 2
        assert "error[E680]: vault:out cannot be a target" in capsys.readouterr().err
        (tmp_path / "a/vault:file").touch()  # a file that has this name
        assert main(["inspect", "vault:file"]) != 0 and "E692" not in capsys.readouterr().err


@pytest.mark.fault(
    "Vaults", "a second writer of a rank, a second server of a domain, another job's vault (F17)", "refused (E694)"
)
def test_a_vault_is_one_job_s_and_a_domain_one_server_s(tmp_path, truth):
    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        with refused("E694", "2 ranks in 2 domains, mirror"):
            Vault.make(here.vault.home, ranks=4, domains=2, protect="mirror")
        with refused("E694", "rank 1 of .* is written by another process"):
            here.vault.writer(1, run="second")
        with refused("E694", "it has no rank 2"):
            here.vault.writer(2, run="second")
        with refused("E694", "d0 of .* has a server already"), Server(here.vault.home, 0):
            pass
        with pytest.raises(ucpl.UcplError, match=r"E694: .* has no domain d5") as raised, Server(here.vault.home, 5):
            pass
        assert raised.value.diagnostics[0].remedy == "it has d0 to d1: write --domain 0 to --domain 1"
    Vault.make(tmp_path / "one", ranks=1, domains=1)
    with pytest.raises(ucpl.UcplError, match="has no domain d1") as raised, Server(tmp_path / "one", 1):
        pass
    assert raised.value.diagnostics[0].remedy == "it has d0 alone: write --domain 0"


def test_what_cannot_be_kept_is_refused_by_name(tmp_path, truth):
    spec = tmp_path / "own.ucpl"
    spec.write_text(
        JOB.read_text().replace("framework torch()", "framework deepspeed()").replace("layout job", "layout whole")
    )
    vault = Vault.make(tmp_path / "job", ranks=2, domains=2)
    with refused("E693", "this run has no name"):
        vault.writer(0)
    with vault.writer(0, run="a", strict=True) as writer:
        for what, said in (
            ({"w": torch.zeros(3).to_sparse()}, "w is a tensor of torch.float32 and layout torch.sparse_coo"),
            (3, "a int cannot be saved"),
            ({"x": lambda: None}, "AttributeError: Can't pickle local object"),
        ):
            with refused("E693", said):
                writer.save(1, what)
        with refused("E693", "the companion state is not small JSON"):
            writer.save(1, {"w": torch.zeros(3)}, {"rng": b"bytes"})  # type: ignore[dict-item]
    with vault.writer(0, run="a", strict=True, layout=truth.layout) as writer:
        given = truth.cut[1][0]
        with refused("E640", "it is missing"):
            writer.save(1, {name: t for name, t in given.items() if name != "norm"})
        with refused("E640", "the layout has no such tensor on this rank"):
            writer.save(1, {**given, "more": torch.zeros(2)})
        with refused("E640", r"norm is \[5\] of bf16, the layout says \[24\] of bf16"):
            writer.save(1, {**given, "norm": torch.zeros(5, dtype=torch.bfloat16)})
        with refused("E640", r"norm is \[24\] of f32, the layout says \[24\] of bf16"):
            writer.save(1, {**given, "norm": torch.zeros(24)})
        with refused("E693", "is a layout: give a dict"):
            writer.save(1, 3)
    with refused("E693", r"is a layout of deepspeed\(\)"):
        vault.writer(0, run="a", layout=f"{spec}:whole(dp=2)")


def test_a_save_that_fails_ends_nothing_and_says_so(tmp_path, truth, monkeypatch, caplog):
    from ucpl.runtime.failpoints import set_failpoints

    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        here.save(truth, 1)
        here.turn()
        for writer in here.writers:
            writer.strict = False
        set_failpoints("vault-room:1:enospc")
        try:
            assert here.save(truth, 2) == [False, True]
        finally:
            set_failpoints("")
        assert "step 2 is not saved: " in caplog.text
        assert "No space left on device" in caplog.text
        here.turn()
        assert truth.step_of(here.url) == 1
        assert here.save(truth, 2) == [True, True]
        here.turn()
        assert truth.step_of(here.url) == 2
        here.writers[0].strict = True
        set_failpoints("vault-room:1:eio")
        try:
            with refused("E695", "cannot be written"):
                here.writers[0].save(3, truth.cut[2][0])
        finally:
            set_failpoints("")


def test_a_vault_is_no_target(tmp_path, truth):
    with refused("E680", "cannot be a target"):
        ucpl.convert(truth.folders[1], f"vault:{tmp_path}/job", truth.layout, layout=truth.layout)
    shutil.rmtree(tmp_path / "job", ignore_errors=True)
