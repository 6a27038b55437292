"""`ucpl resume`: the newest complete checkpoint, for the ranks that are there.

tests/interop/test_resume.py continues training from the printed paths.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ucpl as package
from tests.cli.command import ROOT, digest, good, ucpl
from tests.forking import Command
from ucpl.conversion import resuming

FIXTURES = ROOT / "tests" / "fixtures"
ZERO = FIXTURES / "deepspeed" / "z1_dp4"
TRAINER = FIXTURES / "trainer" / "checkpoint-3"
CHUNKS = FIXTURES / "dcp" / "fsdp2_w4"


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A Trainer's folder with two steps."""
    for step in (3, 12):
        shutil.copytree(TRAINER, tmp_path / "out" / f"checkpoint-{step}")
    return tmp_path / "out"


def path_of(*argv: object) -> Path:
    return Path(good("resume", *argv).out.strip())


def test_the_ranks_of_the_source_load_the_newest_step_itself(run: Path) -> None:
    assert path_of(run, "--ranks", 2) == run / "checkpoint-12"
    assert not Path(f"{run}.resume").exists()


@pytest.mark.parametrize("to", ["", "zero3", "zero3(dp=3)", "zero1"])
def test_other_ranks_load_a_conversion_next_to_the_run(to: str, run: Path) -> None:
    before = digest(run)
    made = path_of(run, "--ranks", 3, *(("--to", to) if to else ()))
    assert made.parent == Path(f"{run}.resume") and made.name.startswith("checkpoint-12-zero")
    assert package.compare(made, run / "checkpoint-12") and (made / "trainer_state.json").exists()
    when = (made / "latest").stat().st_mtime_ns
    assert path_of(run, "--ranks", 3, *(("--to", to) if to else ())) == made
    assert (made / "latest").stat().st_mtime_ns == when and digest(run) == before
    assert path_of(made.parent, "--ranks", 3) == made


def test_a_run_keeps_its_stage(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "checkpoint", tmp_path / "run")  # ZeRO-2, whose layout extends that of ZeRO-1
    assert good("resume", tmp_path / "run", "--ranks", 3, "--json").json["layout"] == "zero2(dp = 3)"
    assert path_of(tmp_path / "run", "--ranks", 4, "--to", "zero2") == tmp_path / "run"
    assert path_of(tmp_path / "run", "--ranks", 4, "--to", "zero1") != tmp_path / "run"


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_the_environment_of_a_job_gives_the_ranks(variable: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ucpl("resume", run)
    assert done.status == 2 and "error[E223]" in done.err and "--ranks N" in done.err
    monkeypatch.setenv(variable, "2")
    assert package.resume(run) == str(run / "checkpoint-12")


@pytest.mark.parametrize(
    "command",
    [("torchrun", "t.py"), ("bin/torchrun", "t.py"), ("python", "-m", "torch.distributed.run", "t.py")],
)
def test_tasks_of_slurm_are_not_the_ranks_of_a_launcher(
    command: tuple[str, ...], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task starts torchrun, which starts a rank for each GPU."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    done = ucpl("resume", run, "--", *command)
    assert done.status == 2 and "error[E223]" in done.err and "--ranks N" in done.err
    assert not Path(f"{run}.resume").exists()


def test_a_save_comes_before_a_folder_made_of_it(tmp_path: Path) -> None:
    """ds_to_universal writes global_step3_universal next to it."""
    shutil.copytree(ZERO, tmp_path / "run")
    package.convert(ZERO, tmp_path / "made", "universal()")
    (made,) = (tmp_path / "made").glob("global_step*")
    shutil.move(made, tmp_path / "run" / "global_step3_universal")
    found = good("resume", tmp_path / "run", "--ranks", 3, "--json").json
    assert found["source"].endswith("global_step3") and found["layout"] == "zero1(dp = 3)", found
    assert path_of(tmp_path / "run", "--ranks", 4) == tmp_path / "run"


def test_an_interrupted_save_is_passed_over(run: Path) -> None:
    (run / "checkpoint-20" / "global_step20").mkdir(parents=True)
    shard = next((run / "checkpoint-12" / "global_step3").glob("*rank_1*optim*"))
    shard.write_bytes(shard.read_bytes()[:100])
    done = good("resume", run, "--ranks", 2)
    assert Path(done.out.strip()) == run / "checkpoint-3"
    assert "checkpoint-20" in done.err and "checkpoint-12" in done.err


@pytest.mark.parametrize("when", ["before its time is read", "before its owner is read"])
def test_a_step_that_disappears_is_passed_over(when: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job removes its old steps while another one resumes."""
    gone = run / "checkpoint-12"
    steps = resuming._steps

    def of_others(place: Path) -> Iterator[Path]:
        found = list(steps(place))
        shutil.rmtree(gone)
        return iter(found)

    if when == "before its owner is read":
        monkeypatch.setattr(resuming, "_steps", of_others)
    else:
        shutil.rmtree(gone)
        gone.symlink_to("nothing")
    assert path_of(run, "--ranks", 2) == run / "checkpoint-3"


def test_a_run_never_begins_anew_because_its_saves_cannot_be_read(run: Path) -> None:
    for shard in run.glob("*/*/*_states.pt"):
        shard.write_bytes(shard.read_bytes()[:100])
    done = ucpl("resume", run, "--ranks", 2, "--", "touch", run / "begun")
    assert done.status == 3 and "error[E4" in done.err and not (run / "begun").exists()


def test_a_folder_with_latest_is_loaded_by_its_own_path(tmp_path: Path) -> None:
    shutil.copytree(ZERO, tmp_path / "run")
    assert path_of(tmp_path / "run", "--ranks", 4) == tmp_path / "run"
    shutil.copytree(tmp_path / "run" / "global_step3", tmp_path / "run" / "global_step9")
    found = good("resume", tmp_path / "run", "--ranks", 4, "--json").json
    assert found["converted"] and found["source"].endswith("global_step9") and package.verify(found["path"])
    trainer = path_of(shutil.copytree(TRAINER, tmp_path / "checkpoint-3"), "--ranks", 3)
    assert (trainer / "trainer_state.json").exists()


def test_a_checkpoint_of_any_ranks_is_never_converted(tmp_path: Path) -> None:
    shutil.copytree(CHUNKS, tmp_path / "run" / "checkpoint" / "step-10")
    found = good("resume", tmp_path / "run", "--json").json
    assert found["path"] == str(tmp_path / "run" / "checkpoint" / "step-10") and not found["converted"]
    script = tmp_path / "script" / "ckpt.pt"
    script.parent.mkdir()
    torch.save({"model": {"w": torch.ones(3)}}, script)
    assert path_of(script.parent) == path_of(script) == script


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "deepspeed" / "tp2_pp2_dp2_z1_bf16", tmp_path / "run")
    done = ucpl("resume", tmp_path / "run", "--ranks", 6)
    assert done.status == 2 and "error[E223]" in done.err and "multiple of 4" in done.err


@pytest.mark.parametrize("found", [True, False])
def test_a_command_runs_with_the_path(found: bool, run: Path, tmp_path: Path) -> None:
    here = run if found else tmp_path / "nothing"
    code = "import os, sys; print(sys.argv[1:], os.environ['UCPL_RESUME'])"
    line = [
        sys.executable,
        "-m",
        "ucpl",
        "resume",
        here,
        "--ranks",
        2,
        "--",
        sys.executable,
        "-c",
        code,
        "--at={}",
        "--x",
    ]
    done = subprocess.run([*map(str, line)], cwd=ROOT, capture_output=True, text=True)
    path = str(run / "checkpoint-12") if found else ""
    assert done.stdout == f"{[f'--at={path}', '--x']} {path}\n", done.stderr
    none = ucpl("resume", tmp_path / "nothing")
    assert (
        none.status == 1
        and none.out == ""
        and "error[E224]" in none.err
        and package.resume(tmp_path / "nothing") is None
    )


def test_processes_that_start_at_once_make_one_target(run: Path) -> None:
    started = [Command("resume", run, "--to", "zero2", WORLD_SIZE="4") for _ in range(4)]
    assert [one.end(300) for one in started] == [0] * 4
    found = {one.out for one in started}
    assert len(found) == 1
    made = Path(found.pop().strip())
    assert package.compare(made, run / "checkpoint-12") and [p.name for p in made.parent.iterdir()] == [made.name]
