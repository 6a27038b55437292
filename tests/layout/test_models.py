"""Results of a model's statements: ranges, kinds, dtypes, groups.

Also the way that patterns of any model are filled in.
"""

from __future__ import annotations

import pytest

from ucpl.errors import UcplError
from ucpl.language import parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.layout import axes as ax
from ucpl.layout.layout import Policy

MODEL = """ucpl 1
model m {
  dim l = 6, a = 4, b = 3
  w : l a
  part : l[1..] a
  odd : l[1.. by 2] a
  few : l[..2] a[3..]
  none : l[9..] a
  plain : 5 b dtype i64
  ice : a is frozen
  buf : b is buffer
  dtype bf16
  group first = w, part
  group rest = all - first
  state s, t : f32
  state u : i64 scalar of first
}
"""
LAYOUT = """layout x(dp) of m {
  mesh dp
  file weights = torch "f"
%s}
"""


def resolved(lines: str = "", call: str = "x(2)") -> Layout:
    return resolve(load(("f.ucpl", MODEL + LAYOUT % lines)), parse_call(call))


def test_a_range_is_the_indices_that_the_tensor_has() -> None:
    found = {p: (t.counts, t.indices) for p, t in resolved().tensors.items()}
    assert found["w"] == ((6, 4), (range(6), range(4)))
    assert found["part"] == ((5, 4), (range(1, 6), range(4)))
    assert found["odd"] == ((3, 4), (range(1, 6, 2), range(4)))
    assert found["few"] == ((2, 1), (range(2), range(3, 4)))
    assert found["none"] == ((0, 4), (range(0), range(4)))
    assert found["plain"] == ((5, 3), (range(5), range(3)))
    assert resolved().tensors["odd"].numel == 12


def test_kinds_dtypes_and_dims() -> None:
    tensors = resolved().tensors
    assert tensors["plain"].dims == ("plain#0", "b") and tensors["plain"].dtype == "i64"
    assert {t.dtype for p, t in tensors.items() if p != "plain"} == {"bf16"}
    assert [tensors[p].kind for p in ("w", "ice", "buf")] == ["parameter", "frozen", "buffer"]


def test_groups_hold_what_is_trained_and_states_are_of_groups() -> None:
    found = resolved()
    assert found.model_groups == (("first", ("w", "part")), ("rest", ("odd", "few", "none", "plain")))
    assert [(s.name, s.dtype, s.scalar, s.groups) for s in found.states] == [
        ("s", "f32", False, None),
        ("t", "f32", False, None),
        ("u", "i64", True, ("first",)),
    ]


def test_a_dtype_is_of_a_model_s_own_tensors() -> None:
    text = "ucpl 1\nmodel m {\n  dtype f16\n  w : 2\n}\nmodel n {\n  use m() as in\n  dtype f32\n  v : 2\n}\n"
    found = resolve(load(("f.ucpl", text + "layout x() of n {\n}\n")), parse_call("x()"))
    assert {p: t.dtype for p, t in found.tensors.items()} == {"in.w": "f16", "v": "f32"}


def test_the_digit_without_a_size_gets_what_is_left() -> None:
    found = resolved("  dim lap = 2\n  index l = (lap slot)\n")
    assert (found.sizes["lap"], found.sizes["slot"], found.sizes["l"]) == (2, 3, 6)
    assert ax.digits_of(found.indices["l"]) == ("lap", "slot")


# ---- patterns of any model --------------------------------------------------------------------------------------------


def shape(line: str, path: str) -> tuple[ax.Axis, ...]:
    return next(e.shape for e in resolved(f"  {line}\n").entries if e.path == path)


L, A, B = ax.Dim("l"), ax.Dim("a"), ax.Dim("b")


@pytest.mark.parametrize(
    ("line", "path", "want"),
    [
        ('* = ... as "{name}"', "w", (L, A)),
        ('w = _ _ as "w"', "w", (L, A)),
        ('w = a _ as "w"', "w", (A, L)),
        ('w = _ l as "w"', "w", (A, L)),
        ('w = _ as "w"', "w", None),
        ('w = a ... as "w"', "w", (A, L)),
        ('w = (...) as "w"', "w", (ax.Stack((ax.Term(None, (L, A)),)),)),
        ('w = pad(..., 4) as "w"', "w", (ax.Pad(ax.Stack((ax.Term(None, (L, A)),)), 4),)),
        ('ice = pad(..., 4) as "w"', "ice", (ax.Pad(A, 4),)),
        ('w = _@dp _ as "w"', "w", (ax.Cut(L, (ax.Split("dp"),)), A)),
        (
            'w = (_[..2]@dp + _[2..]) _ as "w"',
            "w",
            (
                ax.Stack(
                    (
                        ax.Term(None, (ax.Cut(ax.Dim("l", 0, 2), (ax.Split("dp"),)),)),
                        ax.Term(None, (ax.Dim("l", 2, 6),)),
                    )
                ),
                A,
            ),
        ),
        ('w = trim(pad(_, 4)) _ as "w"', "w", (ax.Trim(ax.Pad(L, 4)), A)),
    ],
)
def test_what_the_dims_of_any_model_become(line: str, path: str, want: tuple[ax.Axis, ...] | None) -> None:
    if want is None:  # a is left
        with pytest.raises(UcplError) as caught:
            shape(line, path)
        assert caught.value.diagnostics[0].code == "E156"
        return
    assert shape(line, path) == want


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ('w = _ l as "w"', (A, L)),
        ('w = a _ as "w"', (A, L)),
        ('w = ... l as "w"', (A, L)),
        ('w[l] = _ as "{l}"', (A,)),
        ('w[l] = ... as "{l}"', (A,)),
        ('w[l] = (_[..2]@dp + _[2..]) as "{l}"', None),
        ('w[l[..3]] = _ as "{l}"', (A,)),
        ('w[k, two] = _ as "{k}.{two}"', (A,)),
        ('w[l, a] = ... as "{l}.{a}"', ()),
        ('box[l] = _ h _ as "{l}"', (ax.Dim("box#1"), ax.Dim("h"), ax.Dim("box#3"))),
    ],
)
def test_an_underscore_is_a_dim_that_nothing_names(line: str, want: tuple[ax.Axis, ...] | None) -> None:
    """Neither the brackets nor the pattern name the dim, on either side.

    The underscore makes dims without names accessible.
    """
    model = MODEL.replace(
        "  w : l a\n", "  w : l a\n  dim h = 2, two = 2, k = 3\n  index l = (k two)\n  box : l 5 h 7\n"
    )
    (entry,) = resolve(load(("f.ucpl", model + LAYOUT % f"  {line}\n")), parse_call("x(2)")).entries
    if want is not None:
        assert entry.shape == want
    else:
        assert ax.dims_of(*entry.shape) == ("a", "a")


def test_the_most_special_class_speaks() -> None:
    lines = (
        '  * = ... as "any.{name}"\n  * of parameter = ... as "par.{name}"\n  * of frozen = none\n  w = ... as "w"\n'
    )
    found = {e.path: e.storing.key.text for e in resolved(lines).entries if e.storing.key is not None}
    assert found == {
        "w": "w",
        **dict.fromkeys(("part", "odd", "few", "plain"), "par.{name}"),  # `none` has no index: no line speaks of it
        "buf": "any.{name}",
    }
    trained = '  * of parameter = ... as "par"\n  * of trainable = ... as "tra"\n  * of frozen = ... as "fro"\n'
    said = {e.path: e.storing.key.text for e in resolved(trained).entries if e.storing.key is not None}
    assert said["w"] == "tra" and said["ice"] == "fro" and "buf" not in said


def test_labels_are_looked_for_next_to_the_entry_first() -> None:
    text = """ucpl 1
model m {
  dim a = 4
  dtype f32
  x.q : a
  x.pack.k : a
  q : a
  k : a
  v : a
}
layout x() of m {
  file weights = torch "f"
  x.pack = (q: a + k: a + v: a) as "x"
}
"""
    (entry,) = resolve(load(("f.ucpl", text)), parse_call("x()")).entries
    assert entry.targets == {"q": "x.q", "k": "x.pack.k", "v": "v"}


# ---- clauses ----------------------------------------------------------------------------------------------------------


def test_clauses_become_numbers() -> None:
    lines = '  w = l a at dp[-1] mean @dp dtype f32 value x - 3 lossy as "w"\n  part = ... at dp[-2] as "p"\n'
    first, second = (e.storing for e in resolved(lines).entries)
    assert (first.at, first.policy, first.policy_axes, first.dtype) == ((("dp", 1),), Policy.MEAN, ("dp",), "f32")
    assert first.value == (1.0, -3.0) and first.lossy and not second.lossy
    assert second.at == (("dp", 0),) and second.value == (1.0, 0.0) and second.dtype is None


def test_states_go_to_the_optimizers_file_where_there_is_one() -> None:
    state = '  state * = like as "{key}"\n'
    assert resolved(state).state_lines[0].storing.file == "weights"
    assert resolved('  file optim = torch "o"\n' + state).state_lines[0].storing.file == "optim"
    assert (
        resolved('  file optim = torch "o"\n  state * = like in weights as "{key}"\n').state_lines[0].storing.file
        == "weights"
    )


def test_orders_of_groups() -> None:
    found = resolved("  group g = w, odd order reversed\n  group h = all - g order dealt dp\n").groups
    assert (found["g"].is_reversed, found["g"].dealt) == (True, 1)
    assert (found["h"].is_reversed, found["h"].dealt, found["h"].without) == (False, 2, ("g",))
