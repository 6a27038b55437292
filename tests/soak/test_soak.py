"""A share of the soak, and a case that breaks the law.

`make soak MINUTES=60` is the long one.
"""

import os
from pathlib import Path

import pytest

from tests.cli.command import good
from tests.soak import soaking
from tests.soak.__main__ import soak
from tests.soak.soaking import BEGINNINGS, Broken, Case, End, one_case

SEED = 7
DENSE = next(n for n, start in enumerate(BEGINNINGS) if start.name == "z1_dp4")


def test_a_share_of_the_soak_holds() -> None:
    """The faults of a run depend on the machine's speed.

    An interrupt is one, a kill at the end is none.
    """
    done, broken = soak(SEED, [DENSE], 1, most=1)
    assert not broken
    ended = {name: n for name, n in done.items() if name == "killed" or name.startswith("ended ")}
    ended.pop("ended 0", None)
    assert done["cases"] == 1 and done["conversions"] and sum(ended.values()), done


def test_a_case_is_repeated_by_its_seed(tmp_path: Path) -> None:
    """The draws for it, without kills after some time."""
    for name in "ab":
        (tmp_path / name).mkdir()
    one, other = (next(one_case(SEED, 40, tmp_path / name)) for name in "ab")
    assert one.start is other.start and one.rng.random() == other.rng.random()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    made = next(one_case(SEED, DENSE, tmp_path))
    made.wanted, made.standing = {"a": 1}, None
    return made


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (End(0, ""), "wrote other bytes"),
        (End(1, "internal error: KeyError"), "no error of ours"),
        (End(3, "it is broken"), "without a code"),
        (End(7, "error[E610]: lost"), "without a code"),
    ],
)
def test_what_breaks_the_law_is_seen(case: Case, end: End, says: str) -> None:
    before = soaking.content(case.source)
    with pytest.raises(Broken, match=says):
        case._hold(end, before, None, case.out)
    case._hold(End(3, "error[E610]: lost"), before, None, case.out)
    case.out.mkdir()
    with pytest.raises(Broken, match="neither what stood there nor the new one"):
        case._hold(End(3, "error[E610]: lost"), before, None, case.out)


def test_a_source_that_a_run_changed_is_seen(case: Case) -> None:
    before = soaking.content(case.source)
    soaking.flip(case.source / "latest", 3)
    with pytest.raises(Broken, match="the source was changed"):
        case._hold(End(0, ""), before, None, case.out)


def test_of_a_manifest_all_but_the_digest_of_the_source_counts(tmp_path: Path, case: Case) -> None:
    seen = []
    for n in range(2):
        os.utime(next(case.source.rglob("*optim_states.pt")), (n, n))  # another source, of the same bytes
        good("convert", case.source, tmp_path / f"out{n}", "--to", "zero1(dp=1)")
        seen.append(soaking.content(tmp_path / f"out{n}"))
    manifest = tmp_path / "out1" / "ucpl" / "manifest.json"
    texts = [(tmp_path / f"out{n}" / "ucpl" / "manifest.json").read_text() for n in range(2)]
    assert seen[0] == seen[1] and texts[0] != texts[1]
    for text in (texts[1].replace('"digest":', '"other":'), "{", "[]"):
        manifest.write_text(text)
        assert soaking.content(tmp_path / "out1") != seen[1]
