"""A path that no framework recognises: a description of the file, or of the files in a folder, and a way to make it readable.

Asked only before a refusal, so that no description costs time where a checkpoint is read.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ucpl.errors import plural
from ucpl.extents import Call, Global, TensorRef
from ucpl.records import frozen
from ucpl.remotes.reading import pread
from ucpl.stores.torch_files import read_torch_file
from ucpl.stores.zips import open_file

__all__ = ["Found", "found_at"]

_HEAD = 512  # bytes
_NAMES = 3  # tensors or keys that are named
_KEYS = 8
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WEIGHTS = (*_TORCH, ".safetensors", ".npz", ".h5", ".gguf", ".msgpack", ".pkl", ".gz", ".zst")
_UNPACK = "unpack it first: {tool}"
_AGAIN = "copy or download the file again from where it was written"
_OWN = "read it with its own library, and write its tensors as model.safetensors"

# The first bytes of files of other programs: a name, and what to do.
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "a gzip file", _UNPACK.format(tool="gunzip")),
    (b"\x28\xb5\x2f\xfd", "a zstd file", _UNPACK.format(tool="zstd -d")),
    (b"\xfd7zXZ", "an xz file", _UNPACK.format(tool="xz -d")),
    (b"BZh", "a bzip2 file", _UNPACK.format(tool="bunzip2")),
    (b"\x04\x22\x4d\x18", "an lz4 file", _UNPACK.format(tool="lz4 -d")),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format(tool="7z x")),
    (b"Rar!", "a rar archive", _UNPACK.format(tool="unrar x")),
    (b"\x89HDF\r\n", "an HDF5 file, as Keras writes it", _OWN),
    (b"GGUF", "a GGUF file, as llama.cpp writes it", "convert the checkpoint that it was made from"),
    (b"\x93NUMPY", "a NumPy array", _OWN),
    (b"version https://git-lfs", "a pointer of Git LFS in place of the file", "fetch the file itself: git lfs pull"),
    (b"<!DOCTYPE", "a web page, so that a download has failed", _AGAIN),
    (b"<html", "a web page, so that a download has failed", _AGAIN),
    (b"<?xml", "an XML text, so that a download may have failed", _AGAIN),
)
_FOLDERS: tuple[tuple[str, str], ...] = (  # a file's name, and whose folder has it
    ("manifest.ocdbt", "a checkpoint of Orbax (JAX)"),
    ("_CHECKPOINT_METADATA", "a checkpoint of Orbax (JAX)"),
    ("*.index", "a checkpoint of TensorFlow"),
    ("saved_model.pb", "a SavedModel of TensorFlow"),
    ("*.nemo", "an archive of NeMo: unpack it with tar"),
)


@frozen
class Found:
    """A description, as in `it is ...`, and what to do with it."""

    what: str
    remedy: str


def found_at(path: Path) -> Found | None:
    """None: nothing is known of it. Raises: UcplError E401 to E427, of a torch file that is damaged or of another form."""
    return _in_folder(path) if path.is_dir() else _of_file(path)


def _in_folder(path: Path) -> Found | None:
    names = sorted(p.name for p in path.iterdir())
    if not names:
        return Found("it is an empty folder", "give the folder that the run wrote; if it is a download, start it again")
    for pattern, what in _FOLDERS:
        if any(path.glob(pattern)) or any(path.glob(f"*/{pattern}")):
            return Found(f"it is {what}", _OWN)
    weights = [name for name in names if name.endswith(_WEIGHTS) and (path / name).is_file()]
    for name in weights[:1]:
        found = _of_file(path / name)
        if found is not None:
            return Found(f"its {name} is {found.what.removeprefix('it is ')}", found.remedy)
    more = ", ..." if len(names) > _KEYS else ""
    return Found(f"it holds {', '.join(names[:_KEYS])}{more}", "")


def _of_file(path: Path) -> Found | None:
    head = _head(path)
    magic = next((Found(f"it is {what}", remedy) for first, what, remedy in _MAGIC if head.startswith(first)), None)
    if magic is not None:
        return magic
    if head.startswith(_ZIP):
        if (archive := _archive(path)) is not None:
            return archive
    elif head.strip(b"\0") and not head.startswith(_LEGACY) and path.suffix in _TORCH and not head.startswith(b"\x80"):
        if head[257:262] == b"ustar":
            return Found("it is a tar archive", _UNPACK.format(tool="tar xf"))
        return Found("it is no file of torch.save", _AGAIN)
    elif head.startswith(b"\x80") and not head.startswith(_LEGACY):
        return Found("it is a pickle, and no file of torch.save", f"load it, if you trust it: {_OWN}")
    elif path.suffix not in _TORCH:
        return None
    return _of_torch(path)


def _head(path: Path) -> bytes:
    fd = open_file(path, path.name)
    try:
        return pread(fd, _HEAD, 0)
    finally:
        os.close(fd)


def _archive(path: Path) -> Found | None:
    """Zip archives that are not of torch.save. A damaged one is a torch file, as far as anybody knows."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return None
    if any(name.endswith("/constants.pkl") for name in names):
        remedy = "save the module's state_dict: torch.jit.load(FILE).state_dict()"
        return Found("it is a TorchScript archive", remedy)
    if names and all(name.endswith(".npy") for name in names):
        return Found(f"it is a NumPy archive of {plural(len(names), 'array')}", _OWN)
    if not any(name.endswith("data.pkl") for name in names):
        return Found(f"it is a zip archive of {plural(len(names), 'file')}, and not of torch.save", "unpack it first")
    return None


def _of_torch(path: Path) -> Found:
    value = read_torch_file(path.parent, path.name).value
    if isinstance(value, Call):
        made = value.function
        name = f"{made.module}.{made.name}" if isinstance(made, Global) else "a class"
        remedy = f"if you trust it, save its state dict: {_code(path, '.state_dict()', trusted=True)}"
        return Found(f"it is a torch file of one pickled object, {name}", remedy)
    if isinstance(value, Mapping):
        if _is_state(value):
            return Found(f"it is a torch file of one state dict: {_tensors_text(value)}", f"{_READ} {_code(path, '')}")
        said = ", ".join(f"{key}{_kind_text(one)}" for key, one in list(value.items())[:_KEYS])
        more = ", ..." if len(value) > _KEYS else ""
        states = [key for key, one in value.items() if isinstance(one, Mapping) and _is_state(one)]
        what = f"it is a torch file with the keys {said}{more}" if value else "it is a torch file of an empty dict"
        if not states:
            return Found(what, "")
        of = next((key for key in states if str(key) in ("model", "state_dict", "module")), states[0])
        trusted = not all(map(_is_harmless, value.values()))
        return Found(what, f"{_TRUSTED if trusted else _READ} {_code(path, f'[{of!r}]', trusted=trusted)}")
    kind = "one tensor" if isinstance(value, TensorRef) else f"one {type(value).__name__}"
    return Found(f"it is a torch file of {kind}, without names", "save a dict of tensors by their names")


_TRUSTED = "if you trust it: its tensors are read from model.safetensors, which this makes:"
_READ = "its tensors are read from model.safetensors, which this makes:"


def _code(path: Path, part: str, *, trusted: bool = False) -> str:
    load = f"torch.load({path.name!r}, weights_only={not trusted}, map_location='cpu'){part}"
    return (
        'python -c "import torch; from safetensors.torch import save_file;'
        f" save_file({{k: t.clone() for k, t in {load}.items()}}, 'model.safetensors')\""
    )


def _is_harmless(value: object, depth: int = 16) -> bool:
    """Whether torch.load takes a value without running classes of others."""
    match value:
        case Mapping():
            return depth > 0 and all(_is_harmless(one, depth - 1) for one in value.values())
        case list() | tuple():
            return depth > 0 and all(_is_harmless(one, depth - 1) for one in value)
    return value is None or isinstance(value, TensorRef | str | bytes | int | float | bool)


def _is_state(value: Mapping[object, object]) -> bool:
    return bool(value) and all(isinstance(one, TensorRef) for one in value.values())


def _kind_text(value: object) -> str:
    if isinstance(value, TensorRef):
        return " (a tensor)"
    if not isinstance(value, Mapping):
        return ""
    if _is_state(value):
        return f" ({plural(len(value), 'tensor')})"
    if "param_groups" in value:
        return " (an optimizer)"
    return f" ({plural(sum(1 for _ in _leaves(value)), 'tensor')} below)"


def _leaves(value: object, depth: int = 8) -> Iterator[TensorRef]:
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, Mapping) and depth:
        for one in value.values():
            yield from _leaves(one, depth - 1)


def _tensors_text(value: Mapping[object, object]) -> str:
    names = list(map(str, value))
    return f"{plural(len(names), 'tensor')}, {', '.join(names[:_NAMES])}" + (", ..." if len(names) > _NAMES else "")
