"""The pictures of the pages are equal to their commands' output."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.docs.pictures import FOLDER, MADE, PAGE, written
from tests.docs.screens import KEPT, SCREENS, digest, page_of


def test_every_picture_is_what_its_command_gives(tmp_path: Path) -> None:
    made = written(tmp_path)
    kept = {p.name: p.read_bytes() for p in FOLDER.iterdir() if p.suffix in MADE}
    assert set(made) == set(kept)
    assert [name for name in made if made[name] != kept[name]] == [], "make docs writes them anew"


def test_every_picture_is_shown() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = [p.name for p in FOLDER.iterdir() if p.suffix in (*MADE, ".png")]
    assert files and [name for name in files if f"(pictures/{name})" not in text] == []


def test_every_screen_was_taken_of_the_page_as_it_is_now() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert set(kept) == set(SCREENS) == {p.name for p in FOLDER.iterdir() if p.suffix == ".png"}
    old = [name for name, screen in SCREENS.items() if digest(page_of(screen)) != kept[name]["page"]]
    assert old == [], "python -m tests.docs.screens takes them anew"
    assert [name for name in SCREENS if digest((FOLDER / name).read_bytes()) != kept[name]["screen"]] == []
    for name, screen in SCREENS.items():  # PNG: 16 bytes, then width and height
        size = struct.unpack(">II", (FOLDER / name).read_bytes()[16:24])
        assert size == (screen.width, screen.height), name
