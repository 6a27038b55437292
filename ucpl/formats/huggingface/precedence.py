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

from ucpl.errors import Label, fail
from ucpl.files.model_texts import config_at
from ucpl.records import frozen

__all__ = ["INDEX", "PICKLE", "SHARD", "ChosenFile", "Loader", "chosen", "twin_of"]

INDEX = ".safetensors.index.json"
INDEX_OF_ANY = ".index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})\.(?P<form>safetensors|bin)")
# Files of weights of torch.save. Other files of this end are an optimizer's or a run's.
PICKLE = re.compile(
    r"(?:pytorch_model|adapter_model|diffusion_pytorch_model)(?:\.[A-Za-z0-9_]+)?(?:-[0-9]{5,}-of-[0-9]{5,})?\.bin"
)
EXPLICIT = "transformers_weights"  # the key of config.json that names the file of weights


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
        return self.file.endswith(INDEX_OF_ANY)


def twin_of(file: str) -> str:
    """The name of these weights in torch.save's form, or ""."""
    stem = file.removesuffix(".safetensors")
    twin = f"{'pytorch_model' if stem == 'model' else stem}.bin"
    return twin if stem != file and PICKLE.fullmatch(twin) else ""


def chosen(path: Path, names: Sequence[str]) -> ChosenFile | None:
    """The weights that the folder's own loader takes, or None.

    None: no loader looks for any of these names by default. names: everything in the folder that could be weights.
    Raises: UcplError E384.
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
