"""Placements computed by hand, position by position.

The oracle checks any other text.
"""

from __future__ import annotations

import pytest

from tests.laws.agreement import cells_of
from tests.laws.test_round_trip import shipped
from ucpl.errors import UcplError
from ucpl.language import nodes, parse, parse_call
from ucpl.layout import load, resolve
from ucpl.placement import Placement, locate


def located(body: str, call: str, model: str = "dim a = 4, b = 3\n  w : a b\n  v : a\n  u : b") -> Placement:
    text = f"ucpl 1\nmodel m {{\n  {model}\n  dtype f32\n  state s : f32\n}}\n{body}"
    return locate(resolve(load(("pencil.ucpl", text)), parse_call(call)))


def lies(placement: Placement, state: str = "weight") -> dict[str, str]:
    """`FILE KEY` -> its positions: `w12` is w[1, 2], `.` is padding."""
    out = {}
    for part in placement.parts:
        for number, home in enumerate(part.homes if part.state == state else ()):
            cells = cells_of(placement, part, number)
            texts = ["." if c is None else c[0] + "".join(map(str, c[1])) for c in cells]
            out[f"{home.file} {'/'.join(map(str, home.key))}".strip()] = " ".join(texts)
    return out


def test_the_first_axis_of_a_mesh_runs_slowest_and_ranks_count_through_it() -> None:
    body = (
        'layout x(pp, tp) of m {\n  mesh pp tp\n  file weights = torch "{rank}"\n  v = a@pp@tp as "r{pp}{tp}"\n'
        "  w = none\n  u = none\n}\n"
    )
    wanted = {"0 r00": "v0", "1 r01": "v1", "2 r10": "v2", "3 r11": "v3"}
    assert lies(located(body, "x(pp = 2, tp = 2)")) == wanted


def flat(pattern: str, order: str = "", buckets: str = "", extra: str = "") -> str:
    return (
        'layout x(dp) of m {\n  mesh dp\n  file weights = torch "w"\n  file optim = torch "{dp}"\n'
        f'  w = a b as "w"\n  v = a as "v"\n  u = b as "u"\n{extra}'
        f'  group all = w, v, u{order}\n  state s of all = {pattern} in optim as "{{bucket}}"{buckets}\n}}\n'
    )


W, V, U = (
    " ".join(f"w{i}{j}" for i in range(4) for j in range(3)),
    " ".join(f"v{i}" for i in range(4)),
    " ".join(f"u{i}" for i in range(3)),
)


@pytest.mark.parametrize(
    ("body", "ways", "wanted"),
    [
        (flat("flat(each)"), 1, {"0 0": f"{W} {V} {U}"}),
        (flat("flat(each)", " order reversed"), 1, {"0 0": f"{U} {V} {W}"}),
        (flat("flat(each)", " order dealt 2"), 1, {"0 0": f"{W} {U} {V}"}),
        (flat("flat(each)", " order dealt 3"), 1, {"0 0": f"{W} {V} {U}"}),
        (flat("flat(pad(each, 4))"), 1, {"0 0": f"{W} {V} {U} ."}),
        (flat("trim(flat(pad(each, 5)))"), 1, {"0 0": f"{W} . . . {V} . {U}"}),
        (
            flat("pad(flat(each), 2)@dp"),
            2,
            {"0 0": " ".join(W.split()[:10]), "1 0": " ".join([*W.split()[10:], V, U, "."])},
        ),
        (
            flat("flat(pad(each, 2)@dp)"),
            2,
            {"0 0": " ".join([*W.split()[:6], "v0 v1 u0 u1"]), "1 0": " ".join([*W.split()[6:], "v2 v3 u2 ."])},
        ),
        # A bucket closes as soon as it holds as many as it may: 12 do not wait for the next tensor.
        (flat("flat(each)", buckets=" buckets 12"), 1, {"0 0": W, "0 1": f"{V} {U}"}),
        (flat("flat(each)", buckets=" buckets 13"), 1, {"0 0": f"{W} {V}", "0 1": U}),
        (flat("flat(each)", buckets=" buckets 16"), 1, {"0 0": f"{W} {V}", "0 1": U}),
        (flat("flat(each)", buckets=" buckets 17"), 1, {"0 0": f"{W} {V} {U}"}),
        # A second home of a parameter is no second member.
        (flat("flat(each)", extra='  w = b a as "again"\n'), 1, {"0 0": f"{W} {V} {U}"}),
    ],
)
def test_a_flat_holds_its_members_end_to_end(body: str, ways: int, wanted: dict[str, str]) -> None:
    assert lies(located(body, f"x(dp = {ways})"), "s") == wanted


def test_a_tensor_is_in_a_flat_once_where_its_homes_share_a_part() -> None:
    """The second home is no member, on either rank.

    The first home has half of v on each rank, the second all of it.
    """
    body = (
        'layout x(dp) of m {\n  mesh dp\n  file weights = torch "w{dp}"\n  file optim = torch "{dp}"\n'
        '  v = a@dp as "v"\n  v = a as "all"\n  w = none\n  u = none\n'
        '  group all = v\n  state s of all = flat(each) in optim as "s"\n}\n'
    )
    assert lies(located(body, "x(dp = 2)"), "s") == {"0 s": "v0 v1", "1 s": "v2 v3"}


@pytest.mark.parametrize("other", ["a[..4]", "a[0..]", "a[0, 1, 2, 3]", "a[not 0..0]"])
def test_entries_of_the_same_values_are_one_loop_body_however_they_are_written(other: str) -> None:
    """Layer by layer, as for `a` and `a`.

    Entries of other values are a loop of their own.
    """
    body = (
        'layout x() of m {{\n  file weights = torch "w"\n  file optim = torch "o"\n'
        '  w[a] = b as "w{{a}}"\n  v[{}] = () as "v{{a}}"\n  u = none\n'
        '  group all = w, v\n  state s of all = flat(each) in optim as "s"\n}}\n'
    )
    each = [f"w{i}0 w{i}1 w{i}2" for i in range(4)]
    assert lies(located(body.format(other), "x()"), "s") == {"o s": " ".join(f"{w} v{i}" for i, w in enumerate(each))}
    assert lies(located(body.format("a[..3]"), "x()"), "s") == {"o s": f"{' '.join(each)} v0 v1 v2"}


def test_members_that_are_cut_over_an_axis_are_cut_over_it_once_more() -> None:
    """Each rank has its own flat and keeps another window of it.

    The flats of both ranks have one length.
    """
    body = (
        'layout x(dp) of m {\n  mesh dp\n  file weights = torch "w"\n  file optim = torch "{dp}"\n'
        '  w = a@dp b as "w{dp}"\n  v = a@dp as "v{dp}"\n  group all = w, v\n'
        '  state s of all = flat(each)@dp in optim as "s"\n  u = none\n}\n'
    )
    assert lies(located(body, "x(dp = 2)"), "s") == {"0 s": "w00 w01 w02 w10", "1 s": "w31 w32 v2 v3"}


def test_ranks_whose_members_lie_alike_hold_their_own_elements_and_others_are_not_taken_for_alike() -> None:
    """Flats of one length with the same cuts.

    The first two ranks hold rows of w. The third rank stores its part transposed.
    """
    body = (
        'layout x(tp, dp) of m {\n  mesh tp dp\n  file weights = torch "w{tp}"\n  file optim = torch "{tp}-{dp}"\n'
        '  w = a[..2] b as "w" at tp[0]\n  w = a[2..4] b as "w" at tp[1]\n  w = b a[4..] as "w" at tp[2]\n'
        '  group all = w\n  state s of all = flat(each)@dp in optim as "s"\n}\n'
    )
    found = lies(located(body, "x(tp = 3, dp = 2)", "dim a = 6, b = 2\n  w : a b"), "s")
    assert found == {
        "0-0 s": "w00 w01", "0-1 s": "w10 w11",
        "1-0 s": "w20 w21", "1-1 s": "w30 w31",
        "2-0 s": "w40 w50", "2-1 s": "w41 w51",
    }  # fmt: skip


def test_padding_is_counted_at_its_place() -> None:
    padding = {
        (home.file, part.state): home.padding
        for part in located(flat("pad(flat(pad(each, 5)), 8)@dp"), "x(dp = 2)").parts
        for home in part.homes
    }
    # 15 + 5 + 5 elements to 32: 16 on each. w 12 of 15, then v's first; v's other 3 of 4, u's 3 of 5.
    assert padding == {("w", "weight"): 0, ("0", "s"): 3, ("1", "s"): 16 - 3 - 3}


def test_parts_of_a_dim_are_at_the_start_of_its_range() -> None:
    body = (
        'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}"\n  w = (a[2..]@tp + a[..2]) b as "w"\n'
        '  v = a[1..] as "rest"\n  v = a[..1] as "first"\n  u = none\n}\n'
    )
    found = lies(located(body, "x(tp = 2)"))
    assert found["0 w"] == "w20 w21 w22 w00 w01 w02 w10 w11 w12"
    assert found["1 w"] == "w30 w31 w32 w00 w01 w02 w10 w11 w12"
    assert found["0 rest"] == "v1 v2 v3" and found["0 first"] == "v0"


def test_digits_of_a_dim_may_be_in_any_order() -> None:
    model = "dim i = 2, j = 3, k = 2, a = 12\n  index a = (i j k)\n  v : a"
    tail = '  file weights = torch "f"\n  v = {} as "v"\n}}\n'
    found = {
        pattern: lies(located("layout x() of m {\n" + tail.format(pattern), "x()", model))["f v"]
        for pattern in ("(i j k)", "(k i j)", "(i k j)", "(j k i)", "(k j i)", "(j i k)")
    }
    number = {(i, j, k): i * 6 + j * 2 + k for i in range(2) for j in range(3) for k in range(2)}
    assert found["(i j k)"] == " ".join(f"v{n}" for n in range(12))
    sides = {"i": 2, "j": 3, "k": 2}
    for pattern, cells in found.items():
        names = pattern.strip("()").split()
        want = []
        for x in range(sides[names[0]]):
            for y in range(sides[names[1]]):
                for z in range(sides[names[2]]):
                    at = dict(zip(names, (x, y, z), strict=True))
                    want.append(f"v{number[at['i'], at['j'], at['k']]}")
        assert cells == " ".join(want), pattern


def test_a_digit_that_is_cut_and_innermost_begins_where_its_rank_does() -> None:
    """Rank 1 has the indices 3, 4 and 5.

    The dim is `a = (i j)`, stored `(j i)` and cut over i.
    """
    body = 'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}"\n  v = (j i@tp) as "v"\n}\n'
    found = lies(located(body, "x(tp = 2)", "dim i = 2, j = 3, a = 6\n  index a = (i j)\n  v : a"))
    assert found == {"0 v": "v0 v1 v2", "1 v": "v3 v4 v5"}


def test_a_number_that_a_template_writes_is_a_position_and_a_tensor_that_is_called_a_number_is_not() -> None:
    (model,) = parse('ucpl 1\nmodel m {\n  dtype f32\n  "0" : 3\n  "1.w" : 2\n}\n', "m.ucpl").statements
    assert isinstance(model, nodes.Model)
    placement = locate(resolve(load(), parse_call("plain()"), model=model))
    keys = {home.key for part in placement.parts for home in part.homes}
    assert keys == {("params", "0", "weight"), ("params", "1.w", "weight")}
    flats = {home.key[-1] for part in shipped("zero1(dp = 2)").parts if part.state == "fp32" for home in part.homes}
    assert flats == {0, 1}


def test_every_other_layer_has_the_tensor() -> None:
    """It has positions of its own: layer 3 is its second."""
    body = 'layout x() of m {\n  file weights = torch "f"\n  w[a] = b as "w.{a}"\n}\n'
    assert lies(located(body, "x()", "dim a = 6, b = 2\n  w : a[1.. by 2] b")) == {
        "f w.1": "w00 w01", "f w.3": "w10 w11", "f w.5": "w20 w21"
    }  # fmt: skip


# ---- input of a store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "starts", "numel"),
    [
        ("zero1(dp = 2)", (0, 11), 12),
        ("zero1(dp = 2, alignment = 4)", (0, 12), 13),  # nothing follows the last tensor
        ("zero3(dp = 2)", (0, 12), 13),  # 11 on two ranks are 12
        ("zero3(dp = 3)", (0, 12), 13),
        ("zero3(dp = 4)", (0, 12), 13),
        ("zero3(dp = 5)", (0, 15), 16),
    ],
)
def test_where_members_of_a_flat_begin(call: str, starts: tuple[int, ...], numel: int) -> None:
    """The group `rest` holds 11 elements and one."""
    decay, rest = shipped(call).flats
    assert (rest.members, rest.starts, rest.numel) == ((("blocks.0.w", (11,)), ("scale", ())), starts, numel)
    assert (decay.members, decay.starts, decay.numel) == ((("wte", (7, 5)),), (0,), 35)
    assert (decay.bucket, rest.bucket, decay.group, rest.group) == (0, 1, "decay", "rest")
    assert decay.cut == rest.cut == "dp"


def test_a_stated_order_of_other_sizes_is_refused() -> None:
    from tests.laws.test_locate import GPT, LAYOUTS

    layout = resolve(
        load(("deepspeed.ucpl", (LAYOUTS / "deepspeed.ucpl").read_text())),
        parse_call("zero_stated(dp = 2)"),
        define_sizes=dict(GPT),
    )
    for shape in ((4,), (6,)):
        with pytest.raises(UcplError) as caught:
            locate(layout, stated=lambda file, key, here, shape=shape: [[("ln_f.weight", shape)]])  # type: ignore[misc]
        assert caught.value.diagnostics[0].code == "E212" and "`ln_f.weight`" in caught.value.diagnostics[0].message
