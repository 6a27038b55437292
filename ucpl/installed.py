"""Entry points of installed packages, read from their files.

`importlib.metadata` gives the same and takes a tenth of the time in which `ucpl` starts, most of it for modules that nothing
else needs. Not here: packages in zip archives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache

__all__ = ["entry_points"]

_INFO = (".dist-info", ".egg-info")


def entry_points(group: str) -> Iterator[tuple[str, str]]:
    """(name, value) of a group's entry points, in the order of `sys.path`."""
    for text, is_own in _texts(__file__, tuple(sys.path)):
        if is_own:
            yield from _section(text, f'project.entry-points."{group}"')
        elif f"[{group}]" in text:
            yield from _section(text, group)


@cache
def _texts(file: str, paths: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """Texts with entry points of all groups. True: this checkout's pyproject.toml."""
    seen: set[str] = set()
    found = []
    own = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(file))), "pyproject.toml")
    text = _text(own)
    if text is not None and '\nname = "ucpl"\n' in text:  # a checkout, installed or not
        seen.add("ucpl")
        found.append((text, True))
    for folder in dict.fromkeys(paths):
        try:
            names = sorted(name for name in os.listdir(folder or ".") if name.endswith(_INFO))
        except OSError:
            continue
        for name in names:
            package = name.rpartition(".")[0].partition("-")[0].lower()
            if package in seen:
                continue
            seen.add(package)
            text = _text(os.path.join(folder, name, "entry_points.txt"))
            if text is not None:
                found.append((text, False))
    return tuple(found)


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError):
        return None


def _section(text: str, group: str) -> Iterator[tuple[str, str]]:
    inside = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            inside = line == f"[{group}]"
        elif inside and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip().strip('"')
