"""Which settings a `framework` statement can have: what its store reads of them. Data, and the refusal of any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from ucpl.errors import fail
from ucpl.layout.near import nearest
from ucpl.layout.scope import Value, at
from ucpl.registry import Format, format_named, formats
from ucpl.syntax import nodes, print_expr

__all__ = ["demand_settings", "demand_values"]

_DEGREES = ("dp", "tp", "pp", "ep", "edp", "fsdp")
_STAGES = {0: "none", 1: "optimizer states are cut", 2: "gradients, too", 3: "parameters, too"}


def demand_settings(item: nodes.Framework) -> None:
    """Raises: UcplError E436 for a framework that there is not, E159 for a setting without a name, E192 for an unknown one."""
    name = item.call.name
    if name not in formats():
        meant = next((one.name for one in formats().values() if name.lower() in one.other_names), "")
        close = meant or nearest(name, formats())
        fail(
            "E436",
            f"no framework is called `{name}`",
            at(item.span),
            remedy=(f"did you mean `{close}`? " if close else "")
            + f"one of {', '.join(formats())}; `framework torch()` writes files that the spec alone describes",
        )
    for argument in item.call.arguments:
        if argument.name is None:
            fail("E159", "settings of a framework have names", at(argument.span))
        if argument.name not in format_named(name).settings:
            _refuse(format_named(name), argument)


def demand_values(item: nodes.Framework, settings: Mapping[str, Value]) -> None:
    """Raises: UcplError E192 for a stage of ZeRO that there is not, and for a degree below 1."""
    for argument in item.call.arguments:
        name, value = argument.name or "", settings.get(argument.name or "")
        if isinstance(value, str) and (name == "stage" or name in _DEGREES):
            remedy = f"a number stands without quotes: {name} = {value if value.isdecimal() else 1}"
            said = print_expr(argument.value)
            fail("E192", f"framework {item.call.name}({name} = {said}): it is a text", at(argument.span), remedy=remedy)
        if name == "stage" and value is not None and value not in _STAGES:
            stages = ", ".join(f"{n} ({what})" for n, what in _STAGES.items())
            remedy = f"the stages of ZeRO are {stages}: write, for one, stage = 1"
        elif name in _DEGREES and isinstance(value, int) and value < 1:
            remedy = f"a degree is 1 or more: write {name} = {name}, the size of the mesh axis"
        else:
            continue
        fail(
            "E192", f"framework {item.call.name}({name} = {value}): no {name} is that", at(argument.span), remedy=remedy
        )


def _refuse(own: Format, argument: nodes.Argument) -> NoReturn:
    known = own.settings
    said = argument.name or ""
    close = nearest(said, known)
    others = [other.name for other in formats().values() if said in other.settings]
    whose = f"it is one of {' and '.join(others)}; " if others else ""
    fail(
        "E192",
        f"framework {own.name}() has no setting `{said}`",
        at(argument.span),
        remedy=f"did you mean `{close}`?" if close else f"{whose}the settings of {own.name}() are {', '.join(known)}",
    )
