"""Mistakes in shipped specs and in those of authors, as data.

One line of a file is damaged as a person would, and `check` prints the remedy.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from attrs import frozen

from tests.mistakes.test_mistakes import GENERAL, told
from ucpl.conversion.checking import Checked, check
from ucpl.conversion.requests import Given
from ucpl.errors import catalogue
from ucpl.texts import Json

ROOT = Path(__file__).parents[2]
SPECS: dict[str, dict[str, Json]] = {  # configs of specs without a checkpoint of their own
    "llama": {
        "hidden_size": 36, "intermediate_size": 22, "vocab_size": 67, "num_hidden_layers": 4, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": False, "attention_bias": True,
    },
    "decoder": {
        "hidden_size": 36, "intermediate_size": 22, "vocab_size": 67, "num_hidden_layers": 4, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": False, "attention_bias": True,
    },
    "gpt2": {"n_layer": 4, "n_embd": 16, "vocab_size": 67, "n_positions": 8, "n_head": 4},
}  # fmt: skip


@frozen
class Damaged:
    name: str
    file: str
    before: str  # of one line, once in the file
    after: str
    says: tuple[str, ...]
    code: str = ""


LINES = tuple(
    Damaged(name, row.pop("file"), row.pop("before"), row.pop("after"), tuple(row.pop("says")), **row)
    for folder in ("shipped", "authored")
    for name, row in tomllib.loads((Path(__file__).parent / folder / "lines.toml").read_text(encoding="utf-8")).items()
)


def checked(file: str, text: str, folder: Path) -> Checked:
    path = ROOT / file
    (folder / path.name).write_text(text, encoding="utf-8")
    beside = path.parent / "checkpoints" / path.stem / "config.json"
    config = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else SPECS.get(path.stem)
    return check(str(folder / path.name), Given(config=config))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checked]:
    """The messages for an unchanged file.

    None, or those for a checkpoint that is too small.
    """
    folder = tmp_path_factory.mktemp("good")
    return cache(lambda file: checked(file, (ROOT / file).read_text(encoding="utf-8"), folder))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_damaged_line_is_reported_with_what_to_write_instead(
    line: Damaged, good: Callable[[str], Checked], tmp_path: Path
) -> None:
    text = (ROOT / line.file).read_text(encoding="utf-8")
    assert text.count(line.before) == 1
    found = checked(line.file, text.replace(line.before, line.after), tmp_path)
    remarks = [text for text in found.remarks if text not in good(line.file).remarks]
    before = {(finding.code, finding.message) for finding in good(line.file).findings}
    findings = [finding for finding in found.findings if (finding.code, finding.message) not in before]
    said = "\n".join([*map(told, findings), *remarks])
    assert said, "it passes in silence"
    assert "internal" not in said and GENERAL not in said and all(finding.remedy for finding in findings)
    assert [one for one in line.says if one not in said] == [], said
    assert not line.code or line.code in {finding.code for finding in findings}


def test_there_are_as_many_as_were_found() -> None:
    authored = [line for line in LINES if line.file.startswith("tests/mistakes/authored/")]
    assert len(LINES) - len(authored) >= 60 and len({line.file for line in LINES}) >= 26
    assert len(authored) >= 74 and len({line.file for line in authored}) == 6
    assert all(line.code in catalogue() for line in LINES if line.code)
