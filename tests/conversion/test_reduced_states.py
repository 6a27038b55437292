"""Adafactor of torch, and Adagrad of rows: fewer numbers than elements.

Real optimizers write a folder. It becomes files of ranks, equal to an independent split by torch, and is restored; the
optimizer loads the result, and the losses of further training are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ucpl
from tests.cli.command import ucpl as command
from ucpl.errors import UcplError

V, H, F = 6, 4, 8
MODEL = f"""ucpl 2
model m {{
  dim v = {V}, h = {H}, f = {F}
  dtype f32
  embed : v h
  up    : f h
  down  : h f
  norm  : h
  group matrices = embed, up, down
  group vectors  = norm
STATES
}}
layout whole() of m {{
  framework torch()
  file weights = torch "all.pt"
  blob groups first  as "optimizer/param_groups"
BLOBS
  embed = v h  as "model/embed"
  up    = f h  as "model/up"
  down  = h f  as "model/down"
  norm  = h    as "model/norm"
  state * for matrices, vectors = LIKE  as "optimizer/state/{{name}}/{{state}}"
}}
layout ranks(tp, dp) of m extends whole() {{
  mesh dp tp
  file weights = torch "rank_{{tp}}_{{dp}}.pt"
  embed = pad(v, 4)@tp h@chunk(dp)
  up    = f@tp@chunk(dp) h
  down  = h@chunk(dp) f@tp
  norm  = h@chunk(dp)
}}
"""
STATES = {
    "adafactor": """  state row_var : f32  without h for embed, up  without f for down
  state col_var : f32  without v for embed  without f for up  without h for down
  state variance : f32 for vectors""",
    "rows": """  state sum : f32  without h for embed, up  without f for down
  state own : f32 for vectors""",
}
DIMS = {"embed": (V, H), "up": (F, H), "down": (H, F), "norm": (H,)}
ORDER = ["embed", "up", "down", "norm"]


class RowWise(torch.optim.Optimizer):
    """Adagrad of embedding tables: one sum for each row, shape (rows,)."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            name, square = ("sum", p.grad.square().mean(-1)) if p.dim() > 1 else ("own", p.grad.square())
            held = self.state[p].setdefault(name, torch.zeros_like(square))
            held += square
            p -= 0.1 * p.grad / (held.unsqueeze(-1) if p.dim() > 1 else held).sqrt().add(1e-6)


OPTIMIZERS: dict[str, Any] = {"adafactor": torch.optim.Adafactor, "rows": RowWise}


class Net(torch.nn.Module):
    embed: torch.nn.Parameter
    up: torch.nn.Parameter
    down: torch.nn.Parameter
    norm: torch.nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        for name, shape in DIMS.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inner = self.embed[words] * self.norm
        return inner + torch.tanh(inner @ self.up.T) @ self.down.T


def made(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    one = [[getattr(net, n) for n in ORDER[:3]], [net.norm]]
    return net, OPTIMIZERS[kind]([{"params": params} for params in one])


def trained(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (net(torch.arange(V)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def text(kind: str) -> str:
    steps = [f'  blob "step {n}" first  as "optimizer/state/{n}/step"' for n in ORDER] if kind == "adafactor" else []
    like = "like(1)" if kind == "adafactor" else "like"  # torch keeps axes of one element
    return MODEL.replace("STATES", STATES[kind]).replace("BLOBS", "\n".join(steps)).replace("LIKE", like)


def axes_of(name: str, tp: int, dp: int, t: int, d: int) -> list[slice]:
    """The part of a parameter on a rank, axis by axis."""

    def chunk(size: int, begin: int = 0) -> slice:
        step = -(-size // dp)
        return slice(begin + min(d * step, size), begin + min((d + 1) * step, size))

    rows = -(-V // 4) * 4 // tp
    return {
        "embed": [slice(t * rows, (t + 1) * rows), chunk(H)],
        "up": [chunk(F // tp, t * F // tp), slice(None)],
        "down": [chunk(H), slice(t * F // tp, (t + 1) * F // tp)],
        "norm": [chunk(H)],
    }[name]


def part_of(name: str, state: str, whole: torch.Tensor, axes: list[slice]) -> torch.Tensor:
    """A rank's part of a state, cut as its parameter is."""
    if name == "embed" and state != "col_var":  # rows of padding
        more = -(-V // 4) * 4 - V
        whole = torch.cat([whole, whole.new_zeros(more, *whole.shape[1:])])
    if state == "row_var":
        return whole[axes[0], :]
    if state == "col_var":
        return whole[:, axes[1]]
    return whole[axes[0]] if state in ("sum", "own", "variance") or whole.dim() == 1 else whole[tuple(axes)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_a_real_optimizer_goes_to_ranks_and_comes_back(kind: str, tp: int, dp: int, tmp_path: Path) -> None:
    net, optimizer = made(kind)
    trained(net, optimizer, 3)
    saved = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    (tmp_path / "in").mkdir()
    torch.save(saved, tmp_path / "in" / "all.pt")
    spec = tmp_path / "m.ucpl"
    spec.write_text(text(kind))
    ranks = f"{spec}:ranks(tp = {tp}, dp = {dp})"
    ucpl.convert(tmp_path / "in", tmp_path / "ranks", ranks, layout=f"{spec}:whole()")
    seen = set()
    for t in range(tp):
        for d in range(dp):
            held = torch.load(tmp_path / "ranks" / f"rank_{t}_{d}.pt", weights_only=True)
            for name in ORDER:
                axes = axes_of(name, tp, dp, t, d)
                own = held["optimizer"]["state"][name]
                whole = saved["optimizer"]["state"][name]
                assert own.keys() == whole.keys()
                for state, value in whole.items():
                    wanted = value if state == "step" else part_of(name, state, value, axes)
                    assert torch.equal(own[state], wanted), (name, state, own[state].shape, wanted.shape)
                    seen.add(state)
                assert torch.equal(held["model"][name], part_of(name, "weight", saved["model"][name], axes)), name
    assert seen >= ({"row_var", "col_var", "variance"} if kind == "adafactor" else {"sum", "own"})
    ucpl.convert(tmp_path / "ranks", tmp_path / "back", f"{spec}:whole()", layout=ranks)
    again = torch.load(tmp_path / "back" / "all.pt", weights_only=True)
    other, fresh = made(kind)
    other.load_state_dict(again["model"])
    set_optimizer_state_dict(other, fresh, again["optimizer"])
    assert trained(other, fresh, 4) == trained(net, optimizer, 4)


def test_copies_of_a_row_must_agree(tmp_path: Path) -> None:
    """Ranks that cut a lacked dim have equal numbers."""
    spec = tmp_path / "m.ucpl"
    spec.write_text(text("rows"))
    net, optimizer = made("rows")
    trained(net, optimizer, 2)
    (tmp_path / "in").mkdir()
    torch.save(
        {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}, tmp_path / "in" / "all.pt"
    )
    ranks = f"{spec}:ranks(tp = 2, dp = 1)"
    ucpl.convert(tmp_path / "in", tmp_path / "ranks", ranks, layout=f"{spec}:whole()")
    file = tmp_path / "ranks" / "rank_1_0.pt"
    held = torch.load(file, weights_only=True)
    held["optimizer"]["state"]["down"]["sum"] += 1  # of `down`, whose columns tp cuts
    torch.save(held, file)
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "ranks", tmp_path / "back", f"{spec}:whole()", layout=ranks)
    assert caught.value.diagnostics[0].code == "E613"


def test_files_with_one_value_for_each_element_refuse_such_states(tmp_path: Path) -> None:
    """States are dropped by name, or with frozen parameters."""
    spec = tmp_path / "m.ucpl"
    spec.write_text(text("rows"))
    net, optimizer = made("rows")
    trained(net, optimizer, 2)
    (tmp_path / "in").mkdir()
    torch.save(
        {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}, tmp_path / "in" / "all.pt"
    )
    source = f"{spec}:whole()"
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "in", tmp_path / "out", "plain()", layout=source)
    (found,) = caught.value.diagnostics
    assert found.code == "E225" and "--drop sum" in found.remedy
    ways: list[Any] = [{"drop": ("sum", "own")}, {"freeze": tuple(ORDER[:3])}]
    for number, how in enumerate(ways):
        ucpl.convert(tmp_path / "in", tmp_path / f"out{number}", "plain()", layout=source, **how)
        assert (tmp_path / f"out{number}").exists()


@pytest.mark.parametrize(("to", "stops"), [
    ("zero0(dp=1)", True), ("torch_file()", True), ("dcp(fsdp=2)", True), ("zero1(dp=2)", False),
])  # fmt: skip
def test_the_stop_of_an_adafactor_of_flat_buffers_is_foretold(tmp_path: Path, to: str, stops: bool) -> None:
    states = {
        "weight": torch.ones(4, 3),
        "fp32": torch.ones(4, 3),
        "variance": torch.ones(4, 3),
        "step": torch.tensor(3.0),
    }
    groups = [{"lr": 0.1, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0, "params": ["a"]}]
    torch.save({"params": {"a": states}, "groups": groups}, tmp_path / "plain.pt")
    done = command("convert", tmp_path / "plain.pt", tmp_path / "made", "--to", to)
    assert done.status == 0, done.err
    assert ("KeyError: 'row_var'" in done.out) is stops
