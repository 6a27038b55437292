"""The pages hold.

Their commands run, their tables name existing things, and they speak of the product alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.command import Done, ucpl
from tests.docs.blocks import ROOT, Block, blocks
from ucpl.cli.verbs import VERBS
from ucpl.errors import Exit
from ucpl.errors.document import EXIT_MEANING

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [path for folder in ("editors", "examples") for path in sorted((ROOT / folder).glob("*/README.md"))]
README = blocks(ROOT / "README.md")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- commands of the pages ------------------------------------------------------------------------------------------


def commands(block: Block) -> list[tuple[str, str]]:
    """Each command of a console block with the page's output."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in found]


_TIME = re.compile(r"(?<=\S) in [0-9.e+-]+ s(?:, [0-9.e+-]+ MiB/s)?$", re.MULTILINE)


def agrees(shown: str, output: str) -> bool:
    """Return True if an output equals the page's.

    A line `...` means any lines, a time for any; nothing: anything.
    """
    if not shown:
        return True
    shown, output = (_TIME.sub("", text) for text in (shown, output))
    parts = [re.escape(p) for p in re.split(r"^\.\.\.$\n?", shown + "\n", flags=re.MULTILINE)]
    return re.fullmatch(r"(?:.*\n)*?".join(parts), output if output.endswith("\n") else output + "\n") is not None


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("...\nb", "x\ny\nb\n", True),
        ("...\nb", "x\ny\n", False),
        ("a\n...", "a\n", True),
    ],
)
def test_outputs_are_really_compared(shown: str, output: str, same: bool) -> None:
    assert agrees(shown, output) == same


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the examples in it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def run(command: str, here: Path) -> Done:
    """Run the command as a shell in that folder.

    A verb and no more is run here: a start takes longer.
    """
    argv = shlex.split(command)
    if argv[0] == "ucpl" and not set(command) & set("|&;<>$`"):
        with contextlib.chdir(here):
            return ucpl(*argv[1:])
    script = f'ucpl() {{ "{sys.executable}" -m ucpl "$@"; }}\n{command}\n'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=here, env=environment, capture_output=True, text=True, timeout=1800
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_the_commands_of_the_readme_do_what_it_shows(here: Path) -> None:
    ran = 0
    for block in README:
        if block.info != ("console",):
            continue
        for command, shown in commands(block):
            done = run(command, here)
            ran += 1
            assert done.status == 0, f"{block}: {command}\n{done.out}{done.err}"
            assert agrees(shown, done.out), f"{block}: {command}\n{done.out}"
    assert ran >= 5


def test_the_python_of_the_readme_runs(here: Path) -> None:
    code = [b.text for b in README if b.info == ("python",)]
    assert code
    out = io.StringIO()
    with contextlib.chdir(here), contextlib.redirect_stdout(out):
        exec(compile("\n".join(code), "README.md", "exec"), {"__name__": "readme"})
    assert "read back" in out.getvalue()
    with pytest.raises(import_module("ucpl").UcplError) as caught, contextlib.chdir(here):
        import_module("ucpl").verify("no/such/folder")
    assert (caught.value.diagnostics[0].code, caught.value.exit_status) == ("E437", 3)


def test_what_the_readme_shows_of_an_inferred_text_is_in_it(here: Path) -> None:
    import ucpl

    shown = next(b for b in README if b.info == ("ucpl", "excerpt"))
    text = ucpl.infer(here / "examples" / "checkpoint").text()
    lines = {" ".join(line.split()) for line in text.splitlines()}
    wanted = [" ".join(line.split()) for line in shown.text.splitlines()]
    assert [line for line in wanted if line not in ("", "...") and line not in lines] == []


def test_only_marked_blocks_are_not_run() -> None:
    known = {("console",), ("console", "no-run"), ("python",), ("text",), ("ucpl", "excerpt")}
    assert {b.info for b in README} <= known
    assert [b.info for b in README].count(("console", "no-run")) == 1


# ---- named things exist -----------------------------------------------------------------------------------------------


def test_every_function_of_the_table_of_decisions_exists() -> None:
    text = (ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8")
    table = text.split("## The function of each decision")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)(?::(\w+))?`", table)
    assert len(named) > 15
    for file, name in named:
        code = (ROOT / "ucpl" / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b", code, re.MULTILINE), f"{file}: {name}"


def test_every_verb_of_the_codemap_is_there() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE)
    rooms = {p.parent.name for p in (ROOT / "ucpl").glob("*/__init__.py")} | {
        "digests",
        "installed",
        "owned",
        "records",
        "resources",
        "testing",
        "texts",
    }
    assert {room for room, _ in rows} == rooms
    missing = []
    for room, verbs in rows:
        sources = [ROOT / "ucpl" / f"{room}.py", *(ROOT / "ucpl" / room).rglob("*.py")]
        known = "\n".join(p.read_text(encoding="utf-8") for p in sources if p.is_file())
        for verb in re.findall(r"`(?:\w+\.)?(\w+)`", verbs):
            if not re.search(rf"\b(?:def|class) {verb}\b|^ *{verb}(?:: [^=]+)? =|^    \"{verb}\"", known, re.MULTILINE):
                missing.append(f"{room}: {verb}")
    assert missing == []


def test_modules_that_pages_name_are_there() -> None:
    path = re.compile(
        r"`((?:ucpl/(?!state)|files/|language/|layout/|errors/|tests/|specs/|grammar/|benchmarks/|examples/)[\w./]+)`"
    )
    missing = []
    for page in PAGES:
        for name in path.findall(page.read_text(encoding="utf-8")):
            if not any((base / name).exists() for base in (ROOT, ROOT / "ucpl")) and "NAME" not in name:
                missing.append(f"{relative(page)}: {name}")
    assert missing == []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in folder.glob("*.md") if p.name != "README.md" and f"({p.name})" not in text] == []


def test_a_decision_has_twelve_lines() -> None:
    pages = [p for p in (ROOT / "docs" / "decisions").glob("*.md") if p.name != "README.md"]
    assert [p.name for p in pages if p.read_text(encoding="utf-8").count("\n") > 12] == []


def test_the_readme_lists_every_exit_status() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").partition("The exit status is ")[2].split())
    assert set(EXIT_MEANING) == {v for k, v in vars(Exit).items() if k.isupper()}
    assert [f"{s} ({meaning}" for s, meaning in EXIT_MEANING.items() if f"{s} ({meaning}" not in text] == []


def test_the_readme_lists_every_verb_once() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("| verbs |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", text)) == sorted(VERBS)


def test_what_the_readme_says_of_python_is_the_package() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ucpl = import_module("ucpl")
    assert [n for n in re.findall(r"ucpl\.(\w+)\(", text) if not callable(getattr(ucpl, n))] == []
    assert "`ucpl.parse, resolve, locate, build, order, execute`" in text
    assert {"parse", "resolve", "locate", "build", "order", "execute"} <= set(ucpl.__all__)


def test_the_readme_is_the_description_of_the_package() -> None:
    assert 'readme = "README.md"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@cache
def anchors(path: Path) -> set[str]:
    prose = re.sub(r"^(```+).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ +(.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_heading_that_is_linked_to_is_there(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    wrong = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if "://" not in target and anchor not in anchors((page.parent / target) if target else page):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def test_the_commands_of_the_guarantees_are_there() -> None:
    text = (ROOT / "docs" / "GUARANTEES.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)", text))
    assert named <= targets and {"faults", "powerloss", "mutants", "interop", "test"} <= named
    for module in re.findall(r"python -m (tests\.[\w.]+)", text):
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
