"""Value trees for tests of stores: comparisons, samples, and files from plans."""

from __future__ import annotations

import io
import pickle
import re
import types
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from ucpl.extents import DTYPES, Global, PickledCall, Size, StorageRef, TensorRef, TorchDType
from ucpl.files.inert import LEAVES, set_attributes, steps_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
ENTRY = re.compile(rb"PK\x01\x02.{12}", re.DOTALL)  # of a zip directory, up to the CRC


def assert_same(a: Any, b: Any) -> None:
    """Check for equal trees with the same sharing of containers."""
    met: dict[int, int] = {}
    todo = [(a, b, "")]
    while todo:
        x, y, where = todo.pop()
        assert type(x) is type(y), where
        if type(x) in LEAVES:
            assert repr(x) == repr(y), where
            continue
        if type(x) is not tuple and id(x) in met:
            assert met[id(x)] == id(y), f"{where} is not shared any more"
            continue
        if id(x) in met and met[id(x)] == id(y):
            continue
        met[id(x)] = id(y)
        if type(x) is TensorRef:
            assert x == y, where
        if type(x) in (set, frozenset):
            assert sorted(map(repr, x)) == sorted(map(repr, y)), where
            continue
        left, right = steps_of(x), steps_of(y)
        assert [step for step, _ in left] == [step for step, _ in right], where
        todo.extend((p, q, f"{where}/{step}") for (step, p), (_, q) in zip(left, right, strict=True))


def built(plan: Any, storages: dict[str, bytes]) -> bytes:
    """The file of a plan; it must cover every byte once."""
    out = bytearray(plan.size)
    covered = bytearray(plan.size)

    def put(start: int, data: bytes) -> None:
        assert not any(covered[start : start + len(data)]), f"bytes {start} to {start + len(data)} are written twice"
        out[start : start + len(data)] = data
        covered[start : start + len(data)] = b"\1" * len(data)

    for start, data in plan.fixed:
        put(start, data)
    for name, (start, nbytes) in plan.storages.items():
        assert len(storages[name]) == nbytes
        put(start, storages[name])
    for start, data in plan.finish({name: zlib.crc32(data) for name, data in storages.items()}):
        put(start, data)
    assert all(covered), "a byte is never written"
    return bytes(out)


# ---- torch's own reading, with stubs for missing packages
# --------------------------------------------------------------


class Stub:
    """A stub for a class of a framework."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("torch", "collections", "builtins", "__builtin__", "_codecs", "argparse"):
            return super().find_class(module, name)
        return type(name, (Stub,), {})


_PICKLE = types.ModuleType("pickle_with_stubs")
_PICKLE.Unpickler = _Unpickler  # type: ignore[attr-defined]
_PICKLE.load = lambda file, **kw: _Unpickler(file, **kw).load()  # type: ignore[attr-defined]


def torch_value(data: bytes) -> Any:
    """The value of torch.load without weights_only."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_PICKLE)


def assert_tells(ours: Any, theirs: Any, tensors: Any, where: str = "") -> int:
    """Compare an inert tree with torch's, and return the compared tensors.

    `tensors(ref)` gives a torch tensor of ucpl's.
    """
    kind = type(ours)
    if kind is TensorRef:
        got = tensors(ours)
        assert got.dtype == theirs.dtype and got.shape == theirs.shape and got.stride() == theirs.stride(), where
        assert theirs.storage_offset() == ours.offset and theirs.requires_grad == ours.requires_grad, where
        assert ours.parameter == isinstance(theirs, torch.nn.Parameter), where
        assert same_bits(got, theirs), where
        assert (ours.attributes or {}) == dict(theirs.__dict__), where
        return 1
    if kind is PickledCall:
        assert ours.function.name.endswith(type(theirs).__name__), where
        state = ours.state if isinstance(ours.state, dict) else {}
        return sum(assert_tells(state[name], vars(theirs)[name], tensors, f"{where}.{name}") for name in state)
    if kind in (dict, OrderedDict):
        assert kind is type(theirs) and len(ours) == len(theirs), where
        pairs = zip(ours.items(), theirs.items(), strict=True)
        return sum(
            assert_tells(a, b, tensors, f"{where}/{key}")
            + (assert_tells(key, other, tensors, where) if isinstance(key, tuple) else 0)
            + (0 if isinstance(key, PickledCall | tuple) else int(key != other))
            for (key, a), (other, b) in pairs
        )
    if kind in (list, tuple):
        assert kind is type(theirs) and len(ours) == len(theirs), where
        pairs2 = enumerate(zip(ours, theirs, strict=True))
        return sum(assert_tells(a, b, tensors, f"{where}/{n}") for n, (a, b) in pairs2)
    if kind is Size:
        assert type(theirs) is torch.Size and tuple(ours) == tuple(theirs), where
    elif kind is TorchDType:
        assert theirs is getattr(torch, DTYPES[ours.name].torch), where
    elif kind is Global:
        assert theirs.__name__ == ours.name.split(".")[-1], where
    else:
        assert kind is type(theirs) and ours == theirs, where
    return 0


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes: NaNs too."""
    x, y = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def torch_tensor(ref: TensorRef, raw: bytes) -> torch.Tensor:
    """A view of a storage's bytes."""
    dtype = getattr(torch, DTYPES[ref.storage.dtype].torch)
    whole = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return whole.as_strided(ref.shape, ref.stride, ref.offset)


# ---- strategies ------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}(\.[a-z_][a-z0-9_]{0,8}){0,2}", fullmatch=True)
made_up = st.builds(Global, names.map(lambda n: f"made_up.{n}"), names)
storages = st.builds(
    lambda n, dtype, numel: StorageRef(f"{n}_{dtype}_{numel}", dtype, numel),
    st.integers(0, 5),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 100),
)


@st.composite
def tensors(draw: st.DrawFn) -> TensorRef:
    storage = draw(storages)
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    stride = tuple(draw(st.integers(0, 2**40)) for _ in shape)
    flag, parameter = draw(st.booleans()), draw(st.booleans())
    attributes = draw(st.none() | st.dictionaries(names, st.text() | st.integers(), min_size=1, max_size=2))
    return TensorRef(storage, draw(st.integers(0, 2**40)), shape, stride, flag, parameter, attributes)


plain_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**2050), 2**2050)
    | st.floats()
    | st.text()
    | st.text(st.characters(codec=None, categories=["Cs", "Lu"]))
    | st.binary()
    | st.builds(bytearray, st.binary())
    | st.complex_numbers()
    | st.builds(TorchDType, st.sampled_from(sorted(DTYPES)))
    | st.builds(Size, st.lists(st.integers(0, 2**62), max_size=5))
    | storages.filter(lambda storage: DTYPES[storage.dtype].storage is not None)
    | tensors()
)
leaves = plain_leaves | made_up | st.slices(9)
keys = (
    st.text()
    | st.integers(-(2**63), 2**63)
    | st.booleans()
    | st.none()
    | st.binary()
    | st.tuples(st.text(), st.integers(0, 9))
)


def _ordered(pairs: list[tuple[Any, Any]], attributes: dict[str, Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(pairs)
    set_attributes(made, attributes or None)
    return made


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=5)
    dicts = st.dictionaries(keys, children, max_size=5)
    calls = st.builds(
        PickledCall,
        made_up,
        lists.map(tuple),
        new=st.booleans(),
        state=st.none() | st.dictionaries(names, children, max_size=3),
        list_items=lists,
        dict_items=st.lists(st.tuples(children, children), max_size=3),
    )
    with_names = st.builds(
        PickledCall, made_up, lists.map(tuple), st.dictionaries(names, children, min_size=1), st.just(True)
    )
    ordered = st.builds(
        _ordered, st.lists(st.tuples(keys, children), max_size=4), st.dictionaries(names, children, max_size=2)
    )
    sets = st.sets(keys, max_size=5)
    twice = children.map(lambda child: [child, {"again": child}, (child, [child])])
    return lists | lists.map(tuple) | dicts | ordered | calls | with_names | sets | sets.map(frozenset) | twice


values = st.recursive(leaves, _containers, max_leaves=25)


def bare(path: Path) -> None:
    """Change a file's archives to torch's form without CRCs.

    They have 0 in the directory, and behind the data.
    """
    data = bytearray(path.read_bytes())
    for found in ENTRY.finditer(bytes(data)):
        crc, size = data[found.end() : found.end() + 4], data[found.end() + 4 : found.end() + 8]
        later = bytes(data).find(b"PK\x07\x08" + crc + size)
        if later >= 0:
            data[later + 4 : later + 8] = bytes(4)
        data[found.end() : found.end() + 4] = bytes(4)
    path.write_bytes(data)
