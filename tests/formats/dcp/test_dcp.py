"""DCP folders of torch 2.13 and 2.15: read exactly, or rejected.

Incomplete folders are rejected. The fixtures' values are a formula of each tensor's name, so that they do not depend on
ucpl's reader. Targets are loaded by torch.distributed.checkpoint itself.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from ucpl.errors import UcplError
from ucpl.extents import PickledCall, Size
from ucpl.files.pickles import dumps, loads
from ucpl.formats.dcp.store import DCP
from ucpl.formats.opening import open_checkpoint
from ucpl.language import parse_call
from ucpl.layout import load as load_texts
from ucpl.layout import resolve
from ucpl.placement import locate

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
WHOLE = ("fsdp2_w4", "fsdp2_tp_2x2", "hsdp_2x2")


def value_of(said: dict[str, object]) -> torch.Tensor:
    """A tensor of a fixture, by the formula that made it."""
    dtype = getattr(torch, str(said["dtype"]))
    if "value" in said:
        return torch.tensor(said["value"], dtype=dtype)
    seed = int.from_bytes(hashlib.sha256(str(said["f"]).encode()).digest()[:4], "little")
    shape = said["shape"]
    assert isinstance(shape, list)
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(name: str) -> dict[str, torch.Tensor]:
    told = json.loads((FIXTURES / f"{name}.truth.json").read_text())["tensors"]
    return {key: value_of(said) for key, said in told.items()}


def held_by_plain(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a plain file, under the state dict's names."""
    plain = torch.load(path, weights_only=True)
    out = {f"model.{name}": tensor for name, tensor in plain["buffers"].items()}
    for name, states in plain["params"].items():
        out[f"model.{name}"] = states["weight"]
        out |= {f"optim.state.{name}.{s}": torch.as_tensor(v) for s, v in states.items() if s != "weight"}
    return out | {f"model.{alias}": out[f"model.{owner}"] for alias, owner in plain["aliases"].items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    wrong = [n for n, t in wanted.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)]
    assert wrong == []


@pytest.mark.parametrize("name", WHOLE)
def test_a_folder_is_read_exactly(tmp_path: Path, name: str) -> None:
    ucpl.convert(FIXTURES / name, tmp_path / "plain.pt", to="plain()")
    assert_equal(held_by_plain(tmp_path / "plain.pt"), truth(name))


@pytest.mark.parametrize(("name", "mesh"), [("fsdp2_w4", (4, 1)), ("fsdp2_tp_2x2", (2, 2)), ("hsdp_2x2", (2, 1))])
def test_mesh_groups_and_what_else_was_saved(name: str, mesh: tuple[int, int]) -> None:
    found = open_checkpoint(FIXTURES / name)
    settings = found.state.settings
    assert (settings["fsdp"].value, settings["tp"].value) == mesh
    assert (settings["prefix"].value, settings["states"].value) == ("model.", "optim.state.")
    assert found.state.carried == {"step": 7, "lr_sched": {"last_epoch": 3, "base_lrs": [0.001, 0.0002]}}
    decay, rest = found.state.groups
    assert (decay.hyper["weight_decay"], rest.hyper["weight_decay"], rest.hyper["lr"]) == (0.1, 0.0, 0.0002)
    assert rest.members == ("five", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_proj.bias", "norm.weight")
    kinds = {t.name: t.kind for t in found.state.tensors}
    assert {n for n, k in kinds.items() if k == "buffer"} == {"rope_inv_freq", "num_calls", "live", "proj_t"}
    assert {n for n, k in kinds.items() if k == "frozen"} == set()
    assert found.state.aliases == ({"lm_head.weight": "embed_tokens.weight"} if name == "fsdp2_w4" else {})


@pytest.mark.parametrize("name", WHOLE)
def test_what_infer_writes_reads_the_same(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.ucpl").write_text(ucpl.infer(FIXTURES / name).text())
    ucpl.convert(FIXTURES / name, tmp_path / "plain.pt", to="plain()", layout=f"{tmp_path}/own.ucpl:stored()")
    assert_equal(held_by_plain(tmp_path / "plain.pt"), truth(name))


def loaded_by_torch(folder: Path, like: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Tensors and other values, as torch reads them in another process."""
    held = {name: torch.full_like(tensor, 1) for name, tensor in like.items()}
    beside: dict[str, object] = {"step": 0, "lr_sched.last_epoch": 0, "optim.param_groups.1.params": []}
    state: dict[str, object] = {**held, **beside}
    load(state, checkpoint_id=folder, no_dist=True)
    return held, {name: state[name] for name in beside}  # tensors are filled where they are


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("fsdp2_w4", "dcp(fsdp = 3)"),
        ("fsdp2_w4", "dcp(fsdp = 50)"),
        ("fsdp2_tp_2x2", "dcp(fsdp = 3, tp = 4)"),
        ("fsdp2_tp_2x2", "dcp(fsdp = 1, tp = 3)"),
        ("fsdp2_tp_2x2", "dcp(fsdp = 5, tp = 1)"),
        ("hsdp_2x2", "dcp(fsdp = 6)"),
    ],
)
def test_torch_loads_a_target_of_other_degrees(tmp_path: Path, name: str, to: str) -> None:
    ucpl.convert(FIXTURES / name, tmp_path / "made", to=to)
    held, beside = loaded_by_torch(tmp_path / "made", truth(name))
    assert_equal(held, truth(name))
    assert (beside["step"], beside["lr_sched.last_epoch"]) == (7, 3)
    assert beside["optim.param_groups.1.params"] == list(open_checkpoint(FIXTURES / name).state.groups[1].members)
    assert ucpl.compare(FIXTURES / name, tmp_path / "made")


def test_a_target_has_the_chunks_that_fsdp_makes(tmp_path: Path) -> None:
    """Each rank's chunks in its file.

    5 rows over 4 ranks are 2, 2, 1.
    """
    ucpl.convert(FIXTURES / "fsdp2_w4", tmp_path / "made", to="dcp(fsdp = 4)")
    mine, theirs = open_checkpoint(tmp_path / "made"), open_checkpoint(FIXTURES / "fsdp2_w4")
    assert {k: e.shape for k, e in mine.extents.items()} == {k: e.shape for k, e in theirs.extents.items()}
    of_five = {key[1]: mine.extents[file, key].file for file, key in mine.extents if key[0] == "model.five"}
    assert of_five == {0: "__0_0.distcp", 2: "__1_0.distcp", 4: "__2_0.distcp"}


OTHERWISE = """ucpl 1

layout otherwise(fsdp = 1, tp = 1, a = 3, b = 2) of any extends dcp(fsdp = fsdp) {
  mesh fsdp tp a b
  embed_tokens.weight                = _@a[3, 30, 8] _@b[10, 4]  as "model.embed_tokens.weight"
  "layers.0.self_attn.q_proj.weight" = _ _@chunk(a)              as "model.layers.0.self_attn.q_proj.weight"
}
"""


def test_chunks_of_any_grid_are_read(tmp_path: Path) -> None:
    """Widths of no mesh.

    Each dim is cut over an axis of its own.
    """
    (tmp_path / "otherwise.ucpl").write_text(OTHERWISE)
    ucpl.convert(FIXTURES / "fsdp2_w4", tmp_path / "made", to=f"{tmp_path}/otherwise.ucpl:otherwise()")
    held, _ = loaded_by_torch(tmp_path / "made", truth("fsdp2_w4"))
    assert_equal(held, truth("fsdp2_w4"))
    text = ucpl.infer(tmp_path / "made").text()
    assert "= _@dim0[3, 30, 8, 0] _@dim1[10, 4, 0] " in text and "= _ _@dim1[5, 5, 4] " in text
    ucpl.convert(tmp_path / "made", tmp_path / "plain.pt", to="plain()")
    assert_equal(held_by_plain(tmp_path / "plain.pt"), truth("fsdp2_w4"))


OWN = """ucpl 1

layout own(fsdp) of any {
  framework dcp()
  mesh fsdp
  file weights = dcp "__{rank}_0.distcp"  key "model.{key}"
  file optim   = dcp "__{rank}_0.distcp"  key "optim.state.{key}.{state}"

  group * = model
  *              = _@chunk(fsdp) ...  as "{name}"
  * of buffer    = ...                as "{name}"
  * of alias     = _@chunk(fsdp) ...  as "{alias}"
  state * of *   = like  in optim
}
"""


def test_a_layout_may_name_the_files_of_ranks(tmp_path: Path) -> None:
    """Files of ranks mean the folder: a replicated buffer is one chunk."""
    (tmp_path / "own.ucpl").write_text(OWN)
    own = f"{tmp_path}/own.ucpl:own"
    ucpl.convert(FIXTURES / "fsdp2_w4", tmp_path / "plain.pt", to="plain()", layout=f"{own}(fsdp = 4)")
    assert_equal(held_by_plain(tmp_path / "plain.pt"), truth("fsdp2_w4"))
    ucpl.convert(FIXTURES / "fsdp2_w4", tmp_path / "made", to=f"{own}(fsdp = 3)")
    held, _ = loaded_by_torch(tmp_path / "made", truth("fsdp2_w4"))
    assert_equal(held, truth("fsdp2_w4"))


def begins(pattern: str, **sizes: int) -> list[int]:
    """Begins of chunks of `w.

    N d` along its axis, at tp = 2 and fsdp = 2.
    """
    text = f"ucpl 1\nmodel m {{\n  dim n = {sizes['n']}, d = {sizes['d']}\n  w : n d\n}}\n"
    text += "layout x(fsdp = 2, tp = 2) of m {\n  framework dcp()\n  mesh fsdp tp\n"
    text += f'  file weights = dcp ".metadata"\n  w = {pattern}  as "w"\n}}\n'
    (part,) = locate(resolve(load_texts(("x.ucpl", text)), parse_call("x()"))).parts
    return [int(home.key[1]) for home in part.homes]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("(n@tp d)@chunk(fsdp)", [0, 12, 6, 18]),
        ("(n d)@chunk(tp)@chunk(fsdp)", [0, 12, 6, 18]),
        ("(n@tp@fsdp d)", [0, 12, 6, 18]),
        ("pad((n d), 16)@tp@fsdp", [0, 16, 8, 24]),
    ],
)
def test_where_chunks_begin(pattern: str, wanted: list[int]) -> None:
    assert begins(pattern, n=4, d=6) == wanted


def test_a_broken_run_begins_nowhere() -> None:
    with pytest.raises(UcplError) as found:
        begins("(n d@tp)", n=4, d=6)
    assert found.value.diagnostics[0].code == "E238"


def test_a_flat_buffer_has_no_place_in_chunks(tmp_path: Path) -> None:
    flat = OWN.replace("= like  in optim", '= pad(flat(each), fsdp)@fsdp  in optim as "{bucket}/{state}"')
    (tmp_path / "own.ucpl").write_text(flat)
    with pytest.raises(UcplError, match="a flat buffer has no place") as found:
        ucpl.convert(FIXTURES / "fsdp2_w4", tmp_path / "made", to=f"{tmp_path}/own.ucpl:own(fsdp = 2)")
    assert found.value.diagnostics[0].code == "E238"


def test_parts_that_are_cut_each_on_their_own_are_no_chunk(tmp_path: Path) -> None:
    (tmp_path / "halves.ucpl").write_text(
        "ucpl 1\n\nlayout halves(fsdp = 1, tp = 1, a = 2) of any extends dcp(fsdp = fsdp) {\n  mesh fsdp tp a\n"
        '  five = (_[..2]@a + _[2..]@chunk(a))  as "model.five"\n}\n'
    )
    with pytest.raises(UcplError, match="a chunk of a dcp file is one box") as found:
        ucpl.convert(FIXTURES / "fsdp2_w4", tmp_path / "made", to=f"{tmp_path}/halves.ucpl:halves()")
    assert found.value.diagnostics[0].code == "E238"


def test_rows_that_torch_placed_with_another_rank_are_found_and_put_right(tmp_path: Path) -> None:
    found = ucpl.verify(FIXTURES / "uneven9")
    assert [d.code for d in found.findings] == ["E522"] and "at [8, 0] in __6_0.distcp" in found.findings[0].message
    ucpl.convert(FIXTURES / "uneven9", tmp_path / "made", to="dcp(fsdp = 2)")
    assert ucpl.verify(tmp_path / "made")
    state = {"a.weight": torch.zeros(9, 3)}
    load(state, checkpoint_id=tmp_path / "made", no_dist=True)
    assert torch.equal(state["a.weight"], torch.arange(1.0, 28.0).reshape(9, 3))


# ---- rejected folders
# --------------------------------------------------------------------------------------------------

Part = dict[object, object]


def of(state: Part, *steps: object) -> Part:
    """A dict below: attributes of objects, values of dicts."""
    here: object = state
    for step in steps:
        assert isinstance(here, dict)
        here = here[step]
        here = here.state if isinstance(here, PickledCall) else here
    assert isinstance(here, dict)
    return here


def place_of(state: Part, name: str, begin: int) -> PickledCall:
    """The place of a chunk."""
    return next(
        held
        for index, held in of(state, "storage_data").items()
        if isinstance(index, PickledCall) and index.state["fqn"] == name and index.state["offset"][0] == begin  # type: ignore[index]
        if isinstance(held, PickledCall)
    )


def lose_chunk(state: Part) -> None:
    chunks = of(state, "state_dict_metadata", "model.five")["chunks"]
    assert isinstance(chunks, list)
    lost = chunks.pop(1)
    data = of(state, "storage_data")
    for index in [i for i in data if isinstance(i, PickledCall) and i.state["fqn"] == "model.five"]:  # type: ignore[index]
        if index.state["offset"] == lost.state["offsets"]:  # type: ignore[index]
            del data[index]


def move_chunk(state: Part) -> None:
    held = place_of(state, "model.five", 2).state
    assert isinstance(held, dict)
    held["offset"] += 1


def lose_place(state: Part) -> None:
    data = of(state, "storage_data")
    del data[next(i for i in data if isinstance(i, PickledCall) and i.state["fqn"] == "model.five")]  # type: ignore[index]


def lose_description(state: Part) -> None:
    del of(state, "state_dict_metadata")["model.five"]


def lose_weight(state: Part) -> None:
    lose_description(state)
    data = of(state, "storage_data")
    for index in [i for i in data if isinstance(i, PickledCall) and i.state["fqn"] == "model.five"]:  # type: ignore[index]
        del data[index]


def widen_chunk(state: Part) -> None:
    chunks = of(state, "state_dict_metadata", "model.embed_tokens.weight")["chunks"]
    assert isinstance(chunks, list)
    chunks[0].state["sizes"] = Size((12, 14))


def lead_out(state: Part) -> None:
    held = place_of(state, "model.five", 2).state
    assert isinstance(held, dict)
    held["relative_path"] = "../elsewhere.distcp"


def compress(state: Part) -> None:
    held = place_of(state, "model.five", 2).state
    assert isinstance(held, dict)
    held["transform_descriptors"] = ["zstd"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lose_chunk, "E521", "element [2] of `model.five` is in no chunk"),
        (lose_place, "E520", "about `model.five`: a chunk at [0], and no place for it"),
        (lose_description, "E520", "has a place of `model.five`, but no description"),
        (lose_weight, "E524", "the optimizer has states of `five`"),
        (widen_chunk, "E522", "places [12, 14] of `model.embed_tokens.weight` at [0, 0]"),
        (lead_out, "E393", "'../elsewhere.distcp', outside of the checkpoint's folder"),
        (compress, "E457", "`model.five` is stored through ['zstd']"),
        (lambda state: state.pop("storage_data"), "E455", "storage_data is not there"),
        (lambda state: state.update(state_dict_metadata=[1]), "E455", "state_dict_metadata is a list of 1"),
    ],
)
def test_incomplete_metadata_is_refused(tmp_path: Path, change: Callable[[Part], object], code: str, said: str) -> None:
    shutil.copytree(FIXTURES / "fsdp2_w4", tmp_path / "folder")
    top = loads((tmp_path / "folder/.metadata").read_bytes())
    assert isinstance(top, PickledCall) and isinstance(top.state, dict)
    change(top.state)
    (tmp_path / "folder/.metadata").write_bytes(dumps(top))
    with pytest.raises(UcplError) as found:
        open_checkpoint(tmp_path / "folder")
    assert found.value.diagnostics[0].code == code and said in found.value.diagnostics[0].message


def test_a_rank_whose_file_is_gone_is_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp2_w4", tmp_path / "folder")
    (tmp_path / "folder/__2_0.distcp").unlink()
    with pytest.raises(UcplError, match=r"__2_0\.distcp is missing") as found:
        open_checkpoint(tmp_path / "folder")
    assert found.value.diagnostics[0].code == "E452"


def save_chunks(folder: Path, tensor: torch.Tensor, boxes: dict[tuple[int, int], tuple[int, int]]) -> None:
    """A tensor `w` in these chunks, in torch's own records."""
    data, places = io.BytesIO(), {}
    for (row, column), (rows, columns) in boxes.items():
        start = data.tell()
        torch.save(tensor[row : row + rows, column : column + columns].clone(), data)
        places[MetadataIndex("w", (row, column))] = _StorageInfo("__0_0.distcp", start, data.tell() - start)
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes.items()]
    described = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.size(), chunks)
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(data.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"w": described}, storage_data=places)))


NO_GRID = {(0, 0): (2, 3), (2, 0): (2, 1), (2, 1): (2, 2)}  # halves of rows, one of them cut along the columns, too


def test_chunks_that_are_no_grid_are_read_as_cells_of_one(tmp_path: Path) -> None:
    save_chunks(tmp_path / "dcp", torch.arange(12.0).reshape(4, 3), NO_GRID)
    ucpl.convert(tmp_path / "dcp", tmp_path / "plain.pt", to="plain()")
    assert torch.equal(held_by_plain(tmp_path / "plain.pt")["model.w"], torch.arange(12.0).reshape(4, 3))


def test_chunks_that_fall_into_too_many_cells_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_chunks(tmp_path, torch.arange(12.0).reshape(4, 3), NO_GRID)
    monkeypatch.setattr("ucpl.formats.dcp.reading.CELLS_MAX", 3)
    with pytest.raises(UcplError, match="4 cells") as found:
        ucpl.infer(tmp_path)
    assert found.value.diagnostics[0].code == "E523"


def test_shards_of_safetensors_are_read_exactly(tmp_path: Path) -> None:
    """As HuggingFaceStorageWriter saves them: weights alone, an empty chunk among them."""
    ucpl.convert(FIXTURES / "hf_sharded_w4", tmp_path / "plain.pt", to="plain()")
    assert_equal(
        {n.removeprefix("model."): t for n, t in held_by_plain(tmp_path / "plain.pt").items()}, truth("hf_sharded_w4")
    )
    found = open_checkpoint(FIXTURES / "hf_sharded_w4")
    assert (found.state.settings["fsdp"].value, found.state.settings["tp"].value) == (4, 1)
    ucpl.convert(FIXTURES / "hf_sharded_w4", tmp_path / "made", to="dcp(fsdp = 3)")
    held = {name: torch.zeros_like(tensor) for name, tensor in truth("hf_sharded_w4").items()}
    state: dict[str, object] = {**held}
    load(state, checkpoint_id=tmp_path / "made", no_dist=True)
    assert_equal(held, truth("hf_sharded_w4"))


def test_torch_s_reader_of_safetensors_loads_complete_files(tmp_path: Path) -> None:
    """HuggingFaceStorageReader also takes files without places in headers.

    Each tensor is one chunk.
    """
    ucpl.convert(FIXTURES / "hf_sharded_w4", tmp_path / "made", to='safetensors(shard = "2KB")')
    held = {name: torch.zeros_like(tensor) for name, tensor in truth("hf_sharded_w4").items()}
    state: dict[str, object] = {**held}
    load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "made")), no_dist=True)
    assert_equal(held, truth("hf_sharded_w4"))


@pytest.mark.parametrize(
    ("source", "degrees"),
    [
        ("hf_sharded_w4", (3, 1)),
        ("fsdp2_w4", (1, 1)),
        ("fsdp2_w4", (7, 1)),
        ("fsdp2_tp_2x2", (3, 1)),
        ("fsdp2_tp_2x2", (2, 2)),
        ("fsdp2_tp_2x2", (1, 3)),
    ],
)
def test_shards_are_written_as_torch_reads_them(source: str, degrees: tuple[int, int], tmp_path: Path) -> None:
    """HuggingFaceStorageReader loads them completely.

    ucpl reads them at the requested ranks.
    """
    fsdp, tp = degrees
    ucpl.convert(FIXTURES / source, tmp_path / "made", to=f"safetensors_shards(fsdp = {fsdp}, tp = {tp})")
    wanted = truth(source)
    if any(n.startswith("model.") for n in wanted):
        wanted = {n.removeprefix("model."): t for n, t in wanted.items() if n.startswith("model.")}
    held = {name: torch.full_like(tensor, 1) for name, tensor in wanted.items()}
    state: dict[str, object] = {**held}
    load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "made")), no_dist=True)
    assert_equal(held, wanted)
    names = sorted(path.name for path in (tmp_path / "made").glob("*.safetensors"))
    assert names == [f"shard-{n:05d}-model-00001-of-00001.safetensors" for n in range(1, fsdp * tp + 1)]
    ucpl.convert(tmp_path / "made", tmp_path / "again", to="safetensors_shards(fsdp = 2)")
    held = {name: torch.full_like(tensor, 1) for name, tensor in wanted.items()}
    load({**held}, storage_reader=HuggingFaceStorageReader(str(tmp_path / "again")), no_dist=True)
    assert_equal(held, wanted)


def test_texts_next_to_shards_are_copied(tmp_path: Path) -> None:
    """So joined shards are a folder of transformers again."""
    (tmp_path / "whole").mkdir()
    save_file({"a": torch.arange(4.0)}, tmp_path / "whole/model.safetensors")
    (tmp_path / "whole/config.json").write_text('{"dtype": "float32", "model_type": "none"}')
    ucpl.convert(tmp_path / "whole", tmp_path / "made", to="safetensors_shards(fsdp = 2)")
    ucpl.convert(tmp_path / "made", tmp_path / "again", to="safetensors()")
    for folder in ("made", "again"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["model_type"] == "none"
    assert load_file(tmp_path / "again/model.safetensors")["a"].tolist() == [0, 1, 2, 3]


def test_ranks_without_a_chunk_have_a_shard(tmp_path: Path) -> None:
    """The last two are written, too: ucpl reports missing numbers.

    torch's reader accepts an empty file.
    """
    (tmp_path / "whole").mkdir()
    save_file({"a": torch.arange(2.0), "b": torch.arange(3.0)}, tmp_path / "whole/model.safetensors")
    ucpl.convert(tmp_path / "whole", tmp_path / "made", to="safetensors_shards(fsdp = 5)")
    sizes = {p.name[6:11]: len(load_file(p)) for p in (tmp_path / "made").glob("*.safetensors")}
    assert sizes == {"00001": 2, "00002": 2, "00003": 1, "00004": 0, "00005": 0}
    held = {"a": torch.zeros(2), "b": torch.zeros(3)}
    load({**held}, storage_reader=HuggingFaceStorageReader(str(tmp_path / "made")), no_dist=True)
    assert held["a"].tolist() == [0, 1] and held["b"].tolist() == [0, 1, 2]
    assert ucpl.compare(tmp_path / "whole", tmp_path / "made")


def test_a_shard_has_one_chunk_of_a_tensor() -> None:
    checkpoint = open_checkpoint(FIXTURES / "fsdp2_w4")
    plan = ucpl.plan(str(FIXTURES / "fsdp2_w4"), "safetensors_shards(fsdp = 2)")
    on_one = tuple(evolve(target, rank=0) for target in plan.targets)
    with pytest.raises(UcplError, match="would have two chunks of") as caught:
        DCP().skeleton(plan.target, on_one, checkpoint, None)
    assert caught.value.diagnostics[0].code == "E392"


@pytest.mark.parametrize(
    ("gone", "code", "said"),
    [
        (2, "E452", "the shard of rank 2 is missing"),
        (3, "E452", "the shard of rank 3 is missing"),
        (1, "E452", "rank 1"),
    ],
)
def test_a_shard_that_is_gone_is_named(tmp_path: Path, gone: int, code: str, said: str) -> None:
    shutil.copytree(FIXTURES / "hf_sharded_w4", tmp_path / "folder")
    (tmp_path / f"folder/shard-0000{gone}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(UcplError, match=said) as found:
        open_checkpoint(tmp_path / "folder")
    assert found.value.diagnostics[0].code == code


def test_lightnings_file_next_to_the_chunks_is_copied(tmp_path: Path) -> None:
    """FSDPStrategy saves chunks, and a file next to them.

    The file has loops, callbacks and schedulers.
    """
    shutil.copytree(FIXTURES / "hsdp_2x2", tmp_path / "run")
    meta = {"epoch": 2, "loops": {"fit_loop": {"state": torch.arange(3)}}, "pytorch-lightning_version": "2.6.6"}
    torch.save(meta, tmp_path / "run/meta.pt")
    ucpl.convert(tmp_path / "run", tmp_path / "made", to="dcp(fsdp = 3)")
    found = torch.load(tmp_path / "made/meta.pt")
    assert found.pop("loops")["fit_loop"]["state"].tolist() == [0, 1, 2] and found == {
        "epoch": 2,
        "pytorch-lightning_version": "2.6.6",
    }
    assert ucpl.compare(tmp_path / "run", tmp_path / "made")


@pytest.mark.parametrize(
    ("record", "module"),
    [
        (TensorProperties, "torch.distributed._shard.sharded_tensor.metadata"),  # torch's own, before DCP had one
        (_StorageInfo, "olmo_core.distributed.checkpoint.filesystem"),
    ],
)
def test_records_of_other_modules_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: type[Any], module: str
) -> None:
    for name in (module, module.partition(".")[0]):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[module], record.__name__, record, raising=False)
    monkeypatch.setattr(record, "__module__", module)
    save_chunks(tmp_path / "dcp", torch.arange(12.0).reshape(4, 3), NO_GRID)
    assert module.encode() in (tmp_path / "dcp" / ".metadata").read_bytes()
    ucpl.convert(tmp_path / "dcp", tmp_path / "plain.pt", to="plain()")
    assert torch.equal(held_by_plain(tmp_path / "plain.pt")["model.w"], torch.arange(12.0).reshape(4, 3))
