"""The reader of PyTorch's distributed format: `.metadata` with its values exchanged, and archives of chunks with bytes bent."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import torch
from attrs import define

import ucpl
from tests.fuzz.containers import FIXTURES
from tests.fuzz.damage import Kept, damage_bytes, damage_value
from tests.stores.test_dcp_odd import numbered, save, trained
from ucpl.conversion.opening import infer
from ucpl.stores.dcp.metadata import METADATA
from ucpl.stores.pickles import dumps, loads
from ucpl.stores.registry import open_checkpoint

BENT = 0.15  # of inputs: bytes of a file of chunks, or of `.metadata`; the others are values of `.metadata`


@define(eq=False)
class Folder:
    path: Path
    metadata: object
    raw: dict[str, bytes]


@define(eq=False)
class Dcp:
    folders: list[Folder]
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Dcp:
        shutil.copytree(FIXTURES / "dcp" / "uneven9", folder / "uneven9")
        params = {"w": numbered(4, 2), "b": numbered(3), "s": torch.tensor(2.0)}
        beside = {("run", "seen"): torch.tensor(5), ("run", "names", 0): {"a": 1}, ("model", "buffer"): numbered(2)}
        save(folder / "trained", trained(params, beside=beside))
        return cls.of(folder / "uneven9", folder / "trained")

    @classmethod
    def of_megatron(cls, folder: Path) -> Dcp:
        """Names of Megatron-Core's in the same format: experts, buckets that name no parameter, runs of flattened parts."""
        names = ("dist_moe", "dist_moe_buckets", "dist_old", "dist_unstacked_moe_ep2")
        copies = [Path(shutil.copytree(FIXTURES / "megatron" / name, folder / name)) for name in names]
        return cls.of(*(next(copy.rglob(METADATA)).parent for copy in copies))

    @classmethod
    def of_megatron_fsdp(cls, folder: Path) -> Dcp:
        """Halves of linear_fc1, masters as weights, hyper-parameters by name; and a folder that was converted, with stages."""
        source = Path(shutil.copytree(FIXTURES / "megatron" / "fsdp_tp2", folder / "fsdp_tp2"))
        ucpl.convert(FIXTURES / "megatron" / "dist_moe", folder / "moe", "megatron_fsdp(dp = 2)")
        return cls.of(*(next(copy.rglob(METADATA)).parent for copy in (source, folder / "moe")))

    @classmethod
    def of(cls, *folders: Path) -> Dcp:
        made = []
        for path in folders:
            raw = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
            made.append(Folder(path, loads(raw[METADATA]), raw))
        return cls(made)

    def attempt(self, rng: Random) -> str:
        folder = rng.choice(self.folders)
        if rng.random() < BENT:
            name = rng.choice(sorted(folder.raw))
            data, how = damage_bytes(rng, folder.raw[name])
        else:
            name, kept = METADATA, Kept()
            try:
                value, how = damage_value(rng, folder.metadata, [], kept)
                self.damage = f"{folder.path.name}: {how}"
                data = dumps(value)
            finally:
                kept.mend()
        self.damage = f"{folder.path.name}: {name}: {how}"
        (folder.path / name).write_bytes(data)
        try:
            infer(open_checkpoint(folder.path))
        finally:
            (folder.path / name).write_bytes(folder.raw[name])
        return self.damage
