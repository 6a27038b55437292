"""Texts of the tree that the check reads: docstrings, comments, messages, pages and names of tests."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.english.rules import Finding, check_docstring, check_entry, check_name, check_text

ROOT = Path(__file__).parents[2]
SKIPPED = re.compile(
    r"tests/fixtures/|tests/english/|tests/[^/]+/fixtures/|docs/_site/|docs/FORMATS\.md$|benchmarks/figures/"
)
SPECS = ("specs/", "examples/", "benchmarks/")
NO_TEXTS = {"after", "before", "call", "example", "file", "id", "keep", "of", "pattern", "place", "test"}
TOML_VALUE = re.compile(r"""^\s*(?P<key>[\w"'.-]+)\s*=\s*(?P<quote>\"{3}|'{3}|"|')(?P<text>.*)""")
MESSAGE_WORDS = 3


class Place(NamedTuple):
    """One finding in one file of the tree."""

    path: str
    line: int
    found: str
    instead: str


def tracked_files() -> list[str]:
    """Files of the checkout that the check reads."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and not SKIPPED.search(name)]
    return [name for name in names if Path(name).suffix in READERS and (ROOT / name).is_file()]


def check_file(path: str) -> list[Place]:
    """Findings of one file, in the order of its lines."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return sorted(Place(path, line, found, instead) for line, found, instead in READERS[Path(path).suffix](path, text))


def _at(line: int, findings: Iterator[Finding]) -> Iterator[Finding]:
    yield from (Finding(line + offset, found, instead) for offset, found, instead in findings)


def read_python(path: str, text: str) -> Iterator[Finding]:
    """Docstrings and comments; messages of the product; names of tests."""
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body and isinstance(first := node.body[0], ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    docstrings.add(first.value)
                    yield from _at(first.lineno, check_docstring(first.value.value))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield from _at(node.lineno, check_name(node.name.removeprefix("test_")))
    if path.startswith("ucpl/"):
        yield from _messages(tree, docstrings)
    yield from _comments(text)


def _messages(tree: ast.Module, docstrings: set[ast.Constant]) -> Iterator[Finding]:
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                parts |= set(values)
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "_" for v in values)
            case ast.Constant(value=str(text)) if node not in docstrings and node not in parts:
                pass
            case _:
                continue
        if len(re.findall(r"[A-Za-z_]+(?= )", text)) >= MESSAGE_WORDS - 1:
            yield from _at(node.lineno, check_text(text))


def _comments(text: str) -> Iterator[Finding]:
    """Comments; those on lines that follow each other are one text."""
    block: list[str] = []
    begin = 0
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        words = token.string.lstrip("#! ")
        is_alone = not token.line[:column].strip()
        if not (block and is_alone and line == begin + len(block)):
            yield from _at(begin, check_text("\n".join(block)))
            block, begin = [], line
        block.append(words)
    yield from _at(begin, check_text("\n".join(block)))


def read_page(path: str, text: str) -> Iterator[Finding]:
    """Paragraphs of a page; in the changelog, one text per entry."""
    if path != "CHANGELOG.md":
        yield from _at(1, check_text(text))
        return
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        follow = next((n for n in range(number, len(lines)) if not lines[n].startswith("  ")), len(lines))
        if line.startswith("- "):
            yield from _at(number, check_entry("\n".join([line[2:], *lines[number:follow]])))


def read_toml(path: str, text: str) -> Iterator[Finding]:
    """Comments and texts of a table; texts of several lines are code."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.lstrip().startswith("#"):
            yield from _at(number, check_text(line.lstrip("# ")))
        elif match := TOML_VALUE.match(line):
            if len(match["quote"]) > 1:
                rest = match["text"]
                while match["quote"] not in rest and number < len(lines):
                    rest = lines[number]
                    number += 1
            elif match["key"].strip("\"'") not in NO_TEXTS:
                yield from _at(number, check_text(match["text"].rstrip("\"',")))


def read_spec(path: str, text: str) -> Iterator[Finding]:
    """Comments of a spec that ships or is an example; indented lines of a comment are commands."""
    if path.startswith(SPECS):
        for number, line in enumerate(text.split("\n"), 1):
            if "#" in line and not line.startswith("#   "):
                yield from _at(number, check_text(line.partition("#")[2].strip()))


READERS = {".py": read_python, ".md": read_page, ".toml": read_toml, ".ucpl": read_spec}
