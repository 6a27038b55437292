"""Names of PEFT's adapters in a run, and in adapter_model.safetensors.

    lora_A.default.weight                     lora_A.weight
    ia3_l.default                             ia3_l
    lora_magnitude_vector.default.weight      lora_magnitude_vector
    lm_head.modules_to_save.default.weight    lm_head.weight
    prompt_encoder.default.embedding.weight   prompt_embeddings

Files leave out the adapter's name. Source: peft 0.21, utils/save_and_load.py and the tuners' models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["KINDS", "MAGNITUDE", "in_file", "in_run", "is_of_run"]

KINDS = r"lora_\w+|ia3_l|vera_lambda_\w|hada_\w+|lokr_\w+|oft_\w+|boft_\w+|randlora_\w+|trainable_tokens_\w+"
MAGNITUDE = re.compile(r"(\.lora_magnitude_vector)\.weight\Z")  # as PEFT has saved DoRA's since its first release
_IN_RUN = re.compile(rf"\.(?:{KINDS}|modules_to_save)\.(?!(?:weight|bias)\Z)[^.]+(?=\.|\Z)")
_IN_FILE = re.compile(rf"\.({KINDS})(?=\.(?:weight|bias)\Z|\Z)")
_SAVED = "modules_to_save"
_PROMPT, _ENCODER = "prompt_embeddings", re.compile(r"prompt_encoder\.[^.]+\.embedding\.weight")


def is_of_run(name: str) -> bool:
    """Test for an adapter's parameter, by its name in a run."""
    return _ENCODER.fullmatch(name) is not None or _IN_RUN.search(name) is not None


def in_file(name: str) -> str:
    """The name in PEFT's file of a parameter of an adapter."""
    if _ENCODER.fullmatch(name):
        return _PROMPT
    made = _IN_RUN.sub(lambda found: "" if _SAVED in found[0] else found[0].rpartition(".")[0], name)
    return MAGNITUDE.sub(r"\1", made)


def in_run(name: str, saved: Sequence[str]) -> str:
    """The name in a run of the adapter `default`.

    saved: the modules that adapter_config.json lists in `modules_to_save`.
    """
    if name == _PROMPT:
        return "prompt_encoder.default.embedding.weight"
    made = _IN_FILE.sub(r".\1.default", name)
    if made.endswith(".lora_magnitude_vector.default"):
        return made + ".weight"
    owner = next((one for one in saved if f".{one}." in made and ".default" not in made), None)
    return made if owner is None else made.replace(f".{owner}.", f".{owner}.{_SAVED}.default.")
