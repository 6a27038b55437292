"""Readers of complete folders: DeepSpeed's of every kind, universal ones, plain files.

And their data for a writer.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from random import Random

from attrs import define, evolve, field, frozen

import ucpl
from tests.fuzz import lessened_megatron
from tests.fuzz.containers import FIXTURES, tensors_of, torch_file_of, torch_files
from tests.fuzz.damage import LONELY, Kept, damage_bytes, damage_value
from tests.fuzz.lessened import every_kind, small
from tests.fuzz.lessened_megatron import cut, written
from tests.fuzz.odd import ODD, clear
from tests.fuzz.remembered import Remembered
from ucpl.conversion.opening import infer
from ucpl.errors import UcplError
from ucpl.extents import TensorRef
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import dump_pickle
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.formats.named_files import below, open_files
from ucpl.formats.opening import framework, open_checkpoint
from ucpl.planning.plan import Plan

# The forms in which each kind of source is written, without planning anew: the writers' own reading of carried values.
TARGETS = (
    "zero0(dp=2)",
    "zero1(dp=2)",
    "zero2(dp=3)",
    "zero3(dp=2)",
    "plain()",
    "universal(stage=1)",
    "universal(stage=3)",
)

WRITTEN = 0.1  # of the damaged values: as files
INFERRED = 0.05  # of folders with complete files: inferring does not use `latest`


@frozen(eq=False)
class Part:
    """One file of a folder, and its value.

    The value is damaged and mended.
    """

    path: Path
    part: TorchFile
    raw: bytes
    tensors: list[TensorRef]


def file_of(value: object, part: Part) -> bytes:
    """The file of a damaged value. Raises.

    UcplError where no pickle can say it.
    """
    return torch_file_of(value, part.part, part.raw)


@define(eq=False)
class Folder:
    """One copied checkpoint. Its files may be changed one at a time."""

    path: Path
    parts: list[Part]
    plans: dict[str, Plan | None] = field(factory=dict)  # by target; None where there is no such layout of it

    @classmethod
    def of(cls, path: Path) -> Folder:
        parts = []
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*.pt") if "truth" not in p.name)
        for file in files:
            part = read_torch_file(file.parent, file.name)
            parts.append(Part(file, part, file.read_bytes(), tensors_of(part)))
        return cls(path, parts)

    def plan(self, rng: Random) -> Plan | None:
        """A plan of the folder as it is.

        Each is made when it is first asked for.
        """
        for to in rng.sample(TARGETS, len(TARGETS)):
            if to not in self.plans:
                try:
                    self.plans[to] = ucpl.plan(str(self.path), to)
                except UcplError:
                    self.plans[to] = None
            if self.plans[to] is not None:
                return self.plans[to]
        return None

    def part(self, rng: Random) -> Part:
        # Files of model states have most of the data; the others are many and alike.
        first = [part for part in self.parts if "model_states" in part.path.name or len(self.parts) == 1]
        return rng.choice(first if first and rng.random() < 0.5 else self.parts)


@define(eq=False)
class Folders:
    """Folders with exchanged values in one file.

    Now and then a file is gone or another's.

    Most damage stays in memory, where the files of a folder are read once: writing and reading a pickle takes longer than
    all checks of its values. Some is written: a failure in memory counts only if the file fails, too.
    """

    folders: list[Folder]
    damage: str = ""
    writes: bool = False
    remembered: Remembered = field(factory=Remembered)

    def attempt(self, rng: Random) -> str:
        folder = rng.choice(self.folders)
        plan = folder.plan(rng) if self.writes else None
        if rng.random() < 0.06 and len(folder.parts) > 1:
            one, two = rng.sample(folder.parts, 2)
            self.damage = f"{folder.path}: {one.path.name} is {two.path.name}"
            self._from_file(folder, one, two.raw, plan)
            return self.damage
        part, kept = folder.part(rng), Kept()
        try:
            value, how = damage_value(rng, part.part.value, part.tensors, kept)
            self.damage = f"{folder.path}: {part.path.name}: {how}"
            if rng.random() < WRITTEN or kept.bends:
                self._from_file(folder, part, file_of(value, part), plan)
            else:
                self._in_memory(folder, part, value, plan)
        finally:
            kept.mend()
        return self.damage

    def _in_memory(self, folder: Folder, part: Part, value: object, plan: Plan | None) -> None:
        try:
            self._go(folder, plan, instead={part.path: evolve(part.part, value=value)})
        except UcplError:
            raise
        except Exception:  # a fault of the product, unless no file can hold the value
            self._from_file(folder, part, file_of(value, part), plan)

    def _from_file(self, folder: Folder, part: Part, raw: bytes, plan: Plan | None) -> None:
        try:
            part.path.write_bytes(raw)
            self._go(folder, plan, changed=[part.path])
        finally:
            part.path.write_bytes(part.raw)

    def _go(
        self,
        folder: Folder,
        plan: Plan | None,
        changed: Iterable[Path] = (),
        instead: dict[Path, TorchFile] | None = None,
    ) -> None:
        with self.remembered.but(changed, instead):
            opened = self.opened(folder.path)
        if plan is not None:
            self._write(plan, opened)

    def opened(self, path: Path) -> Checkpoint:
        return open_checkpoint(path)

    def _write(self, plan: Plan, opened: Checkpoint) -> None:
        self.damage += f", to {plan.target.framework} {dict(plan.target.settings)}"
        made = framework(plan.target.framework).skeleton(plan.target, plan.targets, opened, None)
        values = [file.value for file in made.files if file.form == "torch"]
        kinds = {tuple(value) if isinstance(value, dict) else (): value for value in values}
        for value in {
            id(value): value for value in (*values[:1], *kinds.values())
        }.values():  # shards are many and alike
            dump_pickle(value)


@define(eq=False)
class NamedFiles(Folders):
    """Files that a spec names, read as it names them.

    The data at some places is no part of the model.
    """

    def opened(self, path: Path) -> Checkpoint:
        places = ((path.name, ("module", "a")), (path.name, ("optimizer",)))
        return open_files(path.parent, [path.name], below(places))


def named(folder: Path) -> NamedFiles:
    """The files of several frameworks, one by one."""
    made = []
    for number, source in enumerate(torch_files()):
        path = folder / f"{number}" / source.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(source.read_bytes())
        made.append(Folder.of(path))
    return NamedFiles(made)


def deepspeed(folder: Path) -> Folders:
    """A copy of each stored checkpoint, whatever its kind.

    And small ones, which are read eight times as often.
    """
    few = [Folder.of(path) for path in every_kind(folder)]
    return Folders([*stored(folder), *few * 8])


def stored(folder: Path) -> list[Folder]:
    found = sorted(path for path in (FIXTURES / "deepspeed").iterdir() if path.is_dir())
    return [Folder.of(copied(source, folder)) for source in found]


def megatron(folder: Path) -> Folders:
    """Megatron's own: other files of torch_dist, and files of ranks.

    Small ones are read eight times as often.

    `legacy_adam` is among the small ones: without the distributed optimizer it has two files, and is written by Megatron alone.
    """
    names = ("dist_moe", "dist_muon", "dist_buckets", "legacy_adam", "legacy_moe", "legacy_vpp")
    whole = {name: Folder.of(copied(FIXTURES / "megatron" / name, folder)) for name in names}
    few = [cut(name, folder) for name in ("dist_moe", "dist_muon")]
    few += [written(name, folder) for name in (*list(lessened_megatron.BUCKETS)[:1], *lessened_megatron.LEGACY)]
    made = Folders([*whole.values(), *[whole["legacy_adam"], *map(Folder.of, few)] * 8])
    for one in dict.fromkeys(made.folders):
        open_checkpoint(one.path)  # undamaged files are read
    return made


def universal(folder: Path) -> Folders:
    """Those that DeepSpeed's converter made, of a hundred files.

    And small ones, which are read eight times as often.
    """
    made = []
    for source in sorted((FIXTURES / "universal").iterdir()):
        for step in sorted(source.glob("*_universal")):
            made.append(Folder.of(copied(step, folder / source.name)))
    few = [Folder.of(small(name, f"universal(stage={name[1]})", folder)) for name in ("z1_dp4", "z3_dp2_subgroup")]
    return Folders([*made, *few * 8])


def plain(folder: Path) -> Folders:
    """Plain files that were made of dense checkpoints.

    A complete one, and small ones, which are read ten times as often.
    """
    whole = folder / "plain.pt"
    if not whole.exists():
        ucpl.convert(str(FIXTURES / "deepspeed" / "z2_dp3_frozen"), str(whole), "plain()", workers=1)
    few = [Folder.of(small(name, "plain()", folder)) for name in ("z1_dp2_bf16", "z0_dp2_bf16")]
    return Folders([Folder.of(whole), *few * 5])


def writers(folder: Path) -> Folders:
    """Every source, handed on to writers of every kind.

    Small ones are read eight times as often.
    """
    every = [*stored(folder), *universal(folder).folders[:2], *plain(folder).folders[:1]]
    some = [*every_kind(folder), small("z1_dp4", "universal(stage=1)", folder), small("z1_dp2_bf16", "plain()", folder)]
    return Folders([*every, *[Folder.of(path) for path in some] * 8], writes=True)


TAGS = (
    *(
        "",
        " ",
        "\n",
        ".",
        "..",
        "../source",
        "/etc",
        "/dev/shm",
        "~",
        "*",
        "global_step3/",
        "./global_step3",
        "global_step3\n",
    ),
    *(
        "global_step3\r\n",
        "global_step3\n\n",
        "\ufeffglobal_step3",
        "global_step3\0",
        "²",
        LONELY,
        "x" * 300,
        "x" * 5000,
    ),
    *(
        "a/" * 2000,
        "latest",
        "latest/x",
        "other",
        "other/../global_step3",
        "link",
        "loop",
        "up",
        "\u202eglobal_step3",
        "\x1b[2J",
    ),
)


@define(eq=False)
class Latest:
    """Save folders whose `latest` names no step, or is no file."""

    folders: list[Path]
    damage: str = ""
    remembered: Remembered = field(factory=Remembered)

    def attempt(self, rng: Random) -> str:
        folder = rng.choice(self.folders)
        path = folder / rng.choice(("latest", "latest", "latest", "latest_universal"))
        kept = path.read_bytes() if path.exists() else None
        try:
            if rng.random() < 0.1:
                odd = rng.choice(ODD)
                clear(path)
                odd(path)
                self.damage = f"{path} is {odd.__name__}"
            else:
                path.write_bytes(self._text(rng, kept or b"global_step3"))
            with self.remembered.but():
                opened = open_checkpoint(folder)
            assert opened.root.resolve().is_relative_to(folder.resolve())
            if rng.random() < INFERRED:
                infer(opened)
        finally:
            clear(path)
            if kept is not None:
                path.write_bytes(kept)
        return self.damage

    def _text(self, rng: Random, kept: bytes) -> bytes:
        if rng.random() < 0.3:
            raw, self.damage = damage_bytes(rng, kept)
            return raw
        tag = rng.choice(TAGS)
        if rng.random() < 0.3:
            tag = rng.choice((f"{kept.decode()}/{tag}", f"{tag}/{kept.decode()}", tag * rng.choice((2, 1000))))
        self.damage = f"the text {ascii(tag)[:80]}"
        return tag.encode("utf-8", "surrogatepass")


def latest(folder: Path) -> Latest:
    few = small("z0_dp2_bf16", "zero0(dp=2)", folder)
    whole = [copied(FIXTURES / "deepspeed" / name, folder) for name in ("z0_dp2_bf16", "pp2_dp2_z1_functions")]
    for target in (few, *whole):
        (target / "other").mkdir()
        (target / "link").symlink_to(next(p for p in target.iterdir() if p.is_dir()).name)
        (target / "loop").symlink_to("loop")
        (target / "up").symlink_to("..")
    return Latest([few] * 10 + whole)


def copied(source: Path, folder: Path) -> Path:
    target = folder / source.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("truth*"))
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target
