"""The line to write instead of a refused one, by habits.

A row proposes, the parser decides: an offered line can be read in the place of the refused one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from lark.exceptions import UnexpectedInput, UnexpectedToken

from ucpl.errors import UcplError
from ucpl.language.habits import Habit, habits, words
from ucpl.language.source import SKELETON, Source, open_brackets
from ucpl.language.tables import Tables
from ucpl.language.words import CLAUSE_WORDS, ELEMENT_TYPES, LAYOUT_WORDS, MODEL_WORDS
from ucpl.records import frozen

__all__ = ["Instead", "RefusedLine", "comma_above", "instead_of", "standing", "standing_call"]

_LINE_MAX = 400  # characters of a line that is looked at: no person wrote a longer one
_LINES_MAX = 20  # of a statement, above and below
_ROUNDS_MAX = 6  # habits in one line
_AXES_USUAL = ("tp", "pp", "dp", "ep", "cp", "edp", "sp", "fsdp")
_CLAUSES = CLAUSE_WORDS | {"of", "is", "key", "order", "drop", "freeze", "train", "extends"}
_CLAUSE = re.compile(rf"[ \t]*(?:{'|'.join(sorted(_CLAUSES))})\b(?![ \t]*[=.:\[])")
_STATEMENT = re.compile(
    rf"[ \t]*(?:(?:{'|'.join(sorted(LAYOUT_WORDS | MODEL_WORDS | {'model', 'layout', 'plan', 'from'}))})[ \t]+[\w\"]"
    r"|[\w.\"]+(?:\[[^]]*\])?[ \t]*(?P<sign>:|=[^=])|\})"
)
_OWN = CLAUSE_WORDS | ELEMENT_TYPES | LAYOUT_WORDS | MODEL_WORDS | {"from", "like", "buffer", "frozen", "x", "name"}
_FRAMES = {"l": "ucpl 1\nlayout x() of y {\n", "m": "ucpl 1\nmodel y {\n", "t": "ucpl 1\n", "h": "", "c": ""}


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


@frozen
class Instead:
    """Offer of a habit's row: the reason, and perhaps a line."""

    why: str
    line: str = ""

    @property
    def remedy(self) -> str:
        lines = self.line.replace("\n", "\n       ")
        return f"{self.why}\nwrite: {lines}" if lines else self.why


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
    return RefusedLine("c", "", text, min(place, len(text)), "", _AXES_USUAL)


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
    return tuple(dict.fromkeys((*names, *_AXES_USUAL)))


def _tensors(text: str) -> tuple[str, ...]:
    """Names of tensors of the text's models, a thousand at most."""
    found = re.findall(r"^[ \t]*([A-Za-z_][\w.]{0,80})[ \t]*:", text, re.MULTILINE)
    return tuple(dict.fromkeys(name for name in found[:1000] if name.isascii()))


# ---- rows ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _compiled(pattern: str, axes: tuple[str, ...], tensors: tuple[str, ...]) -> re.Pattern[str]:
    meanings = {
        "<N>": r"(?:[A-Za-z_]\w*)",
        "<P>": r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)",
        "<S>": r"[ \t]",
        "<A>": _one_of(axes),
        "<T>": _one_of(tensors),
    }
    for sign, meaning in meanings.items():
        pattern = pattern.replace(sign, meaning)
    return re.compile(pattern)


def _one_of(names: tuple[str, ...]) -> str:
    """Pattern of one of these names; without names, of nothing."""
    return f"(?:{'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})" if names else r"(?!)"


def _proposals(at: RefusedLine) -> Iterator[tuple[Habit, str, str]]:
    """Proposals of the rows for a line.

    Each is the row, the reason, and the line with the match replaced (or nothing).
    """
    for habit in habits():
        if at.place not in habit.place:
            continue
        for match in _compiled(habit.pattern, at.axes, at.tensors).finditer(at.line):
            if not match.start() <= at.column or at.line[match.end() : at.column].strip():
                continue
            made = habit.applied(match)
            why = match.expand(habit.why)
            yield (
                habit,
                why,
                "" if made is None else (at.line[: match.start()] + made + at.line[match.end() :]).strip(),
            )


# ---- the parser's say ------------------------------------------------------------------------------------------------


def _refusal(at: RefusedLine, line: str, parser: Tables) -> int | None:
    """Place where the parser refuses the statement with this line, or None.

    It counts from the line's start.
    """
    frame = _FRAMES[at.place]
    text = frame + at.before + line + at.after
    text += "\n}" * sum(text[i] == "{" for i in open_brackets(text, len(text)))
    start = len(frame) + len(at.before)
    source = Source("<line>", text)
    parser.joiner.source = source
    parser.recorder.begin(source)
    try:
        parser.lark.parse(text + "\n", start="call_text" if at.place == "c" else "start")
    except UnexpectedToken as error:
        place = error.token.start_pos
        return len(text) - start if place is None or error.token.type == "$END" else place - start
    except UnexpectedInput as error:
        return (error.pos_in_stream or 0) - start
    except UcplError as error:
        label = error.diagnostics[0].labels[0]
        above = sum(len(one) + 1 for one in text.split("\n")[: (label.line or 1) - 1])
        return above + (label.column or 1) - 1 - start
    return None


def instead_of(at: RefusedLine, parser: Tables) -> Instead | None:
    """The line to write instead, and the reason.

    Only the reason is given if no row has a line that can be read.
    """
    whys: list[str] = []
    seen = {at.line}
    reason = ""
    opened = max(0, _opens(at, at.line))
    for _ in range(_ROUNDS_MAX):
        further: tuple[str, str, int] | None = None
        for habit, why, line in _proposals(at):
            reason = reason or ("; ".join([*whys, why]) if not habit.offers else "")
            if not line or line in seen:
                continue
            seen.add(line)
            if _opens(at, line) > opened:
                continue
            refused = _refusal(at, line, parser)
            if refused is None or refused > len(line) + _first_of(at.after):
                return Instead("; ".join(dict.fromkeys([*whys, why])), line)
            if further is None and len(line) - refused < len(at.line) - at.column:
                further = why, line, refused
        if further is None:
            break
        whys.append(further[0])
        at = RefusedLine(at.place, at.before, further[1], max(0, further[2]), at.after, at.axes, at.tensors)
    if at.place not in "hc":
        reason = words().of(at.line, _OWN, True) or reason or words().of(at.line, _OWN, False)
    return Instead(reason) if reason else None


def _opens(at: RefusedLine, line: str) -> int:
    """Number of brackets that the statement leaves open with this line."""
    text = at.before + line + at.after
    return sum(text[i] in "([" for i in open_brackets(text, len(text)))


def _first_of(below: str) -> int:
    """End of the first word below a line.

    A refusal behind it is not this line's fault.
    """
    found = re.match(r"\s*(?:#[^\n]*\s*)*\S+", below)
    return found.end() if found else len(below)
