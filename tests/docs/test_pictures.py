"""The pictures of the pages are equal to their commands' output."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pictures import FOLDER, MADE, PAGE, written


def test_every_picture_is_what_its_command_gives(tmp_path: Path) -> None:
    made = written(tmp_path)
    kept = {p.name: p.read_bytes() for p in FOLDER.iterdir() if p.suffix in MADE}
    assert set(made) == set(kept)
    assert [name for name in made if made[name] != kept[name]] == [], "make docs writes them anew"


def test_every_picture_is_shown() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = [p.name for p in FOLDER.iterdir() if p.suffix in MADE]
    assert files and [name for name in files if f"(pictures/{name})" not in text] == []
