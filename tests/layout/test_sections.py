"""Sections of a config by a name: `let t = config.text_config`, then `t.hidden_size`."""

from __future__ import annotations

from typing import Any

import pytest

from ucpl.conversion.checking import check_text
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError
from ucpl.language import parse_call
from ucpl.layout import Layout, load, resolve

CONFIG: dict[str, Any] = {
    "text_config": {"hidden_size": 4, "layers": 2, "kinds": ["a", "b"], "rope": {"theta": 3}},
    "vision_config": {"hidden_size": 6},
}
TEXT = """ucpl 2
model base {
  let t = config.text_config, r = t.rope
  dim h = t.hidden_size, n = r.theta
  w : h n  when t.layers > 1
}
model vl extends base() {
  dim l = t.layers
  b : l[where(t.kinds, "b")] h
}
layout x(tp = 1) of vl {
  mesh tp
  assert t.hidden_size % tp == 0
  file weights = torch "{tp}"
  w    = h@tp n  as "w"
  b[l] = h       as "{l}.b"
}
layout y() of vl extends x() {
  w = h[..t.layers] n  as "w"  when default(t.none, 0)
}
"""


def resolved(text: str, call: str = "x(tp = 2)") -> Layout:
    return resolve(load(("a.ucpl", text)), parse_call(call), config=CONFIG)


def sizes(layout: Layout) -> dict[str, int]:
    return {name: layout.sizes[name] for name in ("h", "n", "l")}


def full(text: str) -> str:
    """The text without names of sections."""
    text = text.replace("  let t = config.text_config, r = t.rope\n", "")
    return (
        text.replace("r.theta", "t.rope.theta")
        .replace("t.", "config.text_config.")
        .replace("alconfig.text_config.", "alt.")
    )


def test_a_section_by_a_name_means_its_keys_in_full() -> None:
    for call in ("x(tp = 2)", "y()"):
        here, there = (resolved(text, call) for text in (TEXT, full(TEXT)))
        assert here.tensors == there.tensors and here.entries == there.entries, call
    assert sizes(resolved(TEXT)) == {"h": 4, "n": 3, "l": 2}


def test_the_config_itself_is_a_section() -> None:
    text = TEXT.replace("let t = config.text_config,", "let c = config, t = c.text_config,")
    assert sizes(resolved(text)) == {"h": 4, "n": 3, "l": 2}


def test_the_innermost_name_counts() -> None:
    text = TEXT.replace("ucpl 2\n", "ucpl 2\nlet t = config.vision_config\n")
    assert sizes(resolved(text))["h"] == 4
    outer = text.replace("  let t = config.text_config, r = t.rope\n", "  let r = config.text_config.rope\n")
    outer = outer.replace("t.layers", "2").replace("t.kinds", "config.text_config.kinds")
    assert sizes(resolved(outer))["h"] == 6


def test_a_layout_of_another_file_has_the_sections_of_its_model() -> None:
    model, layouts = TEXT.split("layout x", 1)
    texts = {"m.ucpl": model, "b.ucpl": f'ucpl 2\nfrom "m.ucpl" import vl\nlayout x{layouts}'}
    library = load(("b.ucpl", texts["b.ucpl"]), read=texts.get)
    assert resolve(library, parse_call("x(tp = 2)"), config=CONFIG).tensors == resolved(TEXT).tensors


def test_check_has_no_remark_on_such_a_text_with_a_config_and_without() -> None:
    plain = TEXT.replace('[where(t.kinds, "b")]', "")
    for config in (CONFIG, {}):
        found = check_text("a.ucpl", plain, Given(config=config), lambda _: None)
        assert found.findings == () or not config
        assert [one.text for one in found.noted if one.rule == "unused-number"] == []


@pytest.mark.parametrize(
    ("before", "after", "says", "remedy"),
    [
        (
            "h = t.hidden_size",
            "h = t.hiden_size",
            "no key `text_config.hiden_size`",
            "`config.text_config.hidden_size`",
        ),
        ("h = t.hidden_size", "h = t", "a section of the config", "config.text_config.hidden_size"),
    ],
)
def test_the_key_is_named_in_full_where_it_is_wrong(before: str, after: str, says: str, remedy: str) -> None:
    with pytest.raises(UcplError) as caught:
        resolved(TEXT.replace(before, after))
    (found,) = caught.value.diagnostics
    assert found.code == "E105" and says in found.message and remedy in found.remedy
    assert found.labels[0].line in (3, 4)
