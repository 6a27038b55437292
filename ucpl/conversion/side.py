"""One side of a plan: placed layout, inputs, forms of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from attrs import field

from ucpl.conversion.requests import Called, Given
from ucpl.errors import fail
from ucpl.records import frozen
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.conversion.changes import Changes
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.inference.parallel import Note
    from ucpl.inference.sizes import Found
    from ucpl.language import nodes
    from ucpl.layout import FileRule, Layout, Library
    from ucpl.placement import Placement
    from ucpl.placement.flats import Stated
    from ucpl.planning.plan import Passed

__all__ = ["Side", "located", "demand_forms", "demand_names"]


@frozen(eq=False)
class Side:
    """One side of a plan: a placed layout, with its inputs."""

    called: Called
    given: Given
    placement: Placement
    checkpoint: Checkpoint | None = None  # of a source: its metadata, such as layers and experts
    found: Found = field(factory=dict)  # sizes that the spec leaves open, from a checkpoint's shapes
    changes: Changes | None = None  # of a target: dropped, frozen and newly trained parameters
    passes: tuple[Passed, ...] = ()  # of a source: the source passes that changed it

    @property
    def library(self) -> Library:
        return self.called.library

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def model(self) -> nodes.Model | None:
        """The layout's own model, or the given one."""
        return self.given.model if self.called.is_of_any else self.called.model(self.given)


def located(
    one: Called,
    given: Given,
    *,
    rank: int | None = None,
    stated: Stated | None = None,
    notes: tuple[Note, ...] = (),
) -> Side:
    """Resolve a layout, and place it for all ranks or for one.

    If `given.bare` is set, the placement is empty.
    """
    from ucpl.layout import resolve
    from ucpl.placement import Placement, locate

    layout = resolve(
        one.library,
        one.call,
        model=given.model if one.is_of_any else None,
        config=given.config,
        define_sizes=given.sizes,
        inherited=given.inherited,
        notes=notes,
        fold=given.folding is not None and rank is None,
        kin=given.folding.kin if given.folding is not None else None,
    )
    demand_forms(layout)
    if given.bare:
        return Side(one, given, Placement(layout, tuple(layout.placed), ()))
    return Side(one, given, locate(layout, rank=rank, stated=stated))


# ---- forms of files --------------------------------------------------------------------------------------------------

_SUFFIX = ".safetensors"


def demand_forms(layout: Layout) -> None:
    """Check the forms of a layout's files.

    Raises: UcplError E397 if the layout's store does not know a form, or if the file's name is one of another form.
    """
    known = format_named(layout.framework).forms
    for rule in layout.files.values() if known else ():
        if rule.form is None:
            continue
        if rule.form not in known:
            _reject(
                rule,
                f"file `{rule.name}` has the form `{rule.form}`, and framework {layout.framework}()"
                f" reads and writes {' and '.join(known)}",
                _remedy(rule, known),
            )
        _demand_suffix(rule)


def _demand_suffix(rule: FileRule) -> None:
    """Check the suffix of a file's name.

    The store derives the form from it.
    Only files of the form safetensors or memory end in .safetensors.
    """
    ending = rule.path.parts[-1] if rule.path is not None and rule.path.parts else ""
    if isinstance(ending, str) and ending and ending.endswith(_SUFFIX) != (rule.form in ("safetensors", "memory")):
        said = rule.path.text if rule.path is not None else ""
        _reject(
            rule,
            f'file `{rule.name}` has the form `{rule.form}`, and "{said}" is the name of another',
            f'write `torch "{said}"`, or end the name in {_SUFFIX}'
            if rule.form == "safetensors"
            else f'write `safetensors "{said}"`, or end the name in .pt',
        )


def demand_names(layout: Layout) -> None:
    """Check that files have names that can be written and found.

    A name must be inside the target's folder, and the layout's framework must look for it.

    Raises: UcplError E397.
    """
    cut = {axis for mesh in layout.meshes for axis, n in zip(mesh.axes, mesh.degrees, strict=True) if n > 1}
    of = format_named(layout.framework)
    for rule in layout.files.values():
        if rule.form is None or rule.path is None:
            continue
        said = _unwritable(rule)
        if said:
            why, remedy = said
            _reject(rule, f"file `{rule.name}`: {rule.path.text!r} {why}", remedy)
        ranks = sorted(cut & rule.path.names)
        if of.has_model_files and ranks:
            _reject(
                rule,
                f"file `{rule.name}` has {{{ranks[0]}}} in its name, and framework {of.name}() reads one complete model",
                "write `framework torch()` if each rank has a file; a complete model is not cut, and its"
                ' file is safetensors "model.safetensors"',
            )
        if of.file_marks and not _is_marked(rule, of.file_marks):
            _reject(
                rule,
                f'framework {of.name}() reads no file called "{rule.path.text}"',
                f"write `framework torch()`, or the names that it gives: {of.file_names}",
            )


def _reject(rule: FileRule, text: str, remedy: str) -> NoReturn:
    """Raises: UcplError E397."""
    from ucpl.layout.scope import at  # opening a checkpoint needs no compiler

    fail("E397", text, at(rule.span), remedy=remedy)


def _unwritable(rule: FileRule) -> tuple[str, str] | None:
    """The fault of a file's name and its remedy, or None."""
    text = rule.path.text if rule.path is not None else ""
    parts = text.split("/")
    odd = next((c for c in text if ord(c) < 32 or ord(c) == 127), None)
    if not text:
        return "is no name", f'write file {rule.name} = {rule.form} "model.pt"'
    if odd is not None:
        shown = {"\r": "\\r", "\n": "\\n", "\t": "\\t"}.get(odd, f"U+{ord(odd):04X}")
        better = "".join("/" + {"\r": "r", "\n": "n", "\t": "t"}[c] if c in "\r\n\t" else c for c in text)
        return f"has the sign {shown} in it", f'folders are divided by `/`: file {rule.name} = {rule.form} "{better}"'
    if text.startswith("/") or ".." in parts:
        left = "/".join(part for part in parts[-1:] if part) or "model.pt"
        return (
            "is outside of the checkpoint's folder",
            f'names are relative to that folder: file {rule.name} = {rule.form} "{left}"',
        )
    if not parts[-1]:
        return (
            "ends in `/`, as a folder does",
            f'write file {rule.name} = {rule.form} "{text.rstrip("/")}{_SUFFIX if rule.form == "safetensors" else ".pt"}"',
        )
    return None


def _is_marked(rule: FileRule, marks: tuple[str, ...]) -> bool:
    """True if a name contains one of a format's marks."""
    text = "".join(part for part in rule.path.parts if isinstance(part, str)) if rule.path is not None else ""
    return any(mark in text for mark in marks)


def _remedy(rule: FileRule, known: tuple[str, ...]) -> str:
    said = rule.path.text if rule.path is not None else ""
    return f'write file {rule.name} = {known[0]} "{said}", or leave `framework` out to plan and prove alone'
