"""Writes the pictures of docs/PICTURES.md anew, by the commands that stand there.

Python -m tests.docs.pictures
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from tests.cli.command import good
from tests.docs.blocks import ROOT

__all__ = ["FOLDER", "MADE", "PAGE", "written"]

PAGE = ROOT / "docs" / "PICTURES.md"
MADE = (".svg", ".html")
FOLDER = ROOT / "docs" / "pictures"
COMMAND = re.compile(r"^\$ ucpl (.*docs/pictures/\S+)$", re.MULTILINE)
PLANS = re.compile(r"^\$ ucpl (plan .* -o \S+\.plan)$", re.MULTILINE)


def written(top: Path) -> dict[str, bytes]:
    """Each file that the commands of the page write, by its name.

    They run in a copy of the named files.
    """
    text = PAGE.read_text(encoding="utf-8")
    for name in ("docs/pictures", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, top / name, ignore=shutil.ignore_patterns(*(f"*{m}" for m in MADE), "__pycache__"))
    with contextlib.chdir(top):
        for line in (*PLANS.findall(text), *COMMAND.findall(text)):
            good(*shlex.split(line))
    return {p.name: p.read_bytes() for p in (top / "docs" / "pictures").iterdir() if p.suffix in MADE}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, data in written(Path(folder)).items():
            (FOLDER / name).write_bytes(data)
