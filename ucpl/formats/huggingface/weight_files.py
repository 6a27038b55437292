"""One file of weights: safetensors, or a state dict of torch.save.

The latter is read by the inert pickle machine, in the zip form and in the form before torch 1.6. It can store two names
of one tensor: the first name in the file is the owner, as in a tied model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attrs import field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Extent, TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.described import found_at
from ucpl.files.safetensors_files import ALIASES, SafetensorsFile, read_safetensors_file
from ucpl.files.torch_files import read_torch_file
from ucpl.formats.huggingface.precedence import PICKLE
from ucpl.records import frozen

__all__ = ["WeightsFile", "read_weights"]


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
