"""The state of a training run without its tensor bytes.

Values are carried over or computed anew, never cut or joined.
"""

from __future__ import annotations

import re

from attrs import field

from ucpl.errors import Diagnostic
from ucpl.extents.parallel_facts import ParallelFacts
from ucpl.extents.structure import NamedTensor
from ucpl.records import frozen


@frozen
class Setting:
    """A number or word of a layout (`dp`), with its origin."""

    value: int | float | str | bool | None
    origin: str  # "command line", "ds_config of mp_rank_00_model_states.pt", "default of specs/deepspeed.ucpl:12"


def of_default(file: str, line: int) -> str:
    """The origin of a value that a layout's own text gives."""
    return f"default of {file}:{line}"


def is_of_default(origin: str) -> bool:
    """If `of_default` made an origin.

    Other defaults are choices that a user should see: "default of a config without heads".
    """
    return re.fullmatch(r"default of .+:[0-9]+", origin) is not None


@frozen
class Scalar:
    """A small tensor with its value: dtype, shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


# Values that an optimizer keeps once per parameter: usually a number; a list or dict of them, too
Counted = Scalar | int | float | str | bool | None | list["Counted"] | tuple["Counted", ...] | dict[str, "Counted"]


@frozen
class ParameterGroup:
    """One parameter group of the optimizer.

    `members` are names of trainable parameters with elements, in the optimizer's order. `hyper` is the param_group dict
    without `params`. `listed`: all names that the optimizer has in the group, frozen parameters and those without
    elements, too; empty where these are members.
    """

    name: str
    members: tuple[str, ...]
    hyper: dict[str, object]
    listed: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[str, ...]:
        """All names that the optimizer has in the group, in its order."""
        return self.listed or self.members


@frozen(eq=False)
class TrainState:
    """All of a training run that is not tensor bytes.

    Values are plain Python values or the inert records of extents.records. Structural facts (world sizes, the stage) are in
    `settings` only: those of a target are computed anew. No field is of one format.
    """

    framework: str  # that ran the training: "deepspeed"; a plain file of its run has it, too
    version: str = ""
    tensors: tuple[NamedTensor, ...] = ()  # parameters, frozen parameters and buffers in the model's order
    aliases: dict[str, str] = field(factory=dict)  # ties: second name -> name
    groups: tuple[ParameterGroup, ...] = ()
    # state name -> parameter name -> value in its original form; a tensor without dims is a `Scalar`
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    # state name -> parameters whose number a conversion made; a writer of one number takes that of the others
    initial_scalars: dict[str, frozenset[str]] = field(factory=dict)
    settings: dict[str, Setting] = field(factory=dict)
    # values of the framework that continue a run: lr_scheduler, loss scaler, global_steps, ds_config, ...
    blobs: dict[str, object] = field(factory=dict)
    # values of the caller: client_state, merged by the framework into its files
    carried: dict[object, object] = field(factory=dict)
    parallel: ParallelFacts = field(factory=ParallelFacts)
    issues: tuple[Diagnostic, ...] = ()  # faults of the files that the reader corrected; `verify` prints them
