"""Uses of the name at a place, and edits that rename it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ucpl.errors import UcplError
from ucpl.language import parse
from ucpl.language.words import BRACKET_WORDS, CLAUSE_WORDS, LAYOUT_WORDS, MODEL_WORDS, is_dotted, quote
from ucpl.lsp.context import CursorContext, context_at
from ucpl.lsp.definitions import definitions_of, parameters_of
from ucpl.lsp.files import EditorTexts, is_shipped
from ucpl.lsp.names import KnownName, find_block, visible
from ucpl.lsp.outline import BLOCKS
from ucpl.lsp.targets import Target, meant
from ucpl.lsp.tokens import Token
from ucpl.records import frozen

__all__ = ["NotRenamed", "NameUse", "references", "renamed", "renamed_part"]

_FILES_MAX = 200  # of one folder
_WHOLE = ("import", "prefix", "plan", "blob", "entry")  # kinds whose uses are parts of other names, or no names
_HOLES = re.compile(r"\{[^{}]*\}")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_RESERVED = BRACKET_WORDS | CLAUSE_WORDS | LAYOUT_WORDS | MODEL_WORDS | {"model", "layout", "plan", "from", "ucpl"}


class NotRenamed(Exception):
    """A name that is not renamed; the text has the reason."""


@frozen
class NameUse:
    """Characters start .. stop of a file that name a definition.

    `written`: all of the name, a label or a part of it.
    """

    path: str
    start: int
    stop: int
    written: str
    is_quoted: bool = False


def references(texts: EditorTexts, context: CursorContext) -> list[NameUse]:
    """All uses of the name at a place, its definition included."""
    known = _meant(texts, context)
    if known is None:
        return []
    return [one for path in _searched(texts, context.place.path, known.path) for one in _uses(texts, path, known)]


def renamed_part(texts: EditorTexts, context: CursorContext) -> Target | None:
    """The characters at a place that `renamed` would replace."""
    path, offset = context.place.path, context.offset
    known = _meant(texts, context)
    if known is None or not _can_be_renamed(known):
        return None
    here = next((one for one in _uses(texts, path, known) if one.start <= offset <= one.stop), None)
    return Target(path, here.start, here.stop) if here is not None else None


def renamed(texts: EditorTexts, context: CursorContext, new: str) -> list[tuple[NameUse, str]]:
    """Each use of the name at a place with its new text.

    Raises: NotRenamed, if the new name is taken, is no name, or a text would not parse.
    """
    known = _meant(texts, context)
    if known is None or not _can_be_renamed(known):
        raise NotRenamed("this is no name that can be renamed here: rename it where it is defined")
    old, new = known.definition.token.value, new.strip().strip('"')
    if not new or new == old:
        return []
    if new in _RESERVED:
        raise NotRenamed(f"`{new}` is a word of the language: choose another name")
    uses = references(texts, context)
    _check_handed_on(texts, context, known)
    for scope in {one.path: one for one in uses}.values():
        found = context_at(texts, scope.path, scope.start)
        if found is not None and any(k.name == new for k in visible(texts, found.scope)):
            raise NotRenamed(f"`{new}` is a name here already: choose another name")
    edits = [(one, _new_text(one, old, new)) for one in uses]
    for path in {one.path for one in uses}:
        _check_parses(texts, path, [(one, text) for one, text in edits if one.path == path])
    return edits


def _can_be_renamed(known: KnownName) -> bool:
    is_default = known.kind == "file" and known.name == "weights"  # lines without `in` are in it
    return known.kind not in _WHOLE and not is_default and not is_shipped(known.path)


def _check_handed_on(texts: EditorTexts, context: CursorContext, known: KnownName) -> None:
    """Check that no `extends` hands the parameter on by its name."""
    name = known.definition.token.value
    for path in _searched(texts, context.place.path, known.path):
        outline = texts.outline(path)
        for block in outline.blocks if outline is not None else ():
            base = find_block(texts, path, block.extends, (block.kind,)) if block.extends else None
            if base is None or block.header is None or base.block.header is None:
                continue
            both = all(name in (t.value for t in parameters_of(b.header)) for b in (block, base.block) if b.header)
            said = [one.value for one in block.header.after("extends")]
            if both and known.definition.block in (block, base.block) and name not in said:
                raise NotRenamed(f"`{block.name}` hands `{name}` on: write extends {base.block.name}({name} = {name})")


def _new_text(use: NameUse, old: str, new: str) -> str:
    if use.written == old:
        kept = use.is_quoted and is_dotted(old)  # quotes that the old name did not need
        return quote(new) if kept or not is_dotted(new) else new
    prefix, _, last = old.rpartition(".")  # a label: the last part of a tensor's name
    new_prefix, _, new_last = new.rpartition(".")
    if use.written != last or prefix != new_prefix or not is_dotted(new):
        raise NotRenamed(f"a label `{use.written}:` names it: write a name that begins with `{prefix}.`")
    return new_last


def _check_parses(texts: EditorTexts, path: str, edits: list[tuple[NameUse, str]]) -> None:
    before = texts.text(path) or ""
    after = before
    for one, text in sorted(edits, key=lambda edit: -edit[0].start):
        after = after[: one.start] + text + after[one.stop :]
    try:
        parse(before, path)
    except UcplError:
        return  # a text that does not parse is renamed as far as it is read
    try:
        parse(after, path)
    except UcplError as error:
        raise NotRenamed(f"{os.path.basename(path)} would not parse: {error.diagnostics[0].message}") from None


# ---- the search ------------------------------------------------------------------------------------------------------


def _meant(texts: EditorTexts, context: CursorContext) -> KnownName | None:
    """The definition that a place names, or defines."""
    token = context.token
    if token is None or not token.is_name:
        return None
    place = context.place
    for block in (place.outline.top, *place.outline.blocks):
        for one in definitions_of(place.outline, block):
            if one.token is token and one.kind not in ("entry", "import"):
                return _of_dim(texts, context, KnownName(place.path, one))
    found = meant(texts, context)
    return _of_dim(texts, context, found[0]) if found else None


def _of_dim(texts: EditorTexts, context: CursorContext, known: KnownName) -> KnownName:
    """The dim of an `index`; any other definition is its own."""
    if known.kind != "index":
        return known
    named = visible(texts, context.scope)
    return next((one for one in named if one.kind == "dim" and one.name == known.name), known)


def _searched(texts: EditorTexts, *paths: str) -> Iterator[str]:
    """The open texts, and the files of the folders of these paths."""
    found = [*paths, *texts.opened]
    for folder in {os.path.dirname(path) for path in paths if os.path.isabs(path) and not is_shipped(path)}:
        found += sorted(str(path) for path in Path(folder).glob("*.ucpl"))[:_FILES_MAX]
    for path in dict.fromkeys(found):
        if (path.endswith(".ucpl") and not is_shipped(path)) or path in texts.opened:
            yield path


def _uses(texts: EditorTexts, path: str, known: KnownName) -> Iterator[NameUse]:
    outline = texts.outline(path)
    name = known.definition.token.value
    for token in outline.tokens if outline is not None else ():
        for start, written, is_quoted in _parts(token, name, is_block=known.kind in BLOCKS):
            context = context_at(texts, path, start + 1 if is_quoted else start)
            one = _meant(texts, context) if context is not None else None
            if one is not None and _is_one(one, known):
                stop = token.stop if is_quoted else start + len(written)
                yield NameUse(path, start, stop, written, is_quoted)


def _is_one(one: KnownName, other: KnownName) -> bool:
    """True for two definitions of one name in a block.

    An axis and its degree are such definitions.
    """
    return one.definition.block is other.definition.block and one.definition.token.value == other.definition.token.value


def _parts(token: Token, name: str, *, is_block: bool) -> Iterator[tuple[int, str, bool]]:
    """Parts of a token that can mean a name.

    Each has its place, its text, and True if it is all of a quoted text.
    """
    last = name.rpartition(".")[2]
    if token.kind == "string":
        if token.value == name:
            yield token.start, name, True
        for hole in _HOLES.finditer(token.text) if not is_block else ():
            for found in _NAME.finditer(hole[0]):
                if found[0] == name or found[0].startswith(f"{name}."):
                    yield token.start + hole.start() + found.start(), name, False
    elif token.kind == "name":
        if token.text == name or token.text.startswith(f"{name}."):
            yield token.start, name, False
        elif token.text.endswith(f".{name}"):  # behind the prefix of a `use`
            yield token.stop - len(name), name, False
        elif token.text == last:
            yield token.start, last, False
