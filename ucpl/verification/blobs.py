"""Checks of a checkpoint's blobs: their places, their copies, and two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.extents import BlobWay, Key, key_text
from ucpl.files.checkpoint import Checkpoint
from ucpl.verification.values import ValueTensors, apart

if TYPE_CHECKING:  # `apply` compares copies, and needs no compiler
    from ucpl.formats.named_files import Values
    from ucpl.placement import Placement
    from ucpl.placement.placement import Blob, BlobPlace
    from ucpl.verification.train_states import Difference

__all__ = ["check_equal_blobs", "compare_blobs", "missing", "find_wrong_copies"]

Place = tuple[str, Key]


def missing(placement: Placement, checkpoint: Checkpoint) -> list[Diagnostic]:
    """Blobs that are not where the layout says. E391."""
    from ucpl.layout.scope import at

    if not placement.blobs:
        return []
    values, out = _values(checkpoint.root), []
    for blob in placement.blobs:
        for place in blob.places if blob.rule.fate != "drop" else ():
            try:
                values.at(place.file, place.key)
            except UcplError as error:
                said = (at(blob.rule.span, "named here"),) if blob.rule.span.line else ()
                out += [_with_labels(d, said) for d in error.diagnostics]
    return out


def _with_labels(d: Diagnostic, labels: tuple[Label, ...]) -> Diagnostic:
    return Diagnostic(d.code, d.message, (*d.labels, *labels), d.notes, d.remedy)


def check_equal_blobs(ways: Iterable[BlobWay], name: str, root: Path) -> None:
    """Check that a plan's places for one value agree. Raises: UcplError E334."""
    pairs = [((w.source_file, w.source_key), (w.file, w.key)) for w in ways]
    found = list(_unlike(name, pairs, root))
    if found:
        raise UcplError(found[0])


def find_wrong_copies(placement: Placement, checkpoint: Checkpoint) -> list[Diagnostic]:
    """The first wrong copy of each blob. E334."""
    out = []
    for blob in placement.blobs:
        if blob.rule.fate in ("keep", "remap"):
            first = _firsts(blob)
            pairs = [(_place(first[p.at]), _place(p)) for p in blob.places if p != first[p.at]]
            out += list(_unlike(blob.name, pairs, checkpoint.root))[:1]
    return out


def _firsts(blob: Blob) -> dict[tuple[int, ...], BlobPlace]:
    out: dict[tuple[int, ...], BlobPlace] = {}
    for place in blob.places:
        out.setdefault(place.at, place)
    return out


def _values(root: Path) -> Values:
    from ucpl.formats.named_files import Values  # most specs have no blob

    return Values(root)


def _place(place: BlobPlace) -> Place:
    return place.file, place.key


def _unlike(name: str, pairs: Iterable[tuple[Place, Place]], root: Path) -> Iterator[Diagnostic]:
    values = _values(root)
    for one, other in pairs:
        a, b = values.at(*one), values.at(*other)
        inside = ValueTensors(root, values.extents)
        found = next(apart(name, a, b, inside, inside), None)
        if found is not None:
            yield Diagnostic(
                "E334",
                f"two copies of blob `{name}` differ: {found.path} is {found.a} and {found.b}",
                (
                    Label(str(root / one[0]), found.a, where=key_text(one[1])),
                    Label(str(root / other[0]), found.b, where=key_text(other[1])),
                ),
                remedy=catalogue()["E334"].remedy,
            )


# ---- two checkpoints -----------------------------------------------------------------------------------------------------


def compare_blobs(a: Checkpoint, here: Placement, b: Checkpoint, there: Placement) -> tuple[list[Difference], int]:
    """The differences, and the number of compared values.

    A `drop` on either side skips the blob.
    """
    ours, theirs = ({x.name: x for x in side.blobs if x.rule.fate != "drop" and x.places} for side in (here, there))
    free = {x.name for side in (here, there) for x in side.blobs if x.rule.fate == "drop"}
    out: list[Difference] = []
    count = 0
    left, right = _values(a.root), _values(b.root)
    for name in dict.fromkeys([*ours, *theirs]):
        if name in free:
            continue
        from ucpl.verification.train_states import Difference

        if name not in ours or name not in theirs:
            texts = ["a value" if name in side else "nothing" for side in (ours, theirs)]
            out.append(Difference("carried", f"blob {name}", a=texts[0], b=texts[1]))
            continue
        pairs = _pairs(ours[name], theirs[name])
        if pairs is None:
            sides = [x.axes_text or "one for all" for x in (ours[name], theirs[name])]
            out.append(Difference("carried", f"blob {name}", a=sides[0], b=sides[1]))
            continue
        for one, other in pairs:
            count += 1
            x, y = left.at(*_place(one)), right.at(*_place(other))
            found = apart(f"blob {name}", x, y, ValueTensors(a.root, left.extents), ValueTensors(b.root, right.extents))
            out += [Difference("carried", d.path, a=d.a, b=d.b, a_place=str(one), b_place=str(other)) for d in found]
    return out, count


def _pairs(one: Blob, other: Blob) -> list[tuple[BlobPlace, BlobPlace]] | None:
    """Pair the values of both sides, by their fates.

    None: their degrees differ.
    """
    ours, theirs = _firsts(one), _firsts(other)
    fates = {one.rule.fate, other.rule.fate}
    if "first" in fates:
        return [(one.places[0], other.places[0])]
    if one.degrees != other.degrees and ("remap" not in fates or len(one.degrees) != len(other.degrees)):
        return None
    return [(ours[c], theirs[c]) for c in ours if c in theirs]
