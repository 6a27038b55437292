"""One GPT-like model from each form of checkpoint to each, at other degrees: what arrives is what docs/MATRIX.md says.

The model is one that Megatron-Core wrote, bf16 with masters, Adam's moments and steps. Each cell is one conversion, without a
checkpoint between, and its target is read once more. `UCPL_GOLDEN=write` writes the page.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

import ucpl

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "MATRIX.md"
ORIGIN = HERE.parent / "fixtures" / "megatron" / "dist_stacked_tp2_pp2_fully"
CUT = f"{HERE}/cut.ucpl"

# form: (what a source is made by, what a target is)
FORMS = {
    "ZeRO-1": ("zero1(dp=2)", "zero1(dp=3, tp=1)"),
    "ZeRO-3": ("zero3(dp=2)", "zero3(dp=3, tp=1)"),
    "ZeRO-1, TP": (f"{CUT}:zero1_tp(dp=1, tp=2)", f"{CUT}:zero1_tp(dp=3, tp=2)"),
    "universal": ("universal()", "universal()"),
    "DCP, FSDP2": ("dcp(fsdp=2)", "dcp(fsdp=3, tp=1)"),
    "DCP, FSDP2 x TP": (f"{CUT}:dcp_tp(fsdp=2, tp=2)", f"{CUT}:dcp_tp(fsdp=3, tp=2)"),
    "torch_dist": ("megatron_core(tp=2)", "megatron_core(pp=3)"),
    "Megatron legacy": ("megatron_legacy(tp=2)", "megatron_legacy(pp=2)"),
    "Hugging Face": ("safetensors()", 'safetensors(shard="20KB")'),
    "plain": ("plain()", "plain()"),
}
WEIGHTS, ALL = "weights", "all"
States = dict[str, dict[str, torch.Tensor]]


def parameters(folder: Path, made: Path, call: str = "") -> States:
    """What a folder has. call: what it was made by; of a text of ours, that says what no file does: how tensors are cut."""
    if call.startswith(CUT):
        ucpl.convert(folder, made, to="plain()", layout=call)
    else:
        ucpl.convert(folder, made, to="plain()")
    held = torch.load(made / "plain.pt", weights_only=True)["params"]
    shutil.rmtree(made)
    return {name: {s: torch.as_tensor(v) for s, v in states.items()} for name, states in held.items()}


@cache
def _origin(base: Path) -> tuple[Path, States]:
    """The model with a tensor for each layer, and all that it has."""
    ucpl.convert(ORIGIN, base / "origin", to="megatron_legacy()")
    return base / "origin", parameters(base / "origin", base / "truth")


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    return _origin(tmp_path_factory.mktemp("matrix"))


def arrived(found: States, wanted: States, source: str) -> str:
    """What of a model is there, each value equal: all, or the weights alone."""
    assert found.keys() == wanted.keys()
    states = {state for held in found.values() for state in held}
    for name, held in found.items():
        for state, tensor in held.items():
            true = wanted[name][state]
            if source == "Hugging Face" and state == "fp32":
                true = wanted[name]["weight"].float()  # a master is made of the weight
            assert torch.equal(tensor, true), (name, state)
    if states - {"fp32"} == {"weight"}:
        return WEIGHTS
    assert all(held.keys() == wanted[name].keys() for name, held in found.items()), states
    return ALL


@pytest.mark.parametrize("source", FORMS)
def test_a_form_goes_to_each_other(tmp_path: Path, origin: tuple[Path, States], source: str) -> None:
    folder, wanted = origin
    ucpl.convert(folder, tmp_path / "source", to=FORMS[source][0])
    row = {}
    for target, (_, call) in FORMS.items():
        ucpl.convert(tmp_path / "source", tmp_path / "target", to=call)
        assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}, "no checkpoint lies between"
        row[target] = arrived(parameters(tmp_path / "target", tmp_path / "plain", call), wanted, source)
        shutil.rmtree(tmp_path / "target")
    line = "| " + " | ".join((source, *row.values())) + " |"
    if os.environ.get("UCPL_GOLDEN") == "write":
        text = PAGE.read_text(encoding="utf-8")
        kept = [part for part in text.splitlines() if not part.startswith(f"| {source} |")]
        PAGE.write_text("\n".join([*kept, line]) + "\n", encoding="utf-8")
    assert line in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_each_form_and_nothing_else() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert rows[0] == "| from \\ to | " + " | ".join(FORMS) + " |"
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows[1:]} == {*FORMS}
