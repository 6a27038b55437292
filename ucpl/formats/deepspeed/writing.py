"""A target's files without payload: metadata, and all carried values.

Metadata of the layout is made from the Structure; values that continue a run come from the source's TrainState. The form
is that of deepspeed 0.19.8, whatever release wrote the source.

Not here: recovery scripts (zero_to_fp32.py), which are DeepSpeed's own code.
"""

from __future__ import annotations

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, StoredTensor, Structure, key_text
from ucpl.extents.pipeline import layer_file
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.formats.deepspeed.config import blobs_of
from ucpl.formats.deepspeed.model_states import model_states, parts
from ucpl.formats.deepspeed.names import (
    EXPERTS_OPTIMIZERS,
    LATEST,
    experts_optim_file,
    is_apart,
    is_of_expert,
    model_file,
    optim_file,
)
from ucpl.formats.deepspeed.optimizer_states import shard
from ucpl.formats.deepspeed.order import alignment_elements
from ucpl.formats.deepspeed.target import Made, StepWriter, skeleton_of
from ucpl.formats.leaving import with_empty_states


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
