"""Numbers and types of a text that every plan rejects.

The stored type does not hold them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from ucpl.errors import UcplError, fail
from ucpl.extents import AS_U8, EXACT, bits_of, holds
from ucpl.layout import Layout
from ucpl.layout.layout import Entry, Filling, Policy
from ucpl.layout.scope import at
from ucpl.placement import Part, Pieces, Placement
from ucpl.placement.boxes import overlaps
from ucpl.placement.sharding import shardings_of
from ucpl.tables import numbered

__all__ = ["check_fill_types", "check_nested_keys", "check_plannable", "odd_fills", "odd_scales"]

_SCALES = ("f32", "bf16", "f16", "f64", "f8_e8m0fnu")
_PRODUCTS = ("f32", "bf16", "f16", "f64")
_BYTES = "u8"  # a file's type for numbers of any form, which a layout may use


def check_fill_types(layout: Layout) -> None:
    """Check that the stored types hold the numbers of fills by name.

    `odd_fills` checks globs and classes: the source may have the tensors that they cannot fill. Raises: UcplError E315.
    """
    for line in layout.fillings:
        if line.value is None or _is_of_many(line):
            continue
        for what, dtype, stored in _of_states(layout, line) if line.states is not None else _of_weights(layout, line):
            if not holds(dtype, stored):
                fail("E315", f"{what} is {dtype}, which has no {stored:g}", at(line.span), remedy=_nearest(dtype))


def odd_fills(layout: Layout) -> Iterator[str]:
    """Fills of many tensors whose number a type does not hold.

    They use globs and classes. A plan that has to fill such a tensor rejects it.
    """
    for line in layout.fillings:
        if line.value is None or not _is_of_many(line):
            continue
        bad = {what: (dtype, stored) for what, dtype, stored in _of_weights(layout, line) if not holds(dtype, stored)}
        if bad:
            what, (dtype, stored) = next(iter(bad.items()))
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            yield (
                f"{layout.name}: `{line.text}` (line {line.span.line}) speaks of {what}{more}, which is {dtype} and has no"
                f" {stored:g}: elements that the source lacks cannot be filled. {_sentence(_nearest(dtype))}"
            )


def _is_of_many(line: Filling) -> bool:
    """Return True if a line uses a glob or a class."""
    return line.states is None and line.rank[0] < 2


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _nearest(dtype: str) -> str:
    if dtype.startswith(("i", "u", "bool")):
        return f"write a whole number that {dtype} holds, or store the tensor in a wider type"
    return f'write a number that {dtype} holds: an integer, "0.5", "0.25"; or store the tensor in a wider type'


def _of_states(layout: Layout, line: Filling) -> Iterator[tuple[str, str, float]]:
    for state in layout.states:
        if state.name in (line.states or ()) and not state.scalar and state.dtype and line.value is not None:
            yield f"`{state.name}`", state.dtype, line.value


def _of_weights(layout: Layout, line: Filling) -> Iterator[tuple[str, str, float]]:
    """`fill NAME = value`: the stored number, which `value x - 1` may shift."""
    if line.value is None:
        return
    for entry in layout.entries:
        for path in entry.targets.values():
            dtype = entry.storing.dtype or layout.tensors[path].dtype
            if path in line.names and entry.storing.key is not None and dtype and bits_of(dtype) not in AS_U8:
                factor, shift = entry.storing.value
                yield f"`{path}`", dtype, factor * line.value + shift


def odd_scales(layout: Layout) -> Iterator[str]:
    """Scales without multiplication, and products beyond their type."""
    for path, tensor in layout.tensors.items():
        if tensor.scaling is not None and tensor.dtype and tensor.dtype not in (*_SCALES, _BYTES):
            yield (
                f"`{path}` (line {tensor.span.line}) is a scale of {tensor.dtype}, and scales are f32, bf16, f16 or f8_e8m0fnu:"
                " no product is made with it. Write `dtype f32`"
            )
    bytes_ = {t.scaling.of: t for t in layout.tensors.values() if t.scaling is not None and t.dtype == _BYTES}
    for entry in (e for e in layout.entries if e.storing.scaled):
        for path in entry.targets.values():
            yield from _of_product(layout, entry, path)
            if path in bytes_:
                yield (
                    f"{layout.name}: `{path}` is stored times its scales (line {entry.span.line}), and `{bytes_[path].path}`"
                    f" (line {bytes_[path].span.line}) is u8, which nothing is multiplied by. If its bytes are exponents, write"
                    " `dtype f8_e8m0fnu` in the model, and `dtype u8` on the line of a file that calls them so"
                )


def _of_product(layout: Layout, entry: Entry, path: str) -> Iterator[str]:
    dtype, product = layout.tensors[path].dtype, entry.storing.dtype
    if not dtype or not product or dtype == product or (bits_of(dtype), product) in EXACT:
        if product and product not in _PRODUCTS:
            yield (
                f"{layout.name}: `{path}` times its scales is {product} (line {entry.span.line}), and products are bf16, f16"
                " or f32. Write `dtype bf16`"
            )
        return
    yield (
        f"{layout.name}: `{path}` is {dtype}, and its product with the scales {product} (line {entry.span.line}), which does"
        f" not hold every {dtype}. Elements in blocks are of 8 bits or 4: write `dtype f8_e4m3fn` in the model, or"
        " `dtype f32` here"
    )


# --- Layouts that are no side of any plan ---------------------------------------------------------------------------

# Faults of one side alone, whatever the other side is.
_OF_ONE_SIDE = ("E304", "E314")
_JOINED = (Policy.MEAN, Policy.SUM, Policy.MAX)


def check_plannable(placement: Placement) -> None:
    """Reject a layout that can be no side of any plan.

    Raises: UcplError E204, E304, E314.

    Only a layout whose boxes may have such a fault is drawn, as a graph to itself.
    """
    shardings_of(placement.layout)  # also of lines without a key, which no rank stores
    if not _may_clash(placement):
        return
    from ucpl.graph import drawn  # most layouts need none

    try:
        drawn(placement, placement)
    except UcplError as error:
        if error.diagnostics[0].code in _OF_ONE_SIDE:
            raise


def check_nested_keys(placement: Placement) -> None:
    """Reject a key of a torch file inside of another's value.

    The steps of keys are dicts, so that `w/x` needs a dict at `w`. Raises: UcplError E392.
    """
    found: dict[str, dict[tuple[str, ...], Part | None]] = {}
    for part in _may_nest(placement):
        for _, places in part.homes.places():
            for file, key in places:
                found.setdefault(file, {})[key] = part
    for blob in placement.blobs:
        for place in blob.places:
            if place.file in found:
                found[place.file].setdefault(tuple(map(str, place.key)), None)
    for file, keys in found.items():
        for key, inside in keys.items():
            outer = next((key[:n] for n in range(len(key)) if key[:n] in keys), None)
            if outer is None:
                continue
            of, inner, shown = keys[outer], "/".join(key), "/".join(outer)
            text = f"`{shown}` of {file} is a tensor or a blob" if shown else f"all of {file} is one value"
            lines = [one for one in (inside, of) if one is not None and one.span.line]
            fail(
                "E392",
                f"{text}, and `{inner}` would be inside of it",
                *(at(one.span, "this one" if n == 0 else "and this one") for n, one in enumerate(lines)),
                remedy=f'write another key, as "{shown}/value" for the first or "{shown}.{"/".join(key[len(outer) :])}" for the'
                " second: each `/` is a step into a dict"
                if shown
                else "write a key for it, too: an empty one is for a file with one value",
            )


def _may_nest(placement: Placement) -> list[Part]:
    """Parts with keys inside of others, or around them.

    Keys of a block differ in numbers alone, so its first one is compared.
    """
    parts = [part for part in placement.parts if part.form == "torch"]
    keys = [{_pattern(map(str, block.place(0, 0)[1])) for block in part.homes.blocks if len(block)} for part in parts]
    every = {key for some in keys for key in some}
    every |= {_pattern(map(str, place.key)) for blob in placement.blobs for place in blob.places}
    outer = {key[:n] for key in every for n in range(len(key))} & every
    inner = {key for key in every if any(key[:n] in outer for n in range(len(key)))}
    return [part for part, some in zip(parts, keys, strict=True) if some & (outer | inner)]


def _pattern(key: Iterable[str]) -> tuple[str, ...]:
    return tuple(re.sub("[0-9]+", "0", step) for step in key)


def _may_clash(placement: Placement) -> bool:
    """Return True if values are combined or undeclared copies overlap."""
    parts = [part for part in placement.parts if len(part.folded)]
    boxes = Pieces.concat(part.folded for part in parts)
    if np.isin(boxes.policy, _JOINED).any():
        return True
    part = np.repeat(np.arange(len(parts)), [len(part.folded) for part in parts])
    replica = np.concatenate([np.zeros(0, np.int64), *(part.homes.replica(part.folded.home) for part in parts)])
    group = np.unique(numbered([part, boxes.tensor, replica]), return_inverse=True)[1]
    one, other = overlaps(group, boxes.low, boxes.high, group, boxes.low, boxes.high)
    return bool((one != other).any())
