"""Digests of a step's results, taken before any later write.

If a write comes first, the save is withdrawn.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import ucpl
from tests.vault.trained import Training, code_of, training
from ucpl.errors import UcplError
from ucpl.storage.vaults import state_digests as told
from ucpl.storage.vaults.state_digests import digest_of_sum, state_digest, weighted_sum
from ucpl.vault import step_digests
from ucpl.vault.arenas import Arenas
from ucpl.vault.framework_writer import collect_input


@pytest.fixture
def apart(monkeypatch):
    """Tensors are taken for those of another device."""
    monkeypatch.setattr(step_digests, "is_far", lambda _: True)


def beside(here: Training) -> None:
    """A thread takes the digests while training continues."""
    here.writer.beside = True


def save_gradients(here: Training) -> None:
    """A complete save, then the unrecorded copy of a second step."""
    here.step()
    here.save()
    here.step()
    here.done += 1
    assert here.writer.save(here.done, (here.model, here.optimizer), {"at": here.done}).replays == 1


def say(here: Training) -> None:
    here.writer._join()
    for server in here.servers:
        server.turn()


@pytest.mark.fault(
    "Vaults",
    "a write past autograd (`.data`), another torch, forged statements about a step",
    "E698; the snapshot before is read",
)
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("at", [0, 961, -1])
@pytest.mark.parametrize("what", ["weight", "exp_avg_sq"])
def test_one_element_that_was_written_past_autograd_is_found_wherever_it_is(tmp_path, request, what, at, far):
    if far:
        request.getfixturevalue("apart")
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        here.step()
        parameter = here.model.first.weight
        written = parameter if what == "weight" else here.optimizer.state[parameter][what]
        written.data.view(-1)[at] += 1
        assert here.save().replays == 1
        with pytest.raises(UcplError) as refused:
            here.demand_same()
        assert code_of(refused) == "E698" and "first.weight" in refused.value.diagnostics[0].message


def test_a_step_waits_for_what_is_digested(tmp_path, monkeypatch):
    """A read returns the saved step's state, not the next one's."""
    goes_on, waits = threading.Event(), threading.Event()

    def slowly(data: memoryview) -> str:
        assert waits.wait(30)
        return state_digest(data)

    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        beside(here)
        monkeypatch.setattr(step_digests, "state_digest", slowly)
        here.step()
        here.done += 1
        assert here.writer.save(here.done, (here.model, here.optimizer)).replays == 1
        was = copy.deepcopy(here.model)
        here.backward()

        def step() -> None:
            here.optimizer.step()
            goes_on.set()

        trained = threading.Thread(target=step)
        trained.start()
        assert not goes_on.wait(0.2)
        waits.set()
        assert goes_on.wait(30)
        trained.join()
        say(here)
        assert here.writer.committed() == (2, 2)
        model = copy.deepcopy(was)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        ucpl.load_into(model, None, f"vault:{here.vault.home}")
        for one, other in zip(model.parameters(), was.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.fault(
    "Vaults",
    "a step or a write before the last state is digested",
    "the step waits; the save does not count, and the next is complete",
)
def test_what_is_written_to_before_it_is_digested_does_not_count(tmp_path, monkeypatch, caplog):
    """Training continues, the log has a line, the next save is complete."""
    waits = threading.Event()

    def slowly(data: memoryview) -> str:
        assert waits.wait(30)
        return state_digest(data)

    with training(tmp_path / "job") as here:
        beside(here)
        here.step()
        here.done += 1
        assert here.writer.save(here.done, (here.model, here.optimizer))
        say(here)
        monkeypatch.setattr(step_digests, "state_digest", slowly)
        here.step()
        here.done += 1
        assert here.writer.save(here.done, (here.model, here.optimizer)).replays == 1
        with torch.no_grad():
            here.model.last.weight.mul_(2)
        waits.set()
        say(here)
        assert here.writer.committed() == (1, 1)
        assert here.writer.error is not None and "model.last.weight was written to before" in caplog.text
        here.step()
        here.done += 1
        saved = here.writer.save(here.done, (here.model, here.optimizer))
        assert saved and saved.replays == 0
        say(here)
        here.demand_same()


@pytest.mark.parametrize("error", [OSError(28, "no room"), KeyboardInterrupt()], ids=["no room", "interrupted"])
def test_no_step_waits_for_marks_of_a_save_that_failed(tmp_path, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(step_digests, "_PATIENCE", 30.0)
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        here.step()
        monkeypatch.setattr(Arenas, "write", fails)
        with pytest.raises((UcplError, KeyboardInterrupt)):
            here.writer.save(2, (here.model, here.optimizer))
        watch = here.writer._replaying
        assert watch is not None and watch.marks is not None and watch.marks._is_done.is_set()


def test_device_tensors_may_be_written_after_the_save(tmp_path, apart):
    """The device computes the digest before its later work."""
    with training(tmp_path / "job") as here:
        beside(here)
        here.step()
        here.done += 1
        assert here.writer.save(here.done, (here.model, here.optimizer))
        say(here)
        here.step()
        here.done += 1
        was = copy.deepcopy(here.model.state_dict())
        assert here.writer.save(here.done, (here.model, here.optimizer)).replays == 1
        with torch.no_grad():
            here.model.last.weight.mul_(2)
        say(here)
        assert here.writer.committed() == (2, 2)
        with torch.no_grad():
            here.model.last.weight.copy_(was["last.weight"])
        here.demand_same()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8191, 8192, 8193, 100_003])
def test_a_sum_is_that_of_the_bytes_on_any_device(monkeypatch, size):
    monkeypatch.setattr(told, "TILE", 1024)
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)
    wanted = digest_of_sum(weighted_sum(data[:size].clone()))
    for begin in range(4):
        moved = torch.cat((torch.zeros(begin, dtype=torch.uint8), data[:size]))[begin:]
        assert digest_of_sum(weighted_sum(moved)) == wanted
    assert state_digest(data[:size].numpy().data, wanted) == wanted
    seen = {wanted}
    for at in {0, size // 2, size - 1} if size else ():
        other = data[:size].clone()
        other[at] ^= 128
        seen.add(digest_of_sum(weighted_sum(other)))
    assert len(seen) == 1 + len({0, size // 2, size - 1} if size else ())


def test_two_words_that_are_exchanged_have_another_sum():
    words = torch.arange(64, dtype=torch.int64)
    other = words.clone()
    other[3], other[40] = words[40], words[3]
    assert (
        digest_of_sum(weighted_sum(words))
        != digest_of_sum(weighted_sum(other))
        != digest_of_sum(weighted_sum(words.flip(0)))
    )


def test_a_save_without_a_thread_digests_at_once(tmp_path, monkeypatch):
    def none(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with training(tmp_path / "job") as here:
        beside(here)
        monkeypatch.setattr(threading.Thread, "start", none)
        for count in (0, 1):
            here.step()
            assert here.save().replays == count
            here.demand_same()


def test_an_interrupted_save_is_not_recorded(tmp_path):
    """An interrupted save drops the digests of the previous one.

    Its thread had not taken them yet.
    """
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        here.step()
        replaying = here.writer._replaying
        assert replaying is not None
        _, told = replaying.files(collect_input((here.model, here.optimizer)), 2, may=True)
        assert told is not None and replaying.marks is not None
        replaying.marks.drop()
        with pytest.raises(UcplError, match="withdrawn before"):
            replaying.marks.take()


def test_a_child_that_was_forked_waits_for_nobody(tmp_path, monkeypatch):
    """It has no thread that digests."""
    with training(tmp_path / "job") as here:
        save_gradients(here)
        replaying = here.writer._replaying
        assert replaying is not None and replaying.marks is not None
        here.writer._join()
        replaying.marks._process = -1

        waited: list[float] = []
        monkeypatch.setattr(replaying.marks._is_done, "wait", waited.append)
        here.step()
        assert not waited


def test_marks_are_in_the_order_of_their_tensors(apart, monkeypatch):
    """By a device or by the CPU."""
    monkeypatch.setattr(step_digests, "is_far", lambda t: t.dtype == torch.float64)
    some = [
        torch.arange(9.0),
        torch.arange(9.0, dtype=torch.float64),
        torch.ones(3),
        torch.ones(3, dtype=torch.float64),
    ]
    found: list[str] = []
    taken = step_digests.StepDigests([(str(n), t, found) for n, t in enumerate(some)])
    taken.fetch()
    taken.take()
    assert found == [state_digest(t.numpy().view("u1").data, mark) for t, mark in zip(some, found, strict=True)]
    assert [mark.split()[0] for mark in found] == ["xxh3", "sum", "xxh3", "sum"]
