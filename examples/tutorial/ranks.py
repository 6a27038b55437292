"""The tutorial's folder as files of four ranks."""

import os

import torch
from safetensors.torch import load_file

folder = load_file("folder/model.safetensors")
TP = PP = 2
os.makedirs("genuine")


def cut(tensor, tp, dim=0):
    return tensor.chunk(TP, dim)[tp].clone()


for pp in range(PP):
    for tp in range(TP):
        part = {}
        for n in range(2):
            layer = f"model.layers.{2 * pp + n}."
            names = ("input", "post_attention", "post_self_attn", "post_mlp")
            part |= {f"layers.{n}.ln{i + 1}": folder[f"{layer}{name}_layernorm.weight"] for i, name in enumerate(names)}
            for kind, key in (("weight", "qkv"), ("bias", "qkv_bias")):
                q, k, v = (folder[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv")
                groups = [torch.cat(x) for x in zip(q.chunk(4), k.chunk(4), v.chunk(4), strict=True)]  # group by group
                part[f"layers.{n}.{key}"] = cut(torch.cat(groups), tp)
            part[f"layers.{n}.out"] = cut(folder[f"{layer}self_attn.o_proj.weight"], tp, 1)
            gate, up = folder[f"{layer}mlp.gate_up_proj.weight"].chunk(2)
            part[f"layers.{n}.gate_up"] = torch.cat([cut(gate, tp), cut(up, tp)])
            part[f"layers.{n}.down"] = cut(folder[f"{layer}mlp.down_proj.weight"], tp, 1)
        name, tensor = ("embed", "model.embed_tokens.weight") if pp == 0 else ("head", "lm_head.weight")
        part[name] = cut(torch.nn.functional.pad(folder[tensor], (0, 0, 0, 1)), tp)  # 51 rows and one of padding
        if pp == PP - 1:
            part["norm"] = folder["model.norm.weight"]
        torch.save(part, f"genuine/stage_{pp}_rank_{tp}.pt")
