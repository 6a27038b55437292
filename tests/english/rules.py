"""Words and forms that no text of the project uses, each with a replacement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

DOCSTRING_WORDS = 12
ENTRY_WORDS = 25


class Finding(NamedTuple):
    """One forbidden word or form. `line` counts from the first line of the text, which is 0."""

    line: int
    found: str
    instead: str


class Rule(NamedTuple):
    """One pattern, and its replacement in words."""

    pattern: re.Pattern[str]
    instead: str


def _words(pattern: str, instead: str) -> Rule:
    return Rule(re.compile(rf"(?<![\w'-])(?:{pattern})(?![\w-])", re.IGNORECASE), instead)


VERB = (
    "sa(?:y|ys|id|ying)|tells?|told|asks?|asked|knows?|known|knew|sees?|seen|shows?|shown|names?|decides?|decided|means?"
    "|depends? on|matters?"
)
BEFORE = r"of|on|about|by|with|for|from|to|in|as|than|and|or|but|is|are|after|before"

WORDS = (
    _words("told", "reported, named, given, written; as a noun: the report, the value"),
    _words("tells?|telling", "reports, prints, returns, distinguishes"),
    _words("said", "stated, printed, written"),
    _words("stands|stood", "is stored, is written, is; for `stands for`: means"),
    _words(r"(?:hang|hangs|hung|hanging)(?: \w+)? on", "depends on"),
    _words(r"(?:go|goes|went|going|gone) on(?! (?:to|until)\b)", "resumes, continues"),
    _words("of which", "a sentence of its own, or `whose`"),
    _words("amiss", "wrong, damaged; as a noun: an issue"),
    _words(r"let(?:s|ting)? go(?: of)?", "releases, drops, frees"),
    _words(r"(?:take|takes|took|taken|taking) apart|takes? (?:it|them) apart", "parses, splits"),
    _words(r"whole(?! numbers?\b)|wholly", "complete, entire, full, all of"),
    _words("beside", "next to; for an addition: besides, with, and"),
    _words("by itself|by themselves", "alone, without help; or leave it out"),
    _words("ever", "leave it out"),
    _words("thereof", "of it, or the noun"),
    _words(r"(?:it|they|that|this|which|files?|tensors?|there|data|values?|what) (?:lie|lies|lay)", "is stored, is at"),
    _words(r"lies? (?:in|at|under|on|within|behind|there|where|outside|inside)", "is stored in, is at"),
)  # fmt: skip
CLAUSES = (
    _words("nor", "`neither ... nor`, or `and not`, or a sentence of its own"),
    Rule(re.compile(r"(?<![\w'-])(?:[Ww]hat)(?![\w-])"), "the noun: `the value`, `the tensors`, `everything that`"),
    Rule(
        re.compile(
            rf"(?<![\w'-])(?:{VERB}|{BEFORE}) (?:who|whoever|how(?! (?:to|many|much)\b)|where|whether)(?![\w-])"
        ),
        "the noun: `the rank that`, `the way`, `the place`; or a condition with `if`",
    ),
    Rule(
        re.compile(rf"(?<![\w'-])(?:{VERB}|than|but|is|are) (?:which|why)(?![\w-])"),
        "the noun: `the tensors that`, `the reason`",
    ),
)
STARTS = re.compile(
    r"(?:What|Which|Whichever|Whoever|Who|Whose|Where|How|Whether|Wherever|Whatever)(?![\w:-])(?! to\b)"
)
START = "the noun first, or a condition with `If`"
SENTENCE = re.compile(r"[^.!?:]*(?:[.!?:](?=[\w.!?:])[^.!?:]*)*[.!?:]*", re.DOTALL)
CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*(?:\n[^`\n]*)?`|https?://\S+|\]\([^)]*\)", re.DOTALL)
OPENING = " \t\n-*#>|\"'([0123456789)."


def _blank(match: re.Match[str]) -> str:
    """Code is no English: a word of the same length and lines is in its place."""
    return re.sub(r"[^\n]", "_", match.group())


def check_text(text: str) -> Iterator[Finding]:
    """Findings of one text: forbidden words, clauses as nouns, first words of sentences."""
    plain = CODE.sub(_blank, text)
    found: dict[int, Finding] = {}

    def add(place: int, word: str, instead: str) -> None:
        found.setdefault(place, Finding(plain.count("\n", 0, place), " ".join(word.split()), instead))

    for sentence in SENTENCE.finditer(plain):
        is_question = sentence.group().rstrip().endswith("?")
        if not is_question:
            start = sentence.start() + len(sentence.group()) - len(sentence.group().lstrip(OPENING))
            if match := STARTS.match(plain, start):
                add(start, match.group(), START)
            for place, word, instead in _matches(CLAUSES, sentence.group()):
                if word.lower() != "nor" or "neither" not in sentence.group()[:place].lower():
                    add(sentence.start() + place, word, instead)
    for place, word, instead in _matches(WORDS, plain):
        add(place, word, instead)
    end = 0
    for place in sorted(found):
        if place >= end:  # one finding, if two patterns share a word
            yield found[place]
            end = place + len(found[place].found)


def _matches(rules: tuple[Rule, ...], text: str) -> Iterator[tuple[int, str, str]]:
    text = re.sub(r"\s", " ", text)
    return ((match.start(), match.group(), rule.instead) for rule in rules for match in rule.pattern.finditer(text))


def check_docstring(text: str) -> Iterator[Finding]:
    """Findings of a docstring. Its first line has at most 12 words."""
    first = CODE.sub("x", text.strip().partition("\n")[0])
    if (count := len(first.split())) > DOCSTRING_WORDS:
        yield Finding(
            0, f"{count} words", f"a first line of at most {DOCSTRING_WORDS} words: a noun phrase or an imperative"
        )
    yield from check_text(text)


def check_entry(text: str) -> Iterator[Finding]:
    """Findings of a line of the changelog, which has at most 25 words."""
    if (count := len(text.split())) > ENTRY_WORDS:
        yield Finding(0, f"{count} words", f"one effect for a user in at most {ENTRY_WORDS} words")
    yield from check_text(text)


def check_name(name: str) -> Iterator[Finding]:
    """Findings of the name of a test: forbidden words alone, since a name has no sentences."""
    text = name.replace("_", " ")
    for rule in WORDS:
        for match in rule.pattern.finditer(text):
            yield Finding(0, match.group(), rule.instead)
