"""The refused line, its statement and the body around it."""

from __future__ import annotations

import re

from ucpl.language.source import SKELETON, open_brackets
from ucpl.language.words import CLAUSE_WORDS, LAYOUT_WORDS, MODEL_WORDS, USUAL_AXES
from ucpl.records import frozen

__all__ = ["RefusedLine", "comma_above", "standing", "standing_call"]

_LINE_MAX = 400  # characters of a line that is looked at: no person wrote a longer one
_LINES_MAX = 20  # of a statement, above and below
_CLAUSES = CLAUSE_WORDS | {"of", "is", "key", "order", "drop", "freeze", "train", "extends"}
_CLAUSE = re.compile(rf"[ \t]*(?:{'|'.join(sorted(_CLAUSES))})\b(?![ \t]*[=.:\[])")
_STATEMENT = re.compile(
    rf"[ \t]*(?:(?:{'|'.join(sorted(LAYOUT_WORDS | MODEL_WORDS | {'model', 'layout', 'plan', 'from'}))})[ \t]+[\w\"]"
    r"|[\w.\"]+(?:\[[^]]*\])?[ \t]*(?P<sign>:|=[^=])|\})"
)


@frozen
class RefusedLine:
    """A refused line with its statement and the body around it."""

    place: str  # l: a layout, m: a model, t: outside both, h: at the version, c: a single call
    before: str  # of the statement, lines above
    line: str  # without its indentation and its comment
    column: int  # of the refusal, from 0; at most the line's length
    after: str  # the comment, and lines of the statement below
    axes: tuple[str, ...]
    tensors: tuple[str, ...] = ()


def standing(text: str, place: int, header: bool) -> RefusedLine | None:
    """The line of a refusal.

    None for a line that no person wrote. `header`: the version is not read yet.
    """
    begin = text.rfind("\n", 0, place) + 1
    stop = text.find("\n", place)
    stop = len(text) if stop < 0 else stop
    if stop - begin > _LINE_MAX:
        return None
    indent = len(text[begin:stop]) - len(text[begin:stop].lstrip(" \t"))
    code = _without_comment(text[begin + indent : stop])
    first, opened = _statement_start(text, begin)
    last = _statement_stop(text, first, stop)
    inner = [at for at in opened if text[at] == "{"]
    head = text[text.rfind("\n", 0, inner[-1]) + 1 : inner[-1]].split() if inner else []
    kind = (
        "h" if header or re.match(r"ucpl\b", code) else {"model": "m", "layout": "l"}.get(head[0] if head else "", "t")
    )
    return RefusedLine(
        kind,
        text[first:begin],
        code,
        max(0, min(place - begin - indent, len(code))),
        text[begin + indent + len(code) : last],
        _axes(text),
        _tensors(text) if kind == "m" else (),
    )


def standing_call(text: str, place: int) -> RefusedLine | None:
    """The line of a refused call, such as a command line gives.

    It is one line, with nothing around it.
    """
    if len(text) > _LINE_MAX or "\n" in text:
        return None
    return RefusedLine("c", "", text, min(place, len(text)), "", USUAL_AXES)


def comma_above(text: str, place: int) -> int | None:
    """The comma that ends the line above a refused line.

    The refused line begins as a statement does, outside of brackets.
    """
    begin = text.rfind("\n", 0, place) + 1
    above = text.rfind("\n", 0, max(0, begin - 1)) + 1
    code = _without_comment(text[above : max(0, begin - 1)])
    stop = text.find("\n", place)
    here = text[begin : stop if stop >= 0 else len(text)]
    begins = _STATEMENT.match(here)
    if not code.endswith(",") or len(here) > _LINE_MAX or begins is None:
        return None
    sign, word = (begins["sign"] or "")[:1], code.split()[0]
    if (sign == ":" and word == "state") or (sign == "=" and word in ("let", "dim")):  # these may continue so
        return None
    opened = open_brackets(text, begin)
    return above + len(code) - 1 if not opened or text[opened[-1]] == "{" else None


def _without_comment(line: str) -> str:
    for match in SKELETON.finditer(line):
        if match[0].startswith("#"):
            return line[: match.start()].rstrip()
    return line.rstrip()


def _statement_start(text: str, begin: int) -> tuple[int, list[int]]:
    """Begin of a line's statement, and the brackets that are open there."""
    opened = open_brackets(text, begin)
    for _ in range(_LINES_MAX):
        if not begin or not ((opened and text[opened[-1]] != "{") or _CLAUSE.match(text, begin)):
            break
        above = text.rfind("\n", 0, begin - 1) + 1
        if text[above : begin - 1].rstrip().endswith("{"):
            break
        begin = above
        opened = open_brackets(text, begin)
    return begin, opened


def _statement_stop(text: str, first: int, stop: int) -> int:
    """End of the line that closes the brackets of a statement."""
    end = stop
    for _ in range(_LINES_MAX):
        opened = open_brackets(text[first:end], end - first)
        if not opened or text[first + opened[-1]] == "{":
            return end
        if end >= len(text):
            break
        below = text.find("\n", end + 1)
        end = len(text) if below < 0 else below
    return stop


def _axes(text: str) -> tuple[str, ...]:
    """The mesh axes that a text has, and the usual ones."""
    said = re.findall(r"^[ \t]*mesh[ \t]+(?:\w+:)?([\w \t]+)", text, re.MULTILINE)
    names = [name for line in said[:8] for name in line.split()[:16] if name.isascii()]
    return tuple(dict.fromkeys((*names, *USUAL_AXES)))


def _tensors(text: str) -> tuple[str, ...]:
    """Names of tensors of the text's models, a thousand at most."""
    found = re.findall(r"^[ \t]*([A-Za-z_][\w.]{0,80})[ \t]*:", text, re.MULTILINE)
    return tuple(dict.fromkeys(name for name in found[:1000] if name.isascii()))
