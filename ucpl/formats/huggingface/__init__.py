"""Folders of Hugging Face: safetensors files with a class's names, and config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Framework

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
    settings = ("shard",)
    forms = ("safetensors",)
    kept_values = frozenset(("huggingface_files",))
    has_model_files = True
    has_own_files = True

    def store(self) -> Framework:
        from ucpl.formats.huggingface.store import HuggingFace as Store

        return Store()


FORMAT = HuggingFaceFormat()
