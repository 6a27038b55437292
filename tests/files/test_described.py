"""A path of no known framework gets a description and a remedy."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.command import ucpl as command
from ucpl.api import open_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoint"
STATE = {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(3), "1.weight": torch.zeros(2), "last": torch.ones(1)}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def repacked(path: Path, way: int = zipfile.ZIP_STORED, order: bytes = b"little") -> None:
    with zipfile.ZipFile(path, "w", way) as there, zipfile.ZipFile(io.BytesIO(saved(STATE))) as here:
        for name in here.namelist():
            there.writestr(name, order if name.endswith("byteorder") else here.read(name))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "counters": (lambda p: torch.save({"model": {"n": torch.ones(2).int()}}, p), r"with the keys model \(1 tensor\)"),
    "an object": (lambda p: torch.save(Namespace(x=torch.ones(2)), p), "one pickled object, argparse.Namespace"),
    "a tensor": (lambda p: torch.save(torch.ones(3), p), "one tensor, without names"),
    "an empty dict": (lambda p: torch.save({}, p), "an empty dict"),
    "compressed": (lambda p: repacked(p, zipfile.ZIP_DEFLATED), "E403.*is compressed"),
    "big-endian": (lambda p: repacked(p, order=b"big"), "E412.*byte order big"),
    "cut short": (lambda p: p.write_bytes(saved(STATE)[:-90]), "E401.*was cut short"),
    "empty": (lambda p: p.write_bytes(b""), "E401.*is empty"),
    "zeros": (lambda p: p.write_bytes(bytes(5000)), "E401.*no zip archive"),
    "gzip": (lambda p: p.write_bytes(gzip.compress(saved(STATE))), r"a gzip file(.|\n)*gunzip"),
    "xz": (lambda p: p.write_bytes(lzma.compress(saved(STATE))), "an xz file"),
    "bzip2": (lambda p: p.write_bytes(bz2.compress(saved(STATE))), "a bzip2 file"),
    "a web page": (lambda p: p.write_text("<!DOCTYPE html><html>404"), r"a web page(.|\n)*again"),
    "LFS": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), r"Git LFS(.|\n)*git lfs pull"),
    "a text": (lambda p: p.write_text("hello"), "no file of torch.save"),
    "TorchScript": (lambda p: torch.jit.script(torch.nn.Linear(2, 2)).save(p), r"TorchScript(.|\n)*state_dict"),
    "NumPy's": (lambda p: p.write_bytes(_npz()), "NumPy archive of 1 array"),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "a pickle"),
    "HDF5": (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90)), "HDF5"),
    "GGUF": (lambda p: p.write_bytes(b"GGUF" + bytes(90)), "GGUF"),
    "torch.export": (lambda p: _zip(p, "w/archive_format", "w/models/model.json"), r"torch.export(.|\n)*state_dict"),
    "Keras": (lambda p: _zip(p, "config.json", "model.weights.h5"), "an archive of Keras"),
}  # fmt: skip


def _zip(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "pt2")


@pytest.mark.parametrize(("name", "said"), [
    ("model.onnx", "an ONNX model"), ("flax_model.msgpack", "as Flax writes it"), ("model.pdparams", "PaddlePaddle"),
])  # fmt: skip
def test_a_file_without_first_bytes_of_its_own_is_described_by_its_name(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x81\xa6params\x80")
    for path in (tmp_path / name, tmp_path):
        done = command("inspect", path)
        assert done.status == 3 and "E435" in done.err and said in done.err, done.err


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, a=np.zeros(3))
    return out.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_described_with_a_way_out(kind: str, tmp_path: Path) -> None:
    make, said = FILES[kind]
    make(tmp_path / "w.pt")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("w.pt", "folder"):
        done = command("inspect", tmp_path / name)
        assert done.status == 3 and re.search(said, done.err), done.err
        assert "help:" in done.err and "internal error" not in done.err
        if name == "w.pt":
            (tmp_path / name).rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in done.err


@pytest.mark.parametrize(("names", "said"), [
    ((), "an empty folder"), (("notes.txt",), "it holds notes.txt"), (("d/manifest.ocdbt",), "Orbax"),
    (("model.ckpt-1.index", "checkpoint"), "TensorFlow"),
])  # fmt: skip
def test_a_folder_is_described(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    done = command("inspect", tmp_path)
    assert done.status == 3 and said in done.err, done.err


def shards(folder: Path, names: dict[str, list[str]], index: dict[str, str]) -> Path:
    folder.mkdir()
    for file, tensors in names.items():
        save_file({name: torch.ones(3) for name in tensors}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_complete_files_next_to_a_stale_index_are_named(tmp_path: Path) -> None:
    two = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
    index = {name: f"model-0000{n}-of-00003.safetensors" for n, name in enumerate("abc", 1)}
    folder = shards(tmp_path / "stale", two, index)
    done = command("inspect", folder)
    assert done.status == 3 and "E380" in done.err
    assert (
        "have all 3 tensors that the index lists" in done.err and "Take model.safetensors.index.json away" in done.err
    )
    (folder / "model.safetensors.index.json").unlink()
    assert {t.name for t in open_checkpoint(folder).state.tensors} == set("abc")
    less = shards(tmp_path / "less", two, index | {"d": "model-00003-of-00003.safetensors"})
    assert "Copy or download the missing file" in command("inspect", less).err
    part = {"model-00001-of-00002.safetensors": ["a", "b", "c"]}
    assert "Copy or download the missing file" in command("inspect", shards(tmp_path / "part", part, index)).err


def test_the_newest_step_with_files_is_offered(tmp_path: Path) -> None:
    for step in ("global_step9", "global_step10", "global_step11"):
        shutil.copytree(EXAMPLE / (EXAMPLE / "latest").read_text().strip(), tmp_path / step)
    for file in (tmp_path / "global_step11").glob("*.pt"):
        file.write_bytes(b"")
    (tmp_path / "global_step12").mkdir()
    for said in (None, "global_step300", "global_step12", "", "../x"):
        if said is not None:
            (tmp_path / "latest").write_text(said)
        done = command("inspect", tmp_path)
        assert done.status == 3 and str(tmp_path / "global_step10") in done.err, (said, done.err)


def test_the_way_out_of_several_files_takes_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index lists the files; without one, a spec joins them."""
    folder, state = tmp_path / "bins", {f"w{i}": torch.full((2,), float(i)) for i in range(6)}
    folder.mkdir()
    files = {f"w{i}": f"part-{i // 2 + 1}.pt" for i in range(6)}
    for file in sorted(set(files.values())):
        torch.save({k: v for k, v in state.items() if files[k] == file}, folder / file)
    done = command("inspect", folder)
    assert "(3 such files)" in done.err and "--from FILE.ucpl:LAYOUT" in done.err and "python -c" not in done.err
    (folder / "part.index.json").write_text(json.dumps({"weight_map": files}))
    printed = command("inspect", folder).err
    monkeypatch.chdir(tmp_path)
    code = shlex.split(printed[printed.index("python -c") :].splitlines()[0])[2]
    subprocess.run([sys.executable, "-c", code], check=True)
    made = load_file(tmp_path / "model.safetensors")
    assert made.keys() == state.keys() and all(torch.equal(made[k], state[k]) for k in state)
    (folder / "part-2.pt").unlink()
    done = command("inspect", folder)
    assert "1 of 3: part-2.pt" in done.err and "python -c" not in done.err


def test_files_of_ranks_are_not_one_file(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(STATE, tmp_path / f"pytorch_model_fsdp_rank{rank}.bin")
    done = command("inspect", tmp_path)
    assert "E438" in done.err and "2 files of FSDP's ranks" in done.err and "one file" not in done.err


def of_index(text: str) -> Callable[[Path], object]:
    def made(path: Path) -> None:
        path.mkdir()
        (path / "pytorch_model.bin.index.json").write_text(text)

    return made


def of_folder(name: str, data: bytes | None) -> Callable[[Path], object]:
    def made(path: Path) -> None:
        (path / name).parent.mkdir(parents=True)
        (path / name).write_bytes(data or b"")

    return made


def header(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


OTHERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "an index alone": ("w", of_index('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'), "2 of 2: 1.safe"),
    "an index that is none": ("w", of_index("["), "index.json is no index of weights"),
    "an index of another form": ("w", of_index("[]"), "index.json is no index of weights"),
    "a step that is not there": ("w", of_folder("latest_checkpointed_iteration.txt", b"7\n"), "names step '7', and"),
    "metadata alone": ("w", of_folder(".metadata", b"x"), "a .metadata, and no .distcp file"),
    "a text": ("w", lambda p: p.write_text("hello\n"), "it is a text, which begins with 'hello'"),
    "an empty file": ("w", lambda p: p.write_bytes(b""), "it is empty"),
    "a zip without files": ("w.pt", lambda p: zipfile.ZipFile(p, "w").close(), "a zip archive without files"),
    "safetensors by another name": (
        "w.pt",
        lambda p: save_file({"a": torch.ones(3)}, p),
        r"a safetensors file of another name(.|\n)*name it w.safetensors",
    ),
    "a pointer of LFS": (
        "w.safetensors",
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"),
        "no safetensors file: it is a pointer of Git LFS",
    ),
    "a web page": ("w.safetensors", lambda p: p.write_text("<!DOCTYPE html><html></html>"), "it is a web page"),
    "gzip": ("w.safetensors", lambda p: p.write_bytes(gzip.compress(header(b"{}"))), "it is a gzip file"),
    "a torch file": ("w.safetensors", lambda p: torch.save(STATE, p), "a zip archive, as torch.save writes it"),
    "a header that is cut": ("w.safetensors", lambda p: p.write_bytes(header(b'{"a":' + b" " * 9)), "E431"),
    "a header that is too long": (
        "w.safetensors",
        lambda p: p.write_bytes((1 << 40).to_bytes(8, "little") + b"{}"),
        "E430.*too short for its header",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_files_are_described(tmp_path: Path, what: str) -> None:
    name, make, said = OTHERS[what]
    make(tmp_path / name)
    for verb in ("inspect", "verify"):
        done = command(verb, tmp_path / name)
        assert done.status == 3 and re.search(said, done.err), done.err


def test_a_remedy_can_be_pasted_whatever_a_file_is_called(tmp_path: Path) -> None:
    path = tmp_path / """a "b" $c `d' e!.pt"""
    state: dict[object, torch.Tensor] = {7: torch.ones(1)}
    state.update(STATE)
    torch.save(state, path)
    there = command("inspect", path).err.partition("which this makes: python")[2].splitlines()[0]
    subprocess.run(["bash", "-c", f"{shlex.quote(sys.executable)}{there}"], cwd=tmp_path, check=True)
    assert command("inspect", tmp_path / "model.safetensors").status == 0


def test_checkpoints_two_folders_below_are_named(tmp_path: Path) -> None:
    for step in (9, 10):
        shutil.copytree(EXAMPLE, tmp_path / "runs" / f"iter_{step}" / "model")
        shutil.copytree(EXAMPLE, tmp_path / "runs" / f"iter_{step}" / "optimizer")
    err = command("inspect", tmp_path / "runs").err
    assert f"its model, {tmp_path}/runs/iter_10/model, and its optimizer, {tmp_path}/runs/iter_10/optimizer, are" in err
