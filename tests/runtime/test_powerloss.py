"""Power loss at any call, with any subset of unsynced changes kept.

A sample by default; all states with UCPL_POWERLOSS=all (`make powerloss`), where each case prints how many it tried.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.cli.command import FIXTURES, good, ucpl
from tests.faults.layer import Layer
from tests.runtime.recorder import Crash, Recorder, Survivor, crash_states, reordered_states
from tests.runtime.test_crashes import content, each_tile_is_journalled, recorded, run, the_disk, tried, world  # noqa: F401
from tests.runtime.world import Torch, remade
from ucpl.runtime.disk import Disk, use_disk

ALL = os.environ.get("UCPL_POWERLOSS") == "all"
SAMPLE = 8
DRAWS = 40 if ALL else 3
TRAINER = FIXTURES.parent / "trainer" / "checkpoint-3"


def each(states: Iterable[Crash], law: Callable[[Crash], None], sample: int = SAMPLE) -> None:
    """Hold a law in all states, or in a sample of them."""
    found = list(states)
    assert len(found) > 30
    drawn = found if ALL else random.Random(len(found)).sample(found, sample)
    for crash in drawn:
        law(crash)
    print(f"{len(drawn)} of {len(found)} states")


@pytest.mark.fault(
    "Power loss", "the disk keeps unsynced renames and writes in any order (all orders in `make powerloss`)", "the same"
)
@pytest.mark.usefixtures("each_tile_is_journalled")
@pytest.mark.parametrize("how", ["new", "force", "force without exchange"])
def test_a_folder_survives_any_order(world, tmp_path: Path, how: str) -> None:  # noqa: F811
    more = {"force": True} if "force" in how else {}
    recorder, wanted = recorded(world, tmp_path, exchanges=how != "force without exchange", **more)
    each(reordered_states(recorder, draws=DRAWS), lambda crash: tried(crash, world, tmp_path / "crash", wanted, **more))


@pytest.mark.usefixtures("each_tile_is_journalled")
def test_a_single_file_survives_any_order(world, tmp_path: Path) -> None:  # noqa: F811
    source, plan = world
    one = source, remade(plan, targets=tuple(evolve(t, file="model.pt") for t in plan.targets))
    more: dict[str, Any] = {"framework": Torch(texts={})}
    recorder, wanted = recorded(one, tmp_path, "out.pt", **more)
    each(
        reordered_states(recorder, draws=DRAWS),
        lambda crash: tried(crash, one, tmp_path / "crash", wanted, "out.pt", **more),
    )


@pytest.mark.fault("Power loss", "the same into a single file, and during a resumed run", "the same")
@pytest.mark.usefixtures("each_tile_is_journalled")
def test_a_resumed_run_survives_any_order(world, tmp_path: Path) -> None:  # noqa: F811
    source, plan = world
    recorder, wanted = recorded(world, tmp_path)
    first = next(c for c in crash_states(recorder, ("torn",)) if c.marks.count("journalled") == 1)
    (tmp_path / "again").mkdir()
    first.tree.lay_out(tmp_path / "again")
    second = Recorder(tmp_path / "again")
    use_disk(second)
    run(plan, source, tmp_path / "again" / "out", resume=True)
    use_disk(Disk())
    each(reordered_states(second, draws=DRAWS), lambda crash: tried(crash, world, tmp_path / "crash", wanted))


@pytest.fixture
def container(tmp_path: Path) -> tuple[Path, list[object]]:
    """A Trainer's folder, and a conversion that makes its weights anew."""
    made = tmp_path / "src"
    shutil.copytree(TRAINER, made)
    torch.save({"rank": 1}, made / "rng_state_1.pth")
    return made, ["convert", made, "PLACE", "--to", "zero1(dp=3, bf16=1)", "--workers", "1"]


@pytest.mark.fault("Power loss", "the same during `convert` of a Trainer's folder with rewritten weights", "the same")
def test_a_container_with_weights_made_anew_survives_any_crash(
    container: tuple[Path, list[object]], tmp_path: Path
) -> None:
    _, command = container

    def argv(place: Path, *more: str) -> list[object]:
        return [place / "out" if part == "PLACE" else part for part in command] + list(more)

    place = tmp_path / "place"
    place.mkdir()
    recorder = Recorder(place)
    use_disk(recorder)
    good(*argv(place))
    use_disk(Disk())
    wanted = content(place / "out")
    assert any(".out.ucpl-made" in str(e.name) for e in recorder.events), "what is made anew is not recorded"

    def law(crash: Crash) -> None:
        top = tmp_path / "crash"
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
        use_disk(Survivor(crash.tree.lay_out(top)))
        assert content(top / "out") in (None, wanted), f"{crash}: half a target"
        done = ucpl(*argv(top, "--resume"))
        assert done.status == 0, f"{crash}: {done.err}"
        assert content(top / "out") == wanted, f"{crash}: other bytes in the end"
        assert os.listdir(top) == ["out"], f"{crash}: something is left"

    each([*crash_states(recorder), *reordered_states(recorder, draws=4 if ALL else 1, ones=False)], law, 4)


@pytest.mark.fault(
    "Power loss",
    "power loss while `plan -o`, `infer -o` or `fmt` writes a text",
    "the old or the new text; the new one after the verb ends",
)
@pytest.mark.parametrize("verb", ["plan", "infer", "fmt"])
def test_a_text_is_durable_before_it_has_its_name_and_its_name_before_it_is_done(verb: str, tmp_path: Path) -> None:
    """After a power loss the target is the old or new text.

    Once the verb has ended, it is the new text.
    """
    out = tmp_path / "out.ucpl"
    source = FIXTURES / "z1_dp2_sgdm"
    good("infer", source, "-o", out)
    out.write_text(out.read_text().replace(" = ", "  =  ", 1))
    argv: dict[str, list[object]] = {
        "plan": ["plan", "--from", source, "--to", "zero1(dp=3)", "-o", out],
        "infer": ["infer", source, "-o", out],
        "fmt": ["fmt", out],
    }
    layer = Layer((tmp_path,))
    with layer.put_in():
        good(*argv[verb])
    changing = [call for call in layer.order if call.split()[0] in ("write", "pwrite", "fsync", "replace", "rename")]
    steps = [call.split()[0] for call in changing]
    last = len(steps) - 1 - steps[::-1].index("write")
    assert steps[last:] == ["write", "fsync", "replace", "fsync"]
    assert changing[last].split()[1] == changing[last + 1].split()[1] == changing[last + 2].split()[1] != str(out)
    assert changing[-1] == f"fsync {tmp_path}"
