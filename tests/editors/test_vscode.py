"""The extension for VS Code.

Its files fit together, and its colours are those of the language.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from editors import textmate as made
from tests.docs.blocks import ROOT
from tests.editors.textmate import rules, tokenised
from ucpl.cli.verbs import VERBS
from ucpl.language.source import Source, version_of
from ucpl.language.tables import tables
from ucpl.resources import VERSIONS

FOLDER = ROOT / "editors" / "vscode"
PACKAGE = json.loads((FOLDER / "package.json").read_text(encoding="utf-8"))
GRAMMAR: dict[str, Any] = json.loads((FOLDER / "syntaxes" / "ucpl.tmLanguage.json").read_text(encoding="utf-8"))
FILES = [p for f in ("specs", "benchmarks", "examples") for p in sorted((ROOT / f).rglob("*.ucpl"))]
WORDS = ("keyword.", "storage.")  # scopes of words of the language


def patterns() -> list[str]:
    return [rule[key] for rule in rules(GRAMMAR) for key in ("match", "begin", "end") if key in rule]


def test_its_patterns_are_regular_expressions() -> None:
    assert len(patterns()) > 15
    for pattern in patterns():
        re.compile(pattern)
        assert "(?<=" not in pattern or re.search(r"\(\?<=[^*+]*?\)", pattern), "editors want a fixed width behind them"


def test_its_words_are_those_of_the_language() -> None:
    """Only the grammar's keywords are in a pattern that colours keywords."""
    coloured: set[str] = set()
    for rule in rules(GRAMMAR):
        scopes = [rule.get("name", ""), *(c["name"] for c in rule.get("captures", {}).values())]
        if any(s.startswith(WORDS) for s in scopes):
            text = re.sub(r"\(\?[<=!:]+|\\[a-zA-Z]|\[[^\]]*\]", " ", rule["match"])
            coloured |= set(re.findall(r"[a-z]{2,}", text))
    written = {
        t.pattern.value
        for version in VERSIONS
        for t in tables(version).lark.terminals
        if t.pattern.type == "str" and t.pattern.value.isalpha()
    }
    policies = {"same", "mean", "sum", "any"}
    assert coloured - made.keywords() == set()
    assert made.keywords() - coloured == set()
    assert written | policies >= made.keywords() - policies and made.keywords() >= written


def read(text: str) -> list[tuple[int, str, bool]]:
    """The places of names and words of the language, by the parser."""
    parser = tables(version_of(text))
    words = {t.name for t in parser.lark.terminals if t.pattern.type == "str" and t.pattern.value.isalpha()}
    source = Source("", text)
    parser.joiner.source = source
    parser.recorder.begin(source)
    going = parser.lark.parse_interactive(text + "\n", start="start")
    found = []
    for token in going.lexer_thread.lex(going.parser_state):
        going.feed_token(token)
        if token.type in words or token.type == "NAME":
            found.append((token.start_pos or 0, str(token), token.type in words))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_spec_has_the_colours_that_the_parser_would_give_it(path: Any) -> None:
    """The parser's words have a keyword's colour, and its names have none."""
    text = path.read_text(encoding="utf-8")
    coloured = {s.start: s.scope for s in tokenised(GRAMMAR, text)}
    wrong = []
    for start, word, is_word in read(text):
        scope = coloured.get(start, "")
        if is_word != scope.startswith(WORDS):
            wrong.append((text.count("\n", 0, start) + 1, word, "word" if is_word else "name", scope))
    assert wrong == []


def test_strings_comments_and_templates_are_distinguished() -> None:
    text = 'x = h as "a.{l:02}\\n" # in a "comment"'
    found = {text[s.start : s.stop]: s.scope for s in tokenised(GRAMMAR, text)}
    assert found["{"].startswith("punctuation.section.template.begin")
    assert found["l"] == "variable.other.ucpl" and found[":02"] == "constant.numeric.ucpl"
    assert found["\\n"] == "constant.character.escape.ucpl"
    assert found['# in a "comment"'] == "comment.line.number-sign.ucpl"
    assert found["as"] == "keyword.other.ucpl" and "in" not in found


def test_a_text_that_does_not_end_colours_no_other_line() -> None:
    text = 'x = h as "a.{l\nlet y = 1'
    found = {text[s.start : s.stop]: s.scope for s in tokenised(GRAMMAR, text)}
    assert found["let"] == "keyword.control.ucpl"


def test_the_extension_names_files_that_are_there_and_starts_the_verb() -> None:
    (language,) = PACKAGE["contributes"]["languages"]
    (grammar,) = PACKAGE["contributes"]["grammars"]
    for name in (PACKAGE["main"], language["configuration"], grammar["path"]):
        assert (FOLDER / name).is_file(), name
    assert language["extensions"] == [".ucpl"] and grammar["scopeName"] == GRAMMAR["scopeName"]
    configuration = json.loads((FOLDER / language["configuration"]).read_text(encoding="utf-8"))
    assert configuration["comments"]["lineComment"] == "#"
    re.compile(configuration["wordPattern"])
    code = (FOLDER / PACKAGE["main"]).read_text(encoding="utf-8")
    assert 'args: ["lsp"]' in code and "lsp" in VERBS
    said = set(re.findall(r'settings\(\)\.get\("(\w+)"\)', code))
    assert {f"ucpl.{name}" for name in said} == set(PACKAGE["contributes"]["configuration"]["properties"])
    assert {c["command"] for c in PACKAGE["contributes"]["commands"]} == set(
        re.findall(r'registerCommand\("([\w.]+)"', code)
    )
    needed = set(re.findall(r'require\("([a-z-]+)', code)) - {"path", "vscode"}
    assert needed == set(PACKAGE["dependencies"])


def test_a_folder_that_is_not_trusted_does_not_say_what_is_started() -> None:
    trust = PACKAGE["capabilities"]["untrustedWorkspaces"]
    assert (trust["supported"], trust["restrictedConfigurations"]) == ("limited", ["ucpl.command"])
