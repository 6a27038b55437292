"""Parts of fused tensors, and cuts that a job can run.

The source of a class gives the parts.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ucpl
from tests.formats.huggingface.folders import llama_config, llama_shapes, random_of, save
from ucpl.inference import hf
from ucpl.inference.hf import reading
from ucpl.inference.hf.records import Config, Version
from ucpl.inference.hf.splits import OutputSplit, split_of
from ucpl.inference.hf.varying import few_experts, numbers_of, singles

F = SimpleNamespace(linear=None)


class Modules:
    """Methods as classes of transformers write them; nothing calls them."""

    def __getattr__(self, name: str) -> Any: ...

    def chunked(self, x: Any) -> Any:
        value, gate = self.wi(x).chunk(2, dim=-1)
        both = self.pair(x)
        both = both.contiguous()
        halves = both.chunk(2, dim=-1)
        return self.act(halves[0]) * halves[1], value, gate

    def attention(self, x: Any) -> Any:
        a, b, c = self.qkv(x).view(1, -1, 3, self.heads, self.head_dim).unbind(2)
        each = self.by_head(x).view(1, -1, self.heads, 3 * self.head_dim)
        d, e, f = each.chunk(3, dim=-1)
        return a, b, c, d, e, f

    def turns(self, x: Any) -> Any:
        y = F.linear(x, self.strided[0])
        return y[..., ::2] * y[..., 1::2]

    def plain(self, x: Any) -> Any:
        y = self.up(x)
        y = self.down(y)
        return torch.split(self.uneven(x), [3, self.rest], dim=-1), y


@pytest.mark.parametrize(
    "attribute, found",
    [
        ("wi", OutputSplit("joined", 2, ("value", "gate"))), ("pair", OutputSplit("joined", 2, ("gate", "up"))),
        ("qkv", OutputSplit("joined", 3, ("q", "k", "v"))), ("by_head", OutputSplit("by_head", 3, ("d", "e", "f"))),
        ("strided", OutputSplit("strided", 2, ("gate", "up"))), ("up", None), ("down", None), ("uneven", None), ("none", None),
    ],
)  # fmt: skip
def test_the_source_of_a_class_shows_a_split(attribute: str, found: OutputSplit | None) -> None:
    assert split_of(Modules, attribute) == found


SHAPES = {"mlp.wi.weight": (44, 36), "mlp.wo.weight": (36, 22), "attn.fused.weight": (108, 36)}


def fused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, splits: dict[str, OutputSplit] | None) -> tuple[str, Any]:
    """The text of a folder with fused pairs, and the folder."""
    config = llama_config(model_type="odd")
    shapes = {name: s for name, s in llama_shapes(config).items() if "mlp" not in name and "k_proj" not in name}
    shapes = {name: s for name, s in shapes.items() if "v_proj" not in name and "q_proj" not in name}
    shapes |= {f"model.layers.{i}.{name}": s for i in range(4) for name, s in SHAPES.items()}
    shapes = {name.replace("self_attn", "attn"): s for name, s in shapes.items()}
    source = save(tmp_path / "s", random_of(shapes), config)
    if splits is not None:
        saved = tuple(hf.FoundTensor(n, s, "f32") for n, s in shapes.items())
        made = hf.Class((Version(saved, numbers_of(config)),), splits=splits)
        monkeypatch.setattr(reading, "class_of", lambda *_, **__: made)
    (tmp_path / "made.ucpl").write_text(hf.import_hf(source))
    return (tmp_path / "made.ucpl").read_text(), source


def test_a_fused_pair_without_evidence_is_not_cut_and_its_other_side_neither(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _ = fused(monkeypatch, tmp_path, {})
    lines = [line for line in text.splitlines() if "{l}" in line or "[l]" in line]
    assert not any("@" in line for line in lines), "no module of a layer is cut by half"
    assert "mlp.wi.weight: an axis is 2 * intermediate_size" in text and "write them" in text


def test_a_module_alone_is_not_cut(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of two sizes in one matrix: no multiple of the inputs."""
    monkeypatch.setitem(SHAPES, "attn.fused.weight", (96, 36))
    text, _ = fused(monkeypatch, tmp_path, {})
    lines = [line for line in text.splitlines() if "o_proj" in line and " as " in line]
    assert lines and not any("@" in line for line in lines), lines


def test_a_fused_pair_is_cut_inside_where_the_class_splits_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"model.layers.*.mlp.wi.weight": OutputSplit("joined", 2, ("gate", "up"))}
    text, source = fused(monkeypatch, tmp_path, splits)
    layout = f"{tmp_path / 'made.ucpl'}:hf()"
    ranks = layout.replace("hf()", "tensor_parallel(tp = 3)")
    ucpl.convert(source, tmp_path / "tp", ranks, layout=layout)
    before = load_file(source / "model.safetensors")
    for rank in range(3):
        found = load_file(tmp_path / "tp" / f"tp_0{rank}.safetensors")
        for i in range(4):
            gate, up = before[f"model.layers.{i}.mlp.wi.weight"].chunk(2)
            expected = torch.cat([gate.chunk(3)[rank], up.chunk(3)[rank]])
            assert torch.equal(found[f"model.layers.{i}.mlp.wi.weight"], expected)
            down = before[f"model.layers.{i}.mlp.wo.weight"].chunk(3, dim=1)[rank]
            assert torch.equal(found[f"model.layers.{i}.mlp.wo.weight"], down)
            assert found[f"model.layers.{i}.attn.o_proj.weight"].shape == (36, 36), "its qkv is unknown, so not cut"
    assert "(gate: intermediate_size@chunk(tp) + up: intermediate_size@chunk(tp)) hidden_size" in text


def test_numbers_that_keys_give_are_written_by_them_and_others_are_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a class, with one key changed at a time.

    Its numbers are products, sums, periods and lists.
    """
    own = {
        "width": 6,
        "copies": 2,
        "extra": 3,
        "image": 8,
        "patch": 2,
        "period": 2,
        "shift": 1,
        "num_layers": 7,
        "odd": 5,
    }

    def shapes(c: dict[str, int]) -> dict[str, tuple[int, ...]]:
        layers = range(c["num_layers"])
        found: dict[str, tuple[int, ...]] = {f"layers.{i}.norm": (c["width"],) for i in layers}
        found |= {f"layers.{i}.some": (c["width"],) for i in layers if i % c["period"] == c["shift"]}
        found |= {
            "shared": (c["copies"] * c["width"],),
            "router": (c["extra"] + c["width"],),
            "unknown": (c["odd"] ** 3,),
        }
        return found | {"positions": ((c["image"] // c["patch"]) ** 2 + 1,), "same": (11,)}

    def version(changed: str, **values: int) -> Version:
        numbers = {f"{k}_offset" if k == "shift" else k: v for k, v in (own | values).items()}
        tensors = tuple(hf.FoundTensor(n, s, "f32") for n, s in shapes(own | values).items())
        return Version(tensors, numbers, changed=changed)

    several = [version(f"{k}_offset" if k == "shift" else k, **{k: n}) for k, n in (
        ("width", 7), ("copies", 3), ("extra", 4), ("image", 16), ("patch", 4), ("period", 3), ("shift", 0), ("num_layers", 8),
        ("odd", 7),
    )]  # fmt: skip
    monkeypatch.setattr(reading, "class_of", lambda *_, **__: hf.Class((version(""), *several)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd"}))
    lines = [" ".join(line.split()) for line in hf.import_hf(tmp_path / "config.json").splitlines()]
    assert "some : l[config.shift_offset.. by config.period] width" in lines
    print("\n".join(lines))
    assert "shared : copies width" in lines or "shared : width copies" in lines
    assert "dim width_extra = config.width + config.extra" in lines
    assert "positions : image_by_patch_squared_1" in lines and "same : n11" in lines
    remarks = [line for line in lines if line.startswith("# ") and "follows" in line]
    assert remarks == [
        "# 125 (unknown) follows config.odd in a way that is unknown here: another config needs another number."
    ]


def test_each_number_of_a_config_is_changed_alone() -> None:
    config: Config = {
        "hidden_size": 8,
        "pad_token_id": 3,
        "deep": {"patch_size": 2},
        "conv_dim": [4, 5],
        "n_routed_experts": 64,
    }
    found = dict(singles(few_experts(config), {"more": 1}))
    assert set(found) == {"hidden_size", "deep.patch_size", "conv_dim", "n_routed_experts", "more"}
    assert found["hidden_size"][0]["hidden_size"] == 16 and found["deep.patch_size"][0]["deep"] == {"patch_size": 3}
    assert found["conv_dim"][0] == few_experts(config) | {"conv_dim": [5, 7]}
    assert few_experts(config)["n_routed_experts"] == 2, "many experts are many tensors"
