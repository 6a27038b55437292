"""Arguments that several verbs share, and the parsing of their texts."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail

if TYPE_CHECKING:
    from ucpl.conversion.keywords import How, MoveBounds
    from ucpl.conversion.requests import Given
    from ucpl.layout.scope import Value

__all__ = [
    "add_changes",
    "add_data_plane",
    "add_json",
    "add_model",
    "add_order",
    "add_quiet",
    "add_sizes",
    "data_plane",
    "given_of",
    "memory_of",
    "run_options",
    "sizes_of",
    "whole_number",
    "write_text",
]

_MEMORY = r"(?i)([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:I?B)?"
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PAIR = r"([A-Za-z_][A-Za-z0-9_]*)\s*[=:]\s*(-?[0-9]+)"  # in whatever form
_SEVERAL = r"(?:\w+=-?[0-9]+[,; ]+)+\w+=-?[0-9]+"
_WHOLE = r"[+-]?[0-9](?:_?[0-9])*"
WORKERS_MAX = 1024
DIGITS_MAX = 18  # of a number that surely fits 64 bits
NUMBER_MAX = 1 << 62
SHOWN = 60  # characters of an argument that a message repeats


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_quiet(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print warnings and errors only; the exit status is the answer"
    )


def add_model(parser: ArgumentParser, whose: str) -> None:
    """`whose`: which layouts it is for."""
    parser.add_argument(
        "--model",
        metavar="FILE.ucpl:NAME",
        help=f"the model {whose}: one that a .ucpl file defines, with arguments where it has parameters,"
        " as in gpt.ucpl:gpt(layers = 4)",
    )


def add_sizes(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-D",
        dest="sizes",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a size of the model, or a parameter of the layout: --to zero3 -D dp=3 is --to 'zero3(dp=3)'; may repeat",
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG.JSON",
        help="a Hugging Face config: its sizes as config.NAME, its class, and the config.json of such a target",
    )


def add_changes(parser: ArgumentParser) -> None:
    """Add the options that drop tensors from a target, and add companions."""
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out a tensor or a state, or 'head.*', all tensors that are called so; may repeat",
    )
    parser.add_argument(
        "--freeze", action="append", default=[], metavar="NAME", help="a parameter is trained no longer; may repeat"
    )
    parser.add_argument(
        "--train",
        action="append",
        default=[],
        metavar="NAME[=GROUP[:LIKE]]",
        help="a frozen parameter is trained from here on, in a group of the optimizer, or in a new one; may repeat",
    )
    parser.add_argument(
        "--fill",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a tensor or a state where the source has nothing of it; may repeat",
    )
    add_order(parser)
    parser.add_argument(
        "--weights-alone", action="store_true", help="convert the weights, and read nothing of the optimizer"
    )


def add_order(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--order",
        metavar="FILE",
        help="the names of the optimizer's parameters in its order, one a line or JSON, if the source has numbers (E446)",
    )


MEMORY = 512 << 20
WORKERS = 2


def add_data_plane(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="bound of all buffers together: 64M, 1G (default 512M, or a quarter of the limit of a container or `ulimit`)",
    )
    parser.add_argument(
        "--workers", metavar="N", help="threads that move data (default 2, or as many processors as there are)"
    )


def data_plane(options: Namespace) -> MoveBounds:
    """`memory` and `workers`, as numbers. Raises: UcplError E173, E508."""
    from ucpl.cli.limits import memory_limit, processors

    limit = memory_limit()
    if options.memory is None:
        memory = MEMORY if limit is None else min(MEMORY, limit // 4)
    else:
        memory = memory_of(options.memory)
        if limit is not None and memory > limit:
            what = f"--memory {options.memory}: this process may use {limit >> 20:,} MiB"
            remedy = (
                f"give less, as in --memory {max(1, limit >> 22)}M, or raise the limit of the container or `ulimit -v`"
            )
            fail("E508", what, Label("<command line>", where=f"--memory {options.memory}"), remedy=remedy)
    if options.workers is None:
        return {"memory": memory, "workers": min(WORKERS, processors())}
    return {"memory": memory, "workers": whole_number("--workers", options.workers, WORKERS_MAX)}


def run_options(options: Namespace) -> How:
    """Options of a run, of a verb with `add_run`.

    Raises: UcplError E173.
    """
    bounds = data_plane(options)
    return {
        "memory": bounds["memory"],
        "workers": bounds["workers"],
        "resume": options.resume,
        "force": options.force,
        "verify_source": options.verify_source,
        "read_back": options.read_back == "all",
        "reflink": options.reflink == "auto",
        "allow_globals": options.allow_global,
    }


def whole_number(name: str, text: str, most: int, remedy: str = "") -> int:
    """A number from 1.

    remedy: the text to write, if it is more than a number. Raises: UcplError E173.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX and 1 <= int(text) <= most):
        fail(
            "E173",
            f"{name} {text[:SHOWN]}: a number from 1 to {most} is needed",
            Label("<command line>", where=f"{name} {text[:SHOWN]}"),
            remedy=remedy or f"write a whole number from 1 on, as in {name} {min(2, most)}",
        )
    return int(text)


def memory_of(text: str, name: str = "--memory") -> int:
    """Bytes of `512M`, `1.5G`, `64MiB`, `1048576`.

    Units are powers of 1024. Raises: UcplError E173.
    """
    found = re.fullmatch(_MEMORY, text.strip())
    size = float(found[1]) * (1 << _UNITS[found[2].upper()]) if found is not None else 0.0
    if not 1 <= size < NUMBER_MAX:
        fail(
            "E173",
            f"{name} {text[:SHOWN]}: no size of memory",
            Label("<command line>", where=f"{name} {text[:SHOWN]}"),
            remedy="write a number with a unit, as in 512M, 1.5G or 64MiB",
        )
    return int(size)


def given_of(options: Namespace) -> Given:
    """Values of -D, --config, --model, --drop and the like.

    Of a verb that has them. Raises: UcplError E110, E170-E178.
    """
    from ucpl.conversion.requests import Given, config_at, model_named

    model, config, sizes = getattr(options, "model", None), options.config, sizes_of(options.sizes)
    return Given(
        model=model_named(model, sizes) if model else None,
        config=config_at(Path(config)) if config is not None else None,
        config_file=Path(config) if config is not None else None,
        sizes=sizes,
        drop=tuple(getattr(options, "drop", ())),
        fill=tuple(getattr(options, "fill", ())),
        freeze=tuple(getattr(options, "freeze", ())),
        train=tuple(getattr(options, "train", ())),
        order=getattr(options, "order", None) or "",
        weights_alone=getattr(options, "weights_alone", False),
    )


def sizes_of(texts: Sequence[str]) -> dict[str, Value]:
    """The values of -D. Raises: UcplError E177."""
    out: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        here = Label("<command line>", where=f"-D {text[:SHOWN]}")
        if not equals or not re.fullmatch(_NAME, name) or not value or re.fullmatch(_SEVERAL, text):
            if name.startswith("config."):
                remedy = (
                    "a value of the config is in the file of --config; -D gives a size of the text by its name: -D h=8"
                )
                fail("E177", f"-D {name[:SHOWN]}: a key of the config is no size", here, remedy=remedy)
            found = re.findall(_PAIR, text)
            better = " ".join(f"-D {one}={number}" for one, number in found)
            fail(
                "E177",
                f"-D {text[:SHOWN]}: not of the form NAME=VALUE",
                here,
                remedy=f"write {better}" if found else f"write -D {name}=8" if re.fullmatch(_NAME, name) else "",
            )
        if name in out:
            fail("E177", f"-D {name[:SHOWN]} is given twice", here, remedy="give it once: one name has one value")
        if not re.fullmatch(_WHOLE, value.strip()):
            out[name] = value
        elif len(value) > DIGITS_MAX:
            fail("E177", f"-D {name[:SHOWN]}: a number of {len(value)} digits is no size", here)
        else:
            out[name] = int(value)
    return out


def write_text(path: Path, text: str | bytes) -> None:
    """Write a small file, durable, complete or not at all.

    It gets the mode and owner of the file that it replaces. A link is followed, unless a stranger put it there.
    Raises: UcplError E179.
    """
    import contextlib
    import os
    import tempfile

    from ucpl.owned import followed

    try:
        data = text.encode() if isinstance(text, str) else text
        place = followed(path)
        if place.exists() and not place.is_file():  # a rename would put a file where a device was
            fail("E179", f"{path} is no regular file", Label(str(path)))
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:60]}.")
        try:
            _fill(handle, data)
            _like(name, place)
            os.replace(name, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sync_folder(place.parent)
    except (OSError, ValueError) as error:  # a ValueError: a path or a text that no file can have
        reason = getattr(error, "strerror", None) or error
        if other := _other_place(error, path):
            reason = f"{reason}: {other}"
        fail("E179", f"{str(path)[:SHOWN]} cannot be written: {reason}", Label(str(path)))


def _other_place(error: OSError | ValueError, path: Path) -> str:
    """The file of an error, if it is not the path."""
    name, folder = getattr(error, "filename", None), path.absolute().parent
    is_other = isinstance(name, str) and folder not in (Path(name).absolute(), Path(name).absolute().parent)
    return str(name) if is_other else ""


def _fill(handle: int, data: bytes) -> None:
    """Write, sync and close. Raises: OSError."""
    import os

    try:
        done = 0
        while done < len(data):
            done += os.write(handle, data[done:])
        os.fsync(handle)
    finally:
        os.close(handle)


def _like(name: str, place: Path) -> None:
    """Give a new file the old one's mode and owner.

    Without one, the umask decides. Raises: OSError.
    """
    import contextlib
    import os

    from ucpl.owned import is_strangers

    umask = os.umask(0)
    os.umask(umask)
    mode = 0o666 & ~umask
    with contextlib.suppress(FileNotFoundError, PermissionError):  # nothing is replaced; it is somebody else's
        if not is_strangers(place):
            before = os.stat(place)
            mode = before.st_mode & 0o777
            os.chown(name, before.st_uid, before.st_gid)
    with contextlib.suppress(PermissionError):  # a file system without modes
        os.chmod(name, mode)


def _sync_folder(folder: Path) -> None:
    """Sync the folder of a new name, if folders can be synced.

    Raises: OSError.
    """
    import errno
    import os

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(handle)
