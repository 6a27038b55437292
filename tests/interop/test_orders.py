"""Orders of registration in the classes of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from ucpl.formats.trainer.orders import orders_of

pytestmark = pytest.mark.interop

SMALL = {
    "vocab_size": 53, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "pad_token_id": 0,
}  # fmt: skip
SEQUENCES = {
    "vocab_size": 53, "d_model": 12, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "pad_token_id": 0,
}  # fmt: skip
CLASSES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Olmo", "Olmo2", "Olmo3", "SmolLM3", "Cohere", "Cohere2",
            "Granite", "StableLm", "Ministral3", "Exaone4", "Ernie4_5", "SeedOss", "Helium", "Arcee", "Starcoder2", "Phi3",
            "Phi", "GPTNeoX", "Bloom", "Falcon", "OPT", "GPT2", "GPTBigCode",
        ),
        SMALL,
    ),
    "GPTJ": {"vocab_size": 53, "n_embd": 12, "n_layer": 2, "n_head": 2, "rotary_dim": 2},
    "GPTNeo": {
        "vocab_size": 53, "hidden_size": 12, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
    },
}  # fmt: skip
HEADED = {
    "BertForMaskedLM": SMALL, "BertForPreTraining": SMALL, "BertForSequenceClassification": SMALL,
    "RobertaForMaskedLM": SMALL, "RobertaForSequenceClassification": SMALL, "ElectraForPreTraining": SMALL,
    "ElectraForMaskedLM": {**SMALL, "embedding_size": 8},
    "DebertaV2ForSequenceClassification": {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "WhisperForConditionalGeneration": SEQUENCES, "BartForConditionalGeneration": SEQUENCES,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes"), [*((f"{name}ForCausalLM", sizes) for name, sizes in CLASSES.items()), *HEADED.items()]
)
def test_orders_of_classes_are_those_of_their_parameters(kind: str, sizes: dict[str, Any]) -> None:
    made = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2ForCausalLM" else kind)
    if kind.startswith(("Gemma", "Helium")):
        sizes = {**sizes, "head_dim": 6, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = made(made.config_class(**sizes))
    names = [name for name, _ in model.named_parameters()]
    orders, count, evidence = orders_of(sorted(names), {**model.config.to_dict(), "architectures": [made.__name__]})
    assert f"classes of {model.config.model_type}" in evidence
    assert count == (24 if kind.startswith("Roberta") else 1)  # shapes decide between those of its embeddings
    assert names in list(orders)
