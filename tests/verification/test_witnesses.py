"""Every planted mistake has a named witness, or the verb reports none.

The class is a Llama of thirty lines of torch here; tests/interop/test_hf.py has transformers' own.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ucpl
from tests.formats.huggingface.folders import llama_config, llama_shapes, save, tensors_of
from ucpl import api
from ucpl.errors import UcplError
from ucpl.files.model_texts import TEXTS
from ucpl.inference.hf import import_hf
from ucpl.inference.infer import stated_of
from ucpl.language import nodes
from ucpl.layout import load, resolve
from ucpl.placement import locate
from ucpl.resources import spec_text
from ucpl.verification.checkpoint import WITNESS
from ucpl.verification.evidence import masters, stated_orders, transformers_class
from ucpl.verification.masters import weights_against_masters

ROOT = Path(__file__).parents[2]
CONFIG = llama_config(
    num_attention_heads=9, num_key_value_heads=9, num_hidden_layers=2
)  # q, k and v of one shape, out square


def forward(folder: Path) -> np.ndarray:
    """LlamaForCausalLM in fp64: rotated halves, and a gate through SiLU."""
    c = json.loads((folder / "config.json").read_text())
    w = {name: t.double() for name, t in tensors_of(folder).items()}
    n, g, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    ids = torch.arange(7) * 5 % c["vocab_size"]
    x = w["model.embed_tokens.weight"][ids]
    angle = torch.arange(7).double()[:, None] / 10000 ** (torch.arange(0, d, 2).double() / d)
    cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        y = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = ((y @ w[f"{p}self_attn.{a}_proj.weight"].T).view(7, -1, d) for a in "qkv")
        q, k, v = turned(q), turned(k).repeat_interleave(n // g, 1), v.repeat_interleave(n // g, 1)
        score = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        score = score.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", score, v).reshape(7, -1) @ w[p + "self_attn.o_proj.weight"].T
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        y = F.silu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)
        x = x + y @ w[p + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return (norm(x, w["model.norm.weight"]) @ head.T).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape) / 4 for name, shape in llama_shapes(CONFIG).items()}
    return save(tmp_path_factory.mktemp("hf") / "model", tensors, CONFIG)


def mistaken(tmp_path, *changes: tuple[str, str]) -> Path:
    """A copy of the shipped spec, with a mistake in its base."""
    text = spec_text("decoder.ucpl")
    head, mark, body = text.partition("layout decoder_hf(")  # the model stays: a place in it is not a place in files
    body = re.sub(r"(?<=\S) +", " ", body.replace("@", "\0"))
    for old, new in changes:
        old, new = (x if x == "@" else x.replace("@", "\0") for x in (old, new))
        assert old in body, f"the mistake is not there to be made: {old}"
        body = body.replace(old, new)
    (tmp_path / "decoder.ucpl").write_text(head + mark + body.replace("\0", "@"))
    (tmp_path / "mine.ucpl").write_text(spec_text("llama.ucpl"))
    return tmp_path / "mine.ucpl"


def swap(a: str, b: str) -> list[tuple[str, str]]:
    return [(a, "@"), (b, a), ("@", b)]


def apart(first: str, second: str) -> str:
    """Two lines, each for one of two tensors."""
    return f'{first}.weight"\n  {second}.weight"'


GATE_UP = 'gate, up = f h as "{mlp}{name}_proj.weight"'
K_V = 'attn.k, attn.v = (g d) h as "{layer}self_{name}_proj.weight"'
V = 'attn.v = (g d) h as "{attn}v_proj'
MISTAKES = {
    "gate and up": [(GATE_UP, apart('gate = f h as "{mlp}up_proj', 'up = f h as "{mlp}gate_proj'))],
    "query and key": [
        ("{attn}q_proj.weight", "{attn}k_proj.weight"),
        (K_V, apart('attn.k = (g d) h as "{attn}q_proj', V)),
    ],
    "key and value": [(K_V, apart('attn.k = (g d) h as "{attn}v_proj', 'attn.v = (g d) h as "{attn}k_proj'))],
    "rotary pairs for halves": [
        ("attn.q = (g r d) h", "attn.q = (g r k two) h"),
        (K_V, apart('attn.k = (g k two) h as "{attn}k_proj', V)),
    ],
    "a square matrix on its side": [("attn.out = h (g r d) as", "attn.out = (g r d) h as")],
    "norms in the other's place": swap("{layer}input_layernorm", "{layer}post_attention_layernorm"),
}


def of_masters(side, checkpoint):
    return masters(side.placement, *weights_against_masters(checkpoint, side.placement, 1 << 26, 2))


def evidence_of(side, checkpoint, **more):
    """All evidence for a spec, as `verify` collects it."""
    orders = stated_orders(side.placement, checkpoint)
    return [orders, of_masters(side, checkpoint), transformers_class(side, checkpoint, **more)]


def of_name(found, name):
    return next(w for w in found if w.name == name)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_that_every_shape_allows_are_caught_by_the_class(mistake, folder, tmp_path, monkeypatch):
    """By the verb, which names its witness."""
    monkeypatch.setattr("ucpl.verification.evidence._forward", lambda: forward)
    spec = mistaken(tmp_path, *MISTAKES[mistake])
    layout = f"{spec}:hf()"
    ucpl.convert(folder, tmp_path / "same", layout, layout=layout)  # fits: shapes are equal
    assert bool(ucpl.compare(folder, tmp_path / "same")), "a round trip through one wrong layout is the identity"
    found = ucpl.verify(folder, layout=layout)
    assert [d.code for d in found.findings] == ["E707"]
    assert found.findings[0].message.startswith("transformers contradicts the spec: the logits differ, by up to")


def test_the_right_spec_agrees(folder, tmp_path):
    layout = f"{mistaken(tmp_path)}:hf()"
    checkpoint = api.open_checkpoint(folder, layout)
    side, _ = api.source_side(checkpoint, layout)
    found = evidence_of(side, checkpoint, forward=forward)
    assert [(w.name, w.verdict) for w in found] == [
        ("stated order", "absent"), ("masters", "absent"), ("transformers", "agrees")
    ]  # fmt: skip


def test_logits_that_are_near_each_other_contradict(folder, tmp_path):
    """The right spec keeps all numbers, so logits are equal."""
    layout = f"{mistaken(tmp_path)}:hf()"
    checkpoint = api.open_checkpoint(folder, layout)
    side, _ = api.source_side(checkpoint, layout)

    def nearly(path: Path) -> np.ndarray:
        logits = forward(path)
        if path != folder:
            logits[0, 0] *= 1 + 1e-12
        return logits

    found = transformers_class(side, checkpoint, forward=nearly)
    assert found.verdict == "contradicts" and "differ, by up to" in found.detail
    found = transformers_class(side, checkpoint, forward=lambda path: forward(path)[: 7 if path == folder else 6])
    assert found.verdict == "contradicts" and "nan" in found.detail


def changed(kind: str, logits: np.ndarray) -> np.ndarray:
    out = logits.copy()
    match kind:
        case "NaN":
            out[:] = np.nan
        case "infinite":
            out[:] = -np.inf
        case "one value":
            out[:] = 2.5
        case "one value and NaN":
            out[:] = np.nan
            out[0] = 2.5
        case "none":
            out = out[:0]
    return out


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("NaN", "all 77 logits are NaN or infinite"),
        ("infinite", "all 77 logits are NaN or infinite"),
        ("one value", "all 77 logits are 2.5"),
        ("one value and NaN", "all 77 logits are 2.5 or not finite"),
        ("none", "there are no logits"),
    ],
)
def test_logits_that_no_mistake_would_change_are_no_evidence(kind, why, folder, tmp_path, monkeypatch):
    """Gate and up are swapped, and logits are equal.

    That is no evidence.
    """
    monkeypatch.setattr("ucpl.verification.evidence._forward", lambda: lambda path: changed(kind, forward(path)))
    found = ucpl.verify(folder, layout=f"{mistaken(tmp_path, *MISTAKES['gate and up'])}:hf()")
    said = f"not witnessed by transformers: {why}"
    assert said.replace("77", str(forward(folder).size)) in found.notes
    assert WITNESS in found.notes and not any(n.startswith("witnessed by transformers") for n in found.notes)


def test_some_logits_that_are_no_numbers_are_counted(folder, tmp_path):
    layout = f"{mistaken(tmp_path)}:hf()"
    checkpoint = api.open_checkpoint(folder, layout)
    side, _ = api.source_side(checkpoint, layout)

    def partly(path: Path) -> np.ndarray:
        logits = forward(path)
        logits[:2] = np.nan
        return logits

    found = transformers_class(side, checkpoint, forward=partly)
    size = forward(folder).size
    assert found.verdict == "agrees" and found.unseen == (f"{2 * size // 7} of {size} logits are NaN or infinite",)


def test_the_reason_without_a_witness_is_reported(folder, tmp_path, monkeypatch):
    layout = f"{mistaken(tmp_path)}:hf()"
    checkpoint = api.open_checkpoint(folder, layout)
    side, _ = api.source_side(checkpoint, layout)

    def broken(path: Path) -> np.ndarray:
        raise KeyError("no such class")

    found = transformers_class(side, checkpoint, forward=broken)
    assert found.verdict == "absent" and "does not run: KeyError" in found.detail
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = transformers_class(side, checkpoint)
    assert found.verdict == "absent" and found.detail == "transformers is not installed"
    shipped = "llama.ucpl:hf()"
    checkpoint = api.open_checkpoint(folder, shipped)
    side, _ = api.source_side(checkpoint, shipped)
    found = transformers_class(side, checkpoint, forward=forward)
    assert found.verdict == "absent" and "itself the shipped one" in found.detail
    strange = tmp_path / "strange.ucpl"
    strange.write_text(
        "ucpl 1\nmodel m {\n  dtype f32\n  dim a = 2, b = 2\n  w : a b\n}\nlayout x() of m {\n  framework huggingface()\n"
        '  file weights = safetensors "model.safetensors"\n  w = a b as "w"\n}\n'
    )
    save(tmp_path / "s", {"w": torch.ones(2, 2)}, CONFIG)
    checkpoint = api.open_checkpoint(tmp_path / "s", f"{strange}:x()")
    side, _ = api.source_side(checkpoint, f"{strange}:x()")
    found = transformers_class(side, checkpoint, forward=forward)
    assert found.verdict == "absent" and "no shipped spec has model `m`" in found.detail


def test_a_model_of_a_shipped_one_s_name_and_other_dims_is_not_taken_for_it(folder, tmp_path):
    for name, file in (("llama.ucpl", "mine.ucpl"), ("decoder.ucpl", "decoder.ucpl")):
        (tmp_path / file).write_text(re.sub(r"\bf\b", "inner", spec_text(name)))
    layout = f"{tmp_path / 'mine.ucpl'}:hf()"
    checkpoint = api.open_checkpoint(folder, layout)
    side, _ = api.source_side(checkpoint, layout)
    found = transformers_class(side, checkpoint, forward=forward)
    assert found.verdict == "absent" and "no shipped spec has model `llama`" in found.detail


FUSED = {
    "k before q": ("q: r d + k: d + v: d", "k: d + q: r d + v: d"),
    "all q, then all k, then all v": ("(g (q: r d + k: d + v: d))@tp h", "(q: g r d + k: g d + v: g d)@tp h"),
    "up before gate": ("(gate: f@tp + up: f@tp) h", "(up: f@tp + gate: f@tp) h"),
    "packed, then cut": ("(gate: f@tp + up: f@tp) h", "(gate: f + up: f)@tp h"),
    "stages in the other order": ("index l = l@pp", "index l = l@pp"),  # the files, not the spec
}


@pytest.mark.parametrize("mistake", [*FUSED, "none"])
def test_a_megatron_folder_is_held_against_a_reference_in_another_dialect(mistake, folder, tmp_path):
    ucpl.convert(folder, tmp_path / "m", "llama.ucpl:megatron(tp=2, pp=2)", layout="llama.ucpl:hf()")
    if mistake == "stages in the other order":
        for tp in range(2):
            one, two = (
                tmp_path / "m" / "release" / f"mp_rank_{tp:02}_{pp:03}" / "model_optim_rng.pt" for pp in range(2)
            )
            a, b = (torch.load(f, weights_only=True)["model"] for f in (one, two))
            layers = [n for n in a if n.startswith("decoder.layers.")]
            torch.save({"model": {**a, **{n: b[n] for n in layers}}}, one)
            torch.save({"model": {**b, **{n: a[n] for n in layers}}}, two)
    spec = mistaken(tmp_path, *([FUSED[mistake]] if mistake in FUSED else []))
    layout = f"{spec}:megatron(tp=2, pp=2)"
    checkpoint = api.open_checkpoint(tmp_path / "m", layout)
    side, _ = api.source_side(checkpoint, layout)
    assert transformers_class(side, checkpoint, forward=forward).verdict == "absent"
    found = transformers_class(side, checkpoint, reference=folder, forward=forward)
    assert found.verdict == ("agrees" if mistake == "none" else "contradicts"), found


def test_a_reference_whose_weights_only_the_class_reads(folder, tmp_path):
    """The class itself reads the weights, in files of other names."""
    ucpl.convert(folder, tmp_path / "m", "llama.ucpl:megatron(tp=2, pp=2)", layout="llama.ucpl:hf()")
    layout = f"{mistaken(tmp_path)}:megatron(tp=2, pp=2)"
    checkpoint = api.open_checkpoint(tmp_path / "m", layout)
    side, _ = api.source_side(checkpoint, layout)
    del checkpoint.state.blobs[TEXTS]
    (tmp_path / "bin").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "bin")
    as_bin = {tmp_path / "bin": folder}
    found = transformers_class(
        side, checkpoint, reference=tmp_path / "bin", forward=lambda path: forward(as_bin.get(path, path))
    )
    assert found.verdict == "agrees", found
    with pytest.raises(UcplError, match=r"E400: .*gone cannot be read"):
        transformers_class(side, checkpoint, reference=tmp_path / "gone", forward=forward)


class Side:
    def __init__(self, library, placement):
        self.library, self.placement = library, placement


def zero(change, checkpoint=ROOT / "examples" / "checkpoint"):
    """The spec that `infer` writes of the example, changed; not fitted."""
    opened = api.open_checkpoint(checkpoint)
    text = change(api.infer(checkpoint).text())
    library = load(("mine.ucpl", text))
    layout = resolve(library, nodes.Call("stored"))
    return Side(library, locate(layout, stated=stated_of(opened))), opened


def swapped(text):
    """Two tensors of one size, swapped in the optimizer's group.

    Shapes, sums and names do not change.
    """
    opened = api.open_checkpoint(ROOT / "examples" / "checkpoint")
    sizes = {t.name: t.shape for t in opened.state.tensors}
    for group in opened.state.groups:
        for i, a in enumerate(group.members):
            for b in group.members[i + 1 :]:
                if sizes[a] == sizes[b]:
                    lines = text.splitlines()
                    at = next(n for n, x in enumerate(lines) if x.strip().startswith("layout "))
                    return "\n".join([*lines[:at], *(_exchange(x, a, b) for x in lines[at:])])
    raise AssertionError("the example has no two tensors of one size")


def _exchange(line, a, b):
    if not line.strip().startswith("group "):
        return line
    return re.sub(rf"(?<![\w.])({re.escape(a)}|{re.escape(b)})(?![\w.])", lambda m: b if m[1] == a else a, line)


def test_registration_order_is_caught_by_stated_orders_and_by_masters():
    side, opened = zero(lambda text: text)
    assert {w.name: w.verdict for w in evidence_of(side, opened)} == {
        "stated order": "agrees", "masters": "agrees", "transformers": "absent"
    }  # fmt: skip
    side, opened = zero(swapped)
    found = evidence_of(side, opened)
    assert (
        of_name(found, "stated order").verdict == "contradicts"
        and "another order" in of_name(found, "stated order").detail
    )
    assert of_name(found, "masters").verdict == "contradicts"


def test_masters_are_evidence_without_a_stated_order():
    from attrs import evolve

    side, opened = zero(swapped)
    found = evidence_of(
        side, evolve(opened, state=evolve(opened.state, parallel=evolve(opened.state.parallel, flats=())))
    )
    assert of_name(found, "stated order").verdict == "absent" and of_name(found, "masters").verdict == "contradicts"


def test_masters_placed_as_their_weights_are_no_witness(tmp_path):
    """One wrong name would be wrong for both.

    Their agreement is no evidence.
    """
    fp32 = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    states = {"weight": fp32.bfloat16(), "fp32": fp32, "exp_avg": fp32, "step": 1}
    torch.save({"params": {"w": states}}, tmp_path / "p.pt")
    opened = api.open_checkpoint(tmp_path / "p.pt")
    side, _ = api.source_side(opened, None)
    assert of_masters(side, opened).verdict == "absent"
    ucpl.convert(tmp_path / "p.pt", tmp_path / "z", "zero1(dp=2)")
    opened = api.open_checkpoint(tmp_path / "z")
    side, _ = api.source_side(opened, None)
    found = of_masters(side, opened)
    assert (found.verdict, found.detail) == (
        "agrees",
        "weights of 1 tensors are their masters, stored in another way, rounded",
    )


@pytest.mark.parametrize("value", [0.0, 1.0, float("inf")])
def test_weights_of_one_value_are_no_evidence_that_masters_are_theirs(value, tmp_path):
    """Swapped tensors of one value have equal masters, too."""
    fp32 = torch.full((6, 4), value)
    states = {"weight": fp32.bfloat16(), "fp32": fp32, "exp_avg": fp32, "step": 1}
    torch.save({"params": {"a": states, "b": states}}, tmp_path / "p.pt")
    ucpl.convert(tmp_path / "p.pt", tmp_path / "z", "zero1(dp=2)")
    opened = api.open_checkpoint(tmp_path / "z")
    side, _ = api.source_side(opened, None)
    found = of_masters(side, opened)
    why = "are NaN or infinite" if np.isinf(value) else f"are {value:g}"
    assert (found.verdict, found.detail) == ("absent", f"all 48 weights with masters that are laid out otherwise {why}")
    notes = ucpl.verify(tmp_path / "z").notes
    assert f"not witnessed by masters: {found.detail}" in notes
    assert any(n.endswith(f"all 48 weights {why}: that these are their masters is not witnessed") for n in notes)


def test_tensors_of_one_value_are_named_where_others_are_witnessed(tmp_path):
    params = {n: {"weight": v.bfloat16(), "fp32": v, "exp_avg": v, "step": 1} for n, v in (
        ("norm", torch.ones(5)), ("w", torch.arange(12.0).reshape(3, 4)), ("final", torch.ones(5)),
    )}  # fmt: skip
    torch.save({"params": params}, tmp_path / "p.pt")
    ucpl.convert(tmp_path / "p.pt", tmp_path / "z", "zero1(dp=2)")
    notes = ucpl.verify(tmp_path / "z").notes
    assert any(n.startswith("witnessed by masters: weights of 1 tensors") for n in notes)
    assert "not witnessed by masters: all elements are equal in final and 1 more, so that no order shows" in notes


def test_a_flat_of_one_tensor_has_no_order_to_witness(tmp_path):
    fp32 = torch.arange(24.0).reshape(6, 4)
    torch.save(
        {"params": {"w": {"weight": fp32.bfloat16(), "fp32": fp32, "exp_avg": fp32, "step": 1}}}, tmp_path / "p.pt"
    )
    ucpl.convert(tmp_path / "p.pt", tmp_path / "z", "zero1(dp=2)")
    said = "not witnessed by stated order: no flat buffer has two tensors, so there is no other order"
    assert said in ucpl.verify(tmp_path / "z").notes


def test_a_weight_that_is_not_its_master_is_named_with_its_place(tmp_path):
    source = ROOT / "examples" / "checkpoint"
    ucpl.convert(source, tmp_path / "p.pt", "plain()")
    value = torch.load(tmp_path / "p.pt", weights_only=True)
    name = next(n for n, states in value["params"].items() if states["weight"].ndim == 2)
    value["params"][name]["weight"][1, 0] += 1
    torch.save(value, tmp_path / "p.pt")
    ucpl.convert(tmp_path / "p.pt", tmp_path / "z", "zero1(dp=2)")
    opened = api.open_checkpoint(tmp_path / "z")
    side, _ = api.source_side(opened, None)
    found = of_masters(side, opened)
    assert found.verdict == "contradicts"
    assert found.detail.startswith(f"weight of {name}[1, 0]: the weight is not its master, rounded, ")


def test_what_has_no_witness_says_so(tmp_path):
    save(tmp_path / "s", {"w": torch.ones(2, 2)})
    opened = api.open_checkpoint(tmp_path / "s")
    side, _ = api.source_side(opened, None)
    found = evidence_of(side, opened)
    assert {w.verdict for w in found} == {"absent"} and all(w.detail and w.what for w in found)
    assert any("not witnessed" in note for note in ucpl.verify(tmp_path / "s").notes)


def test_verify_calls_every_witness_and_says_what_each_has_seen(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ucpl.verification.evidence._forward", lambda: forward)
    wrong = mistaken(tmp_path, *MISTAKES["gate and up"])
    found = ucpl.verify(folder, layout=f"{wrong}:hf()")
    (finding,) = found.findings
    assert not found and finding.code == "E707" and "the logits differ, by up to" in finding.message
    assert any(note.startswith("contradicted by transformers: the logits differ") for note in found.notes)
    skipped = ucpl.verify(folder, layout=f"{wrong}:hf()", witness=False)
    assert skipped and not any("transformers" in note for note in skipped.notes)
    (tmp_path / "right").mkdir()
    right = ucpl.verify(folder, layout=f"{mistaken(tmp_path / 'right')}:hf()")
    assert right and any(n.startswith("witnessed by transformers: ") and "equal, bit for bit" in n for n in right.notes)
    assert WITNESS not in right.notes and WITNESS in skipped.notes
    assert [n.partition(":")[0] for n in right.notes[1:]][-3:-1] == [
        "not witnessed by stated order", "not witnessed by masters"
    ]  # fmt: skip


def test_a_spec_that_was_imported_is_held_against_what_is_imported_anew(folder, tmp_path, monkeypatch):
    """For an unknown class, `import hf` gives the names.

    An unchanged text of `import hf` is no new evidence.
    """
    monkeypatch.setitem(sys.modules, "transformers", None)  # headers alone
    monkeypatch.setattr("ucpl.verification.evidence._forward", lambda: forward)
    text = import_hf(folder)
    (tmp_path / "mine.ucpl").write_text(text)
    notes = ucpl.verify(folder, layout=f"{tmp_path / 'mine.ucpl'}:hf()").notes
    assert any(n.startswith("not witnessed by transformers: `import hf` writes the same layout") for n in notes)
    head, mark, body = text.partition("layout hf(")
    gate, up = "mlp.gate_proj.weight", "mlp.up_proj.weight"
    line = rf'{gate},\s+{up} += (.*?) as "{{layer}}{{name}}"'
    wrong = rf'{gate} = \1 as "{{layer}}{up}"\n  {up} = \1 as "{{layer}}{gate}"'
    body, times = re.subn(line, wrong, body.partition("layout ")[0], flags=re.DOTALL)
    assert times == 1
    (tmp_path / "wrong.ucpl").write_text(head + mark + body.rpartition("}")[0] + "}\n")
    found = ucpl.verify(folder, layout=f"{tmp_path / 'wrong.ucpl'}:hf()")
    assert [d.code for d in found.findings] == ["E707"]
    other = tmp_path / "other.ucpl"
    renamed = text.replace("model.norm.weight ", "final ")
    other.write_text(re.sub(r'^( +final += .*as )"{name}"', r'\1"model.norm.weight"', renamed, flags=re.MULTILINE))
    notes = ucpl.verify(folder, layout=f"{other}:hf()").notes
    assert any(
        "no shipped spec has model `llama` and its tensors, and `import hf` does not write them for" in n for n in notes
    )

    def never(path):
        raise AssertionError("a layout of any model has no names of its own")

    monkeypatch.setattr("ucpl.inference.hf.import_hf", never)
    assert ucpl.verify(folder) and ucpl.verify(folder, layout="safetensors()")


def test_verify_holds_a_folder_of_ranks_against_a_reference(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ucpl.verification.evidence._forward", lambda: forward)
    ucpl.convert(folder, tmp_path / "m", "llama.ucpl:megatron(tp=2, pp=2)", layout="llama.ucpl:hf()")
    layout = f"{mistaken(tmp_path, FUSED['up before gate'])}:megatron(tp=2, pp=2)"
    assert ucpl.verify(tmp_path / "m", layout=layout), "without a reference nothing can tell"
    found = ucpl.verify(tmp_path / "m", layout=layout, reference=folder)
    assert [d.code for d in found.findings] == ["E707"]
    assert ucpl.verify(tmp_path / "m", layout="llama.ucpl:megatron(tp=2, pp=2)", reference=folder)


def test_a_large_folder_s_class_is_run_only_when_it_is_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ucpl.verification.evidence._forward", lambda: forward)
    monkeypatch.setattr("ucpl.verification.evidence.UNASKED_MAX", 1000)
    layout = f"{mistaken(tmp_path)}:hf()"
    notes = ucpl.verify(folder, layout=layout).notes
    assert any(
        n.startswith("not witnessed by transformers: the class would load 0 MiB twice: --reference") for n in notes
    )
    assert any(
        n.startswith("witnessed by transformers: ") for n in ucpl.verify(folder, layout=layout, reference=folder).notes
    )


def test_nothing_heavy_is_imported_where_no_class_is_named(tmp_path):
    """A folder without a config, and one of ranks.

    Transformers is not loaded.
    """
    save(tmp_path / "s", {"w": torch.ones(2, 2)})
    code = "import sys, ucpl; ucpl.verify(sys.argv[1]); print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


OWN = """ucpl 1
model mine {
  dim l = config.num_hidden_layers, h = config.hidden_size, n = config.num_attention_heads, d = config.head_dim
  dim f = config.intermediate_size, v = config.vocab_size
  tok : v h
  one : l h
  a   : l n d h
  b   : l n d h
  c   : l n d h
  back : l h n d
  two : l h
  g   : l f h
  u   : l f h
  down : l h f
  end : h
  top : v h
}
layout ranks(tp = 3) of mine {
  framework torch()
  mesh tp
  file weights = torch "rank_{tp}.pt"
  tok     = v@chunk(tp) h                          as "tok"
  one[l]  = h                                      as "{l}.one"
  abc[l]  = (a: n@tp d + b: n@tp d + c: n@tp d) h  as "{l}.abc"
  back[l] = h (n@tp d)                             as "{l}.back"
  two[l]  = h                                      as "{l}.two"
  gu[l]   = (g: f@chunk(tp) + u: f@chunk(tp)) h    as "{l}.gu"
  down[l] = h f@chunk(tp)                          as "{l}.down"
  end     = h                                      as "end"
  top     = v@chunk(tp) h                          as "top"
}
layout folder(shard = "5GB") of mine {
  framework huggingface(shard = shard)
  file weights = safetensors "model.safetensors"
  tok     = v h     as "model.embed_tokens.weight"
  one[l]  = h       as "model.layers.{l}.input_layernorm.weight"
  a[l]    = (n d) h as "model.layers.{l}.self_attn.q_proj.weight"
  b[l]    = (n d) h as "model.layers.{l}.self_attn.k_proj.weight"
  c[l]    = (n d) h as "model.layers.{l}.self_attn.v_proj.weight"
  back[l] = h (n d) as "model.layers.{l}.self_attn.o_proj.weight"
  two[l]  = h       as "model.layers.{l}.post_attention_layernorm.weight"
  g[l]    = f h     as "model.layers.{l}.mlp.gate_proj.weight"
  u[l]    = f h     as "model.layers.{l}.mlp.up_proj.weight"
  down[l] = h f     as "model.layers.{l}.mlp.down_proj.weight"
  end     = h       as "model.norm.weight"
  top     = v h     as "lm_head.weight"
}
"""


def own_ranks(folder: Path, out: Path, ranks: int = 3) -> Path:
    """Files of ranks, cut by torch."""
    full = tensors_of(folder)
    out.mkdir()
    for tp in range(ranks):

        def part(name: str, dim: int = 0, tp: int = tp) -> torch.Tensor:
            return full[name].chunk(ranks, dim)[tp]

        held = {
            "tok": part("model.embed_tokens.weight"),
            "top": part("lm_head.weight"),
            "end": full["model.norm.weight"],
        }
        for i in range(CONFIG["num_hidden_layers"]):
            p = f"model.layers.{i}."
            held[f"{i}.one"] = full[p + "input_layernorm.weight"]
            held[f"{i}.two"] = full[p + "post_attention_layernorm.weight"]
            held[f"{i}.abc"] = torch.cat([part(f"{p}self_attn.{x}_proj.weight") for x in "qkv"])
            held[f"{i}.gu"] = torch.cat([part(f"{p}mlp.{x}_proj.weight") for x in ("gate", "up")])
            held[f"{i}.back"] = part(p + "self_attn.o_proj.weight", 1)
            held[f"{i}.down"] = part(p + "mlp.down_proj.weight", 1)
        torch.save({name: value.clone() for name, value in held.items()}, out / f"rank_{tp}.pt")
    (out / "config.json").write_text(json.dumps(CONFIG))
    return out


@pytest.mark.parametrize(
    "change",
    [(), ("g: f@chunk(tp) + u: f@chunk(tp)", "u: f@chunk(tp) + g: f@chunk(tp)"), ("(n@tp d)   ", "(d n@tp)   ")],
)
def test_the_class_is_a_witness_of_ranks_with_names_of_their_own(change, folder, tmp_path):
    """The spec writes the folder itself, of files that a framework wrote."""
    text = OWN.replace(*change) if change else OWN
    assert (text == OWN) == (not change)
    (tmp_path / "own.ucpl").write_text(text)
    layout = f"{tmp_path / 'own.ucpl'}:ranks()"
    source = own_ranks(folder, tmp_path / "ranks")
    checkpoint = api.open_checkpoint(source, layout)
    side, _ = api.source_side(checkpoint, layout)
    found = transformers_class(side, checkpoint, reference=folder, forward=forward)
    assert found.verdict == ("contradicts" if change else "agrees"), found.detail
    if not change:
        found = transformers_class(side, checkpoint, forward=forward)
        assert found.verdict == "absent" and "there is no Hugging Face folder" in found.detail
        (source / "ucpl").mkdir()
        (source / "ucpl" / "manifest.json").write_text("{}")
        found = transformers_class(side, checkpoint, reference=folder, forward=forward)
        assert found.verdict == "absent" and "ucpl wrote these files by a spec" in found.detail
