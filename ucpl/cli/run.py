"""Arguments to exit status: find, load and run the verb.

All errors are printed in one way. Exit status: see `Exit`. A diagnostic about the command line itself is wrong usage
(2), whatever its code is for files. An unforeseen exception ends with one line and 1: INTERFACE has no status for it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ucpl.cli.console import Console
from ucpl.cli.limits import end_like_ctrl_c
from ucpl.cli.short_networkx import put_off_algorithms
from ucpl.cli.verbs import VERBS, load_verb, nearest
from ucpl.cli.wrapping import Formatter
from ucpl.errors import Diagnostic, Exit, Label, UcplError, fail
from ucpl.storage.cache_dirs import scoped
from ucpl.storage.joined import is_joined
from ucpl.storage.resolve_url import resolve_source
from ucpl.storage.urls import is_url
from ucpl.texts import is_text

__all__ = ["parser_of", "run"]

GARBAGE = 300_000, 10, 10  # new objects that may be garbage before it is looked for: more than a start makes
# Of one command: a plan of many tensors makes millions of objects, and most of them last to its end.
GARBAGE_OF_ONE = 1_000_000, 10, 1_000
_LASTING = frozenset(("lsp", "vault", "show"))  # verbs that may serve for hours
_ASKED = ("E114", "E124")  # an argument is missing, wherever the finding points
_OF_CHECKPOINTS = "E300"  # the first code of a layout that does not fit a checkpoint
_ABOUT_TEXTS = ("check", "roundtrip", "fmt")
_OPTIONS = ("version", "help")  # which are no verbs
_OTHERS = {  # names of other tools
    "zero_to_fp32": "export SRC DST", "zero_to_fp32.py": "export SRC DST", "merge-weights": "convert SRC DST --to safetensors",
    "ds_to_universal": "convert SRC DST --to universal", "dcp_to_torch": "convert SRC DST.pt --to torch_file",
    "reshard": "convert SRC DST --to LAYOUT", "merge": "export SRC DST", "info": "inspect SRC",
}  # fmt: skip
# Options and words of other tools that are parameters of a layout here, by their names here.
_DEGREES = {name: name for name in ("tp", "dp", "pp", "ep", "cp", "fsdp")} | {
    "tensor-model-parallel-size": "tp", "tp-size": "tp", "target-tp": "tp", "pipeline-model-parallel-size": "pp",
    "pp-size": "pp", "target-pp": "pp", "dp-size": "dp", "world-size": "dp", "nproc-per-node": "dp", "gpus": "dp",
    "num-gpus": "dp", "ranks": "dp",
}  # fmt: skip
_SYNONYMS = {  # of options, in other tools
    "--unfreeze": "--train NAME", "--thaw": "--train NAME", "-j": "--workers N", "--dry": "--dry-run",
    "--overwrite": "--force", "-f": "--force", "-y": "--force", "-n": "--dry-run", "--fast": "--quick", "-v": "--verbose",
    "--src": "SRC DST without names", "--source": "SRC DST without names", "--input": "SRC DST without names",
    "--input-folder": "SRC DST without names", "--target": "--to LAYOUT", "--strategy": "--to LAYOUT",
    "--stage": "--to zero3", "--zero-stage": "--to zero3", "--degrees": "-D tp=2",
    "--dtype": "-D dtype=bf16 with --to safetensors, or -D bf16=1", "--bf16": "-D bf16=1", "--fp16": "-D fp16=1",
}  # fmt: skip
_WRITTEN = {".ucpl": "-o", ".plan": "-o", ".svg": "--svg", ".html": "--html"}  # options for files, by the suffix
_FIRST = "ucpl convert SRC DST --to zero3 -D dp=8"
_CHOICE = r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)"
_CHECKPOINTS = (
    "source",
    "checkpoint",
    "a",
    "b",
    "against",
    "reference",
    "layout",
    "path",
)  # arguments that may be a URL
_MADE = (("apply", "target"), ("convert", "target"))  # and the file that is made there
_NO_CHECKPOINT = (("vault", "path"),)  # the folder itself, whatever may be read of it
_OF_THE_CALLER = ("<command line>", "<call>", "<layout>")  # files of labels that are no files
START = """\
ucpl converts training checkpoints to other frameworks and numbers of ranks.

  ucpl convert SRC DST --to zero3 -D dp=8   all tensors and states, bit for bit
  ucpl inspect SRC                          framework, ranks, tensors, problems
  ucpl export SRC DST                       a folder for from_pretrained

`ucpl demo` converts a shipped checkpoint. `ucpl --help` lists all verbs."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are diagnostics like all others."""

    def error(self, message: str) -> NoReturn:
        remedy = self._example()
        if (found := re.fullmatch(_CHOICE, message)) is not None:
            name, wrong, words = found[1], found[2], re.findall(r"'([^']*)'", found[3])
            message = f"{name}: invalid choice: `{wrong}`"
            close = nearest(wrong, words)
            remedy = f"did you mean `{close}`?" if close else f"write one of {', '.join(words)}"
            if len(words) == 1:  # ucpl import config.json
                remedy = f"write {self.prog} {words[0]} {wrong}"
        fail("E171", message, Label("<command line>", where=self.prog), remedy=remedy)

    def _example(self) -> str:
        """The remedy for a call that lacks words, or has too many."""
        lines = map(str.strip, (self.epilog or "").splitlines())
        return "as in: " + next((line for line in lines if line.startswith(f"{self.prog} ")), _FIRST)

    def _demand_once(self, arguments: Sequence[str]) -> None:
        """Refuse an option that is given twice; argparse takes the last one."""
        given = [one.partition("=")[0] for one in arguments[: arguments.index("--") if "--" in arguments else None]]
        for action in self._actions:
            names = action.option_strings
            if names and type(action).__name__ == "_StoreAction" and sum(one in names for one in given) > 1:
                fail(
                    "E171",
                    f"{names[0]} is given twice",
                    Label("<command line>", where=self.prog),
                    remedy=f"give it once: {names[0]} has one value",
                )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As parse_args, with a suggestion for an option that does not exist.

        An option with one value may be given once. A parser with a default for `command` puts all words behind `--` there.
        """
        command: Sequence[str] = ()
        if self.get_default("command") is not None and "--" in arguments:
            at = arguments.index("--")
            arguments, command = arguments[:at], arguments[at + 1 :]
        self._demand_once(arguments)
        options, extra = self.parse_known_args(arguments)
        if command:
            options.command = list(command)
        if not extra:
            return options
        wrong = next((x for x in extra if x.startswith("-")), extra[0])
        known = [name for action in self._actions for name in action.option_strings]
        bare, _, value = wrong.partition("=")
        degree = bare.lstrip("-").replace("_", "-")
        if degree in _DEGREES and "-D" not in known and "--ranks" in known:
            remedy = "write --ranks N"
        elif degree in _DEGREES and "-D" in known:
            value = value or next(iter(arguments[list(arguments).index(wrong) + 1 :]), "")
            number = value if value.isdigit() else "2"
            remedy = f"write -D {_DEGREES[degree]}={number}, or the call of a layout: 'zero1(dp=2)'"
        elif bare in _SYNONYMS and {*_SYNONYMS[bare].split()} & {*known, "SRC"}:
            remedy = f"write {_SYNONYMS[bare]}"
        elif not wrong.startswith("-") and self.get_default("command") is not None:
            remedy = f"a command is written behind `--`: ucpl resume RUN -- {wrong}"
        elif not wrong.startswith("-") and (option := _option_of(arguments, wrong, known)):
            remedy = f"write {option}"
        else:
            close = nearest(bare, known, 0.7) if wrong.startswith("-") else ""
            remedy = f"did you mean `{close}`?" if close else self._example()
        fail(
            "E171",
            f"{self.prog} has no option `{wrong}`" if wrong.startswith("-") else f"`{wrong}` is one argument too many",
            Label("<command line>", where=self.prog),
            remedy=remedy,
        )


def _option_of(arguments: Sequence[str], word: str, known: Sequence[str]) -> str:
    """The option of a word too many, or an empty text."""
    at = list(arguments).index(word)
    before, value = arguments[max(at - 2, 0) : at], "".join(arguments[at : at + 2 if word == "=" else at + 1])
    if len(before) == 2 and before[0] == "-D" and "=" not in before[1]:
        return f"-D {before[1]}={value.removeprefix('=')}"
    option = _WRITTEN.get(Path(word).suffix, "")
    return f"{option} {word}" if option in known else ""


def run(argv: Sequence[str] | None = None) -> int:
    """One command. Never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    before = arguments[: next((i for i, a in enumerate(arguments) if not a.startswith("-")), len(arguments))]
    thresholds = gc.get_threshold()
    gc.set_threshold(*(GARBAGE_OF_ONE if _LASTING.isdisjoint(arguments) else GARBAGE))
    console = Console(json="--json" in arguments, debug="--debug" in arguments)
    if argv is None:  # nothing else in this process needs algorithms of graphs at its start
        put_off_algorithms()
    try:
        with scoped():
            status = _ended(before, arguments[len(before) :], console)
    finally:
        if argv is None:
            gc.freeze()  # this process ends now: no search for garbage that its end frees at once
        gc.set_threshold(*thresholds)
        console.flush()
    if console.lost and status in (Exit.DONE, Exit.ANSWER_IS_NO):
        console.note(f"error[E179]: standard output cannot be written: {console.lost}; all else was done")
        console.flush()
        return Exit.TARGET_UNWRITABLE
    return status


def _ended(before: list[str], rest: list[str], console: Console) -> int:
    """The end status of a command.

    Raises only with --debug.
    """
    try:
        with end_like_ctrl_c():
            return _run(before, rest, console)
    except UcplError as error:
        if console.debug:
            raise
        console.diagnostics(error.diagnostics)
        status = status_of(error, is_about_texts=next(iter(rest), "") in _ABOUT_TEXTS)
        console.failed(status, error.diagnostics)
        return status
    except KeyboardInterrupt:
        if console.debug:
            raise
        console.note("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        console.close_output()
        return Exit.DONE
    except SystemExit as exit:  # argparse's --help
        return int(exit.code or 0)
    except Exception as error:  # unforeseen: a line for people, a traceback with --debug
        if console.debug:
            raise
        if _lacks_memory(error):
            return _out_of_memory(console)
        console.note(f"internal error: {type(error).__name__}: {error} (run with --debug for the place)")
        return Exit.ANSWER_IS_NO


def _lacks_memory(error: BaseException) -> bool:
    """True if memory ran out.

    Memory of an object, of a thread's stack, or of a library that is loaded.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error)
    return (
        (isinstance(error, RuntimeError) and "can't start new thread" in text)
        or (isinstance(error, ImportError | OSError) and ("map segment" in text or "allocate memory" in text))
        or (isinstance(error, RuntimeError) and "can't allocate memory" in text)
    )


def _out_of_memory(console: Console) -> int:
    """Say E509 in few steps: loading the catalogue takes memory, too."""
    what, remedy = "this process has no more memory", "give less --memory and --workers 1, or raise the limit"
    console.note(f"error[E509]: {what}")
    with contextlib.suppress(Exception):
        from ucpl.cli.limits import memory_limit

        limit = memory_limit()
        remedy += f" of the container or `ulimit -v`, which is {limit >> 20:,} MiB" if limit is not None else ""
    console.note(f"  = help: {remedy}")
    with contextlib.suppress(Exception):
        console.failed(Exit.TARGET_UNWRITABLE, (Diagnostic("E509", what, remedy=remedy),))
    return Exit.TARGET_UNWRITABLE


def _run(before: list[str], rest: list[str], console: Console) -> int:
    parser = _top()
    if not rest:
        options = parser.parse(before)
        if options.version:
            from ucpl import __version__

            console.say(f"ucpl {__version__}")
            return Exit.DONE
        if before:
            parser.print_help()
            return Exit.WRONG_USAGE
        console.say(*START.splitlines())
        return Exit.DONE
    name, arguments = rest[0], rest[1:]
    demand_texts(rest)
    parser.parse(before)
    is_alone = all(word.startswith("-") for word in arguments)
    if name not in VERBS and is_alone and os.sep in name and os.path.exists(name):  # a checkpoint's path alone
        name, arguments = "inspect", rest
    if name not in VERBS:
        fail(
            "E172",
            f"there is no verb `{name}`",
            Label("<command line>", where=f"ucpl {name}"),
            remedy=_verb_for(name, arguments),
        )
    options = parser_of(name).parse(arguments)
    _with_urls(name, options, console)
    console.quiet = getattr(options, "quiet", False) and not console.json
    console.verbose = getattr(options, "verbose", False)
    status: int = load_verb(name).run(options, console)
    return status


def _verb_for(word: str, rest: list[str]) -> str:
    """The remedy for a word that is no verb."""
    if word in _OPTIONS:
        return f"write ucpl {rest[0]} --{word}" if rest and rest[0] in VERBS else f"write ucpl --{word}"
    if word in _OTHERS:
        return f"write ucpl {_OTHERS[word]}"
    if os.path.exists(word):
        more = " --to LAYOUT" * ("--to" not in rest)
        return f"write ucpl convert {shlex.join((word, *rest))}{more}" if rest else f"write ucpl inspect {word}"
    close = nearest(word, list(VERBS))
    return f"did you mean `{close}`?" if close else "`ucpl --help` lists the verbs; the first is `ucpl convert`"


def parser_of(name: str) -> Parser:
    """The parser of a verb."""
    verb = load_verb(name)
    made = Parser(
        prog=f"ucpl {name}",
        description=verb.__doc__,
        epilog="example:\n" + "\n".join(f"  {line}" for line in verb.EXAMPLE.strip().splitlines()),
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    verb.arguments(made)
    _common(made)
    return made


def demand_texts(arguments: Sequence[str]) -> None:
    """Check arguments: names to read have no NUL; all else is UTF-8.

    Raises: UcplError E185.
    """
    for number, text in enumerate(arguments):
        if not text:
            where = " ".join(one or "''" for one in arguments[max(0, number - 2) : number + 1])
            fail(
                "E185",
                "an argument is empty",
                Label("<command line>", where=where),
                remedy="Write a value. A shell variable without a value gives an empty argument.",
            )
        if "\0" in text:  # no shell passes one; who calls `main` may
            fail(
                "E185",
                "an argument has a NUL in it",
                Label("<command line>", where=text),
                remedy="leave it out: no file can have such a name",
            )
        if not is_text(text) and not os.path.lexists(text):
            fail("E185", "an argument is no UTF-8", Label("<command line>", where=text))


def _top() -> Parser:
    width = max(map(len, VERBS))
    listed = "\n".join(f"  {name.ljust(width)}  {VERBS[name]}" for name in VERBS)
    parser = Parser(
        prog="ucpl",
        usage="ucpl [--debug] VERB ...",
        description="The universal checkpoint language: training checkpoints between parallel layouts, proved bit for bit.",
        epilog=f"verbs:\n{listed}\n\n`ucpl VERB --help` shows a verb's arguments, with an example.\n\n"
        "exit status:\n  0 done, or equal; 1 the answer is no; 2 wrong usage; 3 the source is damaged; 4 the target cannot be"
        " written; 5 a plan does not fit its source; 130 interrupted",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    _common(parser)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def status_of(error: UcplError, *, is_about_texts: bool = False) -> int:
    """The exit status of an error.

    A finding of the catalogue is wrong usage if the command line itself causes it: shipped texts are right, so a call's
    number is wrong there. is_about_texts: of a verb that answers about a text. A finding at a line of it is the answer no.
    """
    status = error.exit_status
    first = error.diagnostics[0]
    file = first.labels[0].file if first.labels else ""
    if is_about_texts and file.endswith(".ucpl") and first.labels[0].line is not None:
        status = Exit.ANSWER_IS_NO
    if status != Exit.ANSWER_IS_NO:
        return status
    if first.code in _ASKED or file in _OF_THE_CALLER or (first.code < _OF_CHECKPOINTS and _is_shipped(file)):
        return Exit.WRONG_USAGE
    return status


def _is_shipped(file: str) -> bool:
    from ucpl.resources import spec_files

    own = dict(spec_files()).get(file.removeprefix("specs/")) if file.startswith("specs/") else None
    return own is not None and (not Path(file).is_file() or Path(file).samefile(own))  # a user's folder has its own


def _with_urls(name: str, options: argparse.Namespace, console: Console) -> None:
    """Replace URLs of checkpoints by the paths that represent them.

    Raises: UcplError E680 if a file must be local.
    """
    for place, given in vars(options).items():
        if (
            place in _CHECKPOINTS
            and (name, place) not in _NO_CHECKPOINT
            and isinstance(given, str)
            and is_joined(given)
        ):
            setattr(options, place, str(resolve_source(given, lambda text: console.note(f"warning: {text}"))))
            continue
        for one in given if isinstance(given, list) else [given]:
            if isinstance(one, str | Path) and (name, place) not in _MADE + _NO_CHECKPOINT and is_url(one):
                if place not in _CHECKPOINTS or one is not given:
                    what = (
                        f"{one} is a URL, and only checkpoints have some: plans, layouts, configs and reports are local"
                    )
                    fail("E680", what, Label("<command line>", where=str(one)), remedy="Give a local path.")
                setattr(options, place, str(resolve_source(one, lambda text: console.note(f"warning: {text}"))))
