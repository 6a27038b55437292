"""The line to write instead of a refused one.

Two sources propose lines, and the parser decides: an offered line can be read in the place of the refused one.

- `suggestions.toml` has the rows, those for forms of another version first: a pattern of a refused line that covers
  the place of the refusal, and `instead` or `call` for the match. A row without either gives `why` alone. In a pattern
  `<N>` is a name, `<P>` a path of names, `<A>` an axis of a mesh of the text, `<T>` a tensor of its models. `place`: l
  in a layout, m in a model, t outside both, h at the version, c in a call. A test reads `example` and `write`.
- `_edits` has the general rules, which know no statement: the tokens that the parser expects, the words and signs of
  other tools for those of this language, the nearest word by spelling, quotes, brackets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from re import Match

from attrs import evolve
from lark.exceptions import UnexpectedInput, UnexpectedToken

from ucpl.errors import UcplError
from ucpl.language.foreign_words import table, words
from ucpl.language.refused_lines import RefusedLine
from ucpl.language.slips import expected_kinds
from ucpl.language.source import Source, open_brackets
from ucpl.language.tables import Tables
from ucpl.language.words import CLAUSE_WORDS, ELEMENT_TYPES, LAYOUT_WORDS, MODEL_WORDS
from ucpl.records import frozen

__all__ = ["Instead", "SuggestionRow", "instead_of", "rows"]

_ROUNDS_MAX = 6  # proposals in one line
_POWER_DIGITS = 4  # of a base and its exponent: 2 ** 20 is computed, 10 ** 1000 is not
_FRAMES = {"l": "ucpl 1\nlayout x() of y {\n", "m": "ucpl 1\nmodel y {\n", "t": "ucpl 1\n", "h": "", "c": ""}
_OWN = CLAUSE_WORDS | ELEMENT_TYPES | LAYOUT_WORDS | MODEL_WORDS | {"from", "like", "buffer", "frozen", "x", "name"}


@frozen
class Instead:
    """Offer: the reason, and perhaps a line."""

    why: str
    line: str = ""

    @property
    def remedy(self) -> str:
        lines = self.line.replace("\n", "\n       ")
        return f"{self.why}\nwrite: {lines}" if lines else self.why


@frozen
class SuggestionRow:
    """One row of the table."""

    why: str  # may name groups of the match, as \\1
    pattern: str
    example: str
    write: str = ""  # empty: the offer is `why` alone
    instead: str | None = None
    call: str = ""
    place: str = "lmt"
    version: int = 0  # of the text; 0: any

    def applied(self, match: Match[str]) -> str | None:
        """Replacement of the match; None if the row has none."""
        if self.call:
            return _CALLS[self.call](match)
        return None if self.instead is None else match.expand(self.instead)


# ---- the table -------------------------------------------------------------------------------------------------------


@cache
def rows() -> tuple[SuggestionRow, ...]:
    """All rows, in the order in which they are tried."""
    return tuple(SuggestionRow(**row) for kind in ("version", "row") for row in table()[kind])  # type: ignore[attr-defined]


# ---- the parser's answer ---------------------------------------------------------------------------------------------


def _refusal(at: RefusedLine, parser: Tables) -> tuple[int, UnexpectedInput | None] | None:
    """Place where the parser refuses the statement, and its error.

    None for a statement that can be read. The place counts from the line's start.
    """
    frame = _FRAMES[at.place]
    text = frame + at.before + at.line + at.after
    text += "\n}" * sum(text[i] == "{" for i in open_brackets(text, len(text)))
    start = len(frame) + len(at.before)
    source = Source("<line>", text)
    parser.joiner.source = source
    parser.recorder.begin(source, parser.version)
    try:
        parser.lark.parse(text + "\n", start="call_text" if at.place == "c" else "start")
    except UnexpectedToken as error:
        place = error.token.start_pos
        return (len(text) if place is None or error.token.type == "$END" else place) - start, error
    except UnexpectedInput as error:
        return (error.pos_in_stream or 0) - start, error
    except UcplError as error:
        label = error.diagnostics[0].labels[0]
        above = sum(len(one) + 1 for one in text.split("\n")[: (label.line or 1) - 1])
        return above + (label.column or 1) - 1 - start, None
    return None


def _opens(at: RefusedLine) -> int:
    """Number of brackets that the statement leaves open."""
    text = at.before + at.line + at.after
    return sum(text[i] in "([" for i in open_brackets(text, len(text)))


def _first_of(below: str) -> int:
    """End of the first word below a line.

    A refusal behind it is not this line's fault.
    """
    found = re.match(r"\s*(?:#[^\n]*\s*)*\S+", below)
    return found.end() if found else len(below)


# ---- proposals of the rows -------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _compiled(pattern: str, axes: tuple[str, ...], tensors: tuple[str, ...]) -> re.Pattern[str]:
    meanings = {
        "<N>": r"(?:[A-Za-z_]\w*)",
        "<P>": r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)",
        "<A>": _one_of(axes),
        "<T>": _one_of(tensors),
    }
    for sign, meaning in meanings.items():
        pattern = pattern.replace(sign, meaning)
    return re.compile(pattern)


def _one_of(names: tuple[str, ...]) -> str:
    """Pattern of one of these names; without names, of nothing."""
    return f"(?:{'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})" if names else r"(?!)"


def _by_rows(at: RefusedLine, version: int) -> Iterator[tuple[str, str]]:
    """Proposals of the rows.

    Each is the reason, and the line with the match replaced (or nothing).
    """
    for row in rows():
        if at.place not in row.place or row.version not in (0, version):
            continue
        axes, tensors = at.axes * ("<A>" in row.pattern), at.tensors * ("<T>" in row.pattern)
        for match in _compiled(row.pattern, axes, tensors).finditer(at.line):
            if not match.start() <= at.column <= match.end():
                continue
            made = row.applied(match)
            line = "" if made is None else (at.line[: match.start()] + made + at.line[match.end() :]).strip()
            yield match.expand(row.why), line


# ---- general proposals -----------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|\d+|\.{2,3}|[-+=:<>!&|*/%^~?]+|[^\s\w]')
_RUN = re.compile(r"""[^\s"'(),\[\]=@+|;]+""")  # of a path or a name without its quotes
_ODD_NAME = re.compile(r"[A-Za-z_][\w.]*(?:[-/][\w.]+|\.\d[\w.]*)+")
_VARIABLE = re.compile(r"\$\{\{?[ \t]*([\w.]+)[ \t]*\}?\}|\$([A-Za-z_][\w.]*)")  # of a shell, HCL or a pipeline
_LIST = re.compile(r'[\w."* ,@]+')
# Signs that people type for others; each is tried, and the parser decides.
_SIGNS = {
    "=": (" == ", ": ", " : "),
    ":": (" = ", "..", ", ", " as "),
    "==": (" = ",),
    "===": ("==",),
    "<>": ("!=",),
    ":=": (" = ",),
    "=>": (" -> ", " as ", " = "),
    "->": (" as ", " = "),
    "|": (" + ",),
    "&": (" + ", " and "),
    ",": (" + ",),
    ";": (" + ",),
    ":-": ("..-",),
    "::": (".. by ",),
    "||": (" or ",),
    "&&": (" and ",),
    "!": ("not ",),
    "~": ("not ", " none"),
    "..": ("...",),
    "...": ("..",),
    "…": ("...", ".."),
    "*": ("all", "..."),
}
_NOTHING = frozenset(",;$&!*\\|~:")  # signs that other languages write where this one has none
_OPERATORS = {"OR", "AND", "COMPARE", "PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "DOT", "DIV"}
_NAMING = ("model", "layout", "plan", "group", "file", "alias", "blob", "index")  # words before a new name
_ONE_A_LINE = ("alias", "blob", "group", "index")
_JOINING = {"of", "is", "by", "order", "not", "and", "or", "over"}
_CONDITION = re.compile(r"^assert\b|\bwhen\b")


@frozen
class _Slip:
    """A refused place with the words and signs that the parser expects."""

    line: str
    column: int
    place: str
    expected: frozenset[str]
    axes: tuple[str, ...]

    def put(self, start: int, stop: int, text: str) -> str:
        """The line with another text in a place.

        An empty one leaves one space, or none at a bracket.
        """
        before, after = self.line[:start], self.line[stop:]
        if not text:
            before, after = before.rstrip(), after.lstrip()
            text = "" if before[-1:] in ("", "(", "[") or after[:1] in ("", ")", "]", ",", ".") else " "
        if text[:1] in (" ", ",", ":"):
            before = before.rstrip()
        if text[-1:] == " ":
            after = after.lstrip()
        return (before + text + after).strip()

    def opened(self, place: int) -> str:
        """The innermost open bracket, with the character before it.

        Empty if no bracket is open at that place.
        """
        found = open_brackets(self.line, place)
        return self.line[max(0, found[-1] - 1) : found[-1] + 1] if found else ""

    def may_negate(self, start: int) -> bool:
        """True if `not` can be at that place.

        It is in a condition, or first in brackets.
        """
        if self.opened(start)[-1:] == "[":
            return self.line[:start].rstrip()[-1:] == "["
        return not self.line[start - 1 : start].strip(" (") and _CONDITION.search(self.line) is not None

    def without(self, sign: str, start: int) -> str:
        """The line with spaces for a sign, from a place on."""
        parts = (" " if one == sign else one for one in re.split(f"({_TOKEN.pattern})", self.line[start:]) if one)
        rest = re.sub(r"(?<=[(\[]) | (?=[)\]])", "", " ".join("".join(parts).split()))
        before = self.line[:start].rstrip()
        return before + ("" if before[-1:] in ("", "(", "[") else " ") + rest


def _expected(error: UnexpectedInput | None, parser: Tables) -> frozenset[str]:
    """Words and signs that the parser expects at its error.

    A quoted text is `STRING`.
    """
    if not isinstance(error, UnexpectedToken):
        return frozenset()
    written = {t.name: t.pattern.value for t in parser.lark.terminals if t.pattern.type == "str"}
    kinds = expected_kinds(error)
    return frozenset(written.get(kind, kind) for kind in (kinds - _OPERATORS or kinds))


def _edits(slip: _Slip) -> Iterator[tuple[str, str]]:
    """Proposals of the general rules, the surest first.

    Each is the reason, and the line.
    """
    for one in _VARIABLE.finditer(slip.line):
        if one.start() <= slip.column <= one.end():
            yield "a number is named without signs around it", slip.put(one.start(), one.end(), one[1] or one[2])
    tokens = list(_TOKEN.finditer(slip.line))
    here = next((i for i, one in enumerate(tokens) if one.end() > slip.column), len(tokens))
    around = [tokens[i] for i in (here, here - 1) if 0 <= i < len(tokens)]
    if not slip.expected:  # refused after it was parsed: the place is that of a larger part
        around = [one for one in tokens if one.end() > slip.column][:6]
    above = [one for one in tokens[1:here] if one[0] in words().keywords]
    for one in dict.fromkeys((*around, *tokens[:1], *reversed(above))):
        if one[0][0].isalpha() or one[0][0] == "_":
            yield from _other_word(slip, one)
    for one in around:
        yield from _quoted(slip, one)
        yield from _other_brackets(slip, one)
    for one in around:
        rules = (_left_out, _other_sign) if one[0] == "," else (_other_sign, _left_out)
        for rule in rules:
            yield from rule(slip, one)
    yield from _inserted(slip)


def _other_word(slip: _Slip, token: Match[str]) -> Iterator[tuple[str, str]]:
    """A word of this language in the place of another."""
    text, start, stop = token[0], token.start(), token.end()
    begins = LAYOUT_WORDS | MODEL_WORDS | {"model", "layout", "plan", "from"} if not start else frozenset()
    possible = slip.expected | begins | (CLAUSE_WORDS | {"none"} if start and stop <= slip.column else set())
    for own in words().keywords.get(text, ()):
        if (
            own.split()[0] in possible
            or (own in "01" and "INT" in possible)
            or (own == "==" and _CONDITION.search(slip.line[:start]))
        ):
            yield f"the word for `{text}` is `{own}` here", slip.put(start, stop, own)
            if not start and slip.line[stop : stop + 1] in (":", "="):  # of YAML: `dims: l = 4`
                yield f"the word for `{text}` is `{own}` here", slip.put(start, stop + 1, own)
    kind = words().dtypes.get(text)
    if "dtype" in slip.expected and (kind or text in ELEMENT_TYPES):
        yield "the element type comes after `dtype`", slip.put(start, stop, f"dtype {kind or text}")
    if kind:
        yield f"the element type `{text}` is called `{kind}`", slip.put(start, stop, kind)
    if slip.expected == {"model"} and start == slip.column:
        yield f"`model` is written here, and not `{text}`", slip.put(start, stop, "model")
    near = difflib.get_close_matches(text[:40], sorted(one for one in slip.expected | begins if one.islower()), 1, 0.7)
    if near and near[0] != text:
        yield f"did you mean `{near[0]}`?", slip.put(start, stop, near[0])


def _other_sign(slip: _Slip, token: Match[str]) -> Iterator[tuple[str, str]]:
    """Another sign, or the only possible word, in place of a sign."""
    text, start, stop = token[0], token.start(), token.end()
    if text[0].isalnum() or text[0] in '_"()[]{}':
        return
    others = sorted(_SIGNS.get(text, ()), key=lambda one: one == (" : " if slip.opened(start) else ": "))
    if len(slip.expected) == 1 and set(text) <= set("=:->~"):
        others += [f" {one} " for one in slip.expected if one not in ("NAME", "INT", "STRING", "_NL", "]", ")", "@")]
    for other in others:
        word = other.strip()
        if (
            (word == "==" and not _CONDITION.search(slip.line[:start]))
            or (word == "not" and not slip.may_negate(start))
            or (word == "all" and not re.search(r"^group\b.*[ =]$", slip.line[:start]))
            or (word == "as" and text == ":" and slip.line[stop:].lstrip()[:1] != '"')
            or (word in ("as", "and", "or") and word not in slip.expected and not _CONDITION.search(slip.line[:start]))
            or (word == "..." and slip.line[:start].rstrip()[-1:] != "=" and text == "*")
            or (text in ",;" and ":" not in slip.line[:start].rpartition("(")[2])
        ):
            continue
        why = f"`{word}` is written here, and not `{text}`"
        if slip.line.count(text) > 1 and text in (",", "|", "&", "="):
            parts = re.split(f"({_TOKEN.pattern})", slip.line[start:])
            rest = "".join(other if one == text else one for one in parts if one)
            yield why, re.sub(r" +(?=:)|(?<=\S) +(?= )", "", slip.line[:start].rstrip(" ") + rest)
        yield why, slip.put(start, stop, other)


def _quoted(slip: _Slip, token: Match[str]) -> Iterator[tuple[str, str]]:
    """A file, a key or an odd name in quotes; axes without."""
    text = token[0]
    if text[0] == '"':
        if " " in text or text.strip('"') in words().dtypes.keys() | ELEMENT_TYPES:
            yield "dims, axes and words have no quotes", slip.put(token.start(), token.end(), text.strip('"'))
        return
    found = next((one for one in _RUN.finditer(slip.line) if one.start() <= token.start() < one.end()), None)
    if found is None or not any(one.isalpha() for one in found[0]):
        return
    name = found[0].rstrip(":")
    if name in _OWN:
        return
    if "STRING" in slip.expected and "NAME" not in slip.expected:
        why = "a file and a key have double quotes"
    elif slip.line[: found.start()].strip() in ("", *_NAMING) and _ODD_NAME.fullmatch(name):
        why = "a name with other signs than letters, digits, `_` and `.` has double quotes"
    else:
        return
    yield why, slip.line[: found.start()] + f'"{name}"' + slip.line[found.start() + len(name) :]


def _other_brackets(slip: _Slip, token: Match[str]) -> Iterator[tuple[str, str]]:
    """Another pair of brackets, or none around a list."""
    pair = next((one for one in ("()", "[]", "{}", "<>") if token[0] == one[0]), "")
    start = token.start()
    stop = slip.line.find(pair[1], start) if pair else -1
    if stop < 0:
        return
    before, inner, after = slip.line[:start], slip.line[start + 1 : stop], slip.line[stop + 1 :]
    if inner[:1] == '"' and "STRING" in slip.expected:
        yield f"`{pair}` is not written here", f"{before.rstrip()} {inner}{after}"
    elif before[-1:] == "." and pair in ("{}", "[]"):
        yield "an index comes in brackets", f"{before[:-1]}[{inner}]{after}"
    elif before.startswith("group ") and pair == "[]" and before[-1:].isalnum():
        yield "a member of a group is a tensor with all of its layers", re.sub(r"(?<=\w)\[[^\]]*\]", "", slip.line)
    elif slip.place == "m" and re.search(r"\b(?:pad|flat|trim|copies)$", before):
        return
    elif (before[-1:].isalnum() and not slip.opened(start)) or ":" in inner:
        for other in ("()", "[]"):
            if other != pair:
                yield f"`{other}` is written here, and not `{pair}`", f"{before}{other[0]}{inner}{other[1]}{after}"
    elif _LIST.fullmatch(inner) and before[-1:] in ("", " ", "=", ":", "("):
        yield f"`{pair}` is not written here", " ".join(f"{before} {inner} {after}".split())


def _left_out(slip: _Slip, token: Match[str]) -> Iterator[tuple[str, str]]:
    """The line without a sign, or in two lines."""
    text, start, stop = token[0], token.start(), token.end()
    opened = slip.opened(start)
    if text in (")", "]", "}") and not opened:
        yield f"`{text}` closes nothing that is open", slip.put(start, stop, "")
    is_after_word = slip.line[:start].rstrip().rpartition(" ")[2] in _OWN | {"framework", "dtype"}
    is_before_body = text == "=" and slip.line[stop:].lstrip()[:1] == "{"
    if (start == 0 and text == "-") or text == "--" or (text in ("=", ":") and is_after_word) or is_before_body:
        yield f"`{text}` is not written here", slip.put(start, stop, "")
    if (
        not set(text) <= _NOTHING
        or (text == ":" and stop < len(slip.line))
        or (text == "*" and not opened and slip.place == "l")  # a product of axes is one axis, and no list of them
        or (text == "," and opened[:1].isalnum() and len(opened) == 2)  # of a call
        or (text == "!" and slip.line[stop : stop + 1].strip())
        or "::" in text
    ):
        return
    if text == ";" and stop < len(slip.line) and slip.line.split(maxsplit=1)[0] in ("dim", "let"):
        listed = re.sub(r"[ \t]*;[ \t]*(?:(?:dim|let)\b[ \t]*)?", ", ", slip.line.rstrip("; \t"))
        yield "several numbers of one line have commas between them", listed
    if text == "," and (listed := _lines_of_one_word(slip.line)):
        yield f"each `{slip.line.split(maxsplit=1)[0]}` has a line of its own", listed
    why = f"`{text}` has no meaning here; dims have spaces between, and a statement ends with its line"
    if slip.line.count(text) > 1 and text in (",", "*"):
        yield why, slip.without(text, start)
        yield why, slip.without(text, 0)
    yield why, slip.put(start, stop, "")
    if (text == ";" and stop < len(slip.line)) or re.match(r"[ \t]*[\w.]+[ \t]*:", slip.line[stop:] * (text == ",")):
        yield "a statement ends with its line", f"{slip.line[:start].rstrip()}\n{slip.line[stop:].strip()}"


def _lines_of_one_word(line: str) -> str:
    """The lines of `index l = l@pp, m = m@pp`; empty for another line."""
    word, _, rest = line.partition(" ")
    parts = re.split(r",[ \t]*(?=[A-Za-z_][\w.]*[ \t]*=)", rest)
    return "\n".join(f"{word} {part.strip()}" for part in parts) if word in _ONE_A_LINE and len(parts) > 1 else ""


def _inserted(slip: _Slip) -> Iterator[tuple[str, str]]:
    """The line with a sign that it lacks.

    A word is inserted if no other can be there.
    """
    before, after = slip.line[: slip.column].rstrip(), slip.line[slip.column :].lstrip()
    follows = next(iter(re.findall(r"\w+|\S", after)), "")
    last = next(iter(re.findall(r"[\w-]+$", before)), "")
    foreign = words().advice.keys() | words().keywords.keys() | _OWN | _JOINING
    is_named = bool(follows) and (follows[0].isalnum() or follows[0] in '_"') and follows not in foreign
    is_listed = slip.line.startswith("state ") and _may_be_state(follows) and _may_be_state(last)
    if (
        "[" in slip.expected
        and slip.place == "l"
        and last not in foreign
        and re.match(r"[\w.]+[ \t]+[A-Za-z_]\w*[ \t]*=", slip.line)
    ):
        yield "an index comes in brackets", re.sub(r"^([\w.]+)[ \t]+(\w+)", r"\1[\2]", slip.line)
    if (
        slip.expected == {",", ":"}
        and slip.place == "m"
        and is_named
        and last not in foreign
        and re.fullmatch(r"[\w. ]+", slip.line)
    ):
        yield "`:` is missing", f"{before} : {after}"
    if follows in ("reversed", "dealt") and "order" in slip.expected:
        yield "`order` is missing", f"{before} order {after}"
        return
    for sign in sorted(
        slip.expected - {"NAME", "INT", "STRING", "_NL", "..", "...", "-", "+"}, key=lambda one: (one != "=", one)
    ):
        shown = sign
        if sign == "(" and slip.place == "c" and after:
            text, shown, after = "(", "()", after + ")"
        elif sign == "(" and last:
            text, shown = ("() " if after[:1].isalnum() or after[:1] in ("{", "-") else "()"), "()"
        elif sign in (")", "]") and len(open_brackets(slip.line, len(slip.line))) > 0:
            text = sign if after[:1] in ("", ")", "]", ",", "@") else f"{sign} "
        elif sign == "," and (is_listed or (is_named and last not in foreign)):
            text = ", "
        elif sign == "=" and slip.place == "c" and follows.isdigit():
            text = " = "
        elif sign == "{" and not after:
            text = " {"
        elif sign == "@" and follows in slip.axes:
            text = " @"
        elif (
            len(slip.expected) == 1
            and sign not in ("(", ")", "]", ",", "{", "@")
            and (sign not in (":", "=") or (is_named and last not in foreign))
        ):
            text = "[" if sign == "[" else f" {sign} "
        else:
            continue
        yield f"`{shown}` is missing", (before + text + after).strip()


def _may_be_state(word: str) -> bool:
    """True for the name of a state.

    It may be a word of another tool.
    """
    return word.isidentifier() and word not in CLAUSE_WORDS | LAYOUT_WORDS | _JOINING


# ---- the search ------------------------------------------------------------------------------------------------------


def instead_of(at: RefusedLine, parser: Tables) -> Instead | None:
    """The line to write instead, and the reason.

    Only the reason is given if no proposal can be read.
    """
    reasons: list[str] = []
    for with_rows in (True, False):
        found = _search(at, parser, with_rows, reasons)
        if found is not None:
            return found
        if reasons:
            break
    reason = next(iter(reasons), "") or (_advice(at.line, False) if at.place not in "hc" else "")
    return Instead(reason) if reason else None


def _search(at: RefusedLine, parser: Tables, with_rows: bool, reasons: list[str]) -> Instead | None:
    whys: list[str] = []
    seen = {at.line}
    opened = max(0, _opens(at))
    for _ in range(_ROUNDS_MAX):
        refused = _refusal(at, parser)
        expected = _expected(refused[1] if refused else None, parser)
        step: tuple[str, RefusedLine] | None = None
        slip = _Slip(at.line, at.column, at.place, expected, at.axes)
        for proposals in ([_by_rows(at, parser.version)] if with_rows else []) + [_edits(slip)]:
            best = len(at.line) - at.column
            for why, line in proposals:
                if not line:
                    reasons.append("; ".join([*whys, why]))
                if not line or line in seen:
                    continue
                seen.add(line)
                new = evolve(at, line=line)
                if _opens(new) > opened:
                    continue
                refused = _refusal(new, parser)
                if refused is None or refused[0] > len(line) + _first_of(at.after):
                    if line.endswith(","):  # a list of left sides, which the next line would continue
                        continue
                    return Instead("; ".join(dict.fromkeys([*whys, why])), line)
                if len(line) - refused[0] < best:
                    best = len(line) - refused[0]
                    step = why, evolve(new, column=max(0, refused[0]))
            if step is None and with_rows:
                reasons += [advice] if (advice := _advice(at.line, True)) and at.place in "lm" else []
            if step is not None or (with_rows and reasons):
                break
        if step is None:
            return None
        whys.append(step[0])
        at = step[1]
    return None


# A common word is no habit where it is a name: of a tensor on the left, in a path, a class behind `of`, in quotes.
_NAMED = re.compile(r'"[^"]*"?|^\s*(?:state|derive)\b[^=]*|^\s*[\w.-]+(?=\s*(?:\[[^]]*\])?\s*[=:])|\bof\s+\w+')
_LEFT = re.compile(r"^[a-z][\w.]*(?=\s*(?:\[[\w, ]*\])?\s*[=:]\s*\w+\s*[\[@\w])")  # a tensor's own name: `merge : s m`
_COMMON = re.compile(r"(?<![\w-])[A-Za-z_][\w-]*(?![\w.-])")


def _advice(line: str, always: bool) -> str:
    """Advice for the first word of another tool in a line."""
    known = words()
    if always:
        bare = (
            line if line.startswith('"') else re.sub(r'"[^"]*"?', " ", _LEFT.sub(" ", line))
        )  # of JSON the keys stand in quotes
        found = [one for one in re.findall(r"[A-Za-z_][\w-]*", bare) if one in known.always]
    else:
        found = [one for one in _COMMON.findall(_NAMED.sub(" ", line)) if one in known.advice]
    return next((known.advice[one] for one in found if one not in _OWN), "")


# ---- replacements that a template of groups cannot express -----------------------------------------------------------


def _operator(found: Match[str]) -> str | None:
    """`h // n`, `h ** 2` and `x ?? 1` in the words of numbers."""
    left, sign, right = found["left"], found["sign"], found["right"]
    if sign in ("**", "^") and left.isdecimal() and right.isdecimal() and len(left) + len(right) <= _POWER_DIGITS:
        return str(int(left) ** int(right))
    if sign in ("**", "^"):
        return " * ".join([left] * int(right)) if right in ("2", "3", "4") else None
    return f"{'floor' if sign == '//' else 'default'}({left}, {right})"


def _file(found: Match[str]) -> str:
    """A file without its form, or without its name."""
    name, text = found.groups()
    return f"file weights = {name} {text}" if name in ("torch", "safetensors") else f"file {name} = torch {text}"


def _layout(found: Match[str]) -> str:
    """The head of a layout, with its model and parameters in place."""
    head, parameters, model, after = found.groups()
    return f"{head}{parameters or after} {model or 'of any'} {{"


def _number(found: Match[str]) -> str | None:
    """`500_000`, `4,096`, `0x10`, `4.0` and `5e8` in digits."""
    text = found[0].replace("_", "").replace(",", "")
    try:
        value = int(text, 0) if text[:2].lower() in ("0x", "0b", "0o") else float(text)
    except ValueError:
        return None
    return str(int(value)) if value == int(min(value, 2.0**62)) else None


def _dtype(found: Match[str]) -> str | None:
    """An element type as others call it."""
    name = found[0].strip('"').rpartition(".")[2]
    return words().dtypes.get(name, name if name in ELEMENT_TYPES else None)


def _template(found: Match[str]) -> str:
    """`"ln.%d" % l`, `"ln." + str(l)`, `"ln.{}".format(l)` as one template."""
    text, name, rest = found[1], f"{{{found[2]}}}", found[3] or ""
    put, count = re.subn(r"%0?\d*[ds]|\{\}", name, text, count=1)
    return f'"{put if count else text + name}{rest}"'


def _parts(found: Match[str]) -> str | None:
    """`cat(gate: f, up: f)` as `(gate: f + up: f)`.

    None if parts have no labels: they may be tensors.
    """
    return f"({' + '.join(one.strip() for one in found[1].split(','))})" if ":" in found[1] else None


def _cuts(found: Match[str]) -> str:
    """`@(a, b)` as `@a@b`."""
    return "".join(f"@{name}" for name in re.findall(r"\w+", found[0]))


def _cut(found: Match[str]) -> str:
    """`split(v, tp)`, `chunk(v, tp)`, `v:tp` and `@tp v` as `v@tp`."""
    axis, dim = (found["axis1"] or found["axis2"] or found["axis3"]), (found["dim1"] or found["dim2"] or found["dim3"])
    return f"{dim}@chunk({axis})" if found["call"] == "chunk" else f"{dim}@{axis}"


def _nothing(found: Match[str]) -> str:
    """`x is not None` as `x`, and `x is None` as `not x`."""
    return found[1] if "not" in found[2] or "!" in found[2] else f"not {found[1]}"


def _key(found: Match[str]) -> str:
    """`config["a"]` as `config.a`, with its default."""
    default = (found[2] or "").strip()
    own = next((one for one in words().keywords.get(default, ()) if one in "01"), default)
    return f"default(config.{found[1]}, {own})" if own and default not in ("None", "null") else f"config.{found[1]}"


_CALLS: dict[str, Callable[[Match[str]], str | None]] = {
    "cut": _cut,
    "cuts": _cuts,
    "dtype": _dtype,
    "file": _file,
    "key": _key,
    "nothing": _nothing,
    "layout": _layout,
    "number": _number,
    "operator": _operator,
    "parts": _parts,
    "template": _template,
}
