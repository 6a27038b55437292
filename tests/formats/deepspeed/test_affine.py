"""Maps of a tensor's pieces: unsupported ones are rejected with a reason.

Supported are runs of positions of one dim, end to end on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from ucpl.errors import UcplError
from ucpl.extents import Section, Sharding
from ucpl.files.values import Value
from ucpl.formats.deepspeed.affine import affine_sharding
from ucpl.formats.deepspeed.cuts import info_of

COLUMNS = Sharding((2, 7), 1, (Section(7, (3, 2, 2)),))
PARTS = Sharding((10, 2), 0, (Section(6, (2, 2, 2)), Section(4, None)))


def map_of(sharding: Sharding) -> Any:
    told: Any = info_of({"w": sharding}, 3, {})["affine_map"]
    return deepcopy(told["params"]["^w$"])


def read(given: Any, tmp_path: Any, degree: int = 3) -> Sharding:
    return affine_sharding(Value(tmp_path / "states.pt", "states.pt", ("map",), given), "w", degree)


def piece(entry: Any, rank: int = 0, number: int = 0) -> Any:
    return entry["ranks"][rank]["pieces"][number]


@pytest.mark.parametrize("sharding", [COLUMNS, PARTS])
def test_a_map_as_it_is_written(sharding: Sharding, tmp_path: Any) -> None:
    found = read(map_of(sharding), tmp_path)
    assert (found.shape, found.dim, found.sections) == (sharding.shape, sharding.dim, sharding.sections)
    assert found.origin == "affine_map of states.pt"


def _wider(entry: Any) -> None:
    """The tensor has a column more, and its steps say so."""
    entry["logical_shape"] = [2, 8]
    for rank in range(3):
        piece(entry, rank)["source"][1] = [8, 1]


def _longer(entry: Any) -> None:
    entry["ranks"][1]["shard_shape"] = [2, 4]
    piece(entry, 1)["dest"] = [0, [4, 1]]


# Of two rows of 7 columns, rank 0 holds 3, the others 2 each.
FAULTS: list[tuple[str, Sharding, Callable[[Any], Any], str]] = [
    ("steps in the tensor, of two rows", COLUMNS, lambda e: piece(e).update(source=[0, [5, 1]]), "the strides [5, 1]"),
    ("steps in the shard, of two rows", COLUMNS, lambda e: piece(e).update(dest=[0, [7, 1]]), "[3, 1] are the tensor's"),
    ("steps of two columns", COLUMNS, lambda e: piece(e, 1).update(source=[3, [7, 2]]), "the strides [7, 2]"),
    ("a start within a row", PARTS, lambda e: piece(e, 1).update(source=[5, [2, 1]]), "no run of positions"),
    ("another place in the shard", PARTS, lambda e: piece(e, 1, 1).update(dest=[2, [2, 1]]), "not in its turn"),
    ("a source without steps", COLUMNS, lambda e: piece(e).update(source=[0]), "of another form"),
    ("a target without steps", COLUMNS, lambda e: piece(e).update(dest=[0]), "of another form"),
    ("fewer steps than dims", COLUMNS, lambda e: piece(e).update(source=[0, [7]]), "of another form"),
    ("fewer steps in the shard", COLUMNS, lambda e: piece(e).update(dest=[0, [3]]), "of another form"),
    (
        "a piece of fewer dims",
        COLUMNS,
        lambda e: piece(e).update(shape=[3], source=[0, [1]], dest=[0, [1]]),
        "of another form",
    ),
    ("a shard of more dims", COLUMNS, lambda e: e["ranks"][0].update(shard_shape=[2, 3, 1]), "of another form"),
    ("what is scaled", COLUMNS, lambda e: piece(e, 2).update(scale=2.0), "scaled"),
    ("a rank too many", COLUMNS, lambda e: e["ranks"].update({3: e["ranks"][2]}), "of 4 ranks, there are files of 3"),
    ("a rank of another number", COLUMNS, lambda e: e["ranks"].update({5: e["ranks"].pop(2)}), "of 3 ranks"),
    ("parts of two dims", COLUMNS, lambda e: piece(e).update(shape=[1, 3]), "parts of several dims"),
    ("a piece less on one rank", PARTS, lambda e: e["ranks"][1].update(shard_shape=[2, 2], pieces=[piece(e, 1)]), "numbers"),
    ("a gap between ranks", COLUMNS, lambda e: piece(e, 2).update(source=[6, [7, 1]]), "begins at 6, the one before ends at 5"),
    ("a tensor that goes on", COLUMNS, _wider, "end at 7 of 8"),
    ("a shard that goes on", COLUMNS, _longer, "a shard of 4"),
]  # fmt: skip


@pytest.mark.parametrize(("sharding", "fault", "why"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_what_is_no_run_is_refused(sharding: Sharding, fault: Callable[[Any], Any], why: str, tmp_path: Any) -> None:
    given = map_of(sharding)
    fault(given)
    with pytest.raises(UcplError) as caught:
        read(given, tmp_path)
    (found,) = caught.value.diagnostics
    assert found.code == "E462" and found.message.startswith("w: ") and why in found.message
    assert found.labels[0].file.endswith("states.pt") and "w" in found.labels[0].where


def test_a_scale_of_one_and_steps_of_a_dim_of_one_position_say_nothing(tmp_path: Any) -> None:
    given = map_of(COLUMNS)
    piece(given)["scale"] = 1.0
    assert read(given, tmp_path).sections == COLUMNS.sections
    single = map_of(Sharding((1, 6), 1, (Section(6, (2, 2, 2)),)))
    piece(single)["source"] = [0, [99, 1]]
    assert read(single, tmp_path).dim == 1
