"""Formats come from entry points; only their own code names them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from tests.registry.trees import trees
from ucpl import installed, registry
from ucpl.errors import UcplError
from ucpl.installed import entry_points as installed_points
from ucpl.registry import Format, entries, format_named, format_of_layout, formats

UCPL = Path(entries.__file__).parents[1]
# Words that are a format's name and something else, too: the package of an optimizer's class, the name of a folder, and the
# kind of a container.
OTHERS = {
    ("conversion/exporting.py", "huggingface"),  # a folder of verl
    ("formats/dcp/per_rank.py", "huggingface"),
    ("formats/verl/writing.py", "huggingface"),
    ("ranks/engines.py", "deepspeed"),
    ("formats/folders/kinds.py", "trainer"),
    ("formats/folders/kinds.py", "accelerate"),
}


SHARED = (
    "folders",
    "info_keys",
    "leaving",
    "named_files",
    "opening",
    "optimizer_hypers",
    "overlooked",
    "peft_names",
    "run_steps",
)


class Other(Format):
    name = "other"
    place = 5
    layouts = ("other_folder",)


class Impostor(Format):
    name = "dcp"


@pytest.fixture(autouse=True)
def again() -> Iterator[None]:
    formats.cache_clear()
    format_of_layout.cache_clear()
    yield
    formats.cache_clear()
    format_of_layout.cache_clear()


def with_formats(monkeypatch: pytest.MonkeyPatch, *others: object) -> None:
    """As if packages with these formats were installed."""
    mine = list(installed_points(registry.GROUP))
    module = ModuleType("others_of_a_test")
    vars(module).update({f"o{n}": other for n, other in enumerate(others)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = [(f"n{n}", f"{module.__name__}:o{n}") for n in range(len(others))]
    monkeypatch.setattr(entries, "entry_points", lambda group: [*mine, *made])


def test_a_format_of_another_package_is_found_and_asked_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "other" not in formats()
    formats.cache_clear()
    with_formats(monkeypatch, Other)
    assert next(iter(formats())) == "other"
    assert format_of_layout("other_folder") is format_named("other")


def test_two_formats_of_one_name_and_what_is_no_format_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (Impostor(), object(), Format()):
        formats.cache_clear()
        monkeypatch.undo()
        with_formats(monkeypatch, other)
        with pytest.raises(UcplError) as caught:
            formats()
        assert caught.value.diagnostics[0].code == "E445"


def test_an_unknown_name_is_a_format_without_flags() -> None:
    assert format_named("nobody") is format_named("")
    assert not format_named("").has_tensors_alone({}) and not format_named("").has_optimizer


@pytest.mark.parametrize(
    ("source", "target", "left"),
    [
        ("megatron_legacy", "megatron_legacy", {"optimizer"}),
        ("megatron_legacy", "deepspeed", {"optimizer", "tp", "pp", "ep", "vpp"}),
        ("torch_file", "torch_file", set()),
        ("torch_file", "plain", {"optimizer_file", "model", "optimizer", "scheduler", "wrap", "named", "master_list"}),
        ("deepspeed", "dcp", set()),
        ("", "dcp", set()),
    ],
)
def test_a_target_takes_over_what_its_record_says(source: str, target: str, left: set[str]) -> None:
    assert format_named(source).not_inherited(format_named(target)) == {"file", "weights", "full", *left}


def test_the_page_for_authors_names_each_attribute_of_the_record() -> None:
    page = (UCPL.parent / "docs" / "ADD_A_FORMAT.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)(?:\(\))?`", page))
    assert {name for name in vars(Format) if not name.startswith("_")} <= named
    assert len(page.splitlines()) <= 150


@cache
def homes() -> dict[str, str]:
    """The folder of each format, by its name."""
    return {name: type(one).__module__.removeprefix("ucpl.").replace(".", "/") + "/" for name, one in formats().items()}


def names_in(path: str, tree: ast.AST) -> set[tuple[str, str]]:
    """Names of formats in a module outside their folders.

    A record may name another format. `torch` is also the name of a package, and `__all__` lists functions.
    """
    if path in {f"{home}__init__.py" for home in homes().values()}:
        return set()
    known = {name for name, home in homes().items() if not path.startswith(home)} - {"torch"}
    listed = {id(one) for node in ast.walk(tree) if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
              for one in ast.walk(node.value)}  # fmt: skip
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
             and id(node) not in listed}  # fmt: skip
    return {(path, name) for name in found & known}


def compared_in(path: str, tree: ast.AST) -> set[tuple[str, str]]:
    """Names of formats in comparisons, outside the folder of that format."""
    found = set()
    values = {one.targets[0].id: one.value for one in ast.walk(tree)
              if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)}  # fmt: skip
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            patterns = [one for case in node.cases for one in ast.walk(case.pattern)]
            sides = [node.subject, *(one.value for one in patterns if isinstance(one, ast.MatchValue))]
        asked = {one.attr if isinstance(one, ast.Attribute) else one.id for side in sides for one in ast.walk(side)
                 if isinstance(one, ast.Attribute | ast.Name)}  # fmt: skip
        if not asked & {"format", "framework"}:
            continue
        sides += [values[name] for name in asked & values.keys()]
        for one in (one for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)):
            if isinstance(one.value, str) and one.value in homes() and not path.startswith(homes()[one.value]):
                found.add((path, one.value))
    return found


def test_no_other_code_has_a_formats_name() -> None:
    assert {found for path, tree in trees().items() for found in names_in(path, tree)} == OTHERS


def test_no_other_code_compares_the_name_of_a_format() -> None:
    """A flag of the record answers the question."""
    assert {found for path, tree in trees().items() for found in compared_in(path, tree)} == set()


@pytest.mark.parametrize(
    "line",
    [
        "if source.format == 'deepspeed': pass",
        "if source.format not in ('deepspeed', 'universal'): pass",
        "if 'torch' != one.checkpoint.framework: pass",
        "if framework in {'torch', ''}: pass",
        "_SPEC = ('', 'torch')\nif framework not in _SPEC: pass",
        "match source.format:\n    case 'torch' | 'dcp': pass",
    ],
)
def test_no_comparison_of_a_format_is_passed_over(line: str) -> None:
    assert compared_in("formats/megatron/reading.py", ast.parse(line))
    assert not compared_in("formats/megatron/reading.py", ast.parse("if source.format == 'megatron_core': pass"))


def test_no_other_code_imports_the_code_of_one_format() -> None:
    """Other rooms import only shared modules of `formats`.

    A record imports the rest.
    """
    shared = {"ucpl.formats", *(f"ucpl.formats.{name}" for name in SHARED)}
    found = set()
    for path, tree in trees().items():
        if path.startswith("formats/"):
            continue
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {
                (path, name)
                for name in names
                if name.startswith("ucpl.formats.") and ".".join(name.split(".")[:3]) not in shared
            }
    assert found == set()


@pytest.mark.parametrize("group", ["ucpl.specs", "pytest11", "nobody.s"])
def test_entry_points_are_those_of_importlib(group: str) -> None:
    ours = sorted(set(installed_points(group)))
    theirs = sorted({(point.name, point.value) for point in metadata.entry_points(group=group)})
    assert ours == theirs


def test_a_checkout_has_its_formats_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert {name for name, _ in installed_points("ucpl.formats")} == {*formats()}


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    formats.cache_clear()
    monkeypatch.setattr(entries, "entry_points", lambda group: [("broken", "no_such_package_of_a_test:FORMAT")])
    with pytest.raises(UcplError, match="no_such_package_of_a_test"):
        formats()


def test_a_strange_pyproject_above_the_package_is_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n', encoding="utf-8")
    info = tmp_path / "ucpl-0.1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[ucpl.formats]\ndcp = ucpl.formats.dcp:FORMAT\n", encoding="utf-8")
    monkeypatch.setattr(installed, "__file__", str(tmp_path / "ucpl" / "installed.py"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [*installed_points("ucpl.formats")] == [("dcp", "ucpl.formats.dcp:FORMAT")]
