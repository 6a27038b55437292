"""Folders in fp8 blocks without a spec: `infer` pairs scales with weights.

Layouts of any model make products of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucpl
from tests.formats.huggingface.folders import assert_equal, llama_config, llama_shapes, random_of, save, tensors_of
from ucpl import api
from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.layout import load

GENERIC = """ucpl 1

layout bf16() of any {
  framework huggingface()
  file weights = safetensors "model.safetensors"
  *               = ... as "{name}"
  "*_proj.weight" = ... dtype bf16 value x * scale as "{name}"
  "*_scale_inv"   = none
}
"""


def folder(path: Path, sides: list[int], dtype: torch.dtype = torch.float8_e4m3fn) -> Path:
    config = llama_config(quantization_config={"quant_method": "fp8", "weight_block_size": sides})
    tensors = random_of(llama_shapes(config))
    for name in [n for n in tensors if "_proj" in n]:
        rows, columns = tensors[name].shape
        tensors[name] = (tensors[name] * 50).to(dtype)
        tensors[name + "_scale_inv"] = torch.rand(-(-rows // 8), -(-columns // 16))
    for name in [n for n in tensors if "_proj" not in n and "norm" not in n]:
        tensors[name] = tensors[name].bfloat16()
    return save(path, tensors, config)


def inferred(folder: Path) -> dict[str, nodes.Tensor]:
    model = load(("made.ucpl", api.infer(folder).text())).model("checkpoint").node
    assert isinstance(model, nodes.Model)
    return {i.path: i for i in model.items if isinstance(i, nodes.Tensor)}


def test_infer_says_which_scale_is_of_what(tmp_path: Path) -> None:
    found = inferred(folder(tmp_path / "s", [8, 16]))
    scales = {path: t.scaling for path, t in found.items() if t.scaling is not None}
    assert len(scales) == 4 * 7 and all(path == f"{s.of}_scale_inv" for path, s in scales.items())
    assert {tuple(n.value for n in s.by if isinstance(n, nodes.Number)) for s in scales.values()} == {(8, 16)}


@pytest.mark.parametrize(("sides", "dtype"), [([16, 8], torch.float8_e4m3fn), ([8, 16], torch.bfloat16)])
def test_shapes_or_types_that_disagree_give_no_pair(tmp_path: Path, sides: list[int], dtype: torch.dtype) -> None:
    assert not any(t.scaling for t in inferred(folder(tmp_path / "s", sides, dtype)).values())


def test_what_infer_writes_moves_weights_and_scales_as_they_are(tmp_path: Path) -> None:
    source = folder(tmp_path / "s", [8, 16])
    (tmp_path / "made.ucpl").write_text(api.infer(source).text())
    ucpl.convert(source, tmp_path / "plain.pt", "plain()", layout=f"{tmp_path / 'made.ucpl'}:stored()")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "back", "safetensors()")
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(source))


def test_a_layout_of_any_model_dequantises_a_folder(tmp_path: Path) -> None:
    source = folder(tmp_path / "s", [8, 16])
    (tmp_path / "any.ucpl").write_text(GENERIC)
    ucpl.convert(source, tmp_path / "bf16", f"{tmp_path / 'any.ucpl'}:bf16()")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "bf16" / "model.safetensors")
    assert set(after) == {n for n in before if not n.endswith("_scale_inv")}
    for name, tensor in after.items():
        if (scale := before.get(name + "_scale_inv")) is None:
            assert torch.equal(tensor, before[name])
            continue
        rows, columns = tensor.shape
        each = scale.repeat_interleave(8, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
        assert torch.equal(tensor, (before[name].float() * each).bfloat16())
    assert "quantization_config" not in (tmp_path / "bf16" / "config.json").read_text()


def test_weights_without_their_scales_are_refused(tmp_path: Path) -> None:
    """A weight and its scales move together, or become one product.

    A layout that leaves out only scales separates them.
    """
    source = folder(tmp_path / "s", [8, 16])
    (tmp_path / "any.ucpl").write_text(GENERIC.replace(" dtype bf16 value x * scale", ""))
    with pytest.raises(UcplError, match=r"E310.*weight_scale_inv has no place in the target"):
        ucpl.convert(source, tmp_path / "torn", f"{tmp_path / 'any.ucpl'}:bf16()")
    assert not (tmp_path / "torn").exists()
