"""Small models and checkpoints of headers only, with sizes of no fixture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from ucpl.extents import Extent, Key, NamedTensor, TrainState
from ucpl.extents.train_state import Setting
from ucpl.files.checkpoint import Checkpoint
from ucpl.inference.parallel import Base, Extended, Inherited
from ucpl.language import nodes, parse, parse_call, print_file
from ucpl.layout import load

BASES = """ucpl 1
layout plainly(dp, tp = 1, pp = 1) of any {
  framework deepspeed(stage = 1)
  mesh pp dp tp
  file weights = torch "{pp}_{tp}.pt"
  * = ... as "{name}"
}
layout stage3(dp, tp = 1, pp = 1) of any extends plainly(dp = dp) {
  framework deepspeed(stage = 3)
}
layout named(dp, tp = 1) of any extends plainly(dp = dp, tp = tp) {
  a = ...@tp as "a"
}
layout over_named(dp, tp = 1) of any extends named(dp = dp, tp = tp) {
  framework deepspeed(stage = 2)
}
layout without(dp) of any extends plainly(dp = dp) {
  framework deepspeed(stage = 2)
}
"""


def model_of(**shapes: tuple[int, ...]) -> nodes.Model:
    """A model of tensors; `_` in a keyword means a dot."""
    items = [nodes.Tensor(n.replace("_", "."), tuple(nodes.Dimension(None, k) for k in s)) for n, s in shapes.items()]
    return nodes.Model("m", tuple(items))


def base_of(call: str, model: nodes.Model | None = None, **inherited: int | str) -> Base:
    values: Inherited = {name: (value, f"origin of {name}") for name, value in inherited.items()}
    return Base(load(("bases.ucpl", BASES)), parse_call(call), model or model_of(a=(6, 4)), values)


def text_of(made: Extended) -> str:
    """The layout that was made, as it prints, in single spaces."""
    node = made.library.layout(made.call.name).node
    return " ".join(print_file(nodes.File("", 1, (node,))).split())


def read_again(made: Extended) -> None:
    """Check that the result is a text of the language."""
    parse(print_file(nodes.File("", 1, (made.library.layout(made.call.name).node,))), "made.ucpl")


def checkpoint(
    *tensors: NamedTensor, stored: Mapping[str, tuple[int, ...]] | None = None, **settings: int | float | str | None
) -> Checkpoint:
    """Headers of a file `f`. `stored`: key -> shape."""
    extents: dict[tuple[str, Key], Extent] = {}
    for text, shape in (stored or {}).items():
        key = tuple(text.split("/"))
        extents["f", key] = Extent("f", key, "f32", shape, (1,) * len(shape), 0, "0", 0, 0)
    known = {name: Setting(value, f"origin of {name}") for name, value in settings.items()}
    here = Path("ckpt")
    state = TrainState("deepspeed", tensors=tensors, settings=known)
    return Checkpoint(here, here, None, "deepspeed", "", extents, {}, state)


def with_state(found: Checkpoint, **changes: Any) -> Checkpoint:
    """The checkpoint with other fields of its state."""
    return evolve(found, state=evolve(found.state, **changes))


def with_parallel(found: Checkpoint, **changes: Any) -> Checkpoint:
    """The checkpoint with other parallel facts."""
    return with_state(found, parallel=evolve(found.state.parallel, **changes))
