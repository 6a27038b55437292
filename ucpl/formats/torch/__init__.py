"""Files of torch and safetensors that a spec alone describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Framework

_LAYOUTS = "a file of torch.save is torch_file(); other files need a layout with `framework torch()`"


class TorchFormat(Format):
    name = "torch"
    title = "a folder of files that a spec describes"
    place = 90
    other_names = ("pytorch",)
    hints = (
        ("torch", _LAYOUTS),
        ("pytorch", _LAYOUTS),
    )
    settings = ("tracker", "step")
    forms = ("torch", "safetensors", "memory")
    is_of_a_spec = True
    kept_values = frozenset(("huggingface_files",))

    def store(self) -> Framework:
        from ucpl.formats.torch.store import Generic as Store

        return Store()


FORMAT = TorchFormat()
