"""The table of tests/formats/huggingface/precedence.py, compared with transformers itself."""

from __future__ import annotations

from pathlib import Path

import peft  # noqa: F401 (transformers reads no adapter without it)
import pytest
import torch
import transformers

from tests.formats.huggingface import precedence
from tests.formats.huggingface.folders import llama_config, llama_shapes, random_of

pytestmark = pytest.mark.interop

CONFIG = llama_config(num_hidden_layers=1, architectures=["LlamaForCausalLM"])
TENSORS = random_of(llama_shapes(CONFIG))
FIRST = next(iter(TENSORS))


def taken(folder: Path) -> float:
    """The value of the first tensor's elements, as transformers loads it."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (value,) = model.state_dict()[FIRST].unique().tolist()
    return float(value)


@pytest.mark.parametrize("case", precedence.CASES)
def test_transformers_takes_the_file_that_the_table_names(case: str, tmp_path: Path) -> None:
    made = precedence.folder(tmp_path / "s", TENSORS, CONFIG, case)
    assert taken(made) == precedence.CASES[case][1]


@pytest.mark.parametrize("case", precedence.TWICE)
def test_transformers_takes_the_tensor_of_the_last_file(case: str, tmp_path: Path) -> None:
    made = precedence.twice(tmp_path / "s", TENSORS, CONFIG, case)
    assert taken(made) == precedence.TWICE[case][2]
