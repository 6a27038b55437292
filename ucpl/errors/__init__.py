"""Errors as values: a stable code, places, a reason and a remedy.

Every room raises `UcplError`; only `cli` prints it and turns it into an exit status. The catalogue of codes is data
(`catalogue/*.toml`, one file for each subject), which `ucpl explain` prints and `make docs` puts into the site.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

from attrs import evolve, field

from ucpl.records import frozen

__all__ = ["CodeEntry", "Diagnostic", "Exit", "Label", "UcplError", "called", "calling", "catalogue", "fail", "plural"]


class Exit:
    """Exit statuses of the command line (INTERFACE)."""

    DONE = 0
    ANSWER_IS_NO = 1
    WRONG_USAGE = 2
    SOURCE_DAMAGED = 3
    TARGET_UNWRITABLE = 4
    PLAN_DOES_NOT_FIT = 5
    INTERRUPTED = 130


_CALLED: dict[str, str] = {}  # path of a folder that represents another place -> the user's name of that place


@contextmanager
def calling(path: str, name: str) -> Iterator[None]:
    """Replace `path` by `name` in texts meanwhile.

    For a folder that represents another place.
    """
    _CALLED[path] = name
    try:
        yield
    finally:
        del _CALLED[path]


def called(text: str) -> str:
    """A text with the names that users know."""
    known = _CALLED.copy() if _CALLED else {}  # an entry may be removed meanwhile
    for path in sorted(known, key=len, reverse=True):
        text = text.replace(path, known[path])
    return text


def plural(count: int, noun: str) -> str:
    """A number and its noun: 1 file, 2,000 files."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


_TEXT_MAX = 5000  # characters: more than a path may have


def _printable(text: str) -> str:
    """Shorten a text and escape halves of characters.

    Names from files may have any length, and characters that no terminal takes.
    """
    text = called(text)
    if len(text) > _TEXT_MAX:
        half = _TEXT_MAX // 2 - 5
        text = f"{text[:half]} [...] {text[-half:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _all_printable(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_printable, texts))


@frozen
class Label:
    """A place that the user can open, and the fact there.

    For text (.ucpl): `line` and `column` are 1-based, `length` is in characters and `source` is the line's text.
    For data (a checkpoint): `file` is the path, `where` names the key, the tensor or the element; no line.
    """

    file: str = field(converter=_printable)
    text: str = field(default="", converter=_printable)
    line: int | None = None
    column: int | None = None
    length: int = 1
    source: str | None = None
    where: str = field(default="", converter=_printable)


@frozen
class Diagnostic:
    """One error or warning.

    `labels[0]` is the place to look first; a second label is the place that it disagrees with.
    """

    code: str  # "E101"
    message: str = field(converter=_printable)  # one line, no full stop
    labels: tuple[Label, ...] = ()
    notes: tuple[str, ...] = field(default=(), converter=_all_printable)
    remedy: str = field(default="", converter=_printable)  # the text to write, or the step to take
    about: object = field(
        default=None, eq=False, repr=False
    )  # the values of the message, for a caller that raises it anew


class UcplError(Exception):
    """One or more diagnostics that end the verb.

    `exit_status` comes from the catalogue entry of the first one.
    """

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("; ".join(f"{d.code}: {d.message}" for d in diagnostics))
        self.diagnostics = diagnostics

    def __reduce__(self) -> tuple[type[UcplError], tuple[Diagnostic, ...]]:
        """Pickle without `about`: ranks of a job exchange errors."""
        return type(self), tuple(evolve(d, about=None) for d in self.diagnostics)

    @property
    def exit_status(self) -> int:
        return catalogue()[self.diagnostics[0].code].exit_status

    @property
    def is_of_the_disk(self) -> bool:
        """True if a file could not be read, regardless of its content.

        A caller that skips unreadable content must not skip this error.
        """
        return self.diagnostics[0].code in ("E400", "E685")


@frozen
class CodeEntry:
    """One code of the catalogue.

    `example` is a shortest input that raises it; `remedy` is general.
    """

    code: str
    title: str
    exit_status: int = field(converter=int)
    meaning: str
    example: str
    remedy: str

    @property
    def status_text(self) -> str:
        """The exit status.

        Findings in texts have another one if a call has the fault.
        """
        of_text = self.exit_status == Exit.ANSWER_IS_NO and self.code < "E300"
        return f"{self.exit_status}" + f", or {Exit.WRONG_USAGE} if the call has the fault" * of_text


@cache
def catalogue() -> dict[str, CodeEntry]:
    """All codes, from the toml files of `catalogue/`: `[E101] title=, exit=, meaning=, example=, remedy=`."""
    import tomllib  # most commands end without an error

    found: dict[str, CodeEntry] = {}
    for item in sorted((Path(__file__).parent / "catalogue").glob("*.toml")):
        for code, entry in tomllib.loads(item.read_text(encoding="utf-8")).items():
            if code in found:
                raise ValueError(f"{code} is in the catalogue twice, again in {item.name}")
            found[code] = CodeEntry(
                code=code,
                title=entry["title"],
                exit_status=entry["exit"],
                meaning=entry["meaning"].strip(),
                example=entry["example"].strip(),
                remedy=entry["remedy"].strip(),
            )
    return dict(sorted(found.items()))


def fail(
    code: str,
    message: str,
    *labels: Label,
    notes: tuple[str, ...] = (),
    remedy: str = "",
    about: object = None,
) -> NoReturn:
    """Raise one diagnostic; the default remedy is the catalogue's.

    Raises: UcplError, always.
    """
    raise UcplError(Diagnostic(code, message, labels, notes, remedy or catalogue()[code].remedy, about))
