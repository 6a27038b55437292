"""The known texts: open ones before those on disk, and configs.

A spec has the config.json of its folder.
"""

from __future__ import annotations

import os
from functools import cache

from attrs import field

from ucpl.errors import UcplError
from ucpl.lsp.outline import Outline, TextBlock, outline
from ucpl.records import define, frozen
from ucpl.resources import spec_files
from ucpl.texts import Json, json_object, text_at

__all__ = ["Config", "EditorTexts", "is_shipped", "shipped_blocks", "shipped_path"]

SHIPPED = "specs/"  # the compiler's name of the folder of the shipped files


@frozen
class Config:
    """A config.json: the sizes that `config.x` gives."""

    path: str
    values: dict[str, Json]


@define
class EditorTexts:
    """Texts by absolute path. An open text counts, saved or not."""

    opened: dict[str, str] = field(factory=dict)
    config_path: str = ""  # the path from the editor's settings
    root: str = ""  # folder that a relative one is below
    outlines: dict[str, Outline] = field(factory=dict)  # the last one of each path

    def text(self, path: str) -> str | None:
        """The text of a file, or None if it cannot be read."""
        if path in self.opened:
            return self.opened[path]
        try:
            return text_at(path)
        except UcplError:
            return None

    def outline(self, path: str) -> Outline | None:
        text = self.text(path)
        if text is None:
            return None
        known = self.outlines.get(path)
        if known is None or known.text != text:
            known = self.outlines[path] = outline(text)
        return known

    def imported(self, path: str, name: str) -> str | None:
        """The path of an import: in the file's folder, or shipped."""
        beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
        if self.text(beside) is not None:
            return beside
        return shipped_path(name)

    def config(self, path: str) -> Config | None:
        """The config.json that the settings name.

        Else the one in the file's folder.
        """
        named = os.path.join(self.root or os.path.dirname(path), os.path.expanduser(self.config_path))
        place = named if self.config_path else os.path.join(os.path.dirname(path), "config.json")
        text = self.text(place)
        values = json_object(text) if text is not None else ""
        return Config(place, values) if isinstance(values, dict) else None


def shipped_path(name: str) -> str | None:
    """The path of a shipped file.

    It has its own name, or the one in the compiler's messages.
    """
    return _shipped().get(name.removeprefix(SHIPPED))


def is_shipped(path: str) -> bool:
    """True for the path of a shipped file."""
    return path in _shipped().values()


@cache
def shipped_blocks() -> tuple[tuple[str, TextBlock], ...]:
    """The shipped models and layouts, each with its file's path."""
    return tuple((path, block) for path in _shipped().values() for block in outline(text_at(path) or "").blocks)


@cache
def _shipped() -> dict[str, str]:
    return {name: str(path) for name, path in spec_files()}
