"""What a checkpoint holds that is not a tensor of the model: carried over or regenerated, never cut or joined."""

from __future__ import annotations

from attrs import field

from ucpl.records import frozen


@frozen
class Setting:
    """A number or word that shapes a layout (`dp`, `stage`, `round_robin`, `sub_group_size`), with its printed origin."""

    value: int | float | str | bool | None
    origin: str  # "command line", "ds_config of mp_rank_00_model_states.pt", "default of specs/deepspeed.ucpl:12"


@frozen
class Scalar:
    """A small tensor whose value is held here: its dtype, shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


# What an optimizer keeps once for a whole parameter: most often a number; a list or dict of them, too
Counted = Scalar | int | float | str | bool | None | list["Counted"] | tuple["Counted", ...] | dict[str, "Counted"]


@frozen
class ParameterGroup:
    """One parameter group of the optimizer: its members in the optimizer's own order, and hyper-parameters (lr, ...).

    `members` are names of trainable parameters with elements. `hyper` is the param_group dict without `params`. `listed`: all
    names that the optimizer has in the group, frozen parameters and those without elements, too; empty where these are members.
    """

    name: str
    members: tuple[str, ...]
    hyper: dict[str, object]
    listed: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[str, ...]:
        """All names that the optimizer has in the group, in its order."""
        return self.listed or self.members


@frozen
class Envelope:
    """All that is not a tensor of the model. Values are plain Python values or the inert records of extents.records.

    Structural facts (world sizes, shapes, paddings, the stage) are in `settings` only: the target's are regenerated.
    """

    framework: str  # "deepspeed", "plain", ...
    version: str = ""
    settings: dict[str, Setting] = field(factory=dict)
    groups: tuple[ParameterGroup, ...] = ()
    # state name -> parameter name -> value as it was kept; a tensor without dims is a `Scalar`
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    # parameters whose number of a state a conversion made: where one number is of several, that of the others holds
    begun: dict[str, frozenset[str]] = field(factory=dict)
    # framework fields that continue a run: lr_scheduler, loss scaler, global_steps, ds_config, ...
    blobs: dict[str, object] = field(factory=dict)
    # the caller's own: client_state, merged by the framework into its files
    carried: dict[object, object] = field(factory=dict)
