"""A padded Megatron vocabulary from tp 2 to tp 4 and back.

The checkpoints are torch files. Each element has its own number.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.errors import UcplError

SPEC = """ucpl 1

model gpt {
  dim v = 50257, h = 3
  dtype f32
  embed : v h
  head  : v h
  norm  : h
  state master, exp_avg : f32
}

layout megatron(tp, divisible = 128, dp = 2) of gpt {
  mesh dp tp
  framework torch()
  file weights = torch "mp_rank_{tp:02}.pt"
  file optim   = torch "optim_{dp}_{tp:02}.pt"
  embed = pad(v, divisible * tp, live)@tp h   as "embed"
  head  = h pad(v, divisible * tp, live)@tp   as "head"
  norm  = h                                   as "norm"
  group all = embed, head, norm
  state exp_avg       = like                                             as "{key}.exp_avg"
  state master of all = trim(flat(pad(each, 4)))@chunk(dp, 2)            as "master"
}

layout zeros(tp) of gpt extends megatron(tp = tp) {
  embed = pad(v, 128 * tp)@tp h   as "embed"
  head  = h pad(v, 128 * tp)@tp   as "head"
}
"""
V, H = 50257, 3


def padded(rows: int, state: int, kept: int) -> torch.Tensor:
    """Rows 0 to V, then some live rows, then zeros."""
    out = torch.zeros(rows, H, dtype=torch.float64)
    numbers = torch.arange(1, (V + kept) * H + 1, dtype=torch.float64).view(-1, H)
    out[: V + kept] = numbers + state * 2**20
    return out.float()


def cut(rows: int, state: int, kept: int, tp: int) -> tuple[torch.Tensor, ...]:
    return padded(rows, state, kept).chunk(tp)


def stored(tp: int, divisible: int, kept: int) -> dict[str, dict[str, torch.Tensor]]:
    rows = -(-V // (divisible * tp)) * divisible * tp
    files: dict[str, dict[str, torch.Tensor]] = {}
    norm = torch.arange(1, H + 1) / 7
    for rank in range(tp):
        local = [
            {"embed": cut(rows, s, kept, tp)[rank], "head": cut(rows, s + 3, kept, tp)[rank].T, "norm": norm + s}
            for s in range(3)
        ]
        weights, exp_avg, master = local
        files[f"mp_rank_{rank:02}.pt"] = {k: t.contiguous() for k, t in weights.items()}
        members = [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 4)) for t in master.values()]
        flat = torch.cat(members)[: sum(m.numel() for m in members[:-1]) + H]
        step = -(-flat.numel() // 4) * 2
        for dp in range(2):
            files[f"optim_{dp}_{rank:02}.pt"] = {
                **{f"{k}.exp_avg": t.contiguous() for k, t in exp_avg.items()},
                "master": flat[dp * step : (dp + 1) * step].clone(),
            }
    return files


def written(folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir()
    for name, value in files.items():
        torch.save(value, folder / name)
    return folder


def same(folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, value in files.items():
        found = torch.load(folder / name, weights_only=True)
        assert found.keys() == value.keys()
        for key, tensor in value.items():
            assert torch.equal(found[key], tensor), (name, key)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "gpt.ucpl").write_text(SPEC)
    return f"{tmp_path / 'gpt.ucpl'}:"


def test_rows_go_over_while_there_is_room_and_come_back(tmp_path: Path, spec: str) -> None:
    source = written(tmp_path / "tp2", stored(2, 128, 50432 - V))
    there = tmp_path / "tp4"
    report = ucpl.convert(source, there, layout=f"{spec}megatron(tp=2)", to=f"{spec}megatron(tp=4, divisible=256)")
    same(there, stored(4, 256, 50432 - V))  # 51200 rows: those behind are zeros
    assert not ucpl.verify(there, layout=f"{spec}megatron(tp=4, divisible=256)").findings
    assert not [t for t in report.plan.dropped if "live" in t]
    back = tmp_path / "back"
    ucpl.convert(there, back, layout=f"{spec}megatron(tp=4, divisible=256)", to=f"{spec}megatron(tp=2)")
    same(back, stored(2, 128, 50432 - V))
    ours, theirs = f"{spec}megatron(tp=2)", f"{spec}megatron(tp=4, divisible=256)"
    assert ucpl.compare(source, there, a_layout=ours, b_layout=theirs)
    files = stored(4, 256, 50432 - V)
    files["mp_rank_03.pt"]["embed"][50431 - 3 * 12800, 2] += 1
    assert not ucpl.compare(source, written(tmp_path / "other", files), a_layout=ours, b_layout=theirs)


def test_a_live_row_that_differs_is_named(tmp_path: Path, spec: str) -> None:
    files = stored(2, 128, 50432 - V)
    source = written(tmp_path / "tp2", files)
    for rank in range(2):
        files[f"optim_{rank}_01.pt"]["head.exp_avg"] = files[f"optim_{rank}_01.pt"]["head.exp_avg"].clone()
        files[f"optim_{rank}_01.pt"]["head.exp_avg"][1, -2] += 1
    other, layout = written(tmp_path / "other", files), f"{spec}megatron(tp=2)"
    found = ucpl.compare(source, other, a_layout=layout, b_layout=layout).differences
    assert {(d.state, d.element) for d in found} == {("exp_avg", "head[v=50430, h=1]")}
    against = ucpl.verify(source, layout=layout, against=other).against
    assert against is not None and [d.code for d in against.findings] == ["E702"]
    assert "head[v=50430, h=1]" in against.findings[0].message


def test_a_target_with_less_room_says_how_many_rows_stay_behind(tmp_path: Path, spec: str) -> None:
    source = written(tmp_path / "tp2", stored(2, 128, 50432 - V))
    there = tmp_path / "tp1"
    report = ucpl.convert(source, there, layout=f"{spec}megatron(tp=2)", to=f"{spec}megatron(tp=1)")
    same(there, stored(1, 128, 50304 - V))
    assert list(report.plan.dropped) == [
        f"live rows of v in {t}: 128 of 175 are not kept, the target has room for 47" for t in ("embed", "head")
    ]


def test_a_target_that_pads_with_zeros_gets_zeros(tmp_path: Path, spec: str) -> None:
    source = written(tmp_path / "tp2", stored(2, 128, 50432 - V))
    there = tmp_path / "tp3"
    report = ucpl.convert(source, there, layout=f"{spec}megatron(tp=2)", to=f"{spec}zeros(tp=4)")
    for rank in range(4):
        found = torch.load(there / f"mp_rank_{rank:02}.pt", weights_only=True)
        assert torch.equal(found["embed"], padded(50688, 0, 0).chunk(4)[rank])
    assert all("175 of 175 are not kept, the target has no live rows" in t for t in report.plan.dropped)
    # ... and a statement that these rows are empty is checked against that: they are not zero.
    with pytest.raises(UcplError, match="E614"):
        ucpl.convert(source, tmp_path / "no", layout=f"{spec}zeros(tp=2)", to=f"{spec}zeros(tp=4)")


def test_a_live_row_that_two_copies_hold_unlike_is_found(tmp_path: Path, spec: str) -> None:
    files = stored(2, 128, 50432 - V)
    files["optim_1_01.pt"]["embed.exp_avg"] = files["optim_1_01.pt"]["embed.exp_avg"].clone()
    files["optim_1_01.pt"]["embed.exp_avg"][-1, 1] += 1
    source = written(tmp_path / "tp2", files)
    with pytest.raises(UcplError) as caught:
        ucpl.convert(source, tmp_path / "no", layout=f"{spec}megatron(tp=2)", to=f"{spec}megatron(tp=4)")
    (found,) = caught.value.diagnostics
    assert found.code == "E613" and "[25215, 1] of embed.exp_avg in optim_1_01.pt" in found.message
