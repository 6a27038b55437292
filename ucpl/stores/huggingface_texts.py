"""Small texts of Hugging Face folders: config.json and the tokenizer's, carried from checkpoint to checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ucpl.extents.account import NotRead
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.texts import read_small
from ucpl.stores.watching import reading
from ucpl.texts import Json

__all__ = ["TEXTS", "TEXT_BYTES_MAX", "carried_texts", "config_at", "config_of", "read_texts", "version_of"]

TEXTS = "huggingface_files"  # the blob that holds config.json and the tokenizer's texts, by name
TEXT_BYTES_MAX = 64 << 20
_TEXT = (".json", ".txt", ".jinja", ".md")


def read_texts(folder: Path) -> tuple[dict[str, str], list[NotRead]]:
    """Small text files of a folder by name (config.json, the tokenizer's), and those that stay behind."""
    texts: dict[str, str] = {}
    not_read: list[NotRead] = []
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        if path.suffix in _TEXT and not path.name.endswith(".index.json"):
            try:
                raw = read_small(path, TEXT_BYTES_MAX)
                if raw is None:
                    not_read.append(NotRead(path.name, f"a text of more than {TEXT_BYTES_MAX:,} bytes"))
                else:
                    texts[path.name] = raw.decode("utf-8")
            except UnicodeDecodeError:
                not_read.append(NotRead(path.name, "it is no UTF-8 text"))
        elif path.suffix == ".model":
            not_read.append(NotRead(path.name, "it is no text: copy it into a converted folder"))
    return texts, not_read


def config_of(checkpoint: Checkpoint) -> dict[str, Json] | None:
    """The config.json that a checkpoint has, or that an earlier conversion carried. None where it has none."""
    text = carried_texts(checkpoint).get("config.json")
    return None if text is None else _object(text)


def config_at(folder: Path) -> dict[str, Json] | None:
    """The config.json of a folder; None where it has none that is an object. Raises: UcplError E400."""
    path = folder / "config.json"
    with reading(path):
        is_there = path.is_file()
    data = read_small(path, TEXT_BYTES_MAX) if is_there else None
    return None if data is None else _object(data)


def _object(text: str | bytes) -> dict[str, Json] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def carried_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """Texts of a Hugging Face folder that the checkpoint is, or once was."""
    texts = checkpoint.envelope.blobs.get(TEXTS)
    if not isinstance(texts, dict):
        return {}
    return {n: t for n, t in texts.items() if isinstance(n, str) and isinstance(t, str) and PurePosixPath(n).name == n}


def version_of(texts: Mapping[str, str]) -> str:
    try:
        return str(json.loads(texts.get("config.json", "{}")).get("transformers_version", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""
