"""A small share of the fuzzer in the default suite.

Each reader, always the same inputs.
"""

import os
import resource
import time
from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from tests.fuzz import folders, lessened, lessened_megatron, texts
from tests.fuzz.containers import FIXTURES, pickle_of, torch_files
from tests.fuzz.damage import Kept, damage_value
from tests.fuzz.dcp import Dcp, asked
from tests.fuzz.guards import guard_of
from tests.fuzz.reader import Reader, run
from tests.fuzz.readers import READERS
from tests.layout.fuzzing import tried
from ucpl.errors import UcplError
from ucpl.files.pickles import dumps, loads
from ucpl.formats.opening import open_checkpoint

# Of each reader, some ten seconds in all; `python -m tests.fuzz` runs more.
INPUTS = 100
FEWER = {"writers": 25, "torch-dist": 25, "megatron-fsdp": 25, "journal": 40, "megatron": 60, "call": 70}
DENSE = ("z0_dp2_bf16", "z2_dp3_frozen", "z3_dp2_subgroup")


@pytest.fixture(autouse=True)
def few_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small checkpoints those of dense stages.

    To make one takes as long as fifty inputs, and a long run has them all.
    """
    monkeypatch.setattr(lessened, "KINDS", {name: lessened.KINDS[name] for name in DENSE})
    monkeypatch.setattr(lessened_megatron, "BUCKETS", {"split_buckets": lessened_megatron.BUCKETS["split_buckets"]})
    monkeypatch.setattr(lessened_megatron, "LEGACY", {"moe": lessened_megatron.LEGACY["moe"]})


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


@pytest.mark.parametrize("kind", ["deepspeed", "universal", "plain", "megatron"])
def test_what_is_damaged_in_memory_is_what_is_read(kind: str, tmp_path: Path) -> None:
    ready: folders.Folders = getattr(folders, kind)(tmp_path)
    for folder in ready.folders:
        part = folder.parts[0]
        with ready.remembered.but(instead={part.path: evolve(part.part, value=None)}), pytest.raises(UcplError):
            open_checkpoint(folder.path)


def test_short_texts_are_right() -> None:
    """Each is read to the end, with some of its arguments."""
    for text in texts.FEW:
        assert any(not list(tried(text, Random(seed))) for seed in range(20)), text


@pytest.mark.parametrize("kind", ["prepare", "of_megatron", "of_megatron_fsdp"])
def test_what_is_damaged_in_metadata_in_memory_is_what_is_read(kind: str, tmp_path: Path) -> None:
    """Once more after it was remembered as it is.

    Mended values are read again.
    """
    ready: Dcp = getattr(Dcp, kind)(tmp_path)
    for folder in dict.fromkeys(ready.folders):
        with ready.remembered.but(pickled=(None,)), pytest.raises(UcplError):
            open_checkpoint(folder.path)
        with ready.remembered.but(pickled=(folder.metadata,)):
            again = open_checkpoint(folder.path)
        with ready.remembered.but():
            remembered = open_checkpoint(folder.path)
        assert asked(again) == asked(remembered) == asked(open_checkpoint(folder.path)) == folder.asked


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
    """Writing elsewhere, starting a program, working without end, waiting, taking memory.

    Each is a failure.
    """
    harm = ["Harm: open of", "Harm: os.system", "in working", "in waiting", "memory grew by"]

    class Harmful:
        damage = "planted"
        number = 0

        def attempt(self, rng: Random) -> str:
            self.number += 1
            match self.number % len(harm):
                case 1:
                    (tmp_path.parent / "elsewhere").write_text("harm")
                case 2:
                    os.system("true")
                case 3:
                    working()
                case 4:
                    waiting()
                case _:
                    touched(beneath_the_peak() + (64 << 20))
            return "harm"

    def beneath_the_peak() -> int:
        """Bytes that the process has freed again since it was largest."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - pages * resource.getpagesize()

    def touched(size: int) -> None:
        """Memory that is there, a byte of each page.

        All of them would take seconds of a process that was large.
        """
        taken = bytearray(size)
        taken[:: resource.getpagesize()] = b"x" * -(-size // resource.getpagesize())

    def working() -> None:
        until = time.process_time() + 20
        while time.process_time() < until:
            pass

    def waiting() -> None:
        time.sleep(60)

    guard = evolve(guard_of(tmp_path / "inside"), seconds_max=0.5, waiting_max=2.0, memory_max=32 << 10)
    outcome = run(Reader("harmful", lambda _: Harmful()), tmp_path, 0, iter(range(5)), guard=guard)
    for failure, sign in zip(outcome.failures, harm, strict=True):
        assert sign in failure.trace
    assert all("TooSlow" in failure.trace for failure in outcome.failures[2:4])
    assert not (tmp_path.parent / "elsewhere").exists()


def test_a_fault_of_a_reader_is_seen(tmp_path: Path) -> None:
    """Errors that are not ours, and unprintable ones, are numbered failures."""

    class Faulty:
        damage = "planted"

        def attempt(self, rng: object) -> str:
            raise KeyError("planted")

    outcome = run(Reader("faulty", lambda _: Faulty()), tmp_path, 0, iter(range(30)), failures_max=5)
    assert [failure.number for failure in outcome.failures] == [0, 1, 2, 3, 4]
    assert "planted" in outcome.text()
