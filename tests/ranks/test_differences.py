"""`reshard` in gloo jobs with a different argument on one rank.

All ranks report it; none hangs or has a wrong result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ucpl
from tests.forking import run_all
from ucpl.errors import UcplError

TEXT = """ucpl 1
model m {
  dim l = 3, h = 5
  w : l h
  u : l
  dtype f32
  state fp32 : f32
}
layout L(dp = 1, tp = 1) of m {
  framework torch()
  mesh dp tp
  group all = w, u
  file weights = torch "w_{tp}.pt"
  file states  = torch "o_{dp}_{tp}.pt"
  w = l@spread(tp) h  as "w"
  u = l@spread(tp)    as "u"
  derive weight from fp32
  state fp32 of all = pad(flat(each), dp)@dp  in states as "fp32"
}
"""
Act = Callable[[int, Path], object]


def one(rank: int, port: int, act: Act, size: int, top: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=20))
    try:
        told: object = act(rank, top)
    except UcplError as error:
        told = f"{error.diagnostics[0].code}: {error.diagnostics[0].message}"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    torch.save(told, top / f"{rank}.told")
    os._exit(0)


def job(size: int, act: Act, top: Path) -> list[Any]:
    """The result or error of each rank of a job."""
    (top / "m.ucpl").write_text(TEXT)
    run_all(size, one, act, size, top)
    return [torch.load(top / f"{r}.told") for r in range(size)]


def held(rank: int, value: float = 0.0) -> dict[str, torch.Tensor]:
    """The tensors of the only rank of `L()`; other ranks have none."""
    if rank:
        return {}
    flat = torch.arange(18.0) + value
    return {"w": flat[:15].view(3, 5).clone(), "u": flat[15:].clone(), "fp32": flat}


def wide(rank: int, top: Path) -> object:
    """More ranks than there are layers: some get tensors without elements."""
    layout = f"{top}/m.ucpl:L"
    return dict(ucpl.reshard(held(rank), f"{layout}()", f"{layout}(tp = 5)"))


def test_ranks_that_get_nothing_of_a_tensor_get_an_empty_one(tmp_path):
    found = job(5, wide, tmp_path)
    assert [tuple(one["w"].shape) for one in found] == [(1, 5)] * 3 + [(0, 5)] * 2
    assert torch.equal(torch.cat([one["w"] for one in found]), torch.arange(15.0).view(3, 5))
    assert {one["w"].dtype for one in found} == {torch.float32}


def odd(how: str, rank: int, top: Path) -> object:
    """The last rank of two is given something else than the first."""
    source, target = f"{top}/m.ucpl:L()", f"{top}/m.ucpl:L(dp = 2)"
    state: Any = held(rank)
    more: dict[str, Any] = {}
    other = rank == 1
    if other and how == "another text":
        (top / "n.ucpl").write_text(TEXT.replace("group all = w, u", "group all = u, w"))
        target = target.replace("m.ucpl", "n.ucpl")
    if other and how == "other degrees":
        target = f"{top}/m.ucpl:L(tp = 2)"
    if other and how == "memory":
        more["memory"] = 64
    if other and how == "a list":
        state = {"w": [1, 2]}
        source = target
    if other and how == "no dict":
        state = None
    if how == "a list":
        source = f"{top}/m.ucpl:L(dp = 2)"
        state = state if other else {k: v[:9] if k == "fp32" else v for k, v in held(0).items()}
        state = {"w": [1, 2], "u": torch.zeros(3), "fp32": torch.zeros(9)} if other else state
    if how == "meta" and not other:
        state["w"] = state["w"].to("meta")
    if how == "no such word":
        more["memroy"] = 1
    if how == "no such word on one" and other:
        more["memroy"] = 1
    if how == "no memory":
        more["memory"] = 0
    return dict(ucpl.reshard(state, source, target, **more))


SAID = {
    "another text": ("E622: rank 1 was given another layout of the target than rank 0",) * 2,
    "other degrees": ("E622: rank 1 was given another layout of the target than rank 0",) * 2,
    "memory": ("E622: rank 1 was given another memory than rank 0",) * 2,
    "a list": ("E644: rank 1 failed: w of L(dp = 2", "E640: w of L(dp = 2"),
    "no dict": ("E644: rank 1 failed: ", "E640: "),
    "meta": ("E640: w of L(dp = 1, tp = 1) is a tensor on no device (meta)", "E644: rank 0 failed: w of L("),
    "no such word on one": ("E644: rank 1 failed: TypeError: reshard() got", "TypeError: reshard() got"),
    "no such word": ("TypeError: reshard() got an unexpected keyword argument 'memroy'",) * 2,
    "no memory": ("E173: memory = 0: a number of bytes",) * 2,
}


@pytest.mark.parametrize("how", SAID)
def test_a_difference_on_one_rank_is_reported_on_all(tmp_path, how):
    for found, said in zip(job(2, partial(odd, how), tmp_path), SAID[how], strict=True):
        assert isinstance(found, str) and found.startswith(said), found


def over(how: str, rank: int, top: Path) -> object:
    layout = f"{top}/m.ucpl:L(tp = 2)"
    source = dict(ucpl.reshard(held(rank), f"{top}/m.ucpl:L()", layout))
    out: Any = source if how == "the source" else {k: torch.zeros_like(v) for k, v in source.items()}
    if how == "a part of it":
        out["u"] = source["fp32"][: out["u"].numel()]
    if how == "expanded":
        out["u"] = torch.zeros(1).expand(out["u"].shape)
    if how == "another type":
        out["u"] = out["u"].double()
    if how == "one less":
        del out["u"]
    before = {k: v.clone() for k, v in source.items()}
    try:
        made = ucpl.reshard(source, layout, layout, out=out)
    finally:
        assert all(torch.equal(v, before[k]) for k, v in source.items())
    return all(torch.equal(v, before[k]) for k, v in made.items())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("tensors of their own", None),
        ("the source", "shares memory with state"),
        ("a part of it", "out['u'] shares memory with state['fp32']"),
        ("expanded", "out['u'] is a view whose elements share memory"),
        ("another type", "out['u'] is torch.float64, the layout says f32"),
        ("one less", "u of out, of L("),
    ],
)
def test_what_is_filled_lies_nowhere_where_the_source_does(tmp_path, how, said):
    found = job(2, partial(over, how), tmp_path)
    if said is None:
        assert found == [True, True]
    else:
        assert all(isinstance(one, str) and one[:4] in ("E640", "E644") and said in one for one in found), found
        assert "E640" in {one[:4] for one in found}


# ---- Copies that differ ------------------------------------------------------------------------------------------------------


def drifted(how: str, rank: int, top: Path) -> object:
    """Two ranks with copies of all weights.

    One tensor has another value on the second rank.
    """
    text = TEXT.replace("w_{tp}.pt", "w_{tp}_{dp}.pt") if how.startswith("files") else TEXT
    if how == "files, any":
        text = text.replace("w = l@spread(tp) h ", "w = l@spread(tp) h any @dp ")
    (top / f"{rank}.ucpl").write_text(text)
    flat = torch.arange(18.0)
    state = {"w": flat[:15].view(3, 5).clone(), "u": flat[15:].clone(), "fp32": flat[9 * rank : 9 * rank + 9].clone()}
    if rank and how != "no difference":
        state["w"][1, 2] += 1
    source, target = (f"{top}/{rank}.ucpl:L(dp = 2, tp = 1)", f"{top}/{rank}.ucpl:L(dp = 1, tp = 2)")
    return {key: value.sum() for key, value in ucpl.reshard(state, source, target).items()}


@pytest.mark.parametrize("how", ["one file", "files", "files, any", "no difference"])
def test_copies_that_differ_between_ranks_are_refused_on_all_ranks(tmp_path, how):
    found = job(2, partial(drifted, how), tmp_path)
    if how in ("files, any", "no difference"):
        assert [set(one) for one in found] == [{"w", "u", "fp32"}] * 2
        return
    text = "weight of w has other values on rank"
    assert all(text in one for one in found), found
    assert any(one.startswith("E613: weight of w") for one in found)
    assert all(one.startswith(("E613", "E644")) for one in found)
