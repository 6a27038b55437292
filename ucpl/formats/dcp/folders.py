"""FSDP's model and optimizer in a folder each, read as one checkpoint.

The folders are `pytorch_model_fsdp_0` and `optimizer_0`, or `model` and `optimizer`.
Accelerate and the Trainer write the first two, slime the others. Each is a folder of torch.distributed.checkpoint, with one
dict of the state dict: `model`, and `optimizer`. Together they are one checkpoint, whose names are those of both. Source:
accelerate 1.15, utils/fsdp_utils.py.
"""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, UcplError, fail
from ucpl.files.skipping import skips_optimizer
from ucpl.files.texts import names_like, read_name, read_small
from ucpl.formats.dcp.metadata import METADATA, ByteRange, ChunkedTensor, Metadata, read_metadata
from ucpl.storage.joined import SIGN

__all__ = [
    "METADATA",
    "MODEL",
    "OF_STEP",
    "OPTIMIZER",
    "folders_in",
    "has_chunks",
    "joined_by",
    "is_apart",
    "is_of_megatron",
    "read_folders",
    "step_in",
]

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_MODELS = "pytorch_model_fsdp_"  # and a number
_PAIR = ("model", "optimizer")  # of a step's folder
OF_STEP = "model_and_optim"  # of OLMo-core, in a step's folder
_TRACKER, _DIGITS_MAX = "latest_checkpointed_iteration.txt", 12
_SCHEDULER = "lr_scheduler"  # next to these two
_COMMON, _BACKEND = "common.pt", "metadata.json"  # Megatron-Core's; others may call a file of their own as the second
_BACKEND_BYTES_MAX = 1 << 16


def is_apart(path: Path) -> bool:
    """Test whether a folder has FSDP's model as chunks in a subfolder."""
    return bool(folders_in(path))


def folders_in(path: Path) -> tuple[str, ...]:
    """Those of models first, in order."""
    if not path.is_dir():
        return ()
    models = [entry.name for entry in path.iterdir() if _is_model(entry.name) and has_chunks(entry)]
    if models:
        return (*sorted(models), *([OPTIMIZER] if has_chunks(path / OPTIMIZER) else []))
    if has_chunks(path) or not all(has_chunks(path / name) for name in _PAIR):
        return ()
    return (*_PAIR, *([_SCHEDULER] if has_chunks(path / _SCHEDULER) else []))


def step_in(path: Path) -> Path | None:
    """The folder of chunks that a step or a run leads to.

    OLMo-core's step has it below; slime's run has a tracker of iterations, as Megatron's.
    """
    if not path.is_dir() or has_chunks(path):
        return None
    if has_chunks(path / OF_STEP):
        return path / OF_STEP
    tracker = path / _TRACKER
    text = (read_name(tracker) or "") if tracker.is_file() else ""
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX:
        return None
    step = path / f"iter_{int(text):07d}"
    return step if is_apart(step) or (has_chunks(step) and not is_of_megatron(step)) else None


def joined_by(model: Path, optimizer: Path) -> str:
    """A text that reads a model and its optimizer as one source.

    Chunks of an optimizer need a model of chunks.
    """
    if has_chunks(optimizer) and not has_chunks(model):
        return (
            f"`ucpl convert {model} model-dcp --to dcp -D fsdp=1` makes a DCP folder of the model, and then"
            f" model-dcp{SIGN}{optimizer} names both"
        )
    return f"{model}{SIGN}{optimizer} names both"


def _is_model(name: str) -> bool:
    return name.startswith(_MODELS) and name.removeprefix(_MODELS).isdecimal()


def has_chunks(path: Path) -> bool:
    """Test whether any program wrote this folder in torch.distributed.checkpoint's format."""
    return path.is_dir() and (path / METADATA).is_file() and bool(names_like(path, ".distcp"))


def is_of_megatron(path: Path) -> bool:
    """Test whether a folder with `.metadata` also has a file of Megatron-Core.

    That is common.pt, with or without metadata.json, or a metadata.json that names its backend. A metadata.json of
    other programs does not name one.
    """
    if not path.is_dir() or not (path / METADATA).is_file():
        return False
    if (path / _COMMON).exists() or not (path / _BACKEND).is_file():
        return (path / _COMMON).exists()
    raw = read_small(path / _BACKEND, _BACKEND_BYTES_MAX)
    return raw is not None and b'"sharded_backend"' in raw


def read_folders(root: Path) -> Metadata:
    """Read both folders as one.

    Raises: UcplError E487 for several models, E520 for a name in both folders, and errors of read_metadata.
    """
    folders = folders_in(root)
    optimizer = OPTIMIZER if OPTIMIZER in folders else _PAIR[1]
    models = [name for name in folders if name not in (optimizer, _SCHEDULER)]
    if models not in ([MODEL], [_PAIR[0]]):
        fail(
            "E487",
            f"{root} has {len(models)} model{'s' * (len(models) > 1)}, {', '.join(models[:5])}",
            *(Label(str(root / name)) for name in models[:5]),
            remedy=f"convert each by its own folder, {root / models[0]}: its weights are read",
        )
    out = Metadata()
    for folder in folders:
        try:
            mine = read_metadata(root / folder)
        except UcplError:
            if folder == optimizer and skips_optimizer(f"{optimizer}/{METADATA}", kind="file"):
                continue
            raise
        twice = next((name for name in mine.paths if name in out.paths), None)
        if twice is not None:
            other = out.described[twice]
            fail(
                "E520",
                f"`{twice}` is in {other.rpartition('/')[0]} and in {folder}",
                Label(str(root / other), where=twice),
                Label(str(root / folder / METADATA), where=twice),
            )
        out.tensors |= {name: _moved(stored, folder) for name, stored in mine.tensors.items()}
        out.objects |= {name: _placed(place, folder) for name, place in mine.objects.items()}
        out.paths |= mine.paths
        out.files += tuple(f"{folder}/{file}" for file in mine.files)
        out.archives |= {f"{folder}/{file}": runs for file, runs in mine.archives.items()}
        out.described |= dict.fromkeys(mine.paths, f"{folder}/{METADATA}")
    return out


def _placed(place: ByteRange, folder: str) -> ByteRange:
    return evolve(place, file=f"{folder}/{place.file}")


def _moved(stored: ChunkedTensor, folder: str) -> ChunkedTensor:
    chunks, empty = (
        tuple(evolve(chunk, place=_placed(chunk.place, folder)) for chunk in some)
        for some in (stored.chunks, stored.empty)
    )
    return evolve(stored, chunks=chunks, empty=empty)
