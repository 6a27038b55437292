"""Ranks that are killed, hang or never start, at any moment.

The others end soon with an error that names the rank, and any number of ranks can resume. The processes are real, with
torch's TCP store. A rank counts as dead after three seconds here, and after six outside of tests. `make faults` tries
every case; other runs try one in thirteen.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import ucpl
from tests.ranks.forked import GONE, Ended, Job
from ucpl.cli import main
from ucpl.errors import UcplError
from ucpl.ranks.job import member

SOURCE = Path(__file__).parents[1] / "fixtures/deepspeed/tp2_dp2_z1_uneven"
MORE = 60.0  # seconds after the timeout of a rank: a loaded machine is slow, but a hanging rank never ends
ALL = os.environ.get("UCPL_FAULTS") == "all"

OF_ANY = ("joined", "agreed", "tile-written", "journal-before", "journal-synced", "read-back", "moved")
OF_FIRST = ("created", "synced", "publish-before")
THEN = {2: 3, 3: 8, 8: 2}  # ranks: number of ranks that resume

ENDS = [
    pytest.param(size, bad, f"{phase}:1:{action}", hosted, id=f"{size} ranks, {bad} {phase} {action} {hosted}")
    for size in THEN
    for action in ("kill", "stop")
    for bad, phases in ((0, (*OF_ANY, *OF_FIRST)), (size - 1, OF_ANY))
    for i, phase in enumerate(phases)
    for hosted in ([True, False] if bad == 0 and phase == "tile-written" else [i % 2 == 0])
][:: 1 if ALL else 13]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan, and the files that one process writes by it."""
    top = tmp_path_factory.mktemp("ends")
    made = ucpl.plan(str(SOURCE), "zero1(dp=3, tp=1)")
    ucpl.save_plan(made, top / "grow.plan")
    ucpl.apply(made, SOURCE, top / "one")
    return top / "grow.plan", top / "one"


def command(plan: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    return ["apply", str(plan[0]), str(SOURCE), str(out), "--memory", "1M", *more]


def tree(top: Path) -> dict[str, bytes]:
    return {p.relative_to(top).as_posix(): p.read_bytes() for p in sorted(top.rglob("*")) if p.is_file()}


def others(ends: list[Ended], bad: int) -> list[Ended]:
    return [end for rank, end in enumerate(ends) if rank != bad]


@pytest.mark.fault(
    "Ranks that run a plan together",
    "SIGKILL or SIGSTOP of the first or last of 2, 3 and 8 ranks at ten failpoints",
    "the others end within seconds and name the rank; no target; any number of ranks resumes to the same bytes",
)
@pytest.mark.parametrize(("size", "bad", "what", "hosted"), ENDS)
def test_a_dead_rank_ends_the_others_and_any_number_resumes(plan, tmp_path, size, bad, what, hosted):
    out = tmp_path / "out"
    ends = Job(size, command(plan, out), {bad: what}, hosted).run(tmp_path / "first")
    assert ends[bad].status == (None if what.endswith("stop") else -9)
    for end in others(ends, bad):
        assert end.status == 4, end
        assert f"error[E621]: rank {bad} of {size} is gone" in end.said
        assert end.seconds < GONE + MORE, end
    assert not out.exists()
    again = Job(THEN[size], command(plan, out, "--resume")).run(tmp_path / "second")
    assert [end.status for end in again] == [0] * THEN[size], again
    assert tree(out) == tree(plan[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "out", "second"]


@pytest.mark.fault(
    "Ranks that run a plan together",
    "SIGKILL or SIGSTOP of a rank after publishing",
    "the target exists and is reported",
)
@pytest.mark.parametrize("what", ["publish-after:1:kill", "published:1:stop"])
def test_an_existing_target_is_reported(plan, tmp_path, what):
    """By ranks that do not know the dead first rank's progress."""
    out = tmp_path / "out"
    ends = Job(2, command(plan, out), {0: what}, hosted=False).run(tmp_path / "first")
    assert ends[1].status == 4
    assert f"{out} is complete" in ends[1].said
    assert "finished parts are kept" not in ends[1].said
    assert main(command(plan, out, "--resume")) == 0
    assert tree(out) == tree(plan[1])


def test_a_rank_that_is_gone_when_all_is_done_takes_nothing_back(plan, tmp_path):
    out = tmp_path / "out"
    ends = Job(3, command(plan, out), {2: "published:1:kill"}).run(tmp_path / "first")
    assert [end.status for end in ends] == [0, 4, -9]
    assert re.search(r"remark +rank 2 of 3 is gone.*out was complete by then", ends[0].said)
    assert ends[0].seconds < GONE + MORE
    assert f"{out} is complete" in ends[1].said
    assert tree(out) == tree(plan[1])


@pytest.mark.fault(
    "Ranks that run a plan together", "a rank that never starts", "named after `--wait`; nothing is written"
)
@pytest.mark.parametrize("hosted", [True, False])
def test_a_missing_rank_is_waited_for_as_long_as_requested(plan, tmp_path, hosted):
    out = tmp_path / "out"
    ends = Job(4, command(plan, out, "--wait", "2"), hosted=hosted, starts=(0, 2)).run(tmp_path / "logs")
    for end in ends:
        assert end.status == 4, end
        assert "error[E626]: ranks 1 and 3 of 4 did not start within 2 seconds" in end.said
        assert 1.0 < end.seconds < 2 + MORE
    assert "waiting for ranks 1 and 3 of 4 to start, at most 2 seconds (--wait)" in ends[0].said
    assert list(tmp_path.iterdir()) == [tmp_path / "logs"]


@pytest.mark.parametrize("hosted", [True, False])
def test_a_first_rank_that_does_not_come_is_named(plan, tmp_path, hosted):
    (end,) = Job(2, command(plan, tmp_path / "out", "--wait", "1"), hosted=hosted, starts=(1,)).run(tmp_path / "logs")
    text = "rank 0 of 2 did not start within 1 second" if hosted else "rank 0 of 2 was not reached within 1 second at"
    assert end.status == 4
    assert f"error[E626]: {text}" in end.said
    assert end.seconds < 1 + MORE


def test_one_that_is_gone_while_others_are_waited_for_ends_them(plan, tmp_path):
    """Long before those that were to come would be given up."""
    job = Job(3, command(plan, tmp_path / "out"), {1: "started:1:kill"}, starts=(0, 1))
    ends = job.run(tmp_path / "logs")
    assert "error[E621]: rank 1 of 3 is gone" in ends[0].said
    assert ends[0].seconds < GONE + MORE


def test_two_processes_of_one_rank_are_refused(plan, tmp_path):
    ends = Job(2, command(plan, tmp_path / "out"), starts=(0, 1, 1)).run(tmp_path / "logs")
    assert any("error[E627]: two processes of the job are rank 1 of 2" in end.said for end in ends)
    assert not (tmp_path / "out").exists() or tree(tmp_path / "out") == tree(plan[1])  # the two may be done by then


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "one", "RANK is 'one', which is no number"),
        ("RANK", "2", "RANK is 2, and WORLD_SIZE 2"),
        ("WORLD_SIZE", "2.0", "WORLD_SIZE is '2.0'"),
        ("MASTER_PORT", "99999", "MASTER_PORT is 99999"),
    ],
)
def test_variables_that_cannot_be_are_refused(monkeypatch, name, value, said):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", name: value}
    for one, text in place.items():
        monkeypatch.setenv(one, text)
    with pytest.raises(UcplError) as caught, member():
        pass
    assert caught.value.diagnostics[0].code == "E627"
    assert said in caught.value.diagnostics[0].message


def test_a_wait_that_is_no_number_is_refused(capsys):
    assert main(["apply", "x.plan", "a", "b", "--wait", "forever"]) == 2
    assert "error[E173]: --wait forever" in capsys.readouterr().err


def test_half_of_the_variables_of_a_job_are_no_process_alone(monkeypatch, tmp_path):
    """RANK and WORLD_SIZE alone do not make a single process.

    A script that sets only these would do all the work in each of its processes.
    """
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UcplError, match="RANK is 0 of 2, and MASTER_ADDR is not set") as caught, member():
        pass
    assert caught.value.diagnostics[0].code == "E627"
    monkeypatch.setenv("WORLD_SIZE", "1")
    with member() as team:
        assert team.size == 1
