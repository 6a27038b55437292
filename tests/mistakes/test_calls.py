"""Command lines that go wrong, as data (calls.txt).

Each error has its remedy.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.command import ucpl
from tests.mistakes.test_mistakes import framed
from ucpl.errors import catalogue

LINES = (Path(__file__).parent / "calls.txt").read_text(encoding="utf-8").splitlines()
CASES = [tuple(part.strip() for part in line.split("|", 1)) for line in LINES if not line.startswith("#")]
TWO = """ucpl 1
model m {
  dim r = 4, c = 2
  dtype f32
  w : r c
  bias : r
}
layout a() of m {
  file weights = torch "a.pt"
  w = r c  as "w"
}
layout b() of m extends a() {
  bias = r  as "bias"
}
plan p = a() -> b() drop "hed.*"
plan odd = b() -> a() drop bias freeze bias
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calls")
    (folder / "spec.ucpl").write_text(framed("layout", '  embed = v h as "embed"'))
    (folder / "two.ucpl").write_text(TWO)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "broken.json").write_text("{hidden: 8}")
    return folder


@pytest.mark.parametrize(("line", "says"), CASES)
def test_a_command_line_that_goes_wrong_is_reported(
    line: str, says: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    done = ucpl(*shlex.split(line))
    assert done.status in (1, 2, 3), done.out
    assert "internal" not in done.err and "= help: " in done.err
    assert catalogue()["E001"].remedy not in done.err
    assert [one for one in says.split("; ") if one not in done.err] == [], done.err
