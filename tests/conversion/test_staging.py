"""Weights for a target are next to it until it appears.

Those of a killed run go with the next one.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.command import good
from tests.forking import Command
from tests.formats.folders.test_containers import source  # noqa: F401  (a Trainer's folder)

BEGUN = ("convert", "source", "target", "--to", "zero1(dp=3, bf16=1)")


def killed(folder: Path, *argv: str) -> None:
    """End a run by SIGKILL while its target is written.

    The weights next to the shards exist by then.
    """
    assert Command(*argv, cwd=folder, UCPL_FAIL_AT="target-write:40:kill").end() == -signal.SIGKILL


@pytest.mark.fault(
    "Interruption",
    "SIGKILL while companion weights are rewritten",
    "`--resume`, a fresh run and `apply` into that place remove the leftovers",
)
@pytest.mark.parametrize(
    "following",
    [
        (*BEGUN, "--resume"),
        BEGUN,
        ("convert", "source", "target", "--to", "zero1(dp=3)"),
        ("apply", "it.plan", "source", "target"),
    ],
    ids=["resumed", "again", "another", "applied"],
)
def test_what_a_killed_run_made_goes_with_the_next_run_into_its_place(
    following: tuple[str, ...],
    source: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = source.parent
    monkeypatch.chdir(folder)
    source.rename("source")
    good("plan", "--from", "source", "--to", "zero1(dp=3)", "-o", "it.plan")
    killed(folder, *BEGUN)
    assert (folder / ".target.ucpl-made").is_dir()
    good(*following)
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
