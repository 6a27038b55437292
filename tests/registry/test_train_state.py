"""The records of a checkpoint have no field of one format.

Groups are matched in one place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from attrs import evolve, fields

import ucpl
from tests.registry.trees import trees
from ucpl.extents import TrainState, as_filed
from ucpl.extents.parallel_facts import ParallelFacts
from ucpl.files.checkpoint import Checkpoint, Own
from ucpl.formats.opening import framework, open_checkpoint
from ucpl.registry import formats

RECORDS: tuple[type[Any], ...] = (Checkpoint, TrainState, ParallelFacts)
FIELDS = [
    pytest.param(record, one.name, id=f"{record.__name__}.{one.name}") for record in RECORDS for one in fields(record)
]


@cache
def all_attributes() -> dict[str, list[tuple[str, ast.Attribute]]]:
    """(module, node) of the attributes of each name, without method calls."""
    found: dict[str, list[tuple[str, ast.Attribute]]] = {}
    for module, tree in trees().items():
        calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in calls:
                found.setdefault(node.attr, []).append((module, node))
    return found


def attributes(name: str) -> Iterator[tuple[str, str]]:
    """(module, expression) of each attribute of this name, without method calls."""
    return ((module, ast.unparse(node)) for module, node in all_attributes().get(name, ()))


@pytest.mark.parametrize(("record", "name"), FIELDS)
def test_a_field_is_of_no_single_format(record: type[Any], name: str) -> None:
    """Rooms outside of the formats read it.

    Its type belongs to no format, and its name has no word of a format's name.
    """
    if name != "own":
        assert any(not module.startswith(("formats/", "files/checkpoint.py")) for module, _ in attributes(name))
    hint = repr(get_type_hints(record)[name])
    assert "ucpl.formats" not in hint
    words = {word for one in formats() for word in one.split("_")} - {"torch"}
    assert not words & set(name.split("_"))


def test_only_a_format_looks_into_its_own_facts() -> None:
    names = re.compile(r"\b(checkpoint|source|opened|known|made)\.own$")
    found = {module for module, text in attributes("own") if names.search(text)}
    readers = {"formats/dcp/wrapped.py", "formats/megatron/homes.py", "formats/megatron/stacks.py"}
    readers.add("formats/trainer/writing.py")
    assert found == {"conversion/renaming.py", *readers}
    owners = [cls for cls in Own.__subclasses__() if cls.__module__.startswith("ucpl.")]
    assert all(cls.__module__.startswith("ucpl.formats.") for cls in owners)


def test_groups_are_matched_in_one_place() -> None:
    found = {
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "ucpl.files.groups"
        for name in node.names
        if name.name == "matched"
    }
    assert found == {"conversion/regrouping.py"}


@pytest.mark.parametrize("call", ["plain()", "zero1(dp=2)", "dcp(fsdp=2)"])
def test_a_writer_renders_the_groups_of_the_state(call: str) -> None:
    path = Path(__file__).parents[2] / "examples" / "checkpoint"
    plan, source = ucpl.plan(str(path), call), open_checkpoint(path)
    groups = tuple(evolve(group, hyper={**group.hyper, "lr": 0.123456}) for group in source.state.groups)
    final = evolve(source, state=evolve(source.state, groups=groups))
    writer = framework(plan.target.framework)
    made, changed = (writer.skeleton(plan.target, as_filed(plan.targets), one, None).files for one in (source, final))
    assert "0.123456" in repr(changed)
    assert "0.123456" not in repr(made)
