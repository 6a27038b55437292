"""Checks that a framework's own loader makes, as data.

One function runs them. Each framework has one record of these next to its store (`Framework.demands`). A target is
checked before it is written (conversion/demanded), a checkpoint by `verify`.

Not here: opening files, and classes of transformers (inference/hf/fitting).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import field

from ucpl.errors import Diagnostic, Label, catalogue
from ucpl.extents import ParameterGroup
from ucpl.records import frozen
from ucpl.texts import Json

__all__ = ["Demands", "NamePatterns", "LoaderView", "SizeRule", "sizes_of", "unmet"]

Shape = tuple[int, ...]


@frozen(eq=False)
class LoaderView:
    """A checkpoint as a loader sees it.

    A target, or one that is read.
    """

    place: str  # for messages: a path, or a layout's call
    stored: Mapping[str, Shape]  # shapes of weights by their names in the files
    config: Mapping[str, Json] | None = None  # config.json
    groups: Sequence[ParameterGroup] = ()
    origin: str = ""  # the framework of the source; empty for a checkpoint that is read
    is_of_any: bool = False  # whether the names are the source's, and no spec of the user has written them


@frozen
class NamePatterns:
    """Patterns of names.

    A target that has the source's names must have one that matches.
    """

    patterns: tuple[str, ...]
    of: tuple[str, ...]  # frameworks whose own checkpoints have other names, too
    code: str
    says: str  # "Megatron-Core has no tensor of such a name"

    def unmet(self, seen: LoaderView) -> Iterable[Diagnostic]:
        if not seen.is_of_any or seen.origin in self.of or not seen.stored:
            return
        known = re.compile("|".join(self.patterns), re.DOTALL)
        if any(known.search(name) for name in seen.stored):
            return
        first = next(iter(seen.stored))
        message = (
            f"`{first}`" + (f" and {len(seen.stored) - 1} more" if len(seen.stored) > 1 else "") + f": {self.says}"
        )
        yield Diagnostic(self.code, message, (Label(seen.place, where=first),), remedy=catalogue()[self.code].remedy)


@frozen
class SizeRule:
    """A key of config.json that fixes a dim of some tensors.

    `every`: each of these tensors has that size; else one at least. `more`: a key whose value may be added (layers of MTP).
    `axis`: None where the tensors are numbered by it, from 0.
    """

    keys: tuple[str, ...]
    pattern: str
    axis: int | None
    every: bool = True
    more: str = ""

    def found(self, stored: Mapping[str, Shape]) -> dict[str, int]:
        """Sizes by the tensors that state them."""
        out: dict[str, int] = {}
        known = re.compile(self.pattern)
        for name, shape in stored.items():
            match = known.fullmatch(name)
            if match is None or (self.axis is not None and len(shape) <= self.axis):
                continue
            out[name] = shape[self.axis] if self.axis is not None else int(match["number"]) + 1
        if self.axis is None and out:
            last = max(out, key=lambda name: out[name])
            return {last: out[last]}
        return out

    def unmet(self, seen: LoaderView, config: Mapping[str, Json]) -> Iterable[Diagnostic]:
        key = next((key for key in self.keys if type(config.get(key)) is int), None)
        found = self.found(seen.stored)
        if key is None or not found:
            return
        said, more = config[key], config.get(self.more) if self.more else None
        assert type(said) is int
        allowed = {said, said + (more if type(more) is int else 0)}
        wrong = {name: size for name, size in found.items() if size not in allowed}
        if not wrong or (not self.every and len(wrong) < len(found)):
            return
        name, size = next(iter(wrong.items()))
        states = f"`{name}` is {list(seen.stored[name])}" if self.axis is not None else f"the last layer has `{name}`"
        yield Diagnostic(
            "E388",
            f"config.json has {key} = {said}, and {states}: {size} would fit",
            (Label(seen.place, where=key),),
            remedy=catalogue()["E388"].remedy,
            about=(key, size),
        )


@frozen(eq=False)
class Demands:
    """Demands of one framework's loader."""

    names: NamePatterns | None = None
    sizes: tuple[SizeRule, ...] = ()
    checks: tuple[Callable[[LoaderView], Iterable[Diagnostic]], ...] = field(
        default=()
    )  # demands that no table has: groups, files


def sizes_of(config: Mapping[str, Json]) -> Mapping[str, Json]:
    """The part of config.json with the sizes of the language model.

    Keys of `text_config` precede those next to it.
    """
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def unmet(demands: Demands, seen: LoaderView) -> tuple[Diagnostic, ...]:
    """Everything that the framework's loader would refuse or read otherwise."""
    out = list(demands.names.unmet(seen)) if demands.names is not None else []
    if seen.config is not None and "quantization_config" not in seen.config:
        sizes = sizes_of(seen.config)
        out += [one for size in demands.sizes for one in size.unmet(seen, sizes)]
    out += [one for check in demands.checks for one in check(seen)]
    return tuple(out)
