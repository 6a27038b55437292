"""Print the completion script of a shell.

It completes verbs, options, their values, and names of formats. bash: `eval "$(ucpl completion bash)"` in ~/.bashrc;
zsh: the same with zsh, after compinit, in ~/.zshrc; fish: `ucpl completion fish | source` in config.fish.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ucpl.cli.verbs import VERBS
from ucpl.errors import Exit
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = 'ucpl completion fish > ~/.config/fish/completions/ucpl.fish\neval "$(ucpl completion bash)"'

_FILES = ("FILE", "FOLDER", "CONFIG", "SRC", "DST", "CKPT", "RUN", "PATH", "DIR", "LAYOUT")  # first words of metavars


@frozen
class Option:
    """An option of a verb, or one of its arguments without names."""

    names: tuple[str, ...]
    about: str
    takes: str  # the metavar of its value; empty: it takes none
    values: tuple[str, ...]
    repeats: bool = False

    @property
    def is_path(self) -> bool:
        return self.takes.startswith(_FILES)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(_SHELLS), help="the shell that reads the script")


def run(options: Namespace, console: Console) -> int:
    verbs = {name: list(options_of(name)) for name in VERBS}
    console.say(*_SHELLS[options.shell](verbs))
    return Exit.DONE


def options_of(verb: str) -> Iterator[Option]:
    """Options and arguments of a verb, from its parser."""
    from ucpl.cli.run import parser_of

    for action in parser_of(verb)._actions:
        if action.help != SUPPRESS:
            takes = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
            about = re.split("[:;(]", action.help or "")[0].replace("%%", "%").strip()
            repeats = type(action).__name__ == "_AppendAction"
            yield Option(tuple(action.option_strings), about, takes, _values(verb, action, takes), repeats)


def _values(verb: str, action: Action, takes: str) -> tuple[str, ...]:
    from ucpl.registry.support import support

    if action.choices is not None:
        return tuple(map(str, action.choices))
    if takes == "LAYOUT":
        return tuple(sorted({layout for one in support() for layout in one.layouts}))
    return tuple(one.name for one in support()) if (verb, takes) == ("formats", "NAME") else ()


_PLAIN = str.maketrans("[]:", "() ")


# ---- a script for each shell -----------------------------------------------------------------------------------------


def _bash(verbs: dict[str, list[Option]]) -> Iterator[str]:
    yield from (
        "_ucpl() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} verb= words= i",
        "    COMPREPLY=()",
        "    if [[ $word == = ]]; then word=; elif [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD - 2]}; fi",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        "        if [[ ${COMP_WORDS[i]} != -* ]]; then verb=${COMP_WORDS[i]}; break; fi",
        "    done",
        "    case $verb:$before in",
    )
    keys: dict[str, list[str]] = {}
    for verb, options in verbs.items():
        for one in options:
            if one.names and one.takes:
                keys.setdefault(" ".join(one.values), []).extend(f"{verb}:{name}" for name in one.names)
    yield from (f"        {' | '.join(several)}) words='{words}' ;;" for words, several in keys.items())
    yield "        *) case $verb in"
    yield f"            '') words='{' '.join(verbs)} --help --version' ;;"
    for verb, options in verbs.items():
        names = " ".join(name for one in options for name in one.names)
        free = " ".join(value for one in options if not one.names for value in one.values)
        yield f"            {verb}) if [[ $word == -* ]]; then words='{names}'; else words='{free}'; fi ;;"
    yield from (
        "        esac ;;",
        "    esac",
        '    [[ -z $words ]] || COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o bashdefault -o default -F _ucpl ucpl",
    )


def _zsh(verbs: dict[str, list[Option]]) -> Iterator[str]:
    yield from ("#compdef ucpl", "_ucpl() {", "    local -a verbs", "    verbs=(")
    yield from (f"        {_quoted(f'{verb}:{about}')}" for verb, about in VERBS.items())
    yield from ("    )", "    if ((CURRENT == 2)); then _describe verb verbs; return; fi")
    yield from ("    local verb=$words[2]", "    shift words", "    ((CURRENT--))", "    case $verb in")
    for verb, options in verbs.items():
        yield f"        {verb}) _arguments \\"
        yield from (f"            {_quoted(spec)} \\" for one in options for spec in _zsh_specs(one))
        yield "            ;;"
    yield from ("    esac", "}", "compdef _ucpl ucpl")


def _zsh_specs(one: Option) -> Iterator[str]:
    about = one.about.translate(_PLAIN)
    takes = one.takes.translate(_PLAIN)
    action = f"({' '.join(one.values)})" if one.values else "_files" if one.is_path else " "
    if not one.names:
        yield f":{takes}:{action}"
    for name in one.names:
        sign = "=" * (bool(one.takes) and name.startswith("--"))
        yield f"{'*' * one.repeats}{name}{sign}[{about}]" + (f":{takes}:{action}" if one.takes else "")


def _fish(verbs: dict[str, list[Option]]) -> Iterator[str]:
    for verb, about in VERBS.items():
        yield f"complete -c ucpl -n __fish_use_subcommand -f -a {verb} -d {_quoted(about)}"
    for verb, options in verbs.items():
        for one in options:
            words = [f"complete -c ucpl -n '__fish_seen_subcommand_from {verb}'"]
            words += [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in one.names]
            if one.takes:
                words += ["-r" if one.is_path else "-x"] if one.names else []
                words += [f"-a '{' '.join(one.values)}'"] if one.values else []
            if one.names or one.values:
                yield " ".join([*words, f"-d {_quoted(one.about)}"])


def _quoted(text: str) -> str:
    """A text in single quotes, for each of the shells."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
