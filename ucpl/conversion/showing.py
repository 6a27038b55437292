"""Prints a layout after a compiler stage: resolved or placed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.collapsed_rows import collapsed_lines
from ucpl.conversion.opening import open_checkpoint
from ucpl.conversion.requests import Given, called, is_checkpoint, with_arguments
from ucpl.conversion.side import Side
from ucpl.conversion.side import located as side_of
from ucpl.conversion.sides import in_families, sides, source_side, target_side

if TYPE_CHECKING:
    from ucpl.layout import Layout
    from ucpl.placement import Placement

__all__ = ["located", "resolved", "shown"]


def shown(
    layout: str, to: str | None, given: Given, rank: int | None, *, fold: bool = False
) -> tuple[Side, Side | None]:
    """A layout or checkpoint, and the other side if one is named.

    rank: only the tensors of this rank are needed. A layout of thousands of ranks then does not enumerate the others.
    fold: of a checkpoint with many tensors, those that are stored alike are one.
    """
    if to is not None:
        aimed, given = with_arguments(called(to), given)
    if is_checkpoint(layout):
        side = in_families if fold else source_side
        here = side(open_checkpoint(layout), None, evolve(given, model=None, sizes={}, config=None))
        there = target_side(aimed, here, given) if to is not None else None
        return _of_rank(here, rank), there
    if to is not None:
        return sides(called(layout), aimed, given)
    one, given = with_arguments(called(layout), given)
    here = side_of(one, given, rank=0 if rank is not None else None)
    if rank is not None and 0 < rank < here.layout.ranks:
        here = side_of(one, given, rank=rank)
    return here, None


def _of_rank(side: Side, rank: int | None) -> Side:
    """A checkpoint's layout for one rank, with tensors of all ranks."""
    from ucpl.inference.infer import stated_of
    from ucpl.placement import locate

    if rank is None or side.checkpoint is None or not 0 <= rank < side.layout.ranks:
        return side
    return evolve(side, placement=locate(side.layout, rank=rank, stated=stated_of(side.checkpoint)))


def resolved(one: Side) -> Iterator[str]:
    """Names and numbers, closed; no ranks yet."""
    layout = one.layout
    yield f"layout     {layout.call} of {layout.model_call or 'any'}"
    yield f"framework  {layout.framework or 'none'}" + (
        f"({', '.join(f'{k} = {v}' for k, v in layout.settings.items())})" if layout.settings else ""
    )
    for name, value, origin in layout.origins:
        yield f"origin     {name} = {value}: {origin}"
    for mesh in layout.meshes:
        name = f"{mesh.name}: " if mesh.name else ""
        degrees = " ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.degrees, strict=True))
        yield f"mesh       {name}{degrees}, {layout.ranks} ranks"
    for file in layout.files.values():
        path = f' "{file.path.text}"' if file.path else ""
        yield f"file       {file.name} = {file.form or 'none'}{path}" + (f' key "{file.key.text}"' if file.key else "")
    for path, t in layout.tensors.items():
        dims = " ".join(f"{d}={n}" if "#" not in d else str(n) for d, n in zip(t.dims, t.counts, strict=True))
        yield f"tensor     {path} : {dims} {t.dtype or ''}".rstrip() + (
            "" if t.kind == "parameter" else f" is {t.kind}"
        )
    for alias, owner in layout.aliases.items():
        yield f"alias      {alias} = {owner}"
    for g, members in layout.model_groups:
        yield f"group      {g}: {len(members)} tensors, {', '.join(members[:6])}" + (
            ", ..." if len(members) > 6 else ""
        )
    for state in layout.states:
        yield f"state      {state.name} : {state.dtype}{' scalar' if state.scalar else ''}{_typed(layout, state.name)}"
    for entry in layout.entries:
        key = f' as "{entry.storing.key.text}"' if entry.storing.key else ""
        yield f"stores     {entry.path if entry.bundle else ', '.join(entry.targets.values())} in {entry.storing.file}{key}"
    for taken in layout.taken:
        yield f"takes      {taken.glob}: {', '.join(taken.names) or 'no tensor'}"
    for line in layout.state_lines:
        key = f' as "{line.storing.key.text}"' if line.storing.key else ""
        what = f"{', '.join(line.names or ('*',))} of {', '.join(line.groups or ('*',))}"
        yield f"stores     state {what} in {line.storing.file}{key}"
    for d in layout.derived:
        yield f"derives    {d.state} from {d.source}"


def _typed(layout: Layout, state: str) -> str:
    """Tensors whose state has a type of its own."""
    by: dict[str, list[str]] = {}
    for path, tensor in layout.tensors.items():
        for name, dtype in tensor.state_dtypes:
            if name == state:
                by.setdefault(dtype, []).append(path)
    return "".join(
        f", {dtype} of {', '.join(paths[:6])}{', ...' if len(paths) > 6 else ''}" for dtype, paths in by.items()
    )


def located(placement: Placement, rank: int | None, *, each: bool = False) -> Iterator[str]:
    """Stored tensors with the boxes of their logical tensors.

    Similar ones share a row, except with `each`.
    """
    from ucpl.extents import key_text
    from ucpl.placement.placement import element_name

    yield f"layout     {placement.layout.call}" + (
        f", rank {rank}" if rank is not None else f", {max(1, placement.layout.ranks)} ranks"
    )
    if not each:
        yield from collapsed_lines(placement, rank)
        return
    for part in placement.parts:
        rows: dict[int, list[int]] = {}
        for row, home in enumerate(part.pieces.home.tolist()):
            rows.setdefault(home, []).append(row)
        for number, home in enumerate(part.homes):
            if rank is not None and home.rank != rank:
                continue
            padding = f", {home.padding} of padding" if home.padding else ""
            yield f"{part.state.ljust(10)} {home.file}: {key_text(home.key)} {list(home.shape)}, rank {home.rank}{padding}"
            for row in rows.get(number, []):
                path = placement.tensors[int(part.pieces.tensor[row])]
                n = len(placement.layout.tensors[path].counts)
                low, high = part.pieces.low[row, :n].tolist(), part.pieces.high[row, :n].tolist()
                first = element_name(placement.layout, path, tuple(low))
                size = "x".join(str(b - a) for a, b in zip(low, high, strict=True)) or "1"
                yield f"           at {int(part.pieces.offset[row])}: {size} from {first}"
