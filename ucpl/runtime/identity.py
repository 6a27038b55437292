"""Digests that identify a run: plan, written files, sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import xxhash

from ucpl.extents import StoredTensor
from ucpl.planning.plan import Plan
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import TargetFile
from ucpl.tables.operations import Fill

__all__ = ["IDENTITY", "digest_of_files", "digest_of_plan", "digest_of_sources"]

IDENTITY = ("digest", "files", "content")  # digests that identify a run


def digest_of_plan(plan: Plan) -> str:
    """Everything of a plan that has a say in the target's bytes."""
    state = xxhash.xxh3_128()
    state.update(repr((plan.source_call, plan.target_call, plan.spec_digest, plan.structure_digest)).encode())
    state.update(plan.layout_text.encode())
    for side in (plan.sources, plan.targets):
        for tensor in side:
            state.update(_line(tensor).encode())
        state.update(b"\0\0")
    for m in plan.moves:
        head = (m.kind, m.state, m.source_value, m.target_value, m.lossy, m.over, len(m))
        state.update(repr(head).encode())
        for column in (m.source, m.target, m.shape, m.source_offset, m.source_stride, m.target_offset, m.target_stride):
            state.update(column.astype("<i8").tobytes())
    for node in plan.nodes:
        if isinstance(node, Fill) and node.value != 0:  # zeros need no Fill: elements that no move reaches are zero
            state.update(repr((node.label, node.state, node.value)).encode())
            for column in (node.boxes.offset, node.boxes.shape, node.boxes.stride):
                state.update(column.astype("<i8").tobytes())
    return state.hexdigest()


def _line(t: StoredTensor) -> str:
    return f"{t.file}\0{t.key!r}\0{t.dtype}\0{t.shape}\0{t.shares}\n"


def digest_of_files(files: Sequence[TargetFile], texts: Mapping[str, str]) -> str:
    """Names, sizes, and every byte that is known before data moves."""
    state = xxhash.xxh3_128()
    for file in files:
        state.update(f"{file.path}\0{file.plan.size}\0{sorted(file.plan.storages.items())}\n".encode())
        for position, data in file.plan.fixed:
            state.update(position.to_bytes(8, "little"))
            state.update(data)
    for name, text in sorted(texts.items()):
        state.update(f"{name}\0{text}\0".encode())
    return state.hexdigest()


def digest_of_sources(sources: SourceFiles, made: Set[str]) -> str:
    """Digest of size, time and inode of every file that is read.

    Files that are `made` for the target, anew each time, count by their size alone.
    """
    state = xxhash.xxh3_128()
    for file, identity in sorted(sources.identity.items()):
        if file in made:
            state.update(f"made\0{identity.size}\n".encode())
            continue
        state.update(f"{file}\0{identity.size}\0{identity.mtime_ns}\0{identity.inode}\0{identity.device}\n".encode())
    return state.hexdigest()
