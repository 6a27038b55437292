"""Passes over a checkpoint's metadata, and the engine of a conversion.

Each step runs once.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ucpl
from tests.cli.command import FIXTURES, good
from ucpl.conversion.source_passes import SOURCE_PASSES
from ucpl.conversion.target_passes import TARGET_PASSES

SOURCE = FIXTURES / "z1_dp4"
FROZEN = FIXTURES / "z2_dp3_frozen"
STACKED = FIXTURES.parent / "megatron" / "dist_stacked_tp2_pp2_fully"


def listed(plan: Path) -> dict[str, list[str]]:
    """The changes of each pass, as the command prints them for scripts."""
    found = good("show", plan, "--passes", "--json").json
    return {one["name"]: one["did"] for one in found["passes"] if one["did"]}


def test_every_pass_has_a_name_and_one_line() -> None:
    passes = (*SOURCE_PASSES, *TARGET_PASSES)
    names = [one.name for one in passes]
    assert len(set(names)) == len(names)
    assert all(one.text and "\n" not in one.text and len(one.text) < 100 for one in passes)


def test_a_plan_lists_its_passes_in_their_order(tmp_path: Path) -> None:
    plan = tmp_path / "a.plan"
    good("plan", "--from", FROZEN, "--to", "zero1(dp=2)", "--freeze", "*.bias", "-o", plan)
    assert [*listed(plan)] == ["freeze"] and "bias" in listed(plan)["freeze"][0]
    text = good("show", plan, "--passes").out.splitlines()
    order = [line.split()[1] for line in text if line.startswith(("source", "target"))]
    assert order == [one.name for one in (*SOURCE_PASSES, *TARGET_PASSES)]
    assert text.count("           - nothing") == len(order) - 1


def test_a_plan_without_changes_lists_none(tmp_path: Path) -> None:
    good("plan", "--from", SOURCE, "--to", "zero1(dp=2)", "-o", tmp_path / "a.plan")
    assert listed(tmp_path / "a.plan") == {}


def test_a_source_pass_is_recorded_in_the_plan(tmp_path: Path) -> None:
    good("plan", "--from", STACKED, "--to", "megatron_legacy()", "-o", tmp_path / "a.plan")
    (text,) = listed(tmp_path / "a.plan")["unstack"]
    assert "tensors become" in text
    assert ucpl.load_plan(tmp_path / "a.plan").passes[0].name == "unstack"


def test_passes_of_no_plan_are_refused() -> None:
    from tests.cli.command import ucpl as command

    done = command("show", SOURCE, "--passes")
    assert done.status == 2 and "E171" in done.err and "--after order" in done.err


def test_passes_of_two_sides_are_listed_without_a_file() -> None:
    found = good("show", SOURCE, "--to", "zero3(dp=2)", "--after", "order", "--passes", "--json").json
    assert [one["name"] for one in found["passes"]] == [one.name for one in (*SOURCE_PASSES, *TARGET_PASSES)]


@pytest.mark.parametrize("way", ["convert", "plan and apply"])
def test_each_step_runs_once(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph of the conversion, one of the source's masters.

    Each pass runs once while a plan is made, and once more only if a saved plan is applied.
    """
    calls: list[str] = []
    import_module("ucpl.verification.masters")  # which takes `build` and `order` when it is imported

    def counted(room: str, name: str) -> None:
        module = import_module(room)
        real = getattr(module, name)

        def call(*given: Any, **more: Any) -> Any:
            calls.append(" ".join((name, more.get("name", ""))).strip())
            return real(*given, **more)

        monkeypatch.setattr(module, name, call)

    counted("ucpl.graph", "build")
    counted("ucpl.planning", "order")
    counted("ucpl.verification.masters", "build")
    counted("ucpl.verification.masters", "order")
    counted("ucpl.conversion.opening", "_opened")
    counted("ucpl.conversion.renaming", "renamed")
    passes = ("without_dropped", "without_frozen", "with_changed_groups", "with_trained_members", "with_model_names")
    for name in passes:
        counted("ucpl.conversion.target_passes", name)
    options: dict[str, Any] = {"freeze": ["*.bias"]}
    if way == "convert":
        ucpl.convert(SOURCE, tmp_path / "target", "zero1(dp=2)", **options)
        times = 1
    else:
        made = ucpl.plan(str(SOURCE), "zero1(dp=2)", **options)
        ucpl.apply(made, SOURCE, tmp_path / "target")
        times = 2  # the source of the run may be of a later step
    assert sorted(one for one in calls if one.split()[0] in ("build", "order")) == [
        "build", "build", "order convert", "order masters",
    ]  # fmt: skip
    assert [calls.count(name) for name in passes] == [times] * len(passes)
    assert calls.count("_opened") == 1


def test_a_plan_of_the_release_before_is_read(tmp_path: Path) -> None:
    """Its header has no list of passes.

    The parameters of the passes are those of today.
    """
    from ucpl.planning.files import MAGIC, load_plan, plan_bytes, sealed, unsealed

    made = ucpl.plan(str(FROZEN), "zero1(dp=2)", freeze=["*.bias"])
    head, columns = unsealed(plan_bytes(made)[len(MAGIC) :].partition(b"\n")[2])
    start, key, rest = head.partition(b',"passes":')
    _, end, rest = rest.partition(b"]],")
    assert key and end
    (tmp_path / "old.plan").write_bytes(sealed(start + b"," + rest, columns))
    old = load_plan(tmp_path / "old.plan")
    assert old.passes == () and made.passes != () and old.gone == made.gone
    ucpl.apply(old, FROZEN, tmp_path / "a")
    ucpl.apply(made, FROZEN, tmp_path / "b")
    assert ucpl.compare(tmp_path / "a", tmp_path / "b")
