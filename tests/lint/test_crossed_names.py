"""Words of names and keys that contradict each other."""

from __future__ import annotations

import pytest

from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.lint.crossed_names import crossed_names

TEXT = """ucpl 1
model m {
  dim l = 2, f = 4, h = 4
  mlp.gate : l f h
  mlp.up   : l f h
  attn.q   : l f h
  attn.k   : l f h
  attn.v   : l f h
  ln.in    : l h
  ln.post  : l h
}
layout x() of m {
  file weights = torch "a.pt"
  LINES
}
"""


def said(*lines: str) -> list[str]:
    library = load(("a.ucpl", TEXT.replace("LINES", "\n  ".join(lines))))
    return list(crossed_names(resolve(library, parse_call("x()"))))


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("mlp.gate[l] = f h", "mlp.up[l] = f h", ("mlp.gate_proj", "mlp.up_proj")),
        ("attn.k[l] = f h", "attn.v[l] = f h", ("self_attn.k_proj", "self_attn.v_proj")),
        ("ln.in[l] = h", "ln.post[l] = h", ("input_layernorm", "post_attention_layernorm")),
    ],
)
def test_keys_with_each_other_s_words(first: str, second: str, names: tuple[str, str]) -> None:
    one, two = (f'"{{l}}.{name}.weight"' for name in names)
    assert not said(f"{first} as {one}", f"{second} as {two}")
    (remark,) = said(f"{first} as {two}", f"{second} as {one}")
    assert "(line 14)" in remark and "(line 15)" in remark and "If they are swapped" in remark
    assert not said(f'{first} as "{{l}}.w1"', f'{second} as "{{l}}.w2"'), "no words, no evidence"


@pytest.mark.parametrize(
    ("right", "wrong", "key"),
    [
        ("mlp.gate: f + mlp.up: f", "mlp.up: f + mlp.gate: f", "gate_up_proj"),
        ("attn.q: f + attn.k: f + attn.v: f", "attn.q: f + attn.v: f + attn.k: f", "qkv"),
        ("attn.q: f + attn.k: f + attn.v: f", "attn.k: f + attn.q: f + attn.v: f", "query_key_value"),
    ],
)
def test_parts_in_another_order_than_their_key(right: str, wrong: str, key: str) -> None:
    assert not said(f'all[l] = ({right}) h as "{{l}}.{key}"')
    (remark,) = said(f'all[l] = ({wrong}) h as "{{l}}.{key}"')
    assert "(line 14) is another order than that of the key" in remark
    assert not said(f'all[l] = ({wrong}) h as "{{l}}.fc1"')
