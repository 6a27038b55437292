"""Text without effect is refused in input and omitted from generated texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ucpl.conversion.checking import check
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError
from ucpl.language import nodes, parse, parse_call, print_file
from ucpl.layout import close, expand, load, resolve
from ucpl.registry import formats

ROOT = Path(__file__).parents[2]
BASE = """
layout base() of any {
  file weights = torch "a.pt"
  *              = ...  as "{name}"
  "gone.weight"  = none
  state fp32     = like  as "{name}/fp32"
  state exp_avg, moment = like  as "{name}/{state}"
  derive fp32 from weight
  derive master from fp32
}
"""
MODEL = """
model m {
  w : 4 dtype f32
  state exp_avg : f32
}
"""


def test_frameworks_and_their_settings_are_those_of_the_stores() -> None:
    rooms = ("files", "formats")
    read = "".join(p.read_text() for room in rooms for p in sorted((ROOT / "ucpl" / room).rglob("*.py")))
    specs = "".join(p.read_text() for p in sorted((ROOT / "specs").glob("*.ucpl")))
    for one in formats().values():
        for name in one.settings:
            assert f'"{name}"' in read or re.search(rf"framework \w+\([^)]*\b{name} = ", specs), name


def test_a_closed_text_of_a_layout_of_any_model_says_nothing_idle() -> None:
    library = load(("x.ucpl", f"ucpl 1\n{BASE}{MODEL}"))
    model = library.model("m").node
    assert isinstance(model, nodes.Model)
    layout = expand(library, parse_call("base()"), model)
    text = print_file(nodes.File("", 1, (model, layout)))
    assert "gone" not in text and "moment" not in text and "master" not in text
    resolve(load(("y.ucpl", text)), parse_call("stored()"))


def test_a_closed_text_of_a_layout_that_extends_one_says_nothing_idle() -> None:
    text = f"ucpl 1\n{BASE}{MODEL}layout mine() of m extends base() {{\n}}\n"
    made = print_file(close(load(("x.ucpl", text)), parse_call("mine()")))
    assert "gone" not in made and "moment" not in made and "master" not in made
    assert "state exp_avg = like" in made and "derive fp32 from weight" in made
    resolve(load(("y.ucpl", made)), parse_call("stored()"))


def test_what_replaces_a_line_of_the_base_is_no_idle_line() -> None:
    own = 'state exp_avg, moment = none\n  "gone.weight" = none\n'
    text = f"ucpl 1\n{BASE}{MODEL}layout mine() of m extends base() {{\n  {own}}}\n"
    resolve(load(("x.ucpl", text)), parse_call("mine()"))


@pytest.mark.parametrize("pattern", ["(... + ...)", "(_[..2] ... + _[2..] ...)", "(w: ... + w: ...)"])
def test_terms_of_a_sum_have_a_rest_each(pattern: str) -> None:
    file = parse(f'ucpl 1\nlayout x() of any {{\n  * = {pattern}  as "{{name}}"\n}}\n', "x.ucpl")
    from ucpl.layout.misplaced_statements import check_acting

    layout = file.statements[0]
    assert isinstance(layout, nodes.Layout)
    check_acting(layout.items)


@pytest.mark.parametrize("pattern", ["... (...)", "(_ ... ...)", "pad((...), 2) ...", "(... + _ ...) ..."])
def test_a_second_rest_is_refused(pattern: str) -> None:
    text = f'ucpl 1\nlayout x() of any {{\n  file weights = torch "a"\n  * = {pattern}  as "{{name}}"\n}}\n{MODEL}'
    library = load(("x.ucpl", text))
    model = library.model("m").node
    assert isinstance(model, nodes.Model)
    with pytest.raises(UcplError) as caught:
        resolve(library, parse_call("x()"), model=model)
    assert caught.value.diagnostics[0].code == "E155"


UNREAD = """ucpl 1
model m {
  dim r = 4
  w : r
}
layout x(tp) of any {
  mesh tp
  file weights = torch "{tp}"
  *          = ...  as "{name}"
  "*.bias"   = LINE
}
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('... in nowhere as "{name}"', "E151"),
        ('... on nowhere as "{name}"', "E218"),
        ('... at pq[0] as "{name}"', "E148"),
        ('... as "{layer}"', "E122"),
        ('... as "{name!r}"', "E001"),
        ('... as "{name"', "E120"),
        ('... as "{tp:x}"', "E120"),
    ],
)
def test_names_of_places_are_known_in_lines_that_speak_of_no_tensor(line: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "x.ucpl").write_text(UNREAD.replace("LINE", line))
    assert [d.code for d in check(str(tmp_path / "x.ucpl"), Given()).findings] == [code]
    (tmp_path / "x.ucpl").write_text(UNREAD.replace("LINE", '... as "{name}.{tp}"'))
    assert check(str(tmp_path / "x.ucpl"), Given()).findings == ()


@pytest.mark.parametrize(
    ("dims", "said"),
    [("r[2..2]", "Write `r[2..3]`"), ("r[3..1]", "Write `r[1..3]`"), ("r[1..9]", "Write `r[1..]`"), ("r[1..3]", "")],
)
def test_ranges_that_hold_nothing_or_end_behind_their_dim_are_remarked(dims: str, said: str, tmp_path: Path) -> None:
    text = UNREAD.replace("  w : r\n", f"  w : {dims}\n").replace('  "*.bias"   = LINE\n', "")
    (tmp_path / "x.ucpl").write_text(text)
    found = check(str(tmp_path / "x.ucpl"), Given())
    assert found.findings == () and (any(said in one for one in found.remarks) if said else not found.remarks)


@pytest.mark.parametrize("sign", ["%d", "$tp", "<tp>", "*", "%02d", "${tp}"])
def test_signs_of_other_tools_in_names_are_remarked(sign: str, tmp_path: Path) -> None:
    text = UNREAD.replace('"{tp}"', f'"{sign}.{{tp}}"').replace('  "*.bias"   = LINE\n', "")
    (tmp_path / "x.ucpl").write_text(text)
    found = check(str(tmp_path / "x.ucpl"), Given())
    assert any(f"`{sign}" in one and "{tp:02}" in one for one in found.remarks) or (sign == "${tp}" and found.remarks)
