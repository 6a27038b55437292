"""Trees of texts that were read before, kept as JSON.

They are next to the parser's tables. Most of the time of a short command would be spent on reading the same shipped
layouts and the same file of the user's again. A tree is stored under the digest of its text, of the grammar, and of the
code of this room: everything that could give another tree gives another name. It begins with its own digest, so that a
file that is cut off is never taken for a tree. The expressions in the braces of a file's templates are kept with it,
since they are read one by one later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import attrs

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.language.cache import cache_folder, keep, kept
from ucpl.language.source import Source
from ucpl.language.walk import walk
from ucpl.language.words import HOLE
from ucpl.resources import VERSIONS, grammar_text

__all__ = ["find", "find_hole", "store"]

TREES_MAX = 200  # kept at a time, and a quarter more at most
CHARACTERS_MAX = 200_000  # of a text whose tree is kept
HOLES_MAX = 10_000  # known at a time
Read = Callable[[Source, str], object]


class Spanned(attrs.AttrsInstance, Protocol):
    """A record of the tree."""

    @property
    def span(self) -> nodes.Span: ...


_KINDS: tuple[type, ...] = tuple(
    kind for _, kind in sorted(vars(nodes).items()) if isinstance(kind, type) and attrs.has(kind)
)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS, 1)}
_holes: dict[str, object] = {}  # of every tree that was found or stored in this process


def find(source: Source, start: str) -> object:
    """The kept record of a text, its spans in `source`, or None."""
    path = _path(source.text, start)
    text = kept(path) if path else None
    if text is None or path is None:
        return None
    digest, _, body = text.partition("\n")
    if digest != _digest(body):
        return None
    try:
        told, holes = json.loads(body)
        tree = _decoded(told, source)
        _know(holes)
    except (ValueError, TypeError, LookupError):
        return None
    with contextlib.suppress(OSError):
        path.touch()  # the oldest are dropped
    return tree


def find_hole(source: Source) -> object:
    """The kept expression of a hole, or None.

    Only holes of trees that this process found or stored are known.
    """
    told = _holes.get(source.text)
    return None if told is None else _decoded(told, source)


def store(tree: attrs.AttrsInstance, source: Source, start: str, read: Read) -> None:
    """Keep the record of a text.

    `read` reads the holes in it; one that cannot be read is reported elsewhere.
    """
    path = _path(source.text, start)
    if path is None or len(source.text) > CHARACTERS_MAX:
        return
    holes: dict[str, object] = {}
    for text in _hole_texts(tree):
        with contextlib.suppress(UcplError):
            holes[text] = _encoded(read(Source("", text), "expr_text"))
    _know(holes)
    body = json.dumps([_encoded(tree), holes], separators=(",", ":"))
    keep(path, f"{_digest(body)}\n{body}")
    with contextlib.suppress(OSError):
        _let_go(path.parent)


def _let_go(folder: Path) -> None:
    """Drop the oldest trees of too many.

    A few more may remain: to ask each for its time costs more than to keep a tree.
    """
    with os.scandir(folder) as entries:
        found = [e for e in entries if e.name.startswith("tree-") and e.name.endswith(".json")]
    if len(found) > TREES_MAX + TREES_MAX // 4:
        found.sort(key=lambda e: e.stat().st_mtime)
        for old in found[:-TREES_MAX]:
            os.unlink(old.path)


def _know(holes: dict[str, object]) -> None:
    if len(_holes) > HOLES_MAX:
        _holes.clear()
    _holes.update(holes)


def _hole_texts(tree: attrs.AttrsInstance) -> Iterator[str]:
    for node in walk(tree):
        for value in _fields_of(node):
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and not isinstance(node, nodes.File):
                    yield from (m[1] for m in HOLE.finditer(text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@cache
def _reader() -> str:
    """Digest of the code that makes trees: grammar and this room.

    "" if the code is not available as text.
    """
    files = sorted(Path(__file__).parent.rglob("*.py"))
    made = hashlib.sha256("".join(map(grammar_text, VERSIONS)).encode())
    for file in files:
        made.update(file.read_bytes())
    return made.hexdigest() if files else ""


def _path(text: str, start: str) -> Path | None:
    folder = cache_folder()
    if folder is None or not _reader():
        return None
    return folder / f"tree-{_digest(chr(0).join((_reader(), start, text)))}.json"


# ---- a tree in lists: [0, items] is a tuple, [kind, start, stop, line, column, fields] a record, its places in its text ----


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in attrs.fields(kind) if f.name not in ("span", "text"))


def _fields_of(node: attrs.AttrsInstance) -> Iterator[object]:
    return (getattr(node, name) for name in _names(type(node)))


def _encoded(value: object) -> object:
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, tuple):
        return [0, *map(_encoded, value)]
    if isinstance(value, nodes.File):
        return [_NUMBER[nodes.File], value.version, *map(_encoded, value.statements)]
    record = cast(Spanned, value)
    at = record.span
    return [_NUMBER[type(record)], at.start, at.stop, at.line, at.column, *map(_encoded, _fields_of(record))]


def _decoded(value: object, source: Source, version: int = 1) -> object:
    if not isinstance(value, list):
        return value
    number = value[0]
    if number == 0:
        return tuple([_decoded(item, source, version) for item in value[1:]])
    kind: Callable[..., object] = _KINDS[number - 1]
    if number == _NUMBER[nodes.File]:
        return kind(source.name, value[1], tuple([_decoded(item, source, value[1]) for item in value[2:]]), source.text)
    _, start, stop, line, column, *fields = value
    if line == 1:
        column += source.column - 1
    span = nodes.Span(start, stop, line + source.line - 1, column, source.name, source.line_text, version)
    return kind(*[_decoded(item, source, version) for item in fields], span=span)
