"""Texts of the language, bent as in `tests/layout/fuzzing.py`, within file bounds."""

from __future__ import annotations

from pathlib import Path
from random import Random

from attrs import define, evolve

from tests.layout.fuzzing import CHANGES, Fuzzer, tried

# Of each four lines of `tests.layout.fuzzing.SMALL` a text that has them, and of the others the lines that each layout needs.
BEGIN = "ucpl 1\n"
FEW = tuple(BEGIN + rest for rest in (Path(__file__).parent / "few_lines.txt").read_text("utf-8").split(BEGIN)[1:])
WHOLE = (
    1 / 9
)  # of the texts: parsing takes longer with each line, and a layout of six is parsed, resolved and located, too


@define
class Lessened(Fuzzer):
    """Short texts are changed eight times as often as long ones."""

    def text(self) -> str:
        if self.chance.random() < WHOLE:
            return super().text()
        chosen = self.chance.choice(FEW)
        for _ in range(self.chance.choice((1, 1, 1, 2, 3, 6))):
            chosen = self.chance.choice(CHANGES)(self, chosen)
        return chosen


@define(eq=False)
class Texts:
    fuzzer: Fuzzer
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Texts:
        return cls(Lessened.of(0))

    def attempt(self, rng: Random) -> str:
        """Parse a text; resolve and locate the result.

        Each refusal of a layout is one of ours.
        """
        text = evolve(self.fuzzer, chance=rng).text()
        self.damage = repr(text[:2000])
        for refusal in tried(text, rng):
            raise refusal
        return self.damage
