"""A target that states another training dtype than the source's is refused, for every kind of source; nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from tests.cli.command import FIXTURES, ROOT
from tests.cli.command import ucpl as command

UNIVERSAL = next((ROOT / "tests" / "fixtures" / "universal" / "z1_dp4").glob("*_universal"))
F32 = ["z1_dp4", "z2_dp3_frozen", "z3_dp2_subgroup", "pp2_dp2_z1", "tp2_dp2_z1_uneven", "moe_ep2_dp2_z1"]
BF16 = ["z0_dp2_bf16", "z1_dp2_bf16", "z1_dp2_bf16opt"]
MODEL = 'ucpl 1\nmodel m {\n  w : 6 4 dtype bf16\n  group "0" = w\n  state fp32, exp_avg : f32\n}\n'


def refused(source: Path | str, to: str, **how: str) -> str:
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.plan(str(source), to, **how)  # type: ignore[arg-type]
    (found,) = caught.value.diagnostics
    return found.code


def targets(name: str, flag: str) -> list[str]:
    """Layouts that such a source can become, each stating a dtype."""
    if name.startswith("pp"):
        return [f"zero1({flag})"]
    if name.startswith("moe"):
        return [f"zero1({flag})", f"zero2({flag})"]
    if name.startswith("tp"):
        return [f"zero1(dp=1, {flag})", f"zero0(dp=2, {flag})", f"zero1(dp=2, tp=1, {flag})"]
    stages = (0, 3) if name.endswith("bf16opt") else range(4)  # 1 and 2 assert that it is for bf16
    return [f"zero{stage}(dp=3, {flag})" for stage in stages] + [f"universal({flag})"]


@pytest.mark.parametrize("name", F32)
@pytest.mark.parametrize("flag", ["bf16=1", "fp16=1"])
def test_a_16_bit_target_of_an_f32_source(name: str, flag: str) -> None:
    assert {refused(FIXTURES / name, to) for to in targets(name, flag)} == {"E187"}


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("flag", ["bf16=0", "bf16=0, fp16=1"])
def test_another_target_of_a_bf16_source(name: str, flag: str) -> None:
    assert {refused(FIXTURES / name, to) for to in targets(name, flag)} == {"E187"}


@pytest.mark.parametrize("name", [*F32, *BF16])
def test_the_source_s_own_dtype_may_be_stated(name: str) -> None:
    flag = "bf16=1" if name in BF16 else "bf16=0, fp16=0"
    for to in targets(name, flag):
        assert ucpl.plan(str(FIXTURES / name), to)


def test_a_universal_source() -> None:
    found = {bool(s.value) for n, s in _settings(UNIVERSAL).items() if n == "bf16"}
    assert len(found) == 1
    assert refused(UNIVERSAL, f"zero1(dp=2, bf16={int(not found.pop())})") == "E187"


def _settings(path: Path):
    from ucpl.api import open_checkpoint

    return open_checkpoint(path).envelope.settings


def test_both_at_once() -> None:
    assert refused(FIXTURES / "z1_dp4", "zero1(dp=2, bf16=1, fp16=1)") == "E188"


def test_a_plain_file_keeps_how_its_source_trained(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "z1_dp4", tmp_path / "a.pt", to="plain()")
    assert refused(tmp_path / "a.pt", "zero1(dp=2, bf16=1)") == "E187"
    assert ucpl.plan(str(tmp_path / "a.pt"), "zero1(dp=2, bf16=0)")


@pytest.mark.parametrize(
    ("dtype", "to", "good"),
    [
        (torch.float32, "zero1(dp=2, bf16=1)", False),
        (torch.float32, "zero1(dp=2, fp16=1)", False),
        (torch.float32, "zero1(dp=2, bf16=0)", True),
        (torch.float32, "zero1(dp=2)", True),
        (torch.bfloat16, "zero1(dp=2, bf16=1)", True),
        (torch.bfloat16, "zero1(dp=2, bf16=0)", False),
        (torch.bfloat16, "zero1(dp=2, fp16=1)", False),
        (torch.float16, "zero1(dp=2, fp16=1)", True),
        (torch.float16, "zero1(dp=2, bf16=1)", False),
    ],
)
def test_weights_alone_say_their_dtype(dtype: torch.dtype, to: str, good: bool, tmp_path: Path) -> None:
    """A folder of weights has no settings: what it holds must be what the target trains."""
    save_file({"a": torch.ones(4, dtype=dtype), "b": torch.ones(3, 5, dtype=dtype)}, tmp_path / "model.safetensors")
    if good:
        assert ucpl.plan(str(tmp_path), to)
    else:
        assert refused(tmp_path, to) == "E187"


def test_one_weight_of_another_dtype_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    done = command("convert", tmp_path, tmp_path / "x", "--to", "zero1(dp=2, bf16=1)")
    assert done.status == 2 and "weight of b: holds f32" in done.err and "bf16 = 1" in done.err
    assert not (tmp_path / "x").exists()


def test_specs_alone(tmp_path: Path) -> None:
    """Without a checkpoint the source's call says how it trains, and the target takes it over."""
    (tmp_path / "m.ucpl").write_text(MODEL)
    model = f"{tmp_path}/m.ucpl:m"
    made = ucpl.plan("zero1(dp=4, bf16=1)", "zero1(dp=2)", model=model)
    assert "bf16 = 1" in made.target_call and ("bf16", "the source's layout") in {
        (o.name, o.origin) for o in made.origins
    }
    assert refused("zero1(dp=4, bf16=1)", "zero1(dp=2, bf16=0)", model=model) == "E187"
    assert refused("zero1(dp=4)", "zero3(dp=2, bf16=1)", model=model) == "E187"


def test_a_layout_that_extends_a_shipped_one_states_it_too(tmp_path: Path) -> None:
    (tmp_path / "own.ucpl").write_text("ucpl 1\nlayout own(dp) of any extends zero1(dp = dp, bf16 = 1) {\n}\n")
    assert refused(FIXTURES / "z1_dp4", f"{tmp_path}/own.ucpl:own(dp=2)") == "E187"
    assert ucpl.plan(str(FIXTURES / "z1_dp2_bf16"), f"{tmp_path}/own.ucpl:own(dp=2)")
