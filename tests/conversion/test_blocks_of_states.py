"""States in 8 bits, with one absmax for each block.

bitsandbytes stores them so: a block is a run of flat elements. Each rank quantises its own shard, row-major. If a
rank's rows are multiples of a block, blocks of all cuts are equal.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.conversion.checking import check
from ucpl.conversion.requests import Given

BLOCK = 4  # of bitsandbytes: 256
TEXT = """ucpl 2

model blocked {
  dim f = 8, h = 16, hb = h / 4, fb = f / 4
  up   : f h   dtype f32
  down : h f   dtype f32
  up.absmax1   : f hb  dtype f32 is scale(up, 4)    # so no cut is inside of a block
  up.absmax2   : f hb  dtype f32 is frozen
  down.absmax1 : h fb  dtype f32 is scale(down, 4)
  down.absmax2 : h fb  dtype f32 is frozen
  state state1, state2 : u8
}

layout ranks(tp) of blocked {
  framework torch()
  mesh tp
  file weights = torch "model_{tp}.pt"
  file optim   = torch "optim_{tp}.pt"
  up   = f@tp h   as "up"
  down = h f@tp   as "down"
  up.absmax1, up.absmax2     = (f@tp hb)  in optim as "{name}"
  down.absmax1, down.absmax2 = (h fb@tp)  in optim as "{name}"
  state state1, state2 = like in optim as "{key}.{state}"
}
"""


def quantised(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a shard, and the absmax of each block."""
    blocks = moment.contiguous().view(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1)
    codes = (blocks / absmax[:, None] * 127).round().add(128).to(torch.uint8)
    return codes.view(moment.shape), absmax


def job(folder: Path, tp: int) -> Path:
    """Files of a job in which each rank quantises its shard."""
    made = torch.Generator().manual_seed(5)
    folder.mkdir()
    full = {name: torch.randn(shape, generator=made) for name, shape in (("up", (8, 16)), ("down", (16, 8)))}
    moments = {(name, n): torch.randn(t.shape, generator=made) for name, t in full.items() for n in (1, 2)}
    cut = {"up": 0, "down": 1}
    for rank in range(tp):
        held = {name: t.chunk(tp, cut[name])[rank].clone() for name, t in full.items()}
        optim: dict[str, torch.Tensor] = {}
        for (name, n), moment in moments.items():
            codes, absmax = quantised(moment.chunk(tp, cut[name])[rank])
            optim |= {f"{name}.state{n}": codes.clone(), f"{name}.absmax{n}": absmax}
        torch.save(held, folder / f"model_{rank}.pt")
        torch.save(optim, folder / f"optim_{rank}.pt")
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "blocked.ucpl"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(("tp", "other"), [(1, 2), (2, 1)])
def test_codes_and_absmax_are_those_of_ranks_that_quantise_their_own_shard(
    tp: int, other: int, spec: Path, tmp_path: Path
) -> None:
    source, genuine = job(tmp_path / "source", tp), job(tmp_path / "genuine", other)
    target = tmp_path / "target"
    ucpl.convert(source, target, f"{spec}:ranks(tp = {other})", layout=f"{spec}:ranks(tp = {tp})")
    for rank in range(other):
        for name in (f"model_{rank}.pt", f"optim_{rank}.pt"):
            found, wanted = torch.load(target / name), torch.load(genuine / name)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("absmax", ["(h fb@tp)", "(h fb)"])
def test_a_cut_inside_a_block_is_refused(absmax: str, spec: Path) -> None:
    """At tp = 4, each rank has half a block."""
    spec.write_text(TEXT.replace("(h fb@tp)", absmax))
    found = check(f"{spec}:ranks(tp = 4)", Given())
    assert [d.code for d in found.findings][:1] == ["E216"], found
