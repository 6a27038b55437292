"""The ledger itself.

Its names, its shares, and that it sees a byte, a code and a text that change.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.ledger import __main__ as ledger
from tests.ledger import cases, place
from tests.ledger.cases import Case
from ucpl.formats import opening

CASES = [
    Case("check", cases.mistake, ("ucpl 1\nmodel m {\n  w : 3 x\n}\n", "")),
    Case("convert", cases.convert, (cases.FIXTURES / "deepspeed" / "z1_dp4", "zero1(dp=3)")),
    Case("explain", cases.commands, (("explain", "E001", "--json"),)),
]


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of three cases in its own folder, in this process."""
    monkeypatch.setattr(ledger, "HERE", tmp_path)
    monkeypatch.setattr(ledger, "every_case", lambda: CASES)
    monkeypatch.setattr(ledger, "settle", lambda: None)
    monkeypatch.setenv("UCPL_CACHE", os.environ.get("UCPL_CACHE", ""))
    assert ledger.main(["-n", "1", "--write", "bytes", "--write", "texts"]) == 0
    return tmp_path


def changed(folder: Path, half: str, name: str, old: str, new: str) -> None:
    path = folder / f"{half}.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    assert any(old in line for line in held[name]), held[name]
    held[name] = [line.replace(old, new) for line in held[name]]
    path.write_text(json.dumps(held), encoding="utf-8")


def test_a_second_run_finds_no_difference(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main(["-n", "1"]) == 0
    assert "all is as the ledger says" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("half", "name", "old", "new", "says"),
    [
        ("bytes", "check", " E1", " E2", "a target changed"),
        ("bytes", "convert", "target=", "target=0", "a target changed"),
        ("bytes", "explain", "explain 0", "explain 1", "a target changed"),
        ("texts", "explain", " --json ", " --json 0", "a text changed"),
    ],
)
def test_a_difference_is_printed_with_both_values(
    few: Path, capsys: pytest.CaptureFixture[str], half: str, name: str, old: str, new: str, says: str
) -> None:
    before = ledger.read(half)[name]
    changed(few, half, name, old, new)
    assert ledger.main(["-n", "1"]) == 1
    out = capsys.readouterr().out
    assert f"{half}: {name}: {says}" in out and "1 differences" in out
    assert all(f"  + {line}" in out for line in before if line not in ledger.read(half)[name])
    assert ledger.main(["-n", "1", "--only", name, "--write", half]) == 0
    assert ledger.read(half)[name] == before


def test_a_new_case_and_a_gone_one_are_differences(
    few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Case("formats", cases.commands, (("formats", "dcp"),))
    monkeypatch.setattr(ledger, "every_case", lambda: [CASES[0], CASES[2], new])
    assert ledger.main(["-n", "1"]) == 1
    out = capsys.readouterr().out
    assert "formats\n  a case that the ledger lacks" in out and "convert\n  a case that is there no more" in out
    assert ledger.main(["-n", "1", "--write", "new"]) == 0
    assert ledger.read("bytes").keys() == {"check", "explain", "formats"}


def test_every_case_has_a_name_of_its_own_and_is_in_one_share() -> None:
    every = cases.every_case()
    shares = [case.name for number in (1, 2, 3) for case in ledger.share_of(every, f"{number}/3")]
    assert len(every) > 2500 and sorted(shares) == sorted(case.name for case in every)


def test_both_files_have_the_same_cases() -> None:
    assert ledger.read("bytes").keys() == ledger.read("texts").keys()


def plan(moves: bytes = b"moves", **changes: Any) -> bytes:
    said = {"origins": [["dp", 2, "given"]], "graph": {"nodes": [1]}, "dropped": ["weight"], "layout_text": "ucpl 1"}
    return b"ucpl-plan 10\nsha256:0\nplan\n---\n" + json.dumps(said | changes).encode() + b"\n" + zlib.compress(moves)


def test_a_plan_is_its_moves_and_no_sentence() -> None:
    first = place.plan_digest(plan())
    assert place.plan_digest(plan(dropped=["left out"], layout_text="", origins=[["dp", 2, "default"]])) == first
    assert place.plan_digest(plan(origins=[["dp", 3, "given"]])) != first
    assert place.plan_digest(plan(graph={"nodes": [2]})) != first
    assert place.plan_digest(plan(b"movez")) != first


def test_a_target_is_every_byte_but_its_texts(tmp_path: Path) -> None:
    (tmp_path / "ucpl").mkdir()
    (tmp_path / "ucpl" / "manifest.json").write_text("{}")
    (tmp_path / "weights.pt").write_bytes(bytes(8))
    first = place.tree_digest(tmp_path)
    (tmp_path / "ucpl" / "manifest.json").write_text("[]")
    assert place.tree_digest(tmp_path) == first
    (tmp_path / "weights.pt").write_bytes(bytes(7) + b"\1")
    assert place.tree_digest(tmp_path) != first
    (tmp_path / "weights.pt").write_bytes(bytes(8))
    (tmp_path / "other").touch()
    assert place.tree_digest(tmp_path) != first


def test_times_paths_and_room_are_not_in_a_text(tmp_path: Path) -> None:
    here = place.Place(tmp_path)
    text = f"done          {tmp_path}/x in 0.107 s, 1.53 MiB/s\nbuffers       3,145,728 bytes (3 MiB) at most\n"
    assert here.plain(text) == "done          $HERE/x in TIME\nbuffers       ROOM at most\n"
    assert json.loads(place.pruned_text('{"seconds": {"a": 1}, "b": [{"free": 3, "c": 4}]}')) == {"b": [{"c": 4}]}


def test_a_checkpoint_is_copied_and_opened_once_for_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened again if a case changes it.

    Other files of a case are gone in the next one.
    """
    read: list[Path] = []
    ours = opening.open_checkpoint

    def counted(path: Path, *more: Any) -> Any:
        read.append(path)
        return ours(path, *more)

    def damage(where: place.Place, path: Path) -> None:
        where.copy(path)
        (where.here / "source" / "latest").write_text("elsewhere")
        where.note_bytes(str(sorted(p.name for p in where.here.iterdir())))

    monkeypatch.setattr(opening, "open_checkpoint", counted)
    zero, to = CASES[1].arguments[0], CASES[1].arguments
    two = cases.run_all([CASES[1], CASES[1]])
    assert two[0] == two[1] and [p.name for p in read] == [
        "source",
        "tree",
        "tree",
    ]  # targets without their names
    read.clear()
    three = cases.run_all([CASES[1], Case("damage", damage, (zero,)), Case("again", cases.convert, to)])
    assert three[1].bytes == ("['source']",) and three[2].bytes == two[0].bytes
    assert [p.name for p in read].count("source") == 2
