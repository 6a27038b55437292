"""The blocks of docs/TUTORIAL.md that need transformers."""

from __future__ import annotations

from pathlib import Path

from tests.docs.blocks import blocks
from tests.docs.test_tutorial import PAGE, home, run

__all__ = ["home"]


def test_the_class_witnesses_what_the_tutorial_converts(home: Path) -> None:
    ran = run(blocks(PAGE), home, {("sh",), ("sh", "transformers")})
    assert len([command for command in ran if "--reference" in command]) == 2
