"""The head cut by the vocabulary, and embeddings tied to it."""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.inference.autotp.drawn import Drawn, refuse
from ucpl.inference.hf.modules import EMBEDDING, LINEAR, Module, Network
from ucpl.records import frozen

__all__ = ["Head", "head_of"]

_NAMES = ("lm_head", "embed_out")


@frozen
class Head:
    """path: of the head. modules: the head and embeddings with its weight."""

    path: str
    module: Module
    modules: frozenset[str]

    @staticmethod
    def candidates(network: Network) -> Iterator[tuple[str, Module]]:
        for path, module in network.root.walk():
            if module.role == LINEAR and module.name in _NAMES:
                yield path, module

    def cut(self, drawn: Drawn, said: str) -> None:
        tied = sorted(self.modules - {self.path})
        more = f" with {', '.join(tied)}" if tied else ""
        drawn.column(self.path, self.module, self.path, f"{self.path}{more} by the vocabulary: {said}")


def head_of(drawn: Drawn, *, is_asked: bool) -> Head | None:
    """The head whose logits are parts of the vocabulary on each rank.

    None: DeepSpeed cuts neither it nor its embedding.

    is_asked: DeepSpeed's config requests this, and DeepSpeed stops if it cannot do it. Raises: UcplError E472.
    """
    network = drawn.network
    found = list(Head.candidates(network))
    why = _why_not(drawn, found)
    if why and is_asked:
        refuse(f"vocab_parallel_lm_head: {why}", "vocab_parallel_lm_head")
    if why:
        return None
    ((path, module),) = found
    weight = network.owner(f"{path}.weight")
    tied = {p for p, m in network.root.walk() if m.role == EMBEDDING and network.owner(f"{p}.weight") == weight}
    return Head(path, module, frozenset({path, *tied}))


def _why_not(drawn: Drawn, found: list[tuple[str, Module]]) -> str:
    network = drawn.network
    if len(found) != 1:
        return f"{len(found)} linear modules are called {' or '.join(_NAMES)}"
    ((path, module),) = found
    weight = network.owner(f"{path}.weight")
    for name, one in network.root.walk():
        if one.role == EMBEDDING and network.owner(f"{name}.weight") == weight and not one.is_plain:
            return f"the embedding {name} is a {one.class_name}, which does more than look rows up"
    if 0 in drawn.widths(module.shapes["weight"][0], path):
        return f"{module.shapes['weight'][0]} rows of {path} are too few"
    return "" if network.takes_loss else "the class has no loss that can be replaced"
