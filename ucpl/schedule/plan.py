"""A plan: every stored tensor of source and target by (file, key), and every run of elements that moves between them.

A plan is made from specs alone. It names (file, key, element range); stores bind byte positions when it is applied,
which plans nothing anew. Columns are NumPy arrays with one row a move; positions count elements of a stored tensor
in row-major order of its own shape.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ucpl.extents import StoredTensor, Structure

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

Kind = Literal["copy", "check", "mean", "sum"]


@frozen(eq=False)
class Moves:
    """Strided moves of one graph node. Row i moves a box of `shape[i]` elements.

    Element (j0, j1, ...) of the box lies at `source_offset[i] + sum(j * source_stride[i])` of the source tensor and at
    `target_offset[i] + sum(j * target_stride[i])` of the target tensor. Dims are ordered by falling target stride and
    are merged as far as both sides allow, so that most rows are one contiguous run (D = 1, strides 1). Unused trailing
    dims have size 1.

    kind `copy`: the value goes there. `check`: a declared copy of what a `copy` row puts at the same target place:
    it must be equal and is not written. `mean`, `sum`: all rows of a target place are accumulated in fp64 (fp32 for 16-bit
    sources is widened, too), in order of `source` index, and rounded once.
    """

    kind: Kind
    state: str
    tensor: I32  # (N,) index into Plan.tensors: for messages
    source: I32  # (N,) index into Plan.sources
    target: I32  # (N,) index into Plan.targets
    shape: I64  # (N, D)
    source_offset: I64  # (N,)
    source_stride: I64  # (N, D)
    target_offset: I64  # (N,)
    target_stride: I64  # (N, D)
    source_value: tuple[float, float] = (1.0, 0.0)  # stored = a * x + b on the source's side
    target_value: tuple[float, float] = (1.0, 0.0)  # and on the target's
    lossy: bool = False  # a rounding cast was asked for (or is a derivation)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def elements(self) -> int:
        return int(self.shape.prod(axis=1).sum()) if len(self) else 0


@frozen
class Origin:
    """A value that the plan used and where it came from: nothing is guessed."""

    name: str
    value: Any
    origin: str


@frozen(eq=False)
class Plan:
    """All that `apply` needs. `source` and `target` carry what stores need to know of the framework on each side."""

    name: str
    source_call: str  # "zero1(dp = 4)"
    target_call: str
    source: Structure
    target: Structure
    sources: tuple[StoredTensor, ...]
    targets: tuple[StoredTensor, ...]
    tensors: tuple[str, ...]  # names that `Moves.tensor` points into
    moves: tuple[Moves, ...]
    origins: tuple[Origin, ...] = ()
    derived: tuple[str, ...] = ()  # sentences: "weight is derived from fp32 by rounding to nearest even"
    dropped: tuple[str, ...] = ()  # names of tensors and states of the source that are left out on purpose
    carry: dict[str, str] = field(factory=dict)  # fate of blobs by name: keep, first, drop
    spec_digest: str = ""
    structure_digest: str = ""
    layout_text: str = ""  # the target's closed .ucpl text: becomes ucpl/layout.ucpl
