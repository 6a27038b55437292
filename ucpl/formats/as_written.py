"""A check that a rank's file has its original name.

torch.save names the archive inside a file after the file. Files of ranks have equal keys and shapes, so nothing else shows
that one is under another rank's name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.files.torch_files import TorchFile, read_torch_file

__all__ = ["read_rank", "reject"]

_NUMBER = re.compile(r"[0-9]+")


def read_rank(root: Path, name: str, pattern: re.Pattern[str]) -> TorchFile:
    """The headers of one rank's file.

    pattern: of names of ranks' files. An archive with another kind of name, such as one that was written to memory, is not
    checked. Raises: UcplError E465 where the file was written as another rank's, E400-E427.
    """
    file = read_torch_file(root, name)
    written = f"{file.archive}.pt"
    if written != name and pattern.fullmatch(written) and _NUMBER.sub("#", written) == _NUMBER.sub("#", name):
        reject(file)
    return file


def reject(file: TorchFile) -> NoReturn:
    fail(
        "E465",
        f"{file.file} was written as {file.archive}.pt",
        Label(str(file.path), "is called so"),
        Label(str(file.path), "was saved so", where=f"{file.archive}/data.pkl"),
    )
