"""Files of weights in the order of Hugging Face's loaders.

Source: transformers 5.x (modeling_utils._get_resolved_checkpoint_files), diffusers (model_loading_utils), PEFT
(load_peft_weights). Files are selected by name. `shards.py` of `dcp/` reads the folders of rank-local shards, which
transformers prefers to all of these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.files.model_texts import config_at
from ucpl.records import frozen

__all__ = ["INDEX", "SHARD", "ChosenFile", "Loader", "chosen"]

INDEX = ".safetensors.index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})\.safetensors")
EXPLICIT = "transformers_weights"  # the key of config.json that names the file of weights
_PICKLES = (".bin", ".bin.index.json")


@frozen
class Loader:
    """One loader and its names of files; the first that exists wins."""

    name: str
    files: tuple[str, ...]


LOADERS = (
    Loader(
        "transformers",
        ("model.safetensors", "model" + INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ),
    Loader(
        "diffusers",
        ("diffusion_pytorch_model" + INDEX, "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    ),
    Loader("peft", ("adapter_model.safetensors", "adapter_model.bin")),
)


@frozen
class ChosenFile:
    """The file or index that is read, and notes on others."""

    file: str
    notes: tuple[str, ...] = ()

    @property
    def is_index(self) -> bool:
        return self.file.endswith(INDEX)


def chosen(path: Path, names: Sequence[str]) -> ChosenFile | None:
    """The weights that the folder's own loader takes, or None.

    None: no loader looks for any of these names by default. names: everything in the folder that could be weights.
    Raises: UcplError E384, E389.
    """
    if (said := _explicit(path)) is not None:
        others = [name for loader in LOADERS for name in loader.files if name in names and name != said]
        why = f"transformers takes {said}, which config.json names as {EXPLICIT}"
        return ChosenFile(said, tuple(f"{name} is not read: {why}" for name in others))
    there = [name for name in names if (path / name).is_file()]
    for loader in LOADERS:
        found = [name for name in loader.files if name in there]
        if not found:
            continue
        first, *others = found
        if first.endswith(_PICKLES):
            _reject_pickle(path, loader, first, there)
        return ChosenFile(first, tuple(f"{name} is not read: {loader.name} takes {first} first" for name in others))
    return None


def _explicit(path: Path) -> str | None:
    """The file that config.json names. Raises: UcplError E384."""
    if not os.path.isfile(path / "config.json"):
        return None
    said = (config_at(path) or {}).get(EXPLICIT)
    if said is None:
        return None
    good = isinstance(said, str) and said.endswith((".safetensors", INDEX)) and PurePosixPath(said).name == said
    if not isinstance(said, str) or not good:
        fail(
            "E384",
            f"config.json names {str(said)[:200]!a} as {EXPLICIT}, which is no .safetensors file or index of this folder",
            Label(str(path / "config.json"), where=EXPLICIT),
        )
    return said


def _reject_pickle(path: Path, loader: Loader, first: str, there: Sequence[str]) -> NoReturn:
    """Reject a folder whose loader takes a pickle despite .safetensors files.

    These files have other names. Raises: UcplError E389.
    """
    others = [name for name in there if name.endswith(".safetensors")]
    fail(
        "E389",
        f"{loader.name} takes {first} of this folder, and none of its .safetensors files: {', '.join(others[:4])}"
        + (f" and {len(others) - 4} more" if len(others) > 4 else ""),
        Label(str(path / first), "is loaded"),
        *(Label(str(path / name), "has another name") for name in others[:1]),
    )
