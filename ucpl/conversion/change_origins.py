"""The origin of `drop`, `freeze` and `train`: options or a plan's lines.

Errors repeat the text of the caller in the same form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ucpl.errors import Label, fail
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.language import nodes

__all__ = ["ChangeOrigin"]


@frozen(eq=False)
class ChangeOrigin:
    plan: nodes.Plan | None = None  # None: all come from options

    def is_of_plan(self, word: str, text: str) -> bool:
        """True if a line of the plan has `text`.

        `text` may have the form of an option, `pos=decay`.
        """
        if self.plan is None:
            return False
        if word == "train":
            return any(text == (name if group is None else f"{name}={group}") for name, group in self.plan.train)
        return text in (self.plan.drop if word == "drop" else self.plan.freeze)

    def words(self, word: str, text: str) -> str:
        """`--train pos=decay`, or `train pos in decay`."""
        if not self.is_of_plan(word, text):
            return f"--{word} {text}"
        name, equals, group = text.rpartition("=") if word == "train" else (text, "", "")
        return f"{word} {name} in {group}" if equals else f"{word} {text}"

    def other(self, word: str, text: str, name: str, group: object = None) -> str:
        """Another name in the form of `text`, for a remedy."""
        of_plan = self.is_of_plan(word, text)
        shown = name if not of_plan or name.replace(".", "_").isidentifier() else f'"{name}"'
        behind = "" if group is None else f' in "{group}"' if of_plan else f"={group}"
        return f"{word if of_plan else f'--{word}'} {shown}{behind}"

    def place(self, word: str, text: str) -> Label:
        if self.plan is None or not self.is_of_plan(word, text):
            return Label("<command line>", where=f"--{word} {text}")
        from ucpl.layout.scope import at

        return at(self.plan.span)

    def refuse(self, said: tuple[str, str], what: str, remedy: str = "") -> NoReturn:
        """Raises: UcplError E327."""
        if not remedy and self.is_of_plan(*said):
            remedy = "remove it from the plan, or name another parameter: `ucpl infer` lists the frozen ones"
        fail("E327", f"{self.words(*said)}: {what}", self.place(*said), remedy=remedy)
