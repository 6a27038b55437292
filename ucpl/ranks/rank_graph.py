"""The graph of one rank: local data, sends and receives.

Read ─► Extract ─► Merge / Derive ─► Split ─► Write: local data. Extract ─► Send: requests of other ranks. Receive ─►
Merge / Derive ─► Split ─► Write: requests to other ranks.

A message has the elements of one dtype that one rank gives another, box after box in the order of the request. Both
ends number it alike, so that it contains nothing but elements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, field

from ucpl.ranks.remote_boxes import Name, Piece, RemoteBox, Transfer
from ucpl.records import frozen
from ucpl.tables import Moves, MoveSide, Space
from ucpl.tables.operations import Derive, Extract, Lane, Merge, Node, Read, Receive, Send, Split, Write, flows

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["RankGraph", "Message", "MessagePart", "parse_request", "rank_graph", "request"]

Ints = tuple[int, ...]


@frozen
class Message:
    """Elements of one dtype from one rank for another.

    `elements`: their number, one after the other.
    """

    peer: int
    dtype: str
    elements: int


Numbered = tuple[Name, str] | Message


@frozen
class MessagePart:
    """A box of a tensor here, at `begin` in a message."""

    of: Message
    begin: int
    box: RemoteBox
    may_round: bool = False

    def split(self, most: int) -> Iterator[MessagePart]:
        """In parts of at most so many elements, along its first dims."""
        whole = self.box.elements
        if whole <= most:
            yield self
            return
        count = self.box.shape[0]
        inner, each = whole // count, max(1, most * count // whole)
        for low in range(0, count, each):
            some = self.box.rows(low, min(count, low + each))
            yield from evolve(self, begin=self.begin + low * inner, box=some).split(most)


@frozen(eq=False)
class RankGraph:
    """The graph of a rank.

    Positions are of two spaces: tensors and received messages; results and sent messages.
    """

    net: nx.DiGraph[Node] = field(repr=False)
    sources: tuple[Numbered, ...]  # stored tensors, each with its dtype, then messages
    targets: tuple[Numbered, ...]
    spaces: tuple[Space, Space]

    def kept(self) -> Iterator[tuple[RemoteBox, RemoteBox, bool]]:
        """Boxes that stay on this rank: places, and permission to round."""
        for flow in flows(self.net):
            if isinstance(flow.extract, Extract) and not isinstance(flow.way, Send):
                for source, target in self._rows(flow.moves):
                    yield self._box(source, self.sources), self._box(target, self.targets), flow.lossy

    def given(self) -> dict[int, list[MessagePart]]:
        """Boxes for each other rank, in the order of the messages."""
        found: dict[int, list[MessagePart]] = {}
        for flow in flows(self.net):
            if isinstance(flow.way, Send):
                for source, target in self._rows(flow.moves):
                    part = MessagePart(*self._place(target, self.targets), self._box(source, self.sources))
                    found.setdefault(flow.way.peer, []).append(part)
        return self._in_order(found, self.targets)

    def taken(self) -> dict[int, list[MessagePart]]:
        """Boxes that each other rank gives, in the order of the messages."""
        found: dict[int, list[MessagePart]] = {}
        for flow in flows(self.net):
            if isinstance(flow.extract, Receive):
                for source, target in self._rows(flow.moves):
                    part = MessagePart(*self._place(source, self.sources), self._box(target, self.targets), flow.lossy)
                    found.setdefault(flow.extract.peer, []).append(part)
        return self._in_order(found, self.sources)

    def _rows(self, moves: Moves) -> Iterator[tuple[_Row, _Row]]:
        here, there = self.spaces
        columns = (
            here.home(moves.source),
            here.position(moves.source),
            there.home(moves.target),
            there.position(moves.target),
        )
        blocks = (moves.shape, moves.source_stride, moves.target_stride)
        for source, a, target, b, shape, steps, goes in zip(*(c.tolist() for c in (*columns, *blocks)), strict=True):
            yield _Row(source, a, shape, steps), _Row(target, b, shape, goes)

    @staticmethod
    def _box(row: _Row, tensors: Sequence[Numbered]) -> RemoteBox:
        one = tensors[row.home]
        assert not isinstance(one, Message)
        kept = [(n, s) for n, s in zip(row.shape, row.stride, strict=True) if n > 1]
        return RemoteBox(one[0], one[1], tuple(n for n, _ in kept), row.position, tuple(s for _, s in kept))

    @staticmethod
    def _place(row: _Row, tensors: Sequence[Numbered]) -> tuple[Message, int]:
        one = tensors[row.home]
        assert isinstance(one, Message)
        return one, row.position

    @staticmethod
    def _in_order(found: dict[int, list[MessagePart]], tensors: Sequence[Numbered]) -> dict[int, list[MessagePart]]:
        number = {one: i for i, one in enumerate(tensors)}
        for parts in found.values():
            parts.sort(key=lambda part: (number[part.of], part.begin))
        return found


@frozen
class _Row:
    home: int
    position: int
    shape: list[int]
    stride: list[int]


def rank_graph(pieces: Sequence[Piece], asked: Mapping[int, Sequence[Piece]], rank: int) -> RankGraph:
    """The graph of a rank.

    pieces: its needs, in order, from itself and others; asked: the needs of others, from `parse_request`.
    """
    import networkx as nx

    mine = [p for p in pieces if p.peer == rank]
    taken = _Messages.of(p for p in pieces if p.peer != rank)
    given = _Messages.of(p for peer in sorted(asked) for p in asked[peer])
    here = _Places.over([p.source for p in (*mine, *given.pieces)], taken.each)
    there = _Places.over([p.target for p in pieces], given.each)
    net: nx.DiGraph[Node] = nx.DiGraph()
    read, write = Read("this rank", "", 0, here.stored), Write("this rank", "", 0, there.stored)
    net.add_nodes_from((read, write))
    for way, some in _by_way((0, p) for p in mine).items():
        extract = Extract(way.label, _lanes(way), here.side(p.source for _, p in some))
        nx.add_path(net, (read, extract, *_merged(way, there.side(p.target for _, p in some)), write))
    for message, placed in given.each.items():
        for way, some in _by_way(placed).items():
            extract = Extract(way.label, _lanes(way), here.side(p.source for _, p in some))
            send = Send(way.label, _lanes(way), message.peer, there.packed(message, some))
            nx.add_path(net, (read, extract, send))
    for message, placed in taken.each.items():
        for way, some in _by_way(placed).items():
            receive = Receive(way.label, _lanes(way), message.peer, here.packed(message, some))
            nx.add_path(net, (receive, *_merged(way, there.side(p.target for _, p in some)), write))
    return RankGraph(net, tuple(here.number), tuple(there.number), (here.space, there.space))


Placed = tuple[int, Piece]  # a piece, and its offset in its message


def _lanes(way: Transfer) -> tuple[Lane, ...]:
    return (Lane(way.state, way.origin),)


def _merged(way: Transfer, boxes: MoveSide) -> tuple[Merge | Derive, Split]:
    how = Derive(way.label, _lanes(way), way.exact) if way.derives else Merge(way.label, _lanes(way))
    return how, Split(way.label, _lanes(way), boxes, lossy=way.lossy)


def _by_way(some: Iterable[Placed]) -> dict[Transfer, list[Placed]]:
    found: dict[Transfer, list[Placed]] = {}
    for one in some:
        found.setdefault(one[1].way, []).append(one)
    return found


@frozen(eq=False)
class _Messages:
    """All messages of a rank in one direction, with their pieces.

    The pieces are in the order of the request.
    """

    each: dict[Message, list[Placed]]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> _Messages:
        among: dict[tuple[int, str], list[Piece]] = {}
        for piece in pieces:
            among.setdefault((piece.peer, piece.source.dtype), []).append(piece)
        each: dict[Message, list[Placed]] = {}
        for (peer, dtype), some in among.items():
            ends = np.cumsum([0, *(p.source.elements for p in some)]).tolist()
            each[Message(peer, dtype, ends[-1])] = list(zip(ends, some, strict=False))
        return cls(each)

    @property
    def pieces(self) -> list[Piece]:
        return [p for placed in self.each.values() for _, p in placed]


@frozen(eq=False)
class _Places:
    """Numbers of stored tensors and messages, with boxes as table rows."""

    number: Mapping[Numbered, int]
    stored: int  # so many stored tensors come first
    space: Space

    @classmethod
    def over(cls, boxes: Sequence[RemoteBox], messages: Iterable[Message]) -> _Places:
        stored = dict.fromkeys((box.name, box.dtype) for box in boxes)
        told = list(messages)
        every: list[Numbered] = [*stored, *told]
        number = {one: i for i, one in enumerate(every)}
        far = max((*(box.end for box in boxes), *(message.elements for message in told)), default=1)
        return cls(number, len(stored), Space.over(len(number), far))

    def side(self, boxes: Iterable[RemoteBox]) -> MoveSide:
        return self._table([(self.number[box.name, box.dtype], box.offset, box.shape, box.stride) for box in boxes])

    def packed(self, message: Message, placed: Iterable[Placed]) -> MoveSide:
        home = self.number[message]
        return self._table([(home, at, p.source.shape, _row_major(p.source.shape)) for at, p in placed])

    def _table(self, rows: Sequence[tuple[int, int, Ints, Ints]]) -> MoveSide:
        width = max((1, *(len(shape) for _, _, shape, _ in rows)))
        home, offset = np.array([row[:2] for row in rows], np.int64).T
        shape = np.array([_wide(shape, width) for _, _, shape, _ in rows], np.int64)
        stride = np.array([_wide(stride, width) for _, _, _, stride in rows], np.int64)
        return MoveSide(np.zeros(len(rows), np.int64), self.space.address(home, offset), shape, stride)


def _wide(numbers: Ints, width: int) -> Ints:
    return numbers + (1,) * (width - len(numbers))


def _row_major(shape: Ints) -> Ints:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


# ---- requests from one rank to another
# ---------------------------------------------------------------------------------


def request(pieces: Sequence[Piece]) -> bytes:
    """A request to one rank: names and ways as JSON, then boxes.

    Boxes are numbers, in order.
    """
    names = list(dict.fromkeys((p.source.name, p.source.dtype) for p in pieces))
    ways = list(dict.fromkeys(p.way for p in pieces))
    name, way = {n: i for i, n in enumerate(names)}, {w: i for i, w in enumerate(ways)}
    width = max((len(p.source.shape) for p in pieces), default=0)
    rows = [
        (name[p.source.name, p.source.dtype], way[p.way], len(p.source.shape), p.source.offset)
        + _wide(p.source.shape, width) + _wide(p.source.stride, width)
        for p in pieces
    ]  # fmt: skip
    told = {
        "names": [[file, list(key), dtype] for (file, key), dtype in names],
        "ways": [[w.label, w.state, w.origin] for w in ways],
        "width": width,
    }
    head = json.dumps(told).encode()
    return len(head).to_bytes(8, "little") + head + np.array(rows, np.int64).tobytes()


def parse_request(raw: bytes, peer: int) -> list[Piece]:
    """The pieces of a request of `peer`, as boxes of this rank."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    names: list[tuple[Name, str]] = [((file, tuple(key)), dtype) for file, key, dtype in header["names"]]
    ways = [Transfer(*way) for way in header["ways"]]
    width = int(header["width"])
    rows = np.frombuffer(raw[8 + size :], np.int64).reshape(-1, 4 + 2 * width)
    found = []
    for name, way, dims, offset, *rest in rows.tolist():
        box = RemoteBox(*names[name], tuple(rest[:dims]), offset, tuple(rest[width : width + dims]))
        found.append(Piece(peer, box, box, ways[way]))
    return found
