"""Specs against their longer texts in version 1.

Those are in `before/`, without comments. Degrees and configs are drawn. Tensors may have other names: the folder of the
class, `hf()`, pairs old and new ones.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architectures.test_shipped_specs import CONFIGS
from ucpl.errors import UcplError
from ucpl.language import nodes, parse, parse_call
from ucpl.layout import load, resolve
from ucpl.placement import Placement, locate

ROOT = Path(__file__).parents[2]
BEFORE = Path(__file__).parent / "before"
FOLDERS = {"specs": ROOT / "specs", "examples": ROOT / "examples" / "architectures"}
OLD = {path.stem: path.read_text(encoding="utf-8") for path in sorted(BEFORE.glob("*.txt"))}
SMALL = {"num_hidden_layers": 4, "n_layer": 4, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4}
FLAGS = {"llama.ucpl": {"attention_bias": True, "mlp_bias": True}}  # biases, which no published config of these has
# Of the file, where no config has them.
SIZES: dict[str, dict[str, Any]] = {"examples_lora": {"l": 4, "r": 2, "h": 16, "n": 4, "g": 4, "f": 16}}
CODE = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^"#])*')
FEWER = {"hf", "openai", "phi3"}  # parameters apart, these have no degrees: one call is enough


def new_text(name: str) -> tuple[str, str]:
    where, _, stem = name.partition("_")
    path = FOLDERS[where] / f"{stem}.ucpl"
    return str(path), path.read_text(encoding="utf-8")


def configs(name: str) -> list[dict[str, Any]]:
    """Configs of published models, made small, or of the example's files."""
    where, _, stem = name.partition("_")
    if where == "examples":
        files = (FOLDERS[where] / "checkpoints" / stem).glob("*config.json")
        return [json.loads(f.read_text(encoding="utf-8")) for f in files if not f.name.startswith("generation")]
    out = []
    for file, _, config in CONFIGS.values():
        if file == f"{stem}.ucpl":
            small = config | {key: n for key, n in SMALL.items() if key in config}
            small |= {"moe_layers": [1, 3]} if "moe_layers" in config else {}
            tied = {"tie_word_embeddings": not config.get("tie_word_embeddings", False)}
            out += [small, small | tied | FLAGS.get(file, {})]
    return out


def call_of(layout: nodes.Layout, draw: random.Random) -> str:
    """A call with drawn degrees and small blocks."""
    drawn = {
        "tp": draw.choice([1, 2, 4]), "pp": draw.choice([1, 2, 4]), "ep": draw.choice([1, 2, 4]), "mp": draw.choice([1, 2]),
        "rows": draw.choice([0, 1]), "divisible": draw.choice([8, 128]), "block": 4,
    }  # fmt: skip
    said = [f"{p.name} = {drawn[p.name]}" for p in layout.parameters if p.name in drawn]
    return f"{layout.name}({', '.join(said)})"


Fact = tuple[Any, ...]  # of one box: all but the tensor, then the tensor


def facts(placement: Placement) -> Iterator[tuple[Fact, str]]:
    """Each box of each stored tensor, and its tensor."""
    for part in placement.parts:
        what = part.state, part.form, part.dtype, part.lossy, part.value, part.scaled, part.is_alias, part.copied
        homes = [(home.file, home.key, home.shape, home.rank, home.padding) for home in part.homes]
        p = part.pieces
        columns = p.low, p.high, p.offset, p.stride, p.policy, p.over
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for home, tensor, row in zip(p.home.tolist(), p.tensor.tolist(), rows, strict=True):
            path = placement.tensors[tensor]
            yield (*homes[home], *what, part.value_of(path), *map(tuple, row[:2]), *map(str, row[2:])), path


def meaning(texts: tuple[str, str], call: str, name: str, config: dict[str, Any]) -> list[tuple[Fact, str]] | str:
    """The sorted facts of a layout, or the code of its error."""
    try:
        layout = resolve(load(texts), parse_call(call), config=config, define_sizes=SIZES.get(name, {}))
        return sorted(facts(locate(layout)), key=repr)
    except UcplError as error:
        return error.diagnostics[0].code


def renames(old: list[tuple[Fact, str]], new: list[tuple[Fact, str]]) -> dict[str, str]:
    """Old and new names of tensors in the same places."""
    assert [fact for fact, _ in old] == [fact for fact, _ in new]
    pairs = {(a, b) for (_, a), (_, b) in zip(old, new, strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), "one name for each, and back"
    return dict(pairs)


def characters(text: str) -> int:
    """Length of a text without comments, spaces as one."""
    lines = (re.sub(r"[ \t]+", " ", CODE.match(line)[0]).strip() for line in text.splitlines())  # type: ignore[index]
    return sum(len(line) + 1 for line in lines if line)


def test_the_specs_have_two_thirds_of_their_length_in_version_1() -> None:
    shared = (FOLDERS["specs"] / "decoder.ucpl").read_text(encoding="utf-8")
    new = characters(shared) + sum(characters(new_text(name)[1]) for name in OLD)
    assert 3 * new <= 2 * sum(map(characters, OLD.values()))


@pytest.mark.parametrize("name", OLD)
def test_a_spec_means_the_same_as_its_longer_text(name: str) -> None:
    new, old = new_text(name), (name, OLD[name])
    draw = random.Random(name)
    layouts = [s for s in parse(OLD[name], name).statements if isinstance(s, nodes.Layout)]
    models = {s.name for s in parse(OLD[name], name).statements if isinstance(s, nodes.Model)}
    used = {i.call.name for s in layouts for i in s.items if isinstance(i, nodes.Use)}  # parts of others, without files
    assert {s.name for s in layouts} <= {s.name for s in parse(new[1]).statements if isinstance(s, nodes.Layout)}
    compared = 0
    for layout in layouts:
        if layout.of not in models or layout.name in used or layout.name.endswith("_cut"):
            continue
        for config in draw.sample(configs(name), min(3, len(configs(name)))):
            whole = call_of(next(s for s in layouts if s.name == "hf"), draw)
            first, second = meaning(old, whole, name, config), meaning(new, whole, name, config)
            assert isinstance(first, list) and isinstance(second, list), (first, second)
            names = renames(first, second)
            for _ in range(1 if layout.name in FEWER else 3):
                call = call_of(layout, draw)
                was, now = meaning(old, call, name, config), meaning(new, call, name, config)
                if isinstance(was, list):
                    was = [(fact, names.get(path, path)) for fact, path in was]
                    compared += 1
                assert was == now, (call, config)
    assert compared
