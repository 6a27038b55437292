"""Known formats that cannot be read yet, each with a remedy.

They are checked only if no framework has recognised a path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from ucpl.errors import Label, fail, plural
from ucpl.files.texts import names_like

__all__ = ["reject_stranger"]

_CHUNKS = re.compile(r"__[0-9]+_[0-9]+\.distcp")  # as torch.distributed.checkpoint calls a rank's file
_OF_A_RANK = re.compile(r"_rank_?[0-9]+\.bin$")


def reject_stranger(path: Path) -> None:
    """Nothing, where the path is none of these. Raises: UcplError E438, E452."""
    if path.is_file():
        return
    chunks = sorted(name for name in names_like(path, ".distcp") if _CHUNKS.fullmatch(name))
    if chunks and not (path / ".metadata").exists():
        _reject_without_metadata(path, chunks)
    ranks = sorted(p.name for p in path.glob("pytorch_model_fsdp*.bin") if _OF_A_RANK.search(p.name))
    if ranks:
        _reject(
            f"{path} has its model in {plural(len(ranks), 'file')} of FSDP's ranks ({ranks[0]}"
            f"{', ...' if len(ranks) > 1 else ''}), as LOCAL_STATE_DICT saves it",
            "load it in a job of as many ranks, and save it as SHARDED_STATE_DICT, which is read",
            path / ranks[0],
        )
    for below in sorted(path.glob("pytorch_model_fsdp*.bin")):
        _reject(
            f"{path} has its model in {below.name}, as FSDP saves it in one file",
            "weights alone: save its state dict as model.safetensors, which is read",
            below,
        )


def _reject_without_metadata(path: Path, chunks: list[str]) -> NoReturn:
    """Chunks say neither which tensor they are of nor where they begin."""
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    fail(
        "E452",
        f".metadata is missing: {chunks[0]}{more} hold chunks of tensors, and only it names the tensors",
        Label(str(path / ".metadata"), "not there"),
        remedy="copy it from the original folder: names that begin with a dot are left out by `cp *`; torch writes it last,"
        " so that an interrupted save has none: then use an earlier, complete one",
    )


def _reject(message: str, remedy: str, shown: Path) -> NoReturn:
    fail("E438", f"{message}; that is not read yet", Label(str(shown)), remedy=remedy)
