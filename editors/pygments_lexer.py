"""The colours of the language for Pygments and the documentation's site.

The words are the grammar's.
"""

from __future__ import annotations

from typing import ClassVar

from pygments.lexer import RegexLexer, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text

from editors.textmate import NO_NAME, keywords
from ucpl.layout.arithmetic import FUNCTIONS

__all__ = ["UcplLexer"]


class UcplLexer(RegexLexer):
    """Text of a .ucpl file, or a part of one."""

    name = "ucpl"
    aliases: ClassVar[list[str]] = ["ucpl"]
    filenames: ClassVar[list[str]] = ["*.ucpl"]
    tokens: ClassVar[dict[str, list[object]]] = {
        "root": [
            (r"#[^\n]*", Comment.Single),
            (r'"', String.Double, "text"),
            (r"(?<=@)[A-Za-z_]\w*(?!\w|\s*\()", Name.Decorator),
            (words(sorted(FUNCTIONS), prefix=r"(?<![\w.])", suffix=r"(?=\s*\()"), Name.Builtin),
            (words(sorted(keywords()), prefix=r"(?<![\w.])", suffix=NO_NAME), Keyword),
            (r"config(?:\.[A-Za-z_]\w*)+", Name.Constant),
            (r"[A-Za-z_][\w.]*", Name),
            (r"[0-9]+", Number.Integer),
            (r"->|\.\.\.|\.\.|[-+*/%<>=!@]+", Operator),
            (r"[()\[\]{},:]", Punctuation),
            (r"\s+", Text.Whitespace),
            (r".", Text),
        ],
        "text": [
            (r"\\.", String.Escape),
            (r"\{[^{}\"\n]*\}", String.Interpol),
            (r'"|\n', String.Double, "#pop"),
            (r'[^"\\{\n]+|\{', String.Double),
        ],
    }
