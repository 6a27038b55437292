"""The graph of a plan as JSON and columns.

Nodes in the order in which they run, with the dependencies of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ucpl.planning.parsed import NUMBER_MAX, Json, items, text, whole, wholes
from ucpl.tables import Moves, MoveSide, Space
from ucpl.tables.operations import (
    Check,
    Derive,
    Digits,
    Extract,
    Fill,
    Lane,
    Merge,
    Node,
    Read,
    Receive,
    Recompute,
    Reconstruct,
    Reduce,
    Scale,
    Send,
    Split,
    Write,
    flows,
)

if TYPE_CHECKING:  # a reader of headers alone does not wait for it
    import networkx as nx

__all__ = ["Columns", "net_from", "net_json"]

Columns = dict[str, NDArray[Any]]
T = TypeVar("T", Moves, MoveSide)
_FILL = "fill_"  # before names of columns of the second table


def net_json(net: nx.DiGraph[Node], nodes: Sequence[Node], spaces: tuple[Space, Space]) -> tuple[Json, Columns]:
    """Both sides of an Extract's boxes in one table.

    One table for the entire graph. Fills have one of their own.
    """
    rows: dict[Node, tuple[int, int, int]] = {}  # of an Extract and its consumer, or of a Fill: rows and dims
    tables: list[Moves] = []
    at = 0
    for flow in flows(net, nodes):
        moves = flow.moves
        rows[flow.extract] = rows[flow.place] = (at, at + len(moves), moves.width)
        tables.append(moves)
        at += len(moves)
    fills = [node for node in nodes if isinstance(node, Fill)]
    ends = np.cumsum([0, *(len(fill.boxes) for fill in fills)]).tolist()
    for fill, first, last in zip(fills, ends, ends[1:], strict=False):
        rows[fill] = (first, last, fill.boxes.width)
    filled = MoveSide.concat(fill.boxes for fill in fills)
    number = {node: i for i, node in enumerate(nodes)}
    table = Moves.concat(tables)
    told = [[*_node_json(node, rows.get(node)), sorted(number[p] for p in net.predecessors(node))] for node in nodes]
    columns = {n: _narrow(a) for n, a in table.arrays().items()}
    columns |= {_FILL + n: _narrow(a) for n, a in filled.arrays().items() if fills}
    return {"nodes": told, "bits": [s.bits for s in spaces]}, columns


def _node_json(node: Node, rows: tuple[int, int, int] | None) -> list[Json]:
    match node:
        case Read(label=label, state=state, first=first, last=last):
            return ["read", label, state, first, last]
        case Reconstruct(label=label, state=state, size=size, lost=lost, others=others, scheme=scheme, times=times):
            return ["reconstruct", label, state, size, lost, others, scheme, times]
        case Recompute(label=label, state=state, size=size, steps=steps, gradients=gradients, optimizer=optimizer):
            return ["recompute", label, state, size, steps, gradients, optimizer]
        case Write(label=label, state=state, first=first, last=last):
            return ["write", label, state, first, last]
        case Fill(label=label, state=state, elements=elements, value=value, lacking=lacking):
            return ["fill", label, state, elements, rows, value, lacking]
        case Extract(label=label, lanes=lanes, value=value):
            return ["extract", label, _lanes(lanes), rows, value]
        case Split(label=label, lanes=lanes, value=value, lossy=lossy):
            return ["split", label, _lanes(lanes), rows, value, lossy]
        case Check(label=label, lanes=lanes, value=value, lossy=lossy):
            return ["check", label, _lanes(lanes), rows, value, lossy]
        case Merge(label=label, lanes=lanes):
            return ["merge", label, _lanes(lanes)]
        case Derive(label=label, lanes=lanes, exact=exact):
            return ["derive", label, _lanes(lanes), exact]
        case Scale(label=label, lanes=lanes):
            return ["scale", label, _lanes(lanes)]
        case Reduce(label=label, lanes=lanes, how=how, over=over, exact=exact):
            return ["reduce", label, _lanes(lanes), how, over, exact]
        case Send() | Receive():
            raise ValueError(f"a node of a rank of a job is in no plan: {node}")


def _lanes(lanes: tuple[Lane, ...]) -> Json:
    return [[x.state, x.origin, x.source, x.target] for x in lanes]


def net_from(raw: Json, columns: Mapping[str, NDArray[Any]]) -> tuple[nx.DiGraph[Node], tuple[Space, Space]]:
    """Read the result of `net_json`.

    Raises: ValueError, KeyError, TypeError, IndexError for another form.
    """
    import networkx as nx

    table = Moves.of({n: a for n, a in columns.items() if not n.startswith(_FILL)})
    filled = {n.removeprefix(_FILL): a for n, a in columns.items() if n.startswith(_FILL)}
    boxes = MoveSide.of(filled) if filled else MoveSide.empty()
    bits = wholes(raw["bits"])
    if len(bits) != 2 or not all(0 < b < 62 for b in bits):
        raise ValueError("no room for positions")
    nodes: list[Node] = []
    net: nx.DiGraph[Node] = nx.DiGraph()
    for i, (*told, needs) in enumerate(items(raw["nodes"])):
        node = _node(told, table, boxes)
        net.add_node(node)
        for p in items(needs):
            if whole(p) >= i:
                raise ValueError(f"node {i} needs node {p}, which comes later")
            net.add_edge(nodes[p], node)
        nodes.append(node)
    _are_paired(net, nodes)
    return net, (Space(bits[0]), Space(bits[1]))


def _node(told: Json, table: Moves, fills: MoveSide) -> Node:
    match told:
        case ["read", str(label), str(state), int(first), int(last)]:
            return Read(label, state, first, last)
        case ["reconstruct", str(label), str(state), int(size), lost, others, str(scheme), int(times)]:
            return _reconstruct(Reconstruct(label, state, size, wholes(lost), wholes(others), scheme, times))
        case ["recompute", str(label), str(state), int(size), int(steps), int(gradients), str(optimizer)]:
            if min(size, steps, gradients) <= 0:
                raise ValueError(f"nothing is made so: {told}")
            return Recompute(label, state, size, steps, gradients, optimizer)
        case ["write", str(label), str(state), int(first), int(last)]:
            return Write(label, state, first, last)
        case ["fill", str(label), str(state), int(elements), rows, float(value), bool(lacking)]:
            return _fill(Fill(label, state, elements, _part(fills, rows), value, lacking))
        case ["extract", str(label), lanes, rows, value]:
            return Extract(label, _lanes_from(lanes), _part(table, rows).source_side, _value(value))
        case ["split", str(label), lanes, rows, value, bool(lossy)]:
            return Split(label, _lanes_from(lanes), _part(table, rows).target_side, _value(value), lossy)
        case ["check", str(label), lanes, rows, value, bool(lossy)]:
            return Check(label, _lanes_from(lanes), _part(table, rows).target_side, _value(value), lossy)
        case ["merge", str(label), lanes]:
            return Merge(label, _lanes_from(lanes))
        case ["derive", str(label), lanes, bool(exact)]:
            return Derive(label, _lanes_from(lanes), exact)
        case ["scale", str(label), lanes]:
            return Scale(label, _lanes_from(lanes))
        case ["reduce", str(label), lanes, "mean" | "sum" | "max" as how, over, bool(exact)]:
            return Reduce(label, _lanes_from(lanes), how, _digits(over), exact)
    raise ValueError(f"no operation is {str(told)[:80]}")


def _fill(fill: Fill) -> Fill:
    if fill.boxes.elements != fill.elements or not np.isfinite(fill.value):
        raise ValueError(f"{fill}, and {fill.boxes.elements} of {fill.value} are given")
    return fill


def _reconstruct(node: Reconstruct) -> Reconstruct:
    if node.size <= 0 or node.times <= 0 or not node.lost or not node.others or {*node.lost} & {*node.others}:
        raise ValueError(f"nothing is made so: {node}")
    return node


def _lanes_from(raw: Json) -> tuple[Lane, ...]:
    lanes = tuple(
        Lane(text(state), text(origin), whole(source, -NUMBER_MAX), whole(target, -NUMBER_MAX))
        for state, origin, source, target in items(raw)
    )
    if not lanes:
        raise ValueError("a node without a state")
    return lanes


def _digits(raw: Json) -> Digits:
    pairs = tuple((whole(divisor), whole(degree)) for divisor, degree in items(raw))
    if not all(divisor > 0 and degree > 0 for divisor, degree in pairs):
        raise ValueError("an axis of no ranks")
    return pairs


def _value(raw: Json) -> tuple[float, float]:
    a, b = (float(whole(x, -NUMBER_MAX)) if type(x) is not float else x for x in items(raw))
    if not (np.isfinite(a) and np.isfinite(b) and a != 0):
        raise ValueError(f"values are no {a} * x + {b}")
    return a, b


def _part(table: T, rows: Json) -> T:
    first, last, width = wholes(rows)
    if not first <= last <= len(table) or not 0 < width <= max(1, table.width):
        raise ValueError(f"rows {first} to {last} of {len(table)}")
    part = table.take(slice(first, last))
    return part.replace(**{name: getattr(part, name)[:, :width] for name in part.blocks()})


def _are_paired(net: nx.DiGraph[Node], nodes: Sequence[Node]) -> None:
    """Every box that is extracted goes somewhere, and nothing else does."""
    paired: set[Node] = set()
    for node in nodes:
        if isinstance(node, Reconstruct | Recompute):
            before = Read if isinstance(node, Reconstruct) else Read | Reconstruct
            after = Extract | Recompute if isinstance(node, Reconstruct) else Extract
            if not all(isinstance(n, before) for n in net.predecessors(node)) or not net.in_degree(node):
                raise ValueError("something is made anew that nothing read")
            if not all(isinstance(n, after) for n in net.successors(node)):
                raise ValueError("a rebuilt value is not extracted")
        if isinstance(node, Split):
            way = next(iter(net.predecessors(node)), None)
            if net.in_degree(node) != 1 or not isinstance(way, Merge | Reduce | Derive | Scale):
                raise ValueError("boxes are split that nothing merged")
            sources = (Extract, Merge, Derive, Reduce, Check) if isinstance(way, Scale) else (Extract,)
            if not all(isinstance(box, sources) for box in net.predecessors(way)):
                raise ValueError("something is merged that nothing extracted")
            paired.update((way, node))
    for flow in flows(net, nodes):
        if len(flow.extract.boxes) != len(flow.place.boxes) or flow.extract.lanes != flow.place.lanes:
            raise ValueError("boxes that are extracted are not those that are stored")
        paired.update((flow.extract, flow.way, flow.place))
    if any(n not in paired for n in nodes if isinstance(n, Extract | Split | Check | Merge | Reduce | Derive | Scale)):
        raise ValueError("an operation without its inputs")


def _narrow(array: NDArray[np.int64]) -> NDArray[Any]:
    """The same numbers in as few bytes as hold them."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return np.ascontiguousarray(array.astype(dtype))
    return np.ascontiguousarray(array)
