"""Weights in blocks that share a scale: what the config says of them, and how many blocks an axis has."""

from __future__ import annotations

from math import ceil

from ucpl.frontends.hf.folding import Folded, Form
from ucpl.frontends.hf.records import Facts
from ucpl.frontends.hf.sizes import Axis, Size, Stacked

__all__ = ["blocks_of", "notes_of", "scaled_of"]

_SUFFIX = "_scale_inv"


def notes_of(facts: Facts) -> tuple[str, ...]:
    """What a reader of the text must know of a quantised model; nothing where the config says nothing."""
    said = facts.config.get("quantization_config")
    if not isinstance(said, dict):
        return ()
    method, blocks = said.get("quant_method", "?"), _blocks(facts)
    how = f"{method}, in blocks of {' x '.join(map(str, blocks))}" if blocks else str(method)
    if any(t.name.endswith(_SUFFIX) for t in facts.tensors):
        return (
            f"config.quantization_config: {how}. Scales are tensors by themselves, `..{_SUFFIX}`, and whole on every rank of"
            " tensor_parallel: cut where no block is cut.",
        )
    return (
        f"config.quantization_config: {how}. This is what the class saves without it: files that are quantised have weights of"
        " another type and scales beside them. Import their folder to describe those.",
    )


def scaled_of(f: Folded) -> Form | None:
    """The pattern of the weight that a scale belongs to; None where the tensor is no scale."""
    leaf = f.pattern[-1]
    if leaf is None or not leaf.endswith(_SUFFIX):
        return None
    return (*f.pattern[:-1], leaf.removesuffix(_SUFFIX))


def blocks_of(facts: Facts, base: Axis | None, place: int, size: int) -> tuple[Size, ...] | None:
    """How many blocks an axis of a weight has, said by the dims of that axis; None where that is not the size."""
    blocks = _blocks(facts)
    if base is None or place >= len(blocks):
        return None
    terms = [(*base.outer, *sizes) for _, sizes in base.parts] if isinstance(base, Stacked) else [base]
    total = sum(_product(term) for term in terms)
    if ceil(total / blocks[place]) != size:
        return None
    text = " + ".join(" * ".join(f"({s.text})" if " " in s.text else s.text for s in term) for term in terms)
    name = "_".join(dict.fromkeys(s.name for term in terms for s in term))
    return (Size(f"{name}_blocks", f"ceil({text}, {blocks[place]})", (size,)),)


def _product(term: tuple[Size, ...]) -> int:
    total = 1
    for size in term:
        total *= size.vector[0]
    return total


def _blocks(facts: Facts) -> tuple[int, ...]:
    """The sides of a block, one for each axis; none where the config does not say them all."""
    said = facts.config.get("quantization_config")
    found = said.get("weight_block_size") if isinstance(said, dict) else None
    sides = tuple(b for b in found if isinstance(b, int) and b > 0) if isinstance(found, list) else ()
    return sides if isinstance(found, list) and len(sides) == len(found) else ()
