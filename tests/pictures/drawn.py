"""The content of an SVG of `ucpl show`, for tests.

Levels of tensors with their cells.
"""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ucpl.placement import Placement, locate

SVG = "{http://www.w3.org/2000/svg}"


@define
class Drawn:
    """One level of a tensor.

    Area and elements by the lines that hovering a cell says.
    """

    elements: int
    paper: float  # area of the tensor
    areas: dict[str, float] = field(factory=lambda: defaultdict(float))

    def ranks(self, ranks: int) -> dict[int, int]:
        """The number of each rank's elements, by the cells."""
        out: dict[int, int] = defaultdict(int)
        for title in self.areas:
            _, size, held, _ = title.split("\n")
            for rank in ranks_of(held, ranks):
                out[rank] += elements_of(size)
        return dict(out)


def elements_of(line: str) -> int:
    return int(line.partition(" ")[0].replace(",", ""))


def ranks_of(line: str, ranks: int) -> list[int]:
    """`rank 3`, `ranks 0, 2`, `ranks 0..8 by 2`, `all 8 ranks`."""
    if line.startswith("all "):
        return list(range(ranks))
    found = re.match(r"ranks? ((?:\d+)(?:, \d+)*|\d+\.\.\d+(?: by \d+)?)(?=$|,|;)", line)
    assert found is not None, line
    if ".." not in found[1]:
        return [int(n) for n in found[1].split(", ")]
    low, high, step = re.fullmatch(r"(\d+)\.\.(\d+)(?: by (\d+))?", found[1]).groups()  # type: ignore[union-attr]
    return list(range(int(low), int(high), int(step or 1)))


def drawn(svg: str) -> dict[tuple[str, str, int], Drawn]:
    """(tensor, states, depth) -> its drawn cells."""
    root = ElementTree.fromstring(svg)
    out: dict[tuple[str, str, int], Drawn] = {}
    for group in root.iter(f"{SVG}g"):
        paper, *cells = group.iter(f"{SVG}rect")
        key = group.attrib["data-tensor"], group.attrib["data-states"], int(group.attrib["data-depth"])
        out[key] = one = Drawn(int(group.attrib["data-elements"]), area(paper))
        for cell in cells:
            title = cell.find(f"{SVG}title")
            assert title is not None and title.text
            one.areas[title.text] += area(cell)
    return out


def area(rect: ElementTree.Element) -> float:
    return float(rect.attrib["width"]) * float(rect.attrib["height"])


# ---- pages -----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The content of a page.

    Texts, and elements with their attributes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        self.elements.append((tag, told))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def held_by(placement: Placement, ranks: int) -> dict[tuple[str, str], dict[int, int]]:
    """The elements of each tensor and state, counted per rank.

    Each rank is asked alone; pictures are made of all ranks together.
    """
    layout = placement.layout
    held: dict[tuple[str, str], dict[int, NDArray[np.bool_]]] = defaultdict(dict)
    for rank in range(ranks):
        for part in locate(layout, rank=rank).parts:
            table = part.folded
            for tensor, low, high in zip(table.tensor.tolist(), table.low.tolist(), table.high.tolist(), strict=True):
                path = placement.tensors[tensor]
                counts = layout.tensors[path].counts
                mine = held[path, part.state].setdefault(rank, np.zeros(counts, dtype=np.bool_))
                mine[tuple(slice(a, b) for a, b in zip(low, high, strict=True))[: len(counts)]] = True
    return {key: {rank: int(mine.sum()) for rank, mine in of.items()} for key, of in held.items()}
