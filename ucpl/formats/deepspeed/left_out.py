"""Parameters that the module has and no file holds: what is not stored is not stored, and is said.

`save_checkpoint(exclude_frozen_parameters=True)` leaves frozen parameters out, by their first names alone: a second name stays
behind, at stage 3 without a value. Stage 3 also saves no parameter that the optimizer has not and that is not frozen.
Read in deepspeed 0.19.8: engine.py (`module_state_dict`, `_save_checkpoint`).
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import field

from ucpl.extents import DTYPES, TensorRef
from ucpl.records import frozen
from ucpl.stores.carrying import lifted
from ucpl.stores.pickles import attributes_of
from ucpl.stores.torch_files import TorchFile
from ucpl.stores.values import Value

BLOB = "left_out"
_SHOWN = 3


@frozen
class LeftOut:
    """A name in the module without a parameter of the model behind it."""

    dtype: str
    owner: str | None = None  # it is a second name of this one, which is not there; None: it has no other
    value: TensorRef | None = None  # what is there all the same, below stage 3

    def noted(self, file: str) -> dict[str, object]:
        """As readers note it among what is carried."""
        return {"dtype": self.dtype, "of": self.owner, "value": lifted(self.value, file)}

    @classmethod
    def of(cls, value: Value) -> LeftOut:
        """What readers noted. Raises: UcplError E455 where a file says anything else."""
        dtype, owner, held = value.at("dtype"), value.find("of"), value.find("value")
        if not isinstance(dtype.held, str) or dtype.held not in DTYPES:
            dtype.wrong("a dtype")
        tensor = held.tensor() if held is not None and held.held is not None else None
        return cls(dtype.held, owner.text() if owner is not None and owner.held is not None else None, tensor)


@frozen(eq=False)
class NotStored:
    """What one step's files leave out: names that stay behind, and whether frozen parameters were excluded."""

    names: dict[str, LeftOut] = field(factory=dict)
    by_choice: bool = False  # the fields for frozen parameters are there, and empty

    def and_of(self, other: NotStored) -> NotStored:
        return NotStored({**other.names, **self.names}, self.by_choice or other.by_choice)

    def lines(self, part: TorchFile) -> tuple[str, ...]:
        """What `inspect` and a plan say of it."""
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
    """Stages 2 and 3 have a field for frozen parameters, which is None where they were excluded."""
    held = Value.of(part).mapping()
    return stage >= 2 and "frozen_param_shapes" in held and held["frozen_param_shapes"] is None


def _without_tensors(part: TorchFile) -> list[str]:
    """Modules with no module in them and no tensor: state_dict notes the version of every module."""
    module = Value.of(part).at("module").held
    attributes = attributes_of(module) if isinstance(module, OrderedDict) else None
    versions = attributes.get("_metadata") if isinstance(attributes, dict) else None
    if not isinstance(versions, dict) or not isinstance(module, dict):
        return []
    names = [name for name in versions if isinstance(name, str) and name]
    inside = {name.rpartition(".")[0] for name in (*names, *(n for n in module if isinstance(n, str)))}
    return [name for name in names if name not in inside]
