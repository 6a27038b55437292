"""Forms of files: what a framework's store reads and writes, and what a file's name says of its form.

A layout without a framework is planned and proved, and nothing of it is opened: it may name any form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.errors import fail
from ucpl.layout.scope import at

if TYPE_CHECKING:
    from ucpl.layout import FileRule, Layout

__all__ = ["FORMS", "demand_forms"]

FORMS = {
    "deepspeed": ("torch",),
    "universal": ("torch",),
    "plain": ("torch",),
    "huggingface": ("safetensors",),
    "torch": ("torch", "safetensors"),
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
    if isinstance(ending, str) and ending and ending.endswith(_SUFFIX) != (rule.form == "safetensors"):
        said = rule.path.text if rule.path is not None else ""
        fail(
            "E397",
            f'file `{rule.name}` has the form `{rule.form}`, and "{said}" is the name of another',
            at(rule.span),
            remedy=f'write `torch "{said}"`, or end the name in {_SUFFIX}'
            if rule.form == "safetensors"
            else f'write `safetensors "{said}"`, or end the name in .pt',
        )


def _remedy(rule: FileRule, known: tuple[str, ...]) -> str:
    said = rule.path.text if rule.path is not None else ""
    return f'write file {rule.name} = {known[0]} "{said}", or leave `framework` out to plan and prove alone'
