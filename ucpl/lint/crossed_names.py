"""Names of tensors and keys that contradict each other.

Swapped tensors of one size pass all checks of shapes, and every round trip. Words of the names are evidence: `gate` in a key
with `up_proj` and `up` in one with `gate_proj`, or `up` before `gate` in a key with `gate_up`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from ucpl.layout import Entry, Layout
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_name

__all__ = ["crossed_names"]

_WORD = re.compile(r"[A-Za-z]+[0-9]*")
_HOLE = re.compile(r"\{[^{}]*\}")
_PAIRS_MAX = 20_000


def crossed_names(layout: Layout) -> Iterator[str]:
    """Remarks on keys with words of other tensors."""
    alone = [e for e in layout.entries if len(e.targets) == 1 and e.storing.key is not None]
    yield from _swapped(layout, alone)
    for entry in layout.entries:
        if len(entry.targets) > 1 and entry.storing.key is not None:
            yield from _out_of_order(layout, entry)


def _swapped(layout: Layout, entries: Sequence[Entry]) -> Iterator[str]:
    by_shape: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        tensor = layout.tensors[_path(entry)]
        by_shape.setdefault((entry.storing.file, tensor.counts), []).append(entry)
    said = set()
    for alike in by_shape.values():
        if len(alike) ** 2 > _PAIRS_MAX:
            continue
        for a, b in combinations(alike, 2):
            own, other = (_words(_path(e)) - _words(_path(f)) for e, f in ((a, b), (b, a)))
            keys = _words(_key(a)) - _words(_key(b)), _words(_key(b)) - _words(_key(a))
            is_crossed = own and other and _has(keys[1], own) and _has(keys[0], other)
            names = whole_name(_path(a)), whole_name(_path(b))
            if is_crossed and not _has(keys[0], own) and not _has(keys[1], other) and names not in said:
                said.add(names)
                yield (
                    f'{layout.name}: the key of `{names[0]}` (line {a.span.line}) is "{_key(a)}", and that of `{names[1]}`'
                    f' (line {b.span.line}) is "{_key(b)}". If they are swapped, no check of shapes finds it'
                )


def _out_of_order(layout: Layout, entry: Entry) -> Iterator[str]:
    """Parts in another order than their key."""
    words = [word.lower() for word in _WORD.findall(_HOLE.sub(" ", _key(entry)).replace("_", " "))]
    for axis in ax.walk(*entry.shape):
        labels = [t.label for t in axis.terms if t.label in entry.targets] if isinstance(axis, ax.Stack) else []
        parts = [_last(entry.targets[label]) for label in labels]
        if len(parts) < 2 or len(set(parts)) < len(parts):
            continue
        places = _places(parts, words)
        if places and places != sorted(places):
            order = " before ".join(f"`{part}`" for part in parts)
            yield f'{layout.name}: {order} (line {entry.span.line}) is another order than that of the key, "{_key(entry)}"'


def _places(parts: Sequence[str], words: Sequence[str]) -> list[int]:
    """The place of each part in a key, or nothing.

    Keys are `gate_up`, `qkv`, `query_key_value`.
    """
    letters = [part[0] for part in parts]
    for word in words:
        if sorted(word) == sorted(letters) and len(set(letters)) == len(letters):
            return [word.index(letter) for letter in letters]
    found = [[i for i, word in enumerate(words) if word == part] for part in parts]
    if any(len(one) != 1 for one in found):
        found = [[i for i, word in enumerate(words) if word.startswith(part)] for part in parts]
    return [one[0] for one in found] if all(len(one) == 1 for one in found) else []


def _path(entry: Entry) -> str:
    return next(iter(entry.targets.values()))


def _key(entry: Entry) -> str:
    return entry.storing.key.text if entry.storing.key is not None else ""


def _last(path: str) -> str:
    return whole_name(path).rpartition(".")[2].lower()


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(_HOLE.sub(" ", text).replace("_", " ")))


def _has(words: frozenset[str], asked: frozenset[str]) -> bool:
    """True if each asked word is there, or begins one."""
    return bool(asked) and all(
        word in words or (len(word) > 1 and any(w.startswith(word) for w in words)) for word in asked
    )
