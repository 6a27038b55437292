"""Files of weights: safetensors, state dicts, and the loaders' order.

The latter is read by the inert pickle machine, in the zip form and in the form before torch 1.6. It can store two names
of one tensor: the first name in the file is the owner, as in a tied model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from attrs import field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Extent, TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.described import found_at
from ucpl.files.model_texts import config_at
from ucpl.files.safetensors_files import ALIASES, SafetensorsFile, read_safetensors_file
from ucpl.files.torch_files import read_torch_file
from ucpl.records import frozen

__all__ = ["WeightsFile", "read_weights", "INDEX", "PICKLE", "SHARD", "ChosenFile", "Loader", "chosen", "twin_of"]

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


@frozen
class WeightsFile:
    """The tensors of one file by name, and second names of them.

    metadata: entries of a safetensors header, as far as a note names them. unread: values that are no tensors.
    """

    file: str
    path: Path
    tensors: dict[str, Extent] = field(repr=False)
    aliases: dict[str, str] = field(factory=dict)
    metadata: tuple[str, ...] = ()
    unread: tuple[NotRead, ...] = ()

    @classmethod
    def of_safetensors(cls, part: SafetensorsFile) -> WeightsFile:
        metadata = tuple(name for name in part.metadata or {} if name not in ("format", ALIASES))
        return cls(part.file, part.path, part.tensors, part.aliases(), metadata, tuple(part.unread_metadata()))

    @classmethod
    def of_pickle(cls, root: Path, file: str) -> WeightsFile:
        """A state dict of torch.save. Raises: UcplError E390, E400-E427."""
        try:
            part = read_torch_file(root, file)
        except UcplError:
            _reject(root / file)  # a file of another program
            raise
        values = part.value if isinstance(part.value, dict) else {}
        tensors = {name: one for name, one in values.items() if isinstance(one, TensorRef)}
        if not tensors:
            _reject(root / file)
        aliases = dict(_second_names(tensors))
        extents = {str(n): part.extent((str(n),), one) for n, one in tensors.items() if n not in aliases}
        unread = (NotRead(f"{file}: {name}", "it is no tensor", kind="value") for name in values if name not in tensors)
        return cls(file, part.path, extents, aliases, unread=tuple(unread))


def read_weights(root: Path, file: str) -> WeightsFile:
    """Read the headers of one file of weights.

    The file's name states its form. Raises: UcplError E390, and errors of reading files (E400-E434, E444).
    """
    if PICKLE.fullmatch(file.rpartition("/")[2]):
        return WeightsFile.of_pickle(root, file)
    return WeightsFile.of_safetensors(read_safetensors_file(root, file))


def _reject(path: Path) -> None:
    """Reject a file by its content.

    Raises: UcplError E390 with a description of the file, or the error of a damaged one.
    """
    found = found_at(path)
    if found is not None:
        fail("E390", f"{path.name} holds no tensors by name: {found.what}", Label(str(path)), remedy=found.remedy)


def _second_names(tensors: dict[object, TensorRef]) -> Iterable[tuple[str, str]]:
    seen: dict[tuple[object, ...], str] = {}
    for name, one in tensors.items():
        place = (one.storage.name, one.offset, one.shape, one.stride)
        if (first := seen.setdefault(place, str(name))) != name and 0 not in one.shape:
            yield str(name), first
