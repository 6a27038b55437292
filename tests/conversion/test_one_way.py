"""A verb and its function are one conversion.

Both do the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.cli.command import FIXTURES, digest
from tests.cli.command import ucpl as command

SOURCE = FIXTURES / "z1_dp4"
SPEC = """ucpl 1

let wide = 4, high = 6
model own {
  w : high wide
  dtype f32
}
layout whole() of own {
  framework torch()
  file weights = torch "whole.pt"
  w = high wide as "w"
}
layout cut(tp) of own {
  framework torch()
  mesh tp
  file weights = torch "part_{tp}.pt"
  w = high@tp wide as "w"
}
"""
Converts = Callable[..., int]


def by_python(source: Path, target: Path, to: str, **sizes: int) -> int:
    try:
        ucpl.convert(source, target, to=to, sizes=sizes)
    except ucpl.UcplError as error:
        return error.exit_status
    return 0


def by_command(source: Path, target: Path, to: str, **sizes: int) -> int:
    given = [text for name, size in sizes.items() for text in ("-D", f"{name}={size}")]
    return command("convert", source, target, "--to", to, *given).status


BOTH = pytest.mark.parametrize("convert", [by_python, by_command])


@BOTH
def test_what_was_written_is_looked_at(convert: Converts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that loses a file before its name gets none."""
    room = import_module("ucpl.runtime.execute")  # the package gives the function of that name
    written = room._Run._write_texts

    def losing(run: Any, manifest: str) -> None:
        written(run, manifest)
        next(run.work.tree.rglob("*_optim_states.pt")).unlink()

    monkeypatch.setattr(room._Run, "_write_texts", losing)
    assert convert(SOURCE, tmp_path / "target", "zero1(dp=2)") == 3
    assert not (tmp_path / "target").exists()


@BOTH
def test_a_size_is_the_target_s_where_the_source_says_itself_what_it_is(convert: Converts, tmp_path: Path) -> None:
    own, other = tmp_path / "own.ucpl", tmp_path / "other.ucpl"
    own.write_text(SPEC)
    other.write_text(
        SPEC.replace("let wide", "let spare = 1, wide").replace("framework", "assert spare == 2\n  framework", 1)
    )
    (tmp_path / "whole").mkdir()
    torch.save({"w": torch.arange(24.0).view(6, 4)}, tmp_path / "whole" / "whole.pt")
    ucpl.convert(tmp_path / "whole", tmp_path / "cut", to=f"{own}:cut(tp=3)", layout=f"{own}:whole()")
    assert convert(tmp_path / "cut", tmp_path / "back", f"{other}:whole()", spare=2) == 0
    assert torch.equal(torch.load(tmp_path / "back" / "whole.pt")["w"], torch.arange(24.0).view(6, 4))
    assert convert(tmp_path / "cut", tmp_path / "wrong", f"{other}:whole()", spare=3) != 0


@BOTH
def test_a_target_that_exists_is_refused_before_the_source_is_opened(convert: Converts, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    assert convert(tmp_path / "nowhere", tmp_path / "target", "zero1(dp=2)") == 4
    assert convert(tmp_path / "nowhere", tmp_path / "other", "zero1(dp=2)") == 3


def test_the_same_bytes(tmp_path: Path) -> None:
    targets = []
    for name, convert in (("a", by_python), ("b", by_command)):
        assert convert(SOURCE, tmp_path / name, "zero3(dp=3)") == 0
        targets.append({p.name: digest(p) for p in (tmp_path / name).rglob("*.pt")})
    assert targets[0] == targets[1] and len(targets[0]) == 6


def test_a_plan_of_python_is_proved_again_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from ucpl.verification.proof import coverage

    proved: list[object] = []
    monkeypatch.setattr(coverage, "prove", proved.append)
    ucpl.plan(str(SOURCE), "zero1(dp=2)")
    assert proved == []
    ucpl.plan(str(SOURCE), "zero1(dp=2)", prove=True)
    assert len(proved) == 1


def test_keywords_are_the_options_of_a_run() -> None:
    """A keyword that no option has would be swallowed.

    An option without one could not be asked for.
    """
    from attrs import fields

    from ucpl.conversion.keywords import How, options_from
    from ucpl.runtime.options import RunOptions

    assert How.__optional_keys__ == {a.name for a in fields(RunOptions)} - {"look"}  # which is the verb's own
    assert options_from({}) == RunOptions()
    assert options_from({"resume": True, "tag": "x"}) == RunOptions(resume=True, tag="x")
