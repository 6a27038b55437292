"""Records of the dependency graph: one node per (operation, entry, state) over all ranks and indices.

    Read -> Extract -> Merge -> Split -> Write
            Check ---^          Fill ---^
    Reduce stands for Merge where copies are averaged or summed.

The fragments of a node are columns; rows of `moves` between `first` and `last` belong to a Split.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Read:
    """Stored tensors of one source part: homes `first`..`last` of the plan's sources."""

    part: int
    label: str
    state: str
    first: int
    last: int


@frozen
class Extract:
    """Boxes of logical tensors taken out of what was read. `rows` boxes, `elements` in them."""

    part: int
    label: str
    state: str
    rows: int
    elements: int


@frozen
class Check:
    """Declared copies that must equal what is merged."""

    part: int
    label: str
    state: str
    rows: int


@frozen
class Merge:
    """Every element of the tensors of one target part, once."""

    label: str
    state: str


@frozen
class Reduce:
    """As Merge, where copies that training let drift are averaged, or partial sums added."""

    label: str
    state: str
    how: str  # mean, sum


@frozen
class Split:
    """The same elements, cut as the target stores them."""

    part: int
    label: str
    state: str
    fragments: int


@frozen
class Fill:
    """Padding of the target: zeros."""

    part: int
    label: str
    state: str
    elements: int


@frozen
class Write:
    """Stored tensors of one target part: homes `first`..`last` of the plan's targets."""

    part: int
    label: str
    state: str
    first: int
    last: int


Node = Read | Extract | Check | Merge | Reduce | Split | Fill | Write
