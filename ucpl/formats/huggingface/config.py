"""Texts of a Hugging Face folder, changed to fit the written tensors.

Values that do not fit are changed or left out, with a note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ucpl.extents import StoredTensor, key_text
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.model_texts import WrittenTexts, carried_texts
from ucpl.formats.huggingface.demands import with_vocabulary
from ucpl.formats.huggingface.weight_files import EXPLICIT
from ucpl.texts import Json

__all__ = ["ADAPTER", "rewritten", "written"]

ADAPTER = "adapter_model.safetensors"
CONFIG, OF_ADAPTER = "config.json", "adapter_config.json"
_SCALES = ("_scale_inv", "_scales")  # scales of quantised weights that transformers reads: fp8, mxfp4
_DTYPE = ("dtype", "torch_dtype")  # of transformers from 4.56 on, and before
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def written(source: Checkpoint, targets: Sequence[StoredTensor]) -> WrittenTexts:
    """The texts that a target of these tensors has."""
    texts = {n: t for n, t in carried_texts(source).items() if not n.endswith(".index.json")}
    files = {target.file for target in targets}
    left: dict[str, str] = {}
    if files == {ADAPTER} and CONFIG in texts:
        left[CONFIG] = "transformers would look for the base model's weights next to it"
    if files and ADAPTER not in files and OF_ADAPTER in texts:
        left[OF_ADAPTER] = f"transformers would look for {ADAPTER} next to it"
    texts = {name: text for name, text in texts.items() if name not in left}
    notes: tuple[str, ...] = ()
    if (config := texts.get(CONFIG)) is not None:
        stored = {key_text(target.key): target.shape for target in targets}
        texts[CONFIG], notes = rewritten(config, source, targets, stored)
    return WrittenTexts(texts, notes, left)


def rewritten(
    config: str, source: Checkpoint | None, targets: Sequence[StoredTensor], stored: Mapping[str, tuple[int, ...]]
) -> tuple[str, tuple[str, ...]]:
    """config.json as it fits these tensors, and notes on each change.

    Text that fits is not changed. source: a Hugging Face folder keeps its config's dtype if its tensors keep theirs.
    stored: complete shapes by name.
    """
    try:
        value: Json = json.loads(config)
    except (ValueError, RecursionError):
        return config, ()
    if not isinstance(value, dict):
        return config, ()
    notes = [
        *_without_quantisation(value, source, targets),
        *_without_file(value),
        *_with_dtype(value, source, targets),
    ]
    if notes:
        config = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    config, note = with_vocabulary(config, stored)
    return config, (*notes, *((note,) if note else ()))


def _without_quantisation(
    value: dict[str, Json], source: Checkpoint | None, targets: Sequence[StoredTensor]
) -> Iterable[str]:
    """Remove the quantisation if the scales were applied to the weights.

    A loader would look for quantised weights.
    """
    had = source is not None and any(key_text(key).endswith(_SCALES) for _, key in source.extents)
    if not had or any(key_text(t.key).endswith(_SCALES) for t in targets):
        return
    if value.pop("quantization_config", None) is not None:
        yield "config.json: quantization_config is left out, since the weights are not quantised any more"


def _without_file(value: dict[str, Json]) -> Iterable[str]:
    """Remove the key with the former name of the file of weights."""
    said = value.get(EXPLICIT)
    if isinstance(said, str) and said != "model.safetensors":
        del value[EXPLICIT]
        yield f"config.json: {EXPLICIT} = {said} is left out: the weights are in model.safetensors"


def _with_dtype(value: dict[str, Json], source: Checkpoint | None, targets: Sequence[StoredTensor]) -> Iterable[str]:
    """Set the dtype of most weights, also in configs of parts.

    A folder that keeps its dtype keeps its config's value.
    """
    now = _most((t.dtype, t.numel) for t in targets)
    was = _most((t.dtype, prod(t.shape)) for t in source.state.tensors) if source is not None else None
    if now is None or (source is not None and source.format == "huggingface" and was == now):
        return
    owners = [(f"{name}.", one) for name, one in value.items() if name.endswith("_config") and isinstance(one, dict)]
    there = [
        (lead, owner, key) for lead, owner in (("", value), *owners) for key in _DTYPE if owner.get(key) is not None
    ]
    said = next((owner[key] for lead, owner, key in there if not lead), None)
    for lead, owner, key in there:
        if owner[key] != _DTYPES[now] and (not lead or owner[key] == said):
            yield f"config.json: {lead}{key} = {owner[key]} becomes {_DTYPES[now]}"
            owner[key] = _DTYPES[now]


def _most(sizes: Iterable[tuple[str, int]]) -> str | None:
    """The dtype of most elements, of those that config.json can say."""
    counts: dict[str, int] = {}
    for dtype, numel in sizes:
        if dtype in _DTYPES:
            counts[dtype] = counts.get(dtype, 0) + numel
    return max(sorted(counts), key=counts.__getitem__) if counts else None
