"""Elements that the source lacks, and their values from `fill` lines.

A line acts if the source lacks an element and nowhere else: it never changes elements of the source. Filled elements
are reported; elements of a line that the source has are reported, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np
from attrs import field

from ucpl.errors import Label, fail
from ucpl.graph.copies import choose
from ucpl.graph.rows import StoredBoxes, rows_of
from ucpl.graph.side import GraphSide, spaced
from ucpl.layout.by_index import whole_name
from ucpl.layout.fills import PARAMETER
from ucpl.layout.layout import Filling, LogicalTensor
from ucpl.layout.scope import at
from ucpl.placement import Placement, element_name
from ucpl.placement.boxes import overlaps, subtract
from ucpl.records import define, frozen
from ucpl.tables import I64, Moves, join_runs, straighten
from ucpl.tables import MoveSide as Boxes
from ucpl.tables.operations import Fill

__all__ = ["Filler", "MissingBoxes", "itself_of", "line_to_write", "reject_absent"]

Box = tuple[I64, I64]  # low <= index < high, K columns each
NAMES_SHOWN = 3
DIGITS_SHOWN = 10**15  # whole numbers from here on are shown with an exponent


@frozen
class MissingBoxes:
    """Elements of one state that the target stores and the source lacks.

    They are boxes of each tensor, for some parts of the target.
    """

    state: str
    targets: tuple[int, ...]
    boxes: dict[str, list[Box]]


@define(slots=False)
class Filler:
    """The `fill` lines of a target at work."""

    source: Placement
    target: Placement
    found: dict[tuple[str, int], dict[str, int]] = field(factory=dict)  # (state, line) -> elements of each tensor
    elsewhere: dict[str, tuple[set[str], dict[str, list[Box]]]] = field(factory=dict)  # by state: see `lacking_of`

    @property
    def lines(self) -> tuple[Filling, ...]:
        return self.target.layout.fillings

    @cached_property
    def itself(self) -> frozenset[str]:
        return itself_of(self.source, self.target)

    def of_weight(self, state: str, tensors: set[str]) -> set[str]:
        """Tensors whose masters a line makes of the weight."""
        said = [f.names for f in self.lines if f.value is None and state in (f.states or ())]
        found = tensors & set().union(*said)
        if found:
            self.note(state, next(i for i, f in enumerate(self.lines) if f.value is None and found & f.names), "", 0)
        return found

    def note(self, state: str, line: int, path: str, count: int) -> None:
        tensors = self.found.setdefault((state, line), {})
        if count:
            tensors[path] = tensors.get(path, 0) + count

    # ---- missing elements
    # ------------------------------------------------------------------------------------------------

    def lacking(
        self, state: str, parts: tuple[int, ...], wanted: Iterable[str], sides: tuple[GraphSide, GraphSide]
    ) -> dict[str, list[Box]]:
        """Missing boxes of each tensor that these parts lack some of.

        The parts are the source's.
        """
        here, there = sides
        common = {path: i for i, path in enumerate(self.target.tensors)}
        chosen = frozenset(wanted)
        renumber = np.array([common[p] if p in chosen else -1 for p in self.source.tensors] or [-1], dtype=np.int64)
        k = max(1, here.width, there.width)
        rows = rows_of(here.numbered(parts), here.space, renumber, k)
        held = np.zeros(len(common), dtype=np.int64)
        primary = choose(rows, here.is_alias, here)
        for some in (primary.primary, primary.reduced):
            np.add.at(held, some.tensor, some.volume)
        out: dict[str, list[Box]] = {}
        for path in sorted(chosen, key=lambda p: common[p]):
            tensor = self.target.layout.placed[path].of(state)
            if held[common[path]] >= tensor.numel and not len(primary.reduced):
                continue
            mine = rows.take(rows.tensor == common[path])
            left = subtract(*_whole(tensor, k), mine.low, mine.high)
            if left:
                out[path] = left
        return out

    def whole(self, state: str, targets: list[int], wanted: set[str], k: int) -> MissingBoxes:
        """Tensors that the source lacks completely."""
        tensors = self.target.layout.placed
        return MissingBoxes(
            state, tuple(targets), {p: [_whole(t.of(state), k)] for p, t in tensors.items() if p in wanted}
        )

    # ---- filled elements
    # ------------------------------------------------------------------------------------------------

    def filled(
        self, gap: MissingBoxes, sides: tuple[GraphSide, GraphSide]
    ) -> tuple[list[tuple[Fill, int]], dict[str, list[Box]]]:
        """Fills, each with its target part, and elements without a line."""
        by_line: dict[int, list[tuple[str, Box]]] = {}
        open_: dict[str, list[Box]] = {}
        for path, boxes in gap.boxes.items():
            left = boxes
            allowed = self.nowhere(gap.state, path, boxes, sides[1]) if gap.state in self.itself else boxes
            for ranked in self.ranked(gap.state, path):
                left = self.dealt(ranked, (path, left, allowed), by_line)
            if left:
                open_[path] = left
        out: list[tuple[Fill, int]] = []
        for line, of in by_line.items():
            for path, (low, high) in of:
                self.note(gap.state, line, path, int((high - low).prod()))
            out += self.nodes(gap, self.lines[line], of, sides[1])
        return out, open_

    def ranked(self, state: str, path: str) -> Iterator[list[int]]:
        """Lines for a state of a tensor, the most special first.

        Those of one rank are together.
        """
        speak = [
            i
            for i, f in enumerate(self.lines)
            if _speaks(f, path)
            and f.value is not None
            and (state in self.itself if f.states is None else state in f.states)
        ]
        for rank in sorted({self.lines[i].rank for i in speak}, reverse=True):
            yield [i for i in speak if self.lines[i].rank == rank]

    def dealt(
        self, lines: list[int], of: tuple[str, list[Box], list[Box]], out: dict[int, list[tuple[str, Box]]]
    ) -> list[Box]:
        """Rest of some boxes after lines of one rank.

        Raises E318 if two of them give one element two values.
        """
        path, left, allowed = of
        tensor = self.target.layout.placed[path]
        taken: list[tuple[int, list[Box]]] = []
        for i in lines:
            line = self.lines[i]
            said = [_wide(box, left) for box in line.boxes[path]] if path in line.boxes else left
            mine = _common(_common(left, said), allowed if line.states is None else left)
            for j, others in taken:
                if self.lines[j].value != line.value and (both := _common(mine, others)):
                    first = element_name(self.target.layout, path, tuple(both[0][0][: len(tensor.dims)].tolist()))
                    fail(
                        "E318",
                        f"two lines fill {first}, and give it two values",
                        at(self.lines[j].span, self.lines[j].text),
                        at(line.span, line.text),
                    )
            taken.append((i, mine))
        for i, mine in taken:
            for box in _common(left, mine):
                out.setdefault(i, []).append((path, box))
            left = _without(left, mine)
        return left

    def nowhere(self, state: str, path: str, boxes: list[Box], there: GraphSide) -> list[Box]:
        """Boxes that the source has under no name of the parameter.

        The master of an existing weight is not filled with a number.
        """
        left = boxes
        for other in sorted(self.itself - {state}):
            if other not in self.elsewhere:
                self.elsewhere[other] = self.lacking_of(other, there)
            held, gaps = self.elsewhere[other]
            if path in held:
                left = _common(left, gaps.get(path, []))
        return left

    def lacking_of(self, state: str, there: GraphSide) -> tuple[set[str], dict[str, list[Box]]]:
        """Tensors whose state the source has in part, with the rest."""
        parts = tuple(n for n, p in enumerate(self.source.parts) if p.state == state and len(p.homes))
        held = {self.source.tensors[t] for n in parts for t in self.source.parts[n].tensors}
        held &= set(self.target.tensors)
        if not held:
            return held, {}
        apart = GraphSide(self.source, self.target.tensors, self.target.layout)  # these are looked at, not read
        for n in parts:
            apart.place(n)
        spaced(apart)
        return held, self.lacking(state, parts, held, (apart, there))

    def nodes(
        self, gap: MissingBoxes, line: Filling, of: list[tuple[str, Box]], there: GraphSide
    ) -> list[tuple[Fill, int]]:
        """A Fill for each part and stored value."""
        common = {path: i for i, path in enumerate(self.target.tensors)}
        wanted = {path for path, _ in of}
        renumber = np.array([common[p] if p in wanted else -1 for p in self.target.tensors] or [-1], dtype=np.int64)
        k = len(of[0][1][0])
        rows = rows_of(there.numbered(gap.targets), there.space, renumber, k)
        number = np.array([common[path] for path, _ in of], dtype=np.int64)
        low, high = (np.array([box[side] for _, box in of], dtype=np.int64) for side in (0, 1))
        j, i = overlaps(rows.tensor, rows.low, rows.high, number, low, high)
        boxes = _boxes(rows.take(j), np.maximum(rows.low[j], low[i]), np.minimum(rows.high[j], high[i]))
        pairs, which = np.unique(np.stack([rows.part[j], rows.tensor[j]]), axis=1, return_inverse=True)
        places = [(n, self.stored(n, t, line)) for n, t in pairs.T.tolist()]
        groups = {place: g for g, place in enumerate(dict.fromkeys(places))}
        group = np.array([groups[place] for place in places], dtype=np.int64)[which.reshape(-1)]
        order = np.argsort(group, kind="stable")
        ends = np.searchsorted(group[order], np.arange(len(groups) + 1)).tolist()
        out = []
        for (n, value), g in groups.items():
            some = boxes.take(order[ends[g] : ends[g + 1]])
            side = join_runs(straighten(Moves.between(some, some))).target_side
            out.append((Fill(self.target.parts[n].label, gap.state, side.elements, side, value, lacking=True), n))
        return out

    def stored(self, part: int, tensor: int, line: Filling) -> float:
        """The number as the target's entry stores it: `value x - 1` holds here, too."""
        a, b = self.target.parts[part].value_of(self.target.tensors[tensor])
        return a * (line.value or 0.0) + b

    # ---- reports
    # ---------------------------------------------------------------------------------------------------------

    def lines_of_fills(self) -> tuple[str, ...]:
        """A line for each state's fills, then for lines without effect."""
        out = []
        for (state, line), tensors in sorted(self.found.items(), key=lambda item: item[0]):
            if tensors:
                first = [f"`{name}`" for name in self.target.layout.tensors if name in tensors][:NAMES_SHOWN]
                more = f" and {len(tensors) - len(first)} more" if len(tensors) > len(first) else ""
                count = sum(tensors.values())
                out.append(
                    f"{state} with {_number(self.lines[line].value)}: {count:,} element{'s' * (count != 1)} of"
                    f" {', '.join(first)}{more} (the source lacks them)"
                )
        counted = {s.name for s in self.target.layout.states if s.scalar}  # the checkpoint reports these, not the graph
        used = {line for _, line in self.found}
        used |= {i for i, f in enumerate(self.lines) if f.states and f.states <= counted}
        out += [
            f"nothing by `{f.text}`: {self.why_nothing(f)}"
            for i, f in enumerate(self.lines)
            if i not in used and f.span.line
        ]
        return tuple(out)

    def why_nothing(self, line: Filling) -> str:
        """The reason why a line fills nothing."""
        if not line.names and not line.states:
            return "no tensor of the model is called so"
        stored = {part.state for part in self.target.parts}
        if line.states is not None and not line.states & stored:
            return f"the target stores no {' and no '.join(sorted(line.states))}"
        return "the source has all of it"


def itself_of(source: Placement, target: Placement) -> frozenset[str]:
    """States that are the parameter itself."""
    derived = (*source.layout.derived, *target.layout.derived)
    return frozenset({*PARAMETER, *(n for d in derived for n in (d.state, d.source))})


def line_to_write(state: str, path: str, itself: frozenset[str]) -> str:
    """The `fill` line for elements that the source lacks."""
    name = path if all(part.isidentifier() for part in path.split(".")) else f'"{path}"'
    return f"fill {name} = 0" if state in itself else f"fill state {state} = 0"


def _speaks(line: Filling, path: str) -> bool:
    """True if a line is for a tensor or its live rows."""
    return path in line.names or (whole_name(path) in line.names and not line.boxes)


def _number(value: float | None) -> str:
    if value is None:
        return "its weight"
    return str(int(value)) if value.is_integer() and abs(value) < DIGITS_SHOWN else repr(value)


def _whole(tensor: LogicalTensor, k: int) -> Box:
    low, high = np.zeros(k, dtype=np.int64), np.ones(k, dtype=np.int64)
    high[: len(tensor.counts)] = tensor.counts
    return low, high


def _wide(box: tuple[tuple[int, ...], tuple[int, ...]], like: list[Box]) -> Box:
    """A box of a tensor's own dims, as wide as the others."""
    k = len(like[0][0]) if like else len(box[0])
    low, high = np.zeros(k, dtype=np.int64), np.ones(k, dtype=np.int64)
    low[: len(box[0])], high[: len(box[1])] = box
    return low, high


def _common(ours: list[Box], theirs: list[Box]) -> list[Box]:
    """Common elements; boxes of each list share nothing."""
    both = ((np.maximum(a, c), np.minimum(b, d)) for a, b in ours for c, d in theirs)
    return [(low, high) for low, high in both if (low < high).all()]


def _without(ours: list[Box], theirs: list[Box]) -> list[Box]:
    if not theirs:
        return ours
    low, high = (np.array([box[side] for box in theirs]) for side in (0, 1))
    return [box for a, b in ours for box in subtract(a, b, low, high)]


def _boxes(rows: StoredBoxes, low: I64, high: I64) -> Boxes:
    """Parts of rows, where they are stored."""
    offset = rows.offset + ((low - rows.low) * rows.stride).sum(axis=1)
    return Boxes(rows.tensor, offset, high - low, rows.stride)


# --- The refusal of elements that the source lacks and nothing fills ------------------------------------------------


def reject_absent(source: Placement, target: Placement, state: str, missing: Sequence[str]) -> NoReturn:
    """Refuse a target's state that the source lacks completely.

    It lists the tensors. Raises: UcplError E303.
    """
    fail(
        "E303",
        f"the target stores {state} of `{missing[0]}`"
        + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        + ", and the source has none",
        Label(source.layout.call, "source", where=f"{missing[0]}/{state}"),
        Label(target.layout.call, "target", where=f"{missing[0]}/{state}"),
        remedy=_entry_to_write(source, target, state, missing[0]),
    )


def _entry_to_write(source: Placement, target: Placement, state: str, tensor: str) -> str:
    """The line that the target's layout lacks, or the source's."""
    layout, itself = source.layout, itself_of(source, target)
    line = line_to_write(state, tensor, itself)
    if state != "weight":
        if state in itself and _has_weight(source, tensor):
            line = f"fill state {state} = weight"
        return (
            f"for elements that the source never had, write `{line}` in the layout of the target;"
            f" else `state {state} = like in FILE` in that of the source, or `derive {state} from ...`;"
            f" or choose a target that does not store {state}"
        )
    dims = layout.tensors[tensor].dims if tensor in layout.tensors else ()
    axes = " ".join(dims) if dims and not any("#" in d for d in dims) else "..." if dims else "()"
    name = tensor if all(part.isidentifier() for part in tensor.split(".")) else f'"{tensor}"'
    return (
        f'write an entry for it in {layout.call}: `{name} = {axes}  as "{tensor}"`; where the source has no weights, '
        f"`derive weight from fp32`; where the target needs none, `{name} = none` there; where it is new, `{line}` there"
    )


def _has_weight(source: Placement, tensor: str) -> bool:
    number = source.tensors.index(tensor) if tensor in source.tensors else -1
    return any(p.state == "weight" and number in p.tensors for p in source.parts)
