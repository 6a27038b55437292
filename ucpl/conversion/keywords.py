"""Keyword arguments of the Python API, and the records that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from attrs import fields

from ucpl.conversion.requests import Given, config_at

if TYPE_CHECKING:
    from ucpl.language import nodes
    from ucpl.layout.scope import Value
    from ucpl.runtime.options import Progress, RunOptions
    from ucpl.texts import Json

__all__ = [
    "CallOptions",
    "MoveBounds",
    "How",
    "ToApply",
    "ToConvert",
    "ToPlan",
    "ToVerify",
    "bounds_of",
    "given_from",
    "options_from",
]


class MoveBounds(TypedDict, total=False):
    """Bounds of memory and threads for moving data."""

    memory: int  # bytes of all buffers together (default 512 MiB)
    workers: int  # threads (default 2)


class How(MoveBounds, total=False):
    """Options of a run: fields of `runtime.options.RunOptions`, all optional."""

    resume: bool  # continue an interrupted run into the same target
    force: bool  # replace a target that is there
    verify_source: bool  # read all bytes of a member, even if only a part is moved, to check its CRC
    read_back: bool  # read all written bytes from the disk before the target appears (default)
    reflink: bool  # share complete blocks with the source if the file system can (default)
    allow_globals: Sequence[str]  # classes of a pickle that are carried over
    tag: str | None  # name of the step's folder
    progress: Progress | None  # called with (bytes done, all of them)


class ToApply(How, total=False):
    """Options of a run, and conditions on its source."""

    allow_drift: bool  # convert weights that are not their masters, too


class CallOptions(TypedDict, total=False):
    """Options besides a layout's call."""

    config: Mapping[str, Json] | str | Path | None  # a config.json, as `config.x`: its content or its path
    sizes: (
        Mapping[str, Value] | None
    )  # of model or layout, by name: of the target, and of a source that `layout` describes
    fill: Sequence[str]  # "exp_avg=0": the target's value for elements that the source lacks
    drop: Sequence[str]  # tensors, states and keys of client_state that are left out
    freeze: Sequence[str]  # parameters that are not trained from here on
    train: Sequence[str]  # frozen ones that are: "NAME", "NAME=GROUP"
    order: str | Path  # a file with the names of the optimizer's parameters, if the source numbers them; or "model"
    weights_alone: bool  # convert the weights, and read nothing of the optimizer


class ToPlan(CallOptions, total=False):
    """Options besides the layouts of a plan."""

    model: str | None  # FILE:NAME, if both layouts are of any model
    checkpoint: str | Path | None  # the checkpoint of the source's layout: its headers give model and dtypes
    name: str  # of the plan
    prove: bool  # once more, by code that made none of it


class ToConvert(CallOptions, ToApply, total=False):
    """Options of a conversion."""

    layout: str | None  # the source's; inferred without it
    model: str | None  # FILE:NAME, of a target whose parameters are others than the source's


class ToVerify(CallOptions, MoveBounds, total=False):
    """Options besides a checkpoint to verify."""

    layout: str | None  # its own; inferred without it
    witness: bool  # compare with the class of a Hugging Face folder (default: yes, if there is one)
    reference: str | Path | None  # a Hugging Face folder of the same weights
    quick: float | None  # seconds for reading: as many digests as fit, and no comparison of values


def bounds_of(how: MoveBounds | ToVerify) -> MoveBounds:
    """The bounds among other keywords."""
    found: MoveBounds = {}
    if "memory" in how:
        found["memory"] = how["memory"]
    if "workers" in how:
        found["workers"] = how["workers"]
    return found


def given_from(beside: CallOptions | ToPlan | ToConvert | ToVerify, model: nodes.Model | None = None) -> Given:
    config = beside.get("config")
    return Given(
        model=model,
        config=config_at(Path(config))
        if isinstance(config, str | Path)
        else dict(config)
        if config is not None
        else None,
        config_file=Path(config) if isinstance(config, str | Path) else None,
        sizes=dict(beside.get("sizes") or {}),
        drop=tuple(beside.get("drop", ())),
        fill=tuple(beside.get("fill", ())),
        freeze=tuple(beside.get("freeze", ())),
        train=tuple(beside.get("train", ())),
        order=str(beside.get("order") or ""),
        weights_alone=bool(beside.get("weights_alone")),
    )


def options_from(how: How | MoveBounds) -> RunOptions:
    """The options of a run among the keywords.

    Missing ones have the defaults of `RunOptions`.
    """
    from ucpl.runtime.options import RunOptions

    said: dict[str, Any] = {a.name: how[a.name] for a in fields(RunOptions) if a.name in how}  # type: ignore[literal-required]
    return RunOptions(**said)
