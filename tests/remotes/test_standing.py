"""What stands for a checkpoint elsewhere goes with the call that asked for it: a job may look at a vault again and again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.remotes.conftest import EXAMPLE
from ucpl import errors
from ucpl.cli import main
from ucpl.remotes import entrance, folders, reading, shadows
from ucpl.remotes.standing import ending_with, ends, meanwhile
from ucpl.vault import Vault
from ucpl.vault.looking import damage
from ucpl.vault.persisting import persist
from ucpl.vault.server import Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHT = torch.arange(600.0).reshape(100, 6)


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Path]:
    made = Vault.make(tmp_path / "job", ranks=1, domains=1, protect="none")
    with made.writer(0, run="first", wait=0.0, strict=True) as writer, Server(made.home, 0) as server:
        assert writer.save(1, {"model": {"weight": WEIGHT}})
        for _ in range(2):
            server.turn()
        yield made.home


def held() -> dict[str, int]:
    """All that this process keeps of what stands for something else."""
    top = folders._top(os.getpid())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folders": len(list(top.iterdir())),
        "inodes": len(reading._REMOTES),
        "names": len(errors._CALLED),
        "places": len(entrance._PLACES),
        "remarks": len(entrance._REMARKS),
        "bytes": shadows._KEPT[0],
    }


def filled(src: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 100, bias=False)
    ucpl.load_into(model, None, src)
    assert torch.equal(model.weight, WEIGHT)


CALLS: dict[str, Callable[[str, Path], object]] = {
    "plan": lambda src, tmp: ucpl.plan(src, "plain()"),
    "convert": lambda src, tmp: ucpl.convert(src, tmp / "target.pt", "plain()"),
    "apply": lambda src, tmp: ucpl.apply(ucpl.plan(src, "plain()"), src, tmp / "target.pt"),
    "compare": lambda src, tmp: ucpl.compare(src, src),
    "verify": lambda src, tmp: ucpl.verify(src),
    "infer": lambda src, tmp: ucpl.infer(src).text(),
    "cli": lambda src, tmp: main(["inspect", src]),
    "cli, refused": lambda src, tmp: main(["convert", src, str(tmp / "target.pt"), "--to", "zero9()"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["vault", "store"])
def test_a_call_leaves_nothing_of_what_it_read(
    kind: str, call: str, vault: Path, upload: Callable[..., str], tmp_path: Path
) -> None:
    src = f"vault:{vault}" if kind == "vault" else upload()
    before = held()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        CALLS[call](src, tmp_path / str(number))
        assert held() == before, number


def test_what_a_job_does_beside_its_training_leaves_nothing(vault: Path, tmp_path: Path) -> None:
    before = held()
    for number in range(2):
        filled(f"vault:{vault}", tmp_path)
        persist(vault, tmp_path / f"step-{number}")
        assert damage(vault)[1] == []
        assert held() == before, number


def test_a_target_in_a_store_leaves_nothing(upload: Callable[..., str], tmp_path: Path) -> None:
    upload()
    before = held()
    ucpl.convert(EXAMPLE, "memory://bucket/target", "zero3(dp=3)")
    assert held() == before
    assert ucpl.compare(EXAMPLE, "memory://bucket/target") and held() == before


def test_a_reader_reads_for_as_long_as_it_is_kept(vault: Path) -> None:
    before = held()
    reader = ucpl.StorageReader(f"vault:{vault}")
    state = {"model.weight": torch.zeros(100, 6)}
    load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["model.weight"], WEIGHT)
    during = held()
    assert during["folders"] == before["folders"] + 1 and during["descriptors"] > before["descriptors"]
    reader.reset(f"vault:{vault}")  # another one, instead of the first
    assert held()["folders"] == during["folders"]
    del reader
    assert held() == before
    with pytest.raises(ucpl.UcplError, match="E692"):
        ucpl.StorageReader(f"vault:{vault.parent}/nothing")
    assert held() == before


def test_errors_say_the_url_after_the_call_that_raised_them(upload: Callable[..., str]) -> None:
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.verify(upload(), layout="zero9()")
    with pytest.raises(ucpl.UcplError) as raised:
        ucpl.convert(upload(EXAMPLE / "latest", "bucket/file"), "memory://bucket/target", "plain()")
    assert "ucpl-remote-" not in f"{caught.value} {caught.value.diagnostics} {raised.value.diagnostics}"
    assert "memory://bucket/file" in str(raised.value)


def test_calls_within_calls_end_apart() -> None:
    ended: list[str] = []

    class Owner:
        pass

    owner = Owner()
    with meanwhile():
        ends().callback(ended.append, "outer")
        with meanwhile():
            ends().callback(ended.append, "inner")
        assert ended == ["inner"]
        with ending_with(owner) as end:
            ends().callback(ended.append, "owner's")
        assert ended == ["inner"]
    assert ended == ["inner", "outer"]
    end()
    end()
    del owner
    assert ended == ["inner", "outer", "owner's"]
    kept = Owner()  # as a traceback keeps it
    with pytest.raises(KeyError), ending_with(kept):
        ends().callback(ended.append, "of what failed")
        raise KeyError
    assert ended[-1] == "of what failed"


def test_a_fork_ends_nothing_of_its_parent_s(tmp_path: Path) -> None:
    log = tmp_path / "ended"

    def note() -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")

    def forked() -> int:
        with meanwhile():
            ends().callback(note)
            return os.fork()  # each of the two leaves

    child = forked()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert log.read_text().split() == [str(os.getpid())]
