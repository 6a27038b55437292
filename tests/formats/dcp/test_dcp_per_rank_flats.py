"""FSDP1's state dicts of each rank, as in verl, with flat states.

torch's own sharded state dict names them. Fixtures are FSDP1's own (tests/interop/fsdp1_ranks_job.py): wrapped blocks
kept flat, DTensors; and `use_orig_params`, with ShardedTensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.files.refusals import refusal
from tests.gathered import plain_of
from ucpl.api import open_checkpoint
from ucpl.formats.dcp.per_rank_flats import FlatMember, Number, members_of
from ucpl.formats.matching import Unclear

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
KINDS = ("fsdp1_units_w3", "fsdp1_params_w3")
RANKS = 3


def truth(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = torch.load(FIXTURES / f"{kind}.truth.pt", weights_only=True)
    return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def changed(folder: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / f"optim_world_size_{RANKS}_rank_{rank}.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize("form", ["", "dcp(fsdp = 2)", "zero1(dp = 2)"])
def test_flat_states_are_those_that_torch_names(kind: str, form: str, tmp_path: Path) -> None:
    source = FIXTURES / kind
    if form:
        ucpl.convert(source, tmp_path / "there", form)
        assert ucpl.compare(source, tmp_path / "there") and ucpl.verify(source)
        source = tmp_path / "there"
    found, expected = plain_of(source), truth(kind)
    every = {**found["params"], **{name: {"weight": t} for name, t in found.get("buffers", {}).items()}}
    assert every.keys() == expected.keys()
    for name, states in expected.items():
        for state, value in states.items():
            assert torch.equal(torch.as_tensor(every[name][state], dtype=value.dtype), value), (name, state)
    assert [len(group["params"]) for group in found["groups"]] == [14] and found["groups"][0]["lr"] == 1e-2


def test_runs_that_are_no_parameter_s_are_left_out_with_a_remark(kind: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / kind, tmp_path / "in")
    number = next(iter(torch.load(folder / "optim_world_size_3_rank_1.pt", weights_only=True)["state"]))

    def longer(state: dict[str, Any]) -> None:
        held = state["state"][number]
        held |= {name: torch.cat([t, torch.ones(7)]) for name, t in held.items() if t.ndim}

    changed(folder, 1, longer)
    found = open_checkpoint(folder)
    said = [one.why for one in found.not_read if one.is_optimizer]
    assert len(said) == 3 and all("its states are flat" in why and "no order of the model fits" in why for why in said)
    assert {t.states for t in found.state.tensors} == {()}


def test_states_of_two_lengths_are_refused(kind: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / kind, tmp_path / "in")

    def shorter(state: dict[str, Any]) -> None:
        held = next(iter(state["state"].values()))
        held["exp_avg"] = held["exp_avg"][:-1].clone()

    changed(folder, 1, shorter)
    assert "as many elements as the others" in refusal(lambda: open_checkpoint(folder), "E455").message


# ---- which parameters a number is, by lengths --------------------------------------------------------------------------

BLOCK = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (3, 5)}


def names_of(found: object) -> list[list[str]]:
    assert isinstance(found, list)
    return [[one.name for one in number] for number in found[0]]


def model(layers: int, *around: tuple[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [*around, *((f"h.{i}.{name}", shape) for i in range(layers) for name, shape in BLOCK.items())]


def filled(numel: int, ranks: int = RANKS) -> int:
    return -(-numel // ranks) * ranks


def test_a_unit_has_what_no_unit_inside_it_has() -> None:
    params = [*model(2, ("embed", (7, 2))), ("head", (5,))]
    block = sum(map(prod, BLOCK.values()))
    found = members_of(params, [[0, 1, 2]], {0: filled(19), 1: filled(block), 2: filled(block)}, RANKS)
    assert names_of(found) == [["embed", "head"], *([f"h.{i}.{name}" for name in BLOCK] for i in (0, 1))]
    assert isinstance(found, list) and found[0][0][1] == FlatMember("head", (5,), 14)


def test_units_within_units() -> None:
    """h.0 and h.1 are wrapped, and `a` of each separately."""
    params = model(2, ("embed", (7, 2)))
    lengths: dict[Number, int | None] = dict(enumerate(filled(n) for n in (14, 15, 16, 15, 16)))
    found = members_of(params, [[0, 1, 2, 3, 4]], lengths, RANKS)
    assert names_of(found) == [
        ["embed"], ["h.0.b.weight"], ["h.0.a.weight", "h.0.a.bias"], ["h.1.b.weight"], ["h.1.a.weight", "h.1.a.bias"],
    ]  # fmt: skip


def test_layers_that_are_alike_are_all_units_or_none() -> None:
    """Otherwise h, with one layer as a unit, would be possible."""
    found = members_of(model(2), [[0, 1]], {0: filled(31), 1: filled(31)}, RANKS)
    assert names_of(found) == [[f"h.{i}.{name}" for name in BLOCK] for i in (0, 1)]


@pytest.mark.parametrize(
    ("lengths", "is_several"),
    [((filled(31), filled(62)), False), ((filled(12), filled(12)), True)],
    ids=["none", "several"],
)
def test_lengths_that_leave_no_way_or_two(lengths: tuple[int, ...], is_several: bool) -> None:
    """Two modules of one length.

    The module in the model's own unit is unknown.
    """
    params = model(2) if not is_several else [("a.w", (12,)), ("b.w", (6, 2)), ("c.w", (3, 4)), ("d.w", (24,))]
    lengths = lengths if not is_several else (filled(36), *lengths)
    found = members_of(params, [list(range(len(lengths)))], dict(enumerate(lengths)), RANKS)
    assert found == Unclear(is_several) or (isinstance(found, Unclear) and found.is_several == is_several)
