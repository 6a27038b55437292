"""The check of English finds each forbidden form, and passes plain sentences."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.english.__main__ import compare, count, total
from tests.english.passages import ROOT, Place, read_page, read_python, read_spec, read_toml
from tests.english.rules import check_docstring, check_entry, check_name, check_text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What was saved does not count.", ["What"]),
        ("Whether a file is there.", ["Whether"]),
        ("Where all shards are gone, convert stops.", ["Where"]),
        ("It reads. Which rank has it is known.", ["Which"]),
        ("The rest of what a target leaves out.", ["what"]),
        ("The file says which tensor moves.", ["says which"]),
        ("It knows where\na tensor is.", ["knows where"]),
        ("A rank is told of it.", ["told"]),
        ("The job goes on.", ["goes on"]),
        ("Bits hang on torch.", ["hang on"]),
        ("Half of the values, of which none moves.", ["of which"]),
        ("The page lies in a file beside the whole plan.", ["lies in", "beside", "whole"]),
        ("A tensor that lies in a file.", ["that lies"]),
        ("Nor is it ever taken apart by itself.", ["Nor", "ever", "taken apart", "by itself"]),
        ("A part thereof is amiss.", ["thereof", "amiss"]),
    ],
)  # fmt: skip
def test_forbidden_forms_are_found(text: str, found: list[str]) -> None:
    assert [finding.found for finding in check_text(text)] == found


@pytest.mark.parametrize(
    "text",
    [
        "The plan stores whole numbers, however large.",
        "The rank that holds the shard, which is a copy, sends it.",
        "Is the file complete? What is missing?",
        "Use `what --told beside` or\n```sh\nucpl whole\n```\n",
        "The folder in which a run writes. It never ends. Everything else follows.",
        "How to convert a checkpoint.",
        "Neither the file nor the folder is there.",
        "where: the place of a message",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert list(check_text(text)) == []


def test_lines_are_those_of_the_words() -> None:
    assert [f.line for f in check_text("One line.\nIt is told.\n\nIt says how.")] == [1, 3]


def test_a_first_line_has_twelve_words() -> None:
    assert list(check_docstring("one two three four five six seven eight nine ten `x y` twelve")) == []
    (finding,) = check_docstring("one two three four five six seven eight nine ten eleven twelve more\n\nText.")
    assert finding.found == "13 words"


def test_an_entry_has_twenty_five_words() -> None:
    assert [f.found for f in check_entry("word " * 26)] == ["26 words"]
    assert list(check_entry("word " * 25)) == []


def test_a_name_is_read_as_words() -> None:
    assert [f.found for f in check_name("a_rank_is_told")] == ["told"]


def test_files_are_read_by_their_kind() -> None:
    code = '"""Text told."""\n# beside\n# it nor\nX = f"a file {X} is amiss"\ndef test_told():\n    return "told"\n'
    assert sorted((f.line, f.found) for f in read_python("ucpl/x.py", code)) == [
        (1, "told"), (2, "beside"), (3, "nor"), (4, "amiss"), (5, "told"),
    ]  # fmt: skip
    assert [f.line for f in read_python("tests/x.py", code)].count(4) == 0
    toml = "# told\nwhy = 'amiss here'\nbefore = '''\ntold\n'''\nexample = 'told'\nmeaning = \"ok\"\n"
    assert [(f.line, f.found) for f in read_toml("x.toml", toml)] == [(1, "told"), (2, "amiss")]
    assert [f.line for f in read_page("CHANGELOG.md", "# x told\n- one\n  told\n- two")] == [3]
    assert [f.line for f in read_spec("specs/x.ucpl", "#   ucpl convert whole there\nw : c # told\n")] == [2]


def test_a_count_only_falls_and_a_new_file_is_clean() -> None:
    before = count([Place("ucpl/a/x.py", n, "told", "") for n in range(3)] + [Place("ucpl/a/y.py", 1, "told", "")])
    assert before == {"ucpl/a": {"ucpl/a/x.py": 3, "ucpl/a/y.py": 1}} and total(before) == 4
    assert compare(before, before) == []
    assert compare(before, {"ucpl/a": {"ucpl/a/x.py": 2, "ucpl/a/y.py": 2}}) == []
    (rose,) = compare(before, {"ucpl/a": {"ucpl/a/x.py": 4, "ucpl/a/y.py": 1}})
    assert "ucpl/a/x.py 3 -> 4" in rose
    (new,) = compare(before, {"ucpl/a": {"ucpl/a/z.py": 1}})
    assert new.startswith("ucpl/a/z.py")


def test_the_glossary_names_some_sixty_words_and_their_code() -> None:
    text = (ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z][\w -]*) \| (.+) \| `([\w.]+)` \|$", text, re.MULTILINE)
    assert 60 <= len(rows) == len({word for word, _, _ in rows}) <= 70
    missing = [f"{word}: {name}" for word, _, name in rows if not _is_there(name)]
    assert missing == []
    assert [finding for _, meaning, _ in rows for finding in check_text(meaning)] == []


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True
