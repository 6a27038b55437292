"""The pages of the language and of the layouts are true.

Examples become the intended records, hold, and store the shown tensors.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from lark import Token
from safetensors.torch import load_file, save_file

from tests.cli.command import ucpl
from tests.docs.blocks import PLACES, ROOT, WRONG, Block, blocks, cells, complete, items_of, located, records, whole
from ucpl.errors import UcplError, catalogue
from ucpl.errors.render import render_diagnostic
from ucpl.language import nodes
from ucpl.language.recorder import ENTRY_CLASSES
from ucpl.language.source import version_of
from ucpl.language.tables import LineJoiner, build
from ucpl.language.words import CLAUSE_WORDS
from ucpl.layout.arithmetic import FUNCTIONS
from ucpl.layout.scope import Scope
from ucpl.registry import formats
from ucpl.resources import grammar_text

FIRST = ROOT / "docs" / "LANGUAGE.md"
PAGES, SHIPPED = (
    [ROOT / "docs" / f"{name}.md", *sorted((ROOT / "docs" / folder).glob("*.md"))]
    for name, folder in (("REFERENCE", "reference"), ("LAYOUTS", "layouts"))
)
GOLDEN = ROOT / "tests" / "docs" / "language.records"
ALL = [block for page in (FIRST, *PAGES, *SHIPPED) for block in blocks(page)]
RIGHT = [b for b in ALL if b.info[:1] == ("ucpl",) and b.info[1] != "wrong"]
REFERENCE = [b for b in RIGHT if ROOT / b.page in PAGES]
BASE = next(b.text for b in REFERENCE if b.info == ("ucpl", "file"))
FAULTY = [b for b in ALL if b.info[:2] == ("ucpl", "wrong")]
CELLS = [(b, ALL[i + 1]) for i, b in enumerate(ALL) if b.info[:2] == ("ucpl", "cells")]


def text_of(pages: list[Path]) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def test_every_block_says_what_it_is() -> None:
    known = {"file", "cells", "wrong", "top", "model", "layout"}
    others = [b for b in ALL if b.info not in (("text",), ("sh",))]
    assert [str(b) for b in others if b.info[:1] != ("ucpl",) or b.info[1] not in known] == []


def test_every_example_becomes_the_records_that_are_meant() -> None:
    """The records were read by a person. After a change.

    Look at each that differs before writing it down.
    """
    kept = GOLDEN.read_text(encoding="utf-8").split("\n\n")
    found = [f"{' '.join(b.info)} | {b.text.strip().splitlines()[0]}\n{records(b)}" for b in RIGHT]
    assert found == [k.rstrip("\n") for k in kept]


@pytest.mark.parametrize(("block", "shown"), CELLS, ids=lambda b: str(b))
def test_each_stored_tensor_holds_what_the_page_shows(block: Block, shown: Block) -> None:
    assert shown.info == ("text",)
    assert cells(located(block.text, block.info[2])) == shown.text.rstrip("\n")


@pytest.mark.parametrize(
    "block", [b for b in REFERENCE if b.info[1] not in ("top", "cells") and version_of(b.text) != 1], ids=str
)
def test_each_example_of_the_reference_holds(block: Block) -> None:
    """Its lines have a place on ranks.

    They are in a model of their own or in a layout that extends `base`.
    """
    assert located(complete(block, BASE)).parts


@pytest.mark.parametrize("block", FAULTY, ids=str)
def test_each_wrong_example_is_refused_with_its_code(block: Block) -> None:
    """And with the message that the page shows, if it does."""
    code, *place = block.info[2].split()
    before, after = WRONG[place[0]] if place else ("", "")
    with pytest.raises(UcplError) as caught:
        located(before + block.text + after)
    (found,) = caught.value.diagnostics
    assert found.code == code
    beneath = ALL[ALL.index(block) + 1]
    if beneath.info == ("text",):
        lines = iter(render_diagnostic(found).splitlines())
        assert [line for line in beneath.text.splitlines() if line not in lines] == []  # in this order


# ---- nothing is left out ---------------------------------------------------------------------------------------------


def everything() -> list[Any]:
    """All records of all examples, those inside others too."""
    out: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, tuple):
            for one in value:
                walk(one)
        elif attrs.has(type(value)) and not isinstance(value, nodes.Span):
            out.append(value)
            for f in attrs.fields(type(value)):
                walk(getattr(value, f.name))

    for block in REFERENCE:
        walk(tuple(items_of(block)))
    return out


def test_every_rule_and_word_of_the_grammar_has_an_example() -> None:
    """The parse trees of the reference have each rule and each terminal."""
    lark = build(grammar_text(), LineJoiner(), None)
    rules: set[str] = set()
    words: set[str] = set()
    for block in [b for b in REFERENCE if version_of(b.text) != 1]:
        text = whole(block.text, block.info[1]) if block.info[1] in PLACES else block.text
        for tree in lark.parse(text, start="start").iter_subtrees():
            rules.add(tree.data)
            words |= {child.type for child in tree.children if isinstance(child, Token)}
    known = {str(r.alias or r.origin.name) for r in lark.rules}
    without_a_node = {
        "call_text",
        "expr_text",
        "clause",
        "axis",
        "unit",
        "product",
        "sum",
        "rel",
        "negation",
        "conj",
        "expr",
    }
    assert sorted(r for r in known - rules - without_a_node if not r.startswith("_")) == []
    assert sorted({t.name for t in lark.terminals} - words - {"SLIP", *lark.ignore_tokens}) == []


def test_every_kind_of_record_has_an_example() -> None:
    kinds = {k for k in vars(nodes).values() if isinstance(k, type) and attrs.has(k)} - {nodes.Span, nodes.File}
    assert sorted(k.__name__ for k in kinds - {type(r) for r in everything()}) == []


def test_every_field_of_every_record_is_used_in_an_example() -> None:
    used = {
        (type(r), f.name) for r in everything() for f in attrs.fields(type(r)) if getattr(r, f.name) not in (None, ())
    }
    kinds = {k for k in vars(nodes).values() if isinstance(k, type) and attrs.has(k)} - {nodes.Span, nodes.File}
    fields = {(k, f.name) for k in kinds for f in attrs.fields(k) if f.name != "span"}
    assert sorted(f"{k.__name__}.{name}" for k, name in fields - used) == []


def test_every_variant_has_an_example() -> None:
    found = everything()

    def of(kind: type, name: str) -> set[Any]:
        return {getattr(r, name) for r in found if isinstance(r, kind)}

    policies = {r.args[0] for r in found if isinstance(r, nodes.Clause) and r.word == "copies"}
    words = {r.word for r in found if isinstance(r, nodes.Clause)} - {"copies"} | policies
    assert CLAUSE_WORDS - words == set()
    assert of(nodes.Split, "kind") == {"equal", "sizes", "chunk", "spread"}
    assert of(nodes.Pad, "kind") == {"zero", "live", "undefined"}
    assert any(r.range for r in found if isinstance(r, nodes.Dim)) and any(
        r.range for r in found if isinstance(r, nodes.Any_)
    )
    assert any(r.range for r in found if isinstance(r, nodes.Dimension))
    assert of(nodes.Tensor, "kind") == {"parameter", "buffer", "frozen"}
    assert of(nodes.Blob, "fate") == {"keep", "first", "remap", "drop"}
    assert set(ENTRY_CLASSES) - of(nodes.Entry, "of") == set()
    assert {"+", "-", "*", "/", "%", "==", "!=", "<=", ">", "and", "or"} - of(nodes.Binary, "operator") == set()
    groups = [r for r in found if isinstance(r, nodes.Group)]
    assert any(g.members for g in groups) and any(g.without for g in groups) and any(g.stated for g in groups)
    assert (
        any(g.of_model for g in groups)
        and any(g.indices for g in groups)
        and any(g.order == "reversed" for g in groups)
    )
    assert {"like", None} <= {
        r.shape if r.shape in ("like", None) else "flat" for r in found if isinstance(r, nodes.States)
    }


def test_every_function_and_every_limit_is_named() -> None:
    text = text_of(PAGES)
    assert set(FUNCTIONS) >= {"min", "max", "lcm", "default", "size", "ceil"}
    assert [f for f in FUNCTIONS if f"{f}(" not in text] == []
    assert Scope(given={"a": 7}).lookup("a.size", nodes.NOWHERE) == 7  # as the page says of x.size
    limits = {c for c, e in catalogue().items() if re.search(r"\btoo (large|deep|many|long)\b", e.title) and c < "E300"}
    assert [c for c in limits if c not in text] == []


def test_every_statement_of_the_grammar_is_explained() -> None:
    text = text_of(PAGES)
    words = set(re.findall(r'^\w+: *"(\w+)"', grammar_text(), re.MULTILINE)) | {"none", "like", "each", "flat", "trim"}
    assert {"let", "model", "layout", "mesh", "derive", "blob"} <= words
    assert [w for w in words if not re.search(rf"\b{w}\b", text)] == []


@pytest.mark.parametrize("name", sorted(["zero0", "zero1", "zero2", "zero3", "plain"]))
def test_every_line_that_is_explained_is_in_the_shipped_specs(name: str) -> None:
    text = text_of(SHIPPED)
    assert re.search(rf"^## .*`{name}\(", text, re.MULTILINE)


def test_what_the_page_quotes_of_shipped_layouts_is_what_ships() -> None:
    """Quoted lines are those of specs/, but for spaces and comments.

    One `let` is shortened.
    """
    text = text_of(SHIPPED)
    quoted = [m[1] for m in re.finditer(r"```ucpl layout\n(.*?)```", text, re.DOTALL)]
    assert len(quoted) > 5

    def lines(source: str) -> list[str]:
        joined = re.sub(r"\n +(?=in |as |key |when |buckets )", " ", re.sub(r" *#[^\n]*", "", source))
        return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]

    shipped = {line for path in (ROOT / "specs").glob("*.ucpl") for line in lines(path.read_text(encoding="utf-8"))}
    assert [line for q in quoted for line in lines(q) if line not in shipped and not line.startswith("let ")] == []


def test_every_line_of_the_dictionary_is_a_line_of_the_language() -> None:
    text = text_of(PAGES).partition("## If you know other words")[2].partition("\n## ")[0]
    shown = " ".join(re.findall(r"^\|[^|]*\|([^|]*)\|$", text, re.MULTILINE))
    lines = [line for line in re.findall(r"`([^`]+)`", shown) if " = " in line]
    assert len(lines) >= 19
    for line in lines:
        (record,) = items_of(Block("dictionary", 0, ("ucpl", "layout"), f"{line}\n"))
        assert isinstance(record, nodes.Entry | nodes.States), line


def test_every_shipped_file_and_every_framework_is_named() -> None:
    text = text_of([*PAGES, *SHIPPED])
    assert [p.name for p in (ROOT / "specs").glob("*.ucpl") if f"specs/{p.name}" not in text] == []
    assert [name for name in formats() if f"`{name}`" not in text] == []


# ---- the first page --------------------------------------------------------------------------------------------------


def test_the_complete_file_of_the_first_page_converts_a_folder(tmp_path: Path) -> None:
    """Its commands run.

    Each rank has its part of each matrix, as torch splits it.
    """
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "vocab_size": 11,
        "intermediate_size": 6,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
    }
    shapes = {"model.embed_tokens": (11, 8), "model.norm": (8,), "lm_head": (11, 8)}
    for layer in (f"model.layers.{n}." for n in range(4)):
        shapes |= {f"{layer}{norm}": (8,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}self_attn.{x}_proj": (rows, 8) for x, rows in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
        shapes |= {f"{layer}mlp.{x}_proj": (6, 8) for x in ("gate", "up")} | {f"{layer}mlp.down_proj": (8, 6)}
    torch.manual_seed(0)
    folder = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    save_file(folder, tmp_path / "folder" / "model.safetensors", {"format": "pt"})
    page = blocks(FIRST)
    (tmp_path / "llama.ucpl").write_text(next(b.text for b in page if b.info == ("ucpl", "file")))
    commands = [c for b in page if b.info == ("sh",) for c in re.findall(r"^\$ (.*?)(?: +#.*)?$", b.text, re.MULTILINE)]
    with contextlib.chdir(tmp_path):
        for command in commands:
            done = ucpl(*shlex.split(command)[1:])
            assert done.status == 0, f"{command}\n{done.out}{done.err}"
    assert {c.split()[1] for c in commands} == {"check", "roundtrip", "convert"}
    found = torch.load(tmp_path / "ranks" / "stage_1_rank_1.pt")
    layer = "model.layers.3."
    parts = [folder[f"{layer}self_attn.{x}_proj.weight"].chunk(2)[1] for x in "qkv"]
    assert torch.equal(found["layers.1.qkv"], torch.cat(parts))
    assert torch.equal(found["layers.1.out"], folder[f"{layer}self_attn.o_proj.weight"].chunk(2, 1)[1])
    parts = [folder[f"{layer}mlp.{x}_proj.weight"].chunk(2)[1] for x in ("gate", "up")]
    assert torch.equal(found["layers.1.gate_up"], torch.cat(parts))
    assert torch.equal(found["head"][:5], folder["lm_head.weight"][6:]) and "embed" not in found
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == folder.keys() and all(torch.equal(back[k], folder[k]) for k in folder)
