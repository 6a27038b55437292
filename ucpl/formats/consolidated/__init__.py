"""Meta's folders of Llama, and Mistral's: consolidated.NN.pth and params.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ucpl.extents import StoredTensor, Structure
    from ucpl.files.checkpoint import Checkpoint, Framework
    from ucpl.files.model_texts import WrittenTexts
    from ucpl.texts import Json

_LAYOUTS = "folders of Meta are meta(mp=2); under the names of transformers, 'llama.ucpl:consolidated(mp=2)'"


class ConsolidatedFormat(Format):
    name = "consolidated"
    title = "a folder of Meta"
    place = 68
    layouts = ("meta",)
    hints = (
        ("consolidated", _LAYOUTS),
        ("llama", _LAYOUTS),
    )
    settings = ("mp", "rows", "safetensors")
    forms = ("torch", "safetensors")
    own_settings = frozenset(("mp", "rows", "safetensors"))
    kept_values = frozenset(("huggingface_files",))

    def store(self) -> Framework:
        from ucpl.formats.consolidated.store import Meta as Store

        return Store()

    def texts_written(self, source: Checkpoint, targets: Sequence[StoredTensor]) -> WrittenTexts:
        from ucpl.formats.consolidated.params import written

        return written(source, targets)

    def config_made(self, folder: Path) -> dict[str, Json] | None:
        from ucpl.formats.consolidated.store import config_of

        return config_of(folder)

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.consolidated.params import advice

        return advice(source)


FORMAT = ConsolidatedFormat()
