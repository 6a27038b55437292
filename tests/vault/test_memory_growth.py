"""The memory of a vault's processes does not grow with time.

The text of a generation grows with the number of tensors.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import ucpl
from tests.vault import test_hosts
from tests.vault.small import job, weighing
from tests.vault.trained import training
from ucpl.cli import main
from ucpl.storage.vaults import manifest_cache, remote_domain
from ucpl.storage.vaults.checksummed_text import seal, unseal
from ucpl.storage.vaults.committed import get_commits, read_job
from ucpl.storage.vaults.records import SavedFile
from ucpl.vault import Vault, peers


def held() -> Counter[str]:
    """Objects of the product, counted by class."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if str(kind.__module__).startswith("ucpl."):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return found


def saving(tmp_path: Path, ends: ExitStack) -> Callable[[int], None]:
    """Three domains, of two ranks each."""
    here = ends.enter_context(job(tmp_path / "job", 3, "raim5", each=2))

    def step(number: int) -> None:
        here.save(number)
        here.turn()
        assert here.read() == number

    return step


def replaying(tmp_path: Path, ends: ExitStack) -> Callable[[int], None]:
    """A vault with gradients between complete generations."""
    here = ends.enter_context(training(tmp_path / "job", domains=2, protect="mirror"))

    def step(number: int) -> None:
        here.step()
        here.save()

    return step


def of_hosts(tmp_path: Path, ends: ExitStack) -> Callable[[int], None]:
    here = ends.enter_context(test_hosts.cluster(tmp_path))
    here.serve()
    here.write("first")

    def step(number: int) -> None:
        here.step(number)
        assert here.read(1) == number

    return step


@pytest.mark.parametrize("kind", [saving, replaying, of_hosts])
def test_what_is_held_is_that_of_generations_that_count(
    kind: Callable[[Path, ExitStack], Callable[[int], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_domain, "SILENT", 0.0)
    monkeypatch.setattr(peers, "EVERY", 0.0)
    with ExitStack() as ends:
        step = kind(tmp_path, ends)
        for number in range(1, 7):  # two rounds of all slots
            step(number)
        before = held()
        for number in range(7, 13):
            step(number)
        assert held() - before == Counter()


def test_a_text_of_several_domains_is_parsed_once(tmp_path: Path) -> None:
    home = tmp_path / "job"
    with job(home, 3, "raim5") as here:
        here.save(1)
        here.turn()
        known = read_job(home)
        assert known is not None
        found = [here.vault.domain(n).commit_in(1, known) for n in range(3)]
        assert found[0] is not None and found[0] is found[1] is found[2] is get_commits(home, known)[0]
        assert found[0].files() is found[0].files()  # who opens it asks three times


def test_a_text_grows_by_little_with_each_tensor(tmp_path: Path) -> None:
    """Equal ends of files are stored once.

    Each tensor adds its place and digest.
    """
    sizes = []
    for count in (20, 60):
        vault = Vault.make(tmp_path / f"job{count}", ranks=1, domains=1, protect="none")
        with vault.writer(0, run="first", wait=0.0, strict=True) as writer:
            assert writer.save(1, {"model": {f"layer.{i:03}.weight": torch.ones(8) * i for i in range(count)}})
            sizes.append((vault.domain(0).folder / "r0.s0.json").stat().st_size)
    assert (sizes[1] - sizes[0]) / 40 < 200  # bytes


def test_who_saves_or_votes_takes_no_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing is slow for a job of many ranks.

    Only a committer and a reader need it.
    """
    apart: list[object] = []
    of = SavedFile.of

    def counted(value: object, arena: int) -> SavedFile:
        apart.append(value)
        return of(value, arena)

    with job(tmp_path / "job", 3, "raim5", each=2) as here:
        here.save(1)
        here.turn()
        monkeypatch.setattr(SavedFile, "of", counted)
        manifest_cache._folders.clear()  # as in a process of its own, each of them
        manifest_cache._same.clear()
        here.writers[3].save(2, None)
        (commit,) = get_commits(here.vault.home, here.vault.job)
        assert commit.sealed() == here.path(0, "commit.1.json").read_bytes()  # as a repair writes it
        assert apart == []
        here.save(2, range(3))
        here.save(2, range(4, 6))
        for number in range(2):
            assert here.servers[number].turn() is None and apart == []
        assert here.servers[2].turn() == 2 and len(apart) == 6
        assert here.read() == 2


def other_files(path: Path) -> None:
    """Replace the file list of rank 1 by one without content.

    The text is checksummed, like one of another version or program.
    """
    told = unseal(path.read_bytes())
    assert told is not None and isinstance(told["shards"], list)
    shard = unseal(str(told["shards"][1]).encode())
    assert shard is not None
    told["shards"][1] = seal({**shard, "files": '[{"name": "rank-1"}]'}).decode()
    path.write_bytes(seal(told))


def test_what_a_text_says_of_files_is_refused_when_it_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "job"
    with job(home, 2, "mirror") as here:
        here.save(1)
        here.turn()
        for number in range(2):
            other_files(here.path(number, "commit.1.json"))
        with pytest.raises(
            ucpl.UcplError, match=r"E692: .*parts of the shard of rank 1 are missing or overlap in generation 1"
        ):
            ucpl.verify(f"vault:{home}")
        assert main(["vault", "status", str(home)]) == 0 and "generation 1" in capsys.readouterr().out
        assert main(["vault", "verify", str(home)]) == 3
        here.writers[0].save(2, None)
        here.writers[1].save(2, None)
        here.turn()
        assert here.read() == 2


def test_so_is_what_it_says_of_gradients(tmp_path: Path) -> None:
    home = tmp_path / "job"
    with training(home, domains=2, protect="mirror") as here:
        for _ in range(2):
            here.step()
            here.save()
        for domain in range(2):
            other_files(here.vault.domain(domain).commit(2))
    with pytest.raises(
        ucpl.UcplError, match=r"E692: .*parts of the shard of rank 1 are missing or overlap in generation 2"
    ):
        ucpl.verify(f"vault:{home}")
    assert ucpl.verify(f"vault:{home}@1")


def test_threads_ask_for_texts_while_others_prune_them(tmp_path: Path) -> None:
    """A server's thread answers others while it reads its folder."""
    met: list[Exception] = []

    def asks(number: int) -> None:
        try:
            for i in range(3000):
                manifest_cache.keep(tmp_path, f"commit.{i % 50}.json", number, i, b"text", lambda data: data)
                manifest_cache.cached(tmp_path, f"commit.{i % 7}.json", number)
                if not i % 5:
                    manifest_cache.keep_only(tmp_path, [f"commit.{n}.json" for n in range(i % 50)])
        except Exception as error:
            met.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=asks, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
        manifest_cache.keep_only(tmp_path, [])
    assert met == []


def test_texts_of_older_versions_are_read(tmp_path: Path) -> None:
    """File lists inside the shard's text, and ends stored separately.

    A restarted job resumes from them.
    """
    weight = torch.arange(600.0).reshape(100, 6)
    vault = weighing(tmp_path / "job", weight)
    path = vault.domain(0).commit(1)
    told = unseal(path.read_bytes())
    assert told is not None and isinstance(told["shards"], list)
    shard = unseal(str(told["shards"][0]).encode())
    assert shard is not None
    files = json.loads(str(shard["files"]))
    for file in files:
        data = file.pop("data")
        file["late"] = [[begin, data[number], holes] for begin, number, holes in file["late"]]
    assert any(file["late"] for file in files)
    path.write_bytes(seal({**told, "shards": [seal({**shard, "files": files}).decode()]}))
    model = torch.nn.Linear(6, 100, bias=False)
    assert ucpl.verify(f"vault:{vault.home}")
    ucpl.load_into(model, None, f"vault:{vault.home}")
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_collection_during_a_save(is_on: bool, tmp_path: Path) -> None:
    """The collector stays off, if the job switched it off."""
    seen: list[bool] = []

    def looks(self: object) -> dict[str, object]:
        seen.append(gc.isenabled())
        return {"weight": torch.ones(3)}

    model = type("Stateful", (), {"state_dict": looks, "load_state_dict": looks})()
    vault = Vault.make(tmp_path / "job", ranks=1, domains=1, protect="none")
    try:
        with vault.writer(0, run="first", wait=0.0, strict=True) as writer:
            (gc.enable if is_on else gc.disable)()
            assert writer.save(1, {"model": model}) and gc.isenabled() is is_on
            with pytest.raises(ucpl.UcplError):
                writer.save(2, object())
            assert gc.isenabled() is is_on
    finally:
        gc.enable()
    assert seen == [False]
