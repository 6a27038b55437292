"""Options of the Python API in addition to a layout's call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ucpl
from ucpl.conversion.requests import called
from ucpl.errors import UcplError
from ucpl.language import nodes

TEXT = (
    "ucpl 1\nmodel m {\n  dim h = config.hidden_size\n  dtype f32\n  w : h\n}\n"
    'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}.pt"\n  w = h@tp as "w"\n}\n'
)


def test_a_config_is_an_object_or_where_it_is(tmp_path: Path) -> None:
    spec, config = tmp_path / "m.ucpl", tmp_path / "config.json"
    spec.write_text(TEXT)
    config.write_text(json.dumps({"hidden_size": 12}))
    calls = f"{spec}:x(tp=2)", f"{spec}:x(tp=3)"
    plans = [ucpl.plan(*calls, config=one) for one in ({"hidden_size": 12}, config, str(config))]
    assert [sum(s.numel for s in plan.targets) for plan in plans] == [12, 12, 12]


@pytest.mark.parametrize(("text", "code"), [(None, "E170"), ("[1]", "E176"), ("{", "E176")])
def test_a_config_that_is_none_is_reported_with_its_file(tmp_path: Path, text: str | None, code: str) -> None:
    spec, config = tmp_path / "m.ucpl", tmp_path / "config.json"
    spec.write_text(TEXT)
    if text is not None:
        config.write_text(text)
    with pytest.raises(UcplError) as caught:
        ucpl.plan(f"{spec}:x(tp=2)", f"{spec}:x(tp=3)", config=config)
    (found,) = caught.value.diagnostics
    assert found.code == code and found.labels[0].file == str(config)


def test_a_word_needs_no_quotes_where_a_layout_expects_a_text() -> None:
    quoted, bare = (called(f"safetensors({value})").call for value in ('dtype="bf16"', "dtype=bf16"))
    assert [a.value for a in bare.arguments] == [a.value for a in quoted.arguments]
    assert called("safetensors(most, f32)").call.arguments[1].value == nodes.Text("f32")
    # a parameter that counts ranks takes a number, or the name of one
    assert isinstance(called("zero1(dp=ranks)").call.arguments[0].value, nodes.Name)
