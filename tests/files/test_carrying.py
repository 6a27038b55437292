"""Carried values: sharing is kept, and each tensor is written once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from attrs import evolve

from ucpl.extents import Extent, Global, PickledCall, StorageRef, TensorRef
from ucpl.files.carrying import Storages, by_place, lifted, mapped, origin_of, strides
from ucpl.files.pickles import attributes_of, set_attributes

REF = TensorRef(StorageRef("0", "f32", 12), 2, (2, 3), (3, 1))


def extent(file: str, ref: TensorRef = REF) -> Extent:
    return Extent(
        file=file,
        key=("t",),
        dtype=ref.storage.dtype,
        shape=ref.shape,
        stride=ref.stride,
        offset=ref.offset,
        storage=ref.storage.name,
        storage_start=64,
        storage_bytes=48,
    )


def test_a_tensor_that_is_met_twice_is_written_once() -> None:
    """In one value or in two.

    Another view of its storage, or the same name in another file, is another tensor.
    """
    turned = evolve(REF, shape=(3, 2), stride=(1, 3))
    storages = Storages(by_place([extent("a"), extent("b"), extent("a", turned)]))
    one: Any = storages.value(lifted({"x": REF, "y": [REF, turned]}, "a"))
    two: Any = storages.value(lifted((REF,), "a"))
    other: Any = storages.value(lifted(REF, "b"))
    assert one["x"] == one["y"][0] == two[0]
    assert len({t.storage.name for t in (one["x"], one["y"][1], other)}) == 3
    assert [(c.extent.file, c.extent.shape, c.storage) for c in storages.carried] == [
        ("a", (2, 3), "0"),
        ("a", (3, 2), "1"),
        ("b", (2, 3), "2"),
    ]
    assert (one["x"].offset, one["x"].stride, one["x"].storage.numel) == (0, (3, 1), 6)  # full, and without other bytes
    assert storages.fresh() == "3"


def test_attributes_of_a_tensor_are_its_own() -> None:
    """Two parameters over one storage keep their own attributes."""
    storages = Storages(by_place([extent("a")]))
    both: Any = storages.value(lifted([REF, evolve(REF, requires_grad=True)], "a"))
    plain, trained = both
    assert (plain.requires_grad, trained.requires_grad) == (False, True) and plain.storage == trained.storage


def test_a_tensor_without_elements_shares_a_storage_of_no_bytes() -> None:
    storages = Storages({})
    empty = extent("a", TensorRef(StorageRef("0", "f32", 0), 0, (0, 3), (3, 1)))
    made = [storages.extent(empty), storages.tensor("f32", (4, 0)), storages.empty("f32"), storages.empty("f16")]
    assert [t.storage.name for t in made] == ["0", "0", "0", "1"] and storages.carried == []
    assert (made[0].shape, made[1].shape, strides((4, 0))) == ((0, 3), (4, 0), (1, 1))


def test_storages_of_this_file_stay_as_they_are() -> None:
    storages = Storages({})
    assert storages.value([REF]) == [REF] and storages.carried == []
    moved: Any = lifted(REF, "dir/a.pt")
    assert origin_of(moved.storage.name) == ("dir/a.pt", "0")
    assert origin_of("0") == ("", "0")


def test_what_is_shared_stays_shared_and_cycles_stay_cycles() -> None:
    def renamed(t: TensorRef) -> TensorRef:
        return evolve(t, storage=evolve(t.storage, name="new"))

    shared = [REF]
    cycle: list[Any] = [shared, (shared, REF), {"k": shared}]
    cycle.append(cycle)
    ordered: OrderedDict[str, Any] = OrderedDict(a=shared)
    set_attributes(ordered, {"of": REF, "list": shared})
    call = PickledCall(
        Global("m", "C"), (shared,), {"k": REF}, state={"s": REF}, list_items=[REF], dict_items=[(1, shared)]
    )
    back: Any = mapped([cycle, ordered, call, evolve(REF, attributes={"in": REF})], renamed)
    again, turned, called, holder = back
    assert again[3] is again and again[0] is again[1][0] is again[2]["k"] is turned["a"] is called.args[0]
    assert called.dict_items[0][1] is again[0] and called is not call and called.function == call.function
    found: Any = attributes_of(turned)
    assert type(turned) is OrderedDict and found is not None and found["list"] is again[0]
    names = [again[0][0], again[1][1], found["of"], called.kwargs["k"], called.state["s"], called.list_items[0]]
    assert {t.storage.name for t in [*names, holder, holder.attributes["in"]]} == {"new"}
    assert REF.storage.name == "0" and shared == [REF]
