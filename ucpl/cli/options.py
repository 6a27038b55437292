"""Arguments that several verbs share, and how their texts are read."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucpl.errors import Label, fail

if TYPE_CHECKING:
    from ucpl.layout.scope import Value

__all__ = [
    "add_data_plane",
    "add_json",
    "add_sizes",
    "config_of",
    "data_plane",
    "memory_of",
    "sizes_of",
    "write_text",
]

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_NAME = re.compile(r"[A-Za-z_]\w*")
_WORKERS_MAX = 1024


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_sizes(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-D", dest="sizes", action="append", default=[], metavar="NAME=VALUE", help="a size of model or layout"
    )
    parser.add_argument("--config", metavar="CONFIG.JSON", help="offers a Hugging Face config's sizes, as config.NAME")


def add_data_plane(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--memory", default="512M", metavar="SIZE", help="bound of all buffers together: 64M, 1G (default 512M)"
    )
    parser.add_argument("--workers", default="2", metavar="N", help="threads that move data (default 2)")


def data_plane(options: Namespace) -> dict[str, Any]:
    """`memory` and `workers`, as numbers. Raises: UcplError E173."""
    text = options.workers
    if not text.isdigit() or not 1 <= int(text) <= _WORKERS_MAX:
        fail(
            "E173",
            f"--workers {text}: a number from 1 to {_WORKERS_MAX} is needed",
            Label("<command line>", where=f"--workers {text}"),
        )
    return {"memory": memory_of(options.memory), "workers": int(text)}


def memory_of(text: str) -> int:
    """Bytes of `512M`, `1.5G`, `64MiB`, `1048576`; units are powers of 1024. Raises: UcplError E173."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        fail(
            "E173",
            f"--memory {text}: no size of memory",
            Label("<command line>", where=f"--memory {text}"),
            remedy="write a number with a unit, as in 512M, 1.5G or 64MiB",
        )
    return int(float(found[1]) * (1 << _UNITS[found[2].upper()]))


def sizes_of(options: Namespace) -> dict[str, Value]:
    """The values of -D. Raises: UcplError E177."""
    out: dict[str, Value] = {}
    for text in options.sizes:
        name, equals, value = text.partition("=")
        if not equals or not _NAME.fullmatch(name) or not value:
            fail("E177", f"-D {text}: not of the form NAME=VALUE", Label("<command line>", where=f"-D {text}"))
        if name in out:
            fail("E177", f"-D {name} is given twice", Label("<command line>", where=f"-D {text}"))
        out[name] = _value(value)
    return out


def _value(text: str) -> Value:
    try:
        return int(text)
    except ValueError:
        return text


def config_of(options: Namespace) -> dict[str, Any] | None:
    """The object in --config. Raises: UcplError E170, E176."""
    if options.config is None:
        return None
    import json

    path = Path(options.config)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail("E170", f"{path} cannot be read: {error.strerror}", Label(str(path)))
    except (ValueError, RecursionError) as error:
        fail("E176", f"{path} is no JSON", Label(str(path), str(error)[:200]))
    if not isinstance(found, dict):
        fail("E176", f"{path} holds no JSON object", Label(str(path)))
    return found


def write_text(path: Path, text: str | bytes) -> None:
    """Write a small file, whole or not at all. Raises: UcplError E179."""
    import os
    import tempfile

    data = text.encode() if isinstance(text, str) else text
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        fail("E179", f"{path} cannot be written: {error.strerror or error}", Label(str(path)))
