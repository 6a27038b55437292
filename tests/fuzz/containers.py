"""Readers of single files: pickles, torch files, safetensors files, plain files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

from attrs import define

from tests.fuzz.damage import LONELY, NAMES, damage_bytes, damage_value
from ucpl.files.pickles import dumps, loads
from ucpl.files.torch_files import TorchFile, layout_torch_file, read_torch_file

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
STORED = ("z1_bf16_model_states.pt", "z3_optim_states.pt", "moe_expert_states.pt", "megatron_model_optim_rng.pt")


def torch_files() -> list[Path]:
    found = [FIXTURES / "containers" / name for name in STORED]
    found += sorted((FIXTURES / "deepspeed" / "z1_dp2_bf16").rglob("*.pt"))
    return found


def pickle_of(path: Path) -> bytes:
    """data.pkl of a torch file."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        return archive.read(name)


def torch_file_of(value: Any, source: TorchFile, raw: bytes) -> bytes:
    """The file of a changed value tree, with the original storages.

    CRCs are good.
    """
    import zlib

    planned = layout_torch_file(value)
    made = bytearray(planned.size)
    for at, part in planned.fixed:
        made[at : at + len(part)] = part
    crcs = {}
    for name, (at, size) in planned.storages.items():
        member = source.storages.get(name)
        held = raw[member.start : member.start + member.size] if member is not None else b""
        data = held[:size].ljust(size, b"\0")
        made[at : at + size] = data
        crcs[name] = zlib.crc32(data)
    for at, part in planned.finish(crcs):
        made[at : at + len(part)] = part
    return bytes(made)


def write_torch_file(path: Path, value: Any, source: TorchFile, raw: bytes) -> None:
    path.write_bytes(torch_file_of(value, source, raw))


@define(eq=False)
class Pickles:
    """The machine alone: bytes, and values with parts exchanged."""

    inputs: list[bytes]
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Pickles:
        return cls([pickle_of(path) for path in torch_files()])

    def attempt(self, rng: Random) -> str:
        raw = rng.choice(self.inputs)
        if rng.random() < 0.3:
            value, self.damage = damage_value(rng, loads(raw))
            raw = dumps(value)
        else:
            raw, self.damage = damage_bytes(rng, raw)
        again = dumps(loads(raw))
        loads(again)
        return self.damage


@define(eq=False)
class TorchFiles:
    """Archives whose directory, headers or pickle are bent."""

    path: Path
    inputs: list[bytes]
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> TorchFiles:
        return cls(folder / "file.pt", [path.read_bytes() for path in torch_files()])

    def attempt(self, rng: Random) -> str:
        raw = rng.choice(self.inputs)
        low, high = rng.choice(
            ((0, 4096), (max(0, len(raw) - 6000), len(raw)), (0, len(raw)), (len(raw) - 100, len(raw)))
        )
        raw, self.damage = damage_bytes(rng, raw, low, high)
        self.path.write_bytes(raw)
        part = read_torch_file(self.path.parent, self.path.name)
        part.extents()
        return self.damage


@define(eq=False)
class Safetensors:
    """Headers with parts exchanged, as JSON and as bytes."""

    path: Path
    header: dict[str, Any]
    data: bytes
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Safetensors:
        header = {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b.c": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "d": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
        }
        return cls(folder / "model.safetensors", header, bytes(range(40)))

    def raw(self, rng: Random) -> bytes:
        header, self.damage = damage_value(rng, json.loads(json.dumps(self.header)))
        if isinstance(header, dict) and rng.random() < 0.3:
            name = rng.choice(NAMES)
            header = {name if key == "a" else key: entry for key, entry in header.items()}
            self.damage += f"; `a` is called {ascii(name)[:40]}"
        try:
            text = json.dumps(header, default=lambda value: sorted(map(str, value)) if isinstance(value, set) else None)
        except (TypeError, ValueError, RecursionError):  # no JSON can say it
            text = '{"a": ' + "[" * rng.randrange(1, 3000)
        if rng.random() < 0.1:
            text = text.replace(": 2", f": {'9' * rng.choice((30, 5000))}").replace(
                "[0", f"[{'9' * rng.choice((30, 5000))}"
            )
        if rng.random() < 0.1:
            text = text.replace('"a"', json.dumps(rng.choice(("", ".", "..", "a..b", LONELY, "²"))))
        raw = text.encode("utf-8", "surrogatepass")
        if rng.random() < 0.3:
            raw, how = damage_bytes(rng, raw)
            self.damage += f"; {how}"
        size = len(raw) if rng.random() < 0.9 else rng.choice((0, len(raw) - 1, 1 << 40, (1 << 64) - 1))
        data = self.data if rng.random() < 0.9 else self.data[: rng.randrange(len(self.data))]
        return struct.pack("<Q", max(0, size)) + raw + data

    def attempt(self, rng: Random) -> str:
        from ucpl.formats.opening import open_checkpoint

        self.path.write_bytes(self.raw(rng))
        open_checkpoint(self.path)
        return self.damage


@define(eq=False)
class HuggingFaceFolders:
    """Folders whose index, config or shards are bent."""

    folder: Path
    shards: Safetensors
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> HuggingFaceFolders:
        here = folder / "hf"
        here.mkdir(exist_ok=True)
        return cls(here, Safetensors.prepare(here))

    def attempt(self, rng: Random) -> str:
        from ucpl.formats.huggingface.store import config_of
        from ucpl.formats.opening import open_checkpoint

        for path in self.folder.iterdir():
            path.unlink()
        header = json.dumps(self.shards.header).encode()
        plain = struct.pack("<Q", len(header)) + header + self.shards.data
        (self.folder / "model-00001-of-00001.safetensors").write_bytes(
            plain if rng.random() < 0.8 else self.shards.raw(rng)
        )
        index: Any = {
            "metadata": {"total_size": 40, "total_parameters": 11},
            "weight_map": dict.fromkeys(("a", "b.c", "d"), "model-00001-of-00001.safetensors"),
        }
        index, self.damage = damage_value(rng, index)
        (self.folder / "model.safetensors.index.json").write_bytes(_json(index, rng))
        config, how = damage_value(rng, {"dtype": "bfloat16", "transformers_version": "5.0", "hidden_size": 8})
        (self.folder / "config.json").write_bytes(_json(config, rng))
        self.damage += f"; config: {how}"
        config_of(open_checkpoint(self.folder))
        return self.damage


def _json(value: Any, rng: Random) -> bytes:
    try:
        raw = json.dumps(value, default=str).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        raw = b"[" * 2000
    return damage_bytes(rng, raw)[0] if rng.random() < 0.1 else raw


def tensors_of(part: TorchFile) -> list[Any]:
    from ucpl.extents import TensorRef
    from ucpl.files.pickles import walk

    return [value for _, value in walk(part.value) if type(value) is TensorRef][:50]
