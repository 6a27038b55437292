"""Messages for parse errors: the place, the fault, and the remedy.

A hint is keyed by texts with the same slip. A slip is recognised by the parser's state and the token that it fails on;
the parser's stack is left out, so one text serves every depth of nesting.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from functools import cache

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.language.source import CLOSING, Source, open_brackets
from ucpl.language.words import CLAUSE_WORDS, LAYOUT_WORDS, MODEL_WORDS

__all__ = ["GENERAL", "HINTS", "diagnose", "expected_kinds"]

GENERAL = "no slip that is known"  # name of a diagnostic whose remedy is the code's own

_IN_LAYOUT = "layout x() of y {\n  %s\n}"
_IN_MODEL = "model y {\n  %s\n}"


def _layout(*lines: str) -> list[str]:
    return [_IN_LAYOUT % line for line in lines]


def _model(*lines: str) -> list[str]:
    return [_IN_MODEL % line for line in lines]


# Slips for which no line can be made; the others are in `suggestions`.
HINTS: dict[str, list[str]] = {
    "an axis is a name: write `dim x = 4` in the model, then `x` here; a bare size there, `w : h 4`, is `_` here": _layout(
        "a = h 4", "a = (4 h)", "a = 4 h", "a = h@t 4"
    ),
    'a text of keys has double quotes, as in: let layer = "layers.{l}."': _layout("let a = b.{c}."),
    "texts stand in double quotes": _layout("file f = torch"),
    'a file has a form and a name, as in: file weights = torch "model.pt"': _layout('file "b"'),
    "a layout names its parameters in parentheses, none as `()`: layout x(tp, pp = 1) of y { … }": ["layout x {\n}"],
    "a layout names its model: layout x() of y { … }; of any model: `of any`": [
        "layout x() extends z() {\n}",
    ],
    "a statement starts with its word, such as `mesh` or `file`, or names a tensor and continues with `=`": _layout(
        "as x", "something dp"
    ),
    "give the tensor its stored axes after the `=`; one without any has `()`, one that is not stored has `none`": (
        _layout("state * =", "a =")
    ),
    "a cut names a mesh axis, as in @tp or @chunk(dp, 2), whose degree is a parameter; sizes: @pp[7, 8, 9]": _layout(
        "a = h@4", "a = h@chunk", "a = h@chunk b", "a = h@chunk as", "a = h@chunk(4)", "a = h@spread", "a = h@spread(4)"
    ),
    "parts end to end are in parentheses, as in `qkv = (q: g d + k: g d) h`": _layout("a = b: h", "a = h b: h"),
    "a label is the name of a tensor, without indices, as in `qkv[l] = (q: g d + k: g d) h`": _layout("a = (b[l]: h)"),
    "`at` names a mesh axis and a coordinate of it, as in `at pp[0]`, or `at pp[-1]` for the last": _layout(
        "a = h at t", "a = h at t as"
    ),
    "`pad` has a third word for other than zeros: `live` or `undefined`, as in pad(vocab, 8, live)": _layout(
        "a = pad(h, 2, -4)"
    ),
    "`pad` takes an axis and the number that its size becomes a multiple of, as in pad(vocab, 128 * tp)": _layout(
        "a = pad v h", "a = pad(v) h"
    ),
}

_FRIENDLY = {
    "_NL": "the end of the line",
    "$END": "the end of the text",
    "NAME": "a name",
    "STRING": "a quoted text",
    "INT": "a number",
    "COMPARE": "a comparison",
}

_OPERATORS = {"OR", "AND", "COMPARE", "PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "DOT"}
_STATEMENTS = LAYOUT_WORDS | MODEL_WORDS | {"from", "model", "layout", "plan"}


def diagnose(error: UnexpectedInput, source: Source, parser: Lark) -> Diagnostic:
    """The diagnostic of a text that the parser refuses."""
    if isinstance(error, UnexpectedToken):
        return _unexpected(error, source, parser)
    place = error.pos_in_stream or 0
    if isinstance(error, UnexpectedCharacters):
        return _unreadable(source, place)
    return _diagnostic("E001", "the text ends too early", source.label(source.span(place, place)))


def _diagnostic(code: str, message: str, *labels: Label, notes: tuple[str, ...] = (), remedy: str = "") -> Diagnostic:
    return Diagnostic(code, message, labels, notes, remedy or catalogue()[code].remedy, None if remedy else GENERAL)


def _unreadable(source: Source, place: int) -> Diagnostic:
    """A character that no token starts with."""
    text = source.text
    if text[place] == '"':
        stop = text.find("\n", place)
        label = source.label(source.span(place, stop if stop >= 0 else len(text)), "it starts here")
        return _diagnostic("E005", "a quoted text does not end on its line", label)
    if text[place].isdigit() and text[place].isascii():
        match = re.compile(r"[0-9A-Za-z_]+").match(text, place)
        stop = match.end() if match else place + 1
        label = source.label(source.span(place, stop), "neither a number nor a name")
        return _diagnostic(
            "E019",
            f"`{text[place:stop]}` starts like a number and continues like a name",
            label,
            remedy=_number_and_name(text[place:stop]),
        )
    character = text[place]
    shown = character if character.isprintable() else f"U+{ord(character):04X}"
    return _diagnostic(
        "E004",
        f"`{shown}` means nothing in this language",
        source.label(source.span(place, place + 1)),
        remedy=_lookalike(character),
    )


def _number_and_name(word: str) -> str:
    """The remedy for `4K`, `8GB` and `2nd`."""
    unit = re.fullmatch(r"(\d{1,6})([kKMG])(i?)(?:[bB])?", word)
    if unit is None:
        return "put a space between them, or quotes around a name that starts with a digit"
    base = 1024 if unit[3] else 1000
    number = int(unit[1]) * base ** ("kmg".index(unit[2].lower()) + 1)
    more = f", or {int(unit[1]) * 1024 ** ('kmg'.index(unit[2].lower()) + 1)}" if base == 1000 else ""
    return f"numbers are in digits alone: write {number}{more}"


# Signs that stand for one of the language's, where the tables of Unicode do not say so.
_LIKE = {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "*",
    "·": "*",
    "÷": "/",
    "→": "->",
    "⋅": "*",
    "∗": "*",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
}
_LETTERS = dict(
    zip("асеорхуіјѕԁһАВЕКМНОРСТХαορνΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "aceopxyijsdhABEKMHOPCTXaopvABEZHIKMNOPTYX", strict=True)
)


def _lookalike(character: str) -> str:
    """Replacement for a sign or letter that resembles one of the language's.

    Empty for any other.
    """
    if character.isascii():
        return ""
    like = _LIKE.get(character) or _LETTERS.get(character) or unicodedata.normalize("NFKC", character)
    if not like.isascii() or not like.strip():
        return ""
    name = unicodedata.name(character, "a sign that has no name")
    if like == "*":
        return f"write `*` between numbers, and a space between dims: this one is U+{ord(character):04X}, {name}"
    return f"write `{'..' if like == '...' else like}`: this one is U+{ord(character):04X}, {name}"


def _unexpected(error: UnexpectedToken, source: Source, parser: Lark) -> Diagnostic:
    token = error.token
    start = min(token.start_pos if token.start_pos is not None else len(source.text), len(source.text))
    at_end = token.type == "$END"
    if at_end:
        start = len(source.text.rstrip())
    stop = start + (1 if token.type in ("_NL", "$END") else len(token))
    opener = next(reversed(open_brackets(source.text, start)), None)
    if at_end and opener is not None:
        return _unclosed(source, opener)
    if _slip_of(error)[0] in _before_header(parser):
        text = source.text[start:stop].split("\n")[0]
        label = source.label(source.span(start, start + len(text)), "the version should stand here")
        return _diagnostic("E002", "the text does not name its version of the language", label)

    expected = expected_kinds(error)
    message = f"unexpected `{token}`"
    if at_end or token.type == "_NL":
        message = f"the {'text' if at_end else 'line'} ends too early"
    labels = [source.label(source.span(start, stop), _here(expected))]
    bracket = "{" if opener is None else source.text[opener]
    hint = ""
    if opener is not None and bracket != "{":
        a_clause = str(token) in CLAUSE_WORDS
        if a_clause or "\n" in source.text[opener:start]:
            labels.append(source.label(source.span(opener, opener + 1), f"this `{bracket}` is still open"))
        if a_clause:
            hint = (
                f'close the bracket with `{CLOSING[bracket]}` before the clause; as a name it needs quotes: "{token}"'
            )
    elif str(token) in ")]}" and (opener is None or bracket == "{"):
        hint = f"`{token}` closes nothing that is open"
    hint = (
        hint
        or _misspelt(source.text, start, token)
        or _table(parser).get(_slip_of(error))
        or _meant(token, expected)
        or _name_wanted(token, expected)
        or _clauses(token, expected)
        or _called(source.text, start)
        or _of_shapes(source.text, start)
    )
    return _diagnostic("E001", message, *labels, remedy=hint)


# Forms of the contents of brackets, by the text in front of them.
_CALLED = {
    r"\bpad$": "`pad` takes an axis, a number that its size becomes a multiple of, and perhaps `live` or `undefined`, as in"
    " pad(vocab, 128 * tp)",
    r"@(?:chunk|spread)$": "a cut takes a mesh axis, and perhaps a number of units without a name, as in @spread(tp, 64)",
    r"\bcopies$": "`copies` has a number, as in `(g copies(4) d)`",
    r"\bat[ \t]+\w+$": "`at` has one coordinate, as in `at pp[0]` or `at pp[-1]`: a second place of a tensor is a second line",
}


def _called(text: str, start: int) -> str:
    """The form of the contents of the brackets around a place."""
    line = text.rfind("\n", 0, start) + 1
    if re.search(r"\bcopies[ \t]*$", text[line:start]):
        return _CALLED[r"\bcopies$"]
    for opener in reversed(open_brackets(text, start)):
        for before, form in _CALLED.items() if opener >= line else ():
            if re.search(before, text[line:opener]):
                return form
    return ""


def _of_shapes(text: str, start: int) -> str:
    """The remedy for `dim h = 4, y`: a dim without a size."""
    line = text[text.rfind("\n", 0, start) + 1 : start]
    found = re.match(r"\s*dim\b(?:.*,)?\s*([A-Za-z_]\w*)\s*$", line)
    return (
        f"a dim has a size, `{found[1]} = ...`; without a `dim` line, its size is read from the shapes of a checkpoint"
        if found
        else ""
    )


def _misspelt(text: str, start: int, token: Token) -> str:
    """The intended first word of a line with an error after it."""
    word = text[text.rfind("\n", 0, start) + 1 : start].strip(" \t")
    if not word.isidentifier():
        return ""
    if word in ("model", "layout", "plan") and any(text[i] == "{" for i in open_brackets(text, start)):
        return f"close the body with `}}` in a line above: a {word} is not inside of another statement"
    if word == "alias" and token.type == "NAME":
        return "second names are lines of the model, as in: alias head = embed"
    if str(token) in ("=", ":", "[", ".") and word in LAYOUT_WORDS | MODEL_WORDS:
        return f'`{word}` starts a statement of its own here; as a name it needs quotes: "{word}"'
    if token.type not in ("NAME", "STRING", "INT", "STAR") or word in _STATEMENTS:
        return ""
    near = difflib.get_close_matches(word[:40], sorted(_STATEMENTS), n=1, cutoff=0.75)
    return f"did you mean `{near[0]}`?" if near else ""


def _clauses(token: Token, expected: set[str]) -> str:
    """Clauses that can be in the place of an unknown one."""
    if token.type != "NAME" or not {"IN", "AS"} <= expected:
        return ""
    return f"the clauses are {', '.join(f'`{word}`' for word in sorted(CLAUSE_WORDS))}"


def _unclosed(source: Source, opener: int) -> Diagnostic:
    bracket = source.text[opener]
    label = source.label(source.span(opener, opener + 1), "opened here")
    return _diagnostic("E007", f"`{bracket}` is never closed", label, remedy=f"close it with `{CLOSING[bracket]}`")


def expected_kinds(error: UnexpectedToken) -> set[str]:
    """Kinds of token that are possible there, but those for slips."""
    accepted: set[str] = error.interactive_parser.accepts() if error.interactive_parser else error.expected  # type: ignore[no-untyped-call]
    return {name for name in accepted if name != "SLIP"}


def _here(expected: set[str]) -> str:
    """Tokens that are possible there, if they are few."""
    expected = expected - _OPERATORS or expected  # an expression can always continue: no news
    if not 1 <= len(expected) <= 4:
        return ""
    names = sorted(_friendly(name) for name in expected)
    return (", ".join(names[:-1]) + " or " if names[:-1] else "") + f"{names[-1]} can stand here"


_SIGNS = {
    "LPAR": "(",
    "RPAR": ")",
    "LSQB": "[",
    "RSQB": "]",
    "LBRACE": "{",
    "RBRACE": "}",
    "EQUAL": "=",
    "COLON": ":",
    "COMMA": ",",
    "DOT": ".",
    "CUT": "@",
    "PLUS": "+",
    "MINUS": "-",
    "STAR": "*",
    "SLASH": "/",
    "PERCENT": "%",
    "ARROW": "->",
    "DOTS": "..",
    "REST": "...",
}


def _friendly(kind: str) -> str:
    return _FRIENDLY.get(kind) or f"`{_SIGNS.get(kind) or kind.lower()}`"


def _meant(token: Token, expected: set[str]) -> str:
    """The keyword that a word nearly is."""
    if token.type != "NAME":
        return ""
    words = [kind.lower() for kind in expected if kind.isalpha() and kind not in _FRIENDLY and kind not in _SIGNS]
    near = difflib.get_close_matches(token[:40], words, n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else ""


def _name_wanted(token: Token, expected: set[str]) -> str:
    """A keyword where a name should stand."""
    if token.type.isalpha() and str(token).isidentifier() and token.type != "NAME" and "STRING" in expected:
        return f'`{token}` is a word of the language here; as a name it needs quotes: "{token}"'
    return ""


def _slip_of(error: UnexpectedInput) -> tuple[object, str]:
    state = getattr(error, "state", None)
    token = getattr(error, "token", None)
    kind = getattr(token, "type", "")
    return getattr(state, "position", state), f"{kind}{token}" if kind == "SLIP" else kind


def _failure(parser: Lark, text: str) -> UnexpectedInput | None:
    try:
        parser.parse(text + "\n", start="start")
    except UnexpectedInput as error:
        return error
    except UcplError:
        pass
    return None


@cache
def _before_header(parser: Lark) -> frozenset[object]:
    """The states of the parser in which only the header can stand."""
    failures = (_failure(parser, text) for text in ("let a = 1", "\nlet a = 1"))
    return frozenset(_slip_of(error)[0] for error in failures if error is not None)


@cache
def _table(parser: Lark) -> dict[tuple[object, str], str]:
    """Hints by slip.

    They are made at the first error of a process: a text without errors never pays for them.
    """
    table: dict[tuple[object, str], str] = {}
    for hint, texts in HINTS.items():
        for text in texts:
            for before in ("ucpl 1\n", "ucpl 1\nlet a = 1\n"):  # the parser's state knows the first statement
                error = _failure(parser, before + text)
                if error is not None:
                    table.setdefault(_slip_of(error), hint)
    return table
