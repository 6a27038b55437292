"""Texts of the language, with words exchanged, lines moved, numbers made huge: parsed, printed, and some of them checked."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

from attrs import define

from tests.fuzz.damage import LONELY
from tests.fuzz.small import SPEC
from ucpl.conversion.checking import check_text
from ucpl.conversion.given import Given
from ucpl.errors import catalogue
from ucpl.resources import spec_files
from ucpl.syntax import parse, print_file

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "examples/architectures",
    "examples/patterns",
    "examples/ranks",
    "tests/specs",
    "tests/planted",
    "tests/matrix",
)
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+|\"[^\"\n]*\"|[ \t]+|\n|.", re.DOTALL)
ODD = (
    "", "0", "1", "2", "-1", "9" * 19, "9" * 400, "1 << 62", *"(){}[]@=,:#*+|\\", "..", '"', '"{', '"{l}"', '"../../x"', '"a\\',
    "\n", "\r\n", "\t", "\0", "²", "é", LONELY, "\u202e", "x" * 300, "((" * 60, "default(", "config.x",
    "model", "layout", "plan", "use", "extends", "state", "of", "as", "at", "when", "mesh", "index", "file", "dim", "let",
    "assert", "flat", "pad", "chunk", "spread", "any", "mean", "value", "group", "framework", "torch", "domain", "order",
)  # fmt: skip
CHECKED = 0.06  # of texts: whether they hold is looked at, too
LARGE = 3000  # characters of a text that is checked at most: a large one takes a second


@define(eq=False)
class Texts:
    texts: list[str]
    small: list[str]
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Texts:
        files = [path for _, path in spec_files()]
        files += [path for name in FOLDERS for path in sorted((ROOT / name).glob("*.ucpl"))]
        texts = [path.read_text() for path in files] + [SPEC]
        return cls(texts, [text for text in texts if len(text) < LARGE])

    def attempt(self, rng: Random) -> str:
        is_checked = rng.random() < CHECKED
        text = part(rng, rng.choice(self.small if is_checked else self.texts))
        text, self.damage = bent(rng, text)
        file = parse(text)
        printed = print_file(file)
        assert parse(printed) == file, "what is printed is read as something else"
        if is_checked:
            found = check_text("bent.ucpl", text, Given(), unread)
            for one in found.findings:
                assert one.code in catalogue(), one.code
                one.message.encode()
        return self.damage


def unread(path: str) -> str | None:
    """No file is read that a text names."""
    return None


def part(rng: Random, text: str) -> str:
    """The whole, or its head and one of its blocks: a text of many takes long and says the same."""
    blocks = re.split(r"\n(?=model |layout |plan )", text)
    if len(blocks) < 3 or rng.random() < 0.2:
        return text
    return "\n".join([blocks[0], rng.choice(blocks[1:])]) + "\n"


def bent(rng: Random, text: str) -> tuple[str, str]:
    words = WORD.findall(text)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(words)) if words else 0
        match rng.randrange(8):
            case 0 if words:
                done.append(f"without {words[at]!a} at {at}")
                del words[at]
            case 1 | 2 if words:
                new = rng.choice(ODD)
                done.append(f"{words[at]!a} at {at} became {new!a:.40}")
                words[at] = new
            case 3 if words:
                new = rng.choice(words)
                done.append(f"{words[at]!a} at {at} became {new!a}")
                words[at] = new
            case 4:
                new = rng.choice(ODD)
                done.append(f"{new!a:.40} came in at {at}")
                words.insert(at, new)
            case 5 if words:
                other = rng.randrange(len(words))
                words[at], words[other] = words[other], words[at]
                done.append(f"words {at} and {other} exchanged")
            case 6:
                lines = "".join(words).split("\n")
                one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
                done.append(f"line {one} went to {other}")
                lines.insert(other, lines[one] if rng.random() < 0.5 else lines.pop(one))
                words = WORD.findall("\n".join(lines))
            case _ if words:
                done.append(f"cut at word {at}")
                words = words[:at]
            case _:
                done.append("nothing")
    return "".join(words), "; ".join(done)
