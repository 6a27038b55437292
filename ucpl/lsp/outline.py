"""The shape of a text: blocks, statements, and names with places.

The compiler reads a text that is right; this reads one that is being typed. A test holds it against the compiler: of a text
that parses, both find the same statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache, cached_property

from attrs import field

from ucpl.language.words import LAYOUT_WORDS, MODEL_WORDS
from ucpl.lsp.tokens import LineStarts, Token, tokens
from ucpl.records import define, frozen
from ucpl.resources import VERSIONS, grammar_text

__all__ = ["Outline", "Statement", "TextBlock", "continuing_words", "outline"]

TOP_WORDS = frozenset({"ucpl", "from", "let", "assert", "model", "layout", "plan"})
BLOCKS = ("model", "layout")
_ONLY_TOP = frozenset({"from", "model", "layout", "plan"})
_STARTERS = _ONLY_TOP | {"mesh", "domain", "file", "framework", "assert"}  # words that no line in brackets begins with
_OPEN, _CLOSE = frozenset("(["), frozenset(")]")


@cache
def continuing_words() -> frozenset[str]:
    """Words that continue the statement above at the start of a line.

    They are the grammars' own lists.
    """
    found = [re.search(r"\\r\?\\n\|\(([a-z|]+)\)", grammar_text(version)) for version in VERSIONS]
    return frozenset(word for one in found if one is not None for word in one[1].split("|"))


@frozen(eq=False)
class Statement:
    """One statement: its tokens without newlines and comments.

    They reach from character `start` to `stop`.

    `word` is the keyword that it begins with; "tensor" or "entry" of one that begins with a name; "" of none.
    """

    word: str
    tokens: tuple[Token, ...]

    @property
    def start(self) -> int:
        return self.tokens[0].start

    @property
    def stop(self) -> int:
        return self.tokens[-1].stop

    def after(self, sign: str) -> tuple[Token, ...]:
        """The tokens behind the first such sign or word outside brackets.

        Empty if there is none.
        """
        for i, depth in _depths(self.tokens):
            if depth == 0 and self.tokens[i].text == sign:
                return self.tokens[i + 1 :]
        return ()

    def name_after(self, word: str) -> str:
        """The name right behind a word, or an empty text."""
        rest = self.tokens[1:] if word == self.tokens[0].text else self.after(word)
        return rest[0].value if rest and rest[0].is_name else ""


@define(eq=False)
class TextBlock:
    """A model or a layout, or the text outside them (`kind` "top").

    `start` .. `stop` are its characters, braces included.
    """

    kind: str
    header: Statement | None
    start: int
    stop: int = 0
    is_closed: bool = False
    statements: list[Statement] = field(factory=list)

    @property
    def name(self) -> str:
        return self.header.tokens[1].value if self.header is not None and len(self.header.tokens) > 1 else ""

    @property
    def of(self) -> str:
        """The model that a layout is of."""
        return self.header.name_after("of") if self.header is not None else ""

    @property
    def extends(self) -> str:
        return self.header.name_after("extends") if self.header is not None else ""


@define(eq=False, slots=False)
class Outline:
    """The shape of one text."""

    text: str
    tokens: list[Token]
    top: TextBlock
    blocks: list[TextBlock]  # models and layouts

    @cached_property
    def lines(self) -> LineStarts:
        return LineStarts(self.text)

    def block_at(self, offset: int) -> TextBlock:
        """The model or layout whose braces hold a place, or the top."""
        for block in self.blocks:
            if block.header is not None and block.header.stop < offset < block.stop + (not block.is_closed):
                return block
        return self.top

    def block(self, kinds: Sequence[str], name: str) -> TextBlock | None:
        return next((b for b in self.blocks if b.kind in kinds and b.name == name), None)


def outline(text: str) -> Outline:
    """The shape of a text. Never fails: unclear parts are one statement."""
    found = tokens(text)
    top = here = TextBlock("top", None, 0, len(text), True)
    blocks: list[TextBlock] = []
    for words, brace in _statements(found):
        if here is not top and words and _begins_another(text, words):  # a brace is missing
            here.stop, here = words[0].start, top
        made = Statement(_word(words, here.kind), tuple(words)) if words else None
        if made is not None and brace is not None and brace.text == "{" and here is top:
            here = TextBlock(_kind(made), made, made.start, brace.stop)
            blocks.append(here)
            continue
        if made is not None:
            here.statements.append(made)
        if brace is not None and brace.text == "}" and here is not top:
            here.stop, here.is_closed, here = brace.stop, True, top
    if here is not top:
        here.stop = len(text)
    return Outline(text, found, top, blocks)


def _kind(header: Statement) -> str:
    """The kind of a block.

    If its word is misspelt, the header decides.
    """
    return header.word if header.word in BLOCKS else "layout" if header.name_after("of") else "model"


def _statements(found: list[Token]) -> Iterator[tuple[list[Token], Token | None]]:
    """The tokens of each statement, and the brace that ended it."""
    words: list[Token] = []
    depth = 0
    for i, token in enumerate(found):
        if token.kind == "comment":
            continue
        if token.kind == "newline":
            if words and _ends(found, i, words[-1], depth):
                yield words, None
                words, depth = [], 0
        elif token.kind == "sign" and token.text in "{}":
            yield words, token
            words, depth = [], 0
        else:
            words.append(token)
            depth = max(0, depth + (token.text in _OPEN) - (token.text in _CLOSE))
    if words:
        yield words, None


def _ends(found: list[Token], newline: int, before: Token, depth: int) -> bool:
    """Return True if a newline ends a statement.

    In an open bracket it does if the next line plainly begins another one.
    """
    following = (t for t in found[newline + 1 :] if t.kind not in ("newline", "comment"))
    first = next(following, None)
    if first is None:
        return True
    second = next(following, None)
    if first.kind == "name" and first.text in _STARTERS and _is_word(second):
        return True
    if depth > 0:
        return before.text not in ("(", "[", ",") and second is not None and second.text in ("=", ":")
    if before.text == ",":
        return False
    return first.text not in continuing_words() or not _is_word(second)


def _is_word(following: Token | None) -> bool:
    """Return True if the token before this one is a keyword.

    Before `=`, `.`, `:` and `[` it is a name.
    """
    return following is None or following.text not in ("=", ":", "[", ".")


def _begins_another(text: str, words: Sequence[Token]) -> bool:
    """Return True if a statement is only possible outside blocks.

    Its word is at the very start of a line.
    """
    first = words[0]
    at_start = first.start == 0 or text[first.start - 1] == "\n"
    return at_start and first.text in _ONLY_TOP and _is_word(words[1] if len(words) > 1 else None)


def _word(words: Sequence[Token], kind: str) -> str:
    known = {"top": TOP_WORDS, "model": MODEL_WORDS, "layout": LAYOUT_WORDS}[kind]
    first, second = words[0], words[1] if len(words) > 1 else None
    if first.kind == "name" and first.text in known and _is_word(second):
        return first.text
    if kind == "top" or not (first.is_name or first.text == "*"):
        return ""
    return "tensor" if kind == "model" else "entry"


def _depths(words: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """The number of each token, and the count of open brackets."""
    depth = 0
    for i, token in enumerate(words):
        depth -= token.text in _CLOSE and token.kind == "sign"
        yield i, max(depth, 0)
        depth += token.text in _OPEN and token.kind == "sign"
