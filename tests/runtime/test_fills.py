"""Fills follow their table.

Other places and other values are filled if the table names them; places that it does not name are not filled.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from attrs import evolve

import ucpl
from tests.planning.test_plan import forged, nodes
from tests.runtime.test_execute import code_of, run, two
from tests.runtime.world import Stored, bits_of, moves, plan_of, read_target, stored, write_source
from ucpl.api import open_checkpoint
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.planning import Plan
from ucpl.planning.files import load_plan, plan_bytes, save_plan
from ucpl.runtime.resume import digest_of_plan
from ucpl.tables import MoveSide
from ucpl.tables.operations import Fill

SOURCE = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed" / "z1_dp4"


def with_fills(plan: Plan, change: Callable[[Fill], Fill | None]) -> Plan:
    """The plan with other Fills, or without them."""
    made = {n: change(n) for n in plan.nodes if isinstance(n, Fill)}
    assert made
    net = nx.relabel_nodes(plan.net, {old: new for old, new in made.items() if new is not None})
    net.remove_nodes_from([old for old, new in made.items() if new is None])
    return evolve(plan, net=net)


def padded(tmp_path: Path, dtype: str = "f32") -> tuple[Any, Plan, Any]:
    """70 elements of a source in the middle of 100.

    The target has rows of ten; the copied elements are [15, 85).
    """
    bits = bits_of(dtype, (70,), 3)
    source = write_source(tmp_path / "src", [Stored("a", ("x",), dtype, bits)])
    (extent,) = source.extents.values()
    target = StoredTensor("d.pt", ("x",), dtype, (10, 10), "weight", "x")
    row = (0, 0, 0, (70,), 0, (1,), 15, (1,))
    return source, plan_of([stored(extent)], [target], moves("copy", [row])), bits


@pytest.mark.parametrize("memory", [1 << 18, 64 << 20])
def test_what_the_table_says_is_filled(tmp_path: Path, memory: int) -> None:
    source, plan, bits = padded(tmp_path)
    run(plan, source, tmp_path / "as it is", memory=memory)
    found = read_target(tmp_path / "as it is", "d.pt")["x"].reshape(-1)
    assert not found[:15].any() and not found[85:].any() and found[15:85].tobytes() == bits.tobytes()

    def last(fill: Fill) -> Fill:
        """Only the end of the fill.

        It has fifteen elements, and fifteen of the copy before it.
        """
        boxes = MoveSide(np.array([-1]), np.array([70]), np.array([[30]]), np.array([[1]]))
        return evolve(fill, boxes=boxes, value=2.5)

    run(with_fills(plan, last), source, tmp_path / "elsewhere", memory=memory)
    found = read_target(tmp_path / "elsewhere", "d.pt")["x"].reshape(-1)
    assert not found[:15].any() and found[15:70].tobytes() == bits[:55].tobytes()
    assert (found[70:].view("<f4") == 2.5).all()


@pytest.mark.parametrize("cuts", [(0, 15_000), (0, 6_000, 15_000)], ids=["one read", "reads that are joined"])
def test_a_tile_that_is_copied_in_one_is_filled_where_the_table_says(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """A table that fills copied elements and leaves uncopied ones open.

    The CRC of such a tile differs from the CRC of the bytes read.
    """
    bits = bits_of("f32", (15_000,), 3)
    source = write_source(tmp_path / "src", [Stored("a", ("x",), "f32", bits)])
    (extent,) = source.extents.values()
    target = StoredTensor("d.pt", ("x",), "f32", (20_000,), "weight", "x")
    rows = [(0, 0, 0, (b - a,), a, (1,), a, (1,)) for a, b in pairwise(cuts)]
    plan = plan_of([stored(extent)], [target], moves("copy", rows))
    early = MoveSide(np.array([-1]), np.array([500]), np.array([[5_000]]), np.array([[1]]))
    run(with_fills(plan, lambda f: evolve(f, boxes=early, value=1.5)), source, tmp_path / "out", memory=1 << 18)
    found = read_target(tmp_path / "out", "d.pt")["x"]
    assert (found[500:5_500].view("<f4") == 1.5).all() and not found[15_000:].any()
    assert found[:500].tobytes() == bits[:500].tobytes() and found[5_500:15_000].tobytes() == bits[5_500:].tobytes()


def test_rows_and_values_of_every_size(tmp_path: Path) -> None:
    """A column of padding over many tiles.

    Its dtypes have 1 to 16 bytes.
    """
    for dtype in ("u8", "bf16", "f32", "f64", "c128"):
        bits = bits_of(dtype, (4_000, 30), 5)
        source = write_source(tmp_path / dtype, [Stored("a", ("x",), dtype, bits)])
        (extent,) = source.extents.values()
        target = StoredTensor("d.pt", ("x",), dtype, (4_000, 33), "weight", "x")
        row = (0, 0, 0, (4_000, 30), 0, (30, 1), 3, (33, 1))
        plan = plan_of([stored(extent)], [target], moves("copy", [row]))
        (fill,) = (n for n in plan.nodes if isinstance(n, Fill))
        assert len(fill.boxes) == 1 and fill.elements == 4_000 * 3
        out = tmp_path / f"{dtype} out"
        run(with_fills(plan, lambda f: evolve(f, value=3.0)), source, out)
        found = torch.load(out / "d.pt")["x"]
        assert (found[:, :3] == 3).all()
        assert read_target(out, "d.pt")["x"][:, 3:].tobytes() == bits.tobytes()


def test_what_nothing_is_moved_to_and_nothing_fills_is_refused(tmp_path: Path) -> None:
    source, plan, _ = padded(tmp_path)
    for change in (lambda f: None, lambda f: evolve(f, boxes=f.boxes.take(np.array([0, 0])))):
        with pytest.raises(UcplError) as caught:
            run(with_fills(plan, change), source, tmp_path / "out")
        (found,) = caught.value.diagnostics
        assert found.code == "E603" and found.labels[0].file == "d.pt" and "which has 100" in found.message
        assert not (tmp_path / "out").exists()


def test_what_leaves_its_tensor_is_refused_and_the_step_of_one_element_is_nobodys(tmp_path: Path) -> None:
    """As many elements as are open, but at other places.

    The count alone would accept them.
    """
    source, plan, bits = padded(tmp_path)

    def other(offset: int, shape: list[int], step: list[int]) -> Callable[[Fill], Fill]:
        """The first fifteen, and then a box of another make."""
        boxes = [([-1], [0], [[15]], [[1]]), ([-1], [offset], [shape], [step])]
        return lambda fill: evolve(fill, boxes=MoveSide.concat([MoveSide(*map(np.array, box)) for box in boxes]))

    for change in (other(90, [15], [1]), other(85, [3, 5], [40, 1]), other(85, [5, 3], [1 << 60, 1])):
        with pytest.raises(UcplError) as caught:
            run(with_fills(plan, change), source, tmp_path / "out")
        (found,) = caught.value.diagnostics
        assert found.code == "E603" and ("it has 100" in found.message or "the plan has 1" in found.message)
        assert not (tmp_path / "out").exists()
    run(with_fills(plan, other(85, [15, 1], [1, 1 << 61])), source, tmp_path / "one")
    whole = read_target(tmp_path / "one", "d.pt")["x"].reshape(-1)
    assert whole[15:85].tobytes() == bits.tobytes() and not whole[:15].any() and not whole[85:].any()


def test_sources_of_one_mean_meet_and_must_be_enough(tmp_path: Path) -> None:
    a = np.arange(100, dtype=np.float32)
    source, sources, target, _ = two(tmp_path, a.view("<u4"), a.view("<u4").copy())
    rows = [(0, s, 0, (90,), 0, (1,), 0, (1,)) for s in (0, 1)]
    run(plan_of(sources, target, moves("mean", rows)), source, tmp_path / "out")
    short = plan_of(sources, target, moves("mean", [(0, 0, 0, (90,), 0, (1,), 0, (1,))]))
    assert code_of(lambda: run(with_fills(short, lambda f: None), source, tmp_path / "short")) == "E603"


@pytest.mark.parametrize("twice", [[(0, 100), (0, 100)], [(0, 100), (50, 100), (150, 200)], [(50, 200), (100, 150)]])
def test_no_tile_has_what_the_one_before_it_had(tmp_path: Path, twice: list[tuple[int, int]]) -> None:
    """A plan that moves twice to one place and never to another.

    The number of elements is right, and one place is a hole.
    """
    a = bits_of("f32", (200,), 3)
    source, sources, target, _ = two(tmp_path, a, a.copy())
    first, hole = evolve(target[0], key=("first",)), evolve(target[0], key=("hole",))
    rows = [(0, 0, 0, (200,), 0, (1,), 0, (1,))] + [(0, 1, 1, (b - a,), a, (1,), a, (1,)) for a, b in twice]
    plan = plan_of(sources, [first, hole], moves("copy", rows))
    run(with_fills(plan, lambda f: None), source, tmp_path / "out", workers=1)
    found = read_target(tmp_path / "out", "d.pt")["hole"]
    wanted = np.zeros_like(a)
    for begin, end in twice:
        wanted[begin:end] = a[begin:end]
    assert found.tobytes() == wanted.tobytes()


# ---- of real plans ------------------------------------------------------------------------------------------------------


def real() -> Plan:
    return ucpl.plan(str(SOURCE), "zero1(dp=5)")


def test_a_plan_s_fills_are_what_its_moves_leave(tmp_path: Path) -> None:
    """Expected fills are counted tensor by tensor, and a file keeps them."""
    plan = real()
    reached = [np.zeros(t.numel, np.int64) for t in plan.targets]
    for m in plan.moves:
        if m.kind != "check":
            for i in range(len(m)):
                at = m.target_offset[i] + sum(np.ix_(*(np.arange(n) for n in m.shape[i])) * m.target_stride[i])
                reached[m.target[i]][at.reshape(-1)] += 1
    save_plan(plan, tmp_path / "a.plan")
    for one in (plan, load_plan(tmp_path / "a.plan")):
        found = [r.copy() for r in reached]
        for fill in (n for n in one.nodes if isinstance(n, Fill)):
            assert fill.elements == fill.boxes.elements > 0 and fill.value == 0
            for offset, shape, stride in zip(fill.boxes.offset, fill.boxes.shape, fill.boxes.stride, strict=True):
                for index in np.ndindex(*shape.tolist()):
                    address = offset + (np.array(index) * stride).sum()
                    found[one.spaces[1].home(address)][one.spaces[1].position(address)] += 1
        assert all((r == 1).all() for r, t in zip(found, one.targets, strict=True) if t.shares is None)


def test_what_a_real_plan_fills_is_on_the_disk(tmp_path: Path) -> None:
    plan = real()
    other = with_fills(plan, lambda f: evolve(f, value=-1.0))
    assert digest_of_plan(other) != digest_of_plan(plan)
    count = sum(n.elements for n in plan.nodes if isinstance(n, Fill))
    for name, made, wanted in (("a", plan, 0), ("b", other, count)):
        ucpl.apply(made, SOURCE, tmp_path / name)
        found = open_checkpoint(tmp_path / name)
        flats = [e for e in found.extents.values() if "optim_states" in e.file]
        data = [np.fromfile(found.root / e.file, "<f4", e.numel, offset=e.storage_start + 4 * e.offset) for e in flats]
        assert data and sum(int((flat == -1).sum()) for flat in data) == wanted


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "other elements": lambda r: nodes(r, "fill")[0].__setitem__(3, 10**6),
    "rows that are not there": lambda r: nodes(r, "fill")[0].__setitem__(4, [0, 10**6, 1]),
    "a value without end": lambda r: nodes(r, "fill")[0].__setitem__(5, float("inf")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_fill_made_by_hand_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hand.plan"
    path.write_bytes(forged(real(), HOSTILE[name]))
    with pytest.raises(UcplError, match="E351"):
        load_plan(path)


@pytest.mark.parametrize("column", ["offset", "stride"])
def test_a_fill_of_what_is_not_there_is_refused(column: str, tmp_path: Path) -> None:
    """Boxes of another tensor than there are, and such as run backwards."""

    def beyond(fill: Fill) -> Fill:
        far = {"offset": fill.boxes.offset + (1 << 40), "stride": fill.boxes.stride - 2}
        return evolve(fill, boxes=fill.boxes.replace(**{column: far[column]}))

    save_plan(with_fills(real(), beyond), tmp_path / "a.plan")
    with pytest.raises(UcplError, match="E351"):
        load_plan(tmp_path / "a.plan")


def test_fills_do_not_widen_the_table_of_moves(tmp_path: Path) -> None:
    """200 ranks whose tensors end in padding take a handful of boxes.

    A plan with these boxes is hardly larger.
    """
    model = Path(__file__).parents[2] / "benchmarks" / "llama.ucpl"
    plans = [ucpl.plan("zero3(dp=256)", f"zero3(dp={dp})", model=f"{model}:llama") for dp in (128, 200)]
    fills = [[n for n in p.nodes if isinstance(n, Fill)] for p in plans]
    assert not fills[0] and [len(f.boxes) for f in fills[1]] == [10, 10, 10]
    without = with_fills(plans[1], lambda f: None)
    assert len(plan_bytes(plans[1])) < len(plan_bytes(without)) + 2_000
