"""Families of models by `import hf` of their config.

Every tensor goes through ranks of other degrees and back with equal bytes, and transformers' own class gives equal
logits.
"""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

import ucpl
from tests.interop.families import FAMILIES, Case
from ucpl import api
from ucpl.inference.hf import import_hf
from ucpl.inference.hf.classes import saved_of
from ucpl.inference.hf.families import missing_parts

pytestmark = pytest.mark.interop

CASES = [
    pytest.param(case, id=f"{family} {size}") for family, sizes in FAMILIES.items() for size, case in sizes.items()
]


@pytest.mark.parametrize("case", CASES)
def test_names_of_a_class_have_its_parts(case: Case) -> None:
    """The table that is used without transformers."""
    kind = getattr(transformers, case.kind).config_class.model_type
    saved = saved_of({**case.config, "model_type": kind, "architectures": [case.kind]})
    assert saved is not None and missing_parts({"model_type": kind}, saved.shapes) == ((), True)
    assert missing_parts({"model_type": "gpt2"}, saved.shapes)[0] != () or kind == "gpt2"


def made(case: Case, folder: Path) -> None:
    """A folder of the class with random weights, norms and biases."""
    torch.manual_seed(7)
    kind = getattr(transformers, case.kind)
    model = kind(kind.config_class(**case.config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    if case.dtype == "bfloat16":
        model.save_pretrained(folder)  # the loader decides about fp32 tensors among bf16
        model = kind.from_pretrained(folder, dtype=torch.bfloat16)
        rmtree(folder)
    model.save_pretrained(folder, max_shard_size="40KB")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            out |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return out


def logits(case: Case, folder: Path) -> torch.Tensor:
    """The logits of transformers' class, without missing or unexpected keys."""
    kind = getattr(transformers, case.kind)
    # Experts one by one: torch's grouped kernel wants widths of 16 bytes.
    model, told = kind.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not told.get(what), (what, told[what])
    ids = torch.arange(16).reshape(2, 8) * 7 % case.config["vocab_size"]
    given: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    if hasattr(model.config, "num_mel_bins"):
        del given["input_ids"]
        frames = 2 * model.config.max_source_positions
        given["input_features"] = torch.randn(
            2, model.config.num_mel_bins, frames, generator=torch.Generator().manual_seed(5)
        )
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**given).logits
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_family_goes_to_ranks_and_back(case: Case, tmp_path: Path) -> None:
    made(case, tmp_path / "hf")
    spec = tmp_path / "made.ucpl"
    spec.write_text(import_hf(tmp_path / "hf" / "config.json"))
    here, ranks = f"{spec}:hf()", [f"{spec}:tensor_parallel(tp={n})" for n in case.degrees]

    stored = weights(tmp_path / "hf")
    side, _ = api.source_side(api.open_checkpoint(tmp_path / "hf"), here)  # fits, tensor for tensor
    told = {"/".join(map(str, h.key)): h.shape for p in side.placement.parts for h in p.homes}
    assert told == {name: tuple(t.shape) for name, t in stored.items()}

    ucpl.convert(tmp_path / "hf", tmp_path / "a", ranks[0], layout=here)
    ucpl.convert(tmp_path / "a", tmp_path / "b", ranks[1], layout=ranks[0])
    ucpl.convert(tmp_path / "b", tmp_path / "back", here, layout=ranks[1])
    part = sum(t.numel() for t in weights_of_rank(tmp_path, case).values())
    whole = sum(t.numel() for t in stored.values())
    assert part < 0.75 * whole, "most of it is cut"
    back = weights(tmp_path / "back")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[n].view(torch.uint8), stored[n].view(torch.uint8)) for n in stored)
    assert torch.equal(logits(case, tmp_path / "back"), logits(case, tmp_path / "hf"))


def weights_of_rank(folder: Path, case: Case) -> dict[str, torch.Tensor]:
    with safe_open(folder / "a" / "tp_00.safetensors", "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
