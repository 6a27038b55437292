"""No text is too half-typed.

Every question about it is answered, or has no answer. `python -m tests.lsp.fuzz` asks long.
"""

from __future__ import annotations

import random

import pytest

from tests.lsp.fuzz import SPECS, ask, holed, prefixes

SHARE = 8  # prefixes and holes of each shipped spec


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_every_beginning_of_a_spec_is_answered(number: int) -> None:
    every = list(prefixes(SPECS[number]))
    for text, offset in random.Random(number).sample(every, SHARE):
        ask(text, offset)


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_a_spec_with_holes_is_answered(number: int) -> None:
    chance = random.Random(number)
    for i in range(SHARE):
        text, offset = holed(SPECS[number], chance)
        ask(text, offset, config=i % 2 == 0)


def test_the_fuzzer_finds_what_is_wrong() -> None:
    """It would be no test if its texts were all right."""
    chance = random.Random(1)
    assert sum(ask(*holed(SPECS[3], chance)) > 0 for _ in range(8)) > 4


@pytest.mark.parametrize(
    "text", ["", "\n", "}", "{", '"', "#", "ucpl", "ucpl 1\n}\n}", "\r\n", "\ufeffucpl 1", "a\rb", "@", "\ud800"]
)
def test_what_is_hardly_a_text_is_answered(text: str) -> None:
    for offset in range(len(text) + 1):
        ask(text, offset)
