"""Failure domains of ranks, and files that hold a rank's memory.

Both are compared with the coordinates of ranks, one by one.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ucpl
from ucpl.conversion.planning import Asked, closed_text, described
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError
from ucpl.layout import Layout, domains_of
from ucpl.placement import locate

MODEL = "ucpl 1\nmodel m {\n  dim h = 12, k = 8\n  w : h k\n}\n"


def written(top: Path, body: str, mesh: str = "pp dp tp") -> Path:
    file = top / "job.ucpl"
    file.write_text(
        f"{MODEL}layout job(pp = 1, dp = 1, tp = 1) of m {{\n  framework torch()\n  mesh {mesh}\n{body}\n"
        '  file weights = memory "w_{pp}_{dp}_{tp}"\n  w = h@tp k as "block/w"\n}\n'
    )
    return file


def layout_of(file: Path, degrees: str = "") -> Layout:
    asked = Asked(f"{file}:job({degrees})", f"{file}:job({degrees})")
    return described(asked, Given())[0].layout


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("{pp}", lambda pp, dp, tp, rank: pp),
        ("{pp}.{dp - dp % 2}", lambda pp, dp, tp, rank: (pp, dp // 2)),
        ("{(rank - rank % 3) / 3}", lambda pp, dp, tp, rank: rank // 3),
        ("{(pp + dp) % 2}", lambda pp, dp, tp, rank: (pp + dp) % 2),
        ("{pp}{tp}-{size(dp)}", lambda pp, dp, tp, rank: (pp, tp)),
        ("all", lambda pp, dp, tp, rank: 0),
    ],
)
@pytest.mark.parametrize("degrees", [(2, 4, 3), (3, 2, 1), (1, 1, 1)])
def test_ranks_of_one_text_are_in_one_domain(tmp_path, text, mark, degrees):
    pp, dp, tp = degrees
    found = domains_of(layout_of(written(tmp_path, f'  domain node = "{text}"'), f"{pp}, {dp}, {tp}"), "node")
    wanted: dict[object, list[int]] = {}
    for rank, place in enumerate(product(range(pp), range(dp), range(tp))):
        wanted.setdefault(mark(*place, rank), []).append(rank)
    assert [list(some) for some in found] == list(wanted.values())


def test_what_is_not_given_is_none(tmp_path):
    layout = layout_of(written(tmp_path, '  domain process = "{rank}"'), "dp=3")
    assert domains_of(layout, "node") == ()
    assert domains_of(layout, "process") == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('domain node = "{l}"', "E122"),
        ('domain node = "{state}"', "E122"),
        ('domain rack = "{pp}"', "E016"),
        ('domain node = "{pp}"\n  domain node = "{dp}"', "E00"),
        ('domain node = "{dp / 2}"', "E108"),
    ],
)
def test_what_is_no_domain_is_refused(tmp_path, line, code):
    with pytest.raises(UcplError, match=code):
        domains_of(layout_of(written(tmp_path, f"  {line}"), "dp=4"), "node")


def test_a_domain_is_taken_over_replaced_and_kept_in_a_closed_text(tmp_path):
    file = written(tmp_path, '  let wide = 2\n  domain node = "{pp}.{dp - dp % wide}"')
    text = file.read_text() + (
        '\nlayout other(dp = 1) of m extends job(dp = dp) {\n  domain node = "{dp}"\n}\n'
        "model outer {\n  use m() as in\n}\n"
        "layout around(dp = 1) of outer {\n  framework torch()\n  mesh pp dp tp\n  let pp = 1, tp = 1\n"
        "  use job(dp = dp) as in\n}\n"
    )
    file = tmp_path / "others.ucpl"
    file.write_text(text)
    two = ((0, 1), (2, 3))
    for call, wanted in ((f"{file}:other(dp=4)", ((0,), (1,), (2,), (3,))), (f"{file}:around(dp=4)", two)):
        here = described(Asked(call, call), Given())[0]
        assert domains_of(here.layout, "node") == wanted
        again = tmp_path / "closed.ucpl"
        again.write_text(closed_text(here))
        there = described(Asked(f"{again}:stored()", f"{again}:stored()"), Given())[0]
        assert domains_of(there.layout, "node") == wanted


def test_what_is_in_memory_is_kept_as_safetensors(tmp_path):
    file = written(tmp_path, "")
    assert sorted(h.file for p in locate(layout_of(file, "tp=3")).parts for h in p.homes) == [
        f"w_0_0_{tp}.safetensors" for tp in range(3)
    ]
    value = torch.arange(96, dtype=torch.float32).view(12, 8)
    one = tmp_path / "one"
    one.mkdir()
    torch.save({"w": value}, one / "all.pt")
    file.write_text(
        f'{file.read_text()}layout one() of m {{\n  framework torch()\n  file weights = torch "all.pt"\n  w = h k as "w"\n}}\n'
    )
    ucpl.convert(one, tmp_path / "three", to=f"{file}:job(tp=3)", layout=f"{file}:one()")
    for tp in range(3):
        found = load_file(tmp_path / "three" / f"w_0_0_{tp}.safetensors")
        assert np.array_equal(found["block/w"], value[4 * tp : 4 * tp + 4])
    ucpl.convert(tmp_path / "three", tmp_path / "two", to=f"{file}:job(tp=2)", layout=f"{file}:job(tp=3)")
    assert torch.equal(load_file(tmp_path / "two" / "w_0_0_1.safetensors")["block/w"], value[6:])
