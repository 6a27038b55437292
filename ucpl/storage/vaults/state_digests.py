"""Digests of a tensor's bytes, to check a replayed value.

On the CPU it is xxh3. A tensor on a GPU stays there: the GPU multiplies each word by its own odd weight and adds the
products, so one changed word always changes the sum.
"""

from __future__ import annotations

import torch
import xxhash

from ucpl.live.tensors import flat_bytes, is_aligned, tensor_of

__all__ = ["state_digest", "digest_of_sum", "weighted_sum"]

TILE = 1 << 20  # words that are weighed at a time
_DIGEST, _SUM = "xxh3 ", "sum "
_STEPS = -7046029254386353131, -4658895280553007687  # as int64: 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def state_digest(data: memoryview, like: str = _DIGEST) -> str:
    """The digest of bytes, of the same kind as `like`.

    like: a digest or its prefix. Digests of different kinds are never equal.
    """
    if like.startswith(_SUM):
        return digest_of_sum(weighted_sum(tensor_of(data, torch.uint8, (len(data),))))
    return _DIGEST + xxhash.xxh3_64_hexdigest(data)


def digest_of_sum(found: torch.Tensor) -> str:
    """The digest of a result of `weighted_sum` on the CPU."""
    return f"{_SUM}{int(found) & (1 << 64) - 1:016x}"


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The weighted sum of a contiguous tensor, on its device.

    It is an int64 without dimensions. It is available when the device has computed it.
    """
    raw = flat_bytes(tensor)
    found = torch.zeros((), dtype=torch.int64, device=raw.device)
    for low in range(0, raw.numel(), 8 * TILE):
        tile = raw[low : low + 8 * TILE]
        if tile.numel() % 8 or not is_aligned(tile, 8):  # words start at multiples of 8
            whole = torch.zeros(-(-tile.numel() // 8) * 8, dtype=torch.uint8, device=raw.device)
            whole[: tile.numel()] = tile
            tile = whole
        words = tile.view(torch.int64)
        first = low // 8 + 1
        weights = torch.arange(first, first + words.numel(), dtype=torch.int64, device=raw.device) * _STEPS[0]
        weights = (weights ^ (weights >> 30)) * _STEPS[1]
        found += ((weights ^ (weights >> 27) | 1) * words).sum()
    return found
