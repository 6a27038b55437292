"""What no text can say is converted all the same: a target carries a text of its own only where that can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.conversion import opening
from ucpl.syntax import limits, reading

FORMS = ["zero1(dp=2)", "dcp(fsdp=2)", "plain()"]


def saved(top: Path, *names: str) -> Path:
    held = {name: {"weight": torch.arange(6.0).view(2, 3) + n} for n, name in enumerate((*names, "k"))}
    torch.save({"params": held, "buffers": {}, "aliases": {}, "groups": [], "scalars": {}}, top / "a.pt")
    return top / "a.pt"


@pytest.mark.parametrize("name", ["", "x" * 1025, "*"], ids=["empty", "long", "star"])
@pytest.mark.parametrize("form", FORMS)
def test_names_that_no_text_has_go_there_and_back(tmp_path: Path, name: str, form: str) -> None:
    source = saved(tmp_path, name)
    ucpl.convert(source, tmp_path / "there", to=form)
    assert ucpl.verify(tmp_path / "there") and not list(tmp_path.glob("there/ucpl/layout.ucpl"))
    ucpl.convert(tmp_path / "there", tmp_path / "back.pt", to="plain()")
    assert ucpl.compare(source, tmp_path / "back.pt")
    with pytest.raises(ucpl.UcplError, match="no text can say it") as caught:
        ucpl.infer(source).text()
    assert caught.value.diagnostics[0].code == "E017"


@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_is_too_large_is_not_carried(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model with tens of thousands of experts' tensors, each by itself."""
    source = saved(tmp_path, *(f"layers.{n}.{'long' * 20}.weight" for n in range(40)))
    ucpl.convert(source, tmp_path / "whole", to=form)
    has_text = len(list(tmp_path.glob("whole/ucpl/layout.ucpl")))
    for module in (limits, reading):
        monkeypatch.setattr(module, "TEXT_CHARACTERS_MAX", 4000)
    ucpl.convert(source, tmp_path / "there", to=form)
    assert has_text == 1 and not list(tmp_path.glob("there/ucpl/layout.ucpl"))
    assert ucpl.verify(tmp_path / "there") and ucpl.compare(tmp_path / "there", tmp_path / "whole")
    with pytest.raises(ucpl.UcplError, match="no text can say it") as caught:
        ucpl.infer(source).text()
    assert caught.value.diagnostics[0].code == "E011"


@pytest.mark.parametrize("name", ["w{l}", "a}b", "{}"])
def test_braces_in_a_name_are_said_to_be_none_of_a_text(tmp_path: Path, name: str) -> None:
    with pytest.raises(ucpl.UcplError, match="braces stand for numbers") as caught:
        ucpl.infer(saved(tmp_path, name)).text()
    assert caught.value.diagnostics[0].code == "E017"


def test_a_text_of_what_says_itself_what_it_is_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it would take longer than all else, where there are many tensors."""
    ucpl.convert(saved(tmp_path, "w"), tmp_path / "there", to="zero1(dp=2)")

    def none(text: str) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(opening, "called", none)
    assert ucpl.verify(tmp_path / "there")
