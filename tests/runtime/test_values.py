"""Laws of changed values, compared with exact arithmetic and torch.

Every value of the small types is tested.
"""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.test_execute import code_of, run, two, whole
from tests.runtime.world import Stored, bits_of, moves, plan_of, read_target, stored, write_source
from ucpl.extents import DTYPES, StoredTensor
from ucpl.runtime.rows import Rule
from ucpl.runtime.values import Conversion, _widens, decode, encode, mean, value_text
from ucpl.tables.operations import Merge, Reduce

FLOATS = {  # bits of the exponent, bits of the mantissa that are stored, the largest finite value
    "f64": (11, 52, float(np.finfo(np.float64).max)),
    "f32": (8, 23, float(np.finfo(np.float32).max)),
    "f16": (5, 10, 65504.0),
    "bf16": (8, 7, 3.3895313892515355e38),
    "f8_e4m3fn": (4, 3, 448.0),
    "f8_e5m2": (5, 2, 57344.0),
}
INTS = {
    name: (0 if name[0] == "u" else -(1 << int(name[1:]) - 1), (1 << int(name[1:]) - (name[0] == "i")) - 1)
    for name in ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
}
MERGE = Merge("", ())
COPIES = Rule(MERGE)


def holds(dtype: str, value: Fraction) -> bool:
    """Check that a dtype can represent a number, by its definition.

    The check uses integers only, since it runs a million times.
    """
    above, below = value.numerator, value.denominator
    if dtype == "bool":
        return below == 1 and above in (0, 1)
    if dtype in INTS:
        low, high = INTS[dtype]
        return below == 1 and low <= above <= high
    exponent, mantissa, most = FLOATS[dtype]
    above = abs(above)
    if above > int(most) * below:  # the largest value of each is a whole number
        return False
    if above == 0:
        return True
    least = 2 - (1 << exponent - 1)  # exponent of the smallest normal number
    if dtype == "f8_e4m3fn":
        least = -6
    e = above.bit_length() - below.bit_length()
    if above << max(0, -e) < below << max(0, e):
        e -= 1
    ulp = max(e, least) - mantissa  # as a power of two; the number must be an integer multiple of it
    return (above << max(0, -ulp)) % (below << max(0, ulp)) == 0


def extremes(dtype: str) -> list[Fraction]:
    """Values that other dtypes may lack: the largest, finest and smallest."""
    if dtype == "bool":
        return [Fraction(0), Fraction(1)]
    if dtype in INTS:
        low, high = INTS[dtype]
        return [Fraction(v) for v in (low, low + 1, -1, 0, 1, high - 1, high) if low <= v <= high]
    exponent, mantissa, most = FLOATS[dtype]
    least = -6 if dtype == "f8_e4m3fn" else 2 - (1 << exponent - 1)
    ulp = Fraction(1, 1 << mantissa)
    return [Fraction(v) for v in (0, most, -most, 1 + ulp, Fraction(2) ** least, Fraction(2) ** least * ulp)]


NUMBERS = [*FLOATS, *INTS, "bool"]


@pytest.mark.parametrize("target", NUMBERS)
def test_widening_is_what_keeps_every_value(target):
    """From each dtype."""
    for source in NUMBERS:
        keeps = all(holds(target, value) for value in extremes(source))
        assert not (_widens(source, target) and not keeps), (source, "called widening, and values are lost")
        special = source in FLOATS and target not in FLOATS  # NaN and infinities have no place
        if not keeps or special:
            assert not _widens(source, target), source
        elif source in FLOATS and target in FLOATS and target != "f8_e4m3fn":
            assert _widens(source, target), source


@cache
def numbers_of(dtype: str) -> tuple[np.ndarray, list[Fraction | None]]:
    """Bytes of many values of a dtype, and their numbers.

    A small dtype gives all of its values. None: no number.
    """
    size = DTYPES[dtype].itemsize
    if dtype == "bool":
        raw = np.array([0, 1], np.uint8)
    elif size <= 2:
        raw = np.arange(1 << 8 * size, dtype=f"<u{size}").view(np.uint8)
    else:
        raw = bits_of(dtype, (500,), 3).view(np.uint8).reshape(-1)
        edge = extremes(dtype)
        kind = {"f": np.float64 if size == 8 else np.float32}.get(dtype[0], f"<{dtype[0]}{size}")
        raw = np.concatenate(
            [raw, np.array([int(v) if dtype in INTS else float(v) for v in edge], kind).view(np.uint8)]
        )
    found: list[Fraction | None] = []
    for v in decode(raw, dtype):
        found.append(Fraction(v.item()) if np.isfinite(v) else None)
    return raw, found


@pytest.mark.fault(
    "Disk and files",
    "a value that the target's dtype cannot hold, for every pair of dtypes",
    "refused exactly if exact arithmetic shows a loss",
)
@pytest.mark.parametrize("target", NUMBERS)
def test_what_a_cast_changes_is_found_and_nothing_else(target):
    """Each value of each dtype alone.

    `inexact_at` reports exactly the values that the target lacks.
    """
    for source in NUMBERS:
        assert_what_is_lost_is_found(source, target)


def assert_what_is_lost_is_found(source: str, target: str) -> None:
    raw, values = numbers_of(source)
    size = DTYPES[source].itemsize
    step = max(1, len(values) // 150)
    conversion = Conversion(source, target, COPIES)
    if not conversion.check_exact:
        assert all(v is None or holds(target, v) for v in values), source
        return
    for i in sorted({*range(0, len(values), step), *range(max(0, len(values) - 12), len(values))}):  # the extremes, too
        one, value = raw[i * size : (i + 1) * size], values[i]
        if value is None:
            continue
        lost = conversion.inexact_at(one, conversion.convert(one)) is not None
        assert lost == (not holds(target, value)), (source, value, target)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f8_e4m3fn", "f8_e5m2"])
def test_every_value_of_a_small_float_is_torch_s(dtype):
    size = DTYPES[dtype].itemsize
    raw = np.arange(1 << 8 * size, dtype=f"<u{size}")
    with np.errstate(invalid="ignore"):  # a signalling NaN
        ours = decode(raw.view(np.uint8), dtype).astype(np.float64)
    kind = getattr(torch, DTYPES[dtype].torch)
    theirs = torch.from_numpy(raw.view(f"<i{size}") if size > 1 else raw).view(kind).to(torch.float64).numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    again = encode(decode(raw.view(np.uint8), dtype), dtype).view(raw.dtype)
    nan = np.isnan(ours)
    assert np.array_equal(again[~nan], raw[~nan])
    assert np.isnan(decode(again.view(np.uint8), dtype)[nan]).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f8_e5m2", "f8_e4m3fn"])
@given(st.floats(width=64, allow_nan=False, allow_infinity=False))
def test_fp64_is_rounded_once(dtype, value):
    """Not rounded to fp32 first: no neighbour is nearer.

    Of two equally near neighbours the result is the even one.
    """
    (made,) = decode(encode(np.array([value]), dtype), dtype).astype(np.float64).tolist()
    if not np.isfinite(made):
        assert abs(value) > FLOATS[dtype][2] or (dtype == "f8_e4m3fn" and abs(value) > 447)
        return
    size = DTYPES[dtype].itemsize
    bits = int(encode(np.array([made]), dtype).view(f"<u{size}")[0])
    exact = Fraction(value)
    for other in (bits - 1, bits + 1):
        if not 0 <= other < 1 << 8 * size:
            continue
        (near,) = decode(np.array([other], f"<u{size}").view(np.uint8), dtype).astype(np.float64).tolist()
        if not np.isfinite(near) or ((near < 0) != (made < 0) and near != 0 and made != 0):
            continue
        here, there = abs(Fraction(made) - exact), abs(Fraction(near) - exact)
        assert here < there or (here == there and bits % 2 == 0) or made == near


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 7), ("f16", 10), ("f8_e5m2", 2), ("f8_e4m3fn", 3)])
def test_a_hair_above_the_middle_is_rounded_up(dtype, bits):
    """1 + half a step + 2 ** -40 is rounded up.

    fp32 would lose the last term, and the tie would go to even, down.
    """
    (made,) = decode(encode(np.array([1 + 2.0 ** -(bits + 1) + 2.0**-40]), dtype), dtype).astype(np.float64).tolist()
    assert made == 1 + 2.0**-bits
    (made,) = decode(encode(np.array([1 + 2.0 ** -(bits + 1)]), dtype), dtype).astype(np.float64).tolist()
    assert made == 1


def test_nans_keep_their_sign_on_the_way_to_bf16():
    raw = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000, 0x7F800000], np.uint32)
    made = encode(raw.view(np.float32), "bf16").view("<u2")
    assert [hex(v) for v in made] == ["0x7fc0", "0xffc0", "0x7fff", "0xffc0", "0x7f80"]


def test_what_has_no_cast_is_not_possible():
    for a, b in (("c64", "f32"), ("f32", "c64"), ("c128", "i64")):
        assert not Conversion(a, b, COPIES).is_possible
    assert Conversion("c64", "c128", COPIES).is_possible and Conversion("c64", "c64", COPIES).is_possible
    assert not Conversion("c64", "c128", Rule(MERGE, source_value=(2.0, 0.0))).is_possible
    assert _widens("c64", "c128") and not _widens("c128", "c64")
    assert not Conversion("f32", "bf16", COPIES).is_identity and Conversion("f32", "f32", COPIES).is_identity
    assert not Conversion("f32", "f32", Rule(MERGE, target_value=(1.0, 1.0))).is_identity


def test_rounding_that_was_asked_for_and_means_are_not_held_to_exactness():
    assert Conversion("f32", "bf16", COPIES).check_exact
    assert not Conversion("f32", "bf16", Rule(MERGE, lossy=True)).check_exact
    assert not Conversion("f32", "bf16", Rule(Reduce("", (), "mean"))).check_exact
    assert Conversion("f32", "f32", Rule(MERGE, target_value=(2.0, 0.0))).check_exact


def test_a_value_of_another_scale_must_come_back():
    """1/3 of 1 does not, 1/2 of 1 does."""
    third, half = (Conversion("f32", "f32", Rule(MERGE, target_value=(a, 0.0))) for a in (1 / 3, 0.5))
    one = np.array([2.0, 1.0], np.float32).view(np.uint8)
    assert half.inexact_at(one, half.convert(one)) is None
    assert third.inexact_at(one, third.convert(one)) is not None
    assert half.convert(one).view(np.float32).tolist() == [1.0, 0.5]


def test_means_are_of_what_there_is():
    assert mean(np.array([6.0, 5.0, 0.0]), np.array([3, 1, 0])).tolist() == [2.0, 5.0, 0.0]


def test_values_are_shown_with_their_bits():
    assert value_text(np.float32(0.5).tobytes(), "f32") == "0.5 (bits 3f000000)"
    assert value_text(b"\x01", "bool") == "True (bits 01)" and value_text(b"\x02", "bool") == "2 (bits 02)"
    assert value_text(b"\x80\x3f", "bf16") == "1.0 (bits 3f80)"


# ---- through a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "bits"),
    [("bf16", "f16", 0x7F00), ("u64", "i64", 1 << 63), ("f16", "bf16", 0x3C01), ("i64", "f64", (1 << 53) + 1),
     ("u32", "i32", 1 << 31), ("i32", "u32", (1 << 32) - 1), ("f32", "f16", 0x00000001)],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused(tmp_path, source, target, bits):
    cell = f"<u{DTYPES[source].itemsize}"
    values = np.zeros((4, 5), cell)
    world, sources, there, n = two(tmp_path, values, values, source, to=target)
    run(plan_of(sources, there, moves("copy", [whole(n)])), world, tmp_path / "out")
    values[2, 3] = bits
    world, sources, there, n = two(tmp_path / "bad", values, values, source, to=target)
    assert code_of(lambda: run(plan_of(sources, there, moves("copy", [whole(n)])), world, tmp_path / "no")) == "E605"


def test_complex_numbers_have_no_mean(tmp_path):
    bits = bits_of("c64", (30,), 1)
    world, sources, there, n = two(tmp_path, bits, bits, "c64")
    plan = plan_of(sources, there, moves("mean", [whole(n), whole(n, 1)]))
    assert code_of(lambda: run(plan, world, tmp_path / "out")) == "E605"
    run(plan_of(sources, there, moves("copy", [whole(n)])), world, tmp_path / "copied")
    assert read_target(tmp_path / "copied", "d.pt")["x"].tobytes() == bits.tobytes()


def test_copies_next_to_a_mean_in_one_tile_stay(tmp_path):
    """Thirds of a tile: a copy, a mean, a copy.

    In a second tensor a mean has holes.
    """
    a, b = (np.arange(i, 300 + i, dtype=np.float32) for i in (0, 10))
    world, sources, _, _ = two(tmp_path, a.view("<u4"), b.view("<u4"))
    target = [StoredTensor("d.pt", ("x",), "f32", (300,), "weight", "x")]
    copied = [
        (0, 0, 0, (100,), 0, (1,), 0, (1,)),
        (0, 1, 0, (50,), 200, (1,), 200, (2,)),
        (0, 0, 0, (50,), 200, (1,), 201, (2,)),
    ]
    means = [(0, s, 0, (100,), 100, (1,), 100, (1,)) for s in (0, 1)]
    run(plan_of(sources, target, moves("copy", copied), moves("mean", means)), world, tmp_path / "out")
    found = read_target(tmp_path / "out", "d.pt")["x"].view(np.float32)
    wanted = np.concatenate([a[:100], (a[100:200] + b[100:200]) / 2, np.stack([b[200:250], a[200:250]], 1).reshape(-1)])
    assert np.array_equal(found, wanted)


def test_copies_between_the_elements_of_a_mean_stay(tmp_path):
    """Every other element of a block is a mean, the rest copies."""
    a, b = (np.arange(i, 300 + i, dtype=np.float32) for i in (0, 10))
    world, sources, _, _ = two(tmp_path, a.view("<u4"), b.view("<u4"))
    target = [StoredTensor("d.pt", ("x",), "f32", (300,), "weight", "x")]
    copied = moves("copy", [(0, 0, 0, (150,), 0, (1,), 0, (2,))])
    means = moves("mean", [(0, s, 0, (150,), 0, (1,), 1, (2,)) for s in (0, 1)])
    run(plan_of(sources, target, copied, means), world, tmp_path / "out")
    found = read_target(tmp_path / "out", "d.pt")["x"].view(np.float32)
    assert np.array_equal(found[::2], a[:150]) and np.array_equal(found[1::2], (a[:150] + b[:150]) / 2)


@pytest.mark.parametrize(("offset", "same"), [(0, True), (8, False)])
def test_views_of_one_storage_are_one_only_at_one_offset(tmp_path, offset, same):
    """Two names over one storage.

    The second name is a copy of the first, or begins elsewhere and differs.
    """
    from attrs import evolve

    bits = bits_of("f32", (100,), 1)
    world = write_source(tmp_path / "src", [Stored("a", ("x",), "f32", bits)])
    (one,) = world.extents.values()
    first = evolve(one, shape=(64,))
    second = evolve(one, shape=(64,), key=("y",), offset=offset)
    world.extents.clear()
    world.extents.update({("a", ("x",)): first, ("a", ("y",)): second})
    target = [StoredTensor("d.pt", ("x",), "f32", (64,), "weight", "x")]
    plan = plan_of([stored(first), stored(second)], target, moves("copy", [whole(64)]), moves("check", [whole(64, 1)]))
    if same:
        report = run(plan, world, tmp_path / "out")
        assert report.bytes_read == 256
    else:
        assert code_of(lambda: run(plan, world, tmp_path / "out")) == "E613"


def test_a_check_of_another_place_is_no_echo(tmp_path):
    """Two names of one tensor with separate uses of its halves.

    The copy takes the first half. The check compares the second half with it.
    """
    from attrs import evolve

    bits = bits_of("f32", (100,), 1)
    world = write_source(tmp_path / "src", [Stored("a", ("x",), "f32", bits)])
    (one,) = world.extents.values()
    world.extents["a", ("y",)] = evolve(one, key=("y",))
    target = [StoredTensor("d.pt", ("x",), "f32", (50,), "weight", "x")]
    sources = [stored(e) for e in world.extents.values()]
    other = moves("check", [(0, 1, 0, (50,), 50, (1,), 0, (1,))])
    assert (
        code_of(lambda: run(plan_of(sources, target, moves("copy", [whole(50)]), other), world, tmp_path / "o"))
        == "E613"
    )


def test_a_check_against_a_second_name_is_a_check_of_its_owner(tmp_path):
    """The target's tied tensor has no bytes of its own.

    A check against this tensor compares with its owner's bytes.
    """
    from attrs import evolve

    a = bits_of("f32", (30,), 1)
    for b, code in ((a.copy(), None), (bits_of("f32", (30,), 2), "E613")):
        top = tmp_path / str(code)
        world, sources, target, n = two(top, a, b)
        tied = [target[0], evolve(target[0], key=("tied",), shares=0)]
        plan = plan_of(sources, tied, moves("copy", [whole(n), whole(n, 0, 1)]), moves("check", [whole(n, 1, 1)]))
        if code is None:
            run(plan, world, top / "out")
        else:
            assert code_of(lambda plan=plan, world=world, top=top: run(plan, world, top / "out")) == code
