"""The arguments of a Megatron run, as they go along with a checkpoint: an argparse.Namespace, inert."""

from __future__ import annotations

from collections.abc import Mapping

from ucpl.extents import Call, Global
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.inert import HOLDERS

__all__ = ["KNOWN_GLOBALS", "arguments_in", "namespace", "state_of"]

# Classes that a run's own values are of: torch.load(weights_only=True) refuses them, Megatron does not use it.
KNOWN_GLOBALS = HOLDERS | frozenset(
    f"megatron.core.{name}"
    for name in (
        "enums.ModelType",
        "enums.Fp8Recipe",
        "transformer.enums.AttnBackend",
        "transformer.enums.AttnMaskType",
        "rerun_state_machine.RerunDiagnostic",
        "rerun_state_machine.RerunMode",
        "rerun_state_machine.RerunState",
    )
)
_NAMESPACE = Global("argparse", "Namespace")


def state_of(held: object) -> dict[object, object] | None:
    """The attributes of a Namespace; None where it is none."""
    if type(held) is not Call or held.function != _NAMESPACE:
        return None
    if type(held.state) is dict:
        return held.state
    return dict(held.kwargs.items()) if held.state is None else None


def arguments_in(source: Checkpoint) -> dict[object, object]:
    """Of the run that wrote a checkpoint or what it was made of; none where it was no Megatron."""
    return state_of(source.envelope.carried.get("args")) or {}


def namespace(values: Mapping[object, object]) -> Call:
    """As argparse pickles one."""
    return Call(_NAMESPACE, new=True, state=dict(values))
