"""Forms of files: those that a store reads and writes, no other."""

from __future__ import annotations

import pytest

from ucpl.conversion.side import demand_forms
from ucpl.errors import UcplError
from ucpl.language import parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.registry import formats


def layout(framework: str, file: str) -> Layout:
    sentence = f"  framework {framework}()\n" if framework else ""
    text = (
        f'ucpl 1\nmodel m {{\n  a : 6\n}}\nlayout x() of m {{\n{sentence}  file weights = {file}\n  a = _ as "a"\n}}\n'
    )
    return resolve(load(("x.ucpl", text)), parse_call("x()"))


def test_every_framework_says_its_forms() -> None:
    assert [name for name, one in formats().items() if not one.forms] == []


@pytest.mark.parametrize(
    ("framework", "file", "message", "remedy"),
    [
        ("torch", 'dcp "a"', "form `dcp`, and framework torch() reads and writes torch and safetensors", 'torch "a"'),
        ("huggingface", 'torch "model.bin"', "huggingface() reads and writes safetensors", 'safetensors "model.bin"'),
        ("deepspeed", 'safetensors "a.safetensors"', "deepspeed() reads and writes torch", "leave `framework` out"),
        ("plain", 'dcp "a"', "plain() reads and writes torch", "file weights = torch"),
        ("torch", 'torch "a.safetensors"', "is the name of another", 'write `safetensors "a.safetensors"`'),
        ("torch", 'safetensors "a.pt"', "is the name of another", 'write `torch "a.pt"`'),
    ],
)
def test_a_form_that_the_store_does_not_know_is_refused(framework: str, file: str, message: str, remedy: str) -> None:
    with pytest.raises(UcplError) as caught:
        demand_forms(layout(framework, file))
    (found,) = caught.value.diagnostics
    assert found.code == "E397" and message in found.message and remedy in found.remedy
    assert (found.labels[0].file, found.labels[0].line) == ("x.ucpl", 7)


@pytest.mark.parametrize(
    ("framework", "file"),
    [
        ("", 'dcp "a"'),
        ("torch", 'torch "a.pt"'),
        ("torch", 'torch "a"'),
        ("torch", 'safetensors "a.safetensors"'),
        ("torch", 'torch "{size(a)}"'),
        ("torch", "none"),
        ("huggingface", 'safetensors "model.safetensors"'),
        ("deepspeed", 'torch "a.pt"'),
    ],
)
def test_forms_that_act_are_accepted(framework: str, file: str) -> None:
    text = file.replace("size(a)", "3")
    demand_forms(layout(framework, text))
