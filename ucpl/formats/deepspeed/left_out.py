"""Parameters of the module that no file holds.

`save_checkpoint(exclude_frozen_parameters=True)` leaves frozen parameters out, by their first names only. A second name
remains, at stage 3 without a value. Stage 3 also omits parameters that are neither in the optimizer nor frozen. Source:
deepspeed 0.19.8: engine.py (`module_state_dict`, `_save_checkpoint`).
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import field

from ucpl.extents import DTYPES, TensorRef
from ucpl.files.carrying import lifted
from ucpl.files.pickles import attributes_of
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.records import frozen

BLOB = "left_out"
_SHOWN = 3


@frozen
class LeftOut:
    """A name in the module without a parameter of the model."""

    dtype: str
    owner: str | None = None  # it is a second name of this one, which is not there; None: it has no other
    value: TensorRef | None = None  # the value below stage 3, which is stored

    def noted(self, file: str) -> dict[str, object]:
        """The form in which readers keep it in the train state."""
        return {"dtype": self.dtype, "of": self.owner, "value": lifted(self.value, file)}

    @classmethod
    def of(cls, value: Value) -> LeftOut:
        """The value that a reader kept.

        Raises: UcplError E455 for any other form.
        """
        dtype, owner, held = value.at("dtype"), value.find("of"), value.find("value")
        if not isinstance(dtype.held, str) or dtype.held not in DTYPES:
            dtype.wrong("a dtype")
        tensor = held.tensor() if held is not None and held.held is not None else None
        return cls(dtype.held, owner.text() if owner is not None and owner.held is not None else None, tensor)


@frozen(eq=False)
class NotStored:
    """Names without data in a step's files.

    by_choice: frozen parameters were excluded.
    """

    names: dict[str, LeftOut] = field(factory=dict)
    by_choice: bool = False  # the fields for frozen parameters are there, and empty

    def and_of(self, other: NotStored) -> NotStored:
        return NotStored({**other.names, **self.names}, self.by_choice or other.by_choice)

    def lines(self, part: TorchFile) -> tuple[str, ...]:
        """Lines for `inspect` and plans."""
        out = []
        for name, one in self.names.items():
            if one.owner is None:
                out.append(f"{name}: in no group of the optimizer and not frozen, and stage 3 saves no such parameter")
            elif one.value is None:
                out.append(
                    f"{one.owner}, and {name}, which is the same: frozen and left out (exclude_frozen_parameters)"
                )
            else:
                out.append(
                    f"{one.owner}: frozen and left out; its second name {name} was not, and goes along, but to stage 3"
                )
        if self.by_choice or any(one.owner for one in self.names.values()):
            modules = _without_tensors(part)
            more = f", and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
            of = f": nothing is there of {', '.join(modules[:_SHOWN])}{more}" if modules else ""
            out.append(f"frozen parameters (exclude_frozen_parameters){of}")
        return tuple(out)


def is_by_choice(part: TorchFile, stage: int) -> bool:
    """Test whether frozen parameters were excluded: their field is None.

    Only stages 2 and 3 have the field.
    """
    held = Value.of(part).mapping()
    return stage >= 2 and "frozen_param_shapes" in held and held["frozen_param_shapes"] is None


def _without_tensors(part: TorchFile) -> list[str]:
    """Modules without submodules and tensors, from the versions in state_dict."""
    module = Value.of(part).at("module").held
    attributes = attributes_of(module) if isinstance(module, OrderedDict) else None
    versions = attributes.get("_metadata") if isinstance(attributes, dict) else None
    if not isinstance(versions, dict) or not isinstance(module, dict):
        return []
    names = [name for name in versions if isinstance(name, str) and name]
    inside = {name.rpartition(".")[0] for name in (*names, *(n for n in module if isinstance(n, str)))}
    return [name for name in names if name not in inside]
