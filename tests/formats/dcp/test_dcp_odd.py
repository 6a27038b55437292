"""Odd DCP folders in torch's records: names, places and numbers."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.counted import calls
from tests.files.refusals import refusal
from ucpl.extents import Scalar
from ucpl.formats.dcp.chunks import demand_whole
from ucpl.formats.dcp.mesh import Boxes, chunked, mesh_of
from ucpl.formats.dcp.metadata import ByteRange, ChunkedTensor, StoredChunk
from ucpl.formats.dcp.writing import _tensor_of
from ucpl.formats.opening import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
Steps = tuple[str | int, ...]
StateDict = dict[Steps, object]


def parts(tensor: torch.Tensor, ways: int) -> list[torch.Tensor]:
    return list(torch.chunk(tensor, ways)) if tensor.dim() else [tensor]


def save(folder: Path, state: StateDict, whole: frozenset[str] = frozenset()) -> Path:
    """A state dict by paths, as two ranks of FSDP save it.

    `whole`: names that are not cut.
    """
    data, places = io.BytesIO(), {}
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for steps, value in state.items():
        name, start = ".".join(map(str, steps)), data.tell()
        if not isinstance(value, torch.Tensor):
            torch.save(value, data)
            places[MetadataIndex(name)] = _StorageInfo("__0_0.distcp", start, data.tell() - start)
            described[name] = BytesStorageMetadata()
            continue
        chunks, at = [], 0
        for part in parts(value, 1 if name in whole else 2):
            begin, start = torch.Size((at, *(0 for _ in value.shape[1:])) if value.dim() else ()), data.tell()
            torch.save(part.clone(), data)
            places[MetadataIndex(name, begin)] = _StorageInfo("__0_0.distcp", start, data.tell() - start)
            chunks.append(ChunkStorageMetadata(begin, part.size()))
            at += part.shape[0] if value.dim() else 0
        described[name] = TensorStorageMetadata(TensorProperties.create_from_tensor(value), value.size(), chunks)
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(data.getvalue())
    paths = {".".join(map(str, steps)): steps for steps in state}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, planner_data=paths, storage_data=places)))
    return folder


def trained(params: dict[str, torch.Tensor], model: Steps = ("model",), beside: StateDict | None = None) -> StateDict:
    """Parameters and the optimizer's state of them."""
    state: StateDict = {(*model, name): tensor for name, tensor in params.items()}
    for name, tensor in params.items():
        state["optim", "state", name, "step"] = torch.tensor(3.0)
        state["optim", "state", name, "exp_avg"] = tensor + 1
        state["optim", "state", name, "exp_avg_sq"] = tensor + 2
    told = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(params)}
    state |= {("optim", "param_groups", 0, key): value for key, value in told.items()}
    return state | (beside or {})


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def assert_loads(folder: Path, state: StateDict) -> None:
    """torch loads all of a state dict."""
    wanted = {".".join(map(str, steps)): value for steps, value in state.items()}
    held: dict[str, object] = {
        n: torch.full_like(v, 9) if isinstance(v, torch.Tensor) else 0 for n, v in wanted.items()
    }
    load(held, checkpoint_id=folder, no_dist=True)
    for name, value in wanted.items():
        found = held[name]
        same = (
            torch.equal(found, value)
            if isinstance(found, torch.Tensor) and isinstance(value, torch.Tensor)
            else found == value
        )
        assert same, name


def assert_round_trip(tmp_path: Path, state: StateDict, whole: frozenset[str] = frozenset()) -> None:
    """To one file and to other degrees: torch loads all, without loss."""
    source = save(tmp_path / "source", state, whole)
    ucpl.convert(source, tmp_path / "plain.pt", to="plain()")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "made", to="dcp(fsdp = 3)")
    assert_loads(tmp_path / "made", state)
    assert ucpl.verify(source) and ucpl.verify(tmp_path / "made")
    assert ucpl.compare(source, tmp_path / "made")


def test_names_that_mean_something_elsewhere(tmp_path: Path) -> None:
    """Names with slashes, braces, quotes, globs and digits stay unchanged.

    This holds for tensors with common and with own layout lines.
    """
    names = [
        "a/b",
        "layers.0",
        "layers",
        "0",
        "1",
        "optim",
        "end.",
        "uncut c/d",
        "uncut a{b}",
        'uncut a"b *',
        "uncut ä.é",
    ]
    params = {name: numbered(3, 2) + n for n, name in enumerate(names)}
    whole = frozenset(
        f"{prefix}{name}{state}"
        for name in names
        if name.startswith("uncut")
        for prefix, state in (("model.", ""), ("optim.state.", ".exp_avg"), ("optim.state.", ".exp_avg_sq"))
    )
    assert_round_trip(tmp_path, trained(params), whole)


@pytest.mark.parametrize(
    "state",
    [
        trained({"state.proj.weight": numbered(4, 2), "param_groups.proj.weight": numbered(3)}),
        trained({"state.w": numbered(4, 2), "param_groups.w": numbered(3)}),
        trained({"w": numbered(4, 2)}, ()),
        trained({"s": torch.tensor(2.0), "w": numbered(2)}),
        trained({"s": torch.tensor(2.0)}),
        trained({"w": numbered(2, 1, 2, 1, 2, 1, 2)}),
        trained({"w": numbered(4)}, beside={("optim", "state", "w", "step"): torch.tensor(1e10, dtype=torch.float64)}),
        trained({"w": numbered(4)}, beside={("optim", "param_groups", 0, "lr"): torch.tensor(0.5)}),
    ],
    ids=["modules", "tensors", "no prefix", "number", "numbers alone", "dims", "step", "lr"],
)  # fmt: skip
def test_state_dicts_that_are_odd(tmp_path: Path, state: StateDict) -> None:
    source = save(tmp_path / "source", state)
    ucpl.convert(source, tmp_path / "made", to="dcp(fsdp = 3)")
    assert ucpl.compare(source, tmp_path / "made") and ucpl.verify(source) and ucpl.verify(tmp_path / "made")
    assert_loads(tmp_path / "made", state)


def test_a_model_in_dicts_without_a_prefix(tmp_path: Path) -> None:
    """Names of the optimizer identify the model's dicts."""
    optimizer = {steps: v for steps, v in trained({"layers.w": numbered(4, 2)}).items() if steps[0] == "optim"}
    found = open_checkpoint(
        save(tmp_path / "source", {("layers", "w"): numbered(4, 2), ("run", "seen"): torch.tensor(5), **optimizer})
    )
    assert [t.name for t in found.state.tensors] == ["layers.w"]
    assert list(found.state.carried) == ["run"]


def test_averages_of_weights_are_not_the_model(tmp_path: Path) -> None:
    """Averages have names with equal ends.

    The dict with a model's name is used.
    Otherwise neither is.
    """
    whole = frozenset({"ema.w"})
    found = open_checkpoint(
        save(tmp_path / "a", {("ema", "w"): numbered(4, 2), **trained({"w": numbered(4, 2)})}, whole)
    )
    assert found.state.settings["prefix"].value == "model."
    both = {("b", "w"): numbered(4, 2), **trained({"w": numbered(4, 2)}, ("a",))}
    said = refusal(lambda: open_checkpoint(save(tmp_path / "b", both)), "E524")
    assert said.message == "the optimizer has states of `w`, and several models have one: `b.w` and `a.w`"


def test_what_the_optimizer_says_of_no_elements_goes_along(tmp_path: Path) -> None:
    source = save(tmp_path / "source", trained({"w": numbered(4, 2), "none": numbered(0, 2)}))
    found = open_checkpoint(source)
    assert found.state.groups[0].members == ("w",)
    ucpl.convert(source, tmp_path / "made", to="dcp(fsdp = 3)")
    held = {
        "model.none": torch.zeros(0, 2),
        "model.w": torch.zeros(4, 2),
        "optim.state.none.exp_avg": torch.zeros(0, 2),
    }
    load(held, checkpoint_id=tmp_path / "made", no_dist=True)
    assert torch.equal(held["model.w"], numbered(4, 2))


# ---- places --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2_w4", "fsdp2_tp_2x2", "hsdp_2x2"])
def test_verify_reads_each_archive_of_a_file(name: str) -> None:
    found = ucpl.verify(FIXTURES / name)
    held = open_checkpoint(FIXTURES / name).extents.values()
    assert found and found.files.bytes_protected > sum(one.storage_bytes for one in held)


def test_verify_names_the_tensor_of_a_byte_that_changed(tmp_path: Path) -> None:
    source = save(tmp_path / "source", trained({"w": numbered(40, 8)}))
    extent = open_checkpoint(source).extents[".metadata", ("optim.state.w.exp_avg", 20, 0)]
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[extent.storage_start] ^= 1
    (source / "__0_0.distcp").write_bytes(data)
    (found,) = ucpl.verify(source).findings
    assert found.code == "E630" and "it holds optim.state.w.exp_avg/20/0" in found.message


def changed(folder: Path, change: Callable[[Metadata], object]) -> Path:
    said = pickle.loads((folder / ".metadata").read_bytes())
    change(said)
    (folder / ".metadata").write_bytes(pickle.dumps(said))
    return folder


def place(said: Metadata, name: str) -> MetadataIndex:
    return next(index for index in said.storage_data if index.fqn == name)


def one_place(said: Metadata) -> None:
    said.storage_data[place(said, "model.b")] = said.storage_data[place(said, "model.a")]


def within(said: Metadata) -> None:
    held = said.storage_data[place(said, "model.a")]
    said.storage_data[place(said, "model.a")] = _StorageInfo(held.relative_path, held.offset, held.length + 1)


def behind(said: Metadata) -> None:
    held = said.storage_data[place(said, "model.b")]
    said.storage_data[place(said, "model.b")] = _StorageInfo(held.relative_path, 1 << 50, held.length)


def one_path(said: Metadata) -> None:
    said.planner_data["model.b"] = ("model", "a")


def dict_there(said: Metadata) -> None:
    for kept in (said.planner_data, said.state_dict_metadata):
        kept["model.a.b"] = kept.pop("model.b")
    said.planner_data["model.a.b"] = ("model", "a", "b")
    for index in [one for one in said.storage_data if one.fqn == "model.b"]:
        said.storage_data[MetadataIndex("model.a.b", index.offset)] = said.storage_data.pop(index)


def deep(said: Metadata) -> None:
    said.planner_data["model.b"] = ("model",) * 10_000


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (one_place, "E520", "has `model.a` at bytes 0 to"),
        (within, "E520", "and `model.a` from"),
        (behind, "E402", "are asked for"),
        (one_path, "E520", "gives `model.b` the path `model.a` in the state dict"),
        (dict_there, "E520", "has two values at `model.a` of the state dict: `model.a` and `model.a.b`"),
        (deep, "E455", "expected is a path of at most 100 steps"),
    ],
)
def test_places_and_paths_that_are_no_ones_own(
    tmp_path: Path, change: Callable[[Metadata], object], code: str, message: str
) -> None:
    source = save(tmp_path / "source", {("model", "a"): numbered(4), ("model", "b"): numbered(4)})
    said = refusal(lambda: open_checkpoint(changed(source, change)), code)
    assert message in said.message


def test_chunks_without_number_are_looked_at_in_proportion() -> None:
    """Widths of no mesh, and overlapping boxes, are checked in linear time."""
    ends = [0, *(n * 3 + n % 2 for n in range(1, 6000)), 18_000]
    odd: Boxes = {(low,): (high - low,) for low, high in pairwise(ends)}
    assert calls(lambda: mesh_of({"a": (18_000,)}, {"a": odd})) < 1_000 * len(odd)
    assert mesh_of({"a": (18_000,)}, {"a": odd}) is None
    many = tuple(StoredChunk((n, n), (2000 - n, 2000 - n), ByteRange("f", n, 1)) for n in range(2000))
    whole = ChunkedTensor("f32", (2000, 2000), many)
    said = refusal(lambda: demand_whole("a", whole, Path(".metadata")), "E521")
    assert said.message == "element [1, 1] of `a` is in 2 chunks"
    assert calls(lambda: refusal(lambda: demand_whole("a", whole, Path(".metadata")), "E521")) < 20 * len(many)


@pytest.mark.parametrize(("fsdp", "tp"), [(3, 2), (4, 4), (1, 5), (7, 1), (2, 3)])
def test_the_mesh_of_uneven_tensors(fsdp: int, tp: int) -> None:
    """The least mesh that makes the chunks of all tensors.

    It has as many ranks as the largest tensor needs.
    """

    def cut(rows: int) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {(low + at,): (n,) for low, size in chunked(rows, tp) for at, n in chunked(size, fsdp)}

    shapes: dict[str, tuple[int, ...]] = {f"w{rows}": (rows,) for rows in (9, 31, 100, 5)}
    shapes |= {"wide": (fsdp * 2, tp * 3)}
    boxes = {name: cut(*shape) for name, shape in shapes.items() if len(shape) == 1}
    boxes["wide"] = {(a, b): (n, m) for a, n in chunked(fsdp * 2, fsdp) for b, m in chunked(tp * 3, tp)}
    found = mesh_of(shapes, boxes)
    assert found is not None and (found.fsdp, found.tp) == (fsdp, tp)


def test_a_count_of_steps_is_kept_to_the_last_digit() -> None:
    """As torch's f32 if that is exact, or wider, or unchanged."""
    assert _tensor_of(7) == Scalar("f32", (), struct.pack("<f", 7))
    assert _tensor_of((1 << 24) + 1) == Scalar("f64", (), struct.pack("<d", (1 << 24) + 1))
    assert _tensor_of(1e300) == Scalar("f64", (), struct.pack("<d", 1e300))
    assert _tensor_of((1 << 60) + 1) == (1 << 60) + 1
