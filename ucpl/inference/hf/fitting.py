"""A comparison of a Hugging Face folder's tensors with its class.

It predicts the missing and unexpected tensors of from_pretrained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ucpl.inference.hf.classes import ClassTensors, saved_of
from ucpl.inference.hf.records import Config
from ucpl.records import frozen

__all__ = ["Fitting", "fitting"]

Shape = tuple[int, ...]
_SCALES = ("_scale_inv", "_scales", "_blocks")


@frozen
class Fitting:
    """Differences between a folder and its class.

    mismatched: (name, shape in the folder, that of the class). missing: of the class alone; unexpected: of the folder.
    """

    kind: str  # "LlamaForCausalLM"
    mismatched: tuple[tuple[str, Shape, Shape], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    common: int = 0


def fitting(config: Config, stored: Mapping[str, Shape]) -> Fitting | None:
    """None: transformers is not installed, or cannot make the class."""
    saved = saved_of(config)
    return None if saved is None else _fitted(saved, stored)


def _fitted(saved: ClassTensors, stored: Mapping[str, Shape]) -> Fitting:
    named = {_called(saved, name): name for name in stored}
    both = [name for name in saved.shapes if name in named]
    mismatched = [
        (named[name], stored[named[name]], saved.shapes[name])
        for name in both
        if stored[named[name]] != saved.shapes[name]
    ]
    others = {name: saved.loaded(name) for called, name in named.items() if called not in saved.shapes}
    read = {name: one for name, one in others.items() if one.module in saved.modules}
    mismatched += [
        (name, stored[name], saved.modules[one.module])
        for name, one in read.items()
        if not one.is_part and stored[name] != saved.modules[one.module]
    ]
    ignored = re.compile("|".join(saved.dropped)) if saved.dropped else None
    unexpected = (
        name
        for called, name in named.items()
        if called not in saved.shapes
        and called not in saved.tied
        and name not in read
        and not name.endswith(_SCALES)
        and (ignored is None or ignored.search(name) is None)
    )
    there = {one.module for one in read.values()}
    missing = (
        name
        for name in saved.shapes
        if name not in named and name not in saved.tied and saved.places.get(name) not in there
    )
    return Fitting(saved.name, tuple(mismatched), tuple(missing), tuple(unexpected), len(both) + len(read))


def _called(saved: ClassTensors, name: str) -> str:
    """The class's own name, with or without the base model's prefix.

    from_pretrained finds both.
    """
    if name in saved.shapes or not saved.prefix:
        return name
    lead = f"{saved.prefix}."
    other = name.removeprefix(lead) if name.startswith(lead) else lead + name
    return other if other in saved.shapes else name
