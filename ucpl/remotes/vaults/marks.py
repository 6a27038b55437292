"""What every byte of a tensor comes to, by which one that is made once more is known to be the one that was trained.

On the CPU it is xxh3's digest. What lies on a GPU stays there: its words are weighed and summed by the GPU itself, each with an
odd number of its own, so that one word that is another always tells.
"""

from __future__ import annotations

import torch
import xxhash

from ucpl.live.tensors import flat_bytes, is_aligned, tensor_of

__all__ = ["mark_of", "of_sum", "weighed"]

TILE = 1 << 20  # words that are weighed at a time
_DIGEST, _SUM = "xxh3 ", "sum "
_STEPS = -7046029254386353131, -4658895280553007687  # as int64: 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def mark_of(data: memoryview, like: str = _DIGEST) -> str:
    """like: a mark, or what it begins with: of two kinds none is the other's."""
    if like.startswith(_SUM):
        return of_sum(weighed(tensor_of(data, torch.uint8, (len(data),))))
    return _DIGEST + xxhash.xxh3_64_hexdigest(data)


def of_sum(found: torch.Tensor) -> str:
    """Of what `weighed` gave, which has to have come from its device by then."""
    return f"{_SUM}{int(found) & (1 << 64) - 1:016x}"


def weighed(tensor: torch.Tensor) -> torch.Tensor:
    """A sum, as int64 without dimensions, on the tensor's device, that is there when the device has come to it.

    tensor: contiguous.
    """
    raw = flat_bytes(tensor)
    found = torch.zeros((), dtype=torch.int64, device=raw.device)
    for low in range(0, raw.numel(), 8 * TILE):
        tile = raw[low : low + 8 * TILE]
        if tile.numel() % 8 or not is_aligned(tile, 8):  # words lie at multiples of 8
            whole = torch.zeros(-(-tile.numel() // 8) * 8, dtype=torch.uint8, device=raw.device)
            whole[: tile.numel()] = tile
            tile = whole
        words = tile.view(torch.int64)
        first = low // 8 + 1
        weights = torch.arange(first, first + words.numel(), dtype=torch.int64, device=raw.device) * _STEPS[0]
        weights = (weights ^ (weights >> 30)) * _STEPS[1]
        found += ((weights ^ (weights >> 27) | 1) * words).sum()
    return found
