"""Files of ranks that were exchanged in a copy.

Archives have the original names.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from ucpl.errors import UcplError, catalogue
from ucpl.formats.deepspeed.names import place_in_run
from ucpl.formats.opening import open_checkpoint

SHARED = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[2] / "fixtures")) / "deepspeed"
UNIVERSAL = Path(__file__).parents[2] / "fixtures" / "universal" / "z1_dp4"

MIXED = {
    "shards of stage 1": ("z1_dp4", "zero_pp_rank_{}_mp_rank_00_optim_states.pt", (0, 1)),
    "shards of stage 3, of which no weights are stored": (
        "z3_dp2_subgroup",
        "zero_pp_rank_{}_mp_rank_00_optim_states.pt",
        (0, 1),
    ),
    "model states of stage 3": ("z3_dp2_subgroup", "zero_pp_rank_{}_mp_rank_00_model_states.pt", (0, 1)),
    "tensor-parallel ranks": ("tp2_dp2_z1_uneven", "mp_rank_{:02d}_model_states.pt", (0, 1)),
    "layers": ("pp2_dp2_z1", "layer_{:02d}-model_states.pt", (1, 2)),
    "experts": ("moe_ep2_dp2_z1", "layer_0_expert_{}_mp_rank_00_model_states.pt", (0, 3)),
}


@pytest.mark.fault(
    "Folders of DeepSpeed and Hugging Face",
    "files of two ranks, layers or experts swapped or copied over each other",
    "refused, with both names",
)
@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("is_swapped", [True, False], ids=["swapped", "copied"])
def test_a_file_under_the_name_of_another_is_refused_by_both_names(case: str, is_swapped: bool, tmp_path: Path) -> None:
    name, pattern, numbers = MIXED[case]
    step = next((shutil.copytree(SHARED / name, tmp_path / "save")).glob("global_step?"))
    one, other = (step / pattern.format(n) for n in numbers)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    if is_swapped:
        other.write_bytes(kept)
    with pytest.raises(UcplError) as caught:
        open_checkpoint(tmp_path / "save")
    found = caught.value.diagnostics[0]
    assert found.code == "E465" and catalogue()["E465"].exit_status == 3
    assert any(
        f"{here.name} was written as {there.name}" in found.message for here, there in ((one, other), (other, one))
    )


def test_states_of_a_parameter_swapped_in_a_universal_folder(tmp_path: Path) -> None:
    shutil.copytree(UNIVERSAL / "global_step3_universal", tmp_path / "save")
    folder = tmp_path / "save" / "zero" / "wte.weight"
    (folder / "exp_avg.pt").rename(tmp_path / "kept")
    (folder / "exp_avg_sq.pt").rename(folder / "exp_avg.pt")
    (tmp_path / "kept").rename(folder / "exp_avg_sq.pt")
    with pytest.raises(UcplError, match=r"E465.*exp_avg\.pt was written as exp_avg_sq\.pt"):
        open_checkpoint(tmp_path / "save")


def test_an_archive_that_was_written_into_memory_says_nothing(tmp_path: Path) -> None:
    step = next((shutil.copytree(SHARED / "z1_dp4", tmp_path / "save")).glob("global_step3"))
    file = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(file) as held:
        members = {name.partition("/")[2]: held.read(name) for name in held.namelist()}
    with zipfile.ZipFile(file, "w") as made:
        for name, data in members.items():
            made.writestr(f"archive/{name}", data)
    assert open_checkpoint(tmp_path / "save").files


def test_a_prefix_is_no_other_rank() -> None:
    assert place_in_run("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt") == place_in_run(
        "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )
    assert place_in_run("pytorch_model.bin") is None
