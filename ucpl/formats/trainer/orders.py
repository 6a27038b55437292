"""The order of registration of a module's parameters.

safetensors sorts names, and an optimizer numbers its parameters in the order of registration. Below one module, the order
of its parts is known if there is one part, if their names are numbers, for `weight` and `bias`, for PEFT's parts, and for
the classes of transformers in the table below (transformers 5.23; earlier releases have the same order). For parts of an
unknown module, all orders are tried: the optimizer's shapes have to leave one assignment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import permutations, product
from math import factorial, prod

from ucpl.texts import Json

__all__ = ["ORDERS_MAX", "orders_of", "tied_head"]

ORDERS_MAX = 1500  # orders of unknown parts that are tried
_NUMBERS = re.compile(r"\d+")
_NUMBERED = "#"  # for a number in the name of a module
_LLAMA = (
    "model(embed_tokens layers(self_attn(q_proj k_proj v_proj o_proj q_norm k_norm) mlp(gate_proj up_proj down_proj)"
    " input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm) norm) lm_head score"
)
_PHI3 = _LLAMA.replace("q_proj k_proj v_proj o_proj q_norm k_norm", "o_proj qkv_proj").replace(
    "gate_proj up_proj", "gate_up_proj"
)
_GPT2 = "transformer(wte wpe h(ln_1 attn(c_attn c_proj) ln_2 mlp(c_fc c_proj)) ln_f) lm_head score classifier"
_NEOX = (
    "gpt_neox(embed_in layers(input_layernorm post_attention_layernorm attention(query_key_value dense)"
    " mlp(dense_h_to_4h dense_4h_to_h)) final_layer_norm) embed_out lm_head score classifier"
)
_BLOOM = (
    "transformer(word_embeddings word_embeddings_layernorm h(input_layernorm self_attention(query_key_value dense)"
    " post_attention_layernorm mlp(dense_h_to_4h dense_4h_to_h)) ln_f) lm_head score classifier"
)
_FALCON = (
    "transformer(word_embeddings h(self_attention(query_key_value dense) mlp(dense_h_to_4h dense_4h_to_h) input_layernorm)"
    " ln_f) lm_head score classifier"
)
_OPT = (
    "model(decoder(embed_tokens embed_positions final_layer_norm layers(self_attn(k_proj v_proj q_proj out_proj)"
    " self_attn_layer_norm fc1 fc2 final_layer_norm))) lm_head score"
)
_LAYER = "attention(self(query key value) output(dense LayerNorm)) intermediate(dense) output(dense LayerNorm)"
_LAYERS = f" encoder(layer({_LAYER}))"
_EMBEDDED = "embeddings(word_embeddings position_embeddings token_type_embeddings LayerNorm)"
_BERT = (
    f"bert({_EMBEDDED}{_LAYERS} pooler(dense)) cls(predictions(bias transform(dense LayerNorm) decoder) seq_relationship)"
    " classifier qa_outputs"
)
# transformers 5 has another order of the embeddings: their shapes decide
_HEADED = "lm_head(bias dense layer_norm decoder) classifier(dense out_proj) qa_outputs"
_ROBERTA = f"roberta(embeddings{_LAYERS} pooler(dense)) {_HEADED}"
_ELECTRA = (
    f"electra({_EMBEDDED} embeddings_project{_LAYERS}) discriminator_predictions(dense dense_prediction)"
    " generator_predictions(LayerNorm dense) generator_lm_head classifier(dense out_proj) qa_outputs"
)
_DISENTANGLED = _LAYER.replace("query key value", "query_proj key_proj value_proj pos_key_proj pos_query_proj")
_DEBERTA = (
    "deberta(embeddings(word_embeddings position_embeddings token_type_embeddings embed_proj LayerNorm)"
    f" encoder(layer({_DISENTANGLED}) rel_embeddings LayerNorm conv(conv LayerNorm))) pooler(dense) classifier qa_outputs"
)
_ATTENTION = "(k_proj v_proj q_proj out_proj)"
_ENCODED = f"layers(self_attn{_ATTENTION} self_attn_layer_norm fc1 fc2 final_layer_norm)"
_DECODED = (
    f"layers(self_attn{_ATTENTION} self_attn_layer_norm encoder_attn{_ATTENTION} encoder_attn_layer_norm fc1 fc2"
    " final_layer_norm)"
)
_WHISPER = (
    f"model(encoder(conv1 conv2 embed_positions {_ENCODED} layer_norm) decoder(embed_tokens embed_positions {_DECODED}"
    " layer_norm)) proj_out"
)
_BART = (
    f"model(shared encoder(embed_tokens embed_positions {_ENCODED} layernorm_embedding) decoder(embed_tokens embed_positions"
    f" {_DECODED} layernorm_embedding)) lm_head"
)
_PHI = "model(embed_tokens layers(self_attn(q_proj k_proj v_proj dense) mlp(fc1 fc2) input_layernorm) final_layernorm) lm_head"
_GPTJ = f"transformer(wte h(ln_1 attn{_ATTENTION} mlp(fc_in fc_out)) ln_f) lm_head score"
_GPT_NEO = f"transformer(wte wpe h(ln_1 attn(attention{_ATTENTION}) ln_2 mlp(c_fc c_proj)) ln_f) lm_head score"
_DISTILBERT = (
    "distilbert(embeddings(word_embeddings position_embeddings LayerNorm) transformer(layer(attention(q_lin k_lin v_lin"
    " out_lin) sa_layer_norm ffn(lin1 lin2) output_layer_norm))) vocab_transform vocab_layer_norm pre_classifier classifier"
    " qa_outputs"
)
_T5 = (
    "shared encoder(block(layer(SelfAttention(q k v o relative_attention_bias) layer_norm DenseReluDense(wi wi_0 wi_1 wo)))"
    " final_layer_norm) decoder(block(layer(SelfAttention(q k v o relative_attention_bias) layer_norm EncDecAttention(q k v o)"
    " DenseReluDense(wi wi_0 wi_1 wo))) final_layer_norm) lm_head"
)
# model_type of config.json -> parts of its modules, in the order in which transformers registers them
_CLASSES = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "smollm3",
         "cohere", "cohere2", "granite", "stablelm", "ministral3", "exaone4", "ernie4_5", "seed_oss", "helium", "arcee"),
        _LLAMA,
    ),
    "starcoder2": _LLAMA.replace("gate_proj up_proj down_proj", "c_fc c_proj"),
    "phi3": _PHI3, "gpt2": _GPT2, "gpt_neox": _NEOX, "bloom": _BLOOM, "falcon": _FALCON, "opt": _OPT, "bert": _BERT,
    "distilbert": _DISTILBERT, "t5": _T5, "mt5": _T5, "gpt_bigcode": _GPT2, "roberta": _ROBERTA, "electra": _ELECTRA,
    "deberta-v2": _DEBERTA, "whisper": _WHISPER, "bart": _BART, "phi": _PHI, "gptj": _GPTJ, "gpt_neo": _GPT_NEO,
}  # fmt: skip
_HEADS = ("ForCausalLM", "LMHeadModel")  # ends of classes whose head reads the embeddings, if they have none of its own
_HEAD = {"gpt_neox": "embed_out.weight"}  # else lm_head.weight
_EMBEDDINGS = (
    "model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight", "transformer.word_embeddings.weight",
    "model.decoder.embed_tokens.weight",
)  # fmt: skip
_TORCH = ("weight", "bias")
_PEFT = ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")

Orders = Mapping[str, tuple[str, ...]]  # a module -> its parts in order


def orders_of(names: Sequence[str], config: Mapping[str, Json] | None) -> tuple[Iterator[list[str]], int, str]:
    """The possible orders of these names, their number, and the evidence.

    config: config.json; its class decides. The orders are not listed if there are too many.
    """
    known = _CLASSES.get(str((config or {}).get("model_type")), "")
    parts = _parts_of(known) if known else {}
    found = _unknown(names, parts)
    count = prod(factorial(len(some)) for some in found.values())
    text = f"the order of registration in the classes of {config['model_type']}" if known and config else ""
    if found:
        text = "the only order of registration that fits the shapes" + (f", with {text}" if text else "")
    if count > ORDERS_MAX:
        return iter(()), count, text
    ways = (dict(zip(found, one, strict=True)) for one in product(*(permutations(some) for some in found.values())))
    return (_sorted(names, {**parts, **way}) for way in ways), count, text or "the numbers of modules"


def tied_head(names: Collection[str], config: Mapping[str, Json] | None) -> dict[str, str]:
    """The name of a tied head, and its owner's.

    A class of the table has a head, and its files have none.
    transformers leaves out a tied head, and no other.
    """
    kind, classes = str((config or {}).get("model_type")), (config or {}).get("architectures")
    is_headed = isinstance(classes, list) and len(classes) == 1 and str(classes[0]).endswith(_HEADS)
    head, owner = _HEAD.get(kind, "lm_head.weight"), next((name for name in _EMBEDDINGS if name in names), "")
    return {head: owner} if kind in _CLASSES and is_headed and owner and head not in names else {}


def _unknown(names: Sequence[str], parts: Orders) -> dict[str, tuple[str, ...]]:
    """The parts of each module whose order is not known."""
    below: dict[str, dict[str, None]] = {}
    for name in names:
        steps = name.split(".")
        for n, step in enumerate(steps):
            below.setdefault(_module(steps[:n]), {})[step] = None
    return {
        module: tuple(sorted(some))
        for module, some in below.items()
        if len(some) > 1
        and not all(step.isdecimal() for step in some)
        and not {*some} <= {*_order(module, some, parts)}
    }


def _order(module: str, some: Sequence[str] | Mapping[str, None], parts: Orders) -> tuple[str, ...]:
    """The known order of a module's parts, or ()."""
    own = module.replace(f".{_NUMBERED}", "").removeprefix("base_model.model").removeprefix(".")
    said = (parts.get(module), parts.get(own))
    return next((one for one in (*said, _TORCH, _PEFT) if one is not None and {*some} <= {*one}), ())


def _module(steps: Sequence[str]) -> str:
    """A module, alike for all numbers in its name."""
    return ".".join(_NUMBERED if _NUMBERS.fullmatch(step) else step for step in steps)


def _sorted(names: Sequence[str], parts: Orders) -> list[str]:
    @cache
    def ranks(module: str, step: str) -> int:
        found = next((one for one in (_order(module, (step,), parts),) if one), ())
        return found.index(step) if step in found else 0

    def key(name: str) -> tuple[int, ...]:
        steps = name.split(".")
        return tuple(
            int(step) if _NUMBERS.fullmatch(step) else ranks(_module(steps[:n]), step) for n, step in enumerate(steps)
        )

    return sorted(names, key=key)


@cache
def _parts_of(text: str) -> dict[str, tuple[str, ...]]:
    """The parts of each module of a table's line."""
    out: dict[str, list[str]] = {}
    lead: list[str] = []
    for step, sign in re.findall(r"([^\s()]+)|([()])", text):
        if step:
            out.setdefault(".".join(lead), []).append(step)
        elif sign == "(":
            lead.append(out[".".join(lead)][-1])
        else:
            lead.pop()
    return {module: tuple(some) for module, some in out.items()}
