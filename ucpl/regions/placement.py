"""Where every element of every logical tensor lies in storage: boxes of logical tensors, as NumPy columns."""

from __future__ import annotations

import numpy as np
from attrs import field, frozen, mutable
from numpy.typing import NDArray

from ucpl.extents import Flat, Key
from ucpl.extents.structure import PadKind
from ucpl.layout import Layout
from ucpl.syntax.nodes import NOWHERE, Span

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
I8 = NDArray[np.int8]

POLICIES = ("same", "mean", "sum", "any")  # Pieces.policy holds indices into this


@frozen
class Home:
    """One stored tensor: where it is and how large. `padding` counts its cells that belong to no tensor."""

    file: str
    key: Key
    shape: tuple[int, ...]
    rank: int  # the first rank that holds it
    padding: int
    undefined: bool = False  # whether its padding may hold anything
    live: bool = False  # whether its padding is trained, too
    # Coordinates on mesh axes that do not cut it: two homes of one part may hold the same element only if these differ.
    replica: tuple[int, ...] = ()

    @property
    def padding_kind(self) -> PadKind:
        return "undefined" if self.undefined else "live" if self.live else "zero"


@frozen(eq=False)
class Pieces:
    """Boxes and their places. Row i: elements low..high of tensor `tensor[i]`; the first at `offset`, each dim with its stride.

    Positions count elements of home `home[i]`, row-major. Dims beyond a tensor's own have low 0, high 1, stride 0.
    """

    tensor: I32  # (N,) index into Placement.tensors
    home: I32  # (N,) index into Part.homes
    low: I64  # (N, K)
    high: I64  # (N, K)
    stride: I64  # (N, K)
    offset: I64  # (N,)
    policy: I8  # (N,) index into POLICIES

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: I64) -> Pieces:
        return Pieces(
            self.tensor[rows],
            self.home[rows],
            self.low[rows],
            self.high[rows],
            self.stride[rows],
            self.offset[rows],
            self.policy[rows],
        )


@frozen(eq=False)
class Part:
    """Everything that one entry or state line stores of one state."""

    state: str
    label: str  # the entry's tensor, or the group of a flat
    form: str  # torch, safetensors, ...
    dtype: str | None  # said by the layout; None: as the tensor's or the state's own
    lossy: bool
    value: tuple[float, float]  # stored = a * x + b
    homes: tuple[Home, ...]
    pieces: Pieces
    is_alias: bool = False
    span: Span = field(default=NOWHERE, repr=False)


@mutable(eq=False)
class Placement:
    """A located layout."""

    layout: Layout
    tensors: tuple[str, ...]
    parts: tuple[Part, ...]
    flats: tuple[Flat, ...] = ()
    names: dict[str, str] = field(factory=dict)  # stored name of each single tensor, by its path (for messages)

    def element(self, tensor: int, index: tuple[int, ...]) -> str:
        """An element as people name it: `attn.q[l=3, h=7]`, in indices of whole dims."""
        return element_name(self.layout, self.tensors[tensor], index)


def element_name(layout: Layout, path: str, index: tuple[int, ...]) -> str:
    tensor = layout.tensors[path]
    named = []
    for dim, start, step, position in zip(tensor.dims, tensor.starts, tensor.steps, index, strict=False):
        whole = start + int(position) * step
        named.append(str(whole) if "#" in dim else f"{dim}={whole}")
    return f"{path}[{', '.join(named)}]"


def no_pieces(k: int) -> Pieces:
    z = np.zeros(0, dtype=np.int64)
    return Pieces(
        z.astype(np.int32), z.astype(np.int32), z.reshape(0, k), z.reshape(0, k), z.reshape(0, k), z, z.astype(np.int8)
    )


def joined(parts: list[Pieces], k: int) -> Pieces:
    """Rows of several tables in one."""
    if not parts:
        return no_pieces(k)
    return Pieces(
        np.concatenate([p.tensor for p in parts]),
        np.concatenate([p.home for p in parts]),
        np.concatenate([p.low for p in parts]),
        np.concatenate([p.high for p in parts]),
        np.concatenate([p.stride for p in parts]),
        np.concatenate([p.offset for p in parts]),
        np.concatenate([p.policy for p in parts]),
    )
