"""Weights with a scale per block.

Pairs of tensors, with axes as dims. fp8 has `..weight` and `..weight_scale_inv`, a scale for each block of rows and
columns. mxfp4 has `.._blocks` and `.._scales` for a tensor of the class whose rows, outputs first, are in groups of 32,
two elements to a byte.
"""

from __future__ import annotations

from math import gcd, lcm, prod

from attrs import evolve

from ucpl.inference.blocks import SCALE, blocks_along, sides_of
from ucpl.inference.hf.folding import Folded, Form
from ucpl.inference.hf.records import ModelFacts
from ucpl.inference.hf.sizes import Axis, DimSize, Stacked
from ucpl.language import nodes
from ucpl.records import frozen

__all__ = ["GROUP", "Pair", "PairText", "Whole", "grains_of", "notes_of", "pairs_of", "whole_of"]

GROUP = 32  # elements that have one exponent in mxfp4
_BLOCKS, _SCALES = "_blocks", "_scales"
_PRODUCT = nodes.Clause("value", (nodes.Binary("*", nodes.Name("x"), nodes.Name("scale")),))
_U8 = nodes.Clause("dtype", ("u8",))


@frozen
class Pair:
    """Two tensors of the files.

    `by`: the elements per scale along each axis of `whole`.
    """

    weight: Folded
    scale: Folded
    whole: Folded  # the weight as the class has it
    by: tuple[int, ...]

    @property
    def packed(self) -> bool:
        """Two elements to a byte, outputs first."""
        return self.whole is not self.weight

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of `whole` in the files' order."""
        return (0, 2, 1) if self.packed else tuple(range(len(self.by)))


@frozen
class Whole:
    """An axis as one dim, which is cut by units.

    A unit is one of `of`, and has `unit` elements.
    """

    size: DimSize
    of: str = ""
    unit: int = 1


def pairs_of(facts: ModelFacts, folded: list[Folded]) -> list[Pair]:
    """Weights and scales in the files, if shapes and the config agree."""
    by_pattern = {f.pattern: f for f in folded}
    found = (_fp8(facts, f, by_pattern) or _mxfp4(facts, f, by_pattern) for f in folded)
    return [pair for pair in found if pair is not None]


def _fp8(facts: ModelFacts, f: Folded, by_pattern: dict[Form, Folded]) -> Pair | None:
    scale = _beside(f, "", SCALE, by_pattern)
    if scale is None:
        return None
    by = blocks_along(sides_of(facts.config), f.first.dtype, f.first.shape, scale.first.shape)
    return Pair(f, scale, f, by) if by is not None else None


def _mxfp4(facts: ModelFacts, f: Folded, by_pattern: dict[Form, Folded]) -> Pair | None:
    scale, shape = _beside(f, _BLOCKS, _SCALES, by_pattern), f.first.shape
    is_said = _method(facts) == "mxfp4" and f.first.dtype == "u8"
    if scale is None or not is_said or len(shape) != 4 or shape[3] * 2 != GROUP or scale.first.shape != shape[:3]:
        return None
    experts, outputs, groups, _ = shape
    first = evolve(
        f.first, name=f.sample.removesuffix(_BLOCKS), shape=(experts, groups * GROUP, outputs), dtype="f4_e2m1fn"
    )
    leaf = (f.pattern[-1] or "").removesuffix(_BLOCKS)
    return Pair(f, scale, evolve(f, pattern=(*f.pattern[:-1], leaf), first=first), (1, GROUP, 1))


def _beside(f: Folded, own: str, other: str, by_pattern: dict[Form, Folded]) -> Folded | None:
    """The tensor with `other` for `own` in its name."""
    leaf = f.pattern[-1]
    if leaf is None or not leaf.endswith(own):
        return None
    found = by_pattern.get((*f.pattern[:-1], leaf.removesuffix(own) + other))
    alike = found is not None and (found.containers, found.spans) == (f.containers, f.spans)
    return found if alike else None


def whole_of(axis: Axis | None, size: int) -> Whole | None:
    """An axis of several dims or parts as one dim, or None.

    The dim is their product or sum. None: an unexplained number.
    """
    if axis is None:
        return None
    terms = [(*axis.outer, *sizes) for _, sizes in axis.parts] if isinstance(axis, Stacked) else [axis]
    kept = [tuple(s for s in term if s.text != "1") for term in terms]
    if sum(prod(s.vector[0] for s in term) for term in kept) != size:
        return None
    texts = [" * ".join(f"({s.text})" if set(s.text) & set(" +") else s.text for s in term) for term in kept]
    name = "_".join(dict.fromkeys(s.name for term in kept for s in term))
    text = " + ".join(texts)
    if len(kept) > 1 and len(set(texts)) == 1:
        text, name = f"{len(kept)} * {texts[0]}", f"{name}_x{len(kept)}"
    elif len(kept) == 1 and len(kept[0]) == 1:
        text = kept[0][0].text
    outer = axis.outer if isinstance(axis, Stacked) else axis
    cut = next((s for s in outer if s.cut), None)
    if cut is None or outer[0] is not cut:
        return Whole(DimSize(name, text, (size,)))
    return Whole(DimSize(name, text, (size,), cut=cut.cut), cut.name, size // cut.vector[0])


def grains_of(pairs: list[tuple[Pair, list[Whole | None]]]) -> dict[str, int]:
    """The count of units at block boundaries, in all weights, by unit.

    A unit is a head or the inner width, say.
    """
    out: dict[str, int] = {}
    for pair, axes in pairs:
        for whole, by in zip(axes, pair.by, strict=True):
            if whole is not None and whole.of:
                out[whole.of] = lcm(out.get(whole.of, 1), by // gcd(by, whole.unit))
    return out


def notes_of(facts: ModelFacts, paired: bool) -> tuple[str, ...]:
    """Notes on a quantised model, for the text."""
    said = facts.config.get("quantization_config")
    if not isinstance(said, dict):
        return ()
    method, blocks = said.get("quant_method", "?"), sides_of(facts.config)
    how = f"{method}, in blocks of {' x '.join(map(str, blocks))}" if blocks else str(method)
    if paired:
        return (f"config.quantization_config: {how}. `dequantised()` stores each weight times its scales.",)
    if any(t.name.endswith(SCALE) for t in facts.tensors):
        return (
            f"config.quantization_config: {how}. Scales are tensors of their own, `..{SCALE}`: their weights and block sizes"
            " do not follow from their shapes.",
        )
    return (
        f"config.quantization_config: {how}. These are the tensors of the class without it: quantised files have weights of"
        " another type, and scales. Import their folder to describe those.",
    )


def _method(facts: ModelFacts) -> object:
    said = facts.config.get("quantization_config")
    return said.get("quant_method") if isinstance(said, dict) else None


@frozen
class PairText:
    """Names of weight and scale, and dims of their axes."""

    pair: Pair
    paths: tuple[str, str]
    indices: tuple[str, ...]
    dims: tuple[str, ...]
    blocks: tuple[str, ...]

    def tensors(self, extents: tuple[nodes.Dimension, ...], dtypes: tuple[str, str]) -> list[nodes.Tensor]:
        """The model's tensors."""
        weight, scale = (
            tuple(nodes.Dimension(names[i]) for i in self.pair.order) for names in (self.dims, self.blocks)
        )
        by = tuple(nodes.Number(self.pair.by[i]) for i in self.pair.order if self.pair.by[i] > 1)
        of = nodes.Scaling(self.paths[0], by)
        return [
            nodes.Tensor(self.paths[0], (*extents, *weight), dtypes[0]),
            nodes.Tensor(self.paths[1], (*extents, *scale), dtypes[1], "frozen", None, of),
        ]

    def stored(self, keys: tuple[str, str]) -> list[nodes.Entry]:
        """As the files have both: mxfp4 in groups, its bits as u8."""
        weight = [nodes.Dim(self.dims[i]) for i in self.pair.order]
        if self.pair.packed:
            weight = [*weight[:-1], nodes.Dim(self.blocks[1]), nodes.Dim(f"{self.dims[1]}_{GROUP}")]
        return self._both(keys, (tuple(weight), tuple(nodes.Dim(self.blocks[i]) for i in self.pair.order)))

    def product(self, key: str) -> list[nodes.Entry]:
        """As the class itself saves it."""
        clauses = (nodes.Clause("dtype", ("bf16",)), _PRODUCT, nodes.Clause("as", (key,)))
        return [
            self._entry(self.paths[0], tuple(map(nodes.Dim, self.dims)), clauses),
            nodes.Entry(self.paths[1], (), None),
        ]

    def cut(self, keys: tuple[str, str], axis: int, grain: int) -> list[nodes.Entry]:
        """Cut along an axis at multiples of `grain` elements, where blocks begin."""

        def pieces(names: tuple[str, ...], grain: int) -> tuple[nodes.Axis, ...]:
            split = nodes.Split("tp", "chunk", grain=nodes.Number(grain) if grain > 1 else None)
            return tuple(
                nodes.Cut(nodes.Dim(names[i]), (split,)) if i == axis else nodes.Dim(names[i]) for i in self.pair.order
            )

        return self._both(keys, (pieces(self.dims, grain), pieces(self.blocks, grain // self.pair.by[axis])))

    def _both(self, keys: tuple[str, str], shapes: tuple[tuple[nodes.Axis, ...], ...]) -> list[nodes.Entry]:
        kept = (_U8,) if self.pair.packed else ()
        return [
            self._entry(path, shape, (*kept, nodes.Clause("as", (key,))))
            for path, shape, key in zip(self.paths, shapes, keys, strict=True)
        ]

    def _entry(self, path: str, shape: tuple[nodes.Axis, ...], clauses: tuple[nodes.Clause, ...]) -> nodes.Entry:
        return nodes.Entry(path, (), shape, clauses)  # the key has the indices
