"""A small share of the fuzzer in the default suite: each reader, always the same inputs."""

from pathlib import Path

import pytest

from tests.fuzz.reader import Reader, run
from tests.fuzz.readers import READERS

INPUTS = 150  # of each reader, some seconds in all; `python -m tests.fuzz` runs more


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_only_our_own_errors_come_out(reader: Reader, tmp_path: Path) -> None:
    outcome = run(reader, tmp_path, seed=6, numbers=iter(range(INPUTS)))
    assert not outcome.failures, outcome.text()
    assert outcome.inputs == INPUTS
    assert outcome.codes[""], "no input was read: the valid ones are not valid"
    assert len(outcome.codes) > 1, "no input was refused: nothing is damaged"


def test_a_number_and_a_seed_are_one_input(tmp_path: Path) -> None:
    """A failure is repeated by its number alone."""
    reader = READERS[0]
    ready, again = reader.prepare(tmp_path), reader.prepare(tmp_path)
    whole = run(Reader("pickle", lambda _: ready), tmp_path, 1, iter(range(8)))
    last = run(Reader("pickle", lambda _: again), tmp_path, 1, iter((7,)))
    assert ready.damage == again.damage
    assert sum(whole.codes.values()) == 8
    assert sum(last.codes.values()) == 1


def test_a_fault_of_a_reader_is_seen(tmp_path: Path) -> None:
    """What is no error of ours, and an error that cannot be printed, are failures with their number."""

    class Faulty:
        damage = "planted"

        def attempt(self, rng: object) -> str:
            raise KeyError("planted")

    outcome = run(Reader("faulty", lambda _: Faulty()), tmp_path, 0, iter(range(30)), failures_max=5)
    assert [failure.number for failure in outcome.failures] == [0, 1, 2, 3, 4]
    assert "planted" in outcome.text()
