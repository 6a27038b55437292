"""Layers behind the last one (multi-token prediction), which classes drop on load.

The text has a switch for them: `let mtp = 0` describes the files of the class, `-D mtp=1` files with one such layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import evolve

from ucpl.inference.hf.records import MTP, Behind, Found

__all__ = ["behind_of", "with_behind"]

_LAYERS = "num_hidden_layers"
_CONTAINER = "model.layers"
_A_LAYER = re.compile(r"layers\W+\d+")


def behind_of(numbers: dict[str, int], tensors: Iterable[Found], dropped: Iterable[str]) -> Behind | None:
    """The config's layers behind the last, or None.

    dropped: the class's patterns of keys to ignore. One with a layer's number is a layer behind the last of a released
    model.
    """
    layers, count = numbers.get(_LAYERS), numbers.get(MTP, 0)
    if layers is None or not count or not any(_A_LAYER.search(p) for p in dropped):
        return None
    head = f"{_CONTAINER}.{layers}."
    return None if any(t.name.startswith(head) for t in tensors) else Behind(layers, count)


def with_behind(tensors: tuple[Found, ...], behind: Behind) -> tuple[Found, ...]:
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
