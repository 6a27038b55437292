"""A TextMate grammar for editors, made from the words of the grammars.

    python -m editors.textmate editors/vscode/syntaxes/ucpl.tmLanguage.json      (`make docs` does it)

A word is a keyword only where the language asks for it; a pattern sees one line. So words that begin statements are coloured at
the start of a line alone, and none is before `=`, `:`, `.` and `[`, where it is a name.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ucpl.language.words import AXIS_WORDS, LAYOUT_WORDS, MODEL_WORDS, SPLIT_WORDS
from ucpl.layout.arithmetic import FUNCTIONS
from ucpl.resources import VERSIONS, grammar_text

__all__ = ["NO_NAME", "grammar", "keywords"]

STARTS = LAYOUT_WORDS | MODEL_WORDS | {"ucpl", "from", "model", "layout", "plan"}
INSIDE_TOO = frozenset({"from", "dtype"})  # words that begin a statement and stand inside others
CALLS = AXIS_WORDS - {"each"}  # with parentheses behind
OPERATORS = frozenset({"and", "or", "not"})
_REGEX = re.compile(r"^(?:NAME|INT|STRING|SLIP|_NL|%ignore)\b.*$", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*")
NO_NAME = r"(?![\w.]|\s*(?:[:.\[]|=(?!=)))"  # the text behind a word that is a name
_ALONE = r"(?<![\w.@])"


def keywords() -> frozenset[str]:
    """Every word that a grammar of the language asks for."""
    text = _REGEX.sub("", _COMMENT.sub("", "\n".join(map(grammar_text, VERSIONS))))
    return frozenset(re.findall(r'"([a-z]+)"', text))


def _any(words: frozenset[str]) -> str:
    return "|".join(sorted(words))


def _rule(scope: str, match: str, **captures: str) -> dict[str, object]:
    rule: dict[str, object] = {"match": match}
    if scope:
        rule["name"] = f"{scope}.ucpl"
    if captures:
        rule["captures"] = {number[1:]: {"name": f"{name}.ucpl"} for number, name in captures.items()}
    return rule


def grammar() -> dict[str, object]:
    """The TextMate grammar, as its JSON has it."""
    words = keywords()
    inside = words - (STARTS - INSIDE_TOO) - CALLS - SPLIT_WORDS - OPERATORS
    hole = {
        "name": "meta.template.ucpl",
        "begin": r"\{",
        "end": r"\}|(?=\"|$)",
        "beginCaptures": {"0": {"name": "punctuation.section.template.begin.ucpl"}},
        "endCaptures": {"0": {"name": "punctuation.section.template.end.ucpl"}},
        "patterns": [
            _rule("constant.numeric", r":[0-9]+(?=\})"),
            _rule("support.function", r"\b[a-z]+(?=\()"),
            _rule("constant.numeric", r"\b[0-9]+\b"),
            _rule("variable.other", r"[A-Za-z_][\w.]*"),
        ],
    }
    text = {
        "name": "string.quoted.double.ucpl",
        "begin": '"',
        "end": r'"|$',
        "patterns": [_rule("constant.character.escape", r"\\(?:u\{[0-9A-Fa-f]{1,6}\}|.)"), {"include": "#hole"}],
    }
    patterns = [
        _rule("comment.line.number-sign", "#.*$"),
        {"include": "#text"},
        _rule("", r"^\s*(model|layout|plan)\s+([A-Za-z_]\w*)", _1="storage.type", _2="entity.name.type"),
        _rule("", rf"^\s*({_any(STARTS)}){NO_NAME}", _1="keyword.control"),
        _rule("", r"(?<==)\s*([A-Za-z_]\w*)(?=\s*[,)])", _1="variable.other"),  # an argument, as in f(dtype = dtype)
        _rule("", r"(?<==)\s*(model)\b", _1="keyword.other"),  # group * = model
        _rule("", rf"(@)\s*({_any(SPLIT_WORDS)})(?=\s*\()", _1="keyword.operator", _2="keyword.other"),
        _rule("", r"(@)\s*([A-Za-z_]\w*)", _1="keyword.operator", _2="variable.parameter"),
        _rule("keyword.other", rf"{_ALONE}(?:{_any(CALLS)})(?=\s*\()"),
        _rule("support.function", rf"{_ALONE}(?:{_any(frozenset(FUNCTIONS))})(?=\s*\()"),  # `max` is a word elsewhere
        _rule("keyword.operator.word", rf"{_ALONE}(?:{_any(OPERATORS)}){NO_NAME}"),
        _rule("", rf"{_ALONE}(of)\s+(any){NO_NAME}", _1="keyword.other", _2="constant.language"),
        _rule("", rf"{_ALONE}(dtype)\s+([a-z]\w*)", _1="keyword.other", _2="support.type"),
        _rule("keyword.other", rf"{_ALONE}(?:{_any(inside)}){NO_NAME}"),
        _rule("variable.language", r"\bconfig(?:\.[A-Za-z_]\w*)+"),
        _rule("variable.other", r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"),
        _rule("constant.numeric", r"\b[0-9]+\b"),
        _rule("keyword.operator", r"->|\.\.\.|\.\.|==|!=|<=|>=|[-+*/%<>=@]"),
    ]
    return {
        "$schema": "https://raw.githubusercontent.com/martinring/tmlanguage/master/tmlanguage.json",
        "name": "ucpl",
        "scopeName": "source.ucpl",
        "fileTypes": ["ucpl"],
        "patterns": patterns,
        "repository": {"text": text, "hole": hole},
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(grammar(), indent=2) + "\n", encoding="utf-8")
