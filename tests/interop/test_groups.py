"""DeepSpeed's engine keeps each parameter's hyper-parameters in any grouping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ucpl
from tests.files.test_groups import DECAYS, RATES, REGROUPED, SHAPES, TARGETS, idle, model, source
from tests.interop.parallel import launch

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("groups_job.py")
STAGES = [target for target in TARGETS if target.startswith(("zero", "universal"))]
CASES = [(target, case) for target in STAGES for case in (*REGROUPED, "groups that train nothing")]


def stage_of(target: str) -> int:
    return 1 if target.startswith("universal") else int(target[4])


def prepared(folder: Path, target: str, case: str) -> tuple[dict[str, Any], list[list[float]]]:
    """A job that loads a target, and the expected groups."""
    folder.mkdir()
    target = target.replace("dp = 2", "dp = 1")
    names, frozen = dict(SHAPES), []
    if case in REGROUPED:
        groups, options = REGROUPED[case]
        ucpl.convert(source(folder), folder / "made", target, model=model(folder, groups), **options)
        listed = [members.split(", ") for members in groups.values()]
        like = {"n": "d" if "new" in groups else "b"}
        names |= {"n": (2, 2)}
        wanted = [[kind[like.get(one[0], one[0])] for kind in (RATES, DECAYS)] for one in listed]
    else:
        ucpl.convert(idle(folder), folder / "made", target)
        listed, names, frozen = [["a"], ["b", "c"], ["d"]], names | {"void": (0,), "frozen": (3,)}, ["frozen"]
        wanted = [[kind[one[0]] for kind in (RATES, DECAYS)] for one in listed]
        if target.startswith(
            "zero0"
        ):  # ZeRO's shards have no parameters without elements, torch's optimizer numbers them
            listed[0] = ["a", "void"]
        if target.startswith(("zero0", "zero3")):  # torch's optimizer and ZeRO-3 have groups of frozen parameters
            listed.insert(0, ["frozen"])
            wanted.insert(0, [5.0, 0.5])
    held = {name for one in listed for name in one} | ({"void", "frozen"} if frozen else set())
    shapes = {name: list(shape) for name, shape in names.items() if name in held}
    job = {"do": "load", "world": 1, "shapes": shapes, "frozen": frozen, "groups": listed, "stage": stage_of(target)}
    more = {"universal": target.startswith("universal"), "folder": str(folder / "made")}
    return {**job, **more, "result": str(folder / "result.json")}, wanted


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Any, list[list[float]]]]:
    top = tmp_path_factory.mktemp("groups")
    made = {case: prepared(top / str(n), *case) for n, case in enumerate(CASES)}
    launch("groups", [job for job, _ in made.values()], JOB)
    return {case: (json.loads(Path(job["result"]).read_text()), wanted) for case, (job, wanted) in made.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].partition('(')[0]}-{case[1]}")
def test_an_engine_has_the_values_that_each_parameter_had(
    case: tuple[str, str], loaded: dict[tuple[str, str], tuple[Any, list[list[float]]]]
) -> None:
    found, wanted = loaded[case]
    assert "error" not in found, found
    assert found["groups"] == wanted
