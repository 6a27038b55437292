"""The genuine checkpoint.

Weights made and split by torch alone, as the framework would. Nothing of ucpl is asked.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, WIDTH, TOKENS, HEADS, HEAD, INNER, EXPERTS, DENSE = 4, 16, 50, 4, 4, 12, 8, 1
PP, EP, TP = 2, 4, 2

Tensors = dict[str, Tensor]


def whole() -> Tensors:
    """The model's tensors with distinct numbers, in bf16 where they fit.

    Norms are around one.
    """
    dice = torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {"embed": (TOKENS, WIDTH), "norm": (WIDTH,), "head": (TOKENS, WIDTH)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        shapes |= {f"{at}.{name}": (WIDTH,) for name in ("ln1", "ln2")}
        shapes |= {f"{at}.attn.{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "out", "mix")}
        if layer < DENSE:
            shapes |= mlp(f"{at}.mlp")
            continue
        shapes[f"{at}.moe.router"] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            shapes |= mlp(f"{at}.moe.{expert}")
    made = {f"{name}.weight": torch.randn(shape, generator=dice).bfloat16() for name, shape in shapes.items()}
    return {n: ((t.float() * 8).round() / 64 + 1).bfloat16() if ".ln" in n else t for n, t in made.items()}


def mlp(at: str) -> dict[str, tuple[int, ...]]:
    return {f"{at}.gate": (INNER, WIDTH), f"{at}.up": (INNER, WIDTH), f"{at}.down": (WIDTH, INNER)}


def save_whole(folder: Path) -> Path:
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in whole().items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def save_genuine(folder: Path) -> Path:
    folder.mkdir()
    for pp in range(PP):
        for ep in range(EP):
            for tp in range(TP):
                tensors = {n: t.contiguous() for n, t in of_rank(pp, ep, tp).items()}
                torch.save({"model": tensors}, folder / f"pp{pp}_ep{ep}_tp{tp}_of_{TP}.pt")
    return folder


def of_rank(pp: int, ep: int, tp: int) -> Tensors:
    all_of = whole()
    out: Tensors = {}
    if pp == 0:
        out["embed"] = padded(all_of["embed.weight"]).chunk(TP)[tp]
    if pp == PP - 1:
        out["norm"] = all_of["norm.weight"]
        out["head"] = padded(all_of["head.weight"]).chunk(TP)[tp]
    per_stage, per_rank = LAYERS // PP, EXPERTS // EP
    for local in range(per_stage):
        layer = pp * per_stage + local
        mine = {n.removeprefix(f"layers.{layer}."): t for n, t in all_of.items() if n.startswith(f"layers.{layer}.")}
        at = f"layers.{local}"
        out[f"{at}.ln1"] = mine["ln1.weight"] - 1
        out[f"{at}.ln2"] = mine["ln2.weight"]
        q, k, v = (heads(mine[f"attn.{n}.weight"])[tp] for n in ("q", "k", "v"))
        out[f"{at}.qkv"] = torch.cat([pairs(q), pairs(k), v.flatten(0, 1)])
        out[f"{at}.out"] = mine["attn.out.weight"].chunk(TP, dim=1)[tp]
        out[f"{at}.mix"] = mine["attn.mix.weight"]
        if layer < DENSE:
            out[f"{at}.fc1"], out[f"{at}.down"] = fused(mine, "mlp", tp)
            continue
        out[f"routers.{layer}"] = mine["moe.router.weight"].float()
        for expert in range(per_rank):
            name = f"experts.{layer}.{expert}"
            out[f"{name}.fc1"], out[f"{name}.down"] = fused(mine, f"moe.{ep * per_rank + expert}", tp)
    return out


def padded(table: Tensor) -> Tensor:
    rows = 16 * TP
    return torch.cat([table, table.new_zeros((-len(table)) % rows, WIDTH)])


def heads(weight: Tensor) -> tuple[Tensor, ...]:
    """Heads of each rank.

    (heads of a rank, elements of a head, width).
    """
    return weight.view(HEADS, HEAD, WIDTH).chunk(TP)


def pairs(weight: Tensor) -> Tensor:
    """A head's two halves, interleaved."""
    return weight.view(-1, 2, HEAD // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)


def fused(mine: Tensors, name: str, tp: int) -> tuple[Tensor, Tensor]:
    gate, up = (mine[f"{name}.{part}.weight"].chunk(TP)[tp] for part in ("gate", "up"))
    return torch.cat([gate, up]), mine[f"{name}.down.weight"].chunk(TP, dim=1)[tp]
