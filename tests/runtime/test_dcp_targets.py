"""A DCP target written by the data plane.

The target is complete at any moment, and no byte is read twice.
Its files are many archives each, and `.metadata` is known before data move: another form of files than torch's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ucpl
from tests.runtime.recorder import crash_states
from tests.runtime.test_crashes import each_tile_is_journalled, recorded, the_disk, tried  # noqa: F401  (fixtures)
from ucpl.api import open_checkpoint
from ucpl.extents import DTYPES
from ucpl.formats.dcp.store import DCP

FIXTURES = Path(__file__).parents[1] / "fixtures"
WEIGHTS = FIXTURES / "accelerate" / "fsdp" / "pytorch_model_fsdp_0"
HSDP = FIXTURES / "dcp" / "hsdp_2x2"
CHOSEN = 12  # states of the disk that are resumed from: a second of them


def test_a_folder_of_chunks_survives_any_crash(tmp_path: Path, each_tile_is_journalled: None) -> None:  # noqa: F811
    """States of all modes, evenly spread over the run.

    The target is complete or absent, and a resume ends in the same bytes.
    """
    world = open_checkpoint(WEIGHTS), ucpl.plan(str(WEIGHTS), "dcp(fsdp = 3)")
    recorder, wanted = recorded(world, tmp_path, framework=DCP())
    assert wanted.keys() >= {".metadata", "__0_0.distcp", "__2_0.distcp", "ucpl/manifest.json"}
    states = list(crash_states(recorder))
    assert len(states) > 60 and {state.mode for state in states} == {"kept", "lost", "bare", "torn"}
    for crash in states[:: -(-len(states) // CHOSEN)]:
        tried(crash, world, tmp_path / "crash", wanted, framework=DCP())


@pytest.mark.parametrize("fsdp", [1, 3])
def test_each_byte_is_read_once(fsdp: int, tmp_path: Path) -> None:
    """Chunks of four ranks, two of them copies, into those of others."""
    report = ucpl.convert(HSDP, tmp_path / "out", f"dcp(fsdp = {fsdp})").report
    source = open_checkpoint(HSDP)
    payload = sum(extent.numel * DTYPES[extent.dtype].itemsize for extent in source.extents.values())
    assert payload == report.bytes_needed <= report.bytes_read <= 1.02 * payload
    assert report.bytes_read_back == report.bytes_target
