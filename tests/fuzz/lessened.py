"""Stored checkpoints with the least that still has each kind of structure.

The amount of read data grows with their parameters.

Of a dense model a norm, a scalar, a buffer and the tied head remain; of a pipeline a tensor or two a layer; all experts.
Ranks, files, states, groups and a caller's values stay. Of the stored ones, `z1_dp4` adds nothing but ranks, and
no file of `tp2_ep2_dp2_z1` and `tp2_pp2_dp1_z1` records the cuts of tensors: these three are only read completely.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import ucpl
from tests.fuzz.containers import FIXTURES

FEW = ("blocks.1.*", "blocks.0.attn.*", "blocks.0.mlp.*", "blocks.0.ln2.*", "wpe.weight", "ln_f.*", "mix")
MEGATRON = ("*.query_key_value.*", "*.dense.*", "*.post_norm.*", "*.dense_h_to_4h.*", "*.dense_4h_to_h.bias")
AUTO = ("*.self_attn.*", "*layernorm*", "lm_head.weight")
# Of each kind: the layout that it is written in again, and the dropped tensors.
KINDS = {
    "z0_dp2_bf16": ("zero0(dp=2)", FEW),
    "z1_dp2_bf16": ("zero1(dp=2)", FEW),
    "z1_dp2_bf16opt": ("zero1(dp=2)", FEW),
    "z1_dp2_elastic": ("zero1(dp=2, elastic=1)", FEW),
    "z1_dp2_sgdm": ("zero1(dp=2)", FEW),
    "z2_dp2_roundrobin": ("zero2(dp=2)", FEW),
    "z2_dp3_frozen": ("zero2(dp=3)", tuple(name for name in FEW if name != "wpe.weight")),
    "z3_dp2_subgroup": ("zero3(dp=2)", FEW),
    "tp2_dp2_z1_uneven": ("zero1(dp=2, tp=2)", ("blocks.1.*", "*ln2*", "*.attn.*", "wpe.weight", "mix")),
    "sp2_dp2_z1": ("zero1(dp=2)", (*MEGATRON, "layers.1.*")),
    "pp2_dp2_z1": ("zero1(dp=1, pp=2)", ("*.attn.*", "*.mlp.*", "*.ln2.*", "*.position*")),
    "pp2_dp2_z1_functions": ("zero1(dp=1, pp=2)", ("*.up.weight", "*.down.*", "*.norm.bias", "*.position*")),
    "tp2_pp2_dp2_z1_bf16": ("zero1(dp=1, tp=2, pp=2)", MEGATRON),
    "moe_ep2_dp2_z1": ("zero1(dp=2, ep=2)", ("blocks.0.*", "*.attn.*", "*.ln2.*", "wpe.weight", "ln_f.*", "mix")),
    "moe_ep2_dp4_z1": ("zero1(dp=2, ep=2)", ("first.*",)),
    "pp2_ep2_dp2_z1": ("zero1(dp=2, pp=2, ep=2)", ("*.self_attention.*", "*.post_norm.*")),
    "autoep_ep2_dp4_z1": ("zero1(dp=2, ep=2)", AUTO),
    "autoep_ep2_dp4_z3": ("zero3(dp=2, ep=2)", (*AUTO, "model.layers.0.*")),
}


def small(name: str, to: str, folder: Path, drop: tuple[str, ...] = FEW) -> Path:
    """A stored checkpoint without some of its parameters, in a layout."""
    made = folder / f"{name}-{to[:5]}-few"
    if not made.exists():
        for path, data in _files(name, to, drop).items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_bytes(data)
    if (made / "plain.pt").exists():
        return made / "plain.pt"
    return next((p for p in made.iterdir() if (p / "zero").is_dir()), made)


def every_kind(folder: Path, *names: str) -> list[Path]:
    """All of them, or those of these."""
    return [small(name, to, folder, drop) for name, (to, drop) in KINDS.items() if not names or name in names]


@cache
def _files(name: str, to: str, drop: tuple[str, ...]) -> dict[str, bytes]:
    """Small checkpoints by path.

    Several readers have the same ones, and to convert one takes as long as some fifty inputs.
    """
    with tempfile.TemporaryDirectory(prefix="ucpl-fuzz-") as folder:
        made = Path(folder) / "few"
        ucpl.convert(str(FIXTURES / "deepspeed" / name), str(made), to, workers=1, drop=drop)
        return {p.relative_to(made).as_posix(): p.read_bytes() for p in sorted(made.rglob("*")) if p.is_file()}
