"""A failed save ends nothing, for any input.

An uncommitted save is reported.
"""

from __future__ import annotations

import logging
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.vault.states import Truth
from ucpl.errors import UcplError
from ucpl.storage.vaults.domains import LocalDomain, hold_lock
from ucpl.vault import Vault
from ucpl.vault.persisted import persist
from ucpl.vault.server import Server


def deep(levels: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(levels):
        found = {"in": found}
    return found


class Gone(nn.Module):
    """A module with a parameter on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


@pytest.fixture
def vault(tmp_path):
    return Vault.make(tmp_path / "job")


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=1", (1,))


@pytest.mark.fault(
    "Vaults",
    "a save of values that cannot be kept: odd steps, no JSON, no tensors, a closed writer",
    "reported without an exception; the next save counts",
)
@pytest.mark.parametrize(
    ("step", "what", "state"),
    [
        ("7", nn.Linear(2, 2), None),
        (7.5, nn.Linear(2, 2), None),
        (None, nn.Linear(2, 2), None),
        (-1, nn.Linear(2, 2), None),
        (10**30, nn.Linear(2, 2), None),
        (torch.ones(2), nn.Linear(2, 2), None),
        (1, nn.Linear(2, 2), [1, 2]),
        (1, nn.Linear(2, 2), "abc"),
        (1, nn.Linear(2, 2), deep(5000)),
        (1, nn.Linear(2, 2), {"at": object()}),
        (1, Gone(), None),
        (1, 5, None),
    ],
    ids=[
        "text",
        "fraction",
        "none",
        "negative",
        "huge",
        "two",
        "list",
        "string",
        "deep",
        "object",
        "meta",
        "number",
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_value_that_cannot_be_saved_is_reported_and_training_continues(vault, caplog, step, what, state, beside):
    with vault.writer(0, beside=beside) as writer, Server(vault.home, 0) as server:
        saved = writer.save(step, what, state)
        assert not saved and saved.error is not None and saved.error.diagnostics[0].code == "E693"
        assert "is not saved" in caplog.text and writer.error is saved.error
        assert writer.save(2, nn.Linear(2, 2), {"at": 2})
        writer._join()
        server.turn()
        assert writer.committed() == (2, 2)


def test_an_error_of_torch_is_reported_and_training_continues(vault, monkeypatch):
    def fail(*_):
        raise RuntimeError("a copy from the device failed")

    with vault.writer(0) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(type(writer), "_save", fail)
            saved = writer.save(1, nn.Linear(2, 2))
        assert not saved and "a copy from the device failed" in str(saved.error)
        assert writer.save(2, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"k": None}, "a NoneType, and no tensor with bytes"),
        ({"k": np.zeros(3)}, "a ndarray, and no tensor with bytes"),
        ({"k": 5}, "a int, and no tensor with bytes"),
        ({3: torch.zeros(3)}, "3 is not a key: keys are strings"),
        ({"k": torch.empty(3, device="meta")}, "a tensor on no device (meta), and no tensor with bytes"),
    ],
    ids=["none", "numpy", "number", "key", "meta"],
)
def test_a_tensor_that_the_layout_lacks_is_reported(vault, truth, wrong, said):
    tensors = truth.cut[1][0]
    key = next(iter(tensors))
    given = {**tensors, **{key if k == "k" else k: v for k, v in wrong.items()}}
    with vault.writer(0, layout=truth.layout) as writer:
        saved = writer.save(1, given)
        assert not saved and f"E693: {key if 'k' in wrong else ''}" in str(saved.error) and said in str(saved.error)
        assert writer.save(2, tensors)


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), True])
def test_whatever_is_a_whole_number_is_a_step(vault, step):
    with vault.writer(0, strict=True) as writer, Server(vault.home, 0) as server:
        assert writer.save(step, nn.Linear(2, 2)).step == int(step)
        server.turn()
        assert writer.committed() == (1, int(step))


def test_a_conjugate_is_saved_as_what_it_is(tmp_path, vault):
    value = torch.randn(3, 4, dtype=torch.complex64)
    with vault.writer(0, strict=True) as writer, Server(vault.home, 0) as server:
        writer.save(1, {"z": value.conj(), "n": value.conj().imag})
        server.turn()
        found = {"z": torch.zeros(3, 4, dtype=torch.complex64), "n": torch.zeros(3, 4)}
        persist(vault.home, tmp_path / "there")
        load(found, checkpoint_id=tmp_path / "there", no_dist=True)
        assert torch.equal(found["z"], value.conj().resolve_conj()) and torch.equal(found["n"], -value.imag)


def one_of(step: int) -> torch.Tensor:
    """An element with a stride, which torch calls contiguous all the same."""
    return torch.arange(1.0, 9.0).reshape(1, 8)[:, step]


class One(nn.Module):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.one = nn.Parameter(one_of(step))


def test_a_single_element_is_kept_whatever_its_stride(tmp_path):
    vault = Vault.make(tmp_path / "job", replays=2)
    module, other = One(2), One(5)
    optimizer = torch.optim.AdamW(module.parameters())
    with vault.writer(0, strict=True, wait=0.0) as writer, Server(vault.home, 0) as server:
        for count in range(3):
            assert module.one.stride() == (8,)
            module.one.grad = one_of(count)
            optimizer.step()
            assert writer.save(count, (module, optimizer)).replays == count
            for _ in range(2):
                writer._join()
                server.turn()
        ucpl.load_into(other, torch.optim.AdamW(other.parameters()), f"vault:{vault.home}")
        assert torch.equal(other.one, module.one)


def test_a_closed_writer_saves_nothing(vault):
    writer = vault.writer(0)
    writer.close()
    with vault.writer(0):
        saved = writer.save(1, nn.Linear(2, 2))
        assert not saved and "was closed" in str(saved.error)


@pytest.mark.fault(
    "Vaults",
    "a save without a server, with ranks at other steps or missing ranks",
    "the next save reports the reason (E699)",
)
def test_an_uncommitted_save_is_reported_with_the_reason(tmp_path, caplog):
    """No server; ranks at other steps; a rank without a save.

    Only the first case is waited for as long as requested.
    """
    vault = Vault.make(tmp_path / "job", ranks=2, domains=2, protect="none")
    model = nn.Linear(2, 2)
    with (
        vault.writer(0, run="a", wait=0.3, strict=True) as one,
        vault.writer(1, run="a", wait=0.3, strict=True) as other,
    ):
        for writer in (one, other):
            writer.save(1, model)
        assert one.save(2, model).waited >= 0.3
        assert "generation 1 is not committed after 0 s" in caplog.text and "no server runs for d0, d1" in caplog.text
        assert one.error is not None and one.error.diagnostics[0].code == "E699"
        caplog.clear()
        with Server(vault.home, 0), Server(vault.home, 1):
            other.save(5, model)
            one.save(6, model)
            assert "rank 0 step 2, rank 1 step 5" in caplog.text
            caplog.clear()
            one.save(7, model)
            assert "rank 1 did not save it" in caplog.text


def test_what_does_not_come_back_is_waited_for_longer_each_time(vault):
    """After a commit, the wait is as long as requested again."""
    with vault.writer(0, wait=0.02, strict=True) as writer:
        found = []
        for step in range(5):
            writer.save(step, nn.Linear(2, 2))
            found.append(writer._patience)
        assert found == [math.inf, 1.0, 2.0, 4.0, 8.0]
        with Server(vault.home, 0) as server:
            writer._join()
            server.turn()
            writer.save(5, nn.Linear(2, 2))
            assert writer._patience == math.inf


def test_a_server_that_lives_is_waited_for(tmp_path, caplog):
    vault = Vault.make(tmp_path / "job")
    with vault.writer(0, wait=0.2, strict=True) as writer, Server(vault.home, 0) as server:
        writer.save(1, nn.Linear(2, 2))
        writer.save(2, nn.Linear(2, 2))
        assert "d0 has not voted" in caplog.text and writer._patience == math.inf
        server.turn()
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert writer.save(3, nn.Linear(2, 2)).waited < 0.2
            assert not caplog.text


def test_who_looks_keeps_nobody_out(vault):
    """A lock that is only tested is soon free again."""
    here = LocalDomain(vault.home, 0)
    looking = hold_lock(here.lock("r0"), wait=0)
    looking.__enter__()
    timer = threading.Timer(0.1, lambda: looking.__exit__(None, None, None))
    timer.start()
    with vault.writer(0):
        pass
    timer.join()
    with hold_lock(here.lock("r0"), wait=0), pytest.raises(UcplError, match="E694"):
        vault.writer(0)
