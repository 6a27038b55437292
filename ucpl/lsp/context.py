"""The context of a place: its statement, tokens, and possible names."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from attrs import evolve

from ucpl.lsp.files import EditorTexts
from ucpl.lsp.names import BlockInFile
from ucpl.lsp.outline import BLOCKS, Outline, Statement, TextBlock
from ucpl.lsp.tokens import Token
from ucpl.records import frozen

__all__ = ["NUMBERS", "CursorContext", "context_at", "hole_at", "wanted"]

NUMBERS = ("parameter", "let", "dim", "axis")
_HOLE_NAME = re.compile(r"[A-Za-z_][\w.]*")


@frozen(eq=False)
class CursorContext:
    """A place of a text.

    `before` are the tokens of the statement that end ahead of it; `token` is the token at the place.
    """

    place: BlockInFile
    offset: int
    statement: Statement | None
    before: tuple[Token, ...]
    token: Token | None

    @property
    def block(self) -> TextBlock:
        return self.place.block

    @property
    def scope(self) -> BlockInFile:
        """The block whose names are known here.

        Its header knows those of a model or layout, too.
        """
        for block in self.place.outline.blocks:
            if block.header is self.statement and self.statement is not None:
                return evolve(self.place, block=block)
        return self.place

    @property
    def called(self) -> str:
        """The name before the innermost open parenthesis, or an empty text."""
        return _call_of(self.before) if _bracket(self.before) == "(" else ""

    @property
    def inner(self) -> tuple[Token, ...]:
        """The tokens behind the innermost open bracket."""
        return self.before[_opening(self.before) + 1 :]

    @property
    def following(self) -> str:
        """The token behind the one that is touched."""
        statement, token = self.statement, self.token
        if statement is None or token is None:
            return ""
        return next((t.text for t in statement.tokens if t.start >= token.stop), "")

    @property
    def word(self) -> str:
        return self.statement.word if self.statement is not None else ""

    @property
    def typed(self) -> str:
        """The part of the token before the place."""
        return self.token.text[: self.offset - self.token.start] if self.token is not None else ""

    @property
    def previous(self) -> str:
        return self.before[-1].text if self.before else ""


def context_at(texts: EditorTexts, path: str, offset: int) -> CursorContext | None:
    """The context of a place; None in an unreadable file."""
    outline = texts.outline(path)
    if outline is None:
        return None
    token = _touched(outline, offset)
    block = outline.block_at(offset)
    statement = _statement_at(outline, block, offset)
    before = tuple(t for t in statement.tokens if t.stop <= offset and t is not token) if statement is not None else ()
    return CursorContext(BlockInFile(path, outline, block), offset, statement, before, token)


def _touched(outline: Outline, offset: int) -> Token | None:
    """The word, number or text at a place.

    It may end there. A sign is none: one types behind it.
    """
    found = outline.tokens
    i = bisect_left(found, offset, key=lambda t: t.stop)
    near = [t for t in found[i : i + 2] if t.start <= offset <= t.stop and t.kind not in ("newline", "sign")]
    return next((t for t in near if t.start < offset or t.kind in ("name", "number")), None)


def _statement_at(outline: Outline, block: TextBlock, offset: int) -> Statement | None:
    """The statement at a place, or the one above on its line."""
    headers = [b.header for b in outline.blocks if b.header is not None] if block.kind == "top" else []
    found: Statement | None = None
    for one in (*block.statements, *headers):
        if one.start <= offset <= one.stop:
            return one
        if one.stop < offset and (found is None or one.stop > found.stop):
            found = one
    if found is None or "\n" in outline.text[found.stop : offset]:
        return None
    return None if "}" in outline.text[found.stop : offset] else found


def hole_at(token: Token, offset: int) -> str | None:
    """The text inside a template's braces, up to a place.

    None outside of them.
    """
    text = token.text[: offset - token.start]
    opened = text.rfind("{")
    return text[opened + 1 :] if opened > text.rfind("}") else None


def name_in_hole(token: Token, offset: int) -> str:
    """The name at a place inside a template's braces, or \"\"."""
    if hole_at(token, offset) is None:
        return ""
    for match in _HOLE_NAME.finditer(token.text):
        if match.start() <= offset - token.start <= match.end():
            return match[0]
    return ""


def wanted(context: CursorContext) -> tuple[str, ...]:
    """The kinds of names that fit a place, the likeliest first.

    () if no name fits.
    """
    before = context.before
    if (
        context.token is not None
        and context.token.kind == "string"
        and hole_at(context.token, context.offset) is not None
    ):
        return ("axis", "index", "dim", "parameter", "let")
    near = [t.text for t in before[-3:]]
    if near[-1:] == ["@"] or (len(near) == 3 and near[0] == "@" and near[2] == "("):
        return ("axis",)
    if _bracket(before) == "[" and context.word in ("entry", "tensor") and _opened_by(before) not in (None, ""):
        return ("dim", *NUMBERS) if context.word == "entry" and "=" not in [t.text for t in before] else NUMBERS
    return _by_word(context, near[-1] if near else "")


def _by_word(context: CursorContext, previous: str) -> tuple[str, ...]:
    texts = [t.text for t in context.before]
    if previous in ("is", "dtype") and len(texts) > 1:
        return ()
    match context.word:
        case "model" | "layout":
            return _in_header(context, texts, previous)
        case "from":
            return BLOCKS if "import" in texts else ()
        case "plan":
            if previous in ("=", "->"):
                return ("layout",)
            said = [text for text in texts if text in ("drop", "freeze", "train")][-1:]
            return ("tensor", "state") if said == ["drop"] else ("tensor",) if said else NUMBERS
        case "let" | "dim" | "assert" | "framework":
            return NUMBERS if len(texts) > 1 else ()
        case "use":
            return BLOCKS if len(texts) == 1 else NUMBERS if "as" not in texts else ()
        case "tensor":
            if _call_of(context.before) == "scale":  # is scale(
                return ("tensor",) if previous == "(" else NUMBERS
            if previous == "of":  # is scale of, in version 1
                return ("tensor",)
            return NUMBERS if "when" in texts else ("dim",) if ":" in texts else ()
        case "alias":
            return ("tensor",) if "=" in texts else ()
        case "group":
            return ("tensor", "entry", "group", "file") if "=" in texts else ()
        case "index":
            return ("dim", "index")
        case "derive":
            return NUMBERS if "when" in texts else ("state",)
        case "file":
            return NUMBERS if "when" in texts else ()
        case "blob":
            return _in_clause(previous)
        case "state" | "entry":
            return _in_line(context, texts, previous)
    return ("tensor",) if context.block.kind == "layout" and not texts else ()


def _in_header(context: CursorContext, texts: list[str], previous: str) -> tuple[str, ...]:
    if previous == "extends":
        return (context.word,)
    if previous == "of":
        return ("model",)
    return NUMBERS if _bracket(context.before) == "(" else ()


def _in_line(context: CursorContext, texts: list[str], previous: str) -> tuple[str, ...]:
    """The kinds for an entry or a state line.

    It has a left side, clauses, and a pattern.
    """
    if "=" not in texts:
        if context.word == "state":
            if "dtype" in texts and context.block.kind == "model":
                return ("tensor",) if {"of", "for"} & {*texts[texts.index("dtype") :]} else ()
            return ("group",) if {"of", "for"} & {*texts} else ("state",) if context.block.kind == "layout" else ()
        return ("tensor",) if not texts else ("dim", "index")
    if _in_clause(previous):
        return _in_clause(previous)
    clause = next((t for t in reversed(texts) if t in ("value", "when", "buckets", "as", "in", "on", "dtype")), "")
    if clause in ("value", "when", "buckets"):
        return NUMBERS
    if _call_of(context.before) in ("pad", "flat") and "," in texts[_opening(context.before) :]:
        return NUMBERS
    return ("dim", "index")


def _in_clause(previous: str) -> tuple[str, ...]:
    """The kinds of names behind a clause word."""
    return {"in": ("file",), "on": ("mesh",), "at": ("axis",), "@": ("axis",)}.get(previous, ())


def _opening(before: Sequence[Token]) -> int:
    """The number of the innermost open bracket; -1 for none."""
    depth = 0
    for i in reversed(range(len(before))):
        depth += (before[i].text in (")", "]")) - (before[i].text in ("(", "["))
        if depth < 0:
            return i
    return -1


def _bracket(before: Sequence[Token]) -> str:
    i = _opening(before)
    return before[i].text if i >= 0 else ""


def _opened_by(before: Sequence[Token]) -> str | None:
    """The name right before the innermost open bracket."""
    i = _opening(before)
    return before[i - 1].text if i > 0 else None


def _call_of(before: Sequence[Token]) -> str:
    return _opened_by(before) or ""
