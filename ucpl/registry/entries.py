"""Formats of this package and of others, listed by their entry points."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ucpl.errors import Label, fail
from ucpl.installed import entry_points
from ucpl.registry.format import Format

__all__ = ["GROUP", "format_named", "format_of_layout", "format_of_models", "formats"]

GROUP = "ucpl.formats"
_NONE = Format()


@cache
def formats() -> dict[str, Format]:
    """Formats by name, in the order of their places. Raises: UcplError E445."""
    found: dict[str, Format] = {}
    for name, value in entry_points(GROUP):
        module, _, attribute = value.partition(":")
        where = Label(value, where=f"entry point {name} of {GROUP}")
        try:
            made = getattr(import_module(module), attribute, None)
        except ImportError as error:
            fail("E445", f"the entry point {name} cannot be imported: {error}", where)
        one = made() if isinstance(made, type) else made
        if not isinstance(one, Format) or not one.name:
            fail("E445", f"the entry point {name} is no format", where)
        if type(found.get(one.name, one)) is not type(one):
            fail("E445", f"two packages have a format `{one.name}`", where)
        found[one.name] = one
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


def format_named(name: str) -> Format:
    """The format of this name; one without flags if there is none."""
    return formats().get(name, _NONE)


@cache
def format_of_layout(name: str) -> Format:
    """The format for which a layout of this name ships."""
    return next((one for one in formats().values() if name in one.layouts), _NONE)


@cache
def format_of_models() -> Format:
    """The format of a model's folder, with config.json next to its weights."""
    return next((one for one in formats().values() if one.has_model_files), _NONE)
