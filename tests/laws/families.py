"""Random models of checkpoints: names with numbers, sizes without names."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st

from ucpl.language import nodes

__all__ = ["CALLS", "any_models"]

Kind = Literal["parameter", "buffer", "frozen"]

CALLS = (
    "safetensors()", "safetensors_shards(fsdp = 2)", "dcp(fsdp = 3)", "dcp(fsdp = 2, masters = 1)", "plain()", "universal()",
    "torch_file()", "zero0(dp = 2)", "zero0(dp = 2, bf16 = 1)", "zero0(dp = 1, bf16 = 1, fused = 1)", "zero1(dp = 3)",
    "zero1(dp = 2, round_robin = 1)", "zero1(dp = 2, bf16 = 1, bf16_optimizer = 1)", "zero1(dp = 4, alignment = 4)",
    "zero2(dp = 2)", "zero2(dp = 3, elastic = 1)", "zero3(dp = 3)", "zero3(dp = 2, sub_group_size = 10)",
)  # fmt: skip
_SHAPES = ((4, 3), (3,), (2, 2, 2), (7,), (5, 1), ())
_PARTS = ("a.w", "a.b", "n", "e.0.w", "e.1.w", "e.2.w", "x1y")


@st.composite
def any_models(draw: st.DrawFn) -> nodes.Model:
    shapes = draw(st.sampled_from([_SHAPES[:n] for n in (1, 2, 4, 5, 5, 6)]))
    layers = draw(st.lists(st.lists(st.sampled_from(_PARTS), unique=True, min_size=1), min_size=1, max_size=4))
    names = [f"layers.{n}.{part}" for n, parts in enumerate(layers) for part in parts] + ["embed", "head"]
    if draw(st.booleans()):
        names = list(draw(st.permutations(names)))
    kinds: st.SearchStrategy[Kind] = st.sampled_from((*("parameter",) * 6, "buffer", "frozen"))
    items: list[nodes.ModelItem] = []
    trained: list[str] = []
    for name in names:
        dims = tuple(nodes.Dimension(None, n) for n in draw(st.sampled_from(shapes)))
        kind = draw(kinds)
        trained += [name] if kind == "parameter" else []
        items.append(nodes.Tensor(name, dims, draw(st.sampled_from(["f32", "f32", "bf16"])), kind))
    if draw(st.booleans()):
        items.append(nodes.Alias("tied", names[-1]))
    if draw(st.booleans()) and trained:
        members = trained
        if draw(st.booleans()):
            members = list(draw(st.permutations(trained)))
        cut = draw(st.integers(0, len(members)))
        groups = {"decay": members[:cut], "rest": members[cut:]}
        items += [nodes.Group(name, members=tuple(of)) for name, of in groups.items() if of]
    items.append(nodes.State(("exp_avg", "exp_avg_sq"), "f32", False, None))
    if draw(st.booleans()):
        items.append(nodes.State(("fp32",), "f32", False, None))
    return nodes.Model("m", tuple(items))
