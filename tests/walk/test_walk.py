"""Short walks of the suite, and a test of their power.

`make walk` is the long one.

A walk of a number and a seed is the same each time, so that a fault planted in the product meets it again (tests/mutants).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.walk import walking
from tests.walk.__main__ import verdict, walked
from tests.walk.starts import HOME, STARTS, Here, Start
from tests.walk.walking import LIMITS, Step, differences, one_walk, told
from ucpl import api
from ucpl.errors import catalogue

SEED = 4
CALLS = {  # the steps of the short walks, so that each kind of cut is on the way
    "tp2_pp2_dp2_z1_bf16": (
        "zero1(dp=1, tp=3, stages=[1, 1, 3], layers=5)",
        "zero3(dp=3, tp=1)",
        f"{HOME}:stored(dp=1, tp=2, pp=2)",
    ),
    "tp2_pp2_dp1_z1": ("megatron_deepspeed.ucpl:llama(dp=3, tp=2, stages=[3, 2], layers=5)", "zero2(dp=2, tp=1)"),
    "pp2_ep2_dp2_z1": ("zero1(dp=4, ep=4, tp=1, pp=1)", "zero2(dp=2, ep=2)"),
    "z1_dp4": ("zero0(dp=2)", "universal(stage=3)", "zero2(dp=3, round_robin=1)"),
    "legacy_moe": (
        "megatron_legacy(tp=1, pp=1, vpp=1, ep=1)",
        "megatron_core(tp=3, pp=1, stacked=0)",
        "megatron_legacy(tp=2, pp=1, vpp=1, ep=2)",
        "plain()",
    ),
    "fsdp2_w4": ("dcp(fsdp=5)", "dcp(fsdp=1)", "plain()", "dcp(fsdp=3)"),
}


def walk(name: str, tmp_path: Path) -> list[Step]:
    """Of that checkpoint, along `CALLS`."""
    (start,) = (s for s in STARTS if s.name == name)
    said = iter(CALLS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walking, "BOLD", 1 << 30)
        fixed = evolve(start, draw=lambda rng, here: next(said))
        return list(one_walk(3, 0, tmp_path, len(CALLS[name]), fixed))


@pytest.mark.parametrize("name", CALLS)
def test_a_short_walk_stays_what_it_was(name: str, tmp_path: Path) -> None:
    done = walk(name, tmp_path)
    assert [(step.refused, step.wrong) for step in done] == [("", ())] * len(CALLS[name])


def flipped(path: Path) -> None:
    """The last bit of one moment in a torch file."""
    found = torch.load(path, weights_only=True)
    moment = found["params"]["mix"]["exp_avg"].reshape(-1)
    moment[1] = torch.nextafter(moment[1], torch.tensor(9.0))
    torch.save(found, path)


def renamed(path: Path) -> None:
    found = torch.load(path, weights_only=True)
    found["groups"][0]["lr"] *= 2
    found["scalars"]["global_steps"] += 1
    torch.save(found, path)


@pytest.mark.parametrize(
    ("fault", "place"), [(flipped, "/params/mix/exp_avg"), (renamed, "/groups/0/lr")], ids=["one bit", "a rate"]
)
def test_one_bit_and_one_number_are_seen(
    fault: Callable[[Path], None], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plain() is the truth.

    That of the first step is changed.
    """
    seen: list[Path] = []
    convert: Any = api.convert

    def faulty(source: Path, target: Path, to: str, **how: Any) -> Any:
        made = convert(source, target, to, **how)
        if to == "plain()":
            seen.append(target)
            if len(seen) == 2:
                fault(target)
        return made

    monkeypatch.setattr(api, "convert", faulty)
    first, *_ = walk("z1_dp4", tmp_path)
    assert first.wrong and first.wrong[0].startswith(place)
    assert verdict([first], 3) == 1


def test_a_refusal_without_a_name_fails_and_many_of_those_with_one_do(tmp_path: Path) -> None:
    step = Step(0, "z1_dp4", "zero3(dp=2)")
    refused = evolve(step, refused="E472")
    assert verdict([step] * 19 + [refused], 3) == 0
    assert verdict([step] * 5 + [refused] * 5, 3) == 1
    (start,) = (s for s in STARTS if s.name == "z1_dp4")
    odd = evolve(start, draw=lambda rng, here: "zero1(dp=2, alignment=2)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walking, "BOLD", 1 << 30)
        patch.delitem(LIMITS, "E471")
        (found,) = one_walk(3, 0, tmp_path, 1, odd)
    assert found.refused == "E471" and found.wrong[0].startswith("refused: E471 alignment = 2")


def test_steps_are_those_of_the_seed(tmp_path: Path) -> None:
    """One command walks again where a run failed.

    No step depends on walks before it, or on how many steps there are.
    """
    here = STARTS[0].here
    drawn = [[STARTS[0].draw(Random(f"{seed} 0"), here) for seed in range(5)] for _ in range(2)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 1
    (first,) = walked(SEED, [9], 1)
    again = next(one_walk(SEED, 9, tmp_path))
    assert first == again and first.wrong == ()
    shutil.rmtree(tmp_path)


def test_what_files_of_one_rank_do_not_say_is_all_that_is_left_out() -> None:
    of = {start.family: start for start in STARTS}
    alone, dealt = Here(frozenset(), one_rank=True), Here(frozenset())
    zeros, ones = torch.zeros(2), torch.ones(2)
    groups = [
        {"params": ["a", "e"], "lr": 1.0, "is_expert_parallel": False},
        {"params": ["b"], "lr": 2.0, "is_expert_parallel": False},
    ]
    state: dict[str, Any] = {
        "params": {"a": {"weight": zeros, "exp_avg": ones}},
        "buffers": {"c": ones},
        "groups": groups,
    }

    def differs(start: Start, here: Here, **change: Any) -> bool:
        return any(differences(told(state, start, here), told({**state, **change}, start, here)))

    apart = [{**groups[0], "params": ["a"]}, groups[1], {**groups[0], "params": ["e"], "is_expert_parallel": True}]
    assert not differs(of["megatron"], alone, groups=apart) and differs(of["megatron"], dealt, groups=apart)
    turned = [{**groups[0], "params": ["e", "a"]}, groups[1]]
    assert not differs(of["megatron"], dealt, groups=turned) and differs(of["zero"], dealt, groups=turned)
    other = [{**groups[0], "params": ["a"]}, {**groups[1], "params": ["b", "e"]}]
    frozen = {"params": {**state["params"], "c": {"weight": ones}}, "buffers": {}}
    assert not differs(of["dcp"], alone, **frozen) and differs(of["dcp"], dealt, **frozen)
    for here in (alone, dealt):
        assert differs(of["megatron"], here, groups=other)
        assert differs(of["megatron"], here, groups=[groups[0], {**groups[1], "lr": 3.0}])
        assert differs(of["dcp"], here, buffers={"c": zeros})
        assert differs(of["zero"], here, **frozen)


def test_limits_are_codes_and_states_differ_where_they_do() -> None:
    assert [code for code in LIMITS if code not in catalogue()] == []
    one = {"a": [torch.tensor([1.0, 0.0]), 1], "b": ""}
    assert list(differences(one, {"b": "", "a": [torch.tensor([1.0, 0.0]), 1]})) == []
    for other in (
        {"a": [torch.tensor([1.0, -0.0]), 1], "b": ""},
        {"a": [torch.tensor([1.0, 0.0]).bfloat16(), 1], "b": ""},
        {"a": [torch.tensor([[1.0, 0.0]]), 1], "b": ""},
        {"a": [torch.tensor([1.0, 0.0]), True], "b": ""},
        {"a": [torch.tensor([1.0, 0.0])], "b": ""},
        {"a": [torch.tensor([1.0, 0.0]), 1]},
    ):
        assert len(list(differences(one, other))) == 1, other
