"""The facts of a path: its config, its headers, its class."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.files.checkpoint import Framework
from ucpl.files.header_watch import reading
from ucpl.inference.hf.classes import Class, class_of
from ucpl.inference.hf.records import MTP, Behind, Config, FoundTensor, ModelFacts
from ucpl.inference.hf.varying import lists_of, numbers_of
from ucpl.inference.hf.writing import text_of
from ucpl.registry import formats
from ucpl.texts import is_endless, json_object, read_text

__all__ = ["import_hf"]

_LAYERS = "num_hidden_layers"
_CONTAINER = "model.layers"
_A_LAYER = re.compile(r"layers\W+\d+")


def import_hf(path: str | Path) -> str:
    """The text of a .ucpl with a model and a layout `hf()`.

    It also has a layout `tensor_parallel(tp, pp = 1)` if some tensor is cut. path: a config.json, a folder with one, a folder
    with .safetensors files, or such a file.

    Raises: UcplError E395, E396, and errors of reading files (E380-E386, E400, E430-E434).
    """
    with reading(path):
        return text_of(_facts(Path(path)))


def _facts(path: Path) -> ModelFacts:
    folder = path if os.path.isdir(path) else path.parent
    config_file = path if path.suffix == ".json" else folder / "config.json"
    config = _read_config(config_file) if os.path.isfile(config_file) else None
    is_there = os.path.exists(path) and not is_endless(path)
    stores = path.suffix != ".json" and is_there and _store().recognises(path)
    if config is None and not stores:
        _check_allowed(path, config_file)
        fail("E395", f"{path} has neither a config.json nor .safetensors files", Label(str(path)))
    notes: list[str] = []
    made = class_of(config, config_file, needed=not stores, notes=notes) if config is not None else None
    facts = _of_class(made, config or {}, tuple(notes))
    return facts if not stores else _of_files(path, facts)


def _check_allowed(*paths: Path) -> None:
    """Stop for paths without permission, which otherwise seem to be missing.

    Raises: UcplError E400.
    """
    for path in paths:
        try:
            os.stat(path)
        except PermissionError as error:
            fail("E400", f"{path} cannot be read: {error.strerror}", Label(str(path)))
        except (OSError, ValueError):
            continue


def _read_config(file: Path) -> Config:
    value = json_object(read_text(file))
    if isinstance(value, str):
        fail("E395", f"{file} is no config: {value}", Label(str(file)))
    return value


def _of_class(made: Class | None, config: Config, notes: tuple[str, ...]) -> ModelFacts:
    if made is None:
        return ModelFacts((), config, numbers_of(config), lists_of(config), notes=notes)
    own, *variations = made.versions
    behind = _behind_of(own.numbers, own.tensors, made.dropped)
    facts = ModelFacts(
        own.tensors,
        config,
        own.numbers,
        own.lists,
        tuple(variations),
        made.absent,
        made.aliases,
        made.cuts,
        notes,
        made.origin,
        splits=made.splits,
        items=own.items,
    )
    return facts if behind is None else evolve(facts, tensors=_with_behind(own.tensors, behind), behind=behind)


def _store() -> Framework:
    return next(one for one in formats().values() if one.has_model_files).store()


def _of_files(path: Path, made: ModelFacts) -> ModelFacts:
    """The tensors of the files, with the class's facts of these."""
    opened = _store().open(path)
    buffers = {t.name for t in made.tensors if t.is_buffer}
    order = {t.name: i for i, t in enumerate(made.tensors)}
    found = [FoundTensor(t.name, t.shape, t.dtype, t.name in buffers) for t in opened.state.tensors]
    tensors = tuple(sorted(found, key=lambda t: order.get(t.name, len(order))))
    names = {t.name for t in tensors}
    behind = made.behind
    if behind is not None:
        behind = evolve(behind, is_stored=any(n.startswith(f"{behind.container}.{behind.layers}.") for n in names))
        tensors = tensors if behind.is_stored else _with_behind(tensors, behind)
    aliases = dict(opened.state.aliases)
    for alias, owner in made.aliases.items():
        if owner in names and alias not in names:
            aliases[alias] = owner
    notes = made.notes
    if not made.tensors and made.config.get("tie_word_embeddings") and not aliases:
        notes += ("The config ties word embeddings; which names share a tensor is the class's to say: add `alias`.",)
    return evolve(made, tensors=tensors, aliases=aliases, notes=notes, origin=ModelFacts((), {}).origin, behind=behind)


# ---- layers behind the last one (multi-token prediction), which classes drop on load -----------------------------------
# The text has a switch for them: `let mtp = 0` describes the files of the class, `-D mtp=1` files with one such layer.


def _behind_of(numbers: dict[str, int], tensors: Iterable[FoundTensor], dropped: Iterable[str]) -> Behind | None:
    """The config's layers behind the last, or None.

    dropped: the class's patterns of keys to ignore. One with a layer's number is a layer behind the last of a released
    model.
    """
    layers, count = numbers.get(_LAYERS), numbers.get(MTP, 0)
    if layers is None or not count or not any(_A_LAYER.search(p) for p in dropped):
        return None
    head = f"{_CONTAINER}.{layers}."
    return None if any(t.name.startswith(head) for t in tensors) else Behind(layers, count)


def _with_behind(tensors: tuple[FoundTensor, ...], behind: Behind) -> tuple[FoundTensor, ...]:
    """The tensors with those of the layers behind the last.

    Each is a layer like the last, with tensors that join it to the model, and copies.
    """
    head = f"{_CONTAINER}.{behind.layers - 1}."
    last = [t for t in tensors if t.name.startswith(head)]
    embed = next((t for t in tensors if t.name == "model.embed_tokens.weight"), None)
    norm = next((t for t in tensors if t.name == "model.norm.weight"), None)
    if embed is None or norm is None:
        return tensors
    (width,) = norm.shape
    joint = [
        evolve(norm, name="enorm.weight"),
        evolve(norm, name="hnorm.weight"),
        evolve(norm, name="eh_proj.weight", shape=(width, 2 * width)),
        evolve(norm, name="shared_head.norm.weight"),
        evolve(embed, name="embed_tokens.weight"),
        evolve(embed, name="shared_head.head.weight"),
    ]
    found = [evolve(t, name=t.name.removeprefix(head)) for t in last] + joint
    places = range(behind.layers, behind.layers + behind.count)
    return tensors + tuple(evolve(t, name=f"{_CONTAINER}.{n}.{t.name}") for n in places for t in found)
