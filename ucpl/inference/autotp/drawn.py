"""Cuts per module: widths by DeepSpeed's rule, each with its origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding
from ucpl.inference.hf.modules import Module, Network
from ucpl.inference.parallel import rule
from ucpl.records import frozen

__all__ = ["AutoTPOptions", "Drawn", "Part", "refuse"]

Part = tuple[int, bool]  # positions, and a flag: ranks divide them; otherwise each rank holds all


@frozen
class AutoTPOptions:
    """The options of DeepSpeed's config, or the call's values in their place."""

    degree: int
    kv_heads: int  # 0: the model's config names none
    grain: int = 1
    vocabulary: bool | None = None  # vocab_parallel_lm_head. None: as the plan says


def refuse(what: str, place: str, *, remedy: str = "") -> NoReturn:
    fail("E472", what, Label("config.json", where=place), remedy=remedy)


@frozen(eq=False)
class Drawn:
    """Cuts of one model so far, by parameters' first names."""

    network: Network
    asked: AutoTPOptions
    cuts: dict[str, Sharding] = field(factory=dict)

    def widths(self, size: int, module: str) -> tuple[int, ...]:
        """Widths of `size` positions over the ranks.

        module: the name by which DeepSpeed looks it up; empty: by none.
        """
        return rule(size, self.asked.degree, self.asked.kv_heads, self.asked.grain, module)

    def column(self, path: str, module: Module, called: str, origin: str) -> None:
        """Divide the outputs: rows of the weight and of the bias."""
        rows = module.shapes["weight"][0]
        self.parts(path, module, [(rows, True)], called, origin)

    def row(self, path: str, module: Module, called: str, origin: str) -> None:
        """Divide the inputs: columns of the weight, with a full bias.

        The outputs are summed over ranks.
        """
        self._cut(f"{path}.weight", 1, [(module.shapes["weight"][1], True)], called, origin)

    def parts(self, path: str, module: Module, parts: Sequence[Part], called: str, origin: str) -> None:
        """Divide outputs of several parts, each separately."""
        for name in ("weight", "bias"):
            if name in module.shapes:
                self._cut(f"{path}.{name}", 0, parts, called, origin)

    def _cut(self, name: str, dim: int, parts: Sequence[Part], called: str, origin: str) -> None:
        shape = self.network.shapes[self.network.owner(name)]
        if sum(size for size, _ in parts) != shape[dim]:
            refuse(f"`{name}` is {list(shape)}, and {origin} cuts it into {[size for size, _ in parts]}", name)
        sections = tuple(Section(size, self.widths(size, called) if is_dealt else None) for size, is_dealt in parts)
        made = Sharding(shape, dim, sections, origin)
        first = self.cuts.setdefault(self.network.owner(name), made)
        if (first.dim, first.sections) != (made.dim, made.sections):
            refuse(f"`{name}` is one tensor with others, which {first.origin} cuts in another way than {origin}", name)
