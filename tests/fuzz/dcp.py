"""The reader of PyTorch's distributed format.

`.metadata` with its values exchanged, and archives of chunks with bytes bent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from random import Random

import torch
from attrs import define, field

from tests.formats.dcp.test_dcp_odd import numbered, save, trained
from tests.fuzz import lessened_megatron as lessened
from tests.fuzz.containers import FIXTURES
from tests.fuzz.damage import Kept, damage_bytes, damage_value
from tests.fuzz.lessened_megatron import cut, written
from tests.fuzz.remembered import Remembered
from ucpl.conversion.opening import infer
from ucpl.errors import UcplError
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import dumps, loads
from ucpl.formats.dcp.metadata import METADATA
from ucpl.formats.opening import open_checkpoint

BENT = 0.15  # of inputs: bytes of a file of chunks, or of `.metadata`; the others are values of `.metadata`
WRITTEN = 0.1  # of damaged values: as a file
INFERRED = 0.05  # of folders that are read as if nothing were damaged


@define(eq=False)
class Folder:
    path: Path
    metadata: object
    raw: dict[str, bytes]
    asked: object = None  # of inferring, where nothing is damaged

    @classmethod
    def of(cls, path: Path) -> Folder:
        """Of a folder that `.metadata` is in, or one around it."""
        path = next(path.rglob(METADATA)).parent
        raw = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
        return cls(path, loads(raw[METADATA]), raw)


@define(eq=False)
class Dcp:
    """Most damage stays in memory.

    Archives and undamaged values are read once, as in `folders.Folders`.
    """

    folders: list[Folder]
    damage: str = ""
    remembered: Remembered = field(factory=Remembered)

    @classmethod
    def prepare(cls, folder: Path) -> Dcp:
        shutil.copytree(FIXTURES / "dcp" / "uneven9", folder / "uneven9")
        params = {"w": numbered(4, 2), "b": numbered(3), "s": torch.tensor(2.0)}
        beside = {("run", "seen"): torch.tensor(5), ("run", "names", 0): {"a": 1}, ("model", "buffer"): numbered(2)}
        save(folder / "trained", trained(params, beside=beside))
        return cls.of(folder / "uneven9", folder / "trained")

    @classmethod
    def of_megatron(cls, folder: Path) -> Dcp:
        """Names of Megatron-Core's in the same format.

        Experts, buckets that name no parameter, runs of flattened parts.

        Complete ones, and each kind with few parameters, which are read eight times as often.
        """
        names = ("dist_moe", "dist_moe_buckets", "dist_old", "dist_unstacked_moe_ep2")
        copies = [Path(shutil.copytree(FIXTURES / "megatron" / name, folder / name)) for name in names]
        few = [*(cut(name, folder) for name in lessened.CUT), *(written(name, folder) for name in lessened.BUCKETS)]
        return cls.of(*copies, few=few)

    @classmethod
    def of_megatron_fsdp(cls, folder: Path) -> Dcp:
        """Halves of linear_fc1, masters as weights, hyper-parameters by name.

        And a folder that was converted, with stages.

        Complete, and with few parameters, eight times as often.
        """
        source = Path(shutil.copytree(FIXTURES / "megatron" / "fsdp_tp2", folder / "fsdp_tp2"))
        return cls.of(source, written("fsdp_moe", folder), few=[cut(name, folder) for name in lessened.CUT_FSDP])

    @classmethod
    def of(cls, *folders: Path, few: Iterable[Path] = ()) -> Dcp:
        made = cls([*map(Folder.of, folders), *[Folder.of(path) for path in few] * 8])
        for folder in dict.fromkeys(made.folders):  # undamaged files are read
            with made.remembered.but():
                opened = open_checkpoint(folder.path)
            infer(opened)
            folder.asked = asked(opened)
        return made

    def attempt(self, rng: Random) -> str:
        folder = rng.choice(self.folders)
        if rng.random() < BENT:
            name = rng.choice(sorted(folder.raw))
            data, how = damage_bytes(rng, folder.raw[name])
            self.damage = f"{folder.path.name}: {name}: {how}"
            self._from_file(rng, folder, name, data)
            return self.damage
        kept = Kept()
        try:
            value, how = damage_value(rng, folder.metadata, [], kept)
            self.damage = f"{folder.path.name}: {METADATA}: {how}"
            if rng.random() < WRITTEN:
                self._from_file(rng, folder, METADATA, dumps(value))
            else:
                self._in_memory(rng, folder, value)
        finally:
            kept.mend()
        return self.damage

    def _in_memory(self, rng: Random, folder: Folder, value: object) -> None:
        try:
            self._read(rng, folder, pickled=(value,))
        except UcplError:
            raise
        except Exception:  # a fault of the product, unless no file can hold the value
            self._from_file(rng, folder, METADATA, dumps(value))

    def _from_file(self, rng: Random, folder: Folder, name: str, data: bytes) -> None:
        path = folder.path / name
        try:
            path.write_bytes(data)
            self._read(rng, folder, changed=[path])
        finally:
            path.write_bytes(folder.raw[name])

    def _read(
        self, rng: Random, folder: Folder, changed: Iterable[Path] = (), pickled: tuple[object, ...] = ()
    ) -> None:
        with self.remembered.but(changed, pickled=pickled):
            opened = open_checkpoint(folder.path)
        if asked(opened) != folder.asked or rng.random() < INFERRED:
            infer(opened)


def asked(opened: Checkpoint) -> object:
    """All that inferring looks at.

    If it is unchanged, inferring gives the same result, and takes longer than reading does.
    """
    train_state = opened.state
    return (
        (
            opened.format,
            opened.state.tensors,
            opened.state.aliases,
            opened.state.parallel.flats,
            opened.state.parallel.shardings,
            opened.state.parallel.local_shapes,
        ),
        (
            tuple(opened.extents.items()),
            opened.scalar_extents,
            opened.own,
            opened.files,
            opened.state.parallel.vocabulary,
        ),
        (opened.state.parallel.pipeline, opened.state.parallel.experts),
        (train_state.settings, train_state.scalars, [(group.name, group.members) for group in train_state.groups]),
        ([*train_state.blobs], [*train_state.carried], [*opened.carried_extents]),
    )
