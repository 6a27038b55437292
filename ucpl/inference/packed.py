"""Comments of `infer` on packed weights that are integers in files."""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.files.checkpoint import Checkpoint
from ucpl.files.model_texts import config_of
from ucpl.language.words import is_dotted, quote

__all__ = ["packed_notes"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = 16  # bytes of a block of 32 elements
_WORDS = {"gptq": ("qweight", "qzeros", "g_idx"), "awq": ("qweight", "qzeros")}


def packed_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Lines of remarks, without their sign; none of most checkpoints."""
    return (*_of_mxfp4(checkpoint), *_of_integers(checkpoint))


def _of_mxfp4(checkpoint: Checkpoint) -> Iterator[str]:
    """Pairs of u8 tensors, [..., g, 16] and [..., g], as numbers.

    The lines are of the first pair.
    """
    tensors = {t.name: t for t in checkpoint.state.tensors}
    pairs = []
    for name, blocks in tensors.items():
        scales = tensors.get(name.removesuffix(_BLOCKS) + _SCALES) if name.endswith(_BLOCKS) else None
        if scales is not None and blocks.dtype == scales.dtype == "u8" and blocks.shape == (*scales.shape, _HALF):
            pairs.append((name.removesuffix(_BLOCKS), scales.shape))
    if not pairs:
        return
    path, shape = pairs[0]
    count = "One pair" if len(pairs) == 1 else f"{len(pairs)} pairs"
    dims = [f"d{i}" for i in range(len(shape) - 1)]
    sizes = ", ".join(f"{d} = {n}" for d, n in zip(dims, shape, strict=False))
    rows = " ".join(dims)
    name, scale = _path(path), _path(path + _SCALES)
    yield f"{count} of *{_BLOCKS} and *{_SCALES}: mxfp4, two elements in a byte and a scale for 32. Here they are bytes, which"
    yield 'move as they stand. Lines that cut them or make numbers of them ("Two elements in a byte"), of the first:'
    yield f"  dim {sizes}{', ' * bool(dims)}h = {32 * shape[-1]}, g = {shape[-1]}, k = 32"
    yield "  index h = (g k)"
    yield f"  {name} : {rows} h  dtype f4_e2m1fn"
    yield f"  {scale} : {rows} g  dtype f8_e8m0fnu is scale({name}, 32)"
    yield "and in the layout:"
    yield f"  {name} = {rows} g k  dtype u8 as {quote(path + _BLOCKS)}"
    yield f"  {scale} = {rows} g  dtype u8 as {quote(path + _SCALES)}"


def _of_integers(checkpoint: Checkpoint) -> Iterator[str]:
    """GPTQ and AWQ: integers of a few bits in 32-bit words."""
    config = config_of(checkpoint)
    said = config.get("quantization_config") if config is not None else None
    method = said.get("quant_method") if isinstance(said, dict) else None
    words = _WORDS.get(method, ()) if isinstance(method, str) else ()
    found = [t.name for t in checkpoint.state.tensors if t.name.rpartition(".")[2] in words]
    if not found or not isinstance(said, dict):
        return
    bits = said.get("bits") if isinstance(said.get("bits"), int) else "a few"
    ends = ", ".join(f"*.{w}" for w in words)
    yield f"{len(found)} tensors of {method}, {ends}: integers of {bits} bits, several in a word of 32, for which the language"
    yield "has no type. They are words here: they move as they stand, or cut along dims that are not packed; no numbers"
    yield "are made of them."


def _path(name: str) -> str:
    return name if is_dotted(name) else quote(name)
