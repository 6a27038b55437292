"""Does a layout describe this checkpoint? Every tensor listed, every entry matched, shapes and orders as stated."""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.extents import PAIRED, Flat, in_file, key_text
from ucpl.layout.scope import at
from ucpl.proofs.blobs import missing
from ucpl.proofs.left_over import left_over
from ucpl.regions import Part, Placement
from ucpl.stores.checkpoint import Checkpoint

SHOWN = 8  # findings of one kind that are listed


def findings(placement: Placement, checkpoint: Checkpoint) -> list[Diagnostic]:
    """All disagreements between a located layout and an opened checkpoint.

    E320: a stored tensor with elements that no entry covers. E321: an entry whose place is not in the checkpoint.
    E322: another shape. E323: a flat buffer in another order than the checkpoint states. E391: a blob that is not there.
    E398: files of more ranks.
    """
    out: list[Diagnostic] = []
    stored = {(f, tuple(map(str, k))): e for (f, k), e in checkpoint.extents.items()}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    spec = placement.layout.call
    for part in placement.parts:
        for home in part.homes:
            place = (home.file, tuple(map(str, home.key)))
            seen.add(place)
            here = at(part.span, "stored by this line") if part.span.line else Label(spec, where=part.label)
            extent = stored.get(place)
            if extent is None:
                out.append(
                    Diagnostic(
                        "E321",
                        f"{part.state} of `{part.label}` should be at {key_text(home.key)},"
                        " and the checkpoint has nothing there",
                        (
                            Label(str(checkpoint.root / home.file), "no tensor in this file", where=key_text(home.key)),
                            here,
                        ),
                        remedy="correct the entry's name, or take the entry out",
                    )
                )
            elif extent.shape != (shape := _stated(part, home.shape, extent.dtype)):
                out.append(
                    Diagnostic(
                        "E322",
                        f"{key_text(home.key)} is {list(extent.shape)} in the checkpoint and {list(shape)} in the layout",
                        (
                            Label(str(checkpoint.root / home.file), f"{list(extent.shape)}", where=key_text(home.key)),
                            here,
                        ),
                        remedy="correct the sizes or the cut in the layout",
                    )
                )
    for (file, key), extent in stored.items():
        if (file, key) not in seen and extent.numel:
            out.append(
                Diagnostic(
                    "E320",
                    f"no entry covers {'/'.join(key)}, {list(extent.shape)} {extent.dtype}",
                    (
                        Label(str(checkpoint.root / file), "is in the checkpoint", where="/".join(key)),
                        Label(spec, "covers all but this"),
                    ),
                    remedy="add an entry for it to the layout",
                )
            )
    found = missing(placement, checkpoint) + out
    return found + left_over(placement, checkpoint) + orders(placement, checkpoint)


def _stated(part: Part, shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """The shape that a file of this dtype states: of elements that lie two to a byte, the bytes."""
    return in_file(dtype if dtype in PAIRED or part.dtype is None else part.dtype, shape)[1]


def orders(placement: Placement, checkpoint: Checkpoint) -> list[Diagnostic]:
    """Flat buffers whose members or order differ from what the checkpoint states."""
    out = []
    for flat, theirs in stated_flats(placement, checkpoint):
        ours_names = [n for n, _ in flat.members]
        their_names = [n for n, _ in theirs.members]
        if ours_names == their_names:
            continue
        n = next(
            (i for i, (a, b) in enumerate(zip(ours_names, their_names, strict=False)) if a != b),
            min(len(ours_names), len(their_names)),
        )
        out.append(
            Diagnostic(
                "E323",
                f"flat buffer {flat.bucket} is in another order than the checkpoint states, from tensor {n} on",
                (
                    Label(str(checkpoint.root), "states: " + _excerpt(their_names, n), where=f"bucket {flat.bucket}"),
                    Label(placement.layout.call, "has: " + _excerpt(ours_names, n), where=f"group {flat.group}"),
                ),
                remedy="correct the group's members or its `order`;"
                " `ucpl infer` writes the order that the checkpoint states",
            )
        )
    return out


def stated_flats(placement: Placement, checkpoint: Checkpoint) -> Iterator[tuple[Flat, Flat]]:
    """Flat buffers of a layout, each with the one that the checkpoint states."""
    stated = {_mark(f, f.coordinates): f for f in checkpoint.stated}
    for flat in placement.flats:
        yield from ((flat, theirs) for (b, _), theirs in stated.items() if b == flat.bucket and _agree(theirs, flat))


def _mark(flat: Flat, coordinates: dict[str, int]) -> tuple[int, tuple[tuple[str, int], ...]]:
    return flat.bucket, tuple(sorted(coordinates.items()))


def _agree(a: Flat, b: Flat) -> bool:
    return all(b.coordinates.get(k, v) == v for k, v in a.coordinates.items())


def _excerpt(names: list[str], n: int) -> str:
    shown = names[n : n + 4]
    return (", ".join(shown) if shown else "nothing more") + (", ..." if len(names) > n + 4 else "")


def demand(placement: Placement, checkpoint: Checkpoint) -> None:
    """Raise what `findings` finds, the first few of it."""
    found = findings(placement, checkpoint)
    if found:
        raise UcplError(*found[:SHOWN])
