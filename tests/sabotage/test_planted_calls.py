"""Calls planted in pickles: no verb runs one, no target has one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from attrs import evolve

import ucpl
from tests.conversion.planting import places, plant
from tests.conversion.test_account_of_fixtures import FIXTURES, TARGETS
from tests.conversion.test_planted import ALL, EXAMPLES, copied
from ucpl.api import open_checkpoint

DRAWS = 3
# The ways in which a pickle names `os.system`.
GLOBALS = (b"posix\nsystem", b"X\x05\x00\x00\x00posix", b"\x8c\x05posix")


@pytest.mark.fault("Hostile input", "a call in any pickle of any checkpoint", "not run, and in no target")
@pytest.mark.parametrize("number", range(DRAWS))
@pytest.mark.parametrize("name", ALL)
def test_a_call_in_a_pickle_is_neither_run_nor_carried(name: str, number: int, tmp_path: Path) -> None:
    top = EXAMPLES.parent / name if name.startswith("examples") else FIXTURES / name
    found = [place for place in places(top) if place.kind == "key"]
    if not found:  # a folder of safetensors alone
        return
    dice = random.Random(f"{name}/{number}")
    source, mark = copied(top, tmp_path), tmp_path / "mark"
    plant(source, evolve(dice.choice(found), kind="call"), str(mark))
    target = dice.choice(TARGETS)
    verbs = (
        lambda: open_checkpoint(source),
        lambda: ucpl.verify(source, witness=False),
        lambda: ucpl.infer(source),
        lambda: ucpl.convert(source, tmp_path / "target", target),
    )
    for verb in verbs:
        try:
            verb()
        except ucpl.UcplError as error:
            assert error.diagnostics[0].code != "E900"
        assert not mark.exists()
    written = [tmp_path / "target"] if (tmp_path / "target").is_file() else (tmp_path / "target").rglob("*")
    for file in written:  # plain() and dcp() describe a call in a dict, which is no call to a reader of pickles
        data = file.read_bytes() if file.is_file() else b""
        assert not any(form in data for form in GLOBALS), file
