"""Texts as they are while somebody types.

Every answer is asked for at the place of the last key. None may raise.

python -m tests.lsp.fuzz [texts]        all prefixes of the shipped specs and as many texts with holes
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from ucpl.lsp import Service
from ucpl.resources import spec_files

CONFIG = (
    '{"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 96, "intermediate_size": 128, "num_attention_heads": 8}'
)
PATH = "/typed/spec.ucpl"
SPECS = [path.read_text(encoding="utf-8") for _, path in spec_files()]


def prefixes(text: str) -> Iterator[tuple[str, int]]:
    """Each beginning of a text; the cursor at its end."""
    for stop in range(len(text) + 1):
        yield text[:stop], stop


def holed(text: str, chance: random.Random) -> tuple[str, int]:
    """A text with some runs of characters removed or added.

    The cursor is at one of them.
    """
    place = 0
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(text) + 1)
        gone = chance.choice((0, 1, 1, 2, 5, 20, 100))
        typed = "".join(
            chance.choice('@()[]{}"=+.,:# \n\u00e4\U0001f600abl1') for _ in range(chance.choice((0, 0, 1, 3)))
        )
        text = text[:place] + typed + text[place + gone :]
        place += len(typed)
    return text, min(place, len(text))


def ask(text: str, offset: int, *, config: bool = False) -> int:
    """Every question about a place of a text.

    Gives how many findings the text has.
    """
    service = Service()
    if config:
        service.put("/typed/config.json", CONFIG)
    service.put(PATH, text)
    found = service.findings(PATH)
    service.hover(PATH, offset)
    service.targets(PATH, offset)
    service.completions(PATH, offset)
    service.formatting(PATH)
    service.prepare(PATH)
    for symbol in service.symbols(PATH):
        assert symbol.name and symbol.first <= symbol.start <= symbol.stop <= symbol.last, symbol
    lines = text.split("\n")
    for one in found:
        assert one.message and 0 <= one.start[0] < max(1, len(lines)) and one.start <= one.stop, one
    return len(found)


def main() -> None:
    chance = random.Random(7)
    for text in SPECS:
        for typed, offset in prefixes(text):
            ask(typed, offset)
        print(f"{len(text)} prefixes", flush=True)
    for i in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
        typed, offset = holed(chance.choice(SPECS), chance)
        try:
            ask(typed, offset, config=i % 2 == 0)
        except Exception:  # every exception continues; print the text first
            print(repr(typed), offset)
            raise
    print("done", flush=True)


if __name__ == "__main__":
    main()
