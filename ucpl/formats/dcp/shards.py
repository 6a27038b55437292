"""Shards of torch's HuggingFaceStorageWriter: safetensors files of each rank's chunks, weights only.

The header of each file has the begins of its chunks. No file has the shape of a tensor: it is taken from its chunks. So
a missing shard of the last rank cannot be detected; a missing shard between others can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, NamedTensor, Setting, TrainState, can_train
from ucpl.extents.account import NotRead
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import ahead
from ucpl.files.model_texts import TEXTS, read_texts
from ucpl.files.safetensors_files import SafetensorsFile, read_safetensors_file
from ucpl.files.texts import names_like
from ucpl.files.values import Value
from ucpl.formats.dcp.chunks import address, demand_whole
from ucpl.formats.dcp.mesh import mesh_settings
from ucpl.formats.dcp.metadata import ByteRange, ChunkedTensor, StoredChunk
from ucpl.formats.leaving import EMPTY
from ucpl.texts import json_object

__all__ = ["FILE", "opened_shards", "shards_in"]

FILE = "model.safetensors"  # the file's name in layouts, for any number of shards
INFO = "DCP_SHARDING_INFO"
_SHARD = re.compile(r"shard-(?P<rank>[0-9]{5,})-.+\.safetensors")

Shape = tuple[int, ...]


def shards_in(path: Path) -> list[str]:
    """Files of a folder that are called as such shards are."""
    return [name for name in names_like(path, ".safetensors") if _SHARD.fullmatch(name)]


def opened_shards(root: Path) -> Checkpoint:
    """Read all headers.

    Raises: UcplError E452, E455, E521, and errors of reading files (E400, E430-E434).
    """
    names = shards_in(root)
    _check_ranks(root, names)
    chunks: dict[str, list[StoredChunk]] = {}
    dtypes: dict[str, str] = {}
    extents: dict[tuple[str, Key], Extent] = {}
    empty: dict[str, object] = {}
    ahead(root / names[0], [partial(read_safetensors_file, root, name) for name in names])
    headers: list[NotRead] = []
    for part in (read_safetensors_file(root, name) for name in names):
        headers += part.unread_metadata(INFO, "DCP_VERSION")
        for name, begin, extent in _chunks(part):
            if dtypes.setdefault(name, extent.dtype) != extent.dtype:
                fail(
                    "E522",
                    f"`{name}` is {dtypes[name]} in one shard, and {extent.dtype} in {part.file}",
                    Label(str(part.path), extent.dtype, where=name),
                )
            chunks.setdefault(name, []).append(
                StoredChunk(begin, extent.shape, ByteRange(part.file, extent.storage_start, None))
            )
            if extent.numel:
                extents[FILE, address(name, begin)] = evolve(extent, key=address(name, begin))
    tensors: list[NamedTensor] = []
    for name, found in chunks.items():
        shape = tuple(max(o + n for o, n in zip(*pair, strict=True)) for pair in _columns(found))
        if 0 in shape:
            empty[name] = {"dtype": dtypes[name], "shape": list(shape), "buffer": True}
            continue
        held = tuple(c for c in found if c.numel)
        demand_whole(name, ChunkedTensor(dtypes[name], shape, held), root / held[0].place.file)
        tensors.append(NamedTensor(name, shape, dtypes[name], "parameter" if can_train(dtypes[name]) else "buffer"))
    settings = {"prefix": Setting("", f"headers of {names[0]}"), "states": Setting("", f"headers of {names[0]}")}
    settings |= {"masters": Setting(0, f"headers of {names[0]}"), "file": Setting(FILE, "the shards")}
    settings |= mesh_settings({t.name: t.shape for t in tensors}, extents.values(), "chunks in the shards")
    texts, not_read = read_texts(root)  # of a Hugging Face folder, where somebody put them next to the shards
    blobs: dict[str, object] = {EMPTY: empty} if empty else {}
    if texts:
        blobs[TEXTS] = texts
    return Checkpoint(
        top=root,
        root=root,
        tag=None,
        format="dcp",
        version="",
        extents=extents,
        carried_extents={},
        state=TrainState("dcp", tensors=tuple(tensors), settings=settings, blobs=blobs),
        files=(*names, *texts),
        remarks=("no file has the sizes of tensors: a missing shard of the last rank is not noticed",),
        not_read=(*headers, *not_read),
    )


def _columns(found: list[StoredChunk]) -> Iterator[tuple[Shape, Shape]]:
    """Of each dim: begins and widths of all chunks."""
    begins, widths = zip(*((c.offset, c.shape) for c in found), strict=True)
    return zip(zip(*begins, strict=True), zip(*widths, strict=True), strict=True)


def _chunks(part: SafetensorsFile) -> Iterator[tuple[str, Shape, Extent]]:
    """Name, begin and place of each chunk of a shard.

    Raises: UcplError E455.
    """
    text = (part.metadata or {}).get(INFO)
    said = json_object(text) if text is not None else None
    info = Value(part.path, part.file, ("__metadata__", INFO), said)
    for name, extent in part.tensors.items():
        begin = info.at(name, "saved_offsets").shape()
        if len(begin) != len(extent.shape):
            info.at(name, "saved_offsets").wrong(f"where a chunk of {len(extent.shape)} dims begins")
        yield name, begin, extent


def _check_ranks(root: Path, names: list[str]) -> None:
    """Shards are numbered from 1. Raises: UcplError E452."""
    there = {int(match["rank"]) for name in names if (match := _SHARD.fullmatch(name))}
    missing = next((n for n in range(1, max(there)) if n not in there), None)
    if missing is not None:
        fail(
            "E452",
            f"the shard of rank {missing} is missing: there are {len(there)} up to {max(there)}",
            Label(str(root)),
        )
