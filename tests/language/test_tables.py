"""The parser's tables as JSON: a round trip returns the same tables.

Untrusted tables are not read, and a failure is silent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from lark import Lark

from ucpl.language import cache, tables
from ucpl.language.recorder import Recorder
from ucpl.language.tables import LineJoiner
from ucpl.resources import grammar_text

VALUES = [
    {},
    {"a": [1, "b", None, True, 1.5]},
    {1: "one", "two": 2},
    {0: {1: {"x": [2]}}},
    {"set": {"b", "a"}},
    {"#": {"nested": {3: {"c"}}}},
    [],
    [[{}]],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_what_goes_in_comes_out(value: object) -> None:
    text = json.dumps(tables._encode(value))
    assert json.loads(text, object_hook=tables._decoded) == value


def test_tuples_become_lists_and_sets_are_in_order() -> None:
    assert tables._encode((1, (2, 3))) == [1, [2, 3]]
    assert tables._encode({"b", "a", "c"}) == {"#set": ["a", "b", "c"]}
    assert tables._encode({1: "x"}) == {"#pairs": [[1, "x"]]}


@pytest.fixture(scope="module")
def built() -> Lark:
    """The parser, made of the grammar's text."""
    return tables.build(grammar_text(), LineJoiner(), Recorder())


@pytest.fixture
def saved(built: Lark, tmp_path: Path) -> Path:
    path = tmp_path / "cache" / "tables.json"
    tables._save(built, path)
    return path


def load(path: Path) -> object:
    return tables._load(path, LineJoiner(), Recorder())


def test_kept_tables_parse_as_built_ones_do(saved: Path, built: Lark) -> None:
    joiner, recorder = LineJoiner(), Recorder()
    parser = tables._load(saved, joiner, recorder)
    assert parser is not None
    kept = parser.parse("ucpl 1\nlet a = [1, 2]\n", start="start")
    assert kept == built.parse("ucpl 1\nlet a = [1, 2]\n", start="start")
    assert json.loads(saved.read_text())["data"]["options"].keys().isdisjoint({"postlex", "transformer"})


def test_only_the_user_writes_the_folder_and_no_scrap_is_left(saved: Path) -> None:
    assert saved.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in saved.parent.iterdir()] == ["tables.json"]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_tables_that_others_can_write_are_not_read(saved: Path, mode: int) -> None:
    saved.chmod(mode)
    assert load(saved) is None
    saved.chmod(0o600)
    assert load(saved) is not None
    saved.parent.chmod(0o700 | (mode & 0o022))
    assert load(saved) is None


def test_tables_of_another_user_are_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert load(saved) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "{", '{"data": {}, "memo": {}}', '{"#set": 3}', '{"#pairs": [1]}']
)
def test_what_are_no_tables_is_not_read(saved: Path, text: str) -> None:
    saved.write_text(text)
    assert load(saved) is None


def test_no_tables_and_no_folder(tmp_path: Path) -> None:
    assert load(tmp_path / "none" / "tables.json") is None


def test_a_folder_that_cannot_be_made_is_no_matter(built: Lark, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tables._save(built, tmp_path / "file" / "tables.json")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_nothing(built: Lark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", broken)
    tables._save(built, tmp_path / "tables.json")
    assert list(tmp_path.iterdir()) == []


def test_where_tables_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCPL_CACHE", str(tmp_path))
    assert cache.cache_folder() == tmp_path
    first, other = tables._cache_path("one"), tables._cache_path("two")
    assert first is not None and other is not None and first.parent == tmp_path and first != other
    monkeypatch.setenv("UCPL_CACHE", "")
    assert cache.cache_folder() is None and tables._cache_path("one") is None
    monkeypatch.delenv("UCPL_CACHE")
    found = cache.cache_folder()
    assert found is not None and "ucpl" in found.parts


def test_a_process_without_a_cache_builds_its_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCPL_CACHE", str(tmp_path / "new"))
    made = tables.tables.__wrapped__()
    assert repr(made.lark.parse("ucpl 1\n", start="start")) == "File(name='', version=1, statements=())"
    (kept,) = (tmp_path / "new").iterdir()
    monkeypatch.setattr(tables, "build", lambda *_: pytest.fail("built again"))
    again = tables.tables.__wrapped__()
    assert again.lark.parse("ucpl 1\n", start="start") is not None and kept.exists()
