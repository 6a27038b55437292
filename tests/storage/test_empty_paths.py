"""An empty text is no path: `Path("")` would be the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucpl

SOURCE = Path(__file__).parents[1] / "fixtures" / "deepspeed" / "z1_dp4"


@pytest.mark.parametrize(("source", "target"), [("", "new"), (SOURCE, "")])
def test_an_empty_path_is_refused(
    source: str | Path, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ucpl.UcplError, match="is empty"):
        ucpl.convert(source, target, "plain()", force=True)
    assert not [*tmp_path.iterdir()]
