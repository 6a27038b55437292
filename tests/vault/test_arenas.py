"""The order of a rank's saved bytes in its arena."""

from __future__ import annotations

import pytest
import torch

from ucpl.vault.arenas import Arenas
from ucpl.vault.files import ToSave


@pytest.mark.parametrize("sizes", [(8, 1, 3), (1 << 20, 5, 1 << 20)])
def test_tensors_come_first_and_the_bytes_between_them_last(tmp_path, sizes):
    """A reader opens a checkpoint from few chunks.

    Large tensors start on chunk boundaries.
    """
    tensors = [torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate(sizes)]
    files, ats = [], []
    for name, some in (("a", tensors[:2]), ("b", tensors[2:])):
        at, fixed, held = 0, [], []
        for i, tensor in enumerate(some):
            fixed.append((at, f"{name}{i}".encode()))
            held.append((at + 2, str(i), tensor))
            at += 2 + len(tensor)
        files.append(ToSave(name, at, tuple(fixed), tuple(held)))
        ats.append(at)
    arena = tmp_path / "arena"
    written = Arenas().write(arena, files)
    assert arena.read_bytes() == b"".join(t.numpy().tobytes() for t in tensors) + b"a0a1b0"
    assert written.size == sum(ats) == arena.stat().st_size
    data = arena.read_bytes()
    for file, made in zip(files, written.files, strict=True):
        spans = sorted((s.begin, s.at, s.size) for s in made.segments)
        whole = b"".join(data[at : at + size] for _, at, size in spans)
        assert len(whole) == file.size and whole[:2] == f"{file.name}0".encode()
