"""A framework's files must hold each planned tensor exactly once.

A store that lays out other files is found before it writes.
No command leads here: the shipped stores refuse such layouts themselves, in words of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from tests.runtime.test_execute import run
from tests.runtime.world import Stored, Torch, bits_of, copies, write_source
from ucpl.errors import UcplError
from ucpl.extents import StorageRef, TensorRef
from ucpl.files.checkpoint import Archive, Carried, Skeleton, SkeletonFile
from ucpl.runtime.targets import _file_plan


class Lying(Torch):
    """A store whose layout is changed by `change`.

    `change` gets its first file, or the entire skeleton.
    """

    def __init__(self, change: Callable[[Any], Any], carried: tuple[Any, ...] = ()) -> None:
        super().__init__(carried=carried)
        self.change = change

    def skeleton(self, *given: Any) -> Skeleton:
        made: Skeleton = super().skeleton(*given)
        changed = self.change(made.files[0])
        if isinstance(changed, SkeletonFile):
            return evolve(made, files=(changed, *made.files[1:]))
        return evolve(made, **changed)


def larger(file: SkeletonFile) -> SkeletonFile:
    ref: TensorRef = file.value["a"]
    return evolve(file, value={**file.value, "a": evolve(ref, storage=StorageRef("0", "f32", 21), shape=(21,))})


def beside(file: SkeletonFile) -> SkeletonFile:
    """A tensor that nothing fills."""
    return evolve(file, value={**file.value, "z": TensorRef(StorageRef("9", "f32", 3), 0, (3,), (1,))})


def left_out(file: SkeletonFile) -> SkeletonFile:
    return evolve(file, value={}, storage_of={})


FAULTS: list[tuple[str, Callable[[Any], Any], str, tuple[str, ...]]] = [
    ("another size", larger, "a (a) has 80 bytes, storage 0 of to_a.pt has 84", ("to_a.pt", "a")),
    ("no storage", lambda f: evolve(f, storage_of={0: "7"}), "has 80 bytes, storage 7 of to_a.pt has none", ("to_a.pt", "a")),
    ("a storage too many", beside, "nothing is written to storage 9 of to_a.pt (12 bytes)", ("to_a.pt", "9")),
    ("a tensor that is left out", left_out, "a (a) of to_a.pt has no place in the target's files", ("to_a.pt", "")),
    ("two files of one name", lambda f: {"texts": {"to_a.pt": "x"}}, "two files of the target have the name to_a.pt", ()),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message", "place"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_files_that_do_not_hold_the_plan(
    change: Callable[[Any], Any], message: str, place: tuple[str, ...], tmp_path: Any
) -> None:
    source = write_source(tmp_path / "src", [Stored(n, (n,), "f32", bits_of("f32", (20,), 1)) for n in "ab"])
    plan = copies(source)
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out", framework=Lying(change))
    (found,) = caught.value.diagnostics
    assert (found.code, caught.value.exit_status) == ("E604", 5) and message in found.message and found.remedy
    assert [(x.file, x.where) for x in found.labels] == ([place] if place else [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_carried_tensor_that_has_another_s_storage(tmp_path: Any) -> None:
    source = write_source(tmp_path / "src", [Stored("a", (n,), "f32", bits_of("f32", (20,), 1)) for n in "ab"])
    plan = copies(source)
    extent = next(iter(source.extents.values()))

    def same(file: SkeletonFile) -> SkeletonFile:
        return evolve(file, carried=(Carried(extent, "0"),))

    with pytest.raises(UcplError, match=r"E604: carried .* has 80 bytes, storage 0 of to_a\.pt has 80"):
        run(plan, source, tmp_path / "out", framework=Lying(same))


def test_storages_of_a_file_are_listed_once() -> None:
    """For each tensor they would cost its square."""
    ref = TensorRef(StorageRef("0", "f32", 2), 0, (2,), (1,))
    archives = _file_plan(SkeletonFile("a", (Archive({"a": ref}), Archive({"b": ref})), "archives"))
    tensors = _file_plan(SkeletonFile("b", {"a": ref}, "safetensors"))
    assert set(archives.storages) == {"0:0", "1:0"} and set(tensors.storages) == {"0"}
    assert archives.storages is archives.storages and tensors.storages is tensors.storages
