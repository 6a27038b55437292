"""The search for the state that is the master of 16-bit weights.

Files do not mark this state, and weights are computed from it. A name is not enough: of every parameter, a sample of
the state, rounded to nearest even, must equal the weight. If only the bits or only the name fits, the state is no
master until the call of the source names it, and a note reports this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from attrs import evolve

from ucpl.extents import DTYPES, Extent, NamedTensor, Seen
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.masters import FP32, SETTING, renamed
from ucpl.files.zips import open_file, read_exactly
from ucpl.records import frozen
from ucpl.tables import I64

__all__ = ["is_rounded", "with_masters"]

# Names of masters in optimizers that keep one with their moments.
_NAMES = ("master", "master_param", "master_params", "master_weight", "master_weights", "fp32_param", "fp32_params")
_NARROW = ("bf16", "f16")
_SAMPLE = 128  # elements at either end of a chunk
_SPAN = 1 << 20  # the largest range of bytes that a sample is read from

_Places = Mapping[tuple[str, ...], list[tuple[tuple[int, ...], Extent]]]


@frozen
class _Held:
    """Findings of a sample of a state."""

    elements: int = 0
    weights: int = 0
    difference: str = ""  # the first weight that is not the state, rounded
    is_varied: bool = False  # two weights differ: equal ones prove nothing


def with_masters(checkpoint: Checkpoint) -> Checkpoint:
    """Rename the master to `fp32`, or add a note on candidates."""
    trained = [t for t in checkpoint.state.tensors if t.states]
    narrow = [t for t in trained if t.dtype in _NARROW]
    if not narrow or any(FP32 in t.states for t in trained):
        return checkpoint
    settings = checkpoint.state.settings
    prefix, states = str(settings["prefix"].value), str(settings["states"].value)
    places: dict[tuple[str, ...], list[tuple[tuple[int, ...], Extent]]] = {}
    for (_, key), extent in checkpoint.extents.items():
        name, *at = key
        places.setdefault((str(name),), []).append((tuple(int(step) for step in at), extent))
    said: list[str] = []
    for state in sorted({s for t in narrow for s in t.states}, key=lambda s: (s not in _NAMES, s)):
        holders = [t for t in trained if state in t.states]
        entries = {t.name: ((prefix + t.name,), (f"{states}{t.name}.{state}",)) for t in holders}
        if any(t.dtype not in (*_NARROW, "f32") for t in holders) or any(
            e.dtype != "f32" for t in holders for _, e in places.get(entries[t.name][1], ())
        ):
            continue
        held = _held(checkpoint, holders, entries, places)
        is_all = {t.name for t in narrow} <= {t.name for t in holders} and len(holders) == len(trained)
        proof = f"{held.elements:,} elements of {held.weights:,} weights are it, rounded to nearest even"
        if not held.difference and held.is_varied and state in _NAMES and is_all:
            text = f"fp32 = state `{state}`: a name that masters have, and {proof}"
            made = renamed(checkpoint, state, text)
            return evolve(made, notes=(*made.notes, text))
        if held.difference and state in _NAMES:
            said.append(
                f"state `{state}` is f32 and the weights have 16 bits, but it is not their master: {held.difference}."
                f' Masters are made of the weights; if it is the master, say {SETTING} = "{state}" in the call of --from'
            )
        elif not held.difference and (held.is_varied or state in _NAMES):
            why = proof if held.is_varied else "all weights that were looked at are equal"
            why += "" if is_all else f", and {len(trained) - len(holders)} parameters have none"
            said.append(
                f"state `{state}` is f32 and the weights have 16 bits: it may be their master ({why}). Masters are made of the"
                f" weights, and this state is copied as a state; if it is the master, say {SETTING} ="
                f' "{state}" in the call of --from'
            )
    return (
        evolve(checkpoint, notes=(*checkpoint.notes, *said), remarks=(*checkpoint.remarks, *said))
        if said
        else checkpoint
    )


def _held(
    checkpoint: Checkpoint,
    holders: Iterable[NamedTensor],
    entries: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]],
    places: _Places,
) -> _Held:
    """Compare a sample of each chunk of weights with the state."""
    elements = weights = 0
    seen = Seen()
    for t in holders:
        weight, state = entries[t.name]
        others = dict(places.get(state, ()))
        looked = 0
        for at, extent in places.get(weight, ()):
            other = others.get(at)
            if other is None or other.shape != extent.shape or not extent.numel:
                continue
            sample = _sample(extent.shape)
            mine, wide = _read(checkpoint.root, extent, sample), _read(checkpoint.root, other, sample)
            if mine is None or wide is None:
                continue
            differ = _differing(mine, wide, extent.dtype)
            if len(differ):
                element = [int(o) + int(i) for o, i in zip(at, sample[differ[0]], strict=True)]
                return _Held(difference=f"`{t.name}`{element} is not it, rounded to nearest even")
            looked += len(mine)
            if t.dtype in _NARROW:
                seen.add(_numbers(mine, t.dtype))
        elements += looked
        weights += bool(looked)
        if not looked:
            return _Held(difference=f"no element of `{t.name}` can be held against it")
    return _Held(elements, weights, is_varied=seen.varies)


def _sample(shape: tuple[int, ...]) -> I64:
    """Indices of a tensor's first and last elements, one row each."""
    numel = int(np.prod(shape, dtype=np.int64))
    first = np.arange(min(_SAMPLE, numel), dtype=np.int64)
    rows = np.unique(np.concatenate([first, numel - 1 - first]))
    return np.stack(np.unravel_index(rows, shape), axis=1).astype(np.int64) if shape else np.zeros((1, 0), np.int64)


def is_rounded(root: Path, weight: Extent, master: Extent) -> bool:
    """Test a sample of a weight: the master, rounded to nearest even.

    Elements that are far apart are not read.
    """
    sample = _sample(weight.shape)
    mine, wide = _read(root, weight, sample), _read(root, master, sample)
    return mine is None or wide is None or not len(_differing(mine, wide, weight.dtype))


def _differing(weight: np.ndarray, master: np.ndarray, dtype: str) -> np.ndarray:
    """Positions of weights that are not their masters, rounded."""
    wanted = _rounded(master, dtype)
    return np.flatnonzero((weight != wanted) & ~(_is_nan(weight, dtype) & _is_nan(wanted, dtype)))


def _read(root: Path, extent: Extent, sample: I64) -> np.ndarray | None:
    """The bits of these elements, or None if they are far apart."""
    size = DTYPES[extent.dtype].itemsize
    places = extent.offset + sample @ np.array(extent.stride, dtype=np.int64).reshape(-1)
    out = np.zeros(len(places), dtype=f"<u{size}")
    fd = open_file(root / extent.file, extent.file)
    try:
        middle = (len(places) + 1) // 2
        for some in (slice(0, middle), slice(middle, None)):
            if not len(places[some]):
                continue
            low, high = int(places[some].min()), int(places[some].max())
            if (high + 1 - low) * size > _SPAN:
                return None
            raw = read_exactly(fd, extent.storage_start + low * size, (high + 1 - low) * size, extent.file)
            out[some] = np.frombuffer(raw, dtype=out.dtype)[places[some] - low]
    finally:
        os.close(fd)
    return out


def _numbers(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Bits of 16 as numbers."""
    return bits.view("<f2") if dtype == "f16" else (bits.astype("<u4") << 16).view("<f4")


def _is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Mark NaN bits: each device rounds these in its own way."""
    infinity = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000}[dtype]
    return (bits & ((1 << (8 * bits.itemsize - 1)) - 1)) > infinity


def _rounded(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Bits of f32 values, rounded to nearest even in another float type."""
    if dtype == "f16":
        with np.errstate(all="ignore"):
            return bits.view("<f4").astype("<f2").view("<u2")
    if dtype == "bf16":
        wide = bits.astype(np.uint64)
        wide[_is_nan(bits, "f32")] &= ~np.uint64(0xFFFF)  # else it would be carried into the sign
        wide[_is_nan(bits, "f32")] |= np.uint64(0x400000)
        return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")
    return bits
