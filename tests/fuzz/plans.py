"""Plan files with a right digest and a wrong body.

The JSON, the columns, or their header is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray
from safetensors.numpy import load, save

import ucpl
from tests.fuzz.containers import FIXTURES
from tests.fuzz.damage import damage_bytes, damage_value
from tests.fuzz.folders import copied
from tests.fuzz.odd import clear
from tests.fuzz.small import cut, stored, verb
from ucpl.conversion.opening import open_for
from ucpl.files.checkpoint import Checkpoint
from ucpl.planning.files import sealed, unsealed
from ucpl.planning.plan import Plan

Columns = dict[str, NDArray[Any]]
NUMBERS = (-1, 0, 1, 2, 100, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.5, float("inf"), float("-inf"), float("nan"), 1e300)
LARGE = (("z1_dp2_bf16", "zero3(dp=2)"), ("z2_dp3_frozen", "plain()"), ("tp2_dp2_z1_uneven", "zero1(dp=1, tp=1)"))
ELEMENTS = ("{name}", "{name}[0]", "{name}[0, 0]", "{name}[0, 0, 0]", "{name}[9, 9]", "{name}[{huge}]", "nosuch", "[0]")


@frozen(eq=False)
class Stored:
    """A right plan in parts, and the checkpoint that it is for."""

    head: bytes  # the part for people
    header: str
    columns: bytes
    source: Checkpoint
    names: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, source: Path, folder: Path) -> Stored:
        path = folder / "made.plan"
        ucpl.save_plan(plan, path)
        text, columns = unsealed(path.read_bytes().split(b"\n", 2)[2])
        head, _, header = text.partition(b"\n---\n")
        return cls(head, header.decode().rstrip(), columns, open_for(plan, source), plan.tensors)


@define(eq=False)
class Plans:
    """Plans that are bent, then shown, asked and run."""

    folder: Path
    small: list[Stored] = field(factory=list)
    large: list[Stored] = field(factory=list)
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Plans:
        made = cls(folder)
        spec, parts = cut(folder)
        _, whole = stored(folder)
        for source, at, target in (
            ("cut(tp = 2)", parts, "whole()"),
            ("whole()", whole, "cut(tp = 3, pp = 2)"),
            ("cut(tp = 2)", parts, "cut(tp = 1, pp = 3)"),
        ):
            made.small.append(Stored.of(ucpl.plan(f"{spec}:{source}", f"{spec}:{target}"), at, folder))
        for name, call in LARGE:
            at = copied(FIXTURES / "deepspeed" / name, folder)
            made.large.append(Stored.of(ucpl.plan(str(at), call), at, folder))
        return made

    def attempt(self, rng: Random) -> str:
        base = rng.choice(self.small if rng.random() < 0.9 else self.large)
        path, target = self.folder / "bent.plan", self.folder / "new"
        path.write_bytes(self._bent(base, rng))
        plan = ucpl.load_plan(path)
        match rng.randrange(4):
            case 0:
                verb("show", path)
            case 1:
                huge = "9" * rng.choice((1, 17, 30))
                element = rng.choice(ELEMENTS).format(name=rng.choice(plan.tensors or ("up",)), huge=huge)
                verb("why", path, element, *rng.choice(((), ("--json",), ("--state", "weight"))))
            case _:
                try:
                    ucpl.apply(plan, base.source, target, workers=1, memory=16 << 20, force=rng.random() < 0.1)
                finally:
                    clear(target, self.folder / ".new.ucpl-work")
        return self.damage

    def _bent(self, base: Stored, rng: Random) -> bytes:
        head, header, columns = base.head, base.header.encode(), base.columns
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                value, self.damage = damage_value(rng, json.loads(base.header))
                header = json_of(value)
            case 4 | 5:
                columns, self.damage = bent_columns(rng, load(base.columns))
            case 6:
                columns, self.damage = damage_bytes(rng, columns, 0, rng.choice((8, 400, len(columns))))
            case _:
                header, self.damage = damage_bytes(rng, header)
        text = b"".join((head, b"\n---\n", header, b"\n"))
        if rng.random() < 0.02:
            text, how = damage_bytes(rng, text)
            self.damage += f"; {how}, digest made anew"
        made = sealed(text, columns)
        if rng.random() < 0.02:
            made, how = damage_bytes(rng, made)
            self.damage += f"; the file: {how}"
        return made


def json_of(value: Any) -> bytes:
    """A value as JSON, with the infinities that Python writes.

    Values that JSON lacks are replaced by near ones.
    """
    try:
        return json.dumps(value, default=list_or_text, skipkeys=True).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return b'{"graph": ' + b"[" * 2000


def list_or_text(value: Any) -> Any:
    return list(value) if isinstance(value, set | frozenset) else ascii(value)[:100]


def bent_columns(rng: Random, table: Columns) -> tuple[bytes, str]:
    """One or two columns changed, as arrays that are valid alone."""
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(table)) if table else "tensor"
        table, how = _bent_column(rng, table, name)
        done.append(f"column {name}: {how}")
    return save({n: np.ascontiguousarray(a) for n, a in table.items()}), "; ".join(done)


def _bent_column(rng: Random, table: Columns, name: str) -> tuple[Columns, str]:
    found = table.get(name, np.zeros(3, np.int64))
    match rng.randrange(9):
        case 0 | 1 | 2:
            wide = found.astype(np.int64) if found.dtype.kind in "iu" else found.copy()
            number = rng.choice(NUMBERS) if rng.random() < 0.6 else rng.randrange(-3, 40)
            if wide.size:
                wide.reshape(-1)[rng.randrange(wide.size)] = number
            return {**table, name: wide}, f"a number became {number}"
        case 3:
            return {**table, name: found[: rng.randrange(len(found) + 1)] if found.ndim else found}, "shortened"
        case 4:
            return {**table, name: np.concatenate([found, found]) if found.ndim else found}, "doubled"
        case 5:
            return {n: a for n, a in table.items() if n != name}, "gone"
        case 6:
            return {("x" if n == name else n): a for n, a in table.items()}, "renamed"
        case 7:
            shape = rng.choice(((-1,), (1, -1), (-1, 1), (1, 1, -1)))
            return {**table, name: found.reshape(shape)}, f"of shape {shape}"
        case _:
            kind = rng.choice((np.float32, np.float64, np.uint8, np.bool_, np.uint64, np.float16))
            made = found.astype(kind)
            if made.size and np.dtype(kind).kind == "f":
                made.reshape(-1)[rng.randrange(made.size)] = rng.choice(FLOATS)
            return {**table, name: made}, f"of {np.dtype(kind)}"
