"""Types whose bits move and nothing else, f4_e2m1fn and f8_e8m0fnu: what would have to make such values is refused."""

from __future__ import annotations

from ucpl.errors import Label, fail
from ucpl.extents import AS_U8, PAIRED, StoredTensor, bits_of
from ucpl.layout.scope import at
from ucpl.regions import Part, Placement
from ucpl.regions.bytes_of_two import dim_of_pairs

__all__ = ["demand_bits", "demand_one_order"]

Ends = tuple[StoredTensor, StoredTensor]


def demand_bits(ends: Ends, dtypes: tuple[str, str], parts: tuple[Part, Part], kind: str) -> None:
    """A target of such a type has the bits of a source of that type, unchanged. Raises E324."""
    a, b = dtypes
    if bits_of(b) not in AS_U8:
        return
    how = ""
    if bits_of(a) != bits_of(b):
        how = f"{a} in the source"
    elif kind in ("mean", "sum", "max"):
        how = f"a {kind} of its copies"
    elif parts[0].value != parts[1].value:
        how = "stored with another value"
    if not how:
        return
    here, there = ends
    raw = a == "u8"
    fail(
        "E324",
        f"`{there.label}` is {how}, and {b} in the target: nothing is turned into that type",
        Label(here.file, a, where="/".join(map(str, here.key))),
        at(parts[1].span, b) if parts[1].span.line else Label(there.file, b, where="/".join(map(str, there.key))),
        remedy=f"write `dtype u8` on the source's entry, too: its bytes are {bits_of(b)}" if raw else "",
    )


def demand_one_order(sides: tuple[Placement, Placement], parts: tuple[Part, Part], dtypes: tuple[str, str]) -> None:
    """Elements that share a byte do so on both sides: pairs move as they are. Raises E325."""
    if not {*dtypes} <= PAIRED:
        return
    dims = [dim_of_pairs(side, part) for side, part in zip(sides, parts, strict=True)]
    if dims[0] == dims[1]:
        return
    fail(
        "E325",
        f"two elements of `{parts[1].label}` lie in a byte, along {dims[0]} in the source and along {dims[1]} in the target",
        *(
            at(part.span, f"pairs along {dim}") if part.span.line else Label(side.layout.call, f"pairs along {dim}")
            for side, part, dim in zip(sides, parts, dims, strict=True)
        ),
        remedy=f"end the target's pattern with {dims[0]}, too; or"
        " store numbers there: `dtype bf16`, and `value x * scale` if it has scales",
    )
