"""The files that a rank saves.

A file has known bytes, tensors to copy, and places for their CRCs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

import torch
from attrs import evolve

from ucpl.files.torch_files import TorchFilePlan, layout_archive, layout_torch_file
from ucpl.records import frozen
from ucpl.storage.vaults.records import Late, SavedValue
from ucpl.vault.value_trees import ValueTree

__all__ = ["ToSave", "archives", "cut", "text_file", "torch_file"]


@frozen(eq=False)
class ToSave:
    """One file or a part of it: the bytes [low, high)."""

    name: str
    size: int  # of the complete file
    fixed: tuple[tuple[int, bytes], ...]  # (byte position, bytes)
    tensors: tuple[tuple[int, str, torch.Tensor], ...]  # (byte position, storage, its elements)
    late: tuple[Late, ...] = ()
    named: tuple[SavedValue, ...] = ()  # the values in it, if they are requested


def text_file(name: str, data: bytes) -> ToSave:
    return ToSave(name, len(data), ((0, data),) if data else (), ())


def torch_file(name: str, held: ValueTree) -> ToSave:
    """A file of torch.save. Raises: UcplError E440, E441."""
    file = PurePosixPath(name).name
    plan = layout_torch_file(held.tree, file.rpartition(".")[0] or file)
    return _laid(name, plan.size, [(0, "", plan, held)])


def archives(name: str, some: Iterable[ValueTree | bytes]) -> tuple[ToSave, tuple[tuple[int, int], ...]]:
    """Archives of torch.save and known bytes, end to end.

    And (offset, size) of each.

    Raises: UcplError E440, E441.
    """
    at, spans = 0, []
    parts: list[tuple[int, str, TorchFilePlan, ValueTree]] = []
    known: list[tuple[int, bytes]] = []
    for number, one in enumerate(some):
        if isinstance(one, bytes):
            size = len(one)
            known.append((at, one))
        else:
            plan = layout_archive(one.tree)
            size = plan.size
            parts.append((at, f"{number}:", plan, one))
        spans.append((at, size))
        at += size
    made = _laid(name, at, parts)
    return evolve(made, fixed=tuple(sorted([*made.fixed, *known]))), tuple(spans)


def _laid(name: str, size: int, parts: Sequence[tuple[int, str, TorchFilePlan, ValueTree]]) -> ToSave:
    fixed: list[tuple[int, bytes]] = []
    tensors: list[tuple[int, str, torch.Tensor]] = []
    late: list[Late] = []
    for start, before, plan, held in parts:
        fixed += [(start + at, data) for at, data in plan.fixed]
        tensors += [
            (start + at, before + key, held.tensors[key]) for key, (at, bytes_) in plan.storages.items() if bytes_
        ]
        for at, data, holes in plan.holes():
            late.append(Late(start + at, data, tuple((before + key, place) for key, place in holes)))
    return ToSave(name, size, tuple(fixed), tuple(tensors), tuple(late))


def cut(file: ToSave, part: int, of: int) -> ToSave:
    """One rank's part of a file that several ranks have.

    A part has complete tensors. The parts have about equal sizes.
    """
    if of == 1:
        return file
    whole = sum(t.numel() * t.element_size() for _, _, t in file.tensors)
    mine, before = [], 0
    for one in file.tensors:
        size = one[2].numel() * one[2].element_size()
        if min(of - 1, (2 * before + size) * of // (2 * whole)) == part:
            mine.append(one)
        before += size
    return ToSave(file.name, file.size, file.fixed if part == 0 else (), tuple(mine), file.late if part == 0 else ())
