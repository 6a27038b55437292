"""Snapshots in memory that outlive the trainer: the servers that keep them, and what can be done with what they keep."""

from __future__ import annotations

import argparse
import os
import re
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.costs import add_bandwidths
from ucpl.cli.options import SHOWN, add_data_plane, add_json, add_model, add_sizes, data_plane, whole_number
from ucpl.errors import Exit, Label, UcplError, fail
from ucpl.remotes.urls import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucpl.cli.console import Console
    from ucpl.remotes.vaults.records import Commit, Job
    from ucpl.texts import Json
    from ucpl.vault.looking import Damage
    from ucpl.vault.making import ToMake

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
ucpl vault serve /dev/shm/ucpl/job --ranks 8 --domains 2 --domain 1 --hosts node0:7070,node1:7070 --secret secret.txt
ucpl vault serve /dev/shm/ucpl/job --layout 'job.ucpl:job(dp=4)' --domain 0 --every 10 --into runs
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
    "plan": "what a vault of a layout will be: bytes of each domain, protections ranked, which losses are survived",
    "drill": "try a vault's faults on a layout, with small tensors: which are survived; exit 1 where anything is wrong",
    "serve": "keep what a domain's ranks save: check it, protect it, commit it; until it is told to end",
    "status": "what is there: domains, who lives, which generations count",
    "verify": "hold every byte in memory against its digest; exit 1 where any is lost or damaged",
    "scrub": "hold every byte in memory against its digest, and rebuild what can be rebuilt; exit 1 where any is gone",
    "restore": "convert the newest generation that counts into DST, in any layout",
    "persist": "write a generation into DST as the framework itself would have saved it",
    "gc": "remove vaults below a folder that no living process holds, or one alone",
}
_PATHS = {
    "plan": ("LAYOUT", "FILE.ucpl:NAME(...)"),
    "drill": ("LAYOUT", "FILE.ucpl:NAME(...)"),
    "gc": ("ROOT", "the folder above the vaults, or ROOT/JOB, one vault alone"),
}
_PATH = ("ROOT/JOB", "the vault's folder, in memory: /dev/shm/...")  # of all others
_MAKES = ("restore", "persist")  # a folder, DST
_OF_A_LAYOUT = ("domains", "protect", "lose", "model", "sizes", "config")
# What each action makes use of, beside --json. Anything else that is given would change nothing, and is refused.
_TAKES = {
    "plan": (*_OF_A_LAYOUT, "replays", "room", "bandwidths"),
    "drill": _OF_A_LAYOUT,
    "serve": ("domain", "domains", "ranks", "layout", "protect", "replays", "every", "into", "hosts", "secret"),
    "status": (),
    "verify": ("generation",),
    "scrub": (),
    "restore": ("generation", "to", "otherwise", "source", "memory", "workers"),
    "persist": ("generation",),
    "gc": ("with_state",),
}
# Of a target that `restore` cannot write: it has none of the options that `convert` has for that.
_REMEDIES = {
    "E500": "choose another DST: what is there is not written over",
    "E503": "remove the cause (space, permission, quota), or choose another DST, and write the same line again",
}
POLL = 0.02  # seconds between two looks of a server
PAUSE = 0.5  # the same, where something is in its way
NUMBER_MAX = 1 << 20
_RANKS = re.compile(r"\d+(?:,\d+)*(?:/\d+(?:,\d+)*)*")


class _Action(argparse.Action):
    """From here on the parser says what this action takes, and --help shows that alone."""

    def __call__(self, parser: ArgumentParser, options: Namespace, value: object, option: str | None = None) -> None:
        setattr(options, self.dest, value)
        parser.prog = f"{parser.prog} {value}"
        for one in parser._actions:
            if one.dest == "path":
                one.metavar = _path_of(str(value))[0]


class _Help(argparse.Action):
    """Of the action that was named before it; of all of them where none was."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: str | None, help: str | None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=default, help=help)

    def __call__(self, parser: ArgumentParser, options: Namespace, value: object, option: str | None = None) -> None:
        action = getattr(options, "action", None)
        (parser if action is None else _page(parser, action)).print_help()
        parser.exit()


def _page(parser: ArgumentParser, action: str) -> ArgumentParser:
    """What is said of one action alone. parser: that of all of them, once it has read which one is meant."""
    what = ACTIONS[action]
    page = ArgumentParser(
        prog=parser.prog,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog="example:\n" + "\n".join(f"  {line}" for line in EXAMPLES[action].strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    metavar, told = _path_of(action)
    page.add_argument("path", metavar=metavar, help=told)
    if action in _MAKES:
        page.add_argument("target", metavar="DST", help="a new folder")
    _options(page, action)
    for one in parser._actions:
        if one.dest == "debug":
            page._add_action(one)
    return page


def _path_of(action: str) -> tuple[str, str]:
    return _PATHS.get(action, _PATH)


def _usage(action: str) -> str:
    return f"ucpl vault {action} {_path_of(action)[0]}" + (" DST" if action in _MAKES else "")


def arguments(parser: ArgumentParser) -> None:
    parser._optionals.conflict_handler = "resolve"  # it stands in the place of argparse's own
    parser.add_argument(
        "-h", "--help", action=_Help, default=argparse.SUPPRESS, help="show this; behind an action, what it alone takes"
    )
    parser._optionals.conflict_handler = "error"
    told = "; ".join(f"{name}: {what}" for name, what in ACTIONS.items())
    parser.add_argument("action", choices=list(ACTIONS), action=_Action, help=told)
    parser.add_argument(
        "path",
        metavar="ROOT/JOB",
        help=f"{_PATH[1]} (gc: the folder above, or the vault's; plan, drill: the layout, {_PATHS['plan'][1]})",
    )
    target = parser.add_argument("target", metavar="[DST]", help=f"{', '.join(_MAKES)}: a new folder")
    target.required = (
        False  # argparse would take "?" for none, and DST for one too many, where an option stands before it
    )
    _options(parser)


def _options(parser: ArgumentParser, action: str | None = None) -> None:
    """Those of an action; None: those of all, each with the actions that take it."""

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
    by_itself = {"serve": "", None: " (else, of plan and drill: as the layout says)"}
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
    add("--room", "what a domain may hold in memory, as in 60G", metavar="SIZE")
    at = "of a vault on several hosts, where the server of each domain answers the others"
    add("--hosts", at, metavar="HOST:PORT,...")
    add("--secret", "what all hosts know and nobody else", metavar="FILE")
    steps = "so many saves one after the other may be of gradients alone, of which AdamW makes its steps again"
    add("--replays", steps, metavar="N")
    add("--every", "write every N-th generation that counts below --into", metavar="N")
    add("--into", "where, as FOLDER/step-STEP", metavar="FOLDER")
    add("--generation", "not the newest one", metavar="G")
    add("--to", "the layout of DST", metavar="LAYOUT")
    written = "what `serve --into FOLDER` wrote is taken where memory does not suffice"
    add("--else", written, "otherwise", metavar="FOLDER")
    add("--from", "what the ranks saved, where it must be said", "source", metavar="LAYOUT")
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


def run(options: Namespace, console: Console) -> int:
    home = Path(options.path)
    if options.action in _MAKES and not options.target:
        _wrong(options.action, "needs DST", _usage(options.action))
    if options.action not in _MAKES and options.target:
        _wrong(options.target, "is one argument too many", _usage(options.action))
    _demand_used(options)
    if options.action not in ("plan", "drill") and (is_url(options.path) or options.path.startswith("vault:")):
        _demand_folder(home, options.path)
    actions = {
        "plan": _plan, "drill": _drill, "serve": _serve, "status": _status, "verify": _verify, "scrub": _scrub,
        "restore": _restore, "persist": _persist, "gc": _gc,
    }  # fmt: skip
    return actions[options.action](home, options, console)


def _demand_used(options: Namespace) -> None:
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


def _demand_folder(home: Path, path: str) -> None:
    """A vault is named by its folder; `vault:` before it is for who reads it as a checkpoint. Raises: UcplError E680, E692."""
    from ucpl.remotes.vaults.counted import no_vault

    if path.startswith("vault:"):
        no_vault(home)
    what = f"{path} is a URL, and a vault is a folder of this machine"
    fail("E680", what, Label("<command line>", where=path), remedy="name its folder in memory, as in /dev/shm/ucpl/job")


def _wrong(where: str, what: str, remedy: str) -> None:
    fail("E171", f"`{where}` {what}", Label("<command line>", where=where), remedy=f"write {remedy}")


def _generation(options: Namespace) -> int | None:
    return whole_number("--generation", options.generation, 1 << 50) if options.generation else None


def _plan(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.cli.vault_plan import run_plan

    return run_plan(options, domains_said(options.domains) if options.domains else None, console)


def _drill(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.cli.vault_drill import run_drill

    return run_drill(options, domains_said(options.domains) if options.domains else None, console)


def _serve(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.remotes.vaults.counted import committed
    from ucpl.remotes.vaults.hosts import addresses_of
    from ucpl.vault.leftovers import WORKS, sweep
    from ucpl.vault.making import Vault
    from ucpl.vault.server import Server

    text = options.domain or ""
    if not (text.isascii() and text.isdigit() and len(text) < len(str(NUMBER_MAX))):
        what = f"--domain {text[:SHOWN]}" if text else "serve"
        said = "names no domain" if text else "needs --domain"
        _wrong(what, said, "ucpl vault serve ROOT/JOB --domain 0, one for each domain")
    if bool(options.hosts) != bool(options.secret):
        _wrong("--hosts", "and --secret go together", "--hosts node0:7070,node1:7070 --secret FILE")
    if options.hosts and not (options.ranks or options.domains or options.layout):
        _wrong("--hosts", "needs the shape of the vault, too", "--ranks 8 --domains 2, or --layout")
    if bool(options.every) != bool(options.into):
        _wrong("--every", "and --into go together", "--every 10 --into runs")
    every = whole_number("--every", options.every, NUMBER_MAX) if options.every else 0
    if options.ranks or options.domains or options.layout:
        vault = Vault.make(home, **_said(options))
    else:
        vault = Vault.at(home)
        _demand_kept(vault.job, options)
    at = addresses_of(options.hosts)[int(text)] if options.hosts and int(text) < len(vault.job.domains) else None
    with Server(vault.home, int(text), console.say, at=at) as server:
        ranks = ", ".join(map(str, vault.job.domains[server.number]))
        console.say(f"serving    {vault.home}/d{server.number}: ranks {ranks}, {vault.job.protection}")
        console.flush()
        last = newest.generation if (newest := vault.committed()) is not None else 0
        told = ""
        late = set[int]()  # whoever served before ended before they were written
        if every:
            sweep(Path(options.into), WORKS)
            some = (one for one in committed(vault.home, vault.job) if one.generation % every == 0)
            late |= {one.generation for one in some if not _is_kept(Path(options.into), one, vault.job)}
        while True:
            if not server.here.is_there():
                _gone(server.here.folder)
            try:
                server.turn()
                told = ""
            except OSError as error:  # memory that is full, or what stands where a file should
                waits_for = f"{os.fsdecode(error.filename or server.here.folder)}: {error.strerror or error}"
                if waits_for != told:
                    console.say(f"waits      {waits_for}; nothing counts until that is mended")
                    console.flush()
                told = waits_for
                time.sleep(PAUSE)
            for one in reversed(committed(vault.home, vault.job)):  # one after the other may count between two looks
                if one.generation > last or one.generation in late:
                    last = max(last, one.generation)
                    late.discard(one.generation)
                    if every and one.generation % every == 0 and server.number == min(server.alive(), default=0):
                        _kept(home, _place_of(Path(options.into), one), one.generation, console)
            console.flush()
            time.sleep(POLL)


def _demand_kept(job: Job, options: Namespace) -> None:
    """What is said of a vault that is there is what it was made with. Raises: UcplError E694."""
    from ucpl.remotes.vaults.codes import Protection

    other = ""
    if options.protect and Protection.parse(options.protect) != job.protection:
        other = f"--protect {options.protect}"
    if options.replays and whole_number("--replays", options.replays, NUMBER_MAX) != job.replays:
        other = f"--replays {options.replays}"
    if other:
        what = f"{options.path} was made with --protect '{job.protection}' and --replays {job.replays}"
        remedy = "leave it out, or name another folder with --ranks and --domains"
        fail("E694", what, Label("<command line>", where=other), remedy=remedy)


def _gone(folder: Path) -> None:
    fail(
        "E695", f"{folder} is gone, while it was served", Label(str(folder)),
        remedy="start the server once more: it makes the domain anew, of what the others hold",
    )  # fmt: skip


def _place_of(into: Path, one: Commit) -> Path:
    """Where a generation is written: what a run had written of the same step before it went back stays."""
    plain = into / f"step-{one.step}"
    return into / f"step-{one.step}.generation-{one.generation}" if os.path.lexists(plain) else plain


def _is_kept(into: Path, one: Commit, job: Job) -> bool:
    """Whether a generation was written there."""
    from ucpl.vault.persisting import told_in

    some = (told_in(path) for path in into.glob(f"step-{one.step}*"))
    return any((told.get("vault"), told.get("generation")) == (job.ident, one.generation) for told in some)


def _kept(home: Path, target: Path, generation: int, console: Console) -> None:
    """What cannot be written ends no server."""
    from ucpl.vault.persisting import persist

    try:
        persist(home, target, generation)
        console.say(f"written    {target}: generation {generation}")
    except UcplError as error:
        console.diagnostics(error.diagnostics)


def _said(options: Namespace) -> ToMake:
    said: ToMake = {}
    if options.hosts:
        said["hosts"], said["secret"] = options.hosts, options.secret
    if options.protect:
        said["protect"] = options.protect
    if options.replays:
        said["replays"] = whole_number("--replays", options.replays, NUMBER_MAX)
    if options.layout and (options.domains or options.ranks):
        _wrong("--layout", "says ranks and domains by itself", "--layout alone, or --ranks and --domains")
    if options.layout:
        return {**said, "layout": options.layout}
    domains = options.domains or "1"
    said["domains"] = found = domains_said(domains)
    if isinstance(found, int):
        said["ranks"] = whole_number("--ranks", options.ranks or domains, NUMBER_MAX)
    return said


def domains_said(text: str) -> int | list[list[int]]:
    """How many domains, or the ranks of each. Raises: UcplError E171, E173."""
    if not _RANKS.fullmatch(text):
        _wrong(f"--domains {text}", "names no domains", "--domains 4, or --domains 0,1/2,3")
    if "," in text or "/" in text:
        return [[int(rank) for rank in some.split(",")] for some in text.split("/")]
    return whole_number("--domains", text, NUMBER_MAX)


def _status(home: Path, options: Namespace, console: Console) -> int:
    from attrs import asdict

    from ucpl.vault.looking import look

    found = look(home)
    console.say(
        f"vault      {home}: {found.job.ranks} ranks in {len(found.job.domains)} domains, {found.job.protection}"
        + (f", {found.job.replays} steps replayed at most" if found.job.replays else "")
    )
    for place in found.domains:
        ranks = ", ".join(map(str, place.ranks))
        alive = f"{len(place.written_by)} of {len(place.ranks)} writers live"
        served = "served" if place.is_served else "no server"
        what = f"{served}, {alive}, {bytes_text(place.bytes)}" if place.is_there else "lost"
        if place.at:
            what = f"at {place.at}, {bytes_text(place.bytes)}" if place.is_there else f"no answer from {place.at}"
        console.say(f"d{place.number:<9} ranks {ranks}: {what}")
    for one in found.generations:
        where = (
            ""
            if len(one.in_domains) == len(found.job.domains)
            else f", in d{', d'.join(map(str, one.in_domains))} alone"
        )
        console.say(
            f"committed  generation {one.number}, step {one.step}: {bytes_text(one.bytes)} in {one.files} files,"
            f"{f' gradients of step {one.replays} since all was saved,' if one.replays else ''}"
            f" {bytes_text(one.parity)} for others{'' if one.age is None else f', {one.age:.0f} s ago'}{where}"
        )
    if not found.generations:
        console.say("committed  nothing")
    generations: list[Json] = [{**asdict(one), "in_domains": list(one.in_domains)} for one in found.generations]
    domains: list[Json] = [
        {**asdict(one), "ranks": list(one.ranks), "written_by": list(one.written_by)} for one in found.domains
    ]
    console.answer(
        {
            "vault": str(home),
            "protect": str(found.job.protection),
            "replays": found.job.replays,
            "domains": domains,
            "generations": generations,
        }
    )
    return Exit.DONE


def _verify(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.vault.looking import damage

    memory, found = damage(home, _generation(options))
    memory.close()
    return _told(memory.commit.generation, 0, found, console)


def _scrub(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.vault.looking import mend_texts, scrub
    from ucpl.vault.making import Vault

    if texts := mend_texts(home):
        console.say(f"mended     {texts} texts, as those of other domains say")
    count, found = scrub(home)
    newest = Vault.at(home).committed()
    return _told(newest.generation if newest is not None else 0, count, found, console)


def _told(generation: int, count: int, found: Sequence[Damage], console: Console) -> int:
    for one in found:
        fate = "can be rebuilt" if one.can_be_rebuilt else "is gone"
        console.say(f"damaged    {one.what}: {f'{one.chunks} chunks of 1 MiB, ' if one.chunks else ''}{fate}")
    if count:
        console.say(f"rebuilt    {count} chunks")
    if not found:
        console.say(f"whole      generation {generation}: every byte is what was saved")
    console.answer(
        {
            "generation": generation,
            "rebuilt": count,
            "damaged": [{"what": d.what, "chunks": d.chunks, "can_be_rebuilt": d.can_be_rebuilt} for d in found],
        }
    )
    return Exit.DONE if not found else Exit.ANSWER_IS_NO


def _restore(home: Path, options: Namespace, console: Console) -> int:
    from attrs import evolve

    from ucpl import api
    from ucpl.vault.restoring import keep_state, restored, state_of

    if not options.to:
        _wrong("restore", "needs --to", "--to 'zero1(dp=6)'; `ucpl vault persist` writes it as it was saved")
    bounds, rebuilt, told = data_plane(options), 0, dict[str, object]()

    def read(source: str) -> None:
        nonlocal rebuilt, told
        told = state_of(source)
        try:
            done = api.convert(source, options.target, options.to, layout=options.source or None, **bounds)
        except UcplError as error:
            first, *others = error.diagnostics
            if first.code not in _REMEDIES:
                raise
            raise UcplError(evolve(first, remedy=_REMEDIES[first.code]), *others) from error
        rebuilt = done.report.bytes_rebuilt

    persisted = Path(options.otherwise) if options.otherwise else None
    made = restored(home, read, generation=_generation(options), persisted=persisted)
    for source, why in made.passed:
        console.say(f"passed     {source}: {why}")
    if rebuilt:
        console.say(f"rebuilt    {bytes_text(rebuilt)}, of what other domains hold")
    kept = keep_state(told, Path(options.target))
    if kept is not None:
        console.say(f"state      {kept}: what ranks gave beside it")
    console.say(f"done       {options.target}: step {made.step} of {made.source}")
    passed: list[Json] = [{"source": source, "why": why} for source, why in made.passed]
    answer: dict[str, Json] = {"target": str(options.target), "source": made.source, "step": made.step}
    console.answer({**answer, "rebuilt": rebuilt, "passed": passed, "state": None if kept is None else str(kept)})
    return Exit.DONE


def _persist(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.vault.persisting import persist

    memory = persist(home, Path(options.target), _generation(options))
    rebuilt = f", {bytes_text(memory.all_rebuilt)} rebuilt" if memory.all_rebuilt else ""
    console.say(
        f"written    {options.target}: generation {memory.commit.generation}, step {memory.commit.step}{rebuilt}"
    )
    console.answer({"target": str(options.target), "generation": memory.commit.generation, "step": memory.commit.step})
    return Exit.DONE


def _gc(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.vault.clearing import clear

    found = clear(home, with_state=options.with_state)
    for one in found:
        console.say(f"{one.what:<10} {one.home}: {one.why}")
    if not found:
        console.say(f"nothing    {home} has no vaults")
    console.answer({"vaults": [{"home": str(one.home), "what": one.what, "why": one.why} for one in found]})
    return Exit.DONE
