"""A TextMate grammar applied as an editor does.

Line by line, at each place the pattern that matches first, and a stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

Rule = Mapping[str, Any]


@frozen
class Scoped:
    """Characters start ..

    Stop of a text, and the innermost scope that names them.
    """

    start: int
    stop: int
    scope: str


def tokenised(grammar: Rule, text: str) -> list[Scoped]:
    """Everything that has a scope, in order.

    If one is inside another, both are there, the outer one first.
    """
    found: list[Scoped] = []
    stack: list[Rule] = []
    start = 0
    for line in text.split("\n"):
        _line(grammar, line, start, stack, found)
        start += len(line) + 1
    return found


def rules(grammar: Rule) -> Iterator[Rule]:
    """Every rule, those of the repository too."""
    waiting = [*grammar["patterns"], *grammar.get("repository", {}).values()]
    while waiting:
        rule = waiting.pop()
        yield rule
        waiting += rule.get("patterns", ())


def _line(grammar: Rule, line: str, start: int, stack: list[Rule], found: list[Scoped]) -> None:
    place = 0
    while place <= len(line):
        match, rule, ends = _first(grammar, stack, line, place)
        if match is None:
            return
        _scopes(rule, match, start, ends, found)
        if ends:
            stack.pop()
        elif "begin" in rule:
            stack.append(rule)
        if match.end() == place and not ends and "begin" not in rule:
            place += 1  # a pattern that matches nothing: continue
        else:
            place = match.end()


def _first(grammar: Rule, stack: Sequence[Rule], line: str, place: int) -> tuple[re.Match[str] | None, Rule, bool]:
    """The match that begins first.

    Of several at one place, that of the first rule. The end of an open rule comes first.
    """
    inner = stack[-1]["patterns"] if stack else grammar["patterns"]
    candidates = [(re.compile(stack[-1]["end"]).search(line, place), stack[-1], True)] if stack else []
    for rule in inner:
        rule = grammar["repository"][rule["include"][1:]] if "include" in rule else rule
        candidates.append((re.compile(rule.get("match") or rule["begin"]).search(line, place), rule, False))
    matches = [c for c in candidates if c[0] is not None]
    return min(matches, key=lambda c: c[0].start() if c[0] else 0, default=(None, {}, False))


def _scopes(rule: Rule, match: re.Match[str], start: int, ends: bool, found: list[Scoped]) -> None:
    captures = rule.get("endCaptures" if ends else "beginCaptures", rule.get("captures", {}))
    if "name" in rule:
        found.append(Scoped(start + match.start(), start + match.end(), rule["name"]))
    for number, capture in captures.items():
        if match.start(int(number)) >= 0:
            found.append(Scoped(start + match.start(int(number)), start + match.end(int(number)), capture["name"]))
