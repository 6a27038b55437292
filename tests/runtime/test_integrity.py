"""integrity.json of Megatron-Core: verify holds each file against its sum."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import ucpl

SOURCE = Path(__file__).parents[1] / "fixtures" / "megatron" / "dist_muon"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as verify_integrity of megatron-core 0.17 to 0.19 writes it.

    integrity.json itself is missing.
    """
    copy = shutil.copytree(SOURCE, tmp_path / "in")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in copy.iterdir()}
    (copy / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}, indent=2))
    return copy


def codes(folder: Path) -> list[str]:
    return [f"{d.code} {Path(d.labels[0].file).name}" for d in ucpl.verify(folder).findings]


def test_every_byte_is_protected(folder: Path) -> None:
    found = ucpl.verify(folder)
    assert found and found.files.bytes_unprotected == 0
    plain = ucpl.verify(SOURCE)
    assert plain.files.bytes_unprotected > 0 and plain.files.bytes_read < found.files.bytes_read


def test_what_no_crc_covers_is_found(folder: Path) -> None:
    path = folder / "metadata.json"
    path.write_text(path.read_text().rstrip() + " ")
    assert codes(folder) == ["E635 metadata.json"]
    (folder / "extra.txt").write_text("of nobody")
    sums = json.loads((folder / "integrity.json").read_text())
    sums["files"]["gone.distcp"] = "0" * 64
    (folder / "integrity.json").write_text(json.dumps(sums))
    assert codes(folder) == ["E635 gone.distcp", "E635 metadata.json"]


@pytest.mark.parametrize(
    "text",
    ["{", '{"algorithm": "md5", "files": {}}', '{"algorithm": "sha256", "files": {"../x": "00"}}', '{"files": 3}'],
)
def test_a_list_that_cannot_be_read_is_a_finding(folder: Path, text: str) -> None:
    (folder / "integrity.json").write_text(text)
    assert codes(folder) == ["E632 integrity.json"]


@pytest.mark.parametrize("call", ["megatron_core(tp=1)", 'megatron_core(tp=1, step="iter_0000007")'])
def test_a_target_has_sums_of_its_own_files_if_the_source_has_some(call: str, folder: Path, tmp_path: Path) -> None:
    ucpl.convert(folder, tmp_path / "out", call)
    (made,) = (tmp_path / "out").rglob("integrity.json")
    files = {p.name: p for p in made.parent.iterdir() if p.is_file() and p != made}
    assert files.keys() == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert json.loads(made.read_text()) == {"algorithm": "sha256", "files": sums}
    assert ucpl.verify(tmp_path / "out")
    files["metadata.json"].write_text("{}")
    assert "E635 metadata.json" in codes(tmp_path / "out")
    ucpl.convert(SOURCE, tmp_path / "bare", call)
    assert not [*(tmp_path / "bare").rglob("integrity.json")]
