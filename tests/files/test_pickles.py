"""Pickles: Python and ucpl read them; reading runs no code."""

from __future__ import annotations

import enum
import io
import os
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.files.values import FIXTURES, assert_same, made_up, values
from ucpl.errors import UcplError
from ucpl.extents import BY_TORCH, Global, PickledCall, Size, StorageRef, TensorRef, TorchDType
from ucpl.files.pickles import attributes_of, dump_pickle, dumps, loads, unsafe_globals, walk


@given(values)
def test_reading_undoes_writing(value: Any) -> None:
    data = dumps(value)
    again = loads(data)
    assert_same(value, again)
    assert dumps(again) == data


plain_values = [
    {"a": 1, 2: [True, None, 0.5], "t": (1, (2,), (3, 4), (5, 6, 7), (8, 9, 10, 11)), "e": ((), [], {}, set())},
    [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63, -(2**63), 2**2000, -(2**2050)],
    [b"", b"\x00\xff", bytearray(b"\x80"), bytearray(), "", "é\u2028\ud800", "a" * 300, 1j, float("inf"), -0.0],
    [{1, "b", (2, 3)}, frozenset({1, 2}), slice(1, None, 2), OrderedDict(a=1, b=[2])],
    list(range(2500)),
    {str(n): n for n in range(2001)},
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", plain_values)
def test_python_and_we_agree(value: Any, protocol: int) -> None:
    # Not by their texts: the order of a set, and so its text, is another with each seed of hashes.
    assert_same(value, loads(pickle.dumps(value, protocol)))
    assert_same(value, pickle.loads(dumps(value)))


def test_sharing_and_cycles_are_kept() -> None:
    shared: list[Any] = [1]
    shared.append({"me": shared})
    value: dict[str, Any] = {"a": shared, "b": (shared, shared), "c": bytearray(b"x")}
    value["self"] = value
    read: Any
    for read in (
        loads(pickle.dumps(value, 2)),
        loads(pickle.dumps(value, 4)),
        loads(dumps(value)),
        pickle.loads(dumps(value)),
    ):
        assert read["self"] is read
        assert read["a"] is read["b"][0] is read["b"][1] is read["a"][1]["me"]


def test_a_tuple_that_holds_itself_by_a_list() -> None:
    inner: list[Any] = []
    value = (inner, 1, 2, 3, 4)
    inner.append(value)
    read: Any
    for read in (loads(pickle.dumps(value, 2)), loads(dumps(value)), pickle.loads(dumps(value))):
        assert read[0][0] is read and read[1:] == (1, 2, 3, 4)


def test_an_object_that_holds_itself() -> None:
    thing = PickledCall(Global("made_up", "Thing"), (), new=True)
    thing.state = {"me": thing, "all": {thing}}
    read: Any = loads(dumps(thing))
    assert read.state["me"] is read and read.state["all"] == {read}
    by_argument: list[Any] = []
    call = PickledCall(Global("made_up", "make"), (by_argument,))
    by_argument.append(call)
    read = loads(dumps(call))
    assert read.args[0][0].args[0] is read.args[0] or read.args[0][0] is read


class Colour(enum.IntEnum):
    RED = 3


class Outer:
    class Inner:
        pass


class Thing:
    def __init__(self) -> None:
        self.size, self.next = 4, None


class Slotted:
    __slots__ = ("a",)


class Words(list[str]):
    pass


class WithKeywords:
    def __new__(cls, *, a: int) -> Any:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (), {"a": 1}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_stay_inert_and_are_written_back(protocol: int) -> None:
    words = Words(["a", "b"])
    table = defaultdict(list, {"k": [1]})
    slotted = Slotted()
    slotted.a = 1  # type: ignore[attr-defined]
    things = [Colour.RED, Thing(), words, table, Counter("aab"), slotted, Outer.Inner, WithKeywords(a=1), Path("a/b")]
    read: Any = loads(pickle.dumps(things, protocol))
    assert not any(isinstance(part, (Thing, Words, Slotted, Path)) for _, part in walk(read))
    colour, thing, listed, mapped, *_ = read
    assert colour.function == Global(__name__, "Colour") and colour.args == (3,)
    assert thing.state == {"size": 4, "next": None} and thing.function.name in ("Thing", "__newobj__", "_reconstructor")
    assert listed.list_items == ["a", "b"] and mapped.dict_items == [("k", [1])]
    again = pickle.loads(dumps(read))
    assert again[0] is Colour.RED and vars(again[1]) == vars(things[1]) and again[2] == words and again[3] == table
    assert again[4] == Counter("aab") and again[5].a == 1 and again[6] is Outer.Inner and again[8] == Path("a/b")
    assert f"{__name__}.Colour" in unsafe_globals(read) and f"{__name__}.Outer.Inner" in unsafe_globals(read)


def test_tensors_sizes_and_dtypes_become_records() -> None:
    base = torch.arange(12.0)
    value = {
        "view": base[2:8].view(2, 3).t(),
        "whole": base,
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "size": base.shape,
        "dtypes": [getattr(torch, name) for name in BY_TORCH],
        "u16": torch.zeros(3, dtype=torch.uint16),
        "device": torch.device("cpu"),
    }
    value["parameter"].note = "kept"  # type: ignore[attr-defined]
    read: Any = loads(torch_pickle(value))
    view = read["view"]
    assert (view.shape, view.stride, view.offset, view.storage.numel) == ((3, 2), (1, 3), 2, 12)
    assert view.storage is not read["whole"].storage and view.storage == read["whole"].storage
    assert (
        read["parameter"].parameter
        and read["parameter"].requires_grad
        and read["parameter"].attributes == {"note": "kept"}
    )
    assert read["frozen"].parameter and not read["frozen"].requires_grad
    assert read["size"] == Size([12]) and type(read["size"]) is Size
    assert read["dtypes"] == [TorchDType(dtype.name) for dtype in BY_TORCH.values()]
    assert read["u16"].storage.dtype == "u16" and read["u16"].storage.numel == 3
    assert isinstance(read["device"], PickledCall)
    assert unsafe_globals(read) == []


def torch_pickle(value: Any) -> bytes:
    import zipfile

    file = io.BytesIO()
    torch.save(value, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


def test_a_conjugate_view_is_no_plain_tensor() -> None:
    read: Any = loads(torch_pickle(torch.zeros(2, dtype=torch.complex64).conj()))
    assert isinstance(read, PickledCall) and read.function == Global("torch._utils", "_rebuild_tensor_v2")
    assert_same(read, loads(dumps(read)))


def test_attributes_of_an_ordered_dict_are_kept_aside() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    read: Any = loads(torch_pickle(module.state_dict()))
    attributes: Any = attributes_of(read)
    again: Any = loads(dumps(read))
    assert list(read) == ["0.weight", "0.bias"]
    assert list(attributes["_metadata"]) == ["", "0"]
    assert attributes_of(again) == attributes


def test_unsafe_globals_are_those_that_torch_refuses() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    from ucpl.files.inert import _SAFE

    allowed = set(_get_allowed_globals())
    assert allowed >= {name for name in _SAFE if name != "torch.UntypedStorage"}
    assert unsafe_globals({Global("os", "system"): [slice(1)], "x": frozenset()}) == [
        "builtins.frozenset", "builtins.slice", "os.system",
    ]  # fmt: skip


def test_what_cannot_be_written_says_where() -> None:
    with pytest.raises(UcplError, match=r"E440.*builtins\.object.*a/1"):
        dumps({"a": [0, object()]})
    for bad in (Global("a\nb", "c"), Global("a", "b c"), PickledCall(Global("a", "b"), (), {"k": 1}), Colour.RED):
        with pytest.raises(UcplError, match="E440"):
            dumps(bad)
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UcplError, match="E440"):
        dumps(deep)


def test_storages_are_listed_in_the_order_of_the_pickle() -> None:
    refs = [StorageRef(str(n), "f32", n) for n in (3, 1, 2)]
    _, found = dump_pickle([TensorRef(ref, 0, (ref.numel,), (1,)) for ref in refs + refs])
    assert list(found) == refs


def test_walking_names_every_value() -> None:
    value = {"a": [1, {"b": 2}], 3: PickledCall(Global("m", "C"), (4,), state={"s": 5})}
    found = {key: part for key, part in walk(value) if isinstance(part, int)}
    assert found == {("a", 0): 1, ("a", 1, "b"): 2, (3, "@args", 0): 4, (3, "@state", "s"): 5}


def test_bytes_do_not_depend_on_the_process() -> None:
    code = "from ucpl.files.pickles import dumps; print(dumps([{'a', 'b', 'c', 1, (1, 'x')}, {'k': frozenset('xyz')}]).hex())"
    root = FIXTURES.parents[1]
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "0123"
    }
    assert len(runs) == 1


def test_metadata_of_torchs_distributed_checkpoint() -> None:
    value: Any = loads((FIXTURES / "containers" / "dcp.metadata").read_bytes())
    assert value.function == Global("torch.distributed.checkpoint.metadata", "Metadata")
    assert_same(value, loads(dumps(value)))
    assert "torch.distributed.checkpoint.metadata.MetadataIndex" in unsafe_globals(value)


@given(made_up)
def test_every_name_survives(name: Global) -> None:
    assert loads(dumps(name)) == name


@pytest.mark.parametrize("count", [999, 1001, 2500])  # Python ends a dict of just 1000 with an empty batch
def test_long_containers_are_written_in_python_s_batches(count: int) -> None:
    listed = [None] * count
    assert dumps(listed) == pickle.dumps(listed, 2)
    pairs = dict.fromkeys(range(count))
    assert dumps(pairs) == pickle.dumps(pairs, 2)


@pytest.mark.parametrize("bits", [31, 32, 39, 40, 63, 64, 1000, 2040])
def test_large_numbers_are_written_as_python_writes_them(bits: int) -> None:
    for value in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1):
        assert dumps(value) == pickle.dumps(value, 2)
