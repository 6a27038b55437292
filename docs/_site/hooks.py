"""What the site has beside the pages of docs/: pages that are made, links that lead out of docs/, the colours of the language.

mkdocs calls these functions by their names. Nothing is written but the site.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import sys
from pathlib import Path
from unittest import mock

import pygments.lexers
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the site is that of this checkout

from tests.docs.faults import page as faults_page  # noqa: E402
from ucpl.errors import catalogue  # noqa: E402
from ucpl.errors.document import errors_markdown  # noqa: E402
from ucpl.resources import grammar_text, spec_files, spec_text  # noqa: E402

COPIED = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "EXAMPLES.md": "examples/architectures/README.md",
}
MOVED = {
    "README.md": "index.md",
    "grammar/ucpl.lark": "GRAMMAR.md",
    "specs": "SPECS.md",
}  # files of the checkout, as pages
FENCE = re.compile(r"^(`{3,})(\w+)[^\n`]*$", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ERROR = re.compile(r"\bE\d{3}\b")
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
CODE = re.compile(r"^(`{3,}).*?^\1[ \t]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The decisions stand below their index, each in the order of its name; code of the language has colours."""
    pygments.lexers.LEXERS["UcplLexer"] = ("editors.pygments_lexer", "ucpl", ("ucpl",), ("*.ucpl",), ())
    folder = ROOT / "docs" / "decisions"
    pages = [f"decisions/{path.name}" for path in sorted(folder.glob("*.md")) if path.name != "README.md"]
    for section in config.nav or ():
        for items in section.values():
            for item in items if isinstance(items, list) else ():
                if item.get("Decisions") == "decisions/README.md":
                    item["Decisions"] = ["decisions/README.md", *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages: errors, faults, grammar, specs, verbs, and files outside docs/."""
    made = {name: (ROOT / path).read_text(encoding="utf-8") for name, path in COPIED.items()}
    made |= {
        "ERRORS.md": errors_markdown(),
        "FAULTS.md": faults_page(),
        "GRAMMAR.md": grammar_page(),
        "SPECS.md": specs_page(),
        "VERBS.md": verbs_page(),
    }
    made["EXAMPLES.md"] += examples()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as this site has its pages, and fences with a language alone: what else stands there is for the tests."""
    source = COPIED.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    out, place = [], 0
    for code in CODE.finditer(markdown):
        out += [linked(markdown[place : code.start()], source, page.file.src_uri), FENCE.sub(r"\1\2", code[0])]
        place = code.end()
    return "".join([*out, linked(markdown[place:], source, page.file.src_uri)])


def linked(text: str, source: str, here: str) -> str:
    """A text that has no code, with its links and pictures as this site has them. What it lacks is named and not linked."""

    def link(match: re.Match[str]) -> str:
        bang, shown, target = match.groups()
        path, sharp, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if bang:  # pictures lie in docs/
            place = posixpath.relpath(wanted.removeprefix("docs/"), posixpath.dirname(here) or ".")
            return f"![{shown}]({place})"
        place = placed(wanted)
        if place is None:
            return shown if (ROOT / wanted).exists() else match[0]
        return f"[{shown}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{sharp}{anchor})"

    out, place = [], 0
    for kept in re.finditer(f"{LINK.pattern}|{HEADING.pattern}", text, re.MULTILINE):
        out += [errors_linked(text[place : kept.start()], here), LINK.sub(link, kept[0])]
        place = kept.end()
    return "".join([*out, errors_linked(text[place:], here)])


def errors_linked(text: str, here: str) -> str:
    """Prose without links, with each code of an error linked to its entry in the generated page."""
    if here == "ERRORS.md":
        return text
    page = posixpath.relpath("ERRORS.md", posixpath.dirname(here) or ".")
    known = catalogue()
    return ERROR.sub(lambda m: f"[{m[0]}]({page}#{m[0].lower()})" if m[0] in known else m[0], text)


def placed(path: str) -> str | None:
    """The page that a file of the checkout is; None of one that is none."""
    copied = {source: name for name, source in COPIED.items()}
    if path in copied or path in MOVED:
        return copied.get(path) or MOVED[path]
    if path.startswith("specs/"):
        return "SPECS.md"
    return path.removeprefix("docs/") if path.startswith("docs/") and path.endswith(".md") else None


# ---- pages that are made ---------------------------------------------------------------------------------------------


def grammar_page() -> str:
    return (
        "# Grammar\n\nThe reference of the language as a text: strict LALR(1), read by lark. What it means is in "
        f"[the reference](REFERENCE.md).\n\n```ebnf\n{grammar_text().strip()}\n```\n"
    )


def specs_page() -> str:
    parts = ["# Shipped specs\n\nWhat `convert` runs on: there is no other description of these layouts in the code.\n"]
    parts += [f"## {name}\n\n```ucpl\n{spec_text(name).strip()}\n```\n" for name, _ in spec_files()]
    return "\n".join(parts)


def examples() -> str:
    """The specs of the examples, below their page."""
    folder = ROOT / "examples" / "architectures"
    texts = [
        f"## {p.name}\n\n```ucpl\n{p.read_text(encoding='utf-8').strip()}\n```\n" for p in sorted(folder.glob("*.ucpl"))
    ]
    return "\n" + "\n".join(texts)


def verbs_page() -> str:
    """Each verb's own `--help`."""
    from ucpl.cli import main
    from ucpl.cli.verbs import VERBS

    parts = ["# Verbs\n\nWhat `ucpl VERB --help` prints.\n"]
    for verb, line in VERBS.items():
        shown = io.StringIO()
        with mock.patch.dict(os.environ, COLUMNS="100"), contextlib.redirect_stdout(shown):
            status = main([verb, "--help"])
        if status != 0:
            raise RuntimeError(f"ucpl {verb} --help ended with {status}")
        parts.append(f"## {verb}\n\n{line[0].upper()}{line[1:]}.\n\n```text\n{shown.getvalue().strip()}\n```\n")
    return "\n".join(parts)
