"""Unusual tensors of a running job in every function.

They are read and filled as by torch, or rejected by name. Expected values are torch's: `resolve_conj`, `resolve_neg`,
`contiguous`, `copy_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ucpl
from ucpl.errors import UcplError
from ucpl.live.tensors import Goal, flat_bytes, memory_of, overlap, place_of, unreadable, unwritable
from ucpl.vault.framework_writer import Distributions, collect_input, files_of
from ucpl.vault.layout_writer import LayoutWriter
from ucpl.vault.staging import Stages
from ucpl.vault.value_trees import to_value_tree

SHAPE = (4, 6)
SPEC = (
    "ucpl 1\nmodel m {\n  dim n = 4, k = 6\n  w : n k dtype f32\n}\n"
    'layout own() of m {\n  framework torch()\n  file weights = torch "a.pt"\n  w = n k as "w"\n}\n'
    'layout other() of m {\n  framework torch()\n  file weights = torch "b.pt"\n  w = n k as "v"\n}\n'
)


class Named(torch.Tensor):
    """A class of somebody's, whose elements are torch's."""


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def inferred(values: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return values.clone()


def freed(values: torch.Tensor) -> torch.Tensor:
    mine = values.clone()
    mine.untyped_storage().resize_(0)
    return mine


def cut(values: torch.Tensor) -> torch.Tensor:
    mine = values.clone()
    mine.untyped_storage().resize_(4 * mine.numel() - 4)
    return mine


def faked(values: torch.Tensor) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(values)


# Each is the same numbers, otherwise in memory.
READABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x.clone(),
    "the first of several in the last dim": lambda x: torch.stack([x, x + 100], -1)[..., 0],
    "the last of several in the last dim": lambda x: torch.stack([x + 100, x + 200, x], -1)[..., 2],
    "every second row": lambda x: torch.stack([x, x + 100], 1).flatten(0, 1)[::2],
    "every second column": lambda x: torch.stack([x, x + 100], 2).flatten(1, 2)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "a part of a buffer": lambda x: torch.cat([x.new_full((5,), 9.0), x.flatten(), x.new_full((3,), 8.0)])[5:29].view(x.shape),
    "the negative": lambda x: torch._neg_view(-x),
    "the negative with gaps": lambda x: torch._neg_view(torch.stack([-x, x], -1))[..., 0],
    "the imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "the real part": lambda x: torch.complex(x, x + 100).real,
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "a parameter with gaps": lambda x: torch.nn.Parameter(torch.stack([x, x + 100], -1)[..., 0]),
    "with a gradient": lambda x: x.clone().requires_grad_() * 1,
    "of another class": lambda x: x.clone().as_subclass(Named),
    "made in inference mode": inferred,
}  # fmt: skip
SHARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # readable, and not to be filled
    "a row for all": lambda x: x[:1].expand(SHAPE),
    "one number for all": lambda x: x[0, 0].expand(SHAPE),
    "windows that overlap": lambda x: x.flatten().unfold(0, 6, 3)[:4],
}
PLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a DTensor": lambda x: DTensor.from_local(x.clone(), mesh(), [Replicate()]),
    "a DTensor with gaps": lambda x: DTensor.from_local(torch.stack([x, x + 100], -1)[..., 0], mesh(), [Shard(0)]),
}
UNREADABLE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sparse": (lambda x: x.to_sparse(), "layout torch.sparse_coo"),
    "sparse by rows": (lambda x: x.to_sparse_csr(), "layout torch.sparse_csr"),
    "of MKL-DNN": (lambda x: x.to_mkldnn(), "layout torch._mkldnn"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1, :3]]), "does not store as one array"),
    "jagged": (lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged), "class NestedTensor"),
    "meta": (lambda x: x.to("meta"), "no device (meta)"),
    "a fake": (faked, "class FakeTensor"),
    "lazy": (lambda _: torch.nn.UninitializedParameter(), "lazy module"),
    "freed": (freed, "memory was freed"),
    "cut short": (cut, "memory was freed"),
    "an array": (lambda x: x.numpy(), "a ndarray"),
    "a number": (lambda _: 5.0, "a float"),
    "None": (lambda _: None, "a NoneType"),
    "terms of a sum": (lambda x: DTensor.from_local(x, mesh(), [Partial()]), "Partial"),
}
ALL_READABLE = READABLE | SHARED | PLACED


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "s.ucpl").write_text(SPEC)
    return str(tmp_path / "s.ucpl")


def numbers() -> torch.Tensor:
    return torch.arange(24.0).view(SHAPE) + 1


def truth(tensor: torch.Tensor) -> torch.Tensor:
    """As torch itself has it."""
    mine = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.as_subclass(torch.Tensor)
    return mine.detach().resolve_conj().resolve_neg().contiguous()


def checkpoint(top: Path, dtype: torch.dtype = torch.float32) -> Path:
    if not (top / "ck").exists():
        save({"model": {"weight": numbers().to(dtype)}}, checkpoint_id=top / "ck", no_dist=True)
    return top / "ck"


def model(weight: Any) -> torch.nn.Module:
    """A module with this as its weight, whatever it is."""
    made = torch.nn.Module()
    if isinstance(weight, torch.nn.Parameter):
        made.weight = weight
    else:
        made.register_buffer("weight", weight)
    return made


# ---- Entrances: the numbers that come out of each for a tensor that goes in -------------------------------------------------


def by_reshard(tensor: Any, spec: str) -> torch.Tensor:
    return ucpl.reshard({"w": tensor}, f"{spec}:own()", f"{spec}:other()")["v"]


def by_state_dict_of_a_vault(tensor: Any, spec: str) -> torch.Tensor:
    (file,) = (one for one in files_of(collect_input({"w": tensor}), 1, Distributions()) if one.tensors)
    (data,) = (bytes(part) for _, part in Stages().staged([one for _, _, one in file.tensors]))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(SHAPE)


def by_keys_of_a_vault(tensor: Any, spec: str) -> torch.Tensor:
    (file,) = (one for one in LayoutWriter.of(f"{spec}:own()", 0).files({"w": tensor}) if one.tensors)
    (data,) = (bytes(part) for _, part in Stages().staged([one for _, _, one in file.tensors]))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(SHAPE)


READERS = {
    "reshard": by_reshard,
    "a vault's state dict": by_state_dict_of_a_vault,
    "a vault's keys": by_keys_of_a_vault,
}


@pytest.mark.parametrize("entrance", READERS)
@pytest.mark.parametrize("odd", ALL_READABLE)
def test_every_entrance_reads_the_numbers_that_torch_reads(spec, odd, entrance):
    tensor = ALL_READABLE[odd](numbers())
    assert torch.equal(READERS[entrance](tensor, spec), truth(tensor))


@pytest.mark.parametrize("entrance", READERS)
@pytest.mark.parametrize("odd", UNREADABLE)
def test_every_entrance_refuses_what_has_no_elements(spec, odd, entrance):
    make, said = UNREADABLE[odd]
    tensor = make(numbers())
    if entrance == "a vault's state dict" and not isinstance(tensor, torch.Tensor):
        return  # a value of its own, which is kept as it is
    with pytest.raises(UcplError) as caught:
        READERS[entrance](tensor, spec)
    assert caught.value.diagnostics[0].code == ("E640" if entrance == "reshard" else "E693")
    assert said in str(caught.value)


def into_reshard(tensor: Any, top: Path) -> None:
    (top / "s.ucpl").write_text(SPEC)
    ucpl.reshard({"w": numbers()}, f"{top}/s.ucpl:own()", f"{top}/s.ucpl:other()", out={"v": tensor})


def into_model(tensor: Any, top: Path) -> None:
    ucpl.load_into(model(tensor), None, checkpoint(top))


def into_dcp(tensor: Any, top: Path) -> None:
    state = {"model.weight": tensor}
    load(state, storage_reader=ucpl.StorageReader(checkpoint(top)))
    assert state["model.weight"] is tensor


WRITERS = {"reshard": into_reshard, "load_into": into_model, "dcp.load": into_dcp}


@pytest.mark.parametrize("entrance", WRITERS)
@pytest.mark.parametrize("odd", READABLE | PLACED)
def test_every_entrance_fills_a_tensor_in_its_place(tmp_path, odd, entrance):
    tensor = (READABLE | PLACED)[odd](torch.zeros(SHAPE) - 7)
    if odd == "with a gradient" and entrance == "load_into":
        pytest.skip("no module has a buffer that is made by autograd")
    WRITERS[entrance](tensor, tmp_path)
    assert torch.equal(truth(tensor), numbers())


@pytest.mark.parametrize("odd", SHARED)
@pytest.mark.parametrize("entrance", ["reshard", "load_into"])
def test_elements_that_share_memory_are_not_filled(tmp_path, odd, entrance):
    tensor = SHARED[odd](numbers() + 50)
    before = tensor.clone()
    with pytest.raises(UcplError, match="whose elements share memory") as caught:
        WRITERS[entrance](tensor, tmp_path)
    assert caught.value.diagnostics[0].code == ("E640" if entrance == "reshard" else "E646")
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("odd", [odd for odd in UNREADABLE if odd not in ("an array", "a number", "None", "lazy")])
@pytest.mark.parametrize("entrance", ["reshard", "load_into"])
def test_what_has_no_elements_is_not_filled(tmp_path, odd, entrance):
    make, said = UNREADABLE[odd]
    with pytest.raises(UcplError) as caught:
        WRITERS[entrance](make(numbers()), tmp_path)
    assert caught.value.diagnostics[0].code == ("E640" if entrance == "reshard" else "E646")
    assert said in str(caught.value)


DTYPES = [
    torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.bool,
    torch.complex64, torch.uint8,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 4), (2, 3, 2, 2)], ids=str)
def test_bytes_are_those_of_the_numbers_in_every_type_and_shape(dtype, shape):
    base = (torch.arange(48) % 3).to(dtype)
    count = int(np.prod(shape))
    views = [
        base[:count].view(shape),
        base[::2][:count].view(shape) if count <= 1 else base[: 2 * count].view(*shape, 2)[..., 1],
    ]
    views += [base[:count].view(shape).transpose(0, -1)] if len(shape) > 1 else []
    views += [base[:count].view(shape).contiguous(memory_format=torch.channels_last)] if len(shape) == 4 else []
    views += [base[:count].view(shape).conj()] if dtype.is_complex else []
    for view in views:
        there = torch.empty(count, dtype=dtype)
        there.copy_(view.reshape(-1))
        assert bytes(memory_of(view)) == (there.view(torch.uint8).numpy().tobytes() if count else b"")
        assert unreadable(view) == unwritable(view) == ""
        goal = Goal.of(view.clone(memory_format=torch.preserve_format))
        assert goal.flat.shape == (count,) and torch.equal(flat_bytes(goal.flat), flat_bytes(view))


def test_two_names_of_one_memory_are_one_tensor_only_if_they_are_the_same_numbers():
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    held = to_value_tree({"z": z, "again": z, "conj": z.conj(), "real": z.real}, "a.pt")
    assert len(held.tensors) == 3
    assert place_of(z) == place_of(z.view(3)) != place_of(z.conj())
    assert place_of(torch.ones(3)) != place_of(torch.ones(3))


def test_bytes_that_two_tensors_share_are_found():
    flat = torch.zeros(24)
    pairs = flat.view(12, 2)
    assert overlap([("a", pairs[:, 0]), ("b", pairs[:, 1])]) is None
    assert overlap([("a", flat[:8]), ("b", flat[8:])]) is None
    assert overlap([("a", flat[:9]), ("b", flat[8:])]) == ("a", "b")
    assert overlap([("a", pairs[:, 0]), ("b", flat[3:5])]) == ("a", "b")
    assert overlap([("a", pairs[:, 0]), ("b", flat[3:4])]) is None
    assert overlap([("a", flat)], [("b", flat.view(torch.int32)[3:4])]) == ("a", "b")
    assert overlap([], [("a", flat), ("b", flat)]) is None
    assert overlap([("a", flat[:0])], [("b", flat)]) is None


def test_views_whose_elements_are_apart_in_an_odd_order_are_filled():
    flat = torch.zeros(40)
    for shape, stride, is_apart in (
        ((2, 3), (3, 2), True),
        ((3, 3), (2, 1), False),
        ((2, 2), (1, 1), False),
        ((5, 2), (2, 1), True),
    ):
        assert (unwritable(flat.as_strided(shape, stride, 3)) == "") == is_apart, (shape, stride)


def test_parameters_that_overlap_are_refused(tmp_path):
    save({"model": {"a": torch.ones(4), "b": torch.zeros(4)}}, checkpoint_id=tmp_path / "ck", no_dist=True)
    flat = torch.zeros(20)
    made = torch.nn.Module()
    made.a, made.b = torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[3:7])
    with pytest.raises(UcplError, match="a and b share memory in the job") as caught:
        ucpl.load_into(made, None, tmp_path / "ck")
    assert caught.value.diagnostics[0].code == "E646"
    made.a, made.b = (torch.nn.Parameter(one) for one in flat[:8].view(4, 2).unbind(1))
    ucpl.load_into(made, None, tmp_path / "ck")
    assert flat[:8].tolist() == [1.0, 0.0] * 4


@pytest.mark.parametrize(
    ("here", "there", "fits"),
    [
        (torch.int32, torch.tensor([1, 2**31 - 1]), True),
        (torch.int32, torch.tensor([1, 2**31]), False),
        (torch.int8, torch.tensor([300, 1]), False),
        (torch.uint8, torch.tensor([-1, 1]), False),
        (torch.bool, torch.tensor([0, 1]), True),
        (torch.bool, torch.tensor([0, 2]), False),
        (torch.float32, torch.tensor([5, 2**24 + 1]), False),
        (torch.float32, torch.tensor([5, 2**24]), True),
        (torch.int64, torch.tensor([1.0, 2.5]), False),
        (torch.int64, torch.tensor([1.0, 3.0]), True),
        (torch.float16, torch.tensor([1.0, 1e6]), False),
        (torch.float8_e4m3fn, torch.tensor([1.0, 1e6]), False),
        (torch.bfloat16, torch.tensor([1.0, 1.001]), True),
        (torch.float32, torch.tensor([1.0, float("inf"), float("nan")]), True),
        (torch.float16, torch.tensor([1.0, float("inf"), float("nan")]), True),
        (torch.float32, torch.tensor([1 + 2j]), False),
    ],
    ids=str,
)  # fmt: skip
def test_a_number_that_the_job_cannot_hold_is_refused(tmp_path, here, there, fits):
    made = torch.nn.Module()
    made.register_buffer("count", torch.zeros(there.shape, dtype=here))
    save({"model": {"count": there}}, checkpoint_id=tmp_path / "ck", no_dist=True)
    if fits:
        ucpl.load_into(made, None, tmp_path / "ck")
        assert torch.equal(made.get_buffer("count").nan_to_num(7), there.to(here).nan_to_num(7))
        return
    with pytest.raises(UcplError, match=f"count is {here} in the job, which cannot hold the {there.dtype}") as caught:
        ucpl.load_into(made, None, tmp_path / "ck")
    assert caught.value.diagnostics[0].code == "E646"


@pytest.mark.parametrize("stored", ["emb.weight", "head.weight"])
def test_a_tied_tensor_that_is_stored_once_fills_the_model(tmp_path, stored):
    """As transformers' save_pretrained writes it: by one of its names alone."""
    made = torch.nn.Module()
    made.emb, made.head = torch.nn.Embedding(4, 6), torch.nn.Linear(6, 4, bias=False)
    made.head.weight = made.emb.weight
    save({"model": {stored: numbers()}}, checkpoint_id=tmp_path / "ck", no_dist=True)
    ucpl.load_into(made, None, tmp_path / "ck")
    assert made.head.weight is made.emb.weight
    assert torch.equal(made.head.weight, numbers())
    made.head.weight = torch.nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(UcplError, match="and the checkpoint has not"):
        ucpl.load_into(made, None, tmp_path / "ck")
