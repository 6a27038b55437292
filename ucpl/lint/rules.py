"""Rules of lint: their ids, remarks, and the comments that silence them.

`# ucpl: allow RULE: reason` at the end of a line, or alone above it, silences a rule for that line; at the first line of
a model or layout for all of it, and at the header `ucpl 2` for the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from ucpl.language.nodes import File
from ucpl.language.source import SKELETON
from ucpl.records import frozen
from ucpl.resources import VERSION

__all__ = ["RULES", "Remark", "old_version", "silenced"]

RULES = {
    "constant-condition": "a number is the value of an `or`, which is 1 or 0",
    "crossed-name": "a key has the words of another tensor, or parts in another order",
    "dead-change": "a plan drops, freezes or trains a name without effect",
    "dead-statement": "a statement has no effect, or contradicts itself, at all sizes",
    "empty-part": "a part of a dim has no elements",
    "empty-range": "a range in brackets has no index",
    "fill-type": "a `fill` has a number that the element type does not hold",
    "foreign-text": "a key or path has a placeholder of another tool, as `%d`",
    "missing-key": "a line has no `as`, and no flat buffer has its tensor",
    "missing-state": "a layout stores no state of some trained tensors",
    "missing-tensor": "a layout has no entry for a tensor of its model",
    "misspelt-state": "a state line has a name that is like a known state",
    "no-effect": "a line of a layout acts on no tensor of the model",
    "old-version": "a file is in version 1 of the language",
    "odd-key": "a key of the config is misspelt, or has a value of another kind",
    "odd-tensor": "a tensor is trained with integers, or has a condition on its own dim",
    "repeated-line": "a line repeats a line of the base, word for word",
    "scale-type": "a scale, or its product, has an unusual element type",
    "stored-twice": "a layout and its base both store a tensor",
    "swappable-parts": "parts of one size are side by side: swapped, they pass every check",
    "swapped-dims": "a tensor has its dims in another order than those of the same dims",
    "uncut-parameter": "a parameter is in no mesh, and cuts nothing",
    "undealt-index": "each rank has all of an index in brackets: no `index` line deals it out",
    "unequal-fills": "two `fill` lines give one tensor different numbers",
    "unknown-kind": "a word is compared with a list that does not have it",
    "unknown-rule": "`ucpl: allow` names a rule that does not exist",
    "unlike-cuts": "parts of one tensor have the same dims, and one of them is not cut",
    "unread-config": "nothing reads the config that is given",
    "unread-dim": "a layout of any model has a name that no model can give",
    "unused-file": "no line is in a `file`",
    "unused-group": "no state line is of a `group`",
    "unused-import": "nothing names an imported model or layout",
    "unused-index": "no line has an `index` in brackets, or its digits",
    "unused-key": "a `key` of a file or `use` is one key for all tensors",
    "unused-mesh": "no line is `on` a second mesh",
    "unused-number": "nothing uses a `let`, a `dim` or a parameter",
    "wrong-scope": "a clause, a group or a template is outside its scope",
}
_ALLOW = re.compile(r"#\s*ucpl:\s*allow\b[ \t]*(.*)")
_LINE = re.compile(r"\(line ([0-9]{1,6})\)")


@frozen
class Remark:
    """A remark about a file.

    `rule` is empty for a remark that no rule makes. `line` counts from 1; 0: it is about the file.
    """

    text: str
    rule: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.text} [{self.rule}]" if self.rule else self.text

    @classmethod
    def of(cls, text: str, rule: str, line: int) -> Remark:
        """A remark at the line that its text names, else at `line`."""
        said = _LINE.search(text)
        return cls(text, rule, int(said[1]) if said is not None else line)


def old_version(text: str, file: File) -> tuple[Remark, ...]:
    """The remark about a file in an older version.

    There is none if a comment silences it.
    """
    if file.version == VERSION:
        return ()
    sentence = (
        f"the file is in version {file.version} of the language: `ucpl fmt --upgrade` writes it in version {VERSION}"
    )
    made = Remark(sentence, "old-version", _header_line(text))
    return tuple(one for one in silenced((made,), text, file) if one is made)


def silenced(remarks: tuple[Remark, ...], text: str, file: File) -> tuple[Remark, ...]:
    """The remarks that no comment of a file's text silences."""
    allowed: dict[int, set[str]] = {}
    unknown: list[Remark] = []
    for line, at, names in _comments(text):
        allowed.setdefault(at, set()).update(names)
        for name in sorted(names - RULES.keys()):
            near = get_close_matches(name, RULES, 1)
            meant = f"Did you mean `{near[0]}`?" if near else "docs/LINT.md lists the rules"
            unknown.append(Remark(f"no rule is called `{name}` (line {line}). {meant}", "unknown-rule", line))
    if not allowed:
        return remarks
    header = _header_line(text)
    starts = [statement.span.line for statement in file.statements]
    kept = []
    for one in remarks:
        around = max((start for start in starts if start <= one.line), default=header)
        if not any(one.rule in allowed.get(line, ()) for line in (one.line, around, header)):
            kept.append(one)
    return (*kept, *unknown)


def _header_line(text: str) -> int:
    return next((n for n, line in enumerate(text.split("\n"), 1) if line.strip().startswith("ucpl")), 1)


def _comments(text: str) -> Iterator[tuple[int, int, set[str]]]:
    """Comments that silence rules.

    Each has its line, the line that it is about, and the rules.
    """
    if "ucpl:" not in text:
        return
    lines = text.split("\n")
    for match in SKELETON.finditer(text):
        found = _ALLOW.match(match[0])
        if found is None:
            continue
        line = text.count("\n", 0, match.start()) + 1
        at = line
        while at < len(lines) and re.match(r"\s*(?:#|$)", lines[at - 1]):
            at += 1
        rules = re.match(r"[\w-]+(?:[ \t]*,[ \t]*[\w-]+)*", found[1])
        yield line, at, set(re.findall(r"[\w-]+", rules[0])) if rules else set()
