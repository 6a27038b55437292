"""A persisted generation is complete or absent after a power loss (F18)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.runtime.recorder import Crash, Recorder, Survivor, crash_states, reordered_states
from tests.runtime.test_crashes import content, the_disk  # noqa: F401
from tests.vault.states import Truth, memory
from ucpl.runtime.disk import Disk, use_disk
from ucpl.vault.persisted import persist


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1, 2))


@pytest.mark.fault(
    "Vaults",
    "power loss at any call while a snapshot is persisted (F18)",
    "absent or complete; a new start writes the same bytes",
)
def test_what_is_persisted_survives_any_crash(tmp_path: Path, truth: Truth) -> None:
    with memory(tmp_path / "job", truth, domains=2, protect="mirror") as here:
        for step in (1, 2):
            here.save(truth, step)
            here.turn()
    place = tmp_path / "place"
    place.mkdir()
    recorder = Recorder(place)
    use_disk(recorder)
    persist(tmp_path / "job", place / "step-2")
    use_disk(Disk())
    wanted = content(place / "step-2")
    assert wanted is not None and any("ucpl/state.json" in str(name) for name in wanted)
    assert truth.step_of(place / "step-2") == 2

    def law(crash: Crash) -> None:
        top = tmp_path / "crash"
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
        use_disk(Survivor(crash.tree.lay_out(top)))
        found = content(top / "step-2")
        assert found in (None, wanted), f"{crash}: half a target"
        if found is None:
            persist(tmp_path / "job", top / "step-2")
        use_disk(Disk())
        assert content(top / "step-2") == wanted, f"{crash}: other bytes in the end"
        assert os.listdir(top) == ["step-2"], f"{crash}: something is left"

    states = [*crash_states(recorder), *reordered_states(recorder, draws=40)]
    assert len(states) > 30
    for crash in states:
        law(crash)
