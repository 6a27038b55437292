"""Vaults: sealed texts with exchanged values, and bent or missing files.

The texts are sealed anew, so that they count. A text that was not must give the bytes of a saved generation, or be
refused.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from attrs import define, field, frozen

from tests.fuzz.damage import damage_bytes, damage_value
from tests.fuzz.odd import ODD, clear
from tests.fuzz.plans import json_of
from tests.fuzz.targets import Files, read, write
from tests.vault.small import content, job
from ucpl.conversion.opening import infer, open_checkpoint
from ucpl.storage import cache_dirs
from ucpl.storage.cache_dirs import scoped
from ucpl.storage.vaults.checksummed_text import unseal
from ucpl.storage.vaults.snapshot_folder import SnapshotFile, SnapshotFolder, lay_out, open_generation
from ucpl.vault import Vault
from ucpl.vault.inspect import find_damage, inspect_vault
from ucpl.vault.server import Server

SIZES = (5000, 4097, 1)
SEALED = (".json",)
LOCKS = ".lock"


@frozen(eq=False)
class Case:
    """A vault that was left in the middle.

    Two generations count, or one and a half.
    """

    home: Path
    files: Files
    is_known: bool  # content of `tests.vault.small`, by step and rank; else a checkpoint of DCP's
    truth: dict[int, Files] = field(factory=dict)  # of a checkpoint of DCP's its files, by generation


def small(home: Path, domains: int, protect: str, saves: int) -> Case:
    with job(home, domains, protect, SIZES) as here:
        for step in range(1, saves + 1):
            here.save(step)
            if step < 3:
                here.turn()
    return Case(home, kept(home), True)


def running(home: Path) -> Case:
    state = {"model": {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5)}, "run": {"seen": 3}}
    vault = Vault.make(home, ranks=1, domains=1)
    with Server(vault.home, 0) as server, vault.writer(0, strict=True) as writer:
        writer.save(1, state, {"at": 1})
        server.turn()
    return Case(home, kept(home), False, {1: shadowed(home)})


def stepping(home: Path) -> Case:
    """The newest generation and the one before have gradients alone."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    vault = Vault.make(home, ranks=1, domains=1, replays=2)
    truth = {}
    with Server(vault.home, 0) as server, vault.writer(0, strict=True) as writer:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.arange(8.0).view(2, 4)).square().mean().backward()
            optimizer.step()
            assert writer.save(step, (model, optimizer)).replays == step
            server.turn()
            truth[step + 1] = shadowed(home)
    return Case(home, kept(home), False, truth)


def kept(home: Path) -> Files:
    return {name: data for name, data in read(home).items() if not name.endswith(LOCKS)}


def mend(files: Files, home: Path) -> None:
    """A folder with exactly these files.

    Most of them are unchanged, and stay.
    """
    lacking, folders = dict(files), {"", *(name[:at] for name in files for at, sign in enumerate(name) if sign == "/")}
    for top, within, there in os.walk(home):
        below = os.path.relpath(top, home) + "/" if top != str(home) else ""
        for name in [*within]:
            if below + name not in folders or os.path.islink(f"{top}/{name}"):
                clear(Path(top, name))
                within.remove(name)
        for name in there:
            path = f"{top}/{name}"
            if below + name not in files or not stat.S_ISREG(os.lstat(path).st_mode):
                clear(Path(path))
                continue
            with open(path, "rb") as file:
                if file.read() == files[below + name]:
                    del lacking[below + name]
    write(lacking, home)


@define(eq=False)
class Vaults:
    cases: list[Case]
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Vaults:
        made = [
            small(folder / how.partition("(")[0], n, how, 3)
            for n, how in ((2, "mirror"), (3, "raim5"), (4, "rs(2, 2)"))
        ]
        made += [running(folder / "running"), stepping(folder / "stepping")]
        for case in made:
            mend(case.files, case.home)
        return cls(made)

    def attempt(self, rng: Random) -> str:
        case = rng.choice(self.cases)
        files: dict[str, bytes] = {}  # those that are others than the case has
        is_sealed, odd = False, None
        name = rng.choice(sorted(case.files))
        if rng.random() < 0.75:
            texts = sorted(n for n in case.files if n.endswith(SEALED))
            commits = [n for n in texts if n.rpartition("/")[2].startswith("commit.")]
            name = rng.choice(commits if rng.random() < 0.5 else texts)  # reads depend on these most
            made, self.damage = resealed(rng, case.files[name])
            is_sealed = True
            others = [n for n in case.files if n.rpartition("/")[2] == name.rpartition("/")[2]]
            for other in others if rng.random() < 0.8 else [name]:  # as each domain gets the same
                files[other] = made
        elif rng.random() < 0.6:
            files[name], self.damage = damage_bytes(rng, case.files[name])
        else:
            odd = rng.choice(ODD)
            self.damage = odd.__name__
        self.damage = f"{case.home.name}: {name}: {self.damage}"
        try:
            write(files, case.home)
            if odd is not None:
                clear(case.home / name)
                odd(case.home / name)
            self._read(rng, case, is_sealed)
        finally:
            mend(case.files, case.home)
        return self.damage

    def _read(self, rng: Random, case: Case, is_sealed: bool) -> None:
        match rng.randrange(5):
            case 0:
                inspect_vault(case.home)
            case 1:
                find_damage(case.home)[0].close()
            case 2:
                vault = Vault.at(case.home)
                with ExitStack() as ends:
                    for number in range(min(5, len(vault.job.domains))):
                        server = ends.enter_context(Server(case.home, number))
                        with suppress(OSError):  # an obstacle at its place: the verb reports it, and tries again
                            server.turn()
            case _ if case.is_known:
                demand_saved(case.home, is_sealed)
            case _:
                found = shadowed(case.home)
                if not is_sealed:
                    assert found in case.truth.values(), "files have other bytes than were saved"


def demand_saved(home: Path, is_sealed: bool) -> None:
    """All bytes of all files.

    Without invented texts, those of one saved generation.
    """
    memory = open_generation(home)
    try:
        for name, parts in memory.commit.files().items():
            room = bytearray(min(parts[0][1].size, 1 << 20))
            if room:
                SnapshotFile(SnapshotFolder(memory, "vault:", Path()), name, parts).fill(memoryview(room), 0)
            if not is_sealed:
                wanted = content(memory.commit.step, int(name.rpartition("-")[2]), SIZES)
                assert bytes(room) == wanted, f"{name} has other bytes than were saved at step {memory.commit.step}"
    finally:
        memory.close()


def shadowed(home: Path) -> Files:
    """As a checkpoint that any verb opens.

    And the bytes of its files, the first MiB of each.
    """
    with tempfile.TemporaryDirectory(dir=home.parent) as top, scoped():
        with patch.object(cache_dirs, "fresh", lambda: Path(tempfile.mkdtemp(dir=top))):
            view = lay_out(open_generation(home), f"vault:{home}")
        infer(open_checkpoint(view.root))
        found = {}
        for name, stored in view.files.items():
            room = bytearray(min(stored.size, 1 << 20))
            if room:
                stored.fill(memoryview(room), 0)
            found[name] = bytes(room)
        return found


def resealed(rng: Random, data: bytes) -> tuple[bytes, str]:
    """A text with some changed values, or its inner texts' ones.

    They are changed as an insider could.
    """
    told = unseal(data)
    assert told is not None
    inner = [(key, i) for key in ("shards", "parity") for i in range(len(listed(told, key)))]
    if inner and rng.random() < 0.7:
        key, i = rng.choice(inner)
        text, how = resealed(rng, str(listed(told, key)[i]).encode())
        listed(told, key)[i] = text.decode("utf-8", "surrogatepass")
        return sealed(told), f"{key} {i}: {how}"
    within = told.get("files")
    if isinstance(within, str) and rng.random() < 0.7:
        files, how = damage_value(rng, json.loads(within))
        return sealed({**told, "files": json_of(files).decode("utf-8", "surrogatepass")}), f"files: {how}"
    value, how = damage_value(rng, told)
    return sealed(value), how


def listed(told: dict[str, Any], key: str) -> list[Any]:
    found = told.get(key)
    return found if isinstance(found, list) else []


def sealed(value: object) -> bytes:
    text = json_of(value)
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"
