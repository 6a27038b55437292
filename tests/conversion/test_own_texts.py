"""Checkpoints that no text can describe are converted all the same.

A target carries a text of its own only where that can be read again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from tests.cli.command import good
from ucpl.conversion import opening
from ucpl.language import parse_call, reading
from ucpl.language import source as texts
from ucpl.layout import load, resolve

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
    """Like a model with tens of thousands of experts' tensors."""
    source = saved(
        tmp_path, *(f"layers.{'x' * n}.{'long' * 20}.weight" for n in range(1, 41))
    )  # no numbers, so no folds
    ucpl.convert(source, tmp_path / "whole", to=form)
    has_text = len(list(tmp_path.glob("whole/ucpl/layout.ucpl")))
    for module in (texts, reading):
        monkeypatch.setattr(module, "TEXT_CHARACTERS_MAX", 4000)
    ucpl.convert(source, tmp_path / "there", to=form)
    assert has_text == 1 and not list(tmp_path.glob("there/ucpl/layout.ucpl"))
    assert ucpl.verify(tmp_path / "there") and ucpl.compare(tmp_path / "there", tmp_path / "whole")
    with pytest.raises(ucpl.UcplError, match="no text can say it") as caught:
        ucpl.infer(source).text()
    assert caught.value.diagnostics[0].code == "E011"


@pytest.mark.parametrize("name", ["w{l}", "a}b", "{}"])
def test_braces_in_a_name_are_reported_to_be_none_of_a_text(tmp_path: Path, name: str) -> None:
    with pytest.raises(ucpl.UcplError, match="braces stand for numbers") as caught:
        ucpl.infer(saved(tmp_path, name)).text()
    assert caught.value.diagnostics[0].code == "E017"


def test_a_text_of_what_says_itself_what_it_is_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many tensors, reading it would dominate the time."""
    ucpl.convert(saved(tmp_path, "w"), tmp_path / "there", to="zero1(dp=2)")

    def none(text: str) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(opening, "called", none)
    assert ucpl.verify(tmp_path / "there")


TOWERS = """ucpl 1
model tower(rows = 4) {
  dim a = rows
  dtype f32
  w : a
  state fp32, exp_avg, exp_avg_sq : f32
}
model towers {
  use tower() as x
  use tower(rows = 6) as y
}
layout one() of towers {
  framework torch()
  file weights = torch "w.pt"
  x.w = ... as "x.w"
  y.w = ... as "y.w"
  state fp32, exp_avg, exp_avg_sq = like as "{key}.{state}"
}
layout any() of any {
  framework torch()
  file weights = torch "w2.pt"
  * = ... as "{name}"
  state * of * = like as "{name}.{state}"
}
"""


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    (tmp_path / "t.ucpl").write_text(TOWERS)
    (tmp_path / "source").mkdir()
    held: dict[str, torch.Tensor] = {}
    for name, rows in (("x.w", 4), ("y.w", 6)):
        held |= {
            f"{name}{end}": torch.arange(rows) + 10.0 * n
            for n, end in enumerate(("", ".fp32", ".exp_avg", ".exp_avg_sq"))
        }
        held[name] = held[f"{name}.fp32"].clone()
    torch.save(held, tmp_path / "source" / "w.pt")
    return tmp_path


@pytest.mark.parametrize("to", ["zero1(dp=2)", "zero3(dp=2)", "plain()", "universal()", "dcp(fsdp=2)", "t.ucpl:any()"])
def test_the_text_of_a_model_that_uses_another_twice_is_one(towers: Path, to: str) -> None:
    """Of layouts of any model, too, which write the model out.

    Without groups of its own, and with none.
    """
    spec, form = f"{towers}/t.ucpl", to.replace("t.ucpl", f"{towers}/t.ucpl")
    ucpl.convert(towers / "source", towers / "there", to=form, layout=f"{spec}:one()")
    (text,) = towers.glob("there/ucpl/layout.ucpl")
    layout = resolve(load((str(text), text.read_text())), parse_call("stored()"))
    assert [s.name for s in layout.states] == ["fp32", "exp_avg", "exp_avg_sq"]
    assert ucpl.verify(towers / "there")
    ucpl.convert(towers / "there", towers / "back.pt", to="plain()")
    back = torch.load(towers / "back.pt")["params"]
    assert torch.equal(back["y.w"]["exp_avg"], torch.arange(6) + 20.0)


@pytest.mark.parametrize("name", ["w{l}", "", "x" * 1025, "*"], ids=["braces", "empty", "long", "star"])
def test_what_its_text_alone_would_report_is_refused_where_none_can(towers: Path, name: str) -> None:
    with pytest.raises(ucpl.UcplError, match="nothing would describe the files of any") as caught:
        ucpl.convert(saved(towers, name), towers / "there", to=f"{towers}/t.ucpl:any()")
    assert caught.value.diagnostics[0].code == "E017" and not (towers / "there").exists()


@pytest.mark.parametrize("line", ["framework torch()", 'framework "torch"()', "framework  torch ( )"])
def test_a_folder_of_torch_files_is_known_however_its_text_is_laid_out(towers: Path, line: str) -> None:
    ucpl.convert(towers / "source", towers / "there", to=f"{towers}/t.ucpl:any()", layout=f"{towers}/t.ucpl:one()")
    (text,) = towers.glob("there/ucpl/layout.ucpl")
    text.write_text(text.read_text().replace("framework torch()", line).replace("{\n  framework", "{ framework"))
    assert opening.open_checkpoint(towers / "there").format == "torch"


def test_second_names_are_asked_for_braces_and_length_too(tmp_path: Path) -> None:
    for alias in ("y" * 1025, "a{b}"):
        value = torch.load(saved(tmp_path, "w")) | {"aliases": {alias: "w"}}
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(ucpl.UcplError, match="no text can say it"):
            ucpl.infer(tmp_path / "a.pt").text()


LESS = """ucpl 1
model leaf(n = 4) {
  dim r = n
  dtype f32
  w : r
  b : r
}
model mid {
  use leaf(n = 3) as x
  use leaf() as y
}
model top extends mid() {
  y.b : none
}
layout whole() of top {
  framework torch()
  file weights = torch "w.pt"
  x.w = ... as "x.w"
  x.b = ... as "x.b"
  y.w = ... as "y.w"
}
layout any() of any {
  framework torch()
  file weights = torch "w.pt"
  * = ... as "{name}"
}
"""


@pytest.mark.parametrize("model", [None, "top"])
def test_a_model_that_takes_back_what_it_uses_is_one_for_every_verb(tmp_path: Path, model: str | None) -> None:
    (tmp_path / "less.ucpl").write_text(LESS)
    (tmp_path / "source").mkdir()
    held = {"x.w": torch.arange(3.0), "x.b": torch.ones(3), "y.w": torch.arange(4.0)}
    torch.save(held, tmp_path / "source" / "w.pt")
    spec = tmp_path / "less.ucpl"
    good("check", spec)
    more = ["--model", f"{spec}:{model}"] if model else []
    good(
        "convert", tmp_path / "source", tmp_path / "there", "--from", f"{spec}:whole()", "--to", f"{spec}:any()", *more
    )
    good("convert", tmp_path / "there", tmp_path / "back.pt", "--to", "plain()")
    assert torch.load(tmp_path / "back.pt")["params"].keys() == held.keys()


@pytest.mark.parametrize("form", ["plain()", "dcp(fsdp=3)"])
def test_a_text_with_folded_layers_keeps_the_order_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    """safetensors sorts `10` before `2`; a line has no order."""
    source, text = tmp_path / "model.safetensors", tmp_path / "inferred.ucpl"
    save_file({f"h.{n}.w": torch.arange(6.0).view(2, 3) + n for n in range(12)}, source)
    text.write_text(good("infer", source).out)
    assert '"h.{l}.w"' in text.read_text()
    good("convert", source, tmp_path / "own", "--to", form)
    good("convert", source, tmp_path / "described", "--to", form, "--from", f"{text}:stored()")
    own, described = (sorted(p for p in (tmp_path / n, *(tmp_path / n).rglob("*"))) for n in ("own", "described"))
    pairs = [(a, b) for a, b in zip(own, described, strict=True) if a.is_file() and a.parent.name != "ucpl"]
    assert pairs and all(a.read_bytes() == b.read_bytes() for a, b in pairs)
