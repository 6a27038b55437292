"""A share of the soak, and that a case which breaks the law is seen. `make soak MINUTES=60` is the long one."""

from pathlib import Path

import pytest

from tests.soak import soaking
from tests.soak.__main__ import soak
from tests.soak.soaking import BEGINNINGS, Broken, Case, End, one_case

SEED = 7
DENSE = next(n for n, start in enumerate(BEGINNINGS) if start.name == "z1_dp4")


def test_a_share_of_the_soak_holds() -> None:
    done, broken = soak(SEED, [DENSE], 1, most=1)
    assert not broken
    assert (
        done["cases"] == 1
        and done["conversions"]
        and done["ended 0"]
        and done["killed"] + done["ended 3"] + done["ended 4"]
    )


def test_a_case_is_repeated_by_its_seed(tmp_path: Path) -> None:
    """What is drawn for it, not when a kill after some time falls."""
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


def test_of_a_manifest_all_but_the_digest_of_the_source_counts(tmp_path: Path) -> None:
    (tmp_path / "ucpl").mkdir()
    manifest, seen = tmp_path / "ucpl" / "manifest.json", []
    for text in ('{"content": "a", "files": 1}', '{"content": "b", "files": 1}', '{"content": "a", "files": 2}', "{"):
        manifest.write_text(text)
        seen.append(soaking.content(tmp_path))
    assert seen[0] == seen[1] and seen[2] not in (seen[0], seen[3]) and seen[3] != seen[0]
