"""Cuts of a class without a plan, by its layers.

It finds the linear modules of each layer whose outputs are summed over ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from attrs import evolve, field

from ucpl.inference.autotp.drawn import Drawn, Part, refuse
from ucpl.inference.hf.modules import EMBEDDING, LINEAR, LIST, NORM, Module
from ucpl.records import frozen

__all__ = ["by_policies"]

_UNSUPPORTED = frozenset({"deberta", "flaubert", "fsmt", "gpt2", "led", "longformer", "xlm", "xlnet"})
_NORM_NAMES = ("LayerNorm", "layer_norm", "ln_1", "ln_2")
_NORMS_WITHIN = ("LayerNorm", "layer_norm")
_SUMMED_BY_NAME = ("out_proj", "o_proj", "down_proj")
_SUMMED = (  # (part of the module's name, part of a class's name, of the model's (else of the layer's) text)
    ("attention.dense", "GPTNeoX", True),
    ("self_attention.dense", "falcon", False),
    ("w2", "Mixtral", False),
    ("self_attn.dense", "Phi", False),
    ("self_attention.dense", "ChatGLM", True),
    ("dense_4h_to_h", "ChatGLM", True),
)
_NORM_MARK = "ln"
_OWN = "give a layout of your own that extends zero1 and cuts its tensors: --to 'FILE.ucpl:NAME(tp=N)'"


@frozen(eq=False)
class _Policy:
    """A class of layers, and its linear modules that are summed."""

    layer: Module
    summed: frozenset[str] = field(factory=frozenset)


def by_policies(drawn: Drawn) -> None:
    """Cuts of a network without a plan.

    Raises: UcplError E472 if DeepSpeed has no policy for it.
    """
    for policy in _policies(drawn.network.root):
        for path, layer in _of_class(drawn.network.root, policy.layer.kind):
            _layer(drawn, path, layer, policy)


def _of_class(module: Module, kind: str, path: str = "") -> Iterator[tuple[str, Module]]:
    for child in module.children:
        here = f"{path}.{child.name}" if path else child.name
        if child.kind == kind:
            yield here, child
        else:
            yield from _of_class(child, kind, here)


# ---- which layers there are ------------------------------------------------------------------------------------------------


def _policies(root: Module) -> list[_Policy]:
    text = "\n".join(root.lines())
    named = re.search(r": (.*?)Model", text) or re.search(r": (.*?)Stack", text) or re.match(r"(.*?)Model", text)
    if named is None or named.group(1).lower() in _UNSUPPORTED:
        refuse(
            f"{root.class_name} has no plan of tensor parallelism, and DeepSpeed's AutoTP refuses its kind", "architectures",
            remedy=_OWN,
        )  # fmt: skip
    found: dict[str, _Policy] = {}
    for layer in _layers(root):
        summed = frozenset(_summed(layer, text))
        if summed:
            before = found.setdefault(layer.kind, _Policy(layer))
            found[layer.kind] = evolve(before, summed=before.summed | summed)
    if not found:
        refuse(
            f"DeepSpeed's AutoTP finds no module to sum in the layers of {root.class_name}",
            "architectures",
            remedy=_OWN,
        )
    return list(found.values())


def _layers(module: Module) -> list[Module]:
    """One layer of each class in the lists of a model."""
    out: list[Module] = []
    for child in module.children:
        if child.role == LIST:
            for layer in child.children:
                if all(layer.class_name != known.class_name for known in out):
                    out.append(layer)
        else:
            out += _layers(child)
    return out


def _summed(layer: Module, text: str) -> Iterator[str]:
    """Linear modules before a norm, the last one, and known names."""
    names: list[str] = []
    for child in layer.children:
        names += _named(child, f".{child.name}", _NORM_NAMES) or _within(child)
    for i, name in enumerate(names):
        if name == _NORM_MARK:
            if names[i - 1] != _NORM_MARK:
                yield names[i - 1]
        elif any(s in name for s in _SUMMED_BY_NAME) or _is_known(name, layer, text):
            yield name


def _is_known(name: str, layer: Module, text: str) -> bool:
    return any(s in name and kind in (text if is_of_model else layer.kind) for s, kind, is_of_model in _SUMMED)


def _named(module: Module, name: str, norms: Sequence[str]) -> list[str]:
    if module.role == LINEAR:
        return [name]
    return [_NORM_MARK] if module.role == NORM or module.name in norms else []


def _within(module: Module) -> list[str]:
    """Names in a module, each with its parent's name only."""
    out: list[str] = []
    for child in module.children:
        out += _named(child, f"{module.name}.{child.name}", _NORMS_WITHIN) or _within(child)
    return out


# ---- one layer -------------------------------------------------------------------------------------------------------------


def _layer(drawn: Drawn, path: str, layer: Module, policy: _Policy) -> None:
    text = "\n".join(layer.lines())
    if "Yuan" in text:
        refuse(f"{layer.class_name}: shares query and key heads, which is no run of positions", path, remedy=_OWN)

    def below(here: str, before: str, module: Module) -> None:
        for child in module.children:
            name, place = f"{before}.{child.name}", f"{here}.{child.name}"
            if child.role == LINEAR:
                _linear(drawn, place, child, _At(layer, name, text, name in policy.summed))
            elif child.role == EMBEDDING:
                drawn.row(place, child, name, f"AutoTP: the embedding {layer.class_name}.{name.lstrip('.')}")
            else:
                below(place, child.name, child)

    below(path, "", layer)


@frozen(eq=False)
class _At:
    """A linear module in a layer.

    called: its name with its parent's before it.
    """

    layer: Module
    called: str
    text: str  # names and classes of the layer
    is_summed: bool

    @property
    def is_whole(self) -> bool:
        """True for gates of experts, and for projections to few numbers."""
        gates = ("mlp.gate", "block_sparse_moe.gate")
        of_shared = self.called == "mlp.shared_expert_gate" and "qwen2_moe" in self.layer.kind
        return self.called in gates or any(s in self.called for s in ("q_a_proj", "kv_a_proj_with_mqa")) or of_shared

    @property
    def is_halves(self) -> bool:
        return "gate_up_proj" in self.called or ("dense_h_to_4h" in self.called and "GLM" in self.text)


def _linear(drawn: Drawn, path: str, module: Module, at: _At) -> None:
    text = f"{at.layer.class_name}.{at.called.lstrip('.')}"
    is_head = module.name in ("lm_head", "embed_out")
    if at.is_whole:
        return
    if at.is_halves:
        half = module.shapes["weight"][0] // 2
        drawn.parts(path, module, [(half, True), (half, True)], "mlp", f"AutoTP: gate and up of {text}, rows of each")
    elif (at.is_summed or ("Arctic" in at.text and "w2" in at.called) or "down_proj" in at.called) and not is_head:
        drawn.row(path, module, at.called, f"AutoTP: {text} is summed over ranks, columns")
    elif not is_head and _is_fused(at.called):
        kind, parts = _fused_parts(drawn, at.text, module, path)
        drawn.parts(path, module, parts, "", f"AutoTP: {text}, fused as in {kind}")
    else:
        drawn.column(path, module, at.called, f"AutoTP: {text} is not summed, rows")


# ---- query, key and value in one tensor, in DeepSpeed's order ----------------------------------------------------------

_FUSED_NAMES = ("qkv_proj", "query_key_value", "attn.Wqkv", "self_attn.W_pack", "c_attn")
_HEADS, _PARTS, _PACKED, _ONE, _BLOCKS = "heads", "parts", "packed", "one", "blocks"
# Classes of layers, by a part of their name; the longest that there is counts (module_inject/fusedqkv_utils.py).
_LAYERS = {
    "CodeGenBlock": _BLOCKS,
    "BloomBlock": _HEADS,  # q, k and v of each head in turn
    "GLMBlock": _PARTS,  # q of all heads, then k, then v
    "MPTBlock": _PARTS,
    "MptBlock": _PARTS,
    "BaichuanLayer": _PARTS,
    "QWenBlock": _PARTS,
    "FalconDecoderLayer": _HEADS,
    "GPTBigCodeBlock": _ONE,  # one head of keys and values, which every rank has
    "DecoderLayer": _PARTS,
    "Phi3DecoderLayer": _PACKED,  # as parts, with fewer key-value heads
}


def _is_fused(name: str) -> bool:
    return any(s in name for s in _FUSED_NAMES)


def _fused_parts(drawn: Drawn, text: str, module: Module, path: str) -> tuple[str, Sequence[Part]]:
    """(kind of fused tensor, its parts).

    text: names and classes of its layer. Raises: UcplError E472.
    """
    layer = max((name for name in _LAYERS if name in text), key=len, default="BloomBlock")
    rows, columns = module.shapes["weight"]
    heads, kind = drawn.network.heads, _LAYERS[layer]
    if kind == _BLOCKS:
        refuse(
            f"{path}: DeepSpeed deals blocks of heads in another order ({layer}), which is no run of positions", path
        )
    if kind == _HEADS:
        return layer, [(rows, True)]
    if kind == _ONE:
        if not 0 < heads.hidden < rows:
            refuse(f"{path} has {rows} rows, and hidden_size = {heads.hidden} of them should be queries", path)
        return layer, [(heads.hidden, True), (rows - heads.hidden, False)]
    if kind == _PACKED or drawn.asked.kv_heads == 2:
        each = (
            drawn.asked.kv_heads * (columns // max(1, heads.query)) if kind == _PACKED else (rows - heads.hidden) // 2
        )
        return layer, [(rows - 2 * each, True), (each, True), (each, True)]
    return layer, [(rows // 3, True)] * 3
