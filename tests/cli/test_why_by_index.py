"""`why` of tensors with one text name and several plan names.

They are layers of different sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import good, ucpl

SPEC = """ucpl 1
model unet {
  dim l = 3, f = [2, 4, 2] by l
  up   : l f dtype f32
  down : l[1..] dtype f32
}
layout a() of unet {
  framework torch()
  file weights = torch "a.pt"
  up[l] = f  as "{l}"
  down  = l  as "down"
}
layout b(tp) of unet {
  mesh tp
  framework torch()
  file weights = torch "{tp}"
  up[l] = f@tp  as "{l}"
  down  = l@spread(tp)  as "down"
}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "u.ucpl").write_text(SPEC)
    spec = tmp_path / "u.ucpl"
    good("plan", "--from", f"{spec}:a()", "--to", f"{spec}:b(tp=2)", "-o", tmp_path / "p.plan")
    return tmp_path / "p.plan"


@pytest.mark.parametrize(
    ("element", "source", "target"),
    [
        ("up[l=1, f=3]", ("1", [3]), ("1", "1", [1])),
        ("up[1, 3]", ("1", [3]), ("1", "1", [1])),
        ("up[l=2, f=1]", ("2", [1]), ("1", "2", [0])),
        ("down[l=2]", ("down", [1]), ("1", "down", [0])),
        ("down[1]", ("down", [0]), ("0", "down", [0])),
    ],
)
def test_an_element_is_called_as_messages_call_it(
    element: str, source: tuple[str, list[int]], target: tuple[str, str, list[int]], plan: Path
) -> None:
    (found,) = good("why", plan, element, "--json").json["from"]
    assert (found["source_key"], found["source_index"]) == source
    assert (found["target_file"], found["target_key"], found["target_index"]) == target


def test_a_name_of_the_text_alone_is_all_of_them(plan: Path) -> None:
    found = good("why", plan, "up", "--json").json["from"]
    assert {a["element"] for a in found} == {"up[f=2]", "up[f=4]"} and sum(a["elements"] for a in found) == 8


@pytest.mark.parametrize(
    ("element", "code", "write"),
    [
        ("up[l=0, f=3]", "E182", "'up[l=0, f=0]'"),
        ("up[l=2]", "E182", "'up[l=2, f=0]'"),
        ("up[f=1, l=2]", "E181", "'up[l=0, f=0]'"),
        ("down[l=0]", "E182", "'down[l=1]'"),
        ("dwn", "E182", "did you mean `down`?"),
    ],
)
def test_what_is_no_element_is_reported_with_what_to_write(element: str, code: str, write: str, plan: Path) -> None:
    done = ucpl("why", plan, element)
    assert done.status == 2 and code in done.err and write in done.err
