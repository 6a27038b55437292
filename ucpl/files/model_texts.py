"""Small files of Hugging Face folders: config.json, tokenizer and code.

They are carried between checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from attrs import field

from ucpl.extents.account import NotRead
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import reading
from ucpl.files.texts import read_small
from ucpl.records import frozen
from ucpl.texts import Json

__all__ = [
    "TEXTS",
    "TEXT_BYTES_MAX",
    "WrittenTexts",
    "carried_files",
    "carried_texts",
    "config_at",
    "config_of",
    "damaged_texts",
    "object_of",
    "read_texts",
    "version_of",
]

TEXTS = "huggingface_files"  # the blob that holds config.json and the tokenizer's files, by name
TEXT_BYTES_MAX = 64 << 20
_TEXT = (".json", ".txt", ".jinja", ".md")
_TOKENIZER = (".model", ".spm", ".bpe", ".tiktoken", ".vocab")  # of these, some are no texts
_MAPPED = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


@frozen(eq=False)
class WrittenTexts:
    """Texts of a target by name, notes, and reasons for omitted texts."""

    texts: dict[str, str] = field(factory=dict)
    notes: tuple[str, ...] = ()
    left: dict[str, str] = field(factory=dict)


def read_texts(folder: Path) -> tuple[dict[str, str | bytes], list[NotRead]]:
    """Small files that describe a folder's model, and those left behind.

    config.json and other texts, the tokenizer's files, and code if config.json names some (`auto_map`).
    """
    found: dict[str, str | bytes] = {}
    not_read: list[NotRead] = []
    code: list[str] = []
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name.endswith(".index.json"):
            continue
        if path.suffix == ".py":
            code.append(path.name)
        elif path.suffix in (*_TEXT, *_TOKENIZER):
            _read(path, found, not_read)
    is_mapped = any(_maps(found.get(name)) for name in _MAPPED)
    for name in code:
        if is_mapped:
            _read(folder / name, found, not_read)
        else:
            not_read.append(NotRead(name, "no auto_map of config.json names code of this folder"))
    return found, not_read


def _read(path: Path, found: dict[str, str | bytes], not_read: list[NotRead]) -> None:
    raw = read_small(path, TEXT_BYTES_MAX)
    if raw is None:
        not_read.append(NotRead(path.name, f"a text of more than {TEXT_BYTES_MAX:,} bytes"))
        return
    try:
        found[path.name] = raw.decode("utf-8")
    except UnicodeDecodeError:
        if path.suffix in _TOKENIZER:
            found[path.name] = raw
        else:
            not_read.append(NotRead(path.name, "it is no UTF-8 text"))


def _maps(text: str | bytes | None) -> bool:
    """Test whether a config names classes of files in its folder."""
    value = object_of(text) if isinstance(text, str) else None
    return value is not None and bool(value.get("auto_map"))


def config_of(checkpoint: Checkpoint) -> dict[str, Json] | None:
    """The config.json of a checkpoint or of an earlier conversion, or None."""
    text = carried_texts(checkpoint).get("config.json")
    return None if text is None else object_of(text)


def config_at(folder: Path) -> dict[str, Json] | None:
    """The config.json of a folder, or None.

    Raises: UcplError E400.
    """
    path = folder / "config.json"
    with reading(path):
        is_there = path.is_file()
    data = read_small(path, TEXT_BYTES_MAX) if is_there else None
    return None if data is None else object_of(data)


def damaged_texts(texts: Mapping[str, str | bytes]) -> list[str]:
    """A line for each text of settings that is no JSON object.

    Loaders of the folder fail, or begin with their own defaults.
    """
    return [
        f"{name} is no JSON object: loaders cannot read it"
        for name, text in texts.items()
        if name.endswith("config.json") and object_of(text) is None
    ]


def object_of(text: str | bytes) -> dict[str, Json] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def carried_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """Texts of the Hugging Face folder that is the checkpoint, or was."""
    return {name: text for name, text in carried_files(checkpoint).items() if isinstance(text, str)}


def carried_files(checkpoint: Checkpoint) -> dict[str, str | bytes]:
    """The same, with the tokenizer's files that are no texts."""
    found = checkpoint.state.blobs.get(TEXTS)
    if not isinstance(found, dict):
        return {}
    return {
        n: t
        for n, t in found.items()
        if isinstance(n, str) and isinstance(t, str | bytes) and PurePosixPath(n).name == n
    }


def version_of(texts: Mapping[str, str | bytes]) -> str:
    try:
        return str(json.loads(texts.get("config.json", "{}")).get("transformers_version", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""
