"""Snapshots in memory that outlive the trainer.

The servers that keep them, and verbs on the snapshots.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text, table_lines
from ucpl.cli.options import data_plane, given_of, whole_number
from ucpl.cli.vault_options import EXAMPLE, MAKES, arguments, demand_used, domains_of, usage, wrong
from ucpl.errors import Exit, Label, UcplError, fail, plural
from ucpl.storage.urls import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucpl.cli.console import Console
    from ucpl.texts import Json
    from ucpl.vault.inspect import Damage

__all__ = ["EXAMPLE", "arguments", "run"]

# Of a target that `restore` cannot write: it has none of the options that `convert` has for that.
_REMEDIES = {
    "E500": "choose another DST: an existing one is not overwritten",
    "E503": "remove the cause (space, permission, quota), or choose another DST, and write the same line again",
}


def run(options: Namespace, console: Console) -> int:
    home = Path(options.path)
    if options.action in MAKES and not options.target:
        wrong(options.action, "needs DST", usage(options.action))
    if options.action not in MAKES and options.target:
        wrong(options.target, "is one argument too many", usage(options.action))
    demand_used(options)
    if options.action not in ("plan", "drill") and (is_url(options.path) or options.path.startswith("vault:")):
        _demand_folder(home, options.path)
    actions = {
        "plan": _plan, "drill": _drill, "serve": _serve, "keys": _keys, "status": _status, "verify": _verify, "scrub": _scrub,
        "restore": _restore, "persist": _persist, "gc": _gc,
    }  # fmt: skip
    return actions[options.action](home, options, console)


def _demand_folder(home: Path, path: str) -> None:
    """A vault is named by its folder.

    A reader of it as a checkpoint writes `vault:` before it. Raises: UcplError E680, E692.
    """
    from ucpl.storage.vaults.committed import reject_no_vault

    if path.startswith("vault:"):
        reject_no_vault(home)
    what = f"{path} is a URL, and a vault is a folder of this machine"
    fail("E680", what, Label("<command line>", where=path), remedy="name its folder in memory, as in /dev/shm/ucpl/job")


def _generation(options: Namespace) -> int | None:
    return whole_number("--generation", options.generation, 1 << 50) if options.generation else None


def _plan(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.cli.vault_plan import run_plan

    return run_plan(options, domains_of(options.domains) if options.domains else None, console)


def _serve(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.cli.vault_serve import run_serve

    return run_serve(home, options, console)


def _keys(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.storage.certificates import AUTHORITY_KEY, issue

    hosts = [one.strip() for one in options.hosts.split(",")] if options.hosts else []
    told = domains_of(options.domains) if options.domains else len(hosts) or 2
    domains = told if isinstance(told, int) else len(told)
    if hosts and len(hosts) != domains:
        wrong("--hosts", f"lists {len(hosts)} for {domains} domains", "one host for each domain, or --domains alone")
    try:
        made = issue(home, domains)
    except OSError as error:
        what = f"{home} cannot be written: {error.strerror or error}"
        fail("E695", what, Label(os.fsdecode(error.filename or home)), remedy="name another folder")
    for path in made:
        number = int(path.name[1:]) if path.name[1:].isdigit() else None
        host = hosts[number].rpartition(":")[0] or hosts[number] if number is not None and hosts else ""
        whose = f" {host}" if host else " the host of this domain" if number is not None else " hosts without a domain"
        console.say(f"made       {path}: for{whose}")
    console.say(f"authority  {home}: {AUTHORITY_KEY} makes more of them; no host is given it")
    console.answer({"keys": str(home), "domains": domains, "made": [str(path) for path in made]})
    return 0


def _drill(home: Path, options: Namespace, console: Console) -> int:
    return run_drill(options, domains_of(options.domains) if options.domains else None, console)


def _status(home: Path, options: Namespace, console: Console) -> int:
    from attrs import asdict

    from ucpl.storage.vaults.committed import describe_damage
    from ucpl.vault.inspect import inspect_vault

    found = inspect_vault(home)
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
            f"committed  generation {one.number}, step {one.step}: {bytes_text(one.bytes)} in {plural(one.files, 'file')},"
            f"{f' gradients of step {one.replays} since all was saved,' if one.replays else ''}"
            f" {bytes_text(one.parity)} for others{'' if one.age is None else f', {one.age:.0f} s ago'}{where}"
        )
    if not found.generations:
        console.say("committed  nothing")
    for number, texts in found.damaged_newer:
        console.say(f"damaged    generation {number}, newer than the committed one: {describe_damage(texts)}")
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
            "damaged": [{"number": number, "texts": list(map(str, texts))} for number, texts in found.damaged_newer],
        }
    )
    return Exit.DONE


def _verify(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.vault.inspect import find_damage

    memory, found = find_damage(home, _generation(options))
    memory.close()
    return _print_damage(memory.commit.generation, 0, found, console)


def _scrub(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.vault.create import Vault
    from ucpl.vault.inspect import scrub
    from ucpl.vault.path_conflicts import report_not_written

    try:
        count, found = scrub(home, console.say)
    except OSError as error:
        report_not_written(home, error)
    newest = Vault.at(home).committed()
    return _print_damage(newest.generation if newest is not None else 0, count, found, console)


def _print_damage(generation: int, count: int, found: Sequence[Damage], console: Console) -> int:
    for one in found:
        fate = "can be rebuilt" if one.can_be_rebuilt else "is gone"
        console.say(f"damaged    {one.what}: {f'{one.chunks} chunks of 1 MiB, ' if one.chunks else ''}{fate}")
    if count:
        console.say(f"rebuilt    {count} chunks")
    if not found:
        console.say(f"complete   generation {generation}: every byte equals the saved one")
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
    from ucpl.vault.restore import read_state, restore_newest, write_ranks_json

    if not options.to:
        wrong("restore", "needs --to", "--to 'zero1(dp=6)'; `ucpl vault persist` writes it as it was saved")
    bounds, rebuilt, told = data_plane(options), 0, dict[str, object]()

    def read(source: str) -> None:
        nonlocal rebuilt, told
        told = read_state(source)
        try:
            done = api.convert(source, options.target, options.to, layout=options.source or None, **bounds)
        except UcplError as error:
            first, *others = error.diagnostics
            if first.code not in _REMEDIES:
                raise
            raise UcplError(evolve(first, remedy=_REMEDIES[first.code]), *others) from error
        rebuilt = done.report.bytes_rebuilt

    _warn_of_others(home, console)
    persisted = Path(options.otherwise) if options.otherwise else None
    made = restore_newest(home, read, generation=_generation(options), persisted=persisted)
    for source, why in made.passed:
        console.say(f"passed     {source}: {why}")
    for source in made.silent:
        console.say(f"behind     {source}: nothing in its folder ucpl says when it was saved")
    if rebuilt:
        console.say(f"rebuilt    {bytes_text(rebuilt)}, from other domains")
    kept = write_ranks_json(told, Path(options.target))
    if kept is not None:
        console.say(f"state      {kept}: the companion state of the ranks")
    if made.damage:  # for a caller that keeps standard output alone, too
        console.note(f"warning: {made.damage}; all tensors are restored")
        console.say(f"damaged    {made.damage}")
    console.say(f"done       {options.target}: step {made.step} of {made.source}")
    passed: list[Json] = [{"source": source, "why": why} for source, why in made.passed]
    answer: dict[str, Json] = {"target": str(options.target), "source": made.source, "step": made.step}
    answer |= {"passed": passed, "silent": list(made.silent), "damage": made.damage}
    console.answer({**answer, "rebuilt": rebuilt, "state": None if kept is None else str(kept)})
    return Exit.DONE


def _warn_of_others(home: Path, console: Console) -> None:
    """Report a vault that another user may have changed.

    It is read all the same.
    """
    from ucpl.owned import demand_owned

    with suppress(OSError):  # it does not exist: a restore may read persisted folders
        try:
            demand_owned(home)
        except UcplError as error:
            console.note(f"warning: {error.diagnostics[0].message}; its state may be of another user")


def _persist(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.storage.vaults.committed import get_unreadable_newer
    from ucpl.vault.persisted import persist

    _warn_of_others(home, console)
    passed = get_unreadable_newer(home) if not options.generation else {}
    memory = persist(home, Path(options.target), _generation(options))
    rebuilt = f", {bytes_text(memory.all_rebuilt)} rebuilt" if memory.all_rebuilt else ""
    console.say(
        f"written    {options.target}: generation {memory.commit.generation}, step {memory.commit.step}{rebuilt}"
    )
    for number, why in passed.items():
        console.note(f"warning: generation {number} is newer, and damaged: {why}")
    answer: dict[str, Json] = {"target": str(options.target), "generation": memory.commit.generation}
    console.answer({**answer, "step": memory.commit.step, "damaged": list(passed)})
    return Exit.DONE


def _gc(home: Path, options: Namespace, console: Console) -> int:
    from ucpl.vault.cleanup import remove_vaults

    found = remove_vaults(home, with_state=options.with_state)
    for one in found:
        console.say(f"{one.what:<10} {one.home}: {one.why}")
    if all(one.what == "passed" for one in found):
        console.say(f"nothing    {home} has no {'other ' if found else ''}vaults")
    console.answer({"vaults": [{"home": str(one.home), "what": one.what, "why": one.why} for one in found]})
    return Exit.DONE


# ---- ucpl vault drill ------------------------------------------------------------------------------------------------

LOSE_MAX = 3
DRILL_HEAD = ("fault", "cases", "newest", "the one before", "refused, as foretold", "wrong")
MEMORY = Path("/dev/shm")


def run_drill(options: Namespace, domains: int | list[list[int]] | None, console: Console) -> int:
    """Plan a vault; print it.

    Raises: UcplError E690, E693, and the errors of planning.
    """
    from ucpl.vault.drill import drill
    from ucpl.vault.path_conflicts import DRILLS, open_work_dir, remove_stale

    lose = whole_number("--lose", options.lose, LOSE_MAX) if options.lose else 2
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    remove_stale(where or Path(tempfile.gettempdir()), DRILLS)  # of drills that were killed
    prefix = DRILLS.rstrip("*")
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as top,
        open_work_dir(Path(top)),
    ):
        root = Path(top) / "drill"
        plan, cases = drill(options.path, root, domains, options.protect, lose=lose, given=given_of(options))
        console.say(f"drilled    {options.path}: {len(plan.domains)} domains, {plan.scheme.protection}, in {top}")
        console.flush()
        found = list(cases)
    rows = [
        (one.fault, str(one.cases), *(str(n or "") for n in (one.kept, one.before, one.refused, len(one.wrong))))
        for one in found
    ]
    console.say(*table_lines(DRILL_HEAD, rows))
    wrong = sum(len(one.wrong) for one in found)
    for one in found:
        for case in one.wrong[:3]:
            console.say(f"wrong      {one.fault}: {case}")
    console.say(
        f"drilled    {sum(one.cases for one in found)} cases, {wrong or 'none'} with another result than predicted"
    )
    faults: list[Json] = [
        {
            "fault": one.fault, "cases": one.cases, "newest": one.kept, "before": one.before, "refused": one.refused,
            "wrong": list(one.wrong),
        }
        for one in found
    ]  # fmt: skip
    console.answer({"layout": options.path, "protect": str(plan.scheme.protection), "faults": faults})
    return Exit.ANSWER_IS_NO if wrong else Exit.DONE
