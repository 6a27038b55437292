"""Possible orders of registration, if a folder's files do not record one.

The buckets of the distributed optimizer follow it. If each rank saves a tensor alone, it names all in order, and
`.metadata` has this order. If ranks share the work (`--ckpt-fully-parallel-save`, Megatron-LM's default), each names
its share, and the order is that of Megatron-Core's own modules: those with one kernel for a norm and the linear layer
behind it, or with two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

__all__ = ["by_modules", "is_own_norm", "orders_of", "registered"]

_NORM = r"(?:input_layernorm|self_attention\.linear_qkv\.layer_norm_(?:weight|bias))"
_OUT = r"self_attention\.linear_proj"
_CORE = r"self_attention\.core_attention"
_LAYER = (
    r"self_attention\.(?:linear_qkv|linear_q|linear_q_proj|linear_q_down_proj)",
    r"self_attention\.linear_q_up_proj\.layer_norm_(?:weight|bias)",
    r"self_attention\.linear_q_up_proj",
    r"self_attention\.(?:linear_kv|linear_kv_down_proj)",
    r"self_attention\.linear_kv_up_proj\.layer_norm_(?:weight|bias)",
    r"self_attention\.linear_kv_up_proj",
    r"self_attention\.q_layernorm",
    r"self_attention\.(?:k|kv)_layernorm",
    r"(?:pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm_(?:weight|bias))",
    r"mlp\.router",
    r"mlp\.experts",
    r"mlp\.shared_experts",
    r"mlp",
)
_AROUND = (r".*word_embeddings", r".*position_embeddings", r".*final_layernorm", r".*output_layer")
_APART = (*_AROUND, _NORM, _CORE, _OUT, *_LAYER)  # norms are modules of their own, and a layer's first one comes first
_FUSED = (*_AROUND, _CORE, _OUT, _NORM, *_LAYER)  # a norm is registered with the linear layer behind it
_AHEAD = re.compile(r"(?:.*\.)?mtp\.layers\.(?P<layer>\d{1,9})\.(?P<inner>.+)", re.DOTALL)  # predicts tokens ahead
_AHEAD_BLOCK = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(?P<inner>.+)", re.DOTALL)
_AHEAD_OWN = (r"enorm", r"hnorm", r"eh_proj", r"(?:transformer_layer|mtp_model_layer)", r"final_layernorm")
_INNER = re.compile(r"(?:.*\.)?layers\.(?:\d+\.)?(?P<inner>.+)", re.DOTALL)
_NUMBERED = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d{1,9})\..+", re.DOTALL)
_LAST = ("gate_weight", "linear_fc1", "linear_fc2")  # within an expert, or the mlp
_EXPERT = re.compile(r".*\.(?:local_)?experts\.(\d{1,9})\..*", re.DOTALL)


def orders_of(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Orders to try: those of Megatron-Core's modules, and the listed one.

    The listed one is first if other modules have tensors. If ranks shared the work, it is no order of registration.
    """
    own = [tuple(sorted(names, key=lambda name: _place(name, modules))) for modules in (_FUSED, _APART)]
    seen: list[tuple[str, ...]] = []
    for order in (*own, tuple(names)) if all(map(_is_of_modules, names)) else (tuple(names), *own):
        if order not in seen:
            seen.append(order)
            yield order


def is_own_norm(name: str) -> bool:
    """Test for a norm that is a separate module."""
    return ".input_layernorm." in name


def registered(names: Sequence[str], *, fused: bool) -> tuple[str, ...]:
    """Names in Megatron-Core's order of registration: embeddings, layers, head.

    fused: a norm and the linear layer behind it are one module, as in Transformer Engine.
    """
    modules = _FUSED if fused else _APART
    return tuple(sorted(names, key=lambda name: (*_block(name), _place(name, modules))))


def by_modules(names: Sequence[str]) -> tuple[str, ...]:
    """Names in any order, as `registered`.

    If a name is of no module of Megatron-Core's, the order is unchanged.
    """
    if not all(map(_is_known, names)):
        return tuple(names)
    return registered(names, fused=not any(map(is_own_norm, names)))


def _is_of_modules(name: str) -> bool:
    """As `_is_known`, also for tensors that stack layers."""
    match = _INNER.fullmatch(name)
    if match is None or _AHEAD.fullmatch(name) is not None:
        return _is_known(name)
    return any(re.match(rf"{kind}(?:\.|$)", match["inner"]) for kind in (_NORM, _CORE, _OUT, *_LAYER))


def _is_known(name: str) -> bool:
    if (ahead := _AHEAD.fullmatch(name)) is not None:
        block = _AHEAD_BLOCK.fullmatch(ahead["inner"])
        known = (_NORM, _CORE, _OUT, *_LAYER) if block is not None else _AHEAD_OWN
        inner = block["inner"] if block is not None else ahead["inner"]
        return any(re.match(rf"{kind}(?:\.|$)", inner) for kind in known)
    if _NUMBERED.fullmatch(name) is None:
        return any(re.match(rf"{kind}(?:\.|$)", name) for kind in _AROUND)
    match = _INNER.fullmatch(name)
    assert match is not None
    return any(re.match(rf"{kind}(?:\.|$)", match["inner"]) for kind in (_NORM, _CORE, _OUT, *_LAYER))


def _block(name: str) -> tuple[int, int]:
    if (ahead := _AHEAD.fullmatch(name)) is not None:
        return 3, int(ahead["layer"])
    match = _NUMBERED.fullmatch(name)
    if match is not None:
        return 1, int(match["layer"])
    return (0 if name.startswith("embedding.") else 4 if name.startswith("output_layer.") else 2), 0


def _place(name: str, modules: tuple[str, ...]) -> tuple[int, ...]:
    """The place of a name within its layer.

    Layers of multi-token prediction are behind the last norm, each separately.
    """
    ahead = _AHEAD.fullmatch(name)
    if ahead is None:
        is_before = any(re.match(rf"{kind}(?:\.|$)", name) for kind in _AROUND[:-1])
        return (0 if is_before and _INNER.fullmatch(name) is None else 2, 0, 0, *_within(name, modules))
    own = next(
        (i for i, kind in enumerate(_AHEAD_OWN) if re.match(rf"{kind}(?:\.|$)", ahead["inner"])), len(_AHEAD_OWN)
    )
    block = _AHEAD_BLOCK.fullmatch(ahead["inner"])
    within = _within(f"layers.{block['inner']}", modules) if block is not None else (0,)
    return (1, int(ahead["layer"]), own, *within)


def _within(name: str, modules: tuple[str, ...]) -> tuple[int, ...]:
    """The place of a name among a layer's modules.

    Names without a known module keep their order, behind all known ones.
    """
    match = _INNER.fullmatch(name)
    inner = match["inner"] if match is not None else name
    module = next((i for i, kind in enumerate(modules) if re.match(rf"{kind}(?:\.|$)", inner)), len(modules))
    expert = _EXPERT.fullmatch(name)
    part = next((i for i, kind in enumerate(_LAST) if kind in inner), -1)
    return (
        module,
        int(expert[1]) if expert is not None else 0,
        part,
        ".bias" in inner or "_bias" in inner,
        name[-2:] == "_v",
    )
