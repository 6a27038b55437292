"""Run a plan, then open and check the written target."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, UcplError, calling
from ucpl.registry import format_named
from ucpl.storage.resolve_url import get_upload_target

if TYPE_CHECKING:
    from ucpl.conversion.keywords import How
    from ucpl.conversion.target_passes import AfterPasses
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.plan import Plan
    from ucpl.runtime.counters import Report
    from ucpl.runtime.execute import TargetSizes
    from ucpl.runtime.process_group import ProcessGroup
    from ucpl.storage.upload_target import UploadTarget

__all__ = ["rehearsed", "run"]


def run(
    plan: Plan,
    after: AfterPasses,
    target: Path,
    how: How,
    team: ProcessGroup | None = None,
) -> Report:
    """Run a plan, together with other ranks if there is a team.

    Each parameter of the target must have the hyper-parameters that it has in the source. Raises: UcplError E600-E607 if the
    source differs from the source of the plan.
    """
    from ucpl.conversion.keywords import options_from
    from ucpl.formats.opening import framework
    from ucpl.runtime.execute import execute
    from ucpl.runtime.process_group import ALONE
    from ucpl.verification.blobs import check_equal_blobs

    source, known = after.final, after.ungrouped
    for blob in plan.target.blobs:
        check_equal_blobs(blob.alike, blob.name, source.root)

    def look(written: Path) -> None:
        try:
            with calling(str(written), str(target)):
                _look_again(written, plan, known)
        except UcplError as error:
            by = f"framework {plan.target.framework}()"
            remedy = f"files and keys of {by} are called as it calls them: name them so in the layout"
            raise UcplError(
                *(evolve(d, remedy=remedy) if d.code == "E600" else d for d in error.diagnostics)
            ) from error

    there = get_upload_target(target)
    options = evolve(options_from(how), look=None if there is not None else look)
    try:
        report = execute(plan, source, framework(plan.target.framework), target, options, team or ALONE)
    except UcplError as error:
        match error.diagnostics[0].code:
            case "E504":
                raise _with_holders(error, source) from None
            case "E613":
                raise _with_line(error, plan, source) from None
        raise
    if team is None or team.rank == 0:
        if there is not None:
            _show(there)
        if there is not None or report.done_before:
            _look_again(target, plan, known)
    return evolve(report, account=plan.account)


def _show(there: UploadTarget) -> None:
    """Raises: UcplError E685, with a note that the target is complete."""
    try:
        there.show()
    except UcplError as error:
        first = error.diagnostics[0]
        note = f"{there.url} is complete: its manifest was written, and only the check after it failed"
        raise UcplError(evolve(first, notes=(*first.notes, note))) from error


def rehearsed(plan: Plan, source: Checkpoint, target: Path, how: How) -> TargetSizes:
    """The sizes of a target, after the checks of a run.

    Nothing is written. Raises: UcplError as `run`.
    """
    from ucpl.conversion.keywords import options_from
    from ucpl.formats.opening import framework
    from ucpl.runtime.execute import rehearse

    return rehearse(plan, source, framework(plan.target.framework), target, options_from(how))


def _look_again(target: Path, plan: Plan, known: Checkpoint) -> None:
    """Open the written target and check its tensors and hyper-parameters.

    known: has the right hyper-parameters. Raises: UcplError, E400 for an error of the disk, E609 for hyper-parameters.
    """
    from ucpl.conversion.opening import read_named
    from ucpl.conversion.ordering import arguments_in
    from ucpl.files.header_watch import reading
    from ucpl.files.wrappers import has_wraps, keeping
    from ucpl.formats.opening import open_checkpoint
    from ucpl.runtime.rows import fit
    from ucpl.verification.values import unlike_hypers

    written = [t for t in plan.targets if t.numel]
    described = format_named(plan.target.framework).is_of_a_spec  # only a layout describes its files
    with reading(target), keeping(wraps=has_wraps(t.label for t in written)):
        if target.is_file():  # one file with the name of the target
            written = [evolve(t, file=target.name) for t in written]
        files = dict.fromkeys(t.file for t in written)
        if described:
            from ucpl.formats.named_files import open_files

            opened = open_files(target, files)
        else:
            of = plan.target.framework
            arguments = arguments_in(of, plan.target.settings)
            opened = read_named(target, of, files) or open_checkpoint(target, None, arguments, first=of)
    written, opened = format_named(plan.target.framework).as_read(plan.target.settings, written, opened)
    fit(written, opened.extents, "target")
    if found := tuple(unlike_hypers(known, opened, "E609")):
        raise UcplError(*found)


def _with_holders(error: UcplError, checkpoint: Checkpoint) -> UcplError:
    """The error with the holders of rejected classes.

    They are keys of client_state and files, and can be dropped by name.
    """
    from ucpl.files.pickles import unsafe_globals

    holders = {key: unsafe_globals(value) for key, value in checkpoint.state.carried.items()}
    files = {f.name: f.unsafe for f in checkpoint.container.files} if checkpoint.container is not None else {}
    found = []
    for d in error.diagnostics:
        name = str(d.about)  # the class
        keys = [str(key) for key, names in holders.items() if name in names]
        remedy = f"--allow-global {quote(name)} carries it over, where you trust it"
        remedy += "".join(f"; --drop {key} leaves out the key" for key in keys[:3])
        labels = tuple(Label(str(checkpoint.top), f"holds {name}", where=f"client_state {key}") for key in keys[:3])
        beside = [file for file, names in files.items() if name in names][:3]
        remedy += "".join(f"; --drop {file} leaves out the file" for file in beside)
        labels += tuple(Label(str(checkpoint.top / file), f"names {name}") for file in beside)
        found.append(evolve(d, labels=labels or d.labels, remedy=remedy))
    return UcplError(*found)


def _with_line(error: UcplError, plan: Plan, checkpoint: Checkpoint) -> UcplError:
    """The error with a layout that takes one rank's buffer.

    Each rank of stage 3 saves its own buffers, which may differ.
    """
    buffers = {("module", t.name): t.name for t in checkpoint.state.tensors if t.kind == "buffer"}
    about = error.diagnostics[0].about
    name = buffers.get(about) if isinstance(about, tuple) else None  # the key of the stored tensor
    if name is None or not plan.source_call.startswith("zero3("):
        return error
    remedy = (
        "Ranks of stage 3 keep a buffer each (running means of a BatchNorm that is not synchronised). To take one of them,"
        f" write own.ucpl and give --from 'own.ucpl:own()':\nucpl 2\nlayout own() of any extends {plan.source_call} {{\n"
        f'  "{name}" = ...  any @dp  in meta as "module/{{name}}"\n}}'
    )
    return UcplError(evolve(error.diagnostics[0], remedy=remedy), *error.diagnostics[1:])
