"""`ucpl import hf` of files whose tensors have odd names.

Its output must be valid in the language.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from random import Random
from typing import Any

from attrs import define

from tests.fuzz.damage import LONELY, damage_value
from tests.fuzz.plans import json_of
from ucpl.errors import UcplError
from ucpl.inference.hf import import_hf
from ucpl.language import parse, parse_call
from ucpl.layout import Library, resolve
from ucpl.placement import locate

PARTS = (
    *("model", "layers", "h", "0", "1", "2", "10", "01", "mlp", "up_proj", "weight", "bias", "experts", "self_attn"),
    *(
        "",
        "",
        " ",
        ".",
        "..",
        "-",
        "*",
        "#",
        "{",
        "}",
        "{l}",
        '"',
        "'",
        "\\",
        "/",
        "//",
        "\n",
        "\r",
        "\t",
        "\0",
        "\x1b[2J",
    ),
    *(
        "²",
        "é",
        "\u202e",
        "\u2028",
        "\x85",
        "😀",
        LONELY,
        "\udfff",
        "model",
        "layout",
        "dim",
        "when",
        "config",
        "of",
        "as",
    ),
    *(
        "9" * 9,
        "9" * 10,
        "9" * 400,
        "x" * 300,
        "x" * 5000,
        "__metadata__",
        "ucpl",
        "l",
        "n4",
        "_",
        "any",
        "all",
        "like",
    ),
)
WHOLE = ("model.layers.{n}.mlp.up_proj.weight", "h.{n}.attn.bias", "experts.{n}.{m}.w", "a.{n}", "{n}.{m}", "{n}", "w")
SHAPES: tuple[list[int], ...] = ([], [0], [1], [4], [4, 8], [8, 4], [3, 3], [2, 1, 2], [8], [0, 5], [1 << 40, 0])
CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "vocab_size": 32,
    "model_type": "llama",
    "tie_word_embeddings": True,
    "text_config": {"hidden_size": 8, "head_dim": 4},
    "dtype": "bfloat16",
}
ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1}


@define(eq=False)
class Imports:
    """Folders of one or two safetensors files, or one file."""

    folder: Path
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Imports:
        sys.modules.setdefault("transformers", None)  # type: ignore[arg-type]  # headers alone, and no search for it
        made = cls(folder / "hf")
        made.folder.mkdir(exist_ok=True)
        return made

    def attempt(self, rng: Random) -> str:
        names = names_of(rng)
        self.damage = f"names {ascii(names)[:300]}"
        file = self.folder / "model.safetensors"
        raw, stored = file_of(rng, names)
        file.write_bytes(raw)
        config = self.folder / "config.json"
        config.unlink(missing_ok=True)
        if rng.random() < 0.7:
            value, how = damage_value(rng, json.loads(json.dumps(CONFIG)))
            config.write_bytes(json_of(value))
            self.damage += f"; config: {how}"
        text = import_hf(rng.choice((self.folder, self.folder, file)))
        if rng.random() < 0.5:  # it takes as long again
            return self.damage
        try:
            demand_language(text, json.loads(config.read_bytes()) if config.exists() else {}, stored)
        except UcplError as error:
            raise AssertionError(f"{error}\n{text[:2000]}") from error
        return self.damage


def demand_language(text: str, config: Any, names: list[str]) -> None:
    """An import's text parses, and its layout stores every tensor."""
    file = parse(text, "imported.ucpl")
    library = Library()
    library.add(file)
    placement = locate(resolve(library, parse_call("hf()"), config=config))
    keys = sorted("/".join(map(str, home.key)) for part in placement.parts for home in part.homes)
    assert keys == sorted(names), f"{keys} for {sorted(names)}"


def names_of(rng: Random) -> list[str]:
    names: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        if rng.random() < 0.5:
            form = rng.choice(WHOLE)
            count = rng.choice((1, 2, 3))
            names += [form.format(n=n, m=m) for n in range(count) for m in range(rng.choice((1, 2)))]
        else:
            names.append(".".join(rng.choice(PARTS) for _ in range(rng.choice((1, 1, 2, 3, 5)))))
    if names and rng.random() < 0.3:
        at = rng.randrange(len(names))
        cut = rng.randrange(len(names[at]) + 1)
        names[at] = names[at][:cut] + rng.choice(PARTS) + names[at][cut:]
    # Two halves of a character that are escaped one after the other are that character.
    return list(dict.fromkeys(json.loads(json.dumps(name)) for name in names))


def file_of(rng: Random, names: list[str]) -> tuple[bytes, list[str]]:
    """(a file, those of the names whose tensors have elements)"""
    header: dict[str, Any] = {}
    at = 0
    shape, dtype = rng.choice(SHAPES), rng.choice(sorted(ITEMSIZE))
    for name in names:
        if rng.random() < 0.3:
            shape, dtype = rng.choice(SHAPES), rng.choice(sorted(ITEMSIZE))
        size = ITEMSIZE[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    stored = [name for name, entry in header.items() if 0 not in entry["shape"]]
    return struct.pack("<Q", len(raw)) + raw + bytes(at), stored
