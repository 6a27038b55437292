"""Forms of files: what a framework's store reads and writes, and what a file's name says of its form.

A layout without a framework is planned and proved, and nothing of it is opened: it may name any form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.errors import fail
from ucpl.layout.scope import at

if TYPE_CHECKING:
    from ucpl.layout import FileRule, Layout

__all__ = ["FORMS", "demand_forms", "demand_names"]

FORMS = {
    "deepspeed": ("torch",),
    "universal": ("torch",),
    "plain": ("torch",),
    "huggingface": ("safetensors",),
    "torch": ("torch", "safetensors", "memory"),
    "dcp": ("dcp",),
    "megatron_core": ("dcp",),
    "megatron_fsdp": ("dcp",),
    "megatron_legacy": ("torch",),
}
_SUFFIX = ".safetensors"


def demand_forms(layout: Layout) -> None:
    """Raises: UcplError E397 for a form that the layout's store does not know, or that the file's own name denies."""
    known = FORMS.get(layout.framework)
    for rule in layout.files.values() if known is not None else ():
        if rule.form is None or known is None:
            continue
        if rule.form not in known:
            fail(
                "E397",
                f"file `{rule.name}` has the form `{rule.form}`, and framework {layout.framework}()"
                f" reads and writes {' and '.join(known)}",
                at(rule.span),
                remedy=_remedy(rule, known),
            )
        _demand_suffix(rule)


def _demand_suffix(rule: FileRule) -> None:
    """The store goes by the name: what ends in .safetensors is such a file, and nothing else is."""
    ending = rule.path.parts[-1] if rule.path is not None and rule.path.parts else ""
    if isinstance(ending, str) and ending and ending.endswith(_SUFFIX) != (rule.form in ("safetensors", "memory")):
        said = rule.path.text if rule.path is not None else ""
        fail(
            "E397",
            f'file `{rule.name}` has the form `{rule.form}`, and "{said}" is the name of another',
            at(rule.span),
            remedy=f'write `torch "{said}"`, or end the name in {_SUFFIX}'
            if rule.form == "safetensors"
            else f'write `safetensors "{said}"`, or end the name in .pt',
        )


def demand_names(layout: Layout) -> None:
    """That files have names which can be written below a folder, and which the layout's framework looks for.

    Raises: UcplError E397.
    """
    cut = {axis for mesh in layout.meshes for axis, n in zip(mesh.axes, mesh.degrees, strict=True) if n > 1}
    for rule in layout.files.values():
        if rule.form is None or rule.path is None:
            continue
        said = _unwritable(rule)
        if said:
            why, remedy = said
            fail("E397", f"file `{rule.name}`: {rule.path.text!r} {why}", at(rule.span), remedy=remedy)
        ranks = sorted(cut & rule.path.names)
        if layout.framework == "huggingface" and ranks:
            fail(
                "E397",
                f"file `{rule.name}` has {{{ranks[0]}}} in its name, and framework huggingface() reads one whole model",
                at(rule.span),
                remedy="write `framework torch()` where each rank has a file; a whole model is cut over nothing, and its"
                ' file is safetensors "model.safetensors"',
            )
        if layout.framework == "deepspeed" and not _is_of_deepspeed(rule):
            fail(
                "E397",
                f'DeepSpeed reads no file called "{rule.path.text}"',
                at(rule.span),
                remedy="write `framework torch()`, or the names that DeepSpeed gives:"
                ' file weights = torch "mp_rank_{tp:02}_model_states.pt" and'
                ' file optim = torch "zero_pp_rank_{dp}_mp_rank_{tp:02}_optim_states.pt"',
            )


def _unwritable(rule: FileRule) -> tuple[str, str] | None:
    """What is wrong with a file's name, and what to write; None where it can be written."""
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
            "lies outside of the checkpoint's folder",
            f'a name is told from that folder, which a command is given: file {rule.name} = {rule.form} "{left}"',
        )
    if not parts[-1]:
        return (
            "ends in `/`, as a folder does",
            f'write file {rule.name} = {rule.form} "{text.rstrip("/")}{_SUFFIX if rule.form == "safetensors" else ".pt"}"',
        )
    return None


def _is_of_deepspeed(rule: FileRule) -> bool:
    """By what all of its names have: mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00optim_states.pt."""
    text = "".join(part for part in rule.path.parts if isinstance(part, str)) if rule.path is not None else ""
    return "model_states" in text or "optim_states" in text


def _remedy(rule: FileRule, known: tuple[str, ...]) -> str:
    said = rule.path.text if rule.path is not None else ""
    return f'write file {rule.name} = {known[0]} "{said}", or leave `framework` out to plan and prove alone'
