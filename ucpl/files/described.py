"""A description of a path that no framework recognises, with a remedy.

It is made only for an error, so that it costs no time if a checkpoint is read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ucpl.errors import Label, fail, plural
from ucpl.extents import Global, PickledCall, TensorRef
from ucpl.files.magic import AGAIN, OWN, Description, holds_text, magic_of
from ucpl.files.texts import names_like
from ucpl.files.torch_files import read_torch_file
from ucpl.files.zips import open_file
from ucpl.storage.reading import pread

__all__ = ["Description", "found_at", "reject_stranger"]

_HEAD = 512  # bytes
_SHOWN = 40  # characters of a text
_NAMES = 3  # tensors or keys that are named
_KEYS = 8
_NUMBER = re.compile(r"\d+")
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_EMPTY_ZIP = b"PK\x05\x06"
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WEIGHTS = (*_TORCH, ".safetensors", ".npz", ".h5", ".gguf", ".msgpack", ".pkl", ".gz", ".zst", ".onnx", ".pdparams")
_FOLDERS: tuple[tuple[str, str], ...] = (  # a file's name, and whose folder has it
    ("manifest.ocdbt", "a checkpoint of Orbax (JAX)"),
    ("_CHECKPOINT_METADATA", "a checkpoint of Orbax (JAX)"),
    ("*.index", "a checkpoint of TensorFlow"),
    ("saved_model.pb", "a SavedModel of TensorFlow"),
    ("*.nemo", "an archive of NeMo: unpack it with tar"),
)

_GET = "copy or download the missing files"
_POINTER = "latest_checkpointed_iteration.txt"  # of Megatron-LM; those of DeepSpeed are read elsewhere
_CHUNKS = re.compile(r"__[0-9]+_[0-9]+\.distcp")  # as torch.distributed.checkpoint calls a rank's file
_OF_A_RANK = re.compile(r"_rank_?[0-9]+\.bin$")


def found_at(path: Path) -> Description | None:
    """A description of the path, or None.

    Raises: UcplError E401 to E427, of a torch file that is damaged or of another form.
    """
    return _in_folder(path) if path.is_dir() else _of_file(path)


def _in_folder(path: Path) -> Description | None:
    names = sorted(p.name for p in path.iterdir())
    if not names:
        return Description(
            "it is an empty folder", "give the folder that the run wrote; if it is a download, start it again"
        )
    for pattern, what in _FOLDERS:
        if any(path.glob(pattern)) or any(path.glob(f"*/{pattern}")):
            return Description(f"it is {what}", OWN)
    incomplete = _of_index(path, names)
    if incomplete is not None:
        return incomplete
    weights = [name for name in names if name.endswith(_WEIGHTS) and (path / name).is_file()]
    for name in weights[:1]:
        shards = [path / other for other in weights if _NUMBER.sub("#", other) == _NUMBER.sub("#", name)]
        found = _of_file(path / name, shards)
        if found is not None:
            more = f" ({len(shards)} such files)" if len(shards) > 1 else ""
            return Description(f"its {name}{more} is {found.what.removeprefix('it is ')}", found.remedy)
    for found in (_of_pointer(path, names), _of_metadata(path, names)):
        if found is not None:
            return found
    more = ", ..." if len(names) > _KEYS else ""
    return Description(f"it holds {', '.join(names[:_KEYS])}{more}", "")


def _of_pointer(path: Path, names: list[str]) -> Description | None:
    """A text that names the newest step, whose folder is not there."""
    if _POINTER not in names:
        return None
    step = _head(path / _POINTER).decode(errors="replace").strip()[:_SHOWN]
    folder = f"iter_{int(step):07d}" if step.isascii() and step.isdigit() else step
    if folder in names:
        return None
    return Description(f"its {_POINTER} names step {step!a}, and there is no folder of that step", AGAIN)


def _of_index(path: Path, names: list[str]) -> Description | None:
    """An index whose files are not there."""
    for name in names:
        if name.endswith(".index.json"):
            try:
                files = _listed(path / name)
            except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
                return Description(f"its {name} is no index of weights", AGAIN)
            missing = [file for file in files if file not in names]
            listed = ", ".join(missing[:_NAMES]) + (", ..." if len(missing) > _NAMES else "")
            what = f"its {name} lists files that are not there, {len(missing)} of {len(files)}: {listed}"
            return Description(what, _GET) if missing else None
    return None


def _listed(index: Path) -> list[str]:
    """The files that an index of weights names."""
    return sorted({str(file) for file in json.loads(index.read_bytes())["weight_map"].values()})


def _of_metadata(path: Path, names: list[str]) -> Description | None:
    """A `.metadata` of torch.distributed.checkpoint without the files that it is of."""
    if ".metadata" not in names or any(name.endswith(".distcp") for name in names):
        return None
    return Description("it has a .metadata, and no .distcp file of its tensors", AGAIN)


def _of_file(path: Path, shards: Sequence[Path] = ()) -> Description | None:
    head = _head(path)
    magic = magic_of(head, path.name)
    if magic is not None:
        return magic
    if head.startswith(_ZIP):
        return _archive(path) or _of_torch(path, shards)
    if head.startswith(_LEGACY):
        return _of_torch(path, shards)
    if head.startswith(_EMPTY_ZIP):
        return Description("it is a zip archive without files", AGAIN)
    if head[8:10] == b'{"':
        return Description("it is a safetensors file of another name", f"name it {path.stem}.safetensors")
    if head.startswith(b"\x80"):
        return Description("it is a pickle, and no file of torch.save", f"load it, if you trust it: {OWN}")
    if not head.strip(b"\0"):
        return (
            _of_torch(path, shards)
            if path.suffix in _TORCH
            else Description("it is empty" if not head else "it begins with zeros", AGAIN)
        )
    if holds_text(head):
        line = head.decode(errors="ignore").splitlines()[0][:_SHOWN].strip()
        text = f"a text, which begins with {line!a}"
        return (
            Description(f"it is no file of torch.save: {text}", AGAIN)
            if path.suffix in _TORCH
            else Description(f"it is {text}", "")
        )
    return Description("it is no file of torch.save", AGAIN) if path.suffix in _TORCH else None


def _head(path: Path) -> bytes:
    fd = open_file(path, path.name)
    try:
        return pread(fd, _HEAD, 0)
    finally:
        os.close(fd)


def _archive(path: Path) -> Description | None:
    """Zip archives that are not of torch.save.

    A damaged one is taken for a torch file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return None
    if any(name.endswith("/constants.pkl") for name in names):
        remedy = "save the module's state_dict: torch.jit.load(FILE).state_dict()"
        return Description("it is a TorchScript archive", remedy)
    if names and all(name.endswith(".npy") for name in names):
        return Description(f"it is a NumPy archive of {plural(len(names), 'array')}", OWN)
    if any(name.endswith("/archive_format") for name in names):
        return Description(
            "it is an archive of torch.export", "save the state_dict: torch.export.load(FILE).state_dict"
        )
    if "model.weights.h5" in names:
        return Description("it is an archive of Keras", OWN)
    if not any(name.endswith("data.pkl") for name in names):
        return Description(
            f"it is a zip archive of {plural(len(names), 'file')}, and not of torch.save", "unpack it first"
        )
    return None


def _of_torch(path: Path, shards: Sequence[Path]) -> Description:
    """A description of a torch file without a known framework.

    `shards`: files whose names differ from this one's by a number, itself included.
    """
    value = read_torch_file(path.parent, path.name).value
    if isinstance(value, PickledCall):
        made = value.function
        name = f"{made.module}.{made.name}" if isinstance(made, Global) else "a class"
        remedy = f"if you trust it, save its state dict: {_code([path], '.state_dict()', trusted=True)}"
        return Description(f"it is a torch file of one pickled object, {name}", remedy)
    if isinstance(value, Mapping):
        if _is_state(value):
            return Description(
                f"it is a torch file of one state dict: {_tensors_text(value)}", _way_out(path, shards, "")
            )
        text = ", ".join(f"{key}{_kind_text(one)}" for key, one in list(value.items())[:_KEYS])
        more = ", ..." if len(value) > _KEYS else ""
        states = [key for key, one in value.items() if isinstance(one, Mapping) and _is_state(one)]
        what = f"it is a torch file with the keys {text}{more}" if value else "it is a torch file of an empty dict"
        if not states:
            has_tensors = next(_leaves(value), None) is not None
            return Description(what, "save one dict of its tensors by their names" if has_tensors else "")
        of = next((key for key in states if str(key) in ("model", "state_dict", "module")), states[0])
        trusted = not all(map(_is_harmless, value.values()))
        return Description(what, _way_out(path, shards, f"[{of!r}]", trusted=trusted))
    kind = "one tensor" if isinstance(value, TensorRef) else f"one {type(value).__name__}"
    return Description(f"it is a torch file of {kind}, without names", "save a dict of tensors by their names")


def _way_out(path: Path, shards: Sequence[Path], part: str, *, trusted: bool = False) -> str:
    """A command that makes model.safetensors of these files.

    Otherwise a spec is needed.
    """
    trust = "if you trust it: " if trusted else ""
    made = f"{trust}its tensors are read from model.safetensors, which this makes:"
    if len(shards) < 2:
        return f"{made} {_code([path], part, trusted=trusted)}"
    listed = sorted({path.parent / file for index in path.parent.glob("*.index.json") for file in _listed(index)})
    if set(listed) >= set(shards):
        return f"{made} {_code(listed, part, trusted=trusted)}"
    return (
        f"its {len(shards)} files are parts of one checkpoint: give a spec with --from FILE.ucpl:LAYOUT, whose `file`"
        " lines name them, of `framework torch()`. A layout of any model reads keys with `{name}`"
    )


def _code(paths: Sequence[Path], part: str, *, trusted: bool = False) -> str:
    files = repr(str(paths[0])) if len(paths) == 1 else "f"
    load = f"torch.load({files}, weights_only={not trusted}, map_location='cpu'){part}"
    each = f" for f in {[str(path) for path in paths]}" if len(paths) > 1 else ""
    code = (
        "import torch; from safetensors.torch import save_file;"
        f" save_file({{str(k): t.clone(){each} for k, t in {load}.items()}}, 'model.safetensors')"
    )
    return "python -c " + (shlex.quote(code) if any(c in code for c in '"\\$`!') else f'"{code}"')


def _is_harmless(value: object, depth: int = 16) -> bool:
    """Test whether torch.load takes a value without classes of others."""
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


# ---- known formats that are not read yet ----------------------------------------------------------------------


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
