"""Known formats that cannot be read yet are rejected by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint


def folder_of(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def refused(path: Path) -> tuple[str, str, str]:
    with pytest.raises(UcplError) as found:
        open_checkpoint(path)
    said = found.value.diagnostics[0]
    return said.code, said.message, said.remedy


@pytest.mark.parametrize(
    "names",
    [(".metadata",), ("0_0.distcp",), ("meta.pt",), ("pytorch_model_fsdp_0/x",), ("pytorch_model_fsdp_0/.metadata",)],
)
def test_a_name_alone_makes_no_such_checkpoint(tmp_path: Path, names: tuple[str, ...]) -> None:
    """E401: a torch file that is empty."""
    assert refused(folder_of(tmp_path / "other", *names))[0] == ("E401" if names == ("meta.pt",) else "E435")


@pytest.mark.parametrize("others", [(), ("__1_0.distcp", "__2_0.distcp")])
def test_chunks_without_their_metadata_are_reported(tmp_path: Path, others: tuple[str, ...]) -> None:
    """`cp run/* there` skips names with a first dot.

    An interrupted save has none yet.
    """
    code, said, advice = refused(folder_of(tmp_path / "run", "__0_0.distcp", *others))
    assert code == "E452" and said.startswith(".metadata is missing: __0_0.distcp" + " and 2 more" * bool(others))
    assert "cp *" in advice and "interrupted" in advice


def test_a_state_dict_in_a_dict_is_a_torch_file(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "last.ckpt")
    assert open_checkpoint(tmp_path / "last.ckpt").format == "torch_file"
