"""A small share of the fuzzer in the default suite: each reader, always the same inputs."""

import os
import time
from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from tests.fuzz import folders
from tests.fuzz.containers import FIXTURES, pickle_of, torch_files
from tests.fuzz.damage import Kept, damage_value
from tests.fuzz.guards import guard_of
from tests.fuzz.reader import Reader, run
from tests.fuzz.readers import READERS
from ucpl.errors import UcplError
from ucpl.stores.pickles import dumps, loads
from ucpl.stores.registry import open_checkpoint

# Of each reader, some twenty seconds in all; `python -m tests.fuzz` runs more.
INPUTS = 150
FEWER = {"writers": 40, "journal": 60, "call": 100}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_only_our_own_errors_come_out(reader: Reader, tmp_path: Path) -> None:
    inputs = FEWER.get(reader.name, INPUTS)
    outcome = run(reader, tmp_path, seed=6, numbers=iter(range(inputs)))
    assert not outcome.failures, outcome.text()
    assert outcome.inputs == inputs
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


def test_a_damaged_tree_is_mended() -> None:
    """An input leaves nothing to the next one."""
    for path in torch_files():
        raw = pickle_of(path)
        tree, changed = loads(raw), 0
        wanted = dumps(tree)
        for number in range(100):
            kept = Kept()
            value, _ = damage_value(Random(number), tree, kept=kept)
            try:
                changed += dumps(value) != wanted
            except UcplError:  # no pickle can say it
                changed += 1
            kept.mend()
            assert dumps(tree) == wanted, number
        assert changed > 50


@pytest.mark.parametrize("kind", ["deepspeed", "universal", "plain"])
def test_what_is_damaged_in_memory_is_what_is_read(kind: str, tmp_path: Path) -> None:
    ready: folders.Folders = getattr(folders, kind)(tmp_path)
    for folder in ready.folders:
        part = folder.parts[0]
        with ready.remembered.but(instead={part.path: evolve(part.part, value=None)}), pytest.raises(UcplError):
            open_checkpoint(folder.path)


def test_what_goes_wrong_in_memory_counts_where_it_goes_wrong_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "z0"
    path.mkdir()
    ready = folders.Folders([folders.Folder.of(folders.copied(FIXTURES / "deepspeed" / "z0_dp2_bf16", path))])
    kept = [part.path.read_bytes() for part in ready.folders[0].parts]
    seen = []

    def broken(top: Path) -> None:
        seen.append(bool(ready.remembered.instead))
        if always or ready.remembered.instead:
            raise KeyError("planted")

    monkeypatch.setattr(folders, "open_checkpoint", broken)
    for always in (False, True):
        outcome = run(Reader("broken", lambda _: ready), path, 0, iter(range(20)))
        assert bool(outcome.failures) == always, outcome.text()
        assert {True, False} == set(seen)
    assert [part.path.read_bytes() for part in ready.folders[0].parts] == kept


def test_what_no_reader_does_is_seen(tmp_path: Path) -> None:
    """Writing elsewhere, starting a program, waiting, taking memory: each is a failure, also where it is caught."""

    class Harmful:
        damage = "planted"

        def attempt(self, rng: Random) -> str:
            match rng.randrange(4):
                case 0:
                    (tmp_path.parent / "elsewhere").write_text("harm")
                case 1:
                    os.system("true")
                case 2:
                    time.sleep(5)
                case _:
                    bytearray(b"x" * (64 << 20))
            return "harm"

    guard = guard_of(tmp_path / "inside", seconds_max=0.2, memory_max=32 << 10)
    outcome = run(Reader("harmful", lambda _: Harmful()), tmp_path, 0, iter(range(12)), 20, guard=guard)
    assert len(outcome.failures) >= 9  # a peak is a peak once
    for sign in ("Harm: open of", "Harm: os.system", "TooSlow", "memory grew by"):
        assert sign in outcome.text()
    assert not (tmp_path.parent / "elsewhere").exists()


def test_a_fault_of_a_reader_is_seen(tmp_path: Path) -> None:
    """What is no error of ours, and an error that cannot be printed, are failures with their number."""

    class Faulty:
        damage = "planted"

        def attempt(self, rng: object) -> str:
            raise KeyError("planted")

    outcome = run(Reader("faulty", lambda _: Faulty()), tmp_path, 0, iter(range(30)), failures_max=5)
    assert [failure.number for failure in outcome.failures] == [0, 1, 2, 3, 4]
    assert "planted" in outcome.text()
