"""No two stored tensors share one place, in any notation.

Two statements of the same tensor give one tensor.
"""

from __future__ import annotations

import pytest

from ucpl.errors import UcplError
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import Placement, locate

MODEL = "ucpl 1\nmodel m {\n  dim l = 4, a = 6\n  dtype f32\n  w : l a\n  v : a\n  u : a\n}\n"


def located(file: str, *lines: str) -> Placement:
    body = "\n  ".join(lines)
    text = f'{MODEL}layout x(pp, tp) of m {{\n  mesh pp tp\n  index l = l@pp\n  file weights = torch "{file}"\n  {body}\n}}\n'
    return locate(resolve(load(("x.ucpl", text)), parse_call("x(pp = 2, tp = 2)")))


def taken(*given: str) -> str:
    with pytest.raises(UcplError) as caught:
        located(*given)
    (found,) = caught.value.diagnostics
    assert found.code == "E215"
    return f"{found.message}; {found.remedy}"


REST = ('v = a as "v"', 'u = a as "u"')


def test_pieces_of_one_tensor_that_no_name_distinguishes() -> None:
    assert "v of f.pt" in taken("f.pt", 'w[l] = a as "w.{l}"', 'v = a@tp as "v"', 'u = a as "u"')


@pytest.mark.parametrize(
    ("lines", "remedy", "mended"),
    [
        (('w[l] = a as "w.{l}"', 'v = a@tp as "v"', 'u = a as "u"'), "template: {tp}", ("v.{tp}",)),
        (('w[l] = a as "w.{l.local}"', 'v = a as "v"', 'u = a as "u"'), "template: {l}", ("w.{l}",)),
        (('w[l] = a as "w.{l}"', 'v = a as "v"', 'u = a as "v"'), 'two tensors, u and v: give one of them another key\n'
         'write: as "u"', ("u",)),
        (('w[l] = a as "w.{l}"', 'v = a as "w.0"', 'u = a as "u"'), 'two tensors, v and w: give one of them another key\n'
         'write: as "v"', ("v",)),
        (('v = a as "w.0"', 'w[l] = a as "w.{l}"', 'u = a as "u"'), 'write: as "w.{l}"', ()),
        (('* = ... as "w"',), 'the line is for v and w: name the tensor in the key, as in "{name}"', ("{name}",)),
    ],
)  # fmt: skip
def test_what_to_write_depends_on_how_the_two_differ(
    lines: tuple[str, ...], remedy: str, mended: tuple[str, ...]
) -> None:
    assert remedy in taken("f.pt", *lines)
    at_fault = {"v.{tp}": 1, "w.{l}": 0, "u": 2, "v": 1, "{name}": 0}
    for key in mended:
        fixed = [
            f'{line.rpartition(" as ")[0]} as "{key}"' if n == at_fault[key] else line for n, line in enumerate(lines)
        ]
        assert located("f.pt", *fixed)


def test_layers_of_two_stages_that_both_count_from_nought() -> None:
    assert "w.0 of f.pt" in taken("f.pt", 'w[l] = a as "w.{l.local}"', *REST)


def test_a_layer_of_one_line_and_a_name_of_another() -> None:
    assert "w.2 of f.pt" in taken("f.pt", 'w[l] = a as "w.{l}"', 'v = a as "w.2"', 'u = a as "u"')
    assert "w.2 of f.pt" in taken("f.pt", 'v = a as "w.2"', 'w[l] = a as "w.{l}"', 'u = a as "u"')


def test_numbers_that_only_look_alike_are_no_clash() -> None:
    """Similar numbers in different roles.

    They are a layer's number and a literal one, a step of the key and a part of one, and another file.
    """
    found = located("{pp}.pt", 'w[l] = a as "w.{l}"', 'v = a as "w.7"', 'u = a as "w/2"')
    places = {(h.file, h.key) for p in found.parts for h in p.homes}
    assert len(places) == sum(len(p.homes) for p in found.parts) == 4 + 2 + 2
    assert ("1.pt", ("w.3",)) in places and ("0.pt", ("w", 2)) in places


def test_digits_that_are_put_together_or_filled_up_are_a_text() -> None:
    """A position is one number in its written form.

    `00` would be read as 0, and `01` as 1.
    """
    found = located("f", 'w[l] = a as "w/{l + 8:02}"', 'v = a as "v/{pp}{tp}"', 'u = a@pp as "u/{pp * 10}"')
    keys = {p.label: [h.key for h in p.homes] for p in found.parts}
    assert keys["v"] == [("v", "00"), ("v", "01"), ("v", "10"), ("v", "11")]
    assert keys["w"] == [("w", n) for n in ("08", "09", "10", "11")]
    assert keys["u"] == [("u", 0), ("u", 10)]
    literal = located("f", 'w[l] = a as "w/{l}"', 'v = a as "v/007"', 'u = a as "u/7"')
    keys = {p.label: [h.key for h in p.homes] for p in literal.parts}
    assert (keys["w"], keys["v"], keys["u"]) == ([("w", n) for n in range(4)], [("v", "007")], [("u", 7)])


def test_ranks_that_share_a_file_give_one_tensor() -> None:
    """Three ranks share one file.

    A tensor that all of them hold completely is one stored tensor of the first rank.
    """
    found = located("node_{min(rank, 1)}.pt", 'w[l] = a as "w.{l}"', *REST)
    (v,) = (p for p in found.parts if p.label == "v")
    assert [(h.file, h.rank) for h in v.homes] == [("node_0.pt", 0), ("node_1.pt", 1)]
    assert sorted(set(v.pieces.home.tolist())) == [0, 1]
