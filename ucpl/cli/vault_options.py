"""The command line of `ucpl vault`: its actions, their options and help."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from ucpl.cli.options import add_data_plane, add_json, add_model, add_sizes, whole_number
from ucpl.cli.report import add_bandwidths
from ucpl.cli.wrapping import Formatter
from ucpl.errors import Label, fail

__all__ = ["EXAMPLE", "MAKES", "NUMBER_MAX", "arguments", "demand_used", "domains_of", "usage", "wrong"]

# Of each action, for the help of it alone. The help of all of them shows the first ones.
EXAMPLES = {
    "plan": """
ucpl vault plan 'job.ucpl:job(dp=4, tp=2)' --domains 4 --lose 1
ucpl vault plan 'job.ucpl:job(dp=4, tp=2)' --domains 0,1/2,3/4,5/6,7 --protect mirror --room 60G
""",
    "drill": """
ucpl vault drill 'job.ucpl:job(dp=4)' --domains 4 --lose 2
""",
    "serve": """
ucpl vault serve /dev/shm/ucpl/job --ranks 8 --domains 4 --domain 0
ucpl vault serve /dev/shm/ucpl/job --ranks 8 --domains 2 --domain 1 --hosts node0:7070,node1:7070 --keys keys/d1
ucpl vault serve /dev/shm/ucpl/job --layout 'job.ucpl:job(dp=4)' --domain 0 --every 10 --into runs
""",
    "keys": """
ucpl vault keys keys --hosts node0,node1
ucpl vault keys keys --domains 4 --json
""",
    "status": """
ucpl vault status /dev/shm/ucpl/job
""",
    "verify": """
ucpl vault verify /dev/shm/ucpl/job
ucpl vault verify /dev/shm/ucpl/job --generation 12
""",
    "scrub": """
ucpl vault scrub /dev/shm/ucpl/job
""",
    "restore": """
ucpl vault restore /dev/shm/ucpl/job runs/on-6 --to 'zero1(dp=6)'
ucpl vault restore /dev/shm/ucpl/job runs/on-6 --to 'zero1(dp=6)' --else runs
""",
    "persist": """
ucpl vault persist /dev/shm/ucpl/job runs/step-1200
ucpl vault persist /dev/shm/ucpl/job runs/step-1200 --generation 12
""",
    "gc": """
ucpl vault gc /dev/shm/ucpl
ucpl vault gc /dev/shm/ucpl/job --with-state
""",
}
_SHOWN = {"plan": 1, "serve": 2, "status": 1, "restore": 1, "persist": 1}
EXAMPLE = "\n".join(line for name, n in _SHOWN.items() for line in EXAMPLES[name].strip().splitlines()[:n])
ACTIONS = {
    "plan": "plan a vault of a layout: bytes of each domain, protections ranked, losses that are survived",
    "drill": "try a vault's faults on a layout, with small tensors: which are survived; exit 1 where anything is wrong",
    "serve": "keep the saves of a domain's ranks: check, protect and commit them, until stopped",
    "keys": "make keys and certificates of a vault on several hosts: a folder for each domain, which its host is given",
    "status": "list domains, live servers, committed generations",
    "verify": "hold every byte in memory against its digest; exit 1 where any is lost or damaged",
    "scrub": "compare every byte in memory with its digest, and rebuild damaged parts; exit 1 if any is lost",
    "restore": "convert the newest generation that counts into DST, in any layout",
    "persist": "write a generation into DST as the framework itself would have saved it",
    "gc": "remove vaults below a folder that no living process holds, or one alone",
}
_PATHS = {
    "plan": ("LAYOUT", "FILE.ucpl:NAME(...)"),
    "drill": ("LAYOUT", "FILE.ucpl:NAME(...)"),
    "keys": (
        "DIR",
        "a folder of your own, on one machine: ca.key, which is in it, is needed for new certificates alone",
    ),
    "gc": ("ROOT", "the folder above the vaults, or ROOT/JOB, one vault alone"),
}
_PATH = ("ROOT/JOB", "the vault's folder, in memory: /dev/shm/...")  # of all others
MAKES = ("restore", "persist")  # a folder, DST
_OF_A_LAYOUT = ("domains", "protect", "lose", "model", "sizes", "config")
# Options that each action uses, besides --json. Any other option would change nothing, and is refused.
_TAKES = {
    "plan": (*_OF_A_LAYOUT, "replays", "room", "bandwidths"),
    "drill": _OF_A_LAYOUT,
    "serve": ("domain", "domains", "ranks", "layout", "protect", "replays", "every", "into", "hosts", "keys"),
    "keys": ("domains", "hosts"),
    "status": (),
    "verify": ("generation",),
    "scrub": (),
    "restore": ("generation", "to", "otherwise", "source", "memory", "workers"),
    "persist": ("generation",),
    "gc": ("with_state",),
}
NUMBER_MAX = 1 << 20
_RANKS = re.compile(r"\d+(?:,\d+)*(?:/\d+(?:,\d+)*)*")


class _Action(argparse.Action):
    """Restrict the parser to this action; --help shows that alone."""

    def __call__(self, parser: ArgumentParser, options: Namespace, value: object, option: str | None = None) -> None:
        setattr(options, self.dest, value)
        parser.prog = f"{parser.prog} {value}"
        for one in parser._actions:
            if one.dest == "path":
                one.metavar = _path_of(str(value))[0]


class _Help(argparse.Action):
    """The action that was named before it; all of them without one."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: str | None, help: str | None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=default, help=help)

    def __call__(self, parser: ArgumentParser, options: Namespace, value: object, option: str | None = None) -> None:
        action = getattr(options, "action", None)
        (parser if action is None else _page(parser, action)).print_help()
        parser.exit()


def _page(parser: ArgumentParser, action: str) -> ArgumentParser:
    """Add the options of one action.

    parser: that of all actions, after it has read the action's name.
    """
    what = ACTIONS[action]
    page = ArgumentParser(
        prog=parser.prog,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog="example:\n" + "\n".join(f"  {line}" for line in EXAMPLES[action].strip().splitlines()),
        formatter_class=Formatter,
    )
    metavar, told = _path_of(action)
    page.add_argument("path", metavar=metavar, help=told)
    if action in MAKES:
        page.add_argument("target", metavar="DST", help="a new folder")
    _options(page, action)
    for one in parser._actions:
        if one.dest == "debug":
            page._add_action(one)
    return page


def _path_of(action: str) -> tuple[str, str]:
    return _PATHS.get(action, _PATH)


def usage(action: str) -> str:
    return f"ucpl vault {action} {_path_of(action)[0]}" + (" DST" if action in MAKES else "")


def arguments(parser: ArgumentParser) -> None:
    parser._optionals.conflict_handler = "resolve"  # it takes the place of argparse's own
    parser.add_argument(
        "-h", "--help", action=_Help, default=argparse.SUPPRESS, help="show this; behind an action, its own options"
    )
    parser._optionals.conflict_handler = "error"
    text = "; ".join(f"{name}: {what}" for name, what in ACTIONS.items())
    parser.add_argument("action", choices=list(ACTIONS), action=_Action, help=text)
    parser.add_argument(
        "path",
        metavar="ROOT/JOB",
        help=f"{_PATH[1]} (gc: the folder above, or the vault's; plan, drill: the layout, {_PATHS['plan'][1]})",
    )
    target = parser.add_argument("target", metavar="[DST]", help=f"{', '.join(MAKES)}: a new folder")
    target.required = (
        False  # argparse would match "?" with nothing, and DST with one too many, if an option comes before it
    )
    _options(parser)


def _options(parser: ArgumentParser, action: str | None = None) -> None:
    """The options of an action; None: all, each with its actions."""

    def is_taken(name: str) -> bool:
        return action is None or name in _TAKES[action]

    def add(option: str, told: str, name: str = "", metavar: str = "") -> None:
        """metavar: of its value; it has none without."""
        name = name or option[2:].replace("-", "_")
        if is_taken(name):
            whose = ", ".join(one for one, takes in _TAKES.items() if name in takes)
            told = told if action is not None else f"{whose}: {told}"
            if metavar:
                parser.add_argument(option, dest=name, help=told, metavar=metavar)
            else:
                parser.add_argument(option, dest=name, help=told, action="store_true")

    add("--domain", "which domain, from 0", metavar="K")
    shape = "how many, of as many ranks each; or the ranks of each: 0,1/2,3"
    by_itself = {"serve": "", "keys": " (default 2)", None: " (else, of plan and drill: as in the layout)"}
    add("--domains", shape + by_itself.get(action, " (else: as the layout says)"), metavar="N")
    add("--ranks", "ranks of the job", metavar="N")
    add("--layout", "whose `domain` says the ranks of each domain", metavar="LAYOUT")
    how = "none, mirror, mirror(2), raim5, raim5(4), rs(6, 2)"
    least = {
        "plan": "that of least memory under which --lose N may be lost, or one",
        "drill": "that of least memory under which any one may be lost",
    }
    add("--protect", f"{how} (default: {least.get(action or '', 'raim5 from 3 domains on')})", metavar="HOW")
    lose = {
        "plan": "so many domains may be lost at once; exit 1 where that takes anything with it",
        "drill": "up to so many domains are lost at once (default 2)",
    }
    both = f"so many domains may be lost at once, exit 1 where that takes anything with it; of drill: {lose['drill']}"
    add("--lose", lose.get(action or "", both), metavar="N")
    add("--room", "memory of a domain, as in 60G", metavar="SIZE")
    at = "of a vault on several hosts, where the server of each domain answers the others"
    add("--hosts", "the host of each domain, by domain" if action == "keys" else at, metavar="HOST:PORT,...")
    add("--keys", "the keys of this host, as `ucpl vault keys` makes them", metavar="DIR")
    steps = "number of successive saves of gradients alone, from which AdamW repeats its steps"
    add("--replays", steps, metavar="N")
    add("--every", "write every N-th generation that counts below --into", metavar="N")
    add("--into", "where, as FOLDER/step-STEP", metavar="FOLDER")
    add("--generation", "not the newest one", metavar="G")
    add("--to", "the layout of DST", metavar="LAYOUT")
    written = "if memory does not suffice, use the checkpoints of `serve --into FOLDER`"
    add("--else", written, "otherwise", metavar="FOLDER")
    add("--from", "the layout that the ranks saved, if it is ambiguous", "source", metavar="LAYOUT")
    add("--with-state", "those, too, in which a generation counts")
    if is_taken("model"):
        add_model(parser, "where the layout of plan is of any" if action is None else "where the layout is of any")
    if is_taken("sizes"):
        add_sizes(parser)
    if is_taken("bandwidths"):
        add_bandwidths(parser)
    if is_taken("memory"):
        add_data_plane(parser)
    add_json(parser)


def demand_used(options: Namespace) -> None:
    """Raises: UcplError E171."""
    parser = ArgumentParser()
    arguments(parser)
    for one in parser._actions:
        if one.option_strings and one.dest not in (*_TAKES[options.action], "json", "help"):
            if getattr(options, one.dest) != one.default:
                whose = " and ".join(f"`{name}`" for name, takes in _TAKES.items() if one.dest in takes)
                option = one.option_strings[0]
                fail(
                    "E171", f"ucpl vault {options.action} makes no use of `{option}`, which is for {whose}",
                    Label("<command line>", where=option), remedy="leave it out",
                )  # fmt: skip


def wrong(where: str, what: str, remedy: str) -> None:
    fail("E171", f"`{where}` {what}", Label("<command line>", where=where), remedy=f"write {remedy}")


def domains_of(text: str) -> int | list[list[int]]:
    """The number of domains, or the ranks of each.

    Raises: UcplError E171, E173.
    """
    if not _RANKS.fullmatch(text):
        wrong(f"--domains {text}", "names no domains", "--domains 4, or --domains 0,1/2,3")
    if "," in text or "/" in text:
        return [[int(rank) for rank in some.split(",")] for some in text.split("/")]
    return whole_number("--domains", text, NUMBER_MAX)
