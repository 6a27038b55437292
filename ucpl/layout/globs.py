"""Globs over names of tensors.

They answer two questions: which names does a glob match, and which of many globs does a name have? A glob is the texts
between its stars; a star is any run of characters, of none, too, and dots are characters. Lists of patterns are long
and models longer, so a name is not compared with each glob: it is tested for the texts that a glob ends with, begins
with or has inside, the one of them that the fewest other globs have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import field

from ucpl.records import define

__all__ = ["Globs", "is_called", "literals", "matches"]

_INSIDE = (8, 4, 2, 1)  # characters of a text inside a name that are looked up: the most that the text has

Glob = tuple[str, ...]  # the texts between the stars
Anchor = tuple[str, str]  # place of a text, and the text
Table = dict[int, dict[str, list[int]]]  # characters -> a text of so many -> positions of globs


def literals(glob: Glob) -> int:
    """Number of characters of a glob that are no star.

    More characters make it more literal.
    """
    return sum(map(len, glob))


def matches(glob: Glob, name: str) -> bool:
    """True if the name is the texts of the glob, in order.

    Anything can be between them.
    """
    first, last = glob[0], glob[-1]
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for text in glob[1:-1]:  # the first place that a text fits leaves most for those behind it
        at = name.find(text, at, end)
        if at < 0:
            return False
        at += len(text)
    return True


def is_called(text: str, name: str) -> bool:
    """True if a name, or a glob, is or matches a tensor's."""
    return matches(tuple(text.split("*")), name) if "*" in text else text == name


@define
class Globs:
    """Many globs, each under one of its texts.

    It is the text that the fewest of them have, of these the longest.
    """

    globs: Sequence[Glob]
    ends: Table = field(factory=dict)
    starts: Table = field(factory=dict)
    inside: Table = field(factory=dict)
    everywhere: list[int] = field(factory=list)  # globs of stars alone

    def __attrs_post_init__(self) -> None:
        anchors = [list(_anchors(glob)) for glob in self.globs]
        shared = Counter(anchor for each in anchors for anchor in each)
        tables = {"starts": self.starts, "ends": self.ends, "inside": self.inside}
        for position, each in enumerate(anchors):
            if not each:
                self.everywhere.append(position)
                continue
            where, text = min(each, key=lambda anchor: (shared[anchor], -len(anchor[1])))
            tables[where].setdefault(len(text), {}).setdefault(text, []).append(position)

    def of(self, name: str) -> list[int]:
        """Positions of the globs that match a name, in order."""
        near = {*self.everywhere, *self._near(name)}
        return sorted(i for i in near if matches(self.globs[i], name))

    def _near(self, name: str) -> Iterator[int]:
        """Globs with a text, or a part of it, in the name."""
        for size, known in self.ends.items():
            yield from known.get(name[-size:], ())
        for size, known in self.starts.items():
            yield from known.get(name[:size], ())
        for size, known in self.inside.items():
            for text in {name[at : at + size] for at in range(len(name) - size + 1)} & known.keys():
                yield from known[text]


def _anchors(glob: Glob) -> Iterator[Anchor]:
    """The texts under which a glob can be found."""
    if glob[0]:
        yield "starts", glob[0]
    if glob[-1]:
        yield "ends", glob[-1]
    for text in glob[1:-1]:
        if text:
            size = next(n for n in _INSIDE if n <= len(text))
            yield "inside", text[-size:]
