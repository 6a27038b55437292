"""Plans are read as written; files made by hand reach nowhere.

They are written once or tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.graph.test_alike import located
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.planning import Plan, order
from ucpl.planning.files import load_plan, plan_bytes, save_plan, sealed, unsealed
from ucpl.planning.text import graph_text, summary


def made() -> Plan:
    return order(build(located("fsdp(dp = 2)"), located("stages(pp = 2, tp = 3)")), name="made")


def test_a_plan_that_is_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    plan = made()
    save_plan(plan, tmp_path / "a.plan")
    back = load_plan(tmp_path / "a.plan")
    assert plan_bytes(back) == plan_bytes(plan)
    assert back.sources == plan.sources and back.targets == plan.targets
    assert (back.source, back.target) == (plan.source, plan.target)
    assert graph_text(back) == graph_text(plan)
    for a, b in zip(back.moves, plan.moves, strict=True):
        assert (a.kind, a.state, a.source_value, a.target_value, a.lossy) == (
            b.kind, b.state, b.source_value, b.target_value, b.lossy,
        )  # fmt: skip
        for name in ("tensor", "source", "target", "shape", "source_offset", "source_stride", "target_offset"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_tallies_count_what_is_reported_tensor_by_tensor() -> None:
    plan = made()
    told = {(m.state, m.kind): (len(m), m.elements) for m in plan.moves}
    found = {(t.state, t.kind): (t.runs, t.elements) for t in plan.tallies}
    assert found.keys() == told.keys()
    assert all(found[k][0] >= told[k][0] and found[k][1] == told[k][1] for k in told)
    assert f"reads      {len(plan.sources):,} stored tensors in 2 files" in summary(plan)
    assert f"in 6 files, {sum(4 * t.numel for t in plan.targets):,} bytes" in summary(plan)


def test_stored_tensors_are_numbered_as_they_are_listed() -> None:
    plan = made()
    for shelves in (plan.source_shelves, plan.target_shelves):
        assert [shelves[i] for i in range(len(shelves))] == list(shelves.each)
        assert len({(t.file, t.key) for t in shelves}) == len(shelves)
    with pytest.raises(IndexError):
        plan.source_shelves[len(plan.source_shelves)]


def test_a_plan_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "old.plan").write_bytes(b"ucpl-plan 1\nsha256:0\n")
    with pytest.raises(UcplError) as caught:
        load_plan(tmp_path / "old.plan")
    (found,) = caught.value.diagnostics
    assert found.code == "E351" and "another version: ucpl-plan 1" in found.message and "plan anew" in found.remedy


def forged(plan: Plan, change: Callable[[Any], None]) -> bytes:
    """A plan file with another header, and a digest that matches."""
    head, columns = unsealed(plan_bytes(plan).split(b"\n", 2)[2])
    summed, rule, header = head.partition(b"\n---\n")
    raw = json.loads(header)
    change(raw)
    return sealed(summed + rule + json.dumps(raw).encode() + b"\n", columns)


def test_columns_are_compressed_and_no_file_unpacks_to_more_than_a_hundred_times_its_size(tmp_path: Path) -> None:
    plan = made()
    head, columns = unsealed(plan_bytes(plan).split(b"\n", 2)[2])
    assert len(plan_bytes(plan)) < len(head) + len(columns) * 0.5
    alike = bytes(4 << 20)  # data that compresses better than that is written uncompressed
    assert unsealed(sealed(head, alike).split(b"\n", 2)[2]) == (head, alike)
    packed = zlib.compress(alike, 9)
    for name, body in (
        ("bomb", head + packed),
        ("more", head + zlib.compress(columns) + b"x"),
        ("short", head + packed[:-9]),
    ):
        sealing = b"ucpl-plan 10\nsha256:" + hashlib.sha256(body).hexdigest().encode() + b"\n"
        (tmp_path / name).write_bytes(sealing + body)
        with pytest.raises(UcplError) as caught:
            load_plan(tmp_path / name)
        assert (
            caught.value.diagnostics[0].code == "E351"
            and "its columns do not end" in caught.value.diagnostics[0].message
        )


def nodes(raw: Any, kind: str) -> list[Any]:
    return [n for n in raw["graph"]["nodes"] if n[0] == kind]


def called_alike(shelf: Any) -> None:
    """Names without the part that distinguishes choices.

    As many stored tensors as before, and one name for all.
    """
    assert shelf["choices"] > 1
    shelf["key"] = [
        [["".join(p if isinstance(p, str) else "x" for p in step)], counted] for step, counted in shelf["key"]
    ]


def slots_in(shelves: list[Any]) -> list[Any]:
    """Parts of names that are numbers."""
    names = [name for shelf in shelves for name in (shelf["file"], *(step for step, _ in shelf["key"]))]
    return [part for name in names for part in name if isinstance(part, list)]


HOSTILE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "another lane's tensors": (
        "boxes that are extracted are not those that are stored",
        lambda r: nodes(r, "extract")[0][2][0].__setitem__(2, 10**6),
    ),
    "a lane before the first tensor": (
        "boxes that are extracted are not those that are stored",
        lambda r: nodes(r, "extract")[0][2][0].__setitem__(2, -(10**6)),
    ),
    "rows that are not there": ("rows 0 to 1000000 of", lambda r: nodes(r, "extract")[0].__setitem__(3, [0, 10**6, 1])),
    "rows of another length": (
        "boxes that are extracted are not those that are stored",
        lambda r: nodes(r, "split")[0].__setitem__(3, [0, 1, 1]),
    ),
    "a number of another kind": ("'x' is no whole number", lambda r: nodes(r, "split")[0].__setitem__(4, ["x", 0])),
    "values times nothing": ("values are no 0.0 * x + 0.0", lambda r: nodes(r, "split")[0].__setitem__(4, [0, 0])),
    "values without end": ("Infinity is no number", lambda r: nodes(r, "split")[0].__setitem__(4, [float("inf"), 0])),
    "a need that comes later": (
        ", which comes later",
        lambda r: nodes(r, "extract")[0].__setitem__(-1, [len(r["graph"]["nodes"])]),
    ),
    "a need of a number below zero": (
        "-1 is no whole number from 0",
        lambda r: nodes(r, "merge")[0].__setitem__(-1, [-1]),
    ),
    "a need before the first": (
        "is no whole number from 0",
        lambda r: nodes(r, "extract")[0].__setitem__(-1, [-len(r["graph"]["nodes"])]),
    ),
    "a need counted from the end": (
        "-1 is no whole number from 0",
        lambda r: nodes(r, "write")[-1].__setitem__(-1, [-1]),
    ),
    "no such operation": ("no operation is ['melt'", lambda r: nodes(r, "merge")[0].__setitem__(0, "melt")),
    "a split of nothing": ("boxes are split that nothing merged", lambda r: nodes(r, "split")[0].__setitem__(-1, [])),
    "no room": ("no room for positions", lambda r: r["graph"].__setitem__("bits", [0, 5])),
    "fewer bits": ("a move names source 88 of 78", lambda r: r["graph"].__setitem__("bits", [3, 3])),
    "a column without end": (
        "a column without end",
        lambda r: r["sources"]["columns"].__setitem__(0, {"count": [10**15, 0, 1]}),
    ),
    "runs without end": (
        "a column without end",
        lambda r: r["sources"]["columns"].__setitem__(0, {"runs": [0, 10**15]}),
    ),
    "choices without names": (
        "choices that no name distinguishes",
        lambda r: r["sources"]["shelves"][0].__setitem__("choices", 10**12),
    ),
    "choices that are called alike": (
        "choices that no name distinguishes",
        lambda r: called_alike(r["sources"]["shelves"][-1]),
    ),
    "a size below zero": (
        "a size below zero",
        lambda r: r["sources"]["columns"].__setitem__(r["sources"]["shelves"][0]["shape"][0], [-5, -5]),
    ),
    "more bytes than there are": (
        "a tensor of more bytes than there are",
        lambda r: r["targets"]["columns"].__setitem__(r["targets"]["shelves"][0]["shape"][0], [1 << 61] * 3),
    ),
    "a rank below zero": (
        "a rank or padding below zero",
        lambda r: r["sources"]["columns"].__setitem__(r["sources"]["shelves"][0]["rank"], [-5, -5]),
    ),
    "a list for a dict": ("list indices must be integers", lambda r: r.__setitem__("source", [])),
    "a number for a list": ("3 is no list", lambda r: r.__setitem__("tensors", 3)),
    "no tensors": ("a move names tensor 0 of 0", lambda r: r.__setitem__("tensors", [])),
    "members that are not there": (
        "index out of range",
        lambda r: r["target"].__setitem__("flats", [[0, "", {}, 9, 9, 9, None]]),
    ),
    "nothing": ("'graph'", lambda r: r.clear()),
    "half of a character": ("surrogates not allowed", lambda r: r.__setitem__("name", "\ud800")),
    "half of a character in a name": (
        "surrogates not allowed",
        lambda r: r["target"]["aliases"].__setitem__("\udfff", "w"),
    ),
    "a list for a text": ("['a'] is no text", lambda r: r.__setitem__("spec_digest", ["a"])),
    "a list for a setting": ("[2] is no value of a setting", lambda r: r["target"]["settings"].__setitem__("dp", [2])),
    "a setting without end": (
        "Infinity is no number",
        lambda r: r["target"]["settings"].__setitem__("dp", float("inf")),
    ),
    "a number for a tensor's name": ("5 is no text", lambda r: r["target"]["tensors"][0].__setitem__("name", 5)),
    "a text for a size": (
        "'8' is no whole number from 0",
        lambda r: r["target"]["tensors"][0].__setitem__("shape", ["8"]),
    ),
    "an origin without end": ("NaN is no number", lambda r: r.__setitem__("origins", [["dp", float("nan"), "call"]])),
    "a merge of what nothing extracted": (
        "something is merged that nothing extracted",
        lambda r: nodes(r, "merge")[0].__setitem__(-1, [0]),
    ),
    "half a lane": ("0.5 is no whole number", lambda r: nodes(r, "extract")[0][2][0].__setitem__(2, 0.5)),
    "half a position": (
        "a column of something else than numbers",
        lambda r: r["sources"]["columns"].__setitem__(0, [0.5, 1]),
    ),
    "a stored tensor without a key": (
        "a stored tensor without a key in a file of several",
        lambda r: r["targets"]["shelves"][0].__setitem__("key", []),
    ),
    "a number format that is none": (
        "or of no number format",
        lambda r: slots_in(r["targets"]["shelves"])[0].__setitem__(2, "r"),
    ),
    "a number of a million digits": (
        "or of no number format",
        lambda r: slots_in(r["targets"]["shelves"])[0].__setitem__(2, "0999999d"),
    ),
    "members without places": (
        "a flat buffer with another number of members than of places",
        lambda r: r["target"].update(
            flats=[[0, "", {}, 0, 0, 9, None]], members=[[["w"], [[[9]], [0]]]], starts=[[0, 5]]
        ),
    ),
    "a dtype of no name": ("a dtype of no name", lambda r: r["targets"]["shelves"][0].__setitem__("dtypes", ["f31"])),
}


@pytest.mark.fault("Hostile input", "forged plans with a valid digest", "E351, or actions within their own bounds")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_plan_made_by_hand_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hand.plan"
    said, change = HOSTILE[name]
    path.write_bytes(forged(made(), change))
    with pytest.raises(UcplError) as caught:
        load_plan(path)
    assert [d.code for d in caught.value.diagnostics] == ["E351"]
    assert said in caught.value.diagnostics[0].message  # for the change, and not by another check


@pytest.mark.parametrize("side", ["source_stride", "target_stride"])
def test_a_step_that_no_file_has_is_refused(side: str, tmp_path: Path) -> None:
    """Of a dim of one element, which leads nowhere.

    In bytes it would be no number of 64 bits, and no array has it.
    """
    plan = made()
    first, *others = plan.moves
    strides = np.where(first.shape == 1, 1 << 61, getattr(first, side))
    path = tmp_path / "far.plan"
    save_plan(plan.of(moves=(first.replace(**{side: strides}), *others)), path)
    with pytest.raises(UcplError, match="reaches beyond") as caught:
        load_plan(path)
    assert [d.code for d in caught.value.diagnostics] == ["E351"]


def test_what_is_forged_is_the_plan_itself(tmp_path: Path) -> None:
    """The tests above change the read data.

    Unchanged, the same file is a plan.
    """
    path = tmp_path / "same.plan"
    path.write_bytes(forged(made(), lambda raw: None))
    assert load_plan(path).sources == made().sources
