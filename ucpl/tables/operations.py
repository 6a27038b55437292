"""Operations of the dependency graph, each a record that owns its table.

The same records are built, saved and run.


    Read ─► Extract ─► Merge | Reduce | Derive ─► Split ─► Write
               ├─────► Check ───────────────────────────────► Write ◄─ Fill
               ├─────► Scale ─────────────────────► Split ─► Write
               └─────► Send ─ ─ another rank's ─ ─► Receive ─► Merge | Derive ─► Split ─► Write


    Read ─► Reconstruct ─► Extract ─► ...      of a vault with a lost part
    Read ─► Recompute ─► Extract ─► ...        of a vault that has gradients of the last steps alone; both are possible
    there

One node per (operation, entry) over all ranks, indices and states that are alike: `lanes` lists its states. Row i of an
Extract goes to row i of the Split, Check or Send that follows it.

A plan is of all ranks, and has no Send or Receive: they are in the graph of one rank of a job, which is made of its
share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

from attrs import field

from ucpl.records import frozen
from ucpl.tables.strided import Moves, MoveSide

if TYPE_CHECKING:  # reading headers alone does not need it
    import networkx as nx

__all__ = [
    "Check",
    "Derive",
    "Digits",
    "Extract",
    "Fill",
    "Flow",
    "Kind",
    "Lane",
    "Merge",
    "Node",
    "Read",
    "Receive",
    "Recompute",
    "Reconstruct",
    "Reduce",
    "Scale",
    "Send",
    "Split",
    "Write",
    "flows",
    "in_order",
    "net_text",
]

Kind = Literal["copy", "check", "mean", "sum", "max", "scale", "send"]
Digits = tuple[tuple[int, int], ...]  # (divisor, degree) of mesh axes: a rank's coordinate is rank // divisor % degree


@frozen
class Lane:
    """One state of a node: its target, source and stored tensors.

    The table's positions are those of the first lane; another one's are `source` and `target` stored tensors further.
    """

    state: str
    origin: str
    source: int = 0
    target: int = 0


@frozen(eq=False)
class Read:
    """Stored tensors `first`..`last` of the plan's sources."""

    label: str
    state: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"read    {self.state} of {self.label}: {self.last - self.first:,} stored tensors"


@frozen(eq=False)
class Reconstruct:
    """Data of a vault with lost bytes, made from other domains' data.

    An Extract makes them when it reads: no more than it reads, and straight at their target.
    """

    label: str
    state: str
    size: int  # bytes that are lost
    lost: tuple[int, ...]  # domains, ascending
    others: tuple[int, ...]  # parts from which the bytes are made
    scheme: str  # "raim5"
    times: int  # bytes of others that are read for each

    def __str__(self) -> str:
        lost, others = (", ".join(f"d{d}" for d in some) for some in (self.lost, self.others))
        text = f"{self.size:,} bytes that {lost} lost, from {others}, by {self.scheme}"
        return f"reconstruct {self.state} of {self.label}: {text}"


@frozen(eq=False)
class Recompute:
    """Data of a vault that has gradients of the last steps alone.

    The optimizer makes these steps once more, when an Extract reads it, for each parameter completely.
    """

    label: str
    state: str
    size: int  # bytes that are made
    steps: int
    gradients: int  # bytes of gradients that they are made of
    optimizer: str  # "AdamW"

    def __str__(self) -> str:
        text = (
            f"{self.size:,} bytes by {self.steps} steps of {self.optimizer}, of {self.gradients:,} bytes of gradients"
        )
        return f"recompute {self.state} of {self.label}: {text}"


@frozen(eq=False)
class Extract:
    """Boxes of elements extracted from the data that was read."""

    label: str
    lanes: tuple[Lane, ...]
    boxes: MoveSide = field(repr=False)
    value: tuple[float, float] = (1.0, 0.0)  # stored = a * x + b

    def __str__(self) -> str:
        return f"extract {_states(self, 'origin')} of {self.label}: {_boxes(self.boxes)}"


@frozen(eq=False)
class Merge:
    """Every element once."""

    label: str
    lanes: tuple[Lane, ...]

    def __str__(self) -> str:
        return f"merge   {_states(self)} of {self.label}"


@frozen(eq=False)
class Reduce:
    """Copies put together: averaged or added in fp64, or the greatest.

    They are added by order of their source and rounded once. Copies that differ along the axes of `over` count each
    alone; copies that differ along other axes are one member, and equal.
    """

    label: str
    lanes: tuple[Lane, ...]
    how: Literal["mean", "sum", "max"]
    over: Digits = ()
    exact: bool = False  # values that would be rounded are refused

    def __str__(self) -> str:
        return f"reduce  {_states(self)} of {self.label} by {self.how}"

    def member(self, rank: int) -> int | None:
        """Member that a rank's stored tensor is, or is a copy of.

        None: each is one.
        """
        if not self.over:
            return None
        number = 0
        for divisor, degree in self.over:
            number = number * degree + rank // divisor % degree
        return number


@frozen(eq=False)
class Derive:
    """A state made of another, rounded to nearest even.

    With `exact`, a narrower type is refused if it rounds.
    """

    label: str
    lanes: tuple[Lane, ...]
    exact: bool = False

    def __str__(self) -> str:
        return f"derive  {_states(self)} of {self.label} from {_states(self, 'origin')}"


@frozen(eq=False)
class Scale:
    """Merged values times scales: in fp32, rounded once.

    A box of scales steps by 0 along the elements of a block.
    """

    label: str
    lanes: tuple[Lane, ...]

    def __str__(self) -> str:
        return f"scale   {_states(self)} of {self.label}, a factor for each block"


@frozen(eq=False)
class Split:
    """The same boxes as the target stores them."""

    label: str
    lanes: tuple[Lane, ...]
    boxes: MoveSide = field(repr=False)
    value: tuple[float, float] = (1.0, 0.0)  # stored = a * x + b
    lossy: bool = False  # a cast that rounds was asked for

    def __str__(self) -> str:
        return f"split   {_states(self)} of {self.label}: {_boxes(self.boxes)}"


@frozen(eq=False)
class Check:
    """Boxes of declared copies, compared with the target's elements at their places."""

    label: str
    lanes: tuple[Lane, ...]
    boxes: MoveSide = field(repr=False)
    value: tuple[float, float] = (1.0, 0.0)
    lossy: bool = False

    def __str__(self) -> str:
        return f"check   {_states(self)} of {self.label}: {_boxes(self.boxes)}"


@frozen(eq=False)
class Send:
    """Extracted boxes for another rank, with their places in the message."""

    label: str
    lanes: tuple[Lane, ...]
    peer: int
    boxes: MoveSide = field(repr=False)
    value: tuple[float, float] = (1.0, 0.0)
    lossy: bool = False

    def __str__(self) -> str:
        return f"send    {_states(self, 'origin')} of {self.label} to rank {self.peer}: {_boxes(self.boxes)}"


@frozen(eq=False)
class Receive:
    """Boxes from another rank's Send, with their places in its message."""

    label: str
    lanes: tuple[Lane, ...]
    peer: int
    boxes: MoveSide = field(repr=False)
    value: tuple[float, float] = (1.0, 0.0)

    def __str__(self) -> str:
        return f"receive {_states(self, 'origin')} of {self.label} from rank {self.peer}: {_boxes(self.boxes)}"


@frozen(eq=False)
class Fill:
    """Boxes of elements that no Split reaches, and their value.

    They are padding of the target, or elements that the source lacks. A graph counts elements of padding; their places
    are found when it becomes a plan.
    """

    label: str
    state: str
    elements: int
    boxes: MoveSide = field(repr=False, factory=MoveSide.empty)
    value: float = 0.0
    lacking: bool = False  # elements of tensors that the source lacks

    def __str__(self) -> str:
        what = f"with {self.value:g}, which the source lacks" if self.lacking else "of padding"
        return f"fill    {self.state} of {self.label}: {self.elements:,} elements {what}"


@frozen(eq=False)
class Write:
    """Stored tensors `first`..`last` of the plan's targets."""

    label: str
    state: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"write   {self.state} of {self.label}: {self.last - self.first:,} stored tensors"


Node = (
    Read
    | Reconstruct
    | Recompute
    | Extract
    | Merge
    | Reduce
    | Derive
    | Scale
    | Split
    | Check
    | Send
    | Receive
    | Fill
    | Write
)


def _states(
    node: Extract | Merge | Reduce | Derive | Scale | Split | Check | Send | Receive,
    which: Literal["state", "origin"] = "state",
) -> str:
    return ", ".join(dict.fromkeys(getattr(lane, which) for lane in node.lanes))


def _boxes(boxes: MoveSide) -> str:
    return f"{len(boxes):,} boxes, {boxes.elements:,} elements"


@frozen(eq=False)
class Flow:
    """An Extract, or a Receive, with the operations on its boxes."""

    extract: Extract | Receive
    way: Merge | Reduce | Derive | Scale | Check | Send
    place: Split | Check | Send

    @property
    def kind(self) -> Kind:
        match self.way:
            case Check():
                return "check"
            case Reduce(how=how):
                return how
            case Scale():
                return "scale"
            case Send():
                return "send"
            case _:
                return "copy"

    @property
    def over(self) -> Digits:
        return self.way.over if isinstance(self.way, Reduce) else ()

    @property
    def lossy(self) -> bool:
        return self.place.lossy or isinstance(self.way, Scale) or (isinstance(self.way, Derive) and not self.way.exact)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.place.lanes

    @property
    def moves(self) -> Moves:
        """Both sides of the boxes, of the first lane."""
        return Moves.between(self.extract.boxes, self.place.boxes)


def in_order(net: nx.DiGraph[Node]) -> list[Node]:
    """Nodes in order: each follows those that it needs.

    Of those that are free, the one that joined the graph first comes first. Raises: ValueError if nodes need each
    other. (As networkx's `lexicographical_topological_sort`, which takes four times as long over graphs as small as
    these.)
    """
    nodes = list(net)
    number = {node: i for i, node in enumerate(nodes)}
    after = [[number[n] for n in next_] for next_ in net.adj.values()]
    needs = [0] * len(nodes)
    for numbers in after:
        for n in numbers:
            needs[n] += 1
    free = [n for n, count in enumerate(needs) if not count]  # ascending, and so a heap
    order = []
    while free:
        found = heappop(free)
        order.append(nodes[found])
        for n in after[found]:
            needs[n] -= 1
            if not needs[n]:
                heappush(free, n)
    if len(order) < len(nodes):
        raise ValueError("nodes of a graph need each other")
    return order


def flows(net: nx.DiGraph[Node], nodes: Sequence[Node] | None = None) -> Iterator[Flow]:
    """Every way of elements from source to target, in the graph's order."""
    for node in in_order(net) if nodes is None else nodes:
        match node:
            case Split():
                (way,) = net.predecessors(node)
                assert isinstance(way, Merge | Reduce | Derive | Scale)
                for extract in net.predecessors(way):
                    if isinstance(extract, Extract | Receive):  # a Scale follows the node that it scales
                        yield Flow(extract, way, node)
            case Check() | Send():
                for extract in net.predecessors(node):
                    if isinstance(extract, Extract):
                        yield Flow(extract, node, node)
            case _:
                pass


def net_text(net: nx.DiGraph[Node]) -> str:
    """The graph as text, in the order in which it runs.

    A node is a line, with the nodes that it needs.
    """
    number = {node: i for i, node in enumerate(in_order(net))}
    lines = []
    for node, i in number.items():
        needs = sorted(number[p] for p in net.predecessors(node))
        text = str(node).replace("\n", "\ufffd")  # a name breaks no line
        lines.append(f"{i:>4}  {text}" + (f"  <-  {_ranges(needs)}" if needs else ""))
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """`3, 7-12`"""
    out: list[list[int]] = []
    for n in numbers:
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
