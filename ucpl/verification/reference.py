"""Compare a spec's checkpoint with the framework's own, under the spec's layout.

Stored tensors are compared place by place, so the spec does not transform them: its mistakes are visible here. The
spec only names the elements. Padding is not compared, but the genuine checkpoint's must be zero where the layout demands it.
Copies that may differ (`mean`, `sum`, `max`, `any`) are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from attrs import evolve, field

from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.extents import DTYPES, Extent, Seen, doubt, key_text, together
from ucpl.files.checkpoint import Checkpoint
from ucpl.graph import build
from ucpl.layout.layout import Policy
from ucpl.layout.scope import at
from ucpl.placement import Part, Pieces, Placement
from ucpl.placement.bytes_of_two import is_paired
from ucpl.planning import order
from ucpl.records import define, frozen
from ucpl.registry import format_named
from ucpl.runtime.source_checks import check_padding
from ucpl.runtime.values import decode, first_half, value_text
from ucpl.tables import I64, Bools
from ucpl.verification.diagnosis import Diagnosis, StoredTensors
from ucpl.verification.elements import counted as counted_places
from ucpl.verification.elements import element_in
from ucpl.verification.masters import dtype_of
from ucpl.verification.tiles import TensorBoxes, tiles_of
from ucpl.verification.train_states import counted_names
from ucpl.verification.values import unlike_hypers, unlike_numbers

__all__ = ["ReferenceComparison", "compare_with_reference"]

FILES_SHOWN = 4  # of those that no line names
_NONE_ALIKE = "no stored tensor of this layout is there: if it has another one, `ucpl compare A B` compares the two"
_LIVE = (
    "If the framework trains these rows, write `pad(x, n, live)`; if they may hold anything, `pad(x, n, undefined)`. Else the"
    " genuine file is damaged."
)
_FREE = (Policy.MEAN, Policy.SUM, Policy.MAX, Policy.ANY)
_ALIKE = "parts of one stored tensor hold equal numbers, so that their order does not show"
_ALIKE_ELEMENTS = 1 << 22  # of a stored tensor whose parts are compared
_ALIKE_PARTS = 64
_CONSTANT = "all elements are equal, so that no order shows"
Place = tuple[str, tuple[str, ...]]


@frozen
class ReferenceComparison:
    """The compared tensors and the differences.

    Of the stored tensors of one line, the first is a finding.
    """

    findings: tuple[Diagnostic, ...]
    tensors: int  # stored tensors of both sides
    elements: int
    differing: int  # stored tensors that are missing, of another shape or type, of other bits, or with odd padding
    doubts: tuple[str, ...] = ()  # mistakes that the comparison would not show, and why
    is_witness: bool = True  # whether a mistake could have made the two differ

    def __bool__(self) -> bool:
        return not self.findings


def compare_with_reference(mine: Checkpoint, placement: Placement, reference: Checkpoint) -> ReferenceComparison:
    """Compare every stored tensor.

    Raises: UcplError E610, E611 (one of them cannot be read).
    """
    return _Holding(mine, placement, reference).run()


Finding = Callable[[], Diagnostic]  # of a stored tensor that differs: only the first of a line is put into words


@frozen
class _Apart:
    """A stored tensor's first different position, count, and values.

    The values are bits.
    """

    position: int
    count: int
    raw: tuple[bytes, bytes]


@define
class _Holding:
    mine: Checkpoint
    placement: Placement
    reference: Checkpoint
    here: dict[Place, Extent] = field(init=False)
    there: dict[Place, Extent] = field(init=False)
    diagnosis: Diagnosis = field(init=False)
    findings: list[Diagnostic] = field(factory=list)
    tensors: int = 0
    elements: int = 0
    differing: int = 0
    seen: Seen = field(factory=Seen)
    constant: list[str] = field(factory=list)
    alike: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.here, self.there = _places(self.mine), _places(self.reference)
        self.diagnosis = Diagnosis(StoredTensors(self.mine), StoredTensors(self.reference), self.here, self.there)

    def run(self) -> ReferenceComparison:
        met: set[Place] = set()
        self.files()
        for part in self.placement.parts:
            counted = _Counted(part)
            found = [d for n in range(len(part.homes)) for d in self.home(counted, n, met)]
            self.differing += len(found)
            if found:
                more = (f"and {len(found) - 1} more stored tensors of this line differ",) if len(found) > 1 else ()
                self.findings.append(_with_notes(found[0](), more))
        self.padding()
        self.findings += unlike_hypers(self.reference, self.mine, "E709", every=True)
        self.findings += unlike_numbers(self.reference, self.mine, "E709")
        self.added([p for p in self.there if p not in self.here])
        if self.findings and self.here and not self.here.keys() & self.there.keys():
            self.findings[0] = _with_notes(self.findings[0], (_NONE_ALIKE,))
        why = "" if self.differing else doubt(self.seen, "elements")
        constant = () if why or not self.constant else (f"{_CONSTANT}: {counted_names(self.constant)}",)
        alike = () if why or not self.alike else (f"{_ALIKE}: {counted_names(self.alike)}",)
        doubts = (why,) if why else (*constant, *alike)
        return ReferenceComparison(tuple(self.findings), self.tensors, self.elements, self.differing, doubts, not why)

    # ---- one stored tensor -----------------------------------------------------------------------------------------------

    def home(self, counted: _Counted, number: int, met: set[Place]) -> Iterator[Finding]:
        part = counted.part
        home = part.homes[number]
        place = (home.file, tuple(map(str, home.key)))
        a, b = self.here.get(place), self.there.get(place)
        if a is None or place in met:
            return
        met.add(place)
        self.tensors += 1
        if b is None:
            yield partial(self.alone, part, place)
        elif a.shape != b.shape:
            yield partial(self.other_form, "E705", part, place, (str(list(a.shape)), str(list(b.shape))))
        elif a.dtype != b.dtype:
            yield partial(self.other_form, "E706", part, place, (a.dtype, b.dtype))
        else:
            yield from self.bits(counted, number, place, a, b)

    def other_form(self, code: str, part: Part, place: Place, forms: tuple[str, str]) -> Diagnostic:
        here, there = forms
        what = "shape" if code == "E705" else "element type"
        name = key_text(place[1])
        return Diagnostic(
            code,
            f"{name} of {place[0]}, {part.state} of `{part.label}`, has {what} {here} here and {there} there",
            (
                Label(str(self.mine.root / place[0]), here, where=name),
                Label(str(self.reference.root / place[0]), there, where=name),
                *_line(part),
            ),
            remedy=catalogue()[code].remedy,
        )

    def bits(self, counted: _Counted, number: int, place: Place, a: Extent, b: Extent) -> Iterator[Finding]:
        size = DTYPES[a.dtype].itemsize
        first, count = -1, 0
        raw = (b"", b"")
        runs = a.is_contiguous and b.is_contiguous
        seen = Seen()
        with TensorBoxes.of(self.mine.root, a) as here, TensorBoxes.of(self.reference.root, b) as there:
            for tile in tiles_of(a.shape, size, is_row_major=runs):
                x, y = here.read(tile), there.read(tile)
                if not seen.varies:
                    seen.add(decode(x, a.dtype))
                if np.array_equal(x, y):
                    continue
                apart = np.flatnonzero((x.reshape(-1, size) != y.reshape(-1, size)).any(axis=1))
                places = tile.positions(apart, a.shape)
                counts = self.inside(counted, number, places)
                apart, places = apart[counts], places[counts]
                count += len(places)
                if len(places) and (first < 0 or places[0] < first):  # a tile is in row-major order, tiles need not be
                    first, begin = int(places[0]), int(apart[0]) * size
                    raw = x[begin : begin + size].tobytes(), y[begin : begin + size].tobytes()
        self.elements += a.numel
        self.seen = together((self.seen, seen))
        if not seen.varies:
            self.constant.append(key_text(place[1]))
        elif first < 0:
            self.parts_alike(counted, number, place, a)
        if first >= 0:
            yield partial(self.unequal, counted.part, number, place, _Apart(first, count, raw))

    def parts_alike(self, counted: _Counted, number: int, place: Place, a: Extent) -> None:
        """Report tensors of one stored tensor with the same numbers.

        If swapped, they compare equal.
        """
        pieces = counted.pieces(number)
        tensors = np.unique(pieces.tensor)
        if not 1 < len(tensors) <= _ALIKE_PARTS or a.numel > _ALIKE_ELEMENTS or is_paired(self.placement, counted.part):
            return
        size = DTYPES[a.dtype].itemsize
        stored = np.zeros((a.numel, size), dtype=np.uint8)
        with TensorBoxes.of(self.mine.root, a) as here:
            for tile in tiles_of(a.shape, size, is_row_major=a.is_contiguous):
                raw = here.read(tile).reshape(-1, size)
                stored[tile.positions(np.arange(len(raw)), a.shape)] = raw
        held: dict[bytes, str] = {}
        for tensor in tensors.tolist():
            name = self.placement.tensors[tensor]
            dims = len(self.placement.layout.tensors[name].dims)
            some = [_positions(pieces, row, dims) for row in np.flatnonzero(pieces.tensor == tensor).tolist()]
            values = stored[np.concatenate(some)].tobytes()
            if values and (first := held.setdefault(values, name)) is not name:
                self.alike.append(f"{first} and {name} in {key_text(place[1])}")

    def inside(self, counted: _Counted, number: int, positions: I64) -> Bools:
        """Mask of a file's items that are compared.

        The items are bytes if two elements share one.
        """
        boxes = counted.boxes(number)
        if not is_paired(self.placement, counted.part):
            return _inside(boxes, positions)
        return _inside(boxes, 2 * positions) | _inside(boxes, 2 * positions + 1)

    def unequal(self, part: Part, number: int, place: Place, apart: _Apart) -> Diagnostic:
        extent, position, raw = self.here[place], apart.position, apart.raw
        index = [int(i) for i in np.unravel_index(position, extent.shape)] if extent.shape else []
        where = f"{key_text(place[1])}{index}"
        here, there = (value_text(bits, extent.dtype) for bits in raw)
        if is_paired(self.placement, part):
            half = first_half(*raw)
            here, there = (value_text(bits, "f4_e2m1fn", "high" if half else "low") for bits in raw)
            position = 2 * position + half
        guess = self.diagnosis.of(place)
        return Diagnostic(
            "E702",
            f"{part.state} of {element_in(self.placement, part, number, position)} is {here.partition(' ')[0]} here"
            f" and {there.partition(' ')[0]} there",
            (
                Label(str(self.mine.root / extent.file), here, where=where),
                Label(str(self.reference.root / self.there[place].file), there, where=where),
                *_line(part),
            ),
            (f"{apart.count:,} of {extent.numel:,} elements of this stored tensor differ", *([guess] if guess else [])),
            catalogue()["E702"].remedy,
        )

    def padding(self) -> None:
        """Check padding of the genuine checkpoint that must be zero.

        Without a plan, other findings have the reason.
        """
        try:
            plan = order(build(self.placement, counted_places(self.placement), dtype_of=dtype_of(self.reference)))
            found = check_padding(plan, self.reference)
        except UcplError:
            return
        self.differing += len(found)
        root = self.reference.root
        self.findings += [
            evolve(
                d,
                message=f"in the genuine checkpoint, {d.message}",
                labels=tuple(evolve(label, file=str(root / label.file)) for label in d.labels),
                remedy=_LIVE,
            )
            for d in found
        ]

    # ---- data of one side alone
    # ------------------------------------------------------------------------------------------

    def alone(self, part: Part, place: Place) -> Diagnostic:
        extent, name = self.here[place], key_text(place[1])
        twin = self.diagnosis.twin(place, mine=True)
        return Diagnostic(
            "E703",
            f"{name} of {place[0]}, {part.state} of `{part.label}`, is here alone",
            (
                Label(str(self.mine.root / place[0]), f"{list(extent.shape)} {extent.dtype}", where=name),
                Label(str(self.reference.root / place[0]), "has no such key", where=name),
                *_line(part),
            ),
            (f"there, its numbers are {twin}",) if twin else (),
            catalogue()["E703"].remedy,
        )

    def added(self, places: list[Place]) -> None:
        """Of those whose keys differ in numbers alone, the first is named."""
        alike: dict[str, list[Place]] = {}
        for place in places:
            alike.setdefault(re.sub("[0-9]+", "#", key_text(place[1])), []).append(place)
        self.differing += len(places)
        for group in alike.values():
            place, name = group[0], key_text(group[0][1])
            extent, twin = self.there[place], self.diagnosis.twin(place, mine=False)
            found = Diagnostic(
                "E704",
                f"{name} of {place[0]}, {list(extent.shape)}, is there alone",
                (
                    Label(str(self.reference.root / extent.file), f"{list(extent.shape)} {extent.dtype}", where=name),
                    Label(str(self.mine.root / place[0]), "has no such key", where=name),
                ),
                (f"here, its numbers are {twin}",) if twin else (),
                catalogue()["E704"].remedy,
            )
            more = (f"and {len(group) - 1} more that are called so, but for numbers",) if len(group) > 1 else ()
            self.findings.append(_with_notes(found, more))

    def files(self) -> None:
        """Report files of the genuine checkpoint that no line names."""
        named = {*self.reference.files, *(e.file for e in self.reference.extents.values())}
        kinds = {Path(e.file).suffix for e in self.here.values()}
        if not format_named(self.reference.format).is_of_a_spec or not self.reference.top.is_dir():
            return
        root = self.reference.root
        found = (p for kind in sorted(kinds) for p in sorted(root.rglob(f"*{kind}")))
        for path in [p for p in found if p.relative_to(root).as_posix() not in named][:FILES_SHOWN]:
            self.differing += 1
            self.findings.append(
                Diagnostic(
                    "E704",
                    f"{path.relative_to(root).as_posix()} is there, and no line of the layout names it",
                    (Label(str(path), "named by no `file` line"),),
                    remedy=catalogue()["E704"].remedy,
                )
            )


def _places(checkpoint: Checkpoint) -> dict[Place, Extent]:
    return checkpoint.by_texts


def _line(part: Part) -> tuple[Label, ...]:
    return (at(part.span, "stored by this line"),) if part.span.line else ()


def _with_notes(d: Diagnostic, more: tuple[str, ...]) -> Diagnostic:
    return evolve(d, notes=(*d.notes, *more))


# ---- which positions of a stored tensor count --------------------------------------------------------------------------

Boxes = tuple[I64, I64, I64] | None  # offsets, sizes, strides of the boxes in one home; None: every position counts


@frozen
class _Counted:
    """The compared positions of a part's stored tensors.

    Computed only for tensors that differ: most do not.
    """

    part: Part

    def pieces(self, number: int) -> Pieces:
        return self.part.pieces_of(number)

    def boxes(self, number: int) -> Boxes:
        rows = self.pieces(number)
        is_free = np.isin(rows.policy, _FREE)
        if not self.part.homes[number].padding and not is_free.any():
            return None
        rows = rows.take((~is_free).nonzero()[0])
        return rows.offset, rows.high - rows.low, rows.stride


def _positions(pieces: Pieces, row: int, dims: int) -> I64:
    """The positions of one piece in its stored tensor, in tensor order."""
    index: I64 = np.array(pieces.offset[row], dtype=np.int64)
    sizes = pieces.high[row, :dims] - pieces.low[row, :dims]
    for n, step in zip(sizes.tolist(), pieces.stride[row, :dims].tolist(), strict=True):
        index = index[..., None] + np.arange(n, dtype=np.int64) * step
    return index.ravel()


def _inside(boxes: Boxes, positions: I64) -> Bools:
    """Mask of positions that are in one of the boxes."""
    if boxes is None:
        return np.ones(len(positions), dtype=bool)
    held = np.zeros(len(positions), dtype=bool)
    for offset, size, stride in zip(*boxes, strict=True):
        left = positions - offset
        for dim in np.argsort(-stride, kind="stable"):
            if stride[dim] > 0:
                left = left - np.clip(left // stride[dim], 0, size[dim] - 1) * stride[dim]
        held |= left == 0
    return held
