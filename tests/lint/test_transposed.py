"""Dims in another order than in tensors of the same dims."""

from __future__ import annotations

import pytest

from ucpl.conversion.checking import check_text
from ucpl.conversion.requests import Given
from ucpl.texts import Json

MODEL = """ucpl 2
model m {
  dim l = config.layers, h = config.hidden, f = config.inner, v = config.vocab, n = config.heads, d = config.width
  embed, head    : v h
  attn.q, attn.k : l n d h
  attn.out       : l h n d
  gate, up       : l f h
  upb            : l f
  down           : l h f
  downb          : l h
}
layout x() of m {
  file weights = torch "a.pt"
"""
LINES = {
    "embed": 'embed = v h as "embed.weight"',
    "head": 'head = v h as "head.weight"',
    "q": 'attn.q[l] = (n d) h as "{l}.q.weight"',
    "k": 'attn.k[l] = (n d) h as "{l}.k.weight"',
    "out": 'attn.out[l] = h (n d) as "{l}.out.weight"',
    "gate": 'gate[l] = f h as "{l}.gate.weight"',
    "up": 'up[l] = f h as "{l}.up.weight"',
    "upb": 'upb[l] = f as "{l}.up.bias"',
    "down": 'down[l] = h f as "{l}.down.weight"',
    "downb": 'downb[l] = h as "{l}.down.bias"',
}
CONV1D = {name: LINES[name].replace("(n d) h", "h (n d)") for name in ("q", "k")} | {
    "out": LINES["out"].replace("h (n d)", "(n d) h"),
    "gate": LINES["gate"].replace("f h", "h f"),
    "up": LINES["up"].replace("f h", "h f"),
    "down": LINES["down"].replace("h f", "f h"),
}
CONFIG: dict[str, Json] = dict.fromkeys(("layers", "hidden", "inner", "vocab", "heads", "width"), 4)


def remarks(lines: dict[str, str], model: str = MODEL) -> list[str]:
    text = "\n  ".join([f"{model} ", *lines.values()]) + "\n}\n"
    found = [check_text("x.ucpl", text, Given(config=config), lambda path: None) for config in (CONFIG, None)]
    assert [one.findings for one in found] == [(), ()]
    first, second = ([str(one) for one in each.noted if one.rule == "swapped-dims"] for each in found)
    assert first == second, "the config decides nothing"
    return first


@pytest.mark.parametrize("lines", [LINES, LINES | CONV1D], ids=["linear", "conv1d"])
def test_one_order_is_no_remark(lines: dict[str, str]) -> None:
    assert remarks(lines) == []


@pytest.mark.parametrize("lines", [LINES, LINES | CONV1D], ids=["linear", "conv1d"])
@pytest.mark.parametrize("name", ["head", "q", "out", "up", "down"])
def test_a_tensor_in_the_other_order_is_named(lines: dict[str, str], name: str) -> None:
    other = LINES if lines[name] == CONV1D.get(name) else CONV1D | {"head": LINES["head"].replace("v h", "h v")}
    found = remarks(lines | {name: other[name]})
    assert found and all("no check of shapes finds it" in one for one in found)
    assert any(f"`{lines[name].split(' ')[0].split('[')[0]}`" in one for one in found)


def test_dims_that_the_model_swaps_are_named() -> None:
    assert "`down`" in remarks(LINES, MODEL.replace("down           : l h f", "down           : l f h"))[0]


def test_dims_that_model_and_layout_swap_are_seen_at_the_bias() -> None:
    model = MODEL.replace("down           : l h f", "down           : l f h")
    lines = LINES | {"down": CONV1D["down"]}
    assert remarks(lines, model) == [], "one bias each way is no evidence"
    model = model.replace("  upb            : l f", "  upb, gateb : l f")
    (remark,) = remarks(lines | {"gateb": 'gateb[l] = f as "{l}.gate.bias"'}, model)
    assert "the bias of `down`" in remark and "`gate`, `up`" in remark


def test_dims_in_another_order_in_a_product_are_named() -> None:
    (remark,) = remarks(LINES | {"out": LINES["out"].replace("(n d)", "(d n)")})
    assert "`attn.out`" in remark and "write `n d`" in remark


def test_a_tensor_of_other_dims_is_compared_with_all() -> None:
    lines = {name: line for name, line in LINES.items() if name != "head"}
    model = MODEL.replace("embed, head ", "embed ")
    assert remarks(lines, model) == []
    (remark,) = remarks(lines | {"embed": 'embed = h v as "embed.weight"'}, model)
    assert "`embed`" in remark


def test_dims_without_their_parentheses_are_named() -> None:
    """Such a line is not transposed: it has another number of axes."""
    (remark,) = remarks(LINES | {"out": LINES["out"].replace("(n d)", "n d")})
    assert (
        "`attn.out` (line" in remark and "has 3 stored axes, and `attn.q`, `attn.k` of the same dims have 2" in remark
    )
    assert "Dims of one axis are in parentheses: `(n d) h`" in remark and "transposed" not in remark
