"""Print every product file with its docstring's first line: `make files`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ucpl"


def lines() -> Iterator[str]:
    """A heading for each folder, and a line per file."""
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        yield f"\n## ucpl/{folder.relative_to(PACKAGE).as_posix()}/".replace("/./", "/")
        for path in sorted(folder.glob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            yield f"- {path.name}: {text.splitlines()[0] if text else ''}"


if __name__ == "__main__":
    print("\n".join(lines()))
