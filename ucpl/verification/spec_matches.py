"""Check that a layout describes a checkpoint: tensors, entries, shapes and orders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

from attrs import evolve

from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.extents import PAIRED, Extent, FlatBuffer, in_file
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import walked
from ucpl.layout import FileRule, Layout
from ucpl.layout.axes import dims_of
from ucpl.layout.scope import at
from ucpl.layout.templates import Hole, Template, render, varies
from ucpl.placement import Part, Placement
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.verification.blobs import missing

SHOWN = 8  # findings of one kind that are listed


def findings(placement: Placement, checkpoint: Checkpoint) -> list[Diagnostic]:
    """All disagreements between a located layout and an opened checkpoint.

    E320: a stored tensor with elements that no entry covers. E321: an entry whose place is not in the checkpoint.
    E322: another shape. E323: a flat buffer in another order than the checkpoint states. E391: a blob that is not there.
    E398: files of more ranks.
    """
    out: list[Diagnostic] = []
    stored = checkpoint.by_texts
    seen: set[tuple[str, tuple[str, ...]]] = set()
    spec = placement.layout.call
    for part in placement.parts:
        lacking = []
        for shape, places in part.homes.places():
            seen.update(places)
            for place in places:
                extent = stored.get(place)
                if extent is None:
                    lacking.append((place, shape))
                elif extent.shape != _stated(part, shape, extent.dtype):
                    out.append(_misshapen(part, place, shape, extent, checkpoint, spec))
        if lacking:
            some = len(lacking) < sum(len(places) for _, places in part.homes.places())
            out += [_absent(part, place, shape, some, checkpoint, spec) for place, shape in lacking]
    covered: set[str] | None = None
    for (file, key), extent in stored.items():
        if (file, key) not in seen and extent.numel:
            if covered is None:
                covered = {pattern_of("/".join(one)) for place, one in seen if (place, one) in stored}
            out.append(
                Diagnostic(
                    "E320",
                    f"no entry covers {'/'.join(key)}, {list(extent.shape)} {extent.dtype}",
                    (
                        Label(str(checkpoint.root / file), "is in the checkpoint", where="/".join(key)),
                        Label(spec, "covers all but this"),
                    ),
                    remedy="add an entry for it to the layout",
                    about=Mismatch(
                        "/".join(key), file, stored=extent.shape, of_some=pattern_of("/".join(key)) in covered
                    ),
                )
            )
    found = missing(placement, checkpoint) + out
    return found + _left_over(placement, checkpoint) + orders(placement, checkpoint)


def _absent(
    part: Part,
    place: tuple[str, tuple[str, ...]],
    shape: tuple[int, ...],
    some: bool,
    checkpoint: Checkpoint,
    spec: str,
) -> Diagnostic:
    """E321 of a stored tensor.

    `some`: other tensors of its entry are there.
    """
    file, key = str(checkpoint.root / place[0]), "/".join(place[1])

    return Diagnostic(
        "E321",
        f"{part.state} of `{part.label}` should be at {key}, and the checkpoint has nothing there",
        (Label(file, "no tensor in this file", where=key), _line(part, spec)),
        remedy="correct the entry's name, or take the entry out",
        about=Mismatch(key, place[0], part, shape, of_some=some),
    )


def _misshapen(
    part: Part,
    place: tuple[str, tuple[str, ...]],
    shape: tuple[int, ...],
    extent: Extent,
    checkpoint: Checkpoint,
    spec: str,
) -> Diagnostic:
    """E322 of a stored tensor."""
    file, key = str(checkpoint.root / place[0]), "/".join(place[1])
    stated = _stated(part, shape, extent.dtype)

    return Diagnostic(
        "E322",
        f"{key} is {list(extent.shape)} in the checkpoint and {list(stated)} in the layout",
        (Label(file, f"{list(extent.shape)}", where=key), _line(part, spec)),
        remedy="correct the sizes or the cut in the layout",
        about=Mismatch(key, place[0], part, stated, extent.shape),
    )


def _line(part: Part, spec: str) -> Label:
    return at(part.span, "stored by this line") if part.span.line else Label(spec, where=part.label)


def _stated(part: Part, shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """The shape that a file of this dtype states.

    For two elements per byte, the bytes.
    """
    return in_file(dtype if dtype in PAIRED or part.dtype is None else part.dtype, shape)[1]


def orders(placement: Placement, checkpoint: Checkpoint) -> list[Diagnostic]:
    """Flat buffers whose members or order contradict the checkpoint."""
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


def stated_flats(placement: Placement, checkpoint: Checkpoint) -> Iterator[tuple[FlatBuffer, FlatBuffer]]:
    """Flat buffers of a layout, each with the checkpoint's own statement."""
    stated = {_mark(f, f.coordinates): f for f in checkpoint.state.parallel.flats}
    for flat in placement.flats:
        yield from ((flat, theirs) for (b, _), theirs in stated.items() if b == flat.bucket and _agree(theirs, flat))


def _mark(flat: FlatBuffer, coordinates: dict[str, int]) -> tuple[int, tuple[tuple[str, int], ...]]:
    return flat.bucket, tuple(sorted(coordinates.items()))


def _agree(a: FlatBuffer, b: FlatBuffer) -> bool:
    return all(b.coordinates.get(k, v) == v for k, v in a.coordinates.items())


def _excerpt(names: list[str], n: int) -> str:
    shown = names[n : n + 4]
    return (", ".join(shown) if shown else "nothing more") + (", ..." if len(names) > n + 4 else "")


def demand(placement: Placement, checkpoint: Checkpoint) -> None:
    """Raise the first few results of `findings`, one for each line."""
    found = findings(placement, checkpoint)
    if found:
        raise UcplError(*without_repetitions(found, placement.layout)[:SHOWN])


# --- Files of more ranks than the layout has ------------------------------------------------------------------------

RANKS_MAX = 1 << 16  # names that are made; more are not checked


def _left_over(placement: Placement, checkpoint: Checkpoint) -> list[Diagnostic]:
    """E398: a file name with a coordinate that no rank has."""
    if not format_named(checkpoint.format).is_of_a_spec or not checkpoint.root.is_dir():  # others count their ranks
        return []
    layout = placement.layout
    degrees = {axis: n for mesh in layout.meshes for axis, n in zip(mesh.axes, mesh.degrees, strict=True)}
    degrees.setdefault("rank", layout.ranks)
    named = {rule.name: form for rule in layout.files.values() if (form := _form(rule, degrees)) is not None}
    if not named:
        return []
    stored = {file for part in placement.parts for block in part.homes.blocks for file in block.files}
    stored |= {place.file for blob in placement.blobs for place in blob.places}
    expected = {name: form.files(stored) for name, form in named.items()}
    known = stored.union(*expected.values())
    out = []
    for name, form in named.items():
        others = sorted(f for f in form.alike(checkpoint.root, expected[name]) if f not in known)
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            out.append(
                Diagnostic(
                    "E398",
                    f"{others[0]}{more} would be of a rank that {layout.call} does not have",
                    (
                        Label(str(checkpoint.root / others[0]), "is in the folder"),
                        at(layout.files[name].span, f"{len(expected[name])} files are named so"),
                    ),
                    remedy="give the degrees that the checkpoint was written with;"
                    " a file that is no part of it belongs into another folder",
                )
            )
    return out


@frozen
class _Form:
    """The names of a line's files.

    `ranked`: numbers of the parts that change only with a rank's coordinates.
    """

    path: Template
    ranked: frozenset[int]
    degrees: Mapping[str, int]  # of the coordinates in these parts

    @property
    def pattern(self) -> re.Pattern[str]:
        """A group for each part that is not the same everywhere."""
        return re.compile("".join(self._part(n, part) for n, part in enumerate(self.path.parts)))

    def _part(self, n: int, part: str | Hole) -> str:
        if isinstance(part, str):
            return re.escape(part)
        if n in self.ranked:
            return f"(?P<rank{n}>[0-9]+)"
        return re.escape(self._text(part, self._first)) if self._is_one(part) else f"(?P<other{n}>.*)"

    def _is_one(self, part: Hole) -> bool:
        """Return True if it has one text for coordinates and tensors."""
        return part.names <= self.degrees.keys()

    def files(self, stored: set[str]) -> set[str]:
        """The names at all coordinates.

        The rest of each name is as in one of the stored files.
        """
        places = [dict(zip(self.degrees, c, strict=True)) for c in product(*map(range, self.degrees.values()))]
        ranked = [texts for place in places if (texts := self._numbers(place)) is not None]
        found = {_rest(m) for f in stored if (m := self.pattern.fullmatch(f)) is not None}
        if len(found) * len(places) > RANKS_MAX:
            return {f for f in stored if self.pattern.fullmatch(f) is not None}
        return {self._name({**dict(rest), **numbers}) for rest in found for numbers in ranked}

    def _numbers(self, place: Mapping[str, int]) -> dict[int, str] | None:
        """The parts of ranks at one place.

        None if an expression has no value there.
        """
        try:
            return {n: self._text(self.path.parts[n], place) for n in self.ranked}
        except UcplError:
            return None

    def _name(self, texts: Mapping[int, str]) -> str:
        parts = enumerate(self.path.parts)
        return "".join(texts[n] if n in texts else self._text(part, self._first) for n, part in parts)

    @property
    def _first(self) -> dict[str, int]:
        return dict.fromkeys(self.degrees, 0)

    def _text(self, part: str | Hole, place: Mapping[str, int]) -> str:
        return part if isinstance(part, str) else render(evolve(self.path, parts=(part,)), dict(place))

    def alike(self, root: Path, expected: set[str]) -> Iterator[str]:
        """Files that differ from expected ones in rank numbers alone."""
        rest = {_rest(m) for f in expected if (m := self.pattern.fullmatch(f)) is not None}
        deep = max((f.count("/") for f in expected), default=0)
        for folder, folders, names in walked(root):
            here = os.path.relpath(folder, root).replace(os.sep, "/")
            head = "" if here == "." else f"{here}/"
            if head.count("/") >= deep:
                folders.clear()
            matches = ((head + name, self.pattern.fullmatch(head + name)) for name in names)
            yield from (name for name, m in matches if m is not None and _rest(m) in rest)


def _form(rule: FileRule, degrees: Mapping[str, int]) -> _Form | None:
    """The form of a rule's names, or None if unusable.

    None: no coordinate changes the names, a part needs a coordinate and an index at once, or ranks are too many.
    """
    if rule.form is None or rule.path is None:
        return None
    ranked = {n for n, part in enumerate(rule.path.parts) if isinstance(part, Hole) and varies(part, degrees)}
    names = {
        name for n, part in enumerate(rule.path.parts) if isinstance(part, Hole) and n in ranked for name in part.names
    }
    if not ranked or not names <= degrees.keys() or prod(degrees[a] for a in names) > RANKS_MAX:
        return None
    return _Form(rule.path, frozenset(ranked), {a: degrees[a] for a in sorted(names)})


def _rest(match: re.Match[str]) -> tuple[tuple[int, str], ...]:
    """The groups that do not belong to ranks, by their part's number."""
    return tuple((int(k.removeprefix("other")), v) for k, v in match.groupdict().items() if k.startswith("other"))


# ---- messages for a spec that does not fit ---------------------------------------------------------------------------


_ALIKE = 0.7  # of a key without its numbers, and one that no entry covers
_COMPARED_MAX = 2000  # keys without their numbers that are compared by spelling

_OF_SOME = (
    "the checkpoint has it of other indices: write in the model which ones, as in `w : l[1, 2] h`, or correct the list"
    " of the config"
)
_OF_OTHERS = "an entry covers others of this name: write these indices in the model, too, as in `w : l[0, 3] h`"


@frozen
class Mismatch:
    """A stored tensor without an entry, or a wrong place of one."""

    key: str
    file: str
    part: Part | None = None  # of an entry
    stated: tuple[int, ...] = ()  # the shape in the layout
    stored: tuple[int, ...] = ()  # the shape in the checkpoint
    of_some: bool = False  # the same entry, or another key with other numbers, fits


def without_repetitions(found: Sequence[Diagnostic], layout: Layout) -> list[Diagnostic]:
    """The findings, one for each line and each run of layers.

    A key that a wrong entry may mean is named by the message of that entry alone.
    """
    groups: dict[object, list[Diagnostic]] = {}
    for i, one in enumerate(found):
        groups.setdefault(_group(one) or i, []).append(one)
    free: dict[str, Mismatch] = {}
    for one in found:
        if isinstance(one.about, Mismatch) and one.about.part is None:
            free.setdefault(pattern_of(one.about.key), one.about)
    told = {name: group for name, group in groups.items() if group[0].code != "E320"}
    meant: set[str] = set()
    out: dict[object, Diagnostic] = {}
    for name, group in told.items():
        about = group[0].about
        remedy = group[0].remedy
        if isinstance(about, Mismatch) and about.part is not None:
            if group[0].code == "E321":
                other = _meant(about, free)
                remedy = _at_other(about, other) if other is not None else _OF_SOME if about.of_some else remedy
                meant |= {pattern_of(other.key)} if other is not None else set()
            else:
                remedy = _of_shapes(about, layout) or remedy
        out[name] = _with_others(group, remedy)
    for name, group in groups.items():
        about = group[0].about
        if name not in told and not (isinstance(about, Mismatch) and pattern_of(about.key) in meant):
            is_some = isinstance(about, Mismatch) and about.of_some
            out[name] = _with_others(group, _OF_OTHERS if is_some else group[0].remedy)
    return [out[name] for name in groups if name in out]


def _group(found: Diagnostic) -> object:
    """Key that findings of one mistake share. None for others."""
    about = found.about
    if not isinstance(about, Mismatch):
        return None
    place = found.labels[1] if about.part is not None and found.labels[1].line else None
    return found.code, place or pattern_of(about.key)


def pattern_of(key: str) -> str:
    """The key with one number in place of each."""
    return re.sub(r"[0-9]+", "0", key)


def _with_others(group: Sequence[Diagnostic], remedy: str) -> Diagnostic:
    first, *others = group
    if not others:
        return evolve(first, remedy=remedy)
    also = others[0].about
    key = also.key if isinstance(also, Mismatch) else ""
    note = f"the same of {len(others):,} more, the next {key}"
    return evolve(first, remedy=remedy, notes=(*first.notes, note))


def _meant(about: Mismatch, free: dict[str, Mismatch]) -> Mismatch | None:
    """The stored tensor that an entry may mean.

    It is in another file, or has nearly this key.
    """
    mine = pattern_of(about.key)
    if mine in free:
        return free[mine]
    size = prod(about.stated)
    known = [key for key, one in free.items() if prod(one.stored) == size][:_COMPARED_MAX]
    from difflib import get_close_matches

    close = get_close_matches(mine, known, 1, _ALIKE)
    return free[close[0]] if close else None


def _at_other(about: Mismatch, other: Mismatch) -> str:
    """Remedy for a place that is not there, where another one is."""
    if other.file != about.file and pattern_of(other.key) == pattern_of(about.key):
        return f"the checkpoint has it in {other.file}: correct the name of the entry's `file`"
    return f"did you mean {other.key}? The checkpoint has it, and no entry covers it"


def _of_shapes(about: Mismatch, layout: Layout) -> str:
    """Remedy for another shape: the first axis that differs."""
    mine, theirs = about.stated, about.stored
    if len(mine) != len(theirs):
        axes = f"{len(theirs)} {'axis' if len(theirs) == 1 else 'axes'}"
        return f"the file has {axes}, and the line {len(mine)}: dims in parentheses are one axis, as in `w = (n d) h`"
    if sorted(mine) == sorted(theirs):
        return "the axes are in another order there: write them as they are stored, as in `w = c r`"
    entry = next((e for e in layout.entries if about.part is not None and e.span == about.part.span), None)
    if entry is None or len(entry.shape) != len(mine):
        return ""
    i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    dims = list(dict.fromkeys(dims_of(entry.shape[i])))
    sizes = ", ".join(
        f"{one} = {layout.sizes[one]}" for one in dims if one in layout.sizes and ("#" not in one or len(dims) == 1)
    )
    if not sizes:
        return ""
    if len(dims) == 1 and layout.sizes[dims[0]] == mine[i]:
        dim = f"axis {i}" if "#" in dims[0] else f"`{dims[0]}`"  # a size without a name
        return f"{dim} is {mine[i]} here, and {theirs[i]} in the file: correct the size, or name the dim of that size"
    return f"axis {i} is of {sizes}: correct a size or the pattern, so that {theirs[i]} elements lie along it"
