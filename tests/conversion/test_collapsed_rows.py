"""Equal rows are folded into one.

Layers, experts and ranks are counted in it, and different ones keep rows of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.sparse import MAKERS
from tests.cli.command import good
from tests.docs.blocks import located
from ucpl.conversion import sides
from ucpl.conversion.collapsed_rows import collapsed_lines, numbers
from ucpl.conversion.showing import located as told
from ucpl.placement import Placement

MODEL = """ucpl 1
model m {
  dim l = 5, e = 4, h = 6, f = 8
  up   : l[2..] e f h
  down : l[1, 3] f h
  ln   : l h
  head : h
}
layout x(pp = 1, tp = 1) of m {
  mesh pp tp
  file weights = torch "{pp}_{tp}"
  index l = l@spread(pp)
  up[l, e] = f@tp h   as "layers.{l}.experts.{e}.up"
  down[l]  = f h@tp   as "layers.{l}.down"
  ln[l]    = h        as "layers.{l}.ln"
  head     = h        as "head"
}
"""
STATES = """ucpl 1
model m {
  dim l = 3, h = 5
  w : l h
  b : h
  state exp_avg, exp_avg_sq : f32
}
layout x(dp) of m {
  mesh dp
  file weights = torch "w"
  file optim = torch "{dp}"
  w[l] = h   as "{l}.w"
  b    = h   as "b"
  group all = w, b
  state * of all = pad(flat(each), 2 * dp)@dp   as "{state}"
}
"""
EMPTY = """ucpl 1
model m {
  dim n = 3
  w : n
}
layout x(dp) of m {
  mesh dp
  file weights = torch "{dp}"
  w = n@chunk(dp)   as "w"
}
"""


def rows(placement: Placement, rank: int | None = None) -> list[tuple[str, int]]:
    """Names with the number of tensors that each represents."""
    heads = [line for line in collapsed_lines(placement, rank) if not line.startswith(" ")]
    found = []
    for line in heads:
        count = re.search(r"  x ([\d,]+)$", line)
        found.append((line.split(": ")[1].split(" [")[0], int(count[1].replace(",", "")) if count else 1))
    return found


def test_layers_and_experts_that_are_alike_are_one_row_and_others_are_distinguished() -> None:
    assert rows(located(MODEL, "x()")) == [
        ("layers.{2..5}.experts.{0..4}.up", 12), ("layers.{1, 3}.down", 2), ("layers.{0..5}.ln", 5), ("head", 1),
    ]  # fmt: skip


def test_the_boxes_say_which_elements() -> None:
    lines = list(collapsed_lines(located(MODEL, "x(tp = 2)"), None))
    assert lines[0] == "weight     0_{0..2}: layers.{2..5}.experts.{0..4}.up [4, 6], ranks 0..2  x 24"
    assert lines[1] == "           at 0: 1x1x4x6 from up[l=2..5, e=0..4, f=0, 4, h=0]"


@pytest.mark.parametrize(
    "text, call",
    [
        (MODEL, "x()"), (MODEL, "x(pp = 3)"), (MODEL, "x(pp = 2, tp = 2)"), (STATES, "x(dp = 1)"), (STATES, "x(dp = 3)"),
        (EMPTY, "x(dp = 5)"),
    ],
)  # fmt: skip
def test_every_stored_tensor_is_in_one_row(text: str, call: str) -> None:
    placement = located(text, call)
    homes = [home for part in placement.parts for home in part.homes]
    assert sum(count for _, count in rows(placement)) == len(homes)
    for rank in range(placement.layout.ranks):
        assert sum(count for _, count in rows(placement, rank)) == sum(home.rank == rank for home in homes)


def test_single_rows_keep_their_text() -> None:
    placement = located(STATES, "x(dp = 3)")
    alone = [line for line in collapsed_lines(placement, 0) if line.startswith("exp_avg")]
    assert alone == [line for line in told(placement, 0, each=True) if line.startswith("exp_avg")]


def test_rows_do_not_grow_with_what_is_alike() -> None:
    many = MODEL.replace("l = 5, e = 4", "l = 61, e = 256")
    assert len(list(collapsed_lines(located(many, "x()"), None))) == len(
        list(collapsed_lines(located(MODEL, "x()"), None))
    )


@pytest.mark.parametrize(
    "values, text",
    [([3], "3"), ([0, 1, 2], "0..3"), ([4, 0, 2], "0..6 by 2"), ([1, 4], "1, 4"), (range(0, 99, 98), "0, 98"),
     ([0, 1, 2, 4, 8, 16, 32], "0, 1, 2, 4, 8, 16, ...")],
)  # fmt: skip
def test_numbers_are_reported_as_ranges_are(values: list[int], text: str) -> None:
    assert numbers(values) == text


MANY = """weight     model.safetensors: layers.{1..4}.experts.{0..9}.up [3, 2], rank 0  x 27
           at 0: 3x2 from layers.{1..4}.experts.{0..9}.up[0, 0]
weight     model.safetensors: {layers.0.gate, layers.1.gate, layers.11.gate} [7], rank 0  x 3
           at 0: 7 from {layers.0.gate, layers.1.gate, layers.11.gate}[0]
weight     model.safetensors: head [4, 2], rank 0
           at 0: 4x2 from head[0, 0]"""
FLAT = """weight     mp_rank_00_model_states.pt: module/layers.{0..8}.up [2, 3], rank 0  x 8
           at 0: 2x3 from layers.{0..8}.up[0, 0]
fp32       zero_pp_rank_{0..2}_mp_rank_00_optim_states.pt: optimizer_state_dict/single_partition_of_fp32_groups/0 [24],"""


def test_tensors_of_a_large_checkpoint_share_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with all combinations of their numbers are one pattern."""
    monkeypatch.setattr(sides, "FAMILIES_FROM", 1)
    shapes: dict[str, tuple[int, ...]] = {f"layers.{l}.experts.{e}.up": (3, 2) for l in (1, 2, 3) for e in range(9)}
    shapes |= {f"layers.{l}.gate": (7,) for l in (0, 1, 11)} | {"head": (4, 2)}
    MAKERS["huggingface"](tmp_path / "hf", shapes, 2)
    lines = good("show", tmp_path / "hf").out.splitlines()
    assert sorted(lines[1:]) == sorted(MANY.splitlines())
    assert len(good("show", tmp_path / "hf", "--each").out.splitlines()) == 1 + 2 * len(shapes)
    shapes.pop("layers.2.experts.5.up")
    MAKERS["huggingface"](tmp_path / "gap", shapes, 2)
    assert "{layers.1.experts.0.up, layers.1.experts.1.up," in good("show", tmp_path / "gap").out
    MAKERS["zero1"](tmp_path / "zero1", {f"layers.{l}.up": (2, 3) for l in range(8)}, 2)
    found = good("show", tmp_path / "zero1").out
    assert found.split("\n", 1)[1].startswith(FLAT)
    assert "           at 0: 4x2x3 from layers.{0..8}.up[0, 0]" in found
    of_rank = good("show", tmp_path / "zero1", "--rank", "1").out
    assert "at 0: 4x2x3 from {layers.4.up, layers.5.up, layers.6.up, layers.7.up}[0, 0]" in of_rank
