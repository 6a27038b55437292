"""Places at which names are read as words of the language.

The lexer asks per place, so the sets are per place too: `value` is a clause after a pattern and a name elsewhere. The
printer quotes by these sets; a test compares them with the grammar. They have the words of all versions, so that a name
is written alike in each.
"""

from __future__ import annotations

import re

from ucpl.errors import fail
from ucpl.language.source import Source

__all__ = [
    "AXIS_WORDS", "BRACKET_WORDS", "CLAUSE_WORDS", "DIM_WORDS", "ELEMENT_TYPES", "FILL_WORDS", "INSTEAD",
    "LACKED_WORDS", "LAYOUT_WORDS", "MEMBER_WORDS", "MODEL_WORDS", "NONE_WORDS", "PATTERN_WORDS", "SPLIT_WORDS",
    "NUMBERED", "USUAL_AXES", "HOLE", "is_dotted", "quote", "unquote",
]  # fmt: skip

USUAL_AXES = ("tp", "pp", "dp", "ep", "cp", "edp", "sp", "fsdp")  # names of mesh axes that authors use

_KEEP = "in a file of version 1, whose layout extends this one"
INSTEAD = {  # of each word that version 2 does without
    "buckets": "the number is in the flat buffer: flat(each, n)",
    "domain": f"write the line {_KEEP}",
    "exact": f"take it out, so that a cast that can lose is refused; or write the line {_KEEP}",
    "freeze": "take it out, and give --freeze NAME with the command",
    "max": f"write the line {_KEEP}",
    "train": "take it out, and give --train NAME with the command",
}
CLAUSE_WORDS = frozenset(
    {"at", "on", "in", "as", "dtype", "lossy", "exact", "value", "when", "buckets", "same", "mean", "sum", "max", "any"}
)
AXIS_WORDS = frozenset({"pad", "trim", "copies", "flat", "each"})  # wherever an axis can begin; of labels
BRACKET_WORDS = AXIS_WORDS | CLAUSE_WORDS  # of the axes in brackets: after one of them a clause is a word here too
PATTERN_WORDS = BRACKET_WORDS | {"none", "like"}  # of the axes outside brackets
NONE_WORDS = frozenset({"none"})  # for definitions that an extending layout can remove
DIM_WORDS = frozenset({"dtype", "is", "when"}) | NONE_WORDS  # among the dims of a tensor
LACKED_WORDS = frozenset({"dtype", "for", "without"})  # among the dims that a state lacks
SPLIT_WORDS = frozenset({"chunk", "spread"})  # after `@`
MEMBER_WORDS = frozenset({"all", "from"}) | NONE_WORDS  # the first member of a group
LAYOUT_WORDS = frozenset(  # at the start of a statement in a layout
    {
        "let",
        "dim",
        "assert",
        "mesh",
        "domain",
        "index",
        "file",
        "framework",
        "group",
        "state",
        "derive",
        "fill",
        "blob",
        "use",
    }
)
FILL_WORDS = frozenset({"state"})  # after `fill`
MODEL_WORDS = frozenset({"let", "dim", "dtype", "alias", "state", "assert", "index", "use", "group"})  # … in a model

ELEMENT_TYPES = frozenset(
    "f64 f32 f16 bf16 f8_e4m3fn f8_e5m2 f8_e8m0fnu f4_e2m1fn i64 i32 i16 i8 u64 u32 u16 u8 bool c64 c128".split()  # noqa: SIM905
)


# ---- quoted texts ----------------------------------------------------------------------------------------------------


HOLE = re.compile(r'\{((?:"(?:[^"\\]|\\.)*"|[^{}:"])*)(?::([^{}]*))?\}')  # `{expr:format}` in a template
NUMBERED = re.compile(r"\{([A-Za-z_]\w*)(?:\[([^\[\]{}]+)\])?\}")  # `{l}`, `{l[3..]}` in a tensor's name

_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
_ESCAPE = re.compile(r"\\(u\{([0-9A-Fa-f]{1,6})\}|.)")
_HALF = re.compile("[\ud800-\udfff]")  # surrogates: no encoding of texts has them alone
_PLAIN = {'"': '"', "\\": "\\", "n": "\n", "t": "\t", "r": "\r"}
_UNPRINTED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def is_dotted(name: str) -> bool:
    """True if a name needs no quotes: identifiers, with dots between."""
    return _DOTTED.match(name) is not None


def quote(text: str) -> str:
    """The text as a string of the language.

    Characters that do not print are written by their numbers.
    """
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(_UNPRINTED.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text) + '"'


def unquote(literal: str, source: Source, start: int) -> str:
    """Characters of a string (with its quotes).

    `start` is its place in the source. Raises: UcplError E006, on an escape that the language does not have; E021 on
    half a character.
    """
    body = literal[1:-1]

    def character(match: re.Match[str]) -> str:
        number, plain = match[2], _PLAIN.get(match[1])
        if number is not None and int(number, 16) <= 0x10FFFF:
            return chr(int(number, 16))
        if plain is not None:
            return plain
        place = source.span(start + 1 + match.start(), start + 1 + match.end())
        fail("E006", f"`{match[0]}` is not an escape of the language", source.label(place, "not an escape"))

    value = _ESCAPE.sub(character, body) if "\\" in body else body
    if _HALF.search(value):
        place = source.span(start, start + len(literal))
        fail("E021", "a quoted text holds half a character", source.label(place, "no file can be written with it"))
    return value
