"""Laws of running a plan, compared with a NumPy model.

The target equals the model's in any tiling, within memory, and is never incomplete.
"""

import os
import threading
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.world import (
    Stored,
    Torch,
    bits_of,
    copies,
    moves,
    open_target,
    plan_of,
    read_target,
    stored,
    write_source,
)
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.runtime import Report, compare, execute
from ucpl.runtime.boxes import Box, clip, compose
from ucpl.runtime.buffers import MEMORY_MIN, Budget, Workspace, share_of
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.manifest import read_manifest
from ucpl.runtime.options import RunOptions

MEMORY = 2 * MEMORY_MIN  # the least that two workers need: small tiles, many of them
DTYPES = st.sampled_from(["f32", "bf16", "f64", "u8", "i64", "bool", "f16", "c128", "f8_e5m2"])


@pytest.fixture(autouse=True)
def no_failpoints():
    yield
    set_failpoints("")


def code_of(call) -> str:
    with pytest.raises(UcplError) as caught:
        call()
    return caught.value.diagnostics[0].code


def run(plan, source, out, **more) -> Report:
    more.setdefault("memory", MEMORY)
    return execute(plan, source, more.pop("framework", Torch()), out, RunOptions(**more))


# ---- the law ---------------------------------------------------------------------------------------------------------


@st.composite
def cut(draw, shape):
    """A shape cut into disjoint boxes: (lows, sizes) of each."""
    found = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 4))):
        i = draw(st.integers(0, len(found) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        low, n = found[i][axis]
        if n < 2:
            continue
        at = draw(st.integers(1, n - 1))
        box = found.pop(i)
        found.append((*box[:axis], (low, at), *box[axis + 1 :]))
        found.append((*box[:axis], (low + at, n - at), *box[axis + 1 :]))
    return found


def strides_of(shape):
    found, step = [], 1
    for n in reversed(shape):
        found.append(step)
        step *= n
    return tuple(reversed(found))


def merged(shape, source, target):
    """Dims merged as far as both sides allow, as in a plan."""
    kept: list[list[int]] = []
    for n, s, t in zip(shape, source, target, strict=True):
        if n == 1:
            continue
        if kept and kept[-1][1] == n * s and kept[-1][2] == n * t:
            kept[-1] = [kept[-1][0] * n, s, t]
        else:
            kept.append([n, s, t])
    if not kept:
        return (1,), (1,), (1,)
    return tuple(zip(*kept, strict=True))


@st.composite
def worlds(draw):
    """Sources of any dtype and layout, cut into boxes.

    The boxes go to any place of any target. Some places remain as padding.
    """
    dtype = draw(DTYPES)
    tensors: list[Stored] = []
    rows: list[tuple] = []
    targets: list[StoredTensor] = []
    models: list[np.ndarray] = []
    big = draw(st.booleans())
    for t in range(draw(st.integers(1, 3))):
        side = st.integers(1, 90 if big else 9)
        shape = tuple(draw(st.lists(side, min_size=1, max_size=3)))
        if big and np.prod(shape) > 200_000:
            shape = shape[:2]
        grown = tuple(n + draw(st.integers(0, 3)) for n in shape)  # the target has room around it
        model = np.zeros(grown, bits_of(dtype, (1,), 0).dtype)
        for b, box in enumerate(draw(cut(shape))):
            if draw(st.integers(0, 9)) == 0:
                continue  # padding
            # The box lies somewhere in a source tensor of its own, with other elements around it.
            around = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in box)
            whole = tuple(a + n + z for (a, z), (_, n) in zip(around, box, strict=True))
            bits = bits_of(dtype, whole, 100 * t + b)
            order = tuple(draw(st.permutations(range(len(whole)))))
            source = len(tensors)
            tensors.append(
                Stored(
                    f"s{draw(st.integers(0, 1))}",
                    (f"{t}.{b}",),
                    dtype,
                    bits,
                    order,
                    draw(st.integers(0, 3)),
                    draw(st.integers(0, 2)),
                )
            )
            sizes = tuple(n for _, n in box)
            inner = tuple(slice(a, a + n) for (a, _), n in zip(around, sizes, strict=True))
            model[tuple(slice(low, low + n) for low, n in box)] = bits[inner]
            s, g = strides_of(whole), strides_of(grown)
            flat, fs, gs = merged(sizes, s, g)
            rows.append(
                (0, source, t, flat, sum(a * w for (a, _), w in zip(around, s, strict=True)), fs,
                 sum(low * w for (low, _), w in zip(box, g, strict=True)), gs)
            )  # fmt: skip
        models.append(model)
        targets.append(StoredTensor(f"d{t % 2}.pt", (f"t{t}",), dtype, grown, "weight", f"t{t}"))
    return tensors, rows, targets, models


@settings(max_examples=80)
@given(worlds(), st.sampled_from([MEMORY, 3 * MEMORY, 64 << 20]), st.integers(1, 2), st.booleans())
def test_the_target_is_what_a_numpy_model_says(tmp_path_factory, world, memory, workers, verify_source):
    tensors, rows, targets, models = world
    top = tmp_path_factory.mktemp("world")
    source = write_source(top / "src", tensors)
    plan = plan_of([stored(source.extents[t.file, t.key]) for t in tensors], targets, moves("copy", rows))
    report = run(plan, source, top / "out", memory=memory, workers=workers, verify_source=verify_source)
    for t, model in enumerate(models):
        found = read_target(top / "out", targets[t].file)[f"t{t}"]
        assert found.tobytes() == model.tobytes()
    assert report.bytes_live_max <= memory
    if verify_source:
        assert report.source_bytes_unverified == 0
    assert compare(plan, source, open_target(top / "out", {t.file for t in targets}), memory=memory)
    for file in {t.file for t in targets}:
        assert zipfile.ZipFile(top / "out" / file).testzip() is None
        torch.load(top / "out" / file, weights_only=True)


boxes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=4)


@given(boxes, st.integers(0, 5), st.data())
def test_clipped_boxes_are_the_range_in_order_and_few(dims, start, data):
    step, target = 1, []
    for n, gap, _ in reversed(dims):
        target.append(step)
        step = step * n + gap
    box = Box(tuple(n for n, _, _ in dims), 7, tuple(s for _, _, s in dims), start, tuple(reversed(target)))
    low = data.draw(st.integers(0, start + step + 2))
    high = data.draw(st.integers(low, start + step + 3))
    parts = list(clip(box, low, high))
    assert [e for p in parts for e in elements(p)] == [e for e in elements(box) if low <= e[1] < high]
    assert len(parts) <= 2 * len(dims) - 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_a_composed_box_visits_the_same_elements(shape, data):
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size - 1))
    n = data.draw(st.integers(1, size - start))
    step = data.draw(st.integers(1, max(1, (size - start - 1) // max(1, n - 1)))) if n > 1 else 1
    order = data.draw(st.permutations(range(len(shape))))
    stride = [0] * len(shape)
    weight = 1
    for d in reversed(order):
        stride[d] = weight
        weight *= shape[d]
    box = Box((n,), start, (step,), 0, (1,))
    found = {t: s for p in compose(box, tuple(shape), tuple(stride)) for s, t in elements(p)}
    wanted = {}
    for s, t in elements(box):
        index = np.unravel_index(s, shape)
        wanted[t] = sum(int(i) * w for i, w in zip(index, stride, strict=True))
    assert found == wanted


def elements(box):
    found = [(box.source, box.target)]
    for n, s, t in zip(box.shape, box.source_step, box.target_step, strict=True):
        found = [(a + i * s, b + i * t) for a, b in found for i in range(n)]
    return found


# ---- copies, casts, means --------------------------------------------------------------------------------------------


def two(tmp_path, a, b, dtype="f32", **more):
    source = write_source(tmp_path / "src", [Stored("a", ("x",), dtype, a), Stored("b", ("x",), dtype, b)])
    n = a.size
    sources = [stored(e, "the tensor") for e in source.extents.values()]
    target = [StoredTensor("d.pt", ("x",), more.pop("to", dtype), a.shape, "weight", "the tensor")]
    return source, sources, target, n


def whole(n, source=0, target=0):
    return (0, source, target, (n,), 0, (1,), 0, (1,))


@pytest.mark.fault("Disk and files", "copies that differ", "an error with tensor, element and both values")
def test_a_replica_that_differs_is_named_to_the_element_with_both_values(tmp_path):
    a = np.arange(30_000, dtype=np.float32).reshape(100, 300)
    b = a.copy()
    b[77, 123] += 1
    source, sources, target, n = two(tmp_path, a.view("<u4"), b.view("<u4"))
    plan = plan_of(sources, target, moves("copy", [whole(n)]), moves("check", [whole(n, 1)]))
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    (found,) = caught.value.diagnostics
    assert found.code == "E613" and caught.value.exit_status == 3
    text = f"{found.message} {found.labels}"
    assert "[77, 123]" in text and "the tensor" in text and "23223.0" in text and "23224.0" in text
    assert [label.file for label in found.labels] == ["a", "b"]
    assert sorted(os.listdir(tmp_path)) == ["src"]


def test_equal_bits_are_equal_and_zeros_of_two_signs_are_not(tmp_path):
    a = np.full((5, 7), np.nan, np.float32)
    source, sources, target, n = two(tmp_path, a.view("<u4"), a.view("<u4").copy())
    run(plan_of(sources, target, moves("copy", [whole(n)]), moves("check", [whole(n, 1)])), source, tmp_path / "out")
    zero = np.zeros((5, 7), np.float32)
    source, sources, target, n = two(tmp_path / "z", zero.view("<u4"), (-zero).view("<u4"))
    plan = plan_of(sources, target, moves("copy", [whole(n)]), moves("check", [whole(n, 1)]))
    assert code_of(lambda: run(plan, source, tmp_path / "z" / "out")) == "E613"


@pytest.mark.parametrize("narrow", ["bf16", "f16", "f8_e4m3fn"])
def test_casts_round_to_nearest_even_as_torch_does(tmp_path, narrow):
    bits = bits_of("f32", (200, 301), 5)
    greatest = {"bf16": 0x7F7F7FFF, "f16": 0x477FEFFF, "f8_e4m3fn": 0x7F7FFFFF}[
        narrow
    ]  # that is not rounded to infinity
    if narrow != "f8_e4m3fn":
        values = bits.view(np.float32)
        values[np.isfinite(values) & (np.abs(values) > 65000)] = 3.0
    bits[0, :4] = [0x3F808000, 0x3F818000, greatest, 0x00000001]
    source, sources, target, n = two(tmp_path, bits, bits, to=narrow)
    target = [evolve(target[0], key=("x",))]
    plan = plan_of(sources, target, moves("copy", [whole(n)], lossy=True))
    run(plan, source, tmp_path / "out")
    made = torch.load(tmp_path / "out" / "d.pt")["x"].to(torch.float64).numpy()
    wanted = torch.from_numpy(bits.view(np.float32)).to(made_dtype(narrow)).to(torch.float64).numpy()
    assert np.array_equal(made, wanted, equal_nan=True)


def made_dtype(name):
    return {"bf16": torch.bfloat16, "f16": torch.float16, "f8_e4m3fn": torch.float8_e4m3fn}[name]


def test_a_cast_that_loses_is_refused_where_the_plan_allows_no_rounding(tmp_path):
    a = np.full((40, 50), 0.5, np.float32)
    source, sources, target, n = two(tmp_path, a.view("<u4"), a.view("<u4"), to="bf16")
    run(plan_of(sources, target, moves("copy", [whole(n)])), source, tmp_path / "out")
    a[31, 4] = 1.0000001
    source, sources, target, n = two(tmp_path / "b", a.view("<u4"), a.view("<u4"), to="bf16")
    with pytest.raises(UcplError, match=r"\[31, 4\]"):
        run(plan_of(sources, target, moves("copy", [whole(n)])), source, tmp_path / "out2")


@pytest.mark.parametrize(("kind", "dtype"), [("mean", "f32"), ("sum", "f32"), ("mean", "bf16"), ("sum", "f64")])
@pytest.mark.parametrize("workers", [1, 2])
def test_means_and_sums_are_fp64_in_order_and_rounded_once(tmp_path, kind, dtype, workers):
    rng = np.random.default_rng(1)
    numbers = [torch.from_numpy(rng.standard_normal((90, 333)) * 10.0**i) for i in range(-4, 3)]
    parts = [x.to({"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}[dtype]) for x in numbers]
    cells = {"f32": torch.int32, "bf16": torch.int16, "f64": torch.int64}[dtype]
    tensors = [
        Stored(f"f{i}", ("x",), dtype, p.view(cells).numpy().view({2: "<u2", 4: "<u4", 8: "<u8"}[p.element_size()]))
        for i, p in enumerate(parts)
    ]
    source = write_source(tmp_path / "src", tensors)
    sources = [stored(e) for e in source.extents.values()]
    target = [StoredTensor("d.pt", ("x",), dtype, (90, 333), "weight", "x")]
    rows = [whole(90 * 333, s) for s in reversed(range(len(parts)))]
    run(plan_of(sources, target, moves(kind, rows)), source, tmp_path / "out", workers=workers)
    total = np.zeros((90, 333))
    for p in parts:
        total += p.to(torch.float64).numpy()
    exact = total / len(parts) if kind == "mean" else total
    found = torch.load(tmp_path / "out" / "d.pt")["x"]
    if dtype == "bf16":
        assert nearest_bf16(exact, found.to(torch.float64).numpy())
    else:
        assert torch.equal(found, torch.from_numpy(exact).to(found.dtype))


def nearest_bf16(exact, found):
    """Check that `found` is the nearest bf16 value, ties to even.

    No neighbour in bf16 is nearer. If a neighbour is equally near, this value is the even one.
    """
    bits = torch.from_numpy(found).to(torch.bfloat16).view(torch.int16).numpy().astype(np.int32)
    for step in (-1, 1):
        other = torch.from_numpy((bits + step).astype(np.int16)).view(torch.bfloat16).to(torch.float64).numpy()
        here, there = abs(found - exact), abs(other - exact)
        if ((there < here) | ((there == here) & (bits % 2 != 0))).any():
            return False
    return True


def test_a_value_goes_through_both_sides(tmp_path):
    x = np.arange(4000, dtype=np.float32).reshape(40, 100)
    source, sources, target, n = two(tmp_path, (x * 2 + 1).view("<u4"), x.view("<u4"))
    step = moves("copy", [whole(n)], source_value=(2.0, 1.0), target_value=(4.0, -1.0))
    run(plan_of(sources, target, step), source, tmp_path / "out")
    assert torch.equal(torch.load(tmp_path / "out" / "d.pt")["x"], torch.from_numpy(x * 4 - 1))


def test_every_node_of_a_tile_does_what_it_says(tmp_path):
    """A mean, a sum and a copy in one stored tensor.

    A flat buffer of parameters with different operations has this form.
    """
    a, b = np.arange(300, dtype=np.float32), np.arange(300, dtype=np.float32) * 3 + 1
    source, sources, target, _ = two(tmp_path, a.view("<u4"), b.view("<u4"))

    def part(source, low):
        return (0, source, 0, (100,), low, (1,), low, (1,))

    plan = plan_of(
        sources, target, moves("sum", [part(0, 0), part(1, 0)]), moves("mean", [part(0, 100), part(1, 100)]),
        moves("copy", [part(1, 200)]),
    )  # fmt: skip
    run(plan, source, tmp_path / "out")
    wanted = np.concatenate([(a + b)[:100], ((a + b) / 2)[100:200], b[200:]])
    assert torch.equal(torch.load(tmp_path / "out" / "d.pt")["x"], torch.from_numpy(wanted))


# ---- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_no_byte_is_read_or_written_twice(tmp_path, axis):
    """A tensor in two parts, cut into four by rows or columns.

    At most 1.02 times the needed bytes are read.
    """
    full = bits_of("f32", (1024, 4096), 1)
    halves = np.split(full, 2, axis)
    source = write_source(tmp_path / "src", [Stored(f"s{i}", ("w",), "f32", h) for i, h in enumerate(halves)])
    quarters = np.split(full, 4, axis)
    rows = []
    for q in range(4):
        shape = quarters[q].shape
        at = (q % 2) * quarters[q].shape[axis] * (halves[0].shape[1] if axis == 0 else 1)
        rows.append((0, q // 2, q, *both(shape, halves[0].shape[1], at)))
    targets = [StoredTensor(f"d{q}.pt", ("w",), "f32", quarters[q].shape, "weight", "w") for q in range(4)]
    plan = plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows))
    report = run(plan, source, tmp_path / "out", memory=8 << 20)
    for q in range(4):
        assert read_target(tmp_path / "out", f"d{q}.pt")["w"].tobytes() == quarters[q].tobytes()
    assert report.bytes_needed == full.nbytes
    assert report.bytes_read <= 1.02 * report.bytes_needed
    assert report.bytes_written <= 1.02 * report.bytes_target
    assert report.bytes_read_back == report.bytes_target
    if axis == 0:
        assert report.source_bytes_checked == full.nbytes


def both(shape, source_width, at):
    flat, s, t = merged(shape, (source_width, 1), (shape[1], 1))
    return flat, at, s, 0, t


def test_a_thin_slice_is_not_read_with_its_gaps(tmp_path):
    """One column of many: elements of 4 bytes, 16 KiB apart."""
    full = bits_of("f32", (600, 4096), 1)
    source = write_source(tmp_path / "src", [Stored("s", ("w",), "f32", full)])
    target = [StoredTensor("d.pt", ("w",), "f32", (600,), "weight", "w")]
    rows = [(0, 0, 0, (600,), 17, (4096,), 0, (1,))]
    report = run(
        plan_of([stored(e) for e in source.extents.values()], target, moves("copy", rows)), source, tmp_path / "out"
    )
    assert read_target(tmp_path / "out", "d.pt")["w"].tobytes() == full[:, 17].tobytes()
    assert report.bytes_read == report.bytes_needed == 2400


def test_many_small_tensors(tmp_path):
    tensors = [Stored(f"s{i % 4}", (f"t{i}",), "f32", bits_of("f32", (3, 1 + i % 5), i)) for i in range(2000)]
    source = write_source(tmp_path / "src", tensors)
    flat = np.concatenate([t.bits.ravel() for t in tensors])
    rows, at = [], 0
    for i, t in enumerate(tensors):
        rows.append((0, i, 0, (t.bits.size,), 0, (1,), at, (1,)))
        at += t.bits.size
    target = [StoredTensor("flat.pt", ("flat",), "f32", (at,), "fp32", "flat")]
    plan = plan_of([stored(e) for e in source.extents.values()], target, moves("copy", rows))
    report = run(plan, source, tmp_path / "out")
    assert read_target(tmp_path / "out", "flat.pt")["flat"].tobytes() == flat.tobytes()
    assert report.source_bytes_unverified == 0 and report.bytes_read == report.bytes_needed


def test_a_workspace_gives_back_all_that_it_took():
    """Each phase of a run makes its own workspace.

    Successive workspaces can each use the full budget.
    """
    share = share_of(MEMORY, 1)
    budget = Budget(share.total)
    for _ in range(3):
        with Workspace(share, budget) as space:
            assert len(space.staging) == share.staging and len(space.scratch) == share.scratch
            assert budget.live == share.total
        assert budget.live == 0
    assert budget.live_max == share.total


@pytest.mark.fault("Disk and files", "little memory", "within `--memory`, or refused")
@pytest.mark.parametrize("memory", [1 << 20, 64 << 20])
def test_buffers_stay_within_the_budget_and_too_small_a_one_is_refused(tmp_path, memory):
    source = write_source(tmp_path / "src", [Stored("a", ("x",), "f32", bits_of("f32", (900, 1000), 1), order=(1, 0))])
    report = run(copies(source), source, tmp_path / "out", memory=memory)
    assert 0 < report.bytes_live_max <= memory
    assert code_of(lambda: run(copies(source), source, tmp_path / "out2", memory=MEMORY - 1)) == "E508"


# ---- the plan and the source -----------------------------------------------------------------------------------------


@pytest.fixture
def simple(tmp_path):
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (50, 1000), i)) for i, f in enumerate("abc")]
    source = write_source(tmp_path / "src", tensors)
    return source, copies(source), tmp_path / "out"


@pytest.mark.fault("Disk and files", "a plan for another checkpoint", "refused, with both sides")
def test_a_plan_for_another_checkpoint_is_refused_with_both_sides(simple):
    source, plan, out = simple
    other = plan.of(sources=(evolve(plan.sources[0], shape=(1000, 50)), *plan.sources[1:]))
    with pytest.raises(UcplError, match=r"\[50, 1000\].*\[1000, 50\]") as caught:
        run(other, source, out)
    assert caught.value.exit_status == 5
    other = plan.of(sources=(evolve(plan.sources[0], key=("no",)), evolve(plan.sources[1], file="no"), plan.sources[2]))
    with pytest.raises(UcplError) as caught:
        run(other, source, out)
    assert [d.code for d in caught.value.diagnostics] == ["E600", "E600"]
    assert not out.exists()


@pytest.mark.fault("Disk and files", "a plan that was edited to reach outside a tensor", "refused")
def test_a_move_that_leaves_its_tensor_is_refused(simple):
    source, plan, out = simple
    for row in (
        (0, 0, 0, (50_000,), 1, (1,), 0, (1,)),
        (0, 0, 0, (50_000,), 0, (1,), 1, (1,)),
        (0, 0, 0, (2, 3), 0, (3, 1), 0, (2, 1)),
    ):
        bad = plan.of(moves=(moves("copy", [row]),))
        assert code_of(lambda bad=bad: run(bad, source, out)) == "E603"
    assert os.listdir(out.parent) == ["src"]


@pytest.mark.fault(
    "Disk and files",
    "a source that is flipped, truncated, removed or changed during the run",
    "status 3 with file and storage, no target",
)
@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "touch"])
def test_a_damaged_source_is_found_and_the_target_is_not_there(simple, how):
    source, plan, out = simple
    path = source.root / "b"
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[5000] ^= 4
        path.write_bytes(data)
    elif how == "truncate":
        path.write_bytes(data[:-1])
    elif how == "remove":
        path.unlink()
    hit = [False]

    def touch(done, total):
        os.utime(path, ns=(1, 1))
        hit[0] = True

    with pytest.raises(UcplError) as caught:
        run(plan, source, out, progress=touch if how == "touch" else None)
    (found,) = caught.value.diagnostics
    assert caught.value.exit_status == 3
    assert found.code == {"flip": "E612", "truncate": "E610", "remove": "E610", "touch": "E611"}[how]
    assert "b" in found.message.split()[0]
    if how == "flip":
        assert "storage 1" in found.message and "b (b)" in found.message
    assert not out.exists()


def test_the_source_is_untouched(simple):
    source, plan, out = simple
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.root.iterdir()}
    run(plan, source, out)
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.root.iterdir()} == before


# ---- the target ------------------------------------------------------------------------------------------------------


def tree(top: Path):
    return {p.relative_to(top).as_posix(): p.read_bytes() for p in sorted(top.rglob("*")) if p.is_file()}


@pytest.mark.fault("Disk and files", "an existing target", "kept, or replaced completely")
def test_an_existing_target_is_kept_or_replaced_completely(simple):
    source, plan, out = simple
    out.mkdir()
    (out / "mine").write_text("precious")
    assert code_of(lambda: run(plan, source, out)) == "E500"
    assert tree(out) == {"mine": b"precious"}
    run(plan, source, out, force=True)
    assert "mine" not in tree(out) and "to_a.pt" in tree(out)
    assert sorted(os.listdir(out.parent)) == ["out", "src"]


def test_force_without_exchange_moves_the_old_one_aside(simple, monkeypatch):
    source, plan, out = simple
    out.mkdir()
    monkeypatch.setattr("ucpl.runtime.linux.exchange", lambda *_: False)
    run(plan, source, out, force=True)
    assert "to_a.pt" in tree(out) and sorted(os.listdir(out.parent)) == ["out", "src"]


def test_equal_runs_write_equal_bytes(simple):
    source, plan, out = simple
    run(plan, source, out)
    run(plan, source, out.with_name("again"), workers=1)
    assert tree(out) == tree(out.with_name("again"))


def test_the_folder_describes_itself(simple):
    source, plan, out = simple
    run(plan, source, out)
    assert (out / "latest").read_text() == "step1"
    assert (out / "ucpl/layout.ucpl").read_text() == plan.layout_text
    manifest = read_manifest(out)
    assert manifest is not None
    for name, entry in manifest.files.items():
        data = (out / name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (entry.size, entry.crc)
    assert set(manifest.files) | {"ucpl/manifest.json"} == set(tree(out))


def test_a_target_of_one_file(simple):
    source, plan, out = simple
    one = plan.of(targets=tuple(evolve(t, file="model.pt") for t in plan.targets))
    out = out.with_suffix(".pt")
    run(one, source, out, framework=Torch(texts={}))
    assert set(torch.load(out)) == {"a", "b", "c"}
    assert code_of(lambda: run(one, source, out, framework=Torch(texts={}))) == "E500"
    run(one, source, out, framework=Torch(texts={}), force=True)
    assert sorted(os.listdir(out.parent)) == ["out.pt", "src"]


@pytest.mark.fault("Disk and files", "a target inside the source", "refused")
def test_a_target_within_the_source_and_a_missing_folder_are_refused(simple):
    source, plan, out = simple
    for bad in (source.root, source.root / "x", source.root.parent, out / "no" / "where"):
        assert code_of(lambda bad=bad: run(plan, source, bad, force=True)) == "E507"


@pytest.mark.fault("Hostile input", "unknown classes on their way into a target", "refused unless allowed by name")
def test_unknown_globals_are_refused_unless_allowed(simple):
    source, plan, out = simple
    framework = Torch(unsafe=("evil.System",))
    assert code_of(lambda: run(plan, source, out, framework=framework)) == "E504"
    run(plan, source, out, framework=framework, allow_globals=["evil.System"])


@pytest.mark.fault("Disk and files", "a second run into one target", "refused")
def test_a_second_run_into_the_same_target_is_refused(simple):
    source, plan, out = simple
    inside, go = threading.Event(), threading.Event()

    def wait(done, total):
        inside.set()
        go.wait(20)

    first = threading.Thread(target=lambda: run(plan, source, out, progress=wait))
    first.start()
    try:
        assert inside.wait(20)
        assert code_of(lambda: run(plan, source, out)) == "E502"
    finally:
        go.set()
        first.join()
    assert "to_a.pt" in tree(out)


@pytest.mark.fault("Disk and files", "too little free space at the start", "an error before anything is written")
def test_too_little_room_is_reported_before_anything_is_written(simple, monkeypatch):
    source, plan, out = simple
    real = os.statvfs(out.parent)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real[:3], 1, 1, *real[5:10])))
    assert code_of(lambda: run(plan, source, out)) == "E501"
    assert os.listdir(out.parent) == ["src"]


@pytest.mark.fault(
    "Disk and files", "the disk returns other bytes than were written", "found by reading back, no target"
)
def test_bytes_that_the_disk_changed_are_found_by_reading_back(simple, monkeypatch):
    source, plan, out = simple
    from ucpl.runtime import targets

    real, left = targets.TargetFiles.sync, [0]

    def sync(self, indexes, *, drop=False):
        real(self, indexes, drop=drop)
        if left:  # the first: all was moved
            file = self.path(left.pop())
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                byte = opened.read(1)[0]
                opened.seek(-1, os.SEEK_CUR)
                opened.write(bytes([byte ^ 1]))

    monkeypatch.setattr(targets.TargetFiles, "sync", sync)
    assert code_of(lambda: run(plan, source, out)) == "E505"
    assert os.listdir(out.parent) == ["src"]


def test_an_alias_shares_its_owner_s_bytes_and_must_be_equal(tmp_path):
    a = bits_of("f32", (30, 40), 1)
    for b, code in ((a.copy(), None), (bits_of("f32", (30, 40), 2), "E613")):
        top = tmp_path / str(code)
        source, sources, target, n = two(top, a, b)
        tied = [target[0], evolve(target[0], key=("tied",), shares=0)]
        plan = plan_of(sources, tied, moves("copy", [whole(n), whole(n, 1, 1)]))
        if code:
            assert code_of(lambda plan=plan, source=source, top=top: run(plan, source, top / "out")) == code
            continue
        report = run(plan, source, top / "out")
        found = torch.load(top / "out" / "d.pt")
        assert found["x"].data_ptr() == found["tied"].data_ptr()
        assert found["x"].numpy().tobytes() == a.tobytes()
        # One is copied, one is compared; nothing goes to a place that has no bytes of its own.
        assert report.bytes_needed == report.bytes_read == a.nbytes + b.nbytes


def test_carried_tensors_go_over_as_they_are(tmp_path):
    extra = Stored("c", ("extra",), "i64", bits_of("i64", (6, 7), 3), order=(1, 0))
    source = write_source(tmp_path / "src", [Stored("a", ("x",), "f32", bits_of("f32", (9,), 1)), extra])
    extent = source.extents.pop(("c", ("extra",)))
    run(copies(source), source, tmp_path / "out", framework=Torch(carried=(extent,)))
    assert read_target(tmp_path / "out", "to_a.pt")["carried extra"].tobytes() == extra.bits.tobytes()


def test_empty_tensors_and_numbers(tmp_path):
    tensors = [Stored("a", ("e",), "f32", bits_of("f32", (0, 4), 1)), Stored("a", ("n",), "i64", bits_of("i64", (), 2))]
    source = write_source(tmp_path / "src", tensors)
    run(copies(source), source, tmp_path / "out")
    found = torch.load(tmp_path / "out" / "to_a.pt")
    assert found["e"].shape == (0, 4) and found["n"].item() == int(tensors[1].bits.view("<i8"))
