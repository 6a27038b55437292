"""The lines of a weight in blocks and of its scale."""

from __future__ import annotations

from ucpl.inference.hf.quantised import GROUP, Pair
from ucpl.language import nodes
from ucpl.language.printer import print_item
from ucpl.records import frozen

__all__ = ["PairText"]

_PRODUCT = nodes.Clause("value", (nodes.Binary("*", nodes.Name("x"), nodes.Name("scale")),))
_U8 = nodes.Clause("dtype", ("u8",))


@frozen
class PairText:
    """Names of weight and scale, and dims of their axes."""

    pair: Pair
    paths: tuple[str, str]
    indices: tuple[str, ...]
    dims: tuple[str, ...]
    blocks: tuple[str, ...]

    def tensors(self, extents: tuple[nodes.Dimension, ...], dtypes: tuple[str, str]) -> list[str]:
        """The model's tensors."""
        weight, scale = (
            tuple(nodes.Dimension(names[i]) for i in self.pair.order) for names in (self.dims, self.blocks)
        )
        by = tuple(nodes.Number(self.pair.by[i]) for i in self.pair.order if self.pair.by[i] > 1)
        of = nodes.Scaling(self.paths[0], by)
        return [
            print_item(nodes.Tensor(self.paths[0], (*extents, *weight), dtypes[0])),
            print_item(nodes.Tensor(self.paths[1], (*extents, *scale), dtypes[1], "frozen", None, of)),
        ]

    def stored(self, keys: tuple[str, str]) -> list[nodes.Entry]:
        """As the files have both: mxfp4 in groups, its bits as u8."""
        weight = [nodes.Dim(self.dims[i]) for i in self.pair.order]
        if self.pair.packed:
            weight = [*weight[:-1], nodes.Dim(self.blocks[1]), nodes.Dim(f"{self.dims[1]}_{GROUP}")]
        return self._both(keys, (tuple(weight), tuple(nodes.Dim(self.blocks[i]) for i in self.pair.order)))

    def product(self, key: str) -> list[str]:
        """As the class itself saves it."""
        clauses = (nodes.Clause("dtype", ("bf16",)), _PRODUCT, nodes.Clause("as", (key,)))
        return [
            print_item(self._entry(self.paths[0], tuple(map(nodes.Dim, self.dims)), clauses)),
            print_item(nodes.Entry(self.paths[1], (), None)),
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
        return nodes.Entry(path, tuple(map(nodes.Dim, self.indices)), shape, clauses)
