"""`.metadata` read by runs equals the same read one by one."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.counted import calls
from ucpl.errors import UcplError
from ucpl.files import pickle_runs
from ucpl.files.pickle_runs import Irregular, PickleRuns, Run, find_runs
from ucpl.files.pickles import load_pickle
from ucpl.formats.dcp import metadata
from ucpl.formats.dcp.places import ChunkColumns

SHAPES = {"a": (96,), "b": (96, 5000), "c": (96, 2, 70000), "d": (192, 1, 1, 2), "e": (1, 96), "n": ()}


def described(ranks: int, by_rank: bool, shapes: dict[str, tuple[int, ...]] = SHAPES) -> bytes:
    """Metadata of `ranks` ranks, with places by tensor or by rank.

    torch gathers them by rank, with texts of each.
    """
    known: dict[str, Any] = {"step": BytesStorageMetadata()}
    places: dict[Any, Any] = {}
    rows = []
    for name, shape in shapes.items():
        chunks = []
        for rank in range(ranks if shape else 1):
            dim = 1 if name == "e" else 0
            size = tuple(n // ranks if d == dim else n for d, n in enumerate(shape))
            offset = tuple(n * rank if d == dim else 0 for d, n in enumerate(size))
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            rows.append((rank, name, offset))
        known[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
    ends: dict[int, int] = {}
    files = [f"__{rank}_0.distcp" for rank in range(ranks)]
    for rank, name, offset in sorted(rows) if by_rank else rows:
        begin = ends.get(rank, 0)
        ends[rank] = begin + 70_000_000 * (1 + rank % 3)
        index = MetadataIndex(
            name.encode().decode() if by_rank else name, torch.Size(offset), rank if rank % 5 else None
        )
        places[index] = _StorageInfo(files[rank] if by_rank else f"__{rank}_0.distcp", begin, ends[rank] - begin)
    places[MetadataIndex("step")] = _StorageInfo(files[0], ends[0], 7)
    paths = {name: (name,) for name in known}
    behind: Any = "." * 5000  # the last records of a file are read singly
    return pickle.dumps(Metadata(known, planner_data=paths, storage_data=places, storage_meta=behind))


def read(root: Path, raw: bytes, patch: pytest.MonkeyPatch, singly: bool) -> Any:
    """The metadata, or the error."""
    (root / ".metadata").write_bytes(raw)
    with patch.context() as once:
        if singly:
            once.setattr(metadata, "find_runs", lambda data, forms: PickleRuns(data))
        try:
            made = metadata.read_metadata(root)
        except UcplError as error:
            return str(error)
    tensors = {name: (one.dtype, one.shape, tuple(one.chunks), one.empty) for name, one in made.tensors.items()}
    archives = {file: tuple(runs) for file, runs in made.archives.items()}
    return tensors, made.objects, made.paths, made.files, archives, made.runs_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for rank in range(48):
        (tmp_path / f"__{rank}_0.distcp").touch()
    return tmp_path


@pytest.mark.parametrize("by_rank", [False, True])
def test_runs_say_the_same(root: Path, by_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = described(48, by_rank)
    assert read(root, raw, monkeypatch, False) == read(root, raw, monkeypatch, True)
    kept = find_runs(raw, (metadata._CHUNK, metadata._PLACE))
    monkeypatch.setattr(metadata, "find_runs", lambda data, forms: kept)
    made = metadata.read_metadata(root)
    assert sum(isinstance(one.chunks, ChunkColumns) for one in made.tensors.values()) == len(SHAPES) - 1
    assert sum(run.size for run in kept.taken) > 0.8 * sum(len(one.chunks) for one in made.tensors.values()) * 2 - 80


def test_any_byte_may_differ(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed bytes lead to the same values, or to the same error."""
    raw, rng = described(48, True), random.Random(35)
    for _ in range(40):
        at, size = rng.randrange(len(raw)), rng.choice((0, 1, 1, 2, 40))
        put = rng.choice((rng.randbytes(1), b"0", b"2", b"e(", b"u(", b"", raw[at : at + 50]))
        wrong = raw[:at] + put + raw[at + size :]
        assert read(root, wrong, monkeypatch, False) == read(root, wrong, monkeypatch, True), (at, size, put)


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "taken off": lambda end: b"0" + end,
    "twice": lambda end: b"2" + end,
    "twice, both": lambda end: b"22" + end,
    "in a tuple": lambda end: b"\x85" + end,
    "a list": lambda end: b"l" + b"(" + end,
    "set": lambda end: b"b" + end,
    "called": lambda end: b")R" + end,
    "another object": lambda end: b")\x81" + end,
    "kept and got": lambda end: b"\x94j\xff\x01\x00\x00" + end,
    "the memo changed": lambda end: b"q\x05" + end,
    "a name changed": lambda end: b"\x8c\x01xq\x210" + end,
    "system": lambda end: b"cposix\nsystem\n\x8c\x04true\x85R" + end,
    "stop": lambda end: b"." + end,
}


def of(raw: bytes) -> list[Run]:
    """A run of chunks and one of places."""
    runs = sorted(find_runs(raw, (metadata._CHUNK, metadata._PLACE)).at.items())
    return [runs[0][1], runs[-1][1]]


@pytest.mark.parametrize("how", HOSTILE)
def test_what_is_done_with_a_run(root: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = described(48, False)
    for end in (run.end for run in of(raw)):
        wrong = raw[:end] + HOSTILE[how](raw[end : end + 1]) + raw[end + 1 :]
        assert read(root, wrong, monkeypatch, False) == read(root, wrong, monkeypatch, True)


def test_no_run_is_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk and the last place are removed again.

    Both are of one tensor, so that the others agree.
    """
    raw = described(48, False, {"a": (96,)})
    chunks, places = of(raw)
    wrong = raw[: chunks.end] + b"0" + raw[chunks.end : places.end] + b"00" + raw[places.end :]
    said = read(root, wrong, monkeypatch, True)
    assert len(said[0]["a"][2]) == 47
    assert read(root, wrong, monkeypatch, False) == said


@pytest.mark.parametrize("what", ["class", "attributes", "size"])
def test_what_a_run_refers_to(root: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records behind the first refer to other names than the first."""
    raw = described(48, False)
    run, _ = of(raw)
    made, offsets, size, sizes, _ = (bytes((0x68, n)) for n in run.names)
    if what == "class":
        wrong = raw.replace(made + b")\x81", size + b")\x81")
    elif what == "size":
        wrong = raw.replace(offsets + size, offsets + made)
    else:
        wrong = raw.replace(offsets + size, b"@@").replace(sizes + size, offsets + size).replace(b"@@", sizes + size)
    assert wrong != raw
    said = read(root, wrong, monkeypatch, True)
    assert isinstance(said, str)
    assert read(root, wrong, monkeypatch, False) == said


CALLS = 1.5  # at most, for one chunk more: those of its rank's file, and of names that are new in a block


def test_one_more_chunk_takes_few_calls(tmp_path: Path) -> None:
    """No call for a name, which torch writes out for each rank."""
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.{n}.mlp.experts.down_proj.weight": (192, 100 + n) for n in range(100)
    }
    counts = []
    for ranks in (96, 192):
        (root := tmp_path / str(ranks)).mkdir()
        (root / ".metadata").write_bytes(described(ranks, True, shapes))
        for rank in range(ranks):
            (root / f"__{rank}_0.distcp").touch()
        metadata.read_metadata(root)  # imports
        counts.append(calls(lambda root=root: metadata.read_metadata(root)))  # type: ignore[misc]
    assert counts[1] - counts[0] <= CALLS * 96 * len(shapes), counts


def test_two_names_of_one_hash(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Names are compared, too: equal hashes alone are no proof."""
    raw = described(48, True)
    right = read(root, raw, monkeypatch, True)
    monkeypatch.setattr(pickle_runs, "_ODD", pickle_runs._ODD * 0)
    with pytest.raises(Irregular):
        runs = find_runs(raw, (metadata._CHUNK, metadata._PLACE))
        load_pickle(raw, runs=runs)
        runs.texts([run for run in runs.taken if run.form is metadata._PLACE], ("fqn", "relative_path"))
    assert read(root, raw, monkeypatch, False) == right
