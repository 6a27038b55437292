"""DeepSpeed's store: finds a step's folder, sends files to readers.

Only this module selects the readers: weights are in files of layers, or in those of ranks. All kinds share the topology, the
settings and the closing Checkpoint, and every shard has a tp and a pp coordinate. Readers of experts add theirs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, UcplError, fail, plural
from ucpl.extents import DTYPES, StoredTensor, Structure, key_text
from ucpl.extents.pipeline import layer_file
from ucpl.files.checkpoint import Checkpoint, Order, Skeleton
from ucpl.files.demands import Demands
from ucpl.files.skipping import skips_optimizer
from ucpl.files.texts import read_name
from ucpl.formats.deepspeed.config import blobs_of
from ucpl.formats.deepspeed.dense import read_dense
from ucpl.formats.deepspeed.gathered import Gathered, StepPlace
from ucpl.formats.deepspeed.model_states import model_states, parts
from ucpl.formats.deepspeed.names import (
    ATOMS,
    EXPERTS_OPTIMIZERS,
    LATEST,
    LATEST_UNIVERSAL,
    StepFiles,
    experts_optim_file,
    is_apart,
    is_of_expert,
    list_files,
    model_file,
    optim_file,
)
from ucpl.formats.deepspeed.optimizer_states import shard
from ucpl.formats.deepspeed.order import alignment_elements
from ucpl.formats.deepspeed.settings import read_settings, shards_gone
from ucpl.formats.deepspeed.target import Made, StepWriter, skeleton_of
from ucpl.formats.deepspeed.topology import topology_of
from ucpl.formats.leaving import with_empty_states


class Universal:
    name = "universal"
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        """Test for a folder of atoms, or one with only `latest_universal`."""
        if not path.is_dir():
            return False
        if (path / ATOMS).is_dir() and any(p.is_dir() for p in (path / ATOMS).iterdir()):
            return True
        return (path / LATEST_UNIVERSAL).is_file() and not (path / "latest").is_file()

    def open(self, path: Path) -> Checkpoint:
        """Read the headers of all atoms and of the model states.

        Raises: UcplError E452-E463.
        """
        from ucpl.formats.deepspeed.universal import read_universal

        return read_universal(path)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A folder that `load_universal` takes at any degree of data parallelism.

        Raises: UcplError E470-E479.
        """
        from ucpl.formats.deepspeed.universal_writing import skeleton

        return skeleton(structure, targets, source, tag)


class DeepSpeed:
    name = "deepspeed"
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        """Test for DeepSpeed's files, or for `latest` next to folders."""
        if not path.is_dir():
            return False
        try:
            if not list_files(path).is_empty:
                return True
        except UcplError:
            return True  # its files, though something is wrong with them
        if (path / LATEST).is_file():
            return True
        return any(child.is_dir() and _looks(child) for child in path.iterdir())

    def open(self, path: Path, order: Order | None = None) -> Checkpoint:
        """Read all headers of a step's folder or a save folder.

        order: the parameters of the optimizer's numbers, if no file has them (ZeRO-0). Raises: UcplError E450-E469.
        """
        root, tag = _step_folder(path)
        return _open_step(StepPlace(path, root, tag), order)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """All files of a target, for `engine.load_checkpoint` at its degree and stage.

        Raises: UcplError E470-E479.
        """
        return skeleton(structure, targets, source, tag)


def _looks(folder: Path) -> bool:
    try:
        return not list_files(folder).is_empty
    except UcplError:
        return True


# ---- the step's folder ---------------------------------------------------------------------------------------------------


def _step_folder(path: Path) -> tuple[Path, str]:
    """(the step's folder, its tag).

    Raises: UcplError E450 where there is no checkpoint, E451 where `latest` does not lead to one.
    """
    if not path.exists():
        fail("E450", f"{path} does not exist", Label(str(path)))
    if not path.is_dir():
        fail("E450", f"{path} is a file; a DeepSpeed checkpoint is a folder", Label(str(path)))
    if not list_files(path).is_empty:
        return path, path.resolve().name
    latest = path / LATEST
    if not latest.exists():
        steps = _steps(path)
        if steps:
            fail(
                "E451",
                f"{path} has {plural(len(steps), 'step')} but no `latest` that names one",
                Label(str(path)),
                remedy=_other_step(path),
            )
        fail("E450", f"{path} holds no DeepSpeed checkpoint", Label(str(path)))
    tag = read_name(latest)
    if tag is None:
        fail("E451", f"{latest} does not hold the name of a step", Label(str(latest)), remedy=_other_step(path))
    root = path / tag
    if not Path(os.path.realpath(root)).is_relative_to(os.path.realpath(path)):  # links that go round lead nowhere
        fail(
            "E451",
            f"{latest} names {tag!r}, which is outside the folder",
            Label(str(latest), tag),
            remedy=_other_step(path),
        )
    if not os.path.isdir(root):  # os.path.isdir is False for impossible names, too
        fail(
            "E451",
            f"{latest} names {tag!r}, but there is no such folder",
            Label(str(latest), tag),
            Label(str(root), "not there"),
            remedy=_other_step(path),
        )
    if list_files(root).is_empty:
        what = f"{root} holds no file of a DeepSpeed checkpoint"
        fail("E450", what, Label(str(latest), tag), Label(str(root)), remedy=_other_step(path))
    return root, tag


def _steps(path: Path) -> list[str]:
    """Folders of steps without empty files, in the order of their numbers."""
    found = []
    for child in path.iterdir():
        if child.is_dir() and not list_files(child).is_empty and all(f.stat().st_size for f in child.glob("*.pt")):
            found.append(child.name)
    return sorted(found, key=lambda name: ([int(n) for n in re.findall("[0-9]+", name)], name))


def _other_step(path: Path) -> str:
    """The newest step in the folder, for the remedy."""
    steps = _steps(path)
    return (
        f"name the step's folder, the newest is {path / steps[-1]}"
        if steps
        else "no step's folder has files: copy it again"
    )


# ---- its readers ---------------------------------------------------------------------------------------------------------


def _without_optimizer(listing: StepFiles) -> StepFiles:
    """The files without skipped shards; stage 3 keeps its shards."""
    is_sliced = any(dp is not None for dp, _ in listing.models)
    shards = (*listing.optims.values(), *listing.experts_optims)
    if is_sliced or not shards or not skips_optimizer(*shards, kind="file"):
        return listing
    return evolve(listing, optims={}, prefix="", experts_optims=())


def _open_step(place: StepPlace, order: Order | None) -> Checkpoint:
    """Read all headers of one step. Raises: UcplError E400-E427, E45x, E46x."""
    topology = topology_of(_without_optimizer(list_files(place.root)))
    if order is not None and topology.stage:
        fail(
            "E466",
            f"{order.origin} is of an optimizer that names no parameter, and files of ZeRO-{topology.stage} name them",
            Label(str(topology.first.path), where="param_shapes"),
            remedy="leave it out",
        )
    gathered = Gathered()
    read_settings(gathered, topology)
    gathered.lacking = () if skips_optimizer() else shards_gone(topology)
    if gathered.lacking:
        gathered.remark(f"no shard of the optimizer is there, and the run had one: {gathered.lacking[0]} is missing")
    if topology.listing.layers:
        from ucpl.formats.deepspeed.pipeline import read_pipeline

        files, facts = read_pipeline(gathered, topology, order)
    else:
        files, facts = read_dense(gathered, topology, order)
    return gathered.checkpoint(place, "deepspeed", files, facts)


# ---- files of a target -----------------------------------------------------------------------------------------------


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    """All files of a target that a plain `engine.load_checkpoint` takes.

    Raises: UcplError E470 where one number is needed and several are there, E471 where the form has no place for something.
    """
    is_whole = not structure.settings.get("stage") and not structure.settings.get("masters")
    writer = StepWriter.of(structure, targets, with_empty_states(source, structure) if is_whole else source)
    _reject_alignment(writer)
    if writer.has_layers and not writer.stage and writer.settings.get("bf16"):
        fail(
            "E471",
            "a PipelineModule in bf16 without ZeRO: DeepSpeed makes BF16_Optimizer of it, and has no code that loads one",
            Label("<target>", where="zero0(bf16 = 1)"),
            remedy="zero1(...), which BF16_Optimizer is; or zero0(bf16 = 0) or zero0(fp16 = 1)",
        )
    files: Made = []
    for path, names in apart(writer).items():
        file = writer.file(path)
        files.append((file, parts(writer, file, names)))
    for mp in range(writer.stages * writer.degree):
        for rank in range(writer.dp if writer.stage == 3 else 1):
            writer.turn_to(mp, rank)
            file = writer.file(model_file(writer.stage, rank, mp))
            files.append((file, model_states(writer, file, rank)))
    for mp in range(writer.stages * writer.degree):
        for rank in range(writer.dp if writer.stage else 0):
            writer.turn_to(mp, rank)
            file = writer.file(optim_file(bool(writer.settings.get("bf16")), rank, mp))
            files.append((file, shard(writer, file)))
    for name in _empty_optimizers(writer):
        files.append((writer.file(name), {"optimizer": None}))
    _reject_unused(writer)
    return skeleton_of(tag or writer.folder, LATEST, files)


def _empty_optimizers(writer: StepWriter) -> list[str]:
    """Files of experts' optimizers, if the source has them.

    With ZeRO they are empty. DeepSpeed before 0.10 opens them at each load; it and later ones, up to 0.19.3, write them.
    """
    if not writer.blob(EXPERTS_OPTIMIZERS) or not any(is_of_expert(t.file) for t in writer.targets):
        return []
    degree = int(writer.settings.get("ep") or 1)
    return [experts_optim_file(ep, mp) for mp in range(writer.stages * writer.degree) for ep in range(degree)]


def _reject_alignment(writer: StepWriter) -> None:
    """Check the alignment.

    Ds_config has a flag, and the dtype gives the multiple.
    """
    alignment = int(writer.settings.get("alignment") or 1)
    if alignment == 1 or writer.stage not in (1, 2) or writer.settings.get("bf16_optimizer"):
        return
    trained = {name for _, members in writer.structure.groups for name in members}
    dtypes = sorted({tensor.dtype for tensor in writer.structure.tensors if tensor.name in trained})
    for dtype in dtypes:
        multiple = alignment_elements(DTYPES[dtype].itemsize)
        if alignment != multiple:
            fail(
                "E471",
                f"alignment = {alignment}, and parameter_alignment makes multiples of {multiple} elements of {dtype} tensors",
                Label("<target>", where=f"alignment = {alignment}"),
                remedy=f"alignment = {multiple}, or 1 for none." if len(dtypes) == 1 else "alignment = 1",
            )


def _reject_unused(writer: StepWriter) -> None:
    for i, target in enumerate(writer.targets):
        if i not in writer.used:
            fail(
                "E471",
                f"stage {writer.stage} at dp {writer.dp}, tp {writer.degree} has no place for {key_text(target.key)} of"
                f" {target.file}",
                Label(target.file, where=key_text(target.key)),
            )


def apart(writer: StepWriter) -> dict[str, list[str]]:
    """Files of layers and of experts, with their names in order.

    A layer without tensors has a file, too.
    """
    out: dict[str, list[str]] = {}
    pipeline = writer.pipeline
    if pipeline is not None:
        layers = blobs_of(writer.source).find("layer_files")
        stems = [stem for stem, _ in layers.named()] if layers is not None else []
        is_by_tp = pipeline.is_by_tp or writer.degree > 1
        ranks = range(writer.degree) if is_by_tp else (None,)
        out = {layer_file(stem, tp): [] for stem in stems for tp in ranks}
    for target in writer.targets:
        if is_apart(target.file):
            out.setdefault(target.file, []).append(str(target.key[0]))
    return dict(sorted(out.items()))
