"""A share of the fuzzer's texts, the same in every run.

The only allowed exception is a refusal by ucpl.
"""

from __future__ import annotations

import random

import pytest

from tests.layout.fuzzing import CHANGES, SMALL, Fuzzer, tried
from ucpl.errors import catalogue

SHARE = 60  # texts of one seed


@pytest.mark.parametrize("text", range(len(SMALL)))
def test_the_texts_that_are_changed_are_right(text: int) -> None:
    found = {e.diagnostics[0].code for chance in range(3) for e in tried(SMALL[text], random.Random(chance))}
    assert found <= {"E160", "E204", "E203"}  # degrees that do not divide it


@pytest.mark.parametrize("seed", range(6))
def test_only_refusals_come_of_a_text(seed: int) -> None:
    fuzzer = Fuzzer.of(seed)
    codes: set[str] = set()
    for number in range(SHARE):
        text = fuzzer.text()
        try:
            codes.update(refusal.diagnostics[0].code for refusal in tried(text, fuzzer.chance))
        except Exception as error:
            raise AssertionError(f"seed {seed}, text {number}: {error!r}\n{text}") from error
    assert codes <= set(catalogue()) and len(codes) > 5


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_every_change_changes(change: int) -> None:
    fuzzer = Fuzzer.of(change)
    text = SMALL[0]
    assert any(CHANGES[change](fuzzer, text) != text for _ in range(5))
    assert isinstance(CHANGES[change](fuzzer, ""), str)
