"""config.json, tokenizer and code for a Hugging Face target.

They come from the source, from the folder of its shards, and from --config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.registry import format_named
from ucpl.texts import read_text

if TYPE_CHECKING:
    from ucpl.conversion.side import Side
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["with_model_files"]

CONFIG, ADAPTER = "config.json", "adapter_config.json"


def with_model_files(source: Side, target: Side) -> Side:
    """The source with the small files for a loader of the target.

    Files of --config replace those of the source. All files of its folder that describe the model are copied: config.json, the
    tokenizer, code.
    """
    checkpoint = source.checkpoint
    if checkpoint is None or not format_named(target.layout.framework).has_model_files:
        return source
    from ucpl.files.model_texts import TEXTS, carried_files

    own = carried_files(checkpoint)
    files = _around(checkpoint) | own
    if (file := target.given.config_file) is not None:
        files = _of_folder(file) | files | {_called(file): read_text(file)}
    elif CONFIG not in files and not target.called.is_of_any:  # under the names of a class
        made = format_named(checkpoint.format).config_made(checkpoint.root)
        files |= {CONFIG: json.dumps(made, indent=2) + "\n"} if made is not None else {}
    if files == own:
        return source
    known = evolve(checkpoint.state, blobs={**checkpoint.state.blobs, TEXTS: files})
    container = checkpoint.container.without({*files}) if checkpoint.container is not None else None
    return evolve(source, checkpoint=evolve(checkpoint, state=known, container=container))


def _around(checkpoint: Checkpoint) -> dict[str, str | bytes]:
    """config.json and adapter_config.json of the folder of a training framework.

    Other files of the folder are copied unchanged.
    """
    container = checkpoint.container
    if container is None:
        return {}
    found: dict[str, str | bytes] = {}
    for file in container.files:
        name = Path(file.name).name
        if name in (CONFIG, ADAPTER) and name not in found:
            found[name] = read_text(container.where(file))
    return found


def _of_folder(file: Path) -> dict[str, str | bytes]:
    """Files that describe a model in the folder of a config.json.

    A config with another name has no such folder.
    """
    from ucpl.files.model_texts import read_texts

    return read_texts(file.parent)[0] if file.name == CONFIG else {}


def _called(file: Path) -> str:
    return ADAPTER if file.name == ADAPTER else CONFIG
