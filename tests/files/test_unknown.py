"""Values that several files repeat."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucpl.extents import StorageRef, TensorRef
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import unlike

TENSOR = TensorRef(StorageRef("0", "f32", 1), 0, (), ())


@pytest.mark.parametrize("inner", [{"lr": TENSOR}, [{"lr": TENSOR}], {"a": {"b": [{"c": {"lr": (TENSOR,)}}]}}])
def test_tensors_of_a_shared_value_are_compared(inner: object) -> None:
    """Compare tensors of equal pickles, which each file has."""
    parts = [TorchFile(Path(), f"{n}.pt", "archive", inner, {}) for n in range(3)]
    found = [*unlike(((part, "top/", {"held": inner}) for part in parts), repr)]  # by file
    assert [one.name.partition(":")[0] for one in found] == ["1.pt", "2.pt"]
    assert all(one.name.startswith(f"{n}.pt: top/held") and "lr" in one.name for n, one in enumerate(found, 1))


def test_a_shared_value_without_tensors_is_compared_once() -> None:
    """Compare another value anew, and name each file with it."""
    marked: list[object] = []
    same, other = {"lr": 0.5}, {"lr": 0.25}
    values = (same, same, other, same, other)
    parts = [TorchFile(Path(), f"{n}.pt", "archive", value, {}) for n, value in enumerate(values)]

    def mark(value: object) -> object:
        marked.append(value)
        return value

    found = [*unlike(((part, "", {"held": part.value}) for part in parts), mark)]
    assert [one.name for one in found] == ["2.pt: held/lr", "4.pt: held/lr"]
    assert marked == [0.25, 0.5] * 2
