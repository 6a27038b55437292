"""Texts of the language, bent as `tests/layout/fuzzing.py` bends them, within the bounds that hold for files."""

from __future__ import annotations

from pathlib import Path
from random import Random

from attrs import define, evolve

from tests.layout.fuzzing import Fuzzer, tried


@define(eq=False)
class Texts:
    fuzzer: Fuzzer
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Texts:
        return cls(Fuzzer.of(0))

    def attempt(self, rng: Random) -> str:
        """Parsed, and what is read resolved and located: each refusal of a layout is one of ours."""
        text = evolve(self.fuzzer, chance=rng).text()
        self.damage = repr(text[:2000])
        for refusal in list(tried(text, rng)):
            raise refusal
        return self.damage
