"""Find the shipped data: grammar, and library of models and layouts.

In a checkout it is next to the package (`grammar/`, `specs/`), where people read and edit it; a wheel carries
it inside (`ucpl/_data/`). No other module distinguishes the two. A format's layouts may be in its own folder, too.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ucpl.installed import entry_points

__all__ = ["VERSION", "VERSIONS", "example_folder", "grammar_text", "spec_files", "spec_text"]

VERSIONS = 1, 2  # of the language
VERSION = VERSIONS[-1]
_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    """The folder `name` of the wheel's data, else of the checkout.

    The wheel's is first: the installed data is used.
    """
    packed = _PACKAGE / "_data" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name


@cache
def grammar_text(version: int = VERSION) -> str:
    """The grammar of one version of the language, as lark reads it."""
    name = "ucpl.lark" if version == VERSION else f"ucpl-{version}.lark"
    return (_folder("grammar") / name).read_text(encoding="utf-8")


def example_folder() -> Path:
    """The folder of shipped examples."""
    return _folder("examples")


@cache
def spec_files() -> tuple[tuple[str, Path], ...]:
    """The .ucpl files of this and installed packages as (name, path), sorted.

    A name is the path below `specs/` or `ucpl/formats/`, with `/`. Packages have entry points of the group `ucpl.specs`, each
    with the name of a package whose folder has such files: `npy = "npy_folder"` gives `npy/npy_folder.ucpl`.
    """
    roots = [("", _folder("specs")), ("", _PACKAGE / "formats")]
    for name, value in entry_points("ucpl.specs"):
        found = find_spec(value)
        roots += [(f"{name}/", Path(at)) for at in (found.submodule_search_locations or () if found else ())]
    return tuple(
        sorted(
            (lead + path.relative_to(root).as_posix(), path) for lead, root in roots for path in root.rglob("*.ucpl")
        )
    )


def spec_text(name: str) -> str:
    """The text of a shipped file, by its name in `spec_files`.

    Raises: KeyError, if there is none of that name (so a name can never lead out of the library).
    """
    return dict(spec_files())[name].read_text(encoding="utf-8")
