"""Hugging Face folders, read and written: shards, index, ties, errors."""

import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ucpl
from tests.formats.huggingface.folders import HERE, WRITTEN, assert_equal, llama_config, save, tensors_of
from ucpl import api
from ucpl.errors import UcplError
from ucpl.formats.huggingface.store import HuggingFace
from ucpl.formats.huggingface.writing import shard_bytes
from ucpl.inference.hf import import_hf


def code_of(call, *args, **more) -> str:
    with pytest.raises(UcplError) as caught:
        call(*args, **more)
    return caught.value.diagnostics[0].code


@pytest.fixture
def tensors():
    return {f"layers.{i}.w": torch.arange(i * 64, i * 64 + 64, dtype=torch.float32).reshape(8, 8) for i in range(11)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_transformers_wrote_is_read_and_written_to_equal_tensors(name, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(WRITTEN / name, source)
    opened = api.open_checkpoint(source)
    assert opened.format == "huggingface" and not opened.remarks
    assert {t.name for t in opened.state.tensors} == set(tensors_of(source))
    ucpl.convert(source, tmp_path / "made", 'safetensors(shard="9KB")')
    assert_equal(tensors_of(source), tensors_of(tmp_path / "made"))
    for text in ("config.json", "generation_config.json"):
        assert (tmp_path / "made" / text).read_bytes() == (source / text).read_bytes()
    assert ucpl.compare(source, tmp_path / "made")
    assert ucpl.verify(tmp_path / "made")


@pytest.mark.parametrize(
    "shard, files", [("700B", 6), ("256", 11), ("1", 11), ("1MB", 1), ("2.816KB", 1), ("2.815KB", 2)]
)
def test_shards_hold_at_most_the_size_asked_for_and_an_index_names_each_tensor_once(tensors, tmp_path, shard, files):
    save(tmp_path / "source", tensors)
    ucpl.convert(tmp_path / "source", tmp_path / "made", f'safetensors(shard="{shard}")')
    assert_equal(tensors, tensors_of(tmp_path / "made"))
    found = sorted((tmp_path / "made").glob("*.safetensors"))
    assert len(found) == files
    index = tmp_path / "made" / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    for path in found:
        with safe_open(path, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    if files > 1:
        stated = json.loads(index.read_text())
        assert stated["metadata"] == {"total_parameters": 704, "total_size": 2816}
        order = list(dict.fromkeys(stated["weight_map"][f"layers.{i}.w"] for i in range(11)))
        assert order == [p.name for p in found], "layers 2 to 9 come before layer 10"


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("20KB", 20000), ("1.5MiB", 3 << 19), ("7", 7), (9, 9), ("2 tb", 2 * 10**12)]
)
def test_sizes_of_shards(text, size):
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["five", "", "0", "-1GB", 0, None, "1EB", "9" * 400 + "GB"])
def test_what_is_no_size_is_refused(text):
    assert code_of(shard_bytes, text) == "E387"


def test_a_missing_shard_is_named_with_its_tensors(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UcplError, match=r"model-00002-of-00003\.safetensors is missing: .* 4 tensors") as caught:
        api.open_checkpoint(source)
    assert caught.value.exit_status == 3
    (source / "model.safetensors.index.json").unlink()
    assert code_of(api.open_checkpoint, source) == "E380"


def test_numbered_shards_need_no_index(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, shards=3)
    (source / "model.safetensors.index.json").unlink()
    assert {t.name for t in api.open_checkpoint(source).state.tensors} == set(tensors)


@pytest.mark.fault("Folders of DeepSpeed and Hugging Face", "a missing numbered shard without an index", "named")
def test_one_shard_of_several_is_no_folder(tensors, tmp_path):
    """One file alone passed for the complete model, despite its name."""
    source = save(tmp_path / "s", tensors, shards=3)
    (source / "model.safetensors.index.json").unlink()
    for number in (3, 2):
        (source / f"model-0000{number}-of-00003.safetensors").unlink()
        with pytest.raises(UcplError, match=r"E380: model-00002-of-00003\.safetensors is missing|E380: .*-00003-of"):
            ucpl.convert(source, tmp_path / "made", "plain()")
    assert code_of(ucpl.verify, source) == code_of(import_hf, source) == "E380"
    assert len(api.open_checkpoint(source / "model-00001-of-00003.safetensors").state.tensors) == 4, "named by itself"
    (source / "model-00001-of-00003.safetensors").rename(source / "model-00001-of-00001.safetensors")
    assert len(api.open_checkpoint(source).state.tensors) == 4, "all of one"


LINK = r"model\.safetensors is a link to \.\./blobs/0f3a, which is not there"
MADE = {
    "link": (lambda path: path.symlink_to("../blobs/0f3a"), "E380", LINK),
    "folder": (lambda path: path.mkdir(), "E400", r"model\.safetensors is no regular file"),
    "pipe": (os.mkfifo, "E400", r"model\.safetensors is no regular file"),
}


@pytest.mark.fault(
    "Folders of DeepSpeed and Hugging Face",
    "a dead link, folder or pipe under the name of the weights",
    "refused; for a link, with its destination",
)
@pytest.mark.parametrize("kind", MADE)
def test_a_name_of_weights_that_is_no_file_is_no_empty_model(kind, tmp_path):
    """A hub's cache has links to removed files."""
    make, code, said = MADE[kind]
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "config.json").write_text(json.dumps(llama_config()))
    make(tmp_path / "s" / "model.safetensors")
    for call in (
        lambda: ucpl.convert(tmp_path / "s", tmp_path / "made", "zero1(dp=2)"),
        lambda: ucpl.verify(tmp_path / "s"),
        lambda: api.open_checkpoint(tmp_path / "s"),
        lambda: import_hf(tmp_path / "s"),
        lambda: HuggingFace().open_named(tmp_path / "s", ["model.safetensors"]),
    ):
        with pytest.raises(UcplError, match=f"{code}: {said}"):
            call()
    assert not (tmp_path / "made").exists()


def test_links_of_shards_say_where_they_lead(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, shards=2)
    two = source / "model-00002-of-00002.safetensors"
    two.unlink()
    two.symlink_to("../blobs/77")
    (source / "later.safetensors").symlink_to("later.safetensors")
    with pytest.raises(UcplError, match=r"E380: model-00002-of-00002\.safetensors is a link to \.\./blobs/77"):
        api.open_checkpoint(source)
    (source / "later.safetensors").unlink()
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(UcplError, match=r"E380: model-00002-of-00002\.safetensors is a link to \.\./blobs/77"):
        api.open_checkpoint(source)


def test_a_folder_without_weights_has_a_config_and_nothing_to_convert(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    assert code_of(api.open_checkpoint, tmp_path) == "E435"
    with pytest.raises(UcplError, match=r"E380: .* has no weights"):
        HuggingFace().open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(UcplError, match=r"E385: model\.safetensors\.index\.json lists no tensor"):
        HuggingFace().open(tmp_path)


def test_other_files_next_to_the_weights_are_reported(tensors, tmp_path):
    source = save(tmp_path / "s", tensors)
    (source / "old.safetensors").symlink_to("gone")
    assert [*map(str, api.open_checkpoint(source).not_read)] == [
        "old.safetensors is not read: it is not part of model.safetensors"
    ]


def test_an_index_and_shards_that_disagree(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, shards=2)
    index = source / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    value["metadata"]["total_size"] = 1
    value["weight_map"]["layers.0.w"] = two
    del value["weight_map"]["layers.2.w"]
    index.write_text(json.dumps(value))
    remarks = "\n".join(api.open_checkpoint(source).remarks)
    assert "states total_size 1, the shards hold 2816 bytes" in remarks
    assert f"has layers.0.w in {two}, it is in {one}" in remarks
    assert "layers.2.w" in remarks and "not listed" in remarks

    value["weight_map"]["layers.99.w"] = one
    index.write_text(json.dumps(value))
    assert code_of(api.open_checkpoint, source) == "E381"
    value["weight_map"]["layers.99.w"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(value))
    assert code_of(api.open_checkpoint, source) == "E385"
    index.write_text("{")
    assert code_of(api.open_checkpoint, source) == "E385"


def test_a_tensor_in_two_shards_without_an_index_is_refused(tensors, tmp_path):
    source = save(tmp_path / "s", tensors, shards=2)
    part = dict(list(tensors.items())[1::2])
    file = source / "model-00002-of-00002.safetensors"
    save_file({**part, "layers.0.w": torch.full((8, 8), -1.0)}, file, {"format": "pt"})
    (source / "model.safetensors.index.json").unlink()
    assert code_of(api.open_checkpoint, source) == "E382"


def test_files_without_an_index_are_refused_and_leftovers_are_reported(tensors, tmp_path):
    source = save(tmp_path / "s", tensors)
    save_file({"x": torch.ones(1)}, source / "adapter.safetensors")
    assert any("adapter.safetensors" in one.name for one in api.open_checkpoint(source).not_read)
    (source / "model.safetensors").rename(source / "other.safetensors")
    assert code_of(api.open_checkpoint, source) == "E384"
    assert api.open_checkpoint(source / "other.safetensors").state.tensors[0].name == "layers.0.w"


def test_pieces_of_torch_s_own_writer_are_refused(tmp_path):
    (tmp_path / "s").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "s" / "model.safetensors", {"DCP_SHARDING_INFO": "{}"})
    assert code_of(api.open_checkpoint, tmp_path / "s") == "E386"


def test_a_tied_tensor_is_written_once_and_its_second_name_comes_back(tmp_path):
    shared = torch.arange(12.0).reshape(3, 4)
    torch.save(
        {"params": {"a": {"weight": shared}, "b": {"weight": torch.ones(5)}}, "aliases": {"z": "a"}}, tmp_path / "p.pt"
    )
    ucpl.convert(tmp_path / "p.pt", tmp_path / "made", 'safetensors(shard="40B")')
    assert_equal(tensors_of(tmp_path / "made"), {"a": shared, "b": torch.ones(5)})
    assert api.open_checkpoint(tmp_path / "made").state.aliases == {"z": "a"}
    ucpl.convert(tmp_path / "made", tmp_path / "back.pt", "plain()")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["aliases"] == {"z": "a"} and torch.equal(back["params"]["a"]["weight"], shared)


def test_optimizer_state_stays_behind_and_is_reported(tmp_path):
    w = torch.ones(3, 2)
    torch.save(
        {"params": {"w": {"weight": w, "exp_avg": w * 2, "exp_avg_sq": w * 3}}, "aliases": {}}, tmp_path / "p.pt"
    )
    done = ucpl.convert(tmp_path / "p.pt", tmp_path / "made", "safetensors()")
    assert set(tensors_of(tmp_path / "made")) == {"w"}
    assert any("exp_avg of w" in text for text in done.plan.dropped)


def test_dtypes_empty_and_scalar_tensors_survive(tmp_path):
    tensors = {
        "bf": torch.arange(6).reshape(2, 3).to(torch.bfloat16), "half": torch.ones(3, dtype=torch.float16),
        "int": torch.arange(5), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "bool": torch.tensor([True, False]),
        "f8": torch.arange(4).to(torch.float8_e4m3fn),
    }  # fmt: skip
    save(tmp_path / "s", tensors)
    ucpl.convert(tmp_path / "s", tmp_path / "made", "safetensors()")
    assert_equal(tensors, tensors_of(tmp_path / "made"))


def test_names_with_digits_of_any_kind_are_sorted(tmp_path):
    """Digits of other alphabets are no numbers, and numbers may be long."""
    names = ["l.2", "l.10", "l.²", "l.٣", "l.007", "l." + "1" * 5000, "10", "9"]
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    save(tmp_path / "s", tensors)
    ucpl.convert(tmp_path / "s", tmp_path / "made", 'safetensors(shard="8")')
    assert_equal(tensors, tensors_of(tmp_path / "made"))
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())["weight_map"]
    order = sorted(names, key=index.__getitem__)
    assert order == ["9", "10", "l.2", "l.007", "l.10", "l." + "1" * 5000, "l.²", "l.٣"]


def test_the_format_of_a_file_is_no_second_name(tmp_path):
    save(tmp_path / "s", {"pt": torch.ones(3)})
    assert api.open_checkpoint(tmp_path / "s").state.aliases == {}


def test_two_keys_that_are_one_name_are_refused(tmp_path):
    text = """ucpl 1
model m {
  dtype f32
  "a/b" : 2
  c     : 2
}
layout source() of m {
  framework torch()
  file weights = torch "a.pt"
  "a/b" = _  as "x"
  c     = _  as "c"
}
layout made() of m {
  framework huggingface()
  file weights = safetensors "model.safetensors"
  "a/b" = _  as "{name}"
  c     = _  as "a/b"
}
"""
    (tmp_path / "spec.ucpl").write_text(text)
    (tmp_path / "source").mkdir()
    torch.save({"x": torch.zeros(2), "c": torch.ones(2)}, tmp_path / "source" / "a.pt")
    layout = f"{tmp_path / 'spec.ucpl'}:"
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "source", tmp_path / "made", f"{layout}made()", layout=f"{layout}source()")
    assert caught.value.diagnostics[0].code == "E215" and "a/b" in caught.value.diagnostics[0].message


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damage_of_a_written_shard_is_found(tensors, tmp_path, damage):
    save(tmp_path / "s", tensors)
    ucpl.convert(tmp_path / "s", tmp_path / "made", 'safetensors(shard="1KB")')
    path = tmp_path / "made" / "model-00002-of-00004.safetensors"
    raw = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(raw[:-4])
        assert code_of(api.open_checkpoint, tmp_path / "made") == "E433"
    else:
        raw[-3] ^= 1
        path.write_bytes(raw)
        verdict = ucpl.verify(tmp_path / "made")
        assert not verdict and "model-00002-of-00004.safetensors" in str(verdict)


@pytest.mark.parametrize("shard", ["1KB", "5GB"])
def test_a_checkpoint_of_deepspeed_s_becomes_a_folder_equal_to_its_truth(shard, tmp_path):
    example = HERE.parents[2] / "examples" / "checkpoint"
    truth = torch.load(example / "truth.pt", weights_only=False)
    ucpl.convert(example, tmp_path / "made", f'safetensors(shard="{shard}")')
    found = tensors_of(tmp_path / "made")
    aliases = set(api.open_checkpoint(example).state.aliases)
    want = {name: states["fp32"] if "fp32" in states else states["weight"] for name, states in truth["params"].items()}
    assert_equal({n: t for n, t in {**want, **truth["buffers"]}.items() if n not in aliases}, found)
    assert set(api.open_checkpoint(tmp_path / "made").state.aliases) == aliases


def test_shards_that_an_index_has_in_a_folder_below_are_read(tensors, tmp_path):
    """transformers joins the index's names to the folder, whatever these are."""
    source = save(tmp_path / "s", tensors)
    (source / "model.safetensors").unlink()
    names = list(tensors)
    where = {name: f"weights/{n % 2}.safetensors" for n, name in enumerate(names)}
    (source / "weights").mkdir()
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, source / file, {"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    ucpl.convert(source, tmp_path / "made", "safetensors()")
    assert_equal(tensors_of(tmp_path / "made"), tensors)
    assert ucpl.verify(source, witness=False) and ucpl.compare(source, tmp_path / "made")
    (source / "weights" / "1.safetensors").unlink()
    assert code_of(api.open_checkpoint, source) == "E380"
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {names[0]: "../x.safetensors"}}))
    assert code_of(api.open_checkpoint, source) == "E385"
