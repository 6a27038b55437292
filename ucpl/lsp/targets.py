"""The definitions of the name at a place.

A label is looked up among the names next to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ucpl.lsp.context import CursorContext, name_in_hole, wanted
from ucpl.lsp.definitions import definitions_of
from ucpl.lsp.files import EditorTexts
from ucpl.lsp.names import BlockInFile, KnownName, find_block, visible
from ucpl.records import frozen

__all__ = ["Target", "meant", "targets"]

_SIDES = re.compile(r"\.(size|local)$")


@frozen
class Target:
    """Characters start .. stop of a file: the name in its statement.

    The statement reaches from `first` to `last`.
    """

    path: str
    start: int
    stop: int
    first: int = 0
    last: int = 0


def targets(texts: EditorTexts, context: CursorContext) -> list[Target]:
    """The definitions of the name at a place.

    All lines of a tensor under a condition.
    """
    token = context.token
    if token is None or token.kind not in ("name", "string"):
        return []
    if context.word == "from" and token.kind == "string":
        path = texts.imported(context.place.path, token.value)
        return [Target(path, 0, 0)] if path is not None else []
    if token.text.startswith("config."):
        return _in_config(texts, context, token.text)
    return [_target(k) for k in meant(texts, context)]


def _target(known: KnownName) -> Target:
    one = known.definition
    return Target(known.path, one.token.start, one.token.stop, one.statement.start, one.statement.stop)


def meant(texts: EditorTexts, context: CursorContext) -> list[KnownName]:
    """The possible definitions of the name at a place.

    All are of one kind and one block.
    """
    token = context.token
    if token is None or not token.is_name or _is_text(context):
        return []
    name = token.value if token.kind == "name" else name_in_hole(token, context.offset) or token.value
    kinds = wanted(context)
    if {"model", "layout"} & set(kinds):
        return _block_named(texts, context, name, kinds)
    argument = _argument(texts, context, name)
    if argument is not None:
        return [argument]
    known = visible(texts, context.scope)
    for candidate in _candidates(context, name):
        found = [k for k in known if k.name == candidate and k.kind != "entry"]
        found += [k for k in known if k.name == candidate and k.kind == "entry" and k.definition.token is not token]
        if found:
            return _best(found, kinds)
    return []


def _argument(texts: EditorTexts, context: CursorContext, name: str) -> KnownName | None:
    """The parameter that an argument by name is of."""
    if context.following != "=" or context.word not in ("model", "layout", "plan", "use"):
        return None
    place = find_block(texts, context.place.path, context.called)
    named = definitions_of(place.outline, place.block) if place is not None else []
    found = next((d for d in named if d.kind == "parameter" and d.name == name), None)
    return KnownName(place.path, found) if place is not None and found is not None else None


def _is_text(context: CursorContext) -> bool:
    """Return True for a key, a path or a message.

    Names in templates are none.
    """
    token = context.token
    assert token is not None
    if token.kind != "string" or name_in_hole(token, context.offset):
        return False
    return context.previous in ("as", "key") or context.word in ("file", "assert", "from")


def _block_named(texts: EditorTexts, context: CursorContext, name: str, kinds: tuple[str, ...]) -> list[KnownName]:
    path = context.place.path
    if context.word == "from" and len(context.statement.tokens if context.statement else ()) > 1:
        assert context.statement is not None
        path = texts.imported(path, context.statement.tokens[1].value) or path
    found = find_block(texts, path, name, tuple(k for k in kinds if k in ("model", "layout")))
    return [_own(found)] if found is not None else []


def _own(place: BlockInFile) -> KnownName:
    """A block as the definition of its own name."""
    named = definitions_of(place.outline, place.outline.top)
    return KnownName(place.path, next(d for d in named if d.block is place.block))


def _candidates(context: CursorContext, name: str) -> Iterator[str]:
    """The possible meanings of a written name.

    These are the name itself, a label's neighbours, and the dim of `l.local`.
    """
    statement = context.statement
    if statement is not None and statement.word == "entry" and context.following == ":":
        path = statement.tokens[0].value
        yield ".".join([*path.split(".")[:-1], name])
        yield f"{path}.{name}"
    yield name
    yield _SIDES.sub("", name)


def _best(found: list[KnownName], kinds: tuple[str, ...]) -> list[KnownName]:
    """The definitions of the likeliest kind, of one block and file."""
    order = {kind: i for i, kind in enumerate(kinds)}
    first = min(found, key=lambda k: order.get(k.kind, len(order)))
    return [k for k in found if k.kind == first.kind and k.definition.block is first.definition.block]


def _in_config(texts: EditorTexts, context: CursorContext, name: str) -> list[Target]:
    """The line of the config.json that has the key."""
    config = texts.config(context.place.path)
    text = texts.text(config.path) if config is not None else None
    if config is None or text is None:
        return []
    found: re.Match[str] | None = None
    for step in name.split(".")[1:]:  # an inner key follows its outer key
        found = re.compile(rf'"{re.escape(step)}"\s*:').search(text, found.end() if found is not None else 0)
        if found is None:
            return []
    return [Target(config.path, found.start(), found.end() - 1, found.start(), found.end() - 1)] if found else []
