"""`fill` from the command line to the bytes.

Moments for weights alone, rows and tensors that are new, and refused fills.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from tests.cli.command import ucpl as command
from ucpl.errors import UcplError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "deepspeed" / "z1_dp4"
MOMENTS = ["exp_avg=0", "exp_avg_sq=0"]
GROWN = """ucpl 1
model grown {{
  dim v = 5, h = 4
  dtype f32
  embed : v h
  gate  : h
  state exp_avg : f32
}}
layout old() of grown {{
  framework torch()
  file weights = torch "a.pt"
  embed = v h  as "embed"
  gate  = none
}}
layout new(tp) of grown {{
  mesh tp
  framework torch()
  file weights = torch "{{tp}}.pt"
  embed = v@chunk(tp) h  as "embed"
  gate  = h@tp           as "gate"
  state * = like in weights as "{{state}}/{{key}}"
  {}
}}
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3.0)}, str(file))
    return file


@pytest.mark.parametrize("stage", [1, 3])
def test_moments_of_weights_alone_are_filled(stage: int, weights: Path, tmp_path: Path) -> None:
    made = ucpl.convert(weights, tmp_path / "zero", f"zero{stage}(dp = 2)", fill=MOMENTS)
    assert [text.partition(":")[0] for text in made.plan.filled] == ["exp_avg with 0", "exp_avg_sq with 0"]
    assert "15 elements of `b`, `w`" in made.plan.filled[0]
    again = ucpl.convert(tmp_path / "zero", tmp_path / "plain.pt", "plain()")
    assert again.report
    held = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    assert torch.equal(held["w"]["weight"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(held["w"]["exp_avg"], torch.zeros(3, 4)) and torch.equal(held["b"]["exp_avg_sq"], torch.zeros(3))


def test_what_has_no_moments_cannot_be_given_them_in_silence(weights: Path, tmp_path: Path) -> None:
    made = ucpl.plan(str(weights), "zero1(dp = 2)")
    assert made.filled == () and {s.state for s in made.target_shelves.shelves} == {"weight", "fp32"}


def test_a_spec_fills_what_it_has_grown_by(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    torch.save({"embed": torch.arange(20.0).reshape(5, 4)}, tmp_path / "old" / "a.pt")
    spec = tmp_path / "spec.ucpl"
    spec.write_text(GROWN.format('fill gate = "0.5"\n  fill state exp_avg = 0'))
    made = ucpl.convert(tmp_path / "old", tmp_path / "new", f"{spec}:new(tp = 2)", layout=f"{spec}:old()")
    one = torch.load(tmp_path / "new" / "1.pt", weights_only=True)
    assert torch.equal(one["gate"], torch.full((2,), 0.5)) and torch.equal(
        one["embed"], torch.arange(12.0, 20).reshape(2, 4)
    )
    assert torch.equal(one["exp_avg"]["embed"], torch.zeros(2, 4))
    assert "fill" not in made.plan.layout_text, "how it was made is no part of what it is"
    assert ucpl.verify(tmp_path / "new")
    ucpl.convert(tmp_path / "new", tmp_path / "back", f"{spec}:old()", drop=["gate", "exp_avg"])


def test_a_command_line_says_it(weights: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "zero")
    done = command(
        "convert", str(weights), target, "--to", "zero1(dp=2)", "--fill", "exp_avg=0", "--fill", "state exp_avg_sq=1"
    )
    assert done.status == 0, done.err
    assert "filled        exp_avg with 0: 15 elements of `b`, `w` (the source lacks them)" in done.out
    assert "filled        exp_avg_sq with 1" in done.out


@pytest.mark.parametrize("text", ["exp_avg", "=0", "exp_avg=", "w[=0", "ww=0", "w.x=0", 'w="a"', "w]=0"])
def test_a_fill_that_is_no_line_is_refused(text: str, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(UcplError) as caught:
        ucpl.convert(weights, tmp_path / "zero", "zero1(dp = 2)", fill=[text])
    assert caught.value.diagnostics[0].code in ("E197", "E326"), caught.value
    assert not (tmp_path / "zero").exists()


def test_numbers_of_parameters_are_begun_where_there_are_none(tmp_path: Path) -> None:
    """`step` of new parameters.

    In a flat buffer the step of the trained parameters is used.
    """
    source = ucpl.infer(FIXTURE)
    text, _, _ = source.text().partition("layout ")
    text = text.replace('group "0" = ', 'group "0" = fresh, ').replace(" {", " {\n  fresh : 2  dtype f32", 1)
    fills = "fill fresh = 1\n  fill state exp_avg, exp_avg_sq = 0\n  fill state step = 0"
    spec = tmp_path / "spec.ucpl"
    spec.write_text(f"{text}layout one() of {source.model.name} extends plain() {{\n  {fills}\n}}\n")
    plan = ucpl.plan(str(FIXTURE), f"{spec}:one()")
    assert plan.begun == {"step": {"fresh": 0.0}}
    assert plan.filled[-1] == "step with 0: 1 parameter (the source has none of them)"
    ucpl.save_plan(plan, tmp_path / "a.plan")
    assert ucpl.load_plan(tmp_path / "a.plan").begun == plan.begun
    ucpl.apply(tmp_path / "a.plan", FIXTURE, tmp_path / "one.pt")
    params = torch.load(tmp_path / "one.pt", weights_only=True)["params"]
    assert params["fresh"]["step"] == 0 and {
        float(p["step"]) for n, p in params.items() if "step" in p and n != "fresh"
    } == {3.0}
    assert torch.equal(params["fresh"]["weight"], torch.ones(2))


def test_what_one_side_lacks_is_not_filled_for_a_comparison(tmp_path: Path) -> None:
    text = """ucpl 1
model m {
  dim l = 3, h = 2
  w : l h  dtype f32
}
layout less() of m {
  framework torch()
  file weights = torch "a.pt"
  w[l[..2]] = h  as "w{l}"
}
layout all() of m {
  framework torch()
  file weights = torch "a.pt"
  w = l h  as "w"
  fill w = 0
}
"""
    spec = tmp_path / "spec.ucpl"
    spec.write_text(text)
    for name in ("less", "all"):
        (tmp_path / name).mkdir()
    torch.save({"w0": torch.ones(2), "w1": torch.ones(2)}, tmp_path / "less" / "a.pt")
    torch.save({"w": torch.tensor([[1.0, 1], [1, 1], [7, 7]])}, tmp_path / "all" / "a.pt")
    with pytest.raises(UcplError) as caught:
        ucpl.compare(tmp_path / "less", tmp_path / "all", a_layout=f"{spec}:less()", b_layout=f"{spec}:all()")
    assert caught.value.diagnostics[0].code == "E308"


@pytest.mark.parametrize("text", ["exp_avg=0", "state exp_avg=0", "step=0"])
def test_a_fill_of_a_state_that_the_source_has_is_reported(text: str) -> None:
    plan = ucpl.plan(str(FIXTURE), "zero1(dp = 2)", fill=[text])
    name = text.removeprefix("state ").removesuffix("=0")
    assert plan.filled == (f"nothing by `fill state {name} = 0`: the source has all of it",)


@pytest.mark.parametrize("text", ["exp_avg=0", "step=0"])
def test_a_fill_of_a_state_that_the_target_does_not_store_is_reported(text: str, weights: Path) -> None:
    """A file of tensors has no numbers of the optimizer either."""
    name = text.removesuffix("=0")
    for source in (str(FIXTURE), str(weights)):
        plan = ucpl.plan(source, "safetensors()", fill=[text])
        assert plan.filled == (f"nothing by `fill state {name} = 0`: the target stores no {name}",)
        assert plan.begun == {}


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("nosuch=0", "no tensor and no state is called `nosuch`", "a state that is new: --fill 'state nosuch=0'"),
        ("exp_awg=0.5", "no tensor and no state is called `exp_awg`", "did you mean `exp_avg`? A state that is new"),
        ("square_avq=0", "no tensor and no state is called `square_avq`", "did you mean `square_avg`?"),
        ("block.0.ln1.weight=0", "no tensor is called `block.0.ln1.weight`", "did you mean `blocks.0.ln1.weight`?"),
        (
            "nosuch.*=0",
            "it matches no tensor",
            "the source has every tensor; the states are exp_avg, exp_avg_sq, fp32, step",
        ),
        ('"nosuch*"=0', "it matches no tensor", "the states are"),
    ],
)
def test_a_fill_that_names_nothing_is_refused(text: str, said: str, remedy: str) -> None:
    """Names and globs are those of --drop."""
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(FIXTURE), "zero1(dp = 2)", fill=[text])
    (error,) = caught.value.diagnostics
    assert (error.code, error.message) == ("E197", f"--fill {text}: {said}")
    assert remedy in error.remedy
    assert ucpl.plan(str(FIXTURE), "zero1(dp = 2)", fill=["max_exp_avg_sq=0", "state nosuch=0"]).filled
    assert ucpl.plan(str(FIXTURE), "zero1(dp = 2)", fill=["blocks.0*=0"]).filled


def test_a_fill_that_names_nothing_names_the_missing_tensors(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "grown.ucpl").write_text(
        "ucpl 2\nmodel grown {\n  w : 3 4  dtype f32\n  b : 3  dtype f32\n  lora.a : 3  dtype f32\n}\n"
    )
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(weights), "safetensors()", fill=["z=0"], model=f"{tmp_path / 'grown.ucpl'}:grown")
    assert "the source lacks `lora.a`; the states are none" in caught.value.diagnostics[0].remedy
