"""Arguments of a source's call that its reader takes, such as `order`.

`order` names the parameters of an optimizer's numbers.

`zero0(order = "model")`: the groups follow each other in the model's order. `zero0(order = "names.json")`: the order of the
training script, `[[names[p] for p in group["params"]] for group in optimizer.param_groups]`; for a pipeline one such list for
each stage; or a text with one name in each line. The config.json of a class of transformers gives the class's order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from ucpl.conversion.requests import Called
from ucpl.errors import Label, fail
from ucpl.files.skipping import skips_optimizer
from ucpl.registry import format_named, format_of_layout
from ucpl.texts import read_text

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint, Order
    from ucpl.language import nodes

__all__ = ["ARGUMENT", "arguments_in", "arguments_of", "demand_used", "is_read", "order_of", "without_order"]

ARGUMENT = "order"
_MODEL = "model"
_NUMBERED = "zero0"
_SHAPE = (
    "a list of names, one a line, or JSON: names by group, [[...], [...]], of a pipeline by stage, [[[...]], [[...]]]"
)


def without_order(one: Called) -> Called | None:
    """The call without `order`, which no layout has as a parameter.

    None if the call has no other argument: the checkpoint's metadata is enough.
    """
    if _argument(one) is None:
        return one
    kept = tuple(a for a in one.call.arguments if a.name != ARGUMENT)
    if not kept and (one.call.name == _NUMBERED or ARGUMENT in format_of_layout(one.call.name).reads):
        return None
    return Called(one.library, evolve(one.call, arguments=kept))


def order_of(one: Called | None, option: str = "") -> Order | None:
    """The order that a source's call or an option gives.

    Raises: UcplError E466 for a value that is no order, E170 for a file that cannot be read.
    """
    argument = None if one is None else _argument(one)
    if argument is None and not option:
        return None
    from ucpl.files.checkpoint import Order
    from ucpl.files.model_texts import object_of
    from ucpl.layout.scope import Scope

    said = Scope().evaluate(argument.value) if argument is not None else option
    if not isinstance(said, str):
        _refuse(f"{ARGUMENT} = {said}", f'a word: "{_MODEL}", or the name of a file')
    origin = f'{ARGUMENT} = "{said}"' if argument is not None else f"--{ARGUMENT} {said}"
    if said == _MODEL:
        return Order((), origin)
    text = read_text(Path(said))
    config = object_of(text) if text.lstrip().startswith("{") else None
    return Order((), origin, config) if config is not None else Order(_listed(text, origin), origin)


def demand_used(order: Order | None, path: Path) -> None:
    """Check that the files needed an order.

    Raises: UcplError E466.
    """
    if order is not None and not order.used and not skips_optimizer():
        what = f"{order.origin} is not needed: no optimizer is read whose parameters have numbers and no names"
        fail("E466", what, Label(str(path)), remedy="leave it out")


def _argument(one: Called) -> nodes.Argument | None:
    """The argument `order` of a layout whose reader takes it.

    zero0 and layouts that extend it are such layouts.

    Other layouts may have a parameter with this name.
    """
    if any(p.name == ARGUMENT for p in one.layout.parameters):
        return None
    names = [link.node.name for link in one.library.chain(one.layout.name, one.call.span)]
    if _NUMBERED not in names and not any(ARGUMENT in format_of_layout(name).reads for name in names):
        return None
    return next((a for a in one.call.arguments if a.name == ARGUMENT), None)


def arguments_of(one: Called | None) -> dict[str, object]:
    """The arguments of a source's call that the format's reader takes."""
    if one is None:
        return {}
    from ucpl.layout.scope import Scope

    known = format_of_layout(one.call.name).reads
    return {a.name: Scope().evaluate(a.value) for a in one.call.arguments if a.name is not None and a.name in known}


def is_read(one: Called, checkpoint: Checkpoint) -> bool:
    """Test whether a source's call has only arguments that its reader took.

    Then the checkpoint's metadata describes it.
    """
    of, said = format_named(checkpoint.format), arguments_of(one)
    if one.call.name not in of.layouts or len(said) < len(one.call.arguments) or not said:
        return False
    known = checkpoint.state.settings
    return all(name in known and known[name].value == value for name, value in said.items())


def arguments_in(framework: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Settings of a planned side that its format's reader takes."""
    known = format_named(framework).reads
    return {name: value for name, value in settings.items() if name in known}


def _listed(text: str, origin: str) -> tuple[tuple[str, ...], ...]:
    """Names by stage."""
    if not text.lstrip().startswith("["):
        return (tuple(line.strip() for line in text.splitlines() if line.strip()),)
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(origin, f"{_SHAPE} ({str(error)[:100]})")
    depth, first = 0, held
    while isinstance(first, list) and first and depth < 4:
        depth, first = depth + 1, next((one for one in first if one != []), None)
    stages = held if depth == 3 else [held]
    return tuple(tuple(_names(stage, depth - (depth == 3), origin)) for stage in stages)


def _names(held: object, depth: int, origin: str) -> list[str]:
    if not isinstance(held, list) or depth not in (1, 2):
        _refuse(origin, _SHAPE)
    if depth == 2:
        return [name for group in held for name in _names(group, 1, origin)]
    if any(not isinstance(name, str) for name in held):
        _refuse(origin, _SHAPE)
    return list(held)


def _refuse(said: str, wanted: str) -> NoReturn:
    fail("E466", f"{said} is no order of parameters", Label("<call>", where=said), remedy=f"write {wanted}")
