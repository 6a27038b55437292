"""DeepSpeed's universal format: what DeepSpeed's converter wrote is read; what is written here is the same state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from ucpl.errors import UcplError
from ucpl.stores.deepspeed.universal import Universal

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
WRITTEN = FIXTURES / "universal"  # by ds_to_universal of deepspeed 0.19.8
DENSE = FIXTURES / "deepspeed"


def held(path: Path) -> dict[str, dict[str, Any]]:
    return torch.load(path, weights_only=True)["params"]


@pytest.mark.parametrize("name", ["z1_dp4", "z3_dp4"])
def test_what_deepspeed_wrote_is_the_truth(name: str, tmp_path: Path) -> None:
    ucpl.convert(WRITTEN / name / "global_step3_universal", tmp_path / "plain.pt", to="plain()")
    truth = torch.load(WRITTEN / name / "truth.pt", weights_only=False)["params"]
    found = held(tmp_path / "plain.pt")
    assert set(found) == set(truth)
    for tensor, states in truth.items():
        for state, value in states.items():
            assert torch.equal(found[tensor][state], value), (tensor, state)


@pytest.mark.parametrize("target", ["universal(stage=1)", "universal(stage=3)"])
@pytest.mark.parametrize("name", ["z1_dp4", "z0_dp2_bf16", "z2_dp3_frozen", "z3_dp2_subgroup"])
def test_any_stage_goes_there_and_back_at_another_degree(name: str, target: str, tmp_path: Path) -> None:
    ucpl.convert(DENSE / name, tmp_path / "atoms", to=target)
    assert ucpl.compare(DENSE / name, tmp_path / "atoms"), f"{name} is not {target}"
    back = "zero1(dp=3)" if name.startswith("z3") else "zero3(dp=5)"
    ucpl.convert(tmp_path / "atoms", tmp_path / "back", to=back)
    assert ucpl.compare(DENSE / name, tmp_path / "back"), f"{name} came back as something else"


def test_each_atom_has_the_form_that_its_loader_reads(tmp_path: Path) -> None:
    """Stages 1 and 2 read `param` in the tensor's shape, stage 3 a bare flat tensor; both find the global state."""
    for stage in (1, 3):
        ucpl.convert(DENSE / "z1_dp4", tmp_path / str(stage), to=f"universal(stage={stage})")
        root = tmp_path / str(stage) / (tmp_path / str(stage) / "latest_universal").read_text().strip()
        atom = torch.load(root / "zero" / "wte.weight" / "fp32.pt", weights_only=True)
        assert (atom["param"].shape == (67, 24)) if stage == 1 else (atom.shape == (67 * 24,))
        assert (root / "zero" / "optimizer_state.pt").is_file()
        assert (root / "zero" / "wte.weight" / "step.pt").exists() == (stage == 1)


def broken(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "z1_dp4", tmp_path / "broken")
    return tmp_path / "broken" / "global_step3_universal"


def test_a_missing_folder_of_atoms_is_named(tmp_path: Path) -> None:
    root = broken(tmp_path)
    shutil.rmtree(root / "zero" / "mix")
    with pytest.raises(UcplError, match="E452: mix is in param_shapes") as caught:
        Universal().open(root)
    assert caught.value.diagnostics[0].labels[0].file == str(root / "zero" / "mix")


def test_a_missing_state_of_one_parameter_is_named(tmp_path: Path) -> None:
    root = broken(tmp_path)
    (root / "zero" / "mix" / "exp_avg.pt").unlink()
    with pytest.raises(UcplError, match="mix"):
        ucpl.convert(root, tmp_path / "out", to="zero1(dp=2)")
    assert not (tmp_path / "out").exists()


def test_an_atom_of_another_size_is_refused(tmp_path: Path) -> None:
    root = broken(tmp_path)
    torch.save({"param": torch.zeros(3, 4)}, root / "zero" / "mix" / "fp32.pt")
    torch.save({"param": torch.zeros(3, 4)}, root / "zero" / "mix" / "exp_avg.pt")
    torch.save({"param": torch.zeros(3, 4)}, root / "zero" / "mix" / "exp_avg_sq.pt")
    with pytest.raises(UcplError, match="E458"):
        Universal().open(root)


def test_a_pointer_that_leads_out_is_refused(tmp_path: Path) -> None:
    root = broken(tmp_path)
    (root.parent / "latest_universal").write_text("../elsewhere")
    with pytest.raises(UcplError, match="E450"):
        Universal().open(root.parent)
