"""The joins, copies and refusals of `build`, seen from the plan alone."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from tests.laws import moves as mv
from tests.laws.test_round_trip import shipped
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.placement import locate
from ucpl.planning import Plan, order
from ucpl.testing import Example, assert_round_trip, lay_out, numbered, run
from ucpl.verification.proof.coverage import prove

MODEL = "ucpl 1\nmodel m {\n  dim a = 4, b = 6\n  dtype f32\n  w : a b\n  v : a\n}\n"


def layout(name: str, *lines: str) -> str:
    """A layout over tp; by default, `v` is stored once a rank."""
    said = [*lines, *([] if any(x.startswith("v ") for x in lines) else ['v = a as "v"'])]
    return f'layout {name}(tp) of m {{\n  mesh tp\n  file weights = torch "{{tp}}.pt"\n  ' + "\n  ".join(said) + "\n}\n"


def planned(source: str, target: str, ways: tuple[int, int] = (2, 2)) -> Plan:
    a, b = (locate(Example(t, c).layout()) for t, c in both(source, target, ways))
    graph = build(a, b)
    prove(graph)
    return order(graph)


def both(source: str, target: str, ways: tuple[int, int]) -> list[tuple[str, str]]:
    text = MODEL + source + target
    return [(text, f"x(tp = {ways[0]})"), (text, f"y(tp = {ways[1]})")]


def read(plan: Plan, kind: str, tensor: str = "w") -> set[str]:
    """Keys that a plan reads for moves of this kind."""
    keys = {str(i): s.key[-1] for i, s in enumerate(plan.sources)}
    number = plan.tensors.index(tensor)
    return {
        str(keys[str(s)])
        for m in plan.moves
        if m.kind == kind
        for s, t in zip(m.source.tolist(), m.tensor.tolist(), strict=True)
        if t == number
    }


WHOLE = layout("y", 'w = a b as "w"')


def test_a_copy_any_is_read_only_where_nothing_else_is() -> None:
    """The order of lines and the equality of boxes do not matter."""
    loose = 'w = a b any @tp as "loose"'
    for firm in ('w = a@tp b as "firm"', 'w = a b at tp[0] as "firm"'):
        for lines in ((loose, firm), (firm, loose)):
            plan = planned(layout("x", *lines), WHOLE)
            assert read(plan, "copy") == {"firm"} and read(plan, "check") == set()
    plan = planned(layout("x", loose), WHOLE)
    assert read(plan, "copy") == {"loose"} and read(plan, "check") == set()


def test_a_second_home_is_checked_and_the_first_is_read() -> None:
    plan = planned(layout("x", 'w = a b as "one"', 'w = a b as "two"'), WHOLE)
    assert read(plan, "copy") == {"one"} and read(plan, "check") == {"one", "two"}  # rank 1's "one" is a copy, too
    halves = planned(layout("x", 'w = a@tp b as "halves"', 'w = a b@tp as "others"'), WHOLE)
    assert read(halves, "copy") == {"halves"} and read(halves, "check") == {"others"}


def test_every_copy_is_checked_once() -> None:
    """Against one place of the target, however many there are."""
    plan = planned(layout("x", 'w = a b as "w"'), WHOLE, (3, 4))
    checks = [f.source for f in mv.fills(plan) if f.kind == "check"]
    assert len(checks) == len(set(checks)) == 2 * (24 + 4)
    copies = [f.target for f in mv.fills(plan) if f.kind == "copy"]
    assert len(copies) == len(set(copies)) == 4 * (24 + 4)


def test_copies_that_are_cut_otherwise_are_checked_piece_by_piece() -> None:
    """Thirds and halves: the halves are read, the thirds are compared."""
    text = MODEL.replace("b = 6", "b = 12")
    source = layout("x", 'w = a b@tp as "w"', 'w = a b@chunk(tp, 5) as "other"')
    a = locate(Example(text + source, "x(tp = 3)").layout())
    b = locate(Example(text + WHOLE, "y(tp = 1)").layout())
    graph = build(a, b)
    prove(graph)
    plan = order(graph)
    assert read(plan, "copy") == {"w"} and read(plan, "check") == {"other"}
    stored = lay_out(a, numbered(a, {}))
    assert not np.isnan(run(plan, stored)["0.pt", ("w",)]).any()
    stored["1.pt", ("other",)][3] += 0.5
    with pytest.raises(AssertionError, match=r"a copy in other of 1\.pt at 3"):
        run(plan, stored)


def refused(source: str, target: str, ways: tuple[int, int] = (2, 2)) -> tuple[str, str]:
    with pytest.raises(UcplError) as caught:
        planned(source, target, ways)
    return caught.value.diagnostics[0].code, caught.value.diagnostics[0].message


def test_a_mean_over_copies_that_are_cut_differently_is_refused_with_the_element() -> None:
    code, message = refused(layout("x", 'w = a b mean @tp as "w"', 'w = a@tp b as "half"'), WHOLE)
    assert code == "E304" and message.startswith("w[a=0, b=0] has two places")


def test_what_one_side_lacks_is_named_by_its_first_element() -> None:
    lost = layout("x", 'w = a@tp b at tp[1] as "w"')
    code, message = refused(lost, WHOLE)
    assert code == "E308" and "w[a=0, b=0]" in message
    code, message = refused(layout("x", 'w = a b as "w"'), layout("y", 'w = a@tp b at tp[0] as "w"'))
    assert code == "E309" and "w[a=2, b=0]" in message


def test_partial_sums_are_read_and_never_written() -> None:
    sums = 'w = a b sum @tp as "w"'
    plan = planned(layout("x", sums), WHOLE)
    assert read(plan, "sum") == {"w"} and read(plan, "copy") == set()
    assert refused(layout("x", 'w = a b as "w"'), layout("y", sums))[0] == "E311"
    assert read(planned(layout("x", sums), WHOLE, (1, 2)), "copy") == {"w"}  # of one rank: the value itself


def test_each_place_has_the_factor_that_its_own_line_says() -> None:
    """One source, two homes in the target with another value each.

    A second source shifts its weight alone.
    """
    plus = layout("y", 'w = a b as "w"', 'w = a b value x - 1 as "less"')
    assert_round_trip(*(Example(*pair) for pair in both(layout("x", 'w = a@tp b as "w"'), plus, (2, 1))))
    plan = planned(layout("x", 'w = a@tp b as "w"'), plus, (2, 1))
    values = {(plan.targets[t].key[-1], m.target_value) for m in plan.moves for t in m.target.tolist()}
    assert {("w", (1.0, 0.0)), ("less", (1.0, -1.0)), ("v", (1.0, 0.0))} == values


def test_moments_do_not_shift_with_the_value_although_their_boxes_are_the_same() -> None:
    text = MODEL.replace("  v : a\n", "  state fp32, exp_avg : f32\n")
    source = (
        'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}.pt"\n  file optim = torch "o{tp}.pt"\n'
        '  w = a@tp b value x - 1 as "w"\n  state fp32, exp_avg = like in optim as "{key}/{state}"\n}\n'
    )
    target = source.replace("layout x", "layout y").replace(" value x - 1", "")
    pair = [Example(text + source + target, call) for call in ("x(tp = 2)", "y(tp = 4)")]
    assert_round_trip(*pair)
    plan = order(build(*(locate(e.layout()) for e in pair)))
    assert {m.state: m.source_value for m in plan.moves} == {
        "weight": (1.0, -1.0), "fp32": (1.0, -1.0), "exp_avg": (1.0, 0.0)
    }  # fmt: skip


def test_a_tensor_s_value_holds_in_flat_buffers_among_others_that_have_none() -> None:
    """Adjacent members of one buffer, stored with three values on both sides.

    Moments of the same line are there, too.
    """
    text = MODEL.replace("  v : a\n", "  v : a\n  u : a\n  state fp32, exp_avg : f32\n")
    lines = '  w = a b as "w"\n  v = a value x - 1 as "v"\n  u = a value x + 2 as "u"\n'
    flat = '  state fp32, exp_avg = pad(flat(each), 2 * dp)@dp in optim as "{state}"\n'
    head = 'layout x(dp) of m {\n  mesh dp\n  file weights = torch "w"\n  file optim = torch "o{dp}.pt"\n'
    plain = lines.replace(" value x - 1", "").replace("x + 2", "x - 3")
    source, target = head + lines + flat + "}\n", head.replace("layout x", "layout y") + plain + flat + "}\n"
    pair = [Example(text + source + target, call) for call in ("x(dp = 2)", "y(dp = 3)")]
    assert_round_trip(*pair)
    plan = order(build(*(locate(e.layout()) for e in pair)))
    of = {
        (m.state, plan.tensors[t]): (m.source_value[1], m.target_value[1])
        for m in plan.moves
        for t in m.tensor.tolist()
    }
    assert {k: v for k, v in of.items() if k[0] == "fp32"} == {
        ("fp32", "w"): (0.0, 0.0), ("fp32", "v"): (-1.0, 0.0), ("fp32", "u"): (2.0, -3.0)
    }  # fmt: skip
    assert {v for k, v in of.items() if k[0] == "exp_avg"} == {(0.0, 0.0)}


@pytest.mark.parametrize("forgotten", ["fp32", "exp_avg", "exp_avg_sq"])
def test_a_state_that_is_left_out_without_being_named_is_missed(forgotten: str) -> None:
    graph = build(shipped("zero1(dp = 2)"), shipped("safetensors()"), drop=("fp32", "exp_avg", "exp_avg_sq"))
    prove(graph)
    dropped = tuple(text for text in graph.dropped if not text.startswith(f"{forgotten} of "))
    with pytest.raises(UcplError) as caught:
        prove(evolve(graph, dropped=dropped))
    (found,) = caught.value.diagnostics
    assert found.code == "E343" and found.message.startswith(f"{forgotten} of wte[0, 0] is neither used")


def test_a_tensor_that_is_partly_cut_is_a_copy_where_it_is_not() -> None:
    """Half of w is cut over tp, the other half is copied.

    Copies are declared, and no overlap.
    """
    plan = planned(layout("x", 'w = (a[..2]@tp + a[2..]) b as "w"'), WHOLE)
    checks = {f.source for f in mv.fills(plan) if f.kind == "check" and f.source[0][1] == "w"}
    assert checks == {(("1.pt", "w"), i) for i in range(6, 18)}


def test_a_home_of_a_part_is_read_there_and_the_rest_from_another_home() -> None:
    """Rows 0 and 1 are stored alone; columns hold all rows.

    Of the columns rows 2 and 3 are read, the others are checked.
    """
    plan = planned(layout("x", 'w = a[..2] b as "top"', 'w = a b@tp as "columns"'), WHOLE)
    fills = mv.fills(plan)
    assert read(plan, "copy") == {"top", "columns"}
    copies = {f.source for f in fills if f.kind == "copy" and f.source[0][1] == "columns"}
    checks = {f.source for f in fills if f.kind == "check" and f.source[0][1] == "columns"}
    assert copies == {((f"{rank}.pt", "columns"), i) for rank in range(2) for i in range(6, 12)}
    assert checks == {((f"{rank}.pt", "columns"), i) for rank in range(2) for i in range(6)}


def test_a_copy_is_held_against_each_element_once_where_homes_of_the_target_overlap_in_part() -> None:
    """Row 0 is written twice.

    Copies of the source are checked at its first place, and rows 1 to 3 at their only one.
    """
    source = layout("x", 'w = a b as "w"')
    for order_of_lines in (1, -1):
        lines = ['w = a[..1] b as "top"', 'w = a b as "w"'][::order_of_lines]
        fills = mv.fills(planned(source, layout("y", *lines), (2, 1)))
        checks = [f for f in fills if f.kind == "check" and f.source[0][1] == "w"]
        assert sorted(f.source for f in checks) == [(("1.pt", "w"), i) for i in range(24)]


@pytest.mark.parametrize("rows", [2, 3])
def test_two_boxes_of_one_stored_tensor_that_share_an_element_are_refused(rows: int) -> None:
    """The same box twice, or one that reaches into another.

    No text can express this: `locate` must not either.
    """
    text = MODEL + layout("x", 'w = a@tp b as "w"') + WHOLE
    a, b = (locate(Example(text, call).layout()) for call in ("x(tp = 2)", "y(tp = 1)"))
    part = next(p for p in a.parts if p.label == "w")
    pieces = part.folded.take(np.array([0, 1, 0]))
    pieces.high[2, 0] = rows
    pieces.home[2] = pieces.home[0]
    if rows == 3:  # it reaches into the other rank's half: those two are declared copies of nothing, either
        pieces.home[2] = pieces.home[1]
    parts = tuple(evolve(p, folded=pieces) if p is part else p for p in a.parts)
    with pytest.raises(UcplError) as caught:
        build(evolve(a, parts=parts), b)
    assert caught.value.diagnostics[0].code == "E304"
    assert caught.value.diagnostics[0].message.startswith("w[a=")


def test_a_dtype_that_no_line_says_is_the_source_s_and_a_narrower_one_must_be_asked_for() -> None:
    plan = planned(layout("x", 'w = a@tp b as "w"'), WHOLE)
    assert {t.dtype for t in plan.targets} == {"f32"}
    for dtype, code in (("f64", None), ("f32", None), ("bf16", "E306"), ("f16", "E306"), ("i32", "E306")):
        target = layout("y", f'w = a b as "w" dtype {dtype}')
        if code is not None:
            assert refused(layout("x", 'w = a@tp b as "w"'), target)[0] == code, dtype
            continue
        made = planned(layout("x", 'w = a@tp b as "w"'), target)
        assert {t.dtype for t in made.targets if t.key == ("w",)} == {dtype}


def test_runs_are_joined_within_one_stored_tensor_only() -> None:
    """x and y follow each other in one tensor and in two.

    In two tensors they are two moves.
    """
    text = "ucpl 1\nmodel m {\n  dim i = 2, j = 2, k = 2\n  dtype f32\n  x : i\n  y : j\n  z : k\n}\n"
    one = 'layout one() of m {\n  file weights = torch "f"\n  s = (x: i + y: j) as "s"\n  z = k as "z"\n}\n'
    two = 'layout two() of m {\n  file weights = torch "f"\n  x = i as "x"\n  t = (z: k + y: j) as "t"\n}\n'
    a, b = (locate(Example(text + one + two, call).layout()) for call in ("one()", "two()"))
    for source, target in ((a, b), (b, a)):
        graph = build(source, target)
        prove(graph)
        (moves,) = order(graph).moves
        assert sorted(moves.shape[:, 0].tolist()) == [2, 2, 2]


def test_a_mean_and_homes_that_overlap_is_not_copied_as_well() -> None:
    source = layout("x", 'w = a[..2] b as "top"', 'w = a b@tp as "columns"', 'v = a mean @tp as "v"')
    plan = planned(source, WHOLE)
    assert read(plan, "mean", "v") == {"v"} and read(plan, "copy", "v") == set()
