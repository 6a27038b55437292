"""The records of a vault: job, shard, parity and commit.

The texts are checksummed, so an intact one was written by us. But a vault may belong to anyone, so each value is
checked before its use; a wrong record counts as missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import PurePosixPath
from typing import overload

import xxhash
from attrs import field

from ucpl.errors import UcplError
from ucpl.records import frozen
from ucpl.storage.vaults.checksummed_text import JsonObject, json_text, seal, unseal
from ucpl.storage.vaults.protection import BLOCK, Protection, block_size, get_sets

__all__ = [
    "CHUNK",
    "FORM",
    "NAME",
    "REPLAYS_MAX",
    "WHOLE",
    "RunRecord",
    "Commit",
    "SavedFile",
    "Job",
    "Late",
    "SavedValue",
    "Parity",
    "Segment",
    "Shard",
    "text_digest",
    "slot_of",
]  # fmt: skip

FORM = 1
_REPLAYING = 2  # the version for vaults with gradients; older readers reject it
REPLAYS_MAX = 64
CHUNK = 1 << 20  # bytes that have a digest of their own
_DIGITS = 16  # of a digest of a chunk
_SIZE_MAX = 1 << 52
WHOLE = 2  # slots for all that a rank has
_RANKS_MAX = 1 << 20
_STEP_MAX = 255  # bytes of a name of a file
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,100}")  # of a job


class _RecordError(ValueError):
    """A text whose content is not that of its kind."""


def text_digest(data: bytes) -> str:
    """The digest of a checksummed text."""
    return xxhash.xxh3_128_hexdigest(data)


def _number(fields: Mapping[str, object], name: str, most: int = _SIZE_MAX) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise _RecordError(name)
    return value


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _RecordError(name)
    return value


def _list(fields: Mapping[str, object], name: str) -> list[object]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise _RecordError(name)
    return value


def _object(value: object) -> JsonObject:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _RecordError("an object")
    return value


def _numbers(value: object, count: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= _SIZE_MAX for n in value):
        raise _RecordError("numbers")
    if count is not None and len(value) != count:
        raise _RecordError("so many numbers")
    return tuple(value)


def _digests(fields: Mapping[str, object], size: int) -> tuple[int, ...]:
    text = _text(fields, "chunks")
    if len(text) != -(-size // CHUNK) * _DIGITS:
        raise _RecordError("chunks")
    return tuple(int(text[i : i + _DIGITS], 16) for i in range(0, len(text), _DIGITS))


def _digits(chunks: Sequence[int]) -> str:
    return "".join(f"{one:0{_DIGITS}x}" for one in chunks)


@frozen
class Job:
    """The identity of a vault: its domains, ranks and protection.

    Every domain has the same text.
    """

    name: str
    ident: str  # of this vault alone
    domains: tuple[tuple[int, ...], ...]  # ranks of each
    protection: Protection
    replays: int = 0  # maximum number of consecutive saves of gradients

    @property
    def slots(self) -> int:
        """Slots of a rank: two complete ones, and one per replayed step."""
        return WHOLE + self.replays

    @property
    def kept(self) -> int:
        """Commits that are kept: of all slots."""
        return self.slots

    def domain_of(self, rank: int) -> int | None:
        return next((d for d, ranks in enumerate(self.domains) if rank in ranks), None)

    @property
    def ranks(self) -> int:
        return sum(map(len, self.domains))

    def sealed(self) -> bytes:
        fields: JsonObject = {"form": FORM, "job": self.name, "ident": self.ident, "protect": str(self.protection)}
        if self.replays:
            fields |= {"form": _REPLAYING, "replays": self.replays}
        return seal({**fields, "domains": [list(ranks) for ranks in self.domains]})

    @classmethod
    def of(cls, data: bytes | None) -> Job | None:
        fields = unseal(data) if data is not None else None
        if fields is None:
            return None
        try:
            domains = tuple(_numbers(ranks) for ranks in _list(fields, "domains"))
            ranks = sorted(rank for some in domains for rank in some)
            if not ranks or ranks != list(range(len(ranks))) or len(ranks) > _RANKS_MAX:
                raise _RecordError("domains")
            replays = _number(fields, "replays", REPLAYS_MAX) if "replays" in fields else 0
            if fields.get("form") != (_REPLAYING if replays else FORM):
                raise _RecordError("form")
            protection, name = Protection.parse(_text(fields, "protect")), _text(fields, "job")
            if not NAME.fullmatch(name):
                raise _RecordError("job")
            get_sets(len(domains), protection)
            return cls(name, _text(fields, "ident"), domains, protection, replays)
        except (ValueError, UcplError):
            return None


@frozen
class Segment:
    """Bytes of a file in an arena.

    Bytes [begin, begin + size) of the file are at byte `at` of the arena.
    """

    begin: int
    size: int
    at: int


@frozen
class Late:
    """Bytes of a file that depend on the CRCs of its storages.

    The CRCs are known after the save.
    begin: the position in the file;
    data: with zeros for CRCs;
    holes: (storage, position in data).
    """

    begin: int
    data: bytes
    holes: tuple[tuple[str, int], ...]


@frozen
class SavedValue:
    """A complete value that a rank saved under a name.

    It is a tensor, or a serialized value (without a storage and a dtype).
    """

    name: str  # the framework's name; for a tensor with the position of its first element: "model.up@0,128"
    storage: str  # in `File.crcs`
    at: int  # in the file
    size: int
    dtype: str  # torch's word
    shape: tuple[int, ...]

    def to_json(self) -> list[object]:
        return [self.name, self.storage, self.at, self.size, self.dtype, list(self.shape)]

    @classmethod
    def of(cls, value: object, file: int) -> SavedValue:
        if not isinstance(value, list) or len(value) != 6 or not all(isinstance(value[i], str) for i in (0, 1, 4)):
            raise _RecordError("named")
        at, size = _numbers(value[2:4], 2)
        if at + size > file:
            raise _RecordError("named")
        return cls(value[0], value[1], at, size, value[4], _numbers(value[5]))


@frozen
class SavedFile:
    """The part of one file that a rank saved.

    `crcs`: of the storages in it.
    `late`: on the rank that saves the beginning of the file.
    named: its values, in vaults that keep gradients.
    """

    name: str
    size: int  # of the complete file
    segments: tuple[Segment, ...]
    crcs: Mapping[str, int]
    late: tuple[Late, ...] = ()
    named: tuple[SavedValue, ...] = ()

    def to_json(self) -> JsonObject:
        data: dict[bytes, int] = {}  # most files have equal ends, and each end is stored once
        late = [[one.begin, data.setdefault(one.data, len(data)), list(map(list, one.holes))] for one in self.late]
        segments = [[s.begin, s.size, s.at] for s in self.segments]
        fields: JsonObject = {
            "name": self.name,
            "size": self.size,
            "segments": segments,
            "crcs": dict(self.crcs),
            "late": late,
        }
        fields["data"] = [one.hex() for one in data]
        return {**fields, "named": [one.to_json() for one in self.named]} if self.named else fields

    @classmethod
    def of(cls, value: object, arena: int) -> SavedFile:
        fields = _object(value)
        name, size = _text(fields, "name"), _number(fields, "size")
        steps = PurePosixPath(name).parts
        if not steps or name.startswith("/") or "\0" in name or any(s in ("", ".", "..") for s in name.split("/")):
            raise _RecordError("name")
        if max(len(step.encode()) for step in steps) > _STEP_MAX:  # a ValueError, too, of half a character
            raise _RecordError("name")
        segments = tuple(Segment(*_numbers(one, 3)) for one in _list(fields, "segments"))
        if any(s.begin + s.size > size or s.at + s.size > arena for s in segments):
            raise _RecordError("segments")
        crcs = _object(fields.get("crcs"))
        if not all(type(crc) is int and 0 <= crc < 1 << 32 for crc in crcs.values()):
            raise _RecordError("crcs")
        data = list(map(_bytes, _list(fields, "data"))) if "data" in fields else []
        late = tuple(_late(one, size, data) for one in _list(fields, "late"))
        named = tuple(SavedValue.of(one, size) for one in _list(fields, "named")) if "named" in fields else ()
        return cls(name, size, segments, {k: v for k, v in crcs.items() if isinstance(v, int)}, late, named)


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        raise _RecordError("data")
    return bytes.fromhex(value)


def _late(value: object, size: int, every: Sequence[bytes]) -> Late:
    if not isinstance(value, list) or len(value) != 3 or type(value[0]) is not int:
        raise _RecordError("late")
    if isinstance(value[1], str):  # older versions stored each separately
        data = _bytes(value[1])
    elif type(value[1]) is int and 0 <= value[1] < len(every):
        data = every[value[1]]
    else:
        raise _RecordError("late")
    holes = value[2]
    if not 0 <= value[0] <= size - len(data) or not isinstance(holes, list):
        raise _RecordError("late")
    found = []
    for hole in holes:
        if not isinstance(hole, list) or len(hole) != 2 or not isinstance(hole[0], str):
            raise _RecordError("late")
        (at,) = _numbers(hole[1:], 1)
        if at + 4 > len(data):
            raise _RecordError("late")
        found.append((hole[0], at))
    return Late(value[0], data, tuple(found))


class SavedFiles(Sequence[SavedFile]):
    """The files of a rank, parsed from their text on demand.

    The text grows with the number of tensors, and saves and votes do not need the content. Raises: ValueError, when the
    content is read and is no list of files.
    """

    def __init__(self, text: str, arena: int) -> None:
        self.text, self._arena = text, arena  # bytes that the rank saved
        self._made: tuple[SavedFile, ...] | None = None

    def _all(self) -> tuple[SavedFile, ...]:
        if self._made is None:
            try:
                fields = json.loads(self.text)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, list):
                raise _RecordError("files")
            self._made = tuple(SavedFile.of(one, self._arena) for one in fields)
        return self._made

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, at: int) -> SavedFile: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[SavedFile]: ...

    def __getitem__(self, at: int | slice) -> SavedFile | Sequence[SavedFile]:
        return self._all()[at]

    def __iter__(self) -> Iterator[SavedFile]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)


def _rests(fields: Mapping[str, object]) -> tuple[int, int, int]:
    """(slot, depth, base) of a text. Raises: ValueError."""
    slot = _number(fields, "slot", WHOLE + REPLAYS_MAX - 1)
    if "depth" not in fields:
        if slot >= WHOLE:
            raise _RecordError("slot")
        return slot, 0, slot
    depth, base = _number(fields, "depth", REPLAYS_MAX), _number(fields, "base", WHOLE - 1)
    if not depth or slot != slot_of(depth, base):
        raise _RecordError("depth")
    return slot, depth, base


def slot_of(depth: int, base: int) -> int:
    """The slot of a generation `depth` gradient steps after its base.

    The base is complete, and is in slot `base`.
    """
    return WHOLE + depth - 1 if depth else base


@frozen
class Shard:
    """One rank's save of a generation.

    depth: 0 for a complete save; else the number of gradient steps after the generation in slot `base`.
    replay: the step's record.
    """

    ident: str  # of the vault
    run: str  # of the job's processes that saved it: none other's is mixed with it
    generation: int
    step: int
    rank: int
    slot: int
    size: int  # bytes of the arena
    chunks: tuple[int, ...]
    files: Sequence[SavedFile]  # parsed on demand: ValueError, if the text has none
    state: JsonObject  # small JSON of the caller's
    depth: int = 0
    base: int = 0
    replay: JsonObject = field(factory=dict)

    def sealed(self) -> bytes:
        fields: JsonObject = {
            name: getattr(self, name) for name in ("ident", "run", "generation", "step", "rank", "slot", "size")
        }
        files = self.files
        text = files.text if isinstance(files, SavedFiles) else json_text([file.to_json() for file in files])
        fields |= {"chunks": _digits(self.chunks), "files": text, "state": self.state}
        if self.depth:
            fields |= {"depth": self.depth, "base": self.base, "replay": self.replay}
        return seal(fields)

    @classmethod
    def of(cls, data: bytes | None) -> Shard | None:
        fields = unseal(data) if data is not None else None
        if fields is None:
            return None
        try:
            size = _number(fields, "size")
            within = fields.get("files")  # older versions have them in this text
            files = SavedFiles(json_text(within) if isinstance(within, list) else _text(fields, "files"), size)
            slot, depth, base = _rests(fields)
            return cls(
                _text(fields, "ident"), _text(fields, "run"), _number(fields, "generation"), _number(fields, "step"),
                _number(fields, "rank", _RANKS_MAX), slot, size, _digests(fields, size), files,
                _object(fields.get("state")), depth, base, _object(fields.get("replay")) if depth else {},
            )  # fmt: skip
        except ValueError:
            return None


@frozen
class RunRecord:
    """The first generation of a run, as one rank determined it.

    The rank writes it before it saves, for ranks that start later.
    """

    ident: str
    run: str
    first: int

    def sealed(self) -> bytes:
        return seal({"ident": self.ident, "run": self.run, "first": self.first})

    @classmethod
    def of(cls, data: bytes | None) -> RunRecord | None:
        fields = unseal(data) if data is not None else None
        try:
            return (
                cls(_text(fields, "ident"), _text(fields, "run"), _number(fields, "first"))
                if fields is not None
                else None
            )
        except ValueError:
            return None


@frozen
class Parity:
    """The redundancy that a domain stores for its set.

    It is of one generation, and is the domain's vote for it.
    """

    ident: str
    run: str
    generation: int
    domain: int
    slot: int
    block: int  # bytes
    size: int  # blocks times their bytes
    chunks: tuple[int, ...]
    shards: Mapping[str, str]  # rank -> the mark of its shard's text, of all ranks
    depth: int = 0  # as a `Shard` has it
    base: int = 0

    def sealed(self) -> bytes:
        names = ("ident", "run", "generation", "domain", "slot", "block", "size")
        fields: JsonObject = {name: getattr(self, name) for name in names}
        if self.depth:
            fields |= {"depth": self.depth, "base": self.base}
        return seal({**fields, "chunks": _digits(self.chunks), "shards": dict(self.shards)})

    @classmethod
    def of(cls, data: bytes | None) -> Parity | None:
        fields = unseal(data) if data is not None else None
        if fields is None:
            return None
        try:
            size = _number(fields, "size")
            shards = _object(fields.get("shards"))
            slot, depth, base = _rests(fields)
            return cls(
                _text(fields, "ident"), _text(fields, "run"), _number(fields, "generation"),
                _number(fields, "domain", _RANKS_MAX), slot, _number(fields, "block"), size, _digests(fields, size),
                {rank: str(mark) for rank, mark in shards.items()}, depth, base,
            )  # fmt: skip
        except ValueError:
            return None


@frozen(eq=False)
class Commit:
    """A committed generation: all shards and all parity.

    Every domain has the same text.
    """

    generation: int
    step: int
    shards: tuple[Shard, ...]  # by rank
    parity: tuple[Parity, ...]  # by domain
    at: int = 0  # milliseconds since 1970, when it was committed; 0: older versions did not say

    @property
    def depth(self) -> int:
        """Gradient steps since the complete generation; 0: it is complete."""
        return self.shards[0].depth

    def needs(self, generation: int) -> bool:
        """True if it is replayed from that generation."""
        return self.generation - self.depth <= generation <= self.generation

    def sealed(self) -> bytes:
        texts = [[one.sealed().decode() for one in some] for some in (self.shards, self.parity)]
        fields: JsonObject = {"generation": self.generation, "step": self.step, "shards": texts[0], "parity": texts[1]}
        return seal({**fields, "at": self.at} if self.at else fields)

    @classmethod
    def of(cls, data: bytes | None, job: Job) -> Commit | None:
        """The commit record of a text.

        None if it does not fit the job.

        Raises nothing.
        """
        fields = unseal(data) if data is not None else None
        if fields is None:
            return None
        try:
            shards = [Shard.of(str(one).encode()) for one in _list(fields, "shards")]
            parity = [Parity.of(str(one).encode()) for one in _list(fields, "parity")]
            found = cls(
                _number(fields, "generation"), _number(fields, "step"),
                tuple(s for s in shards if s is not None), tuple(p for p in parity if p is not None),
                _number(fields, "at") if "at" in fields else 0,
            )  # fmt: skip
        except ValueError:
            return None
        return found if found._fits(job) else None

    def _fits(self, job: Job) -> bool:
        some: list[Shard | Parity] = [*self.shards, *self.parity]
        return (
            [s.rank for s in self.shards] == list(range(job.ranks))
            and [p.domain for p in self.parity] == list(range(len(job.domains)))
            and all(one.ident == job.ident and one.generation == self.generation for one in some)
            and len({one.run for one in some}) == 1
            and {one.depth for one in some} <= {self.depth}
            and self.depth <= min(job.replays, self.generation)
            and self._is_protected(job)
        )

    def _is_protected(self, job: Job) -> bool:
        """True if the redundancy of each domain has the right size."""
        sizes = [sum(-(-self.shards[rank].size // BLOCK) * BLOCK for rank in ranks) for ranks in job.domains]
        for among in get_sets(len(job.domains), job.protection):
            data, held = job.protection.blocks(len(among))
            block = block_size([sizes[d] for d in among], data)
            if any((self.parity[d].block, self.parity[d].size) != (block, held * block) for d in among):
                return False
        return True

    def read(self) -> Iterator[tuple[int, SavedFile]]:
        """The file parts of each rank.

        Raises: ValueError, if a text is no list of files.
        """
        for shard in self.shards:
            try:
                files = tuple(shard.files)
            except ValueError:
                raise ValueError(f"the shard of rank {shard.rank}") from None
            yield from ((shard.rank, file) for file in files)

    def files(self) -> Mapping[str, Sequence[tuple[int, SavedFile]]]:
        """Every file by name: its parts with their ranks, in order.

        The parts have no gap. Raises: ValueError.
        """
        return self._files

    @cached_property
    def _files(self) -> dict[str, list[tuple[int, SavedFile]]]:
        """Cached, because readers call it more than once."""
        found: dict[str, list[tuple[int, SavedFile]]] = {}
        for rank, file in self.read():
            found.setdefault(file.name, []).append((rank, file))
        for name, parts in found.items():
            spans = sorted((s.begin, s.begin + s.size) for _, file in parts for s in file.segments)
            spans += [(late.begin, late.begin + len(late.data)) for _, file in parts for late in file.late]
            spans.sort()
            size = parts[0][1].size
            whole = spans and spans[0][0] == 0 and spans[-1][1] == size if size else not spans
            if not whole or any(a[1] != b[0] for a, b in pairwise(spans)):
                raise ValueError(name)
        return found
