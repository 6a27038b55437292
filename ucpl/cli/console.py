"""Output: answers on standard output, progress and diagnostics on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from attrs import evolve

from ucpl.cli.wrapping import width_of, wrapped
from ucpl.errors import Diagnostic, Label, called
from ucpl.resources import spec_text

__all__ = ["Console", "bytes_text", "table_lines"]

_LINES = 4  # of a finding at a terminal, beyond which its short form is shown
_SHOWN = 5  # findings of one kind of damage repeat for every file: the first few say it


class Console:
    """With `json`, answers are one JSON object and `say` is silent."""

    def __init__(self, *, json: bool = False, debug: bool = False) -> None:
        self.json = json
        self.debug = debug
        self.quiet = False  # -q, or another rank answers
        self.verbose = False  # -v
        self._closed = False
        self._answered = False
        self._lost = ""
        # No reader of a stream that the caller closed exists, and no file of ours may take its number.
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]

    # ---- standard output ---------------------------------------------------------------------------------------------

    def say(self, *lines: str) -> None:
        """Print lines of the answer; without any, an empty one.

        Characters that would break a line are replaced.
        """
        if not self.json and not self.quiet:
            self._write(sys.stdout, _lines(sys.stdout, lines or ("",)))

    def raw(self, text: str) -> None:
        """A text that is the answer itself: a .ucpl file."""
        if not self.json:
            self._write(sys.stdout, text)

    def answer(self, value: Mapping[str, object]) -> None:
        """The answer for programs: the one object of `--json`."""
        if self.json and not self.quiet:
            from json import dumps

            self._answered = True
            self._write(sys.stdout, _escaped(dumps(value, ensure_ascii=False, default=str)) + "\n")

    def failed(self, status: int, diagnostics: Sequence[Diagnostic]) -> None:
        """The object of `--json` where an error ended the verb."""
        if not self._answered:
            self.answer({"status": status, "diagnostics": [diagnostic_object(d) for d in diagnostics]})

    @property
    def lost(self) -> str:
        """The reason for lost output, such as a full disk."""
        return self._lost

    def _lose(self, error: OSError) -> None:
        self._lost = self._lost or error.strerror or str(error)
        self.close_output()

    def close_output(self) -> None:
        """Continue without output: no reader is left."""
        self._closed = True
        _lead_nowhere(sys.stdout)

    def flush(self) -> None:
        with contextlib.suppress(ValueError):
            try:
                sys.stdout.flush()
            except BrokenPipeError:
                self.close_output()
            except OSError as error:
                self._lose(error)
        with contextlib.suppress(ValueError):
            try:
                sys.stderr.flush()
            except OSError:  # no stream is left for a message
                _lead_nowhere(sys.stderr)

    def _write(self, stream: IO[str], text: str) -> None:
        if self._closed:
            return
        try:
            stream.write(text)
        except BrokenPipeError:  # the reader has enough: the work continues, and its status is kept
            self.close_output()
        except OSError as error:  # the work continues, and its end reports the loss
            self._lose(error)

    # ---- standard error ----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(_lines(sys.stderr, (text,)))

    def diagnostics(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Findings as people read them, with the lines that they point at."""
        from ucpl.errors.render import render_diagnostic, shorter

        color = self._colored(sys.stderr)
        width = width_of(sys.stderr)

        def lines_of(d: Diagnostic) -> list[str]:
            text = render_diagnostic(d, color)
            return [piece for line in text.split("\n") for piece in wrapped(line, width)]

        def few_lines_of(d: Diagnostic) -> list[str]:
            """The longest form with few lines, or the last one."""
            lines = lines_of(d)
            for less in shorter(d):
                if len(lines) <= _LINES:
                    break
                lines = lines_of(less)
            return lines

        short = width is not None and not self.verbose  # at a terminal
        texts = [(few_lines_of if short else lines_of)(with_source(d)) for d in diagnostics[:_SHOWN]]
        if len(diagnostics) > _SHOWN:
            texts.append([f"... and {len(diagnostics) - _SHOWN} more findings"])
        with contextlib.suppress(OSError):
            self.flush()
            sys.stderr.write("\n\n".join("\n".join(lines) for lines in texts) + "\n")

    @staticmethod
    def _colored(stream: IO[str]) -> bool:
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None] | None]:
        """A bar on standard error, where that is a terminal; otherwise nothing."""
        if self.json or self.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            yield None
            return
        from rich.console import Console as Terminal
        from rich.markup import escape
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        terminal = Terminal(stderr=True, no_color=bool(os.environ.get("NO_COLOR")))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=terminal, transient=True) as bar:
            task = bar.add_task(escape(_printable(what)), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(stream: IO[str], lines: Sequence[str]) -> str:
    """Lines as a stream shows them: printable, broken between words.

    A line is broken if it is wider than the stream.
    """
    width = width_of(stream)
    return "".join(f"{piece}\n" for line in lines for piece in wrapped(_printable(line), width))


def _lead_nowhere(stream: IO[str]) -> None:
    """Discard the rest of the output, also when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _printable(text: str) -> str:
    """Replace characters that a terminal would obey.

    Names come from files that anybody may have written.
    """
    text = called(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _escaped(text: str) -> str:
    """JSON with escapes for control characters.

    The value is the same.
    """
    text = called(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _json_of(c) for c in text)


def _json_of(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def diagnostic_object(d: Diagnostic) -> dict[str, object]:
    return {
        "code": d.code,
        "message": d.message,
        "places": [
            {
                k: v
                for k, v in (
                    ("file", p.file),
                    ("line", p.line),
                    ("column", p.column),
                    ("where", p.where),
                    ("text", p.text),
                )
                if v
            }
            for p in d.labels
        ],
        "notes": list(d.notes),
        "remedy": d.remedy,
    }


def bytes_text(n: int) -> str:
    """A number of bytes in few words: 174,885 bytes (171 KiB)."""
    size, unit = float(n), ""
    for unit in ("", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{n:,} bytes" + (f" ({size:.3g} {unit})" if unit else "")


# ---- tables of answers -----------------------------------------------------------------------------------------------


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as wide as its content, without a frame."""
    from rich import box
    from rich.console import Console as Terminal
    from rich.table import Table

    made = Table(*head, box=box.SIMPLE, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    terminal = Terminal(width=max(40, sum(max(map(len, column)) + 3 for column in zip(head, *rows, strict=True))))
    with terminal.capture() as shown:
        terminal.print(made, markup=False, highlight=False, no_wrap=True)
    return [line.rstrip() for line in shown.get().splitlines() if line.strip()]


# ---- lines that diagnostics point at ---------------------------------------------------------------------------------

_SIZE_MAX = 16 << 20  # characters of a text


def with_source(diagnostic: Diagnostic) -> Diagnostic:
    """The diagnostic with the lines of its labels.

    A label in a call has its text with it.
    """
    return evolve(diagnostic, labels=tuple(map(_sourced, diagnostic.labels)))


def _sourced(label: Label) -> Label:
    if label.line is None or label.source is not None:
        return label
    lines = _lines_of_file(label.file)
    return evolve(label, source=lines[label.line - 1]) if label.line <= len(lines) else label


def _lines_of_file(name: str) -> tuple[str, ...]:
    try:
        if name.startswith("specs/") and not Path(name).is_file():
            return tuple(spec_text(name.removeprefix("specs/")).splitlines())
        path = Path(name)
        if not path.is_file() or path.stat().st_size > _SIZE_MAX:
            return ()
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError, KeyError):
        return ()
