"""Laws of the tree.

They apply to every file, page and wheel of the project.
"""

import ast
import contextlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from editors import textmate
from ucpl.errors import Exit, catalogue
from ucpl.errors.document import EXIT_MEANING, errors_markdown

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ucpl"
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
CODE = re.compile(r"[EW]\d{3}")
WORD = re.compile(rf"\b{CODE.pattern}\b")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [path for folder in ("editors", "examples") for path in sorted((ROOT / folder).glob("*/README.md"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tracked() -> list[Path]:
    """Files that git knows, in a checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


# --- Code -----------------------------------------------------------------------------------------------------------


def test_every_module_says_what_it_is_for(parsed: dict[str, ast.Module]) -> None:
    assert [name for path in MODULES if not ast.get_docstring(parsed[name := relative(path)])] == []


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    assert not [relative(path) for path in MODULES if path.stem in {"utils", "util", "helpers", "common", "misc"}]


def test_the_order_of_imports_is_a_contract() -> None:
    contracts = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    down = contracts["down"]
    assert down["exhaustive"] and down["containers"] == ["ucpl"]
    named = set(re.findall(r"\w+", " ".join(down["layers"]))) | set(down["exhaustive_ignores"])
    assert named >= set(ROOMS)
    assert {"files", "files-know-no-plans", "plans-touch-no-files", "torch", "lark", "networkx"} <= set(contracts)


def test_torch_is_imported_where_it_is_declared(parsed: dict[str, ast.Module]) -> None:
    """The contract covers every room, and docs/ARCHITECTURE.md names the same ones."""
    known = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    left_out = {line.removesuffix(" -> torch").removesuffix(".**") for line in known["torch"]["ignore_imports"]}
    users = {path for path, tree in parsed.items() if has_torch(tree)}
    rooms = {path.split("/")[1] for path in users if not path.startswith("ucpl/storage/")}
    files = {path for path in users if path.startswith("ucpl/storage/")}
    assert left_out == {f"ucpl.{room}" for room in rooms} | {
        file.removesuffix(".py").replace("/", ".") for file in files
    }
    text = " ".join((ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8").split())
    said = re.findall(
        r"[\w/.]+", text.partition("torch is imported in ")[2].partition(" only (")[0].replace(" and ", ", ")
    )
    assert sorted(said) == sorted(rooms | {file.removeprefix("ucpl/") for file in files})


def has_torch(tree: ast.Module) -> bool:
    """Return True if a module imports it by a statement."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(one.name.partition(".")[0] == "torch" for one in names):
                return True
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == "torch":
                return True
    return False


# The memory of a tensor of a running job, and objects that only look like its numbers: `ucpl.live.tensors` alone asks for it.
OF_MEMORY = {
    "data_ptr", "untyped_storage", "_local_tensor", "to_local", "local_shards", "resolve_conj", "resolve_neg", "as_strided",
    "from_numpy", "frombuffer", "numpy", "__array__", "__array_interface__", "from_dlpack",
}  # fmt: skip
OF_ARRAYS = {  # modules without tensors of a job
    "ucpl/runtime/values.py": "casts arrays of its own by torch",
    "ucpl/verification/model_class.py": "looks at a model that it loaded itself",
}


def taken_of_memory(tree: ast.Module) -> set[str]:
    """Names by which a module takes memory of tensors.

    Numpy's functions of the same names and `import numpy` are none.
    """
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="np")) | ast.Attribute(value=ast.Attribute(value=ast.Name(id="np"))):
                continue
            case ast.Attribute(value=ast.Attribute(attr="stride_tricks")):
                continue
            case ast.Attribute(attr=name) if name in OF_MEMORY:
                found.add(name)
            case ast.Call(
                func=ast.Attribute(attr="view"), args=[ast.Attribute(value=ast.Name(id="torch"), attr="uint8")]
            ):
                found.add("view(torch.uint8)")
            case ast.Name(id="DTensor") | ast.ImportFrom(names=[ast.alias(name="DTensor")]):
                found.add("DTensor")
    return found


def test_memory_of_tensors_is_taken_at_one_entrance(parsed: dict[str, ast.Module]) -> None:
    taken = {path: taken_of_memory(tree) for path, tree in parsed.items() if path not in OF_ARRAYS}
    assert {path for path, names in taken.items() if names} == {"ucpl/live/tensors.py"}
    for path in OF_ARRAYS:
        assert taken_of_memory(parsed[path]), path


@pytest.mark.parametrize(
    "line",
    [
        "x.data_ptr()", "x.detach().cpu().numpy()", "torch.from_numpy(x)", "torch.frombuffer(x, dtype=d)",
        "x.view(torch.uint8)",
        "d._local_tensor", "isinstance(x, DTensor)", "torch.as_strided(x, s, t)", "take = torch.Tensor.numpy",
        "np.asarray(x.__array__())",
    ],
)  # fmt: skip
def test_no_way_around_the_entrance_is_passed_over(line: str) -> None:
    assert taken_of_memory(ast.parse(line))
    assert not taken_of_memory(
        ast.parse("np.frombuffer(x); np.lib.stride_tricks.as_strided(x); import numpy as np; x.view(d)")
    )


# Everything that the proof of a graph uses of the rooms that make graphs: values, and the sort of a column. The contract
# `proof` knows modules alone, and does not see a join that a package passes on (`from ucpl.tables import clip`).
OF_MAKERS = {
    "ucpl.tables": {"each", "once"},
    "ucpl.tables.operations": {"Fill", "Flow", "Lane"},
    "ucpl.graph": {"Graph"},
    "ucpl.placement": {"Part", "Placement", "element_name"},
    "ucpl.planning": {"Plan", "Runs"},
}
OF_ANYBODY = ("ucpl.errors", "ucpl.extents", "ucpl.layout", "ucpl.records")  # rooms that know nothing of boxes


def taken_beside(text: str, proof: set[str]) -> list[str]:
    """The forbidden imports of a module of the proof.

    proof: its modules, which may import each other.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):  # a module under a name has all that is in it
                found += [one.name for one in names if one.name.partition(".")[0] in ("importlib", "sys", "ucpl")]
            case ast.ImportFrom(module=module, names=names, level=level):
                name = module or ""
                is_free = (
                    name in proof or name.startswith(OF_ANYBODY) or name.partition(".")[0] not in ("importlib", "ucpl")
                )
                may = OF_MAKERS.get(name, set())
                found += [f"{name}.{one.name}" for one in names if level or not (is_free or one.name in may)]
    return found


def test_the_proof_takes_no_joins_from_what_it_proves() -> None:
    contracts = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    (package,) = contracts["proof"]["source_modules"]
    files = sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    texts = {f"{package}.{path.stem}": path.read_text(encoding="utf-8") for path in files}
    proof = set(texts)
    assert f"{package}.coverage" in proof
    assert {name: taken for name, text in texts.items() if (taken := taken_beside(text, proof))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from ucpl.tables import clip, once",
        "from ucpl.tables import clip as once",
        "from ucpl.tables import *",
        "from ucpl.tables.space import gaps",
        "from ucpl.tables.operations import Moves",
        "from ucpl import tables",
        "from ucpl.placement import locate",
        "from ucpl.placement.boxes import subtract",
        "from ucpl.graph import optimise",
        "from ucpl.verification.elements import Elements",
        "from . import where",
        "import ucpl.tables.strided as strided",
        "from importlib import import_module",
    ],
)
def test_no_way_around_that_is_passed_over(line: str) -> None:
    assert taken_beside(line, {"ucpl.verification.proof.coverage"})
    assert not taken_beside("import numpy as np\nfrom ucpl.tables import once\nfrom ucpl.errors import fail\n", set())


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("ucpl", "lark networkx numpy torch"), ("ucpl.errors", "lark networkx numpy torch"), ("ucpl.cli", "torch")],
)
def test_importing_starts_in_a_blink(module: str, heavy: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({heavy.split()}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_tracked_file_names_the_machine_it_was_made_on() -> None:
    folder = re.compile(rb"(?<![\w.~}/-])/(?:work|root|opt)/")
    found = {relative(path): folder.findall(path.read_bytes()) for path in tracked() if path != Path(__file__)}
    assert {name: hits for name, hits in found.items() if hits} == {}


# --- Measures of the code: each only becomes smaller ------------------------------------------------------------------

ANY_MAX = 28  # of the name `Any` in the package, imports counted
PARAMETERS_MAX = 5  # of a function, besides self
SHARE_OF_LONG_SIGNATURES = 0.02
FUNCTION_LINES_MAX = 80
CLASS_LINES_MAX = 500
MODULE_LINES_MIN = 60  # of a module with one importer
CLASS_NAMES_TWICE_MAX = 23  # a word of the language: its node, and its resolved form
CLASSES_OF_TWO_MODULES = {"Report", "UcplCallback"}  # public names: of `execute` and `roundtrip`, of two frameworks


@pytest.fixture(scope="module")
def parsed() -> dict[str, ast.Module]:
    """Every module of the package, as a tree.

    Read once for all who ask.
    """
    return {relative(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def named_any(tree: ast.AST) -> int:
    """The number of `Any` in a module.

    By name, as `typing.Any`, in an import, or in an annotation that is a text.
    """
    count = 0
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any") | ast.alias(name="Any"):
                count += 1
            case ast.Constant(value=str(text)) if "Any" in text:
                with contextlib.suppress(SyntaxError):  # a sentence
                    count += named_any(ast.parse(text, mode="eval"))
    return count


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of a function, besides self or cls."""
    a = function.args
    named = [one.arg for one in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    named += [one.arg for one in (a.vararg, a.kwarg) if one is not None]
    return len([name for name in named if name not in ("self", "cls")])


def test_types_are_reported(parsed: dict[str, ast.Module]) -> None:
    """`object` and a question for the class replace `Any`."""
    found = {path: count for path, tree in parsed.items() if (count := named_any(tree))}
    assert sum(found.values()) <= ANY_MAX, found


def test_any_is_counted_wherever_it_is_written() -> None:
    text = (
        "import typing\nfrom typing import Any\nx: Any\ny: typing.Any\nz: 'list[Any]'\nw = 'Any word of a sentence.'\n"
    )
    assert named_any(ast.parse(text)) == 4
    (function,) = ast.parse("def f(self, a, /, b, *c, d, **e): ...").body
    assert isinstance(function, ast.FunctionDef) and parameters(function) == 5


def test_nobody_reads_what_a_message_says(parsed: dict[str, ast.Module]) -> None:
    """The subjects of a diagnostic are in `about`, as values.

    A text may be written anew.
    """

    def is_text(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in ("message", "remedy")

    found = []
    for path, tree in parsed.items():
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.expr)):
            asked = isinstance(node, ast.Attribute) and is_text(node.value)  # d.message.startswith
            held = (
                isinstance(node, ast.Compare)
                and any(map(is_text, (node.left, *node.comparators)))
                and not all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            )
            if asked or held:
                found.append(f"{path}:{node.lineno}")
    assert found == []


def test_functions_ask_for_little(parsed: dict[str, ast.Module]) -> None:
    functions = [
        (path, node.name, parameters(node))
        for path, tree in parsed.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [one for one in functions if one[2] > PARAMETERS_MAX]
    assert len(long) <= SHARE_OF_LONG_SIGNATURES * len(functions), long


def lines_of(node: ast.stmt) -> int:
    """Lines of a definition, without its decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_and_classes_are_short(parsed: dict[str, ast.Module]) -> None:
    found = {}
    for path, tree in parsed.items():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if lines_of(node) > FUNCTION_LINES_MAX:
                    found[path, node.name] = lines_of(node)
                case ast.ClassDef() if lines_of(node) > CLASS_LINES_MAX:
                    found[path, node.name] = lines_of(node)
    assert found == {}


def test_a_class_name_has_one_meaning(parsed: dict[str, ast.Module]) -> None:
    """Private classes have the names that their modules need."""
    found: dict[str, set[str]] = {}
    for path, tree in parsed.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path)
    several = {name for name, paths in found.items() if len(paths) > 1 and "ucpl/language/nodes.py" not in paths}
    assert several == CLASSES_OF_TWO_MODULES, "two ideas with one name: rename one of them"
    assert sum(len(paths) > 1 for paths in found.values()) <= CLASS_NAMES_TWICE_MAX


def importers_of(parsed: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Files of the package that import each module, by its dotted name.

    Imports inside functions count.
    """
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in parsed}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path, tree in parsed.items():
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=modules):
                    taken = {one.name for one in modules}
                case ast.ImportFrom(module=str(module), names=inner, level=0):
                    taken = {below if (below := f"{module}.{one.name}") in names else module for one in inner}
                case _:
                    continue
            for name in taken & set(names):
                if names[name] != path:
                    found[name].add(path)
    return found


def test_no_small_module_serves_one_other(parsed: dict[str, ast.Module]) -> None:
    """A module with one importer belongs into it.

    Unless it is an idea of its own of more than a few lines.
    """
    importers = importers_of(parsed)
    found = set()
    for path in parsed:
        count = (ROOT / path).read_text(encoding="utf-8").count("\n")
        name = path.removesuffix(".py").replace("/", ".")
        if not path.endswith("/__init__.py") and count < MODULE_LINES_MIN and len(importers[name]) == 1:
            found.add("/".join(path.split("/")[-2:]))
    assert found == set(), "merge it into its importer"


def test_importers_are_found_however_they_import() -> None:
    texts = {
        "ucpl/__init__.py": "",
        "ucpl/a.py": "from ucpl import b\nimport ucpl.c\nfrom ucpl.a import x",
        "ucpl/b.py": "def f():\n    from ucpl.a import x\n",
        "ucpl/c/__init__.py": "import json\nfrom ucpl.c.d import y",
        "ucpl/c/d.py": "from ucpl.c import z",
    }
    assert importers_of({path: ast.parse(text) for path, text in texts.items()}) == {
        "ucpl": set(),
        "ucpl.a": {"ucpl/b.py"},
        "ucpl.b": {"ucpl/a.py"},
        "ucpl.c": {"ucpl/a.py", "ucpl/c/d.py"},
        "ucpl.c.d": {"ucpl/c/__init__.py"},
    }


# --- Pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ARCHITECTURE",
        "EDITORS",
        "LANGUAGE",
        "LAYOUTS",
        "PERFORMANCE",
        "PICTURES",
        "GUARANTEES",
        "REFERENCE",
        "TUTORIAL",
    ],
)
def test_the_page_exists_and_the_readme_leads_to_it(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").is_file()
    assert f"docs/{name}.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [room for room in ROOMS if not re.search(rf"\b{room}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"^(```+).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_every_page_has_its_place_in_the_site() -> None:
    """A new page of docs/ is in the `nav` of mkdocs.yml.

    Decisions are found automatically.
    """
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    pages = [name for name in names if not name.startswith("decisions/")]
    assert [name for name in pages if not re.search(rf": {re.escape(name)}$", text, re.MULTILINE)] == []


def test_the_page_of_errors_is_generated_and_not_committed() -> None:
    assert not (ROOT / "docs" / "ERRORS.md").exists(), "`make docs` builds it into the site"
    page = errors_markdown()
    assert [code for code, entry in catalogue().items() if f"## {code}\n\n**{entry.title}**" not in page] == []


def test_the_colours_of_editors_are_those_of_the_grammar() -> None:
    """When this fails: `make docs`, or `python -m editors.textmate editors/vscode/syntaxes/ucpl.tmLanguage.json`."""
    path = ROOT / "editors" / "vscode" / "syntaxes" / "ucpl.tmLanguage.json"
    assert json.loads(path.read_text(encoding="utf-8")) == textmate.grammar()


def test_every_code_has_a_known_exit_status_and_all_its_texts() -> None:
    statuses = {value for name, value in vars(Exit).items() if name.isupper()}
    assert set(EXIT_MEANING) == statuses
    for code, entry in catalogue().items():
        assert CODE.fullmatch(code)
        assert entry.exit_status in statuses, code
        assert entry.title and entry.meaning and entry.example and entry.remedy, code


def raised(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Codes in calls, and their places.

    A code in a comparison, a table or a text is not raised by it.
    """
    out: dict[str, str] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            given: list[ast.expr | None] = []
            match node:
                case ast.Call():
                    given = [*node.args, *(k.value for k in node.keywords)]
                case ast.arguments():
                    given = [*node.defaults, *node.kw_defaults]
                case ast.Assign(targets=[ast.Name(id="code")]):
                    given = [node.value]
            for value in given:
                chosen = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                for one in chosen:
                    if isinstance(one, ast.Constant) and isinstance(one.value, str) and CODE.fullmatch(one.value):
                        out.setdefault(one.value, path)
    return out


def test_every_code_that_is_raised_is_in_the_catalogue_and_the_reverse(parsed: dict[str, ast.Module]) -> None:
    found = raised(parsed)
    assert {code: path for code, path in found.items() if code not in catalogue()} == {}
    assert [code for code in catalogue() if code not in found] == []


def expected() -> set[str]:
    """Codes in texts that tests compare, and in golden files.

    A docstring expects nothing.
    """
    found = {
        code for path in (ROOT / "tests").rglob("*.txt") for code in WORD.findall(path.read_text(encoding="utf-8"))
    }
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if WORD.search(text) is None:
            continue
        tree = ast.parse(text)
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree) if path != Path(__file__) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                found |= set(WORD.findall(node.value))
    return found


def test_every_code_is_expected_by_a_test() -> None:
    assert set(catalogue()) - expected() == set(), "write a test that provokes it"


SHORT = {
    "README.md": 150,
    "CHANGELOG.md": 60,
    "docs/ARCHITECTURE.md": 200,
    "docs/GUARANTEES.md": 150,
    "docs/LANGUAGE.md": 200,
    "docs/REFERENCE.md docs/reference/*.md": 900,
}


@pytest.mark.parametrize(("pages", "lines"), SHORT.items())
def test_pages_for_users_are_short(pages: str, lines: int) -> None:
    found = [path for pattern in pages.split() for path in ROOT.glob(pattern)]
    assert found and sum(path.read_text(encoding="utf-8").count("\n") for path in found) <= lines


GENERATED = "generates this page"  # each of them says so, and names its command


def test_a_page_has_twelve_kilobytes_unless_a_program_generates_it() -> None:
    sizes = {relative(page): page.stat().st_size for page in PAGES}
    generated = {relative(page) for page in PAGES if GENERATED in page.read_text(encoding="utf-8")}
    assert {name: size for name, size in sizes.items() if size > 12_000 and name not in generated} == {}
    assert generated == {"docs/FORMATS.md"}


def test_the_changelog_speaks_of_this_version_or_the_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text or f"## [{PYPROJECT['project']['version']}]" in text


# --- Package --------------------------------------------------------------------------------------------------------


def test_every_dependency_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines if "==" in line)}
    project = PYPROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(line for group in project["optional-dependencies"].values() for line in group),
    ]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_every_pin_has_digests_but_torch() -> None:
    """The installed packages are compared with them.

    No file that the index replaced since is taken.
    """
    found: dict[str, str] = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        text = path.read_text(encoding="utf-8").replace(" \\\n", "")
        for line in (one for one in text.splitlines() if not one.startswith("#")):
            pin, *digests = line.split()
            assert digests and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in digests), line
            name, _, version = pin.partition("==")
            assert found.setdefault(name, version) == version
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines if "==" in line)}
    assert found == {name: pin for name, pin in pins.items() if name != "torch"}


def test_the_wheel_carries_grammar_specs_examples_and_catalogue(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {"ucpl/py.typed", "ucpl/__init__.pyi", *map(relative, MODULES)}
    for data in ("errors/catalogue/*.toml", "formats/*/*.toml", "formats/*/*.ucpl"):
        wanted |= {relative(path) for path in PACKAGE.glob(data)}
    for folder in ("grammar", "specs", "examples"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files, folder
        wanted |= {f"ucpl/_data/{relative(path)}" for path in files}
    assert wanted - names == set()
    shared = {name.partition(".data/data/")[2] for name in names if ".data/" in name}
    folders = ("bash-completion/completions/ucpl", "zsh/site-functions/_ucpl", "fish/vendor_completions.d/ucpl.fish")
    assert shared == {f"share/{name}" for name in folders}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name and ".data/" not in name} == {"ucpl"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
