"""One torch file that anyone can read: plain()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Framework


class PlainFormat(Format):
    name = "plain"
    title = "a plain file"
    place = 70
    layouts = ("plain",)
    hints = (("ddp", "ranks that hold copies save one file: plain()"),)
    settings = ("file", "has_masters")
    forms = ("torch",)
    has_optimizer = True
    has_client_state = True
    has_plan_groups = True
    has_groups_of_weights = True
    shows_stored = True

    def store(self) -> Framework:
        from ucpl.formats.plain.store import Plain as Store

        return Store()


FORMAT = PlainFormat()
