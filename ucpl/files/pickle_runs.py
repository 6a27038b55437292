"""Runs of equal records in a pickle, read at once as columns.

A pickle of millions of objects of one class has the same instructions again and again. `find_runs` looks for them in
the bytes, all at once, with numpy; the machine (pickle_machine) steps over a run where one of its own instructions
begins there, and only if the names that the records refer to are in its memo as the form has them. A record that
differs in one instruction is left to the machine. Nothing is imported or called.

A reader of runs must meet each of them once, in the list or dict that it expects (`Runs.met`): otherwise the pickle
separates their records, and has to be read without runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from attrs import field

from ucpl.extents import Global
from ucpl.files.inert import SIZE
from ucpl.records import define, frozen

__all__ = ["Form", "Irregular", "Run", "PickleRuns", "TextColumns", "ValuesOf", "find_runs"]

Numbers = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]

_BLOCK = 1 << 16  # records that are looked at together: their columns stay in the cache
_PART = 1 << 22  # bytes that are searched together
_LEAST = 4  # records of a run
_SAMPLE = 64
_CLASSES_MAX = 16  # of the most frequent objects
_DIMS_MAX = 8  # of a shape; larger ones are left to the machine
_REACH = 4096  # bytes: no record that is read here is longer
_BORN = b")\x81\x94}\x94("  # after a class: an object without arguments, and its attributes
_SIZED = int.from_bytes(b"\x85\x94R\x94", "little")
_ODD = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
_BYTE, _WORD = np.uint64(0xFF), np.uint64(0xFFFFFFFF)

_LENGTH = np.zeros(256, np.int64)  # of an instruction with a number
_MASK = np.zeros(256, np.uint64)
for _op, _bytes in ((0x4B, 1), (0x4D, 2), (0x4A, 4)):
    _LENGTH[_op], _MASK[_op] = 1 + _bytes, (1 << 8 * _bytes) - 1
_LONG_MASK = np.array([0] + [(1 << 8 * n) - 1 for n in range(1, 8)], np.uint64)
_TUPLES = np.array([0x29, 0x85, 0x86, 0x87], np.uint8)


class Irregular(Exception):
    """A pickle that cannot be read by runs."""


@frozen
class Form:
    """A record: the class of an object, and its attributes in order.

    Kinds of attributes: shape, count, text, and number (a count or None).

    value: the record that follows, where the two are key and value of a dict.
    """

    of: Callable[[Global], bool]
    fields: tuple[tuple[str, str], ...]
    value: Form | None = None

    @property
    def every(self) -> tuple[tuple[str, str], ...]:
        return self.fields + (self.value.every if self.value is not None else ())


@frozen(eq=False)
class Run:
    """Records without a gap between them.

    They are `size` rows of the columns of a block, from `first` on.
    """

    form: Form
    block: _Block
    first: int
    size: int
    end: int  # behind its last byte
    names: tuple[int, ...]  # the places in the memo of all that each record refers to

    def shapes(self, name: str) -> Numbers:
        """A column of shapes, all of as many dims. Raises: Irregular."""
        dims, values = self.block.shapes[name]
        rows = dims[self.first : self.first + self.size]
        if (rows != rows[0]).any():
            raise Irregular
        return values[self.first : self.first + self.size, : int(rows[0])]

    def dims(self, name: str) -> Numbers:
        return self.block.shapes[name][0][self.first : self.first + self.size]

    def padded(self, name: str) -> Numbers:
        """The numbers of shapes; those of fewer dims end with zeros."""
        return self.block.shapes[name][1][self.first : self.first + self.size]

    def wholes(self, name: str) -> Numbers:
        return self.block.wholes[name][self.first : self.first + self.size]


@frozen(eq=False)
class ValuesOf:
    """The values of a dict whose keys are a run.

    Another object than the run, since a pickle may separate them.
    """

    run: Run


@define
class _Text:
    """A column of texts, each in the memo or written out."""

    known: npt.NDArray[np.int32]  # -1: written out
    begin: npt.NDArray[np.int32]
    size: npt.NDArray[np.int16]
    put: npt.NDArray[np.int8]  # its place among the values that its record puts into the memo


@define(eq=False)
class _Block:
    puts: npt.NDArray[np.int8]  # for each record, how many values it puts into the memo
    shapes: dict[str, tuple[Numbers, Numbers]] = field(factory=dict)
    wholes: dict[str, Numbers] = field(factory=dict)
    texts: dict[str, _Text] = field(factory=dict)


@define(eq=False)
class PickleRuns:
    """The runs of a pickle.

    at: by their first byte. taken: those that the machine stepped over.
    """

    data: bytes
    at: dict[int, Run] = field(factory=dict)
    taken: list[Run] = field(factory=list)
    bases: list[int] = field(factory=list)  # the size of the memo before each
    stepped: int = 0  # values that they stand for in it
    memo: dict[int, object] = field(factory=dict)  # of the machine
    _fitting: set[tuple[int, tuple[int, ...]]] = field(factory=set)
    _met: set[int] = field(factory=set)

    def take(self, run: Run, size: int) -> bool:
        """Step over a run, with a memo of `size` values.

        Not if its records refer to other names than its form's.
        """
        mark = (id(run.form), run.names)
        if mark not in self._fitting:
            if not _fits(run.form, iter(run.names), self.memo):
                return False
            self._fitting.add(mark)
        self.taken.append(run)
        self.bases.append(size)
        self.stepped += int(run.block.puts[run.first : run.first + run.size].sum(dtype=np.int64))
        return True

    def text(self, index: int) -> str:
        """The text that a run put into the memo. Raises: KeyError."""
        number = bisect_right(self.bases, index) - 1
        if number < 0:
            raise KeyError(index)
        run, left = self.taken[number], index - self.bases[number]
        puts = run.block.puts[run.first : run.first + run.size]
        ends = np.cumsum(puts, dtype=np.int64)
        row = int(np.searchsorted(ends, left, side="right"))
        if row < run.size:
            left -= int(ends[row] - puts[row])
            for text in run.block.texts.values():
                n = run.first + row
                if text.known[n] < 0 and text.put[n] == left:
                    begin = int(text.begin[n])
                    return str(self.data[begin : begin + int(text.size[n])], "utf-8", "surrogatepass")
        raise KeyError(index)

    def met(self, run: Run) -> None:
        """Count a run. Raises: Irregular if it was met before."""
        if id(run) in self._met:
            raise Irregular
        self._met.add(id(run))

    def demand_all_met(self) -> None:
        """Check that the reader met all runs. Raises: Irregular."""
        if len(self._met) != len(self.taken):
            raise Irregular

    def texts(self, runs: list[Run], names: tuple[str, ...]) -> TextColumns:
        """All texts of these runs. Raises: Irregular, UnicodeDecodeError."""
        cuts = [slice(run.first, run.first + run.size) for run in runs]
        base_of = {id(run): base for run, base in zip(self.taken, self.bases, strict=True)}
        size_before = np.concatenate([_size_before(run, base_of[id(run)]) for run in runs])
        found = dict[bytes, int]()
        known: dict[str, Numbers] = {}
        columns: dict[str, Numbers] = {}
        owned, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for name in names:
            of = [(run.block.texts[name], cut) for run, cut in zip(runs, cuts, strict=True)]
            known[name] = np.concatenate([text.known[cut] for text, cut in of])
            own = np.flatnonzero(known[name] < 0)
            begins = np.concatenate([text.begin[cut] for text, cut in of])[own]
            sizes = np.concatenate([text.size[cut] for text, cut in of])[own]
            put = np.concatenate([text.put[cut] for text, cut in of])[own]
            columns[name] = np.full(len(known[name]), -1, np.int64)
            columns[name][own] = _numbered(self.data, begins.astype(np.int64), sizes.astype(np.int64), found)
            owned.append(size_before[own] + put)
            owners.append(columns[name][own])
        values = [str(raw, "utf-8", "surrogatepass") for raw in found]
        ids_of = {value: n for n, value in enumerate(values)}
        places, ids = np.concatenate(owned), np.concatenate(owners)
        order = np.argsort(places, kind="stable")
        places, ids = places[order], ids[order]
        out: dict[str, Numbers] = {}
        for name in names:
            mine, wanted = columns[name], known[name]
            if (wanted >= size_before).any():
                raise Irregular
            lacking = np.flatnonzero(mine < 0)
            heads = np.flatnonzero(np.diff(wanted[lacking], prepend=-1))
            asked, back = np.unique(wanted[lacking][heads], return_inverse=True)
            at = np.minimum(np.searchsorted(places, asked), max(len(places) - 1, 0))
            got = np.empty(len(asked), np.int64)
            for n, (index, place) in enumerate(zip(asked.tolist(), at.tolist(), strict=True)):
                if len(places) and places[place] == index:
                    got[n] = ids[place]
                    continue
                value = self.memo.get(index)
                if type(value) is not str:
                    raise Irregular
                if value not in ids_of:
                    ids_of[value] = len(values)
                    values.append(value)
                got[n] = ids_of[value]
            mine[lacking] = np.repeat(got[back], np.diff(heads, append=len(lacking)))
            out[name] = mine
        return TextColumns(values, out)


@define
class TextColumns:
    """Texts, and for each column the number of each record's text."""

    values: list[str]
    columns: dict[str, Numbers]


def _size_before(run: Run, base: int) -> Numbers:
    """The size of the memo before each record."""
    puts = run.block.puts[run.first : run.first + run.size].astype(np.int64)
    return base + np.cumsum(puts) - puts


def _numbered(data: bytes, begins: Numbers, sizes: Numbers, found: dict[bytes, int]) -> Numbers:
    """The number of each text in `found`, which gets new ones.

    Equal texts of a block are one look-up. Raises: Irregular if two texts have one hash.
    """
    out = np.empty(len(begins), np.int64)
    for low in range(0, len(begins), _BLOCK):
        begin, size = begins[low : low + _BLOCK], sizes[low : low + _BLOCK]
        words = [*_words(data, begin, size)]
        mark = size.astype(np.uint64)
        for word in words:
            mark = (mark ^ word) * _ODD
            mark ^= mark >> 29
        _, first, back = np.unique(mark, return_index=True, return_inverse=True)
        if any((column[first[back]] != column).any() for column in (size, *words)):
            raise Irregular
        ends = zip(begin[first].tolist(), size[first].tolist(), strict=True)
        # In the order of the file: numbers do not depend on hashes.
        texts = {n: data[at : at + some] for n, (at, some) in enumerate(ends)}
        numbers = np.empty(len(first), np.int64)
        for n in np.argsort(first).tolist():
            numbers[n] = found.setdefault(texts[n], len(found))
        out[low : low + _BLOCK] = numbers[back]
    return out


def _words(data: bytes, begins: Numbers, sizes: Numbers) -> Iterator[npt.NDArray[np.uint64]]:
    """Texts as numbers of eight bytes, with zeros behind their ends."""
    b8 = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    for at in range(0, int(sizes.max(initial=0)), 8):
        left = np.clip(sizes - at, 0, 8)
        word = b8[np.minimum(begins + at, len(b8) - 1)]
        yield word & _FIRST[left]


def _fits(form: Form, names: Iterator[int], memo: dict[int, object]) -> bool:
    """Test whether records refer to the names of their form.

    These are the class, the attributes' names and torch.Size, at their places in the memo.
    """
    made = memo.get(next(names))
    if type(made) is not Global or not form.of(made):
        return False
    for name, kind in form.fields:
        if memo.get(next(names)) != name or (kind == "shape" and memo.get(next(names)) is not SIZE):
            return False
    return form.value is None or _fits(form.value, names, memo)


# ---- records in the bytes ------------------------------------------------------------------------------------------


@define(eq=False)
class _Reader:
    """Instructions of many records at once.

    A position in each; `good`: all of it was as expected so far.
    """

    b1: npt.NDArray[np.uint8]
    b8: npt.NDArray[np.uint64]  # at every byte
    pos: Numbers
    good: Marks
    puts: Numbers
    names: list[Numbers] = field(factory=list)
    block: _Block = field(factory=lambda: _Block(np.zeros(0, np.int8)))

    def expect(self, ops: bytes) -> None:
        """At most eight instructions."""
        self.good &= _begins(self.b8[self.pos], ops)
        self.pos += len(ops)

    def got(self) -> Numbers:
        """BINGET or LONG_BINGET."""
        raw = self.b8[self.pos]
        op, index = raw & _BYTE, (raw >> 8 & _WORD).astype(np.int64)
        long = op == 0x6A
        if long.all():  # nearly always: a memo of 256 values is soon full
            self.pos += 5
            return index
        self.good &= long | (op == 0x68)
        self.pos += np.where(long, 5, 2)
        return np.where(long, index, index & 0xFF)

    def whole(self, none: bool = False) -> Numbers:
        """A number from 0 on, below 2^55; -1 for None."""
        raw = self.b8[self.pos]
        op = (raw & _BYTE).astype(np.uint8)
        length, value = _LENGTH[op], raw >> 8 & _MASK[op]
        if (long := op == 0x8A).any():
            count = (raw >> 8 & _BYTE).astype(np.int64)
            fits = long & (count >= 1) & (count <= 7)
            count = np.where(fits, count, 1)
            more = self.b8[self.pos + 2] & _LONG_MASK[count]
            fits &= more >> (8 * count - 1).astype(np.uint64) == 0
            value, length = np.where(fits, more, value), np.where(fits, 2 + count, length)
        self.good &= (length > 0) | ((op == 0x4E) if none else False)
        self.good &= (op != 0x4A) | (value < 1 << 31)
        found = value.astype(np.int64)
        if none:
            found = np.where(op == 0x4E, -1, found)
            length = np.where(op == 0x4E, 1, length)
        self.pos += length
        return found

    def shape(self) -> tuple[Numbers, Numbers]:
        """The numbers of torch.Size, behind its name."""
        self.names.append(self.got())
        marked = self.b1[self.pos] == 0x28
        self.pos += marked
        dims = np.zeros(len(self.pos), np.int64)
        columns: list[Numbers] = []
        for _ in range(_DIMS_MAX):
            op = self.b1[self.pos]
            more = self.good & ((_LENGTH[op] > 0) | (op == 0x8A))
            if not more.any():
                break
            if more.all():
                columns.append(self.whole())
            else:
                here, good = self.pos.copy(), self.good.copy()
                value = self.whole()
                self.good = np.where(more, self.good, good)
                self.pos = np.where(more, self.pos, here)
                columns.append(np.where(more, value, 0))
            dims += more
        first = self.b8[self.pos]
        op, raw = first & _BYTE, first >> np.uint64(8)
        self.good &= np.where(marked, (op == 0x74) & (dims > 3), (dims <= 3) & (op == _TUPLES[np.minimum(dims, 3)]))
        put = dims > 0  # the empty tuple is not put into the memo
        self.good &= ~put | (raw & _BYTE == 0x94)
        self.good &= np.where(put, raw >> np.uint64(8), raw) & _WORD == _SIZED
        self.pos += put + 5
        self.puts += put + 2
        return dims, np.stack(columns, axis=1) if columns else np.zeros((len(dims), 0), np.int64)

    def text(self) -> _Text:
        """A text of the memo, or SHORT_BINUNICODE and its place there."""
        own = self.b1[self.pos] == 0x8C
        here, size = self.pos, np.zeros(len(self.pos), np.int64)
        if own.any():
            size = np.where(own, self.b1[here + 1], 0).astype(np.int64)
        if own.all():
            index, self.pos = size, here + 2 + size
        else:
            self.pos, good = here.copy(), self.good.copy()
            index = self.got()
            self.good = np.where(own, good, self.good)
            self.pos = np.where(own, here + 2 + size, self.pos)
        if own.any():
            self.good &= ~own | (self.b1[self.pos] == 0x94)
            self.pos += own
        known, begin = np.where(own, -1, index).astype(np.int32), (here + 2).astype(np.int32)
        made = _Text(known, begin, size.astype(np.int16), self.puts.astype(np.int8))
        self.puts += own
        return made

    def record(self, form: Form) -> None:
        self.names.append(self.got())
        self.expect(_BORN)
        self.puts += 2
        for name, kind in form.fields:
            self.names.append(self.got())
            if kind == "shape":
                self.block.shapes[name] = self.shape()
            elif kind == "text":
                self.block.texts[name] = self.text()
            elif kind == "number":
                self.whole(none=True)
            else:
                self.block.wholes[name] = self.whole()
        self.expect(b"ub")
        if form.value is not None:
            self.record(form.value)


def find_runs(data: bytes, forms: tuple[Form, ...]) -> PickleRuns:
    """The runs of records of these forms.

    Only the machine knows the names that they refer to.
    """
    runs = PickleRuns(data)
    if len(data) < 2 * _REACH:
        return runs
    b1 = np.frombuffer(data, np.uint8)
    b8 = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    starts, classes = _starts(b1, b8)
    found, counts = np.unique(classes, return_counts=True)
    for index in found[np.argsort(-counts)][:_CLASSES_MAX].tolist():
        mine = starts[classes == index]
        for form in forms:
            sample = _read(b1, b8, mine[1 : 1 + _SAMPLE], form)
            if sample.good.any():
                for at in range(0, len(mine), _BLOCK):
                    _cut(runs, _read(b1, b8, mine[at : at + _BLOCK], form), mine[at : at + _BLOCK], form)
                break
    return runs


def _begins(raw: npt.NDArray[np.uint64], ops: bytes) -> Marks:
    """Test eight bytes each for these at their begin."""
    made: Marks = raw << np.uint64(64 - 8 * len(ops)) == np.uint64(int.from_bytes(ops, "little") << 64 - 8 * len(ops))
    return made


def _starts(b1: npt.NDArray[np.uint8], b8: npt.NDArray[np.uint64]) -> tuple[Numbers, Numbers]:
    """Possible begins of objects without arguments.

    With the place of the class of each in the memo.
    """
    begins, classes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for begin in range(8, len(b1) - _REACH, _PART):
        end = min(begin + _PART, len(b1) - _REACH)
        at = np.flatnonzero(b1[begin:end] == _BORN[1]) + (begin - 1)
        at = at[_begins(b8[at], _BORN)]
        before = b8[at - 5]  # its last five bytes are those before the object
        short, long = before >> 24 & _BYTE == 0x68, before & _BYTE == 0x6A
        named = np.where(short, before >> 32 & _BYTE, before >> 8 & _WORD).astype(np.int64)
        fits = short | long
        begins.append((at - np.where(short, 2, 5))[fits])
        classes.append(named[fits])
    return np.concatenate(begins), np.concatenate(classes)


def _read(b1: npt.NDArray[np.uint8], b8: npt.NDArray[np.uint64], starts: Numbers, form: Form) -> _Reader:
    n = len(starts)
    reader = _Reader(b1, b8, starts.copy(), np.ones(n, np.bool_), np.zeros(n, np.int64))
    reader.record(form)
    reader.block.puts = reader.puts.astype(np.int8)
    return reader


def _cut(runs: PickleRuns, reader: _Reader, starts: Numbers, form: Form) -> None:
    """Keep the runs of a block.

    Their records have no gap, and refer to the same names.
    """
    names, good = np.stack(reader.names, axis=1), reader.good
    joined = np.zeros(len(starts), np.bool_)
    joined[1:] = good[1:] & good[:-1] & (starts[1:] == reader.pos[:-1]) & (names[1:] == names[:-1]).all(axis=1)
    heads = np.flatnonzero(~joined)
    sizes = np.diff(np.append(heads, len(starts)))
    for first, size in zip(heads.tolist(), sizes.tolist(), strict=True):
        if size >= _LEAST and good[first]:
            run = Run(form, reader.block, first, size, int(reader.pos[first + size - 1]), tuple(names[first].tolist()))
            runs.at[int(starts[first])] = run
