"""Libraries: bases of layouts, replaced models, given texts and unread files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucpl import api
from ucpl.errors import UcplError
from ucpl.language import nodes, parse_call
from ucpl.layout import load, resolve
from ucpl.texts import TEXT_MAX, read_text, text_at

TEXT = """ucpl 1
model m {
  dim a = 4
  w : a dtype f32
}
layout low(dp) of m {
  mesh dp
  file weights = torch "f.{dp}"
  w = a as "w"
}
layout mid(dp) of m extends low(dp) {
}
layout top(dp) of m extends mid(dp) {
}
"""
CIRCLE = """ucpl 1
layout a(dp, tp = 1) of any extends b(dp, tp) {
}
layout b(dp, tp = 1) of any extends a(dp, tp) {
}
"""


def test_a_chain_is_the_layout_and_all_that_it_extends() -> None:
    library = load(("f.ucpl", TEXT))
    assert [link.node.name for link in library.chain("top")] == ["top", "mid", "low"]
    assert [link.node.name for link in library.chain("low")] == ["low"]


def test_a_model_in_place_of_another_leaves_the_library_as_it_was() -> None:
    library = load(("f.ucpl", TEXT))
    model = library.model("m").node
    assert isinstance(model, nodes.Model)
    said = nodes.Dims((nodes.Binding("a", nodes.Number(6)),))
    other = library.with_model(nodes.Model("m", (*model.items, said)))
    assert resolve(other, parse_call("top(2)")).sizes["a"] == 6
    assert resolve(library, parse_call("top(2)")).sizes["a"] == 4
    assert other.model("m").file is library.model("m").file


def test_a_circle_of_extends_is_refused_wherever_a_layout_is_called(tmp_path: Path) -> None:
    from ucpl.inference.parallel import is_open
    from ucpl.inference.whole_shapes import with_shapes

    library = load(("f.ucpl", CIRCLE))
    checkpoint = api.open_checkpoint(Path(__file__).parents[2] / "examples" / "checkpoint")
    walks = [
        lambda: library.chain("a"),
        lambda: is_open(library, parse_call("a(2)")),
        lambda: resolve(library, parse_call("a(2)"), model=nodes.Model("m", ())),
    ]
    for walk in walks:
        with pytest.raises(UcplError) as caught:
            walk()
        assert caught.value.diagnostics[0].code == "E119"
    assert with_shapes(checkpoint, library, parse_call("a(2)")) is checkpoint
    (tmp_path / "circle.ucpl").write_text(CIRCLE)
    with pytest.raises(UcplError) as caught:
        api.plan(str(Path(__file__).parents[2] / "examples" / "checkpoint"), f"{tmp_path / 'circle.ucpl'}:a(dp = 2)")
    assert caught.value.diagnostics[0].code == "E119"


# ---- where texts come from -------------------------------------------------------------------------------------------


def test_a_library_reads_no_file_that_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.ucpl").write_text(TEXT)
    two = 'ucpl 1\nfrom "one.ucpl" import m\n'
    with pytest.raises(UcplError) as caught:
        load(("two.ucpl", two))
    assert caught.value.diagnostics[0].code == "E112"
    assert "m" in load(("two.ucpl", two), read=text_at).known
    assert "m" in load(("two.ucpl", two), ("one.ucpl", TEXT)).known
    asked: list[str] = []

    def read(path: str) -> str:
        asked.append(path)
        return TEXT

    load(("dir/two.ucpl", two), read=read)
    assert asked == ["dir/one.ucpl"]


def test_only_regular_texts_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ucpl")
    (tmp_path / "latin.ucpl").write_bytes("ucpl 1 # é".encode("latin-1"))
    (tmp_path / "link.ucpl").symlink_to("/dev/zero")
    with (tmp_path / "huge.ucpl").open("wb") as file:
        file.truncate(TEXT_MAX + 1)
    (tmp_path / "folder.ucpl").mkdir()
    said = {
        "pipe.ucpl": "no regular file",
        "link.ucpl": "no regular file",
        "latin.ucpl": "no UTF-8 text",
        "huge.ucpl": f"more than {TEXT_MAX:,} bytes",
        "folder.ucpl": "directory",
        "absent.ucpl": "No such file",
        "n" * 300: "File name too long",
        "\0": "null byte",
    }
    for name, reason in said.items():
        with pytest.raises(UcplError) as caught:
            read_text(tmp_path / name)
        assert caught.value.diagnostics[0].code in ("E170", "E184")
        assert reason.lower() in caught.value.diagnostics[0].message.lower()


@pytest.mark.parametrize("name", ["pipe.ucpl", "latin.ucpl"])
def test_an_import_of_what_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.ucpl")
    (tmp_path / "latin.ucpl").write_bytes("ucpl 1 # é".encode("latin-1"))
    (tmp_path / "mine.ucpl").write_text(f'ucpl 1\nfrom "{name}" import m\n')
    with pytest.raises(UcplError) as caught:
        api.load(tmp_path / "mine.ucpl")
    (found,) = caught.value.diagnostics
    assert found.code == {"pipe.ucpl": "E184", "latin.ucpl": "E170"}[name]
    assert [(label.file, label.line) for label in found.labels] == [
        (str(tmp_path / name), None),
        (str(tmp_path / "mine.ucpl"), 2),
    ]
    if name == "latin.ucpl":
        assert "byte 0xe9 of line 1" in found.message and "UTF-8" in found.remedy


@pytest.mark.parametrize("name", ["n" * 300 + ".ucpl", "a\\0b.ucpl", "gone/one.ucpl", "folder"])
def test_an_import_that_no_file_can_answer(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine.ucpl").write_text(f'ucpl 1\nfrom "{name}" import m\n')
    with pytest.raises(UcplError) as caught:
        api.load(tmp_path / "mine.ucpl")
    assert caught.value.diagnostics[0].code in ("E006", "E112")


def test_a_text_has_the_newlines_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "dos.ucpl").write_bytes(b"ucpl 1\r\nlet a = 1\r\n")
    assert read_text(tmp_path / "dos.ucpl") == "ucpl 1\nlet a = 1\n"
