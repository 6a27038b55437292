"""Folders of Hugging Face: safetensors files with a class's names, and config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ucpl.extents import StoredTensor
    from ucpl.files.checkpoint import Checkpoint, Framework
    from ucpl.files.model_texts import WrittenTexts
    from ucpl.texts import Json

_LAYOUTS = "folders of Hugging Face are safetensors(); with the names of a class, `ucpl import hf CONFIG`"


class HuggingFaceFormat(Format):
    name = "huggingface"
    title = "a Hugging Face folder"
    place = 80
    layouts = ("safetensors",)
    other_names = ("hf", "transformers", "safetensors")
    hints = (
        ("huggingface", _LAYOUTS),
        ("transformers", _LAYOUTS),
    )
    settings = ("shard", "dtype")
    forms = ("safetensors",)
    kept_values = frozenset(("huggingface_files",))
    has_model_files = True
    has_own_files = True
    weights_file = "model.safetensors"

    def store(self) -> Framework:
        from ucpl.formats.huggingface.store import HuggingFace as Store

        return Store()

    def check_settings(self, settings: Mapping[str, object]) -> None:
        if settings.get("shard", "5GB") != "5GB":
            from ucpl.formats.huggingface.writing import shard_bytes

            shard_bytes(settings["shard"])

    def open_named(self, path: Path, names: Sequence[str]) -> Checkpoint:
        from ucpl.formats.huggingface.store import HuggingFace

        return HuggingFace().open_named(path, names)

    def texts_written(self, source: Checkpoint, targets: Sequence[StoredTensor]) -> WrittenTexts:
        from ucpl.formats.huggingface.config import written

        return written(source, targets)

    def config_rewritten(self, config: str, targets: Sequence[StoredTensor]) -> str:
        from ucpl.formats.huggingface.config import rewritten

        return rewritten(config, None, targets, {str(t.key[-1]): t.shape for t in targets})[0]

    def renamed_at_load(self, config: Mapping[str, Json], stored: Mapping[str, tuple[int, ...]]) -> str:
        from ucpl.formats.huggingface.demands import renamed_at_load

        return renamed_at_load(config, stored)


FORMAT = HuggingFaceFormat()
