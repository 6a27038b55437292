"""What a vault's processes hold does not grow with how long they run: what a generation says is as long as a job has tensors."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vault import test_hosts
from tests.vault.small import job
from tests.vault.trained import training
from ucpl.remotes.vaults.counted import committed, job_at


def held() -> Counter[str]:
    """Objects of the product, by what they are."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if str(kind.__module__).startswith("ucpl."):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return found


def saving(tmp_path: Path, ends: ExitStack) -> Callable[[int], None]:
    """Three domains, of two ranks each."""
    here = ends.enter_context(job(tmp_path / "job", 3, "raim5", each=2))

    def step(number: int) -> None:
        here.save(number)
        here.turn()
        assert here.read() == number

    return step


def replaying(tmp_path: Path, ends: ExitStack) -> Callable[[int], None]:
    """Gradients between whole generations."""
    here = ends.enter_context(training(tmp_path / "job", domains=2, protect="mirror"))

    def step(number: int) -> None:
        here.step()
        here.save()

    return step


def of_hosts(tmp_path: Path, ends: ExitStack) -> Callable[[int], None]:
    here = ends.enter_context(test_hosts.cluster(tmp_path))
    here.serve()
    here.write("first")

    def step(number: int) -> None:
        here.step(number)
        assert here.read(1) == number

    return step


@pytest.mark.parametrize("kind", [saving, replaying, of_hosts])
def test_what_is_held_is_that_of_generations_that_count(
    kind: Callable[[Path, ExitStack], Callable[[int], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_hosts.far, "SILENT", 0.0)
    monkeypatch.setattr(test_hosts.others, "EVERY", 0.0)
    with ExitStack() as ends:
        step = kind(tmp_path, ends)
        for number in range(1, 13):  # four rounds of all slots
            step(number)
        before = held()
        for number in range(13, 25):
            step(number)
        assert held() - before == Counter()


def test_a_text_of_several_domains_is_taken_apart_once(tmp_path: Path) -> None:
    home = tmp_path / "job"
    with job(home, 3, "raim5") as here:
        here.save(1)
        here.turn()
        known = job_at(home)
        assert known is not None
        found = [here.vault.domain(n).commit_in(1, known) for n in range(3)]
        assert found[0] is not None and found[0] is found[1] is found[2] is committed(home, known)[0]
