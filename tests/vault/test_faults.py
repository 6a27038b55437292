"""Faults of a vault, one by one.

A read returns the bytes of one committed generation, or an error with the lost tensors.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from attrs import evolve

from tests.fuzz.odd import ODD
from tests.vault.small import Job, give, job
from ucpl.errors import UcplError
from ucpl.runtime.failpoints import set_failpoints
from ucpl.storage.vaults.checksummed_text import seal, unseal
from ucpl.storage.vaults.committed import get_commits
from ucpl.storage.vaults.memory import get_domain_data
from ucpl.storage.vaults.protection import Protection, get_sets
from ucpl.storage.vaults.records import CHUNK
from ucpl.texts import Json
from ucpl.vault import Vault, arenas
from ucpl.vault import writer as writer_module
from ucpl.vault.server import Server
from ucpl.vault.survival import Survival

LARGE = (2 * CHUNK + 777, CHUNK, 3 * CHUNK - 5, 40)
LEAST = {"none": 1, "mirror": 2, "mirror(2)": 3, "raim5": 2, "raim5(4)": 4, "rs(1, 1)": 2, "rs(2, 2)": 4, "rs(3, 2)": 5,
         "rs(5, 3)": 8}  # fmt: skip
EVERY = [(n, protect) for n in (2, 3, 4, 5, 8) for protect, least in LEAST.items() if n >= least]


def flip(path: Path, at: int = 100) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 16]))


@pytest.mark.fault(
    "Vaults",
    "every set of one to three lost domains of 2 to 8, under each protection (F9)",
    "the bytes, or E691 if the protection does not cover the loss",
)
@pytest.mark.parametrize(("domains", "protect"), EVERY)
def test_every_set_of_lost_domains_comes_back_or_is_refused_as_the_codes_say(tmp_path, domains, protect):
    """F7, F9: up to three lost domains, with unequal shards."""
    with job(tmp_path / "job", domains, protect) as here:
        here.save(1)
        here.turn()
        protection = Protection.parse(protect)
        sets = get_sets(domains, protection)
        commit = here.vault.committed()
        assert commit is not None and here.read() == 1
        guarded = Survival(protection, tuple(get_domain_data(ranks, commit.shards) for ranks in here.vault.job.domains))
        for count in (1, 2, 3):
            for lost in map(frozenset, itertools.combinations(range(domains), count)):
                told = all(
                    _is_covered(protection, len(some), [some.index(d) for d in some if d in lost]) for some in sets
                )
                assert not (told and guarded.loses(lost))
                if not guarded.loses(lost):  # which nothing may be, too, where a domain has next to nothing
                    assert here.read(lost) == 1
                else:
                    with pytest.raises(UcplError, match="E691"):
                        here.read(lost)


def _is_covered(protection: Protection, size: int, lost: list[int]) -> bool:
    """Expected by hand: a set of copies needs one; XOR survives one."""
    if protection.name == "mirror":
        return all(any((p + 1 + j) % size not in lost for j in range(protection.copies)) for p in lost)
    return len(lost) <= protection.copies


@pytest.mark.fault(
    "Vaults", "a flipped bit in each half chunk (F10)", "found, rebuilt, and repaired by a server that starts"
)
@pytest.mark.parametrize("protect", ["mirror", "raim5", "rs(1, 2)"])
@pytest.mark.parametrize("name", ["r1.s0", "p.s0"])
def test_a_flipped_bit_is_found_rebuilt_and_healed(tmp_path, protect, name):
    """F10: in every chunk of shards and of redundancy."""
    with job(tmp_path / "job", 3, protect, LARGE) as here:
        here.save(1)
        here.turn()
        path = here.path(1, name)
        before = path.read_bytes()
        for at in range(17, len(before), CHUNK // 2):
            flip(path, at)
            assert here.read() == 1
            here.serve(1)  # a server that starts looks at all of its domain, and heals it
            assert path.read_bytes() == before


@pytest.mark.fault(
    "Vaults",
    "a record that is damaged, cut, empty or another domain's (F10, F11)",
    "ignored: another domain's copy or an older snapshot is read",
)
def test_a_damaged_text_is_as_if_it_were_not_there(tmp_path):
    """F10, F11: a damaged commit, shard record or job record.

    It is flipped, truncated, empty, or of another vault.
    """
    with job(tmp_path / "job", 3, "raim5") as here:
        here.save(1)
        here.turn()
        here.save(2)
        here.turn()
        commits = [here.path(d, "commit.2.json") for d in range(3)]
        whole = commits[0].read_bytes()
        for damaged in (
            b"",
            whole[:-1],
            whole[: len(whole) // 2],
            b"{}",
            seal({}),
            seal({"generation": 2, "shards": 3}),
        ):
            for path in commits[:2]:
                path.write_bytes(damaged)
            assert here.read() == 2  # the third domain knows
        commits[2].write_bytes(whole.replace(b'"step":2', b'"step":7'))
        assert here.read() == 1  # nobody knows any more; one says so, whose digest is another
        commits[2].unlink()
        assert here.read() == 1
        told = unseal(whole)
        assert told is not None
        other = seal({**told, "generation": 3})
        commits[0].with_name("commit.3.json").write_bytes(other)
        assert here.read() == 1
        here.path(0, "job.json").write_bytes(b"damaged")
        assert here.read() == 1  # the majority, two of three, has the identity record


@pytest.mark.fault("Vaults", "an arena that is shortened, empty, missing or a folder (F11)", "rebuilt")
def test_a_shortened_or_absent_arena_is_rebuilt(tmp_path):
    """F11."""
    with job(tmp_path / "job", 3, "raim5", LARGE) as here:
        here.save(1)
        here.turn()
        path = here.path(0, "r0.s0")
        whole = path.read_bytes()
        for damage in (
            lambda: os.truncate(path, 1000),
            lambda: os.truncate(path, 0),
            path.unlink,
            lambda: _folder(path),
        ):
            damage()
            assert here.read() == 1
            if path.is_dir():
                path.rmdir()
            here.serve(0)
            assert path.read_bytes() == whole


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.fault(
    "Vaults",
    "the committer dies after one domain has the commit (F5)",
    "the snapshot counts; the other domains learn of it before they overwrite an older one",
)
def test_a_commit_record_in_one_domain_is_sufficient(tmp_path):
    """F5: whoever committed was killed when one domain knew."""
    with job(tmp_path / "job", 3, "raim5") as here:
        here.save(1)
        here.turn()
        here.save(2)
        here.turn()
        for number in (1, 2):
            here.path(number, "commit.2.json").unlink()
        assert here.read() == 2
        here.save(3, range(1, 3))  # ranks of the two others do not write where generation 2 lies
        assert here.read() == 2
        away = shutil.move(here.vault.domain(0).folder, tmp_path / "away")
        assert here.read() == 2  # a rank copies the newest commit into its domain before it overwrites an older one
        shutil.move(away, here.vault.domain(0).folder)
        here.save(3, range(1))
        here.turn()
        assert here.read() == 3
        assert all(here.path(d, "commit.3.json").exists() for d in range(3))


def test_ranks_that_are_at_other_steps_commit_nothing(tmp_path):
    with job(tmp_path / "job", 2, "mirror") as here:
        here.save(1)
        here.turn()
        here.writers[0].save(2, None)
        here.writers[1].save(3, None)
        here.turn()
        assert here.read() == 1


def test_what_is_rebuilt_is_held_against_what_was_saved(tmp_path):
    """Undamaged inputs may belong to another generation."""
    with job(tmp_path / "job", 3, "raim5", LARGE) as here:
        here.save(1)
        here.turn()
        (commit,) = get_commits(here.vault.home, here.vault.job)
        first = commit.shards[0]
        other = evolve(first, chunks=(first.chunks[0] ^ 1, *first.chunks[1:]))
        for number in range(3):
            text = evolve(commit, shards=(other, *commit.shards[1:])).sealed()
            here.path(number, "commit.1.json").write_bytes(text)
        with pytest.raises(UcplError, match="E691"):
            here.read()


@pytest.mark.fault(
    "Vaults", "a folder, pipe, link or nothing in place of any file of a domain", "ignored; other domains replace it"
)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("name", ["job.json", "commit.1.json", "r0.s0", "r0.s0.json", "p.s0", "p.s0.json"])
def test_what_is_no_file_is_as_if_it_were_not_there(tmp_path, odd, name):
    """A folder, a pipe or a link in one domain.

    The other domains replace the file.
    """
    with job(tmp_path / "job", 3, "raim5") as here:
        here.save(1)
        here.turn()
        path = here.path(0, name)
        path.unlink()
        odd(path)
        here.turn()
        assert here.read() == 1


@pytest.mark.parametrize("protect", ["mirror(2)", "rs(2, 2)"])
def test_what_is_damaged_is_not_made_use_of(tmp_path, protect):
    """A lost domain is rebuilt from unchecked inputs first.

    If the result is wrong, damaged inputs are excluded.
    """
    with job(tmp_path / "job", 4, protect, (3 * CHUNK, 3 * CHUNK + 17, 3 * CHUNK - 4096)) as here:
        here.save(1)
        here.turn()
        for name in ("p.s0", "r1.s0"):  # of the domain that is asked first
            path = here.path(1, name)
            for at in range(5, path.stat().st_size, CHUNK // 2):
                flip(path, at)
        assert here.read(frozenset({0})) == 1


@pytest.mark.fault(
    "Vaults",
    "a forged record with a valid digest: parity, names, sizes, domains",
    "it does not count, or the read is refused",
)
def test_a_commit_whose_parity_is_none_of_its_shards_does_not_count(tmp_path):
    """A digest alone proves nothing about the inputs.

    A commit record could contain any.
    """
    with job(tmp_path / "job", 3, "raim5") as here:
        for step in (1, 2):
            here.save(step)
            here.turn()
        commit = get_commits(here.vault.home, here.vault.job)[0]
        first = commit.parity[0]
        for other in (evolve(first, size=2 * first.size, chunks=first.chunks), evolve(first, block=2 * first.block)):
            text = evolve(commit, parity=(other, *commit.parity[1:])).sealed()
            for number in range(3):
                here.path(number, "commit.2.json").write_bytes(text)
            assert here.read() == 1


def test_a_generation_without_all_parts_of_a_file_is_none(tmp_path):
    with job(tmp_path / "job", 2, "mirror") as here:
        here.save(1)
        here.turn()
        (commit,) = get_commits(here.vault.home, here.vault.job)
        (file,) = commit.shards[0].files
        for damaged in (evolve(file, segments=()), evolve(file, size=file.size + 1)):
            text = evolve(commit, shards=(evolve(commit.shards[0], files=(damaged,)), commit.shards[1])).sealed()
            for number in range(2):
                here.path(number, "commit.1.json").write_bytes(text)
            with pytest.raises(UcplError, match=r"E692: .*parts of rank-0 are missing or overlap in generation 1"):
                here.read()


@pytest.mark.fault("Vaults", "a rank withdraws a save that all have voted for", "it never counts")
def test_what_a_rank_took_back_never_counts(tmp_path):
    """All domains voted, and the committer was killed.

    Then a rank starts its next save in that slot.
    """
    with job(tmp_path / "job", 2, "mirror") as here:
        here.save(1)
        here.turn()
        here.save(2)
        set_failpoints("vault-commit:1:eio")
        try:
            with pytest.raises(OSError, match="Input"):
                here.turn()
        finally:
            set_failpoints("")
        assert all(here.vault.domain(d).vote_in(s) for d in range(2) for s in range(2))
        set_failpoints("vault-chunk:1:eio")
        try:
            with pytest.raises(UcplError, match="E695"):
                here.writers[0].save(3, None)
        finally:
            set_failpoints("")
        here.turn()
        assert here.read() == 1
        assert not here.path(0, "commit.2.json").exists()


@pytest.mark.fault("Vaults", "ranks of two runs at different steps (F3, F14)", "never mixed in one snapshot")
def test_ranks_of_two_runs_are_never_mixed(tmp_path):
    """F3, F14: a run that ended during a generation.

    The next run saves the same number.
    """
    with job(tmp_path / "job", 3, "raim5") as here:
        here.save(1)
        here.turn()
        here.save(2, range(2))  # the third rank was killed
        here.turn()
        assert here.read() == 1
        here.start("second")
        here.save(5, range(2, 3))
        here.turn()
        assert here.read() == 1
        here.save(5, range(2))
        here.turn()
        assert here.read() == 5


@pytest.mark.parametrize("protect", ["none", "raim5"])
def test_a_shard_that_is_damaged_before_it_counts_is_not_committed(tmp_path, protect):
    with job(tmp_path / "job", 3, protect, LARGE) as here:
        here.save(1)
        here.turn()
        here.save(2)
        flip(here.path(2, "r2.s1"), CHUNK + 3)
        here.turn()
        assert here.read() == 1
        here.save(3)
        here.turn()
        assert here.read() == 3


def test_a_lost_domain_withholds_what_is_new_and_is_taken_up_again(tmp_path):
    """F7, F8: at a step that others have saved.

    Then its server returns and heals it, and the job continues.
    """
    with job(tmp_path / "job", 4, "raim5") as here:
        for step in (1, 2):
            here.save(step)
            here.turn()
        here.save(3, range(3))
        here.stop(3)
        shutil.rmtree(here.vault.domain(3).folder)
        here.turn()
        assert here.read() == 2
        here.serve(3)
        assert here.read(frozenset({0})) == 2  # the redundancy of the lost domain is rebuilt
        here.start("second")
        here.save(4)
        here.turn()
        assert here.read() == 4


@pytest.mark.fault(
    "Vaults",
    "ENOSPC and EIO at a save and at parity (F12, F19)",
    "the save returns false; training continues; committed snapshots stay",
)
def test_full_memory_ends_no_save_before_it_and_no_process(tmp_path):
    """F12, F19: no room for an arena or parity; a failing disk."""
    with job(tmp_path / "job", 2, "mirror") as here:
        here.save(1)
        here.turn()
        for writer in here.writers:
            writer.strict = False
        for trap in ("vault-room:1:enospc", "vault-room:2:enospc", "vault-chunk:1:eio", "vault-copied:2:eio"):
            set_failpoints(trap)
            try:
                here.save(2)
            finally:
                set_failpoints("")
            here.turn()
            assert here.read() in (1, 2)
        here.save(3)
        for trap in ("vault-room:1:enospc", "vault-parity:1:eio", "vault-voted:1:eio", "vault-commit:1:eio"):
            set_failpoints(trap)
            try:
                with pytest.raises(OSError, match=r"No space|Input/output"):
                    here.turn()
            finally:
                set_failpoints("")
            assert here.read() in (1, 2)
        here.turn()
        assert here.read() == 3


@pytest.mark.fault("Vaults", "tensors change right after a save (F21)", "the snapshot has the values at the save")
def test_what_changes_after_a_save_is_not_what_was_saved(tmp_path):
    """F21."""
    import torch

    from ucpl.vault import Vault
    from ucpl.vault.server import Server

    vault = Vault.make(tmp_path / "job", ranks=1, domains=1)
    tensor = torch.arange(100_000, dtype=torch.float32)
    with vault.writer(0, strict=True) as writer, Server(vault.home, 0) as server:
        writer.save(1, {"w": tensor})
        tensor.add_(1.0)
        server.turn()
        server.turn()
    from ucpl.vault.persisted import persist

    persist(vault.home, tmp_path / "out")
    from torch.distributed.checkpoint.state_dict_loader import load

    found = {"w": torch.empty(100_000)}
    load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(found["w"], torch.arange(100_000, dtype=torch.float32))


def test_a_tensor_that_changes_during_its_digest_withdraws_the_save(tmp_path, monkeypatch):
    """Nothing of the state is read once the save has returned."""
    goes_on = threading.Event()
    monkeypatch.setattr(arenas, "failpoint", lambda name: name == "vault-chunk" and goes_on.wait(20))
    vault = Vault.make(tmp_path / "job", ranks=1, domains=1)
    tensor = torch.arange(600_000, dtype=torch.float32)
    with vault.writer(0) as writer, Server(vault.home, 0) as server:
        numbers: list[Json] = [1, 2, 3]
        beside: dict[str, Json] = {"rng": numbers}
        assert writer.save(1, {"w": tensor}, beside)
        tensor.add_(1.0)
        numbers.append(4)
        server.turn()
        assert writer.committed() is None  # the copied bytes have no record yet
        goes_on.set()
        writer._join()
        server.turn()
        assert writer.committed() == (1, 1)
        assert vault.state() == {"rng": [1, 2, 3]}
        found = persisted(vault, tmp_path / "first")
        assert torch.equal(found, torch.arange(600_000, dtype=torch.float32))
        assert writer.save(2, {"w": tensor})
    with Server(vault.home, 0) as server:  # the closed writer has recorded its copy
        server.turn()
    assert torch.equal(persisted(vault, tmp_path / "second"), tensor)


def persisted(vault: Vault, folder: Path) -> torch.Tensor:
    from torch.distributed.checkpoint.state_dict_loader import load

    from ucpl.vault.persisted import persist

    persist(vault.home, folder)
    found = {"w": torch.empty(600_000)}
    load(found, checkpoint_id=folder, no_dist=True)
    return found["w"]


def test_an_error_of_the_background_digest_is_reported(tmp_path, monkeypatch, caplog):
    def full(name: str) -> None:
        if name == "vault-copied":
            raise OSError(28, "No space left on device")

    vault = Vault.make(tmp_path / "job", ranks=1, domains=1)
    with vault.writer(0) as writer, Server(vault.home, 0) as server:
        assert writer.save(1, {"w": torch.arange(10.0)})
        server.turn()
        writer._join()
        server.turn()
        monkeypatch.setattr(writer_module, "failpoint", full)
        assert writer.save(2, {"w": torch.arange(10.0)}), "it was copied"
        writer._join()
        assert writer.error is not None and writer.error.diagnostics[0].code == "E695"
        assert "step 2 is not saved" in caplog.text
        server.turn()
        assert writer.committed() == (1, 1)
        monkeypatch.undo()
        saved = writer.save(3, {"w": torch.arange(10.0)})
        assert saved and saved.waited < 10, "nobody waits for what can never count"
        writer._join()
        server.turn()
        assert writer.committed() == (3, 3)


def test_the_job_of_small_vaults_detects_faults(tmp_path):
    """The oracle itself: another step's bytes are no step's."""
    with job(tmp_path / "job", 2, "none") as here:
        assert isinstance(here, Job)
        here.save(1)
        here.turn()
        here.sizes = (5000, 70_000, 1)
        with pytest.raises(AssertionError):
            here.read()


def test_ranks_of_a_run_begin_with_one_generation_whenever_that_of_the_run_before_counts(tmp_path):
    """All was saved when the job was killed.

    Servers commit it while the next run starts.
    """
    with job(tmp_path / "job", 2, "mirror") as made:
        made.save(1)
        for writer in made.writers:
            writer.close()
        first = made.vault.writer(0, run="second")
        made.turn()
        assert made.read() == 1
        second = made.vault.writer(1, run="second")
        assert [first._next, second._next] == [2, 2]
        first.close()
        second.close()


def test_ranks_of_a_run_begin_with_one_generation_whatever_the_first_of_them_has_written_over(tmp_path):
    """One rank had saved once more when the job was killed.

    Its first save overwrites the evidence that the others would need.
    """
    with job(tmp_path / "job", 2, "mirror") as made:
        made.save(1)
        made.turn()
        made.save(2, range(1))
        made.start("second")
        for writer in made.writers:
            writer.close()
        first = made.vault.writer(0, run="third", strict=True)
        give(first, made._files(first))
        first.save(3, None)
        second = made.vault.writer(1, run="third", strict=True)
        give(second, made._files(second))
        second.save(3, None)
        first.close()
        second.close()
        made.turn()
        assert made.read() == 3
        again = made.vault.writer(0, run="third")  # a text that was used before means nothing any more
        assert again._next == 4
        again.close()
